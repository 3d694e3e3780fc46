"""Options of `mmldlm sample`, and which of them go together."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmldlm.diffusion.noise import MODES
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import ConfigError, UsageError
from mmldlm.optim.ema import add_weights_option
from mmldlm.run.load import LoadedRun
from mmldlm.settings.fields import build, dump

MOST_POINTS = 1000
POINTS = 7


def parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--length", type=int, help="tokens to write; default: by the length head")
    parser.add_argument("--out", type=Path, help="write the generated latents to this .npy file")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--watch", action="store_true", help="show the texts appear, step by step")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint's folder; default: the newest good one")
    parser.add_argument("--data", help="data store, where it is no longer at the config's data.path")
    add_weights_option(parser)
    group = parser.add_argument_group("between two texts, and parts of a text (l2t)")
    group.add_argument(
        "--interpolate", nargs=2, metavar=("A", "B"), help="write texts between the latents of two texts"
    )
    group.add_argument("--points", type=int, help=f"texts from A to B, both included; default: {POINTS}")
    group.add_argument("--edit", metavar="TEXT", help="rewrite the [span] of this text; \\[ and \\] are brackets")
    group.add_argument("--span-length", type=int, dest="span_length", help="tokens to write there; default: as it has")
    group.add_argument("--like", metavar="TEXT", help="--edit: by the latent of this text; default: of the edited one")
    group = parser.add_argument_group("sampling (default: the run's own `sampling` settings)")
    group.add_argument("--steps", type=int, help="reverse steps")
    group.add_argument("--temperature", type=float, help="0: the likeliest token")
    group.add_argument("--top-p", type=float, dest="top_p")
    group.add_argument("--guidance", type=float, help="classifier-free guidance scale; 1: none")
    group.add_argument("--decoding", choices=["auto", "ancestral", "confidence"])
    group.add_argument("--remask", type=float, help="share of the largest remasking rate")
    group.add_argument("--latent-sampler", choices=["ddim", "euler"], dest="latent_sampler")
    return parser


def check(options: argparse.Namespace) -> None:
    """`UsageError` where options contradict each other, whatever the run is."""
    _check_conditions(options)
    if options.watch and options.mode == "t2l":
        raise UsageError("--watch: shows texts appear, expected --mode l2t or joint, found t2l")
    if options.out and (options.out.suffix != ".npy" or not options.out.absolute().parent.is_dir()):
        raise UsageError(f"--out: expected a .npy file in a folder that exists, found {options.out}")
    for name, most in (("count", None), ("points", MOST_POINTS), ("span_length", None)):
        value = getattr(options, name)
        least = 2 if name == "points" else 1
        if value is not None and not least <= value <= (most or value):
            expected = f"{least} to {most}" if most else f"at least {least}"
            raise UsageError(f"--{name.replace('_', '-')}: expected {expected}, found {value}")


def _check_conditions(options: argparse.Namespace) -> None:
    """What the texts are to come from is said once, and in full."""
    one = {"--interpolate": options.interpolate, "--edit": options.edit}
    for option, of, value in (
        ("--points", "--interpolate", options.points),
        ("--like", "--edit", options.like),
        ("--span-length", "--edit", options.span_length),
    ):
        if value is not None and one[of] is None:
            raise UsageError(f"{option}: belongs to {of}, which was not given")
    chosen = [option for option, value in one.items() if value is not None]
    if not chosen:
        needs = {"l2t": "--text or --latents", "t2l": "--text", "joint": "neither --text nor --latents"}[options.mode]
        given = bool(options.text) + bool(options.latents)
        if given != (options.mode != "joint") or (options.mode == "t2l" and options.latents):
            raise UsageError(f"--mode {options.mode} needs {needs}")
        return
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)}: expected one of them")
    if options.mode != "l2t":
        raise UsageError(f"{chosen[0]}: writes from latents, expected --mode l2t, found {options.mode}")
    refused = {"--text": options.text, "--latents": options.latents, "--length": options.length}
    if options.edit is not None:
        del refused["--latents"]
        if options.like is not None and options.latents:
            raise UsageError("--like and --latents: expected one latent to edit by")
    else:
        del refused["--length"]
        refused["--count"] = options.count if options.count != 1 else None
    for option, value in refused.items():
        if value:
            why = {
                "--text": "has its own text",
                "--latents": "has its own texts",
                "--length": "takes --span-length",
                "--count": "writes one text a point, take another --seed",
            }[option]
            raise UsageError(f"{option}: does not go with {chosen[0]}, which {why}")


def sampling_of(options: argparse.Namespace, run: LoadedRun) -> SamplingConfig:
    """The run's `sampling` settings with what the options say; `UsageError` where that is out of bounds."""
    longest = run.store.manifest.max_length
    if options.length is not None and not 1 <= options.length <= longest:
        raise UsageError(f"--length: expected 1 to {longest}, found {options.length}")
    chosen = {name: getattr(options, name) for name in dump(SamplingConfig()) if getattr(options, name) is not None}
    try:
        return build(SamplingConfig, {**dump(run.config.sampling), **chosen})
    except ConfigError as error:
        raise UsageError(f"--{error}") from None
