"""Write what later versions must read, and the list of what is stable, to tests/fixtures/VERSION.

    python scripts/release_fixtures.py             # for a release, once
    python scripts/release_fixtures.py --stable    # stable.json alone

`tests/test_earlier_versions.py` reads all of these folders, `tests/test_stable.py` compares the newest list with the
present. The files name no machine: paths are relative to the folder, and host and processor are stand-ins.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, get_args
from unittest.mock import patch

import mmldlm
from mmldlm import cli
from mmldlm.checkpoint import manifest as checkpoint_manifest
from mmldlm.data import manifest as store_manifest
from mmldlm.errors import ExitCode
from mmldlm.inference.model import Samples, Score
from mmldlm.telemetry.metrics import Kind
from scripts.docs import settings_table

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
CONFIG = """\
run: {dir: run, seed: 3}
data: {path: store}
model: {depth: 1, width: 16, latent_width: 16, num_heads: 2, conditioning_width: 8, modulation_rank: 2}
optim: {lr: 1e-2}
ema: {decay: 0.5}
train: {steps: 8, global_batch_size: 8}
log: {every: 2, tensorboard: false}
validation: {every: 4, samples: 8, text_samples: 1}
checkpoint: {every_steps: 4, keep_last: 1}
sampling: {steps: 4}
"""
SENTENCES = ("The rose and the leaf.", "The tide of the reef and the sail.", "The drum.")
WORDS = (
    "rose soil water seed leaf root wave tide reef whale sail flour oven knife salt chord drum choir bass and the of"
)


# --- what is stable: the value of each name, as the changelog writes it ----------------------------------------


def stable() -> dict[str, Any]:
    """Return a description of all that docs/stability.md promises, by names for the changelog."""
    formats = {"checkpoint format": checkpoint_manifest.FORMAT, "store format": store_manifest.FORMAT}
    codes = {f"exit code {code.value}": code.name for code in ExitCode}
    kinds = {f"kind {kind}": "metrics.jsonl" for kind in get_args(Kind)}
    return {**dict(_settings()), **dict(_commands()), **dict(_interface()), **formats, **codes, **kinds}


def _settings() -> Iterator[tuple[str, str]]:
    for row in settings_table().splitlines():
        if row.startswith("| `"):
            _, key, type_, default, *_ = re.split(r"(?<!\\)\|", row)
            yield key.strip(" `"), f"{type_.strip()}; default {default.strip(' `')}".replace("\\|", "|")


class _Parser(Exception):
    """The parser of a command, where it would read the arguments."""


def _commands() -> Iterator[tuple[str, Any]]:
    def stop(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Parser(parser)

    with patch.multiple(argparse.ArgumentParser, parse_args=stop, parse_intermixed_args=stop):
        for name, (entry, _) in cli.COMMANDS.items():
            module, _, function = entry.partition(":")
            try:
                getattr(importlib.import_module(module), function or "main")([])
            except _Parser as found:
                yield from _options(f"mmldlm {name}", found.args[0])


def _options(command: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    yield command, "command"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from _options(f"{command} {name}", sub)
        elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            choices = list(map(str, action.choices)) if action.choices else None
            value = {"nargs": str(action.nargs), "default": str(action.default), "choices": choices}
            for name in action.option_strings or [action.dest]:
                yield f"{command} {name}", value


def _interface() -> Iterator[tuple[str, str]]:
    yield from _signature("mmldlm.load", mmldlm.load)
    yield from _signature("mmldlm.Model", mmldlm.Model.__init__)
    for name, member in vars(mmldlm.Model).items():
        if isinstance(member, property):
            yield f"Model.{name}", str(inspect.signature(member.fget).return_annotation)  # type: ignore[arg-type]
        elif not name.startswith("_"):
            yield from _signature(f"Model.{name}", getattr(mmldlm.Model, name))
    for cls in (Samples, Score):
        for name, annotation in inspect.get_annotations(cls).items():
            yield f"{cls.__name__}.{name}", str(annotation)
        for name, member in vars(cls).items():
            if isinstance(member, property):
                yield f"{cls.__name__}.{name}", str(inspect.signature(member.fget).return_annotation)  # type: ignore[arg-type]


def _signature(name: str, function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yield the function with what it returns, and each parameter with kind, type and default."""
    signature = inspect.signature(function)
    yield name, f"returns {signature.return_annotation}"
    for parameter in signature.parameters.values():
        if parameter.name != "self":
            default = "none" if parameter.default is parameter.empty else repr(parameter.default)
            yield f"{name}({parameter.name})", f"{parameter.kind.description} {parameter.annotation}; default {default}"


# --- what a version writes --------------------------------------------------------------------------------------


def write_fixtures(folder: Path) -> None:
    """Prepare a store, train, evaluate, score and export in `folder`, which is made, with the commands."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    draw, words = random.Random(0), WORDS.split()
    texts = [f"The {' '.join(draw.choices(words, k=draw.choice([3, 5, 8])))}." for _ in range(80)]
    (folder / "corpus.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    (folder / "sentences.txt").write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    store = "--out store --vocab-size 280 --channels 4 --max-length 24 --validation-fraction 0.15 --test-fraction 0.15"
    with ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        os.chdir(folder)
        for name, stand_in in (
            ("mmldlm.config._absolute", lambda path: path),
            ("mmldlm.utils.cpu.processor_name", lambda: "processor"),
            ("mmldlm.trainer.startup_report.memory_limits", lambda: {"host_memory_mib": 1024.0}),
        ):
            stack.enter_context(patch(name, stand_in))
        stack.enter_context(patch.object(socket, "gethostname", lambda: "host"))
        for command in (
            f"prepare corpus.txt {store}",
            "train config.yaml",
            "evaluate run --samples 12 --texts 4 --times 1",
            "score run sentences.txt --out scores.jsonl --draws 2",
            "export run bundle",
        ):
            if code := cli.main(command.split()):
                raise SystemExit(f"mmldlm {command}: exit code {code}")
    (folder / "corpus.txt").unlink()


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stable", action="store_true", help="write stable.json alone")
    options, folder = parser.parse_args(), FIXTURES / mmldlm.__version__
    if not options.stable:
        write_fixtures(folder)
    (folder / "stable.json").write_text(json.dumps(stable(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
