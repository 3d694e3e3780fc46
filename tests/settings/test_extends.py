"""`extends:` in run configs: precedence, refused files, and reproducibility from the run folder alone."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.config import RunConfig, load_config, load_with_provenance, write_config
from mmldlm.errors import ConfigError
from mmldlm.loading.load import load_run, run_config
from mmldlm.settings.fields import build
from mmldlm.settings.yaml import parse_yaml
from tests.helpers.engine_runs import record_list
from tests.helpers.operations import count_calls
from tests.helpers.paths import ROOT
from tests.helpers.tiny_config import TINY

quick = pytest.mark.quick


def write(folder: Path, **texts: str) -> Path:
    """Files NAME.yaml with these texts; the first one's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(texts))}.yaml"


@quick
def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mine="extends: [a.yaml, deep/b.yaml]\noptim: {lr: 3}\n",
        a="optim: {lr: 1, eps: 1e-3, muon: {momentum: 0.5, nesterov: false}, name: muon}\ntrain: {steps: 5}",
    )
    write(tmp_path / "deep", b="extends: ../c.yaml\noptim: {lr: 2, muon: {nesterov: true}}\n")
    write(tmp_path, c="train: {steps: 7}\nlog: {every: 3}\n")
    config = load_config(path)
    assert (config.optim.lr, config.optim.eps, config.optim.muon.momentum) == (3, 1e-3, 0.5)
    assert config.optim.muon.nesterov and config.train.steps == 7 and config.log.every == 3
    assert load_config(path, ["optim.lr=4"]).optim.lr == 4
    assert load_config(path, ["optim={lr: 4}"]).optim.eps == RunConfig().optim.eps, "a group given as a whole is whole"


@quick
def test_lists_and_maps_are_values_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mine="extends: a.yaml\nmode: {t2l: 1}\nmode_schedule: {9: joint}\nfreeze: [text_head]\n",
        a="mode: {l2t: 1, joint: 1}\nmode_schedule: {5: l2t}\nfreeze: [backbone]\n",
    )
    config = load_config(path)
    assert (config.mode, config.mode_schedule, config.freeze) == ({"t2l": 1}, {9: "joint"}, ["text_head"])


@quick
def test_a_file_that_two_extend_undoes_neither(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        mine="extends: [a.yaml, b.yaml]",
        a="extends: common.yaml\noptim: {lr: 1}",
        b="extends: ./../" + tmp_path.name + "/common.yaml\ntrain: {steps: 2}",
        common="optim: {lr: 9}\ntrain: {steps: 9}\nlog: {every: 9}",
    )
    config = load_config(path)
    assert (config.optim.lr, config.train.steps, config.log.every) == (1, 2, 9)


@quick
def test_a_mixture_takes_the_place_of_an_inherited_path_and_the_reverse(tmp_path: Path) -> None:
    preset = ROOT / "configs/tiny.yaml"
    assert load_config(preset).data.path, "the presets name a store"
    mixed, other = {"a": 1.0, "b/c": 3.0}, {"a": 2.0}
    for data in (
        load_config(preset, ["data.mixture={a: 1, b/c: 3}"]).data,
        load_config(preset, ["data.mixture.a=1", "data.mixture.b/c=3"]).data,
        load_config(write(tmp_path, mine=f"extends: {preset}\ndata: {{mixture: {mixed}}}")).data,
        load_config(
            write(tmp_path, mine=f"extends: {preset}\ndata: {{mixture: {other}}}"), [f"data.mixture={mixed}"]
        ).data,
    ):
        assert (data.path, data.mixture) == ("", mixed)
    mine = write(tmp_path, mine=f"extends: {preset}\ndata: {{mixture: {mixed}}}")
    assert load_config(mine, ["data.path=d"]).data.location == "d"
    assert load_with_provenance(mine)[1]["data.path"] == "default"
    # A written config has both keys, of which one is empty.
    (tmp_path / "written").mkdir()
    write_config(load_config(preset), tmp_path / "written")
    assert load_config(tmp_path / "written/config.yaml", [f"data.mixture={mixed}"]).data.location == mixed
    for overrides in (["data.mixture={a: 1}", "data.path=d"], ["data={path: d, mixture: {a: 1}}"]):
        with pytest.raises(ConfigError, match=r"data.mixture: expected this or data.path, found both"):
            load_config(preset, overrides)


@quick
def test_checks_apply_to_the_merged_config(tmp_path: Path) -> None:
    """heads that do not fit the default width, but fit that of another file."""
    path = write(tmp_path, mine="extends: a.yaml\nmodel: {width: 192}", a="model: {num_heads: 3}")
    assert load_config(path).model.num_heads == 3
    with pytest.raises(ConfigError, match=r"model.num_heads: model.width 256"):
        load_config(tmp_path / "a.yaml")


REFUSED = {
    "itself": ({"a": "extends: a.yaml"}, "a.yaml: extends: a file must not extend itself, found A -> A"),
    "a circle": (
        {"a": "extends: b.yaml", "b": "extends: [c.yaml]", "c": "extends: a.yaml"},
        "c.yaml: extends: a file must not extend itself, found A -> B -> C -> A",
    ),
    "no file": ({"a": "extends: [b.yaml, no.yaml]", "b": "{}"}, "a.yaml: extends: expected a file, found none at"),
    "a folder": ({"a": "extends: ."}, "a.yaml: extends: expected a file, found none at"),
    "nothing": ({"a": "extends: ''"}, "a.yaml: extends: expected a file, found none at"),
    "an endless one": ({"a": "extends: /dev/zero"}, "a.yaml: extends: expected a file, found none at /dev/zero"),
    "a pipe": ({"a": "extends: pipe"}, "a.yaml: extends: expected a file, found none at"),
    "no name": ({"a": "extends: 5"}, "a.yaml: extends: expected text or list, found 5"),
    "null": ({"a": "extends:"}, "a.yaml: extends: expected text or list, found None"),
    "a map": ({"a": "extends: {b: c}"}, "a.yaml: extends: expected text or list, found {'b': 'c'}"),
    "lists in lists": ({"a": "extends: [[b.yaml]]"}, "a.yaml: extends.0: expected text, found"),
    "no YAML": ({"a": "extends: b.yaml", "b": "a: ["}, "a.yaml: extends: "),
    "tags": ({"a": "extends: b.yaml", "b": "a: !!python/object/apply:os.system [x]"}, "b.yaml, line 1: not valid YAML"),
    "no mapping": ({"a": "extends: b.yaml", "b": "- run"}, "b.yaml: expected settings (key: value), found list"),
    "within a group": ({"a": "run: {extends: b.yaml}", "b": ""}, "unknown key 'run.extends'"),
    "an unknown key below": (
        {"a": "extends: b.yaml\noptim: {lr: 1}", "b": "optim: {lrr: 1}"},
        "b.yaml: unknown key 'optim.lrr': did you mean 'optim.lr'?",
    ),
    "a wrong value that another would replace": (
        {"a": "extends: b.yaml\noptim: {lr: 1}", "b": "optim: {lr: fast}"},
        "b.yaml: optim.lr: expected number, found 'fast'",
    ),
    "a wrong value above": (
        {"a": "extends: b.yaml\noptim: {lr: fast}", "b": "optim: {lr: 1}"},
        "a.yaml: optim.lr: expected number, found 'fast'",
    ),
    "a group that is none": (
        {"a": "extends: b.yaml\nmodel: {depth: 2}", "b": "model: 5"},
        "b.yaml: model: expected keys below it, found 5",
    ),
}


@quick
@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_files(tmp_path: Path, name: str) -> None:
    texts, expected = REFUSED[name]
    path = write(tmp_path, **texts)
    os.mkfifo(tmp_path / "pipe")
    for letter in "ABC":
        expected = expected.replace(f"> {letter}", f"> {tmp_path}/{letter.lower()}.yaml")
        expected = expected.replace(f"found {letter} ", f"found {tmp_path}/{letter.lower()}.yaml ")
    errors: list[str] = []

    def load() -> None:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        errors.append(str(caught.value))

    assert count_calls(load) < 1_000_000
    assert expected in errors[0] and len(errors[0]) <= 2000 and "\n" not in errors[0]


@quick
def test_extends_is_for_files(tmp_path: Path) -> None:
    path = write(tmp_path, a="{}", b="{}")
    with pytest.raises(ConfigError, match=r"^extends: expected in a config file, found on the command line$"):
        load_config(path, [f"extends={tmp_path}/b.yaml"])


# --- a run from its folder alone --------------------------------------------------------------------------------


@quick
def test_a_full_disk_leaves_the_config_of_a_run(tmp_path: Path) -> None:
    write_config(RunConfig(), tmp_path)
    before, limits = (tmp_path / "config.yaml").read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError):
            write_config(RunConfig(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "config.yaml").read_text() == before


@quick
@pytest.mark.parametrize("text", ["", "# a comment\n"])
def test_an_empty_config_is_not_all_defaults(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    for read in (load_config, run_config):
        with pytest.raises(ConfigError, match=r"config.yaml: expected settings \(key: value\), found nothing"):
            read(tmp_path / "config.yaml" if read is load_config else tmp_path)


def curve(run: Path) -> list[tuple[float, float]]:
    return [(record["loss/total"], record["optim/grad_norm"]) for record in record_list(run)]


def test_run_is_reproducible_from_its_folder(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start from a config that extends others, with relative paths and overrides; then from another folder."""
    (tmp_path / "stores").mkdir()
    (tmp_path / "stores" / "tiny").symlink_to(tiny_store)
    base = TINY.format(run="runs/first", store="stores/tiny") + "mode: {l2t: 1, joint: 2}\n"
    write(tmp_path / "configs", mine="extends: base.yaml\noptim: {eps: 1e-6}\n", base=base)
    monkeypatch.chdir(tmp_path)
    assert train.main(["configs/mine.yaml", "optim.clip_norm=0.5", "run.seed=8"]) == 0
    first = tmp_path / "runs" / "first"
    written = parse_yaml((first / "config.yaml").read_text(), "config.yaml")
    assert "extends" not in written and written["run"]["dir"] == str(first)
    assert written["data"]["path"] == str(tmp_path / "stores" / "tiny")
    (tmp_path / "configs" / "base.yaml").unlink()
    monkeypatch.chdir("/")
    again = tmp_path / "again"
    assert train.main([str(first / "config.yaml"), f"run.dir={again}"]) == 0
    assert curve(again) == curve(first) and len(curve(first)) == 8
    assert (again / "config.yaml").read_text() == (first / "config.yaml").read_text().replace(str(first), str(again))
    assert load_run(first).store.path == tmp_path / "stores" / "tiny", "nor is it sampled from there alone"
    # From the same config into the same folder it continues, from anywhere.
    capsys.readouterr()
    assert train.main([str(first / "config.yaml"), "train.steps=9", "schedule.lr=constant"]) == 0
    shown = capsys.readouterr().out
    assert "steps 8 to 9" in shown and "changed since: schedule.lr: cosine -> constant" in shown
    assert "data.path" not in shown and "run.dir" not in shown


@quick
def test_written_configs_cannot_extend(tmp_path: Path) -> None:
    write(tmp_path, config="extends: other.yaml", other="run: {seed: 1}")
    with pytest.raises(ConfigError, match="unknown key 'extends'"):
        load_run(tmp_path)


@quick
def test_empty_paths_and_words_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmldlm.config import with_absolute_paths

    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(RunConfig()) == RunConfig()
    chosen = build(RunConfig, {"resume": "runs/a/../step", "data": {"path": "/x"}})
    result = with_absolute_paths(chosen)
    assert (result.resume, result.data.path) == (f"{tmp_path}/runs/a/../step", "/x")
    mixed = build(RunConfig, {"data": {"mixture": {"one": 0.7, "/two": 0.3}}})
    assert with_absolute_paths(mixed).data.mixture == {f"{tmp_path}/one": 0.7, "/two": 0.3}
