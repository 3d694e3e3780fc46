"""What makes a run outlive its process: an atomic store, state without pickle, a lock on the run folder."""

from mmldlm.checkpoint.lock import RunLock
from mmldlm.checkpoint.manifest import Checkpoint, verify
from mmldlm.checkpoint.state import (
    NO_STATE,
    TrainState,
    clean_name,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    read_tensors,
    write_tensors,
)
from mmldlm.checkpoint.store import CheckpointStore

__all__ = [
    "NO_STATE",
    "Checkpoint",
    "CheckpointStore",
    "RunLock",
    "TrainState",
    "clean_name",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "read_tensors",
    "verify",
    "write_tensors",
]
