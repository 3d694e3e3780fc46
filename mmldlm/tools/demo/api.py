"""What the page asks for, as functions from JSON values to JSON values. Knows nothing of HTTP.

A request that makes no sense is a `MmldlmError` of one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from mmldlm.data.nearest import nearest_neighbors
from mmldlm.diffusion.noise import trained_modes
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import MmldlmError, UsageError
from mmldlm.evaluation import cosine
from mmldlm.inference.conditions import encode_or_raise, load_run_encoder
from mmldlm.inference.generate import sample, supports_guidance
from mmldlm.inference.interpolate import interpolate
from mmldlm.run.load import LoadedRun
from mmldlm.settings.fields import build, dump, setting

LONGEST_TEXT = 10_000  # characters
MOST_STEPS = 512
PATIENCE_S = 120.0  # that a request waits for those before it

T = TypeVar("T", bound="Asked")


class Busy(MmldlmError):
    """Others were asked before, and take their time."""


@dataclass(frozen=True)
class Asked:
    """What any request may say beside its texts."""

    seed: int = setting(0, "of all random numbers", at_least=0)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(frozen=True)
class Writing(Asked):
    count: int = setting(3, "texts", at_least=1, at_most=16)
    length: int | None = setting(None, "tokens of each; null: drawn from the length head", at_least=1)


@dataclass(frozen=True)
class Finding(Asked):
    neighbours: int = setting(5, "nearest documents", at_least=1, at_most=50)
    split: str = setting("train", "where they are looked for")


@dataclass(frozen=True)
class Between(Asked):
    points: int = setting(7, "texts, those at both ends included", at_least=2, at_most=32)
    length: int | None = setting(None, "tokens of each; null: drawn from the length head", at_least=1)


class Api:
    """Answers one request at a time, whichever thread it comes from: there is one model, and it takes all cores."""

    def __init__(self, run: LoadedRun):
        self.run, self.encoder = run, load_run_encoder(run)
        self._lock = Lock()
        self._answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "write": self._write,
            "neighbours": self._neighbors,
            "interpolate": self._interpolate,
        }

    def knows(self, name: str) -> bool:
        return name in self._answers

    def answer(self, name: str, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict):
            raise UsageError("expected a JSON object")
        if not self._lock.acquire(timeout=PATIENCE_S):
            raise Busy(f"the model has been busy for {PATIENCE_S:.0f} s: try again")
        try:
            return self._answers[name](request)
        finally:
            self._lock.release()

    def about(self) -> dict[str, Any]:
        """What the page shows of the run, and what it offers."""
        run, manifest = self.run, self.run.store.manifest
        return {
            "run": str(run.folder),
            "weights": str(run),
            "modes": list(trained_modes(run.config.mode, run.config.mode_schedule)),
            "guidance": supports_guidance(run),
            "max_length": manifest.max_length,
            "splits": {name: split.samples for name, split in manifest.splits.items()},
            "encoder": manifest.encoder["name"],
            "sampling": dump(run.config.sampling),
            "examples": self._examples(),
        }

    def _examples(self) -> list[str]:
        """Two held-out texts, from which the page shows at once what the run writes."""
        split = self.run.store.split("test")
        tokens, lengths, _ = split.gather(np.array([len(split) // 3, 2 * len(split) // 3]))
        return self.run.tokenizer.decode_batch([part.tolist() for part in np.split(tokens, lengths.cumsum()[:-1])])

    # --- requests ---------------------------------------------------------------------------------------

    def _write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Texts from the latent of `text`, each with the cosine of its own latent to that one."""
        (text,), asked = self._texts(request, "text"), self._read(Writing, request)
        self._check_length(asked.length)
        latents = encode_or_raise(self.encoder, [text])
        made, texts = sample(self.run, "l2t", asked.sampling, asked.seed, latents, None, asked.count, asked.length)
        similar = cosine(self.encoder.encode(texts), latents)
        found = zip(texts, made.lengths, similar.tolist(), strict=True)
        return {"texts": [{"text": text, "tokens": length, "cosine": _finite(near)} for text, length, near in found]}

    def _neighbors(self, request: dict[str, Any]) -> dict[str, Any]:
        """The latent that the run finds for `text`: the documents nearest to it, and to the encoder's own latent."""
        (text,), asked = self._texts(request, "text"), self._read(Finding, request)
        store = self.run.store
        split = store.split(asked.split)
        made, _ = sample(self.run, "t2l", asked.sampling, asked.seed, texts=[text])
        found, own = made.latents.numpy(), self.encoder.encode([text])
        rows = nearest_neighbors(store, split, np.concatenate([found, own]), asked.neighbours)
        listed = [self._documents(split, near) for near in rows]
        return {"cosine": _finite(float(cosine(found, own)[0])), "found": listed[0], "own": listed[1]}

    def _interpolate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Texts between the latents of the texts `a` and `b`."""
        ends, asked = self._texts(request, "a", "b"), self._read(Between, request)
        self._check_length(asked.length)
        latents = encode_or_raise(self.encoder, ends)
        _, texts = interpolate(self.run, asked.sampling, asked.seed, latents, asked.points, asked.length)
        shares = np.linspace(0, 1, asked.points).tolist()
        return {"points": [{"share": share, "text": text} for share, text in zip(shares, texts, strict=True)]}

    # --- their parts ------------------------------------------------------------------------------------

    def _texts(self, request: dict[str, Any], *names: str) -> list[str]:
        """Takes the texts out of a request: what is left are settings."""
        return [_text(name, request.pop(name, None)) for name in names]

    def _read(self, cls: type[T], request: Mapping[str, Any]) -> T:
        """The rest of a request, with the run's own settings of sampling where it says nothing."""
        chosen = request.get("sampling", {})
        if isinstance(chosen, Mapping):
            request = {**request, "sampling": {**dump(self.run.config.sampling), **chosen}}
        asked = build(cls, request)
        if asked.sampling.steps > MOST_STEPS:
            raise UsageError(f"sampling.steps: must be at most {MOST_STEPS}, found {asked.sampling.steps}")
        return asked

    def _check_length(self, length: int | None) -> None:
        longest = self.run.store.manifest.max_length
        if length is not None and length > longest:
            raise UsageError(f"length: must be at most {longest}, found {length}")

    def _documents(self, split: Any, near: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        rows = [split.tokens(row).tolist() for row, _ in near]
        texts = self.run.tokenizer.decode_batch(rows)
        return [{"row": row, "cosine": value, "text": text} for (row, value), text in zip(near, texts, strict=True)]


def _text(name: str, found: Any) -> str:
    if not isinstance(found, str) or not found.strip():
        raise UsageError(f"{name}: expected a sentence, found nothing")
    if len(found) > LONGEST_TEXT:
        raise UsageError(f"{name}: expected at most {LONGEST_TEXT} characters, found {len(found)}")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name}: expected text, found half a character") from None
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
