"""Forgeries of a bundle, and what `mmldlm verify` says about each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mmldlm.checkpoint.state import weights_hash
from mmldlm.evaluation import EvaluationConfig
from mmldlm.evaluation.suite import provenance
from mmldlm.inference.bundle import model_card
from mmldlm.loading.load import load_run
from mmldlm.utils.files import sha256
from tests.helpers.changed_checkpoints import HASH, manifest_body, seal

Change = Callable[[Any], Any]  # of the content of a JSON file, in place
Forgery = Callable[[Path, Path], Any]  # changes a bundle of an EMA; the other one has the same run's trained weights


def reseal(bundle: Path, **info: Any) -> None:
    """Write sizes and hashes of all files again, and entries of `info`."""
    body = manifest_body(bundle)
    for name in body["files"]:
        body["files"][name] = {"bytes": (bundle / name).stat().st_size, "sha256": sha256(bundle / name)}
    body["info"] |= info
    seal(bundle, body)


def change_json(path: Path, change: Change) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def claim(bundle: Path, change: Change, with_card: bool = True, **info: Any) -> None:
    """Change `evaluation.json`, then the hashes and, by our own code, the model card."""
    change_json(bundle / "evaluation.json", change)
    reseal(bundle, **info)
    if with_card:
        card = model_card(load_run(bundle), json.loads((bundle / "evaluation.json").read_bytes()))
        (bundle / "README.md").write_text(card, encoding="utf-8")
        reseal(bundle)


def claiming(change: Change, with_card: bool = True, **info: Any) -> Forgery:
    return lambda bundle, _: claim(bundle, change, with_card, **info)


def figures(mode: str = "", **values: Any) -> Forgery:
    """Claim other figures, of a mode or of the text alone."""
    return claiming(lambda content: (content[mode] if mode else content).update(values))


def changing(name: str, change: Change) -> Forgery:
    """Change a JSON file, and the hashes."""
    return lambda bundle, _: (change_json(bundle / name, change), reseal(bundle))


def config(group: str = "", **values: Any) -> Forgery:
    return changing("config.json", lambda tree: (tree[group] if group else tree).update(values))


def replacing(name: str, old: str, new: str) -> Forgery:
    """Change a text in a file, and the hashes."""
    return lambda bundle, _: (
        (bundle / name).write_text((bundle / name).read_text().replace(old, new, 1)),
        reseal(bundle),
    )


def flip_a_byte(bundle: Path, _: Path) -> None:
    path = bundle / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_weights_and_their_hash(bundle: Path, _: Path) -> None:
    path = bundle / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda each: tensors[each].numel())
    save_file(tensors | {name: tensors[name] * 1.5}, path)
    reseal(bundle)
    claim(bundle, lambda content: content.update(weights_sha256=weights_hash(load_run(bundle).model)))


def take_another_evaluation(bundle: Path, trained: Path) -> None:
    shutil.copy(trained / "evaluation.json", bundle)
    claim(bundle, lambda content: None)


def scale(latent: dict[str, Any]) -> None:
    latent.update(rms=latent["rms"] * 3, max_norm=latent["max_norm"] / 3)


def scale_latents(bundle: Path, _: Path) -> None:
    """Of `latents.json` and of the description of the data, whose checksum follows."""
    path = bundle / "data/manifest.json"
    change_json(bundle / "latents.json", scale)
    change_json(path, lambda content: scale(content["latent"]))
    (bundle / "data/manifest.sha256").write_text(f"{sha256(path)}  manifest.json\n")
    reseal(bundle)


def widen(content: dict[str, Any]) -> None:
    low, high = content["bits_per_token_ci95"]
    content["bits_per_token_ci95"] = [low - (high - low), high + (high - low)]


def take_a_seed_with_its_hash(bundle: Path, _: Path) -> None:
    content = json.loads((bundle / "evaluation.json").read_bytes())
    options = EvaluationConfig(**{name: content[name] for name in asdict(EvaluationConfig())} | {"seed": 5})
    digest = provenance(load_run(bundle), options, content["modes"])["options_sha256"]
    claim(bundle, lambda content: content.update(seed=5, options_sha256=digest))


OPTIONS = "evaluation.json: options_sha256: found"
WEIGHTS = "evaluation.json: weights_sha256: found"
# What is changed, and what the report must name.
FOUND_WITHOUT_DATA: dict[str, tuple[Forgery, str]] = {
    "a byte of the weights": (flip_a_byte, "model.safetensors has SHA-256"),
    "a byte of the weights, with the manifest": (lambda *folders: (flip_a_byte(*folders), reseal(folders[0])), WEIGHTS),
    "the trained weights for the EMA": (
        lambda bundle, trained: (shutil.copy(trained / "model.safetensors", bundle), reseal(bundle)), WEIGHTS),
    "the evaluation of other weights": (take_another_evaluation, "evaluation.json: weights: found 'trained'"),
    "a figure in the card": (replacing("README.md", "baseline: unigram ", "baseline: unigram 1"), "README.md: line "),
    "the versions in the card": (replacing("README.md", "| trained with | ", "| trained with | x"), "README.md: line "),
    "a figure in evaluation.json": (
        claiming(lambda content: content["l2t"].update(bleu=88.0), with_card=False), "README.md: line "),
    "another tokenizer": (replacing("tokenizer/tokenizer.json", '"[PAD]"', '"[pad]"'), "tokenizer"),
    "a sampling setting": (config("sampling", steps=7), OPTIONS),
    "the precision": (config(precision="bf16"), OPTIONS),
    "the shape of the network": (config("model", depth=3), "model.depth"),
    "another latent process": (config("latent", prediction="v"), "latent.prediction"),
    "the hash of the data": (figures(data_manifest=HASH), "evaluation.json: data_manifest: found"),
    "a truncated file": (
        lambda bundle, _: (bundle / "data/encoder/lsa.safetensors").write_bytes(b""), "lsa.safetensors has 0 bytes"),
    "a missing file": (lambda bundle, _: (bundle / "latents.json").unlink(), "latents.json"),
    "a missing evaluation": (lambda bundle, _: (bundle / "evaluation.json").unlink(), "evaluation.json"),
    "a missing manifest": (lambda bundle, _: (bundle / "manifest.json").unlink(), "manifest.json"),
    "a pickle beside": (
        lambda bundle, _: (bundle / "pytorch_model.bin").write_bytes(b"\x80\x04N."), "manifest, pytorch_model.bin"),
    "the statistics of the latents": (changing("latents.json", scale), "latents.json: differs from the latents in"),
    "the number of samples": (figures(samples=1000), OPTIONS),
    "the seed": (figures(seed=5), OPTIONS),
    "the modes": (figures(modes=["l2t"]), OPTIONS),
    "the step": (
        lambda bundle, _: seal(bundle, manifest_body(bundle) | {"step": 2000}), "evaluation.json: step: found"),
    "values that no evaluation has": (
        claiming(lambda content: content.update(times=0), with_card=False), "this version writes other contents"),
}  # fmt: skip
# Files, figures, card and hashes fit together, so only measuring again finds these.
FOUND_BY_MEASURING: dict[str, tuple[Forgery, str]] = {
    "a figure": (figures("l2t", bleu=88.0), "l2t.bleu: 88.0 claimed"),
    "a figure, slightly": (
        claiming(lambda content: content.update(bits_per_token=content["bits_per_token"] * (1 - 1e-4))),
        "within the interval, by the versions, processor and threads of the evaluation"),
    "a baseline": (figures("l2t", bits_per_token_shuffled=20.0), "l2t.bits_per_token_shuffled: 20.0 claimed"),
    "a figure in a table": (
        claiming(lambda content: content["by_length"][0].update(bits_per_token=1.0)), "by_length.0.bits_per_token: "),
    "an interval": (claiming(widen), "bits_per_token_ci95: "),
    "the number of documents": (figures(documents=1000), "documents: 1000 claimed, 20 measured"),
    "a seed of other documents": (take_a_seed_with_its_hash, "bits_per_token: "),
    "a generated text": (
        claiming(lambda content: content["l2t"]["samples"][0].update(generation="A rose.")), "l2t.samples.0.gen"),
    "a figure that is left out": (claiming(lambda content: content["joint"].pop("distinct_1")), "joint.distinct_1: "),
    "an invented figure": (figures("t2l", recall_at_5=1.0), "t2l.recall_at_5: 1.0 claimed"),
    "the hash of the data": (
        claiming(lambda content: content.update(data_manifest=HASH), data_manifest=HASH), "found data with the hash"),
    "the statistics of the latents": (scale_latents, "PROBLEM evaluation.json: "),
    "the weights": (change_weights_and_their_hash, "bits_per_token: "),
}  # fmt: skip
