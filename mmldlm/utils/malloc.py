"""Tuning of memory allocation on the host and on GPUs, without importing torch.

By default, glibc returns large blocks to the kernel at once. A training step frees and allocates the same blocks again
and again, and each time the kernel maps them page by page and fills them with zeros.

On GPUs, PyTorch's allocator by default keeps segments of fixed sizes. Micro-batches differ in their number of tokens,
so blocks of many sizes split these segments until none has room for a large block (fragmentation).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = -1  # converted to the largest unsigned size
_GROWTH_BYTES = 64 * 2**20

CUDA_ALLOCATOR_OPTIONS = (
    "expandable_segments:True",
    # For checkpoint buffers: eight threads map their pages in a third of the time that cudaHostAlloc takes.
    "pinned_use_cuda_host_register:True",
    "pinned_num_register_threads:8",
)
CUDA_ALLOCATOR_ENV = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # PyTorch also reads the older name


def keep_freed_memory() -> bool:
    """Make malloc reuse freed blocks instead of returning them to the kernel. Return whether it worked (with glibc).

    It also affects threads that already exist. It does nothing if the environment has MALLOC_* or GLIBC_TUNABLES.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (mallopt may mean something else in other C libraries)
        # Always set both. One alone ends glibc's own adaptation of its thresholds, and steps get slower.
        settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH_BYTES))
        return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
    except (AttributeError, OSError, TypeError):
        return False


def configure_cuda_allocator(environment: MutableMapping[str, str]) -> None:
    """Set `CUDA_ALLOCATOR_OPTIONS` for PyTorch's allocator on GPUs, unless the user has set options in `environment`.

    Call it before CUDA starts.
    """
    if not any(name in environment for name in CUDA_ALLOCATOR_ENV):
        environment[CUDA_ALLOCATOR_ENV[0]] = ",".join(CUDA_ALLOCATOR_OPTIONS)
