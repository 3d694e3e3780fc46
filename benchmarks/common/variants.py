"""The variants of the benchmark `step`: the reference, and our trainer with its defaults and other settings.

Shapes: B samples, L positions of a padded sample, M latent tokens, C latent channels, V vocabulary.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common.task import HEAD_WIDTH, Feed, Task, device, heads_of
from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.loading.compatibility import data_shape
from mmldlm.loading.factory import build_corruption, build_objective
from mmldlm.model.mmdit import DataShape
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.cpu import slowdown

if TYPE_CHECKING:
    from typing_extensions import Self

# --- the reference --------------------------------------------------------------------------------


class ReferenceModel(nn.Module):
    """The network that users come from: the package `mmdit` 0.3.0 in a wrapper that follows its documentation.

    It has token and learned position embeddings, a two-layer latent encoder, and one time embedding for both
    modalities. Text width, depth and head width are the trainer's.
    """

    def __init__(self, depth: int, width: int, shape: DataShape, streams: int, flash: bool = False):
        """`streams` is the number of residual streams. `flash` selects PyTorch's fused attention kernel."""
        super().__init__()
        from mmdit.mmdit_generalized_pytorch import MMDiT

        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, width)
        self.positions = nn.Embedding(shape.max_length, width)
        self.latents = nn.Sequential(nn.Linear(shape.latent_channels, width), nn.GELU(), nn.Linear(width, width))
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.width = width
        self.backbone = MMDiT(
            depth=depth,
            dim_modalities=(width, width),
            dim_cond=width,
            dim_head=HEAD_WIDTH,
            heads=heads_of(width),
            qk_rmsnorm=True,
            flash_attn=flash,
            num_residual_streams=streams,
        )
        self.text_head = nn.Linear(width, shape.vocab_size)
        self.latent_head = nn.Linear(width, shape.latent_channels)

    def forward(
        self, tokens_BL: Tensor, latents_BMC: Tensor, t_text_B: Tensor, t_latent_B: Tensor, real_BL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, L, V] and the predicted latents [B, M, C]."""
        text = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        conditioning = self._time(t_text_B) + self._time(t_latent_B)
        text, latents = self.backbone(
            modality_tokens=(text, self.latents(latents_BMC)), modality_masks=(real_BL, None), time_cond=conditioning
        )
        return self.text_head(text), self.latent_head(latents)

    def _time(self, t_B: Tensor) -> Tensor:
        half = self.width // 2
        rate = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t_B.device) / half)
        angle = 1000.0 * t_B[:, None] * rate
        return self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))


def padded(noised: NoisedBatch, pad_id: int, length: int) -> dict[str, Tensor]:
    """Pad a corrupted micro-batch to rectangles [B, length] on its device."""
    device, lengths = noised.noised_tokens.device, noised.layout.lengths
    rows = noised.noised_tokens.split(lengths)
    tokens = F.pad(
        pad_sequence(list(rows), batch_first=True, padding_value=pad_id), (0, length - max(lengths)), value=pad_id
    )
    real = torch.arange(length, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    index = noised.layout.sample_of_token * length + noised.layout.position
    targets = torch.full((tokens.numel(),), -100, device=device)
    targets[index[noised.positions]] = noised.targets
    weights = torch.zeros(tokens.numel(), device=device)
    weights[index[noised.positions]] = noised.token_weight
    return {"tokens": tokens, "real": real, "targets": targets, "weights": weights}


def reference_loss(
    model: ReferenceModel, noised: NoisedBatch, latent_weight: float, length: int
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of one micro-batch with all logits. Return it with the values read from the device."""
    rectangle = padded(noised, model.shape.pad_id, length)
    logits, latents = model(
        rectangle["tokens"], noised.noised_latents, noised.t_text, noised.t_latent, rectangle["real"]
    )
    flat, targets = logits.flatten(0, 1), rectangle["targets"]
    nll = F.cross_entropy(flat.float(), targets, ignore_index=-100, reduction="none")
    text = (nll * rectangle["weights"]).sum() / rectangle["real"].sum()
    cosine = F.cosine_similarity(latents.float().flatten(1), noised.latent_target.flatten(1), dim=-1)
    latent = ((1 - cosine) * noised.latent_weight).sum() / noised.latent_weight.sum().clamp_min(1)
    loss = text + latent_weight * latent
    masked = targets != -100
    accuracy = (flat.argmax(-1) == targets)[masked].float().mean()
    for value in (text, latent, loss):
        if torch.isnan(value).any().item():
            raise FloatingPointError("a loss is not a number")
    return loss, {"loss": loss.item(), "text": text.item(), "latent": latent.item(), "accuracy": accuracy.item()}


class ReferenceRun:
    """The training loop that users come from, with the methods, data and noise of `Trainer`.

    It pads all samples to the maximum length, computes logits of the whole vocabulary at every position, and in each
    step reads NaN checks and an accuracy from the device. AdamW and clipping are PyTorch's defaults. Nothing is logged.
    """

    def __init__(self, task: Task, streams: int, flash: bool, feed: Feed):
        self.config = task.config()
        self.feed, self.device = feed, device()
        manifest = Store.open(task.store).manifest
        self.objective, shape = build_objective(self.config, manifest), data_shape(manifest)
        torch.manual_seed(self.config.run.seed)
        self.model = ReferenceModel(task.depth, task.width, shape, streams, flash).to(self.device).train()
        optim = self.config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay
        )
        self.read: dict[str, float] = {}

    def step(self) -> None:
        (noised,) = self.corrupt(self.feed.step, [self.feed.batch()])
        self.backward(self.loss(noised))
        self.update()
        self.end_step()

    def corrupt(self, step: int, micro_batches: list[Batch]) -> list[NoisedBatch]:
        noised = build_corruption(self.config, self.objective)(step, micro_batches)
        return [batch.to(self.device) for batch in noised]

    def loss(self, noised: NoisedBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            loss, self.read = reference_loss(
                self.model, noised, self.config.loss.latent_weight, self.model.shape.max_length
            )
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def end_step(self) -> None:
        """Do nothing: the forward pass has read the values."""


# --- the trainer ----------------------------------------------------------------------------------


class FeedTrainer(Trainer):
    """Our trainer on the micro-batches of a feed."""

    def __init__(self, config: RunConfig, feed: Feed):
        super().__init__(config)
        self.feed = feed

    def __enter__(self) -> Self:
        super().__enter__()
        self.components.loader.steps = lambda *_: self.feed.steps()  # type: ignore[method-assign]
        return self


# --- the variants ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    name: str
    about: str
    streams: int = 0  # residual streams of the reference, 0 for the trainer
    flash: bool = False
    settings: tuple[str, ...] = ()

    @property
    def is_reference(self) -> bool:
        return self.streams > 0

    @property
    def is_compiled(self) -> bool:
        return "compile.scope=regional" in self.settings


def variants(precision: str, device_type: str) -> dict[str, Variant]:
    """Return all variants by name, in the order of display, except variants that would change nothing here."""
    listed = [
        Variant("reference", "mmdit 0.3.0, 2 residual streams", streams=2),
        Variant("reference-1", "mmdit 0.3.0, 1 residual stream", streams=1),
        Variant("reference-1-flash", "the same with PyTorch's attention", streams=1, flash=True),
        Variant("trainer", "our trainer"),
    ]
    if precision != "bf16" and (device_type == "cuda" or slowdown(torch.bfloat16) < 2):
        listed.append(Variant("trainer-bf16", "our trainer in bf16", settings=("precision=bf16",)))
    listed.append(Variant("trainer-muon", "our trainer with Muon, as the quickstart", settings=("optim.name=muon",)))
    listed.append(Variant("trainer-compiled", "our trainer, compiled", settings=("compile.scope=regional",)))
    settings: tuple[str, ...]
    for kind in ("selective", "full"):
        settings = (f"memory.activation_checkpointing={kind}",)
        listed.append(Variant(f"trainer-{kind}", f"our trainer, {kind} recomputation of each block", settings=settings))
    settings = ("memory.activation_checkpointing=full", "memory.kept_blocks=3")
    listed.append(Variant("trainer-full-kept-3", "the same, but for the last three blocks", settings=settings))
    return {variant.name: variant for variant in listed}


class Open:
    """A variant that is ready to step. Its `trainer` has the methods that `counting.METHODS` names."""

    def __init__(
        self,
        trainer: Any,
        feed: Feed,
        step: Callable[[], None],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ):
        self.trainer, self.feed, self.model, self.optimizer = trainer, feed, model, optimizer
        self._step = step
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    def defer_fetch(self) -> None:
        """Fetch the numbers of steps late, as on a GPU. The reference reads its numbers in each step."""
        if isinstance(self.trainer, Trainer):
            self.trainer.numbers.defer_fetch = True

    def step(self, number: int) -> None:
        """Take one step, on the micro-batch and with the noise of its number."""
        self.feed.step = number
        self._step()


@contextmanager
def opened(variant: Variant, task: Task, rows: list[np.ndarray], folder: Path) -> Iterator[Open]:
    """Open the variant over the micro-batches `rows`, its run in `folder`, and its output in `folder/output.txt`."""
    folder.mkdir(parents=True)
    feed = Feed(Store.open(task.store).split("train"), rows, device().type)
    if variant.is_reference:
        run = ReferenceRun(task, variant.streams, variant.flash, feed)
        yield Open(run, feed, run.step, run.model, run.optimizer)
        return
    with (
        entered(FeedTrainer(task.config(folder / "run", variant.settings), feed), folder) as trainer,
        closing(trainer.steps()) as steps,  # type: ignore[type-var]  # it is a generator
    ):
        engine = trainer.engine
        yield Open(
            trainer,
            feed,
            lambda: train_step(trainer, *next(steps)),
            engine.unwrapped_model,
            engine.unwrapped_optimizer,
        )


TrainerT = TypeVar("TrainerT", bound=Trainer)


@contextmanager
def entered(trainer: TrainerT, folder: Path) -> Iterator[TrainerT]:
    """Enter the trainer with its output in `folder/output.txt`, then reset the signal handlers."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        output = stack.enter_context((folder / "output.txt").open("w"))
        with redirect_stdout(output), redirect_stderr(output):
            stack.enter_context(trainer)
        # The trainer's handlers would save and exit after the step, but there is nothing to save.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield trainer
