"""Small data folders of the LGDLM trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from tests.helpers.sample_corpus import write_corpus

LENGTH = 100  # of a padded row


@dataclass
class Samples:
    """Texts with their padded ids, masks and latents, and the tokenizer of the ids."""

    texts: list[str]
    tokenizer: Path
    ids: np.ndarray  # int32 [n, LENGTH]
    masks: np.ndarray  # int32 [n, LENGTH]
    latents: np.ndarray  # float32 [n, 6]


def make_samples(folder: Path, count: int = 120) -> Samples:
    texts = list(dict.fromkeys(write_corpus(folder / "corpus.txt", 3 * count).read_text().splitlines()))[:count]
    assert len(texts) == count
    tokenizer = Tokenizer.train(texts, 400)
    tokenizer.save(folder / "tokenizer")
    rows = tokenizer.encode_batch(texts)
    ids = np.full((count, LENGTH), tokenizer.pad_id, np.int32)
    masks = np.zeros((count, LENGTH), np.int32)
    for row, result in enumerate(rows):
        ids[row, : len(result)], masks[row, : len(result)] = result, 1
    latents = np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)
    return Samples(texts, folder / "tokenizer", ids, masks, latents)


def pairs_of(store: Store) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the text and the latents of each sample of a store."""
    tokenizer = Tokenizer.load(store.path / "tokenizer")
    for name in store.manifest.splits:
        split = store.split(name)
        for row in range(len(split)):
            yield tokenizer.decode_batch([split.tokens(row).tolist()])[0], split.latents(row)


def write_pairs(folder: Path, samples: Samples, suffixed: bool = False) -> Path:
    (folder / "latents").mkdir(parents=True)
    (folder / "tokens").mkdir()
    for row in range(len(samples.texts)):
        name = f"{row:05d}_tokens.npz" if suffixed else f"tokens/{row:05d}.npz"
        np.savez(folder / name, input_ids=samples.ids[row], attention_mask=samples.masks[row])
        # Versions of the trainer wrote [C] or [1, C].
        np.save(folder / f"latents/{row:05d}.npy", samples.latents[row] if row % 2 else samples.latents[row][None])
    return folder


def write_batches(folder: Path, samples: Samples, size: int = 50, file_a_sample: bool = False) -> Path:
    """Write rows of tokens in another order than those of latents, paired by `latent_idx` alone."""
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


def write_dat(folder: Path, samples: Samples, spare: int = 16, masked: bool = False) -> Path:
    """Write two ranks' files with room for `spare` more samples, and an index as it is written by hand."""
    folder.mkdir()
    half = len(samples.texts) // 2 + 7
    counts = []
    for rank, rows in enumerate((slice(0, half), slice(half, None))):
        tokens = np.stack([samples.ids[rows], samples.masks[rows]], 1) if masked else samples.ids[rows]
        counts.append(len(tokens))
        for kind, array in (("tokens", tokens), ("latents", samples.latents[rows])):
            path = folder / f"train_rank{rank}_{kind}.dat"
            path.write_bytes(array.tobytes() + bytes(spare * array[0].nbytes))
    index = {"files": ["train_rank0", "train_rank1"], "samples_per_rank": counts, "latents": "float32:6"}
    pad_id = {} if masked else {"pad_id": Tokenizer.load(samples.tokenizer).pad_id}
    index |= {"tokens": f"int32:{'2x' if masked else ''}{LENGTH}"} | pad_id
    (folder / "global_index.json").write_text(json.dumps(index))
    return folder


def write_texts(folder: Path, samples: Samples) -> Path:
    """Write every other text to the JSON, and the others to a file, with their beginning in the JSON."""
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


def write_base(folder: Path, samples: Samples) -> Path:
    """Write the folder that the trainer read: a file of tokens, latents and text for each sample, below `train`."""
    for kind in ("tokens", "latents", "texts"):
        (folder / kind / "train").mkdir(parents=True)
    items = []
    for row, text in enumerate(samples.texts):
        name = f"openwebtext_{row:08d}_000_{row * 7919 % 65536:016x}"
        paths = {"token": f"{name}_tokens.npz", "latent": f"{name}.npy", "text": f"{name}.txt"}
        item = {f"{kind}_path": f"{kind}s/train/{path}" for kind, path in paths.items()}
        ids, mask = samples.ids[row].astype(np.int16), samples.masks[row].astype(bool)
        np.savez(folder / item["token_path"], input_ids=ids, attention_mask=mask)
        np.save(folder / item["latent_path"], samples.latents[row])
        (folder / item["text_path"]).write_text(text)
        items.append({"text": text[:20], "doc_id": row, "chunk_id": 0} | item)
    (folder / "train_data_with_tokens.json").write_text(json.dumps(items, indent=2))
    return folder


def write_unified(folder: Path, samples: Samples) -> Path:
    """Write the files of `generate_unified_tokens.py`: batches of the tokens of two large files of latents."""
    for kind in ("tokens", "latents"):
        (folder / kind / "train").mkdir(parents=True)
    half = len(samples.texts) // 2
    for number, rows in enumerate((np.arange(half), np.arange(half, len(samples.texts)))):
        path = f"latents/train/part_{1 - number}.npy"
        np.save(folder / path, samples.latents[rows][:, None])
        order = np.random.default_rng(number).permutation(len(rows))
        name = f"tokens/train/tokens_latent{number:04d}_batch0000"
        np.save(folder / f"{name}.npy", np.stack([samples.ids[rows[order]], samples.masks[rows[order]]], 1))
        source = f"/elsewhere/{path}" if number == 0 else "latents/chunk.npy"
        meta = [{"latent_path": source, "latent_file": Path(path).name, "latent_idx": int(i)} for i in order]
        (folder / f"{name}_meta.json").write_text(json.dumps(meta))
    (folder / "tokens/train/global_index.json").write_text("{}")
    return folder


def write_indexed_dat(folder: Path, samples: Samples) -> Path:
    """Write `.dat` files with the `global_index.json` and the texts of all ranks, as LGDLM did."""
    index = json.loads((write_dat(folder, samples, masked=True) / "global_index.json").read_text())
    counts = index["samples_per_rank"]
    index = {"files": index["files"], "samples_per_rank": counts, "max_length": LENGTH, "embedding_dim": 6}
    (folder / "global_index.json").write_text(json.dumps(index | {"world_size": 2}))
    for rank, texts in enumerate((samples.texts[: counts[0]], samples.texts[counts[0] :])):
        (folder / f"train_rank{rank}_texts.txt").write_text("".join(f"{text}\n" for text in texts))
    return folder
