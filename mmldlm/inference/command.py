"""Sample from a run: `mmldlm sample RUN --mode l2t --text "..."`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.evaluation import cosine
from mmldlm.inference.batch_sample import sample_file
from mmldlm.inference.conditions import encode_texts, read_latents
from mmldlm.inference.edit import SpanEdit, edit, mask_span
from mmldlm.inference.generate import sample
from mmldlm.inference.interpolate import interpolate
from mmldlm.inference.live_view import LiveView
from mmldlm.inference.options import DEFAULT_POINTS, build_parser, check_options, sampling_config
from mmldlm.run.load import LoadedRun, load_run
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress

MAX_ROUNDS = 4  # of draws, for distinct candidates
_SEED_STRIDE = 2**32  # between the seeds of two rounds: no seed that is usually given


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm sample`; returns the exit code."""
    options = build_parser().parse_args(argv)
    check_options(options)
    if options.out and options.out.suffix == ".jsonl":
        return sample_file(options)
    span_edit = None if options.edit is None else SpanEdit.parse(options.edit)
    with Progress(enabled=not options.watch) as progress:
        progress.phase("loading the run", announce=False)
        choose_threads()
        run = load_run(options.run, options.checkpoint, options.data, options.weights)
        config = sampling_config(options, run)
        progress.phase("generating", announce=False)
        view = LiveView(run.tokenizer) if options.watch else None
        try:
            generation, lines = _generate(options, run, config, span_edit, view)
        finally:
            if view is not None:
                view.close()
    if run.has_ema:
        print(printable(f"{run}:"))
    for line in lines:
        print(printable(line))
    if options.out:
        np.save(options.out, generation.latents.numpy(), allow_pickle=False)
        print(printable(f"latents {list(generation.latents.shape)} written to {options.out}"))
    return 0


def _generate(
    options: argparse.Namespace,
    run: LoadedRun,
    config: SamplingConfig,
    span_edit: SpanEdit | None,
    view: LiveView | None,
) -> tuple[Generation, list[str]]:
    """Return the generation that the options request, and lines that show it."""
    count, seed = options.count, options.seed
    if options.interpolate:
        ends = encode_texts(run, options.interpolate)
        points = DEFAULT_POINTS if options.points is None else options.points
        generation, texts = interpolate(run, config, seed, ends, points, options.length, view)
        fractions = np.linspace(0, 1, points)
        lines = [f"  {fraction:.2f}  {text}" for fraction, text in zip(fractions, texts, strict=True)]
        return generation, [f"from: {options.interpolate[0]}", *lines, f"to: {options.interpolate[1]}"]
    if span_edit is not None:
        template = mask_span(run, span_edit, options.span_length)
        like = span_edit.text if options.like is None else options.like
        raw = read_latents(run, options.latents) if options.latents else encode_texts(run, [like])
        generation, texts = edit(run, config, seed, template, raw, count, view)
        versions = _distinct(texts, count, lambda other: edit(run, config, seed + other, template, raw, count)[1])
        return generation, [f"edit: {options.edit}", *chain.from_iterable(versions)]
    if options.mode == "t2l":
        generation, _ = sample(run, "t2l", config, seed, texts=options.text, count=count)
        truth = np.repeat(encode_texts(run, options.text), count, axis=0)
        similarity = cosine(generation.latents.numpy(), truth)
        pairs = zip(np.repeat(options.text, count), similarity, strict=True)
        return generation, [f"cosine {value:.3f} to the encoder's own latent of: {text}" for text, value in pairs]
    if options.mode == "joint":
        return sample(run, "joint", config, seed, count=count, length=options.length, callback=view)
    raw = read_latents(run, options.latents) if options.latents else encode_texts(run, options.text)
    generation, texts = sample(run, "l2t", config, seed, raw, None, count, options.length, view)
    candidates = _distinct(
        texts, count, lambda other: sample(run, "l2t", config, seed + other, raw, None, count, options.length)[1]
    )
    sources = [[f"from: {text}"] for text in options.text or ()] or [[]] * len(candidates)
    return generation, [line for pair in zip(sources, candidates, strict=True) for line in chain(*pair)]


def _distinct(texts: Sequence[str], count: int, draw: Callable[[int], Sequence[str]]) -> list[list[str]]:
    """Return lines with up to `count` distinct texts of each condition; `draw` returns more, by another seed."""
    found: list[dict[str, None]] = [{} for _ in range(len(texts) // count)]
    for number in range(1, MAX_ROUNDS + 1):
        for index, text in enumerate(texts):
            if len(of_condition := found[index // count]) < count:
                of_condition[text] = None
        if number == MAX_ROUNDS or all(len(of_condition) == count for of_condition in found):
            break
        texts = draw(number * _SEED_STRIDE)
    lines = [[f"  {text}" for text in of_condition] for of_condition in found]
    for part in lines:
        if len(part) < count:
            part.append(f"  (only {len(part)} distinct in {number * count} draws; a higher --temperature gives more)")
    return lines
