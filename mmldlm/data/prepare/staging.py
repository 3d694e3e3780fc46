"""The folder of an unfinished store: what a preparation has done so far, piece by piece.

`STORE.incomplete/` holds `plan.json`, the lock, the files of the crew, and `work-PLAN/` with a folder for each piece of
work that is done. Such a folder appears in one rename, so that a preparation that was killed goes on behind the
last of them, and two processes that do the same piece do each other no harm.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.plan import Plan
from mmldlm.errors import DataError, PeerLostError
from mmldlm.utils.files import fsync, make_folder, write_atomically

STORE = "store"  # the piece that becomes the store
_PLAN, _RESULT, _MERGING = "plan.json", "result.json", "merging"


def unfinished(out: Path) -> Path:
    """Where everything lies until the store at `out` appears in one rename."""
    return out.with_name(f"{out.name}.incomplete")


class Workshop:
    """The work of one plan on the store at `out`. `bind` by the leading process comes first."""

    def __init__(self, out: Path, identity: str):
        self.folder = unfinished(out)
        self._work = self.folder / f"work-{identity}"

    @classmethod
    def bind(cls, out: Path, plan: Plan, config: PrepareConfig) -> Workshop:
        """Take up the work of this plan where it was left, or begin it.

        DataError where the work of another plan lies here, unless `config.overwrite`.
        """
        folder, shop = unfinished(out), cls(out, plan.identity)
        path = folder / _PLAN
        if (text := cls.plan_in(folder)) not in ("", plan.to_json()):
            if not config.overwrite:
                other = ", ".join(_differing(text, plan, config))
                raise DataError(
                    f"{folder}: left unfinished with other {other}; expected the same to go on, or --overwrite to "
                    "start anew"
                )
            path.unlink()
        for left in folder.glob("work-*"):
            # Also that of a store which was put in its place, and only had to be cleared away.
            if left != shop._work or (shop.has(_MERGING) and not shop.has(STORE)):
                shutil.rmtree(left)
        make_folder(shop._work)
        for torn in shop._work.glob(".*"):
            shutil.rmtree(torn)
        write_atomically(path, plan.to_json())
        return shop

    @staticmethod
    def plan_in(folder: Path) -> str:
        """The text of the plan that the work in this folder is of; "" where there is none."""
        path = folder / _PLAN
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def has(self, piece: str) -> bool:
        return (self._work / piece).exists()

    def path(self, piece: str) -> Path:
        """The folder of a piece that is done."""
        return self._work / piece

    def begin_merging(self) -> None:
        """From here on shards move to the folder of the store, which itself moves to its place at the end."""
        self.path(_MERGING).touch()
        fsync(self._work)

    def result(self, piece: str) -> dict[str, Any]:
        """What was told of a piece that is done."""
        return json.loads((self._work / piece / _RESULT).read_text(encoding="utf-8"))

    @contextmanager
    def doing(self, piece: str) -> Iterator[tuple[Path, dict[str, Any]]]:
        """A folder to fill and a result, of JSON values, to be told; both are there for good when the block ends."""
        temporary = self._work / f".{piece}.{uuid.uuid4().hex}"
        result: dict[str, Any] = {}
        try:
            temporary.mkdir()
            yield temporary, result
            (temporary / _RESULT).write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
            for path in [*temporary.rglob("*"), temporary]:
                fsync(path)
            try:
                temporary.rename(self._work / piece)
            except OSError:
                if not self.has(piece):  # else a process of an earlier session was as fast
                    raise
        except FileNotFoundError as error:
            if temporary.exists():
                raise
            raise PeerLostError(f"{temporary}: no longer there: another process leads now") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        fsync(self._work)


def _differing(text: str, plan: Plan, config: PrepareConfig) -> list[str]:
    """What another plan differs in."""
    try:
        other = Plan.from_json(text)
    except (ValueError, TypeError, KeyError, AttributeError):
        return ["contents"]
    found = config.differing(other.options)
    if other.sources != plan.sources:
        found.append("sources")
    if other.version != plan.version:
        found.append(f"version ({other.version})")
    return found or ["parts"]
