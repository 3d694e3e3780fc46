"""What changed latents are, and that both tables of generation follow from a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import generation
from benchmarks.generation import OTHERS, WITHOUT, changes, rounded, signs
from mmldlm.data.store import Store
from mmldlm.loading.load import LoadedRun

LATENTS = np.random.default_rng(0).standard_normal((5, 2, 16), np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounded_latents_have_few_levels_and_are_near(bits: int) -> None:
    largest = np.abs(LATENTS).max(-1, keepdims=True)
    levels = rounded(LATENTS, bits) / largest * (2 ** (bits - 1) - 1)
    assert np.abs(levels - np.round(levels)).max() < 1e-4 and np.abs(levels).max() <= 2 ** (bits - 1) - 1 + 1e-4
    assert (np.abs(rounded(LATENTS, bits) - LATENTS) <= largest / (2 ** (bits - 1) - 1) / 2 + 1e-6).all()


@pytest.mark.quick
def test_signs_have_one_size_for_each_vector() -> None:
    kept = signs(LATENTS)
    assert (np.sign(kept) == np.sign(LATENTS)).all()
    np.testing.assert_allclose(np.abs(kept), np.abs(LATENTS).mean(-1, keepdims=True).repeat(16, -1), rtol=1e-6)


@pytest.mark.quick
def test_a_part_of_the_channels_and_noise_are_those_of_their_names(tiny_store: Path) -> None:
    store = Store.open(tiny_store)
    latent, made = store.manifest.latent, changes(store)
    raw = store.split("train").samples(np.arange(20))[2]
    half = made["half of the channels"](raw)
    kept = latent.channels // 2
    np.testing.assert_array_equal(half[..., :kept], raw[..., :kept])
    np.testing.assert_allclose(half[..., kept:], np.broadcast_to(latent.mean[kept:], half[..., kept:].shape), rtol=1e-6)
    sizes = [float(np.square(made[name](raw) - raw).mean()) ** 0.5 / latent.rms for name in ("noise 0.1", "noise 0.3")]
    assert sizes == pytest.approx([0.1, 0.3], rel=0.1)


def test_both_tables(short_run: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.diffusion.search.FOUND", 0.0)  # so little training finds no text
    assert generation.main([str(short_run.folder), "--limit", "6", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "generation.json").read_text(encoding="utf-8"))
    (run,) = result["runs"]
    settings, latents = run["settings"], run["latents"]
    assert settings[WITHOUT]["passes_per_text"] < settings["`--search 1`"]["passes_per_text"]
    near = {name: arm["reencoded_cosine"] or -1.0 for name, arm in settings.items()}  # null: no text has a latent
    assert near["default"] > near[WITHOUT] and near["default"] > near[OTHERS]
    whole = latents["as they are, 32 bits a number"]
    for key in ("bleu", "exact_match", "reencoded_cosine"):
        assert whole["search"][key] == settings["default"][key] and whole[WITHOUT][key] == settings[WITHOUT][key]
    assert latents["noise 0.3"]["bits_per_token"] != whole["bits_per_token"]
    made = generation.blocks({"runs": [run, run]})
    assert made["search"].count("\n") == 1 + len(settings) and made["changed-latents"].count("\n") == 1 + len(latents)
    assert "seeds: 2" in made["search"] and " to " in generation.blocks(result)["search"]  # an interval
