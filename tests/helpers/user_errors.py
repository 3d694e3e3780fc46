"""The contract of user errors: one line on stderr and a documented exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CompletedProcess

import pytest

from mmldlm.errors import MmldlmError


def assert_user_error(
    result: tuple[int, str] | CompletedProcess[str], code: int, *must_name: str, alone: bool = True
) -> None:
    """Check that a command ended with `code` and one line of error, without a traceback.

    Args:
        result: The finished process, or (exit code, stderr) of a command called in this process.
        must_name: Texts that the line contains.
        alone: Nothing else is on stderr. With False other lines may come before it.
    """
    status, errors = (result.returncode, result.stderr) if isinstance(result, CompletedProcess) else result
    assert status == code, errors
    lines = errors.splitlines()
    assert [line.startswith("mmldlm: error: ") for line in lines].count(True) == 1, errors
    assert lines[-1].startswith("mmldlm: error: ") and (len(lines) == 1 or not alone), errors
    assert "Traceback" not in errors, errors
    assert all(text in lines[-1] for text in must_name), (must_name, lines[-1])


@contextmanager
def refused(kind: type[MmldlmError], *must_name: object) -> Iterator[None]:
    """Check that the block raises an error of this kind, in one line that contains all of `must_name`."""
    with pytest.raises(kind) as error:
        yield
    line = str(error.value)
    assert "\n" not in line and not [name for name in map(str, must_name) if name not in line], (must_name, line)
