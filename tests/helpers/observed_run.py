"""A run of three steps in this process, and everything observable of it, by aspect."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any, Literal

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from mmldlm.config import load_config
from mmldlm.distributed.optimizers import describe_optimizer
from mmldlm.errors import MmldlmError
from mmldlm.inference import sample
from mmldlm.loading.load import load_run
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer
from tests.helpers.metrics import read_metrics

Aspect = Literal["curve", "validation", "texts", "latents", "batches", "workers", "parts", "records", "files", "end"]
ASPECTS: dict[Aspect, str] = {
    "curve": "loss, gradient norm and learning rate of each step",
    "validation": "the held-out losses, and the quality of texts and latents generated from held-out samples",
    "texts": "held-out texts with those generated from their latents",
    "latents": "latents made by `mmldlm sample --mode joint`",
    "batches": "the samples of each micro-batch",
    "workers": "child processes while a step is computed",
    "parts": "kernels and implementations that the components chose",
    "records": "kinds and steps of the records in metrics.jsonl",
    "files": "names in the run folder",
    "end": "how the run ended, and its error",
}

BASE = (
    "run.seed=3",
    "model={depth: 2, width: 32, num_heads: 2, conditioning_width: 32, modulation_rank: 8}",
    "optim.lr=3e-3",
    "train={steps: 3, global_batch_size: 8}",
    "log={every: 1, tensorboard: false}",
    "validation={every: 3, first: 0, samples: 16, text_samples: 2}",
    "checkpoint={every_steps: 0, keep_best: 0}",
    "sampling.steps=4",
)
EXPLODING = ("optim.lr=1e38", "optim.warmup_steps=0", "train.steps=4", "validation.every=0")


def observe(folder: Path, store: Path, *settings: str, samples: bool) -> dict[Aspect, Any]:
    """Train `BASE` with `settings` on the store at `store`; the result does not depend on `folder`.

    With `samples`, also the aspect "latents": what the trained run generates from noise.
    """
    config = load_config(None, [*BASE, f"run.dir={folder}", f"data.path={store}", *settings])
    batches: list[Any] = []
    seen: dict[Aspect, Any] = {"batches": batches, "end": "done"}
    try:
        with Trainer(config) as run:
            model = run.engine.unwrapped_model
            recomputed = [{"forward", "attention"} & vars(block).keys() for block in model.blocks]  # type: ignore[union-attr]
            seen["parts"] = model.backend, recomputed, describe_optimizer(run.engine.unwrapped_optimizer)
            for step, micro_batches in run.steps():
                batches.append([batch.sample_ids.tolist() for batch in micro_batches])
                seen["workers"] = len(multiprocessing.active_children())
                train_step(run, step, micro_batches)
    except MmldlmError as error:
        seen["end"] = str(error).replace(str(folder), "RUN")
    records = read_metrics(folder / "metrics.jsonl")
    seen["records"] = [(record["kind"], record["step"]) for record in records]
    curve = [record for record in records if record["kind"] == "train"]
    seen["curve"] = [(r["step"], r["loss/total"], r["optim/grad_norm"], r["optim/lr"]) for r in curve]
    validation = [record for record in records if record["kind"] == "validation"]
    measured = ("validation/", "quality/")
    seen["validation"] = [{key: r[key] for key in r if key.startswith(measured)} for r in validation]
    seen["texts"] = shown_texts(folder / "tensorboard")
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    seen["files"] = sorted(name.partition(".tfevents.")[0] for name in names)
    if samples:
        trained = load_run(folder)
        seen["latents"] = sample(trained, "joint", trained.config.sampling, seed=0, count=2)[0].latents.tolist()
    return seen


def shown_texts(folder: Path) -> list[tuple[int, str]]:
    """Return the steps and tables of the text samples in TensorBoard; none without TensorBoard files."""
    if not folder.exists():
        return []
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples/")]
    return [(event.step, event.tensor_proto.string_val[0].decode()) for tag in tags for event in events.Tensors(tag)]
