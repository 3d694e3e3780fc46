"""Mode weights as a piecewise constant function of the step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mmldlm.diffusion.noise import MODES, ModeShares, mode_stages, mode_weights, mode_weights_at, trained_modes

pytestmark = pytest.mark.quick

SCHEDULES: list[tuple[ModeShares, dict[int, ModeShares]]] = [
    ("joint", {}),
    ({"l2t": 3, "joint": 1}, {}),
    ("l2t", {5: "joint"}),
    ("joint", {0: "t2l"}),
    ("joint", {0: "t2l", 7: {"l2t": 1, "t2l": 3}}),
    ({"l2t": 1, "t2l": 1}, {9: "joint", 2: "t2l", 4: {"joint": 0, "l2t": 2}}),
]
schedules = pytest.mark.parametrize(("mode", "schedule"), SCHEDULES, ids=str)


def spelled_out(mode: ModeShares, schedule: Mapping[int, ModeShares], steps: int) -> list[ModeShares]:
    """The setting in force at each step, walking over them."""
    result = []
    for step in range(steps):
        mode = schedule.get(step, mode)
        result.append(mode)
    return result


@schedules
def test_an_entry_holds_from_its_step_to_the_next(mode: ModeShares, schedule: dict[int, ModeShares]) -> None:
    for step, expected in enumerate(spelled_out(mode, schedule, 12)):
        assert mode_weights_at(step, mode, schedule) == mode_weights(expected)


@schedules
def test_trained_modes_are_those_with_a_share_at_some_step(mode: ModeShares, schedule: dict[int, ModeShares]) -> None:
    shares = [mode_weights(setting) for setting in spelled_out(mode, schedule, 12)]
    assert trained_modes(mode, schedule) == tuple(name for name in MODES if any(share[name] for share in shares))


@schedules
def test_stages_begin_at_step_0_and_are_in_order(mode: ModeShares, schedule: dict[int, ModeShares]) -> None:
    stages = mode_stages(mode, schedule)
    assert list(stages) == sorted({0, *schedule})
    assert all(sum(weights.values()) == pytest.approx(1) for weights in stages.values())


@pytest.mark.parametrize(
    ("mode", "schedule", "message"),
    [
        ("both", {}, r"^mode: unknown mode 'both'"),
        ("both", {0: "joint"}, r"^mode: unknown mode 'both'"),
        ("l2t", {-1: "joint"}, r"^mode_schedule\.-1: .*at least 0, found -1"),
        ("l2t", {3: "both"}, r"^mode_schedule\.3: unknown mode 'both', expected l2t, t2l, joint"),
        ("l2t", {3: "t2l", 8: {"joint": -1.0}}, r"^mode_schedule\.8: weights must be at least 0"),
        ("l2t", {3: {}}, r"^mode_schedule\.3: weights must be"),
    ],
)
def test_invalid_schedules_are_refused_by_key(mode: ModeShares, schedule: dict[int, ModeShares], message: str) -> None:
    for call in (trained_modes, mode_stages, lambda *both: mode_weights_at(0, *both)):
        with pytest.raises(ValueError, match=message):
            call(mode, schedule)
