"""`mmldlm verify FOLDER`: check that a run, a checkpoint or a bundle (`verify_bundle.py`) is what its records say.

A check by hashes takes seconds: the records have the config, the hashes of the data and of each checkpoint, and the
gradient norm of every step. On request we also compute steps again and compare all numbers, which takes as long as it
took the run: each segment between two checkpoints is trained again from the first one, in a scratch folder.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.manifest import MANIFEST, Checkpoint, foreign_files, verify_checkpoint
from mmldlm.config import CONFIG_NAME, RunConfig, diff_configs, load_config, split_arguments, with_absolute_paths
from mmldlm.data.mixture import open_data
from mmldlm.data.verify import verify_part
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError, DataError, ExitCode, UsageError, exit_process, run_command
from mmldlm.loading.load import BUNDLE_CONFIG
from mmldlm.settings.declaration import dump
from mmldlm.tools.checkpoints import diff_checkpoints
from mmldlm.tools.records import Record, check_record, read_json
from mmldlm.tools.replay import RecordedRun, advance, replay
from mmldlm.tools.runs import lock_was_released, read_exits
from mmldlm.tools.verify_bundle import verify_bundle
from mmldlm.trainer.branches import REWINDS_FILE
from mmldlm.trainer.checkpointer import PROVENANCE
from mmldlm.trainer.consistency import code_hash
from mmldlm.trainer.step_guard import SKIPS_FILE
from mmldlm.utils.files import sha256
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress

Difference = tuple[float, str]  # relative difference of a recorded and a recomputed value, and a line about it

# Largest relative difference allowed if engine, world size, threads, processor or versions changed. Sums are then
# rounded differently, by about 1e-6 in a step, and AdamW amplifies that (see docs/checkpoints.md).
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
MAX_PRINTED = 30  # more problems are only counted
_SET_ASIDE = re.compile(r"(?:damaged|superseded)-step-(\d+)")
# Not "scalars": they come from callbacks, and a replay has none.
COMPARED_KINDS = ("train", "validation", "quality", "skip")
# Groups and keys that are part of a run's result. Speeds, times, memory and micro-batches are not.
COMPARED_GROUPS = ("loss", "optim", "validation", "quality", "health", "weights", "reason")
COMPARED_KEYS = ("data/tokens", "data/tokens_per_step", "data/epoch", "data/global_batch_size")
INTERVAL_MEANS = ("loss/", "data/tokens_per_step")  # means over the steps since the previous record, or since the start
# Entries of a start's report that decide how sums are rounded, in addition to its ranks.
_NUMERICS = (
    *("engine", "sharding", "world_size", "precision", "attention", "compile", "optimizer", "versions"),
    *("activation_checkpointing", "micro_batch_size"),
)


# --- checks by hashes and records ----------------------------------------------------------------------------------


def check(run: RecordedRun, progress: Progress) -> Iterator[str]:
    """Yield a line for everything in the run folder and the store that contradicts the run's records."""
    yield from run.damaged
    yield from _check_config(run)
    yield from _check_end(run)
    yield from _check_records(run)
    yield from _check_data(run)
    yield from _check_checkpoints(run, progress)


def unchecked(run: RecordedRun) -> Iterator[str]:
    """Yield what cannot be checked, because nothing in the run folder tells."""
    sessions = _sessions(run)
    if run.last_step != (total := sessions[-1][1].train.steps):
        yield f"whether the run continued after step {run.last_step} of {total}"
    for (*_, has_ended), (start, *_) in pairwise(sessions):
        if not has_ended:
            yield f"which older checkpoints existed at step {start['step']}, where the run continued after a kill"
    yield from (f"the checkpoint of step {record['step']}, which has no record" for record in _unrecorded(run))
    if any(config.checkpoint.mirror for _, config, *_ in sessions):
        yield "which checkpoints must exist, since some may only be in checkpoint.mirror"
    if any(record["kind"] == "scalars" for record in run.records):
        yield "records of kind scalars, which callbacks have written"


def _check_config(run: RecordedRun) -> Iterator[str]:
    try:
        recorded = replace(run, overrides=()).config_after(run.last_step)
        configs = recorded, load_config(run.folder / CONFIG_NAME, may_extend=False)
    except ConfigError as error:
        yield str(error)
        return
    if run.starts[-1].get("total_steps") != recorded.train.steps:
        yield f"metrics.jsonl: total_steps of the latest start: expected its train.steps, {recorded.train.steps}"
    lines = diff_configs(*(dump(with_absolute_paths(config)) for config in configs))
    yield from (f"{CONFIG_NAME}: changed since the start: {line}" for line in lines if not line.startswith("run.dir:"))


def _check_end(run: RecordedRun) -> Iterator[str]:
    """Yield where `exit.json` and `startup.json`, which every run writes, contradict the records."""
    start, report = run.starts[-1], read_json(run.folder / "startup.json")
    only_recorded = {"kind", "step", "time", "nonfinite", "total_steps", "samples", "resumed_from", "config"}
    changed = [key for key in sorted(report.keys() | start.keys() - only_recorded) if report.get(key) != start.get(key)]
    if changed:
        yield f"startup.json: {', '.join(changed)}: differs from the record of the latest start"
    last, end = run.records[-1], next(iter(read_exits(run.folder)), None)
    reason = last.get("stopped_by")
    code, cause = (ExitCode.STOPPED, f"stopped by {reason} after") if reason else (ExitCode.DONE, "finished")
    if end is None:
        # A rewind also releases the lock.
        if lock_was_released(run.folder) and not (run.folder / REWINDS_FILE).exists():
            yield "exit.json: is missing, although the run has released its lock, so it has ended"
    elif not end.is_clean:
        return  # a later start may have failed before its first record
    elif last["kind"] != "end":
        yield f"metrics.jsonl: the run has ended ({end.cause}), its last record is {last['kind']}, expected end"
    elif (end.code, end.step) != (code, last["step"]) or not end.cause.startswith(cause) or end.time < last["time"] - 1:
        yield f"exit.json: expected code {int(code)}, step {last['step']}, {cause} ..., written after the records"


def _sessions(run: RecordedRun) -> list[tuple[Record, RunConfig, int, bool]]:
    """Return each start, its config, its last step, and whether it finished or was stopped at that step.

    A session's last step is where the next start begins, or the last step with a record.
    """
    places = {one["step"]: place for place, one in enumerate(run.records) if one["kind"] in ("start", "resume")}
    stops = [*[*places.items()][1:], (run.last_step, len(run.records))]
    return [
        (run.records[place], run.config_after(begin), last, run.records[stop - 1]["kind"] == "end")
        for (begin, place), (last, stop) in zip(places.items(), stops, strict=True)
    ]


def _check_records(run: RecordedRun) -> Iterator[str]:
    """Yield records that are missing or too many by the config of their start, and skips without recorded samples."""
    found, expected = defaultdict[tuple[int, str], list[int]](list), dict[tuple[int, str], list[int]]()
    for record in run.records:
        if record["kind"] in ("train", "validation", "quality"):
            found[record["step"], record["kind"]].append(len(record.get("grad_norms", [])))
    skips = [(record["step"], record.get("reason")) for record in run.records if record["kind"] == "skip"]
    skipped = {step for step, _ in skips}
    for start, config, last, has_ended in _sessions(run):
        since, quality_every = start["step"], config.validation.quality_every
        for step in range(since + 1, last + 1):
            validates = config.validation_due(step, start["samples"]["train"])
            due = {"validation": validates, "quality": config.train.is_due(step, quality_every)}
            norms = {(step, kind): [0] for kind in due if due[kind]}
            if config.train.is_due(step, config.log.every) and not skipped.issuperset(range(since + 1, step + 1)):
                norms[step, "train"], since = [step - since], step
            is_sure = has_ended or step < last  # a kill may have prevented a record of the last step
            expected |= {place: numbers for place, numbers in norms.items() if is_sure or place in found}
    for step, kind in sorted({*expected, *found}):
        before, after = expected.get((step, kind), []), found[step, kind]
        if before != after:
            yield f"{kind} records of step {step}: expected {len(before)} with {before} norms, found {after}"
    path = run.folder / SKIPS_FILE
    try:
        lines = [check_record(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    except DataError as error:
        yield f"{path.name}: {error}"
        return
    named = [(line["step"], line.get("reason")) for line in lines]
    # The file with samples is written first.
    if skips not in (named, named if run.records[-1]["kind"] == "end" else named[:-1]):
        yield f"{path.name}: has {len(named)} skipped steps, expected the {len(skips)} of metrics.jsonl"


def _check_data(run: RecordedRun) -> Iterator[str]:
    verified = []
    for step, recorded in {start["step"]: start["data_manifest"] for start in run.starts}.items():
        try:
            location = run.config_after(step).data.location
            store = open_data(location)
            if store.identity != recorded:
                yield f"{store.path}: the data of step {step} had the hash {recorded[:12]}, found {store.identity[:12]}"
            if location not in verified:  # only once, however often the run was resumed
                verified.append(location)
                verify_part(store)
        except (ConfigError, DataError) as error:
            yield str(error)


def _check_checkpoints(run: RecordedRun, progress: Progress) -> Iterator[str]:
    recorded: dict[int, str] = {}
    for start in run.starts:
        if start["step"] and not start.get("resumed_from"):
            yield f"metrics.jsonl: the start after step {start['step']} does not say from which checkpoint"
    for record in run.records:
        source: Record = record if record["kind"] == "checkpoint" else record.get("resumed_from") or {}
        if "sha256" not in source:
            continue
        step, digest = record["step"], source["sha256"]
        if recorded.setdefault(step, digest) != digest and record["kind"] == "resume":
            yield f"the checkpoint of step {step} was changed between its writing and the resume from it"
        recorded[step] = digest
    for step, path in progress.track(run.checkpoints.items(), "checkpoints", len(run.checkpoints)):
        try:
            saved = verify_checkpoint(path)
            changes = [_changed_since(saved, run, start) for start in run.starts if start["step"] <= step]
            # A start may save the step that it begins with again.
            earlier = sum(start["step"] < step for start in run.starts)
            if earlier and all(changes):
                yield f"{path}: differs from the record of the start that saved it: {'; '.join(changes[earlier - 1])}"
            if step not in (*recorded, *(record["step"] for record in _unrecorded(run))):
                yield f"{path}: no record has this checkpoint; if the run was killed while it was saved, resume it"
            elif sha256(path / MANIFEST) != recorded.get(step, sha256(path / MANIFEST)):
                yield f"{path}: is not the checkpoint that the run has written at step {step}"
            yield from foreign_files(path)
        except (ConfigError, DataError) as error:
            yield str(error)
    due, kept = _expected_checkpoints(run)
    yield from (f"checkpoint of step {step}: was due, but has no record" for step in sorted(due - recorded.keys()))
    set_aside = {int(match[1]) for path in run.folder.glob("checkpoints/*") if (match := _SET_ASIDE.match(path.name))}
    for step in sorted(kept - run.checkpoints.keys() - set_aside):
        yield f"checkpoint of step {step}: is missing, although the settings checkpoint.keep_* keep it"


def _unrecorded(run: RecordedRun) -> list[Record]:
    """Return a record for the newest checkpoint if a kill may have come between the save and its record."""
    newest, known = max(run.checkpoints, default=0), {run.starts[0]["step"]}
    known |= {one["step"] for one in run.records if one["kind"] == "checkpoint" or one.get("resumed_from")}
    may_be = run.records[-1]["kind"] != "end" and max(known) < newest <= run.last_step
    return [{"kind": "checkpoint", "step": newest}] if may_be else []


def _changed_since(saved: Checkpoint, run: RecordedRun, start: Record) -> list[str]:
    """Return the entries in which a checkpoint differs from the record of a start."""
    keys = [key for key in PROVENANCE if key in saved.info and saved.info[key] != start.get(key)]
    recorded = RecordedRun(run.folder, [start]).config_after(start["step"])
    configs = load_config(saved.file(CONFIG_NAME), may_extend=False), recorded
    return keys + diff_configs(*(dump(with_absolute_paths(config)) for config in configs))


def _expected_checkpoints(run: RecordedRun) -> tuple[set[int], set[int]]:
    """Return the steps that must have been saved, and the steps whose checkpoints must still exist."""
    due, kept, losses, best = set[int](), set[int](), dict[int, float | None](), list[float]()
    sessions, was_ended, metric = _sessions(run), False, ""
    # A save is recorded before the next one is complete, so a kill can only have lost the record of the last save.
    newest = max((record["step"] for record in run.records if record["kind"] in ("checkpoint", "end")), default=0)
    for start, config, last, has_ended in sessions:
        settings, policy, begin = config.checkpoint, config.checkpoint.retention, start["step"]
        before, metric = metric, config.judged_by if "first" in start["config"]["validation"] else "validation/total"
        best = best if metric == before else []  # the first versions judged checkpoints by the total loss
        due |= {step for step in range(begin + 1, min(last, newest) + 1) if settings.is_due(step)}
        due |= {last} if has_ended else set()
        # After a kill, steps were trained again, and may have replaced checkpoints that are not permanent.
        if not was_ended:
            kept = set(filter(policy.is_permanent, kept))
        if start.get("resumed_from") and config.resume == "auto":
            kept.add(begin)
        for record in (*run.records, *_unrecorded(run)):
            step, loss = record["step"], record.get(metric, math.nan)
            if record["kind"] == "validation" and begin < step <= last and math.isfinite(loss):
                best = sorted([*best, loss])[: max(1, settings.keep_best)]
                losses[step] = loss if loss in best[: settings.keep_best] else None
            elif record["kind"] == "checkpoint" and begin < step <= last:
                kept = policy.steps_to_keep(step, kept - {step}, {at: losses.get(at) for at in {*kept, step}})
        was_ended = has_ended
    return due, set() if any(config.checkpoint.mirror for _, config, *_ in sessions) else kept


# --- steps computed again ------------------------------------------------------------------------------------------


def recompute(
    run: RecordedRun, first: int, last: int, launch: LauncherEnv, scratch_in: Path | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Train all segments that contain the steps `first` to `last` again, and compare all numbers (collective).

    Yields:
        On rank 0, for each segment, a line with the result, and a line for each number that differs.

    Raises:
        ConfigError: This launch cannot repeat the run.
    """
    is_exact = True
    for trainer, begin, stop, is_fresh in replay(run, first, last, launch, scratch_in):
        start = run.start_before(begin)
        dropout, processes = trainer.config.model.dropout, start["world_size"]
        if dropout and launch.world_size != processes:
            raise ConfigError(
                f"model.dropout: {dropout:g} is drawn by each process, expected the run's {processes} processes, found "
                f"{launch.world_size}"
            )
        advance(trainer, stop)
        if trainer.state.step < stop:
            problem = f"the recorded config ends at step {trainer.state.step}"
            yield f"steps {begin + 1} to {stop}: NOT the same", [problem]
            return
        trainer.save(wait=True)
        if not trainer.engine.is_main:
            continue
        report = read_json(trainer.run_dir / "startup.json")
        is_exact = (is_exact or is_fresh) and _round_alike(report, start)
        tolerance = 0.0 if is_exact else TOLERANCE[trainer.config.precision]
        scratch = RecordedRun.read(trainer.run_dir)
        differences = [*_record_differences(run, scratch, begin, stop)]
        if stop in run.checkpoints:
            differences += _checkpoint_differences(run.checkpoints[stop], scratch.checkpoints[stop])
        problems = [line for size, line in differences if size > tolerance]
        largest = max((size for size, _ in differences), default=0.0)
        result = "bitwise the same" if is_exact else f"the same within {largest:.1e}"
        if problems:
            result = (
                f"NOT the same within {tolerance:g}, because of rounding or a change" if tolerance else "NOT the same"
            )
        for record in run.records:
            if begin < record["step"] <= stop and len(record.get("grad_norms", [])) > record["step"] - begin:
                result += f"; not compared: the record of step {record['step']}, whose means include earlier steps"
        yield f"steps {begin + 1} to {stop}: {result}", problems


def _round_alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two starts round sums alike, by their reports. On GPUs they do not: kernels add in any order."""
    keys = ("name", "processor", "threads")
    ranks, others = ([[rank.get(key) for key in keys] for rank in start["ranks"]] for start in (first, second))
    on_cpus = all(name == "cpu" for name, *_ in ranks)
    return on_cpus and ranks == others and all(first.get(key) == second.get(key) for key in _NUMERICS)


def _differences(name: str, recorded: Any, recomputed: Any) -> Iterator[Difference]:
    """Yield the differences between two values. Values that are no numbers differ infinitely, if they are not equal."""
    if isinstance(recorded, list) and isinstance(recomputed, list) and len(recorded) == len(recomputed):
        for index, pair in enumerate(zip(recorded, recomputed, strict=True)):
            yield from _differences(f"{name}[{index}]", *pair)
        return
    size, numbers = math.inf, [value for value in (recorded, recomputed) if isinstance(value, int | float)]
    if recorded == recomputed or (len(numbers) == 2 and all(map(math.isnan, numbers))):
        return
    if len(numbers) == 2:
        size = abs(recorded - recomputed) / max(map(abs, numbers))
    yield size if math.isfinite(size) else math.inf, f"{name}: {recorded} recorded, {recomputed} recomputed"


def _record_differences(run: RecordedRun, scratch: RecordedRun, begin: int, end: int) -> Iterator[Difference]:
    def chosen(records: Sequence[Record]) -> dict[tuple[int, str], Record]:
        between = (record for record in records if begin < record["step"] <= end)
        return {(record["step"], record["kind"]): record for record in between if record["kind"] in COMPARED_KINDS}

    recorded, recomputed = chosen(run.records), chosen(scratch.records)
    for place in sorted({*recorded, *recomputed}):
        name = f"{place[1]} record of step {place[0]}"
        if place not in recorded or place not in recomputed:
            yield math.inf, f"{name}: only {'recorded' if place in recorded else 'recomputed'}"
            continue
        ours, theirs = recorded[place], recomputed[place]
        # The first record after a checkpoint or a start may average fewer steps.
        is_whole = len(ours.get("grad_norms", [])) == len(theirs.get("grad_norms", []))
        for key in sorted(ours.keys() | theirs.keys()):
            is_compared = key in COMPARED_KEYS or key.partition("/")[0] in COMPARED_GROUPS
            if is_compared and (is_whole or not key.startswith(INTERVAL_MEANS)):
                yield from _differences(f"{name}: {key}", ours.get(key), theirs.get(key))
    norms, others = run.grad_norms(), scratch.grad_norms()
    for step in range(begin + 1, end + 1):
        if step in norms and step in others:
            yield from _differences(f"gradient norm of step {step}", norms[step], others[step])


def _checkpoint_differences(recorded: Path, recomputed: Path) -> Iterator[Difference]:
    """Yield the differences in tensors and state between two checkpoints. Their configs were compared before."""
    result = diff_checkpoints(recorded, recomputed)
    for name, values in result["tensors"].items():
        # A tensor of zeros has no relative difference.
        size = values.get("relative", math.inf) or values.get("largest", math.inf) or sys.float_info.min
        yield size, f"{recorded.name}: {name}: differs by {size:.1e} of its norm"
    for key, values in result["state"].items():
        if key != "threads":  # a replay may use another number, which `_round_alike` takes into account
            yield from _differences(f"{recorded.name}: state.json: {key}", *values)


# --- command -------------------------------------------------------------------------------------------------------


def _report(folder: Path, lines: Sequence[str], problems: Sequence[str]) -> int:
    """Print lines, problems and the result, and return the exit code."""
    found = [f"PROBLEM {problem}" for problem in problems[:MAX_PRINTED]]
    result = f"{folder}: {f'{len(problems)} problems' if problems else 'verified'}"
    print(*map(printable, [*lines, *found, result]), sep="\n")
    return ExitCode.DATA if problems else ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mmldlm verify",
        usage="%(prog)s RUN [--all | --from STEP --to STEP] [key.sub=value ...] | %(prog)s CHECKPOINT | "
        "%(prog)s BUNDLE [--data STORE]",
        description="Check config, data and checkpoints of a run by their hashes, and compute its steps again; or "
        "check one checkpoint; or check a bundle, and measure the figures of its model card again.",
        epilog="Settings such as data.path=NEW or train.micro_batch_size=8 apply to the steps that are computed again.",
    )
    parser.add_argument("arguments", nargs="+", metavar="FOLDER | key.sub=value")
    parser.add_argument("--data", metavar="STORE", help="of a bundle: measure its figures again, on this data store")
    parser.add_argument("--all", action="store_true", help="compute all steps again")
    parser.add_argument("--from", type=int, dest="first", metavar="STEP", help="compute again from this step on")
    parser.add_argument("--to", type=int, dest="last", metavar="STEP", help="compute again up to this step")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="folder to compute in, on a disk that all nodes share"
    )
    parser.add_argument(
        "--accelerate_config", metavar="FILE", help="accelerate config that selects the engine under torchrun"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mmldlm verify`. Return 0, or 65 if anything differs from what run, checkpoint or bundle say."""
    options = _parser().parse_intermixed_args(argv)
    folders, overrides = split_arguments(options.arguments)
    if len(folders) != 1:
        raise UsageError(f"expected one folder, found {len(folders)}: {' '.join(folders) or 'none'}")
    folder, is_recomputed = Path(folders[0]), options.all or options.first is not None or options.last is not None
    is_bundle = (folder / BUNDLE_CONFIG).is_file()
    if is_recomputed and (folder / MANIFEST).is_file():
        kind = "bundle" if is_bundle else "checkpoint"
        raise UsageError(f"--all, --from, --to: expected a run folder, found the {kind} {folder}")
    if options.data and not is_bundle:
        raise UsageError(f"--data: expected a bundle of `mmldlm export`, found {folder}")
    if is_bundle:
        return _report(folder, *verify_bundle(folder, options.data))
    if (folder / MANIFEST).is_file():
        verify_checkpoint(folder)
        return _report(folder, [], [*foreign_files(folder)])
    launch = read_launcher_env(os.environ, None, options.accelerate_config)
    recorded = RecordedRun.read(folder, overrides)
    begin, end = recorded.starts[0]["step"] + 1, recorded.last_step
    first = begin if options.first is None else options.first
    last = end if options.last is None else options.last
    if is_recomputed and not begin <= first <= last <= end:
        raise UsageError(f"--from {first} --to {last}: expected steps from {begin} to {end}, in this order")
    lines: list[str] = []
    problems: list[str] = []
    if launch.rank == 0:
        with Progress() as progress:
            progress.phase("verifying", announce=False)
            problems += check(recorded, progress)
        lines.append(f"{len(recorded.records)} records, {len(recorded.checkpoints)} checkpoints, config and data")
        if (codes := {str(start["versions"].get("code")) for start in recorded.starts}) != {code_hash()}:
            lines.append(f"the run's code has the hash {', '.join(sorted(codes))}, this one {code_hash()}")
    lines += [f"not checked: {line}" for line in unchecked(recorded)]
    if recorded.damaged:
        lines.append("no step was computed again, because records are damaged")
    elif is_recomputed:
        for line, differences in recompute(recorded, first, last, launch, options.scratch):
            lines.append(line)
            problems += [f"recomputed {difference}" for difference in differences]
    if launch.rank:
        return ExitCode.DONE
    return _report(folder, lines, problems)


if __name__ == "__main__":
    exit_process(run_command(main))
