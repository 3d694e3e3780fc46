"""`mmldlm sample -n`: texts that differ where there are some, and their number where there are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.evaluation import cosine
from mmldlm.inference import encode_texts
from mmldlm.inference.command import build_parser, generated_lines
from mmldlm.run.load import LoadedRun

pytestmark = pytest.mark.quick
TEXTS = ["The rose of soil and water.", "The soil of water and the rose."]


def shown(run: LoadedRun, count: int, **sampling: object) -> list[list[str]]:
    """The lines that the command shows of each text."""
    texts = [argument for text in TEXTS for argument in ("--text", text)]
    parsed = build_parser().parse_intermixed_args(["RUN", *texts, "-n", str(count)])
    config: SamplingConfig = replace(run.config.sampling, **sampling)  # type: ignore[arg-type]
    lines = generated_lines(parsed, replace(run, config=replace(run.config, sampling=config)))[1]
    groups: list[list[str]] = []
    for line in lines:
        if line.startswith("from: "):
            groups.append([])
        else:
            groups[-1].append(line.removeprefix("  "))
    return groups


def fits(run: LoadedRun, texts: Sequence[Sequence[str]]) -> np.ndarray:
    """The cosine of each text's latent to that of its source; -1 for a text that has none."""
    encoded = run.encoder.encode([text for of_source in texts for text in of_source])
    return np.nan_to_num(cosine(encoded, np.repeat(encode_texts(run, TEXTS), len(texts[0]), axis=0)), nan=-1)


def test_several_texts_differ_and_come_best_first(short_run: LoadedRun) -> None:
    texts = shown(short_run, 3, top_p=0.99)
    assert all(len(set(of_source)) == 3 for of_source in texts)
    cosines = fits(short_run, texts).reshape(2, 3)
    assert (np.diff(cosines) <= 1e-6).all()


def test_where_there_are_none_it_is_said(short_run: LoadedRun) -> None:
    """So little mass that all draws are the same, at one length."""
    for of_source in shown(short_run, 3, top_p=1e-6, lengths=1, steps=1):
        assert of_source[1:] == ["(only 1 distinct texts; a higher sampling.temperature gives more)"]
