"""What a run says about itself: `metrics.jsonl`, TensorBoard and a progress line behind one `Tracker`."""

from mmldlm.telemetry.meter import StepNumbers, StepStats
from mmldlm.telemetry.metrics import MetricsFile, read_metrics
from mmldlm.telemetry.notices import Notices
from mmldlm.telemetry.profiler import ProfileConfig, StepProfiler, phase
from mmldlm.telemetry.progress import Progress
from mmldlm.telemetry.resources import cuda_memory_mib, load_values, memory_limits, memory_values, resident_mib
from mmldlm.telemetry.tensorboard import TensorBoard
from mmldlm.telemetry.tracker import Tracker

__all__ = [
    "MetricsFile",
    "Notices",
    "ProfileConfig",
    "Progress",
    "StepNumbers",
    "StepProfiler",
    "StepStats",
    "TensorBoard",
    "Tracker",
    "cuda_memory_mib",
    "load_values",
    "memory_limits",
    "memory_values",
    "phase",
    "read_metrics",
    "resident_mib",
]
