"""A sanity line against public figures: a small character-level model on 27 symbols in pieces of 256.

    python -m benchmarks.characters OUT_FOLDER [--steps 3000]

The bound in bits per character of held-out text must fall below the cross entropy of a bigram model fitted
on the same training text. Writes `OUT_FOLDER/characters.json` and prints the curve as a Markdown table.
Training goes through the same commands as any other run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LENGTH = 256
CONFIG = """
run: {{dir: {out}/run}}
data: {{path: {out}/store}}
model: {{depth: 4, width: 128, num_heads: 4, conditioning_width: 128, modulation_rank: 32}}
mode: joint
optim: {{lr: 3e-3}}
train: {{steps: {steps}, global_batch_size: 16}}
log: {{every: 50}}
validation: {{every: 0}}
checkpoint: {{every_steps: {every}, keep_last: 100}}
"""


def write_text(path: Path) -> None:
    """Write the embedded corpus like text8: lower-case letters and single spaces, in lines of LENGTH characters."""
    from mmldlm.data.prepare.documents import Document
    from mmldlm.data.prepare.readers.python_docs import read_python_docs

    sentences = [item.text for item in read_python_docs() if isinstance(item, Document)]
    text = " ".join(" ".join(re.sub("[^a-z]+", " ", sentence.lower()).split()) for sentence in sentences)
    lines = (text[start : start + LENGTH] for start in range(0, len(text) - LENGTH + 1, LENGTH))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def ngram_bits(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Return bits per character of held-out pieces [n, L] under unigrams and bigrams of the training pieces.

    Add-one smoothed; a piece's first character is scored by unigrams in both.
    """
    unigram = np.bincount(train.ravel(), minlength=vocab_size) + 1.0
    log_unigram = np.log2(unigram / unigram.sum())
    bigram = np.ones((vocab_size, vocab_size))
    np.add.at(bigram, (train[:, :-1].ravel(), train[:, 1:].ravel()), 1)
    log_bigram = np.log2(bigram / bigram.sum(1, keepdims=True))
    first = log_unigram[held_out[:, 0]].sum()
    rest = log_bigram[held_out[:, :-1], held_out[:, 1:]].sum()
    return float(-log_unigram[held_out].mean()), float(-(first + rest) / held_out.size)


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "mmldlm.cli", *arguments], check=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args(argv)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "text.txt").exists():
        write_text(out / "text.txt")
    command(
        *("prepare", str(out / "text.txt"), "--out", str(out / "store"), "--tokenizer", "characters"),
        *("--max-length", str(LENGTH), "--channels", "16"),
    )
    config = out / "config.yaml"
    config.write_text(CONFIG.format(out=out, steps=options.steps, every=max(1, options.steps // 8)), encoding="utf-8")
    command("train", str(config))

    from mmldlm.data.store import Store
    from mmldlm.evaluation import BITS, Evaluation, EvaluationConfig
    from mmldlm.evaluation.likelihood import text_bound
    from mmldlm.run.load import load_run

    store = Store.open(out / "store")
    splits = (store.split("train"), store.split("test"))
    train, test = (split.gather(np.arange(len(split)))[0].reshape(-1, LENGTH) for split in splits)
    unigram, bigram = ngram_bits(train, test, store.manifest.vocab_size)
    curve = []
    for checkpoint in sorted((out / "run" / "checkpoints").glob("step-*")):
        run = load_run(out / "run", checkpoint)
        evaluation = Evaluation(run, EvaluationConfig(samples=256, times=4))
        bits = float(text_bound(evaluation, "none").nats.sum()) / (len(evaluation.ids) * LENGTH) * BITS
        curve.append({"step": run.step, "bits_per_character": bits})
        print(f"| {run.step} | {bits:.3f} |", flush=True)
    result = {"unigram": unigram, "bigram": bigram, "curve": curve}
    (out / "characters.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"unigram {unigram:.3f}, bigram {bigram:.3f} bits per character")


if __name__ == "__main__":
    main()
