"""Stages of `scripts/gpu_check.sh`, which measure what only a GPU can show. Each part has its own time limit.

    python -m benchmarks.gpu_check STAGE --out FOLDER --stores FOLDER [--tiny]

Writes FOLDER/STAGE.json after each part, so that a time limit costs only the part that it cuts off. `graphs` and `best`
take some parts from other stages, and write these into the files of the other stages. `--tiny` shows on any machine
that a stage runs. Its result is never committed. The bars are in `gpu_bars.py`.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from packaging.requirements import Requirement

from benchmarks.common.counting import covered
from benchmarks.common.report import ROOT, circumstances, plain_parser, print_status, write_json
from benchmarks.common.task import SHAPES, Kind, device
from benchmarks.gpu_replays import attention, blocks, replay
from benchmarks.memory import GPU_SETTINGS, SETTINGS, measure
from mmldlm.distributed.launch import DDP
from mmldlm.errors import DataError
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.loading.load import load_run
from mmldlm.model.flops import peak_flops
from mmldlm.utils.versions import outdated

# Seconds of a stage, since a command may take 600, and of the longest stages.
BUDGET_S, BUDGETS_S = 555.0, {"best": 700.0, "speedrun": 700.0}
STARTED = time.perf_counter()
deadline = STARTED + BUDGET_S  # when the running part must end
PROJECT, _, _ = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")
DEPENDENCIES = [Requirement(line) for line in re.findall(r'(?m)^    "(.+>=.+?)"', PROJECT)]
TRAIN = """
import gc
import sys
import torch
from benchmarks.memory import train
from mmldlm.config import load_config
runs, failed = [[]], []
for argument in sys.argv[1:]:
    runs.append([]) if argument == "--" else runs[-1].append(argument)
for settings in runs:
    try:
        train(load_config(None, settings))
    except Exception as error:
        failed.append(f"{settings}: {type(error).__name__}: {error}")
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
sys.exit("\\n".join(failed) or 0)
"""
EAGER, COMPILED = "compile.scope=none", "compile.scope=regional"
SMALL = (
    "precision=bf16", "model={depth: 4, width: 256, num_heads: 4}", "log={every: 1, tensorboard: false}", EAGER
)  # fmt: skip
LEFT_OUT = "left out: no time"
TIMED_OUT = 124  # exit code of a command that outlasts its limit, like timeout(1)
Result = dict[str, Any]
Options = argparse.Namespace
TRACED = (24, 25)  # first and last traced step
MIN_RUN_S, MIN_PART_S = 60.0, 8.0  # a run or a part is left out if the stage has fewer seconds left
MAX_TRACE_BYTES = 15 * 2**20
LADDER_VARIANTS = ("reference", "reference-1-flash", "trainer", "trainer-compiled")
ENGINES = (DDP, "fsdp2", "zero1", "zero2", "zero3", "zero2_offload")
SIZES = {"24x1024": (24, 1024), "12x768": (12, 768), "24x2048": (24, 2048)}  # blocks, width
SPEEDRUN_S, SPEEDRUN_SAMPLES = 440.0, 1024  # seconds of the training's steps, and samples of a step
BUDGET_TOKENS = 32_768  # token budget of a micro-batch of documents or sentences


def left() -> float:
    """Return the seconds that the running part has left."""
    return deadline - time.perf_counter()


def run(command: Sequence[str], limit: float) -> tuple[int, str]:
    """Run a command. Return its output and exit code, which is 124 if it outlasts `limit` seconds or the stage."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, min(limit, left())), env=environment, cwd=ROOT
        )
    except subprocess.TimeoutExpired as error:
        return TIMED_OUT, (error.stdout or b"").decode(errors="replace")[-2000:]
    return done.returncode, done.stdout + done.stderr


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- smoke ----------------------------------------------------------------------------------------


def gpu_tests(_: Options) -> Result:
    """Run the tests that need a GPU."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    code, text = run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-n", "4", *files], 240
    )
    return {"exit": code, **({"tail": text[-3000:]} if code else {})}


def train(options: Options, *settings: str, engine: str = "", limit: float = 200, traces: str = "") -> Result:
    """Run a training in one process, and return its exit code, curve and numbers.

    Without `engine` and with checkpoints off, it does not save at its end, either.

    Args:
        options: Options of the stage.
        settings: key.sub=value of the run config.
        engine: Name of a file in accelerate_configs/; by default no launcher.
        limit: Seconds that the training may take.
        traces: Name for the copies of its traces in `options.out`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable]
        if engine:
            config = Path(temporary) / "config.yaml"
            config.write_text("{}\n")
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "mmldlm.train"]
            command += [str(config)]
            if engine != DDP:  # only torchrun selects it
                command += ["--accelerate_config", f"accelerate_configs/{engine}.yaml"]
        else:
            command += ["-c", TRAIN]
        start = time.perf_counter()
        code, text = run([*command, f"run.dir={folder}", *settings], limit)
        result = {"wall_s": round(time.perf_counter() - start, 1), **trained(options, folder, settings, code, text)}
        for trace in sorted(folder.glob("profile/*.json.gz")) if traces else []:
            shutil.copy(trace, options.out / f"{traces}-trace.json.gz")
    return result


def train_in_turns(options: Options, runs: dict[str, tuple[str, ...]]) -> Result:
    """Run trainings one after the other in one process, while there is time, and return each one's result."""
    with tempfile.TemporaryDirectory() as temporary:
        command, folders = [sys.executable, "-c", TRAIN], dict[str, Path]()
        for name, settings in runs.items():
            folders[name] = Path(temporary) / name.split()[0]  # "NAME later" continues in the folder of NAME
            command += ["--"] * (len(command) > 3) + [f"run.dir={folders[name]}", *settings]
        code, text = run(command, left() - 5)
        ended = {name for name, folder in folders.items() if (folder / "exit.json").exists()}
        good = {name for name in ended if not json.loads((folders[name] / "exit.json").read_text())["code"]}
        cut = [name for name in runs if code == TIMED_OUT and name not in ended]  # later runs did not begin
        results: Result = {
            name: trained(options, folders[name], settings, int(name not in good), text)
            for name, settings in runs.items()
            if name not in cut
        }
    return results | ({LEFT_OUT: cut} if cut else {})


def trained(options: Options, folder: Path, settings: Sequence[str], code: int, text: str) -> Result:
    """Return the exit code, curve and numbers of a run."""
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    named = [setting.replace(f"{options.stores.resolve()}/", "") for setting in settings]
    result: Result = {"exit": code, "settings": named}
    return result | ({"tail": text[-1500:]} if code else _numbers(records))


def _numbers(records: Sequence[Result]) -> Result:
    """Return a run's curve, and the numbers of its last full record."""
    steps = [record for record in records if "loss/total" in record]
    last = steps[-2 if len(steps) > 1 else -1]  # the last record may cover few steps, or traced ones
    numbers: Result = {"curve": [(record["step"], record["loss/total"]) for record in steps]}
    names = {"step_s": "speed/step_s", "tokens_per_s": "speed/tokens_per_s", "mfu": "speed/mfu"}
    numbers |= {name: last[key] for name, key in names.items() if key in last}
    numbers["data_wait_share"] = last["speed/data_wait_s"] / last["speed/step_s"]
    if "memory/cuda_peak_allocated_mib" in last:
        allocated = max(record["memory/cuda_peak_allocated_mib"] for record in steps)
        reserved = max(record["memory/cuda_peak_reserved_mib"] for record in steps)
        numbers |= {"peak_bytes": allocated * 2**20, "reserved_share": reserved / allocated}
    saved = [record for record in records if record.get("kind") == "checkpoint"]
    if saved:
        numbers |= {"first_stall_s": saved[0]["stall_s"], "written_s": [record["seconds"] for record in saved]}
    if len(saved) > 1:
        numbers["later_stall_s"] = saved[1]["stall_s"]
    return numbers


def data(options: Options, kind: Kind) -> str:
    """Return the setting for a store, and write the store unless `prepare` has done so."""
    return f"data.path={SHAPES['tiny' if options.tiny else 'gpu'].store(options.stores, kind).resolve()}"


def model(options: Options, size: str) -> str:
    depth, width = (2, 64) if options.tiny else SIZES[size]
    return f"model={{depth: {depth}, width: {width}, num_heads: {width // 64}}}"


def steps_of(options: Options, steps: int, samples: int) -> str:
    if options.tiny:
        steps, samples = min(steps, TRACED[1]), 2
    return f"train={{steps: {steps}, global_batch_size: {samples}}}"


QUIET = ("precision=bf16", "validation.every=0", "checkpoint.every_steps=0", "log={every: 10, tensorboard: false}")


def engines(options: Options, names: Sequence[str] = ENGINES, with_graphs: Sequence[str] = ()) -> Result:
    """Compare curves of one process without a launcher and under each engine, with validation and a checkpoint."""
    settings = (
        *SMALL,
        "train={steps: 8, global_batch_size: 16, micro_batch_size: 8}",
        "validation={every: 4, samples: 32}",
        "checkpoint.every_steps=8",
        data(options, "documents"),
    )
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as threads:  # nothing is timed here
        started = {"single": threads.submit(train, options, *settings)}
        for engine in names:
            given = settings + tuple(with_graphs if engine == DDP else ())
            started[engine] = threads.submit(train, options, *given, engine=engine)
        started["auto_micro_batch"] = threads.submit(train, options, *settings, "train.auto_micro_batch=true")
    return compared({name: run.result() for name, run in started.items()}, dict.fromkeys(started, "single"))


def worst(differences: Iterable[float]) -> float:
    """Return the largest difference, or NaN if one of them is NaN."""
    return max(differences, key=lambda difference: math.inf if math.isnan(difference) else difference)


def compared(runs: dict[str, Result], bases: dict[str, str]) -> Result:
    """Return the runs, how many failed, and each curve's largest relative difference from its base's curve."""
    differences = {}
    for name, base in bases.items():
        losses, others = (dict(runs.get(each, {}).get("curve", ())) for each in (name, base))
        if both := losses.keys() & others.keys():
            differences[name] = worst(abs(losses[step] / others[step] - 1) for step in both)
    failed = sum(runs[name]["exit"] != 0 for name in runs.keys() & bases.keys())
    largest = {"largest_difference": worst(differences.values())} if differences else {}
    return {"runs": runs, "failed": failed, "differences": differences, **largest}


# --- graphs, beside `gpu_replays.py` --------------------------------------------------------------


def graphs(value: str) -> tuple[str, ...]:
    """Return the setting for CUDA graphs, which do not exist on a CPU."""
    return (f"compile.graphs={value}",) if device().type == "cuda" else ()


def curves(options: Options) -> Result:
    """Compare curves with and without replayed steps, with recomputation, validations, checkpoints and a resume."""
    # A micro-batch has so many samples that few sizes occur, and most steps are replayed.
    samples, tokens, steps = (24, 300, 6) if options.tiny else (96, 10_240, 20)
    checkpoints = f"checkpoint.every_steps={steps // 2}"
    settings_of_all = "schedule.lr=constant", "optim.warmup_steps=3", "validation={every: 4, samples: 32}", checkpoints
    shared = (*SMALL, *settings_of_all, data(options, "documents"))

    def settings(graphs_are: str, steps: int = steps, kept: str = "none") -> tuple[str, ...]:
        size = f"train={{steps: {steps}, global_batch_size: {samples}, micro_batch_tokens: {tokens}}}"
        return (*shared, size, f"memory.activation_checkpointing={kept}", *graphs(graphs_are))

    wanted = {f"{kept}-{on}": settings(on, kept=kept) for kept in ("none", "selective", "full") for on in ("off", "on")}
    wanted |= {"resumed": settings("on", steps // 2), "resumed later": settings("on")}
    bases = {name: name.replace("-on", "-off") for name in wanted}
    return compared(train_in_turns(options, wanted), bases | {"resumed": "none-on", "resumed later": "none-on"})


def launched(options: Options) -> Result:
    """Run DDP with graphs, and FSDP2, over NCCL in one process."""
    return engines(options, (DDP, "fsdp2"), graphs("on"))


# --- speed ----------------------------------------------------------------------------------------


class Plain(torch.nn.Module):
    """A plain PyTorch network for comparison: pre-norm blocks and SwiGLU, without conditioning and second stream."""

    def __init__(self, depth: int, width: int, heads: int, vocab: int):
        super().__init__()
        linear, hidden = partial(torch.nn.Linear, bias=False), 8 * round(width / 3)
        self.embed, self.heads = torch.nn.Embedding(vocab, width), heads
        self.layers = torch.nn.ModuleList()
        for _ in range(depth):
            shapes = {
                "qkv": (width, 3 * width),
                "out": (width, width),
                "up": (width, 2 * hidden),
                "down": (hidden, width),
            }
            self.layers.append(torch.nn.ModuleDict({name: linear(*shape) for name, shape in shapes.items()}))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, L / 2, V] of every other one of `tokens` [B, L]."""
        x = self.embed(tokens)
        for layer in self.layers:
            assert isinstance(layer, torch.nn.ModuleDict)
            qkv = layer["qkv"](F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + layer["out"](F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
            gate, value = layer["up"](F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * value)
        return F.linear(F.rms_norm(x[:, ::2], x.shape[-1:]), self.embed.weight)


def plain(options: Options) -> Result:
    """Measure the speed of `Plain`, compiled, with as many rows as our network and half of its tokens in the loss."""
    shape = SHAPES["tiny" if options.tiny else "gpu"]
    rows, batch, steps = shape.positions, *((2, 3) if options.tiny else (32, 30))
    torch.manual_seed(0)
    network = Plain(shape.depth, shape.width, shape.heads, shape.vocab_size).to(device())
    forward = torch.compile(network)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    tokens = torch.randint(0, shape.vocab_size, (batch, rows), device=device())
    for step in range(-5, steps):
        if step == 0:
            synchronize()
            start = time.perf_counter()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = forward(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, ::2].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize()
    seconds = (time.perf_counter() - start) / steps
    matrices = sum(parameter.numel() for parameter in network.layers.parameters())
    # Count products with all matrices, logits of half of the tokens, and attention.
    flops = 6 * matrices + 3 * shape.width * (shape.vocab_size + 4 * rows * shape.depth)
    speed = tokens.numel() / seconds
    peak = peak_flops(torch.cuda.get_device_name() if torch.cuda.is_available() else "", "bf16")
    return {"compiled": {"step_s": seconds, "tokens_per_s": speed, "mfu": flops * speed / peak if peak else None}}


def runs(options: Options) -> Result:
    """Measure real runs by size, kind of samples, samples of a step and mode. Runs with a bar come first.

    Documents and sentences come in micro-batches of up to `BUDGET_TOKENS`, full samples in one micro-batch.
    """
    wanted: list[tuple[str, Kind, int, str]] = [(size, "full", 32, "compiled") for size in ("24x1024", "12x768")]
    wanted += [("24x1024", "documents", 256, "compiled"), ("24x1024", "full", 32, "without-graphs")]
    wanted += [("24x1024", "sentences", 2048, "compiled"), ("24x2048", "full", 32, "compiled")]
    wanted += [("12x768", "documents", 256, "compiled"), ("24x1024", "full", 8, "compiled")]
    settings: dict[str, tuple[str, ...]] = {}
    for size, kind, samples, mode in wanted:
        special: tuple[str, ...] = () if kind == "full" else (f"train.micro_batch_tokens={BUDGET_TOKENS}",)
        special += graphs("off") if mode == "without-graphs" else ()
        steps = steps_of(options, 40, samples)
        settings[f"{size}-{kind}-{samples}-{mode}"] = (
            model(options, size), steps, *QUIET, COMPILED, *special, data(options, kind)
        )  # fmt: skip
    results = train_in_turns(options, settings)
    for name, result in results.items():
        if name != LEFT_OUT:
            print_status(f"{name}: {result.get('tokens_per_s', 0):,.0f} tokens/s, exit {result['exit']}")
    return results


# --- profile --------------------------------------------------------------------------------------


def compiled(options: Options) -> Result:
    """Trace the compiled network: count a step's kernels, and how much of an untraced step they fill."""
    settings = model(options, "24x1024"), steps_of(options, TRACED[1], 32), *QUIET, COMPILED, data(options, "full")
    result = train(options, f"profile.steps=[{TRACED[0]}, {TRACED[1]}]", *settings, traces="compiled")
    trace = options.out / "compiled-trace.json.gz"
    if trace.exists():
        # Tracing makes steps longer, but not kernels. So take the step's time from the record before.
        if table := kernel_table(trace):
            result |= table | {"busy": table["busy_s"] / result["step_s"]}
        if trace.stat().st_size > MAX_TRACE_BYTES:
            trace.unlink()
    return result


def kernel_table(trace: Path) -> Result:
    """Return the kernels of a traced step, the seconds in which any runs, graph launches, and the largest gaps."""
    steps = TRACED[1] - TRACED[0] + 1
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    if not kernels:
        return {}
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    gaps, end = [], kernels[0]["ts"]
    for event in kernels:
        name = re.sub(r"<.*", "", event["name"])[:80]
        total[name][0] += 1 / steps
        total[name][1] += event["dur"] / steps / 1e3
        gaps.append({"us": round(event["ts"] - end, 1), "before": name})
        end = max(end, event["ts"] + event["dur"])
    busy = covered((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    top = sorted(total.items(), key=lambda item: -item[1][1])[:40]
    return {
        "kernels": len(kernels) / steps,
        "busy_s": busy / steps / 1e6,
        "graph_launch_ms": sum(event["dur"] for event in events if event.get("name") == "cudaGraphLaunch")
        / steps
        / 1e3,
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:10],
        "top": [{"name": name, "count": round(count, 1), "ms": round(ms, 3)} for name, (count, ms) in top],
    }


def saving(options: Options) -> Result:
    """Measure stalls by checkpoints while a network of 386M parameters trains. Saves do not overlap."""
    checkpoints = (*QUIET, EAGER, f"checkpoint.every_steps={8 if options.tiny else 40}")
    size, steps = model(options, "24x1024"), steps_of(options, 120, 16)
    return train(options, size, steps, *checkpoints, data(options, "documents"))


# --- reference, state -----------------------------------------------------------------------------


def ladder(options: Options) -> Result:
    """Compare our trainer with mmdit."""
    shape, batch = ("tiny", "4") if options.tiny else ("gpu", "16")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks", "step", "--variants", *LADDER_VARIANTS]
        command += ["--shape", shape, "--precision", "bf16", "--batch", batch, "--stores", str(options.stores)]
        command += ["--rounds", "3", "--batches", "2", "--no-memory", "--out", folder, "--name", "ladder"]
        code, text = run(command, left() - 10)
        if code:
            return {"exit": code, "tail": text[-2500:]}
        result = json.loads((Path(folder) / "ladder.json").read_text(encoding="utf-8"))
    kept = ("tokens_per_s", "step_s", "mfu", "gpu_busy", "speed", "counts")
    rows = {name: {key: row[key] for key in kept if key in row} for name, row in result["variants"].items()}
    return {"exit": code, "control": result["control"], **rows}


def memory(options: Options) -> Result:
    """Compare estimates of memory with the allocated memory."""
    store = SHAPES["tiny" if options.tiny else "gpu"].store(options.stores, "documents")
    settings = {"256 x 4": SETTINGS["256 x 4"]} if options.tiny else GPU_SETTINGS
    table: Result = {"settings": {}}
    for name, given in settings.items():
        if left() < MIN_RUN_S:
            table.setdefault(LEFT_OUT, []).append(name)
            continue
        result = measure(store, given)
        table["settings"][name] = {"measured": result.measured, "estimated": result.estimated, "error": result.error}
        print_status(f"{name}: {result.measured:,.0f} MiB, estimated {result.estimated:,.0f}, {result.error:+.1%}")
    errors = [row["error"] for row in table["settings"].values()]
    return table | {"lowest_error": min(errors), "highest_error": max(errors)}


# --- speedrun -------------------------------------------------------------------------------------


def inverter(options: Options) -> Result:
    """Train 12 x 768 for eight minutes on vectors of WordNet's definitions, after a short run that times a step."""
    store = options.stores / "wordnet" / "wordnet"
    if not options.tiny and not store.is_dir():
        raise DataError(f"{store}: no such data store, expected the one of `bash scripts/gpu_check.sh prepare`")

    def settings(steps: int) -> tuple[str, ...]:
        return (
            *(*QUIET, "mode=l2t", "loss.text=masked_mean", "optim.lr=6e-4", "model.dropout=0.1"),
            *(model(options, "12x768"), EAGER if options.tiny else COMPILED),
            *(steps_of(options, steps, SPEEDRUN_SAMPLES), f"train.micro_batch_tokens={BUDGET_TOKENS}"),
            data(options, "sentences") if options.tiny else f"data.path={store.resolve()}",
        )

    timed = train(options, *settings(60), limit=left() if options.tiny else 150)
    if timed["exit"]:
        return timed
    given, folder = settings(round(SPEEDRUN_S / timed["step_s"])), options.stores / "speedrun"
    shutil.rmtree(folder, ignore_errors=True)
    config = ["configs/l2t.yaml", f"run.dir={folder.resolve()}"]
    code, text = run([sys.executable, "-m", "mmldlm.train", *config, *given], left() - 60)
    return {"timed": timed, **trained(options, folder, given, code, text)}


def inverted(options: Options) -> Result:
    """Measure the texts of the network that `inverter` trained, with exact likelihoods and without the encoder."""
    # Imported here, since the other parts run where sacreBLEU is missing.
    from benchmarks.common.text_metrics import bits, our_nats, text_metrics

    loaded = load_run(options.stores / "speedrun")
    count = min(20 if options.tiny else 500, len(loaded.store.split("test")))
    evaluation, result = Evaluation(loaded, EvaluationConfig(samples=count, texts=count)), Result(texts=count)
    for lengths in (1, loaded.config.sampling.tried_lengths):
        sampling, started = replace(loaded.config.sampling, tried_lengths=lengths), time.perf_counter()
        made = evaluation.generate("l2t", "own", count, sampling, "likelihood").tokens
        given = evaluation.tokens, loaded.tokenizer, None, evaluation.raw_latents, time.perf_counter() - started
        measured = text_metrics(made, *given)
        measured["ms_per_text"] = measured.pop("cpu_ms_per_text")  # here of the wall
        result[f"likeliest of {lengths}"] = measured
    return result | bits("bits_per_token", our_nats(evaluation)[0], evaluation.lengths)


# --- stages ---------------------------------------------------------------------------------------

Part = Callable[[Options], Result]
PARTS: dict[str, tuple[Part, ...]] = {
    "smoke": (gpu_tests, engines),
    "speed": (plain, runs),
    "profile": (compiled, saving),
    "reference": (ladder,),
    "state": (memory,),
    "graphs": (attention, replay, curves, blocks, launched),
    "speedrun": (inverter, inverted),
}
# `best` has the most valuable parts of all stages, for a machine that we get only once.
STAGES: dict[str, tuple[Part, ...]] = PARTS | {
    "graphs": (attention, replay, curves, plain, runs, compiled, blocks, launched),
    "best": (attention, replay, curves, plain, runs, compiled, gpu_tests, memory, blocks, launched),
}
LIMITS_S = {  # limits for the parts of these two stages
    "attention": 20, "replay": 10, "curves": 90, "plain": 50, "runs": 200, "compiled": 80, "gpu_tests": 150,
    "memory": 70, "blocks": 60, "launched": 40,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    global deadline
    parser = plain_parser("gpu_check", __doc__ or "")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--stores", type=Path, required=True, help="folder of the data stores")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="parts of the stage (all); the others keep their result"
    )
    parser.add_argument("--tiny", action="store_true", help="small and short, to see on any machine that it works")
    options = parser.parse_args(argv)
    seconds = float(os.environ.get("GPU_CHECK_SECONDS") or BUDGETS_S.get(options.stage, BUDGET_S))
    now, results, failed = circumstances(device()), dict[str, Result](), False
    for problem in outdated(DEPENDENCIES):  # a checkout that is not installed skips this check
        print_status(f"too old, which what follows may show: {problem}")
        now.setdefault("outdated", []).append(problem)
    for part in STAGES[options.stage]:
        name, start = part.__name__, time.perf_counter()
        home = next((stage for stage, parts in PARTS.items() if part in parts), options.stage)
        if options.only and name not in options.only:
            continue
        end = STARTED + seconds
        is_limited = options.stage in ("graphs", "best") and not options.tiny
        deadline = min(end, start + LIMITS_S[name]) if is_limited else end
        if left() < MIN_PART_S:
            print_status(f"{name}: {LEFT_OUT}")
            continue
        if home not in results:
            before = options.out / f"{home}.json"
            keeps = before.exists() and (options.only or home != options.stage)
            results[home] = json.loads(before.read_text(encoding="utf-8")) if keeps else {}
            results[home] |= {"stage": home, "tiny": options.tiny, **now}
        try:
            # A non-finite number becomes its name, e.g. "nan". That is valid JSON and passes no bar.
            results[home][name] = json.loads(json.dumps(part(options)), parse_constant=str)
        except Exception as error:  # go on, as the other parts are still worth having
            results[home][name], failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
        gc.collect()
        torch.cuda.empty_cache()  # free the part's memory for the processes of the next part
        print_status(f"{name}: {time.perf_counter() - start:.0f} s")
        write_json(results[home], options.out, home)
    print(json.dumps(results)[:9000])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
