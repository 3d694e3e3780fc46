"""After a power failure at any point of a save, the old or the new checkpoint is complete."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.errors import DataError
from mmldlm.utils.files import write_atomically
from tests.helpers.crash_states import (
    ROOT,
    Event,
    Names,
    Promise,
    Recording,
    Sync,
    Tree,
    Write,
    crash_states,
    recorded,
    write_tree,
)
from tests.helpers.save_checkpoint import save_checkpoint

LIMIT = 64  # states of one prefix
Save = Callable[[CheckpointStore], object]


@pytest.fixture(autouse=True)
def no_real_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are seen all the same, and it is the model that loses power, not this machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def store_in(run: Path, last: int = 1) -> CheckpointStore:
    return CheckpointStore(run / "checkpoints", Retention(last=last))


def files(step: int, part: int = 0) -> dict[str, Any]:
    tensors = {"w": torch.full((6,), float(step + part))}
    return {f"model-{part}.safetensors": lambda path: write_tensors(path, tensors), f"sub/{part}.json": b"%d" % step}


def of_one(step: int) -> Save:
    return lambda store: save_checkpoint(store, step, files(step), {"from": "one"})


def of_two(step: int) -> Save:
    def save(store: CheckpointStore) -> None:
        temporary = store.begin(step, 1000)
        parts = [write_files(temporary, files(step, part)) for part in (0, 1)]
        store.commit(temporary, step, parts[0] | parts[1], {"from": "two"}, {})

    return save


def content(store: CheckpointStore, repair: bool = False) -> tuple[int, dict[str, bytes]] | None:
    """Step and files of the newest checkpoint; no folder that looks newer may be there."""
    result = store.newest(repair)
    if result is None:
        return None
    if result.path != store.paths()[0]:
        raise DataError(f"{store.paths()[0].name} is newer than {result.path.name}, and damaged")
    return result.step, {name: result.file(name).read_bytes() for name in result.files}


def record(run: Path, before: Sequence[Save], saves: Sequence[Save], last: int = 1) -> tuple[Recording, list[Any]]:
    """Record `saves` in a run folder with the checkpoints `before`; also return the newest one after each save."""
    run.mkdir()
    for save in before:
        save(store_in(run, last))
    after = [content(store_in(run))]
    with recorded(run) as recording:
        for save in saves:
            save(store_in(run, last))
            recording.promise()
            after.append(content(store_in(run)))
    return recording, after


def distinct(recording: Recording, events: Sequence[Event], limit: int = LIMIT) -> Iterable[tuple[int, Tree]]:
    """Every state once that a crash in `events` may leave, with the number of promises kept by then."""
    seen, draw = set(), random.Random(0)
    for length in range(len(events) + 1):
        promises = sum(isinstance(event, Promise) for event in events[:length])
        for tree in crash_states(recording, events[:length], draw, limit):
            if (key := (promises, repr(tree))) not in seen:
                seen.add(key)
                yield promises, tree


def fault(folder: Path, kept: int, tree: Tree, after: Sequence[Any]) -> str:
    """Return the fault of a state in which `kept` promises hold; "" if the last or the next checkpoint is valid."""
    write_tree(folder, tree)
    try:
        store = store_in(folder)
        for repair in (False, True):
            if (result := content(store, repair)) not in after[kept : kept + 2]:
                return f"newest is {result and result[0]}, {kept} promises kept: {tree}"
        save_checkpoint(store, 1000, {"file": b"x"}, {})  # and the run continues
        return "" if content(store) == (1000, {"file": b"x"}) else f"cannot continue: {tree}"
    except DataError as error:
        return f"{error}: {tree}"
    finally:
        shutil.rmtree(folder)


SCENARIOS: dict[str, tuple[list[Save], list[Save], int]] = {
    "one process": ([of_one(1)], [of_one(2)], 1),
    "two processes": ([of_two(1)], [of_two(2)], 1),
    "the same step again": ([of_one(1)], [of_one(1)], 1),
    "one after another": ([of_one(1)], [of_one(2), of_two(3)], 1),
    "two kept": ([of_one(1), of_one(2)], [of_one(3)], 2),
    "the first of a run": ([], [of_one(1)], 1),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_valid_checkpoint_after_every_crash(name: str, tmp_path: Path) -> None:
    recording, after = record(tmp_path / "run", *SCENARIOS[name])
    states = list(distinct(recording, recording.events))
    faults = [result for kept, tree in states if (result := fault(tmp_path / "state", kept, tree, after))]
    assert not faults, f"{len(faults)} of {len(states)} states: {faults[0]}"
    assert len(states) > len(recording.events), "the model leaves no doubt: it sees too little"


# --- the model can fail: the same events with one thing left out or moved ---------------------------------------


def without_syncs(recording: Recording, path: str) -> list[Event]:
    node = recording.node(path)
    assert Sync(node) in recording.events
    return [event for event in recording.events if event != Sync(node)]


def rename_of(recording: Recording, folder: str, name: str) -> Names:
    """The change that gave `name` in `folder` to something that had another name before."""
    where = recording.node(folder)
    moves = [event for event in recording.events if isinstance(event, Names) and len(event.changes) == 2]
    return next(event for event in moves if event.changes[1][:2] == (where, name))


def written_in_place(recording: Recording, folder: str, name: str) -> list[Event]:
    """Write under the final name from the start."""
    move = rename_of(recording, folder, name)
    (where, temporary, _), (_, _, node) = move.changes
    named = Names(((where, name, node),))
    made = Names(((where, temporary, node),))
    assert made in recording.events
    return [named if event == made else event for event in recording.events if event != move]


def pruned_before_rename(recording: Recording) -> list[Event]:
    """Remove the old checkpoint while the new one still has its temporary name."""
    events = recording.events
    at = events.index(rename_of(recording, "checkpoints", "step-00000002"))
    gone = events.index(rename_of(recording, "checkpoints", ".old-step-00000001"))
    assert at < gone
    return [*events[:at], *events[gone:-1], *events[at:gone], events[-1]]


MUTANTS: dict[str, Callable[[Recording], list[Event]]] = {
    "fsync of a file": lambda seen: without_syncs(seen, "checkpoints/step-00000002/model-0.safetensors"),
    "fsync of a file in a folder": lambda seen: without_syncs(seen, "checkpoints/step-00000002/sub/0.json"),
    "fsync of the manifest": lambda seen: without_syncs(seen, "checkpoints/step-00000002/manifest.json"),
    "fsync of the folder": lambda seen: without_syncs(seen, "checkpoints/step-00000002"),
    "fsync of a folder in it": lambda seen: without_syncs(seen, "checkpoints/step-00000002/sub"),
    "fsync of the parent": lambda seen: without_syncs(seen, "checkpoints"),
    "rename": lambda seen: written_in_place(seen, "checkpoints", "step-00000002"),
    "pruning last": pruned_before_rename,
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("save", [of_one, of_two])
def test_faulty_saves_are_detected(name: str, save: Callable[[int], Save], tmp_path: Path) -> None:
    recording, after = record(tmp_path / "run", [of_one(1)], [save(2)])
    states = distinct(recording, MUTANTS[name](recording))
    assert any(fault(tmp_path / "state", kept, tree, after) for kept, tree in states)


# --- a single file ----------------------------------------------------------------------------------------------

OLD, NEW = b"old content", b"new content, of another length"


def record_write(folder: Path) -> Recording:
    folder.mkdir()
    write_atomically(folder / "file", OLD)
    with recorded(folder) as recording:
        write_atomically(folder / "file", NEW)
        recording.promise()
    return recording


def wrong(recording: Recording, events: Sequence[Event]) -> list[Tree]:
    return [tree for kept, tree in distinct(recording, events) if tree.get("file") not in (OLD, NEW)[kept:]]


def test_atomic_write_is_old_or_new_after_a_crash(tmp_path: Path) -> None:
    recording = record_write(tmp_path / "folder")
    assert wrong(recording, recording.events) == []
    in_place: list[Event] = [Write(recording.names[ROOT]["file"], NEW), *recording.events[-2:]]
    for mutant in (without_syncs(recording, "file"), without_syncs(recording, ""), in_place):
        assert wrong(recording, mutant)
