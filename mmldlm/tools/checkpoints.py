"""`mmldlm checkpoints list|diff|merge`: list a run's checkpoints, compare two, or average several."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmldlm.checkpoint.manifest import MANIFEST, read_manifest, verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import TensorFiles
from mmldlm.config import load_config
from mmldlm.errors import DataError, ExitCode, UsageError
from mmldlm.loading.compatibility import identity
from mmldlm.loading.load import LoadedRun, is_checkpoint, load_run, run_config
from mmldlm.optim.ema import WEIGHTS_LABELS, Weights
from mmldlm.tools.config import config_diff
from mmldlm.tools.export import check_new, save_bundle
from mmldlm.tools.runs import MetricsReader
from mmldlm.utils.format import format_number, human_duration
from mmldlm.utils.nested import flatten, replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress
from mmldlm.utils.short_repr import short_repr

GROUPS = ("model", "optimizer", "ema")
MAX_PRINTED = 20  # differing tensors
_SET_ASIDE = ("damaged-", "superseded-")


def list_checkpoints(run: Path) -> list[dict[str, Any]]:
    """Describe a run's checkpoints by their manifests, newest first. Their files are not verified."""
    config, folder = run_config(run), run / "checkpoints"
    retention = config.checkpoint.retention
    if not folder.is_dir() and not (run / "metrics.jsonl").is_file():
        raise DataError(f"{run}: expected a run folder, found neither metrics.jsonl nor checkpoints in it")
    reader = MetricsReader(run / "metrics.jsonl")
    reader.refresh()
    validations = {one["step"]: one.get(config.judged_by) for one in reader.by_kind("validation")}
    times = {one["step"]: one["time"] for one in reader.by_kind("checkpoint")}
    paths = CheckpointStore(folder, retention).paths()
    bodies = {path: body for path in paths if (body := read_manifest(path))}
    losses = {body["step"]: body["info"].get("validation_loss") for body in bodies.values()}
    best = Retention(last=1, best=retention.best).steps_to_keep(-1, (), losses)
    rows: list[dict[str, Any]] = []
    for path in [*paths, *(path for path in sorted(folder.glob("*")) if path.name.startswith(_SET_ASIDE))]:
        body = bodies.get(path) or read_manifest(path)
        if not body:
            rows.append({"name": path.name, "notes": ["no valid manifest"]})
            continue
        step, info, loss = body["step"], body["info"], body["info"].get("validation_loss")
        saved_at, notes = (path / MANIFEST).stat().st_mtime, []
        if path in bodies:
            loss = validations.get(step, loss)  # the manifest has a loss only if it was among the best
            saved_at = times.get(step, saved_at)  # a copied file is only as old as the copy
            notes += ["best"] if step in best else []
        rows.append(
            {
                "name": path.name,
                "step": step,
                "bytes": sum(file["bytes"] for file in body["files"].values()),
                "age_s": max(0.0, time.time() - saved_at),
                "engine": info.get("engine"),
                "world_size": info.get("world_size"),
                "validation_loss": loss,
                "notes": [*(["permanent"] if retention.is_permanent(step) else []), *notes],
            }
        )
    return rows


def diff_checkpoints(first: Path, second: Path) -> dict[str, Any]:
    """Compare two checkpoints, or the newest ones of two runs.

    Returns:
        "tensors": for each tensor that differs, the largest absolute difference and the relative one (the norm of the
        difference over the norm of the first tensor). "equal": the number of equal tensors. "config" and "state":
        both values of each entry that differs.

    Raises:
        DataError: A checkpoint is damaged or missing.
    """
    checkpoints = [verify_checkpoint(_newest(path)) for path in (first, second)]
    tensors, equal = {}, 0
    for group in GROUPS:
        before, after = (TensorFiles.find(checkpoint, group) or TensorFiles({}) for checkpoint in checkpoints)
        for name in sorted(before.keys() | after.keys()):
            difference = _difference(before, after, name)
            equal += difference is None
            if difference is not None:
                tensors[f"{group}/{name}"] = difference
    states = [flatten(json.loads(checkpoint.file("state.json").read_bytes())) for checkpoint in checkpoints]
    configs = [load_config(checkpoint.file("config.yaml"), may_extend=False) for checkpoint in checkpoints]
    return {
        "checkpoints": [str(checkpoint.path) for checkpoint in checkpoints],
        "equal": equal,
        "tensors": tensors,
        "config": config_diff(*configs),
        "state": {
            key: [state.get(key) for state in states]
            for key in {**states[0], **states[1]}
            if states[0].get(key) != states[1].get(key)
        },
    }


def merge_checkpoints(paths: Sequence[Path], shares: Sequence[float], weights: Weights | None) -> LoadedRun:
    """Average the weights of several trained networks, and return the first run with the mean weights.

    Args:
        paths: Folders of checkpoints, runs (their newest checkpoint is taken) or bundles. All must have one network
            and one standardization of latents.
        shares: Share of each in the mean.
        weights: As in `load_run`.

    Raises:
        DataError: A folder cannot be read, or its network or latents differ from the first one's.
    """
    merged, sums, origin = None, dict[str, Tensor](), list[dict[str, Any]]()
    for path, share in zip(paths, shares, strict=True):
        folder, checkpoint = (path.absolute().parent.parent, path) if is_checkpoint(path) else (path, None)
        run = load_run(folder, checkpoint, None, weights, device="cpu")
        if merged is None:
            merged = run
        for what, here, there in (
            ("network and data", identity(merged.config, merged.store), identity(run.config, run.store)),
            ("standardization of latents", merged.store.manifest.latent, run.store.manifest.latent),
        ):
            if here != there:
                raise DataError(f"{path}: expected the same {what} as in {paths[0]}, found others")
        assert isinstance(run.model, nn.Module)
        for name, tensor in run.model.state_dict().items():
            sums[name] = sums.get(name, 0) + tensor.double() * (share / sum(shares))
        origin.append({"from": path.resolve().name, "step": run.step, "weights": run.weights, "share": share})
    assert merged is not None and isinstance(merged.model, nn.Module)
    merged.model.load_state_dict(sums)  # rounds to the tensors' own type
    step = max(one["step"] for one in origin)
    return replace(merged, step=step, info={**merged.info, "merged": origin})


def _difference(before: TensorFiles, after: TensorFiles, name: str) -> dict[str, Any] | None:
    """Return how a tensor differs; None if it does not."""
    if name not in before or name not in after:
        return {"only_in": "first" if name in before else "second"}
    first, second = before[name], after[name]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return {"types": [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (first, second)]}
    if first.equal(second):
        return None
    distance: Tensor = second.double() - first.double()
    norm, largest, length = (float(value) for value in (first.double().norm(), distance.abs().max(), distance.norm()))
    if not math.isfinite(largest + norm + length):
        return {"largest": math.inf, "relative": math.inf}
    return {"largest": largest, "relative": length / norm if norm else None}


def _newest(target: Path) -> Path:
    """Return `target` if it is a checkpoint, else the newest checkpoint of the run `target`."""
    if (target / MANIFEST).is_file():
        return target
    paths = CheckpointStore(target / "checkpoints", Retention()).paths()
    if not paths:
        raise DataError(f"{target}: expected a checkpoint's folder, or a run folder with checkpoints")
    return paths[0]


def _print_list(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("no checkpoint yet")
    for row in rows:
        if "step" not in row:
            print(printable(f"{row['name']:<24} {', '.join(row['notes'])}"))
            continue
        loss = "" if row["validation_loss"] is None else f"validation {format_number(row['validation_loss'])}"
        where, size = f"{row['engine']} x {row['world_size']}", f"{row['bytes'] / 2**20:9.1f} MiB"
        age, notes = human_duration(row["age_s"]), ", ".join(row["notes"])
        print(printable(f"{row['name']:<24} {size}  {age:>8} ago  {where:<14} {loss:<20} {notes}".rstrip()))


def _print_diff(found: dict[str, Any]) -> None:
    tensors = found["tensors"]
    print(*map(printable, found["checkpoints"]), sep=" -> ")
    print(f"{found['equal']} tensors are equal, {len(tensors)} differ", end="")
    print(f"; {len(found['config'])} settings and {len(found['state'])} values of the state differ")
    for key in ("config", "state"):
        for name, (before, after) in found[key].items():
            print(printable(f"{key} {name}: {short_repr(before)} -> {short_repr(after)}"))
    ranked = sorted(tensors.items(), key=lambda item: -(item[1].get("relative") or float("inf")))
    for name, values in ranked[:MAX_PRINTED]:
        if "largest" in values:
            relative = "" if values["relative"] is None else f", relative {values['relative']:.2e}"
            what = f"largest difference {values['largest']:.2e}{relative}"
        else:
            what = " -> ".join(values["types"]) if "types" in values else f"only in the {values['only_in']}"
        print(printable(f"{name}: {what}"))
    if len(ranked) > MAX_PRINTED:
        print(f"and {len(ranked) - MAX_PRINTED} more")


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm checkpoints`; a `DataError` propagates."""
    parser = argparse.ArgumentParser("mmldlm checkpoints", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="step, size, age, engine, validation loss, and why it is kept")
    listing.add_argument("run", type=Path, help="run folder")
    diff = commands.add_parser("diff", help="tensors, settings and state in which two checkpoints differ")
    for name in ("first", "second"):
        diff.add_argument(name, type=Path, help="a checkpoint's folder, or a run folder for its newest")
    merge = commands.add_parser("merge", help="a bundle with the mean weights of several checkpoints of one network")
    merge.add_argument("checkpoints", type=Path, nargs="+", help="folders of checkpoints, runs or bundles")
    merge.add_argument("--out", type=Path, required=True, help="folder of the bundle, which must not exist")
    merge.add_argument(
        "--shares", type=float, nargs="+", metavar="S", help="weight of each in the mean (default: equal)"
    )
    merge.add_argument(
        "--weights", choices=list(WEIGHTS_LABELS), help="which weights to take from checkpoints that have both"
    )
    for command in (listing, diff):
        command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if options.command == "merge":
        shares = options.shares or [1.0] * len(options.checkpoints)
        if not 1 < len(shares) == len(options.checkpoints) or not all(0 < share < math.inf for share in shares):
            given = len(options.checkpoints)
            found = "one checkpoint" if given == 1 else f"{given} checkpoints and --shares {shares}"
            raise UsageError(
                f"checkpoints merge: expected two checkpoints or more, each with a share above 0, found {found}"
            )
        check_new(options.out)
        run = merge_checkpoints(options.checkpoints, shares, options.weights)
        save_bundle(replace(run, folder=options.out), options.out)  # without the first run's evaluation
        next_step = f"mmldlm evaluate {options.out} --data STORE --out FOLDER"
        print(printable(f"{options.out}: the mean of {len(shares)} checkpoints; {next_step}"))
        return ExitCode.DONE
    if options.command == "list":
        result: Any = list_checkpoints(options.run)
    else:
        with Progress() as progress:
            progress.phase("verifying and comparing", announce=False)
            result = diff_checkpoints(options.first, options.second)
    if options.json:
        print(json.dumps(replace_nonfinite(result), indent=1, allow_nan=False))
    elif options.command == "list":
        _print_list(result)
    else:
        _print_diff(result)
    return ExitCode.DONE
