"""mmldlm: a trainer for Multimodal Latent Diffusion Language Models.

`mmldlm.load(PATH)` returns the `mmldlm.Model` of a bundle or a run folder; both are in `mmldlm.inference.model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmldlm.inference.model import Model as Model
    from mmldlm.inference.model import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("Model", "load"):  # imported on first use, since torch takes seconds
        return getattr(importlib.import_module("mmldlm.inference.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
