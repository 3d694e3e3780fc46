"""`Model`: use a trained network through three methods, `sample`, `encode` and `score`.

Shape letters: n texts or conditions, B generated samples, M latent tokens of a sample, C latent channels, T draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.diffusion.likelihood import bound_terms
from mmldlm.diffusion.noise import Mode
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import DataError, UsageError
from mmldlm.inference.conditions import check_latents, encode_or_raise
from mmldlm.inference.generate import prefix_tokens, sample, tokenize_texts
from mmldlm.loading.load import LoadedRun, load_run
from mmldlm.settings.declaration import dump, restore
from mmldlm.settings.successors import current
from mmldlm.utils.intervals import Ratio, ratio_of_sums
from mmldlm.utils.torch_defaults import torch_defaults

GRID_TEXTS = 64  # in `score`, this many consecutive texts share a low-discrepancy grid of noise times
if TYPE_CHECKING:
    from huggingface_hub import ModelHubMixin as _HubMixin
else:
    try:
        from huggingface_hub import ModelHubMixin as _HubMixin
    except ImportError:  # huggingface_hub is not installed
        _HubMixin = object


@dataclass(frozen=True)
class Samples:
    """B generated samples. Samples of one condition are next to each other. Given texts or latents are unchanged.

    Attributes:
        texts: The texts.
        tokens: Token ids of each text.
        latents: float32 [B, M, C] on the encoder's scale.
    """

    texts: list[str]
    tokens: list[list[int]]
    latents: np.ndarray


@dataclass(frozen=True)
class Score:
    """Upper bounds on the negative log-likelihood of n texts, given their numbers of tokens.

    Attributes:
        nats: An unbiased estimate of each text's bound, float64 [n].
        standard_errors: The standard error of each estimate over the T draws, float64 [n]. NaN for one draw.
        tokens: Number of tokens of each text, int64 [n].
    """

    nats: np.ndarray
    standard_errors: np.ndarray
    tokens: np.ndarray

    @property
    def bits_per_token(self) -> Ratio:
        """Bits per token over all texts. For two texts or more, with standard error and 95 % interval over texts."""
        return ratio_of_sums(self.nats, self.tokens.astype(np.float64)) * (1 / math.log(2))


class Model(_HubMixin):
    """A trained network from a bundle, a run folder or, by `from_pretrained`, a model hub.

    Args:
        path: A bundle of `mmldlm export`, whose files are verified, or a run folder.
        device: Device of the network, by default the GPU if there is one.

    Raises:
        DataError: The folder is no bundle, or a file is damaged. The message names it.
    """

    def __init__(self, path: str | Path, device: str | None = None):
        self.run: LoadedRun = load_run(path, device=device)

    def __str__(self) -> str:
        return f"{self.run.folder}: {self.run}"

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that the network was trained for."""
        return self.run.config.trained_modes

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(M, C)."""
        return self.run.store.manifest.latent.tokens, self.run.store.manifest.latent.channels

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        return self.run.store.manifest.max_length

    @torch_defaults()
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the encoder's latents of n texts on its own scale, float32 [n, M, C].

        Raises:
            DataError: The encoder has no latent for a text. If latents were imported, it has none for any text.
        """
        return encode_or_raise(self.run.encoder, _as_list(texts), ", or latents")

    @torch_defaults()
    def sample(
        self,
        texts: Sequence[str] | None = None,
        latents: np.ndarray | None = None,
        *,
        mode: Mode | None = None,
        count: int = 1,
        lengths: int | Sequence[int] | None = None,
        prefixes: Sequence[str] | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> Samples:
        """Generate texts from latents (l2t), latents from texts (t2l), or both from noise (joint).

        Args:
            texts: n conditions. In t2l, the texts themselves. In l2t, texts that the encoder turns into latents.
            latents: n conditions in l2t: float [n, M, C] on the encoder's scale, or [n, C] if M is 1.
            mode: l2t, t2l or joint. By default l2t for latents, t2l for texts and joint without a condition.
            count: Samples per condition. In joint, which has no conditions, the number of samples.
            lengths: Tokens of each text: one number, or one for each of the n conditions. By default, the length head
                decides: `tried_lengths` lengths around its median in l2t, a draw in joint.
            prefixes: Texts that the generated ones follow, for a network trained on data with prefixes
                (`prepare --prefix-field`): one for all conditions or one for each. In joint each is a condition.
            seed: Seed of the random numbers.
            **sampling: Settings that replace the run's own `sampling`, e.g. steps, top_p or tried_lengths.

        Returns:
            B = n x count samples.

        Raises:
            UsageError: The arguments do not fit together, or the network was not trained for guidance.
            ConfigError: There is no such sampling setting, or it is out of bounds.
            DataError: A text or a latent cannot be a condition.
        """
        mode = mode or ("l2t" if latents is not None else "t2l" if texts is not None else "joint")
        given = [name for name, value in (("texts", texts), ("latents", latents)) if value is not None]
        accepted = {"l2t": (["texts"], ["latents"]), "t2l": (["texts"],), "joint": ([],)}
        if mode not in accepted or given not in accepted[mode]:
            raise UsageError(
                f"mode {mode}: found {' and '.join(given) or 'no condition'}, expected texts or latents in l2t, texts "
                "in t2l, and neither in joint"
            )
        if count < 1:
            raise UsageError(f"count: expected at least 1, found {count}")
        for length in [lengths] if isinstance(lengths, int) else lengths or ():
            if mode == "t2l" or not 1 <= length <= self.max_length:
                raise UsageError(f"lengths: expected 1 to {self.max_length}, and none in t2l, found {length} in {mode}")
        sampling = current({"sampling": sampling}, "sample")["sampling"]
        if "steps" in sampling:
            sampling.setdefault("t2l_steps", sampling["steps"])
        config = restore(SamplingConfig, {**dump(self.run.config.sampling), **sampling}, "sampling.")
        raw = None if latents is None else check_latents(self.run, np.asarray(latents), "latents")
        if mode == "l2t" and texts is not None:
            raw = self.encode(texts)
        conditions = _as_list(texts) if mode == "t2l" and texts is not None else None
        prefixes = None if prefixes is None else _as_list(prefixes)
        generation, generated = sample(self.run, mode, config, seed, raw, conditions, count, lengths, prefixes=prefixes)
        return Samples(generated, generation.split(), generation.latents.numpy())

    @torch_defaults()
    def score(
        self,
        texts: Sequence[str],
        latents: np.ndarray | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        draws: int = 4,
        seed: int = 0,
        batch_size: int = 64,
    ) -> Score:
        """Estimate the likelihood bound of n texts as `mmldlm evaluate` does, alone or given latents.

        Args:
            texts: The texts.
            latents: float [n, M, C] on the encoder's scale, e.g. `encode(texts)`. With None, texts are scored without
                latents, which requires a network that has trained joint.
            prefixes: Texts that `texts` follow, see `sample`. Their own likelihood does not count.
            draws: T, the number of noise times per text. Each costs one forward pass.
            seed: Seed of the noise.
            batch_size: Texts per forward pass.

        Raises:
            UsageError: The network was not trained for this mode, or a number is out of range.
            DataError: A text has no tokens or too many, or a latent has the wrong shape.
        """
        run = self.run
        check_scored_mode(run, latents is not None)
        if min(draws, batch_size) < 1:
            raise UsageError(f"draws, batch_size: expected at least 1, found {draws}, {batch_size}")
        ids = tokenize_texts(run, _as_list(texts))
        raw = None if latents is None else check_latents(run, np.asarray(latents), "latents")
        if raw is not None and len(raw) != len(ids):
            raise UsageError(f"latents: expected one for each of {len(ids)} texts, found {len(raw)}")
        heads = prefix_tokens(run, _as_list(prefixes or ""), len(ids))
        whole = [[*head, *text] for head, text in zip(heads, ids, strict=True)]
        terms = np.zeros((draws, len(ids)))
        for start in range(0, len(ids), batch_size):
            rows, given = slice(start, start + batch_size), None if raw is None else raw[start : start + batch_size]
            terms[:, rows] = draw_bounds(run, whole[rows], given, range(len(ids))[rows], seed, draws)
        errors = terms.std(0, ddof=1) / math.sqrt(draws) if draws > 1 else np.full(len(ids), math.nan)
        return Score(terms.mean(0), errors, np.array([len(text) for text in ids]))

    # --- huggingface_hub ------------------------------------------------------------------------------------

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the bundle, for `save_pretrained` and `push_to_hub`."""
        from mmldlm.inference.bundle import write_bundle

        write_bundle(self.run, save_directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]  # a stable name, `model_id`, where the mixin has a longer one
        cls, model_id: str | Path, *, revision: str | None = None, device: str | None = None, **download: Any
    ) -> Model:
        """Load a local bundle, or download one. Other options go to huggingface_hub's `snapshot_download`.

        Raises:
            DataError: There is no such folder or model, or it is no bundle.
        """
        if Path(model_id).is_dir():
            return cls(model_id, device)
        try:
            from huggingface_hub import snapshot_download

            folder = snapshot_download(str(model_id), revision=revision, **download)
        except Exception as error:  # the library is missing, or raises one of its many errors
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{model_id}: no such folder, and the hub does not provide it ({reason})") from None
        return cls(folder, device)


def load(path: str | Path, device: str | None = None) -> Model:
    """Load a bundle of `mmldlm export`, or a run folder (see `Model`)."""
    return Model(path, device)


def _as_list(texts: Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def check_scored_mode(run: LoadedRun, given_latents: bool) -> None:
    """Raise `UsageError` if the network was not trained to generate texts with, or without, a latent."""
    mode = "l2t" if given_latents else "joint"
    if mode not in run.config.trained_modes:
        raise UsageError(
            f"score {'given' if given_latents else 'without'} latents: expected a network that "
            f"trained {mode}, found {', '.join(run.config.trained_modes)}"
        )


def draw_bounds(
    run: LoadedRun,
    tokens: Sequence[Sequence[int]],
    latents: np.ndarray | None,
    indices: Sequence[int],
    seed: int,
    draws: int,
) -> np.ndarray:
    """Return unbiased estimates of the bounds of B texts in nats, float64 [T, B] (see `Model.score`).

    Args:
        latents: [B, M, C] on the encoder's scale, or None.
        indices: Positions of the texts in the input. Together with the seed, they determine the noise.
        draws: T. Each draw has its own noise.
    """
    latent, flat = run.store.manifest.latent, torch.tensor([token for text in tokens for token in text])
    shape = len(tokens), latent.tokens, latent.channels
    conditions = np.zeros(shape, np.float32) if latents is None else run.store.standardize(latents)
    slots = torch.tensor(indices)
    batch = Batch(flat, torch.from_numpy(conditions), tuple(map(len, tokens)), slots, slots)
    t_latent = 1.0 if latents is None else 0.0
    fixed = run.model, run.objective, batch, t_latent, seed
    return np.stack([bound_terms(*fixed, draw, GRID_TEXTS, run.device)[3].numpy() for draw in range(draws)])
