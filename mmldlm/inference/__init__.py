"""What is done with a trained run: texts from latents, latents of texts, and both from noise."""

from mmldlm.inference.conditions import encode_texts, read_latents
from mmldlm.inference.generate import Watch, sample

__all__ = ["Watch", "encode_texts", "read_latents", "sample"]
