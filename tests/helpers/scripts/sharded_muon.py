"""One of several ranks over gloo: Muon on sharded matrices against whole ones, bit by bit.

As a CPU computes it, and as a GPU does, where the whole ones are updated by PyTorch's own.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from mmldlm.distributed import optimizers
from mmldlm.distributed.optimizers import ShardedMuon
from mmldlm.errors import exit_process

# Rows that do not divide by the ranks, fewer rows than ranks, wide and tall.
SHAPES = [(64, 32), (33, 64), (1, 16), (2, 5), (192, 64), (64, 170)]
OPTIONS = {"lr": 0.1, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor.clone(), mesh, [Shard(0)], src_data_rank=None)

    for kind, nesterov in product((ShardedMuon, torch.optim.Muon), (True, False)):
        optimizers.runs_on_cpu = lambda _, on_cpu=kind is ShardedMuon: on_cpu
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
        whole = [torch.nn.Parameter(weight.clone()) for weight in weights]
        parts = [torch.nn.Parameter(sharded(weight)) for weight in weights]
        expected = kind(whole, nesterov=nesterov, **OPTIONS)
        optimizer = ShardedMuon(parts, nesterov=nesterov, **OPTIONS)
        for step in range(4):
            for one, part in zip(whole, parts, strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                part.grad = sharded(one.grad)
            if step == 2:  # one without a gradient stays as it is
                whole[0].grad = parts[0].grad = None
            expected.step()
            optimizer.step()
        for one, part in zip(whole, parts, strict=True):
            mean = optimizer.state[part]["momentum_buffer"]
            assert mean.placements == part.placements == (Shard(0),), "the state is shared out as the weights are"
            assert torch.equal(part.detach().full_tensor(), one.detach()), one.shape
            assert torch.equal(mean.full_tensor(), expected.state[one]["momentum_buffer"]), one.shape
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    exit_process(0)
