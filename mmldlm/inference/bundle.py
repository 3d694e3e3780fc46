"""Bundles: one folder with a trained network and everything it needs to generate, in hashed files without pickle.

    manifest.json      sizes and SHA-256 of all other files, step, versions and revision of the code that trained it
    config.json        all settings of the run, without the paths of its machine
    model.safetensors  one set of weights, trained or EMA
    latents.json       mean and scale of the latents
    tokenizer/         as transformers' AutoTokenizer reads it
    data/              the encoder, or the name of the encoder that computed the latents, and sizes of the data
    evaluation.json    figures of `mmldlm evaluate`, if it measured these weights on the data of their run
    README.md          the model card

A bundle has the form of a checkpoint, so the code that reads checkpoints also reads, verifies and refuses bundles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from mmldlm import __version__
from mmldlm.checkpoint.manifest import foreign, write_checkpoint_manifest
from mmldlm.checkpoint.slices import SlicedTensor, TensorGroup, tensor_file_name
from mmldlm.checkpoint.state import model_state, weights_hash
from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.config import RunConfig
from mmldlm.data.writer import write_description
from mmldlm.evaluation.table import table
from mmldlm.loading.compatibility import LATENTS_NAME, identity
from mmldlm.loading.load import BUNDLE_CONFIG, DESCRIPTION, LoadedRun
from mmldlm.model.initial_weights import InitConfig
from mmldlm.settings.declaration import dump
from mmldlm.utils.files import file_info, fsync, read_regular

EVALUATION_NAME, CARD_NAME = "evaluation.json", "README.md"

AGAIN = "`mmldlm verify PATH --data STORE` measures the values again, with the store whose hash is above."
CARD = """\
---
library_name: mmldlm
pipeline_tag: text-generation
tags:
- masked-diffusion
- latent-diffusion
- text-embeddings
---

# Multimodal Latent Diffusion Language Model

One network that generates texts from latents (l2t), latents of texts (t2l), and both from noise (joint).
Trained modes: {modes}.

{description}| | |
|---|---|
| weights | {weights}, {parameters:,} parameters |
| vocabulary, longest text | {vocab_size:,} tokens, {max_length} tokens |
| latents | {latent_tokens} x {channels}, by the encoder {encoder} |
| data | SHA-256 of the manifest of the store: {data} |
| trained with | {versions} |

## Use

With mmldlm installed from its wheel:

    import mmldlm

    model = mmldlm.load("PATH")                  # of this folder
    model.sample(texts=["A sentence."], mode="l2t").texts
    model.sample(texts=["A sentence."]).latents  # t2l
    model.sample(count=3).texts                  # joint
    model.score(["A sentence."]).bits_per_token

## Evaluation

{evaluation}
"""


def write_bundle(run: LoadedRun, folder: Path, description: str = "") -> None:
    """Write a run as a bundle to an existing folder. The same run always gives the same bytes.

    Existing files of a bundle are replaced, other files stay. `description` is Markdown for the model card. By default,
    it is copied from the bundle that the run was loaded from.

    Raises:
        NumericalError: A weight is not finite.
    """
    assert isinstance(run.model, nn.Module)
    names, tensors = [BUNDLE_CONFIG, LATENTS_NAME, CARD_NAME, tensor_file_name("model", 0, 1)], model_state(run.model)
    slices = {name: SlicedTensor.like(tensor, ((0, 0),)) for name, tensor in tensors.items()}
    write_tensors(folder / names[-1], tensors)
    _write_json(folder / BUNDLE_CONFIG, dump(portable(run.config)))
    _write_json(folder / LATENTS_NAME, asdict(run.store.manifest.latent))
    run.tokenizer.save(folder / "tokenizer")
    (folder / DESCRIPTION).mkdir(exist_ok=True)
    write_description(run.store, folder / DESCRIPTION)
    info = {
        **run.info,
        "identity": identity(run.config, run.store),
        "weights": run.weights,
        "exported_with": __version__,
    }
    info["description"] = description or str(run.info.get("description", ""))
    with foreign(run.folder / EVALUATION_NAME):
        evaluation = matching_evaluation(run)
        card = model_card(replace(run, info=info), evaluation)
    if evaluation is not None:
        _write_json(folder / EVALUATION_NAME, evaluation)
        names.append(EVALUATION_NAME)
    (folder / CARD_NAME).write_text(card, encoding="utf-8")
    inside = [path for name in ("tokenizer", DESCRIPTION) for path in (folder / name).rglob("*") if path.is_file()]
    paths = sorted([*(folder / name for name in names), *inside])
    for path in paths:
        fsync(path)
    files = {path.relative_to(folder).as_posix(): file_info(path) for path in paths}
    fsync(write_checkpoint_manifest(folder, run.step, files, info, {"model": TensorGroup(1, slices)}))


def portable(config: RunConfig) -> RunConfig:
    """Return the config without paths, since they are private and mean nothing on another machine."""
    data = replace(config.data, path="", mixture={})
    run, checkpoint = replace(config.run, dir=""), replace(config.checkpoint, mirror="")
    return replace(config, run=run, data=data, checkpoint=checkpoint, init=InitConfig(), resume="auto")


def matching_evaluation(run: LoadedRun) -> dict[str, Any] | None:
    """Return the content of the run's `evaluation.json`, or None if it belongs to other weights or data."""
    path = run.folder / EVALUATION_NAME
    evaluation = json.loads(read_regular(path, run.folder)) if path.is_file() else {}
    if not evaluation:
        return None
    expected = {"step": run.step, "weights": run.weights, "data_manifest": run.info.get("data_manifest")}
    same = expected.items() <= evaluation.items() and evaluation.get("weights_sha256") == weights_hash(run.model)
    return evaluation if same else None


def model_card(run: LoadedRun, evaluation: Mapping[str, Any] | None) -> str:
    """Return the model card of a bundle with these figures."""
    assert isinstance(run.model, nn.Module)
    manifest = run.store.manifest
    figures = "Not measured: `mmldlm evaluate`, then export again."
    if evaluation is not None:
        lines = "\n".join(f"    {line}".rstrip() for line in table(evaluation).splitlines())
        figures = f"Each value with its baselines, on documents of the split {evaluation['split']}. {AGAIN}\n\n{lines}"
    origin = run.info.get("init") or {}
    started = f", started from {origin['from']}, step {origin.get('step')}" if "from" in origin else ""
    return CARD.format(
        modes=", ".join(run.config.trained_modes),
        description=f"{description.strip()}\n\n" if (description := run.info.get("description", "")) else "",
        weights=f"{run}{started}",
        parameters=sum(tensor.numel() for tensor in model_state(run.model).values()),
        vocab_size=manifest.vocab_size,
        max_length=manifest.max_length,
        latent_tokens=manifest.latent.tokens,
        channels=manifest.latent.channels,
        encoder=manifest.encoder["name"],
        data=run.info.get("data_manifest", "unknown"),
        versions=", ".join(" ".join(pair) for pair in run.info.get("versions", {}).items()) or "unknown versions",
        evaluation=figures,
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
