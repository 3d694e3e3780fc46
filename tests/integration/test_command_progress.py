"""Commands that may take long tell their progress in plain lines where there is no terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmldlm import cli, train
from mmldlm.utils.progress import Progress
from tests.helpers.lgdlm_folders import make_samples, write_pairs
from tests.helpers.tiny_config import TINY

AND = "\n"


@pytest.fixture(scope="module")
def folder(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps in `run`, its config, and data of LGDLM in `old`."""
    folder = tmp_path_factory.mktemp("progress")
    (folder / "config.yaml").write_text(TINY.format(run=folder / "run", store=tiny_store))
    assert train.main([str(folder / "config.yaml"), "train.steps=2"]) == 0
    write_pairs(folder / "old", make_samples(folder))
    return folder


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        (
            "train {folder}/config.yaml",
            rf"verifying and reading the checkpoint: \d+s{AND}verifying the data: (\d+) of \1 shards and files, \d+s",
        ),
        ("sample {folder}/run --mode joint --count 2", rf"generating: \d+s{AND}loading the run: \d+s"),
        ("evaluate {folder}/run --samples 8 --texts 2 --times 2", r".*: \d+ of \d+ .*, \d+s"),
        ("verify {folder}/run", r"verifying: (\d) of \1 checkpoints, \d+s"),
        ("checkpoints diff {folder}/run {folder}/run", r"verifying and comparing: \d+s"),
        ("compare {folder}/run --figures {folder}/figures", r"drawing figures: \d+s"),
        ("data verify {store}", r"verifying: (\d+) of \1 shards and files, \d+s"),
        ("convert lgdlm {folder}/old {folder}/converted", r"converting: 120 samples, \d+s"),
    ],
)
def test_plain_lines_without_a_terminal(
    command: str,
    lines: str,
    folder: Path,
    tiny_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command.startswith("convert"):
        pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")
    # Without waiting between two lines, and with a watch that does not wait for a second either.
    monkeypatch.setattr(Progress.__init__, "__defaults__", (True, 0.0))
    monkeypatch.setattr("mmldlm.utils.progress._MIN_POLL_S", 0.001)
    monkeypatch.setattr("mmldlm.evaluate.run.__defaults__", (None, 0.0))
    assert cli.main(command.format(folder=folder, store=tiny_store).split()) == 0
    printed = capsys.readouterr().err.splitlines()
    for line in lines.split(AND):
        assert any(re.fullmatch(line, each) for each in printed), printed
