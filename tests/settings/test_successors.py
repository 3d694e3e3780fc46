"""Settings, options and commands that are gone: old names work for two versions, and records are read for good.

`log.evry` was renamed to `log.every` after 0.1.0, and `log.gone`, `model.gone` were removed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import mmldlm
from mmldlm import cli, train
from mmldlm.loading.load import run_config
from mmldlm.settings import successors
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.runs import History
from tests.helpers.changed_checkpoints import manifest_body, replace_file, seal
from tests.helpers.user_errors import assert_user_error

pytestmark = pytest.mark.quick
NOTICE = "notice: log.evry is now log.every (renamed after 0.1.0); the old name will be refused from 0.4.0\n"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set mmldlm's version, by default 0.2.0, and forget the notices."""

    def become(text: str) -> None:
        monkeypatch.setattr(successors, "__version__", text)
        monkeypatch.setattr(successors, "_noticed", set())

    monkeypatch.setitem(successors.RENAMED, "log.evry", ("log.every", "0.1.0"))
    for key in ("log.gone", "model.gone"):
        monkeypatch.setitem(successors.REMOVED, key, (1, "use log.figures_every"))
    become("0.2.0")
    return become


@pytest.fixture
def call(version: object, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main([*map(str, arguments)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "preset.yaml"
    path.write_text("log:\n  evry: 7\n", encoding="utf-8")
    return path


def make_old(folder: Path, group: str, key: str | None, old: str, value: object = None) -> None:
    """Give the configs of a run folder and its checkpoints the setting `old`, in place of `key` or with a value."""
    for path in (folder / "config.yaml", *folder.glob("checkpoints/*/config.yaml")):
        settings = read_yaml(path)
        settings[group][old] = settings[group].pop(key) if key else value
        text = yaml.safe_dump(settings)
        path.write_text(text, encoding="utf-8")
        if path.parent != folder:
            replace_file(path.parent, path.name, text.encode())


def test_an_old_name_works_with_a_notice(call: Call, preset: Path, tmp_path: Path) -> None:
    extending = tmp_path / "own.yaml"
    extending.write_text("extends: preset.yaml\nlog: {figure_samples: 8}\n", encoding="utf-8")
    for arguments, value, origin in (
        ([preset], 7, f"{preset}:2"),
        ([preset, "log.evry=9"], 9, "command line"),
        ([preset, "log.every=9"], 9, "command line"),
        ([extending, "log={evry: 9}"], 9, "command line"),
        ([extending], 7, f"{preset}:2"),
    ):
        successors._noticed.clear()
        code, out, err = call("config", "--json", *arguments)
        assert (code, err) == (0, NOTICE), arguments
        assert json.loads(out)["log.every"] == {"value": value, "origin": origin}, arguments


def test_only_the_first_rank_has_a_notice(call: Call, preset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert call("config", preset)[::2] == (0, "")


def test_both_names_are_refused(call: Call, preset: Path) -> None:
    code, _, err = call("config", preset, "log.evry=1", "log.every=2")
    assert_user_error((code, err), 64, "command line", "log.evry", "log.every", alone=False)
    preset.write_text("log: {every: 5, evry: 7}\n", encoding="utf-8")
    code, _, err = call("config", preset)
    assert_user_error((code, err), 64, str(preset), "log.evry", "log.every", alone=False)


@pytest.mark.parametrize("now", ["0.3.9", "0.4.0", "0.12.0", "1.0.0"])
def test_an_old_name_is_refused_after_two_versions(
    call: Call, version: Callable[[str], None], preset: Path, now: str
) -> None:
    version(now)
    empty = preset.with_name("empty.yaml")
    empty.write_text("{}", encoding="utf-8")
    for arguments, source in (([preset], preset), ([empty, "log.evry=9"], "command line")):
        code, _, err = call("config", *arguments)
        if now == "0.3.9":
            assert code == 0 and err in (NOTICE, ""), "once"
        else:
            assert_user_error((code, err), 64, f"{source}: log.evry is gone, use log.every (renamed after 0.1.0)")


def test_records_are_read_for_good(
    call: Call,
    version: Callable[[str], None],
    short_run_dir: Path,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that an earlier version wrote, as it is shown, sampled from, verified, trained on and exported."""
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    shutil.copytree(short_run_dir, run)
    make_old(run, "log", "every", "evry")
    notice = f"notice: log.evry in {run / 'config.yaml'} is now log.every (renamed after 0.1.0)\n"
    version("0.9.0")
    assert call("config", run)[::2] == (0, notice)
    version("0.9.0")
    code, _, err = call("sample", run, "--mode", "joint", "sampling.steps=1")
    assert code == 0 and err.count("notice") == 1 and notice in err
    assert run_config(run).log.every == 1
    version("0.2.0")
    settings = ["train.steps=21", "validation.every=0", "optim.lr=1e-2", "optim.warmup_steps=0", "log.evry=1"]
    code, out, err = call("train", tiny_config, *settings)
    assert code == 0 and "resuming from" in out and "evry" not in out
    assert err.count("notice") == 1 and NOTICE in err, "of the user's name, once"
    assert "evry" not in (run / "config.yaml").read_text(encoding="utf-8")
    assert cli.main(["export", str(run), str(bundle)]) == 0
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    config["log"] |= {"evry": 3, "gone": 2}
    del config["log"]["every"]
    replace_file(bundle, "config.json", json.dumps(config).encode())
    version("0.9.0")
    code, _, err = call("sample", bundle, "--mode", "joint", "sampling.steps=1")
    assert code == 0 and err.count("notice") == 2 and "log.evry in " in err
    assert run_config(bundle).log.every == 3
    monkeypatch.setitem(successors.RENAMED, "sampling.stps", ("sampling.steps", "0.9.0"))
    assert len(mmldlm.load(bundle).sample(count=2, stps=1).texts) == 2


def test_records_of_a_run_are_compared_by_present_names(call: Call, short_run_dir: Path, tmp_path: Path) -> None:
    """By `verify` and by what draws curves; `tf32` was added after the run."""
    run = tmp_path / "run"
    shutil.copytree(short_run_dir, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for settings in (read_yaml(run / "config.yaml"), lines[0]["config"]):
        settings["log"]["evry"] = settings["log"].pop("every")
        del settings["tf32"]
        text = yaml.safe_dump(settings)
    (run / "config.yaml").write_text(text.replace(str(short_run_dir), str(run)), encoding="utf-8")
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    code, out, err = call("verify", run)
    assert code == 0 and err.count("notice") == 1, out + err
    assert History(run).config["log.every"] == 1


def test_a_removed_setting(call: Call, version: Callable[[str], None], short_run_dir: Path, tmp_path: Path) -> None:
    """It is refused where it can be changed. Where it cannot, it is left out, unless the network had it."""
    for arguments in (["log.gone=1"], ["log={gone: 1}"], ["model.gone=1"]):
        (tmp_path / "own.yaml").write_text("{}", encoding="utf-8")
        code, _, err = call("config", tmp_path / "own.yaml", *arguments)
        assert_user_error((code, err), 64, "command line: ", ".gone is gone, use log.figures_every")
    (tmp_path / "own.yaml").write_text("log: {gone: 1}", encoding="utf-8")
    code, _, err = call("config", tmp_path / "own.yaml")
    assert_user_error((code, err), 64, "own.yaml: log.gone is gone, use log.figures_every")
    for group, value, code, words in (
        ("log", 1, 0, ""),
        ("log", 2, 0, "log.gone is gone, and 2 in "),
        ("model", 1, 0, ""),
        ("model", 2, 64, "config.yaml: model.gone is gone, use log.figures_every"),
    ):
        version("0.9.0")
        run = tmp_path / f"{group}-{value}"
        shutil.copytree(short_run_dir, run)
        make_old(run, group, None, "gone", value)
        result, _, err = call("sample", run, "--mode", "joint", "sampling.steps=1")
        assert result == code and words in err and (".gone" in err) == bool(words), (group, value)


def test_a_setting_moves_to_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its own is gone, by several renames, and where the tree is no tree of settings."""
    for old, new in (("old.evry", "logs.evry"), ("logs.evry", "log.every")):
        monkeypatch.setitem(successors.RENAMED, old, (new, "0.1.0"))
    assert successors.current({"old": {"evry": 3}, "log": {"figures_every": 2}}, "") == {
        "log": {"figures_every": 2, "every": 3}
    }
    assert successors.current_overrides(["a", "old.evry=3", "log={every: 2}"]) == ["a", "log.every=3", "log={every: 2}"]
    for tree in ({"old": 3}, {"old": None, 5: 6}, [1], None):
        assert successors.current(tree, "") == tree


def test_the_identity_of_a_checkpoint_is_read_by_present_names(
    call: Call, short_run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(short_run_dir, run)
    make_old(run, "model", "num_heads", "heads")
    (checkpoint,) = run.glob("checkpoints/step-*")
    body = manifest_body(checkpoint)
    network = body["info"]["identity"]["model"]
    network["heads"] = network.pop("num_heads")
    network["gone"] = 1
    seal(checkpoint, body)
    assert call("sample", run, "--mode", "joint", "sampling.steps=1")[0] == 64
    monkeypatch.setitem(successors.RENAMED, "model.heads", ("model.num_heads", "0.1.0"))
    code, _, err = call("sample", run, "--mode", "joint", "sampling.steps=1")
    assert code == 0 and err.count("notice") == 1


def test_removed_options_say_what_to_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(successors.REMOVED_WORDS, "train --fast", "use compile.scope=regional")
    for run in (cli.main, lambda arguments: train.main(arguments[1:])):
        for option in ("--fast", "--fast=1"):
            code = run(["train", "own.yaml", option])
            words = "mmldlm train --fast is gone, use compile.scope=regional"
            assert_user_error((code, capsys.readouterr().err), 2, words)
