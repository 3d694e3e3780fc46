"""Changes to a finished run and its store that `mmldlm verify` must find."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mmldlm.config import load_config
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.utils.files import sha256
from tests.helpers.changed_checkpoints import replace_file

Records = list[dict[str, Any]]
# Changes the folder `run`, whose data are in `store`; returns what the report must name.
Tampering = Callable[[Path, Path, random.Random], str]


def read_records(run: Path) -> Records:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_records(run: Path, records: Records) -> None:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def change_metric(run: Path, store: Path, rng: random.Random) -> str:
    records = read_records(run)
    record = rng.choice([record for record in records if record["kind"] in ("train", "validation")])
    key = rng.choice([key for key in record if key.split("/")[0] in ("loss", "validation") and record[key]])
    record[key] *= 1 - 10.0 ** -rng.randint(2, 12)
    write_records(run, records)
    return f"{record['kind']} record of step {record['step']}: {key}"


def change_norm(run: Path, store: Path, rng: random.Random) -> str:
    records = read_records(run)
    record = rng.choice([record for record in records if record["kind"] == "train"])
    record["grad_norms"][-1] *= 1 + 1e-9
    write_records(run, records)
    return f"gradient norm of step {record['step']}"


def remove_record(run: Path, store: Path, rng: random.Random) -> str:
    records = read_records(run)
    removed = records.pop(rng.choice([place for place, record in enumerate(records) if record["kind"] == "train"]))
    write_records(run, records)
    return f"train records of step {removed['step']}"


def shorten_record(run: Path, store: Path, rng: random.Random) -> str:
    """Half of a loss, in a record that claims to be about fewer steps."""
    records = read_records(run)
    record = rng.choice([record for record in records if record["kind"] == "train"])
    record["loss/total"] /= 2
    del record["grad_norms"][0]
    write_records(run, records)
    return f"train records of step {record['step']}"


def forge_record(run: Path, store: Path, rng: random.Random) -> str:
    """A better record before the true one, so that readers who take the last see nothing."""
    records = read_records(run)
    place = rng.choice([place for place, record in enumerate(records) if record["kind"] in ("train", "validation")])
    group = {"train": "loss", "validation": "validation"}[records[place]["kind"]]
    records.insert(place, {**records[place], f"{group}/total": 0.1})
    write_records(run, records)
    return f"{records[place]['kind']} records of step {records[place]['step']}"


def change_json(run: Path, store: Path, rng: random.Random) -> str:
    exits = {"code": 75, "step": 9, "cause": "stopped", "time": 1.0}
    name, values = rng.choice([("exit.json", exits), ("startup.json", {"world_size": 64, "git": "x", "added": 1})])
    key = rng.choice(sorted(values))
    (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | {key: values[key]}))
    return f"{name}: "


def add_file(run: Path, store: Path, rng: random.Random) -> str:
    (rng.choice(checkpoints(run)) / "tokenizer" / "added.py").write_text("print()")
    return "not in its manifest, tokenizer/added.py"


def remove_checkpoints(run: Path, store: Path, rng: random.Random) -> str:
    for folder in checkpoints(run)[rng.randrange(2) :]:
        shutil.rmtree(folder)
    return "checkpoint of step 8: is missing"


def remove_checkpoint_with_its_record(run: Path, store: Path, rng: random.Random) -> str:
    shutil.rmtree(run / "checkpoints/step-00000008")
    write_records(run, [one for one in read_records(run) if (one["kind"], one["step"]) != ("checkpoint", 8)])
    return "checkpoint of step 8: was due, but has no record"


def cut_run(run: Path, store: Path, rng: random.Random) -> str:
    """The run ends after step 6: nothing later is left, the report of its end included."""
    write_records(run, [record for record in read_records(run) if record["step"] <= 6])
    shutil.rmtree(run / "checkpoints/step-00000008")
    (run / "exit.json").unlink()
    os.utime(run / "run.lock", (0, 0))  # within seconds of its release, a new start may be about to fill it
    return "exit.json: is missing"


def change_skips(run: Path, store: Path, rng: random.Random) -> str:
    """A skip in the records alone, as where `skipped_steps.jsonl` was cut."""
    records = read_records(run)
    write_records(run, [*records[:-1], {"kind": "skip", "step": 5, "time": 1e9, "reason": "spike"}, records[-1]])
    return "skipped_steps.jsonl: has "


def damage_record(run: Path, store: Path, rng: random.Random) -> str:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    place = rng.randrange(1, len(lines))
    lines[place] = lines[place][: rng.randrange(1, len(lines[place]) - 2)] + b"\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    return f"line {place + 1}: "


def cut_records(run: Path, store: Path, rng: random.Random) -> str:
    write_records(run, read_records(run)[: -rng.randint(1, 5)])
    return "expected end"


def change_setting(run: Path, store: Path, rng: random.Random) -> str:
    key, old, new = rng.choice(
        [
            ("optim.lr", "lr: 0.003", "lr: 0.002"),
            ("run.seed", "seed: 3", "seed: 4"),
            ("optim.weight_decay", "weight_decay: 0.01", "weight_decay: 0.02"),
            ("train.global_batch_size", "global_batch_size: 8", "global_batch_size: 16"),
            ("optim.clip_norm", "clip_norm: 1.0", "clip_norm: 2.0"),
        ]
    )
    path = run / "config.yaml"
    text = path.read_text()
    assert text.count(old) == 1, (old, text)
    path.write_text(text.replace(old, new))
    return key


def _drawn(run: Path, store: Path) -> int:
    """A training sample of one of the run's last steps."""
    config, split = load_config(run / "config.yaml", may_extend=False), Store.open(store).split("train")
    return int(SampleOrder(split.lengths, config.run.seed, config.data.window).take(60, 1)[0])


def change_sample(run: Path, store: Path, rng: random.Random, kind: str = "", rehash: bool = False) -> str:
    """A sample's tokens or latents, in the first shard; with `rehash`, all hashes follow, also those of the records."""
    kind = kind or rng.choice(["tokens", "latents"])
    path, sample = store / f"train-00000.{kind}.npy", _drawn(run, store)
    offsets = np.load(store / "train-00000.offsets.npy")
    array = np.load(path)
    place = int(offsets[sample]) if kind == "tokens" else sample
    array[place] = array[place - 1]
    np.save(path, array)
    if not rehash:
        return f"train-00000.{kind}.npy"
    identity = update_store_manifest(store, path)
    records = read_records(run)
    for record in records:
        if "data_manifest" in record:
            record["data_manifest"] = identity
    write_records(run, records)
    report = json.loads((run / "startup.json").read_text())
    (run / "startup.json").write_text(json.dumps(report | {"data_manifest": identity}))
    return "the start that saved it: data_manifest"


def change_sample_and_manifest(run: Path, store: Path, rng: random.Random) -> str:
    change_sample(run, store, rng, "tokens")
    update_store_manifest(store, store / "train-00000.tokens.npy")
    return "the data of step"


def update_store_manifest(store: Path, path: Path) -> str:
    manifest = json.loads((store / "manifest.json").read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    shard["files"][path.name.split(".", 1)[1]]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    (store / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (store / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    return digest


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def flip_weight_byte(run: Path, store: Path, rng: random.Random) -> str:
    path = rng.choice(checkpoints(run)) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-rng.randint(1, 4000)] ^= 1
    path.write_bytes(content)
    return f"{path.parent.name}/model.safetensors"


def change_weight(run: Path, rng: random.Random, rehash: bool = False, by: float = 1e-5) -> str:
    """One weight, by the last bits of its float or what is given, with the manifest of the checkpoint."""
    folder = rng.choice(checkpoints(run)[1:] if rehash else checkpoints(run))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = rng.choice(sorted(name for name in tensors if tensors[name].size > 8))
    tensors[name].reshape(-1)[rng.randrange(8)] += by
    save_file(tensors, path)
    digest = _reseal(folder, path)
    if not rehash:
        return f"{folder.name}: is not the checkpoint"
    records = read_records(run)
    for record in records:
        if record["kind"] == "checkpoint" and record["step"] == int(folder.name[5:]):
            record["sha256"] = digest
    write_records(run, records)
    return f"{folder.name}: model/{name}"


def change_state(run: Path, store: Path, rng: random.Random) -> str:
    folder = rng.choice(checkpoints(run))
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"tokens_seen": ', '"tokens_seen": 1'))
    _reseal(folder, path)
    return f"{folder.name}: is not the checkpoint"


def _reseal(folder: Path, path: Path) -> str:
    replace_file(folder, path.name, path.read_bytes())
    return sha256(folder / "manifest.json")


def swap_checkpoints(run: Path, store: Path, rng: random.Random) -> str:
    first, second = rng.sample(checkpoints(run), 2)
    other = first.with_name("other")
    first.rename(other)
    second.rename(first)
    other.rename(second)
    return f"{first.name}: expected the step of its name, found step {int(second.name[5:])}"


def copy_checkpoint(run: Path, store: Path, rng: random.Random) -> str:
    """A checkpoint of the run, presented as one of a step that has none."""
    shutil.copytree(rng.choice(checkpoints(run)), run / "checkpoints" / "step-00000007")
    return "step-00000007: expected the step of its name"


def change_recorded_setting(run: Path, store: Path, rng: random.Random) -> str:
    """The learning rate, wherever it is written, as if the run had another one."""
    new = 0.003 * (1 + rng.random())
    records = read_records(run)
    for record in records:
        if "config" in record:
            record["config"]["optim"]["lr"] = new
    write_records(run, records)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.003", f"lr: {new!r}"))
    return "the start that saved it: optim.lr"


FOUND_BY_HASHES: dict[str, Tampering] = {
    "damaged record": damage_record,
    "cut records": cut_records,
    "setting": change_setting,
    "sample": change_sample,
    "sample and manifest": change_sample_and_manifest,
    "weight byte": flip_weight_byte,
    "weight and manifest": lambda run, store, rng: change_weight(run, rng),
    "state and manifest": change_state,
    "swapped checkpoints": swap_checkpoints,
    "checkpoint of no step": copy_checkpoint,
    "removed record": remove_record,
    "recorded setting": change_recorded_setting,
    "sample and all hashes": lambda run, store, rng: change_sample(run, store, rng, rehash=True),
    "shortened record": shorten_record,
    "forged record": forge_record,
    "changed reports": change_json,
    "added file": add_file,
    "removed checkpoints": remove_checkpoints,
    "removed checkpoint and record": remove_checkpoint_with_its_record,
    "cut run": cut_run,
    "skipped steps": change_skips,
}
# Hashes and records are consistent, so only the recomputation finds these.
FOUND_BY_RECOMPUTATION: dict[str, Tampering] = {
    "metric": change_metric,
    "gradient norm": change_norm,
    "weight": lambda run, store, rng: change_weight(run, rng, rehash=True),
    "weight of NaN": lambda run, store, rng: change_weight(run, rng, rehash=True, by=math.nan),
    "infinite weight": lambda run, store, rng: change_weight(run, rng, rehash=True, by=-math.inf),
}
