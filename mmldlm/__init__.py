"""mmldlm: a trainer for Multimodal Latent Diffusion Language Models."""

__version__ = "0.1.0"
