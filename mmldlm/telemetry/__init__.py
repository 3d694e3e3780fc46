"""Logging of a run: `metrics.jsonl`, TensorBoard and a progress line behind one `Tracker`."""

from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.telemetry.notices import Notices
from mmldlm.telemetry.profiler import ProfileConfig, StepProfiler, phase
from mmldlm.telemetry.progress import ProgressLine
from mmldlm.telemetry.rank_times import RankTimes
from mmldlm.telemetry.resources import cpu_load_metrics, memory_limits, memory_metrics, resident_mib
from mmldlm.telemetry.step_stats import StepNumbers, StepStats
from mmldlm.telemetry.tracker import Tracker

__all__ = [
    "MetricsFile",
    "Notices",
    "ProfileConfig",
    "ProgressLine",
    "RankTimes",
    "StepNumbers",
    "StepProfiler",
    "StepStats",
    "Tracker",
    "cpu_load_metrics",
    "memory_limits",
    "memory_metrics",
    "phase",
    "resident_mib",
]
