"""Tuning of glibc's malloc, which keeps freed memory in the process.

By default glibc returns large blocks to the kernel at once. A training step frees and allocates the same blocks again
and again, and each time the kernel maps them page by page, filled with zeros.
"""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = -1  # converted to the largest unsigned size
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Make malloc reuse freed blocks instead of returning them to the kernel.

    Also affects threads that exist already. Does nothing if the environment has MALLOC_* or GLIBC_TUNABLES.

    Returns:
        Whether it succeeded; False if the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (mallopt of other C libraries may have another meaning)
        # Never one of them alone: that ends glibc's own adaptation of its thresholds, and steps get slower.
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH_BYTES))
        return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
    except (AttributeError, OSError, TypeError):
        return False
