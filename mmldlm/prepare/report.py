"""Progress of a preparation, the log of documents that it could not use, and its summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmldlm.data.manifest import Manifest, describe_losses
from mmldlm.errors import DataError
from mmldlm.prepare.documents import Problem
from mmldlm.prepare.options import PrepareConfig
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import INTERVAL_S, Progress, print_status

PROBLEMS_FILE = "problems.jsonl"
DOCUMENTS = "documents"  # the unit of progress
_MAX_SHOWN_PER_KIND = 10
_WARNED_SHARE, _REFUSED_SHARE = 0.01, 0.5  # of unknown tokens, and of documents whose tokens decode to another text
_FREQUENT_SHARE = 0.1  # of documents with the same text, and of tokens that repeat the token before
_HELD_OUT_RATIO = 0.85  # of characters per token, held-out texts to training texts


class ProblemLog:
    """Writes the problems of one task to `folder`, and prints the first ten of each kind to stderr.

    Use it as a context manager. More than `--max-problems` stop the task at once, and `check_problem_budget` checks the
    rest. `reported` counts problems by kind over all tasks of this process, and is updated.
    """

    def __init__(self, config: PrepareConfig, folder: Path, reported: Counter[str]):
        self.counts: Counter[str] = Counter()
        self.serious, self.first = 0, ""
        self._config, self._reported = config, reported
        self._file = (folder / PROBLEMS_FILE).open("w", encoding="utf-8")

    def __enter__(self) -> ProblemLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, problem: Problem) -> None:
        """Write and count a problem, or raise `DataError` if more than `--max-problems` of them are not harmless."""
        self._file.write(json.dumps(asdict(problem), ensure_ascii=False) + "\n")
        self.counts[problem.kind] += 1
        self._reported[problem.kind] += 1
        if self._reported[problem.kind] <= _MAX_SHOWN_PER_KIND:
            print_status(printable(f"{problem} ({problem.kind})"))
        elif self._reported[problem.kind] == _MAX_SHOWN_PER_KIND + 1:
            print_status(f"more of kind {problem.kind}: see problems.jsonl of the store")
        if not problem.harmless:
            self.serious += 1
            self.first = self.first or str(problem)
        # Check this now and not only at the end of the stage, or a wrong option would fill the log with every document.
        if self.serious > self._config.max_problems:
            raise _too_many(str(problem), self._config)

    def result(self) -> dict[str, Any]:
        """Return the counts as JSON values: by kind, of serious problems, and the first of these."""
        return {"problems": self.counts, "serious": self.serious, "first": self.first}


def check_problem_budget(config: PrepareConfig, results: Sequence[dict[str, Any]]) -> None:
    """Check the problems of all tasks of a stage (`ProblemLog.result` of each) against the options.

    It is a `DataError` if there are more serious problems than `--on-problem` and `--max-problems` allow.
    """
    serious = sum(result["serious"] for result in results)
    first = next((result["first"] for result in results if result["serious"]), "")
    if serious and config.on_problem == "error":
        more = f" and {serious - 1} more" if serious > 1 else ""
        raise DataError(f"{first}{more}; fix the input, or pass --on-problem skip to leave them out")
    if serious > config.max_problems:
        raise _too_many(first, config)


def _too_many(problem: str, config: PrepareConfig) -> DataError:
    return DataError(f"{problem}: more than --max-problems {config.max_problems} documents cannot be used")


def sum_counts(results: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    """Add up the counts under a key over the results of all tasks."""
    return sum((Counter(result[key]) for result in results), Counter[str]())


def loss_shares(counts: Counter[str]) -> dict[str, float]:
    """Return the shares of unknown tokens and of lossy documents, from the counts of `Tokenizer.count_losses`."""
    return {
        "unknown_tokens": counts["unknown"] / max(1, counts["tokens"]),
        "lossy_documents": counts["lossy"] / max(1, counts["documents"]),
    }


def check_losses(config: PrepareConfig, counts: Counter[str]) -> None:
    """Raise `DataError` if half of the tokens or documents are lost, unless `--lossy` accepts that."""
    losses = loss_shares(counts)
    if max(losses.values()) >= _REFUSED_SHARE and not config.lossy:
        raise DataError(
            f"--tokenizer {config.tokenizer} does not fit the text: {describe_losses(losses)}; expected less than "
            f"{_REFUSED_SHARE:.0%} of each, or --lossy"
        )


class StageProgress(Progress):
    """Progress over the stages of a preparation, and the problems of this process by kind."""

    def __init__(self, enabled: bool, interval: float = INTERVAL_S):
        super().__init__(enabled, interval)
        self.reported: Counter[str] = Counter()


def summary(manifest: Manifest) -> str:
    """Return the table of splits that is printed at the end."""
    rows = [f"{'split':<12}{'samples':>10}{'tokens':>12}{'characters':>12}{'char/token':>12}{'mean length':>13}"]
    for name, split in manifest.splits.items():
        rows.append(
            f"{name:<12}{split.samples:>10,}{split.tokens:>12,}{split.characters:>12,}"
            f"{split.characters / split.tokens:>12.2f}{split.tokens / split.samples:>13.1f}"
        )
    problems = ", ".join(f"{count} {kind}" for kind, count in manifest.problems.items() if count) or "none"
    rows.append(
        f"longest sample {manifest.max_length} tokens; vocabulary {manifest.vocab_size}; latents "
        f"{manifest.latent.tokens} x {manifest.latent.channels} of {manifest.encoder['name']}; problems: {problems}"
    )
    losses = describe_losses(manifest.tokenizer)
    is_lossy = any(value >= _WARNED_SHARE for value in manifest.tokenizer.values() if isinstance(value, float))
    rows.append(f"warning: the tokenizer loses text: {losses}" if is_lossy else losses)
    if cut := manifest.problems.get("cut_by_encoder"):
        rows.append(f"warning: the encoder reads no more than the beginning of {cut:,} samples")
    # Stores of version 0.1.0 lack both.
    token, text = manifest.tokenizer.get("most_frequent"), manifest.grouping.get("most_frequent")
    if token and text and not manifest.options.get("group_field"):
        often = f"{token['text']!r}, {token['share']:.1%} of tokens; {text['text']!r}, {text['share']:.1%} of documents"
        is_odd = max(token["repeated"], text["share"]) >= _FREQUENT_SHARE
        advice = ": if that is padding or a separator, leave it out by an attention_mask or --separator" * is_odd
        rows.append(f"{'warning: ' * is_odd}most frequent: {often}{advice}")
    train, *others = manifest.splits.values()
    held_out = sum(split.characters for split in others) / sum(split.tokens for split in others)
    if manifest.options.get("tokenizer") == "words" and held_out < _HELD_OUT_RATIO * train.characters / train.tokens:
        rows.append(
            f"warning: {held_out:.2f} characters a token in held-out texts, whose words are spelled in bytes: try "
            "--tokenizer bpe, and with learned latents fewer --latent-tokens"
        )
    return "\n".join(map(printable, rows))
