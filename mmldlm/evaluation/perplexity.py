"""How predictable texts are to a causal language model of the transformers library. The extra `perplexity`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from mmldlm.errors import DataError, UsageError

UNBOUNDED = 1 << 20  # tokens; where a model or tokenizer names a limit above, it has none


class CausalModel:
    """A causal language model with its tokenizer, both from one local folder; nothing is downloaded or unpickled."""

    def __init__(self, folder: Path | str, device: torch.device):
        """UsageError where the library is not installed, DataError where the folder holds no such model."""
        folder = Path(folder)
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            raise UsageError(
                f"--perplexity-model {folder} needs transformers: pip install mmldlm[perplexity]"
            ) from None
        disable_progress_bar()  # which would be drawn into files as well
        if not (folder / "config.json").is_file():
            raise DataError(f"--perplexity-model {folder}: expected the folder of a causal language model, config.json")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except Exception as error:  # the library raises many kinds
            reason = " ".join(str(error).split())[:300]
            raise DataError(f"--perplexity-model {folder}: cannot load the model ({reason})") from None
        self._model = model.float().to(device).eval()
        self._device = device
        limit = getattr(model.config, "max_position_embeddings", None) or UNBOUNDED
        self.limit: int = min(limit, UNBOUNDED)  # tokens that it can read

    @torch.no_grad()
    def nats(self, text: str) -> tuple[float, int]:
        """-log p of a text, and how many tokens that is of: all but the first, which has nothing before it.

        Where its tokenizer begins texts with a token of its own, that is the first. What is beyond the model's reach is
        left out. One text at a time, so that no padding enters.
        """
        ids = self._tokenizer(text, return_tensors="pt", truncation=False).input_ids[:, : self.limit].to(self._device)
        if ids.shape[1] < 2:
            return 0.0, 0
        logits = self._model(ids).logits[0, :-1].double()
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        return float(nll), ids.shape[1] - 1


def perplexity(nats: np.ndarray) -> float | None:
    """exp(nats per token) over all texts, from rows [n, 2] of nats and tokens; None where there is no token."""
    total, tokens = nats.sum(0)
    return float(np.exp(total / tokens)) if tokens else None


def nats_of(model: CausalModel, texts: Sequence[str], places: Iterable[int]) -> np.ndarray:
    """float64 [n, 2]: nats and tokens of the texts at these places, zeros for the others."""
    found = np.zeros((len(texts), 2))
    for place in places:
        found[place] = model.nats(texts[place])
    return found
