"""Training through the real command: curves, resume, signals, faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmldlm import train
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.trainer.startup_report import data_notices
from tests.helpers.engine_runs import record_list
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.user_errors import assert_user_error
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def curve(run: Path, key: str = "loss/total") -> list[float]:
    return [record[key] for record in record_list(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


def same_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.setting("run.dir")
def test_same_seed_same_curve_bit_for_bit(tiny_config: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert train.main([str(tiny_config), f"run.dir={tmp_path / name}"]) == 0
    assert train.main([str(tiny_config), f"run.dir={tmp_path / 'c'}", "run.seed=4"]) == 0
    assert curve(tmp_path / "a") == curve(tmp_path / "b") != curve(tmp_path / "c")
    assert same_weights(tmp_path / "a", tmp_path / "b")
    losses = curve(tmp_path / "a")
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_the_run_folder_is_complete(tiny_config: Path, tmp_path: Path) -> None:
    assert train.main([str(tiny_config), "log.tensorboard=true"]) == 0
    run = tmp_path / "run"
    assert {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "exit.json"} <= {
        p.name for p in run.iterdir()
    }
    assert json.loads((run / "exit.json").read_text())["code"] == 0
    validation = record_list(run, "validation")
    assert [record["step"] for record in validation] == [4, 8]
    assert {"validation/text_l2t", "validation/latent_t2l", "validation/text_joint"} <= set(validation[0])
    last = record_list(run)[-1]
    flops_per_token = last["speed/tflops_per_s"] * 1e12 / last["speed/tokens_per_s"]
    parameters = json.loads((run / "startup.json").read_text())["parameters_total"]
    assert 1 < flops_per_token / parameters < 12, "about six a parameter, whatever the machine"
    sizes = {key: value for key, value in last.items() if key.startswith("data/") and key.endswith("batch_size")}
    assert sizes == {"data/global_batch_size": 8, "data/micro_batch_size": 8}
    tokens = [0, *(record["data/tokens"] for record in record_list(run))]
    assert [record["data/tokens_per_step"] for record in record_list(run)] == np.diff(tokens).tolist()
    assert all(0 <= record["accuracy/masked_tokens"] <= 1 for record in record_list(run))
    assert last["speed/tokens_per_s"] > 0 and last["memory/resident_mib"] > 0 and last["optim/lr"] > 0
    # Everything done: the same command ends at once and changes nothing.
    before = (run / "metrics.jsonl").read_text()
    assert train.main([str(tiny_config)]) == 0
    assert [r for r in record_list(run) if r["step"] > 8] == [] and len(record_list(run)) == 8
    assert before.splitlines()[:8] == (run / "metrics.jsonl").read_text().splitlines()[:8]


def test_loader_workers_do_not_change_the_curve(tiny_config: Path, tmp_path: Path) -> None:
    for workers in (0, 2):
        assert train.main([str(tiny_config), f"run.dir={tmp_path / str(workers)}", f"data.num_workers={workers}"]) == 0
    assert curve(tmp_path / "0") == curve(tmp_path / "2")


def test_accumulation_does_not_change_the_curve(tiny_config: Path, tmp_path: Path) -> None:
    for micro in (8, 4, 2):
        arguments = [str(tiny_config), f"run.dir={tmp_path / str(micro)}", f"train.micro_batch_size={micro}"]
        assert train.main(arguments) == 0
    for key in ("loss/total", "optim/grad_norm"):
        whole = torch.tensor(curve(tmp_path / "8", key))
        for micro in (4, 2):
            assert torch.allclose(torch.tensor(curve(tmp_path / str(micro), key)), whole, rtol=1e-4)


def test_indivisible_batch_is_refused_with_what_works(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(tiny_config), "train.micro_batch_size=3"]) == 64
    message = capsys.readouterr().err
    assert "train.global_batch_size" in message and "6" in message and "9" in message


def test_resumed_run_equals_the_uninterrupted_one(tiny_config: Path, tmp_path: Path) -> None:
    """Stop at step 5, resume to 9, and to 12, which is in the fourth epoch."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = [str(tiny_config), "train.steps=12", "train.global_batch_size=128", "train.micro_batch_size=64"]
    # A constant rate: with a schedule over train.steps, a shorter run would have other learning rates.
    common += ["schedule.lr=constant", "optim.warmup_steps=2"]
    for steps in (5, 9, 12):
        assert train.main([*common, f"run.dir={parts}", f"train.steps={steps}"]) == 0
    assert train.main([*common, f"run.dir={whole}"]) == 0
    assert same_weights(whole, parts)
    assert curve(whole) == curve(parts)
    assert [record["step"] for record in record_list(parts)] == list(range(1, 13))
    assert record_list(parts)[-1]["data/epoch"] > 2


def test_interrupt_saves_and_resumes(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Neither warm-up nor rate may follow from the number of steps, which is another one after the stop.
    settings = [str(tiny_config), "validation.every=0", "schedule.lr=constant", "optim.warmup_steps=1"]
    arguments = [sys.executable, "-m", "mmldlm.train", *settings]
    process = subprocess.Popen([*arguments, "train.steps=100000"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    run = tmp_path / "run"
    while not (run / "metrics.jsonl").exists() or not record_list(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 75, errors
    assert "stopped by SIGINT" in errors and "Traceback" not in errors
    assert json.loads((run / "exit.json").read_text())["code"] == 75
    stopped_at = record_list(run)[-1]["step"]
    steps = stopped_at + 20
    assert train.main([*settings, f"train.steps={steps}"]) == 0
    assert f"steps {stopped_at} to {steps}" in capsys.readouterr().out
    assert train.main([*settings, f"train.steps={steps}", f"run.dir={tmp_path / 'whole'}"]) == 0
    assert curve(run) == curve(tmp_path / "whole")
    assert same_weights(run, tmp_path / "whole")


def test_killed_run_resumes_from_its_last_checkpoint(tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", [str(tiny_config), "train.steps=60", "validation.every=0"]
    pids = forked.start("single", settings, 1, tmp_path / "log")
    wait_until(lambda: any((run / "checkpoints").glob("step-*")), "a checkpoint")
    forked.kill(pids)
    assert forked.wait(pids) == dict.fromkeys(pids, -signal.SIGKILL)
    assert train.main(settings) == 0
    assert [record["step"] for record in record_list(run)] == list(range(1, 61))
    assert train.main([*settings, f"run.dir={tmp_path / 'whole'}"]) == 0
    assert same_weights(run, tmp_path / "whole")


def test_dropout_is_part_of_the_exact_resume(tiny_config: Path, tmp_path: Path) -> None:
    common = [
        str(tiny_config),
        "model.dropout=0.2",
        "schedule.lr=constant",
        "optim.warmup_steps=1",
        "validation.every=0",
    ]
    for steps in (3, 6):
        assert train.main([*common, f"run.dir={tmp_path / 'parts'}", f"train.steps={steps}"]) == 0
    torch.manual_seed(1234)  # whatever state a process is in
    assert train.main([*common, f"run.dir={tmp_path / 'whole'}", "train.steps=6"]) == 0
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")


def test_a_refused_start_leaves_the_folders_exit_json(tiny_config: Path, tmp_path: Path) -> None:
    assert train.main([str(tiny_config)]) == 0
    before = (tmp_path / "run" / "exit.json").read_text()
    assert train.main([str(tiny_config), "data.path=/nowhere"]) == 65
    assert (tmp_path / "run" / "exit.json").read_text() == before


def test_validation_is_of_the_trained_modes(tiny_config: Path, tmp_path: Path) -> None:
    assert train.main([str(tiny_config), "mode=l2t", "train.steps=4"]) == 0
    (record,) = record_list(tmp_path / "run", "validation")
    assert "validation/text_l2t" in record and not [key for key in record if key.endswith(("t2l", "joint", "latent"))]


@pytest.mark.setting("resume")
def test_resume_never_starts_again_from_step_0(tiny_config: Path, tmp_path: Path) -> None:
    assert train.main([str(tiny_config)]) == 0
    first = curve(tmp_path / "run")
    assert train.main([str(tiny_config), "resume=never"]) == 0
    assert curve(tmp_path / "run") == first
    assert len(record_list(tmp_path / "run")) == 8
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl.old")) > 8  # the history is kept aside


def test_resume_refuses_another_network(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(tiny_config)]) == 0
    capsys.readouterr()
    status = train.main([str(tiny_config), "model.width=64"])
    assert_user_error((status, capsys.readouterr().err), 65, "model.width is 32 in the checkpoint, 64 now")


@pytest.mark.setting("data.path")
def test_resume_refuses_another_tokenizer(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmldlm.prepare.pipeline import prepare
    from tests.helpers.sample_corpus import small_config, write_corpus

    assert train.main([str(tiny_config)]) == 0
    other = small_config(tmp_path / "other", write_corpus(tmp_path / "other.txt", 400, seed=9), max_length=32)
    prepare(other, progress=False)
    capsys.readouterr()
    assert train.main([str(tiny_config), f"data.path={tmp_path / 'other'}"]) == 65
    assert "in the checkpoint" in capsys.readouterr().err


def test_changed_learning_rate_is_allowed_and_shown(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(tiny_config)]) == 0
    assert train.main([str(tiny_config), "train.steps=10", "optim.lr=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "changed since: optim.lr: 0.003 -> 0.001" in shown and "steps 8 to 10" in shown


def test_exploding_run_is_stopped_without_saving_garbage(tiny_config: Path, tmp_path: Path) -> None:
    arguments = [str(tiny_config), "optim.lr=1e38", "optim.warmup_steps=0", "guard.max_consecutive=3", "train.steps=50"]
    assert train.main([*arguments, "validation.every=0"]) == 70
    run = tmp_path / "run"
    exit_record = json.loads((run / "exit.json").read_text())
    assert exit_record["code"] == 70 and "not finite" in exit_record["cause"]
    assert len(record_list(run, "skip")) >= 3
    for checkpoint in (run / "checkpoints").glob("step-*"):
        assert all(tensor.isfinite().all() for tensor in load_file(checkpoint / "model.safetensors").values())


def test_bf16_follows_fp32(tiny_config: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        assert train.main([str(tiny_config), f"run.dir={tmp_path / precision}", f"precision={precision}"]) == 0
    exact, half = (torch.tensor(curve(tmp_path / precision)) for precision in ("fp32", "bf16"))
    assert not torch.equal(exact, half)
    assert torch.allclose(half, exact, rtol=0.02)
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path / "bf16").values())


def test_a_global_batch_larger_than_the_data_is_told(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, dry_run in ((600, True), (8, True), (600, False)):
        settings = [f"train.global_batch_size={size}", "train.steps=1", "train.micro_batch_size=100"]
        settings = settings[:2] + (settings[2:] if size == 600 else [])
        more = ["--dry-run"] if dry_run else ["validation.every=0", "checkpoint.every_steps=0"]
        assert train.main([str(tiny_config), *settings, *more]) == 0
        output = capsys.readouterr()
        lines = [line for line in (output.out + output.err).splitlines() if "notice" in line]
        assert len(lines) == (size == 600), lines
        assert all("a global batch of 600 reads the" in line and "times in one step" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("model.latent_width=16", [16]),
        ("model.latent_width=40 model.width=16", []),
        ("model.width=64", []),
        ("model.width=16", [32]),  # the least width
    ],
)
def test_a_latent_stream_narrower_than_the_latents_is_told(settings: str, told: list[int], tiny_store: Path) -> None:
    store = Store.open(tiny_store)
    wide = store.with_manifest(replace(store.manifest, latent=replace(store.manifest.latent, channels=40)))
    notices = data_notices(load_config(None, settings.split()), wide, 1, "cpu")
    assert [notice.partition(" cannot")[0] for notice in notices] == [f"model.latent_width {width}" for width in told]


@pytest.mark.parametrize(("latents", "length", "named"), [(1, 512, [511]), (4, 128, [124]), (1, 511, []), (1, 200, [])])
def test_rows_above_a_tile_of_attention_are_told(latents: int, length: int, named: list[int], tiny_store: Path) -> None:
    store = Store.open(tiny_store)
    latent = replace(store.manifest.latent, tokens=latents)
    store = store.with_manifest(replace(store.manifest, max_length=length, latent=latent))
    on_gpu, on_cpu = (data_notices(load_config(None, []), store, 1, device) for device in ("cuda", "cpu"))
    assert [notice.partition("--max-length ")[2][:4] for notice in on_gpu] == [f"{most}`" for most in named]
    assert on_cpu == []
