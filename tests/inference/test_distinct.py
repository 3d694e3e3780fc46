"""`mmldlm sample`: texts that differ under `-n`, where there are some, and ones that fit better under a search."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.data.store import Store
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import UsageError
from mmldlm.evaluation import cosine
from mmldlm.inference import encode_texts
from mmldlm.inference.command import build_parser, generated_lines
from mmldlm.inference.generate import sample
from mmldlm.loading.load import LoadedRun

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


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_several_texts_differ_and_come_best_first(shift: float, short_run: LoadedRun) -> None:
    """By the encoder's own scale: far from the network's where the mean latent is far from zero."""
    store = copy(short_run.store)
    mean = tuple(np.asarray(store.manifest.latent.mean) + shift)
    store.manifest = replace(store.manifest, latent=replace(store.manifest.latent, mean=mean))
    short_run = replace(short_run, store=store)
    texts = shown(short_run, 3, top_p=0.99)
    assert all(len(set(of_source)) == 3 for of_source in texts)
    cosines = fits(short_run, texts).reshape(2, 3)
    assert (np.diff(cosines) <= 1e-6).all()


def test_where_there_are_none_it_is_said(short_run: LoadedRun) -> None:
    """So little mass that all draws are the same, at one length."""
    for of_source in shown(short_run, 3, top_p=1e-6, tried_lengths=1, steps=1):
        assert of_source[1:] == ["(only 1 distinct texts; a higher sampling.temperature gives more)"]


@pytest.mark.setting("sampling.search")
def test_a_search_finds_texts_that_fit_better(short_run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.diffusion.search.FOUND", 0.0)  # so little training finds no text
    found = {rounds: shown(short_run, 1, search=rounds, temperature=1.0, tried_lengths=3) for rounds in (0, 1, 8)}
    passes = [int(found[rounds][-1].pop().removeprefix("passes of the network per latent: ")) for rounds in found]
    assert passes[0] < passes[1] < passes[2]
    assert found[8] == shown(short_run, 1, temperature=1.0, tried_lengths=3), "the default"
    none, one, most = (fits(short_run, found[rounds]) for rounds in found)
    assert (one >= none - 1e-6).all() and (most >= one - 1e-6).all() and most.mean() > none.mean() + 0.02


def test_without_the_encoder_the_network_chooses(
    short_run: LoadedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first text of several is the one whose latent by the network is nearest to the given latent."""
    latents = encode_texts(short_run, TEXTS)
    shutil.copytree(short_run.store.path, tmp_path / "store")
    run = replace(short_run, store=Store.open(tmp_path / "store"))
    shutil.rmtree(tmp_path / "store" / "encoder")
    sampling = replace(run.config.sampling, temperature=2.0)
    made, texts = sample(run, "l2t", sampling, 0, latents, count=4)
    assert "t2l" in capsys.readouterr().err
    assert len(set(texts[:4])) == 4
    given = torch.from_numpy(run.store.standardize(latents)).repeat_interleave(4, 0)
    fits = run.fit_by_network(sampling)(made.split(), given).view(2, 4)
    assert (fits.diff() <= 1e-6).all() and fits.std() > 1e-3


def test_a_search_needs_the_encoder(short_run: LoadedRun, tmp_path: Path) -> None:
    shutil.copytree(short_run.store.path, tmp_path / "store")
    run = replace(short_run, store=Store.open(tmp_path / "store"))
    shutil.rmtree(tmp_path / "store" / "encoder")
    latents = np.zeros((1, *short_run.store.split("test").latents(0).shape), np.float32)
    sampling = replace(run.config.sampling, search=16)
    with pytest.raises(UsageError, match=r"^sampling.search: .* 16$"):
        sample(run, "l2t", sampling, 0, latents)
    assert sample(run, "l2t", replace(sampling, search=None), 0, latents)[1], "chosen by its likelihood"
