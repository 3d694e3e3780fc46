"""What the tests of hostile checkpoints share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm.checkpoint import manifest as manifest_module
from mmldlm.errors import DataError
from mmldlm.utils.files import sha256

SECONDS = 5.0
HASH = "0" * 64


def opened(read: Callable[[], Any]) -> Any:
    """What `read` gives, or None where it refuses in one short line."""
    began = time.process_time()
    try:
        found = read()
    except DataError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) <= 2000, str(error)[:3000]
        found = None
    assert time.process_time() - began < SECONDS
    return found


def seal(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest that holds together, whatever it says."""
    (path / "manifest.json").write_bytes(manifest_module._seal(body))


def body_of(path: Path) -> dict[str, Any]:
    body = json.loads((path / "manifest.json").read_bytes())
    del body["sha256"]
    return body


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Another file in a checkpoint, with a manifest that vouches for it."""
    (path / name).unlink()  # not in place: a test may have it mapped
    (path / name).write_bytes(content)
    body = body_of(path)
    body["files"][name] = {"bytes": len(content), "sha256": sha256(path / name)}
    seal(path, body)
