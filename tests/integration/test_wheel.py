"""The wheel works by itself, and a folder of `mmldlm new` has all that a run on any machine needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmldlm import __version__
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.two_nodes import environment
from tests.helpers.waiting import TEST_TIMEOUT_S

FOLDERS = ("accelerate_configs", "configs", "deploy", "ds_configs")
SOURCES = (*FOLDERS, "mmldlm", "scripts", "pyproject.toml", "README.md", "LICENSE", "constraints.txt")
SMALL = "model.depth=2 model.width=32 model.num_heads=2 model.conditioning_width=32 model.modulation_rank=8"
MANIFEST_RUN = "configs/small.yaml data.path=/shared/data run.dir=/shared/runs/own"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    for name in SOURCES:  # a copy: a build leaves files in its folder
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source], check=True, cwd=folder
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", venv / "bin/python", "install", "--no-deps", "--no-index", wheel], check=True)
    shutil.rmtree(source)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A plain path comes after the wheel, and its own .pth files, one of which leads to this checkout, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def run(installed: Path, cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of the installation, without a variable that leads to the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{installed}{os.pathsep}{env['PATH']}"}
    program, *rest = map(str, arguments)
    return subprocess.run(
        [str(installed / program), *rest], cwd=cwd, env=env, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
    )


@pytest.fixture(scope="module")
def project(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("new")
    result = run(installed, parent, "mmldlm", "new", "own")
    assert result.returncode == 0, result.stderr
    return parent / "own"


def test_new_writes_the_files_of_the_repository_once(installed: Path, project: Path) -> None:
    written = {path.relative_to(project) for path in project.rglob("*") if path.is_file()}
    for name in written:
        assert (project / name).read_bytes() == (ROOT / name).read_bytes(), name
        assert not (project / name).is_symlink()
    here = {path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    assert here <= written
    scripts = {"quickstart.sh", "launch_node.sh", "hostfile.example", "slurm/train.sbatch"}
    assert {Path("scripts") / name for name in scripts} | {Path("constraints.txt")} <= written
    before = {name: (project / name).stat().st_mtime_ns for name in written}
    again = run(installed, project.parent, "mmldlm", "new", "own")
    assert again.returncode == 2 and "own/accelerate_configs: exists already" in again.stderr
    assert {name: (project / name).stat().st_mtime_ns for name in written} == before


def test_metadata_name_licence_python_and_extras(installed: Path) -> None:
    (info,) = installed.parent.glob("lib/python*/site-packages/mmldlm-*.dist-info")
    metadata = PathDistribution(info).metadata
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Author"] == "the mmldlm authors"
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert metadata["Requires-Python"] == ">=3.10" and not metadata.get_all("Project-URL")
    assert {"encoders", "figures", "demo", "mirror"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Version"] == __version__ in (ROOT / "CITATION.cff").read_text()


def test_a_run_from_the_folder_uses_the_installed_package(installed: Path, project: Path, tiny_store: Path) -> None:
    where = run(installed, project, "python", "-c", "import mmldlm; print(mmldlm.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(installed.parent), where
    settings = [f"data.path={tiny_store}", "train.steps=2", "validation.every=0", *SMALL.split()]
    result = run(installed, project, "mmldlm", "train", "configs/tiny.yaml", *settings, "run.dir=runs/own")
    assert result.returncode == 0, result.stderr
    assert json.loads((project / "runs/own/exit.json").read_text())["code"] == 0
    result = run(installed, project, "mmldlm", "sample", "runs/own", "--mode", "joint", "sampling.steps=2")
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 1, result.stderr


@pytest.mark.quick
def test_links_of_the_package_lead_to_the_files_of_the_repository() -> None:
    links = [path for path in (ROOT / "mmldlm/project").rglob("*") if path.is_symlink()]
    assert len(links) >= 8
    for link in links:
        assert link.resolve() == ROOT / link.relative_to(ROOT / "mmldlm/project")


def kubernetes() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


@pytest.mark.quick
def test_parts_of_the_kubernetes_job_agree() -> None:
    job, service = (kubernetes()[kind] for kind in ("Job", "Service"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["NPROC_PER_NODE"])
    # The host name of pod 0, in the domain of the headless service that selects the job's pods.
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.quick
def test_files_that_deploy_names_are_in_a_new_folder() -> None:
    for path in (ROOT / "deploy").iterdir():
        for name in re.findall(r"\b(?:scripts|configs|deploy)/[\w./-]+\w", path.read_text(encoding="utf-8")):
            assert (ROOT / "mmldlm/project" / name).is_file(), f"{path.name}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ["kubernetes", "skypilot"])
def test_commands_of_the_manifests_train_on_two_nodes(
    manifest: str, installed: Path, project: Path, tiny_store: Path, tmp_path: Path
) -> None:
    """What each node would run, with a smaller model on this machine's cores."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "NNODES": 2,
        "NPROC_PER_NODE": 1,
        "NODE_CHECK": "skip",
    }
    if manifest == "kubernetes":
        (container,) = kubernetes()["Job"]["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["bash", "-c"]
        (script,) = container["args"]
        nodes = [{"JOB_COMPLETION_INDEX": rank} for rank in range(2)]
    else:
        script = yaml.safe_load((ROOT / "deploy/skypilot.yaml").read_text(encoding="utf-8"))["run"]
        nodes = [
            {
                "SKYPILOT_NODE_RANK": rank,
                "SKYPILOT_NUM_NODES": 2,
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
                "SKYPILOT_NUM_GPUS_PER_NODE": 1,
            }
            for rank in range(2)
        ]
        script = script.replace("MASTER_PORT=29500", f"MASTER_PORT={place['MASTER_PORT']}")
    small = f"configs/tiny.yaml data.path={tiny_store} run.dir={tmp_path}/run train.steps=2 validation.every=0 {SMALL}"
    assert script.count(MANIFEST_RUN) == 1
    path = {"PATH": f"{installed}{os.pathsep}{os.environ['PATH']}", "PYTHON": "", "PYTHONPATH": ""}
    started = [
        subprocess.Popen(
            ["bash", "-c", script.replace(MANIFEST_RUN, small)],
            cwd=project,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(tmp_path / "logs", **place, **path, **node),
        )
        for node in nodes
    ]
    for node in started:
        out, _ = node.communicate(timeout=TEST_TIMEOUT_S)
        assert node.returncode == 0, out
    startup = json.loads((tmp_path / "run/startup.json").read_text())
    assert "fsdp2" in json.dumps(startup) and json.loads((tmp_path / "run/exit.json").read_text())["code"] == 0
