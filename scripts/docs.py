"""Write what is generated from the code: tables of settings, engines and alerts in docs/, and configs/schema.json.

python scripts/docs.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mmldlm.config import RunConfig
from mmldlm.distributed.capabilities import capability_table
from mmldlm.settings.declaration import dump, key_of
from mmldlm.tools.config import config_schema, to_flow_yaml
from mmldlm.tools.monitor.alerts import alert_table

ROOT = Path(__file__).resolve().parent.parent
_MARKED = re.compile(r"(?<=<!-- generated -->\n).*?(?=<!-- /generated -->)", re.DOTALL)
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_SCALARS = {int: "whole number", float: "number", bool: "true | false", str: "text", NoneType: "null"}


def settings_table() -> str:
    """Return a section per group and a row per setting, in order of declaration, with advice in italics."""
    return "\n".join(_sections(RunConfig, "", "Without a group", "Top-level keys of the YAML file."))


def _sections(cls: type, prefix: str, title: str, about: str) -> Iterator[str]:
    """Yield the section of the settings in `cls`, whose keys begin with `prefix`, and those of the groups in it."""
    hints, rows, groups = get_type_hints(cls), [], []
    for field in dataclasses.fields(cls):
        key, hint, doc = prefix + key_of(field), hints[field.name], field.metadata["doc"]
        if dataclasses.is_dataclass(hint):
            groups.append(_sections(hint, f"{key}.", f"`{key}`", f"{doc[:1].upper()}{doc[1:]}."))
            continue
        bounds = [f"{label} {field.metadata[name]}" for name, label in _BOUNDS.items() if name in field.metadata]
        is_plain = field.default_factory is dataclasses.MISSING
        default = to_flow_yaml(dump(field.default if is_plain else field.default_factory()))
        advice = field.metadata["advice"]
        meaning = f"{doc}. *{advice}*" if advice else doc
        cells = [f"`{key}`", ", ".join([type_name(hint), *bounds]), f"`{default}`", meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    yield "\n".join(
        [f"## {title}", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    )
    yield from chain(*groups)


def type_name(hint: Any) -> str:
    """Return the name of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, args))
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_name, args))}]"
    if origin is dict:
        return f"map of {type_name(args[0])} to {type_name(args[1])}"
    return _SCALARS[hint]


def generated() -> dict[Path, str]:
    """Return the content of each file; of the pages, what is between the marks is new."""
    tables = {"settings": settings_table(), "engines": capability_table(), "review": alert_table()}
    contents = {ROOT / "configs" / "schema.json": f"{json.dumps(config_schema(), indent=1)}\n"}
    for name, table in tables.items():
        path = ROOT / "docs" / f"{name}.md"
        contents[path], count = _MARKED.subn(lambda _, table=table: f"\n{table}\n", path.read_text(encoding="utf-8"))
        assert count == 1, f"{path}: {count} parts are marked as generated"
    return contents


if __name__ == "__main__":
    for path, content in generated().items():
        path.write_text(content, encoding="utf-8")
