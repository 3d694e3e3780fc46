"""Inference with a trained run: generate texts from latents, latents from texts, or both from noise."""

from mmldlm.inference.conditions import encode_texts, read_latents
from mmldlm.inference.generate import sample

__all__ = ["encode_texts", "read_latents", "sample"]
