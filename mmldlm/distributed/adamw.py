"""AdamW for parameters that may be sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import torch

from mmldlm.distributed.grad_scaler import to_local


class ShardedAdamW(torch.optim.AdamW):
    """PyTorch's AdamW, which updates the shards of DTensors as plain tensors.

    The update is element-wise, so it needs no other shard. As operations of DTensors it has the same result, after more
    work on the host for each parameter than the update takes on a GPU.
    """

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[torch.Tensor]) -> bool:
        has_complex = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = map(to_local, tensors)
        return bool(has_complex)
