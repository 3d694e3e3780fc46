"""Record what the commands of one source tree compute and write, as JSON.

    python tests/golden/record.py TREE OUT.json [--only PART ...]

Only the command line is used, so that one recorder serves every commit whose verbs are the same. Floating-point values
are recorded as hexadecimal strings: they are equal for equal code on the same machine, and differ between kinds of CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
TIMEOUT_S = 900
WORDS = [
    "rose",
    "tulip",
    "soil",
    "water",
    "seed",
    "wave",
    "tide",
    "salt",
    "reef",
    "whale",
    "flour",
    "oven",
    "knife",
    "butter",
    "simmer",
    "chord",
    "tempo",
    "violin",
    "drum",
]

RUN = """
run: {dir: RUN, seed: 3}
data: {path: STORE, num_workers: 0}
model: {depth: 2, width: 64, num_heads: 2, conditioning_width: 32, modulation_rank: 8}
mode: {l2t: 0.4, t2l: 0.3, joint: 0.3}
loss: {latent_weight: 0.1}
optim: {lr: 1e-3}
train: {steps: 20, global_batch_size: 8, micro_batch_size: 2}
log: {every: 1, tensorboard: false}
validation: {every: 10, samples: 16, text_samples: 2}
checkpoint: {every_steps: 10}
sampling: {steps: 3}
"""

# Name of a curve: settings on top of RUN.
CURVES = {
    "l2t": ["mode={l2t: 1}"],
    "t2l": ["mode={t2l: 1}"],
    "joint": ["mode={joint: 1}"],
    "mixed": [],
    "mode_schedule": ["mode_schedule={10: {l2t: 0.7, joint: 0.3}}"],
    "accumulation": ["train.global_batch_size=12", "train.batch_schedule={10: {global_batch_size: 24}}"],
    "ema": ["ema.decay=0.9"],
    "dropout": ["model.dropout=0.1"],
    "muon": ["optim.name=muon", "optim.lr=1e-2"],
    "v_huber": ["latent.prediction=v", "loss.latent=huber"],
    "epsilon_mse": ["latent.prediction=epsilon", "loss.latent=mse", "latent.noise_schedule=rectified_flow"],
    "exact_masks": ["text.masks=exact", "text.time_sampling=mode"],
    "bf16": ["precision=bf16"],
    "checkpointing": ["memory.activation_checkpointing=full"],
    "selective": ["memory.activation_checkpointing=selective"],
    "guard": ["guard.grad_norm_spike=1.5", "optim.clip_norm=0.1"],
    "frozen": ["freeze=[latent_stream]"],
    "plateau": ["schedule.lr=plateau", "schedule.patience=2", "optim.warmup_steps=3"],
    "tensorboard": ["log.tensorboard=true", "log.figures_every=10", "validation.quality_every=10", "ema.decay=0.5"],
}
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")

# Command, arguments. STORE, RUN and FOLDER are replaced.
BAD = [
    ["train"],
    ["train", "/nowhere.yaml"],
    ["train", "CONFIG", "CONFIG"],
    ["train", "CONFIG", "optim.lrr=1"],
    ["train", "CONFIG", "train.steps=many"],
    ["train", "CONFIG", "train.steps=0"],
    ["train", "CONFIG", "optim.lr=-1"],
    ["train", "CONFIG", "optim.lr=true"],
    ["train", "CONFIG", "data.path=/nowhere"],
    ["train", "CONFIG", "data.path="],
    ["train", "CONFIG", "resume=/nowhere"],
    ["train", "CONFIG", "attention.backend=varlen"],
    ["train", "CONFIG", "mode={l2t: 2}"],
    ["train", "CONFIG", "mode={other: 1}"],
    ["train", "CONFIG", "freeze=[nothing]"],
    ["train", "CONFIG", "model.width=63"],
    ["train", "CONFIG", "train.micro_batch_size=3"],
    ["train", "CONFIG", "precision=fp8"],
    ["train", "CONFIG", "loss.huber_delta=0.5"],
    ["train", "CONFIG", "run.dir=/proc/nowhere"],
    ["train", "CONFIG", "extends=nothing.yaml"],
    ["train", "CONFIG", "--deepspeed_config", "/nowhere.json"],
    ["train", "DUPLICATE"],
    ["train", "MISSPELT"],
    ["train", "NOTYAML"],
    ["config", "/nowhere.yaml"],
    ["data", "info", "/nowhere"],
    ["data", "verify", "/nowhere"],
    ["prepare"],
    ["prepare", "/nowhere.txt", "--out", "FOLDER/x"],
    ["prepare", "EMPTY", "--out", "FOLDER/x"],
    ["prepare", "JSONL", "--field", "other", "--out", "FOLDER/x"],
    ["prepare", "TEXT", "--out", "STORE"],
    ["prepare", "TEXT", "--out", "FOLDER/x", "--vocab-size", "3"],
    ["sample", "/nowhere"],
    ["sample", "RUN", "--mode", "other"],
    ["evaluate", "/nowhere"],
    ["evaluate", "RUN", "--samples", "0"],
    ["monitor", "/nowhere", "--once"],
    ["compare", "/nowhere"],
    ["train", "/nowhere.yaml", "--check"],
    ["nothing"],
]
VERBS = (
    "new,prepare,convert,data,data info,data verify,data sample,train,sample,score,evaluate,export,"
    "checkpoints,verify,explain,rewind,monitor,compare,config"
)
# A run in which everything happens that can happen beside its steps.
FEATURES = [
    "log={every: 1, tensorboard: true, figures_every: 10}",
    "validation={every: 5, samples: 16, text_samples: 2, quality_every: 10, quality_samples: 4}",
    "checkpoint={every_steps: 5, keep_last: 4, keep_best: 1}",
    "profile.steps=[3, 4]",
    "guard.grad_norm_spike=50",
    "ema.decay=0.5",
]


class Recorder:
    """Runs the commands of `tree` in a scratch `folder`."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree.resolve()
        self.folder = folder
        self.text = folder / "corpus.txt"
        self.text.write_text("\n".join(_documents(600)) + "\n", encoding="utf-8")
        self.store = folder / "store"
        self.config = folder / "config.yaml"
        self.config.write_text(self._filled(RUN), encoding="utf-8")

    def _filled(self, text: str) -> str:
        return text.replace("RUN", str(self.folder / "runs/none")).replace("STORE", str(self.store))

    def run(self, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        """Run `command` from the tree's root, on one thread."""
        environment = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", **env}
        return subprocess.run(
            command, cwd=self.tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def mmldlm(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-m", "mmldlm.cli", *map(str, arguments)])

    def succeed(self, done: subprocess.CompletedProcess[str]) -> str:
        if done.returncode:
            raise RuntimeError(f"{' '.join(done.args)}\nexit code {done.returncode}\n{done.stderr[-3000:]}")
        return done.stdout

    def prepare(self, out: Path, *arguments: object) -> None:
        options = ["--vocab-size", 300, "--channels", 8, "--validation-fraction", 0.1, "--test-fraction", 0.1]
        self.succeed(self.mmldlm("prepare", *arguments, "--out", out, *options))

    # The parts, each a function from nothing to JSON values.

    def curves(self) -> dict[str, Any]:
        """Loss, gradient norm and learning rate of each step, and the validation records."""
        return {name: self.curve(name, settings) for name, settings in CURVES.items()}

    def curve(self, name: str, settings: list[str], launcher: list[str] | None = None) -> list[dict[str, str]]:
        folder = self.folder / "runs" / name
        start = launcher or [sys.executable]
        command = [*start, "-m", "mmldlm.train", str(self.config), f"run.dir={folder}", *settings]
        self.succeed(self.run(command))
        return _curve(folder)

    def engines(self) -> dict[str, Any]:
        """The curve of the mixed run on two processes."""
        result = {}
        for engine in ENGINES:
            options = ["--num_processes", "2", "--main_process_port", str(_free_port())]
            file = f"accelerate_configs/{engine}.yaml"
            launcher = [str(BIN / "accelerate"), "launch", "--config_file", file, *options]
            result[engine] = self.curve(f"engine-{engine}", ["distributed.timeout_s=300"], launcher)
        return result

    def resumed(self) -> dict[str, Any]:
        """A run of 20 steps whose second half is resumed from step 10."""
        folder = self.folder / "runs/resumed"
        self.curve("resumed", ["ema.decay=0.9"])
        whole = _curve(folder)
        for checkpoint in (folder / "checkpoints").glob("*20*"):
            shutil.rmtree(checkpoint)
        self.curve("resumed", ["ema.decay=0.9"])
        resumed = _curve(folder)
        return {"curve": resumed, "equal to the run without a break": resumed == whole}

    def checkpoint(self) -> dict[str, Any]:
        """Names of a run's files and of its tensors with types and shapes."""
        folder = self.folder / "runs/contents"
        self.curve("contents", ["ema.decay=0.9", "log.tensorboard=true"])
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        tensors = {str(path.relative_to(folder)): _header(path) for path in sorted(folder.rglob("*.safetensors"))}
        jsons = {name: _keys(json.loads((folder / name).read_text())) for name in names if name.endswith(".json")}
        kinds: dict[str, set[str]] = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            kinds.setdefault(record["kind"], set()).update(record)
        return {
            "files": [name if "tfevents" not in name else "tensorboard/EVENTS" for name in names],
            "tensors": tensors,
            "keys": jsons,
            "metrics": {kind: sorted(keys) for kind, keys in kinds.items()},
        }

    def features(self) -> dict[str, Any]:
        """A run with every feature on: its curve, files and kinds of records, and whether its resumes repeat it."""
        folder = self.folder / "runs/features"
        whole = self.curve("features", [*FEATURES, f"checkpoint.mirror={self.folder / 'mirror'}"])
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        kinds = sorted({json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()})
        equal = {}
        for step in (15, 10, 5):
            for checkpoint in (folder / "checkpoints").glob("step-*"):
                if int(checkpoint.name.removeprefix("step-")) > step:
                    shutil.rmtree(checkpoint)
            equal[step] = self.curve("features", FEATURES) == whole
        names = [name for name in files if "tfevents" not in name]
        return {"curve": whole, "files": names, "kinds": kinds, "resumed from": equal}

    def stores(self) -> dict[str, Any]:
        """SHA-256 of the files of stores prepared from several formats, with 1 and with 3 processes."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        documents = _documents(600)
        (self.folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        pq.write_table(pa.table({"text": documents}), self.folder / "c.parquet")
        result = {}
        inputs = {"text": self.text, "jsonl": self.folder / "c.jsonl", "parquet": self.folder / "c.parquet"}
        for kind, path in inputs.items():
            for processes in (1, 3):
                out = self.folder / f"stores/{kind}-{processes}"
                self.prepare(out, path, "--part-bytes", 4096, "--processes", processes)
                result[f"{kind}, {processes} processes"] = _hashes(out)
        options = {
            "words": ["--tokenizer", "words"],
            "stretches": ["--latent-tokens", "2"],
            "near duplicates": ["--near-duplicates"],
            "cut": ["--max-length", "12", "--over-length", "cut"],
            "split": ["--max-length", "12"],
        }
        for name, arguments in options.items():
            out = self.folder / f"stores/{name}"
            self.prepare(out, self.text, *arguments)
            result[name] = _hashes(out)
        return result

    def commands(self) -> dict[str, Any]:
        """What sample, evaluate and compare compute from a run, and the keys of what they write."""
        self.curve("sampled", ["ema.decay=0.5"])
        run = self.folder / "runs/sampled"
        result: dict[str, Any] = {}
        sample = ["sample", run, "--seed", 1]
        for name, arguments in {
            "joint": ["--mode", "joint", "--count", 3],
            "l2t": ["--mode", "l2t", "--text", "The rose and the tide."],
        }.items():
            result[f"sample {name}"] = self.succeed(self.mmldlm(*sample, *arguments)).splitlines()
        self.succeed(self.mmldlm("evaluate", run, "--samples", 40, "--texts", 12))
        evaluated = json.loads((run / "evaluation.json").read_text())
        evaluated.pop("measured_by", None)  # has the hash of the code
        result["evaluate"] = _hexed(evaluated)
        result["compare keys"] = _keys(json.loads(self.succeed(self.mmldlm("compare", run, run, "--json"))))
        return result

    def configs(self) -> dict[str, Any]:
        """Values and origins of all presets."""
        presets = sorted((self.tree / "configs").glob("*.yaml"))
        return {path.name: json.loads(self.succeed(self.mmldlm("config", f"configs/{path.name}", "--json")))
                for path in presets}  # fmt: skip

    def helps(self) -> dict[str, list[str]]:
        """The options of all commands, without their descriptions."""
        result = {}
        for verb in VERBS.split(","):
            words = (
                self.mmldlm(*verb.split(), "--help")
                .stdout.replace("[", " ")
                .replace("]", " ")
                .replace(",", " ")
                .split()
            )
            result[verb] = sorted({word for word in words if word.startswith("--")})
        return result

    def errors(self) -> dict[str, Any]:
        """Exit codes of bad commands, and how many lines of complaint each had."""
        run = self.folder / "runs/errors"
        self.curve("errors", ["train.steps=2", "validation.every=0"])
        files = {
            "DUPLICATE": "run: {dir: x}\nrun: {dir: y}\n",
            "MISSPELT": "optimm: {lr: 1}\n",
            "NOTYAML": "a: [1\nb: }",
            "EMPTY": "",
            "JSONL": '{"text": "one"}\n',
        }
        names = {"CONFIG": self.config, "STORE": self.store, "RUN": run, "FOLDER": self.folder, "TEXT": self.text}
        for name, content in files.items():
            suffix = {"EMPTY": ".txt", "JSONL": ".jsonl"}.get(name, ".yaml")
            names[name] = self.folder / (name.lower() + suffix)
            names[name].write_text(content)

        def one(command: list[str]) -> dict[str, Any]:
            words = []
            for word in command:
                head, _, tail = word.partition("/")
                words.append(str(names[head]) + (f"/{tail}" if tail else "") if head in names else word)
            done = self.mmldlm(*words)
            lines = [line for line in done.stderr.splitlines() if "error:" in line]
            return {"code": done.returncode, "complaints": len(lines), "traceback": "Traceback" in done.stderr}

        with ThreadPoolExecutor(2) as pool:
            return dict(zip(map(" ".join, BAD), pool.map(one, BAD), strict=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _documents(count: int) -> list[str]:
    draw = random.Random(0)
    return ["The " + " ".join(draw.choices(WORDS, k=draw.choice([4, 6, 9, 15, 25]))) + "." for _ in range(count)]


def _hexed(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hexed(inner) for key, inner in value.items()}
    return [_hexed(inner) for inner in value] if isinstance(value, list) else value


def _curve(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    timed = ("speed/", "memory/", "time", "data/", "host/", "cpu/", "system/", "hash")
    records = [record for record in map(json.loads, lines) if record["kind"] in ("train", "validation")]
    return [_hexed({key: value for key, value in each.items() if not key.startswith(timed)}) for each in records]


def _header(path: Path) -> dict[str, Any]:
    """Types and shapes of the tensors in a safetensors file, by name."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return {name: [entry["dtype"], entry["shape"]] for name, entry in header.items() if name != "__metadata__"}


def _keys(value: Any) -> Any:
    """The keys of nested mappings; a list stands for its first element."""
    if isinstance(value, dict):
        return {key: _keys(inner) for key, inner in sorted(value.items())}
    return [_keys(value[0])] if isinstance(value, list) and value else None


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a store; its manifest, which names the input's path, without the path's folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.sha256")
    scratch = str(folder.parent.parent).encode()
    contents = ((path, path.read_bytes().replace(scratch, b"FOLDER")) for path in files)
    return {str(path.relative_to(folder)): hashlib.sha256(content).hexdigest() for path, content in contents}


PARTS = ("configs", "helps", "errors", "stores", "checkpoint", "curves", "resumed", "features", "engines", "commands")


def record(tree: Path, folder: Path, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Record `parts` of the source tree `tree`, with scratch files in `folder`."""
    recorder = Recorder(tree, folder)
    recorder.prepare(recorder.store, recorder.text)
    result = {}
    for part in parts:
        print(f"{tree.name}: {part}", flush=True)
        result[part] = getattr(recorder, part)()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = record(options.tree, Path(folder), tuple(options.only))
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
