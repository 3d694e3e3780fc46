"""Texts that the user chose (`validation.prompts`): at each validation a text is generated from the latent of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmldlm.config import RunConfig
from mmldlm.data.encoders import load_encoder
from mmldlm.data.store import Store
from mmldlm.distributed.collectives import Collectives
from mmldlm.errors import DataError
from mmldlm.evaluation.visualize import cap_steps, small_evaluation
from mmldlm.loading.load import LoadedRun
from mmldlm.prepare.documents import Document, Problem
from mmldlm.prepare.readers.text import read_texts


@dataclass(frozen=True)
class Prompts:
    """The lines of the file, and their latents, standardized: float32 [n, M, C]."""

    lines: list[Document]
    latents: np.ndarray


def read_prompts(config: RunConfig, store: Store) -> Prompts | None:
    """Read and encode `validation.prompts`, if there is one, or raise `DataError` for a line that cannot be used."""
    if not config.validation.prompts:
        return None
    items = read_texts(Path(config.validation.prompts), store.manifest.has_prefixes)
    lines = [item for item in items if isinstance(item, Document)]
    latents = load_encoder(store.path / "encoder").encode([line.text for line in lines])
    unusable = [item for item in items if isinstance(item, Problem)]
    unusable += [
        line.problem("unencodable", "the encoder has no latent for this text")
        for line, latent in zip(lines, latents, strict=True)
        if not np.isfinite(latent).all()
    ]
    if unusable:
        raise DataError(f"validation.prompts: {unusable[0]}")
    return Prompts(lines, store.standardize(latents))


def prompt_samples(run: LoadedRun, processes: Collectives, prompts: Prompts) -> list[dict[str, str]]:
    """Return a row for each prompt, with the text generated from its latent (collective). Noise is always the same."""
    sampling = replace(cap_steps(run.config.sampling, run.store.manifest.max_length), tried_lengths=1)
    prefixes = run.tokenizer.encode_prefixes([line.prefix for line in prompts.lines])
    start = [[run.objective.text.mask_id]] * len(prefixes)  # only their number matters
    evaluation = small_evaluation(run, 1, processes)
    tokens = evaluation.generate_from("l2t", start, prefixes, prompts.latents, sampling, "likelihood").tokens
    has_prefixes = run.store.manifest.has_prefixes
    return [
        {**({"prefix": line.prefix} if has_prefixes else {}), "prompt": line.text, "generation": text}
        for line, text in zip(prompts.lines, evaluation.decode(tokens), strict=True)
    ]
