"""Configs that nobody should write: each is a run config or one short line, soon and in little memory."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmldlm.config import RunConfig, load_config, require_paths
from mmldlm.errors import ConfigError, UsageError
from mmldlm.settings.fields import build, dump, leaves, to_yaml
from mmldlm.settings.yaml import MAX_BYTES, parse_yaml
from mmldlm.trainer.checkpointer import check_resume
from mmldlm.trainer.setup import step_plan
from tests.helpers.paths import ROOT

CASES, SECONDS, GROWTH_MIB = 2500, 2.0, 200

ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
MERGE_BOMB = "a0: &a0 {x0: 1, y0: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], x{n}: 1}}\n" for n in range(1, 30)
)
SHARED = "run: {dir: r}\nmode: &m {l2t: 1, joint: 3}\nmode_schedule: {10: *m, 20: {<<: *m, l2t: 5}}\n"

NASTY: dict[str, tuple[str | bytes, list[str]]] = {
    "aliases that would expand to 9^30 values": (ALIAS_BOMB + "optim: {lr: *a29}\nmode: {l2t: *a28}\n", []),
    "merge keys that would expand to 9^30 keys": (MERGE_BOMB, []),
    "one merge key of thousands": ("a: &a {" + ", ".join(f"k{n}: 1" for n in range(900)) + "}\n"
                                   "b: {<<: [" + "*a," * 16_000 + "]}", []),
    "a list in itself": ("freeze: &f [*f]\noptim: {lr: *f}", []),
    "a map in itself": ("run: &r {dir: x, run: *r}\nmode: &m {l2t: *m}", []),
    "a map that merges itself": ("run: &r {<<: *r, dir: 3}", []),
    "a map as its own key": ("&a {*a : 1}", []),
    "brackets": ("[" * 60_000, []),
    "question marks": ("? " * 30_000, []),
    "deep flow maps": ("{a: " * 15_000, []),
    "deep blocks": ("".join(" " * n + f"k{n}:\n" for n in range(340)), []),
    "a word of 1 MB": ("run: {dir: " + "x" * 2**20 + "}", []),
    "a word of 1 MB on the command line": (b"", ["run.dir=" + "x" * 2**20]),
    "a key of 1 MB on the command line": (b"", ["x" * 2**20 + "=1", "a." * 2**19 + "b=1"]),
    "a key of 60 KB": ("x" * 60_000 + ": 1", []),
    "thousands of unknown keys": ("".join(f"learning_rat{n}: 1\n" for n in range(3500)), []),
    "a number of 10,000 digits": ("train: {steps: " + "9" * 10_000 + "}", []),
    "a hexadecimal number of 10,000 digits": ("train: {steps: 0x" + "f" * 10_000 + "}", []),
    "a key of 10,000 digits": ("? 0x" + "f" * 10_000 + "\n: 1", ["mode_schedule." + "9" * 10_000 + "=l2t"]),
    "a whole number beyond any float": ("optim: {lr: 0x" + "f" * 400 + "}", []),
    "a seed that torch cannot take": ("run: {seed: 18446744073709551616}", []),
    "a number beyond any float": ("optim: {lr: 1e309, clip_norm: .inf}\nmode: {l2t: 1e308, t2l: 1e308}", []),
    "a sexagesimal number beyond any float": ("a: 1" + ":1" * 5000 + ".0", []),
    "tags": ("a: !!python/object/apply:os.system ['true']", []),
    "a float that is none": ("optim: {lr: !!float ''}", []),
    "a date that is none": ("run: {dir: 2024-99-99}", []),
    "dates and sets": ("run: {dir: 2024-01-01}\nmode: !!set {l2t, t2l}\ndata: {path: !!binary aGk=}", []),
    "keys twice": ("run: {dir: a, dir: b}", []),
    "half a surrogate pair": (r'run: {dir: "\ud800"}', []),
    "half a surrogate pair on the command line": (b"", ["run.dir=\udc80"]),
    "a path with NUL": (r'run: {dir: "a\0b", dir2: 1}', []),
    "a path of two lines": ('run: {dir: "a\\nb\\u2028c\\x85"}', []),
    "a name that no folder can have": ("run: {dir: " + "x" * 300 + "}\nresume: " + "y" * 300, []),
    "UTF-16": ("run: {dir: x}".encode("utf-16"), []),
    "bytes": (bytes(range(256)) * 8, []),
    "BOM in the middle": ("run: {dir: \ufeffx}\n\ufeffdata: 1", []),
    "tabs": ("run:\n\tdir: x\n", []),
    "two documents": ("run: {dir: x}\n---\nrun: {dir: y}\n", []),
    "a version of YAML to come": ("%YAML 9.9\n---\nrun: {dir: x}\n", []),
    "an empty assignment": (b"", ["=", "==", ".=1", "a..b=1", "run.=1", "run.dir.x=1"]),
}  # fmt: skip


def outcome(path: Path, overrides: list[str]) -> RunConfig | None:
    """The config, or None where it was refused in one short line."""
    began = time.process_time()
    try:
        config = load_config(path, overrides)
        require_paths(config, "data.path", "run.dir")
        check_resume(config.resume)
        config.train.check_batches(2)
        step_plan(config, 2)
    except (ConfigError, UsageError) as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) <= 2000, str(error)[:3000]
        config = None
    assert time.process_time() - began < SECONDS
    return config


def memory_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.quick
@pytest.mark.parametrize("name", NASTY)
def test_nasty_ones(tmp_path: Path, name: str) -> None:
    content, overrides = NASTY[name]
    path, before = tmp_path / "config.yaml", memory_mib()
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert outcome(path, []) is None
    for each in overrides:
        assert outcome(path, [each]) is None
    assert memory_mib() - before < GROWTH_MIB


@pytest.mark.quick
def test_ordinary_anchors_and_merges_still_work(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SHARED)
    config = load_config(path, ["mode_schedule.10.l2t=2"])
    assert config.mode == {"l2t": 1, "joint": 3}, "an override of one leaves the other that shares its mapping"
    assert config.mode_schedule == {10: {"l2t": 2, "joint": 3}, 20: {"l2t": 5, "joint": 3}}
    path.write_text("mode:\n  <<: [{l2t: 1}, {l2t: 2, joint: 2}]\n")
    assert load_config(path).mode == {"l2t": 1, "joint": 2}


@pytest.mark.quick
def test_the_size_of_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    fitting = "run: {dir: x}\n#"
    (tmp_path / "a.yaml").write_text(fitting + "x" * (MAX_BYTES - len(fitting)))
    assert load_config(tmp_path / "a.yaml").run.dir == "x"
    for endless in (tmp_path / "b.yaml", Path("/dev/zero")):
        (tmp_path / "b.yaml").write_text(fitting + "x" * MAX_BYTES)
        with pytest.raises(ConfigError, match=f"at most {MAX_BYTES} bytes"):
            load_config(endless)


# --- fuzzing ----------------------------------------------------------------------------------------------

KEYS = [key for key, _ in leaves(RunConfig)]
VALUES: list[Any] = [
    None, True, "", "off", "x", "x" * 5000, "😀" * 300, "a\nb", "\x00", "../../x", "$(touch canary)", "{}", "*a", "&a",
    0, -1, 2**31, 2**63, 2**70, 10**4000, -(10**300), 1e308, 1e-320, float("inf"), float("nan"), 0.5, -0.0,
    [], [[]], [1] * 1001, ["backbone"] * 50, {}, {"a": {"b": {"c": {}}}}, {"l2t": 1e308, "t2l": 1e308},
    {1: {2: {3: 4}}}, {"l2t": -1}, {"NCCL_DEBUG": 3}, {"LD_PRELOAD": "x"}, {5: "joint"}, {-5: "l2t"}, {2**64: "l2t"},
]  # fmt: skip
SNIPPETS = [
    "a: &a [*a, *a]", "<<: *a", "<<: {run: {dir: y}}", "? [1, 2]\n: 3", "? {a: b}\n: 3", "- 1", "---", "...", "%T",
    "!!python/name:os.system", "!!set {a, b}", "!!omap [a: 1]", "!!binary '//8='", "!!int ''", "!!timestamp x", "! x",
    "2024-02-31", "2001-12-14t21:59:43.10-05:00", "=", "<<", "~", "0o777", "0b1", "1_000", "190:20:30", "1e309",
    ".nan", "-.inf", "0x" + "f" * 5000, "9" * 5000, "|", ">", "|9999", "'", '"', '"\\ud800"', '"\\x00"', "\ufeff", "\t",
    "\u2028", "#", "@", "`", "[" * 400, "{" * 400, "*b", "&b", "run: *b", "? " * 50, "\\", "é: ü", "\x1b[31m",
    "a" * 9000,
]  # fmt: skip


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [place for key, value in items for place in [(tree, key), *places(value)]]


def mutate_tree(rng: random.Random, tree: dict[Any, Any]) -> str:
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(tree) or [(tree, "run")])
        what = rng.randrange(4) if isinstance(container, dict) else 0
        if what == 0:
            container[key] = deepcopy(rng.choice(VALUES))
        elif what == 1:
            container[rng.choice([*KEYS, "x" * 400, "é", 3, "lr", "seed"])] = container.pop(key)
        elif what == 2:
            container[rng.choice(KEYS).split(".")[-1]] = deepcopy(rng.choice(VALUES))
        else:
            container[key] = {key: container[key]}
    with suppress(ValueError):  # a number too long to write
        return yaml.dump(tree, allow_unicode=rng.random() < 0.5, default_flow_style=rng.choice([None, True, False]))
    return "a: 1"


def mutate_text(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines)) if lines else 0
        what = rng.randrange(5)
        if what == 0:
            lines.insert(at, " " * rng.choice([0, 0, 2, 3]) + rng.choice(SNIPPETS))
        elif what == 1 and lines:
            lines[at] = lines[at].split(":")[0] + ": " + rng.choice(SNIPPETS)
        elif what == 2 and lines:
            lines.insert(at, lines[at])
        elif what == 3 and lines:
            lines[at] = rng.choice(["  ", "\t", "- ", "? "]) + lines[at]
        elif lines:
            del lines[at]
    return "\n".join(lines)


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.randint(1, 8)):
        at, size = rng.randrange(len(raw) + 1), rng.randint(1, 30)
        raw = (
            raw[:at]
            + rng.choice([rng.randbytes(1), b"", b"", raw[-size:], b":{[&*!|>"])
            + raw[at + rng.choice([0, 1, size]) :]
        )
    return raw


def overrides_of(rng: random.Random) -> list[str]:
    if rng.random() < 0.6:
        return []
    keys = [
        *KEYS,
        "a.b.c",
        "mode_schedule.5",
        "mode_schedule.5.l2t",
        "train.batch_schedule.5.micro_batch_size",
        "run",
        "",
        ".",
        "mode_schedule." + "9" * 50,
        "é.ü",
    ]
    return [f"{rng.choice(keys)}={rng.choice([*SNIPPETS, '1', '{}', 'x', '[1, 2]'])}" for _ in range(rng.randint(1, 3))]


def bases() -> list[dict[Any, Any]]:
    found = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))]
    small = {"run": {"dir": "r"}, "data": {"path": "d"}}
    more = {"freeze": ["backbone"], "mode_schedule": {0: "l2t", 9: {"l2t": 1, "joint": 3}}, "resume": "never"}
    more["train"] = {"batch_schedule": {5: {"micro_batch_size": 4}, 9: {"global_batch_size": 256}}}
    full = dump(RunConfig())
    parts = [{**small, name: full[name]} for name in ("model", "optim", "distributed", "sampling", "checkpoint")]
    return [*found, {**small, **more}, *parts]


BASES = [(tree, yaml.safe_dump(tree, sort_keys=False)) for tree in bases()]


def fuzzed(rng: random.Random) -> bytes:
    tree, text = rng.choice(BASES)
    if rng.random() < 0.5:
        text = mutate_tree(rng, deepcopy(tree))
    if rng.random() < 0.5:
        text = mutate_text(rng, text)
    raw = text.encode(rng.choice(["utf-8"] * 20 + ["utf-16", "utf-8-sig", "utf-32"]), "surrogatepass")
    return mutate_bytes(rng, raw) if rng.random() < 0.4 else raw


def test_fuzzed_configs(tmp_path: Path) -> None:
    """What is accepted can be written and read again."""
    path, before, accepted = tmp_path / "config.yaml", memory_mib(), 0
    shutil.copy(ROOT / "configs" / "common.yaml", tmp_path)  # which presets extend
    for seed in range(CASES):
        rng = random.Random(seed)
        path.write_bytes(fuzzed(rng))
        config = outcome(path, overrides_of(rng))
        if config is not None:
            accepted += 1
            if accepted % 10 == 0:
                assert build(RunConfig, parse_yaml(to_yaml(config), "resolved")) == config, seed
    assert CASES / 20 < accepted < CASES / 2, "neither kind is left out"
    assert memory_mib() - before < GROWTH_MIB


@pytest.mark.parametrize("name", ["merge keys that would expand to 9^30 keys", "bytes", "a path of two lines", "tags"])
def test_the_command_answers_in_one_line(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, name: str
) -> None:
    content, overrides = NASTY[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    done = command("mmldlm.cli", "train", path, *overrides)
    assert done.returncode == 64 and done.stdout == "", done.stderr
    assert done.stderr.startswith("mmldlm: error: ") and len(done.stderr.splitlines()) == 1
