"""What a comparison of groups of runs says, from their records: which statistic, which runs, and better or worse."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mmldlm.tools.compare.comparison import Comparison, RunGroup, group_runs
from mmldlm.tools.compare.paired import Difference
from mmldlm.tools.compare.run_summary import RunSummary, better_direction, is_metric_baseline
from mmldlm.utils.intervals import confidence_sequence, welch_half_width
from tests.helpers.written_runs import write_lines, write_run

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        ("loss/total", "lower"),
        ("validation/text_l2t", "lower"),
        ("validation/total/best", "lower"),
        ("accuracy/masked_tokens", "higher"),
        ("speed/tokens_per_s", "higher"),
        ("speed/step_s", "lower"),
        ("speed/cores_of_others", ""),
        ("memory/host_free_mib", "higher"),
        ("memory/resident_mib", "lower"),
        ("data/tokens", ""),
        ("quality/l2t_bits_per_token", "lower"),
        ("quality/figures_l2t_first_guess_accuracy", "higher"),
        ("quality/t2l_cosine_mean_latent", ""),
        ("evaluation/bits_per_token", "lower"),
        ("evaluation/bits_per_token_standard_error", ""),
        ("evaluation/controls.unigram_bits_per_token", ""),
        ("evaluation/controls.trigram_bits_per_token_with_length", ""),
        ("evaluation/joint.reencoded_cosine_drawn", "higher"),
        ("evaluation/edit.changed", "higher"),
        ("evaluation/edit.changed_own_latent", ""),
        ("evaluation/l2t.bits_per_token_bag_of_words", ""),
        ("evaluation/t2l.recall_at_1", "higher"),
        ("evaluation/t2l.cosine_ridge", ""),
        ("evaluation/joint.token_entropy", ""),
    ],
)
def test_directions(key: str, direction: str) -> None:
    """Baselines, counts and errors have none, whatever their names contain; a metric may have none, either."""
    assert better_direction(key) == direction
    is_judge = key.startswith(("quality/", "evaluation/")) and not direction and "entropy" not in key
    assert is_metric_baseline(key) == is_judge


@pytest.mark.parametrize(
    ("key", "value", "baseline", "verdict"),
    [
        ("validation/total", 2.0, 3.0, "better"),
        ("validation/total", 3.0, 2.0, "worse"),
        ("speed/tokens_per_s", 2.0, 3.0, "worse"),
        ("evaluation/t2l.cosine", 0.2, -0.2, "better"),
        ("evaluation/t2l.cosine_shuffled", 0.2, 0.1, ""),
        ("validation/total", 2.0, 2.001, ""),
    ],
)
def test_verdicts(key: str, value: float, baseline: float, verdict: str) -> None:
    spread = np.array([0.99, 1.0, 1.01])
    assert Difference.of_independent(key, baseline * spread, value * spread).verdict == verdict


def summaries(folder: Path, name: str, seeds: range, **options: float) -> list[RunSummary]:
    return [RunSummary(write_run(folder / f"{name}-{seed}", seed, **options)) for seed in seeds]  # type: ignore[arg-type]


def final(runs: list[RunSummary], tag: str) -> np.ndarray:
    return np.array([run.final_values()[tag] for run in runs])


def compared(a: list[RunSummary], b: list[RunSummary], max_step: float = math.inf) -> Comparison:
    return Comparison(RunGroup(tuple(a)), RunGroup(tuple(b)), len(a) > 1 or len(b) > 1, max_step)


def test_runs_of_equal_seeds_are_pairs(tmp_path: Path) -> None:
    a, b = summaries(tmp_path, "a", range(4)), summaries(tmp_path, "b", range(4), shift=0.3, lr=2e-3)
    comparison = compared(a, b)
    rows = {row.tag: row for row in comparison.over_seeds}
    for tag in ("loss/total", "validation/total", "speed/tokens_per_s"):
        row, differences = rows[tag], final(b, tag) - final(a, tag)
        assert (row.unit, len(row.steps)) == ("pairs", 4)
        means, half_widths = confidence_sequence(differences, 10.0)
        assert (row.means[-1], row.half_widths[-1]) == (means[-1], half_widths[-1])
    # The noise of a seed cancels: the shift is all that is left.
    assert comparison.decision == "higher" and rows["loss/total"].verdict == "worse"
    assert list(rows)[:3] == ["validation/total", "validation/total/best", "loss/total"] and "optim/lr" not in rows
    assert compared(a[:2], b[:2]).decision == "open", "two pairs have no interval"


def test_runs_of_other_seeds_are_independent(tmp_path: Path) -> None:
    a, b = summaries(tmp_path, "a", range(4)), summaries(tmp_path, "b", range(7, 10), shift=1.0, lr=2e-3)
    comparison = compared(a, b)
    rows = {row.tag: row for row in comparison.over_seeds}
    row, values = rows["loss/total"], (final(a, "loss/total"), final(b, "loss/total"))
    assert (row.unit, len(row.steps), comparison.pairs) == ("runs", 7, [])
    assert row.means[-1] == pytest.approx(values[1].mean() - values[0].mean())
    assert row.half_widths[-1] == welch_half_width(*values)
    assert comparison.decision == "higher" and row.relative()[0] == pytest.approx(row.means[-1] / values[0].mean())
    # A second run of a seed tells nothing new.
    again = RunSummary(write_run(tmp_path / "again", 8, shift=5, lr=2e-3))
    assert compared(a, [*b, again]).over_seeds[0].means[-1] == comparison.over_seeds[0].means[-1]


def test_two_runs_are_compared_record_by_record(tmp_path: Path) -> None:
    (a,), (b,) = summaries(tmp_path, "a", range(1)), summaries(tmp_path, "b", range(1), shift=0.1, lr=2e-3)
    comparison = compared([a], [b])
    rows = {row.tag: row for row in comparison.over_records((a, b))}
    assert comparison.conclusion == "loss/total of these two runs alone: B is above A"
    assert rows["loss/total"].means == pytest.approx(0.1) and len(rows["loss/total"].steps) == 20
    assert not rows["validation/total"].has_interval
    # Their final values have no interval, and so no verdict.
    assert {(row.unit, row.has_interval, row.verdict) for row in comparison.over_seeds} == {("runs", False, "")}


def test_unfinished_runs_count_up_to_their_last_step(tmp_path: Path) -> None:
    a, b = summaries(tmp_path, "a", range(3)), summaries(tmp_path, "b", range(3), lr=2e-3)
    short = RunSummary(write_run(tmp_path / "short", 3, lr=2e-3, steps=13))
    a += summaries(tmp_path, "a", range(3, 4))
    assert [len(row.steps) for row in compared(a, [*b, short]).over_seeds[:1]] == [3], "the one that has not ended"
    assert [len(group.runs) for group in group_runs([*a, *b, short])] == [4, 4]
    row = next(row for row in compared(a, [*b, short], 13).over_seeds if row.tag == "loss/total")
    losses = [run.curve("loss/total", "train").values[11:13].mean() for run in a]
    assert len(row.steps) == 4 and row.baseline == pytest.approx(np.mean(losses))


def test_evaluations_are_compared_if_they_are_alike(tmp_path: Path) -> None:
    a, b = summaries(tmp_path, "a", range(1)), summaries(tmp_path, "b", range(1), lr=2e-3)
    for run, samples in ((a[0], 64), (b[0], 64)):
        (run.path / "evaluation.json").write_text(f'{{"samples": {samples}, "t2l": {{"cosine": 0.5}}}}')
    assert "evaluation/t2l.cosine" in {row.tag for row in compared(a, b).over_seeds}
    (b[0].path / "evaluation.json").write_text('{"samples": 32, "t2l": {"cosine": 0.5}}')
    assert not any("evaluation" in row.tag for row in compared(a, [RunSummary(b[0].path)]).over_seeds)


def test_a_baseline_of_zero_has_no_relative_difference() -> None:
    row = Difference.of_independent("evaluation/l2t.exact_match", np.zeros(3), np.array([0.1, 0.2, 0.3]))
    assert all(map(math.isnan, row.relative())) and row.decision(0.5) == "open" and row.verdict == ""


def test_the_time_of_a_run_is_that_of_all_its_sessions(tmp_path: Path) -> None:
    kinds = (("start", 0, 0), ("train", 1, 10), ("train", 2, 30), ("resume", 2, 500), ("train", 3, 507))
    run = write_lines(tmp_path / "run", [{"kind": kind, "step": step, "time": time} for kind, step, time in kinds])
    assert RunSummary(run).duration_s == 37
