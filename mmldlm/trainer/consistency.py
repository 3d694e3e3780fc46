"""Checks that all ranks have the same config, data, versions and run folder."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import mmldlm
from mmldlm.config import RunConfig
from mmldlm.data.store import Store
from mmldlm.errors import ConfigError, StorageError
from mmldlm.settings.declaration import flat_settings
from mmldlm.utils.files import probe_file, wait_until_visible

if TYPE_CHECKING:
    from mmldlm.distributed.engine import Engine

SHARED_FOLDER_TIMEOUT_S = 5.0
PACKAGES = ("torch", "accelerate", "deepspeed", "numpy")
ABSENT = "absent"


def fingerprint(config: RunConfig, store: Store) -> dict[str, str]:
    """Return everything that determines the curves, as `config.*`, `data.*`, `version.*` and `git`, in milliseconds.

    Data is represented by the hashes of its manifests. Paths are left out, because they may differ between nodes.
    """
    settings = {key: value for key, value in flat_settings(config).items() if key not in ("data.path", "data.mixture")}
    return {
        **{f"config.{key}": v if isinstance(v, str) else json.dumps(v, sort_keys=True) for key, v in settings.items()},
        "data.manifest": store.identity,
        "data.tokenizer": str(store.manifest.tokenizer["sha256"]),
        **{f"version.{name}": version for name, version in versions().items()},
        "git": revision(),
    }


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, mmldlm, and the packages that change numbers, and of `more` packages."""
    own = {"python": platform.python_version(), "mmldlm": mmldlm.__version__, "code": code_hash()}
    return own | {name: _version(name) for name in (*PACKAGES, *more)}


def compare_ranks(engine: Engine, config: RunConfig, store: Store) -> dict[str, str]:
    """Return the ranks' common fingerprint, or raise a `ConfigError` with the differing ranks and keys (collective)."""
    fingerprints = engine.gather(fingerprint(config, store), "comparison of configs, versions and data")
    differences = disagreements(fingerprints)
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigError("the ranks were not started alike: " + "; ".join(differences[:3]) + more)
    return fingerprints[0]


@contextmanager
def writable_run_folder(run_dir: Path) -> Iterator[None]:
    """Create a missing run folder while the context is open. `StorageError` if it cannot be written."""
    created = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            with probe_file(run_dir):
                pass
        except OSError as error:
            raise StorageError(f"run.dir: cannot write {run_dir.resolve()}: {error.strerror}") from None
        yield
    finally:
        with suppress(OSError):  # the folder may be in use by now
            for folder in created:
                folder.rmdir()


def check_run_folder(engine: Engine, run_dir: Path) -> None:
    """Raise `ConfigError` on all ranks if any of them does not see a file of rank 0 in the run folder (collective)."""
    if engine.world_size == 1:
        return
    # Keep the file until every rank has looked for it.
    with ExitStack() as stack:
        name = stack.enter_context(probe_file(run_dir)) if engine.is_main else None
        name = engine.gather(name, "name of a file in the run folder")[0]
        visible = wait_until_visible(run_dir / name, SHARED_FOLDER_TIMEOUT_S)
        results = engine.gather((visible, socket.gethostname()), "sight of a file in the run folder")
    missing = [f"rank {rank} on {host}" for rank, (visible, host) in enumerate(results) if not visible]
    if missing:
        raise ConfigError(
            f"run.dir: {run_dir} is not the same folder on all nodes: {', '.join(missing)} cannot see rank 0's file in "
            "it; put it on a file system that all nodes share"
        )


def code_hash(package: Path = Path(mmldlm.__file__).parent) -> str:
    """Return the start of the SHA-256 of all sources of the package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def revision(package: Path = Path(mmldlm.__file__).parent) -> str:
    """Return the short git revision of the package's checkout, with "+changes" if files differ, or ""."""
    if not (package.parent / ".git").exists():  # an installed package may lie inside another project's checkout
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--dirty=+changes"]
    try:
        result = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def disagreements(fingerprints: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each key that differs between ranks, naming the first rank that differs from rank 0."""
    lines = []
    for key in dict.fromkeys(key for fingerprint in fingerprints for key in fingerprint):
        values = [fingerprint.get(key, ABSENT) for fingerprint in fingerprints]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if rank is not None:
            lines.append(f"rank {rank}: {key} is {_short(values[rank])}, {_short(values[0])} on rank 0")
    return lines


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def _short(value: str) -> str:
    """Shorten a value for a message: a hash becomes its first 12 digits."""
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value or "empty"
