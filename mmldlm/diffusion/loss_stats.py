"""Statistics of the losses: sums and counts by mode and noise bin, and the named means for the log.

Shape letters: B samples, S sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mmldlm.diffusion.noise import MODES


class LossStats:
    """Entries of the sums [S] and counts [S] of losses: text by bin, latents by bin, lengths, `aux_losses`.

    A bin is a pair of a mode and a noise bin, and a noise bin is one of `num_noise_bins` equal parts of the noise times
    [0, 1]. The index of a bin is mode x num_noise_bins + noise bin. `aux_losses` names the terms that only training
    adds, learned weights, and "accuracy" if it is counted.
    """

    def __init__(self, num_noise_bins: int, latent_weight: float, length_weight: float, aux_losses: tuple[str, ...]):
        self.num_noise_bins, self.num_bins = num_noise_bins, len(MODES) * num_noise_bins
        self.latent_weight, self.length_weight, self.aux_losses = latent_weight, length_weight, aux_losses

    @property
    def size(self) -> int:
        """Number S of sums."""
        return 2 * self.num_bins + 1 + len(self.aux_losses)

    def bin_of(self, mode: Tensor, t: Tensor) -> Tensor:
        """Return the bin of each sample."""
        # t = 1 belongs to the last bin.
        noise_bin = (t * self.num_noise_bins).long().clamp_max(self.num_noise_bins - 1)
        return mode * self.num_noise_bins + noise_bin

    def counts(self, text_bin: Tensor, latent_bin: Tensor, loss_tokens: Tensor, num_masked: int) -> Tensor:
        """Return the denominators [S]: tokens by bin, samples by bin, all samples, then one for each of `aux_losses`.

        The samples by bin include only samples whose latent is trained.

        Args:
            text_bin, latent_bin: Bins of the samples [B].
            loss_tokens: How many tokens of each sample the text loss averages over, [B].
            num_masked: Number of masked tokens, over which the accuracy is a mean.
        """
        tokens = torch.zeros(self.num_bins, dtype=torch.float64).index_add(0, text_bin, loss_tokens.double())
        samples = torch.bincount(latent_bin, minlength=self.num_bins).double()
        # Every sample has a length loss, so we count all before we remove the samples with given latents.
        total = samples.sum()
        tokens.view(len(MODES), -1)[MODES.index("t2l")] = 0
        samples.view(len(MODES), -1)[MODES.index("l2t")] = 0
        aux_counts = {"label_smoothing": tokens.sum(), "z": tokens.sum(), "accuracy": total.new_tensor(num_masked)}
        # A learned weight counts once per sample, so that its mean over any micro-batches is the step's weight.
        aux = [aux_counts.get(name, total) for name in self.aux_losses]
        return torch.cat([tokens, samples, torch.stack([total, *aux])])

    def totals(self, counts: Sequence[float]) -> tuple[float, float, float]:
        """Return the counts [S] over all bins: of tokens, of samples whose latent is trained, and of all samples."""
        return sum(counts[: self.num_bins]), sum(counts[self.num_bins : 2 * self.num_bins]), counts[2 * self.num_bins]

    def summary(self, sums: Tensor, counts: Tensor, coarsen: int = 1) -> dict[str, float]:
        """Return mean losses by name, and the accuracy. Text losses are in nats per token.

        The total has the weights of the config even if weights are learned, and no time weighting, so that you can
        compare it with validation and with other runs. Losses of noise bins are over all modes. `sums` and `counts` [S]
        come from the same micro-batches, and each `coarsen` adjacent noise bins are merged.
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
                details |= _means({f"loss/{name}_noise_{part}": (value, count) for part, value, count in by_bin})
        accuracy = {"accuracy/masked_tokens": aux.pop("accuracy")} if "accuracy" in aux else {}
        losses["loss/length"] = float(sums[2 * num_bins] / counts[2 * num_bins])
        losses["loss/total"] = (
            losses.get("loss/text", 0.0)
            + self.latent_weight * losses.get("loss/latent", 0.0)
            + self.length_weight * losses["loss/length"]
            + sum(aux.get(name, 0.0) for name in ("label_smoothing", "z"))
        )
        return losses | {f"loss/{name}": value for name, value in aux.items()} | accuracy | details

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
