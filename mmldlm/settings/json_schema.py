"""JSON schema of settings. Editors use it to complete and check the keys of a config."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import WithDefaultSchema

from mmldlm.settings.fields import type_adapter

# For the bounds of a union, pydantic writes its own names into the schema.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


class _SettingsSchema(GenerateJsonSchema):
    """pydantic's JSON schema without titles, and with the defaults of settings, but not of groups."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        if dataclasses.is_dataclass(schema.get("default")):
            return self.generate_inner(schema["schema"])
        if "default_factory" in schema:
            schema = {**schema, "default": schema["default_factory"]()}  # type: ignore[call-arg]
        return {_BOUNDS.get(name, name): value for name, value in super().default_schema(schema).items()}


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of configs of the dataclass `cls`."""
    return {
        "$schema": _SettingsSchema.schema_dialect,
        **type_adapter(cls).json_schema(schema_generator=_SettingsSchema),
    }
