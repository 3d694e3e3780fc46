"""A race: train a base and its arms, and decide by their records alone.

We look at the arms at a few steps, each twice the previous one, where all runs have had the same samples (successive
halving: Karnin, Koren and Somekh, ICML 2013). An arm leaves as soon as it is clearly not better than the base, or than
the best arm, by an amount that matters (Hoeffding races: Maron and Moore, NIPS 1993). Among the arms that are better
beyond luck, at their shares of the error budget (`gain.py`), the best one is kept if it is still better at its end. An
arm that is undecided at its end is trained again from other initial weights.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.contrib.race.arms import Arm, environment, last_line
from mmldlm.contrib.race.gain import Gain, share
from mmldlm.contrib.race.ledger import Ledger
from mmldlm.errors import ConfigError, ExitCode, MmldlmError, StoppedBySignal, UsageError, error_from_exit_code
from mmldlm.tools.compare.run_summary import RunSummary, better_direction
from mmldlm.tools.runs import History
from mmldlm.utils.printable import printable
from mmldlm.utils.process import CONTINUE, stop_at_signals

MAX_SEEDS = 3  # an undecided arm is trained from at most this many initial weights
DROP_RISK = 0.05  # risk, at each look, that an arm leaves although it is better by an amount that matters
LOG = "race.log"  # file in the run folder with the output of its last processes
METRICS = ("loss", "accuracy", "validation", "quality")  # groups of metrics in a run's records

# Exit codes that are the arm's own fault. Any other code means that it could not be tried, and ends the race.
_FAULTS = (1, ExitCode.USAGE, ExitCode.CONFIG, ExitCode.DATA, ExitCode.NUMERICAL)


_AT = itemgetter("metric", "step", "seeds")  # results are compared at the same values of these keys

# Default values for the line of a result.
NO_RESULT = {"kind": "result", "step": 0, "seeds": 0, "values": [], "gain": None, "interval": None, "better": False}


@dataclass
class Proposal:
    """An arm, its line in the ledger, and the lines of its results so far."""

    line: Mapping[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    arm: Arm | None = None  # of one that is undecided

    @property
    def decision(self) -> str:
        """The decision, or "" while there is none."""
        return self.results[-1]["decision"] if self.results else ""

    @property
    def is_better(self) -> bool:
        """Return whether a look has shown that the arm is better than the base."""
        return any(result["better"] for result in self.results)


@dataclass
class Race:
    """The race of a base. Its runs are stored below `folder`."""

    ledger: Ledger
    base: Arm
    folder: Path
    risk: float
    at_least: float
    seeds: int
    looks: int
    launch: str
    jobs: int
    deadline: float
    base_values: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def run(self, proposals: Sequence[Proposal]) -> None:
        """Train and decide the proposals for this base. Some may be decided already."""
        for look, (step, seed) in enumerate(self.schedule):
            racing = [one for one in proposals if not one.decision]
            is_contest = len(racing) > 1 and seed == 0  # the better arms compete to be the best
            due = [one for one in racing if len(one.results) == look and (is_contest or not one.is_better)]
            earlier = [line for one in proposals if one not in due for line in one.results]
            for metric in {one.line["metric"] for one in due}:
                self._base(metric, step)  # before training the arms, as there may be no such metric
            lines = self._measure(due, seed, step)
            for line in lines:
                if line["values"]:
                    rivals = [other for other in (*lines, *earlier) if other["values"] and _AT(other) == _AT(line)]
                    self._judge(line, rivals, is_last=look == len(self.schedule) - 1)
            self._record(due, lines)
        kept = [one.results[-1]["gain"] for one in proposals if one.decision == "keep"]
        self._finish([one for one in proposals if not one.decision], max([0.0, *kept]))

    @cached_property
    def schedule(self) -> list[tuple[int, int]]:
        """Step and number of initial weights of each look. Looks are at steps with records and validations."""
        settings = self.base.settings
        last = settings["train.steps"]
        every = [settings[key] for key in ("log.every", "validation.every", "validation.quality_every")]
        unit = math.lcm(*(number for number in every if 0 < number <= last))
        steps = sorted({min(last, -(-last // 2**look // unit) * unit) for look in range(self.looks)})
        return [(step, 0) for step in steps] + [(last, seed) for seed in range(1, MAX_SEEDS)]

    # --- decisions ---------------------------------------------------------------------------------------------

    def _measure(self, proposals: Sequence[Proposal], seed: int, step: int) -> list[dict[str, Any]]:
        """Train proposals to a step and return the lines of their results. An arm that broke its run has failed."""
        lines = []
        errors = self.train([(one.arm, seed) for one in proposals if one.arm is not None], step)
        for one, error in zip(proposals, errors, strict=True):
            metric = one.line["metric"]
            line = {key: one.line[key] for key in ("n", "arm", "metric")}
            line |= {**NO_RESULT, "step": step, "seeds": seed + 1, "decision": "", "reason": ""}
            if error is not None:
                line |= {"decision": "failed", "reason": str(error)}
            elif np.isfinite(values := self.values(one.line["key"], seed + 1, metric, step)).all():
                line["values"] = values.tolist()
            else:
                line |= {"decision": "failed", "reason": f"{metric} is not finite at step {step}"}
            lines.append(line)
        return lines

    def _base(self, metric: str, step: int) -> np.ndarray:
        """Train the base's runs to the step and return their values."""
        if (metric, step) not in self.base_values:
            for error in self.train([(self.base, seed) for seed in range(self.seeds)], step):
                if error is not None:
                    raise error
            self.base_values[metric, step] = self.values("base", self.seeds, metric, step)
        return self.base_values[metric, step]

    def _gain(self, line: Mapping[str, Any], rival: Mapping[str, Any] | None = None) -> Gain:
        """Return the gain of a result over the base, or over another result at the same look."""
        base = self._base(line["metric"], line["step"])
        reference = base if rival is None else np.array(rival["values"])
        return Gain.of(np.array(line["values"]), reference, base, better_direction(line["metric"]) == "higher")

    def _compare(self, line: dict[str, Any]) -> Gain:
        """Add the gain over the base and its interval to a result, and return the gain."""
        gain = self._gain(line)
        low, high = gain.bounds(self.risk * share(line["n"]) / len(self.schedule))
        line |= {"gain": gain.value, "interval": [low, high], "better": low > 0}
        return gain

    def _judge(self, line: dict[str, Any], rivals: Sequence[Mapping[str, Any]], is_last: bool) -> None:
        """Add the gain and the decision to a result. The rivals are all results at the same look."""
        gain = self._compare(line)
        leads, higher = [(gain, "the base")], better_direction(line["metric"]) == "higher"
        rivals = sorted(rivals, key=lambda other: float(np.mean(other["values"])), reverse=higher)
        # Before the end, at most half of the arms may leave for a better arm: a fast start need not end best.
        staying = 1 if line["step"] == self.schedule[-1][0] else (len(rivals) + 1) // 2
        if all(other is not line for other in rivals[:staying]):
            leads.append((self._gain(line, rivals[0]), rivals[0]["arm"]))
        ahead = [name for lead, name in leads if lead.bounds(DROP_RISK)[1] < self.at_least]
        if line["values"] == self._base(line["metric"], line["step"])[:1].tolist():
            if line["step"] == self.schedule[-1][0]:  # earlier, a schedule may still separate them
                line |= {"decision": "no change", "reason": "its metric is the base's to the last bit"}
        elif ahead:
            line |= {"decision": "discard", "reason": f"not {100 * self.at_least:g} % better than {ahead[-1]}"}
        elif is_last and not line["better"]:
            line |= {"decision": "open", "reason": f"neither after {MAX_SEEDS} runs"}

    def _finish(self, better: Sequence[Proposal], to_beat: float) -> None:
        """Train the best of the better proposals to its end, and keep it if it is still the best there."""
        winner, last, lines = "", self.schedule[-1][0], []
        better = sorted(better, key=lambda one: -one.results[-1]["gain"])
        for one in better:
            line = {**one.results[-1], "decision": "better", "reason": f"better than the base; {winner} is kept"}
            if not winner:
                shown_at, (line,) = line["step"], self._measure([one], line["seeds"] - 1, last)
                if line["values"]:
                    line |= {"decision": "discard", "reason": "better than the base before, not the best at its end"}
                    if self._compare(line).value > to_beat:
                        winner = line["arm"]
                        line |= {"decision": "keep", "reason": "better than the base", "shown_at": shown_at}
            lines.append(line)
        self._record(better, lines)

    def _record(self, proposals: Sequence[Proposal], results: Sequence[dict[str, Any]]) -> None:
        """Add the costs so far to results, append them to the ledger, and print them."""
        for one, result in zip(proposals, results, strict=True):
            runs = [self.run_dir(one.line["key"], seed) for seed in range(result["seeds"])]
            trained = [RunSummary(run) for run in runs if (run / "metrics.jsonl").exists()]
            result["steps"] = sum(run.history.step for run in trained)
            result["seconds"] = round(sum(run.duration_s for run in trained), 1)
            one.results.append(result)
        if results:
            self.ledger.append(results)
        for result in results:
            print(printable(result_line(result)), flush=True)

    # --- runs ----------------------------------------------------------------------------------------------------

    def run_dir(self, key: str, seed: int) -> Path:
        """Return the folder of the run from the `seed`-th initial weights of an arm, named by its key, or "base"."""
        return self.folder / f"{key}-{seed}"

    def values(self, key: str, seeds: int, metric: str, step: int) -> np.ndarray:
        """Return the metric of the first runs of an arm at a step, as `mmldlm compare` defines it, or NaN."""
        runs = [RunSummary(self.run_dir(key, seed)).final_values(step) for seed in range(seeds)]
        if key == "base" and (lacking := next((run for run in runs if metric not in run), None)) is not None:
            names = [name for name in lacking if better_direction(name) and name.startswith(METRICS)]
            raise ConfigError(f"--metric: expected one of {', '.join(names)} at step {step}, found {metric}")
        return np.array([run.get(metric, math.nan) for run in runs])

    def train(self, runs: Sequence[tuple[Arm, int]], step: int) -> list[MmldlmError | None]:
        """Train runs, given by arm and number of initial weights, up to a step, `jobs` at a time, and save them.

        Return the error of each run that fails by its arm's fault. Any other error ends all runs and is raised.
        """
        waiting = [run for run in runs if reached(self._folder(*run)) < step]
        errors = dict[tuple[str, int], MmldlmError | None]()
        with stop_at_signals(CONTINUE):
            for first in range(0, len(waiting), self.jobs):
                if time.monotonic() > self.deadline:
                    raise StoppedBySignal(f"--budget: the hours are used up; {CONTINUE}")
                processes: list[subprocess.Popen[bytes]] = []
                try:
                    for place, run in enumerate(waiting[first : first + self.jobs]):
                        processes.append(self._start(*run, step, place))
                    codes = [process.wait() for process in processes]
                except BaseException:  # after a signal, the runs save before this process ends
                    for process in processes:
                        process.send_signal(signal.SIGTERM)
                    for process in processes:
                        process.wait()
                    raise
                for (arm, seed), code in zip(waiting[first:], codes, strict=False):
                    errors[arm.key, seed] = self._error(arm, seed, step, code)
        return [errors.get((arm.key, seed)) for arm, seed in runs]

    def _folder(self, arm: Arm, seed: int) -> Path:
        return self.run_dir("base" if arm is self.base else arm.key, seed)

    def _start(self, arm: Arm, seed: int, step: int, place: int) -> subprocess.Popen[bytes]:
        """Start a run with the launcher at one of the `jobs` places, which divide the GPUs and cores."""
        run_dir, settings = self._folder(arm, seed), self.base.settings
        first = settings["run.seed"] if settings["run.init_seed"] is None else settings["run.init_seed"]
        launcher, _, options = self.launch.partition(" -- ")  # options after " -- " are for `mmldlm.train`
        words = shlex.split(launcher) if launcher else [sys.executable]
        if arm.tree is not None:  # the run starts in another folder than the launcher's relative files
            words = [str(Path(word).absolute()) if Path(word).is_file() else word for word in words]
        words.append("--module" if Path(words[0]).name == "deepspeed" else "-m")
        words += ["mmldlm.train", *arm.arguments, f"run.dir={run_dir}", f"run.init_seed={first + seed}"]
        words += [*shlex.split(options), f"--stop-at={step}"]
        variables = environment(arm.tree)
        if self.jobs > 1:
            gpus = variables.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
            if own := gpus.split(",")[place :: self.jobs] if gpus else []:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self.jobs)))
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / LOG).open("wb") as output:
            try:
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                return subprocess.Popen(words, cwd=arm.tree, env=variables, **streams)
            except OSError as error:
                raise UsageError(f"--launch: expected a command, found {words[0]}: {error.strerror}") from None

    def _error(self, arm: Arm, seed: int, step: int, code: int) -> MmldlmError | None:
        """Return the arm's fault that kept an ended run from reaching `step`. Raise an error for any other reason."""
        run_dir = self._folder(arm, seed)
        if reached(run_dir) >= step:
            return None
        log = run_dir / LOG
        exits = History(run_dir).exits if (run_dir / "exit.json").exists() else []
        code = exits[0].code if exits and self.launch and code == 1 else code  # a launcher hides the run's own code
        code = ExitCode.PEER_LOST if code < 0 or code >= 128 else code  # a signal is not the arm's fault
        cause = last_line(log.read_text(encoding="utf-8", errors="replace")).removeprefix("mmldlm: error: ")
        error = error_from_exit_code(code, f"{arm.text}: exit code {code} at its training: {cause} ({log})")
        if error.exit_code not in _FAULTS:
            raise error
        return error


def reached(run_dir: Path) -> int:
    """Return the step at which a run last saved and ended, or 0 if it never did."""
    if not (run_dir / "metrics.jsonl").exists():
        return 0
    return max((record["step"] for record in History(run_dir).by_kind("end")), default=0)


def result_line(result: dict[str, Any]) -> str:
    """Format a result for the terminal."""
    decision = f"{result['decision'] or 'undecided'}{', ' if result['reason'] else ''}{result['reason']}"
    line = f"{result['n']}. {result['arm']}: {decision}"
    if result["gain"] is None:
        return line
    low, high = (f"{100 * bound:+.3g}" for bound in result["interval"])
    runs = "a run" if result["seeds"] == 1 else f"{result['seeds']} runs"
    gain = f"better by {100 * result['gain']:+.3g} % [{low}, {high}]"
    return f"{line}; {result['metric']} {gain} at step {result['step']:,} of {runs}"
