"""Muon against PyTorch's Muon, decay, fused kernels and descriptions of the optimizers that are built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.distributed import optimizers
from mmldlm.distributed.optimizers import (
    build_optimizer,
    check_state_compatible,
    describe_optimizer,
)
from mmldlm.errors import ConfigError
from mmldlm.optim.config import MuonConfig, OptimConfig, OptimizerName
from mmldlm.optim.param_groups import muon_matrices, parameter_groups
from tests.helpers.small_model import small_model

pytestmark = pytest.mark.quick


def test_decay_shrinks_matrices_and_leaves_the_rest() -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["text_out.weight"], before["text_out.weight"] * (1 - 0.1 * 0.5))
    for name in ("text_out.bias", "token_embedding.weight", "latent_position", "blocks.1.latent.head_norm.k"):
        assert torch.equal(after[name], before[name])


MUON_SETTINGS = [
    {},
    {"muon": MuonConfig(momentum=0.8)},
    {"muon": MuonConfig(nesterov=False)},
    {"muon": MuonConfig(ns_steps=2), "weight_decay": 0.5},
    {"fused": False, "betas": (0.5, 0.9), "eps": 1e-3},
]


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("settings", MUON_SETTINGS, ids=str)
def test_muon_matches_pytorch(settings: dict[str, object], on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every setting, while the learning rate changes: as on a GPU bit by bit, on a CPU nearly (float32)."""
    monkeypatch.setattr(optimizers, "runs_on_cpu", lambda _: on_cpu)
    config = OptimConfig(**{"name": "muon", "weight_decay": 0.1, **settings})  # type: ignore[arg-type]
    model, reference = small_model(), small_model()
    optimizer = build_optimizer(model, config)
    matrices, muon = muon_matrices(reference), config.muon
    options = {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.ns_steps}
    others = parameter_groups(reference, config.weight_decay, exclude=matrices)
    apart = [
        torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(others, betas=config.betas, eps=config.eps, fused=config.fused == "auto"),
    ]
    for step in range(4):
        for each in (optimizer, *apart):
            for group in each.param_groups:
                group["lr"] = 0.01 * (step + 1)
        set_gradients(model, step)
        set_gradients(reference, step)
        optimizer.step()
        for each in apart:
            each.step()
    expected, start = dict(reference.named_parameters()), dict(small_model().named_parameters())
    for name, parameter in model.named_parameters():
        error, moved = ((parameter - other).norm() for other in (expected[name], start[name]))
        assert moved > 0 and (error < 0.02 * moved if on_cpu else error == 0), name


def test_muon_on_a_cpu_does_not_depend_on_its_kind() -> None:
    """No product of an update is of bfloat16, which some kinds of CPU are fast at, and others slow."""
    seen = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "mm" in function.__name__:
                seen.add(args[0].dtype)
            return function(*args, **(kwargs or {}))

    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    set_gradients(model, 0)
    with Products():
        optimizer.step()
    assert seen == {torch.float32}


def test_muons_updates_are_as_large_as_adamws() -> None:
    """The root mean square is near 0.2 of the learning rate, as AdamW's (arXiv 2502.16982, section 2.2)."""
    model, before = small_model(), small_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=0.1, weight_decay=0))
    set_gradients(model, 0)
    optimizer.step()
    for new, old in zip(muon_matrices(model), muon_matrices(before), strict=True):
        # Newton-Schulz leaves the singular values between about 0.7 and 1.2.
        assert float((new - old).detach().square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.35)


def test_optimizer_description() -> None:
    model = small_model()
    count = sum(parameter.numel() for parameter in muon_matrices(model))
    muon = build_optimizer(model, OptimConfig(name="muon"))
    adamw = build_optimizer(model, OptimConfig(fused=False))
    fused = build_optimizer(model, OptimConfig())
    assert (
        describe_optimizer(muon)
        == f"torch.Muon for 24 matrices of {count:,} parameters, torch.AdamW, fused for the rest"
    )
    assert (describe_optimizer(adamw), describe_optimizer(fused)) == ("torch.AdamW", "torch.AdamW, fused")
    # Whether a step can be left out by a flag on the device, as PyTorch marks it.
    assert [getattr(o, "_step_supports_amp_scaling", False) for o in (muon, adamw, fused)] == [False, False, True]


class ShardOperators(TorchDispatchMode):
    """Counts operators that run on DTensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, with a process group that exchanges nothing."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"fused": False}], ids=str)
def test_sharded_adamw_updates_local_tensors(settings: dict[str, object], mesh: DeviceMesh) -> None:
    """The bits of PyTorch's, without an operator on DTensors once the moments exist."""
    config = OptimConfig(weight_decay=0.1, **settings)  # type: ignore[arg-type]
    model, reference = small_model(), small_model()
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, config, sharded=True)
    plain = build_optimizer(reference, config)
    assert describe_optimizer(optimizer) == describe_optimizer(plain)
    for step in range(3):
        set_gradients(reference, step)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert isinstance(one, DTensor) and other.grad is not None
            one.grad = distribute_tensor(other.grad, mesh, one.placements, src_data_rank=None)
        with ShardOperators() as operators:
            optimizer.step()
        plain.step()
        assert (operators.count == 0) == (step > 0)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(one, DTensor) and torch.equal(one.to_local(), other)


def test_state_of_another_kind_is_refused() -> None:
    kinds: list[OptimizerName] = ["adamw", "deepspeed_adam", "muon"]
    for saved in kinds:
        for asked in kinds:
            if "muon" in (saved, asked) and saved != asked:
                with pytest.raises(ConfigError, match=f"optim.name: found {asked}, .*{saved}"):
                    check_state_compatible(saved, asked)
            else:
                check_state_compatible(saved, asked)
