"""Training state as named tensors and JSON, independent of the engine. Nothing is ever unpickled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.checkpoint.tensors import meta_of
from mmldlm.errors import DataError
from mmldlm.utils.short_repr import display_name, short_repr

# Components that wrappers (activation checkpointing, torch.compile, FSDP) add to parameter names.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

NO_STATE = ":empty"  # marks a parameter that has not had its first step
NORM_WINDOW = 100  # the median of this many gradient norms defines a spike: fewer are noisy, more lag behind
RISE = 0.02  # a validation loss is clearly higher if it exceeds the lowest one by this share
LOSS_WINDOW = 100  # at most this many training losses are averaged for a plateau measurement
_SINCE_0_2 = {"judged_by", "best_step", "last_validation", "worse_in_a_row"}  # fields that earlier checkpoints lack


@dataclass
class TrainState:
    """Progress of a run. Its noise follows from `step`, its samples from `samples_drawn`."""

    step: int = 0
    samples_seen: int = 0
    samples_drawn: int = 0  # position in the sample order, which includes samples of skipped steps
    tokens_seen: int = 0
    threads: int = 0  # PyTorch's threads on a CPU
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    # The validations so far, judged by one of their losses.
    judged_by: str = "validation/total"
    best_validations: list[float] = dataclasses.field(default_factory=list)  # lowest validation losses, ascending
    best_step: int = 0  # step of the lowest loss
    last_validation: float | None = None
    worse_in_a_row: int = 0  # validations since the lowest loss
    # Gradient norms of the last accepted steps, see `mmldlm.trainer.step_guard`.
    accepted_norms: list[float] = dataclasses.field(default_factory=list)
    loss_scale: float | None = None  # fp16 only, see `mmldlm.distributed.grad_scaler`
    steps_at_scale: int = 0  # consecutive steps without overflow
    # The plateau schedule, see `mmldlm.optim.lr_schedule`.
    lr_cuts: int = 0  # reductions of the learning rate so far
    plateau_best: float | None = None  # the lowest loss
    plateau_since: int = 0  # step of that loss, or of the last reduction
    plateau_losses: list[float] = dataclasses.field(default_factory=list)  # training losses since the last measurement

    def judge(self, metric: str, loss: float, keep: int) -> bool:
        """Record a validation's loss and return whether it is among the `keep` best."""
        if metric != self.judged_by:  # an earlier version, or other modes, judged by another loss
            self.judged_by, self.best_validations, self.worse_in_a_row = metric, [], 0
        self.last_validation, self.worse_in_a_row = None, self.worse_in_a_row + 1
        if not math.isfinite(loss):
            return False
        self.last_validation = loss
        if not self.best_validations or loss < self.best_validations[0]:
            self.best_step, self.worse_in_a_row = self.step, 0
        self.best_validations = sorted([*self.best_validations, loss])[: max(1, keep)]
        return loss in self.best_validations[:keep]

    def overfitting(self) -> dict[str, Any] | None:
        """Return the last and the lowest validation loss if the last one is clearly higher, otherwise None."""
        best, last = self.best_validations[:1], self.last_validation
        if not best or last is None or last <= best[0] + RISE * abs(best[0]):
            return None
        return {"metric": self.judged_by, "loss": last, "lowest": best[0], "lowest_step": self.best_step}

    def to_json(self) -> str:
        """Return the state as JSON with a trailing newline."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> TrainState:
        """Restore the state that `to_json` wrote. Raises DataError if another version wrote it."""
        values, names = json.loads(text), {field.name for field in dataclasses.fields(cls)}
        if differing := (values.keys() ^ names) - (_SINCE_0_2 - values.keys()):
            differing = ", ".join(sorted(differing))
            raise DataError(
                f"training state: {differing}: only the checkpoint or only this version has it; train the run again"
            )
        return cls(**values)


def clean_name(name: str) -> str:
    """Return a parameter's name as it is in the unwrapped model."""
    # Only a leading "module." comes from a wrapper (DDP, DeepSpeed). A layer of the model may have this name, too.
    return ".".join(part for part in name.removeprefix("module.").split(".") if part not in _WRAPPERS)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters (tied ones once) and persistent buffers by clean name, detached but not copied."""
    return {name: tensor.detach() for name, tensor in _model_tensors(model)}


def weights_hash(model: Any) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of a model's parameters and persistent buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model_state(model).items()):
        digest.update(f"{name} {_describe(tensor)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise `DataError` if names, dtypes or shapes of `tensors`, which are not read, differ from the model's."""
    targets = dict(_model_tensors(model))
    _check_names("the model", targets.keys(), tensors.keys())
    _check_types(targets, meta_of(tensors))


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model in place.

    Raises:
        DataError: Names, dtypes or shapes differ from the model's, and nothing was changed. Or a file is damaged.
    """
    check_model_state(model, tensors)
    with torch.no_grad():
        for name, target in _model_tensors(model):
            target.copy_(tensors[name])


def check_ema_weights(model: nn.Module, ema: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """Check the saved EMA weights against the saved optimizer state and the shapes of the unwrapped `model`.

    Raises:
        DataError: `ema` and `optimizer` do not have the same parameters, or a dtype or shape differs.
    """
    _check_names("its optimizer's state", {entry.rpartition("/")[0] for entry in optimizer}, ema.keys())
    _check_types({name: tensor for name, tensor in _model_tensors(model) if name in ema}, meta_of(ema))


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as `{"parameter.name/exp_avg": tensor, "parameter.name/step": ...}`.

    Learning rate and other hyperparameters are not included, since they follow from config and step.
    """
    entries: dict[str, Tensor] = {}
    for name, parameter in _optimized_parameters(optimizer, model).items():
        state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
        if not state:  # stored explicitly before the first step, so that a missing entry is always an error
            entries[f"{name}/{NO_STATE}"] = torch.empty(0)
        entries |= {f"{name}/{key}": value.detach() for key, value in state.items()}
    return entries


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore a state from `optimizer_state` into an optimizer with the same parameters, in any order.

    Raises:
        DataError: Names, dtypes or shapes differ from the optimizer's. Nothing was changed.
    """
    parameters = _optimized_parameters(optimizer, model)
    check_optimizer_entries({name: parameter.shape for name, parameter in parameters.items()}, tensors)
    states: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for entry, tensor in tensors.items():
        name, _, key = entry.rpartition("/")
        if key != NO_STATE:
            states[name][key] = tensor.clone()  # the optimizer may keep this tensor and update it in place
    # Keys are numbers: a parameter's place in the groups. `load_state_dict` moves each tensor to the device and dtype
    # that the optimizer's implementation expects.
    state = {number: entries for number, entries in enumerate(states.values()) if entries}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def check_optimizer_entries(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    """Check entries from `optimizer_state` against the shape of each parameter, given by clean name.

    Raises:
        DataError: The entries belong to other parameters, or a dtype or shape does not match.
    """
    _check_names("the optimizer", shapes.keys(), {entry.rpartition("/")[0] for entry in tensors})
    for entry, tensor in meta_of(tensors).items():
        name, _, key = entry.rpartition("/")
        shape = torch.Size() if key == "step" else shapes[name]
        if key != NO_STATE and not (tensor.is_floating_point() and tensor.shape == shape):
            raise DataError(
                f"{display_name(entry)} is {_describe(tensor)} in the checkpoint, {list(shape)} in the optimizer"
            )


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((clean_name(name), parameter) for name, parameter in model.named_parameters())
    yield from ((clean_name(name), buffer) for name, buffer in model.named_buffers() if name in persistent)


def _optimized_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters by clean name, in the order of the optimizer's groups."""
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(id(parameter) in names for parameter in parameters), "the optimizer holds parameters of another model"
    return {names[id(parameter)]: parameter for parameter in parameters}


def _check_types(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        saved, expected = _describe(tensors[name]), _describe(target)
        if saved != expected:
            raise DataError(f"{name} is {saved} in the checkpoint, {expected} in the model")


def _describe(tensor: Tensor) -> str:
    """Return dtype and shape as text, e.g. `float32 [4, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {short_repr(list(tensor.shape))}"


def _check_names(owner: str, expected: Any, saved: Any) -> None:
    missing, unexpected = sorted(expected - saved), sorted(saved - expected)
    if missing or unexpected:
        raise DataError(f"checkpoint and {owner} differ: missing {_join(missing)}; unexpected {_join(unexpected)}")


def _join(names: list[str]) -> str:
    """Join the first four names, and add how many more there are."""
    text = ", ".join(map(display_name, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return text or "none"
