"""`mmldlm sample --interpolate`: points between two latents, and the texts generated from them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm import cli
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.inference import encode_texts, sample
from mmldlm.inference.generate import interpolate
from mmldlm.loading.load import LoadedRun
from mmldlm.model.layers import Modulation
from mmldlm.model.mmdit import MMDiT
from mmldlm.utils.slerp import slerp

pytestmark = pytest.mark.quick

A, B = "The rose of soil and water.", "The choir of tune and note."


def random_latents(norms: tuple[float, float], tokens: int = 3, channels: int = 16) -> tuple[np.ndarray, np.ndarray]:
    result = np.random.default_rng(0).normal(size=(2, tokens, channels))
    result *= np.asarray(norms)[:, None, None] / np.linalg.norm(result, axis=-1, keepdims=True)
    return result[0].astype(np.float32), result[1].astype(np.float32)


def test_steps_are_equal_angles_on_the_great_circle() -> None:
    a, b = random_latents((4.0, 4.0))
    points = slerp(a, b, 9)
    assert np.allclose(points[0], a, atol=1e-5) and np.allclose(points[-1], b, atol=1e-5)
    assert np.allclose(np.linalg.norm(points, axis=-1), 4, atol=1e-5)  # a chord would pass within 3 of the mean
    cosines = (points[1:] * points[:-1]).sum(-1) / 16
    whole = np.arccos((a * b).sum(-1) / 16)
    assert np.allclose(np.arccos(cosines), whole / 8, atol=1e-4)
    # In the plane of both: nothing comes in from elsewhere.
    for token in range(3):
        assert np.linalg.matrix_rank(points[:, token].astype(np.float64), tol=1e-4) == 2


def test_norms_are_interpolated() -> None:
    points = slerp(*random_latents((2.0, 6.0)), 5)
    assert np.allclose(np.linalg.norm(points, axis=-1), np.linspace(2, 6, 5)[:, None], atol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-7, 3.0, -1.0, 0.0])
def test_degenerate_cases_interpolate_linearly(factor: float) -> None:
    a, _ = random_latents((4.0, 4.0))
    b = np.float32(factor) * a
    points = slerp(a, b, 4)
    assert np.isfinite(points).all()
    assert np.allclose(points, np.linspace(a, b, 4), atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=1.0, steps=6),
        SamplingConfig(temperature=1.0, steps=6, guidance=2.0),
        SamplingConfig(temperature=1.0, steps=6, remask=1.0),
        SamplingConfig(temperature=1.0, steps=6, decoding="confidence"),
    ],
    ids=str,
)
def test_neighbors_differ_by_their_latents_only(short_run: LoadedRun, config: SamplingConfig) -> None:
    """With equal latents all texts are equal."""
    same = encode_texts(short_run, [A, A])
    made, texts = interpolate(short_run, config, 5, same, 4, length=12)
    assert len(set(texts)) == 1 and made.lengths == (12,) * 4
    _, others = interpolate(short_run, config, 6, same, 2, length=12)
    assert others[0] != texts[0]


def attentive(model: MMDiT) -> MMDiT:
    """The network with its gates, shut at the start of training, wide open: what it writes depends on the latent."""
    opened, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for module in opened.modules():
        if isinstance(module, Modulation):
            torch.nn.init.normal_(module.up.weight, std=1.0, generator=generator)
    return opened


def test_endpoints_match_their_latents(short_run: LoadedRun) -> None:
    run = replace(short_run, model=attentive(short_run.model))
    ends, config = encode_texts(run, [A, B]), SamplingConfig(steps=4, search=0)
    made, texts = interpolate(run, config, 0, ends, 5)
    assert texts[0] != texts[-1]
    for place, end in ((0, 0), (-1, 1)):
        assert texts[place] == sample(run, "l2t", config, 0, ends[end : end + 1])[1][0], "also in its length"
        assert np.allclose(made.latents[place].numpy(), ends[end], atol=1e-5)


def test_command_writes_a_line_per_point(
    short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "points.npy"
    assert cli.main(["sample", str(short_run_dir), "--interpolate", A, B, "--points", "3", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"from: {A}" and lines[4] == f"to: {B}"
    assert [line.split()[0] for line in lines[1:4]] == ["0.00", "0.50", "1.00"]
    assert np.load(out).shape == (3, 1, 8)
