"""`mmldlm verify`: honest runs pass, whatever happened to them, and changed ones do not."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mmldlm import cli, train
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.errors import MmldlmError
from mmldlm.tools.replay import RecordedRun, advance, replay
from mmldlm.tools.spikes import explain_main, rewind_main
from tests.helpers.engine_runs import records, wait_for_step
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.tampering import FOUND_BY_HASHES, FOUND_BY_RECOMPUTATION, read_records, write_records
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error

ENGINES = {"single": 1, "ddp": 2, "fsdp2": 4, "zero2": 2, "zero3": 4}
SCRIPT = str(ROOT / "mmldlm/tools/verify.py")
Copies = Callable[[], tuple[Path, Path]]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Copies:
    """Copies of a run of 8 steps with checkpoints at 4, where it was resumed, and 8, and of its store."""
    folder = tmp_path_factory.mktemp("honest")
    run, store, number = folder / "run", folder / "store", 0
    shutil.copytree(tiny_store, store)
    (folder / "config.yaml").write_text(TINY.format(run=run, store=store))
    for steps in (4, 8):
        assert train.main([str(folder / "config.yaml"), f"train.steps={steps}", "log.every=2"]) == 0

    def copy() -> tuple[Path, Path]:
        # The paths in records and config stay those of the first copy, so it is put in their place.
        nonlocal number
        original = folder / "original"
        if not original.exists():
            original.mkdir()
            for path in (run, store):
                shutil.copytree(path, original / path.name)
        for path in (run, store):
            shutil.rmtree(path)
            shutil.copytree(original / path.name, path)
        return run, store

    return copy


def verified(capsys: pytest.CaptureFixture[str], run: Path, *options: object, code: int = 0) -> str:
    assert cli.main(["verify", str(run), *map(str, options)]) == code, capsys.readouterr().out
    return capsys.readouterr().out


def test_honest_run(copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = copies()
    assert "2 checkpoints" in verified(capsys, run)
    output = verified(capsys, run, "--all")
    assert "steps 1 to 4: bitwise the same\nsteps 5 to 8: bitwise the same" in output
    # Only the segment that has these steps; without its first checkpoint it begins at the one before.
    assert "steps 5 to 8" in (output := verified(capsys, run, "--from", 5)) and "1 to 4" not in output
    assert "steps 1 to 4" in (output := verified(capsys, run, "--to", 3)) and "5 to 8" not in output
    shutil.rmtree(run / "checkpoints/step-00000004")
    output = verified(capsys, run, "--from", 6, code=65)
    assert "steps 1 to 4: bitwise the same\nsteps 5 to 8: bitwise the same" in output
    assert output.count("PROBLEM") == 1 and "PROBLEM checkpoint of step 4: is missing" in output
    run, _ = copies()
    # Other micro-batches round other sums.
    assert "the same within" in verified(capsys, run, "--all", "train.micro_batch_size=2")


def test_a_checkpoint_alone(copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = copies()
    folder = run / "checkpoints/step-00000008"
    assert verified(capsys, folder).endswith("step-00000008: verified\n")
    assert_user_error((cli.main(["verify", str(folder), "--all"]), capsys.readouterr().err), 2, "expected a run folder")
    assert cli.main(["checkpoints", "verify", str(run)]) == 2 and "mmldlm verify" in capsys.readouterr().err
    (folder / "added").touch()
    assert "not in its manifest, added" in verified(capsys, folder, code=65)
    (folder / "model.safetensors").write_bytes(b"")
    assert_user_error((cli.main(["verify", str(folder)]), capsys.readouterr().err), 65, "model.safetensors")


@pytest.mark.parametrize("name", FOUND_BY_HASHES)
def test_hashes_find(name: str, copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    run, store = copies()
    expected = FOUND_BY_HASHES[name](run, store, random.Random(name))
    assert expected in verified(capsys, run, code=65)


@pytest.mark.parametrize("name", FOUND_BY_RECOMPUTATION)
def test_recomputation_finds(name: str, copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    run, store = copies()
    expected = FOUND_BY_RECOMPUTATION[name](run, store, random.Random(name))
    verified(capsys, run)  # the hashes are consistent
    assert expected in verified(capsys, run, "--all", code=65)


def test_a_kill_between_a_save_and_its_record(copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = copies()
    write_records(
        run, [one for one in read_records(run) if one["step"] < 8 or one["kind"] not in ("checkpoint", "end")]
    )
    (run / "exit.json").unlink()
    (run / "run.lock").write_text("{}")
    assert "not checked: the checkpoint of step 8" in verified(capsys, run)


@pytest.mark.parametrize(
    "settings",
    [
        ["log.tensorboard=true", "validation.quality_every=3", "validation.quality_samples=4"],
        ["checkpoint.keep_last=1", "checkpoint.keep_every=3", "checkpoint.keep_best=1", "log.every=3"],
    ],
)
def test_honest_runs_with_other_settings(
    settings: list[str], tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped, resumed, rewound and stopped again; with figures, which measure more, or few checkpoints."""
    command, run = [str(tiny_config), "validation.every=2", "checkpoint.every_steps=2", *settings], tmp_path / "run"
    for stop_at in (5, 7):
        assert train.main([*command, "--stop-at", str(stop_at)]) == 75
        assert "not checked: whether the run continued after" in verified(capsys, run)
    assert rewind_main([str(run), "--before", "6"]) == 0
    verified(capsys, run)
    assert train.main([*command, "--stop-at", "6"]) == 75
    output = verified(capsys, run, "--all")
    assert output.count("bitwise the same") == output.count("\nsteps ")
    assert "not checked: which older checkpoints" in output


@pytest.mark.parametrize("key", ["data_manifest", "versions", "resumed_from", "config", "ranks", "step"])
def test_damaged_starts_are_problems(key: str, copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of another type, and keys that are missing, in either start; never a traceback."""
    values = (5, [], {"code": 5}, {"path": 5})
    for place, value in (*itertools.product((0, -1), (None,)), *zip(itertools.cycle((0, -1)), values)):
        run, _ = copies()
        records = read_records(run)
        start = [record for record in records if record["kind"] in ("start", "resume")][place]
        start[key] = value
        if value is None:
            del start[key]
        write_records(run, records)
        code = cli.main(["verify", str(run), *(["--all"] if value is None else [])])
        assert value != {"path": 5} or code in (64, 65)
        with contextlib.suppress(MmldlmError):
            explain_main([str(run), "2"])
        capsys.readouterr()


@pytest.mark.parametrize("steps", [(7, 3), (0, 0), (9, 9), (1, 9), (300, 400), (-2, 4)])
def test_steps_that_the_run_does_not_have(
    steps: tuple[int, int], copies: Copies, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = copies()
    code = cli.main(["verify", str(run), "--from", str(steps[0]), "--to", str(steps[1])])
    assert_user_error((code, capsys.readouterr().err), 2, f"--from {steps[0]} --to {steps[1]}", "from 1 to 8")


def test_scratch_folders_are_new_and_only_they_are_removed(
    copies: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = copies()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    folders = [tmp_path / "tmp", tmp_path / "own"]
    # What was in the way of the name that all replays of a run once had.
    once = f"mmldlm-{hashlib.sha256(str(run.absolute()).encode()).hexdigest()}"
    for folder in folders:
        (folder / once).mkdir(parents=True)
        (folder / once / "precious").touch()
    recorded = RecordedRun.read(run)
    launch = read_launcher_env({})
    # A replay is going on while another one comes and goes.
    stretches = replay(recorded, 1, 4, launch)
    trainer, _, stop, _ = next(stretches)
    # What they print is swallowed by the replay that is going on.
    assert cli.main(["verify", str(run), "--to", "3", "--scratch", str(folders[1])]) == 0
    assert cli.main(["verify", str(run), "--to", "3"]) == 0
    advance(trainer, stop)
    trainer.save(wait=True)
    assert trainer.run_dir.parent == folders[0] and not (trainer.run_dir / "tensorboard").exists()
    assert not list(stretches)
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [[once]] * 2
    assert all((folder / once / "precious").exists() for folder in folders)
    capsys.readouterr()
    code = cli.main(["verify", str(run), "--all", "--scratch", str(tmp_path / "none")])
    assert_user_error((code, capsys.readouterr().err), 74, "--scratch", "none")


@pytest.mark.slow
def test_hundreds_of_tamperings(copies: Copies, capsys: pytest.CaptureFixture[str]) -> None:
    found = 0
    for seed in range(5):
        for name, tamper in FOUND_BY_HASHES.items():
            run, store = copies()
            expected = tamper(run, store, random.Random(f"{name} {seed}"))
            assert expected in verified(capsys, run, code=65), name
            found += 1
        for name, tamper in FOUND_BY_RECOMPUTATION.items():
            run, store = copies()
            expected = tamper(run, store, random.Random(f"{name} {seed}"))
            verified(capsys, run)
            assert expected in verified(capsys, run, "--all", code=65), name
            found += 1
    assert found == 5 * (len(FOUND_BY_HASHES) + len(FOUND_BY_RECOMPUTATION))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_honest_runs_of_all_engines(
    engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is killed under one engine and resumed under another, with other ranks and another end."""
    folder, log, names = tmp_path / "run", tmp_path / "log", list(ENGINES)
    other = names[names.index(engine) - 1]
    settings = [parity_config, f"run.dir={folder}", "train.micro_batch_size=1", "checkpoint.every_steps=4"]
    pids = forked.start(engine, [*settings, "train.steps=18", "log.every=3"], ENGINES[engine], log)
    wait_for_step(folder, 9, log, lambda: forked.wait(pids, 0))
    forked.kill(pids)
    assert set(forked.wait(pids).values()) == {-signal.SIGKILL}
    resumed_at = max(records(folder))  # before the resume
    forked.succeed(other, folder, ENGINES[other], *settings, "train.steps=20", "log.every=4")
    starts = [record["step"] for record in read_records(folder) if record["kind"] in ("start", "resume")]
    assert len(starts) == 2 and 4 <= starts[1] <= resumed_at
    # In one process, from the folder and the store alone.
    print(engine, other, starts, verified(capsys, folder, "--all"))
    # Under the engine that computed the last steps, every bit is the same.
    pids = forked.start(other, [folder, "--all"], ENGINES[other], tmp_path / "verify.log", SCRIPT)
    codes = forked.wait(pids)
    output = (tmp_path / "verify.log").read_text()
    print(output[-800:])
    assert [codes.get(pid) for pid in pids] == [0] * ENGINES[other], output[-3000:]
    assert "steps 17 to 20: bitwise the same" in output
