"""Build and describe the optimizer of `optim`, including AdamW and Muon for parameters that FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from mmldlm.distributed.grad_scaler import to_local
from mmldlm.errors import ConfigError
from mmldlm.model.ops import runs_on_cpu
from mmldlm.optim.config import OptimConfig, OptimizerName
from mmldlm.optim.param_groups import muon_matrices, parameter_groups


def check_device(config: OptimConfig, offloaded: bool, device_type: str) -> None:
    """Raise `ConfigError` if the optimizer's kernels do not run on this type of device, "cuda" or "cpu"."""
    if config.name == "deepspeed_adam" and not offloaded and device_type != "cuda":
        raise ConfigError(
            f"optim.name: found deepspeed_adam, but without offload its kernel needs CUDA, and this is {device_type}; "
            "expected adamw, or an engine that offloads the optimizer: zero2_offload, zero3_offload"
        )


def check_state_compatible(saved: OptimizerName, requested: OptimizerName) -> None:
    """Raise `ConfigError` if optimizer `requested` cannot resume from the state of optimizer `saved`."""
    if (saved == "muon") != (requested == "muon"):
        raise ConfigError(
            f"optim.name: found {requested}, which cannot resume from the optimizer state of {saved}; expected "
            f"{saved if saved == 'muon' else 'adamw or deepspeed_adam'}"
        )


def build_optimizer(
    model: nn.Module, config: OptimConfig, offloaded: bool = False, sharded: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer for the trainable parameters of `model`. The engine must support it, see `capabilities`.

    If `offloaded`, it steps on the host. If `sharded`, the parameters will be DTensors.
    """
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "deepspeed_adam":
        from mmldlm.distributed.deepspeed_adam import build_deepspeed_adam

        return build_deepspeed_adam(parameter_groups(model, config.weight_decay), offloaded, **adamw)
    adamw["fused"] = bool(config.fused)  # auto is true on every device that we train on
    if config.name == "adamw":
        # DeepSpeed recognizes only PyTorch's own class.
        kind = ShardedAdamW if sharded else torch.optim.AdamW
        return kind(parameter_groups(model, config.weight_decay), **adamw)

    matrices = muon_matrices(model)
    muon: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon |= {"momentum": config.muon.momentum, "nesterov": config.muon.nesterov, "ns_steps": config.muon.ns_steps}
    rest = parameter_groups(model, config.weight_decay, exclude=matrices)
    return MuonAdamW(matrices, muon, rest, adamw)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the implementation for the user, for example "torch.AdamW, fused"."""
    # `MuonAdamW` has two parts, Muon and AdamW. Any other optimizer is its own only part.
    *matrices, adam = getattr(optimizer, "parts", [optimizer])
    kind = torch.optim.AdamW if isinstance(adam, ShardedAdamW) else type(adam)
    name = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    name += ", fused" if adam.param_groups[0].get("fused") else ""
    if not matrices:
        return name
    sizes = [parameter.numel() for group in matrices[0].param_groups for parameter in group["params"]]
    return f"torch.Muon for {len(sizes)} matrices of {sum(sizes):,} parameters, {name} for the rest"


class ShardedAdamW(torch.optim.AdamW):
    """PyTorch's AdamW, which updates shards of DTensors as plain tensors.

    The update is element-wise, so it needs no other shard. DTensor operations would have the same result, but take more
    work on the host, for each parameter, than the update takes on a GPU.
    """

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[torch.Tensor]) -> bool:
        has_complex = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = map(to_local, tensors)
        return bool(has_complex)


_STACKED = 8  # matrices of one shape that we orthogonalize at once


class ShardedMuon(torch.optim.Muon):
    """PyTorch's Muon, which gathers a sharded matrix to orthogonalize it.

    PyTorch's own runs the Newton-Schulz iteration on shards. That takes 11 to 16 collectives per matrix, rounds partial
    sums to bfloat16, so that an update is up to 3 % off, and fails for a matrix with fewer rows than ranks. Here a
    single gather of bfloat16 suffices, and the update is bit-identical to a single process. On a CPU, the iteration
    runs in float32, and matrices of one shape share its products. CPUs differ in their speed for bfloat16: some take
    half as long as for float32, others two or ten times as long, and the results of a run would depend on it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices (collective if they are sharded)."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        in_float32 = bool(parameters) and runs_on_cpu(parameters[0])
        if not in_float32 and not any(isinstance(parameter, DTensor) for parameter in parameters):
            super().step()
            return
        size = _STACKED if in_float32 else 1
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for alike in by_shape.values():
                for start in range(0, len(alike), size):
                    self._step(alike[start : start + size], group, in_float32)

    def _step(self, parameters: Sequence[Tensor], group: Mapping[str, Any], in_float32: bool) -> None:
        """Update matrices of one shape like `torch.optim.Muon`. Only the iteration is not element-wise."""
        updates = [self._update(parameter, group) for parameter in parameters]
        numbers = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if in_float32:
            orthogonals = list(newton_schulz(torch.stack(updates), *numbers))
        else:
            orthogonals = [_zeropower_via_newtonschulz(update, *numbers) for update in updates]
        for parameter, orthogonal in zip(parameters, orthogonals, strict=True):
            if isinstance(parameter, DTensor):
                # All ranks have computed the same matrix, so each slices its copy without communication.
                mesh, placements = parameter.device_mesh, parameter.placements
                orthogonal = distribute_tensor(orthogonal, mesh, placements, src_data_rank=None)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(orthogonal, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update the running mean of the gradients, and return the whole matrix to orthogonalize."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        # The iteration rounds to bfloat16 anyway, so gathering in bfloat16 loses nothing.
        update = (gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean).bfloat16()
        return update.full_tensor() if isinstance(update, DTensor) else update


def newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float) -> Tensor:
    """Return approximately the nearest orthogonal matrices [K, R, C] in float32.

    Each step is X <- F X with F = a + b A + c A^2 and A = X X^T (Muon, https://kellerjordan.github.io/posts/muon/). The
    F of all steps are polynomials of the first A, so they commute, and the next A is F A F. Therefore the wide X is
    multiplied only once, at the end. If a matrix is nearly square, that would take more products than it saves.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.float().mT if is_tall else matrices.float()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=epsilon)
    if x.shape[2] < 1.5 * x.shape[1]:
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    else:
        gram, factors = x @ x.mT, list[Tensor]()
        for _ in range(steps):
            if factors:
                gram = factors[-1] @ gram @ factors[-1]
            factors.append(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
            factors[-1].diagonal(dim1=1, dim2=2).add_(a)
        x = reduce(torch.bmm, factors) @ x
    return x.mT if is_tall else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the given matrices, AdamW for all other parameters.

    Engines, checkpoints and the learning-rate schedule expect groups and state in one object, so this one holds them,
    and its two optimizers share them. Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`, arXiv
    2502.16982, section 2.2), so that one learning rate and one weight decay fit both.
    """

    # PyTorch's marker for optimizers that can skip a step by a flag on the device. Muon cannot.
    _step_supports_amp_scaling = False

    def __init__(
        self, matrices: Sequence[Tensor], muon: Mapping[str, Any], rest: list[dict[str, Any]], adamw: Mapping[str, Any]
    ):
        """Build Muon for `matrices` and AdamW for the groups `rest`. `muon` and `adamw` are PyTorch's options."""
        self._muon = ShardedMuon(list(matrices), adjust_lr_fn="match_rms_adamw", **muon)
        self._adamw = ShardedAdamW(rest, **adamw)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    @property
    def parts(self) -> tuple[ShardedMuon, ShardedAdamW]:
        """Both optimizers, with the current groups and state, because loading and engines may have replaced them."""
        # Only Muon's groups have `ns_steps`.
        for part, is_muon in ((self._muon, True), (self._adamw, False)):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) == is_muon]
        return self._muon, self._adamw

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "closures are not supported: the gradients are already computed"
        for part in self.parts:
            part.step()
