"""Sample from a run: `mmldlm sample RUN --mode l2t --text "..."`."""

from __future__ import annotations

import argparse

import numpy as np

from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.evaluation import cosine
from mmldlm.inference.conditions import encode_texts, read_latents
from mmldlm.inference.edit import Marked, blanked, edit
from mmldlm.inference.generate import sample
from mmldlm.inference.interpolate import interpolate
from mmldlm.inference.live_view import Watcher
from mmldlm.inference.options import POINTS, check, parser, sampling_of
from mmldlm.run.load import LoadedRun, load_run


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    check(options)
    marked = None if options.edit is None else Marked.read(options.edit)
    run = load_run(options.run, options.checkpoint, options.data, options.weights)
    config = sampling_of(options, run)
    watcher = Watcher(run.tokenizer) if options.watch else None
    try:
        made, lines = _written(options, run, config, marked, watcher)
    finally:
        if watcher is not None:
            watcher.close()
    if run.has_average:
        print(f"{run}:")
    for line in lines:
        print(line)
    if options.out:
        np.save(options.out, made.latents.numpy(), allow_pickle=False)
        print(f"latents {list(made.latents.shape)} written to {options.out}")
    return 0


def _written(
    options: argparse.Namespace,
    run: LoadedRun,
    config: SamplingConfig,
    marked: Marked | None,
    watcher: Watcher | None,
) -> tuple[Generation, list[str]]:
    """What the options ask for, and the lines that tell it."""
    count, seed = options.count, options.seed
    if options.interpolate:
        ends = encode_texts(run, options.interpolate)
        points = POINTS if options.points is None else options.points
        made, texts = interpolate(run, config, seed, ends, points, options.length, watcher)
        shares = np.linspace(0, 1, points)
        lines = [f"  {share:.2f}  {text}" for share, text in zip(shares, texts, strict=True)]
        return made, [f"from: {options.interpolate[0]}", *lines, f"to: {options.interpolate[1]}"]
    if marked is not None:
        row = blanked(run, marked, options.span_length)
        like = marked.text if options.like is None else options.like
        raw = read_latents(run, options.latents) if options.latents else encode_texts(run, [like])
        made, texts = edit(run, config, seed, row, raw, count, watcher)
        return made, [f"edit: {options.edit}", *(f"  {text}" for text in texts)]
    if options.mode == "t2l":
        made, _ = sample(run, "t2l", config, seed, texts=options.text, count=count)
        truth = np.repeat(encode_texts(run, options.text), count, axis=0)
        similar = cosine(made.latents.numpy(), truth)
        found = zip(np.repeat(options.text, count), similar, strict=True)
        return made, [f"cosine {value:.3f} to the encoder's own latent of: {text}" for text, value in found]
    if options.mode == "joint":
        return sample(run, "joint", config, seed, count=count, length=options.length, watch=watcher)
    raw = read_latents(run, options.latents) if options.latents else encode_texts(run, options.text)
    made, texts = sample(run, "l2t", config, seed, raw, None, count, options.length, watcher)
    lines = []
    for index, text in enumerate(texts):
        if options.text and index % count == 0:
            lines.append(f"from: {options.text[index // count]}")
        lines.append(f"  {text}")
    return made, lines
