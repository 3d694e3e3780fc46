"""The variants of the ladder: the reference, our trainer with all old practice, and each step to its defaults.

Shapes: B samples, N tokens of an unpadded micro-batch, L positions of a padded sample, M latent tokens, D width,
C latent channels, P masked tokens, V vocabulary.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from benchmarks.common.task import HEAD_WIDTH, Feed, Task, device, heads_of
from mmldlm.batch import ACCURACY_STRIDE, Batch, PackedLayout
from mmldlm.config import RunConfig
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.model.attention import BACKENDS
from mmldlm.model.mmdit import DataShape, Prediction, Rows
from mmldlm.run.compatibility import data_shape
from mmldlm.run.factory import build_corruption, build_objective
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.cpu import slowdown

if TYPE_CHECKING:
    from typing_extensions import Self

# --- the reference --------------------------------------------------------------------------------


class ReferenceModel(nn.Module):
    """The network that users come from: the package `mmdit` 0.3.0 in a wrapper that follows its documentation.

    Token and learned position embeddings, a two-layer latent encoder, one time embedding for both modalities. Text
    width, depth and head width are those of the trainer.
    """

    def __init__(self, depth: int, width: int, shape: DataShape, streams: int, flash: bool = False):
        """`streams`: residual streams of the hyper-connections; `flash`: attention by PyTorch's fused kernel."""
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
    model: nn.Module, noised: NoisedBatch, latent_weight: float, length: int
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one micro-batch with all logits, and its values, read from the device."""
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

    All samples are padded to the maximum length, the whole vocabulary has logits at every position, and each step reads
    NaN checks and an accuracy from the device. AdamW and clipping are PyTorch's defaults; nothing is logged.
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
        """The values were read in the forward pass."""


# --- old practice ---------------------------------------------------------------------------------

Practice = Literal["recompute", "reads", "head", "padding"]
IGNORED = -100  # target of a position without loss


class PaddedLayout(PackedLayout):
    """B samples of L positions each; those after a sample's own tokens are padding, which nothing attends to."""

    def __init__(self, real: PackedLayout, length: int):
        super().__init__((length,) * real.num_samples, real.latent_tokens, real.device)
        self.real_lengths = real.lengths

    @cached_property
    def keys(self) -> Tensor:
        """Mask bool [B, 1, 1, M + L] of the rows of the joint sequence that may be attended to."""
        lengths = torch.tensor(self.real_lengths, device=self.device)
        real = torch.arange(-self.latent_tokens, self.max_length, device=self.device) < lengths[:, None]
        return real[:, None, None]


def padded_attention(latent_qkv: Tensor, text_qkv: Tensor, layout: PaddedLayout) -> tuple[Tensor, Tensor]:
    """Attend over rectangles, with a mask of keys."""
    samples, m, length = layout.num_samples, layout.latent_tokens, layout.max_length
    rows = [latent_qkv.unflatten(0, (samples, m)), text_qkv.unflatten(0, (samples, length))]
    q, k, v = torch.cat(rows, dim=1).permute(2, 0, 3, 1, 4).unbind()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.keys).transpose(1, 2)
    latent_out, text_out = out.split([m, length], dim=1)
    return latent_out.flatten(0, 1), text_out.flatten(0, 1)


BACKENDS["padded"] = padded_attention


def pad(noised: NoisedBatch, pad_id: int, length: int) -> NoisedBatch:
    """Return the micro-batch padded to B x L positions."""
    layout = noised.layout
    index = layout.sample_of_token * length + layout.position
    tokens = noised.noised_tokens.new_full((layout.num_samples * length,), pad_id)
    return replace(
        noised,
        noised_tokens=tokens.index_copy(0, index, noised.noised_tokens),
        layout=PaddedLayout(layout, length),
        positions=index.index_select(0, noised.positions),
    )


class WholeBackbone(nn.ModuleList):
    """Blocks that are recomputed together: iteration yields one function that runs all of them.

    The names of the parameters are unchanged.
    """

    def __iter__(self) -> Iterator[Callable[..., Any]]:  # type: ignore[override]
        yield self._recomputed

    def _recomputed(self, *arguments: Any) -> Any:
        return checkpoint(self._all, *arguments, use_reentrant=False, preserve_rng_state=False)

    def _all(self, text: Tensor, latent: Tensor, conditioning: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        *blocks, last_block = super().__iter__()
        for block in blocks:
            text, latent = block(text, latent, conditioning, rows._replace(kept=None))
        return last_block(text, latent, conditioning, rows)


class FeedTrainer(Trainer):
    """Our trainer on the micro-batches of a feed."""

    def __init__(self, config: RunConfig, feed: Feed):
        super().__init__(config)
        self.feed = feed

    def __enter__(self) -> Self:
        super().__enter__()
        self.components.loader.steps = lambda *_: self.feed.steps()  # type: ignore[method-assign]
        return self


class OldPractice(FeedTrainer):
    """Our trainer with the practices of other trainers: the steps of the ladder for which there is no setting.

    The loss is the trainer's own in each combination, to rounding (tests/benchmarks/test_variants.py).

    - padding: samples are padded to the maximum length, under one dense attention with a mask of keys
    - head: logits of the whole vocabulary at every position, all at once
    - reads: three losses and an accuracy are read from the device in each step, and the losses searched for NaN
    - recompute: activation checkpointing around the whole backbone
    """

    def __init__(self, config: RunConfig, feed: Feed, practices: frozenset[Practice]):
        super().__init__(config, feed)
        self.practices = practices
        self.read: dict[str, float] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        model = self.engine.unwrapped_model
        if "padding" in self.practices:
            model.backend = "padded"
        if "recompute" in self.practices:
            model.blocks = WholeBackbone(model.blocks)
            model.shards_blocks = True  # which compute their own modulation
        return self

    def accumulate(self, noised: Sequence[NoisedBatch]) -> Iterator[NoisedBatch]:
        if "padding" in self.practices:
            manifest = self.components.store.manifest
            noised = [pad(batch, manifest.pad_id, manifest.max_length) for batch in noised]
        return super().accumulate(noised)

    def loss(self, batch: NoisedBatch, totals: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
        if not self.practices & {"head", "reads"}:
            return super().loss(batch, totals)
        loss, sums = self.components.objective(self._with_logits, batch, totals)
        if "reads" in self.practices:
            self._read(loss, sums)
        return loss, sums

    def _with_logits(
        self,
        tokens: Tensor,
        latents: Tensor,
        t_text: Tensor,
        t_latent: Tensor,
        layout: PackedLayout,
        positions: Tensor,
        targets: Tensor,
    ) -> Prediction:
        """Stand in for the network: return what it returns for `targets`, computed from logits, without accuracy."""
        rows, labels = positions, targets
        if "head" in self.practices:
            rows = torch.arange(len(tokens), device=tokens.device)
            labels = torch.full_like(tokens, IGNORED).index_copy(0, positions, targets)
        logits, latent, length_logits, *_ = self.engine.forward(tokens, latents, t_text, t_latent, layout, rows)
        nll = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        if "reads" in self.practices:
            self._correct = (logits.detach().argmax(-1) == labels)[labels != IGNORED]
        nll = nll.index_select(0, positions) if "head" in self.practices else nll
        return Prediction(nll, latent, length_logits, is_best=targets[::ACCURACY_STRIDE] < 0)

    def _read(self, loss: Tensor, sums: Tensor) -> None:
        bins = self.components.objective.stats.num_bins
        losses = {"loss": loss, "text": sums[:bins].sum(), "latent": sums[bins : 2 * bins].sum()}
        for name, value in losses.items():
            if torch.isnan(value).any().item():
                raise FloatingPointError(f"{name} is not a number")
        self.read = {name: value.item() for name, value in losses.items()}
        self.read["accuracy"] = self._correct.float().mean().item()


# --- the variants ---------------------------------------------------------------------------------

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
    listed.append(Variant("trainer", f"+ {SWITCHES[switches[-1]]}: our trainer"))
    listed += [Variant(f"without-{name}", f"all but: {SWITCHES[name]}", frozenset([name])) for name in switches]
    if precision != "bf16" and (device_type == "cuda" or slowdown(torch.bfloat16) < 2):
        listed.append(Variant("trainer-bf16", "our trainer in bf16", settings=("precision=bf16",)))
    listed.append(Variant("trainer-muon", "our trainer with Muon, as the quickstart", settings=("optim.name=muon",)))
    listed.append(Variant("trainer-compiled", "our trainer, compiled", settings=("compile.scope=regional",)))
    for kind in ("selective", "full"):
        settings = (f"memory.activation_checkpointing={kind}",)
        listed.append(Variant(f"trainer-{kind}", f"our trainer, {kind} recomputation of each block", settings=settings))
    settings = ("memory.activation_checkpointing=full", "memory.kept_blocks=3")
    listed.append(Variant("trainer-full-kept-3", "the same, but for the last three blocks", settings=settings))
    return {variant.name: variant for variant in listed}


class Open:
    """A variant that is ready to step: its `trainer` has the methods that `counting.METHODS` names."""

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
        """Fetch the numbers of steps late, as on a GPU; the reference reads its own in each step."""
        if isinstance(self.trainer, Trainer):
            self.trainer.numbers.defer_fetch = True

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
        run = ReferenceRun(task, variant.streams, variant.flash, feed)
        yield Open(run, feed, run.step, run.model, run.optimizer)
        return
    with entered(_trainer(variant, task, feed, folder / "run"), folder) as trainer, closing(trainer.steps()) as steps:
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
        # The trainer's would save and exit after the step, and there is nothing to save.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield trainer


def _trainer(variant: Variant, task: Task, feed: Feed, run_dir: Path) -> Trainer:
    settings = {
        "attention": "attention.backend=sdpa",
        "adamw": "optim.fused=false",
        "latent": f"model.latent_width={task.width}",
        "modulation": "model.modulation_rank=0",
    }
    given = tuple(setting for name, setting in settings.items() if name in variant.old)
    config = task.config(run_dir, given + variant.settings)
    practices = variant.old & set(get_args(Practice))
    return OldPractice(config, feed, practices) if practices else FeedTrainer(config, feed)
