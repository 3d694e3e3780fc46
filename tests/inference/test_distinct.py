"""`mmldlm sample -n`: distinct candidates where there are some, and their number where there are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.inference import encode_texts, sample
from mmldlm.inference.command import MAX_ROUNDS, build_parser, generated_lines
from mmldlm.run.load import LoadedRun

pytestmark = pytest.mark.quick
TEXTS = ["The rose of soil and water.", "The soil of water and the rose."]


def shown(run: LoadedRun, count: int, config: SamplingConfig | None = None) -> tuple[list[str], list[str]]:
    """The lines of the command, and the texts of a plain draw of as many."""
    texts = [argument for text in TEXTS for argument in ("--text", text)]
    parsed = build_parser().parse_intermixed_args(["RUN", *texts, "-n", str(count)])
    run = replace(run, config=replace(run.config, sampling=config or run.config.sampling))
    plain = sample(run, "l2t", run.config.sampling, parsed.seed, encode_texts(run, TEXTS), None, count)[1]
    return generated_lines(parsed, run)[1], plain


def candidates(lines: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for line in lines:
        if line.startswith("from: "):
            groups.append([])
        else:
            groups[-1].append(line)
    return groups


def test_one_is_the_plain_draw(short_run: LoadedRun) -> None:
    lines, plain = shown(short_run, 1)
    assert lines == [f"from: {TEXTS[0]}", f"  {plain[0]}", f"from: {TEXTS[1]}", f"  {plain[1]}"]


def test_candidates_differ_where_there_are_others(short_run: LoadedRun) -> None:
    lines, plain = shown(short_run, 3, replace(short_run.config.sampling, temperature=1.0))
    for index, group in enumerate(candidates(lines)):
        assert len(set(group)) == 3 and group[0] == f"  {plain[3 * index]}"


def test_where_there_are_none_it_is_said(short_run: LoadedRun) -> None:
    """The likeliest tokens, at once: all draws are the same."""
    lines, plain = shown(short_run, 3, replace(short_run.config.sampling, temperature=0.0, steps=1))
    for index, group in enumerate(candidates(lines)):
        *texts, note = group
        assert texts == [f"  {text}" for text in dict.fromkeys(plain[3 * index : 3 * index + 3])]
        assert (
            note
            == f"  (only {len(texts)} distinct in {3 * MAX_ROUNDS} draws; a higher sampling.temperature gives more)"
        )
