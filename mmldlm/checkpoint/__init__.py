"""Checkpoints: an atomic store, training state without pickle, and a lock on the run folder."""

from mmldlm.checkpoint.lock import RunLock
from mmldlm.checkpoint.manifest import Checkpoint, verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.state import (
    NO_STATE,
    TrainState,
    check_ema_weights,
    clean_name,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.checkpoint.tensors import TensorFiles, tensor_file_name, write_tensors

__all__ = [
    "NO_STATE",
    "Checkpoint",
    "CheckpointStore",
    "Retention",
    "RunLock",
    "TensorFiles",
    "TrainState",
    "check_ema_weights",
    "clean_name",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "tensor_file_name",
    "verify_checkpoint",
    "write_files",
    "write_tensors",
]
