"""Arms of a race: what an arm changes in the base, whether the two can be compared, and how the arm is trained."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.config import RunConfig, load_config, require_paths, with_absolute_paths
from mmldlm.diffusion.noise import trained_modes
from mmldlm.errors import ConfigError, UsageError
from mmldlm.settings.declaration import flat_settings
from mmldlm.tools.compare.paired import LOSS, ORDER, changed_settings
from mmldlm.tools.config import to_flow_yaml
from mmldlm.trainer.consistency import code_hash
from mmldlm.utils.short_repr import truncate

BOUND = "validation/text_l2t"  # no setting changes the meaning of this metric
GIT = "git:"

_OWNED = ("run.dir", "run.init_seed")  # settings that the race itself decides
_SHARED = (*ORDER, "train.steps", "validation")  # settings that decide which samples and steps a value is about
# Settings that a training loss does not reflect, or that change the quantity it averages.
_UNSEEN = (*LOSS, "ema", "model.dropout")


@dataclass(frozen=True)
class Arm:
    """A config, and the code that trains it.

    Attributes:
        text: The arm as written in the ledger. Parsing it again gives the same arm.
        key: Hash of the arm's identity: base and code, and the settings or the tree of the commit.
        settings: Resolved settings by dotted key, as in JSON.
        arguments: Arguments of `mmldlm train`: the config file and settings.
        tree: Checkout of the revision that trains the arm, if it is another one.
    """

    text: str
    key: str
    settings: Mapping[str, Any]
    arguments: tuple[str, ...]
    tree: Path | None = None

    @classmethod
    def base(cls, path: Path) -> Arm:
        """Return the base: the arm that all others are compared with."""
        settings = _load(path)
        return cls("base", _hash("base", code_hash(), _own(settings)), settings, (str(path),))

    @classmethod
    def parse(cls, text: str, base: Arm, folder: Path) -> Arm:
        """Parse an arm: settings, a config file, or git:REVISION, which is checked out in `folder`.

        Raises:
            ConfigError, UsageError: The arm does not start, or has other samples than the base.
        """
        if text.startswith(GIT):
            arm = _of_revision(text, base, folder)
        else:
            if Path(text).suffix in (".yaml", ".yml"):
                text = str(Path(text).absolute())
                arguments = [text]
            else:  # only a comma before a key and "=" separates settings: others are part of a list or map
                arguments = [base.arguments[0], *re.split(r",(?=\s*[a-z_]\w*(?:\.\w+)*=)", text)]
            settings = _load(Path(arguments[0]), arguments[1:])
            arm = cls(text, _hash(base.key, _own(settings)), settings, tuple(arguments))
        for key in changed_settings(base.settings, arm.settings, _SHARED):
            expected, found = base.settings.get(key), arm.settings.get(key)
            raise ConfigError(f"{text}: {key}: expected {expected} as in the base, for the same samples, found {found}")
        return arm

    def changes(self, base: Arm) -> dict[str, Any]:
        """Return the arm's values of all settings that differ from the base, and its commit, if it has one."""
        settings = {key: value for key, value in _own(self.settings).items() if value != base.settings.get(key)}
        return settings | ({"git": self.text.removeprefix(GIT)} if self.tree else {})

    def metric(self, metric: str, base: Arm) -> str:
        """Return the metric to compare by: `metric`, or the bound if the arm changes the meaning of `metric`.

        Raises:
            ConfigError: No metric can compare the arm with the base.
        """
        group = metric.partition("/")[0]
        keys = changed_settings(base.settings, self.settings, LOSS if group == "validation" else _UNSEEN)
        by_code = self.tree is not None and group in ("loss", "accuracy")
        if group == "quality" or metric == BOUND or not (keys or by_code):
            return metric
        modes = [trained_modes(arm.settings["mode"], arm.settings["mode_schedule"]) for arm in (base, self)]
        if not all("l2t" in trained for trained in modes):
            changed = ", ".join(keys) or "the code"
            raise ConfigError(
                f"{self.text}: expected --metric quality/..., since {changed} changes the meaning of {metric}"
            )
        return BOUND


def _load(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    config = load_config(path, overrides)
    require_paths(config, "data.path", "run.dir")
    if config.resume != "auto":
        raise ConfigError(f"resume: expected auto, so that each turn continues the run, found {config.resume}")
    return _as_json(with_absolute_paths(config))


def _as_json(config: RunConfig) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(json.dumps(flat_settings(config)))
    return settings


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _OWNED}


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _of_revision(text: str, base: Arm, folder: Path) -> Arm:
    """Return the base's config as trained by another revision of the repository in the current folder."""
    commit = _git(text, "rev-parse", "--verify", "--quiet", f"{text.removeprefix(GIT)}^{{commit}}")
    root = Path(_git(text, "rev-parse", "--show-toplevel"))
    tree = folder / commit[:12]
    # Check out again, since a kill may have left half a checkout, or somebody may have changed it.
    if not tree.is_dir() or _git(text, "-C", str(tree), "status", "--porcelain", "--untracked-files=no"):
        shutil.rmtree(tree, ignore_errors=True)
        _git(text, "worktree", "prune")
        _git(text, "worktree", "add", "--force", "--detach", str(tree), commit)
    path = Path(base.arguments[0])
    if path.is_relative_to(root) and (tree / path.relative_to(root)).is_file():
        path = tree / path.relative_to(root)  # the commit may have its own version of the base
    given = _as_json(load_config(base.arguments[0]))
    paths = [f"{key}={to_flow_yaml(base.settings[key])}" for key in given if given[key] != base.settings[key]]
    command = [sys.executable, "-m", "mmldlm", "config", str(path), *paths, "--json"]
    shown = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    if shown.returncode:
        raise ConfigError(f"{text}: expected a revision that starts, found {last_line(shown.stderr)}")
    settings = {key: entry["value"] for key, entry in json.loads(shown.stdout).items()}
    key = _hash(base.key, _git(text, "rev-parse", f"{commit}^{{tree}}"))
    return Arm(f"{GIT}{commit}", key, settings, (str(path), *paths), tree)


def _git(text: str, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if done.returncode:
        problem = last_line(done.stderr) or "no such commit"
        raise UsageError(f"{text}: expected a revision of the repository here, found {problem}")
    return done.stdout.strip()


def last_line(text: str) -> str:
    """Return the last line of a program's output. It says what is wrong."""
    return truncate((text.strip().splitlines() or [""])[-1], 400)


def environment(tree: Path | None) -> dict[str, str]:
    """Return the environment for processes that run the code of a checkout, or of this package."""
    if tree is None:
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))}
