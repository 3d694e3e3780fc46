"""Rules of docs/security.md that can be checked in the source; each check is shown to detect what it forbids."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("mmldlm", "benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch"))

UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
OF_TORCH = {"torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"}
OF_ENGINES = {"load_state", "save_state", "load_checkpoint", "save_checkpoint", "load_zero_checkpoint"}  # by torch.load
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"}
PROCESSES = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}
REMOTE = {"SentenceTransformer", "from_pretrained", "load_dataset"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression; "" before what is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call, dict[str | None, ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node, {keyword.arg: keyword.value for keyword in node.keywords}


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("__import__", "importlib.import_module"):
            yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def unpickles(tree: ast.AST) -> Iterator[object]:
    for name in imports(tree):
        of_engine = name.split(".")[-1] in OF_ENGINES and not name.startswith("mmldlm.")
        if UNPICKLERS & set(name.split(".")) or name in OF_TORCH or of_engine:
            yield name
    for name, _, _ in calls(tree):
        _, is_method, verb = name.rpartition(".")
        if name in OF_TORCH or verb in ("read_pickle", "to_pickle") or (is_method and verb in OF_ENGINES):
            yield name


def loads_arrays_of_objects(tree: ast.AST) -> Iterator[object]:
    for name, _, keywords in calls(tree):
        explicit = name in {f"{numpy}.{verb}" for numpy in ("np", "numpy") for verb in ("load", "save", "savez")}
        if (explicit or "allow_pickle" in keywords) and not is_false(keywords.get("allow_pickle")):
            yield name


def sends_objects(tree: ast.AST) -> Iterator[object]:
    yield from (name for name, _, _ in calls(tree) if re.search(r"(gather|broadcast|scatter|send|recv)_object", name))
    yield from (name for name in imports(tree) if name.endswith("_object_list") or "distributed.rpc" in name)


def reads_yaml_loosely(tree: ast.AST) -> Iterator[object]:
    for name, _, keywords in calls(tree):
        strict = name == "yaml.load" and dotted(keywords.get("Loader") or ast.Name("")) == "_Loader"
        if re.match(r"yaml\.(\w+_)?load(_\w+)?$", name) and not strict:
            yield name
    yield from (name for name in imports(tree) if re.match(r"yaml\..*(load|Loader)", name))


def runs_text(tree: ast.AST) -> Iterator[object]:
    yield from (name for name, _, _ in calls(tree) if name in ("eval", "exec", "compile"))


def runs_a_shell(tree: ast.AST) -> Iterator[object]:
    for name, call, keywords in calls(tree):
        command = call.args[0] if call.args else keywords.get("args")
        as_text = isinstance(command, (ast.Constant, ast.JoinedStr, ast.BinOp))
        if isinstance(command, ast.BinOp) and isinstance(command.left, ast.List):
            as_text = False
        in_shell = name in SHELLS or not is_false(keywords.get("shell", ast.Constant(False)))
        if in_shell or (name in PROCESSES and as_text):
            yield name
    yield from (name for name in imports(tree) if name in SHELLS | PROCESSES)


def runs_code_of_models(tree: ast.AST) -> Iterator[object]:
    for name, _, keywords in calls(tree):
        named = "trust_remote_code" in keywords or name.split(".")[-1] in REMOTE
        if named and not is_false(keywords.get("trust_remote_code")):
            yield name


def guesses_temporary_names(tree: ast.AST) -> Iterator[object]:
    yield from (name for name, _, _ in calls(tree) if name in ("tempfile.mktemp", "os.tempnam", "os.tmpnam"))
    yield from (name for name in imports(tree) if name == "tempfile.mktemp")


def listens_to_all(tree: ast.AST) -> Iterator[object]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search(r"0\.0\.0\.0|bind_all", node.value)
        ):
            yield node.value


RULES: dict[Callable[[ast.AST], Iterator[object]], tuple[list[str], list[str]]] = {
    unpickles: (
        ["import pickle", "from pickle import loads", "import joblib.numpy_pickle", "torch.load(p)", "torch.save(x, p)",
         "from torch import load", "import os, marshal", "engine.load_checkpoint(p)", "accelerator.load_state(p)",
         "from deepspeed.engine import load_checkpoint",
         "__import__('dill')", "importlib.import_module('shelve')", "def f():\n  import cloudpickle"],
        ["import torch", "json.load(f)", "model.load_state_dict(s)", "store.save(1)", "load_checkpoint(path)",
         "from mmldlm.trainer.checkpointer import load_checkpoint"],
    ),
    loads_arrays_of_objects: (
        ["np.load(p)", "np.load(p, allow_pickle=True)", "numpy.load(p, mmap_mode='r')", "f(allow_pickle=flag)",
         "np.save(p, x)"],
        ["np.load(p, allow_pickle=False)", "json.load(f)", "np.memmap(p)"],
    ),
    sends_objects: (
        ["dist.all_gather_object(a, b)", "torch.distributed.broadcast_object_list(a)", "dist.gather_object(a)",
         "from torch.distributed import scatter_object_list", "import torch.distributed.rpc"],
        ["dist.all_gather(a, b)", "dist.all_reduce(a)"],
    ),
    reads_yaml_loosely: (
        ["yaml.load(t)", "yaml.load(t, yaml.Loader)", "yaml.unsafe_load(t)", "yaml.full_load(t)", "yaml.load_all(t)",
         "yaml.safe_load(t)", "yaml.load(t, Loader=yaml.FullLoader)", "from yaml import UnsafeLoader"],
        ["yaml.load(t, Loader=_Loader)", "yaml.safe_dump(x)"],
    ),
    runs_text: (["eval(x)", "exec(x)", "f(compile(x, y, z))"], ["model.eval()", "re.compile(x)", "torch.compile(m)"]),
    runs_a_shell: (
        ["os.system(x)", "os.popen(x)", "subprocess.run(c, shell=True)", "subprocess.run('ls')",
         "subprocess.run(f'ls {x}')", "subprocess.Popen('ls ' + x)", "subprocess.check_output(args='ls')",
         "f(shell=flag)", "subprocess.getoutput(x)", "from os import system", "from subprocess import run"],
        ["subprocess.run(['ls', x])", "subprocess.run(command)", "subprocess.run(['ls'] + x)", "f(shell=False)"],
    ),
    runs_code_of_models: (
        ["f(trust_remote_code=True)", "f(trust_remote_code=flag)", "SentenceTransformer(x)",
         "AutoModel.from_pretrained(x)"],
        ["SentenceTransformer(x, trust_remote_code=False)"],
    ),
    guesses_temporary_names: (["tempfile.mktemp()", "from tempfile import mktemp"], ["tempfile.mkdtemp()"]),
    listens_to_all: (["f('0.0.0.0')", "x = ['--host=0.0.0.0']", "c = '--bind_all'"], ["f('127.0.0.1')"]),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_of_the_code(rule: Callable[[ast.AST], Iterator[object]]) -> None:
    forbidden, allowed = RULES[rule]
    assert [text for text in forbidden if not list(rule(ast.parse(text)))] == [], "the rule is blind"
    assert [text for text in allowed if list(rule(ast.parse(text)))] == []
    assert len(SOURCES) > 50
    offenders = {
        str(path.relative_to(ROOT)): result
        for path in SOURCES
        if (result := list(rule(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert offenders == {}


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
        for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *SCRIPTS]
        for line in path.read_text(encoding="utf-8").splitlines()
        if "tensorboard --logdir" in line
    ]
    assert len(printed) >= 2
    assert [place for place in printed if "--host 127.0.0.1" not in place[1]] == []
