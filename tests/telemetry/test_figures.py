"""Figures and histograms: their data, their rendering, and the message if they cannot be drawn."""

from __future__ import annotations

import importlib
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmldlm import train
from mmldlm.config import load_config
from mmldlm.distributed.collectives import Collectives
from mmldlm.evaluation.validate import validation_ids
from mmldlm.evaluation.visualize import collect_figure_data, figure_metrics, figures_due, text_samples
from mmldlm.loading.load import load_run
from mmldlm.telemetry import figures
from mmldlm.telemetry.figures import FigureData
from mmldlm.telemetry.tensorboard import LAYOUT
from mmldlm.telemetry.tracker import Tracker
from tests.helpers.engine_runs import record_list
from tests.helpers.tiny_config import TINY

DRAWN = np.random.default_rng(0)
N, D = 12, 8


def pictures(**changes: Any) -> FigureData:
    truth = DRAWN.standard_normal((N, D)).astype(np.float32)
    whole = FigureData(
        tokens=[np.arange(1 + number) for number in range(N)],
        true_latents=truth,
        t2l_latents=truth.copy(),
        joint_latents=DRAWN.standard_normal((5, D)).astype(np.float32),
        joint_tokens=[[0]] * 5,
        similarity=np.eye(N),
        likeliest_lengths=np.arange(N) + 1,
        token_hits=np.stack([np.arange(N), np.full(N, N)]),
    )
    return replace(whole, **changes)


LEVELS = {"text_l2t": [1.0, 2.0, 3.0], "latent_joint": [0.5, float("nan"), float("inf")]}


@pytest.mark.quick
def test_quality_of_perfect_and_random_latents() -> None:
    perfect = figure_metrics(pictures())
    assert perfect["quality/figures_t2l_cosine"] == perfect["quality/figures_t2l_recall_at_1"] == 1
    assert perfect["quality/figures_l2t_first_guess_accuracy"] == pytest.approx(sum(range(N)) / N**2)
    for worthless in (np.ones((N, N)), np.full((N, N), np.nan)):  # all alike, and none at all
        assert figure_metrics(pictures(similarity=worthless))["quality/figures_t2l_recall_at_1"] == 0
    one_wrong = np.eye(N)
    one_wrong[3, 4] = 2.0
    assert figure_metrics(pictures(similarity=one_wrong))["quality/figures_t2l_recall_at_1"] == pytest.approx(1 - 1 / N)
    assert figure_metrics(pictures(token_hits=None, similarity=None, t2l_latents=None)) == {}


@pytest.mark.quick
def test_figures_are_due_at_validations() -> None:
    def due(every: int, validation: int, steps: int = 1050, tensorboard: bool = True) -> list[int]:
        config = load_config(
            None,
            [
                f"log={{figures_every: {every}, tensorboard: {str(tensorboard).lower()}}}",
                f"validation.every={validation}",
                f"train.steps={steps}",
            ],
        )
        validations = [step for step in range(1, steps + 1) if step % validation == 0 or step == steps]
        return [step for step in validations if figures_due(step, config)]

    assert due(1000, 200) == [1000, 1050]
    assert due(500, 200) == [600, 1000, 1050]
    assert due(1, 250) == due(250, 250) == [250, 500, 750, 1000, 1050]
    assert due(10_000, 200) == [1050]
    assert due(0, 200) == due(100, 200, tensorboard=False) == []


@pytest.mark.quick
def test_basis_is_computed_from_true_latents_only() -> None:
    """Along the axes that explain most, and the same whatever order or sign the samples come in."""
    spread = np.array([9.0, 5.0, *[0.1] * (D - 2)], np.float32)
    truth = DRAWN.standard_normal((200, D)).astype(np.float32) * spread + 3
    mean, axes, shares = figures.principal_axes(truth)
    np.testing.assert_allclose(np.abs(axes), np.eye(D)[:2], atol=0.05)
    assert shares[0] > shares[1] and shares.sum() == pytest.approx(1, abs=0.01)
    again = figures.principal_axes(truth[::-1].copy())
    np.testing.assert_allclose(again[1], axes, atol=1e-3)
    np.testing.assert_allclose(mean, truth.mean(0))


def test_every_figure_is_drawn_and_shows_its_data() -> None:
    base = pictures()
    drawn = figures.draw(base, LEVELS)
    names = ("loss_over_noise_time", "latents", "retrieval", "token_accuracy")
    assert set(drawn) == {f"figures/{name}" for name in names}
    for pixels in drawn.values():
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.std() > 10
    changed = replace(
        base, t2l_latents=-base.true_latents, similarity=-np.eye(N), token_hits=np.stack([np.ones(N), np.full(N, N)])
    )
    others = figures.draw(changed, {**LEVELS, "text_l2t": [3.0, 2.0, 1.0]})
    assert all(not np.array_equal(drawn[name], others[name]) for name in drawn)


def test_a_diverged_run_and_one_of_a_single_mode_can_be_drawn() -> None:
    lost = np.full((N, D), np.nan, np.float32)
    figures.draw(
        pictures(t2l_latents=lost, joint_latents=lost, similarity=np.full((N, N), np.nan)),
        {"text_l2t": [float("nan")] * 3},
    )
    alone = pictures(t2l_latents=None, joint_latents=None, similarity=None)
    assert set(figures.draw(alone, {"text_l2t": [1.0]})) == {
        "figures/loss_over_noise_time", "figures/latents", "figures/token_accuracy"
    }  # fmt: skip
    one = pictures(
        tokens=[np.arange(3)],
        true_latents=np.ones((1, D), np.float32),
        t2l_latents=None,
        joint_latents=None,
        similarity=None,
    )
    assert "figures/latents" not in figures.draw(one, LEVELS)


def test_missing_matplotlib_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "matplotlib", None)
        importlib.reload(figures)
        try:
            with Tracker(tmp_path, 10, 0, False, enabled=True) as tracker:
                for step in (1, 2):
                    tracker.log_figures(step, pictures(), LEVELS)
        finally:
            patch.undo()
            importlib.reload(figures)
    said = [line for line in capfd.readouterr().err.splitlines() if "matplotlib" in line]
    assert len(said) == 1 and "pip install 'matplotlib>=" in said[0]
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()
    assert tags["images"] == [] and "lengths/true" in tags["histograms"]


# --- one run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """A run of four steps that draws 10 samples, a validation each second step."""
    folder = tmp_path_factory.mktemp("run")
    config = folder / "config.yaml"
    config.write_text(TINY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    log = "log={every: 1, tensorboard: true, figures_every: 2, figure_samples: 10}"
    assert train.main([str(config), log, "train.steps=4", "validation.every=2"]) == 0
    return folder / "run"


def test_tensorboard_and_the_metrics_file_have_the_same_scalars(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    written = [*record_list(run, "train"), *record_list(run, "validation")]
    theirs = {
        (record["step"], tag): value for record in written for tag, value in record.items() if isinstance(value, float)
    }
    theirs = {place: value for place, value in theirs.items() if "/" in place[1]}
    ours = {(event.step, tag): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert theirs.items() and {place: ours[place] for place in theirs} == pytest.approx(theirs, rel=1e-6)
    groups = {tag.partition("/")[0] for tag in events.Tags()["scalars"]}
    assert groups == {"loss", "accuracy", "validation", "quality", "optim", "speed", "memory", "data", "health"}


def test_the_layout_opens_on_the_losses_and_no_chart_is_empty(run: Path) -> None:
    tags = EventAccumulator(str(run / "tensorboard")).Reload().Tags()["scalars"]
    first = next(iter(LAYOUT.values()))
    assert next(iter(first)) == "loss: training and validation"
    for charts in LAYOUT.values():
        for title, patterns in charts.items():
            for pattern in patterns:
                assert any(re.match(pattern, tag) for tag in tags), f"{title}: {pattern} matches nothing"


def test_each_validation_has_its_texts_figures_and_histograms(run: Path) -> None:
    events = EventAccumulator(
        str(run / "tensorboard"), size_guidance={"images": 0, "histograms": 0, "tensors": 0}
    ).Reload()
    tags = events.Tags()
    figures_of = {"loss_over_noise_time", "latents", "retrieval", "token_accuracy"}
    assert set(tags["images"]) == {f"figures/{name}" for name in figures_of}
    norms, lengths = ("true", "t2l", "joint"), ("true", "likeliest")
    curves = ("text_l2t", "text_joint", "latent_t2l", "latent_joint")
    assert set(tags["histograms"]) == {
        *(f"latent_norms/{name}" for name in norms),
        *(f"lengths/{name}" for name in lengths),
        *(f"loss_over_noise_time/{name}" for name in curves),
    }
    for tag in tags["images"]:
        assert [event.step for event in events.Images(tag)] == [2, 4]
    for tag in tags["histograms"]:
        assert [event.step for event in events.Histograms(tag)] == [2, 4]
    for mode in ("l2t", "joint"):
        shown = events.Tensors(f"samples/{mode}/text_summary")
        assert [event.step for event in shown] == [2, 4]
        assert shown[0].tensor_proto.string_val[0].count(b"\n") == 3, "a head, a rule and two samples"


def test_the_curve_over_noise_times_is_the_validation_loss(run: Path) -> None:
    """The mean of the fine curve's parts, which have nearly equal counts, is the loss of the coarse level."""
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    (record,) = [each for each in record_list(run, "validation") if each["step"] == 4]
    curve = events.Histograms("loss_over_noise_time/latent_t2l")[-1].histogram_value
    assert np.diff([curve.min, *curve.bucket_limit]) == pytest.approx(1 / 30) and curve.bucket_limit[-1] == curve.max
    assert curve.bucket[0] > 0 and curve.bucket[-1] > 0, "readers would stretch what is left over empty ends"
    measured = [value for value in curve.bucket if value]
    assert np.mean(measured) == pytest.approx(record["validation/latent_t2l"], rel=0.1)


def test_quality_of_a_run(run: Path) -> None:
    record = record_list(run, "validation")[-1]
    of_figures = ("l2t_first_guess_accuracy", "t2l_cosine", "t2l_recall_at_1")
    names = ("l2t_bits_per_token", *(f"figures_{name}" for name in of_figures))
    assert {f"quality/{name}" for name in names} == {key for key in record if key.startswith("quality/")}
    assert record["quality/l2t_bits_per_token"] == pytest.approx(record["validation/text_l2t"] / math.log(2))
    loaded = load_run(run)
    split, data = loaded.store.split("validation"), collect_figure_data(loaded, Collectives())
    ids = np.array(validation_ids(split, 10))
    truth = loaded.store.standardize(split.gather(ids)[2]).reshape(10, -1)
    np.testing.assert_allclose(data.true_latents, truth, rtol=1e-6)
    assert data.t2l_latents is not None
    both = (data.t2l_latents, truth)
    result, raw = (loaded.store.restore(latents.reshape(10, 1, -1)).reshape(10, -1) for latents in both)
    cosine = (result * raw).sum(1) / np.linalg.norm(result, axis=1) / np.linalg.norm(raw, axis=1)
    assert record["quality/figures_t2l_cosine"] == pytest.approx(cosine.mean(), abs=1e-4)
    # In the table of joint texts, a held-out latent is nearest to itself.
    texts = loaded.tokenizer.decode_batch([split.tokens(int(row)).tolist() for row in ids])
    rows = text_samples(loaded, Collectives(), replace(data, joint_latents=truth))["samples/joint"]
    assert rows and [row["held-out text of the nearest latent"] for row in rows] == texts[: len(rows)]


@pytest.mark.parametrize("steps", [2, 8, 100])
def test_figure_data_takes_few_forward_passes(steps: int, run: Path) -> None:
    """Eight reverse steps write a text of up to 32 tokens, and one predicts x0; no more are taken. Joint takes them for
    the latents and for the texts, and one for the latents of these; its texts are those of the figures' latents."""
    loaded, passes = load_run(run), []
    sampling = replace(loaded.config.sampling, steps=steps)
    loaded = replace(loaded, config=replace(loaded.config, sampling=sampling))

    def counted(*inputs: Any) -> Any:
        passes.append(len(inputs[0]))
        return loaded.model(*inputs)

    watched = replace(loaded, model=counted)
    split = loaded.store.split("validation")
    lengths = split.lengths[np.array(validation_ids(split, 10))]

    def writing(texts: int) -> int:
        return min(steps, max(8, math.ceil(lengths[:texts].max() / 4)))

    taken = collect_figure_data(watched, Collectives())
    assert len(passes) == 1 + 1 + 2 * writing(8) + 1
    assert [len(text) for text in taken.joint_tokens] == lengths[:8].tolist()
    passes.clear()
    tables = text_samples(watched, Collectives(), taken)
    assert len(passes) == 1 + writing(2), "one for the lengths"
    shown = [row["generation"] for row in tables["samples/joint"]]
    assert shown == loaded.tokenizer.decode_batch(taken.joint_tokens[:2])
    assert tables["samples/l2t"] == text_samples(loaded, Collectives(), None)["samples/l2t"]
