"""The commands of docs/checkpoints.md about verify, explain and rewind, as printed, on one small run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mmldlm import cli
from tests.helpers.paths import ROOT
from tests.helpers.spikes import SPIKY, drawn_at, spoiled_copy

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    text = "\n".join(BLOCK.findall((ROOT / "docs" / page).read_text()))
    return [shlex.split(line) for line in text.splitlines() if line]


@pytest.mark.slow  # as of docs/howto; what the commands do: tests/tools/test_spikes.py and test_verify.py
def test_commands_of_the_page(
    tmp_path: Path, tiny_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = drawn_at(tiny_store, 27)[3]
    (tmp_path / "data").mkdir()
    spoiled_copy(tiny_store, tmp_path / "data", [sample])
    (tmp_path / "configs").mkdir()
    config = SPIKY.format(run="runs/own", store="data/own")
    (tmp_path / "configs/own.yaml").write_text(config.replace("every_steps: 10", "every_steps: 8"))
    # The page's first step with a spike is the sample's, and the run has it in its first start.
    assert cli.main(["train", "configs/own.yaml"]) == 0
    said = []
    for program, *arguments in commands("checkpoints.md"):
        assert program == ".venv/bin/mmldlm"
        capsys.readouterr()
        assert cli.main([argument.replace("own:44", f"own:{sample}") for argument in arguments]) == 0
        said.append(capsys.readouterr().out)
    verified, segment, everything, explained, rewound, _, compared = said
    assert "runs/own: verified" in verified and "steps 1 to 8: bitwise the same" in segment
    assert everything.count("bitwise the same") == 5
    assert f"own:{sample}: " in explained and "they caused it" in explained and "4 replays" in explained
    assert "continues from step 24" in rewound and "left by mmldlm rewind" in compared
    assert (tmp_path / "runs/own/branches/01-before-27").is_dir()
