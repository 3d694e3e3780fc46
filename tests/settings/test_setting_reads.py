"""Every setting is read by code that acts on it, observed during runs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, get_type_hints

import pytest
import torch

import mmldlm
from mmldlm import cli, train
from mmldlm.config import RunConfig, load_config
from mmldlm.errors import ExitCode
from mmldlm.settings.declaration import key_of, leaves
from tests.helpers.observed_run import BASE, EXPLODING

PACKAGE = Path(mmldlm.__file__).parent
# What handles settings without acting on them: files of it, and functions in others.
FILES = (
    "settings/declaration.py",
    "settings/fields.py",
    "settings/layers.py",
    "tools/config.py",
    "trainer/consistency.py",
)
FUNCTIONS = ("__post_init__", "require_paths", "with_absolute_paths", "trained_modes")

# Settings under which a key is read that is not read in `BASE`, each a run of its own. Add to it where the test asks.
RUNS: tuple[tuple[str, ...], ...] = (
    ("checkpoint.every_steps=2", "profile.steps=[2, 2]", "data.num_workers=1"),
    ("checkpoint.every_steps=2", "train.steps=4"),  # which resumes from the one before
    ("resume=never", *EXPLODING),
    ("resume=never", *EXPLODING, "guard.grad_norm_spike=10"),
    ("resume=never", "schedule.lr=cosine_restarts", "latent.time_sampling=logit_normal", "loss.latent=huber"),
    ("resume=never", "schedule.lr=wsd", "text.time_sampling=mode", "latent.time_sampling=mode", "train.steps=2"),
    ("resume=never", "schedule={lr: plateau, patience: 1, threshold: 0.9}", "validation.every=1", "train.steps=5"),
    ("resume=never", "loss.latent_time_weighting=min_snr", "optim.lr_scaling=sqrt", "ema.decay=0.9", "train.steps=2"),
    ("resume=never", "train.steps=1", "validation.quality_every=1", "validation.quality_samples=2"),
    ("resume=never", "log.tensorboard=true", "checkpoint.mirror=/dev/null/no/folder", "train.steps=1"),
    ("resume=never", "optim.name=muon", "memory.activation_checkpointing=every_k", "compile.scope=regional"),
)
# Keys that only a check of other keys reads.
IN_CHECKS_ALONE = {"distributed.allow_long_timeout": "lifts the bound of the timeouts"}


def classes(cls: type, prefix: str = "") -> Iterator[tuple[type, dict[str, str]]]:
    """Every class of settings below `cls`, with the dotted key of each attribute that is a setting."""
    hints = get_type_hints(cls)
    groups = {f: hints[f.name] for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[f.name])}
    yield cls, {f.name: prefix + key_of(f) for f in dataclasses.fields(cls) if f not in groups}
    for field, group in groups.items():
        yield from classes(group, f"{prefix}{key_of(field)}.")


class Reads:
    """Context in which `keys` collects the settings that code of the package reads in order to act on them."""

    def __init__(self, cls: type = RunConfig, package: Path = PACKAGE):
        self.keys: set[str] = set()
        self.classes, self.package = list(classes(cls)), str(package)
        assert len({result for result, _ in self.classes}) == len(self.classes), "one class stands for two groups"

    def __enter__(self) -> Reads:
        for cls, keys in self.classes:
            cls.__getattribute__ = self._recording(keys)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cls, _ in self.classes:
            del cls.__getattribute__

    def _recording(self, keys: dict[str, str]) -> Any:
        def __getattribute__(settings: Any, name: str) -> Any:
            if name in keys and self._acts(sys._getframe(1).f_code):
                self.keys.add(keys[name])
            return object.__getattribute__(settings, name)

        return __getattribute__

    def _acts(self, code: CodeType) -> bool:
        name = getattr(code, "co_qualname", code.co_name)  # with the function around it, from Python 3.11 on
        within = code.co_filename.startswith(self.package) and not code.co_filename.endswith(FILES)
        return within and not any(function in name for function in FUNCTIONS)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> set[str]:
    """Keys that are read in some run, or by what is done with its folder."""
    folder = tmp_path_factory.mktemp("read") / "run"
    config = folder.with_suffix(".yaml")
    config.write_text("{}", encoding="utf-8")
    given = [str(config), *BASE, f"run.dir={folder}", f"data.path={tiny_store}"]
    with Reads() as reads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)  # which would take minutes
        for settings in RUNS:
            assert train.main([*given, *settings]) in (ExitCode.DONE, ExitCode.NUMERICAL), settings
        assert train.main([*given, f"run.dir={folder}-2", f"init.from={folder}", "train.steps=1"]) == 0
        assert train.main([*given, "--dry-run"]) == 0
        assert cli.main(["evaluate", str(folder), "--samples", "4", "--texts", "2", "--times", "1"]) == 0
        assert cli.main(["sample", str(folder), "--mode", "joint", "--length", "4"]) == 0
    return reads.keys


def test_every_key_is_read(read: set[str]) -> None:
    keys = {key for key, _ in leaves(RunConfig)}
    unread = sorted(keys - read - IN_CHECKS_ALONE.keys())
    assert not unread, (
        f"no code of mmldlm/ reads {', '.join(unread)} in order to act on it. Either the setting does nothing, or it "
        "is read only under settings that no run of tests/settings/test_setting_reads.py has: then add those to RUNS"
    )
    assert keys >= IN_CHECKS_ALONE.keys() and not read & IN_CHECKS_ALONE.keys()


@dataclasses.dataclass(frozen=True)
class _Group:
    used: int = 1
    unused: int = 2
    checked: int = 3

    def __post_init__(self) -> None:
        assert all(self.checked for _ in range(1))


@dataclasses.dataclass(frozen=True)
class _Settings:
    group: _Group = _Group()
    async_: bool = True


@pytest.mark.quick
def test_reading_is_acting() -> None:
    """Checks, dumps, copies, comparisons and documentation do not count as reads."""
    before = _Settings.__getattribute__
    with Reads(_Settings, Path(__file__).parent) as reads:
        settings = _Settings(_Group())
        dataclasses.asdict(settings)
        dataclasses.replace(settings.group, unused=4)
        assert settings == _Settings() and repr(settings)
        assert reads.keys == set()
        assert settings.group.used and settings.async_
    assert reads.keys == {"group.used", "async"} and _Settings.__getattribute__ is before
    with Reads() as reads:
        load_config(None, ["optim.lr=1"])
    assert reads.keys == set()
