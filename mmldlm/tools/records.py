"""Records of `metrics.jsonl`, checked once, where a line is read. Imports no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # the one that pydantic needs before Python 3.12

from mmldlm.errors import DataError
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import short_repr

Record = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=2**53)]  # exact as a float
_STRICT: ConfigDict = {"strict": True, "extra": "allow"}


@with_config(_STRICT)
class _Source(TypedDict):
    path: str
    sha256: str


@with_config(_STRICT)
class _Rank(TypedDict, total=False):
    host: str
    pid: Count
    name: str
    device: str
    device_memory_mib: FiniteFloat | None
    host_memory_mib: FiniteFloat | None


@with_config(_STRICT)
class _Record(TypedDict, total=False):
    """Keys that readers use and that are no metrics. Most may be missing, as in records of another version."""

    kind: str
    step: Count
    time: FiniteFloat
    nonfinite: list[str]
    # start, resume
    total_steps: Count
    world_size: Count
    engine: str
    sharding: str | None
    ranks: list[_Rank]
    versions: dict[str, str]
    data_manifest: str
    config: dict[str, Any] | None
    resumed_from: _Source | None
    # others
    grad_norms: list[float | None]
    reason: str
    sha256: str
    stall_s: float
    rank: Count
    host: str
    slow: bool
    slowdown: FiniteFloat
    what: str
    error: str
    stopped_by: str


check_values = TypeAdapter(_Record).validate_python  # raises ValueError; missing keys are no error
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "slow_rank": ("rank", "host", "slow", "slowdown"),
    "heartbeat": ("what",),
}


def check_record(line: bytes) -> Record:
    """Return the record in `line`, with NaN for metrics that were not finite.

    It is a `DataError` if the line is no record, or one of its values is missing or of another type.
    """
    try:
        record: Record = json.loads(line)
        check_values(record)
    except ValidationError as error:
        problem = error.errors()[0]
        key = printable(".".join(map(str, problem["loc"])) or "record")
        raise DataError(f"{key}: {problem['msg']}, found {short_repr(problem['input'])}") from None
    except (ValueError, RecursionError):
        raise DataError("is no JSON") from None
    for key in ("kind", "step", "time", *_REQUIRED.get(record.get("kind", ""), ())):
        if key not in record:
            raise DataError(f"{key}: expected in this record, found none")
    for key in record.get("nonfinite", ()):
        if key in record:  # otherwise the key is a path into a value, such as "ranks.0.loss"
            record[key] = math.nan
    for key, value in record.items():
        # A metric; null if it does not exist in this record.
        if "/" not in key or value is None or value is math.nan:
            continue
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise DataError(f"{printable(key)}: expected a number, found {short_repr(value)}")
    return {sys.intern(key): value for key, value in record.items()}


def parse_record(line: bytes) -> Record | None:
    """Return the record in `line` as `check_record`, or None."""
    try:
        return check_record(line)
    except DataError:
        return None
