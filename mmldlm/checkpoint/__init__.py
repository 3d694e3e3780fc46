"""What makes a run outlive its process: an atomic store, state without pickle, a lock on the run folder."""

from mmldlm.checkpoint.lock import RunLock
from mmldlm.checkpoint.manifest import Checkpoint, verify
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.state import (
    NO_STATE,
    TrainState,
    check_average,
    clean_name,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.checkpoint.tensors import TensorFiles, file_name, write_tensors

__all__ = [
    "NO_STATE",
    "Checkpoint",
    "CheckpointStore",
    "Retention",
    "RunLock",
    "TensorFiles",
    "TrainState",
    "check_average",
    "clean_name",
    "file_name",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "verify",
    "write_files",
    "write_tensors",
]
