"""What becomes of freed memory on a CPU.

The C library gives large blocks back to the system at once. A step frees and asks for the same ones again and again,
and each time the system hands them out page by page, filled with zeros.
"""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = -1  # taken as the largest size there is
_GROWTH = 64 * 2**20


def keep_freed_memory() -> bool:
    """Keep freed blocks for what comes next in this process, where the C library is glibc; whether it does.

    Threads that came before keep theirs likewise. Variables MALLOC_* and GLIBC_TUNABLES of the environment hold.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (others may have a mallopt of another meaning)
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH))
        return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
    except (AttributeError, OSError, TypeError):
        return False
