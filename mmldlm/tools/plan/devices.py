"""`--device NAME`: step times of GPUs by a roofline from published or measured rates. Not verified by real steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from mmldlm.errors import UsageError
from mmldlm.model.flops import peak_flops
from mmldlm.tools.plan.costs import HSDP, StepCosts
from mmldlm.tools.plan.kernels import UPDATE_BYTES, Phase, Rates

INTERVAL = (1 / 1.5, 2.0)  # factors of the prediction, a guess: kernels rarely exceed the shares, hosts may be slow
# Shares of the published rates that kernels reach, and seconds from one to the next; see docs/performance.md.
PRODUCT, ATTENTION_FORWARD, ATTENTION_BACKWARD, TRAFFIC, LINK, LAUNCH_S = 0.64, 0.33, 0.23, 0.76, 0.7, 2.2e-6
# Shares of the measured rates of a large product and of a copy.
OF_SQUARE, OF_COPY = 0.80, 0.85
MEASURED_LENGTH = "512"  # tokens of the samples whose attention was measured
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """Published rates of a GPU: those of NVIDIA's data sheets, without sparsity."""

    cuda_name: str  # of its rate in bf16, see `peak_flops`
    fp32: float  # FLOP/s, without TF32
    memory: float  # bytes/s
    link: float  # bytes/s to another GPU of the node, one direction: NVLink, or PCIe 4.0 x16 (5.0 of the rtx5090)

    def rates(self, precision: str) -> Rates:
        """Return what its kernels reach."""
        peak = peak_flops(self.cuda_name, precision) or self.fp32
        return Rates(
            PRODUCT * peak, ATTENTION_FORWARD * peak, ATTENTION_BACKWARD * peak, TRAFFIC * self.memory, LAUNCH_S
        )

    def predict(self, engine: str, costs: StepCosts, rates: Rates, network: float) -> tuple[float, float, float]:
        """Return the seconds of a step: predicted, and the ends of the interval.

        Collectives are rings over the slowest link, and half of the shorter of computing and exchanging is hidden.
        `network` has the bytes/s of a GPU between nodes.
        """
        compute = sum(work.roofline_s for work in costs.work) / len(costs.work)
        compute += costs.updated(engine) * UPDATE_BYTES / rates.traffic
        exchange = 0.0
        for (kind, ranks), size in costs.traffic(engine).items():
            is_local = costs.nodes == 1 or (engine == HSDP and kind != "all_reduce")
            rate = LINK * (self.link if is_local else min(self.link, network))
            exchange += (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size / rate
        low, high = INTERVAL
        shorter, longer = sorted((compute, exchange))
        return longer + shorter / 2, longer * low, (longer + shorter) * high


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 19.5e12, 2.039e12, 300e9),
    "b200": Gpu("NVIDIA B200", 75e12, 7.7e12, 900e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 67e12, 3.35e12, 450e9),
    "h200": Gpu("NVIDIA H200", 67e12, 4.8e12, 450e9),
    "l4": Gpu("NVIDIA L4", 30.3e12, 300e9, 32e9),
    "l40s": Gpu("NVIDIA L40S", 91.6e12, 864e9, 32e9),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", 82.6e12, 1.008e12, 32e9),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", 104.8e12, 1.792e12, 64e9),
}


def measured_rates(path: Path, precision: str) -> Rates:
    """Return the rates of a GPU that `python -m benchmarks gpu_check smoke` has measured, in bf16.

    Raises:
        UsageError: The file has none, or the config's precision is another.
    """
    if precision != "bf16":
        raise UsageError(f"--rates: these are rates of bf16, found precision {precision} in the config")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["ceilings"]
        forward, backward = (found["attention"][MEASURED_LENGTH][f"{phase}_tflop_per_s"] for phase in get_args(Phase))
        product, copy = found["products_tflop_per_s"]["square"], found["copy_tb_per_s"]
        return Rates(
            OF_SQUARE * product * TERA, forward * TERA, backward * TERA, OF_COPY * copy * TERA, found["launch_us"] / 1e6
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--rates: {path} has no rates of a GPU: {type(error).__name__} {error}") from None
