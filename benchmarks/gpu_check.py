"""Stages of `scripts/gpu_check.sh`: what only a GPU can show, each part with a time limit of its own.

    python -m benchmarks.gpu_check STAGE --out FOLDER --stores FOLDER [--tiny]

Writes FOLDER/STAGE.json after each part, so that what a time limit cuts off costs that part alone. `--tiny` shows on
any machine that the stage runs; its result is never committed. The bars are in `gpu_bars.py`.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common.counting import covered
from benchmarks.common.report import ROOT, circumstances, plain_parser, print_status, write_json
from benchmarks.common.task import SHAPES, Kind, device
from benchmarks.memory import GPU_SETTINGS, SETTINGS, measure
from mmldlm.distributed.launch import DDP
from mmldlm.model.flops import peak_flops

BUDGET_S = float(os.environ.get("GPU_CHECK_SECONDS", 555))  # of a stage, where a command may take 600
STARTED = time.perf_counter()
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
LEFT_OUT = "left out: no time"
TIMED_OUT = 124  # exit code of a command that outlasts its limit, as of timeout(1)
Result = dict[str, Any]
Options = argparse.Namespace
TRACED = (24, 25)  # first and last step of a trace
MIN_RUN_S = 60.0  # a run is left out if less is left of the stage
MAX_TRACE_BYTES = 15 * 2**20
LADDER_VARIANTS = ("reference", "reference-1-flash", "trainer", "trainer-compiled")
ENGINES = (DDP, "fsdp2", "zero1", "zero2", "zero3", "zero2_offload")
SIZES = {"24x1024": (24, 1024), "12x768": (12, 768), "24x2048": (24, 2048)}  # blocks, width
BUDGET_TOKENS = 32_768  # of a micro-batch of documents or sentences
MODES: dict[str, tuple[str, ...]] = {"eager": ("compile.scope=none",), "compiled": ("compile.scope=regional",)}


def left() -> float:
    """Return the seconds left of the stage."""
    return BUDGET_S - (time.perf_counter() - STARTED)


def run(command: Sequence[str], limit: float) -> tuple[int, str]:
    """Return exit code and output of a command; 124 if it outlasts `limit` seconds or the stage."""
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


def environment(_: Options) -> Result:
    """Tools and packages of the machine."""
    tools: Result = {tool: bool(shutil.which(tool)) for tool in ("nvcc", "g++", "cc", "ninja", "nvidia-smi", "ncu")}
    for package in ("deepspeed", "accelerate", "triton", "mmdit", "pydantic", "tokenizers"):
        code, text = run([sys.executable, "-c", f"import {package}; print(getattr({package}, '__version__', '?'))"], 60)
        tools[package] = text.strip().splitlines()[-1][:120] if text.strip() else f"exit {code}"
    if torch.cuda.is_available():
        tools["nccl"], tools["capability"] = torch.cuda.nccl.version(), torch.cuda.get_device_capability()
    return tools


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a call, after three others."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def ceilings(options: Options) -> Result:
    """Rates of copies, of products of the network's shapes and of attention, and the cost of a launch."""
    scale, kind = 64 if options.tiny else 1, device().type
    # A CPU, which shows only that it works, may have no instructions for bfloat16: minutes for one product.
    make = partial(torch.randn, device=kind, dtype=torch.bfloat16 if kind == "cuda" else torch.float32)
    source = torch.zeros(2**30 // scale, device=kind)
    target = torch.empty_like(source)
    rates: Result = {"copy_tb_per_s": 8 * len(source) / milliseconds(partial(target.copy_, source)) / 1e9}
    del source, target
    rows = 16384 // scale
    products = {
        "qkv": (rows, 1024, 3072),
        "out": (rows, 1024, 1024),
        "up": (rows, 1024, 5456),
        "down": (rows, 2728, 1024),
        "qkv weight": (3072, rows, 1024),
        "up weight": (5456, rows, 1024),
        "head, 256 rows": (256, 1024, 30522),
        "head, 4,096 rows": (4096 // scale, 1024, 30522),
        "square": (8192 // scale,) * 3,
    }
    rates["products_tflop_per_s"] = {
        name: 2 * m * k * n / milliseconds(partial(torch.mm, make(m, k), make(k, n))) / 1e9
        for name, (m, k, n) in products.items()
    }
    small = torch.zeros(1, device=kind)
    synchronize()
    start = time.perf_counter()
    for _ in range(10_000):
        small.add_(1)
    rates["launch_us_host"] = (time.perf_counter() - start) * 100
    synchronize()
    rates["launch_us"] = (time.perf_counter() - start) * 100
    if kind == "cuda":
        rates["attention"] = {str(length): _attention(rows, length) for length in (128, 512, 2048)}
    return rates


def _attention(rows: int, length: int) -> Result:
    from torch.nn.attention.varlen import varlen_attn

    q = torch.randn(rows, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.arange(0, rows + 1, length, device="cuda", dtype=torch.int32)

    def forward() -> Any:
        return varlen_attn(q, q, q, offsets, offsets, length, length)

    flops = 4 * rows * length * 1024
    alone, both = milliseconds(forward), milliseconds(lambda: forward().sum().backward())
    # Backward computes the scores again: five products for two.
    return {"forward_tflop_per_s": flops / alone / 1e9, "backward_tflop_per_s": 2.5 * flops / (both - alone) / 1e9}


def gpu_tests(_: Options) -> Result:
    """The tests that need a GPU."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    code, text = run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-n", "4", *files], 240
    )
    return {"exit": code, **({"tail": text[-3000:]} if code else {})}


def train(options: Options, *settings: str, engine: str = "", limit: float = 200, traces: str = "") -> Result:
    """Run a training in one process, and return its exit code, curve and numbers.

    Without `engine`, and with checkpoints off, it does not save the last one either.

    Args:
        options: Options of the stage.
        settings: key.sub=value of the run config.
        engine: Name of a file in accelerate_configs/; by default no launcher.
        limit: Seconds that it may take.
        traces: Name under which its traces are copied to `options.out`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable]
        if engine:
            config = Path(temporary) / "config.yaml"
            config.write_text("{}\n")
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "-m", "mmldlm.train"]
            command += [str(config)]
            if engine != DDP:  # which torchrun alone selects
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
    """Run trainings one after the other in one process, as long as there is time, and return the result of each."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-c", TRAIN]
        for name, settings in runs.items():
            command += ["--"] * (len(command) > 3) + [f"run.dir={temporary}/{name}", *settings]
        code, text = run(command, left() - 5)
        folders = {name: Path(temporary) / name for name in runs}
        ended = {name for name, folder in folders.items() if (folder / "exit.json").exists()}
        good = {name for name in ended if not json.loads((folders[name] / "exit.json").read_text())["code"]}
        cut = [name for name in runs if code == TIMED_OUT and name not in ended]  # the others failed before they began
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
    """Return the curve of a run, and the numbers of its last full record."""
    steps = [record for record in records if "loss/total" in record]
    last = steps[-2 if len(steps) > 1 else -1]  # the last one may be of few steps, and of traced ones
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
    """Return the setting of a store, which is written unless `prepare` has."""
    return f"data.path={SHAPES['tiny' if options.tiny else 'gpu'].store(options.stores, kind).resolve()}"


def model(options: Options, size: str) -> str:
    depth, width = (2, 64) if options.tiny else SIZES[size]
    return f"model={{depth: {depth}, width: {width}, num_heads: {width // 64}}}"


def steps_of(options: Options, steps: int, samples: int) -> str:
    if options.tiny:
        steps, samples = min(steps, TRACED[1]), 2
    return f"train={{steps: {steps}, global_batch_size: {samples}}}"


QUIET = ("precision=bf16", "validation.every=0", "checkpoint.every_steps=0", "log={every: 10, tensorboard: false}")


def engines(options: Options) -> Result:
    """One process without a launcher and under each engine, with validation and a checkpoint: equal curves."""
    settings = (
        "precision=bf16",
        "model={depth: 4, width: 256, num_heads: 4}",
        "train={steps: 8, global_batch_size: 16, micro_batch_size: 8}",
        "log={every: 1, tensorboard: false}",
        "validation={every: 4, samples: 32}",
        "checkpoint.every_steps=8",
        *MODES["eager"],
        data(options, "documents"),
    )
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as threads:  # nothing is timed here
        started = {"single": threads.submit(train, options, *settings)}
        for engine in ENGINES:
            started[engine] = threads.submit(train, options, *settings, engine=engine)
        started["auto_micro_batch"] = threads.submit(train, options, *settings, "train.auto_micro_batch=true")
    runs = {name: run.result() for name, run in started.items()}
    differences = [
        abs(ours - one) / abs(one)
        for result in runs.values()
        for (_, ours), (_, one) in zip(result.get("curve", ()), runs["single"].get("curve", ()), strict=False)
    ]
    failed = sum(result["exit"] != 0 for result in runs.values())
    largest = {"largest_difference": max(differences)} if differences else {}
    return {"runs": runs, "failed": failed, **largest}


# --- speed ----------------------------------------------------------------------------------------


class Plain(torch.nn.Module):
    """What plain PyTorch gives at a width and depth: pre-norm blocks, SwiGLU, no conditioning, no second stream."""

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
            qkv = layer["qkv"](F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + layer["out"](F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))
            gate, value = layer["up"](F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * value)
        return F.linear(F.rms_norm(x[:, ::2], x.shape[-1:]), self.embed.weight)


def plain(options: Options) -> Result:
    """Speed of `Plain`, with half of its tokens in the loss as ours; eager and compiled."""
    shape = SHAPES["tiny" if options.tiny else "gpu"]
    batch, steps = (2, 3) if options.tiny else (32, 30)
    speeds = {}
    for mode in MODES:
        torch.manual_seed(0)
        network = Plain(shape.depth, shape.width, shape.heads, shape.vocab_size).to(device())
        forward = torch.compile(network) if mode == "compiled" else network
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        tokens = torch.randint(0, shape.vocab_size, (batch, shape.positions), device=device())

        def step(forward: Any = forward, optimizer: Any = optimizer, tokens: torch.Tensor = tokens) -> None:
            with torch.autocast(tokens.device.type, torch.bfloat16):
                logits = forward(tokens)
            F.cross_entropy(logits.float().flatten(0, 1), tokens[:, ::2].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        seconds = (time.perf_counter() - start) / steps
        matrices = sum(parameter.numel() for parameter in network.layers.parameters())
        # Products with all matrices, logits of half of the tokens, attention.
        per_token = 2 * matrices + shape.width * (shape.vocab_size + 4 * shape.positions * shape.depth)
        peak = peak_flops(torch.cuda.get_device_name() if torch.cuda.is_available() else "", "bf16")
        speeds[mode] = {
            "step_s": seconds,
            "tokens_per_s": tokens.numel() / seconds,
            "mfu": 3 * per_token * tokens.numel() / seconds / peak if peak else None,
        }
    return speeds


def runs(options: Options) -> Result:
    """Real runs, those with a bar first: size, kind of samples, samples of a step, mode.

    Documents and sentences come in micro-batches of up to `BUDGET_TOKENS`, full samples in one micro-batch.
    """
    wanted: list[tuple[str, Kind, int, str]] = [(size, "full", 32, "compiled") for size in ("24x1024", "12x768")]
    wanted += [("24x1024", "documents", 256, "compiled"), ("24x1024", "sentences", 2048, "compiled")]
    wanted += [("24x2048", "full", 32, "compiled")]
    wanted += [(size, "full", 32, "eager") for size in SIZES]
    wanted += [("12x768", "documents", 256, mode) for mode in ("compiled", "eager")]
    wanted += [("24x1024", "full", 8, mode) for mode in ("compiled", "eager")]
    settings: dict[str, tuple[str, ...]] = {}
    for size, kind, samples, mode in wanted:
        budget = () if kind == "full" else (f"train.micro_batch_tokens={BUDGET_TOKENS}",)
        steps = steps_of(options, 40, samples)
        settings[f"{size}-{kind}-{samples}-{mode}"] = (
            model(options, size), steps, *QUIET, *MODES[mode], *budget, data(options, kind)
        )  # fmt: skip
    results = train_in_turns(options, settings)
    for name, result in results.items():
        if name != LEFT_OUT:
            print_status(f"{name}: {result.get('tokens_per_s', 0):,.0f} tokens/s, exit {result['exit']}")
    return results


# --- profile --------------------------------------------------------------------------------------


def profiled(mode: str, options: Options) -> Result:
    """Kernels of a step, and the share of an untraced step in which any runs."""
    steps = steps_of(options, TRACED[1], 32)
    traced = f"profile.steps=[{TRACED[0]}, {TRACED[1]}]"
    result = train(
        options, model(options, "24x1024"), steps, traced, *QUIET, *MODES[mode], data(options, "full"), traces=mode
    )
    trace = options.out / f"{mode}-trace.json.gz"
    if trace.exists():
        # Tracing makes steps longer, but not kernels: the step's time is from the record before.
        if table := kernel_table(trace):
            result |= table | {"busy": table["busy_s"] / result["step_s"]}
        if trace.stat().st_size > MAX_TRACE_BYTES:
            trace.unlink()
    return result


def kernel_table(trace: Path) -> Result:
    """Return the kernels of a trace, and the seconds in which any runs, for each step; empty without a GPU."""
    steps = TRACED[1] - TRACED[0] + 1
    with gzip.open(trace, "rt") as file:
        kernels = [event for event in json.load(file)["traceEvents"] if event.get("cat") == "kernel"]
    if not kernels:
        return {}
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in kernels:
        entry = total[re.sub(r"<.*", "", event["name"])[:80]]
        entry[0] += 1 / steps
        entry[1] += event["dur"] / steps / 1e3
    busy = covered((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    top = sorted(total.items(), key=lambda item: -item[1][1])[:40]
    return {
        "kernels": len(kernels) / steps,
        "busy_s": busy / steps / 1e6,
        "top": [{"name": name, "count": round(count, 1), "ms": round(ms, 3)} for name, (count, ms) in top],
    }


def eager(options: Options) -> Result:
    """Trace of the eager network."""
    return profiled("eager", options)


def compiled(options: Options) -> Result:
    """Trace of the compiled network."""
    return profiled("compiled", options)


def saving(options: Options) -> Result:
    """Stalls of checkpoints while a network of 386M parameters trains, each after the one before was written."""
    checkpoints = (*QUIET, *MODES["eager"], f"checkpoint.every_steps={8 if options.tiny else 40}")
    size, steps = model(options, "24x1024"), steps_of(options, 120, 16)
    return train(options, size, steps, *checkpoints, data(options, "documents"))


# --- reference, state -----------------------------------------------------------------------------


def ladder(options: Options) -> Result:
    """Our trainer against mmdit."""
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
    """Estimates of memory against what was allocated."""
    store = SHAPES["tiny" if options.tiny else "gpu"].store(options.stores, "documents")
    settings = {"256 x 4, one step": SETTINGS["256 x 4, one step"]} if options.tiny else GPU_SETTINGS
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


# --- stages ---------------------------------------------------------------------------------------

STAGES: dict[str, tuple[Callable[[Options], Result], ...]] = {
    "smoke": (environment, ceilings, gpu_tests, engines),
    "speed": (plain, runs),
    "profile": (eager, compiled, saving),
    "reference": (ladder,),
    "state": (memory,),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("gpu_check", __doc__ or "")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--stores", type=Path, required=True, help="folder of the data stores")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="parts of the stage (all); the others keep their result"
    )
    parser.add_argument("--tiny", action="store_true", help="small and short, to see on any machine that it works")
    options = parser.parse_args(argv)
    result: Result = {"stage": options.stage, "tiny": options.tiny, **circumstances(device())}
    before = options.out / f"{options.stage}.json"
    if options.only and before.exists():
        result = json.loads(before.read_text(encoding="utf-8")) | result
    failed = False
    for part in STAGES[options.stage]:
        if options.only and part.__name__ not in options.only:
            continue
        start = time.perf_counter()
        try:
            result[part.__name__] = part(options)
        except Exception as error:  # the other parts are worth having
            result[part.__name__], failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
        gc.collect()
        torch.cuda.empty_cache()  # what the part held would be missing to the processes of the next one
        print_status(f"{part.__name__}: {time.perf_counter() - start:.0f} s")
        write_json(result, options.out, options.stage)
    print(json.dumps(result)[:9000])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
