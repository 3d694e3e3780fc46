"""Sample from a run: `mmldlm sample RUN --mode l2t --text "..."`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mmldlm.build import LoadedRun, load_run
from mmldlm.data.encoders import load_encoder
from mmldlm.diffusion.noise import MODES, Mode, trained_modes
from mmldlm.diffusion.sampling import GUIDANCE_NEEDS, Generation, SamplingConfig, draw_lengths, generate
from mmldlm.ema import add_weights_option
from mmldlm.errors import ConfigError, DataError, UsageError
from mmldlm.evaluation import cosine
from mmldlm.schema import build, dump


def encode_texts(run: LoadedRun, texts: list[str]) -> np.ndarray:
    """float32 [n, M, C] in the encoder's scale; `DataError` naming a text that has no latent."""
    latents = load_encoder(run.store.path / "encoder").encode(texts)
    for text, latent in zip(texts, latents, strict=True):
        if not np.isfinite(latent).all():
            raise DataError(
                f"the encoder has no latent for {text!r}: expected words that its corpus knows, or --latents"
            )
    return latents


def read_latents(run: LoadedRun, path: Path) -> np.ndarray:
    """float32 [n, M, C] in the encoder's scale from an .npy file of [n, C] or [n, M, C]."""
    try:
        latents = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"--latents: {path} does not exist") from None
    except ValueError as error:
        raise DataError(f"--latents: {path} is not an .npy array: {error}") from None
    if not isinstance(latents, np.ndarray):
        raise DataError(f"--latents: {path} is an archive of arrays, expected one .npy array")
    shape = (run.store.manifest.latent.tokens, run.store.manifest.latent.channels)
    if latents.ndim == 2 and shape[0] == 1:
        latents = latents[:, None]
    if latents.shape[1:] != shape or not len(latents) or latents.dtype.kind != "f":
        raise DataError(
            f"--latents: {path} is {latents.dtype} {list(latents.shape)}, expected float [n, {shape[0]}, {shape[1]}]"
        )
    bad = ~np.isfinite(latents.reshape(len(latents), -1)).all(1)
    if bad.any():
        raise DataError(f"--latents: {path}: row {int(bad.argmax())} is not finite")
    return latents.astype(np.float32)


def sample(
    run: LoadedRun,
    mode: Mode,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray | None = None,
    texts: list[str] | None = None,
    count: int = 1,
    length: int | None = None,
) -> tuple[Generation, list[str]]:
    """`count` generations for each condition; their texts decoded, their latents in the encoder's scale.

    l2t takes `raw_latents` [n, M, C]; t2l takes `texts`; joint takes neither. Lengths are drawn from the
    length head unless `length` fixes them.
    """
    manifest = run.store.manifest
    if config.guidance != 1 and (
        mode == "joint" or "joint" not in trained_modes(run.config.mode, run.config.mode_schedule)
    ):
        raise UsageError(
            f"--guidance: mode {mode}, trained {run.config.mode}: expected l2t or t2l, and {GUIDANCE_NEEDS}"
        )
    shape = (manifest.latent.tokens, manifest.latent.channels)
    generator = torch.Generator().manual_seed(seed)
    tokens: torch.Tensor | None = None
    if mode == "t2l":
        assert texts is not None
        ids = [row for row in run.tokenizer.encode_batch(texts) for _ in range(count)]
        lengths = tuple(map(len, ids))
        if min(lengths) < 1 or max(lengths) > manifest.max_length:
            raise DataError(
                f"--text: expected 1 to {manifest.max_length} tokens, found {min(lengths)} to {max(lengths)}"
            )
        tokens = torch.tensor([token for row in ids for token in row])
        latents = torch.zeros(len(ids), *shape)
    elif mode == "l2t":
        assert raw_latents is not None
        latents = torch.from_numpy(run.store.standardise(raw_latents)).repeat_interleave(count, 0)
    else:
        latents = torch.randn(count, *shape, generator=generator)
    latents = latents.to(run.device)
    if mode != "t2l":
        t_latent = 0.0 if mode == "l2t" else 1.0
        lengths = (
            (length,) * len(latents)
            if length
            else draw_lengths(run.model, manifest.mask_id, latents, t_latent, generator)
        )
    made = generate(
        run.model, run.objective.text, run.objective.latent, mode, config, generator, latents, lengths, tokens
    )
    restored = torch.from_numpy(run.store.restore(made.latents.numpy()))
    return replace(made, latents=restored), run.tokenizer.decode_batch(made.split())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmldlm sample", description="Write texts from latents, find latents of texts."
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--mode", choices=MODES, default="l2t", help="default: %(default)s")
    parser.add_argument(
        "--text", action="append", help="l2t: write from this text's latent; t2l: find its latent; repeatable"
    )
    parser.add_argument("--latents", type=Path, help="l2t: .npy of latents [n, C] or [n, M, C] in the encoder's scale")
    parser.add_argument("-n", "--count", type=int, default=1, help="generations a condition; default: %(default)s")
    parser.add_argument("--length", type=int, help="tokens to write; default: drawn from the length head")
    parser.add_argument("--out", type=Path, help="write the generated latents to this .npy file")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint's folder; default: the newest good one")
    parser.add_argument("--data", help="data store, where it is no longer at the config's data.path")
    add_weights_option(parser)
    group = parser.add_argument_group("sampling (default: the run's own `sampling` settings)")
    group.add_argument("--steps", type=int, help="reverse steps")
    group.add_argument("--temperature", type=float, help="0: the likeliest token")
    group.add_argument("--top-p", type=float, dest="top_p")
    group.add_argument("--guidance", type=float, help="classifier-free guidance scale; 1: none")
    group.add_argument("--decoding", choices=["ancestral", "confidence"])
    group.add_argument("--remask", type=float, help="share of the largest remasking rate")
    group.add_argument("--latent-sampler", choices=["ddim", "euler"], dest="latent_sampler")
    return parser


def _check(options: argparse.Namespace, run: LoadedRun) -> SamplingConfig:
    needs = {"l2t": "--text or --latents", "t2l": "--text", "joint": "neither --text nor --latents"}[options.mode]
    given = bool(options.text) + bool(options.latents)
    if given != (options.mode != "joint") or (options.mode == "t2l" and options.latents):
        raise UsageError(f"--mode {options.mode} needs {needs}")
    if options.out and (options.out.suffix != ".npy" or not options.out.absolute().parent.is_dir()):
        raise UsageError(f"--out: expected a .npy file in a folder that exists, found {options.out}")
    if options.count < 1:
        raise UsageError(f"--count: expected at least 1, found {options.count}")
    longest = run.store.manifest.max_length
    if options.length is not None and not 1 <= options.length <= longest:
        raise UsageError(f"--length: expected 1 to {longest}, found {options.length}")
    chosen = {name: getattr(options, name) for name in dump(SamplingConfig()) if getattr(options, name) is not None}
    try:
        return build(SamplingConfig, {**dump(run.config.sampling), **chosen})
    except ConfigError as error:
        raise UsageError(f"--{error}") from None


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    run = load_run(options.run, options.checkpoint, options.data, options.weights)
    config = _check(options, run)
    raw = None
    if options.mode == "l2t":
        raw = read_latents(run, options.latents) if options.latents else encode_texts(run, options.text)
    made, texts = sample(run, options.mode, config, options.seed, raw, options.text, options.count, options.length)
    if run.has_average:
        print(f"{run}:")
    if options.mode == "t2l":
        truth = np.repeat(encode_texts(run, options.text), options.count, axis=0)
        for text, similar in zip(
            np.repeat(options.text, options.count), cosine(made.latents.numpy(), truth), strict=True
        ):
            print(f"cosine {similar:.3f} to the encoder's own latent of: {text}")
    else:
        for index, text in enumerate(texts):
            if options.mode == "l2t" and options.text and index % options.count == 0:
                print(f"from: {options.text[index // options.count]}")
            print(f"  {text}" if options.mode == "l2t" else text)
    if options.out:
        np.save(options.out, made.latents.numpy(), allow_pickle=False)
        print(f"latents {list(made.latents.shape)} written to {options.out}")
    return 0
