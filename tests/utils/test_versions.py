"""A dependency that is too old is one line at the start, before anything of it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mmldlm.utils.versions import install_command
from tests.helpers.paths import ROOT
from tests.helpers.user_errors import assert_user_error

tomllib = pytest.importorskip("tomllib", reason="Python 3.11")


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """Make `name` look installed in this version to a Python with `folder` in PYTHONPATH."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {line}" for line in requires]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]))


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command", [("mmldlm.train", "absent.yaml"), ("mmldlm.evaluate", "absent"), ("mmldlm.cli", "train", "absent.yaml")]
)
def test_a_version_out_of_range_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    install(tmp_path, "mmldlm", "0.1.0", "torch>=2", "accelerate>=1.12", 'gradio>=6; extra == "demo"')
    install(tmp_path, "accelerate", "1.10.0")
    install(tmp_path, "gradio", "1.0")  # of an extra that this command does not use
    # Would it be imported, this would be a traceback.
    (tmp_path / "accelerate.py").write_text("raise AttributeError('no cp_backend')\n")
    result = run(tmp_path, *command)
    assert result.returncode == 64 and not result.stdout
    assert result.stderr == (
        "mmldlm: error: accelerate: found version 1.10.0, expected >=1.12; pip install 'accelerate>=1.12'\n"
    )


def test_a_version_of_an_extra_is_refused_where_it_is_needed(tiny_config: Path, tmp_path: Path) -> None:
    install(tmp_path, "mmldlm", "0.1.0", 'deepspeed>=0.19.8; extra == "deepspeed"')
    install(tmp_path, "deepspeed", "0.18.0")
    result = run(tmp_path, "mmldlm.train", tiny_config, "optim.name=deepspeed_adam")
    assert_user_error(result, 64, "deepspeed: found version 0.18.0, expected >=0.19.8")


def test_other_versions_are_not_refused(tmp_path: Path) -> None:
    """A package that a command may not need is missed where it is imported; a checkout needs no metadata."""
    install(tmp_path, "mmldlm", "0.1.0", "torch>=2", "no-such-package>=1", 'psutil>=99; python_version < "3"')
    assert run(tmp_path, "mmldlm.cli", "config", "absent.yaml").stderr.startswith(
        "mmldlm: error: config file absent.yaml"
    )


@pytest.mark.quick
def test_the_packages_of_an_extra_are_those_of_the_metadata() -> None:
    """Messages name packages, not mmldlm: it may be a checkout or a wheel, and its name on PyPI is not ours."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert install_command("figures") == "pip install " + " ".join(f"'{each}'" for each in extras["figures"])


@pytest.mark.quick
def test_a_checkout_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of an error of its own, which would hide what is missing."""

    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("mmldlm.utils.versions.requires", missing)
    assert install_command("figures") == "install the extra 'figures'"


@pytest.mark.quick
def test_no_command_installs_a_name_that_nobody_owns() -> None:
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("mmldlm/**/*.py"), *ROOT.glob("scripts/*.sh")]
    assert len(sources) > 100
    for path in sources:
        assert not re.search(r"pip install [^\n]*\bmmldlm(\[|\b(?![-_/.\w]))", path.read_text()), path
