"""Event files for TensorBoard, a thin layer over PyTorch's `SummaryWriter`.

Two properties of TensorBoard's readers matter when a run resumes. First, a session start at step S makes them drop the
events of the run with step >= S. The run's first session start does not, so a fresh run also writes one, at step 0.
Second, they read event files in the order of their names, which begin with the second of creation.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.utils.nested import flatten

# Category -> chart -> regular expressions of tags. TensorBoard opens the first category.
LAYOUT: dict[str, dict[str, list[str]]] = {
    "Overview": {
        "loss: training and validation": [r"^loss/total$", r"^validation/total$"],
        "text loss: training and validation": [r"^loss/text$", r"^validation/text$"],
        "latent loss: training and validation": [r"^loss/latent$", r"^validation/latent$"],
        "masked tokens predicted right, training": [r"^accuracy/masked_tokens$"],
        "learning rate": [r"^optim/lr$"],
        "gradient norm": [r"^optim/grad_norm$"],
        "tokens per second": [r"^speed/tokens_per_s$"],
    },
    "Quality, held out": {
        "text from its latent (l2t): bits per token": [r"^quality/l2t_bits_per_token$"],
        "text from its latent (l2t): token accuracy": [r"^quality/(figures_l2t_first_guess|l2t_token)_accuracy$"],
        "latent from its text (t2l): cosine and recall@1": [r"^quality/(figures_)?t2l_(cosine|recall_at_1)$"],
    },
    "By mode": {
        "text loss, training": [r"^loss/text_(l2t|joint)$"],
        "text loss, validation": [r"^validation/text_(l2t|joint)$"],
        "latent loss, training": [r"^loss/latent_(t2l|joint)$"],
        "latent loss, validation": [r"^validation/latent_(t2l|joint)$"],
    },
    "By noise time, 0 (data) to 1 (noise)": {
        "text loss, training": [r"^loss/text_noise_"],
        "text loss, validation": [r"^validation/text_noise_"],
        "latent loss, training": [r"^loss/latent_noise_"],
        "latent loss, validation": [r"^validation/latent_noise_"],
    },
    "Speed and health": {
        "step time, data wait, compute time of the median and slowest rank (s)": [
            r"^speed/step_s$",
            r"^speed/(data_wait|compute)_s(_slowest)?$",
        ],
        "TFLOP/s and model FLOPs utilization (MFU)": [r"^speed/(tflops_per_s|mfu)$"],
        "CPU cores used by other processes": [r"^speed/cores_of_others$"],
        "memory (MiB)": [r"^memory/"],
        "skipped steps": [r"^health/skipped_steps$"],
    },
}

FLUSH_INTERVAL_S = 20  # a kill may lose this much of the curves, but checkpoints flush them
MAX_CLOCK_SKEW_S = 2.0
_HISTOGRAM_BINS = 30  # TensorBoard draws 30
log = logging.getLogger(__name__)
_excepthook = threading.excepthook


def _leave_to_next_write(failed: threading.ExceptHookArgs) -> None:
    """Report an exception that ended a thread, except in the writer's thread: the next write raises that one."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        _excepthook(failed)


class TensorBoard:
    """Writes event files to `folder`.

    Existing events with step >= `purge_step` are hidden. Pass 0 for a new run, or S + 1 to resume after step S.
    """

    def __init__(self, folder: Path, purge_step: int):
        self._first_step = purge_step
        self._end: Any = None
        # Import here, because it takes seconds and only one rank of a run writes.
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        _await_later_name(folder)
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_INTERVAL_S)
        threading.excepthook = _leave_to_next_write

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar per tag, for example `loss/total`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, str]], tag: str) -> None:
        """Write texts as a table with a row per sample and a column per key of the first row."""
        if rows:
            self._writer.add_text(tag, markdown_table(rows), step)

    def session_text(self, tag: str, content: str) -> None:
        """Write text, verbatim, as a code block at this session's first step.

        A later session that hides this session's events hides the text as well.
        """
        # Unlike a fence, an indented block has no end marker that the content could contain.
        block = "\n".join("    " + line for line in _readable(content).splitlines())
        self._writer.add_text(tag, block, self._first_step)

    def histogram(self, step: int, tag: str, values: np.ndarray, within: tuple[float, float]) -> None:
        """Write a histogram of the finite `values`. Values outside the range `within` count at its ends."""
        counts, edges = np.histogram(values[np.isfinite(values)].clip(*within), bins=_HISTOGRAM_BINS, range=within)
        self._write_histogram(step, tag, counts.astype(np.float64), edges)

    def bin_histogram(self, step: int, tag: str, heights: Sequence[float]) -> None:
        """Write `heights` over equal parts of [0, 1] as a histogram. TensorBoard stacks histograms by step."""
        counts = np.nan_to_num(np.asarray(heights, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        self._write_histogram(step, tag, counts, np.linspace(0, 1, len(counts) + 1))

    def _write_histogram(self, step: int, tag: str, counts: np.ndarray, edges: np.ndarray) -> None:
        filled = np.flatnonzero(counts)
        if not filled.size:
            return
        # Readers drop empty bins at the ends. They take minimum and maximum as the ends of the rest.
        first, last = filled[0], filled[-1] + 1
        counts, edges = counts[first:last], edges[first : last + 1]
        centers = (edges[1:] + edges[:-1]) / 2
        number, total, squares = (float(counts @ centers**power) for power in (0, 1, 2))
        minimum, *limits = edges.tolist()
        self._writer.add_histogram_raw(tag, minimum, limits[-1], number, total, squares, limits, counts.tolist(), step)

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """Write an image, uint8 [height, width, 3]."""
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def hparams(self, values: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Write the run's hyperparameters. The page "HParams" compares runs by the last values of `metrics`.

        We do not use `SummaryWriter.add_hparams`, because it would open a sub-run. Lists and None are written as JSON.
        """
        from torch.utils.tensorboard.summary import hparams

        flat = {
            name: value if type(value) in (str, int, float) else json.dumps(value, default=str)
            for name, value in flatten(values).items()
        }
        # The third summary marks the session as complete, so `end` writes it.
        experiment, start, self._end = hparams(flat, dict.fromkeys(metrics, 0.0))
        for summary in (experiment, start):
            self._writer._get_file_writer().add_summary(summary, self._first_step)

    def end(self, step: int) -> None:
        """Mark the run as complete."""
        if self._end is not None:
            self._writer._get_file_writer().add_summary(self._end, max(step, self._first_step))

    def layout(self) -> None:
        """Write the charts of the page "Custom Scalars"."""
        from torch.utils.tensorboard.summary import custom_scalars

        charts = {
            category: {title: ["Multiline", tags] for title, tags in group.items()}
            for category, group in LAYOUT.items()
        }
        self._writer._get_file_writer().add_summary(custom_scalars(charts), self._first_step)

    def flush(self) -> None:
        """Write all events to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _await_later_name(folder: Path) -> None:
    """Wait until the name of a new event file would sort after all existing ones: usually at most a second."""
    names = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir()]
    delay = max((int(name[1]) for name in names if name), default=0) + 1 - time.time()
    if delay > MAX_CLOCK_SKEW_S:
        log.warning("%s has events from %.0f s in the future: curves may overlap until then", folder, delay)
    elif delay > 0:
        time.sleep(delay)


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a Markdown table that shows each text verbatim, whatever it contains."""
    columns = list(rows[0])
    lines = [[escape(column) for column in columns], ["---"] * len(columns)]
    lines += [[escape(str(row.get(column, ""))) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def escape(text: str) -> str:
    """Return `text` as entities, so that Markdown and HTML in it have no effect. Line ends become <br>."""
    lines = _readable(text).splitlines()
    return "<br>".join(re.sub(r"[^\w ,;.]|_", lambda match: f"&#{ord(match[0])};", line) for line in lines)


def _readable(text: str) -> str:
    """Replace surrogates and control characters by U+FFFD, because they break UTF-8 or a page."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text.replace("\r\n", "\n"))
