"""Options of `mmldlm sample`, and which of them can be combined."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmldlm.diffusion.noise import MODES
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import ConfigError, UsageError
from mmldlm.inference.batch import add_batch_options
from mmldlm.run.load import LoadedRun, add_run_options
from mmldlm.settings.declaration import dump, restore

MAX_POINTS = 1000
DEFAULT_POINTS = 7


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mmldlm sample`."""
    parser = argparse.ArgumentParser(
        prog="mmldlm sample", description="Generate texts from latents, latents from texts, or both from noise."
    )
    parser.add_argument("--mode", choices=MODES, default="l2t", help="default: %(default)s")
    parser.add_argument(
        "--text", action="append", help="l2t: generate from this text's latent; t2l: generate its latent; repeatable"
    )
    parser.add_argument("--latents", type=Path, help="l2t: .npy of latents [n, C] or [n, M, C] on the encoder's scale")
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="as --text, for each line of a file, or `text` of a .jsonl; see --out",
    )
    parser.add_argument("-n", "--count", type=int, default=1, help="generations per condition; default: %(default)s")
    parser.add_argument("--length", type=int, help="tokens to generate; default: by the length head")
    parser.add_argument(
        "--out", type=Path, help=".npy: write the generated latents to it; .jsonl: a result of each text or latent"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--watch", action="store_true", help="show the texts step by step as they are generated")
    add_run_options(parser)
    add_batch_options(parser.add_argument_group("--out OUT.jsonl: many, resumable, also under a launcher"))
    group = parser.add_argument_group("interpolation and editing (l2t)")
    group.add_argument(
        "--interpolate", nargs=2, metavar=("A", "B"), help="generate texts between the latents of two texts"
    )
    group.add_argument("--points", type=int, help=f"texts from A to B, both included; default: {DEFAULT_POINTS}")
    group.add_argument("--edit", metavar="TEXT", help="regenerate the [span] of this text; \\[ and \\] are brackets")
    group.add_argument(
        "--span-length",
        type=int,
        dest="span_length",
        help="tokens to generate for the span; default: as many as it has",
    )
    group.add_argument("--like", metavar="TEXT", help="--edit: use the latent of this text; default: of the edited one")
    group = parser.add_argument_group("sampling (default: the run's own `sampling` settings)")
    group.add_argument("--steps", type=int, help="reverse steps; t2l: default sampling.t2l_steps")
    group.add_argument("--temperature", type=float, help="0: the likeliest token")
    group.add_argument("--top-p", type=float, dest="top_p")
    group.add_argument("--guidance", type=float, help="classifier-free guidance scale; 1: none")
    group.add_argument("--decoding", choices=["auto", "ancestral", "confidence"])
    group.add_argument("--remask", type=float, help="fraction of the largest remasking rate")
    group.add_argument("--latent-sampler", choices=["ddim", "euler"], dest="latent_sampler")
    group.add_argument("--joint-order", choices=["together", "latents_first"], dest="joint_order")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise `UsageError` if options contradict each other, independent of the run."""
    suffixes = (".jsonl",) if options.texts else (".npy", ".jsonl")
    if options.texts and not options.out:
        raise UsageError("--texts: needs --out OUT.jsonl")
    if options.out and (options.out.suffix not in suffixes or not options.out.absolute().parent.is_dir()):
        raise UsageError(f"--out: expected a {' or '.join(suffixes)} file in an existing folder, found {options.out}")
    if options.out and options.out.suffix == ".jsonl":
        _check_batch(options)
    else:
        _check_conditions(options)
    if options.watch and options.mode == "t2l":
        raise UsageError("--watch: shows texts as they are generated, expected --mode l2t or joint, found t2l")
    for name, maximum in (("count", None), ("points", MAX_POINTS), ("span_length", None)):
        value = getattr(options, name)
        minimum = 2 if name == "points" else 1
        if value is not None and not minimum <= value <= (maximum or value):
            expected = f"{minimum} to {maximum}" if maximum else f"at least {minimum}"
            raise UsageError(f"--{name.replace('_', '-')}: expected {expected}, found {value}")


def _check_batch(options: argparse.Namespace) -> None:
    """Raise `UsageError` unless the options name one file of conditions."""
    for option in ("text", "interpolate", "edit", "watch"):
        if getattr(options, option):
            raise UsageError(f"--{option}: cannot be combined with --out {options.out}")
    needs = {"l2t": "--texts or --latents", "t2l": "--texts", "joint": "neither --texts nor --latents"}[options.mode]
    given = bool(options.texts) + bool(options.latents)
    if given != (options.mode != "joint") or (options.mode == "t2l" and options.latents):
        raise UsageError(f"--mode {options.mode} --out {options.out} needs {needs}")


def _check_conditions(options: argparse.Namespace) -> None:
    """Raise `UsageError` unless the options name exactly one complete condition to generate from."""
    operations = {"--interpolate": options.interpolate, "--edit": options.edit}
    for option, operation, value in (
        ("--points", "--interpolate", options.points),
        ("--like", "--edit", options.like),
        ("--span-length", "--edit", options.span_length),
    ):
        if value is not None and operations[operation] is None:
            raise UsageError(f"{option}: needs {operation}, which was not given")
    chosen = [option for option, value in operations.items() if value is not None]
    if not chosen:
        needs = {"l2t": "--text or --latents", "t2l": "--text", "joint": "neither --text nor --latents"}[options.mode]
        given = bool(options.text) + bool(options.latents)
        if given != (options.mode != "joint") or (options.mode == "t2l" and options.latents):
            raise UsageError(f"--mode {options.mode} needs {needs}")
        return
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)}: expected one of them")
    if options.mode != "l2t":
        raise UsageError(f"{chosen[0]}: generates from latents, expected --mode l2t, found {options.mode}")
    incompatible = {"--text": options.text, "--latents": options.latents, "--length": options.length}
    if options.edit is not None:
        del incompatible["--latents"]
        if options.like is not None and options.latents:
            raise UsageError("--like and --latents: expected only one of them")
    else:
        # --interpolate takes --length, but generates one text per point.
        del incompatible["--length"]
        incompatible["--count"] = options.count if options.count != 1 else None
    for option, value in incompatible.items():
        if value:
            why = {
                "--text": "has its own text",
                "--latents": "has its own texts",
                "--length": "uses --span-length",
                "--count": "generates one text per point, use another --seed",
            }[option]
            raise UsageError(f"{option}: cannot be combined with {chosen[0]}, which {why}")


def sampling_config(options: argparse.Namespace, run: LoadedRun) -> SamplingConfig:
    """Return the run's `sampling` settings, overridden by the options; `UsageError` if one is out of bounds."""
    max_length = run.store.manifest.max_length
    if options.length is not None and not 1 <= options.length <= max_length:
        raise UsageError(f"--length: expected 1 to {max_length}, found {options.length}")
    given = {**vars(options), "t2l_steps": options.steps}
    overrides = {name: given[name] for name in dump(SamplingConfig()) if given[name] is not None}
    try:
        return restore(SamplingConfig, {**dump(run.config.sampling), **overrides})
    except ConfigError as error:
        raise UsageError(f"--{error}") from None
