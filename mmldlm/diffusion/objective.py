"""The training objective: corrupt both modalities, call the network once, weigh and sum the losses.

The network is an argument: any callable with `MMDiT.forward`'s signature, wrapped by whatever engine, or
a test's perfect denoiser. Losses are sums over samples and tokens; they are divided once, by counts over
the whole global batch, so that no split of it into ranks and micro-batches changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import Batch, Layout
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentLoss
from mmldlm.diffusion.masked import MaskedDiffusion, TextLoss
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.schema import setting

Network = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class LossConfig:
    text: TextLoss = setting("elbo", "elbo: nats per token, bounds the likelihood; masked_mean: plain mean over masked")
    latent: LatentLoss = setting("cosine", "distance of predicted and true latent target")
    latent_weight: float = setting(0.1, "weight of the latent loss beside the text loss", at_least=0)
    length_weight: float = setting(0.01, "weight of the length head's loss", at_least=0)


@dataclass(frozen=True)
class NoisedBatch:
    """A corrupted micro-batch: what the network gets, and what it is measured by."""

    noised_tokens: Tensor  # int64 [N]
    noised_latents: Tensor  # float32 [B, M, C]
    t_text: Tensor  # float32 [B]
    t_latent: Tensor  # float32 [B]
    layout: Layout
    positions: Tensor  # int64 [P]: the masked tokens
    targets: Tensor  # int64 [P]: what they were
    token_weight: Tensor  # float32 [P]
    token_mode: Tensor  # int64 [P]
    latent_target: Tensor  # float32 [B, M, C]
    latent_weight: Tensor  # float32 [B]: 0 where the latent is pinned
    mode: Tensor  # int64 [B]
    length_target: Tensor  # int64 [B]: length - 1
    counts: Tensor  # float64 [2 * modes + 1] on the host: what the sums of `Objective.sums` are divided by

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Layout, Tensor, Tensor]:
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
    def __init__(self, config: LossConfig, text: MaskedDiffusion, latent: GaussianDiffusion):
        self.config, self.text, self.latent = config, text, latent

    def corrupt(self, batch: Batch, noise: Noise) -> NoisedBatch:
        """Forward processes of both modalities; on the host, where `positions` has a known size."""
        layout = batch.layout
        masked = self.text.masked(noise.uniforms, noise.t_text, layout.sample_of_token)
        positions = masked.nonzero().squeeze(1)
        sample = layout.sample_of_token[positions]
        trains_text = noise.mode != MODES.index("t2l")
        trains_latent = noise.mode != MODES.index("l2t")
        lengths = torch.tensor(batch.lengths)
        return NoisedBatch(
            noised_tokens=self.text.corrupt(batch.tokens, masked),
            noised_latents=self.latent.corrupt(batch.latents, noise.epsilon, noise.t_latent),
            t_text=noise.t_text,
            t_latent=noise.t_latent,
            layout=layout,
            positions=positions,
            targets=batch.tokens[positions],
            token_weight=(self.text.weights(noise.t_text) * trains_text)[sample],
            token_mode=noise.mode[sample],
            latent_target=self.latent.target(batch.latents, noise.epsilon, noise.t_latent),
            latent_weight=trains_latent.float(),
            mode=noise.mode,
            length_target=lengths - 1,
            counts=self._counts(noise.mode, lengths, sample),
        )

    def _counts(self, mode: Tensor, lengths: Tensor, masked_sample: Tensor) -> Tensor:
        """By mode: tokens that the text loss is spread over; samples whose latent is trained; all samples."""
        t2l, l2t = MODES.index("t2l"), MODES.index("l2t")
        real_tokens = (
            lengths if self.text.loss_kind == "elbo" else torch.bincount(masked_sample, minlength=len(lengths))
        )
        tokens = torch.zeros(len(MODES), dtype=torch.float64).index_add(0, mode, real_tokens.double())
        samples = torch.bincount(mode, minlength=len(MODES)).double()
        tokens[t2l], total = 0, samples.sum()
        samples[l2t] = 0
        return torch.cat([tokens, samples, total[None]])

    def __call__(self, model: Network, noised: NoisedBatch, totals: Sequence[float]) -> tuple[Tensor, Tensor]:
        """(loss, sums): the micro-batch's share of the step's loss, and the detached sums behind it.

        `totals` are the `counts` summed over the step's global batch. `sums` [2 * modes + 1] lie on the
        device and are divided by their counts only when somebody looks, so a step waits for nothing.
        """
        nll, latent_pred, length_logits = model(*noised.inputs)
        modes = len(MODES)
        text = nll.new_zeros(modes).index_add(0, noised.token_mode, noised.token_weight * nll)
        latent_losses = self.latent.losses(latent_pred, noised.latent_target) * noised.latent_weight
        latent = nll.new_zeros(modes).index_add(0, noised.mode, latent_losses)
        length = F.cross_entropy(length_logits, noised.length_target, reduction="sum")
        loss = (
            text.sum() / max(1.0, sum(totals[:modes]))
            + self.config.latent_weight * latent.sum() / max(1.0, sum(totals[modes : 2 * modes]))
            + self.config.length_weight * length / max(1.0, totals[-1])
        )
        return loss, torch.cat([text, latent, length[None]]).detach()

    def summary(self, sums: Tensor, counts: Tensor) -> dict[str, float]:
        """Mean losses by name from sums and counts over any number of micro-batches; nats for text."""
        modes = len(MODES)
        text, latent, length = sums[:modes], sums[modes : 2 * modes], sums[-1]
        tokens, samples, total = counts[:modes], counts[modes : 2 * modes], counts[-1]
        values: dict[str, float] = {}
        if tokens.sum() > 0:
            values["loss/text"] = float(text.sum() / tokens.sum())
        if samples.sum() > 0:
            values["loss/latent"] = float(latent.sum() / samples.sum())
        values["loss/length"] = float(length / total)
        values["loss/total"] = (
            values.get("loss/text", 0.0)
            + self.config.latent_weight * values.get("loss/latent", 0.0)
            + self.config.length_weight * values["loss/length"]
        )
        for index, name in enumerate(MODES):
            if tokens[index] > 0:
                values[f"loss/text_{name}"] = float(text[index] / tokens[index])
            if samples[index] > 0:
                values[f"loss/latent_{name}"] = float(latent[index] / samples[index])
        return values


def total_counts(noised: Iterable[NoisedBatch]) -> Tensor:
    """Counts of several micro-batches together, on the host."""
    return torch.stack([batch.counts for batch in noised]).sum(0)
