"""What is measured on held-out documents: likelihood bounds, texts from latents, latents from texts; each beside
its control."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import sacrebleu
import torch

from mmldlm.batch import Batch
from mmldlm.build import LoadedRun
from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.loader import fixed_batches
from mmldlm.data.verify import without_bad
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import Mode, draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, Objective
from mmldlm.diffusion.sampling import SamplingConfig, generate
from mmldlm.errors import DataError

MICRO_BATCH = 64
BITS = 1 / math.log(2)

# What stands in for a document's latent: its own, another document's, the mean of all, or noise (no condition).
Condition = Literal["own", "shuffled", "mean", "none"]


@dataclass(frozen=True)
class EvaluationConfig:
    split: str = "test"
    samples: int = 1000  # documents of the likelihood bound, and candidates of the retrieval
    texts: int = 200  # documents to write from their latents
    times: int = 4  # noise times a document, in equal parts of [0, 1]
    seed: int = 0


class Evaluation:
    """The documents at hand and what is measured on them."""

    def __init__(self, run: LoadedRun, config: EvaluationConfig):
        self.run, self.config = run, config
        store = without_bad(run.store, config.split, run.config.data.max_bad_samples)
        self.split = store.split(config.split)
        good = len(self.split) - len(self.split.skipped)
        count = min(config.samples, good)
        if count < 2:
            raise DataError(f"{store.path}: split {config.split} has {good} samples, expected at least 2")
        # Neighbours in a store come from one source: a fixed draw, also of the first few, is a fair sample.
        rng = np.random.default_rng(config.seed)
        drawn = rng.permutation(len(self.split))
        self.ids: np.ndarray = drawn[~np.isin(drawn, self.split.skipped)][:count]
        self.raw_latents = self.split.gather(self.ids)[2].astype(np.float32)
        latents = torch.from_numpy(run.store.standardise(self.raw_latents))
        cycle = rng.permutation(count)
        other = np.empty(count, np.int64)
        other[cycle] = np.roll(cycle, 1)  # one cycle through all: nobody keeps his own
        self.latents: dict[Condition, torch.Tensor] = {
            "own": latents,
            "shuffled": latents[other],
            "mean": torch.zeros_like(latents),  # the mean is the origin of the standardised space
        }
        # The bound, whatever loss the run was trained by.
        self.text = MaskedDiffusion(run.store.manifest.mask_id, "elbo")

    def batches(self, condition: Condition, count: int | None = None) -> Iterator[Batch]:
        ids = self.ids[:count]
        for batch in fixed_batches(self.split, ids, MICRO_BATCH):
            if condition != "none":
                batch = replace(batch, latents=self.latents[condition][batch.slots])
            yield batch

    # --- likelihood -----------------------------------------------------------------------------------

    @torch.no_grad()
    def text_nats(self, condition: Condition) -> np.ndarray:
        """float64 [n]: estimate of each document's negative ELBO in nats, given its condition.

        The mean over `times` draws of t from a low-discrepancy grid over all documents; unbiased, and the
        same draws for every condition.
        """
        run, nats = self.run, torch.zeros(len(self.ids), dtype=torch.float64)
        objective = Objective(LossConfig(), self.text, run.objective.latent)
        for draw in range(self.config.times):
            for batch in self.batches(condition):
                noise = draw_noise(batch, self.config.seed, draw, len(self.ids), mode_weights("l2t"))
                if condition == "none":
                    noise = replace(noise, t_latent=torch.ones_like(noise.t_latent))
                noised = objective.corrupt(batch, noise).to(run.device)
                sample = noised.layout.sample_of_token[noised.positions]
                prediction = run.model(*noised.inputs)
                weighted = (noised.token_weight * prediction.text).double()
                per_sample = weighted.new_zeros(len(batch.lengths)).index_add(0, sample, weighted)
                nats[batch.slots] += per_sample.cpu() / self.config.times
        return nats.numpy()

    def unigram_nats(self) -> float:
        """Nats per token of the documents under the training split's token frequencies (add-one smoothed)."""
        counts = self.run.store.token_counts.astype(np.float64) + 1
        log_p = np.log(counts / counts.sum())
        tokens = self.split.gather(self.ids)[0]
        return float(-log_p[tokens].mean())

    # --- generation -------------------------------------------------------------------------------------

    @torch.no_grad()
    def write(
        self, mode: Mode, condition: Condition, count: int, sampling: SamplingConfig
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Standardised latents [count, M, C] and tokens of `count` documents, generated; in order of `ids`."""
        run, latents = self.run, torch.zeros_like(self.latents["own"][:count])
        tokens: list[list[int]] = [[] for _ in range(count)]
        generator = torch.Generator().manual_seed(self.config.seed)
        for batch in self.batches(condition, count):
            made = generate(
                run.model,
                run.objective.text,
                run.objective.latent,
                mode,
                sampling,
                generator,
                batch.latents.to(run.device),
                batch.lengths,
                batch.tokens,
            )
            latents[batch.slots] = made.latents
            for slot, written in zip(batch.slots.tolist(), made.split(), strict=True):
                tokens[slot] = written
        return latents, tokens


def likelihood(evaluation: Evaluation, progress: Callable[[str], None]) -> dict[str, Any]:
    """Bits per token and character of the text alone and given its latent, with controls."""
    lengths = evaluation.split.lengths[evaluation.ids].astype(np.float64)
    characters = float(evaluation.split.characters[evaluation.ids].sum())
    tokens = float(lengths.sum())
    nats: dict[Condition, np.ndarray] = {}
    conditions: tuple[Condition, ...] = ("none", "own", "shuffled", "mean")
    for condition in conditions:
        progress(f"bound, latent {condition}")
        nats[condition] = evaluation.text_nats(condition)
    bits = {name: float(values.sum()) / tokens * BITS for name, values in nats.items()}
    unigram = evaluation.unigram_nats() * BITS
    return {
        "bits_per_token": bits["none"],
        "bits_per_token_standard_error": _standard_error(nats["none"], lengths) * BITS,
        "bits_per_character": float(nats["none"].sum()) / characters * BITS,
        "controls": {"unigram_bits_per_token": unigram, "unigram_bits_per_character": unigram * tokens / characters},
        "l2t": {
            "bits_per_token": bits["own"],
            "bits_per_token_shuffled": bits["shuffled"],
            "bits_per_token_mean_latent": bits["mean"],
            "bits_per_character": float(nats["own"].sum()) / characters * BITS,
        },
    }


def _standard_error(nats: np.ndarray, lengths: np.ndarray) -> float:
    """Of the ratio of sums nats / lengths over documents."""
    residual = nats - nats.sum() / lengths.sum() * lengths
    return float(residual.std(ddof=1) / lengths.mean() / math.sqrt(len(nats)))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n] cosines of the rows of [n, M, C], mean over M; NaN where a row is not finite."""
    norm = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return ((a * b).sum(-1) / np.maximum(norm, 1e-12)).mean(-1)


def text_metrics(evaluation: Evaluation, encoder: LatentEncoder, progress: Callable[[str], None]) -> dict[str, Any]:
    """l2t: what is written from a latent beside the document it came from; keys with `_shuffled`, `_mean_latent` are
    the same with another document's latent, with the mean latent."""
    run, count = evaluation.run, min(evaluation.config.texts, len(evaluation.ids))
    reference_tokens: list[list[int]] = [
        evaluation.split.tokens(int(index)).tolist() for index in evaluation.ids[:count]
    ]
    references = run.tokenizer.decode_batch(reference_tokens)
    truth = evaluation.raw_latents[:count]
    found: dict[str, Any] = {"texts": count}
    suffixes: dict[Condition, str] = {"own": "", "shuffled": "_shuffled", "mean": "_mean_latent"}
    for condition, suffix in suffixes.items():
        progress(f"texts from latents, latent {condition}")
        _, tokens = evaluation.write("l2t", condition, count, run.config.sampling)
        written = run.tokenizer.decode_batch(tokens)
        same = sum(a == b for x, y in zip(tokens, reference_tokens, strict=True) for a, b in zip(x, y, strict=True))
        similar = cosine(encoder.encode(written), truth)
        encodable = np.isfinite(similar)
        found[f"token_accuracy{suffix}"] = same / sum(map(len, reference_tokens))
        found[f"bleu{suffix}"] = sacrebleu.corpus_bleu(written, [references]).score
        found[f"reencoded_cosine{suffix}"] = float(similar[encodable].mean()) if encodable.any() else None
        found[f"unencodable{suffix}"] = int((~encodable).sum())
        if condition == "own":
            found["samples"] = [
                {"reference": reference, "generation": text}
                for reference, text in zip(references[:20], written[:20], strict=True)
            ]
    return found


def latent_metrics(evaluation: Evaluation, progress: Callable[[str], None]) -> dict[str, Any]:
    """t2l: the latent found for a text beside its true one, and whether it finds it among all candidates."""
    progress("latents from texts")
    store, count = evaluation.run.store, len(evaluation.ids)
    latents, _ = evaluation.write("t2l", "own", count, evaluation.run.config.sampling)
    made, truth = store.restore(latents.numpy()), evaluation.raw_latents
    mean = np.broadcast_to(np.asarray(store.manifest.latent.mean, np.float32), truth.shape)
    other = store.restore(evaluation.latents["shuffled"].numpy())

    def unit(x: np.ndarray) -> np.ndarray:
        flat = x.reshape(count, -1)
        return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)

    similarity = unit(made) @ unit(truth).T
    # Candidates as good as the true one count before it: duplicates are no success, and NaN is none either.
    rank = (~(similarity < similarity.diagonal()[:, None])).sum(1)
    return {
        "cosine": float(cosine(made, truth).mean()),
        "cosine_mean_latent": float(cosine(mean, truth).mean()),
        "cosine_shuffled": float(cosine(made, other).mean()),
        "recall_at_1": float((rank <= 1).mean()),
        "recall_at_10": float((rank <= 10).mean()),
        "recall_at_1_chance": 1 / count,
        "candidates": count,
    }


def joint_samples(evaluation: Evaluation, count: int, progress: Callable[[str], None]) -> list[str]:
    """Texts that come with a latent of their own, of the lengths of held-out documents."""
    progress("texts of their own")
    config = replace(evaluation.run.config.sampling, guidance=1.0)
    _, tokens = evaluation.write("joint", "none", count, config)
    return evaluation.run.tokenizer.decode_batch(tokens)
