"""Checkpoints: an atomic store, and training state without pickle."""
