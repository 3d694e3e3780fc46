"""The layouts of the trainer before this one come in whole, each text with its own latent, or are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.inspect import verify_store
from mmldlm.data.prepare.documents import Document, Problem
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.pipeline import main, prepare
from mmldlm.data.prepare.readers.lgdlm import find_layout, predecessor_parts, read_predecessor
from mmldlm.data.store import Store
from mmldlm.errors import DataError, UsageError
from tests.helpers.lgdlm_folders import (
    LENGTH,
    Samples,
    make_samples,
    pairs_of,
    rewrite,
    write_batches,
    write_dat,
    write_pairs,
    write_texts,
)
from tests.helpers.sample_corpus import small_config

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    return make_samples(tmp_path_factory.mktemp("samples"))


WRITERS: dict[str, Callable[[Path, Samples], tuple[Path, dict]]] = {
    "pairs": lambda folder, samples: (write_pairs(folder, samples), {}),
    "pairs with suffixes": lambda folder, samples: (write_pairs(folder, samples, suffixed=True), {}),
    "batches": lambda folder, samples: (write_batches(folder, samples), {}),
    "batches, a file a latent": lambda folder, samples: (write_batches(folder, samples, file_a_sample=True), {}),
    "dat": write_dat,
    "dat with masks": lambda folder, samples: write_dat(folder, samples, masked=True),
    "texts": lambda folder, samples: (write_texts(folder, samples), {}),
}


def old_config(out: Path, folder: Path, samples: Samples, **options: object) -> PrepareConfig:
    values: dict = {"format": "predecessor", "encoder": "included", "tokenizer": str(samples.tokenizer)}
    return small_config(out, folder, **values | {"channels": None, "latent_dtype": "float32"} | options)


@pytest.mark.parametrize("layout", WRITERS)
def test_every_sample_comes_in_with_its_own_latent(layout: str, samples: Samples, tmp_path: Path) -> None:
    folder, options = WRITERS[layout](tmp_path / "old", samples)
    assert find_layout(folder) == layout.split(",")[0].split(" ")[0]
    manifest = prepare(old_config(tmp_path / "store", folder, samples, **options), progress=False)
    found = dict(pairs_of(Store.open(tmp_path / "store")))
    assert len(found) == len(samples.texts) == sum(split.samples for split in manifest.splits.values())
    for text, latent in samples.by_text.items():
        assert np.array_equal(found[text], latent[None]), text
    assert manifest.problems == {"over_length": 0}
    assert (manifest.latent.tokens, manifest.latent.channels) == (1, 6)
    assert manifest.encoder["name"] == "included" and len(manifest.encoder["revision"]) == 64
    assert manifest.sources[0]["folder"] == str(folder)
    assert verify_store(tmp_path / "store") == []


@pytest.mark.parametrize("layout", WRITERS)
def test_parts_are_read_by_themselves(layout: str, samples: Samples, tmp_path: Path) -> None:
    folder, options = WRITERS[layout](tmp_path / "old", samples)
    shapes = predecessor_shapes(options)
    whole = predecessor_parts(folder, 1 << 30, shapes=shapes)
    many = predecessor_parts(folder, 4000, shapes=shapes)
    assert len(many) > len(whole) and len(set(many)) == len(many)

    def keys(parts: list) -> list:
        return [(item.source, item.line, item.key) for part in parts for item in read_predecessor(part, "text", shapes)]

    assert keys(many) == keys(whole) and len(keys(whole)) == len(samples.texts)
    assert sorted(keys(many[::-1])) == sorted(keys(whole)), "a part depends on those read before"


def predecessor_shapes(options: dict):  # type: ignore[no-untyped-def]
    from mmldlm.data.prepare.readers.lgdlm_arrays import DatShapes

    return DatShapes(**{name.removeprefix("dat_"): value for name, value in options.items()})


def test_the_command_recognizes_the_layout_and_takes_its_latents(samples: Samples, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "old", samples)
    arguments = [str(folder), "--format", "predecessor", "--tokenizer", str(samples.tokenizer), "--latents-of", "E5"]
    assert main([*arguments, "--out", str(tmp_path / "store"), "--test-fraction", "0.1"]) == 0
    assert Store.open(tmp_path / "store").manifest.encoder["name"] == "E5"
    lsa = [*arguments[:-2], "--encoder", "lsa", "--channels", "8", "--out", str(tmp_path / "lsa")]
    assert main([*lsa, "--test-fraction", "0.1"]) == 0
    assert Store.open(tmp_path / "lsa").manifest.latent.channels == 8


def test_latents_are_truncated_when_asked_to(samples: Samples, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "old", samples)
    prepare(old_config(tmp_path / "store", folder, samples, channels=4), progress=False)
    for text, latent in pairs_of(Store.open(tmp_path / "store")):
        expected = samples.by_text[text][:4]
        assert np.allclose(latent, expected / np.linalg.norm(expected), atol=1e-6)
    prepare(old_config(tmp_path / "as-is", folder, samples, channels=4, normalise=False), progress=False)
    assert all(
        np.array_equal(found[0], samples.by_text[t][:4]) for t, found in pairs_of(Store.open(tmp_path / "as-is"))
    )


def rewrite_meta(folder: Path, change: Callable[[list], object]) -> None:
    path = folder / "tokens_latent0_batch1_meta.json"
    rows = json.loads(path.read_text())
    change(rows)
    path.write_text(json.dumps(rows))


def hole(mask: np.ndarray) -> None:
    mask[1] = 0


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no latent": ("pairs", lambda f: (f / "latents/00017.npy").unlink(), "00017.npz:18: sample 00017 has no latents"),
    "no tokens": ("pairs", lambda f: (f / "tokens/00017.npz").unlink(), "00017.npy:18: sample 00017 has no tokens"),
    "mask with a hole": (
        "pairs",
        lambda f: rewrite(f / "tokens/00003.npz", hole, "attention_mask"),
        r"sample 00003: the mask is not \d+ ones and then zeros",
    ),
    "mask of another length": (
        "pairs",
        lambda f: rewrite(f / "tokens/00003.npz", lambda mask: mask[:-1], "attention_mask"),
        r"sample 00003: ids \[100\] and mask \[99\]",
    ),
    "latent of another size": (
        "pairs",
        lambda f: rewrite(f / "latents/00005.npy", lambda latent: latent[:4]),
        r"sample 00005: latents \[1, 4\], expected \[1, 6\]",
    ),
    "latent of zeros": (
        "pairs",
        lambda f: rewrite(f / "latents/00005.npy", np.zeros_like),
        "sample 00005: the latent is all zeros",
    ),
    "latent that is not finite": (
        "pairs",
        lambda f: rewrite(f / "latents/00005.npy", lambda latent: latent * np.nan),
        "sample 00005: the latent is not finite",
    ),
    "pickled latent": (
        "pairs",
        lambda f: np.save(f / "latents/00005.npy", np.array([{}]), allow_pickle=True),
        "sample 00005: not a readable array .*allow_pickle=False",
    ),
    "token of another tokenizer": (
        "pairs",
        lambda f: rewrite(f / "tokens/00003.npz", lambda ids: ids * 0 + 50_000, "input_ids"),
        "sample 00003: token 0 is 50000, not below",
    ),
    "no meta": (
        "batches",
        lambda f: (f / "tokens_latent0_batch1_meta.json").unlink(),
        "tokens_latent0_batch1_meta.json: missing: row i of tokens is not row i of latents",
    ),
    "meta without latent_idx": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].pop("latent_idx")),
        "batch1_meta.json: not readable as JSON with a latent_idx",
    ),
    "meta of another count": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows.pop()),
        "batch1_meta.json: 49 latent_idx, expected 50",
    ),
    "one latent twice": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].update(latent_idx=rows[9]["latent_idx"])),
        r"row 9 of .*batch1.npy: latent_idx \d+, which is that of row 3 of .*batch1.npy already",
    ),
    "latent_idx outside": (
        "batches",
        lambda f: rewrite_meta(f, lambda rows: rows[3].update(latent_idx=999)),
        "batch1.npy:4: sample latent_idx 999: .*has 120 rows",
    ),
    "mask with a hole in a batch": (
        "batches",
        lambda f: rewrite(f / "tokens_latent0_batch0.npy", lambda array: hole(array[7, 1])),
        r"batch0.npy:8: sample latent_idx \d+: the mask is not",
    ),
    "no latent file": (
        "texts",
        lambda f: (f / "latents/00004.npy").unlink(),
        "train_data.json:5: sample '4': its late",
    ),
    "other text in the file": (
        "texts",
        lambda f: (f / "texts/00005.txt").write_text("Something else."),
        "train_data.json:6: sample '5': 'text' begins .* but 00005.txt 'Something else.'",
    ),
    "text file of another encoding": (
        "texts",
        lambda f: (f / "texts/00005.txt").write_bytes(b"\xff\xfe"),
        "train_data.json:6: .*utf-8",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_together_is_named(fault: str, samples: Samples, tmp_path: Path) -> None:
    layout, damage, message = FAULTS[fault]
    folder, options = WRITERS[layout](tmp_path / "old", samples)
    damage(folder)
    config = old_config(tmp_path / "store", folder, samples, **options)
    with pytest.raises(DataError, match=message):
        prepare(config, progress=False)
    assert not (tmp_path / "store").exists()


def test_a_bad_sample_is_left_out_when_asked_to(samples: Samples, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "old", samples)
    (folder / "latents/00017.npy").unlink()
    rewrite(folder / "tokens/00003.npz", np.zeros_like, "attention_mask")
    config = old_config(tmp_path / "store", folder, samples, on_problem="skip")
    manifest = prepare(config, progress=False)
    assert manifest.problems == {"empty": 1, "mismatch": 1, "over_length": 0}
    assert sum(split.samples for split in manifest.splits.values()) == len(samples.texts) - 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"dat_samples": None},
            UsageError,
            "--dat-samples None: expected the number of samples of each of train_rank0",
        ),
        ({"dat_samples": "10"}, UsageError, "--dat-samples 10: expected the number of samples of each of"),
        ({"dat_samples": "60,53"}, DataError, "train_rank0_tokens.dat: row 60, behind the last sample, is not empty"),
        ({"dat_samples": "900,53"}, DataError, "train_rank0_tokens.dat: room for 83 samples, expected 900"),
        ({"dat_samples": "69,53"}, DataError, "train_rank0_tokens.dat:6[89]: sample row 6[78]: .*zero"),
        ({"dat_tokens": "int32:99"}, DataError, "train_rank0_tokens.dat: .* bytes, expected rows of 396: --dat-tokens"),
        (
            {"dat_tokens": "int32:50"},
            DataError,
            r"train_rank0_tokens.dat: row 67, behind|room for 166 samples, but for 83",
        ),
        ({"dat_tokens": "object:9"}, UsageError, "--dat-tokens object:9: expected type and shape"),
        ({"dat_latents": "float32:3"}, DataError, "row 67, behind the last sample|but for 166"),
        ({"dat_latents": "int32:6"}, UsageError, "--dat-latents int32:6: expected type and shape"),
        ({"dat_pad_id": None}, UsageError, "holds no masks, so --dat-pad-id is needed"),
    ],
)
def test_dat_files_are_read_as_told_or_not_at_all(
    change: dict, error: type, message: str, samples: Samples, tmp_path: Path
) -> None:
    folder, options = write_dat(tmp_path / "old", samples)
    np.save(folder / "train_rank0_index.npy", np.array([{}]), allow_pickle=True)  # never looked at
    with pytest.raises(error, match=message):
        prepare(old_config(tmp_path / "store", folder, samples, **options | change), progress=False)


def test_tokens_need_their_tokenizer(samples: Samples, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "old", samples)
    config = replace(old_config(tmp_path / "store", folder, samples), tokenizer="bpe")
    with pytest.raises(DataError, match="holds tokens, so --tokenizer is needed"):
        prepare(config, progress=False)


def test_two_layouts_in_one_folder_are_told_apart_by_the_user(samples: Samples, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "old", samples)
    shutil.copytree(write_pairs(tmp_path / "other", samples) / "tokens", folder / "tokens")
    with pytest.raises(DataError, match="--format predecessor-pairs or --format predecessor-texts"):
        find_layout(folder)
    for name in ("pairs", "texts"):
        config = old_config(tmp_path / name, folder, samples, format=f"predecessor-{name}")
        assert sum(split.samples for split in prepare(config, progress=False).splits.values()) == 120
    with pytest.raises(DataError, match="no layout of the predecessor"):
        find_layout(tmp_path)


def test_a_long_sample_with_one_latent_is_not_split(samples: Samples, tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "old", samples)
    with pytest.raises(DataError, match=r"\d+ tokens, but one latent, which cannot be split"):
        prepare(old_config(tmp_path / "store", folder, samples, max_length=20), progress=False)
    manifest = prepare(old_config(tmp_path / "cut", folder, samples, max_length=20, over_length="cut"), progress=False)
    assert manifest.max_length == 20 and manifest.problems["over_length"] > 10
    assert sum(split.samples for split in manifest.splits.values()) == 120


def test_paths_lead_nowhere_outside(samples: Samples, tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "old", samples)
    np.save(tmp_path / "secret.npy", samples.latents[0])
    items = json.loads((folder / "train_data.json").read_text())
    items[0]["latent_path"] = "../secret.npy"
    (folder / "train_data.json").write_text(json.dumps(items))
    (part,) = predecessor_parts(folder, 1 << 30)
    first, *others = read_predecessor(part, "text")
    assert isinstance(first, Problem) and first.kind == "mismatch" and "'../secret.npy' is not in" in first.reason
    assert all(isinstance(item, Document) and item.latents is not None for item in others) and LENGTH
