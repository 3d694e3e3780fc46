"""Logging of a run: `metrics.jsonl`, TensorBoard and a progress line behind one `Tracker`."""
