"""Checkpoints changed by someone, whose manifests match their files."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mmldlm.utils.files import sha256
from tests.helpers.save_checkpoint import whole_tensors

HASH = "0" * 64


def seal(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest with the right hash of `body`, whatever that holds."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n")


def manifest_body(path: Path) -> dict[str, Any]:
    body = json.loads((path / "manifest.json").read_bytes())
    del body["sha256"]
    return body


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and enter its size, its hash and, if it has any, its tensors in the manifest."""
    (path / name).unlink()  # not in place: a test may have it mapped
    (path / name).write_bytes(content)
    body = manifest_body(path)
    body["files"][name] = {"bytes": len(content), "sha256": sha256(path / name)}
    with suppress(SafetensorError):
        body["tensors"] |= {group: asdict(tensors) for group, tensors in whole_tensors(path, [name]).items()}
    seal(path, body)
