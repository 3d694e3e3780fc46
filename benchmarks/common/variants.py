"""The variants of the ladder: the reference, our trainer with all old practice, and each step to its defaults."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.common.old_practice import OldPractice, Practice
from benchmarks.common.task import Feed, Task, device
from mmldlm.data.store import Store
from mmldlm.model.cpu_half import has_bf16_instructions
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer

# Old practices in the order of the ladder, and how the step that drops each is displayed.
SWITCHES = {
    "recompute": "no recomputation of the whole backbone",
    "reads": "no values read in each step",
    "head": "head on masked tokens only, in chunks",
    "padding": "no padding",
    "attention": "one attention kernel over unpadded samples",
    "adamw": "fused AdamW",
    "latent": "narrow latent stream",
    "modulation": "factored modulation",
}


@dataclass(frozen=True)
class Variant:
    name: str
    about: str
    old: frozenset[str] = frozenset()  # of SWITCHES
    streams: int = 0  # of the reference; 0: it is the trainer
    flash: bool = False
    settings: tuple[str, ...] = ()

    @property
    def is_reference(self) -> bool:
        return self.streams > 0

    @property
    def is_compiled(self) -> bool:
        return "compile.scope=regional" in self.settings


def variants(precision: str, device_type: str) -> dict[str, Variant]:
    """Return all variants by name, in the order of display; without those that would change nothing here."""
    switches = [name for name in SWITCHES if name != "attention" or (device_type, precision) == ("cuda", "bf16")]
    listed = [
        Variant("reference", "mmdit 0.3.0, 2 residual streams", streams=2),
        Variant("reference-1", "mmdit 0.3.0, 1 residual stream", streams=1),
        Variant("reference-1-flash", "the same with PyTorch's attention", streams=1, flash=True),
        Variant("old", "our trainer with all old practice", frozenset(switches)),
    ]
    for number, name in enumerate(switches[:-1], 1):
        listed.append(Variant(f"rung-{number}-{name}", f"+ {SWITCHES[name]}", frozenset(switches[number:])))
    listed.append(Variant("trainer", f"+ {SWITCHES[switches[-1]]}: our trainer as it is"))
    listed += [Variant(f"without-{name}", f"all but: {SWITCHES[name]}", frozenset([name])) for name in switches]
    if precision != "bf16" and (device_type == "cuda" or has_bf16_instructions()):
        listed.append(Variant("trainer-bf16", "our trainer in bf16", settings=("precision=bf16",)))
    listed.append(Variant("trainer-compiled", "our trainer, compiled", settings=("compile.scope=regional",)))
    for kind in ("selective", "full"):
        settings = (f"memory.activation_checkpointing={kind}",)
        listed.append(Variant(f"trainer-{kind}", f"our trainer, {kind} recomputation of each block", settings=settings))
    settings = ("memory.activation_checkpointing=full", "memory.kept_blocks=3")
    listed.append(Variant("trainer-full-kept-3", "the same, but for the last three blocks", settings=settings))
    return {variant.name: variant for variant in listed}


class Open:
    """A variant that is ready to step: its `verbs` hold the methods that `counting.METHODS` names."""

    def __init__(
        self,
        verbs: Any,
        feed: Feed,
        step: Callable[[], None],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self.verbs, self.feed, self.model, self.optimizer = verbs, feed, model, optimizer
        self._step = step
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def defer_fetch(self) -> None:
        """Fetch the numbers of steps late, as on a GPU; the reference reads its own in each step."""
        if isinstance(self.verbs, Trainer):
            self.verbs.log.defer_fetch = True

    def step(self, number: int) -> None:
        """Take one step, on the micro-batch and with the noise of its number."""
        self.feed.step = number
        self._step()


@contextmanager
def opened(variant: Variant, task: Task, rows: list[np.ndarray], folder: Path) -> Iterator[Open]:
    """Open the variant over the micro-batches `rows`, its run in `folder`; its output goes to `folder/output.txt`."""
    folder.mkdir(parents=True)
    feed = Feed(Store.open(task.store).split("train"), rows, device().type)
    if variant.is_reference:
        from benchmarks.common.reference import ReferenceRun

        run = ReferenceRun(task, variant.streams, variant.flash, feed)
        yield Open(run, feed, run.step, run.model, run.optimizer)
        return
    with training_of(variant, task, folder) as training:
        training.components.loader.steps = feed.steps  # type: ignore[method-assign]
        with closing(training.steps()) as steps:
            engine = training.engine
            yield Open(
                training,
                feed,
                lambda: train_step(training, *next(steps)),
                engine.unwrapped_model,
                engine.unwrapped_optimizer,
            )


@contextmanager
def training_of(variant: Variant, task: Task, folder: Path) -> Iterator[Trainer]:
    """Open a run of a variant of ours in `folder`/run, with its own loader; its output goes to `folder`/output.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output.txt").open("w"))
        with redirect_stdout(output), redirect_stderr(output):
            training = stack.enter_context(_training(variant, task, folder / "run"))
        # The trainer would save and exit after the step; here is nothing to save.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield training


def _training(variant: Variant, task: Task, run_dir: Path) -> Trainer:
    settings = {
        "attention": "attention.backend=sdpa",
        "adamw": "optim.fused=false",
        "latent": f"model.latent_width={task.width}",
        "modulation": "model.modulation_rank=0",
    }
    given = tuple(setting for name, setting in settings.items() if name in variant.old)
    config = task.config(run_dir, given + variant.settings)
    practices = variant.old & set(get_args(Practice))
    return OldPractice(config, practices) if practices else Trainer(config)  # type: ignore[arg-type]
