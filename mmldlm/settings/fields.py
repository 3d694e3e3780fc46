"""Typed, strict settings: dataclasses from nested mappings and `key.sub=value`, and back.

pydantic checks a config against the dataclasses whose fields `declaration.setting` declares: unknown keys, wrong types
and values out of bounds are reported together.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails, SchemaValidator

from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import dump, leaves
from mmldlm.settings.yaml import parse_yaml
from mmldlm.utils.short_repr import display_name, short_repr, truncate

T = TypeVar("T")

MAX_PROBLEMS = 8  # reported for one config
MAX_MESSAGE_CHARS = 1600

# Names of other trainers, LGDLM's included, by the last part of their keys; the error message suggests ours.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "beta1": "optim.betas",
    "beta2": "optim.betas",
    "warmup": "optim.warmup_steps",
    "grad_clip": "optim.clip_norm",
    "grad_clip_norm": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "use_fused": "optim.fused",
    "lr_schedule": "schedule.lr",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "max_steps": "train.steps",
    "num_train_steps": "train.steps",
    "total_steps": "train.steps",
    "steps": "train.steps",
    "batch_size": "train.global_batch_size",
    "bs": "train.global_batch_size",
    "train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "output_dir": "run.dir",
    "save_dir": "run.dir",
    "run_name": "run.dir",
    "seed": "run.seed",
    "num_layers": "model.depth",
    "layers": "model.depth",
    "n_blocks": "model.depth",
    "hidden_size": "model.width",
    "cond_dim": "model.conditioning_width",
    "n_heads": "model.num_heads",
    "heads": "model.num_heads",
    "loss_type": "mode",
    "mode_weights": "mode",
    "sequential_schedule": "mode_schedule",
    "latent_beta_schedule": "latent.process",
    "latent_parameterization": "latent.prediction",
    "latent_loss_weight": "loss.latent_weight",
    "dtype": "precision",
    "mixed_precision": "precision",
    "compile_model": "compile.scope",
    "log_freq": "log.every",
    "eval_freq": "validation.every",
    "num_eval_batches": "validation.samples",
    "save_freq": "checkpoint.every_steps",
    "save_every_n_steps": "checkpoint.every_steps",
    "timeout": "distributed.timeout_s",
}
# Settings that are gone, and what to use in their place.
_BY_HAND = "gone; use `mmldlm explain` and `mmldlm rewind`, and delete the line"
_NO_POWERSGD = "gone with comm_hook: powersgd; use comm_hook: fp16 or bf16, and delete the line"
REMOVED = {
    "guard.on_spike": _BY_HAND,
    "guard.max_rewinds": _BY_HAND,
    "distributed.ddp.powersgd_rank": _NO_POWERSGD,
    "distributed.ddp.powersgd_start_step": _NO_POWERSGD,
}
_MIN_LIKENESS, _MIN_GROUP_LIKENESS = 0.75, 0.75  # of a key that a message suggests, and of its group


def set_dotted(tree: dict[Any, Any], assignment: str) -> None:
    """Apply one `key.sub=value` override to `tree`; the value is YAML, and a key of digits is an integer as in YAML."""
    key, equals, value = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"expected key=value, found {short_repr(assignment)}")
    *parents, leaf = (int(part) if part.isdecimal() and len(part) < 20 else part for part in key.strip().split("."))
    for parent in parents:
        group = tree.get(parent, {})
        if not isinstance(group, dict):
            raise ConfigError(f"{display_name(key)}: {display_name(parent)} is a value, expected a group of keys")
        tree[parent] = dict(group)  # copied, as a YAML alias may share the mapping with another key
        tree = tree[parent]
    tree[leaf] = parse_yaml(value, key)


# --- mapping -> dataclass ---------------------------------------------------------------------------------


def build(cls: type[T], tree: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from nested mappings.

    A `ConfigError` of one line has up to `MAX_PROBLEMS` unknown keys (and the nearest valid ones), wrong types and
    values out of bounds.
    """
    try:
        value: T = _validator(cls).validate_python(tree)  # type: ignore[arg-type]  # mypy: type[T] is no Hashable
    except ValidationError as error:
        raise ConfigError(_summary(cls, error.errors())) from None
    return value


def check_partial(cls: type, tree: Mapping[str, Any]) -> None:
    """Check some of the settings of `cls` without the checks across settings, which other files may satisfy."""
    try:
        _validator(cls).validate_python(tree)
    except ValidationError as error:
        problems = [problem for problem in error.errors() if problem["type"] != "value_error"]  # of __post_init__
        if problems:
            raise ConfigError(_summary(cls, problems)) from None


@functools.cache
def type_adapter(cls: type) -> TypeAdapter[Any]:
    """Return pydantic's view of the dataclass `cls`, with the keys of `key_of`."""
    config = ConfigDict(extra="forbid", alias_generator=lambda name: name.rstrip("_"))
    return TypeAdapter(with_config(config)(cls))


@functools.cache
def _validator(cls: type) -> SchemaValidator:
    return SchemaValidator(_strict(type_adapter(cls).core_schema))


# By type in pydantic's core schema: no value is converted to another type, numbers are finite and fit 64 bits, and a
# text, which is often a path, has one line. (pydantic's own strict mode would also refuse lists for tuples.)
_STRICT: dict[str, dict[str, Any]] = {
    "bool": {"strict": True},
    "int": {"strict": True, "ge": -(2**63), "le": 2**63 - 1},
    "float": {"strict": True, "allow_inf_nan": False},
    "str": {"strict": True, "pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"},
    "list": {"strict": True},
    "dict": {"strict": True},
}


def _strict(schema: Any) -> Any:
    """Return a core schema of pydantic with `_STRICT` added to its types, and without names for members of unions."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _strict(part) for key, part in schema.items()}
    # As a member of a union, None is named among the expected values of an error message.
    if schema.get("type") == "nullable":
        schema = {"type": "union", "choices": [schema["schema"], {"type": "none"}]}
    if schema.get("type") == "union":
        return {**schema, "choices": [(choice, "") for choice in schema["choices"]]}
    # The bounds of the setting itself come last and win.
    return {**_STRICT.get(str(schema.get("type")), {}), **schema}


# --- error messages ---------------------------------------------------------------------------------------

# By pydantic's type of the error: what was expected, with names of the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "whole number",
    "float_type": "number",
    "finite_number": "finite number",
    "string_type": "text",
    "string_unicode": "text without control characters",
    "string_pattern_mismatch": "text without control characters",
    "none_required": "null",
    "list_type": "list",
    "tuple_type": "list",
    "dict_type": "map",
    "dataclass_type": "keys below it",
    "literal_error": "{expected}",
    "missing": "a value",
    "too_long": "at most {max_length} values",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}


def _summary(cls: type, errors: Sequence[ErrorDetails]) -> str:
    """Return pydantic's errors as one line, with one problem per key."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for error in errors:  # the members of a union have no name, and "[key]" marks the key of a map
        key = ".".join(display_name(part) for part in map(str, error["loc"]) if part not in ("", "[key]"))
        by_key.setdefault(key, []).append(error)
    # A map that is one of a union's types, but has a wrong entry, is reported by the key of the entry.
    keys = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]
    known = {key for key, _ in leaves(cls)}
    problems = [_problem(key, by_key[key], known) for key in keys[:MAX_PROBLEMS]]
    return truncate("; ".join(problems), MAX_MESSAGE_CHARS)


def _problem(key: str, errors: Sequence[ErrorDetails], known: set[str]) -> str:
    """Return the message of the errors at `key`, which are several for a union."""
    kind, value = errors[0]["type"], errors[0]["input"]
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return f"unknown key {short_repr(key)}: {nearest_key(key, known)}"
    if kind == "value_error":  # of __post_init__, whose message begins with the name of the setting
        return f"{key}.{errors[0]['ctx']['error']}".lstrip(".")
    expected = " or ".join(dict.fromkeys(_expected(error) for error in errors))
    if not expected.startswith("must be"):  # a bound
        expected = f"expected {expected}"
    names = re.findall("'(.*?)'", expected)
    close = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    advice = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{key or 'config'}: {expected}, found {short_repr(value)}{advice}"


def _expected(error: ErrorDetails) -> str:
    context = {
        name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in error.get("ctx", {}).items()
    }
    return _EXPECTED[error["type"]].format(**context)


def nearest_key(key: str, known: set[str]) -> str:
    """Return advice for an unknown key: the known key of the same meaning or spelling, if there is one."""
    if key in REMOVED:
        return REMOVED[key]
    key = truncate(key)  # a long key resembles none, and is slow to compare
    group, _, leaf = key.rpartition(".")
    likeness = {candidate: _likeness(key, candidate) for candidate in sorted(known)}
    best = max(likeness, key=lambda candidate: likeness[candidate])
    synonym = SYNONYMS.get(leaf)
    if synonym in known and not (group and likeness[best] == 1):  # False for None, and if these settings lack the key
        return f"did you mean {synonym!r}?"
    return f"did you mean {best!r}?" if likeness[best] >= _MIN_LIKENESS else "see docs/settings.md for the keys"


def _likeness(key: str, candidate: str) -> float:
    """Return how nearly two keys are spelled alike, from 0 to 1.

    Their last parts are compared word by word: max_val_samples is no misspelled max_bad_samples. Their groups must be
    alike too, unless the last parts are equal and say enough by themselves: tokenizer.path is not data.path.
    """
    if re.sub("[._]", "", key) == re.sub("[._]", "", candidate):
        return 1.0
    (group, _, leaf), (other_group, _, other_leaf) = key.rpartition("."), candidate.rpartition(".")
    words, other_words = leaf.split("_"), other_leaf.split("_")
    if len(words) != len(other_words):
        return 0.0
    near = min(difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(other_words, words, strict=True))
    is_near_group = difflib.SequenceMatcher(None, other_group, group).ratio() >= _MIN_GROUP_LIKENESS
    is_longer_group = bool(other_group) and group.startswith(other_group)  # as optimizer
    is_distinctive = near == 1 and (len(words) > 1 or not other_group)
    return near if not group or is_near_group or is_longer_group or is_distinctive else 0.0


def to_yaml(value: Any) -> str:
    """Return a settings dataclass as YAML."""
    return yaml.safe_dump(dump(value), sort_keys=False, allow_unicode=True, default_flow_style=False)
