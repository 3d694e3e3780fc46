"""A yardstick: texts from the vectors of a public sentence encoder, by three methods, on texts that anybody can get.

    python -m benchmarks yardstick [--corpora wordnet debian] [--seeds 0 1 2] [--minutes 5] [--keep FOLDER]

The corpora are definitions of WordNet and descriptions of Debian's packages (`common/public_texts.py`), the encoder is
MiniLM. Each method trains on the same store for as many CPU minutes of one thread:

- `mmldlm`: the quickstart's network, with the advice for one task (`mode: l2t`)
- `decoder`: the autoregressive decoder of `decoder.py`
- `masked 10 %`: the recipe of arXiv 2602.11047 (`common/masked_inverter.py`), and `masked 10 to 100 %`: the same with
  the masks that its source describes in words

A few steps of each are timed first, and the number of steps follows. All learn at the rate of the config. Of all but
ours the validation split chooses the weights. Metrics compare with the texts as they are spelled. OUT/yardstick.json is
written after each run, and runs that FOLDER has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.causal_decoder import CausalDecoder, Opponent
from benchmarks.common.masked_inverter import SHARE, MaskedInverter
from benchmarks.common.public_texts import SOURCES, write_texts
from benchmarks.common.report import (
    RESULTS,
    ROOT,
    circumstances,
    kept,
    markdown,
    plain_parser,
    positive,
    select_names,
    value_with_spread,
)
from benchmarks.common.text_metrics import bits, bleu_signature, our_nats, text_metrics
from benchmarks.decoder import BATCH, EXACT, NEAREST, VALIDATIONS, Corpus, decode, decoder_bits, train
from benchmarks.learning import (
    CLOSE,
    CONFIG,
    TEST_MODEL,
    nearest_word_similarity,
    prepare_store,
    train_run,
    working_folder,
    write_corpora,
)
from mmldlm.config import load_config
from mmldlm.data.nearest import nearest_neighbors
from mmldlm.data.store import Store
from mmldlm.errors import DataError, UsageError
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.loading.load import LoadedRun, load_run

PREPARE = (
    *("--encoder", f"sentence-transformers:{TEST_MODEL}", "--tokenizer", "bpe", "--vocab-size", "8192"),
    *("--validation-fraction", "0.01", "--over-length", "cut"),
)
# Texts that differ in a word share a split, and so do the texts of a package.
APART = {"wordnet": ("--near-duplicates",), "debian": ("--group-field", "group")}
SETTINGS = ("model.latent_width=null", "mode=l2t", "validation.every=0", "log.tensorboard=false", "sampling.search=0")
QUICK = ("model.depth=1", "model.width=64", "model.num_heads=2", "train.global_batch_size=8")
QUICK_STEPS, QUICK_TEXTS = 20, 20
TIMED_STEPS = VALIDATIONS, 60  # both with all validations
PASSES = {"8 passes": 8, "a token a pass": 10_000}
ONE_LENGTH, FIVE_LENGTHS = "likeliest length", "nearest of 5 lengths"
ANOTHER, COPIED = "another text's vector", "nearest training text"
COLUMNS = {  # title, metric and format
    "BLEU": ("bleu", ".1f"),
    "BLEU, mean of texts": ("bleu_by_text", ".1f"),
    "exact": ("exact_match", ".3f"),
    "token F1": ("token_set_f1", ".1f"),
    "cosine": ("reencoded_cosine", ".3f"),
    "bits a token": (EXACT, ".2f"),
    "CPU ms a text": ("cpu_ms_per_text", ".0f"),
    "CPU minutes of training": ("train_cpu_minutes", ".1f"),
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Ground(Corpus):
    """A corpus on which the methods compete."""

    kinds: Mapping[str, str]  # of each source text
    options: argparse.Namespace

    @cached_property
    def measured(self) -> dict[str, np.ndarray]:
        """The indices of the measured test texts by kind. A text that was cut is none of them."""
        split = self.store.split("test")
        drawn = np.random.default_rng(0).permutation(len(split))
        _, tokens, _ = split.samples(drawn)
        kinds = np.array(
            [self.kinds.get(text, "") for text in self.tokenizer.decode_batch([text.tolist() for text in tokens])]
        )
        return {kind: drawn[kinds == kind][: self.options.texts] for kind in sorted({*kinds} - {""})}

    @property
    def settings(self) -> list[str]:
        small = QUICK if self.options.quick else ()
        return [f"data.path={self.store.path}", *SETTINGS, *small, *self.options.settings]

    # --- training ---------------------------------------------------------------------------------

    def trained(self, method: str, seed: int, steps: int) -> tuple[Any, int, float]:
        """Train a method. Return its run or network, its last step, and the CPU seconds of training."""
        settings = [*self.settings, f"train.steps={steps}"]
        if method == "mmldlm":
            run = self.folder / f"{method}-{steps}-seed-{seed}"
            cpu_s = train_run(run, self.store.path, settings, seed)
            return load_run(run), steps, cpu_s
        started = time.process_time()
        config = load_config(ROOT / CONFIG, [*settings, f"run.seed={seed}"])
        model, curve = train(config, self.store, NETWORKS[method])
        return model, max(curve), time.process_time() - started

    def steps(self, method: str) -> int:
        """Return how many steps take the minutes, by the seconds of few steps and of more."""
        if self.options.quick:
            return QUICK_STEPS

        def measure() -> Record:
            if method != "mmldlm":  # in this process, where a size of tensors costs more when it is new
                self.trained(method, 0, max(TIMED_STEPS))
            (few, few_s), (more, more_s) = (self.trained(method, 0, steps)[1:] for steps in TIMED_STEPS)
            step_s = (more_s - few_s) / (more - few)
            return {"step_s": step_s, "start_s": max(0.0, few_s - few * step_s)}

        timed = kept(self.folder / f"time-{method}.json", measure)
        return max(1, round((60 * self.options.minutes - timed["start_s"]) / timed["step_s"]))

    # --- measuring --------------------------------------------------------------------------------

    def run(self, method: str, seed: int) -> Record:
        """Train and measure a method with one seed."""
        steps = self.steps(method)

        def measure() -> Record:
            trained, last_step, cpu_s = self.trained(method, seed, steps)
            model = trained.model if method == "mmldlm" else trained
            return {
                "seed": seed,
                "steps": steps,
                "last_step": last_step,
                "train_cpu_minutes": cpu_s / 60,
                "million_parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
                "by_kind": {kind: METHODS[method](self, trained, ids) for kind, ids in self.measured.items()},
            }

        return kept(self.folder / f"{method}-{self.options.minutes}-minutes-seed-{seed}.json", measure)

    def compare(self, tokens: Sequence[Sequence[int]], ids: np.ndarray, cpu_s: float) -> Record:
        _, true, raw_latents = self.store.split("test").samples(ids)
        return text_metrics(tokens, [text.tolist() for text in true], self.tokenizer, self.encoder, raw_latents, cpu_s)

    def ours(self, run: LoadedRun, ids: np.ndarray) -> Record:
        """Measure a run: exact likelihoods, and texts with and without the help of the encoder."""
        count = len(ids)
        evaluation = Evaluation(run, EvaluationConfig(samples=count, texts=count), ids=ids.tolist())
        exact, default, result = bits(EXACT, our_nats(evaluation)[0], evaluation.lengths), run.config.sampling, Record()
        _ = run.encoder  # loaded before the clock starts
        for name, condition, lengths, chooser in (
            (ONE_LENGTH, "own", 1, "likelihood"),
            (FIVE_LENGTHS, "own", default.tried_lengths, "encoder"),
            (ANOTHER, "shuffled", 1, "likelihood"),
        ):
            started = time.process_time()
            sampling = replace(default, tried_lengths=lengths)
            made = evaluation.generate("l2t", condition, count, sampling, chooser).tokens  # type: ignore[arg-type]
            cpu_s = time.process_time() - started
            result[name] = self.compare(made, ids, cpu_s) | (exact if condition == "own" else {})
        return result

    def decoder(self, model: CausalDecoder, ids: np.ndarray) -> Record:
        """Measure a decoder: exact likelihoods, and texts with and without the help of the encoder."""
        split = self.store.split("test")
        exact, raw_latents, result = decoder_bits(model, split, ids), split.samples(ids)[2], Record()
        for decoding in ("greedy", NEAREST):
            tokens, cpu_s = decode(model, self, raw_latents, decoding)
            result[decoding] = self.compare(tokens, ids, cpu_s) | exact
        return result

    def inverter(self, model: MaskedInverter, ids: np.ndarray) -> Record:
        """Measure an inverter, which has no likelihood of a length, at the true lengths of the texts."""
        _, true, raw_latents = self.store.split("test").samples(ids)
        latents, lengths, result = torch.from_numpy(self.store.standardize(raw_latents)), [*map(len, true)], Record()
        for name, passes in PASSES.items():
            started, made = time.process_time(), list[list[int]]()
            for first in range(0, len(ids), BATCH):
                part = slice(first, first + BATCH)
                made += model.generate(latents[part], lengths[part], min(passes, max(lengths[part])))
            result[name] = self.compare(made, ids, time.process_time() - started)
        return result

    def controls(self) -> Record:
        """Return what the training texts with the nearest vectors score, and how near to training the texts are."""
        train_split, result = self.store.split("train"), Record()
        pool = self.tokenizer.decode_batch(
            [text.tolist() for text in train_split.samples(np.arange(len(train_split)))[1]]
        )
        for kind, ids in self.measured.items():
            started, (_, true, raw_latents) = time.process_time(), self.store.split("test").samples(ids)
            found = nearest_neighbors(self.store, train_split, raw_latents, 1)
            copies = [train_split.samples(np.array([row[0][0]]))[1][0].tolist() for row in found]
            scores = self.compare(copies, ids, time.process_time() - started)
            similar = np.array(
                nearest_word_similarity(self.tokenizer.decode_batch([text.tolist() for text in true]), pool)
            )
            tokens = sum(map(len, true)) / len(ids)
            result[kind] = {"texts": len(ids), "tokens_per_text": tokens, "close": float((similar >= CLOSE).mean())}
            result[kind][COPIED] = scores
        return result


NETWORKS: dict[str, Callable[..., Opponent]] = {
    "decoder": CausalDecoder,
    "masked 10 %": MaskedInverter,
    "masked 10 to 100 %": partial(MaskedInverter, lowest=SHARE, highest=1.0),
}
METHODS: dict[str, Callable[[Ground, Any, np.ndarray], Record]] = {
    "mmldlm": Ground.ours,
    "decoder": Ground.decoder,
    "masked 10 %": Ground.inverter,
    "masked 10 to 100 %": Ground.inverter,
}


def prepare_texts(name: str, folder: Path, limit: int | None = None) -> tuple[Store, dict[str, str], Record]:
    """Fetch and prepare a corpus in `folder`. Return its store, the kind of each text, and where the texts are from."""
    path, about = write_texts(name, folder, limit)
    store = Store.open(prepare_store((str(path), *PREPARE, *APART[name]), folder / name))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return store, {row["text"]: row["kind"] for row in rows}, about


def results(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Record]:
    """Yield the results of a corpus, each time with a run more."""
    given = {key: getattr(options, key) for key in ("limit", "texts", "settings", "quick")}
    earlier = kept(folder / "options.json", lambda: given)
    if given != earlier:
        raise UsageError(f"--keep: {folder} has results with {earlier}, expected the same options, found {given}")
    store, kinds, about = prepare_texts(name, folder, options.limit)
    ground = Ground(store, folder, kinds, options)
    if not ground.measured:
        raise DataError(f"{store.path}: no test text is a whole text of {name}, expected some; raise --limit")
    runs: dict[str, list[Record]] = {method: [] for method in METHODS if method in options.methods}
    corpus = {
        **circumstances(torch.device("cpu")),
        "source": about,
        "samples": {split: len(store.split(split)) for split in ("train", "validation", "test")},
        "settings": [*SETTINGS, *options.settings],
        "minutes": options.minutes,
        "bleu_signature": bleu_signature([*kinds][:9]),
        "controls": kept(folder / "controls.json", ground.controls),
        "methods": runs,
    }
    for seed in options.seeds:
        for method, measured in runs.items():
            measured.append(ground.run(method, seed))
            yield corpus


# --- tables ---------------------------------------------------------------------------------------


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a table for each corpus and kind of text, and a sentence about each corpus."""
    made = {}
    for name, corpus in result["corpora"].items():
        for kind, control in corpus["controls"].items():
            rows = [(COPIED, "", [control[COPIED]])]
            for method, runs in corpus["methods"].items():
                for way in runs[0]["by_kind"][kind] if runs else ():
                    rows.append((method, way, [{**run, **run["by_kind"][kind][way]} for run in runs]))
            title = f"`{name}`, {kind}: {control['texts']} texts of {control['tokens_per_text']:.0f} tokens"
            table = [
                {title: f"{method}, {way}" if way else method}
                | {head: value_with_spread(runs, metric, digits) for head, (metric, digits) in COLUMNS.items()}
                for method, way, runs in rows
            ]
            made[f"yardstick-{name}-{kind.replace(' ', '-')}"] = markdown(table)
        made[f"yardstick-{name}"] = _about(corpus)
    return made


def _about(corpus: Mapping[str, Any]) -> str:
    seeds = {run["seed"] for runs in corpus["methods"].values() for run in runs}
    close = ", ".join(f"{control['close']:.1%} ({kind})" for kind, control in corpus["controls"].items())
    return (
        f"From {corpus['source']['origin']}, {corpus['samples']['train']:,} texts for training. Of the measured texts "
        f"{close} share at least {CLOSE:.0%} of their words with a training text. Seeds: {len(seeds)}, on one core of "
        f"{corpus['machine']['cpu']}. BLEU: `{corpus['bleu_signature']}`."
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("yardstick", "Texts from vectors of a public encoder, by several methods, on public texts.")
    add = parser.add_argument
    add("settings", nargs="*", metavar="key.sub=value", help="settings of the run config, for a trial")
    add("--corpora", nargs="+", help=f"some of {', '.join(SOURCES)} (all)")
    add("--methods", nargs="+", help=f"some of {', '.join(METHODS).replace('%', '%%')} (all)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--minutes", type=positive, default=5, help="CPU minutes of each training (%(default)s)")
    add("--texts", type=positive, default=300, help="most test texts of each kind (%(default)s)")
    add("--limit", type=positive, help="most texts of a corpus (all)")
    add("--keep", type=Path, metavar="FOLDER", help="texts, stores, runs and results stay there, and are used again")
    add("--out", type=Path, default=RESULTS, help="folder of yardstick.json (%(default)s)")
    add("--quick", action="store_true", help="small and short, to see that it works")
    options = parser.parse_intermixed_args(argv)
    names = select_names("--corpora", options.corpora, list(SOURCES))
    options.methods = select_names("--methods", options.methods, list(METHODS))
    if options.quick:
        options.texts = min(options.texts, QUICK_TEXTS)
    torch.set_num_threads(1)
    with working_folder(options.keep) as folder:
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            for corpus in results(name, folder / name, options):
                write_corpora("yardstick", {name: corpus}, options.out, SOURCES)
            print("\n\n".join(blocks({"corpora": {name: corpus}}).values()), flush=True)
    return 0
