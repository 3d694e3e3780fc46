"""TensorBoard after kills and on several ranks: each value once, equal to those of one undisturbed process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginAccumulator

from tests.helpers.engine_runs import records, wait_for_step
from tests.helpers.forked_runs import ForkedRuns

LOG = "log={every: 1, tensorboard: true, figures_every: 4, figure_samples: 36}"
SETTINGS = (
    "train.steps=14",
    "validation={every: 4, first: 0, samples: 70, text_samples: 2}",
    "checkpoint.every_steps=5",
    LOG,
)
ALL = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}
ONCE_A_START = ("run/", "_hparams_/", "custom_scalars__config__")


def arguments(config: Path) -> list[object]:
    return [config, "mode_schedule={}", *SETTINGS]


@pytest.fixture(scope="module")
def whole(forked: ForkedRuns, parity_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one undisturbed process."""
    folder = tmp_path_factory.mktemp("pictures") / "whole"
    forked.succeed("single", folder, 1, *arguments(parity_config))
    return folder


def shown(folder: Path) -> Counter[tuple[str, int]]:
    """Count how often TensorBoard reads each (tag, step)."""
    events = PluginAccumulator(str(folder / "tensorboard"), size_guidance=ALL).Reload()
    return Counter((tag, event.step) for tag in events.Tags()["tensors"] for event in events.Tensors(tag))


def of_steps(places: Counter[tuple[str, int]]) -> set[tuple[str, int]]:
    return {(tag, step) for tag, step in places if not tag.startswith(ONCE_A_START)}


def public(folder: Path) -> Iterator[tuple[str, int, object]]:
    """Read curves, figures and histograms through TensorBoard's documented reader."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance=ALL).Reload()
    for tag in events.Tags()["scalars"]:
        yield from ((tag, event.step, event.value) for event in events.Scalars(tag))
    for tag in events.Tags()["images"]:
        yield from ((tag, event.step, event.encoded_image_string) for event in events.Images(tag))
    for tag in events.Tags()["histograms"]:
        yield from ((tag, event.step, tuple(event.histogram_value.bucket)) for event in events.Histograms(tag))


def test_resumed_run_has_each_value_once(forked: ForkedRuns, parity_config: Path, whole: Path, tmp_path: Path) -> None:
    """Killed before the first checkpoint and after it, and at last started when there is nothing left to do."""
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [*arguments(parity_config), f"run.dir={folder}"]
    for step in (4, 9):
        (pid,) = forked.start("single", command, 1, log)
        wait_for_step(folder, step, log, lambda pid=pid: forked.wait([pid], 0))  # type: ignore[misc]
        forked.kill([pid])
        assert forked.wait([pid]) == {pid: -9}
    for _ in range(2):
        forked.succeed("single", folder, 1, *arguments(parity_config))
    assert len(list((folder / "tensorboard").glob("events.*"))) == 4
    ours, theirs = shown(folder), shown(whole)
    assert of_steps(ours) == of_steps(theirs) and ("figures/retrieval", 8) in ours
    assert {place: count for place, count in (*ours.items(), *theirs.items()) if count > 1} == {}
    seen = [(tag, step, value) for tag, step, value in public(folder) if not tag.startswith(("speed/", "memory/"))]
    expected = [each for each in public(whole) if not each[0].startswith(("speed/", "memory/"))]
    assert sorted(seen, key=str) == sorted(expected, key=str)
    assert {tag for tag, _, _ in seen} >= {"figures/latents", "latent_norms/t2l", "loss/text_noise_0-0.2"}


@pytest.mark.parametrize(
    ("engine", "processes"),
    [pytest.param("fsdp2", 2, marks=pytest.mark.slow), pytest.param("ddp", 3, marks=pytest.mark.slow)],
)
def test_several_ranks_write_the_figures_once(
    engine: str, processes: int, forked: ForkedRuns, parity_config: Path, whole: Path, tmp_path: Path
) -> None:
    """36 samples are three forward passes: three ranks have one each, and one of two has a pass that does not count."""
    folder = tmp_path / "run"
    sizes = () if processes == 2 else ("train={steps: 14, global_batch_size: 12, micro_batch_size: 2}",)
    reference = whole
    if sizes:
        reference = tmp_path / "reference"
        forked.succeed("single", reference, 1, *arguments(parity_config), *sizes)
    forked.succeed(engine, folder, processes, *arguments(parity_config), *sizes)
    assert len(list((folder / "tensorboard").glob("events.*"))) == 1
    compared = ("speed/compute_s", "speed/slowest_rank")  # no comparison in one process
    by_ranks = {name for name in shown(folder) if name[0].startswith(compared)}
    assert by_ranks and shown(folder).keys() - by_ranks == shown(reference).keys()
    ours, theirs = records(folder, "validation"), records(reference, "validation")
    assert ours.keys() == theirs.keys()
    for step, record in theirs.items():
        measured = {key: value for key, value in record.items() if key.startswith(("validation/", "quality/"))}
        of_figures = ("l2t_first_guess_accuracy", "t2l_cosine", "t2l_recall_at_1")
        assert {f"quality/figures_{name}" for name in of_figures} <= set(measured)
        assert {key: ours[step][key] for key in measured} == pytest.approx(measured, rel=1e-3, abs=0.03)
    last, expected = records(folder)[14], records(reference)[14]
    by_level = {key: value for key, value in expected.items() if "_noise_" in key}
    assert len(by_level) >= 8 and {key: last[key] for key in by_level} == pytest.approx(by_level, rel=1e-3)
