"""The training objective: corrupt both modalities, call the network once, weight and sum the losses.

The network is an argument: any callable with the signature of `MMDiT.forward`, for example wrapped by an engine, or a
perfect denoiser in a test. Losses are sums over samples and tokens, divided once by counts over the whole global batch,
so the gradient does not depend on how that is split into ranks and micro-batches.

Shape letters: B samples, N tokens of the whole unpadded micro-batch, P masked tokens, M latent tokens of a sample,
C latent channels, S sums.
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
from mmldlm.settings.fields import require_effect, setting

Network = Callable[..., tuple[Tensor, ...]]

_NOISE_BIN = "_noise_"  # in the names of losses of one noise bin


@dataclass(frozen=True)
class LossConfig:
    """Losses and their weights."""

    text: TextLoss = setting(
        "elbo",
        "elbo: nats per token, a bound of the likelihood; masked_mean: plain mean over masked tokens",
        advice="elbo to compare bits per token; evaluation measures it in any case",
    )
    latent: LatentLoss = setting(
        "cosine",
        "distance of predicted and true latent target",
        advice="cosine if only the direction of a latent matters, as in retrieval; mse if its length does",
    )
    huber_delta: float = setting(1.0, "huber: error from which on the loss grows linearly", above=0)
    latent_weight: float = setting(
        10.0,
        "weight of the latent loss relative to the text loss; with `latent_weighting: uncertainty` its initial value",
        at_least=0,
        advice="Below 1 the cosine loss of t2l is negligible next to nats per token; 1 if only latents are trained, "
        "or the loss is mse",
    )
    latent_weighting: Literal["fixed", "uncertainty"] = setting(
        "fixed", "uncertainty: learned weights of text and latent loss, which follow the size of each loss"
    )
    text_weight_limit: float | None = setting(
        None,
        "maximal weight of a masked token in training under `text: elbo`, which is 1 / t_text; null: no limit",
        above=0,
    )
    latent_time_weighting: Literal["none", "min_snr"] = setting(
        "none", "weight of a latent's loss by its noise time; min_snr: SNR up to min_snr_gamma, on x0's squared error"
    )
    min_snr_gamma: float = setting(5.0, "min_snr: signal-to-noise ratio at which the weight is clipped", above=0)
    label_smoothing: float = setting(
        0.0, "fraction of each token's target that is spread over all tokens, in training", at_least=0, below=1
    )
    z_loss: float = setting(
        0.0,
        "weight of the squared log of the softmax denominator of the text head, in training; usual: 1e-4",
        at_least=0,
    )
    length_weight: float = setting(0.01, "weight of the length head's loss", at_least=0)

    def __post_init__(self) -> None:
        require_effect(self, "huber_delta", "latent", "huber")
        require_effect(self, "min_snr_gamma", "latent_time_weighting", "min_snr")
        require_effect(self, "text_weight_limit", "text", "elbo")
        if self.latent_weighting == "uncertainty" and not self.latent_weight:
            raise ValueError(
                "latent_weight: expected an initial weight above 0 under latent_weighting: uncertainty, found 0"
            )

    @property
    def needs_text_terms(self) -> bool:
        """Return whether the text loss needs more of the head than likelihoods."""
        return self.label_smoothing > 0 or self.z_loss > 0


@dataclass(frozen=True)
class NoisedBatch:
    """A corrupted micro-batch: inputs of the network, targets and weights of the losses."""

    noised_tokens: Tensor  # int64 [N]
    noised_latents: Tensor  # float32 [B, M, C]
    t_text: Tensor  # float32 [B]
    t_latent: Tensor  # float32 [B]
    layout: PackedLayout
    positions: Tensor  # int64 [P]: the masked tokens
    targets: Tensor  # int64 [P]: their true ids
    token_weight: Tensor  # float32 [P]: in the reported loss, a bound under `loss.text: elbo`
    trained_token_weight: Tensor | None  # float32 [P]: in the training loss, if it is another
    token_bin: Tensor  # int64 [P]: bin of mode and t_text, see `Objective`
    latent_target: Tensor  # float32 [B, M, C]
    latent_weight: Tensor  # float32 [B]: in the reported loss, 0 where the latent is given
    trained_latent_weight: Tensor | None  # float32 [B]: in the training loss, if it is another
    latent_bin: Tensor  # int64 [B]: bin of mode and t_latent
    length_target: Tensor  # int64 [B]: length - 1
    counts: Tensor  # float64 [S] on the host: denominators of the sums of `Objective.__call__`
    sample_ids: Tensor  # int64 [B] on the host: index of each sample in its split

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
        """Return the batch on `device`, except for what stays on the host; copies from pinned memory do not block."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in ("counts", "sample_ids")
        }
        return replace(self, layout=self.layout.to(device), **moved)


class Objective:
    """Losses of a micro-batch, as sums [S] with counts [S]: text by bin, latents by bin, lengths, `aux_losses`.

    A bin is a mode and a noise bin, one of `num_noise_bins` equal parts of the noise times in [0, 1]. Its index is
    mode x num_noise_bins + noise bin.

    Args:
        config: losses and their weights.
        text: diffusion of the text.
        latent: diffusion of the latents.
        num_noise_bins: number of noise bins.
    """

    def __init__(self, config: LossConfig, text: MaskedDiffusion, latent: GaussianDiffusion, num_noise_bins: int = 1):
        self.config, self.text, self.latent, self.num_noise_bins = config, text, latent, num_noise_bins
        self.num_bins = len(MODES) * num_noise_bins
        enabled = {
            "label_smoothing": config.label_smoothing > 0,
            "z": config.z_loss > 0,
            "text_weight": config.latent_weighting == "uncertainty",
            "latent_weight": config.latent_weighting == "uncertainty",
        }
        self.aux_losses = tuple(name for name, is_enabled in enabled.items() if is_enabled)

    @property
    def size(self) -> int:
        """Number S of sums."""
        return 2 * self.num_bins + 1 + len(self.aux_losses)

    def for_validation(self, refine: int = 1) -> Objective:
        """Return the objective with the reported losses alone, without the terms that only training adds.

        Each noise bin is divided into `refine` bins.
        """
        config = LossConfig(
            text=self.config.text,
            latent=self.config.latent,
            huber_delta=self.config.huber_delta,
            latent_weight=self.config.latent_weight,
            length_weight=self.config.length_weight,
        )
        return Objective(config, self.text, self.latent, self.num_noise_bins * refine)

    def corrupt(self, batch: Batch, noise: Noise) -> NoisedBatch:
        """Apply the forward processes of both modalities; on the host, where the size of `positions` is known."""
        layout = batch.layout
        masked = self.text.token_mask(noise.uniforms, noise.t_text, layout.sample_of_token)
        positions = masked.nonzero().squeeze(1)
        sample = layout.sample_of_token[positions]
        trains_text = noise.mode != MODES.index("t2l")
        trains_latent = noise.mode != MODES.index("l2t")
        lengths = torch.tensor(batch.lengths)
        text_bin, latent_bin = (self._bin(noise.mode, t) for t in (noise.t_text, noise.t_latent))
        token_weight = self.text.weights(noise.t_text, lengths, noise.importance) * trains_text
        # Limits and time weights change the trained loss only, so that reported ones compare across runs.
        trained_token_weight = trained_latent_weight = None
        if self.config.text_weight_limit is not None:
            limited = self.text.weights(noise.t_text, lengths, noise.importance, self.config.text_weight_limit)
            trained_token_weight = (limited * trains_text)[sample]
        if self.config.latent_time_weighting == "min_snr":
            time_weight = self.latent.min_snr_weight(noise.t_latent, self.config.min_snr_gamma)
            trained_latent_weight = time_weight * trains_latent
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
            token_bin=text_bin[sample],
            latent_target=self.latent.target(batch.latents, noise.epsilon, noise.t_latent),
            latent_weight=trains_latent.float(),
            trained_latent_weight=trained_latent_weight,
            latent_bin=latent_bin,
            length_target=lengths - 1,
            counts=self._counts(text_bin, latent_bin, lengths, sample),
            sample_ids=batch.sample_ids,
        )

    def _bin(self, mode: Tensor, t: Tensor) -> Tensor:
        # t = 1 belongs to the last bin.
        noise_bin = (t * self.num_noise_bins).long().clamp_max(self.num_noise_bins - 1)
        return mode * self.num_noise_bins + noise_bin

    def _counts(self, text_bin: Tensor, latent_bin: Tensor, lengths: Tensor, masked_sample: Tensor) -> Tensor:
        """Return the denominators [S]: tokens by bin, samples by bin, all samples, then those of `aux_losses`.

        Tokens are those that the text loss is a mean over, samples those whose latent is trained.
        """
        loss_tokens = (
            lengths if self.text.loss_kind == "elbo" else torch.bincount(masked_sample, minlength=len(lengths))
        )
        tokens = torch.zeros(self.num_bins, dtype=torch.float64).index_add(0, text_bin, loss_tokens.double())
        samples = torch.bincount(latent_bin, minlength=self.num_bins).double()
        # All samples have a length loss: counted before those with given latents are removed.
        total = samples.sum()
        tokens.view(len(MODES), -1)[MODES.index("t2l")] = 0
        samples.view(len(MODES), -1)[MODES.index("l2t")] = 0
        aux_counts = {"label_smoothing": tokens.sum(), "z": tokens.sum()}  # learned weights count once per micro-batch
        aux = [aux_counts.get(name, torch.ones_like(total)) for name in self.aux_losses]
        return torch.cat([tokens, samples, torch.stack([total, *aux])])

    def __call__(self, model: Network, noised: NoisedBatch, totals: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Compute the losses of a micro-batch.

        Args:
            model: the network.
            noised: a corrupted micro-batch on the device of the network.
            totals: `counts` [S], summed over the global batch of the step.

        Returns:
            The micro-batch's share of the step's loss, and the detached sums [S]. These stay on the device and are
            divided by their counts when they are logged, so that no step waits for the device.
        """
        text_terms, latent_pred, length_logits, *learned = model(*noised.inputs)
        num_bins, config = self.num_bins, self.config
        aux: dict[str, Tensor] = {}
        # A step without a modality has a loss of 0 for it: its sums are 0, and the divisor must not be.
        tokens, samples = max(1.0, sum(totals[:num_bins])), max(1.0, sum(totals[num_bins : 2 * num_bins]))
        nll = text_terms[:, 0] if config.needs_text_terms else text_terms
        # The training loss is a sum of its own, so that the number of noise bins does not change a bit of it.
        weighted = noised.token_weight * nll
        text = nll.new_zeros(num_bins).index_add(0, noised.token_bin, weighted.detach())
        weight = noised.trained_token_weight
        trained_text = (weighted if weight is None else weight * nll).sum()
        weight = noised.token_weight if weight is None else weight
        if config.label_smoothing:
            # The difference of (1 - e) nll + e (mean nll of all tokens) and nll.
            aux["label_smoothing"] = config.label_smoothing * (weight * (text_terms[:, 2] - nll)).sum()
        if config.z_loss:
            aux["z"] = config.z_loss * (weight * text_terms[:, 1].square()).sum()
        latent_losses = self.latent.losses(latent_pred, noised.latent_target)
        weighted = noised.latent_weight * latent_losses
        latent = nll.new_zeros(num_bins).index_add(0, noised.latent_bin, weighted.detach())
        weight = noised.trained_latent_weight
        trained_latent = (weighted if weight is None else weight * latent_losses).sum()
        length = F.cross_entropy(length_logits, noised.length_target, reduction="sum")
        text_loss, latent_loss = sum(aux.values(), trained_text) / tokens, trained_latent / samples
        length_loss = config.length_weight * length / max(1.0, totals[2 * num_bins])
        if config.latent_weighting == "fixed":
            loss = text_loss + config.latent_weight * latent_loss + length_loss
        else:
            (log_variances,) = learned
            weights = (-log_variances).exp()
            # The term s / 2 counts once per step: each micro-batch adds its fraction of it.
            counts = noised.counts.tolist()
            fractions = (sum(counts[:num_bins]) / tokens, sum(counts[num_bins : 2 * num_bins]) / samples)
            loss = weights[0] * text_loss + weights[1] * latent_loss + length_loss
            loss = loss + 0.5 * (fractions[0] * log_variances[0] + fractions[1] * log_variances[1])
            aux |= {"text_weight": weights[0], "latent_weight": weights[1]}
        reported = [aux[name].view(1) for name in self.aux_losses]
        return loss, torch.cat([text, latent, length[None], *reported]).detach()

    def summary(self, sums: Tensor, counts: Tensor, coarsen: int = 1) -> dict[str, float]:
        """Return mean losses by name; nats per token for text.

        The total has the weights of the config even if others are learned, and no time weighting, so that it can be
        compared with validation and with other runs. Losses of noise bins are over all modes.

        Args:
            sums: [S], over any number of micro-batches.
            counts: [S], over the same micro-batches.
            coarsen: number of adjacent noise bins that are merged.
        """
        num_bins = self.num_bins
        aux_sums, aux_counts = sums[2 * num_bins + 1 :], counts[2 * num_bins + 1 :]
        aux = {
            name: float(value / count)
            for name, value, count in zip(self.aux_losses, aux_sums, aux_counts, strict=True)
            if count > 0
        }
        losses: dict[str, float] = {}
        details: dict[str, float] = {}
        for name, first in (("text", 0), ("latent", num_bins)):
            bin_sums, bin_counts = (  # [modes, noise bins]
                values[first : first + num_bins].view(len(MODES), -1, coarsen).sum(2) for values in (sums, counts)
            )
            losses |= _means({f"loss/{name}": (bin_sums.sum(), bin_counts.sum())})
            by_mode = zip(MODES, bin_sums.sum(1), bin_counts.sum(1), strict=True)
            details |= _means({f"loss/{name}_{mode}": (value, count) for mode, value, count in by_mode})
            if bin_sums.shape[1] > 1:
                by_bin = zip(noise_bin_names(bin_sums.shape[1]), bin_sums.sum(0), bin_counts.sum(0), strict=True)
                details |= _means({f"loss/{name}{_NOISE_BIN}{part}": (value, count) for part, value, count in by_bin})
        losses["loss/length"] = float(sums[2 * num_bins] / counts[2 * num_bins])
        losses["loss/total"] = (
            losses.get("loss/text", 0.0)
            + self.config.latent_weight * losses.get("loss/latent", 0.0)
            + self.config.length_weight * losses["loss/length"]
            + sum(aux.get(name, 0.0) for name in ("label_smoothing", "z"))
        )
        return losses | {f"loss/{name}": value for name, value in aux.items()} | details

    def by_noise_bin(self, sums: Tensor, counts: Tensor) -> dict[str, list[float]]:
        """Return mean losses by noise bin, from t = 0 to 1, of each measured modality and mode ("text_l2t").

        Empty bins are NaN.
        """
        shape = (2, len(MODES), self.num_noise_bins)
        means = (sums[: 2 * self.num_bins] / counts[: 2 * self.num_bins]).view(shape)  # 0 / 0 is NaN
        measured = counts[: 2 * self.num_bins].view(shape).sum(2) > 0
        return {
            f"{name}_{mode}": means[row, column].tolist()
            for row, name in enumerate(("text", "latent"))
            for column, mode in enumerate(MODES)
            if measured[row, column]
        }


def noise_bin_names(num_noise_bins: int) -> list[str]:
    """Return the names of equal parts of [0, 1]: "0-0.2", "0.2-0.4" ..."""
    edges = [f"{round(edge / num_noise_bins, 2):g}" for edge in range(num_noise_bins + 1)]
    return [f"{low}-{high}" for low, high in pairwise(edges)]


def _means(totals: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return sum / count by name, for counts above 0."""
    return {name: float(value / count) for name, (value, count) in totals.items() if count > 0}


def total_counts(noised: Iterable[NoisedBatch]) -> Tensor:
    """Return the sum of the counts of several micro-batches, on the host."""
    return torch.stack([batch.counts for batch in noised]).sum(0)
