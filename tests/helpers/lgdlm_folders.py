"""Small folders in the layouts of the trainer before this one, written as it wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from tests.helpers.sample_corpus import write_corpus

LENGTH = 100  # of a padded row


@dataclass
class Samples:
    """Texts with their padded ids, masks and latents, which say which sample they are of."""

    texts: list[str]
    tokenizer: Path
    ids: np.ndarray  # int32 [n, LENGTH]
    masks: np.ndarray  # int32 [n, LENGTH]
    latents: np.ndarray  # float32 [n, 6]

    @property
    def by_text(self) -> dict[str, np.ndarray]:
        return dict(zip(self.texts, self.latents, strict=True))


def make_samples(folder: Path, count: int = 120) -> Samples:
    texts = list(dict.fromkeys(write_corpus(folder / "corpus.txt", 3 * count).read_text().splitlines()))[:count]
    assert len(texts) == count
    tokenizer = Tokenizer.train(texts, 400)
    tokenizer.save(folder / "tokenizer")
    rows = tokenizer.encode_batch(texts)
    ids = np.full((count, LENGTH), tokenizer.pad_id, np.int32)
    masks = np.zeros((count, LENGTH), np.int32)
    for row, found in enumerate(rows):
        ids[row, : len(found)], masks[row, : len(found)] = found, 1
    latents = np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)
    return Samples(texts, folder / "tokenizer", ids, masks, latents)


def write_pairs(folder: Path, samples: Samples, suffixed: bool = False) -> Path:
    (folder / "latents").mkdir(parents=True)
    (folder / "tokens").mkdir()
    for row in range(len(samples.texts)):
        name = f"{row:05d}_tokens.npz" if suffixed else f"tokens/{row:05d}.npz"
        np.savez(folder / name, input_ids=samples.ids[row], attention_mask=samples.masks[row])
        # Some of [d], some of [1, d], as different versions wrote them.
        np.save(folder / f"latents/{row:05d}.npy", samples.latents[row] if row % 2 else samples.latents[row][None])
    return folder


def write_batches(folder: Path, samples: Samples, size: int = 50, file_a_sample: bool = False) -> Path:
    """Rows of tokens in another order than those of latents, as an unordered pool wrote them."""
    (folder / "latents").mkdir(parents=True)
    order = np.random.default_rng(1).permutation(len(samples.texts))
    if file_a_sample:
        for row, latent in enumerate(samples.latents):
            np.save(folder / f"latents/latent_{row:06d}.npy", latent)
    else:
        np.save(folder / "latents/latents_0.npy", samples.latents)
    for batch, start in enumerate(range(0, len(order), size)):
        rows = order[start : start + size]
        name = f"tokens_latent0_batch{batch}"
        np.save(folder / f"{name}.npy", np.stack([samples.ids[rows], samples.masks[rows]], 1))
        (folder / f"{name}_meta.json").write_text(json.dumps([{"latent_idx": int(row), "length": 1} for row in rows]))
    return folder


def write_dat(folder: Path, samples: Samples, spare: int = 16, masked: bool = False) -> tuple[Path, dict]:
    """Two ranks' files with room for `spare` more, and the options that say what is in them."""
    folder.mkdir()
    half = len(samples.texts) // 2 + 7
    counts = []
    for rank, rows in enumerate((slice(0, half), slice(half, None))):
        tokens = np.stack([samples.ids[rows], samples.masks[rows]], 1) if masked else samples.ids[rows]
        counts.append(len(tokens))
        for kind, array in (("tokens", tokens), ("latents", samples.latents[rows])):
            path = folder / f"train_rank{rank}_{kind}.dat"
            path.write_bytes(array.tobytes() + bytes(spare * array[0].nbytes))
    pad = int(Tokenizer.load(samples.tokenizer).pad_id)
    return folder, {
        "dat_samples": ",".join(map(str, counts)),
        "dat_tokens": f"int32:{'2x' if masked else ''}{LENGTH}",
        "dat_latents": "float32:6",
        "dat_pad_id": None if masked else pad,
    }


def write_texts(folder: Path, samples: Samples) -> Path:
    """Every other text in the JSON alone, the others in a file, with its beginning in the JSON."""
    (folder / "latents").mkdir(parents=True)
    (folder / "texts").mkdir()
    items = []
    for row, text in enumerate(samples.texts):
        np.save(folder / f"latents/{row:05d}.npy", samples.latents[row])
        item = {"id": row, "text": text, "latent_path": f"latents/{row:05d}.npy"}
        if row % 2:
            (folder / f"texts/{row:05d}.txt").write_text(text + "\n")
            item |= {"text": text[:10], "text_path": f"/elsewhere/texts/{row:05d}.txt"}
        items.append(item)
    (folder / "train_data.json").write_text(json.dumps(items))
    return folder


def pairs_of(store: Store) -> Iterator[tuple[str, np.ndarray]]:
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    for name in store.manifest.splits:
        split = store.split(name)
        for row in range(len(split)):
            yield tokenizer.decode_batch([split.tokens(row).tolist()])[0], split.latents(row)


def rewrite(path: Path, change: Callable[[np.ndarray], object], array: str | None = None) -> None:
    """Change an .npy file, or the `array` of an .npz."""
    if array is None:
        found = np.load(path)
        made = change(found)
        np.save(path, found if made is None else made)
        return
    found = dict(np.load(path))
    made = change(found[array])
    found[array] = found[array] if made is None else made
    np.savez(path, **found)
