"""DeepSpeed is an extra: without it the package imports, trains and shards, and only what needs it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.user_errors import assert_user_error
from tests.helpers.waiting import TEST_TIMEOUT_S

IMPORT_ALL = """
import importlib, pkgutil
import mmldlm

refused = {}
for name in {module.name for module in pkgutil.walk_packages(mmldlm.__path__, 'mmldlm.')} - {'mmldlm.__main__'}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        refused[name] = error.name
print(sorted(refused.items()))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with all packages of this one but DeepSpeed."""
    venv = tmp_path_factory.mktemp("without") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("deepspeed", "__")) and path.suffix != ".pth":
            (packages / path.name).symlink_to(path)
    return venv / "bin/python"


def run(python: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [str(python), *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
    )


def test_only_the_engine_and_its_optimizer_import_it(python: Path) -> None:
    result = run(python, "-c", IMPORT_ALL)
    own = [(f"mmldlm.distributed.{name}", "deepspeed") for name in ("deepspeed_adam", "zero")]
    assert result.stdout.strip() == str(own), result.stderr[-2000:]


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp2"])
def test_other_engines_train(python: Path, engine: str, tiny_config: Path, tmp_path: Path) -> None:
    train = ["-m", "mmldlm.train", tiny_config, "train.steps=2"]
    if engine != "single":
        file = ROOT / "accelerate_configs" / f"{engine}.yaml"
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
        train = [*launch, *train, "--accelerate_config", file]
    result = run(python, *train)
    assert result.returncode == 0, result.stderr[-2000:]
    assert '"deepspeed": "absent"' in (tmp_path / "run/startup.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--accelerate_config", ROOT / "accelerate_configs/zero2.yaml"], "ds_configs/zero2.json"),
        (["--deepspeed_config", ROOT / "ds_configs/zero3.json"], "ds_configs/zero3.json"),
        (["optim.name=deepspeed_adam"], "optim.name: deepspeed_adam"),
    ],
)
def test_what_needs_it_is_refused_in_one_line(
    python: Path, arguments: list[object], names: str, tiny_config: Path, tmp_path: Path
) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = run(python, "-m", "mmldlm.train", tiny_config, *arguments, **rank)
    assert_user_error(result, 64, f"{names}: needs DeepSpeed, mmldlm's extra deepspeed")
    assert not (tmp_path / "run").exists()


def test_a_corpus_without_its_sentences_says_so(python: Path) -> None:
    code = "from mmldlm.prepare.job import *; make_plan(PrepareConfig('out', corpus='python-docs'))"
    result = run(python, "-c", code)
    assert "python-docs: has no sentences of deepspeed" in result.stderr, result.stderr


def test_the_launch_script_says_so_before_it_starts(python: Path, tiny_config: Path) -> None:
    environment = {**os.environ, "PYTHON": str(python), "NPROC_PER_NODE": "2", "NODE_CHECK": "skip"}
    command = ["bash", ROOT / "scripts/launch_node.sh", "zero2", tiny_config]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S)
    assert result.returncode == 2 and "zero2 needs DeepSpeed" in result.stderr, result.stderr
