"""The training objective: corrupt both modalities, call the network once, weight and sum the losses.

The network is an argument: any callable with the signature of `MMDiT.forward`, e.g. a network wrapped by an engine, or
a perfect denoiser in a test. Losses are sums over samples and tokens, divided once by counts over the whole global
batch, so the gradient does not depend on how the global batch is split into ranks and micro-batches.

Shape letters: B samples, N tokens of the unpadded micro-batch, P masked tokens, M latent tokens, C channels, S sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import ACCURACY_STRIDE, Batch, PackedLayout
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentLoss
from mmldlm.diffusion.loss_stats import LossStats
from mmldlm.diffusion.masked import MaskedDiffusion, TextLoss
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.settings.declaration import require_effect, setting
from mmldlm.utils.packed_tensors import PackedTensors

Network = Callable[..., tuple[Tensor, ...]]
ON_HOST = ("counts", "sample_ids")  # tensors of a `NoisedBatch` that stay on the host


@dataclass(frozen=True)
class LossConfig:
    """Losses and their weights."""

    text: TextLoss = setting(
        "elbo",
        "text loss in training. elbo: a bound of the likelihood, in nats per token. masked_mean: plain mean over "
        "masked tokens, in which samples with few masks weigh less. Validation and evaluation always measure the bound",
    )
    latent: LatentLoss = setting(
        "cosine",
        "distance of predicted and true latent target",
        advice="cosine if only the direction of a latent matters, e.g. for retrieval. mse if the length matters, or to "
        "sample texts and latents jointly",
    )
    huber_delta: float = setting(1.0, "huber: the loss grows linearly from this error on", above=0)
    latent_weight: float = setting(
        10.0,
        "weight of the latent loss relative to the text loss. With `latent_weighting: uncertainty` it is the "
        "initial value",
        at_least=0,
        advice="Below 1 the latent loss is negligible next to nats per token. 1 if only latents are trained",
    )
    latent_weighting: Literal["fixed", "uncertainty"] = setting(
        "fixed",
        "fixed: the weights of the config. uncertainty: learned weights of text and latent loss, which follow "
        "the size of each loss",
    )
    text_weight_limit: float | None = setting(
        None,
        "upper limit of a masked token's weight 1 / t_text in training under `text: elbo`; null: no limit",
        above=0,
    )
    latent_time_weighting: Literal["none", "min_snr"] = setting(
        "none",
        "weight of a latent's loss by its noise time. min_snr: the signal-to-noise ratio up to min_snr_gamma, "
        "applied to the squared error of x0",
    )
    min_snr_gamma: float = setting(5.0, "min_snr: signal-to-noise ratio at which the weight is clipped", above=0)
    label_smoothing: float = setting(
        0.0, "in training, fraction of each token's target that is spread over all tokens", at_least=0, below=1
    )
    z_loss: float = setting(
        0.0, "in training, weight of the squared log of the text head's softmax denominator, e.g. 1e-4", at_least=0
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
        """Return whether the text loss needs the log of the softmax denominator, or the mean log probability."""
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
    token_weight: Tensor  # float32 [P]: in the reported loss, which is a bound under `loss.text: elbo`
    trained_token_weight: Tensor | None  # float32 [P]: in the training loss, if it differs from the reported loss
    token_bin: Tensor  # int64 [P]: bin of mode and t_text, see `LossStats`
    latent_target: Tensor  # float32 [B, M, C]
    latent_weight: Tensor  # float32 [B]: in the reported loss, 0 where the latent is given
    trained_latent_weight: Tensor | None  # float32 [B]: in the training loss, if it differs from the reported loss
    latent_bin: Tensor  # int64 [B]: bin of mode and t_latent
    length_target: Tensor  # int64 [B]: length - 1, without the prefix
    counts: Tensor  # float64 [S] on the host: denominators of the sums of `Objective.__call__`
    sample_ids: Tensor  # int64 [B] on the host: index of each sample in its split
    trained_length_weight: Tensor | None = None  # float32 [B]: in the training loss, if samples have weights

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, PackedLayout, Tensor, Tensor]:
        """The arguments of the network, in order."""
        times = self.t_text, self.t_latent
        return self.noised_tokens, self.noised_latents, *times, self.layout, self.positions, self.targets

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that go to a device, by name, including the layout's tensors."""
        own = {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and name not in ON_HOST}
        return own | self.layout.index_tensors()

    @cached_property
    def packed(self) -> PackedTensors:
        """`tensors` in one buffer. Their places depend only on the numbers of samples, tokens and masked tokens."""
        return PackedTensors.pack(self.tensors())

    @classmethod
    def from_packed(cls, packed: PackedTensors, layout: PackedLayout, *on_host: Tensor) -> NoisedBatch:
        """Return a batch whose `tensors` are views of `packed`, with the given layout, counts and sample ids."""
        tensors = packed.tensors() | dict(zip(ON_HOST, on_host, strict=True))
        own = {each.name: tensors.get(each.name) for each in fields(cls) if each.name != "layout"}
        batch = cls(layout=layout.with_index_tensors(tensors, packed.buffer.device), **own)  # type: ignore[arg-type]
        vars(batch)["packed"] = packed
        return batch

    def __reduce__(self) -> Any:
        # One buffer, because each tensor that a worker sends takes a file descriptor. The device's part is first.
        packed = PackedTensors.pack(self.tensors() | {name: getattr(self, name) for name in ON_HOST})
        layout = PackedLayout(self.layout.lengths, self.layout.latent_tokens, num_filler=self.layout.num_filler)
        return _received, (packed, layout)

    def pin_memory(self) -> NoisedBatch:
        """Return the batch in pinned memory, in one buffer."""
        return self.from_packed(self.packed.pin_memory(), self.layout, self.counts, self.sample_ids)

    def to(self, device: torch.device | str) -> NoisedBatch:
        """Copy the batch to `device` in one piece. A copy from pinned memory does not block."""
        if torch.device(device) == self.layout.device:
            return self
        return self.from_packed(self.packed.to(device), self.layout, self.counts, self.sample_ids)


def _received(packed: PackedTensors, layout: PackedLayout) -> NoisedBatch:
    """Rebuild a batch that a worker of the loader has sent."""
    tensors, stop = packed.tensors(), packed.places[ON_HOST[0]].start
    places = {name: place for name, place in packed.places.items() if place.start < stop}
    on_device = PackedTensors(packed.buffer[:stop], places)
    return NoisedBatch.from_packed(on_device, layout, *(tensors[name] for name in ON_HOST))


class Objective:
    """Losses of a micro-batch. `stats` names the entries of the reported sums [S].

    With `accuracy` it counts correctly predicted tokens. In training the network must then return `Prediction.is_best`.
    """

    def __init__(
        self,
        config: LossConfig,
        text: MaskedDiffusion,
        latent: GaussianDiffusion,
        num_noise_bins: int = 1,
        accuracy: bool = False,
    ):
        self.config, self.text, self.latent = config, text, latent
        enabled = {
            "label_smoothing": config.label_smoothing > 0,
            "z": config.z_loss > 0,
            "text_weight": config.latent_weighting == "uncertainty",
            "latent_weight": config.latent_weighting == "uncertainty",
            "accuracy": accuracy,
        }
        aux_losses = tuple(name for name, is_enabled in enabled.items() if is_enabled)
        self.stats = LossStats(num_noise_bins, config.latent_weight, config.length_weight, aux_losses)

    def for_validation(self, refine: int = 1) -> Objective:
        """Return the objective without the terms and weights of training, with `refine` noise bins for each bin here.

        Its text loss is the likelihood bound with exact masks. Runs with independent masks or `masked_mean` are
        measured in the same way: the bound is the same as with independent masks, with less variance.
        """
        config = LossConfig(
            latent=self.config.latent,
            huber_delta=self.config.huber_delta,
            latent_weight=self.config.latent_weight,
            length_weight=self.config.length_weight,
        )
        text = MaskedDiffusion(self.text.mask_id, "elbo", "exact", self.text.prefix_end)
        return Objective(config, text, self.latent, self.stats.num_noise_bins * refine)

    def corrupt(self, batch: Batch, noise: Noise) -> NoisedBatch:
        """Apply both forward processes on the host, so that the host knows the size of `positions`."""
        layout = batch.layout
        is_text, lengths = self.text.find_texts(batch.tokens, layout)
        uniforms = noise.uniforms.masked_fill(~is_text, 1.0)
        masked = self.text.token_mask(uniforms, noise.t_text, layout.sample_of_token)
        positions = masked.nonzero().squeeze(1)
        sample = layout.sample_of_token[positions]
        trains_text = noise.mode != MODES.index("t2l")
        text_bin, latent_bin = (self.stats.bin_of(noise.mode, t) for t in (noise.t_text, noise.t_latent))
        token_weight = self.text.weights(noise.t_text, lengths, noise.importance) * trains_text
        latent_weight = (noise.mode != MODES.index("l2t")).float()
        # How many tokens of each sample the text loss averages over.
        loss_tokens = lengths if self.text.loss_kind == "elbo" else torch.bincount(sample, minlength=len(lengths))
        # Limits and time weights change the trained loss only, so that you can compare reported losses across runs.
        trained_token_weight, trained_latent_weight = token_weight, latent_weight
        if (limit := self.config.text_weight_limit) is not None:
            trained_token_weight = self.text.weights(noise.t_text, lengths, noise.importance, limit) * trains_text
        if self.config.latent_time_weighting == "min_snr":
            time_weight = self.latent.min_snr_weight(noise.t_latent, self.config.min_snr_gamma)
            trained_latent_weight = time_weight * latent_weight
        # So do weights of samples. Their mean is 1, so the divisors of the losses are the same.
        if batch.weights is not None:
            trained_token_weight = trained_token_weight * batch.weights
            trained_latent_weight = trained_latent_weight * batch.weights
        return NoisedBatch(
            noised_tokens=batch.tokens.masked_fill(masked, self.text.mask_id),
            noised_latents=self.latent.corrupt(batch.latents, noise.epsilon, noise.t_latent),
            t_text=noise.t_text,
            t_latent=noise.t_latent,
            layout=layout,
            positions=positions,
            targets=batch.tokens[positions],
            token_weight=token_weight[sample],
            trained_token_weight=None if trained_token_weight is token_weight else trained_token_weight[sample],
            token_bin=text_bin[sample],
            latent_target=self.latent.target(batch.latents, noise.epsilon, noise.t_latent),
            latent_weight=latent_weight,
            trained_latent_weight=None if trained_latent_weight is latent_weight else trained_latent_weight,
            latent_bin=latent_bin,
            length_target=lengths - 1,
            counts=self.stats.counts(text_bin, latent_bin, loss_tokens, len(positions)),
            sample_ids=batch.sample_ids,
            trained_length_weight=batch.weights,
        )

    def divisors(self, totals: Sequence[float], noised: NoisedBatch) -> Tensor:
        """Return the divisors of the losses, float32 [5] on the host, given `counts` [S] summed over the step.

        The first three count the step's tokens, its samples whose latent is trained, and all of its samples. Each is at
        least 1, since a modality that is absent has a loss of 0. The last two are the micro-batch's shares of these
        tokens and samples, for learned loss weights.
        """
        tokens, samples, lengths = (max(1.0, total) for total in self.stats.totals(totals))
        step = torch.tensor([tokens, samples, lengths], dtype=torch.float64)
        own = noised.counts[: 2 * self.stats.num_bins].view(2, -1).sum(1)
        return torch.cat([step, own / step[:2]]).float()

    def __call__(self, model: Network, noised: NoisedBatch, totals: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
        """Compute the losses of a micro-batch that is corrupted and on the network's device.

        Args:
            totals: `counts` [S], summed over the global batch of the step. They are read after the forward pass, since
                the sum may still be in progress during it. Or the resulting `divisors`, as a tensor on the device:
                then no Python number depends on the micro-batch, and a captured CUDA graph can be replayed for others.

        Returns:
            The micro-batch's share of the step's loss, and the detached sums [S]. The sums stay on the device, and
            logging divides them by their counts, so that no step waits for the device.
        """
        config, stats = self.config, self.stats
        text_terms, latent_pred, length_logits, *optional = model(*noised.inputs)
        text_sums, trained_text, aux = self._text_loss(text_terms, noised)
        latent_losses = self.latent.losses(latent_pred, noised.latent_target)
        latent_weights = noised.latent_weight, noised.trained_latent_weight
        latent_sums, trained_latent = self._weighted_sums(latent_losses, *latent_weights, noised.latent_bin)
        if noised.trained_length_weight is None:
            length_sum = trained_length = F.cross_entropy(length_logits, noised.length_target, reduction="sum")
        else:
            lengths_nll = F.cross_entropy(length_logits, noised.length_target, reduction="none")
            length_sum, trained_length = lengths_nll.sum(), (lengths_nll * noised.trained_length_weight).sum()
        # Divisors on the host are scalars, which GPU operators accept as they are.
        divisors = totals if isinstance(totals, Tensor) else self.divisors(totals, noised)
        tokens, samples, lengths, token_share, sample_share = divisors.unbind()
        text_loss, latent_loss = sum(aux.values(), trained_text) / tokens, trained_latent / samples
        length_loss = config.length_weight * trained_length / lengths
        if config.latent_weighting == "fixed":
            loss = text_loss + config.latent_weight * latent_loss + length_loss
        else:
            log_variances = optional[0]
            weights = (-log_variances).exp()
            loss = weights[0] * text_loss + weights[1] * latent_loss + length_loss
            # The term s / 2 counts once per step: each micro-batch adds its fraction of it.
            loss = loss + 0.5 * (token_share * log_variances[0] + sample_share * log_variances[1])
            aux |= zip(("text_weight", "latent_weight"), weights * (noised.length_target >= 0).sum(), strict=True)
        if "accuracy" in stats.aux_losses:
            counted = noised.token_weight > 0
            tried = counted[::ACCURACY_STRIDE]
            aux["accuracy"] = (optional[1] & tried).sum() * (counted.sum() / tried.sum().clamp_min(1))
        reported = [aux[name].view(1) for name in stats.aux_losses]
        return loss, torch.cat([text_sums, latent_sums, length_sum[None], *reported]).detach()

    def _text_loss(self, text_terms: Tensor, noised: NoisedBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the reported sums by bin, the sum for training, and the sums of the terms that only training adds."""
        config, weight, trained_weight = self.config, noised.token_weight, noised.trained_token_weight
        nll = text_terms[:, 0] if config.needs_text_terms else text_terms
        sums, trained = self._weighted_sums(nll, weight, trained_weight, noised.token_bin)
        weight = weight if trained_weight is None else trained_weight
        aux: dict[str, Tensor] = {}
        if config.label_smoothing:
            # The difference of (1 - e) nll + e (mean nll of all tokens) and nll.
            aux["label_smoothing"] = config.label_smoothing * (weight * (text_terms[:, 2] - nll)).sum()
        if config.z_loss:
            aux["z"] = config.z_loss * (weight * text_terms[:, 1].square()).sum()
        return sums, trained, aux

    def _weighted_sums(
        self, losses: Tensor, weight: Tensor, trained_weight: Tensor | None, loss_bin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the reported losses by bin, and the sum for training, which is the same to the bit for any bins."""
        reported = weight * losses
        trained = reported if trained_weight is None else trained_weight * losses
        by_bin = losses.new_zeros(self.stats.num_bins).index_add(0, loss_bin, reported.detach())
        return by_bin, trained.sum()


def total_counts(noised: Iterable[NoisedBatch]) -> Tensor:
    """Return the sum of the counts of several micro-batches, on the host."""
    return torch.stack([batch.counts for batch in noised]).sum(0)
