"""`mmldlm align RUN NEW --pairs FILE --out OUT`: a bundle that takes vectors of another encoder as its latents.

Such as those of an embedding service that has changed its model: a linear map takes them to the latents of the run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mmldlm.data.encoders import LatentEncoder, load_encoder
from mmldlm.data.encoders.sentence_transformers import SentenceTransformerEncoder
from mmldlm.data.nearest import unit_vectors
from mmldlm.errors import DataError
from mmldlm.inference.batch import read_items
from mmldlm.inference.conditions import encode_or_raise, read_array
from mmldlm.run.load import add_run_options, load_run
from mmldlm.tools.export import check_new, save_bundle
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import short_repr

HELD_OUT = 0.1  # of the pairs, to measure the map on
MIN_PAIRS = 20
_PENALTIES = 10.0 ** np.arange(-8, 1, 0.5)  # of the largest eigenvalue


def fit_ridge(vectors: np.ndarray, latents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix [D, F] and bias [F] that map vectors [n, D] to latents [n, F] by ridge regression.

    The penalty is that of the least generalized cross-validation (Golub, Heath and Wahba 1979, eq. 1.4).
    """
    mean, target_mean = vectors.mean(0), latents.mean(0)
    u, singular, vt = np.linalg.svd(vectors - mean, full_matrices=False)
    rotated = u.T @ (latents - target_mean)
    outside, errors, kept = ((latents - target_mean) ** 2).sum() - (rotated**2).sum(), [], []
    for penalty in _PENALTIES * singular[0] ** 2:
        kept.append(singular**2 / (singular**2 + penalty))
        error = outside + (((1 - kept[-1])[:, None] * rotated) ** 2).sum()
        errors.append(error / max(1 - (kept[-1].sum() + 1) / len(vectors), 1e-9) ** 2)
    factors = kept[int(np.argmin(errors))] / np.maximum(singular, 1e-30)
    matrix = vt.T @ (factors[:, None] * rotated)
    return matrix, target_mean - mean @ matrix


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm align`; returns the exit code."""
    parser = argparse.ArgumentParser("mmldlm align", description=__doc__)
    add_run_options(parser)
    add = parser.add_argument
    add("new", help="the vectors of the pairs' texts, .npy [n, D]; or the other encoder: a folder of a store, run or "
        "bundle, or sentence-transformers:FOLDER")  # fmt: skip
    add(
        "--pairs", type=Path, required=True, metavar="FILE", help="texts that both encoders know: one a line, or .jsonl"
    )
    add("--out", type=Path, required=True, help="folder of the bundle, which must not exist")
    options = parser.parse_args(argv)
    check_new(options.out)
    run = load_run(options.run, options.checkpoint, options.data, options.weights, device="cpu")
    texts = [getattr(item, "text", "") for item in read_items(options.pairs, run, checked=False)]
    latents = encode_or_raise(run.encoder, texts).reshape(len(texts), -1).astype(np.float64)
    if options.new.endswith(".npy"):
        vectors = np.asarray(read_array(Path(options.new), "NEW"))
    else:
        vectors = encode_or_raise(_encoder(options.new), texts)
    if len(vectors) != len(texts) or len(texts) < MIN_PAIRS or not np.isfinite(vectors).all():
        found = f"{len(vectors)} vectors and {len(texts)} texts"
        raise DataError(f"NEW, --pairs: expected a finite vector of each text, at least {MIN_PAIRS}, found {found}")
    vectors = vectors.reshape(len(texts), -1).astype(np.float64)
    order = np.random.default_rng(0).permutation(len(texts))
    held, rest = np.split(order, [max(2, int(len(order) * HELD_OUT))])
    matrix, bias = fit_ridge(vectors[rest], latents[rest])
    center, found = latents[rest].mean(0), vectors[held] @ matrix + bias
    truth = latents[held]
    measured = {
        "pairs": len(texts),
        "held_out": len(held),
        "explained": float(1 - ((found - truth) ** 2).sum() / ((truth - center) ** 2).sum()),
        "cosine": float((unit_vectors(found - center) * unit_vectors(truth - center)).sum(1).mean()),
    }
    matrix, bias = fit_ridge(vectors, latents)
    alignment = {"matrix": torch.from_numpy(matrix).float(), "bias": torch.from_numpy(bias).float()}
    save_bundle(replace(run, alignment=alignment, info={**run.info, "alignment": measured}), options.out)
    figures = f"{100 * measured['explained']:.1f} % of the latents' variance explained, cosine {measured['cosine']:.3f}"
    next_step = f"mmldlm sample {options.out} --latents vectors.npy"
    print(printable(f"{options.out}: {figures} on {len(held)} held-out pairs of {len(texts)}; {next_step}"))
    return 0


def _encoder(name: str) -> LatentEncoder:
    kind, _, model = name.partition(":")
    if kind == SentenceTransformerEncoder.kind and model:
        return SentenceTransformerEncoder(model)
    folder = next((path for path in (Path(name) / "encoder", Path(name) / "data/encoder") if path.is_dir()), None)
    if folder is None:
        raise DataError(
            f"NEW: expected .npy, a folder with an encoder, or sentence-transformers:FOLDER, found {short_repr(name)}"
        )
    return load_encoder(folder)
