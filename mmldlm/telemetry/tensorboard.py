"""TensorBoard: the place where a run is reviewed. A thin layer over PyTorch's `SummaryWriter`.

What its readers do after a resume decides what is written here. They drop the events of a run with
step >= S when they meet a session start at S, **except** at the first session start of a run; so a
fresh run writes one too, at step 0. They read the event files in the order of their names, which
begin with the second of creation.
"""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.settings.fields import flatten
from mmldlm.utils.files import write_atomically

# Category -> chart -> tags, which are regular expressions. The first category is open on arrival.
LAYOUT: dict[str, dict[str, list[str]]] = {
    "What matters": {
        "loss: training and validation": [r"^loss/total$", r"^validation/total$"],
        "text loss: training and validation": [r"^loss/text$", r"^validation/text$"],
        "latent loss: training and validation": [r"^loss/latent$", r"^validation/latent$"],
        "learning rate": [r"^optim/lr$"],
        "gradient norm": [r"^optim/grad_norm$"],
        "tokens per second": [r"^speed/tokens_per_s$"],
    },
    "Quality, held out": {
        "text from its latent (l2t): bits per token": [r"^quality/l2t_bits_per_token$"],
        "text from its latent (l2t): tokens right": [
            r"^quality/(figures_l2t_first_guess|l2t_token)_accuracy$",
        ],
        "latent of a text (t2l): cosine, and found first among the samples": [
            r"^quality/(figures_)?t2l_(cosine|recall_at_1)$",
        ],
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
        "step time and data wait (s)": [r"^speed/step_s$", r"^speed/data_wait_s$"],
        "useful TFLOPs a second, and their share of the device's peak": [r"^speed/(tflops_per_s|mfu)$"],
        "cores that other processes keep busy": [r"^speed/cores_of_others$"],
        "memory (MiB)": [r"^memory/"],
        "skipped steps": [r"^health/skipped_steps$"],
    },
}

FLUSH_SECONDS = 20  # what a kill may cost of the curves; checkpoints flush by themselves
MAX_CLOCK_SKEW_S = 2.0
_BINS = 30  # of histograms: as many as TensorBoard draws
_PROJECTOR = """embeddings {
  tensor_name: "latents"
  tensor_path: "latents.tsv"
  metadata_path: "latents_labels.tsv"
}
"""

log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in `folder`. Events already there with step >= `purge_step` disappear from view:
    0 for a fresh run, S + 1 for one resumed after step S.
    """

    def __init__(self, folder: Path | str, purge_step: int):
        self.folder, self._first_step = Path(folder), purge_step
        self._end: Any = None
        # Imported here: it takes seconds, and only one process of a run writes.
        from torch.utils.tensorboard import SummaryWriter

        self.folder.mkdir(parents=True, exist_ok=True)
        _await_later_name(self.folder)
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=FLUSH_SECONDS)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar a tag; tags are `group/name`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, str]], tag: str) -> None:
        """Texts as a table: one row a sample, one column a key of the first row."""
        if rows:
            self._writer.add_text(tag, markdown_table(rows), step)

    def text(self, step: int, tag: str, content: str) -> None:
        """`content` as it stands, in a block of code."""
        # A block by indentation has no end mark that the content could contain.
        self._writer.add_text(tag, "\n".join("    " + line for line in _readable(content).splitlines()), step)

    def about(self, tag: str, content: str) -> None:
        """What holds from the first step of this start on, as text. It goes the way of that step's events where a
        later start hides them."""
        self.text(self._first_step, tag, content)

    def histogram(self, step: int, tag: str, values: np.ndarray, within: tuple[float, float]) -> None:
        """Of those of `values` that are finite; what lies outside of `within` counts at its ends."""
        bars, edges = np.histogram(values[np.isfinite(values)].clip(*within), bins=_BINS, range=within)
        self._bars(step, tag, bars.astype(np.float64), edges)

    def profile(self, step: int, tag: str, heights: Sequence[float]) -> None:
        """`heights` over equal parts of [0, 1], as a histogram: so that one step lies behind the other."""
        bars = np.nan_to_num(np.asarray(heights, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        self._bars(step, tag, bars, np.linspace(0, 1, len(bars) + 1))

    def _bars(self, step: int, tag: str, bars: np.ndarray, edges: np.ndarray) -> None:
        filled = np.flatnonzero(bars)
        if not filled.size:
            return
        # Readers leave out empty bins at the ends, and then take least and greatest for the ends of what is left.
        first, last = filled[0], filled[-1] + 1
        bars, edges = bars[first:last], edges[first : last + 1]
        middles = (edges[1:] + edges[:-1]) / 2
        number, total, squares = (float(bars @ middles**power) for power in (0, 1, 2))
        least, *limits = edges.tolist()
        self._writer.add_histogram_raw(tag, least, limits[-1], number, total, squares, limits, bars.tolist(), step)

    def image(self, step: int, tag: str, pixels: np.ndarray) -> None:
        """uint8 [height, width, 3]."""
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def projector(self, latents: np.ndarray, labels: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
        """Points [n, D] for the page "Projector", each with a label in every column; they replace earlier ones."""
        points = io.BytesIO()
        np.savetxt(points, latents, fmt="%.4g", delimiter="\t")
        rows = [[" ".join(_readable(label).split()) for label in row] for row in (columns, *labels)]
        write_atomically(self.folder / "latents.tsv", points.getvalue())
        write_atomically(self.folder / "latents_labels.tsv", "".join("\t".join(row) + "\n" for row in rows))
        write_atomically(self.folder / "projector_config.pbtxt", _PROJECTOR)

    def hparams(self, values: Mapping[str, Any], metrics: Sequence[str] = ()) -> None:
        """The run's hyper-parameters. Runs are compared by the last values of the scalars `metrics`.

        `SummaryWriter.add_hparams` would open a sub-run, and refuses lists and None.
        """
        from torch.utils.tensorboard.summary import hparams

        flat = {name: _hparam(value) for name, value in flatten(values).items()}
        experiment, start, self._end = hparams(flat, dict.fromkeys(metrics, 0.0))
        for summary in (experiment, start):
            self._writer._get_file_writer().add_summary(summary, self._first_step)

    def end(self, step: int) -> None:
        """The run is complete."""
        if self._end is not None:
            self._writer._get_file_writer().add_summary(self._end, max(step, self._first_step))

    def layout(self, layout: Mapping[str, Mapping[str, list[str]]] = LAYOUT) -> None:
        """The page "Custom scalars"."""
        from torch.utils.tensorboard.summary import custom_scalars

        charts = {c: {t: ["Multiline", tags] for t, tags in group.items()} for c, group in layout.items()}
        self._writer._get_file_writer().add_summary(custom_scalars(charts), self._first_step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _await_later_name(folder: Path) -> None:
    """Wait, a second at most, until a new event file's name sorts behind those that are there."""
    names = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir()]
    delay = max((int(name[1]) for name in names if name), default=0) + 1 - time.time()
    if delay > MAX_CLOCK_SKEW_S:
        log.warning("%s has events from %.0f s in the future: curves may overlap until then", folder, delay)
    elif delay > 0:
        time.sleep(delay)


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table in which every text shows exactly as it is, whatever it contains."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines[0] = [escape(column) for column in columns]
    lines += [[escape(str(row.get(column, ""))) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def escape(text: str) -> str:
    """`text` as entities, so that neither Markdown nor HTML in it is obeyed; line ends become <br>."""
    lines = _readable(text).splitlines()
    return "<br>".join(re.sub(r"[^\w ,;.]|_", lambda match: f"&#{ord(match[0])};", line) for line in lines)


def _readable(text: str) -> str:
    """`text` without what breaks UTF-8 or a page: surrogates and control characters become U+FFFD."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text.replace("\r\n", "\n"))


def _hparam(value: Any) -> str | float:
    """A number or string as it is; a bool, None, list or mapping as its JSON."""
    if isinstance(value, str | float) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return json.dumps(value, default=str)
