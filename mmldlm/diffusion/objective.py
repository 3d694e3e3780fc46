"""The training objective: corrupt both modalities, call the network once, weigh and sum the losses.

The network is an argument: any callable with `MMDiT.forward`'s signature, wrapped by whatever engine, or
a test's perfect denoiser. Losses are sums over samples and tokens; they are divided once, by counts over
the whole global batch, so that no split of it into ranks and micro-batches changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import Batch, PackedLayout
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentLoss
from mmldlm.diffusion.masked import MaskedDiffusion, TextLoss
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.settings.fields import setting

Network = Callable[..., tuple[Tensor, ...]]

NOISE = "_noise_"  # in the names of losses at one noise level


@dataclass(frozen=True)
class LossConfig:
    text: TextLoss = setting("elbo", "elbo: nats per token, bounds the likelihood; masked_mean: plain mean over masked")
    latent: LatentLoss = setting("cosine", "distance of predicted and true latent target")
    huber_delta: float = setting(1.0, "huber: error from which on the loss grows linearly", above=0)
    latent_weight: float = setting(
        10.0,
        "weight of the latent loss beside the text loss; with `latent_weighting: uncertainty` the first",
        at_least=0,
    )
    latent_weighting: Literal["fixed", "uncertainty"] = setting(
        "fixed", "uncertainty: text and latent loss each with a weight that is learned from how large it is"
    )
    text_weight_limit: float | None = setting(
        None,
        "training's largest weight of a masked token under `text: elbo`, which is 1 / t_text; null: no limit",
        above=0,
    )
    latent_time_weighting: Literal["none", "min_snr"] = setting(
        "none", "weight of a latent's loss by its noise time; min_snr: that of x0's squared error, up to min_snr_gamma"
    )
    min_snr_gamma: float = setting(5.0, "min_snr: signal-to-noise ratio from which on x0 weighs no more", above=0)
    label_smoothing: float = setting(
        0.0, "share of each token's target that is spread over all tokens, in training", at_least=0, below=1
    )
    z_loss: float = setting(
        0.0, "weight of the squared log of the head's softmax denominator, in training; usual: 1e-4", at_least=0
    )
    length_weight: float = setting(0.01, "weight of the length head's loss", at_least=0)

    def __post_init__(self) -> None:
        if self.latent != "huber" and self.huber_delta != 1:
            raise ValueError(f"huber_delta: does nothing under latent: {self.latent}, expected 1 or latent: huber")
        if self.latent_time_weighting == "none" and self.min_snr_gamma != 5:
            raise ValueError(
                "min_snr_gamma: does nothing under latent_time_weighting: none, expected 5 or latent_time_weighting: "
                "min_snr"
            )
        if self.text != "elbo" and self.text_weight_limit is not None:
            raise ValueError(f"text_weight_limit: does nothing under text: {self.text}, expected null or text: elbo")
        if self.latent_weighting == "uncertainty" and not self.latent_weight:
            raise ValueError("latent_weight: expected a first one above 0 under latent_weighting: uncertainty, found 0")

    @property
    def shapes_text(self) -> bool:
        """Whether the text loss takes more of the head than likelihoods."""
        return self.label_smoothing > 0 or self.z_loss > 0


@dataclass(frozen=True)
class NoisedBatch:
    """A corrupted micro-batch: what the network gets, and what it is measured by."""

    noised_tokens: Tensor  # int64 [N]
    noised_latents: Tensor  # float32 [B, M, C]
    t_text: Tensor  # float32 [B]
    t_latent: Tensor  # float32 [B]
    layout: PackedLayout
    positions: Tensor  # int64 [P]: the masked tokens
    targets: Tensor  # int64 [P]: what they were
    token_weight: Tensor  # float32 [P]: in the loss that is shown, a bound under `loss.text: elbo`
    trained_token_weight: Tensor | None  # float32 [P]: in the loss that is trained, where it is another
    token_cell: Tensor  # int64 [P]: mode and level of t_text, see `Objective`
    latent_target: Tensor  # float32 [B, M, C]
    latent_weight: Tensor  # float32 [B]: 0 where the latent is pinned
    trained_latent_weight: Tensor | None  # float32 [B]: in the loss that is trained, where it is another
    latent_cell: Tensor  # int64 [B]: mode and level of t_latent
    length_target: Tensor  # int64 [B]: length - 1
    counts: Tensor  # float64 [S] on the host: what the sums of `Objective.__call__` are divided by

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, PackedLayout, Tensor, Tensor]:
        """The arguments of the network, in order."""
        return (
            self.noised_tokens,
            self.noised_latents,
            self.t_text,
            self.t_latent,
            self.layout,
            self.positions,
            self.targets,
        )

    def to(self, device: torch.device | str) -> NoisedBatch:
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "counts"
        }
        return replace(self, layout=self.layout.to(device), **moved)


class Objective:
    """Sums and counts [S]: text by cell, latents by cell, lengths, then each of `extras`.

    A cell is a mode at one of `levels` equal parts of the noise times in [0, 1]: number mode x levels + level.
    """

    def __init__(self, config: LossConfig, text: MaskedDiffusion, latent: GaussianDiffusion, levels: int = 1):
        self.config, self.text, self.latent, self.levels = config, text, latent, levels
        self.cells = len(MODES) * levels
        shown = {
            "label_smoothing": config.label_smoothing > 0,
            "z": config.z_loss > 0,
            "text_weight": config.latent_weighting == "uncertainty",
            "latent_weight": config.latent_weighting == "uncertainty",
        }
        self.extras = tuple(name for name, is_shown in shown.items() if is_shown)

    @property
    def size(self) -> int:
        """S: how many sums there are."""
        return 2 * self.cells + 1 + len(self.extras)

    def plain(self, finer: int = 1) -> Objective:
        """The losses as they are shown, without what only training adds: for held-out samples.

        Each noise level is cut into `finer` ones.
        """
        config = LossConfig(
            text=self.config.text,
            latent=self.config.latent,
            huber_delta=self.config.huber_delta,
            latent_weight=self.config.latent_weight,
            length_weight=self.config.length_weight,
        )
        return Objective(config, self.text, self.latent, self.levels * finer)

    def corrupt(self, batch: Batch, noise: Noise) -> NoisedBatch:
        """Forward processes of both modalities; on the host, where `positions` has a known size."""
        layout = batch.layout
        masked = self.text.masked(noise.uniforms, noise.t_text, layout.sample_of_token)
        positions = masked.nonzero().squeeze(1)
        sample = layout.sample_of_token[positions]
        trains_text = noise.mode != MODES.index("t2l")
        trains_latent = noise.mode != MODES.index("l2t")
        lengths = torch.tensor(batch.lengths)
        text_cell, latent_cell = (self._cell(noise.mode, t) for t in (noise.t_text, noise.t_latent))
        token_weight = self.text.weights(noise.t_text, lengths, noise.importance) * trains_text
        trained_token_weight = trained_latent_weight = None
        if self.config.text_weight_limit is not None:
            limited = self.text.weights(noise.t_text, lengths, noise.importance, self.config.text_weight_limit)
            trained_token_weight = (limited * trains_text)[sample]
        if self.config.latent_time_weighting == "min_snr":
            by_time = self.latent.min_snr_weight(noise.t_latent, self.config.min_snr_gamma)
            trained_latent_weight = by_time * trains_latent
        return NoisedBatch(
            noised_tokens=self.text.corrupt(batch.tokens, masked),
            noised_latents=self.latent.corrupt(batch.latents, noise.epsilon, noise.t_latent),
            t_text=noise.t_text,
            t_latent=noise.t_latent,
            layout=layout,
            positions=positions,
            targets=batch.tokens[positions],
            token_weight=token_weight[sample],
            trained_token_weight=trained_token_weight,
            token_cell=text_cell[sample],
            latent_target=self.latent.target(batch.latents, noise.epsilon, noise.t_latent),
            latent_weight=trains_latent.float(),
            trained_latent_weight=trained_latent_weight,
            latent_cell=latent_cell,
            length_target=lengths - 1,
            counts=self._counts(text_cell, latent_cell, lengths, sample),
        )

    def _cell(self, mode: Tensor, t: Tensor) -> Tensor:
        return mode * self.levels + (t * self.levels).long().clamp_max(self.levels - 1)

    def _counts(self, text_cell: Tensor, latent_cell: Tensor, lengths: Tensor, masked_sample: Tensor) -> Tensor:
        """By cell: tokens that the text loss is spread over; samples whose latent is trained; all samples; extras."""
        real_tokens = (
            lengths if self.text.loss_kind == "elbo" else torch.bincount(masked_sample, minlength=len(lengths))
        )
        tokens = torch.zeros(self.cells, dtype=torch.float64).index_add(0, text_cell, real_tokens.double())
        samples = torch.bincount(latent_cell, minlength=self.cells).double()
        total = samples.sum()
        tokens.view(len(MODES), -1)[MODES.index("t2l")] = 0
        samples.view(len(MODES), -1)[MODES.index("l2t")] = 0
        of_extras = {"label_smoothing": tokens.sum(), "z": tokens.sum()}  # a weight counts once a micro-batch
        extras = [of_extras.get(name, torch.ones_like(total)) for name in self.extras]
        return torch.cat([tokens, samples, torch.stack([total, *extras])])

    def __call__(self, model: Network, noised: NoisedBatch, totals: Sequence[float]) -> tuple[Tensor, Tensor]:
        """(loss, sums): the micro-batch's share of the step's loss, and the detached sums behind it.

        `totals` are the `counts` summed over the step's global batch. `sums` [S] lie on the device and are
        divided by their counts only when somebody looks, so a step waits for nothing.
        """
        text_terms, latent_pred, length_logits, *learned = model(*noised.inputs)
        cells, config = self.cells, self.config
        extras: dict[str, Tensor] = {}
        tokens, samples = max(1.0, sum(totals[:cells])), max(1.0, sum(totals[cells : 2 * cells]))
        nll = text_terms[:, 0] if config.shapes_text else text_terms
        # What is trained is summed by itself: into how many cells its parts are counted changes no bit of it.
        weighted = noised.token_weight * nll
        text = nll.new_zeros(cells).index_add(0, noised.token_cell, weighted.detach())
        weight = noised.trained_token_weight
        trained_text = (weighted if weight is None else weight * nll).sum()
        weight = noised.token_weight if weight is None else weight
        if config.label_smoothing:
            # (1 - e) nll + e (mean over all tokens of their nll), as what it adds to nll.
            extras["label_smoothing"] = config.label_smoothing * (weight * (text_terms[:, 2] - nll)).sum()
        if config.z_loss:
            extras["z"] = config.z_loss * (weight * text_terms[:, 1].square()).sum()
        latent_losses = self.latent.losses(latent_pred, noised.latent_target)
        weighted = noised.latent_weight * latent_losses
        latent = nll.new_zeros(cells).index_add(0, noised.latent_cell, weighted.detach())
        weight = noised.trained_latent_weight
        trained_latent = (weighted if weight is None else weight * latent_losses).sum()
        length = F.cross_entropy(length_logits, noised.length_target, reduction="sum")
        text_loss, latent_loss = sum(extras.values(), trained_text) / tokens, trained_latent / samples
        length_loss = config.length_weight * length / max(1.0, totals[2 * cells])
        if config.latent_weighting == "fixed":
            loss = text_loss + config.latent_weight * latent_loss + length_loss
        else:
            (log_variances,) = learned
            weights = (-log_variances).exp()
            own = noised.counts.tolist()
            shares = (sum(own[:cells]) / tokens, sum(own[cells : 2 * cells]) / samples)
            loss = weights[0] * text_loss + weights[1] * latent_loss + length_loss
            loss = loss + 0.5 * (shares[0] * log_variances[0] + shares[1] * log_variances[1])
            extras |= {"text_weight": weights[0], "latent_weight": weights[1]}
        shown = [extras[name].view(1) for name in self.extras]
        return loss, torch.cat([text, latent, length[None], *shown]).detach()

    def summary(self, sums: Tensor, counts: Tensor, finer: int = 1) -> dict[str, float]:
        """Mean losses by name from sums and counts over any number of micro-batches; nats for text.

        The total has the weights of the config, also where others are learned, and no time weighting: so it can be
        compared, with that of validation and of other runs. Those of noise levels are over all modes; `finer`: so many
        of them are shown as one.
        """
        cells = self.cells
        extras = {
            name: float(value / count)
            for name, value, count in zip(self.extras, sums[2 * cells + 1 :], counts[2 * cells + 1 :], strict=True)
            if count > 0
        }
        whole: dict[str, float] = {}
        parts: dict[str, float] = {}
        for name, first in (("text", 0), ("latent", cells)):
            own, of = (each[first : first + cells].view(len(MODES), -1, finer).sum(2) for each in (sums, counts))
            whole |= _means({f"loss/{name}": (own.sum(), of.sum())})
            of_modes = zip(MODES, own.sum(1), of.sum(1), strict=True)
            parts |= _means({f"loss/{name}_{mode}": (value, count) for mode, value, count in of_modes})
            if own.shape[1] > 1:
                of_levels = zip(level_names(own.shape[1]), own.sum(0), of.sum(0), strict=True)
                parts |= _means({f"loss/{name}{NOISE}{level}": (value, count) for level, value, count in of_levels})
        whole["loss/length"] = float(sums[2 * cells] / counts[2 * cells])
        whole["loss/total"] = (
            whole.get("loss/text", 0.0)
            + self.config.latent_weight * whole.get("loss/latent", 0.0)
            + self.config.length_weight * whole["loss/length"]
            + sum(extras.get(name, 0.0) for name in ("label_smoothing", "z"))
        )
        return whole | {f"loss/{name}": value for name, value in extras.items()} | parts

    def by_level(self, sums: Tensor, counts: Tensor) -> dict[str, list[float]]:
        """Mean losses over the noise levels, from 0 to 1, of each modality and mode that has any: "text_l2t"; NaN
        where nothing was measured."""
        shape = (2, len(MODES), self.levels)
        means = (sums[: 2 * self.cells] / counts[: 2 * self.cells]).view(shape)  # 0 / 0 is NaN
        measured = counts[: 2 * self.cells].view(shape).sum(2) > 0
        return {
            f"{name}_{mode}": means[place, number].tolist()
            for place, name in enumerate(("text", "latent"))
            for number, mode in enumerate(MODES)
            if measured[place, number]
        }


def level_names(levels: int) -> list[str]:
    """Of equal parts of [0, 1]: "0-0.2", "0.2-0.4" ..."""
    edges = [f"{round(edge / levels, 2):g}" for edge in range(levels + 1)]
    return [f"{low}-{high}" for low, high in pairwise(edges)]


def _means(parts: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Sum over count, where anything was counted."""
    return {name: float(value / count) for name, (value, count) in parts.items() if count > 0}


def total_counts(noised: Iterable[NoisedBatch]) -> Tensor:
    """Counts of several micro-batches together, on the host."""
    return torch.stack([batch.counts for batch in noised]).sum(0)
