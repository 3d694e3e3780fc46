"""`mmldlm train --check`: the start of a run, which reports what the ranks see and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.errors import ExitCode
from tests.helpers.forked_runs import ForkedRuns


def check(forked: ForkedRuns, log: Path, config: Path, *per_rank: str) -> tuple[list[int], str]:
    """Check two ranks of DDP, of which the last one has the settings `per_rank`; return exit codes and output."""
    script = log.with_suffix(".py")
    script.write_text(
        "import os, sys\n"
        "from mmldlm import train\n"
        f"own = {list(per_rank)!r} if os.environ['RANK'] == '1' else []\n"
        "code = train.main([*sys.argv[1:], *own])\n"
        "sys.stdout.flush()\n"
        "os._exit(code)\n"
    )
    pids = forked.start("ddp", [config, "--check"], 2, log, str(script))
    codes = forked.wait(pids)
    return [codes[pid] for pid in pids], log.read_text()


def test_equal_ranks_are_ready(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    codes, out = check(forked, tmp_path / "log", tiny_config)
    assert codes == [0, 0] and out.count("\nready\n") == 1, out
    assert "started ddp (ranks: 2, nodes: 1)" in out and "all-reduce, gloo: " in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("optim.lr=1e-3", ExitCode.CONFIG, "rank 1: config.optim.lr is 0.001, 0.003 on rank 0"),
        ("data.path=/nowhere", ExitCode.DATA, "/nowhere: not a data store"),
    ],
)
def test_ranks_that_differ_are_named(
    setting: str, code: int, message: str, forked: ForkedRuns, tiny_config: Path, tmp_path: Path
) -> None:
    codes, out = check(forked, tmp_path / "log", tiny_config, setting)
    assert codes == [code, code] and message in out and "\nready" not in out


def test_one_run_folder_for_all_ranks(forked: ForkedRuns, tiny_config: Path, tmp_path: Path) -> None:
    codes, out = check(forked, tmp_path / "log", tiny_config, f"run.dir={tmp_path / 'other'}")
    assert codes == [ExitCode.CONFIG] * 2 and "config.run.dir" in out


def test_one_process_without_a_launcher(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert train.main([str(tiny_config), "--check", f"run.dir={tmp_path / 'new/run'}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("started single (ranks: 1, nodes: 1)\n") and out.endswith("ready\n")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    assert train.main([str(tiny_config), "--check", f"run.dir={tmp_path / 'file/run'}"]) == ExitCode.STORAGE
    assert f"run.dir: cannot write {tmp_path / 'file/run'}: Not a directory" in capsys.readouterr().err
