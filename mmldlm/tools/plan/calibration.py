"""`--device this`: step times of this machine, by a few coefficients that are fitted to real steps of small networks.

A step of one process takes

    a FLOPs of products + b FLOPs of attention + c bytes of traffic + d kernels + e updated parameters + f

and under an engine with W processes

    g (the terms a to d) + e updated parameters + h bytes of collectives + i blocks x micro-batches + f

with coefficients of their own for each engine and W: g is how much longer computing takes where processes share cores,
h gloo's bandwidth, i what the engine does for each block. All are at least 0, and minimize the relative error. The
interval is that of the calibration itself: each network is left out in turn and predicted from the others, and the
largest error of n counts. A further network of the same kind should be inside with probability n / (n + 1): the
jackknife, see Barber et al. (arXiv 1905.02928), who prove less for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import mmldlm
from mmldlm.config import load_config
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE
from mmldlm.errors import DataError, MmldlmError, UsageError
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.plan.costs import StepCosts, Work, step_costs
from mmldlm.utils.cpu import processor_name
from mmldlm.utils.files import write_atomically
from mmldlm.utils.progress import Progress

ENGINES = (DDP, FSDP2, "zero1", "zero2", "zero3")
STEPS = 7  # of each network, the first of which is not timed
ROUNDS = 2  # of all engines, minutes apart, as machines are faster at times
LAUNCHER_FILES = Path(mmldlm.__file__).parent / "project"  # with accelerate_configs/ and ds_configs/
Network = tuple[int, int, int, int, str]
# Width, depth, tokens of a step on a rank, micro-batches, activation checkpointing.
NETWORKS: Sequence[Network] = (
    (64, 2, 384, 1, "none"),
    (64, 6, 1024, 1, "none"),
    (96, 8, 192, 1, "none"),
    (128, 3, 1536, 1, "none"),
    (160, 5, 384, 1, "none"),
    (192, 2, 1024, 1, "none"),
    (256, 3, 320, 1, "none"),
    (256, 5, 768, 1, "none"),
    (224, 4, 256, 1, "full"),
    (128, 5, 768, 2, "none"),
    (160, 2, 1536, 4, "selective"),
)


@dataclass(frozen=True)
class Fit:
    """Coefficients of an engine, and the factor within which each network was predicted when it was left out."""

    coefficients: list[float]
    factor: float


class Calibration:
    """Coefficients by "ENGINE xW"; the file at `path` keeps them."""

    def __init__(self, path: Path, networks: Sequence[Network] = NETWORKS):
        self.path, self.networks = path, networks
        self.machine: dict[str, Any] = {
            "cpu": processor_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        self._costs: dict[int, list[StepCosts]] = {}  # of the networks, by world size
        self.machine["networks"] = [list(network) for network in networks]
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            kept = content.get("fits", {}) if content.get("machine") == self.machine else {}
            self.fits = {name: Fit(**fit) for name, fit in kept.items()}
        except (ValueError, TypeError, AttributeError):
            raise DataError(f"{path}: is no calibration; remove it to measure again") from None

    def calibrate(self, store: str | Mapping[str, float], engines: Sequence[str], world_size: int) -> None:
        """Measure what is missing for these engines and processes, on a store."""
        single = f"{SINGLE} x1"
        launches = {single: (SINGLE, 1)} | {f"{engine} x{world_size}": (engine, world_size) for engine in engines}
        missing = {name: launch for name, launch in launches.items() if name not in self.fits}
        opened: Store = open_data(store)
        jobs = {world: jobs_of(self.networks, store, opened, world) for world in (1, world_size)}
        seconds: dict[str, list[dict[str, list[float]]]] = {name: [] for name in missing}
        with Progress() as progress:
            for number in range(1, ROUNDS + 1):
                for name, (engine, world) in missing.items():
                    text = f"calibrating {engine} with {world} processes on {len(self.networks)} networks"
                    progress.phase(f"{text}, round {number} of {ROUNDS}")
                    seconds[name].append(timed(engine, world, jobs[world]))
            for name, (engine, world) in missing.items():
                if world not in self._costs:
                    progress.phase(f"recording the kernels of {len(self.networks)} networks for {world} processes")
                    configs = [load_config(None, settings) for _, settings in jobs[world]]
                    self._costs[world] = [step_costs(config, opened, world, "cpu") for config in configs]
                times = [median(chain(*(of[job] for of in seconds[name]))) for job, _ in jobs[world]]
                rows = [self._row(engine, cost) for cost in self._costs[world]]
                self.fits[name] = fit(np.array(rows), np.array(times))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": self.machine, "fits": {key: vars(value) for key, value in self.fits.items()}}
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")

    def predict(self, engine: str, costs: StepCosts) -> tuple[float, float, float]:
        """Return the seconds of a step: predicted, and the ends of the interval."""
        fitted = self.fits[f"{engine} x{costs.world_size}"]
        seconds = float(np.dot(fitted.coefficients, self._row(engine, costs)))
        return seconds, seconds / fitted.factor, seconds * fitted.factor

    def _row(self, engine: str, costs: StepCosts) -> list[float]:
        """Return what the coefficients are multiplied by."""
        if engine == SINGLE:
            return [*_work(costs), costs.updated(engine), 1.0]
        compute = float(np.dot(self.fits[f"{SINGLE} x1"].coefficients[:4], _work(costs)))
        blocks = costs.depth * costs.micro_batches
        return [compute, costs.updated(engine), sum(costs.traffic(engine).values()), blocks, 1.0]


def _work(costs: StepCosts) -> list[float]:
    def of(work: Work) -> tuple[float, float, float, float]:
        return work.products, work.attention + work.attention_backward, work.traffic, work.kernels

    return [median(values) for values in zip(*map(of, costs.work), strict=True)]


def fit(rows: np.ndarray, seconds: np.ndarray) -> Fit:
    """Fit coefficients of at least 0 to rows [networks, terms] by relative error, and their leave-one-out factor."""
    errors = []
    for left_out in range(len(rows)):
        others = np.arange(len(rows)) != left_out
        predicted = rows[left_out] @ non_negative(rows[others], seconds[others])
        errors.append(abs(np.log(predicted / seconds[left_out])))
    return Fit(non_negative(rows, seconds).tolist(), float(np.exp(max(errors))))


def non_negative(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the coefficients of at least 0 with the least relative squared error: the best subset of the terms."""
    scaled = rows / seconds[:, None]
    scale = np.linalg.norm(scaled, axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for subset in map(list, combinations(range(rows.shape[1]), count)):
            found, *_ = np.linalg.lstsq(scaled[:, subset] / scale[subset], np.ones(len(rows)), rcond=None)
            error = float(((scaled[:, subset] / scale[subset] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(rows.shape[1]), error
                best[subset] = found / scale[subset]
    return best


def jobs_of(
    networks: Sequence[Network], location: str | Mapping[str, float], store: Store, world_size: int
) -> list[tuple[str, list[str]]]:
    """Return the networks as (name, settings), sized by the lengths of the store."""
    length = store.split("train").mean_length + store.manifest.latent.tokens
    return [(name_of(network), network_settings(location, network, length, world_size)) for network in networks]


def name_of(network: Network) -> str:
    return "{} x {}, {}, {}, {}".format(*network)


def network_settings(
    location: str | Mapping[str, float], network: Network, length: float, world_size: int
) -> list[str]:
    """Return the settings of a network that has about `tokens` in each of a rank's steps."""
    width, depth, tokens, micro, checkpointing = network
    samples = max(1, round(tokens / length / micro))
    batch = f"global_batch_size: {samples * micro * world_size}, micro_batch_size: {samples}"
    key = "path" if isinstance(location, str) else "mixture"
    return [
        f"data={{{key}: {json.dumps(location)}, window: 1}}",  # steps of equal size
        f"model={{width: {width}, depth: {depth}, num_heads: {width // 32}}}",
        f"train={{steps: {STEPS}, {batch}}}",
        f"memory.activation_checkpointing={checkpointing}",
        "compile.scope=none",
        "precision=fp32",
    ]


def timed(
    engine: str, world_size: int, jobs: Sequence[tuple[str, list[str]]], memory: bool = False, **variables: str
) -> dict[str, Any]:
    """Run all jobs in one launch and return their results, see `timed_steps`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        out = folder / "out.jsonl"
        arguments = ["-m", "mmldlm.tools.plan.timed_steps", str(folder / "jobs.json"), str(out)]
        arguments += ["--memory"] * memory
        command = [sys.executable, *arguments]
        if engine != SINGLE:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
            command = [*launcher, *arguments]
        if engine not in (SINGLE, DDP):
            command += ["--accelerate_config", str(launcher_file(engine, folder))]
        environment = {"OMP_NUM_THREADS": str(threads_of(world_size)), "PLAN_RUN_DIR": str(folder / "runs")}
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment, **variables}, check=False
        )
        if done.returncode:
            errors = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
            raise MmldlmError(f"{engine} with {world_size} processes did not run: {(errors or ['no message'])[0]}")
        return dict(json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())


def threads_of(world_size: int) -> int:
    """Return the threads of each process, which share those of PyTorch here."""
    return max(1, torch.get_num_threads() // world_size)


def launcher_file(engine: str, folder: Path, **values: Any) -> Path:
    """Write the accelerate file of an engine, and its DeepSpeed file, into `folder`; `values` replace entries."""
    tree = read_yaml(LAUNCHER_FILES / "accelerate_configs" / f"{engine}.yaml")
    if "deepspeed_config" in tree:
        name = Path(tree["deepspeed_config"]["deepspeed_config_file"]).name
        write_atomically(folder / "deepspeed.json", (LAUNCHER_FILES / "ds_configs" / name).read_text(encoding="utf-8"))
        tree["deepspeed_config"]["deepspeed_config_file"] = str((folder / "deepspeed.json").resolve())
        if values.get("num_machines", 1) > 1:
            tree["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    path = folder / "accelerate.yaml"
    write_atomically(path, json.dumps({**tree, **values}, indent=1) + "\n")  # JSON is YAML
    return path


def calibration_path() -> Path:
    """Return the file that keeps the calibration: in $MMLDLM_CALIBRATION, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("MMLDLM_CALIBRATION", cache / "mmldlm" / "calibration.json"))


def check_cpu() -> None:
    """Raise `UsageError` on a machine with a GPU, whose steps a calibration of the host does not tell."""
    if torch.cuda.is_available():
        raise UsageError("--device: this is a CPU's calibration, found a GPU; expected its name, such as h200")
