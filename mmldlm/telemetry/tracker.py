"""`Tracker`: the training loop logs through this class to `metrics.jsonl`, OpenMetrics, TensorBoard and progress.

Tags are `group/name`, the same in the metrics file and in TensorBoard. The groups are loss, validation (the same losses
on held-out samples), quality, optim, speed, memory, data and health.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.telemetry import figures
from mmldlm.telemetry.experiment_trackers import ExperimentTracker
from mmldlm.telemetry.metrics import Kind, MetricsFile
from mmldlm.telemetry.open_metrics import OpenMetricsFile
from mmldlm.telemetry.tensorboard import TensorBoard
from mmldlm.utils.nested import flatten
from mmldlm.utils.progress import ProgressLine

if TYPE_CHECKING:
    from mmldlm.telemetry.figures import FigureData

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


class Tracker:
    """Logs of one run, as a context manager. Each kind of output is a list, empty if the output is off.

    Args:
        start_step: Number of steps done: 0, or the step of the checkpoint. After a resume, later events are dropped
            from the metrics file and hidden in TensorBoard.
        resumed: Whether the run continues from a checkpoint. If not, an existing metrics file is set aside.
        enabled: True on the main rank. On all other ranks, every method does nothing.
        trackers: Names of experiment trackers that also get the scalars.
    """

    def __init__(
        self,
        run_dir: Path | str,
        total_steps: int,
        start_step: int,
        resumed: bool,
        enabled: bool,
        tensorboard: bool = True,
        trackers: Sequence[str] = (),
    ):
        self._total_steps, self._start_step, self.resumed = total_steps, start_step, resumed
        self._metrics: list[MetricsFile] = []
        self._open_metrics: list[OpenMetricsFile] = []
        self._lines: list[ProgressLine] = []
        self._boards: list[TensorBoard] = []
        self._trackers: list[ExperimentTracker] = []
        self._missing = figures.MISSING  # a message to print once
        if not enabled:
            return
        folder = Path(run_dir)
        self._metrics = [MetricsFile(folder / "metrics.jsonl", start_step if resumed else None)]
        self._open_metrics = [OpenMetricsFile(folder, total_steps)]
        self._lines = [ProgressLine(total_steps, start_step)]
        self._lines[0].start_status_thread()
        if tensorboard:
            self._boards = [TensorBoard(folder / "tensorboard", start_step + 1 if resumed else 0)]
        self._trackers = [ExperimentTracker(name, folder, resumed, self.message) for name in dict.fromkeys(trackers)]

    def start(self, info: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Write the first record, with `info` (world size, engine, versions ...) and the resolved run config."""
        kind: Kind = "resume" if self.resumed else "start"
        self._write(kind, self._start_step, {"total_steps": self._total_steps, **info, "config": config})
        for tracker in self._trackers:
            tracker.start(config)
        for board in self._boards:
            board.layout()
            board.session_text(f"run/{kind}", _as_lines(info))
            board.session_text("run/config", _as_lines(config))
            board.hparams(config, HPARAM_METRICS)
            board.flush()

    def step_done(self, step: int) -> None:
        """Count a finished step on the progress line. `train` gets the values of a logged step."""
        for line in self._lines:
            line.set_status(step)

    def train(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a training record, already reduced over the ranks."""
        self._write_curves("train", step, values)
        for line in self._lines:
            line.update(step, values)

    def validation(
        self, step: int, values: Mapping[str, float | str], bin_losses: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Log a validation after `step` finished steps.

        Args:
            values: Losses by tag. The key "weights" says whether EMA or trained weights were measured.
            bin_losses: Losses in equal noise bins, by modality and mode, for TensorBoard only.
        """
        self._write_curves("validation", step, values)
        for board in self._boards:
            for name, heights in (bin_losses or {}).items():
                board.bin_histogram(step, f"loss_over_noise_time/{name}", heights)
        # Leave out single noise bins: a line has no room for them.
        numbers = {key: value for key, value in _numbers(values).items() if "_noise_" not in key}
        shown = "  ".join(f"{key.removeprefix('validation/')} {value:.4f}" for key, value in numbers.items())
        weights = " of the EMA weights" if values.get("weights") == "ema" else ""
        self.message(f"validation{weights} at step {step:,}: {shown}")

    def quality(self, step: int, values: Mapping[str, float]) -> None:
        """Log quality metrics of generations for held-out samples, see `mmldlm.evaluation.quality`."""
        self._write_curves("quality", step, values)
        chosen = {key: value for key, value in values.items() if key.endswith(SHOWN_QUALITY_SUFFIXES)}
        shown = "  ".join(f"{key.removeprefix('quality/')} {value:.3f}" for key, value in chosen.items())
        self.message(f"quality at step {step:,}: {shown}")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers that a callback has measured, by tag."""
        self._write_curves("scalars", step, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, str]], tag: str) -> None:
        """Log texts side by side, for TensorBoard only. A row is like `{"reference": ..., "generation": ...}`."""
        for board in self._boards:
            board.samples(step, rows, tag)

    def log_figures(self, step: int, data: FigureData, bin_losses: Mapping[str, Sequence[float]]) -> None:
        """Log figures and histograms of held-out samples, for TensorBoard only.

        `bin_losses` are losses in equal noise bins, by modality and mode.
        """
        for board in self._boards:
            for tag, (values, within) in figures.histograms(data).items():
                board.histogram(step, tag, values, within)
            for tag, pixels in figures.draw(data, bin_losses).items() if figures.MISSING is None else ():
                board.image(step, tag, pixels)
            if self._missing is not None:
                self.message(self._missing)
                self._missing = None

    def event(self, kind: Kind, step: int, values: Mapping[str, Any], text: str = "") -> None:
        """Log a single event, such as a skip or a checkpoint. It is on disk when this returns.

        The event is printed as `text`, or as its values if there is no text.
        """
        self._write(kind, step, values)
        shown = "  ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items() if k != "sha256"
        )
        self.message(f"{kind} at step {step:,}: {text or shown}")
        self.flush()

    def heartbeat(self, step: int, what: str) -> None:
        """Tell readers that the run is busy with `what` (saving, evaluating) and not hung.

        Before a save, this also writes the curves up to `step` to disk. So a run that resumes from the checkpoint has
        no gap in them.
        """
        for line in self._lines:
            line.set_status(step, what)
        self._write("heartbeat", step, {"what": what})
        self.flush()

    def end(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the last record of a run that finished, or that was stopped by a signal and saved."""
        self._write("end", step, values)
        for board in self._boards if "stopped_by" not in values else ():  # a stopped run may resume
            board.end(step)
        for line in self._lines:
            line.close()
        self.flush()

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        for line in self._lines:
            line.message(text)

    def flush(self) -> None:
        """Write everything logged so far to disk."""
        for metrics in self._metrics:
            metrics.sync()
        for board in self._boards:
            board.flush()

    def close(self) -> None:
        """Close all outputs."""
        for line in self._lines:
            line.end()
        in_place = all(metrics.is_in_place for metrics in self._metrics)
        for metrics in self._metrics:
            metrics.close()
        for board in self._boards if in_place else ():  # TensorBoard opens its file by name for each write
            board.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        for metrics in self._metrics:
            metrics.write(kind, step, values)
        for latest in self._open_metrics:
            latest.update(step, _numbers(values), str(values.get("run_id", "")), ended=kind == "end")

    def _write_curves(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        self._write(kind, step, values)
        for board in self._boards:
            board.scalars(step, _numbers(values))
        for tracker in self._trackers:
            tracker.log(step, _numbers(values))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}


def _as_lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in flatten(values).items())
