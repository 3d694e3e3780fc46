"""`Evaluation`: the documents at hand, what stands in for their latents, and the work on them shared by all processes.

Micro-batches are cut the same however many processes there are, each goes to one of them whole, and noise is keyed by a
document's place. So one and three processes find the same bits, where each computes with as many threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.data.encoders import LatentEncoder, load_encoder
from mmldlm.data.loader import collate
from mmldlm.data.store import Store
from mmldlm.data.verify import without_bad
from mmldlm.diffusion.noise import MODES, Mode, SampleStreams
from mmldlm.diffusion.sampling import SamplingConfig, generate
from mmldlm.distributed.collectives import Collectives
from mmldlm.errors import DataError
from mmldlm.run.load import LoadedRun
from mmldlm.utils.progress import Progress

ENCODED_AT_ONCE = 64  # texts
MICRO_BATCHES = "micro-batches"
_UNIGRAM = len(MODES)  # kind of a generation beside the modes

# What stands in for a document's latent: its own, another document's, the mean of all, or noise (no condition).
Condition = Literal["own", "shuffled", "mean", "none"]


@dataclass(frozen=True)
class EvaluationConfig:
    split: str = "test"
    samples: int = 1000  # documents of the likelihood bound, and candidates of the retrieval
    texts: int = 200  # documents to write from their latents, and texts to write from noise
    times: int = 4  # noise times a document, in equal parts of [0, 1]
    seed: int = 0
    batch: int = 64  # documents at a time


@dataclass(frozen=True)
class Written:
    """What was generated, in order of the documents."""

    latents: np.ndarray  # float32 [n, M, C], standardized
    tokens: list[list[int]]


def check_count(count: int, split: str, store: Store) -> None:
    """DataError for fewer documents than intervals and controls take."""
    if count < 2:
        raise DataError(f"{store.path}: split {split} has {count} samples, expected at least 2")


class Evaluation:
    """The documents at hand and what is measured on them. What it computes with the network is collective."""

    def __init__(
        self,
        run: LoadedRun,
        config: EvaluationConfig,
        processes: Collectives | None = None,
        ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ):
        """`ids`: rows of the split to measure on, known to be good; otherwise they are drawn by the seed. DataError
        where the split has fewer than two to draw. `progress` is told of this rank's batches, by default silently."""
        self.progress = progress or Progress(shown=False)
        self.run, self.config, self.processes = run, config, processes or Collectives()
        store = run.store if ids is not None else without_bad(run.store, config.split, run.config.data.max_bad_samples)
        self.split = store.split(config.split)
        rng = np.random.default_rng(config.seed)
        self.ids: np.ndarray = self._draw(rng) if ids is None else np.asarray(ids, np.int64)
        count = len(self.ids)
        if ids is None:
            check_count(count, config.split, store)
        tokens, self.lengths, self.raw_latents = self.split.gather(self.ids)
        self.tokens: list[list[int]] = [part.tolist() for part in np.split(tokens, self.lengths.cumsum()[:-1])]
        latents = run.store.standardize(self.raw_latents)
        cycle = rng.permutation(count)
        other = np.empty(count, np.int64)
        other[cycle] = np.roll(cycle, 1)  # one cycle through all: nobody keeps his own
        self.latents: dict[Condition, np.ndarray] = {
            "own": latents,
            "shuffled": latents[other],
            "mean": np.zeros_like(latents),  # the mean is the origin of the standardized space
        }

    def _draw(self, rng: np.random.Generator) -> np.ndarray:
        # Neighbors in a store come from one source: a fixed draw, also of the first few, is a fair sample.
        drawn = rng.permutation(len(self.split))
        return drawn[~np.isin(drawn, self.split.skipped)][: self.config.samples]

    @property
    def texts(self) -> int:
        """How many documents are written; the first ones."""
        return min(self.config.texts, len(self.ids))

    @cached_property
    def characters(self) -> np.ndarray:
        """Of each document."""
        return self.split.characters[self.ids]

    @cached_property
    def encoder(self) -> LatentEncoder:
        """The one that the latents were made with."""
        return load_encoder(self.run.store.path / "encoder")

    # --- the work, shared ---------------------------------------------------------------------------------

    def batches(self, condition: Condition, count: int | None = None) -> Iterator[tuple[bool, Batch]]:
        """This rank's micro-batches of the first `count` documents, and whether each counts; slots are places."""
        for counts, slots in self._shared(self.lengths[:count]):
            yield counts, self._batch(condition, slots)

    def draws(self, condition: Condition) -> Iterator[tuple[int, bool, Batch]]:
        """The same of all documents, `times` times over, with the number of the draw."""
        every = [(draw, *shared) for draw in range(self.config.times) for shared in self._dealt(self.lengths)]
        for draw, counts, slots in self.progress.over(every, MICRO_BATCHES, len(every)):
            yield draw, counts, self._batch(condition, slots)

    def _batch(self, condition: Condition, slots: np.ndarray) -> Batch:
        batch = collate(self.split, self.ids[slots], slots)
        if condition == "none":
            return batch
        return replace(batch, latents=torch.from_numpy(self.latents[condition][slots]))

    def _shared(self, lengths: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
        """This rank's part of samples of these lengths: places of a micro-batch, and whether it counts."""
        local_items = self._dealt(lengths)
        return self.progress.over(local_items, MICRO_BATCHES, len(local_items))

    def _dealt(self, lengths: np.ndarray) -> list[tuple[bool, np.ndarray]]:
        size, order = self.config.batch, np.argsort(lengths, kind="stable")
        cuts = [order[start : start + size] for start in range(0, len(order), size)]
        return [(counts, slots) for _, slots, counts in self.processes.local_items(cuts)]

    def pooled(self, values: np.ndarray) -> np.ndarray:
        """Collective: float64; what each rank has filled in of an array of zeros, together."""
        return self.processes.sum(torch.from_numpy(values), "results of the evaluation").numpy()

    # --- generation -----------------------------------------------------------------------------------------

    def write(self, mode: Mode, condition: Condition, count: int, sampling: SamplingConfig) -> Written:
        """Collective: latents and tokens of the first `count` documents, generated, of their lengths."""
        return self._generated(mode, self.batches(condition, count), self.lengths[:count], sampling)

    def latents_of(self, tokens: Sequence[Sequence[int]], sampling: SamplingConfig) -> np.ndarray:
        """Collective: standardized latents [n, M, C] that the network finds for texts of its tokens."""
        shape, lengths = self.raw_latents.shape[1:], np.array([len(text) for text in tokens])

        def batches() -> Iterator[tuple[bool, Batch]]:
            for counts, slots in self._shared(lengths):
                chosen = [torch.tensor(tokens[slot]) for slot in slots]
                places = torch.from_numpy(slots)
                found = tuple(lengths[slots].tolist())
                yield counts, Batch(torch.cat(chosen), torch.zeros(len(slots), *shape), found, places, places)

        return self._generated("t2l", batches(), lengths, sampling).latents

    @torch.no_grad()
    def _generated(
        self, mode: Mode, batches: Iterator[tuple[bool, Batch]], lengths: np.ndarray, sampling: SamplingConfig
    ) -> Written:
        run, stops = self.run, lengths.cumsum()
        latents = np.zeros((len(lengths), *self.raw_latents.shape[1:]))
        tokens = np.zeros(int(stops[-1]))
        for counts, batch in batches:
            made = generate(
                run.model,
                run.objective.text,
                run.objective.latent,
                mode,
                sampling,
                SampleStreams(self.config.seed, MODES.index(mode), batch.slots),
                batch.latents.to(run.device),
                batch.lengths,
                batch.tokens,
            )
            if not counts:
                continue
            latents[batch.slots.numpy()] = made.latents
            for slot, written in zip(batch.slots.tolist(), made.split(), strict=True):
                tokens[stops[slot] - len(written) : stops[slot]] = written
        whole = self.pooled(tokens).astype(np.int64)
        texts = [part.tolist() for part in np.split(whole, stops[:-1])]
        return Written(self.pooled(latents).astype(np.float32), texts)

    # --- what a network is compared with --------------------------------------------------------------------

    def unigram_tokens(self, count: int) -> list[list[int]]:
        """Texts of the lengths of the first `count` documents, their tokens drawn by the training split's frequencies.

        They know the vocabulary and nothing else.
        """
        slots, lengths = torch.arange(count), torch.from_numpy(self.lengths[:count])
        samples = slots.repeat_interleave(lengths)
        streams = SampleStreams(self.config.seed, _UNIGRAM, slots)
        uniforms = streams.uniform(samples.shape, torch.float64, samples).numpy()
        mass = self.run.store.token_counts.astype(np.float64).cumsum()
        drawn = np.searchsorted(mass, uniforms * mass[-1], side="right")
        return [part.tolist() for part in np.split(drawn, lengths.cumsum(0)[:-1])]

    def unigram_nats(self) -> np.ndarray:
        """float64 [n]: each document's nats under the training split's token frequencies (add-one smoothed)."""
        counts = self.run.store.token_counts.astype(np.float64) + 1
        log_p = np.log(counts / counts.sum())
        return np.array([-log_p[text].sum() for text in self.tokens])

    # --- texts ----------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return self.run.tokenizer.decode_batch(tokens)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Collective: float32 [n, M, C], on the encoder's own scale; NaN where it has no latent for a text."""
        found = np.zeros((len(texts), *self.raw_latents.shape[1:]))
        ours = self.processes
        starts = range(ours.rank * ENCODED_AT_ONCE, len(texts), ours.world_size * ENCODED_AT_ONCE)
        for start in self.progress.over(starts, "batches of the encoder", len(starts)):
            some = texts[start : start + ENCODED_AT_ONCE]
            found[start : start + len(some)] = self.encoder.encode(some)
        return self.pooled(found).astype(np.float32)
