"""Forgeries of a bundle, and what `mmldlm verify` says about each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Made:
    """A bundle that may be changed, and one that a forger takes other parts from."""

    bundle: Path
    trained: Path  # a bundle of the same run's trained weights: the first one has the EMA


Forgery = Callable[[Made], None]


def reseal(folder: Path, **info: Any) -> None:
    """Write sizes and hashes of all files again, and entries of `info`."""
    body = manifest_body(folder)
    for name in body["files"]:
        path = folder / name
        body["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    body["info"] |= info
    seal(folder, body)


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def claiming(change: Callable[[Any], Any], with_card: bool = True, **info: Any) -> Forgery:
    """Change `evaluation.json`, then the hashes and, by our own code, the model card."""

    def forge(made: Made) -> None:
        change_json(made.bundle / "evaluation.json", change)
        reseal(made.bundle, **info)
        if with_card:
            write_card(made.bundle)

    return forge


def write_card(bundle: Path) -> None:
    card = model_card(load_run(bundle), json.loads((bundle / "evaluation.json").read_bytes()))
    (bundle / "README.md").write_text(card, encoding="utf-8")
    reseal(bundle)


def changing(name: str, change: Callable[[Any], Any]) -> Forgery:
    """Change a JSON file, and the hashes."""

    def forge(made: Made) -> None:
        change_json(made.bundle / name, change)
        reseal(made.bundle)

    return forge


def replacing(name: str, old: str, new: str) -> Forgery:
    """Change a text in a file, and the hashes."""

    def forge(made: Made) -> None:
        text = (made.bundle / name).read_text(encoding="utf-8")
        assert old in text, (name, old)
        (made.bundle / name).write_text(text.replace(old, new, 1), encoding="utf-8")
        reseal(made.bundle)

    return forge


def flip_a_byte(made: Made) -> None:
    path = made.bundle / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_a_weight(made: Made) -> None:
    flip_a_byte(made)
    reseal(made.bundle)


def change_weights_and_their_hash(made: Made) -> None:
    """Noise on one matrix; the evaluation says that it measured these."""
    path = made.bundle / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda each: tensors[each].numel())
    save_file(tensors | {name: tensors[name] * 1.5}, path)
    reseal(made.bundle)
    digest = weights_hash(load_run(made.bundle).model)
    claiming(lambda figures: figures.update(weights_sha256=digest))(made)


def take_other_weights(made: Made) -> None:
    shutil.copy(made.trained / "model.safetensors", made.bundle)
    reseal(made.bundle)


def take_another_evaluation(made: Made) -> None:
    shutil.copy(made.trained / "evaluation.json", made.bundle)
    reseal(made.bundle)
    write_card(made.bundle)


def truncate(made: Made) -> None:
    path = made.bundle / "data/encoder/lsa.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def scale_latents(made: Made) -> None:
    """Of `latents.json` and of the description of the data, whose checksum follows."""
    change_json(made.bundle / "latents.json", _scale)
    path = made.bundle / "data/manifest.json"
    change_json(path, lambda content: _scale(content["latent"]))
    (made.bundle / "data/manifest.sha256").write_text(f"{sha256(path)}  manifest.json\n")
    reseal(made.bundle)


def _scale(latent: dict[str, Any]) -> None:
    latent["rms"] *= 3
    latent["max_norm"] /= 3


def _widen(figures: dict[str, Any]) -> None:
    low, high = figures["bits_per_token_ci95"]
    figures["bits_per_token_ci95"] = [low - (high - low), high + (high - low)]


def seed_with_its_hash(made: Made) -> None:
    path = made.bundle / "evaluation.json"
    figures = json.loads(path.read_bytes())
    names = asdict(EvaluationConfig())
    config = EvaluationConfig(**{name: figures[name] for name in names} | {"seed": 5})
    options = provenance(load_run(made.bundle), config, figures["modes"])["options_sha256"]
    claiming(lambda content: content.update(seed=5, options_sha256=options))(made)


def remove(name: str) -> Forgery:
    return lambda made: (made.bundle / name).unlink()


def add_pickle(made: Made) -> None:
    (made.bundle / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def say_another_step(made: Made) -> None:
    seal(made.bundle, manifest_body(made.bundle) | {"step": 2000})


OPTIONS = "evaluation.json: options_sha256: found"
WEIGHTS = "evaluation.json: weights_sha256: found"


def l2t(**figures: Any) -> Forgery:
    return claiming(lambda content: content["l2t"].update(figures))


def top(**figures: Any) -> Forgery:
    return claiming(lambda content: content.update(figures))


def config(change: Callable[[Any], Any]) -> Forgery:
    return changing("config.json", change)


# What is changed, and what the report must name.
FOUND_WITHOUT_DATA: dict[str, tuple[Forgery, str]] = {
    "a byte of the weights": (flip_a_byte, "model.safetensors has SHA-256"),
    "a byte of the weights, with the manifest": (change_a_weight, WEIGHTS),
    "the trained weights for the EMA": (take_other_weights, WEIGHTS),
    "the evaluation of other weights": (take_another_evaluation, "evaluation.json: weights: found 'trained'"),
    "a figure in the card": (replacing("README.md", "baseline: unigram ", "baseline: unigram 1"), "README.md: line "),
    "the versions in the card": (replacing("README.md", "| trained with | ", "| trained with | x"), "README.md: line "),
    "a figure in evaluation.json": (
        claiming(lambda figures: figures["l2t"].update(bleu=88.0), with_card=False),
        "README.md: line ",
    ),
    "another tokenizer": (replacing("tokenizer/tokenizer.json", '"[PAD]"', '"[pad]"'), "tokenizer"),
    "a sampling setting": (config(lambda tree: tree["sampling"].update(steps=7)), OPTIONS),
    "the precision": (config(lambda tree: tree.update(precision="bf16")), OPTIONS),
    "the shape of the network": (config(lambda tree: tree["model"].update(depth=3)), "model.depth"),
    "another latent process": (config(lambda tree: tree["latent"].update(prediction="v")), "latent.prediction"),
    "the hash of the data": (top(data_manifest=HASH), "evaluation.json: data_manifest: found"),
    "a truncated file": (truncate, "lsa.safetensors has "),
    "a missing file": (remove("latents.json"), "latents.json"),
    "a missing evaluation": (remove("evaluation.json"), "evaluation.json"),
    "a missing manifest": (remove("manifest.json"), "manifest.json"),
    "a pickle beside": (add_pickle, "not in its manifest, pytorch_model.bin"),
    "the statistics of the latents": (changing("latents.json", _scale), "latents.json: differs from the latents in"),
    "the number of samples": (top(samples=1000), OPTIONS),
    "the seed": (top(seed=5), OPTIONS),
    "the modes": (top(modes=["l2t"]), OPTIONS),
    "the step": (say_another_step, "evaluation.json: step: found"),
    "values that no evaluation has": (
        claiming(lambda figures: figures.update(times=0), with_card=False),
        "evaluation.json: this version writes other",
    ),
}
# Files, figures, card and hashes fit together, so only measuring again finds these.
FOUND_BY_MEASURING: dict[str, tuple[Forgery, str]] = {
    "a figure": (l2t(bleu=88.0), "l2t.bleu: 88.0 claimed"),
    "a figure, slightly": (
        claiming(lambda figures: figures.update(bits_per_token=figures["bits_per_token"] * (1 - 1e-4))),
        "within the interval, by the versions, processor and threads of the evaluation",
    ),
    "a baseline": (l2t(bits_per_token_shuffled=20.0), "l2t.bits_per_token_shuffled: 20.0 claimed"),
    "a figure in a table": (
        claiming(lambda figures: figures["by_length"][0].update(bits_per_token=1.0)),
        "by_length.0.bits_per_token: 1.0 claimed",
    ),
    "an interval": (claiming(_widen), "bits_per_token_ci95: "),
    "the number of documents": (top(documents=1000), "documents: 1000 claimed, 20 measured"),
    "a seed of other documents": (seed_with_its_hash, "bits_per_token: "),
    "a generated text": (
        claiming(lambda figures: figures["l2t"]["samples"][0].update(generation="The rose.")),
        "l2t.samples.0.generation: 'The rose.' claimed",
    ),
    "a figure that is left out": (
        claiming(lambda figures: figures["joint"].pop("distinct_1")),
        "joint.distinct_1: 'nothing' claimed",
    ),
    "an invented figure": (
        claiming(lambda figures: figures["t2l"].update(recall_at_5=1.0)),
        "t2l.recall_at_5: 1.0 claimed",
    ),
    "the hash of the data": (
        claiming(lambda figures: figures.update(data_manifest=HASH), data_manifest=HASH),
        "found data with the hash",
    ),
    "the statistics of the latents": (scale_latents, "PROBLEM evaluation.json: "),
    "the weights": (change_weights_and_their_hash, "bits_per_token: "),
}
