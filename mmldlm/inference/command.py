"""`mmldlm sample RUN`: generate texts from latents, latents from texts, or both from noise."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from mmldlm.diffusion.noise import MODES
from mmldlm.diffusion.sampling import Generation
from mmldlm.errors import UsageError
from mmldlm.evaluation import cosine
from mmldlm.evaluation.changes import edit_sampling
from mmldlm.inference import batch
from mmldlm.inference.conditions import encode_texts, read_latents
from mmldlm.inference.edit import SpanEdit, mask_span
from mmldlm.inference.generate import check_guidance, interpolate, sample
from mmldlm.loading.load import LoadedRun, add_run_options, add_search, add_settings, given_settings, load_run
from mmldlm.prepare.documents import Document
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.files import write_atomically
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress

MAX_POINTS, DEFAULT_POINTS = 1000, 7

_BOUNDS = {"count": (1, None), "length": (1, None), "span_length": (1, None), "points": (2, MAX_POINTS)}
# For some options, another option that they need, and options that they exclude, with the reason.
_NEEDS = {"texts": "out", "points": "interpolate", "like": "edit", "span_length": "edit"}
_EXCLUDES = {
    "interpolate": (("edit", "text", "latents", "count", "prefix"), ", which generates one text per point"),
    "edit": (("text", "length"), ", which has its own text and uses --span-length"),
    "like": (("latents",), ", since its latent is used"),
    "search": (("count", "length", "edit"), ", which improves one text of a latent, of any length"),
}


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
    parser.add_argument(
        "--prefix",
        action="append",
        help="for data with prefixes, the text to continue: one, or one for each --text",
    )
    parser.add_argument("-n", "--count", type=int, default=1, help="generations per condition; default: %(default)s")
    parser.add_argument("--length", type=int, help="tokens to generate; default: by the length head")
    parser.add_argument(
        "--out", type=Path, help=".npy: write the generated latents to it; .jsonl: a result of each text or latent"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    add_run_options(parser)
    add_settings(parser)
    add_search(parser)
    batch.add_batch_options(parser.add_argument_group("--out OUT.jsonl: many, resumable, also under a launcher"))
    group = parser.add_argument_group("interpolation and editing (l2t)")
    group.add_argument(
        "--interpolate", nargs=2, metavar=("A", "B"), help="generate texts between the latents of two texts"
    )
    group.add_argument("--points", type=int, help=f"texts from A to B, both included; default: {DEFAULT_POINTS}")
    group.add_argument("--edit", metavar="TEXT", help="regenerate the [span] of this text; \\[ and \\] are brackets")
    group.add_argument("--span-length", type=int, help="tokens to generate for the span; default: as many as it has")
    group.add_argument(
        "--like",
        metavar="TEXT",
        help="--edit: use the latent of this text; default: none, or that of the edited text if the run did not "
        "train joint",
    )
    return parser


def check_options(options: argparse.Namespace, given: set[str]) -> None:
    """Raise `UsageError` if options contradict each other. This does not depend on the run.

    `given` has the names of the options that differ from their defaults.
    """
    mode, out, to_file = options.mode, options.out, bool(options.out and options.out.suffix == ".jsonl")
    suffixes = (".jsonl",) if options.texts else (".npy", ".jsonl")
    if out and (out.suffix not in suffixes or not out.absolute().parent.is_dir()):
        raise UsageError(f"--out: expected a {' or '.join(suffixes)} file in an existing folder, found {out}")
    for name, (minimum, maximum) in _BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value <= (maximum or value):
            expected = f"{minimum} to {maximum}" if maximum else f"at least {minimum}"
            raise UsageError(f"{_option(name)}: expected {expected}, found {value}")
    for name, needed in _NEEDS.items():
        if name in given and needed not in given:
            raise UsageError(f"{_option(name)}: needs {_option(needed)}, which was not given")
    excludes = _EXCLUDES | ({"out": (("text", "interpolate", "edit"), f" {out}")} if to_file else {})
    for name, (excluded, why) in excludes.items():
        for other in excluded:
            if {name, other} <= given:
                raise UsageError(f"{_option(other)}: cannot be combined with {_option(name)}{why}")
    if operation := given & {"interpolate", "edit"}:
        if mode != "l2t":
            raise UsageError(f"--{operation.pop()}: generates from latents, expected --mode l2t, found {mode}")
    else:
        text = "texts" if to_file else "text"
        accepted: dict[str, list[set[str]]] = {"l2t": [{text}, {"latents"}], "t2l": [{text}], "joint": [set()]}
        if given & {"text", "texts", "latents"} not in accepted[mode]:
            needs = {"l2t": f"--{text} or --latents", "t2l": f"--{text}", "joint": f"neither --{text} nor --latents"}
            raise UsageError(f"--mode {mode}{f' --out {out}' * to_file} needs {needs[mode]}")
    if to_file and len(options.prefix or ()) > 1:
        raise UsageError(f"--prefix: expected one for all of {out}, or `prefix` in .jsonl, found {len(options.prefix)}")
    if options.search and mode != "l2t":
        raise UsageError(f"--search: improves the text of a latent, expected --mode l2t, found {mode}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_length(options: argparse.Namespace, run: LoadedRun) -> None:
    """Raise `UsageError` if the requested length exceeds the longest text of the run."""
    if options.length and options.length > run.store.manifest.max_length:
        raise UsageError(f"--length: expected 1 to {run.store.manifest.max_length}, found {options.length}")


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm sample` and return the exit code."""
    parser = build_parser()
    options = parser.parse_intermixed_args(argv)
    check_options(options, {name for name, value in vars(options).items() if value != parser.get_default(name)})
    if options.out and options.out.suffix == ".jsonl":
        return sample_file(options)
    span = None if options.edit is None else SpanEdit.parse(options.edit)
    with Progress() as progress:
        progress.phase("loading the run", announce=False)
        choose_threads()
        run = load_run(options.run, options.checkpoint, options.data, options.weights, given_settings(options))
        check_length(options, run)
        progress.phase("generating", announce=False)
        generation, lines = generated_lines(options, run, span)
    for line in [f"{run}:", *lines] if run.has_ema else lines:
        print(printable(line))
    if options.out:
        content = BytesIO()
        np.save(content, generation.latents.numpy(), allow_pickle=False)
        write_atomically(options.out, content.getvalue())
        print(printable(f"latents {list(generation.latents.shape)} written to {options.out}"))
    return 0


def generated_lines(
    options: argparse.Namespace, run: LoadedRun, span: SpanEdit | None = None
) -> tuple[Generation, list[str]]:
    """Generate what the options request. Return the generation and the lines to print."""
    config, count, seed = run.config.sampling, options.count, options.seed
    made = partial(sample, run, options.mode, config, seed, count=count, prefixes=options.prefix)
    if options.interpolate:
        start, end = options.interpolate
        points = options.points or DEFAULT_POINTS
        latents = encode_texts(run, [start, end])
        generation, texts = interpolate(run, config, seed, latents, points, options.length)
        lines = [f"  {share:.2f}  {text}" for share, text in zip(np.linspace(0, 1, points), texts, strict=True)]
        return generation, [f"from: {start}", *lines, f"to: {end}"]
    if options.mode == "t2l":
        generation, _ = made(texts=options.text)
        truth = np.repeat(encode_texts(run, options.text), count, axis=0)
        similarity = cosine(generation.latents.numpy(), truth)
        pairs = zip(np.repeat(options.text, count), similarity, strict=True)
        return generation, [f"cosine {value:.3f} to the encoder's own latent of: {text}" for text, value in pairs]
    if options.mode == "joint":
        return made(length=options.length)
    template = None if span is None else mask_span(run, span, options.span_length)
    if span is not None and options.like is None and not options.latents and "joint" in run.config.trained_modes:
        config = edit_sampling(config, count)
        generation, texts = sample(run, "joint", config, seed, count=count, template=template, prefixes=options.prefix)
        return generation, [f"edit: {options.edit}", *_distinct(texts)]
    given = options.text if span is None else [span.text if options.like is None else options.like]
    raw = read_latents(run, options.latents) if options.latents else encode_texts(run, given)
    generation, texts = made(raw, length=options.length, template=template)
    candidates = [_distinct(texts[first : first + count]) for first in range(0, len(texts), count)]
    if span is not None:
        return generation, [f"edit: {options.edit}", *chain.from_iterable(candidates)]
    sources = [[f"from: {text}"] for text in options.text or ()] or [[]] * len(candidates)
    lines = [line for pair in zip(sources, candidates, strict=True) for line in chain(*pair)]
    if config.search is not None:
        lines.append(f"passes of the network per latent: {generation.passes / len(raw):,.0f}")
    return generation, lines


def _distinct(texts: Sequence[str]) -> list[str]:
    """Return a line for each distinct text of a condition, plus a note if there are fewer than requested."""
    lines = [f"  {text}" for text in dict.fromkeys(texts)]
    if len(lines) < len(texts):
        lines.append(f"  (only {len(lines)} distinct texts; a higher sampling.temperature gives more)")
    return lines


def sample_file(options: argparse.Namespace) -> int:
    """Generate `--count` samples for each text or latent of a file, or `--count` joint ones. Return the exit code."""
    mode, count = options.mode, options.count
    with batch.batch_processes(options) as (run, processes, progress):
        config, latent = run.config.sampling, run.store.manifest.latent
        check_length(options, run)
        check_guidance(run, mode, config)
        items: Sequence[batch.Item]
        latents = None
        if mode == "joint":
            items, count = [Document("", "noise", number) for number in range(1, count + 1)], 1
        elif options.latents:
            items, latents = batch.read_rows(options.latents, run)
        else:
            items = batch.read_items(options.texts, run, checked=mode == "t2l")
            latents = batch.encode_with(run) if mode == "l2t" else None
        rows = batch.NO_ROWS if mode == "l2t" else (count, latent.tokens, latent.channels)

        def compute(indices: list[int], texts: list[str], latents: np.ndarray | None) -> batch.Results:
            slots = torch.tensor(indices)
            if mode != "l2t":
                slots = (slots[:, None] * count + torch.arange(count)).flatten()
            total = len(indices) if mode == "joint" else count
            # A line may have its own prefix. Otherwise --prefix holds for all lines.
            own = [getattr(items[index], "prefix", "") or (options.prefix or [""])[0] for index in indices]
            prefixes = options.prefix if mode == "joint" else own
            made, generated = sample(
                run, mode, config, options.seed, latents, texts, total, options.length, slots=slots, prefixes=prefixes
            )
            parts = [slice(start, start + count) for start in range(0, len(generated), count)]
            records = [{"texts": generated[part], "tokens": list(made.lengths[part])} for part in parts]
            return records, None if mode == "l2t" else made.latents.numpy().reshape(-1, *rows)

        request = {
            "command": f"sample, {mode}",
            **batch.describe(run, options, options.texts, options.latents),
            "sampling": asdict(config),
            **{name: getattr(options, name) for name in ("count", "length", "seed", "batch")},
            **({"prefix": options.prefix} if options.prefix else {}),
        }
        job = batch.Job(options.out, request, items, options.batch, options.on_problem == "skip", latents, rows)
        batch.run_batches(job, compute, processes, progress)
        if processes.is_main:
            job.finish()
    return 0
