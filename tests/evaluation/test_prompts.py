"""`validation.prompts`: at each validation a text from the latent of each line, the same on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmldlm import cli, train
from mmldlm.data.store import Store
from mmldlm.distributed.collectives import Collectives
from mmldlm.errors import ExitCode
from mmldlm.evaluation.prompts import Prompts, prompt_samples, read_prompts
from mmldlm.loading.load import load_run
from mmldlm.telemetry.tensorboard import markdown_table
from tests.helpers.engine_runs import record_list
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.observed_run import shown_texts
from tests.helpers.sample_corpus import write_corpus
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error

LINES = ("The whale and the coral reef.", "Flour and butter of the oven.", "Rose and seed.", "The violin of the choir.")
SHOWN = ("log.tensorboard=true", "log.figures_every=0", "validation.text_samples=0")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


@pytest.mark.setting("validation.prompts")
def test_each_validation_shows_a_text_for_each_line(
    prompts: Path, tiny_config: Path, tmp_path: Path, forked: ForkedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run is that without prompts. Two ranks show what one does."""
    monkeypatch.chdir(tmp_path)
    given = [tiny_config, *SHOWN, "validation.prompts=prompts.txt"]
    assert train.main([*map(str, given)]) == 0
    run = load_run(tmp_path / "run")
    assert run.config.validation.prompts == str(prompts), "an absolute path, so that config.yaml repeats the run"
    shown = shown_texts(tmp_path / "run/tensorboard")
    assert [step for step, _ in shown] == [4, 8]
    loaded = read_prompts(run.config, Store.open(run.config.data.path))
    assert loaded is not None and (loaded.latents == run.store.standardize(run.encoder.encode(LINES))).all()
    rows = prompt_samples(run, Collectives(), loaded)
    assert [row["prompt"] for row in rows] == [*LINES]
    assert shown[-1][1] == markdown_table(rows)
    torch.manual_seed(0)
    for parameter in run.model.parameters():  # type: ignore[attr-defined]  # so that texts depend on latents
        parameter.data += 0.3 * torch.randn_like(parameter)
    (alone,) = prompt_samples(run, Collectives(), Prompts(loaded.lines[:1], loaded.latents[:1]))
    first, *others = prompt_samples(run, Collectives(), loaded)
    assert alone == first and first["generation"] not in [row["generation"] for row in others]
    assert train.main([str(tiny_config), *SHOWN, f"run.dir={tmp_path / 'without'}"]) == 0
    curves = [
        [
            {key: value for key, value in record.items() if key.startswith(("loss/", "validation/"))}
            for record in records
        ]
        for name in ("run", "without")
        for records in [record_list(tmp_path / name) + record_list(tmp_path / name, "validation")]
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 10
    forked.succeed("ddp", tmp_path / "two", 2, *given[:-1], f"validation.prompts={prompts}", "train.micro_batch_size=4")
    assert [step for step, _ in shown_texts(tmp_path / "two/tensorboard")] == [4, 8]
    assert shown_texts(tmp_path / "two/tensorboard")[0] == shown[0]


def test_a_line_may_have_a_prefix(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "corpus.txt", 300).read_text().splitlines()
    rows = [{"text": text, "question": f"what of {text.split()[1]}"} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--prefix-field=question", "--vocab-size=300", "--channels=8", "--validation-fraction=0.1"]
    store = tmp_path / "store"
    assert cli.main(["prepare", str(tmp_path / "rows.jsonl"), "--out", str(store), *given, "--test-fraction=0.1"]) == 0
    lines = [{"text": LINES[0], "prefix": "what of whale"}, {"text": LINES[1]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "config.yaml"
    config.write_text(TINY.format(run=tmp_path / "run", store=store))
    assert train.main([str(config), *SHOWN, f"validation.prompts={tmp_path / 'prompts.jsonl'}"]) == 0
    (_, first), (_, last) = shown_texts(tmp_path / "run/tensorboard")
    assert first.splitlines()[0] == last.splitlines()[0] == "| prefix | prompt | generation |"
    assert [line.split(" | ")[0] for line in last.splitlines()[2:]] == ["| what of whale", "| "]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("content", "settings", "code", "must_name"),
    [
        (None, [], ExitCode.DATA, ("prompts.txt", "cannot read")),
        ("", [], ExitCode.DATA, ("prompts.txt", "empty file")),
        ("The rose.\n\nThe reef.\n", [], ExitCode.DATA, ("validation.prompts", "prompts.txt:2", "empty document")),
        ("The rose.\nzzz\n", [], ExitCode.DATA, ("validation.prompts", "prompts.txt:2", "no latent")),
        ("The rose.\n", ["mode=t2l"], ExitCode.CONFIG, ("validation.prompts", "l2t", "t2l")),
        ("The rose.\n", ["log.tensorboard=false"], ExitCode.CONFIG, ("validation.prompts", "log.tensorboard")),
    ],
)
def test_what_shows_nothing_is_refused_before_anything_is_created(
    content: str | None,
    settings: list[str],
    code: int,
    must_name: tuple[str, ...],
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_text(content)
    result = train.main([str(tiny_config), *SHOWN, f"validation.prompts={path}", *settings]), capsys.readouterr().err
    assert_user_error(result, code, *must_name)
    assert not (tmp_path / "run").exists()
