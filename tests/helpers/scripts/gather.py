"""One of two ranks that exchange values; `python gather.py CANARY`: rank 1 then sends a pickle instead."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.deepspeed_file import StepPlan
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.errors import exit_process

VALUES = [None, "x" * 5000, {"a": [1, 2.5, True, None], "é": "\ud800\n"}, float("inf"), 2**70, []]


class Canary:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def main() -> None:
    plan = StepPlan(micro_batch_size=1, accumulation=1, global_batch_size=2, clip_norm=0.0, precision="fp32", width=8)
    engine = start_engine(DistributedConfig(timeout_s=60), read_launcher_env(os.environ), plan)
    for value in VALUES:
        mine = value if engine.rank else "y"
        assert engine.gather(mine) == ["y", value], value
        assert engine.gather((engine.rank, (mine,))) == [[0, ["y"]], [1, [value]]]
    for more in ({1, 2}, b"x", Path("x"), torch.ones(1)):
        try:
            engine.gather({"a": [more]})
        except TypeError:
            continue
        raise SystemExit(f"{more!r} was sent")
    pickled = pickle.dumps(Canary(Path(sys.argv[1])))
    if engine.rank:
        for tensor in (torch.tensor([len(pickled)]), torch.frombuffer(bytearray(pickled), dtype=torch.uint8)):
            dist.all_gather([torch.empty_like(tensor) for _ in range(2)], tensor)  # as `gather` does
    else:
        try:
            result: Any = engine.gather("y")
        except ValueError as error:
            result = error
        assert isinstance(result, ValueError), result
    engine.close()


if __name__ == "__main__":
    main()
    exit_process(0)
