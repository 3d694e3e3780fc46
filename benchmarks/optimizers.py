"""Cost of a step of each optimizer, and the loss of a small model after equal steps.

    python -m benchmarks optimizers STORE [--steps 60] [--updates 10] [--rate 1.5e-3] [key.sub=value ...]

One process. "update" is the median time of the optimizer's step with given gradients, on the model of the settings;
`--updates-only` leaves out the training, for a larger model. "loss" is that of held-out samples after equal steps from
the same weights, on the same samples and noise, with the same learning rates. DeepSpeed's AdamW (CPUAdam, on a GPU
FusedAdam) steps here without an engine; it trains under ZeRO only, so it has no loss here: its curve is AdamW's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from benchmarks.common.measure import clock
from benchmarks.common.report import plain_parser
from benchmarks.common.task import device
from mmldlm.config import RunConfig, load_config
from mmldlm.data.store import Store
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.errors import ConfigError
from mmldlm.run.factory import build_model
from mmldlm.train import train

os.environ.setdefault("DS_ACCELERATOR", device().type)  # DeepSpeed would warn

# A small version of the quickstart's model and losses.
SETTINGS = (
    "model={depth: 3, width: 96, num_heads: 4}",
    "mode={l2t: 0.4, t2l: 0.3, joint: 0.3}",
    "latent.prediction=x0",
    "loss.latent_weight=10",
    "train.global_batch_size=32",
    "data.num_workers=0",
    "log={every: 100000, tensorboard: false}",
    "validation={samples: 128, text_samples: 0}",
    "checkpoint.every_steps=0",
)
VARIANTS = {
    "AdamW, fused": ["optim.name=adamw"],
    "AdamW, not fused": ["optim.name=adamw", "optim.fused=false"],
    "Muon + AdamW, fused": ["optim.name=muon"],
    "DeepSpeed's AdamW": ["optim.name=deepspeed_adam"],
}


def update_ms(config: RunConfig, updates: int) -> float:
    """Return the median time of an optimizer's step, after a first one that makes its state."""
    kind = device().type
    model = build_model(config, Store.open(config.data.path).manifest, kind).to(kind)
    optimizer = build_optimizer(model, config.optim, offloaded=kind == "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def times() -> Iterator[float]:
        for _ in range(updates + 1):
            start = clock()
            optimizer.step()
            yield 1000 * (clock() - start)

    return median(list(times())[1:])


def held_out_losses(config: RunConfig) -> tuple[float, float]:
    """Train, and return the validation losses (text, latent) after the last step."""
    train(config, read_launcher_env({}))
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *_, last = (record for record in map(json.loads, lines) if record["kind"] == "validation")
    return last["validation/text"], last["validation/latent"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser("optimizers", __doc__)
    parser.add_argument("store", type=Path, help="a data store")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--updates", type=int, default=10, help="steps to time for each optimizer")
    parser.add_argument("--updates-only", action="store_true")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(argv)
    length = [f"train.steps={options.steps}", f"validation.every={options.steps}", f"optim.lr={options.rate}"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, variant) in enumerate(VARIANTS.items()):
            given = [f"data.path={options.store}", f"run.dir={folder}/{number}", *length]
            config = load_config(None, [*SETTINGS, *given, *options.settings, *variant])
            cost = "none here"
            with suppress(ConfigError):  # no compiler
                cost = f"{update_ms(config, options.updates):.2f}"
            losses = ["", ""]
            if config.optim.name != "deepspeed_adam" and not options.updates_only:
                losses = [f"{loss:.4f}" for loss in held_out_losses(config)]
            rows.append([name, cost, *losses])
    model = build_model(config, Store.open(config.data.path).manifest, "cpu")
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"\n{count:,} parameters, {options.steps} steps, torch {torch.__version__}, "
        f"{device().type}, {torch.get_num_threads()} threads\n"
    )
    print("| optimizer | update, ms | held-out text, nats a token | held-out latent |\n|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
