"""Inference with a trained run: texts from latents, latents from texts, and both from noise."""

from mmldlm.inference.conditions import encode_texts, read_latents
from mmldlm.inference.generate import StepCallback, sample

__all__ = ["StepCallback", "encode_texts", "read_latents", "sample"]
