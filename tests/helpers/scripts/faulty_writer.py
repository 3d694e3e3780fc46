"""`mmldlm.train` whose checkpoint files are slow to write or cannot be written on one rank.

WRITER=slow: each save takes a second longer. WRITER=fail: the second save fails on rank 1, as a full disk does.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.errors import StorageError
from mmldlm.trainer import checkpointer as saving
from mmldlm.utils.files import FileInfo
from tests.helpers.trainer_scripts import train_and_exit

FAULT, RANK = os.environ["WRITER"], int(os.environ.get("RANK", "0"))
_write_files = saving.write_files
calls = 0


def write_files(folder: Path, files: Mapping[str, Any]) -> dict[str, FileInfo]:
    global calls
    calls += 1
    if FAULT == "slow":
        time.sleep(1)
    elif RANK == 1 and calls == 2:
        raise StorageError(f"cannot write {folder}: {os.strerror(errno.ENOSPC)}")
    return _write_files(folder, files)


saving.write_files = write_files
train_and_exit()
