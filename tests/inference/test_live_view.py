"""`mmldlm sample --watch`: intermediate texts, in a terminal and without one."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios
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
    latents, config = encode_texts(short_run, [TEXT]), SamplingConfig(steps=4)
    made, texts = sample(short_run, "l2t", config, 0, latents, length=9, count=2, callback=watcher)
    watcher.close()
    lines = printed.getvalue().splitlines()
    assert [line[:8] for line in lines] == [f"t {t:.3f} " for t in (1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0, 0)]
    assert [line[9:12] for line in lines] == ["[1]", "[2]"] * 5
    assert lines[0].endswith(f"[1] {'_' * 9}")  # what has no encoding is taken for ASCII
    masks = [line.count("_") for line in lines[::2]]
    assert masks == sorted(masks, reverse=True) and 0 < masks[2] < 9 and masks[-1] == 0
    assert [line[13:] for line in lines[-2:]] == [watcher.text(ids) for ids in made.split()]
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
    """A pseudo-terminal of a size, and what its screen shows after all that was written to it."""

    def __init__(self, columns: int, rows: int):
        self._reader, writer = os.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.columns, self.rows = columns, rows
        self.stream = os.fdopen(writer, "w", encoding="utf-8")
        self.lines = [""]

    def look(self) -> list[str]:
        """Full lines on the screen; AssertionError where one wrapped, or went up beyond the top."""
        self.stream.write(_END)
        self.stream.flush()
        content = b""
        while not content.endswith(_END.encode()):  # a terminal hands on what it gets in parts, and later
            content += os.read(self._reader, 1 << 16)
        written = content.decode().removesuffix(_END).replace("\r\n", "\n")
        for part in re.findall(r"\x1b\[\d+F\x1b\[J|\n|[^\n\x1b]+", written):
            if part == "\n":
                self.lines.append("")
            elif part[0] == "\x1b":
                up = int(part[2 : part.index("F")])
                assert up < self.rows and up < len(self.lines), "what has left the screen cannot be reached"
                self.lines = [*self.lines[: len(self.lines) - 1 - up], ""]
            else:
                assert len(part) <= self.columns
                self.lines[-1] += part
        return self.lines[:-1]


def test_a_terminal_shows_one_state_at_a_time(short_run: LoadedRun) -> None:
    terminal, tokenizer = Terminal(20, 12), short_run.tokenizer
    watcher = LiveView(tokenizer, terminal.stream, pause_s=0)
    (ids,) = tokenizer.encode_batch(["The rose of soil and water and salt."])
    masked = [tokenizer.mask_id] * len(ids)
    watcher(1.0, [masked])
    first = terminal.look()
    assert first[0] == "t 1.000" and set("".join(first[1:])) == {" ", "░"}
    watcher(0.5, [masked[:4] + ids[4:]])
    half = terminal.look()
    assert half[0] == "t 0.500" and half[1].startswith("  ░░░░") and half[-1].endswith(" and salt.")
    watcher(0.0, [ids])
    assert "".join(line[2:] for line in terminal.look()[1:]) == "The rose of soil and water and salt."
    watcher(0.0, [ids] * 20)  # more than the screen has room for
    full = terminal.look()
    assert len(full) == 11 and full[-1] == "..."
    watcher.close()
    terminal.stream.write("done\n")
    assert terminal.look() == ["done"]


def test_control_characters_are_escaped(short_run: LoadedRun) -> None:
    watcher = LiveView(short_run.tokenizer, io.StringIO())
    (ids,) = short_run.tokenizer.encode_batch(["a\x1b[31m\nb\t[MASK]"])
    assert watcher.text(ids) == "a\\x1b[31m\\nb\\t[MASK]"
    assert watcher.text([*ids[:1], short_run.tokenizer.mask_id]) == "a_"


def test_wide_characters_take_two_columns(short_run: LoadedRun) -> None:
    terminal = Terminal(13, 24)
    watcher = LiveView(short_run.tokenizer, terminal.stream, pause_s=0)
    (ids,) = short_run.tokenizer.encode_batch(["水" * 12])
    watcher(0.0, [ids])
    assert [len(line) for line in terminal.look()[1:]] == [7, 7, 4]
