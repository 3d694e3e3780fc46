"""`mmldlm sample --texts` and `mmldlm score`: the output is a function of the input, whatever processes and kills."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmldlm
from mmldlm import cli
from mmldlm.inference import sample
from mmldlm.utils.intervals import mean_of_draws
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.user_errors import assert_user_error
from tests.helpers.waiting import wait_until

SENTENCES = ["The rose of soil and water.", "The wave.", "Water and soil.", "A rose in the water.", "The soil."]
TEXTS = [SENTENCES[index % 5] for index in range(22)]
BATCH = 4
FEW = ("sampling.steps=2", "sampling.t2l_steps=2", "--batch", str(BATCH))


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def outputs(out: Path) -> dict[str, bytes]:
    paths = (out.with_suffix(suffix) for suffix in (".jsonl", ".npy", ".json"))
    return {path.suffix: path.read_bytes() for path in paths if path.exists()}


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "texts.txt", TEXTS)


JOBS = {
    "l2t": ("sample", "--texts", "{texts}", "-n", "2", *FEW),
    "t2l": ("sample", "--mode", "t2l", "--texts", "{texts}", "-n", "2", *FEW),
    "joint": ("sample", "--mode", "joint", "-n", "22", *FEW),
    "score": ("score", "{texts}", "--draws", "4", "--batch", str(BATCH)),
}


def job(name: str, run: Path, texts: Path, out: Path) -> list[str]:
    command, *rest = (str(texts) if part == "{texts}" else part for part in JOBS[name])
    return [command, str(run), *rest, "--out", str(out)]


@pytest.mark.parametrize("name", JOBS)
def test_whatever_a_kill_leaves_is_continued_to_the_same_bytes(
    name: str, short_run_dir: Path, texts: Path, tmp_path: Path
) -> None:
    out, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    assert cli.main(job(name, short_run_dir, texts, out)) == 0
    whole, generator = outputs(out), np.random.default_rng(0)
    assert set(whole) == ({".jsonl", ".npy", ".json"} if name in ("t2l", "joint") else {".jsonl", ".json"})
    assert [record["index"] for record in records(out)] == list(range(22))
    begun = json.dumps({"request": json.loads(whole[".json"])["request"]}).encode()
    for kept in (0.0, *generator.random(3), 1.0):
        for suffix, content in (whole | {".json": begun}).items():
            # Latents are written before their lines, and a kill may cut either anywhere.
            size = len(content) if suffix == ".json" else int(kept * len(content))
            again.with_suffix(suffix).write_bytes(content[: size + (64 if suffix == ".npy" else 0)])
        assert cli.main(job(name, short_run_dir, texts, again)) == 0
        assert outputs(again) == whole


def test_killed_processes_and_any_number_of_them_write_the_same(
    forked: ForkedRuns, short_run_dir: Path, tmp_path: Path
) -> None:
    texts = write_lines(tmp_path / "texts.txt", TEXTS * 12)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert cli.main(job("t2l", short_run_dir, texts, one)) == 0
    complete = len(records(one))

    def start() -> list[int]:
        command = job("t2l", short_run_dir, texts, two)
        return forked.start("ddp", command, 2, tmp_path / "log", str(ROOT / "mmldlm" / "__main__.py"))

    def lines() -> int:
        return two.read_bytes().count(b"\n") if two.exists() else 0

    for _ in range(2):
        before, pids = lines(), start()
        wait_until(lambda before=before: lines() > before, "a batch")
        os.kill(pids[1], signal.SIGKILL)  # rank 0 learns of it by its watchdog
        codes = forked.wait(pids)
        assert codes[pids[1]] == -signal.SIGKILL and codes[pids[0]] in (0, 76), (tmp_path / "log").read_text()
        assert outputs(one)[".jsonl"].startswith(b"".join(two.read_bytes().splitlines(True)[:-1]))
    assert lines() < complete, "the kills came too late to test anything"
    pids = start()
    assert forked.wait(pids) == dict.fromkeys(pids, 0), (tmp_path / "log").read_text()
    assert outputs(two) == outputs(one)


@pytest.mark.quick
def test_items_have_streams_of_their_own(short_run_dir: Path, texts: Path, tmp_path: Path) -> None:
    """Equal texts at different places get different samples; each place the same ones, whatever the others are."""
    out, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    assert cli.main(job("l2t", short_run_dir, texts, out)) == 0
    samples = [tuple(record["texts"]) for record in records(out)]
    assert len({sample for index, sample in enumerate(samples) if index % 5 == 0}) > 1
    assert all(first != second for first, second in samples[:5])
    assert all(len(record["tokens"]) == 2 for record in records(out))
    changed = write_lines(tmp_path / "changed.txt", [*TEXTS[:2], "zzz", *TEXTS[3:]])
    assert cli.main([*job("l2t", short_run_dir, changed, other), "--on-problem", "skip"]) == 0
    assert [tuple(record.get("texts", ())) for record in records(other)] == [*samples[:2], (), *samples[3:]]


@pytest.mark.quick
def test_latents_of_a_file_and_ids(short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text's latent gives what the text gives; a row of OUT.npy is the latent of its line."""
    model = mmldlm.load(short_run_dir)
    rows = [{"id": f"doc {index}", "text": text} if index else {"text": text} for index, text in enumerate(TEXTS[:6])]
    texts = write_lines(tmp_path / "texts.jsonl", [json.dumps(row) for row in rows])
    by_text, by_latent, found = (tmp_path / f"{name}.jsonl" for name in ("text", "latent", "found"))
    np.save(tmp_path / "given.npy", model.encode(TEXTS[:6]).squeeze(1))
    assert cli.main(["sample", str(short_run_dir), "--texts", str(texts), *FEW, "--out", str(by_text)]) == 0
    latents = ["--latents", str(tmp_path / "given.npy")]
    assert cli.main(["sample", str(short_run_dir), *latents, *FEW, "--out", str(by_latent)]) == 0
    assert [record.pop("id", None) for record in records(by_text)] == [None, *(f"doc {index}" for index in range(1, 6))]
    assert [record["texts"] for record in records(by_text)] == [record["texts"] for record in records(by_latent)]
    t2l = [
        "sample",
        str(short_run_dir),
        "--mode",
        "t2l",
        "--texts",
        str(texts),
        "sampling.t2l_steps=1",
        "--out",
        str(found),
    ]
    assert cli.main(t2l) == 0
    assert f"written: {found}, {found.with_suffix('.npy')}" in capsys.readouterr().out
    config = replace(model.run.config.sampling, t2l_steps=1)
    for index, row in enumerate(np.load(found.with_suffix(".npy"))):
        generated, _ = sample(model.run, "t2l", config, 0, texts=[TEXTS[index]], slots=torch.tensor([index]))
        assert row == pytest.approx(generated.latents[0].numpy(), abs=1e-5)
    assert [record["tokens"] for record in records(found)] == [
        [len(model.run.tokenizer.encode_batch([text])[0])] for text in TEXTS[:6]
    ]


PROBLEMS = {
    "json.jsonl": (['{"text": "The wave."}', "{"], ":2: not valid JSON"),
    "field.jsonl": (['{"text": "The wave."}', '{"words": "x"}'], ":2: no field 'text'"),
    "blank.txt": (["The wave.", "", "The wave."], ":2: empty document"),
    "long.txt": (["The wave.", "The wave. " * 40], ":2: "),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", PROBLEMS)
def test_bad_lines_are_named_and_refused_or_skipped(
    name: str, short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, problem = PROBLEMS[name]
    texts, out = write_lines(tmp_path / name, lines), tmp_path / "out.jsonl"
    command = ["score", str(short_run_dir), str(texts), "--out", str(out), "--draws", "2"]
    status = cli.main(command)
    assert_user_error((status, capsys.readouterr().err), 65, f"{texts}{problem}", "--on-problem skip")
    assert not out.exists(), "all lines are checked before anything is computed"
    assert cli.main([*command, "--on-problem", "skip"]) == 0
    told = capsys.readouterr().err
    assert f"1 of {len(lines)} skipped, first {texts}{problem}" in told
    assert ["problem" in record for record in records(out)] == [False, True, False][: len(lines)]
    summary = json.loads(out.with_suffix(".json").read_text())
    assert summary["problems"] == 1 and summary["tokens"] == sum(record.get("tokens", 0) for record in records(out))


@pytest.mark.quick
def test_rows_that_are_not_finite_are_named(
    short_run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latents = np.zeros((3, 8), np.float32)
    latents[1, 2] = np.nan
    np.save(tmp_path / "own.npy", latents)
    command = ["sample", str(short_run_dir), "--latents", str(tmp_path / "own.npy"), "--out", str(tmp_path / "o.jsonl")]
    status = cli.main(command)
    assert_user_error((status, capsys.readouterr().err), 65, "own.npy:2: row 1 is not finite")
    assert cli.main([*command, "--on-problem", "skip"]) == 0
    assert ["texts" in record for record in records(tmp_path / "o.jsonl")] == [True, False, True]


@pytest.mark.quick
def test_another_request_does_not_continue_the_output(
    short_run_dir: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    command = job("l2t", short_run_dir, texts, out)
    assert cli.main(command) == 0
    whole = outputs(out)

    def refused(arguments: list[str], code: int, *named: str) -> None:
        capsys.readouterr()
        assert_user_error((cli.main(arguments), capsys.readouterr().err), code, *named)
        assert outputs(out) == whole

    refused([*command, "--seed", "1"], 2, f"{out} was begun with seed 0, found 1")
    refused([*command, "sampling.temperature=0.5"], 2, "sampling")
    write_lines(texts, TEXTS[:-1])
    refused(command, 2, "input")
    write_lines(texts, TEXTS)
    with out.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(command, 73, f"{out}: another process is writing it")
    assert cli.main(command) == 0
    assert outputs(out) == whole
    out.with_suffix(".json").unlink()
    whole.pop(".json")
    refused(command, 2, f"{out} exists, without out.json")


@pytest.mark.quick
def test_latents_of_others_are_not_overwritten(
    short_run_dir: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "out.npy", np.ones(1000))
    before = outputs(tmp_path / "out.jsonl")
    command = job("t2l", short_run_dir, texts, tmp_path / "out.jsonl")
    assert_user_error((cli.main(command), capsys.readouterr().err), 2, "out.npy exists", alone=False)
    (tmp_path / "out.jsonl").unlink()
    assert outputs(tmp_path / "out.jsonl") == before


@pytest.mark.quick
@pytest.mark.parametrize("given", ["", "own", "file"])
def test_scores_are_those_of_the_library(given: str, short_run_dir: Path, tmp_path: Path) -> None:
    model, out = mmldlm.load(short_run_dir), tmp_path / "out.jsonl"
    texts = write_lines(tmp_path / "texts.txt", TEXTS)
    latents = model.encode(TEXTS) if given else None
    np.save(tmp_path / "latents.npy", model.encode(TEXTS))
    option = {"": [], "own": ["--latents", "own"], "file": ["--latents", str(tmp_path / "latents.npy")]}[given]
    command = ["score", str(short_run_dir), str(texts), "--out", str(out), "--draws", "5", *option]
    assert cli.main(command) == 0
    expected, lines = model.score(TEXTS, latents, draws=5), records(out)
    assert [line["nats"] for line in lines] == pytest.approx(expected.nats, rel=1e-6)
    assert [line["tokens"] for line in lines] == expected.tokens.tolist()
    summary = json.loads(out.with_suffix(".json").read_text())
    assert summary["bits_per_token"] == pytest.approx(expected.bits_per_token.value, rel=1e-6)
    assert summary["bits_per_token_ci95"] == pytest.approx(expected.bits_per_token.interval, abs=1e-5)


@pytest.mark.quick
def test_the_noise_of_a_text_depends_on_its_place_alone(short_run_dir: Path, tmp_path: Path) -> None:
    """Whatever is computed with it: other sizes of the batch, texts left out, a part of the file. No texts share it."""
    lines = [*TEXTS, "", TEXTS[0]] * 4  # more than one grid of noise times; the same text again in each
    nats = {}
    for size, texts in ((3, lines), (48, lines), (200, lines), (7, lines[:70])):
        path, out = write_lines(tmp_path / "texts.txt", texts), tmp_path / f"{size}.jsonl"
        command = ["score", str(short_run_dir), str(path), "--out", str(out), "--draws", "2", "--on-problem", "skip"]
        assert cli.main([*command, "--batch", str(size)]) == 0
        nats[size] = [record.get("nats", np.nan) for record in records(out)]
    for size in (48, 200):
        assert nats[size] == pytest.approx(nats[3], rel=1e-5, nan_ok=True)
    assert nats[7] == pytest.approx(nats[3][:70], rel=1e-5, nan_ok=True)
    same = [value for value, text in zip(nats[3], lines, strict=True) if text == TEXTS[0]]
    assert len({round(value, 3) for value in same}) == len(same) > 4
    model = mmldlm.load(short_run_dir)
    for size in (5, 64):
        assert model.score(TEXTS, draws=2, batch_size=size).nats == pytest.approx(nats[3][: len(TEXTS)], rel=1e-5)


@pytest.mark.quick
def test_settings_replace_those_of_the_run(
    short_run_dir: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They belong to what was requested."""
    plain, half = tmp_path / "plain.jsonl", tmp_path / "half.jsonl"
    assert cli.main(job("score", short_run_dir, texts, plain)) == 0
    assert cli.main([*job("score", short_run_dir, texts, half), "precision=bf16"]) == 0
    nats = [[line["nats"] for line in records(out)] for out in (plain, half)]
    assert nats[0] != nats[1] and nats[0] == pytest.approx(nats[1], rel=0.05)
    capsys.readouterr()
    status = cli.main(job("score", short_run_dir, texts, half))
    assert_user_error((status, capsys.readouterr().err), 2, "was begun with settings")
    status = cli.main([*job("score", short_run_dir, texts, half), "model.depth=9"])
    assert_user_error((status, capsys.readouterr().err), 64, "expected a key of sampling", "found 'model.depth=9'")


def test_intervals_of_single_texts_hold_their_true_bound(short_run_dir: Path, tmp_path: Path) -> None:
    model, out = mmldlm.load(short_run_dir), tmp_path / "out.jsonl"
    texts = write_lines(tmp_path / "texts.txt", TEXTS * 8)
    assert cli.main(["score", str(short_run_dir), str(texts), "--out", str(out)]) == 0
    truth = model.score(SENTENCES, draws=300, seed=1)
    bits = truth.nats / truth.tokens / np.log(2)
    inside = [
        low <= bits[SENTENCES.index(text)] <= high
        for text, (low, high) in zip(TEXTS * 8, (line["bits_per_token_ci95"] for line in records(out)), strict=True)
    ]
    assert 0.88 <= np.mean(inside) <= 0.99, np.mean(inside)


@pytest.mark.quick
def test_quantile_of_few_draws() -> None:
    stdtrit = pytest.importorskip("scipy.special").stdtrit
    generator = np.random.default_rng(0)
    for count in (4, 5, 8, 16, 64):
        ratio = mean_of_draws(generator.random(count))
        expected = ratio.standard_error * stdtrit(count - 1, 0.975)
        assert ratio.interval[1] - ratio.value == pytest.approx(expected, rel=0.01)
    assert mean_of_draws(np.ones(3)).no_interval_reason == "n = 3"
