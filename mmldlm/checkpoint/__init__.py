"""Checkpoints: a store with atomic saves, and the training state without pickle."""
