"""`Tracker`: the logging interface of the training loop, with metrics file, TensorBoard and progress line behind it.

Tags are `group/name`, the groups being loss, validation (the same losses, held out), quality, optim, speed, memory,
data and health; they are the same in the metrics file and in TensorBoard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.telemetry import figures
from mmldlm.telemetry.metrics import Kind, MetricsFile
from mmldlm.telemetry.progress import ProgressLine
from mmldlm.telemetry.tensorboard import TensorBoard
from mmldlm.utils.nested import flatten

if TYPE_CHECKING:
    from mmldlm.telemetry.figure_data import FigureData

HPARAM_METRICS = (
    "loss/total",
    "validation/total",
    "validation/text",
    "validation/latent",
    "quality/l2t_bits_per_token",
    "quality/figures_l2t_first_guess_accuracy",
    "quality/figures_t2l_cosine",
    "quality/figures_t2l_recall_at_1",
    "speed/tokens_per_s",
)
SHOWN_QUALITY_SUFFIXES = ("_token_accuracy", "_bleu", "_cosine", "_recall_at_10", "_token_entropy", "_repetition_4")
_NOISE_BIN_TAG = "_noise_"  # tags of single noise bins: the progress line has no room for them


class Tracker:
    """Logs of one run; a context manager.

    Args:
        start_step: Last step that is already done: 0, or the step of the checkpoint to resume from. Later records are
            dropped from the metrics file and hidden in TensorBoard.
        resumed: Whether the run continues from a checkpoint; otherwise an existing metrics file is set aside.
        enabled: True on the main rank; on the others all methods do nothing.
    """

    def __init__(
        self,
        run_dir: Path | str,
        total_steps: int,
        start_step: int,
        resumed: bool,
        enabled: bool,
        tensorboard: bool = True,
    ):
        self.enabled = enabled
        self._total_steps, self._start_step, self._resumed = total_steps, start_step, resumed
        self._board: TensorBoard | None = None
        self._reported_missing = False
        if not enabled:
            return
        folder = Path(run_dir)
        self._metrics = MetricsFile(folder / "metrics.jsonl", start_step if resumed else None)
        self._progress = ProgressLine(total_steps, start_step)
        self._progress.start_status_thread()
        if tensorboard:
            self._board = TensorBoard(folder / "tensorboard", start_step + 1 if resumed else 0)

    def start(self, info: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        """Write the first record: `info` (world size, engine, versions ...) and the resolved run config."""
        if not self.enabled:
            return
        kind: Kind = "resume" if self._resumed else "start"
        self._write(kind, self._start_step, {"total_steps": self._total_steps, **info, "config": config})
        if self._board is None:
            return
        self._board.layout()
        self._board.session_text(f"run/{kind}", _lines(info))
        if config is not None:
            self._board.session_text("run/config", _lines(config))
            self._board.hparams(config, HPARAM_METRICS)
        self._board.flush()

    def step_done(self, step: int) -> None:
        """Count a finished step; the values of logged steps are passed to `train`."""
        if self.enabled:
            self._progress.set_status(step)

    def train(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a training step, already reduced over ranks."""
        if not self.enabled:
            return
        self._write("train", step, values)
        self._scalars(step, values)
        self._progress.update(step, values)

    def validation(
        self, step: int, values: Mapping[str, float | str], bin_losses: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Log a validation after `step` finished steps.

        Args:
            values: Losses by tag, and under "weights" which weights were measured, see `mmldlm.optim.ema`.
            bin_losses: Losses in equal noise bins, by modality and mode; to TensorBoard only.
        """
        if not self.enabled:
            return
        self._write("validation", step, values)
        self._scalars(step, values)
        if self._board is not None:
            for name, heights in (bin_losses or {}).items():
                self._board.bin_histogram(step, f"loss_over_noise_time/{name}", heights)
        numbers = {key: value for key, value in _numbers(values).items() if _NOISE_BIN_TAG not in key}
        shown = "  ".join(f"{key.removeprefix('validation/')} {value:.4f}" for key, value in numbers.items())
        weights = " of the EMA weights" if values.get("weights") == "ema" else ""
        self._progress.message(f"validation{weights} at step {step:,}: {shown}")

    def quality(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of generations for held-out samples, see `mmldlm.evaluation.quality`."""
        if not self.enabled:
            return
        self._write("quality", step, values)
        self._scalars(step, values)
        chosen = {key: value for key, value in values.items() if key.endswith(SHOWN_QUALITY_SUFFIXES)}
        shown = "  ".join(f"{key.removeprefix('quality/')} {value:.3f}" for key, value in chosen.items())
        self._progress.message(f"quality at step {step:,}: {shown}")

    def samples(self, step: int, rows: Sequence[Mapping[str, str]], tag: str) -> None:
        """Log texts side by side, rows like `{"reference": ..., "generation": ...}`; to TensorBoard only."""
        if self._board is not None:
            self._board.samples(step, rows, tag)

    def log_figures(
        self, step: int, data: FigureData, bin_losses: Mapping[str, Sequence[float]], texts: Sequence[str] | None
    ) -> None:
        """Log figures and histograms of held-out samples; to TensorBoard only.

        Args:
            bin_losses: Losses in equal noise bins, by modality and mode.
            texts: Texts of the samples, which label the points of the projector; None: no projector.
        """
        board = self._board
        if board is None:
            return
        for tag, (values, within) in figures.histograms(data).items():
            board.histogram(step, tag, values, within)
        if figures.MISSING is None:
            for tag, pixels in figures.draw(data, bin_losses).items():
                board.image(step, tag, pixels)
        elif not self._reported_missing:
            self._progress.message(figures.MISSING)
            self._reported_missing = True
        if texts is not None:
            latents = figures.latents_by_kind(data)
            texts_by_kind = {"true": texts, "t2l": texts, "joint": ["(from noise)"] * len(latents.get("joint", []))}
            labels = [(kind, text) for kind in latents for text in texts_by_kind[kind]]
            board.projector(np.concatenate(list(latents.values())), labels, ("kind", "text"))

    def event(self, kind: Kind, step: int, values: Mapping[str, Any], text: str = "") -> None:
        """Log a single event, such as a skip or a checkpoint. It is on disk when this returns.

        What is printed is `text`, by default the values.
        """
        if not self.enabled:
            return
        self._write(kind, step, values)
        shown = "  ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items() if k != "sha256"
        )
        self._progress.message(f"{kind} at step {step:,}: {text or shown}")
        self.flush()

    def heartbeat(self, step: int, what: str) -> None:
        """Tell readers that the run is busy with `what` (saving, evaluating), not hung.

        Called before a save, it also writes the curves up to `step` to disk before the checkpoint: a run resumed from
        that checkpoint has no gap.
        """
        if self.enabled:
            self._progress.set_status(step, what)
            self._write("heartbeat", step, {"what": what})
            self.flush()

    def end(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Write the last record of a run that ended cleanly: finished, or stopped by a signal and saved."""
        if self.enabled:
            self._write("end", step, values or {})
            # A stopped run can be resumed, so it is not marked as complete.
            if self._board is not None and "stopped_by" not in (values or {}):
                self._board.end(step)
            self._progress.close()
            self.flush()

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        if self.enabled:
            self._progress.message(text)

    def flush(self) -> None:
        """Write everything logged so far to disk."""
        if not self.enabled:
            return
        self._metrics.sync()
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Close all outputs."""
        if not self.enabled:
            return
        self._progress.end()
        in_place = self._metrics.is_in_place
        self._metrics.close()
        if self._board is not None and in_place:  # which opens its file by name each time it writes
            self._board.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        self._metrics.write(kind, step, values)

    def _scalars(self, step: int, values: Mapping[str, Any]) -> None:
        if self._board is not None:
            self._board.scalars(step, _numbers(values))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in flatten(values).items())
