"""`mmldlm new DIR`: create a project folder with presets, launcher files and the quickstart, without a checkout."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import mmldlm
from mmldlm.errors import StorageError, UsageError

FILES = Path(mmldlm.__file__).parent / "project"  # in a checkout, it has links to the folders at the root


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm new` and return the exit code."""
    parser = argparse.ArgumentParser("mmldlm new", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write to; it may have other files")
    folder: Path = parser.parse_args(argv).folder
    names = sorted(path.name for path in FILES.iterdir())
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise UsageError(f"{folder / taken[0]}: exists already, expected a folder without {', '.join(names)}")
    try:
        shutil.copytree(FILES, folder, dirs_exist_ok=True)
    except shutil.Error as error:
        _, target, reason = error.args[0][0]
        raise StorageError(f"cannot write {target}: {reason}") from None
    print(f"written to {folder}: {', '.join(names)}")
    print("next, in that folder: bash scripts/quickstart.sh; mmldlm config configs/tiny.yaml shows every setting")
    return 0
