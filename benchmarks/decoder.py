"""A fair opponent: an autoregressive decoder of texts from the same latents, beside our network.

    python -m benchmarks decoder [--corpora simple-docs] [--seeds 0 1 2] [--steps 1800 450 160 900 3600] [--keep FOLDER]

The decoder trains on the samples of a run of the config, in the same order and with the same optimizer. The validation
split decides about its learning rate (of `RATES`, after a quarter of the config's steps), about the step whose weights
count, and about the run whose texts are shown, of those with half of the config's steps to all. A text follows its
latents and ends with a token of its own, so the decoder needs no length. Every number of steps is a run with a schedule
of its own, for both networks. The bits are exact likelihoods: the decoder's of a text and its end from left to right,
ours of the length and the tokens in the order of decoding. All documents of the split test are measured, on one thread.
The results of all runs stay in FOLDER, where `learning --keep` can have trained ours. The next call measures the rest.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.common.causal_decoder import CausalDecoder, Opponent
from benchmarks.common.report import (
    RESULTS,
    ROOT,
    circumstances,
    kept,
    markdown,
    median_with_range,
    plain_parser,
    positive,
    read_result,
    select_names,
)
from benchmarks.common.text_metrics import bits, our_nats
from benchmarks.learning import CASES, CONFIG, prepare_corpus, train_run, working_folder, write_corpora
from mmldlm.config import RunConfig, load_config
from mmldlm.data.encoders import LatentEncoder, load_encoder
from mmldlm.data.loader import Loader, fixed_batches
from mmldlm.data.manifest import Manifest
from mmldlm.data.store import Split, Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.search import PROPOSED, search
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.l2t import fault_metrics, reencoding_metrics, reference_metrics
from mmldlm.evaluation.likelihood import SHORT
from mmldlm.evaluation.statistics import cosine
from mmldlm.loading.load import SEARCH_ROUNDS, load_run
from mmldlm.model.mmdit import ModelConfig
from mmldlm.optim.lr_schedule import batch_scale, lr_at

RATES = (2e-3, 4e-3, 8e-3)  # peak learning rates of the decoder
VALIDATIONS, PATIENCE = 12, 3  # of a decoder's run, and how many without a new lowest value end it
BATCH = 64  # texts that are measured together
NEAREST = "nearest of 5 beams"  # by the encoder, as ours is chosen among five lengths
BEAMS = {"greedy": 1, "beam of 4": 4, NEAREST: 5}
EDITED = f"{NEAREST}, edited"  # by the search that edits ours, with tokens that the decoder proposes
DECODINGS = (*BEAMS, EDITED)
EXACT, BOUND = "bits_per_token_with_length", "bound_of_bits_per_token_with_length"
CURVES = {
    "decoder": ("decoder", EXACT),
    "mmldlm": ("mmldlm", EXACT),
    "mmldlm, bound over all orders": ("mmldlm", BOUND),
}
TEXT_ROWS = {
    "exact matches": "exact_match",
    "BLEU": "bleu",
    "chrF": "chrf",
    "cosine of a text's latent to the given one": "reencoded_cosine",
    "texts with a doubled word": "doubled_words",
    "CPU ms per text": "cpu_ms_per_text",
}
ROWS = {
    "bits per token, with the end or length": EXACT,
    **TEXT_ROWS,
    "reads of the corpus": "reads",
    "CPU minutes of training": "train_cpu_minutes",
    "million parameters": "million_parameters",
}

Record = dict[str, Any]
Network = TypeVar("Network", bound=Opponent)


@torch.no_grad()
def decoder_bits(model: Opponent, split: Split, ids: np.ndarray | None = None) -> Record:
    """Return the bits per token of a split's documents, or of those with the indices `ids`, each with its end."""
    measured = np.arange(len(split)) if ids is None else ids
    nats = np.zeros(len(measured))
    for batch in fixed_batches(split, measured, BATCH):
        nats[batch.slots.numpy()] = model.nats(batch.latents, batch.tokens.split(batch.lengths)).double().sum(1).numpy()
    return bits(EXACT, nats, split.lengths[measured])


def train(
    config: RunConfig, store: Store, build: Callable[[ModelConfig, Manifest], Network]
) -> tuple[Network, dict[int, float]]:
    """Train a decoder in place of the config's network, until the validation split gets no better.

    Returns:
        The decoder with its best weights, and the bits of the validation split by step.
    """
    torch.manual_seed(config.run.weights_seed)
    model, optim, steps = build(config.model, store.manifest), config.optim, config.train.steps
    optimizer, best, curve = build_optimizer(model, optim), model.state_dict(), dict[int, float]()
    due = {math.ceil(steps * part / VALIDATIONS) for part in range(1, VALIDATIONS + 1)}
    loader = Loader(store, "train", config.data, config.run.seed, partial(config.train.batch_at, world_size=1))
    for step, batches in loader.steps(0, steps):
        samples = sum(len(batch.lengths) for batch in batches)
        predicted = samples + sum(len(batch.tokens) for batch in batches)
        for batch in batches:
            nats = model.nats(batch.latents, batch.tokens.split(batch.lengths))
            (nats.sum() / predicted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, steps, optim, config.schedule, batch_scale(optim, samples))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in due:
            curve[step + 1] = decoder_bits(model.eval(), store.split("validation"))[EXACT]
            model.train()
            lowest = min(curve, key=curve.__getitem__)
            if lowest == step + 1:
                best = {name: values.clone() for name, values in model.state_dict().items()}
            elif sum(validated > lowest for validated in curve) == PATIENCE:
                break
    model.load_state_dict(best)
    return model.eval(), curve


@dataclass(frozen=True)
class Corpus:
    """A store with its tokenizer and encoder, and the folder where runs and results stay."""

    store: Store
    folder: Path

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.store.path / "tokenizer")

    @cached_property
    def encoder(self) -> LatentEncoder:
        return load_encoder(self.store.path / "encoder")


def decode(
    model: CausalDecoder, corpus: Corpus, raw_latents: np.ndarray, decoding: str
) -> tuple[list[list[int]], float]:
    """Return the texts of latents by a decoding of `BEAMS`, and the CPU seconds that they took."""
    tokenizer, encoder = corpus.tokenizer, corpus.encoder  # loaded before the clock starts
    latents, beams = torch.from_numpy(corpus.store.standardize(raw_latents)), BEAMS[decoding]
    started = time.process_time()
    ranked = [texts for part in latents.split(BATCH) for texts in model.generate(part, beams)]
    best = np.zeros(len(ranked), np.int64)
    if decoding == NEAREST:
        flattened = tokenizer.decode_batch([text for texts in ranked for text in texts])
        near = cosine(encoder.encode(flattened), raw_latents.repeat(beams, axis=0)).reshape(-1, beams)
        best = np.nan_to_num(near, nan=-1).argmax(1)  # the encoder has no latent of an empty text
    tokens = [texts[place] for texts, place in zip(ranked, best, strict=True)]
    return tokens, time.process_time() - started


@dataclass(frozen=True)
class Contest(Corpus):
    """A corpus of the learning gate for both networks."""

    name: str
    given: Sequence[str]

    @property
    def settings(self) -> list[str]:
        return [*CASES[self.name].settings, *self.given]

    def config(self, *settings: str) -> RunConfig:
        return load_config(ROOT / CONFIG, [f"data.path={self.store.path}", *self.settings, *settings])

    def kept(self, name: str, measure: Callable[[], Record]) -> Record:
        """Return a result of the folder. If it is not there, measure it."""
        return kept(self.folder / f"{name}.json", measure)

    def result(self, seed: int, steps: int, train_cpu_s: float, model: Any) -> Record:
        """Return what the results of both networks have."""
        return {
            "seed": seed,
            "steps": steps,
            "reads": steps * self.config().train.global_batch_size / len(self.store.split("train")),
            "train_cpu_minutes": train_cpu_s / 60,
            "million_parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        }

    def decoder(self, seed: int, steps: int, rate: float) -> Record:
        """Train and measure a decoder."""

        def measure() -> Record:
            started = time.process_time()
            config = self.config(f"run.seed={seed}", f"train.steps={steps}", f"optim.lr={rate}")
            model, curve = train(config, self.store, CausalDecoder)
            result = self.result(seed, steps, time.process_time() - started, model)
            best = min(curve, key=curve.__getitem__)
            result |= {"rate": rate, "best_step": best, "last_step": max(curve), "validation_bits": curve[best]}
            result |= decoder_bits(model, self.store.split("test"))
            whole = self.config().train.steps
            return result | (self.decoder_texts(model) if whole // 2 <= steps <= whole else {})

        return self.kept(f"decoder-{steps}-{rate:g}-seed-{seed}", measure)

    def decoder_texts(self, model: CausalDecoder) -> Record:
        """Return the values of `TEXT_ROWS` by decoding."""
        split = self.store.split("test")
        _, true, raw_latents = split.samples(np.arange(len(split)))
        latents, result = torch.from_numpy(self.store.standardize(raw_latents)), dict[str, Any]()
        tokenizer, encoder = self.tokenizer, self.encoder  # loaded before the clock starts
        for decoding in BEAMS:
            tokens, cpu_s = decode(model, self, raw_latents, decoding)
            result[decoding] = self.texts(tokens, [text.tolist() for text in true], raw_latents, cpu_s)

        def fit(texts: list[list[int]], numbers: Sequence[int]) -> torch.Tensor:
            return torch.from_numpy(cosine(encoder.encode(tokenizer.decode_batch(texts)), raw_latents[list(numbers)]))

        def propose(templates: list[list[int]], numbers: Sequence[int]) -> list[list[int]]:
            return [
                found
                for part in torch.arange(len(templates)).split(BATCH)
                for found in model.likely_tokens(
                    latents[[numbers[row] for row in part]], [templates[row] for row in part], mask_id, PROPOSED
                )
            ]

        manifest = self.store.manifest
        mask_id, started = manifest.mask_id, time.process_time()
        words = frozenset(tokenizer.word_ids)
        edited = search(tokens, SEARCH_ROUNDS, fit, propose, mask_id, manifest.max_length, single_words=words)
        cpu_s += time.process_time() - started
        result[EDITED] = self.texts(edited, [text.tolist() for text in true], raw_latents, cpu_s)
        return result

    def ours(self, seed: int, steps: int) -> Record:
        """Train and measure a run, with its texts if it has the config's number of steps."""
        whole = steps == self.config().train.steps
        path = self.folder / (f"seed-{seed}" if whole else f"steps-{steps}-seed-{seed}")

        def measure() -> Record:
            train_cpu_s = train_run(path, self.store.path, [*self.settings, f"train.steps={steps}"], seed)
            run, count = load_run(path), len(self.store.split("test"))
            evaluation = Evaluation(run, EvaluationConfig(samples=count, texts=count))
            (exact, bound), lengths = our_nats(evaluation), evaluation.lengths
            result = self.result(seed, run.step, train_cpu_s, run.model)
            result |= bits(EXACT, exact, lengths) | bits(BOUND, bound, lengths)
            if whole:
                _ = run.encoder
                started = time.process_time()
                made = evaluation.generate("l2t", "own", count, run.config.sampling, "search").tokens
                cpu_s = time.process_time() - started
                result |= self.texts(made, evaluation.tokens, evaluation.raw_latents, cpu_s)
            return result

        return self.kept(f"mmldlm-{steps}-seed-{seed}", measure)

    def texts(
        self, tokens: Sequence[list[int]], true: Sequence[list[int]], raw_latents: np.ndarray, cpu_s: float
    ) -> Record:
        """Return the values of `TEXT_ROWS` of generated texts, given the true ones and their latents."""
        tokenizer = self.tokenizer
        texts = tokenizer.decode_batch(tokens)
        measured = {
            "cpu_ms_per_text": 1000 * cpu_s / len(texts),
            **reference_metrics(tokens, texts, true, tokenizer.decode_batch(true), unknown=tokenizer.unknown_id),
            **reencoding_metrics(self.encoder.encode(texts), raw_latents),
            **fault_metrics(tokens, true, frozenset(tokenizer.word_ids)),
        }
        return {metric: measured[metric] for metric in TEXT_ROWS.values()}


def results(contest: Contest, options: argparse.Namespace) -> Iterator[Record]:
    """Yield the results of a corpus, each time with a run more."""
    whole = contest.config().train.steps
    tried = {rate: contest.decoder(options.seeds[0], max(1, whole // 4), rate)["validation_bits"] for rate in RATES}
    rate, networks = min(tried, key=tried.__getitem__), {"decoder": list[Record](), "mmldlm": list[Record]()}
    rates = {f"{each:g}": validation_bits for each, validation_bits in tried.items()}
    described = {"config": CONFIG, "settings": contest.settings, "validation_bits_by_rate": rates}
    corpus = {**circumstances(torch.device("cpu")), **described, **networks}
    for steps in options.steps or [whole]:
        for seed in options.seeds:
            networks["decoder"].append(contest.decoder(seed, steps, rate))
            yield corpus
            networks["mmldlm"].append(contest.ours(seed, steps))
            yield corpus


# --- tables and curves ----------------------------------------------------------------------------


def curves(corpus: Mapping[str, Any]) -> dict[str, dict[float, list[float]]]:
    """Return the bits per token of all seeds, by the names of `CURVES` and by reads of the corpus."""
    made: dict[str, dict[float, list[float]]] = {label: {} for label in CURVES}
    for label, (network, metric) in CURVES.items():
        for run in sorted(corpus[network], key=lambda run: run["steps"]):
            made[label].setdefault(run["reads"], []).append(run[metric])
    return made


def of_the_gate(seed: Mapping[str, Any], documents: int) -> Record:
    """Return the values of `ROWS` that the learning gate has, with the exact bits if they are of all documents."""
    l2t, train_cpu_s = seed["metrics"]["l2t"], seed["train_cpu_s"]  # None if an earlier start was killed
    exact = l2t[f"bits_per_token_by_confidence{SHORT}"] + l2t["length_bits_per_token"]
    is_of_all = l2t["confidence_documents"] == documents
    return {**l2t, "train_cpu_minutes": train_cpu_s and train_cpu_s / 60, EXACT: exact if is_of_all else None}


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: for each corpus a table of the texts, and one over its reads if they vary.

    Values are medians over the seeds. Where ours was not measured beside the decoder, it is the learning gate's.
    """
    gate, made = read_result("learning")["corpora"], {}
    for name, corpus in result["corpora"].items():
        ours = [run for run in corpus["mmldlm"] if "bleu" in run] or [
            of_the_gate(seed, gate[name]["samples"]["test"]) for seed in gate[name]["seeds"]
        ]
        best: dict[int, Record] = {}  # by seed
        for run in corpus["decoder"]:
            seed = run["seed"]
            if "greedy" in run and (seed not in best or run["validation_bits"] < best[seed]["validation_bits"]):
                best[seed] = run
        decodings = [decoding for decoding in DECODINGS if any(decoding in run for run in best.values())]
        columns = {decoding: [run | run.get(decoding, {}) for run in best.values()] for decoding in decodings}
        columns[f"mmldlm, seeds: {len(ours)}"] = ours
        rows = []
        for title, metric in ROWS.items():
            cells = {label: median_with_range([run.get(metric) for run in runs]) for label, runs in columns.items()}
            rows.append({f"`{name}`, seeds: {len(best)}": title, **cells})
        made[f"decoder-{name}"] = markdown(rows)
        by_label = curves(corpus)
        if len(by_label["decoder"]) > 1:
            rows = []
            for reads in sorted({reads for curve in by_label.values() for reads in curve}):
                values = {label: curve.get(reads, []) for label, curve in by_label.items()}
                cells = {label: median_with_range(seeds, ".2f") for label, seeds in values.items()}
                counts = " and ".join(str(len(values[label])) for label in ("decoder", "mmldlm"))
                rows.append({"times each sentence was read": f"{reads:.1f}", **cells, "seeds": counts})
            made[f"decoder-{name}-reads"] = markdown(rows)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("decoder", "An autoregressive decoder beside our network, on the same latents.")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config, for a trial")
    parser.add_argument("--corpora", nargs="+", help=f"some of {', '.join(CASES)} (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, nargs="+", help="numbers of steps, in this order (the config's)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="stores, runs and results stay there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of decoder.json (%(default)s)")
    options = parser.parse_intermixed_args(argv)
    torch.set_num_threads(1)
    with working_folder(options.keep) as folder:
        for name in select_names("--corpora", options.corpora, list(CASES)):
            store = Store.open(prepare_corpus(name, folder / name))
            for corpus in results(Contest(store, folder / name, name, options.settings), options):
                write_corpora("decoder", {name: corpus}, options.out)
            print("\n\n".join(blocks({"corpora": {name: corpus}}).values()), flush=True)
    return 0
