"""`Mirror`: copies of checkpoints on another disk and in a store, retention, damage, and whose they are."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import fsspec
import pytest

from mmldlm.checkpoint.manifest import MANIFEST, Checkpoint, verify_checkpoint
from mmldlm.checkpoint.mirror import Mirror
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.errors import ConfigError, DataError, StorageError
from tests.helpers.save_checkpoint import save_checkpoint
from tests.helpers.waiting import wait_until

FILES = ("config.yaml", "metrics.jsonl", "data")


class Run:
    """A run folder whose checkpoints have a mirror at `place`."""

    def __init__(self, folder: Path, place: str, retention: Retention | None = None, name: str = "first"):
        self.folder, self.records = folder, list[tuple[int, Mapping[str, Any]]]()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for file in ("config.yaml", "data/manifest.json", "run.lock"):
            (folder / file).write_text(name)
        self.metrics = folder / "metrics.jsonl"
        self.name = name
        self.store = CheckpointStore(folder / "checkpoints", retention or Retention(last=2))
        self.mirror = Mirror(place, self.store, FILES)

    def save(self, *steps: int, loss: Callable[[int], float | None] = lambda step: None) -> None:
        """Save checkpoints, and copy each of them."""
        for step in steps:
            with self.metrics.open("a") as file:
                file.write(f'{{"run": "{self.name}", "step": {step}}}\n')
            save_checkpoint(self.store, step, {"model.bin": b"m" * step}, {"validation_loss": loss(step)})
            self.copy(step)

    def copy(self, step: int) -> None:
        self.mirror.request(step)
        while self.mirror.busy:
            self.mirror.wait(time.monotonic() + 60, lambda *record: self.records.append(record))

    def fetch(self, local: Checkpoint | None = None, is_chosen: bool = False) -> Checkpoint | None:
        return self.mirror.fetch_newer(local, is_chosen)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror") if request.param == "disk" else f"memory://{tmp_path.name}"


@pytest.fixture
def run(tmp_path: Path, place: str) -> Run:
    return Run(tmp_path / "run", place)


def copies(run: Run) -> list[str]:
    """The names of the mirror's folders."""
    system, root = fsspec.core.url_to_fs(run.mirror.url)
    return sorted(path.rpartition("/")[2] for path in system.ls(root, detail=False))


def damage(run: Run, step: int, name: str = "model.bin") -> None:
    system, root = fsspec.core.url_to_fs(run.mirror.url)
    path = f"{root}/step-{step:08}/checkpoints/step-{step:08}/{name}"
    system.pipe_file(path, system.cat_file(path)[:-1] + b"!")


def test_an_empty_disk_gets_the_newest_checkpoint_and_the_files_of_its_run(
    tmp_path: Path, place: str, run: Run
) -> None:
    run.save(1, 2, 3)
    run.metrics.open("a").write("since\n")
    assert copies(run) == ["step-00000002", "step-00000003"], "as on disk"
    assert [(step, values.keys()) for step, values in run.records] == [
        (step, {"path", "bytes", "seconds"}) for step in (1, 2, 3)
    ]
    shutil.rmtree(run.folder)
    (run.folder / ".checkpoints.tmp").mkdir(parents=True)  # of a fetch that was killed
    (run.folder / ".checkpoints.tmp" / "rest").touch()
    fetched = CheckpointStore(run.folder / "checkpoints", Retention()), run.fetch()
    assert fetched[1] == fetched[0].newest() and fetched[1] is not None and fetched[1].step == 3
    assert run.metrics.read_text().count("\n") == 3 and (run.folder / "data/manifest.json").read_text() == "first"
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoints", *sorted(FILES)]
    assert run.fetch(fetched[1]) is fetched[1], "nothing is newer"
    run.save(4)
    assert copies(run) == ["step-00000003", "step-00000004"]


def test_retention_is_over_all_that_the_mirror_has(tmp_path: Path, place: str) -> None:
    policy = Retention(last=1, every=4, best=1)
    losses = {1: 1.0, 2: 0.5, 3: 0.7, 4: 0.9, 5: None, 6: 0.6}
    run = Run(tmp_path / "run", place, policy)
    run.save(1, 2, 3, 4, 5, loss=losses.get)
    assert copies(run) == [f"step-{step:08}" for step in (2, 4, 5)]
    shutil.rmtree(run.store.folder)  # another disk
    run.save(6, loss=losses.get)
    assert copies(run) == [f"step-{step:08}" for step in (2, 4, 6)], "2 is the best, 4 a multiple"


def test_a_copy_without_its_manifest_does_not_count(run: Run, tmp_path: Path) -> None:
    run.save(1, 2)
    system, root = fsspec.core.url_to_fs(run.mirror.url)
    system.rm_file(f"{root}/step-00000002/checkpoints/step-00000002/{MANIFEST}")
    system.pipe_file(f"{root}/step-00000002/rest", b"")
    other = Run(tmp_path / "other/run", run.mirror.url.rpartition("/")[0])
    fetched = other.fetch()
    assert fetched is not None and fetched.step == 1
    run.fetch(run.store.newest())  # started again, since the other one has started meanwhile
    run.copy(2)
    assert not system.exists(f"{root}/step-00000002/rest"), "what is left of a copy goes before the next"
    assert system.exists(f"{root}/step-00000002/checkpoints/step-00000002/{MANIFEST}")


@pytest.mark.parametrize("name", ["model.bin", MANIFEST])
def test_a_damaged_copy_gives_way_to_the_one_before(run: Run, name: str, caplog: pytest.LogCaptureFixture) -> None:
    run.save(1, 2)
    damage(run, 2, name)
    shutil.rmtree(run.store.folder)
    fetched = run.fetch()
    assert fetched is not None and fetched.step == 1 and verify_checkpoint(fetched.path) == fetched
    assert [name in record.message for record in caplog.records] == [True]
    run.save(2)
    shutil.rmtree(run.store.folder)
    assert run.fetch().step == 2, "it was copied again"  # type: ignore[union-attr]


def test_only_the_user_starts_over_if_all_copies_are_damaged(run: Run) -> None:
    run.save(1, 2)
    damage(run, 1)
    damage(run, 2)
    local = run.store.newest()
    shutil.rmtree(run.store.folder)
    with pytest.raises(DataError, match=r"step-00000002/model\.bin.*SHA-256"):
        run.fetch()
    assert run.fetch(local) is local and len(copies(run)) == 2


@pytest.mark.parametrize("name", ["../stolen", "data/../../stolen", "run.lock", "elsewhere"])
def test_no_file_is_written_outside_of_what_a_copy_has(tmp_path: Path, run: Run, name: str) -> None:
    run.save(1)

    class Lying(type(run.mirror._system)):  # type: ignore[misc]  # a store may have any names
        cachable = False

        def find(self, path: str, **options: Any) -> list[str]:
            return [*super().find(path, **options), f"{path}/{name}"]

        def get_file(self, source: str, target: str, **options: Any) -> None:
            if source.endswith(name):
                Path(target).write_bytes(b"stolen")
            else:
                super().get_file(source, target, **options)

    run.mirror._place = Lying(), run.mirror._place[1]
    shutil.rmtree(run.store.folder)
    if ".." in name and name.startswith("data"):
        with pytest.raises(DataError, match="stolen"):
            run.fetch()
    else:
        assert run.fetch() is not None
    assert (run.folder / "run.lock").read_text() == "first"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"stolen"] == []


def test_copies_of_another_run_or_a_later_step_are_refused(tmp_path: Path, run: Run, place: str) -> None:
    run.save(1, 2)
    before, local = copies(run), verify_checkpoint(run.store.by_step()[1])
    for chosen, found in ((None, 0), (local, 1)):
        with pytest.raises(ConfigError, match=rf"checkpoint\.mirror: .*step 2.* {found}\b"):
            run.fetch(chosen, is_chosen=True)
    other = Run(tmp_path / "b/run", place, name="second")
    save_checkpoint(other.store, 5, {}, {})
    other.metrics.write_text('{"run": "second"}\n')
    with pytest.raises(ConfigError, match=r"another run.*run\.dir"):
        other.fetch(other.store.newest())
    other.copy(5)
    assert [(step, "another run" in values["error"]) for step, values in other.records] == [(5, True)]
    run.store.set_aside_after(1)
    run.copy(1)
    assert "step 2" in run.records[-1][1]["error"]
    assert copies(run) == before
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror.*run\.dir"):
        Run(tmp_path / "run", str(tmp_path))


def test_a_fault_is_told_and_the_next_checkpoint_is_the_next_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mirror").touch()  # no folder
    run = Run(tmp_path / "run", str(tmp_path / "mirror"))
    with pytest.raises(StorageError, match=r"checkpoint\.mirror: .*no-such-system://x"):
        Run(tmp_path / "run", "no-such-system://x").fetch()
    run.save(1)
    assert run.records[0][0] == 1 and str(tmp_path / "mirror") in run.records[0][1]["error"]
    local = run.store.newest()
    other = Run(tmp_path / "run", "no-such-system://x")
    assert other.fetch(local) is local and "cannot look for newer checkpoints" in caplog.text
    (tmp_path / "mirror").unlink()
    run.save(2)
    assert "error" not in run.records[1][1] and copies(run) == ["step-00000001", "step-00000002"]


def test_the_end_waits_until_the_deadline_only(run: Run) -> None:
    """What had not arrived by then never gets a manifest."""
    started, end = Event(), Event()

    class Slow(type(run.mirror._system)):  # type: ignore[misc]
        cachable = False

        def put_file(self, source: str, target: str, **options: Any) -> None:
            started.set()
            assert end.wait(60)
            super().put_file(source, target, **options)

    run.save(1)
    run.mirror._place = Slow(), run.mirror._place[1]
    save_checkpoint(run.store, 2, {"a": b"a", "b": b"b"}, {})
    run.mirror.request(2)
    run.mirror.wait(time.monotonic() + 60, lambda *record: run.records.append(record))
    assert started.wait(60) and run.mirror.busy and len(run.records) == 1
    run.mirror.wait(0.0, lambda *record: run.records.append(record))
    assert not run.mirror.busy and run.records[1] == (
        2,
        {"error": f"{run.mirror.url}: not within checkpoint.mirror_wait_s"},
    )
    end.set()
    wait_until(lambda: not any(thread.name == "mirror" for thread in enumerate_threads()), "the end of the thread")
    assert run.mirror._copies(newest=2) == [1]


def test_a_second_training_with_one_mirror_is_noticed(tmp_path: Path, place: str) -> None:
    """Two copies of a run folder: the one that started last has the mirror, and its own step in it."""
    first, second = (Run(tmp_path / name / "run", place) for name in "ab")
    for run in (first, second):
        run.fetch()
    second.save(2)
    first.metrics.write_bytes(second.metrics.read_bytes())
    first.save(2, loss=lambda step: 1.0)
    assert "error" not in second.records[-1][1] and "another training" in first.records[-1][1]["error"]
    again = Run(tmp_path / "a" / "run", place)  # the same command once more
    again.fetch(again.store.newest())
    again.copy(2)
    manifest = (tmp_path / "a/run/checkpoints/step-00000002" / MANIFEST).read_bytes()
    system, root = fsspec.core.url_to_fs(first.mirror.url)
    assert system.cat_file(f"{root}/step-00000002/checkpoints/step-00000002/{MANIFEST}") == manifest
    assert "error" not in again.records[-1][1]
