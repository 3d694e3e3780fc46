"""Garbage is collected at known steps, and a step leaves none that holds memory."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from contextlib import closing
from pathlib import Path

import pytest
import torch

from mmldlm.config import load_config
from mmldlm.train import train_step
from mmldlm.trainer.callbacks import COLLECT_EVERY, ScheduledCollection
from mmldlm.trainer.trainer import Trainer


class Cycle:
    """An object that only the garbage collector frees."""

    freed = 0

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        type(self).freed += 1


def test_garbage_is_collected_at_its_steps_alone() -> None:
    Cycle.freed = 0
    freed = []
    gc.unfreeze()  # what was there before this test
    with closing(ScheduledCollection()) as collection:
        for step in range(1, COLLECT_EVERY + 2):
            for _ in range(3000):  # more than Python waits for by itself
                Cycle()
            collection.after_step(step)
            freed.append(Cycle.freed)
        assert gc.get_freeze_count() > 0
        gc.unfreeze()  # as the trainer does at the end of a run
    assert set(freed[:-2]) == {3000} and set(freed[-2:]) == {3000 * COLLECT_EVERY}
    assert gc.isenabled()


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_step_leaves_no_tensors_in_cycles(tiny_config: Path, checkpointing: str) -> None:
    """They would hold their memory until the next collection."""
    overrides = (
        f"memory.activation_checkpointing={checkpointing}",
        "train.steps=12",
        "validation.every=0",
        "checkpoint.every_steps=0",
    )
    alive = []
    with Trainer(load_config(tiny_config, list(overrides))) as run:
        for step, batches in run.steps():
            train_step(run, step, batches)
            del batches
            assert not gc.isenabled()
            if step > 0:  # the first one ends with a collection
                alive.append(sum(isinstance(value, torch.Tensor) for value in gc.get_objects()))
    assert max(alive[1:]) <= alive[0] + 5, alive


@pytest.mark.parametrize("settings", [["precision=bf16"], ["memory.activation_checkpointing=full"]], ids=str)
def test_a_run_begins_without_the_network_of_the_one_before(
    tiny_config: Path, tmp_path: Path, settings: list[str]
) -> None:
    """Where a module's method is another function, which has the module, networks are freed by a collection alone."""
    kept: list[weakref.ref[torch.nn.Module]] = []
    gc.disable()
    try:
        for name in ("first", "second"):
            with Trainer(load_config(tiny_config, [f"run.dir={tmp_path / name}", "train.steps=1", *settings])) as run:
                assert sum(reference() is not None for reference in kept) == 0
                kept += [weakref.ref(module) for module in run.engine.unwrapped_model.modules()]
                run.checkpointer.saved_at = run.state.step
            del run
    finally:
        gc.enable()


def test_a_run_that_has_ended_is_freed_at_once(tiny_config: Path) -> None:
    """Without a collection: the next run of this process may need the memory, and workers of the loader would stay."""
    gc.collect()
    gc.disable()
    try:
        with Trainer(load_config(tiny_config, ["train.steps=2", "data.num_workers=1"])) as run:
            for step, batches in run.steps():
                train_step(run, step, batches)
            kept = [weakref.ref(run.engine.unwrapped_model), weakref.ref(run.components.loader)]
        del run, batches
        assert [reference() for reference in kept] == [None, None] and not multiprocessing.active_children()
    finally:
        gc.enable()
