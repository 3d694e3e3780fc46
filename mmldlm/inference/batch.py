"""Process all texts or latents of a file in batches, shared among the processes of a launch.

The output depends only on input, weights and options: items are cut into batches by index, one process computes a batch
on one CPU thread, and each item has its own random streams. Rank 0 writes the batches in order. So after a kill, the
files have the beginning of the output, and the same command continues them.

    OUT.jsonl  one line for each item
    OUT.npy    the generated latents, if there are any, in the same order
    OUT.json   what was requested and, at the end, a summary
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import nn

from mmldlm.checkpoint.state import model_state
from mmldlm.errors import DataError, RunInUseError, UsageError
from mmldlm.inference.conditions import check_shape, read_array
from mmldlm.loading.load import LoadedRun, load_run_on_all_ranks, run_config
from mmldlm.prepare.documents import Document, Problem
from mmldlm.prepare.readers.text import read_texts
from mmldlm.utils.files import fsync, naming, sha256, write_atomically
from mmldlm.utils.printable import printable
from mmldlm.utils.process import CONTINUE, stop_at_signals
from mmldlm.utils.progress import Progress
from mmldlm.utils.short_repr import short_repr

if TYPE_CHECKING:
    from mmldlm.distributed.collectives import Collectives

Item: TypeAlias = Document | Problem  # content of a line of a file, or of a row of an array
Results: TypeAlias = tuple[Sequence[dict[str, Any]], np.ndarray | None]  # records, generated latents [n, R, M, C]
# Takes the indices and texts of n items, and their latents [n, M, C] if the job has any.
Compute: TypeAlias = Callable[[list[int], list[str], np.ndarray | None], Results]
Latents: TypeAlias = Callable[[list[int], list[str]], np.ndarray]
NO_ROWS = (0, 0, 0)


@dataclass(frozen=True)
class Job:
    """The items to process, and the files to write.

    Attributes:
        out: OUT.jsonl.
        request: Everything that the output depends on.
        skip_problems: Write problems to OUT.jsonl and continue.
        latents: Returns the latents [n, M, C] of items by their indices and texts. A missing latent is not finite.
        rows: (R, M, C): each item has R rows of shape [M, C] in OUT.npy. With `NO_ROWS` there is no such file.
    """

    out: Path
    request: dict[str, Any]
    items: Sequence[Item]
    batch_size: int
    skip_problems: bool
    latents: Latents | None = None
    rows: tuple[int, int, int] = NO_ROWS

    @property
    def summary(self) -> Path:
        """Path of OUT.json."""
        return self.out.with_suffix(".json")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were written, item by item."""
        with self.out.open("rb") as file:
            yield from map(json.loads, file)

    def finish(self, **summary: Any) -> None:
        """Write the summary and print where the results are."""
        problems = [record["problem"] for record in self.records() if "problem" in record]
        summary = {"request": self.request, "items": len(self.items), "problems": len(problems), **summary}
        write_atomically(self.summary, json.dumps(summary, indent=1) + "\n")
        if problems:
            print(f"{len(problems)} of {len(self.items)} skipped, first {printable(problems[0])}", file=sys.stderr)
        arrays = [self.out.with_suffix(".npy")] if any(self.rows) else []
        print("written:", ", ".join(map(str, [self.out, *arrays, self.summary])))


def add_batch_options(parser: ArgumentParser | Any) -> None:
    """Add the options that all commands for files have to a parser, or to one of its groups."""
    parser.add_argument("--batch", type=int, default=64, help="lines per forward pass; default: %(default)s")
    parser.add_argument(
        "--on-problem", choices=["error", "skip"], default="error", help="unusable lines; default: %(default)s"
    )


@contextmanager
def batch_processes(options: Namespace) -> Iterator[tuple[LoadedRun, Collectives, Progress]]:
    """Check --out and --batch, then yield the loaded run, the processes of the launch, and their progress."""
    out: Path = options.out
    if out.suffix != ".jsonl" or not out.absolute().parent.is_dir():
        raise UsageError(f"--out: expected a .jsonl file in an existing folder, found {out}")
    if options.batch < 1:
        raise UsageError(f"--batch: expected at least 1, found {options.batch}")
    # Imported here, because they need packages that sampling from a bundle does not.
    from mmldlm.distributed.launch import read_launcher_env
    from mmldlm.distributed.process_group import process_group

    torch.set_num_threads(1)  # sums depend on the number of threads
    with (
        stop_at_signals(CONTINUE),
        process_group(run_config(options.run).distributed, read_launcher_env(os.environ)) as processes,
        Progress(processes.is_main) as progress,
    ):
        progress.phase("loading the run", announce=False)
        yield load_run_on_all_ranks(options, processes), processes, progress


def read_items(path: Path, run: LoadedRun, checked: bool = True) -> list[Item]:
    """Read the texts of a file as `read_texts` does, and raise its errors.

    With `checked`, a text that does not fit the tokenizer or is longer than any text of the run becomes a problem.
    """
    items = read_texts(path, run.store.manifest.has_prefixes)
    return [_check_tokens(item, run) for item in items] if checked else items


def _check_tokens(item: Item, run: LoadedRun) -> Item:
    if isinstance(item, Document):
        try:
            tokens, most = len(run.tokenizer.encode_batch([item.text])[0]), run.store.manifest.max_length
        except DataError as error:
            return Problem(item.source, item.line, "invalid", str(error))
        if not 1 <= tokens <= most:
            return Problem(item.source, item.line, "invalid", f"{tokens} tokens, expected 1 to {most}")
    return item


def read_rows(path: Path, run: LoadedRun) -> tuple[list[Item], Latents]:
    """Return the rows of an .npy file of latents as items, and a function that reads the latents of some rows."""
    latents = check_shape(run, read_array(path, "--latents"), f"--latents: {path}")
    finite = np.isfinite(latents).all((1, 2))
    return [
        Document("", str(path), row) if good else Problem(str(path), row, "invalid", f"row {row - 1} is not finite")
        for row, good in enumerate(finite, 1)
    ], lambda indices, _: np.asarray(latents[indices], np.float32)


def encode_with(run: LoadedRun) -> Latents:
    """Return a function that computes the latents of texts with the run's encoder."""
    encoder = run.encoder
    return lambda _, texts: encoder.encode(texts)


def describe(run: LoadedRun, options: Namespace, *inputs: Path | None) -> dict[str, Any]:
    """Describe a request by the run's step and by hashes of weights and inputs, plus settings outside of `sampling`.

    The result is the same for a run and its bundle, wherever they are stored.
    """
    assert isinstance(run.model, nn.Module)
    digest = hashlib.sha256()
    for _, tensor in sorted(model_state(run.model).items()):
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    files = [sha256(path) for path in inputs if path is not None]
    settings = [setting for setting in options.settings if not setting.startswith("sampling.")]
    described = {"run": str(run), "weights": digest.hexdigest(), "input": files}
    return described | ({"settings": settings} if settings else {})


class _Output:
    """The files of a job, which rank 0 writes. The first `done` items are complete."""

    def __init__(self, job: Job):
        self._lines = job.out.open("a+b")
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInUseError(f"{job.out}: another process is writing it") from None
        _check_request(job, new=self._lines.tell() == 0)
        complete = len(job.items)
        self._rows = None
        if any(job.rows):
            path = job.out.with_suffix(".npy")
            self._rows = path.open("r+b" if path.exists() else "w+b")
            header = BytesIO()
            shape = (job.rows[0] * len(job.items), *job.rows[1:])
            np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
            item_bytes = 4 * int(np.prod(job.rows))
            complete = max(0, self._rows.seek(0, os.SEEK_END) - len(header.getvalue())) // item_bytes
        self._lines.seek(0)
        self.done = size = 0
        for line in self._lines:
            if self.done == complete or not line.endswith(b"\n"):
                break
            self.done, size = self.done + 1, size + len(line)
        self._lines.truncate(size)
        if self._rows is not None:
            self._rows.seek(0)
            self._rows.write(header.getvalue())
            self._rows.truncate(self._rows.seek(self.done * item_bytes, os.SEEK_CUR))
        fsync(job.out.absolute().parent)

    def append(self, records: Sequence[dict[str, Any]], rows: np.ndarray) -> None:
        """Append complete items. Write their lines last, because a line says that its item is complete."""
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        for file, content in ((self._rows, rows.astype("<f4").tobytes()), (self._lines, lines.encode())):
            if file is not None:
                with naming(file.name):
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
        self.done += len(records)


def _check_request(job: Job, new: bool) -> None:
    """Write the request, or raise `UsageError` if the existing output belongs to another request."""
    path = job.summary
    if not path.exists():
        rows = job.out.with_suffix(".npy")
        if not new or (any(job.rows) and rows.exists()):
            existing = rows if new else job.out
            raise UsageError(f"--out: {existing} exists, without {path.name}; expected a new file")
        write_atomically(path, json.dumps({"request": job.request}, indent=1) + "\n")
    try:
        earlier = json.loads(path.read_bytes())["request"]
        changed = [key for key in {**job.request, **earlier} if earlier.get(key) != job.request.get(key)]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(f"--out: {path} is not the request of an earlier start; expected a new file") from None
    if changed:
        found, expected = (short_repr(request.get(changed[0])) for request in (job.request, earlier))
        raise UsageError(f"--out: {job.out} was begun with {changed[0]} {expected}, found {found}; expected a new file")


def run_batches(job: Job, compute: Compute, processes: Collectives, progress: Progress) -> None:
    """Compute the items that are not in the output yet (collective).

    Raises:
        DataError: An item has a problem.
        UsageError: The files have the output of another request.
        RunInUseError: Another process is writing the files.
    """
    count, size = len(job.items), job.batch_size
    output = None
    with processes.raise_on_all_ranks("opening of the output"):
        problems = [item for item in job.items if isinstance(item, Problem)]
        if problems and not job.skip_problems:
            raise _error(problems[0], f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
        if processes.is_main:
            output = _Output(job)
    done = processes.gather(output.done if output else 0, "items that are complete")[0]
    progress.phase(f"computing, {done:,} are done by an earlier start" if done else "computing", announce=False)
    for start in range(done // size * size, count, size * processes.world_size):
        first = start + processes.rank * size
        rows = np.full((size, *job.rows), np.nan, np.float32)
        with processes.raise_on_all_ranks("computation of a batch"):
            records = _compute(job, compute, range(first, min(first + size, count)), rows)
        gathered = list(chain(*processes.gather(records, "results of a batch")))
        all_rows = processes.gather_vectors(torch.from_numpy(rows.reshape(-1)), "latents of a batch")
        if output is not None:
            latents = all_rows.numpy().reshape(processes.world_size * size, *job.rows)[: len(gathered)]
            kept = output.done - start  # an earlier start may have written part of the first batch
            output.append(gathered[kept:], latents[kept:])
        progress.advance(min(start + size * processes.world_size, count), "items", count)


def _compute(job: Job, compute: Compute, indices: range, rows: np.ndarray) -> list[dict[str, Any]]:
    """Return the records of a batch and fill in its rows. The batch may be empty."""
    results: dict[int, dict[str, Any] | Problem] = {
        index: item for index in indices if isinstance(item := job.items[index], Problem)
    }
    documents = {index: item for index in indices if isinstance(item := job.items[index], Document)}
    latents = None
    if documents and job.latents is not None:
        latents = job.latents(list(documents), [document.text for document in documents.values()])
        finite = np.isfinite(latents).all((1, 2))
        for index in np.array(list(documents))[~finite].tolist():
            item = documents.pop(index)
            results[index] = Problem(item.source, item.line, "unencodable", "the encoder has no latent for this text")
        latents = latents[finite]
    if documents:
        good = list(documents)
        computed, generated = compute(good, [document.text for document in documents.values()], latents)
        results |= zip(good, computed, strict=True)
        if generated is not None:
            rows[[index - indices.start for index in good]] = generated
    records = []
    for index in indices:
        item, result = job.items[index], results[index]
        if isinstance(result, Problem):
            if not job.skip_problems:
                raise _error(result)
            result = {"problem": str(result)}
        key = {"id": item.key} if isinstance(item, Document) and item.key else {}
        records.append({"index": index, **key, **result})
    return records


def _error(problem: Problem, more: str = "") -> DataError:
    return DataError(f"{problem}{more}; --on-problem skip leaves it out")
