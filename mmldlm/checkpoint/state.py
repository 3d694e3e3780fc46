"""Training state as named tensors and JSON, the same under every engine; nothing is ever unpickled."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.errors import DataError
from mmldlm.utils.short_repr import cut, named, shown

# What wrappers (activation checkpointing, compile) put into parameter names.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

# Entries of the optimizer's state that are no tensor: "<parameter>/step:int" and the like.
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {"int": (int, torch.int64), "float": (float, torch.float64)}
NO_STATE = ":empty"
_SCALARS = frozenset({"step", "eta", "mu"})  # entries of PyTorch's optimizers that are one number
NORM_WINDOW = 100  # norms that a spike is measured against: the median of fewer is restless, that of more comes late
LOSS_WINDOW = 100  # training losses, at most, that one measurement of a plateau is the mean of
_WINDOWS = {"accepted_norms": NORM_WINDOW, "plateau_losses": LOSS_WINDOW}


@dataclass
class TrainState:
    """Where a run is. Its noise follows from `step`, its samples from `samples_drawn`."""

    step: int = 0
    samples_seen: int = 0
    samples_drawn: int = 0  # from the sample order, those of skipped steps included
    tokens_seen: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_validations: list[float] = dataclasses.field(default_factory=list)  # the lowest losses, ascending
    accepted_norms: list[float] = dataclasses.field(
        default_factory=list
    )  # gradient norms, see `mmldlm.trainer.step_guard`
    loss_scale: float | None = None  # in fp16, see `mmldlm.distributed.grad_scaler`
    steps_at_scale: int = 0  # in a row that did not overflow
    micro_batch_limit: int | None = None  # samples; larger ones did not fit, see `mmldlm.trainer.auto_batch_size`
    lr_cuts: int = 0  # of the learning rate by a plateau, see `mmldlm.optim.lr_schedule`, as what follows
    plateau_best: float | None = None  # the lowest loss
    plateau_since: int = 0  # step of that loss, or of the last cut
    plateau_losses: list[float] = dataclasses.field(default_factory=list)  # of training, since the last measurement

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> TrainState:
        """Strict: DataError for a missing or unknown key, a wrong type, a negative or non-finite number."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"training state is not JSON: {cut(str(error))}") from error
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            found = sorted(values) if isinstance(values, dict) else values
            raise DataError(f"training state has {shown(found)}, expected the keys {sorted(names)}")
        for name, value in values.items():
            if isinstance(getattr(cls(), name), list):
                good = isinstance(value, list) and all(type(item) is float and math.isfinite(item) for item in value)
                if name in _WINDOWS:
                    good = good and len(value) <= _WINDOWS[name] and min(value, default=0.0) >= 0
            elif name == "plateau_best":
                good = value is None or (type(value) is float and 0 <= value < math.inf)
            elif name == "loss_scale":
                good = value is None or (type(value) is float and 0 < value < math.inf)
            elif name == "micro_batch_limit":
                good = value is None or (type(value) is int and 0 < value < 2**63)
            else:
                good = type(value) is int and 0 <= value < 2**63
            if not good:
                raise DataError(f"training state: {name} is {shown(value)}")
        return cls(**values)


def clean_name(name: str) -> str:
    """A parameter's name as the unwrapped model has it."""
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and persistent buffers, by clean name."""
    return {name: tensor.detach() for name, tensor in _model_tensors(model)}


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model in place.

    Raises:
        DataError: names or shapes are not exactly the model's; then nothing was changed.
    """
    targets = dict(_model_tensors(model))
    _check_names("the model", targets.keys(), tensors.keys())
    _check_kinds(targets, tensors)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])


def check_average(model: nn.Module, average: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """DataError where `average` is not of exactly the parameters that the saved `optimizer` state is of.

    It is checked against the shapes of the bare `model`.
    """
    _check_names("its optimizer's state", {entry.rpartition("/")[0] for entry in optimizer}, average.keys())
    _check_kinds({name: tensor for name, tensor in _model_tensors(model) if name in average}, average)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `{"parameter.name/exp_avg": tensor, "parameter.name/step": ...}`.

    Learning rate and other settings are not in it: they follow from config and step.
    """
    flat: dict[str, Tensor] = {}
    for name, parameter in _optimized(optimizer, model).items():
        state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
        if not state:  # before the first step; named, so that absence is always an error
            flat[f"{name}/{NO_STATE}"] = torch.empty(0)
        for key, value in state.items():
            if isinstance(value, Tensor):
                flat[f"{name}/{key}"] = value.detach()
            else:
                kind = type(value).__name__
                assert kind in _NUMBERS, f"optimizer state {key} of {name} is a {kind}"
                flat[f"{name}/{key}:{kind}"] = torch.tensor(value, dtype=_NUMBERS[kind][1])
    return flat


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_state` gave, into an optimizer over the same parameters in any order.

    Raises:
        DataError: parameter names or shapes are not exactly the optimizer's; then nothing was changed.
    """
    parameters = _optimized(optimizer, model)
    check_optimizer_entries({name: parameter.shape for name, parameter in parameters.items()}, tensors)
    found: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for entry, tensor in tensors.items():
        name, _, key = entry.rpartition("/")
        key, _, kind = key.partition(":")
        if kind in _NUMBERS:
            found[name][key] = _NUMBERS[kind][0](tensor.item())
        elif not kind:
            found[name][key] = tensor.clone()  # the optimizer may keep it, and writes to it
    # PyTorch's own loading puts each tensor on the device and in the type that the implementation wants.
    order = {id(parameter): name for name, parameter in parameters.items()}
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: found[order[id(parameter)]] for index, parameter in enumerate(flat)}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


def check_optimizer_entries(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """DataError where the state in `tensors` is not that of exactly the parameters in `shapes`."""
    _check_names("the optimizer", shapes.keys(), {entry.rpartition("/")[0] for entry in tensors})
    for entry, tensor in tensors.items():
        name, _, key = entry.rpartition("/")
        key, _, kind = key.partition(":")
        if kind in _NUMBERS:
            shape, good = torch.Size(), tensor.dtype == _NUMBERS[kind][1]
        else:
            shape = torch.Size() if key in _SCALARS else shapes[name]
            good = tensor.is_floating_point() and not kind
        if f"{key}:{kind}" != NO_STATE and not (good and tensor.shape == shape):
            raise DataError(f"{named(entry)} is {_kind(tensor)} in the checkpoint, {list(shape)} in the optimizer")


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((clean_name(name), parameter) for name, parameter in model.named_parameters())
    yield from ((clean_name(name), buffer) for name, buffer in model.named_buffers() if name in persistent)


def _optimized(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by clean name."""
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(id(parameter) in names for parameter in parameters), "the optimizer holds parameters of another model"
    return {names[id(parameter)]: parameter for parameter in parameters}


def _check_kinds(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        found, expected = _kind(tensors[name]), _kind(target)
        if found != expected:
            raise DataError(f"{name} is {found} in the checkpoint, {expected} in the model")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {shown(list(tensor.shape))}"


def _check_names(owner: str, expected: Any, found: Any) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        raise DataError(f"checkpoint and {owner} differ: missing {_some(missing)}; not wanted {_some(extra)}")


def _some(names: list[str]) -> str:
    some = ", ".join(map(named, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return some or "none"
