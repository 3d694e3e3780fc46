"""`Evaluation`: the documents to measure on, their baseline latents, and generation distributed over all ranks.

Micro-batches do not depend on the number of ranks, a single rank computes each of them, and noise is keyed by the
document's index. So one rank and three ranks compute the same bits, if each uses the same number of threads.

Shape letters: n documents or texts, M latent tokens, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.data.loader import collate
from mmldlm.data.nearest import TextIndex, draw_samples
from mmldlm.data.store import Split, Store
from mmldlm.data.verify import drop_bad_samples
from mmldlm.diffusion.candidates import Candidates, TextRequest, generate_candidates
from mmldlm.diffusion.noise import MODES, Mode, SampleStreams
from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.distributed.collectives import Collectives
from mmldlm.errors import DataError
from mmldlm.evaluation.statistics import BITS
from mmldlm.evaluation.trigram import TrigramModel
from mmldlm.loading.load import LoadedRun
from mmldlm.utils.progress import Progress

ENCODER_BATCH_SIZE = 64  # texts
MEAN_SAMPLES = 5000  # use this many training samples, or all if there are fewer
_UNIGRAM = len(MODES)  # key of the random stream for unigram texts, above the keys of the modes

_T = TypeVar("_T")
# The latent to condition on: the document's own one, another document's, the mean of all, or none (noise).
Condition = Literal["own", "shuffled", "mean", "none"]
# What chooses among texts of several lengths: the run's encoder, the encoder with a search that edits its choice, the
# texts' likelihood, or the network's t2l, compared with the text's latent or, as a control, with another document's.
Chooser = Literal["encoder", "search", "likelihood", "network", "network_shuffled"]


@dataclass(frozen=True)
class EvaluationConfig:
    """Which documents are measured, and how many draws and generations they get."""

    split: str = "test"
    samples: int = 1000  # documents for the likelihood bound, and candidates for retrieval
    texts: int = 200  # texts to generate from the latents of documents, and from noise
    times: int = 4  # noise times per document: [0, 1] is cut into this many equal parts, with one time in each
    seed: int = 0
    batch: int = 64  # documents per micro-batch


@dataclass(frozen=True)
class GeneratedSamples:
    """Generated latents and texts, in the order of the documents."""

    latents: np.ndarray  # float32 [n, M, C], standardized
    tokens: list[list[int]]
    passes: float  # passes of the network, by sample


def check_num_samples(count: int, split: str, store: Store) -> None:
    """Raise `DataError` if there are too few documents for confidence intervals and baselines."""
    if count < 2:
        raise DataError(f"{store.path}: split {split} has {count} samples, expected at least 2")


class Evaluation:
    """The documents to measure on, and the generations of the run for them.

    Methods that run the network are collective.

    Args:
        processes: The ranks that share the work, by default only this process.
        ids: Indices in the split of documents known to be good. By default they are drawn with `config.seed`. Then a
            split with fewer than two documents raises `DataError`.
        progress: Reports the micro-batches of this rank. By default it is silent.
    """

    def __init__(
        self,
        run: LoadedRun,
        config: EvaluationConfig,
        processes: Collectives | None = None,
        ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ):
        self.progress = progress or Progress(enabled=False)
        self.run, self.config, self.processes = run, config, processes or Collectives()
        # If a forward pass is collective, all ranks run the same number, whatever the lengths of their texts.
        self._every_step = self.processes.shards_parameters
        self._good_splits = {} if ids is None else {name: run.store.split(name) for name in ("train", config.split)}
        self.split = self.good_split(config.split)
        rng = np.random.default_rng(config.seed)
        # Neighbors in a store come from one source. We draw documents at random, so the first few are a fair sample.
        self.ids = draw_samples(self.split, config.samples, rng) if ids is None else np.asarray(ids, np.int64)
        count = len(self.ids)
        if ids is None:
            check_num_samples(count, config.split, run.store)
        prefixes, texts, self.raw_latents = self.split.samples(self.ids)
        self.prefixes: list[list[int]] = [prefix.tolist() for prefix in prefixes]
        self.tokens: list[list[int]] = [text.tolist() for text in texts]
        self.lengths = np.array([len(text) for text in self.tokens])
        latents = run.store.standardize(self.raw_latents)
        cycle = rng.permutation(count)
        self.others = np.empty(count, np.int64)
        # A single cycle through all documents, so that no document keeps its latent.
        self.others[cycle] = np.roll(cycle, 1)
        self.latents: dict[Condition, np.ndarray] = {"own": latents, "shuffled": latents[self.others]}
        if latents.shape[1] == 1:  # in the standardized space, the mean over all tokens is the origin
            self.latents["mean"] = np.zeros_like(latents)

    def good_split(self, name: str) -> Split:
        """Return a split without its bad samples, if the run leaves them out."""
        if name not in self._good_splits:  # verify a split only once
            store = drop_bad_samples(self.run.store, name, self.run.config.data.max_bad_samples)
            self._good_splits[name] = store.split(name)
        return self._good_splits[name]

    def given_latents(self, condition: Condition) -> np.ndarray:
        """Return standardized latents, float32 [n, M, C]. "mean" averages each latent token. "none" only has a size."""
        if condition == "mean" and condition not in self.latents:
            split, rng = self.good_split("train"), np.random.default_rng(self.config.seed)
            latents = split.samples(np.sort(draw_samples(split, MEAN_SAMPLES, rng)))[2]
            mean = self.run.store.standardize(latents.mean(0, dtype=np.float64))
            self.latents["mean"] = np.broadcast_to(mean - mean.mean(0), self.raw_latents.shape)
        return self.latents["own" if condition == "none" else condition]

    @property
    def num_texts(self) -> int:
        """Number of documents for which texts are generated, counted from the first."""
        return min(self.config.texts, len(self.ids))

    # --- distribution over ranks ----------------------------------------------------------------------------

    def batches(self, condition: Condition, count: int | None = None) -> Iterator[tuple[bool, Batch]]:
        """Yield (counted, micro-batch) for this rank's part of the first `count` documents.

        The slots of a micro-batch are document indices. If a forward pass is collective, a rank that has no work left
        repeats a micro-batch, with `counted` false.
        """
        for counted, slots in self._track(self._local_slots(self.lengths[:count])):
            yield counted, self._batch(condition, slots)

    def draws(self, condition: Condition) -> Iterator[tuple[int, bool, Batch]]:
        """Yield (draw, counted, micro-batch) for this rank's part of all documents, for each of the `times` draws."""
        work = [(draw, *item) for draw in range(self.config.times) for item in self._local_slots(self.lengths)]
        for draw, counted, slots in self._track(work):
            yield draw, counted, self._batch(condition, slots)

    def _batch(self, condition: Condition, slots: np.ndarray) -> Batch:
        batch = collate(self.split, self.ids[slots], slots)
        if condition == "none":
            return batch
        return replace(batch, latents=torch.from_numpy(self.given_latents(condition)[slots]))

    def _track(self, work: Sequence[_T]) -> Iterator[_T]:
        return self.progress.track(work, "micro-batches", len(work))

    def _local_slots(self, lengths: np.ndarray) -> list[tuple[bool, np.ndarray]]:
        """Return (counted, slots) for this rank's micro-batches. Each has samples of similar `lengths`."""
        size, order = self.config.batch, np.argsort(lengths, kind="stable")
        micro_batches = [order[start : start + size] for start in range(0, len(order), size)]
        return [(counted, slots) for _, slots, counted in self.processes.local_items(micro_batches)]

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:
        """Return the float64 sum of all ranks' arrays. Each array is zero outside of its rank's part (collective)."""
        return self.processes.sum(torch.from_numpy(values), "results of the evaluation").numpy()

    # --- generation -----------------------------------------------------------------------------------------

    def generate(
        self,
        mode: Mode,
        condition: Condition,
        count: int,
        sampling: SamplingConfig,
        chooser: Chooser | None = None,
    ) -> GeneratedSamples:
        """Generate latents and tokens for the first `count` documents (collective).

        Texts get the documents' lengths. With a `chooser` (only in l2t), the network finds the lengths, as in `mmldlm
        sample`.
        """
        if mode == "joint":  # without a condition there is nothing to guide to
            sampling = replace(sampling, guidance=1.0)
        start = self.tokens[:count]
        if mode != "t2l":
            start = [[self.run.objective.text.mask_id] * len(tokens) for tokens in start]
        return self.generate_from(mode, start, self.prefixes, self.given_latents(condition), sampling, chooser)

    def generate_latents(
        self, tokens: Sequence[Sequence[int]], sampling: SamplingConfig, prefixes: Sequence[Sequence[int]] | None = None
    ) -> np.ndarray:
        """Generate standardized latents [n, M, C] for texts given as tokens, in t2l (collective)."""
        empty = np.zeros((len(tokens), *self.raw_latents.shape[1:]), np.float32)
        return self.generate_from("t2l", tokens, prefixes or [()] * len(tokens), empty, sampling).latents

    def generate_texts(
        self, condition: Condition, count: int, sampling: SamplingConfig, choosers: Sequence[Chooser]
    ) -> list[GeneratedSamples]:
        """Generate texts of several lengths once, and return what each of `choosers` makes of them (collective)."""
        prefixes, latents = self.prefixes[:count], self.given_latents(condition)
        return self._generate("l2t", self.tokens[:count], prefixes, latents, sampling, choosers)

    def generate_from(
        self,
        mode: Mode,
        start: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]],
        given_latents: np.ndarray,
        sampling: SamplingConfig,
        chooser: Chooser | None = None,
    ) -> GeneratedSamples:
        """Generate n samples from standardized latents [n, M, C] and from texts, whose [MASK] tokens alone change.

        With a `chooser`, only the number of samples matters in `start` (collective).
        """
        (made,) = self._generate(mode, start, prefixes, given_latents, sampling, [chooser])
        return made

    @torch.no_grad()
    def _generate(
        self,
        mode: Mode,
        start: Sequence[Sequence[int]],
        prefixes: Sequence[Sequence[int]],
        given_latents: np.ndarray,
        sampling: SamplingConfig,
        choosers: Sequence[Chooser | None],
    ) -> list[GeneratedSamples]:
        """Return the samples of `generate_from` by each of `choosers`, or by None alone (collective)."""
        run, count = self.run, len(start)
        lengths = np.array([len(tokens) for tokens in start])
        latents = np.zeros((len(choosers), count, *self.raw_latents.shape[1:]))
        # float64 represents every token id and length exactly, so one sum over the ranks can merge them.
        longest = lengths.max() if None in choosers else run.store.manifest.max_length
        texts, passes = np.zeros((len(choosers), count, 1 + longest)), np.zeros(len(choosers))
        sampler = run.sampler(sampling, every_step=self._every_step)
        for counted, slots in self._track(self._local_slots(lengths)):
            streams, rows = SampleStreams(self.config.seed, MODES.index(mode), torch.from_numpy(slots)), slots.tolist()
            given, heads = torch.from_numpy(given_latents[slots]).to(run.device), [prefixes[row] for row in rows]
            if None in choosers:
                whole = [[*head, *start[row]] for head, row in zip(heads, rows, strict=True)]
                generations = [sampler.generate(mode, streams, given, whole)]
            else:
                candidates = generate_candidates(sampler, streams, TextRequest(given, longest, prefixes=heads))
                generations = [self._choose(candidates, chooser, sampling, slots) for chooser in choosers]
            for index, generation in enumerate(generations if counted else ()):
                passes[index] += generation.passes
                latents[index, rows] = generation.latents
                for row, tokens in zip(rows, generation.split(), strict=True):
                    texts[index, row, : 1 + len(tokens)] = len(tokens), *tokens
        merged = self.sum_over_ranks(texts).astype(np.int64)
        made = [[row[1 : 1 + row[0]].tolist() for row in each] for each in merged]
        latents = self.sum_over_ranks(latents).astype(np.float32)
        return list(map(GeneratedSamples, latents, made, (self.sum_over_ranks(passes) / count).tolist()))

    def _choose(
        self, candidates: Candidates, chooser: Chooser | None, sampling: SamplingConfig, slots: np.ndarray
    ) -> Generation:
        """Return a text for each document of `slots`."""
        run = self.run
        if chooser in ("encoder", "search"):
            fit, rounds = run.fit(sampling), run.search_rounds(sampling) if chooser == "search" else 0
            best = candidates.best(fit)
            return candidates.edited(best, fit, rounds) if rounds else best
        if chooser == "likelihood":
            return candidates.best()
        judges = None
        if chooser == "network_shuffled":
            judges = torch.from_numpy(self.latents["shuffled"][slots]).to(run.device)
        return candidates.best(run.fit_by_network(sampling, self._every_step), judges)

    # --- baselines ------------------------------------------------------------------------------------------

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Token counts in the training split's texts, float64 [V]. For data with prefixes, in 100,000 of the texts."""
        store = self.run.store
        counts = self._training_texts.token_counts if store.manifest.has_prefixes else store.token_counts
        return counts.astype(np.float64)

    def unigram_tokens(self, count: int) -> list[list[int]]:
        """Draw texts with the lengths of the first `count` documents by the training split's token frequencies.

        This baseline knows the vocabulary and nothing else.
        """
        lengths = self.lengths[:count]
        streams = SampleStreams(self.config.seed, _UNIGRAM, torch.arange(count))
        uniforms = streams.uniform(1, lengths.tolist())[0].numpy()
        mass = self.token_counts.cumsum()
        # Invert the cumulative counts. side="right" never returns a token with a count of 0.
        drawn = np.searchsorted(mass, uniforms * mass[-1], side="right")
        return [part.tolist() for part in np.split(drawn, lengths.cumsum()[:-1])]

    def unigram_nats(self) -> np.ndarray:
        """Return the documents' nats, float64 [n], under the training split's smoothed (+1) token frequencies."""
        counts = self.token_counts + 1
        log_p = np.log(counts / counts.sum())
        return np.array([-log_p[text].sum() for text in self.tokens])

    @cached_property
    def trigrams(self) -> TrigramModel:
        """Model of the training split's texts, of 100,000 of them if there are more."""
        return TrigramModel(self._training_texts.texts, self.run.store.manifest.vocab_size)

    def trigram_bits_per_token(self, texts: Sequence[Sequence[int]]) -> float:
        """Return the bits of texts and their ends by `trigrams`, divided by the numbers of tokens."""
        return float(self.trigrams.nats(texts).sum()) * BITS / sum(map(len, texts))

    def marginal_length_nats(self) -> np.ndarray:
        """Return the nats of the documents' lengths, float64 [n], under the training split's smoothed (+1) lengths."""
        store = self.run.store
        of_texts = store.manifest.has_prefixes
        lengths = self._training_texts.lengths.long().numpy() if of_texts else np.asarray(store.split("train").lengths)
        counts = np.bincount(lengths, minlength=store.manifest.max_length + 1)[1:] + 1
        return -np.log(counts / counts.sum())[self.lengths - 1]

    # --- texts ----------------------------------------------------------------------------------------------

    @cached_property
    def _training_texts(self) -> TextIndex:
        return TextIndex.of_split(self.good_split("train"), self.config.seed)

    @cached_property
    def document_similarity(self) -> np.ndarray:
        """Similarity of each document to the most similar training text (see `training_similarity`)."""
        return self.training_similarity(self.tokens)

    def training_similarity(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the similarity of each text to the most similar training text, float64 [n] (collective)."""
        return self.measure_texts(self._training_texts.similarity, texts)

    def measure_texts(
        self, measure: Callable[[_T], Any], texts: Sequence[_T], numbers: int | None = None
    ) -> np.ndarray:
        """Apply `measure` to all texts, and return float64 [n] or [n, `numbers`] (collective)."""
        values = np.zeros(len(texts) if numbers is None else (len(texts), numbers))
        local = range(self.processes.rank, len(texts), self.processes.world_size)
        for index in self.progress.track(local, "texts", len(local)):
            values[index] = measure(texts[index])
        return self.sum_over_ranks(values)

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of token sequences."""
        return self.run.tokenizer.decode_batch(tokens)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Encode `texts`. Return latents on the encoder's own scale, float32 [n, M, C] (collective).

        The row of a text that cannot be encoded is NaN.
        """
        latents = np.zeros((len(texts), *self.raw_latents.shape[1:]))
        rank, world_size = self.processes.rank, self.processes.world_size
        starts = range(rank * ENCODER_BATCH_SIZE, len(texts), world_size * ENCODER_BATCH_SIZE)
        for start in self.progress.track(starts, "batches of the encoder", len(starts)):
            batch = texts[start : start + ENCODER_BATCH_SIZE]
            latents[start : start + len(batch)] = self.run.encoder.encode(batch)
        return self.sum_over_ranks(latents).astype(np.float32)
