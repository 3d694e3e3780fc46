"""Rules of docs/security.md that can be checked in the source; each check is shown to detect what it forbids."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("mmldlm", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch"))

# By ruff, as pyproject.toml selects it.
FORBIDDEN = """
import pickle
from pickle import loads
import joblib.numpy_pickle
import marshal
import cloudpickle
import shelve
torch.load(p)
torch.save(x, p)
from torch import load
torch.distributed.all_gather_object(a, b)
from torch.distributed import scatter_object_list
import torch.distributed.rpc
yaml.load(t)
yaml.load(t, Loader=yaml.FullLoader)
yaml.unsafe_load(t)
yaml.full_load(t)
yaml.safe_load(t)
from yaml import UnsafeLoader
eval(x)
exec(x)
os.system(x)
os.popen(x)
subprocess.run(c, shell=True)
subprocess.getoutput(x)
from os import popen
tempfile.mktemp()
from tempfile import mktemp
f("0.0.0.0")
"""
ALLOWED = """
json.load(f)
model.load_state_dict(s)
torch.distributed.all_gather(a, b)
yaml.safe_dump(x)
model.eval()
re.compile(x)
torch.compile(m)
subprocess.run(["ls", x])
tempfile.mkdtemp()
f("127.0.0.1")
"""


def test_ruff_finds_what_is_forbidden() -> None:
    imports = "import os, re, subprocess, tempfile, torch, torch.distributed, yaml, json\n"
    name = str(ROOT / "mmldlm" / "rules.py")
    command = [sys.executable, "-m", "ruff", "check", "--output-format", "json"]
    found = {}
    for text in (FORBIDDEN, ALLOWED):
        source = imports + text.strip() + "\n"
        arguments = [*command, "--stdin-filename", name, "-"]
        result = subprocess.run(arguments, cwd=ROOT, input=source, capture_output=True, text=True)
        rows = {row["location"]["row"] for row in json.loads(result.stdout) if row["code"].startswith(("S", "TID"))}
        found[text] = {line for number, line in enumerate(source.splitlines(), 1) if number in rows}
    assert found[FORBIDDEN] == set(FORBIDDEN.strip().splitlines())
    assert found[ALLOWED] == set()


def runs_code_of_files(tree: ast.AST) -> Iterator[str]:
    """Arrays of objects, checkpoints of the engines, code of models and of texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, keywords = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
            owner, _, name = function.rpartition(".")
            switch = None
            if "allow_pickle" in keywords or (owner in ("np", "numpy") and name in ("load", "save", "savez")):
                switch = "allow_pickle"
            elif "trust_remote_code" in keywords or name in ("SentenceTransformer", "load_dataset", "from_pretrained"):
                switch = "trust_remote_code"
            if switch and ast.unparse(keywords.get(switch, ast.Constant(True))) != "False":
                yield function
            if function == "compile" or (
                owner and name in ("load_state", "save_state", "load_checkpoint", "save_checkpoint")
            ):
                yield function
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "bind_all" in node.value:
            yield node.value


def test_nothing_runs_code_of_files() -> None:
    forbidden = (
        "np.load(p)", "np.load(p, allow_pickle=True)", "np.save(p, x)", "f(allow_pickle=flag)",
        "engine.load_checkpoint(p)", "accelerator.load_state(p)", "f(trust_remote_code=flag)",
        "SentenceTransformer(x)", "AutoModel.from_pretrained(x)", "c = '--bind_all'", "compile(x, y, z)",
    )  # fmt: skip
    allowed = "np.load(p, allow_pickle=False)\nnp.memmap(p)\nSentenceTransformer(x, trust_remote_code=False)"
    assert [text for text in forbidden if not list(runs_code_of_files(ast.parse(text)))] == []
    assert list(runs_code_of_files(ast.parse(allowed))) == []
    assert len(SOURCES) > 50
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: found for name, tree in trees.items() if (found := list(runs_code_of_files(tree)))} == {}


# What a shell runs of a value: `eval`, a command made of text, downloads that are run at once, every address.
IN_SCRIPTS = (
    r"(^|[;&|(]|then|do)\s*eval\b|\b(ba)?sh -c \"|\|\s*(ba)?sh\b|0\.0\.0\.0|--bind_all|mktemp -u|\bsource /dev/"
)


def test_rules_of_the_scripts() -> None:
    for text in (
        'eval "$x"',
        'if a; then eval "$x"; fi',
        'bash -c "ls $x"',
        "curl x | sh",
        "a --host 0.0.0.0",
        "mktemp -u",
    ):
        assert re.search(IN_SCRIPTS, text, re.MULTILINE), text
    for text in ("bash -c 'exec \"$@\"'", 'mmldlm evaluate "$x"', "a --host 127.0.0.1", "mktemp -d"):
        assert not re.search(IN_SCRIPTS, text, re.MULTILINE), text
    assert len(SCRIPTS) >= 6
    for path in SCRIPTS:
        code = re.sub(r"^\s*#.*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not re.search(IN_SCRIPTS, code, re.MULTILINE), path


def test_tensorboard_listens_on_loopback_only() -> None:
    """Every documented command names the host; another one has to be given explicitly."""
    printed = [
        (path, line)
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SCRIPTS]
        for line in path.read_text(encoding="utf-8").splitlines()
        if "tensorboard --logdir" in line
    ]
    assert len(printed) >= 2
    assert [place for place in printed if "--host 127.0.0.1" not in place[1]] == []
