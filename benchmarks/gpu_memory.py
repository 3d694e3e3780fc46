"""The largest micro-batches that fit a GPU, by the dry run's estimate: nothing is trained, and no GPU is needed.

    python -m benchmarks gpu_memory [--positions 512 2048] [--gpus 16 24 40 80 141] [key.sub=value ...]

24 blocks of width 1024, vocabulary 30,522, bf16, every sample of the maximum length. Memory is estimated for two
micro-batches, and is a straight line through them. A GPU of 16 GB has 16e9 bytes, of which `SHARE` is filled: the rest
is for CUDA, fragmentation, communication, and what an estimate does not include. DDP needs 4 bytes per parameter more
than one GPU alone: its buckets stay when gradients are freed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.task import SHAPES, TOKENIZER_VOCAB, make_store
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.trainer.dry_run import MIB, Estimate, estimate, state_mib

SHAPE = SHAPES["gpu"]
KINDS = ("none", "selective", "full")
SHARDED = 8  # GPUs over which FSDP2 shards the state
SHARE = 0.9
TOKENS = (32_768, 65_536)  # of the two micro-batches; with fewer, the optimizer's step may be what needs the most


@dataclass(frozen=True)
class Line:
    """Bytes of a process as a function of the samples of its micro-batch."""

    fixed: float
    per_sample: float
    state: float  # weights, gradients and moments: the minimum, in the optimizer's step

    @classmethod
    def through(cls, points: dict[int, float], state: float) -> Line:
        (few, less), (many, more) = sorted(points.items())
        slope = (more - less) / (many - few)
        return cls(less - slope * few, slope, state)

    def samples(self, capacity: float) -> int:
        """Return the largest micro-batch that fits into `capacity` bytes."""
        return 0 if capacity < self.state else max(0, int((capacity - self.fixed) / self.per_sample))


def estimated(store: Path, samples: int, settings: Sequence[str]) -> Estimate:
    """Estimate one process whose steps have one micro-batch, after the first, which has no moments yet."""
    given = (
        f"data.path={store}",
        f"model={{width: {SHAPE.width}, depth: {SHAPE.depth}, num_heads: {SHAPE.heads}}}",
        "precision=bf16",
        f"train={{steps: 2, global_batch_size: {samples}}}",
    )
    config = load_config(None, [*given, *settings])
    return estimate(config, Store.open(store), world_size=1, steps_per_stage=1, device="cuda")


def lines(estimates: dict[int, Estimate]) -> dict[str, Line]:
    """Return a line per engine, given estimates by samples."""
    alone, sharded = {}, {}
    for samples, one in estimates.items():
        at_peak = sum(one.peak_mib.get(kind, 0.0) for kind in ("weights", "gradients", "moments"))
        state, _ = state_mib("fsdp2", replace(one, world_size=SHARDED), "bf16")
        alone[samples] = one.total_mib * MIB
        sharded[samples] = (one.total_mib - at_peak + state) * MIB
    return {
        "one GPU": Line.through(alone, one.state_mib * MIB),
        f"fsdp2 on {SHARDED}": Line.through(sharded, state * MIB),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="mmldlm bench gpu_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--positions", type=int, nargs="+", default=(512, 2048), help="tokens of a sample")
    parser.add_argument("--gpus", type=int, nargs="+", default=(16, 24, 40, 80, 141), metavar="GB")
    parser.add_argument("--stores", type=Path, help="folder of the stores that samples come from, kept; else temporary")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="of the run config")
    options = parser.parse_intermixed_args(argv)
    print(f"| positions | recomputed | engine | {' | '.join(f'{size} GB' for size in options.gpus)} |")
    print("|---" * (3 + len(options.gpus)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for positions in options.positions:
            sizes = [max(1, tokens // positions) for tokens in TOKENS]
            folder = options.stores or Path(temporary)
            store = make_store(folder, "full", TOKENIZER_VOCAB, positions, SHAPE.vocab_size, 2 * max(sizes))
            for kind in KINDS:
                settings = (f"memory.activation_checkpointing={kind}", *options.settings)
                by_engine = lines({size: estimated(store, size, settings) for size in sizes})
                for engine, line in by_engine.items():
                    samples = [line.samples(SHARE * size * 1e9) for size in options.gpus]
                    cells = (f"{count * positions:,} ({count:,})" for count in samples)
                    print(f"| {positions} | {kind} | {engine} | {' | '.join(cells)} |", flush=True)
