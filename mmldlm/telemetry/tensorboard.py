"""TensorBoard: the place where a run is reviewed. A thin layer over PyTorch's `SummaryWriter`.

What its readers do after a resume decides what is written here. They drop the events of a run with
step >= S when they meet a session start at S, **except** at the first session start of a run; so a
fresh run writes one too, at step 0. They read the event files in the order of their names, which
begin with the second of creation.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmldlm.schema import flatten

# Category -> chart -> tags, which are regular expressions. The first category is open on arrival.
LAYOUT: dict[str, dict[str, list[str]]] = {
    "What matters": {
        "loss: training and validation": [r"^loss/total$", r"^validation/(loss/)?total$"],
        "text loss: training and validation": [r"^loss/text$", r"^validation/(loss/)?text$"],
        "latent loss: training and validation": [r"^loss/latent$", r"^validation/(loss/)?latent$"],
        "learning rate": [r"^optim/lr$"],
        "gradient norm": [r"^optim/grad_norm$"],
        "tokens per second": [r"^speed/tokens_per_s$"],
    },
    "Speed and health": {
        "step time and data wait (s)": [r"^speed/step_s$", r"^speed/data_wait_s$"],
        "memory (MiB)": [r"^memory/"],
        "skipped steps": [r"^health/skipped_steps$"],
    },
}

FLUSH_SECONDS = 20  # what a kill may cost of the curves; checkpoints flush by themselves
MAX_CLOCK_SKEW_S = 2.0

log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in `folder`. Events already there with step >= `purge_step` disappear from view:
    0 for a fresh run, S + 1 for one resumed after step S.
    """

    def __init__(self, folder: Path | str, purge_step: int):
        # Imported here: it takes seconds, and only one process of a run writes.
        from torch.utils.tensorboard import SummaryWriter

        Path(folder).mkdir(parents=True, exist_ok=True)
        _await_later_name(Path(folder))
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

    def hparams(self, values: Mapping[str, Any], metrics: Sequence[str] = ()) -> None:
        """The run's hyper-parameters, compared between runs by the tags `metrics`.

        `SummaryWriter.add_hparams` would open a sub-run, and refuses lists and None.
        """
        from torch.utils.tensorboard.summary import hparams

        flat = {name: _hparam(value) for name, value in flatten(values).items()}
        writer = self._writer._get_file_writer()
        for summary in hparams(flat, dict.fromkeys(metrics, 0.0)):
            writer.add_summary(summary)

    def layout(self, layout: Mapping[str, Mapping[str, list[str]]] = LAYOUT) -> None:
        """The page "Custom scalars"."""
        charts = {c: {t: ["Multiline", tags] for t, tags in group.items()} for c, group in layout.items()}
        self._writer.add_custom_scalars(charts)

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
