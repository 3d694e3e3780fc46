"""`mmldlm sample --watch`: intermediate texts, in a terminal and without one."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from mmldlm import cli
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.inference import encode_texts, sample
from mmldlm.inference.live_view import LiveView
from mmldlm.run.load import LoadedRun

pytestmark = pytest.mark.quick

TEXT = "The rose of soil and water."
_END = "\x1e"  # behind all that was written; no watcher writes it


def test_lines_show_every_step(short_run: LoadedRun) -> None:
    printed = io.StringIO()
    watcher = LiveView(short_run.tokenizer, printed)
    latents, config = encode_texts(short_run, [TEXT]), SamplingConfig(steps=4, tried_lengths=1)
    made, texts = sample(short_run, "l2t", config, 0, latents, length=9, count=2, callback=watcher)
    watcher.close()
    lines = printed.getvalue().splitlines()
    assert [line[:8] for line in lines] == [f"t {t:.3f} " for t in (1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0, 0)]
    assert [line[9:12] for line in lines] == ["[1]", "[2]"] * 5
    assert lines[0].endswith(f"[1] {'_' * 9}")  # what has no encoding is taken for ASCII
    masks = [line.count("_") for line in lines[::2]]
    assert masks == sorted(masks, reverse=True) and 0 < masks[2] < 9 and masks[-1] == 0
    assert sorted(line[13:] for line in lines[-2:]) == sorted(watcher.text(ids) for ids in made.split())
    assert sample(short_run, "l2t", config, 0, latents, length=9, count=2)[1] == texts  # watching changes nothing


def test_command_ends_with_the_same_output_as_without_watch(
    short_run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in (["--text", TEXT], ["--mode", "joint"], ["--interpolate", TEXT, TEXT], ["--edit", "The [rose]."]):
        arguments = ["sample", str(short_run_dir), *mode, "sampling.steps=2"]
        assert cli.main(arguments) == 0
        unwatched = capsys.readouterr().out
        assert cli.main([*arguments, "--watch"]) == 0
        watched = capsys.readouterr().out
        assert watched.endswith(unwatched) and watched.startswith("t 1.000  ")


class Terminal:
    """A pseudo-terminal, and what its screen shows after all that was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))
        self._reader, writer = os.openpty()
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        self.lines, self.row, self.rows = [""], 0, rows

    def look(self) -> list[str]:
        """Full lines on the screen; AssertionError where one went up beyond the top."""
        self.stream.write(_END)
        self.stream.flush()
        content = b""
        while not content.endswith(_END.encode()):  # a terminal hands on what it gets in parts, and later
            content += os.read(self._reader, 1 << 16)
        written = content.decode().removesuffix(_END)
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\n|\r|[^\n\r\x1b]+", written):
            if part == "\n":
                self.row += 1
                self.lines += [""] * (self.row == len(self.lines))
            elif part == "\x1b[1A":
                self.row -= 1
                assert self.row >= 0 and len(self.lines) - self.row <= self.rows, "beyond the top of the screen"
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and not re.fullmatch(r"\x1b\[(\?25[lh]|[0-9;]*m)", part):  # cursor and colors
                assert not part.startswith("\x1b"), part
                self.lines[self.row] += part
        return [line.rstrip() for line in self.lines if line.strip()]


def test_a_terminal_shows_one_state_at_a_time(short_run: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, tokenizer = Terminal(monkeypatch, 20, 12), short_run.tokenizer
    watcher = LiveView(tokenizer, terminal.stream, pause_s=0)
    (ids,) = tokenizer.encode_batch(["The rose of soil and water and salt."])
    masked = [tokenizer.mask_id] * len(ids)
    watcher(1.0, [masked])
    first = terminal.look()
    assert first[0] == "t 1.000" and set("".join(first[1:])) == {" ", "░"}
    watcher(0.5, [masked[:4] + ids[4:]])
    half = terminal.look()
    assert half[0] == "t 0.500" and half[1].startswith("  ░░░░") and half[-1].endswith("salt.")
    watcher(0.0, [ids])
    assert " ".join(line.strip() for line in terminal.look()[1:]) == "The rose of soil and water and salt."
    watcher(0.0, [ids] * 20)  # more than the screen has room for
    full = terminal.look()
    assert len(full) == 12 and full[-1].strip() == "..."
    watcher.close()
    terminal.stream.write("done\n")
    assert terminal.look() == ["done"]


def test_control_characters_are_escaped(short_run: LoadedRun) -> None:
    watcher = LiveView(short_run.tokenizer, io.StringIO())
    (ids,) = short_run.tokenizer.encode_batch(["a\x1b[31m\nb\t[MASK]"])
    assert watcher.text(ids) == "a\\x1b[31m\\nb\\t[MASK]"
    assert watcher.text([*ids[:1], short_run.tokenizer.mask_id]) == "a_"
