"""Perplexity of texts under a causal language model of the transformers library (the extra `perplexity`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mmldlm.data.tokenizer import make_deterministic
from mmldlm.errors import DataError, UsageError
from mmldlm.utils.versions import install_command

MAX_CONTEXT_TOKENS = 1 << 20  # models and tokenizers without a limit name a larger one


class CausalModel:
    """A causal language model with its tokenizer, both from one local folder; nothing is downloaded or unpickled.

    The folder is what `save_pretrained` wrote: config.json, weights as safetensors, tokenizer. If it has no such model,
    that is a `DataError`; if transformers is not installed, a `UsageError`.
    """

    def __init__(self, folder: Path | str, device: torch.device):
        folder = Path(folder)
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils.logging import disable_progress_bar
        except ImportError:
            raise UsageError(
                f"--perplexity-model {folder} needs transformers: {install_command('perplexity')}"
            ) from None
        disable_progress_bar()  # it would also be drawn into log files
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
        if backend := getattr(self._tokenizer, "backend_tokenizer", None):
            make_deterministic(backend)
        self._model = model.float().to(device).eval()
        self._device = device
        limit = getattr(model.config, "max_position_embeddings", None) or MAX_CONTEXT_TOKENS
        self.limit: int = min(limit, MAX_CONTEXT_TOKENS)  # the context length, tokens

    @torch.no_grad()
    def nats(self, text: str) -> tuple[float, int]:
        """Return -log p of a text, and the number of tokens that it is the sum over.

        These are all tokens but the first (BOS, if the tokenizer adds one), which has no context. Tokens beyond the
        context length are left out. The model reads one text at a time, so there is no padding.
        """
        ids = self._tokenizer(text, return_tensors="pt", truncation=False).input_ids[:, : self.limit].to(self._device)
        if ids.shape[1] < 2:
            return 0.0, 0
        logits = self._model(ids).logits[0, :-1].double()
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        return float(nll), ids.shape[1] - 1


def perplexity(nats: np.ndarray) -> float | None:
    """Return exp(nats per token) over all texts, from rows [n, 2] of nats and tokens; None if there are no tokens."""
    total, tokens = nats.sum(0)
    return float(np.exp(total / tokens)) if tokens else None
