"""Read and validate the records of `metrics.jsonl` and other files of a run. Imports no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from mmldlm.errors import DataError, ExitCode
from mmldlm.utils.files import read_regular
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import short_repr

Record = dict[str, Any]
_ModelT = TypeVar("_ModelT", bound=BaseModel)
Count = Annotated[int, Field(ge=0, le=2**53)]  # up to 2**53 a float is exact


class _Model(BaseModel):
    """Base of all models: it declares the keys that readers use, and allows others."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Rank(_Model):
    """A rank in the start-up report."""

    host: str
    pid: Count
    name: str = ""
    device: str = ""
    device_memory_mib: FiniteFloat | None = None
    host_memory_mib: FiniteFloat | None = None


class StartupReport(_Model):
    """The start-up report: the content of `startup.json`, and part of the record of a start."""

    world_size: Count | None = None
    engine: str | None = None
    sharding: str | None = None
    ranks: list[Rank] = []
    versions: dict[str, str] | None = None
    data_manifest: str | None = None


class ExitReport(_Model):
    """How a rank ended. `exit.json` is the report of the run, `exit.rank*.json` are reports of other ranks."""

    rank: Count
    code: int
    step: Count
    cause: str
    time: FiniteFloat

    @property
    def is_clean(self) -> bool:
        """Return whether the rank finished, or was stopped and saved."""
        return self.code in (ExitCode.DONE, ExitCode.STOPPED)


class Lock(_Model):
    """The content of `run.lock`: the process of rank 0, while it holds the folder or after it was killed."""

    host: str
    pid: Count
    started: Annotated[datetime, Field(strict=False)]


class _Record(_Model):
    """A record of any kind. A key with a default belongs to the kind in its comment, or to several."""

    kind: str
    step: Count
    time: FiniteFloat
    nonfinite: list[str] = []
    grad_norms: list[float | None] = []  # train
    reason: str = ""  # skip
    sha256: str = ""  # checkpoint
    error: str = ""  # mirror
    stopped_by: str = ""  # end


class _Source(_Model):
    path: str
    sha256: str


class _Start(_Record, StartupReport):
    total_steps: Count | None = None
    config: dict[str, Any] | None = None
    resumed_from: _Source | None = None


class _Heartbeat(_Record):
    what: str


# Kinds of records with more than one additional key, or with a required one.
_MODELS: dict[str, type[_Record]] = {"start": _Start, "resume": _Start, "heartbeat": _Heartbeat}


def check_record(line: bytes) -> Record:
    """Parse and validate a line of `metrics.jsonl`. Metrics that were not finite become NaN.

    Raises:
        DataError: The line is no record, or a value is missing or has the wrong type.
    """
    try:
        record: Record = json.loads(line)
        kind = str(record.get("kind")) if isinstance(record, dict) else ""
        _MODELS.get(kind, _Record).model_validate(record)
    except ValidationError as error:
        problem = error.errors()[0]
        key = printable(".".join(map(str, problem["loc"])) or "record")
        if problem["type"] == "missing":
            raise DataError(f"{key}: expected in this record, found none") from None
        raise DataError(f"{key}: {problem['msg']}, found {short_repr(problem['input'])}") from None
    except (ValueError, RecursionError):
        raise DataError("is no JSON") from None
    for key in record.get("nonfinite", ()):
        if key in record:  # otherwise the key is a path into a nested value, e.g. "ranks.0.loss"
            record[key] = math.nan
    for key, value in record.items():
        # Only metrics have a slash. A metric that does not exist in this record is null.
        if "/" not in key or value is None or value is math.nan:
            continue
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise DataError(f"{printable(key)}: expected a number, found {short_repr(value)}")
    return {sys.intern(key): value for key, value in record.items()}


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in `path`, or an empty one if the file is missing, torn or no JSON object."""
    try:
        content = json.loads(read_regular(path, path.parent))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_model(path: Path, model: type[_ModelT]) -> _ModelT | None:
    """Return the content of `path` as `model`, or None if the file is missing, torn or does not match."""
    try:
        return model.model_validate_json(read_regular(path, path.parent))
    except (OSError, ValueError):
        return None
