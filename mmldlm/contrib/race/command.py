"""`mmldlm race BASE ARM...`: train several changes of a run, stop each once it is decided, and keep the best."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from mmldlm.contrib.race.arms import BOUND, Arm
from mmldlm.contrib.race.ledger import Ledger
from mmldlm.contrib.race.race import METRICS, NO_RESULT, Proposal, Race, result_line
from mmldlm.errors import ConfigError, ExitCode, UsageError
from mmldlm.tools.compare.command import fraction, positive
from mmldlm.tools.compare.run_summary import better_direction
from mmldlm.utils.lock import RunLock
from mmldlm.utils.printable import printable

# Options that the ledger stores for each base, with their defaults.
_OPTIONS = {"metric": BOUND, "risk": 0.05, "at_least": 0.002, "seeds": 16, "looks": 3, "launch": ""}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "mmldlm race",
        description="Train changes of a run with the same samples, noise and masks; an arm leaves as soon as it "
        "is decided, and the best is kept if it is better than luck. The ledger has all proposals and results. The "
        "same command continues.",
    )
    add = parser.add_argument
    add("base", nargs="?", metavar="BASE.yaml", help="config of the base; with --ledger by default its last one")
    add("arms", nargs="*", metavar="ARM", help="key=value,key=value, a config file, or git:REVISION")
    add("--add", action="append", default=[], metavar="ARM", help="another arm to continue a ledger with")
    add("--ledger", type=Path, metavar="FILE", help="ledger (RUN-race/experiments.jsonl by run.dir of the base)")
    add("--metric", help="metric of the decisions, of loss/, accuracy/, validation/ or quality/ (validation/text_l2t)")
    add("--risk", type=fraction, metavar="X%", help="probability that luck alone is kept, in all the ledger (5%%)")
    add("--at-least", type=fraction, metavar="X%", help="smallest gain that matters (0.2%%)")
    add("--seeds", type=positive, metavar="N", help="initial weights from which the base shows its luck (16)")
    add("--looks", type=positive, metavar="N", help="at train.steps, half of it, ... (3); 1: at the end alone")
    add("--jobs", type=positive, default=1, metavar="N", help="runs side by side, which share the GPUs and cores (1)")
    add(
        "--launch",
        metavar="WORDS",
        help="launcher, such as 'accelerate launch --config_file FILE'; after ' -- ' options of mmldlm.train",
    )
    add(
        "--budget",
        type=float,
        default=math.inf,
        metavar="HOURS",
        help="stop after the turn in which these hours are used up",
    )
    options = parser.parse_args(argv)
    if options.base is None and options.ledger is None:
        raise UsageError("expected BASE.yaml, or --ledger with a ledger that has one")
    if options.base is not None and "=" in options.base:
        raise UsageError(f"expected BASE.yaml before the arms, found {options.base}")
    return options


def _open(options: argparse.Namespace, path: Path) -> tuple[Ledger, Arm]:
    """Open the ledger at `path` and return it with the base. Options that were not given come from the ledger."""
    ledger = Ledger(path)
    races = ledger.of_kind("race")
    if options.base is None and not races:
        raise UsageError(f"--ledger: expected a ledger with a base, or BASE.yaml, found no base in {path}")
    base = Arm.base(Path(races[-1]["base"] if options.base is None else options.base).absolute())
    same = ledger.of_kind("race", key=base.key)
    if options.base is None and not same:
        raise ConfigError(f"{base.arguments[0]}: expected the settings and code of {path}, found others; name the base")
    for name, default in _OPTIONS.items():
        known = same or (races if name == "risk" else [])  # one risk covers the whole ledger
        value, given = known[-1][name] if known else default, getattr(options, name)
        if known and given not in (None, value):
            raise UsageError(f"--{name.replace('_', '-')}: expected {value} as in {path}, found {given}")
        setattr(options, name, value if given is None else given)
    if options.metric.partition("/")[0] not in METRICS or not better_direction(options.metric):
        raise UsageError(f"--metric: expected one of {', '.join(METRICS)} with a better side, found {options.metric}")
    if options.seeds < 3 or not options.risk:
        raise UsageError(f"expected at least --seeds 3 and a --risk above 0, found {options.seeds} and {options.risk}")
    if not same:
        header = {"kind": "race", "base": base.arguments[0], "key": base.key}
        ledger.append([header | {name: getattr(options, name) for name in _OPTIONS}])
    return ledger, base


def _proposals(options: argparse.Namespace, ledger: Ledger, base: Arm, folder: Path) -> list[Proposal]:
    """Return all proposals for the base. New ones from the command line are added to the ledger."""
    arms = [Arm.parse(text, base, folder) for text in dict.fromkeys([*options.arms, *options.add])]
    metrics = [arm.metric(options.metric, base) for arm in arms]
    for arm, metric in zip(arms, metrics, strict=True):
        known = ledger.of_kind("proposal", key=arm.key)
        if metric != options.metric:
            print(printable(f"{arm.text}: compared by {metric}, since it changes what {options.metric} means"))
        if known:
            for result in ledger.of_kind("result", n=known[0]["n"])[-1:]:
                if result["decision"]:
                    print(printable(f"{ledger.path}: has it already: {result_line(result)}"))
            continue
        line = {"kind": "proposal", "n": len(ledger.of_kind("proposal")) + 1, "arm": arm.text, "metric": metric}
        changes = arm.changes(base)
        ledger.append([line | {"key": arm.key, "base": base.key, "changes": changes}])
        if not changes:
            line |= {**NO_RESULT, "decision": "no change", "reason": "no setting differs", "steps": 0, "seconds": 0.0}
            print(printable(result_line(line)))
            ledger.append([line])
    proposals = [
        Proposal(line, ledger.of_kind("result", n=line["n"])) for line in ledger.of_kind("proposal", base=base.key)
    ]
    for one in proposals:
        if not one.decision:
            one.arm = Arm.parse(one.line["arm"], base, folder)
            if one.arm.key != one.line["key"]:
                raise ConfigError(
                    f"{one.arm.text}: expected as proposal {one.line['n']} of {ledger.path}, found a change"
                )
    return proposals


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm race`. An `MmldlmError` is raised to the caller."""
    options = _parse(argv)
    deadline = time.monotonic() + 3600 * options.budget
    path = options.ledger or Path(f"{Arm.base(Path(options.base)).settings['run.dir']}-race") / "experiments.jsonl"
    with RunLock(path.parent):
        ledger, base = _open(options, path)
        folder = Path(f"{base.settings['run.dir']}-race") / base.key
        proposals = _proposals(options, ledger, base, folder)
        numbers = options.risk, options.at_least, options.seeds, options.looks
        Race(ledger, base, folder, *numbers, options.launch, options.jobs, deadline).run(proposals)
    kept = [one for one in proposals if one.decision == "keep"]
    print(printable(f"{ledger.path}: {len(ledger.of_kind('proposal'))} proposals; {len(kept)} kept for this base"))
    return ExitCode.DONE
