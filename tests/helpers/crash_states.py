"""Contents that a disk may have after a power failure, derived from the observed file operations of a piece of code.

Operations are observed, not intercepted: the folder is read around each call that orders them (fsync, rename, ...),
so files written by a library in Rust count as well. Files and folders are identified by numbers.

The model is the weakest that POSIX allows. Content of a file is on the disk for sure once the file was synced;
until then it may be there, in part, as zeros or not at all. A created, moved or removed name is on the disk for sure
once its folder was synced; until then each such change may have happened or not, in any order.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = 0  # the number of the folder that is watched
ORDERING = ("fsync", "mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir")


@dataclass(frozen=True)
class Write:
    """All of a file's content."""

    file: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    """A sync of a file's content or a folder's names."""

    node: int


@dataclass(frozen=True)
class Names:
    """One change of names, all or nothing: (folder, name, what it means from now on; None: nothing)."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Promise:
    """The code has returned: what it has done must be there from now on."""


Event = Write | Sync | Names | Promise
Tree = Mapping[str, Any]  # name -> bytes, or the tree of a folder


@dataclass
class Recording:
    """The start, all on disk, and what happened then."""

    names: dict[int, dict[str, int]]  # of each folder
    contents: dict[int, bytes]
    events: list[Event] = field(default_factory=list)

    def promise(self) -> None:
        self.events.append(Promise())

    def node(self, path: str) -> int:
        """The number of what came to have this path last."""
        where = ROOT
        for name in Path(path).parts:
            named = [change for event in self.events if isinstance(event, Names) for change in event.changes]
            known = {what: node for folder, what, node in named if folder == where and node is not None}
            where = {**self.names.get(where, {}), **known}[name]
        return where


@contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Record what happens in `folder` during the body."""
    eye = _Eye(folder)
    recording = Recording({n: dict(v) for n, v in eye.names.items()}, dict(eye.contents), eye.events)
    with pytest.MonkeyPatch.context() as patch:
        for name in ORDERING:
            patch.setattr(os, name, eye.around(getattr(os, name), syncs=name == "fsync"))
        yield recording
        eye.look()


class _Eye:
    """Sees what has changed in a folder since it last looked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.numbers: dict[int, int] = {folder.stat().st_ino: ROOT}  # of what is there, by inode
        self.names: dict[int, dict[str, int]] = {ROOT: {}}
        self.contents: dict[int, bytes] = {}
        self.events: list[Event] = []
        self.fresh = itertools.count(1)
        self.look()
        self.events.clear()

    def around(self, call: Callable[..., Any], syncs: bool) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            self.look()
            result = call(*args, **kwargs)
            if syncs and (node := self.numbers.get(os.fstat(args[0]).st_ino)) is not None:
                self.events.append(Sync(node))
            self.look()
            return result

        return observed

    def look(self) -> None:
        result: dict[int, dict[str, int]] = {}
        contents: dict[int, bytes] = {}
        seen: dict[int, int] = {}

        def visit(path: Path, number: int) -> None:
            result[number] = {}
            for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                inode = entry.inode()
                child = seen[inode] = self.numbers.get(inode) or next(self.fresh)
                result[number][entry.name] = child
                if entry.is_dir(follow_symlinks=False):
                    visit(Path(entry.path), child)
                else:
                    contents[child] = Path(entry.path).read_bytes()

        visit(self.folder, ROOT)
        gone, come = [], []
        for number in {**self.names, **result}:
            old, new = self.names.get(number, {}), result.get(number, {})
            gone += [(number, name, old[name]) for name in old if new.get(name) != old[name] and number in result]
            come += [(number, name, new[name]) for name in new if new[name] != old.get(name)]
        for folder, name, node in come:
            left = [(where, what, None) for where, what, before in gone if before == node]
            self.events.append(Names((*left, (folder, name, node))))
        moved = {node for _, _, node in come}
        overwritten = {(folder, name) for folder, name, _ in come}
        for folder, name, node in gone:
            if node not in moved and (folder, name) not in overwritten:
                self.events.append(Names(((folder, name, None),)))
        for file, content in contents.items():
            if content != self.contents.get(file):
                self.events.append(Write(file, content))
        root = {self.folder.stat().st_ino: ROOT}
        self.numbers, self.names, self.contents = {**seen, **root}, result, contents


# --- what may be left of it -----------------------------------------------------------------------------------


def crash_states(recording: Recording, events: Sequence[Event], draw: random.Random, limit: int) -> Iterator[Tree]:
    """The disks that a power failure after `events` may leave: all of them, or a sample of `limit`."""
    changes = [(at, event) for at, event in enumerate(events) if isinstance(event, Names)]
    synced = {event.node: at for at, event in enumerate(events) if isinstance(event, Sync)}
    sure = [all(synced.get(folder, -1) > at for folder, _, _ in event.changes) for at, event in changes]
    happened = [(True,) if known else (True, False) for known in sure]
    files = sorted(recording.contents.keys() | {event.file for event in recording.events if isinstance(event, Write)})
    choices: list[Sequence[Any]] = [*happened, *(_contents(file, recording, events) for file in files)]
    for choice in _combinations(choices, draw, limit):
        names = {number: dict(entries) for number, entries in recording.names.items()}
        for done, (_, event) in zip(choice, changes, strict=False):
            for folder, name, node in event.changes if done else ():
                if node is None:
                    names.setdefault(folder, {}).pop(name, None)
                else:
                    names.setdefault(folder, {})[name] = node
        yield _tree(ROOT, names, dict(zip(files, choice[len(changes) :], strict=True)))


def _contents(file: int, recording: Recording, events: Sequence[Event]) -> list[bytes]:
    """Return the possible contents of a file: the last synced one, or any later state of its writing."""
    durable, later = recording.contents.get(file, b""), []
    current = durable
    for event in events:
        if isinstance(event, Write) and event.file == file:
            current = event.content
            later += [current, current[: len(current) // 2], bytes(len(current)), b""]
        elif isinstance(event, Sync) and event.node == file:
            durable, later = current, []
    return list(dict.fromkeys([durable, *later]))


def _combinations(choices: Sequence[Sequence[Any]], draw: random.Random, limit: int) -> Iterator[tuple[Any, ...]]:
    if math.prod(map(len, choices)) <= limit:
        yield from itertools.product(*choices)
        return
    yield tuple(options[0] for options in choices)
    for _ in range(limit - 1):
        yield tuple(draw.choice(options) for options in choices)


def _tree(folder: int, names: Mapping[int, Mapping[str, int]], contents: Mapping[int, bytes]) -> Tree:
    return {
        name: contents[node] if node in contents else _tree(node, names, contents)
        for name, node in sorted(names.get(folder, {}).items())
    }


def write_tree(folder: Path, tree: Tree) -> None:
    folder.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (folder / name).write_bytes(inner)
        else:
            write_tree(folder / name, inner)
