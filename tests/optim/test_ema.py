"""`ema`: averaged weights under every engine, with skipped steps, validations and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmldlm import cli, train
from mmldlm.config import load_config
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launch import read_launcher_env
from mmldlm.errors import ConfigError, DataError
from mmldlm.evaluation.validate import validation_ids, validation_losses
from mmldlm.loading.load import load_run
from mmldlm.optim import ema
from mmldlm.optim.ema import EmaConfig, EmaWeights, decay_at
from mmldlm.trainer.setup import step_plan
from tests.helpers.engine_runs import CURVE, records, saved_tensors
from tests.helpers.forked_runs import ForkedRuns

SMALL = (
    "model={depth: 1, width: 16, num_heads: 2, conditioning_width: 16, modulation_rank: 4}",
    "train={steps: 50, global_batch_size: 6}",
    "validation={every: 20, first: 0, samples: 12, text_samples: 1}",
    "log.every=50",
    "checkpoint.every_steps=0",
)
SKIPPED = [0, 3, 30]
LATER = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("ddp", 2, "fp32"),
        ("fsdp2", 3, "fp32"),
        ("zero1", 2, "fp32"),
        ("zero3", 2, "fp32"),
        ("zero2", 2, "fp32"),
        ("zero2_offload", 2, "fp32"),
        ("zero3_offload", 2, "fp32"),
        ("fsdp2", 2, "bf16"),
        ("zero2", 2, "bf16"),
        ("zero3", 2, "bf16"),
    )
]


@pytest.mark.parametrize(
    ("engine", "processes", "precision"),
    [("single", 1, "fp32"), *LATER],
)
def test_ema_decay_over_50_steps_is_that_of_float64(
    engine: str, processes: int, precision: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Three of the steps are skipped, the first among them; validations change weights and average places."""
    folder = tmp_path / "run"
    folder.mkdir()
    facts = {"FACTS": str(folder), "SKIPPED": json.dumps(SKIPPED)}
    settings = (
        parity_config,
        *SMALL,
        "ema.decay=0.98",
        f"precision={precision}",
        f"train.micro_batch_size={6 // processes}",
    )
    log = tmp_path / "log"
    run = [*settings, f"run.dir={folder}"]
    pids = forked.start(engine, run, processes, log, script="ema_reference.py", **facts)
    codes = forked.wait(pids)
    assert [codes.get(pid) for pid in pids] == [0] * processes, log.read_text()[-3000:]
    result, weights, expected = (
        saved_tensors(folder, "ema"),
        saved_tensors(folder),
        load_file(folder / "reference.safetensors"),
    )
    assert list(records(folder, "skip")) == [step + 1 for step in SKIPPED]
    assert list(records(folder, "validation")) == [20, 40, 50]
    trained = {entry.rpartition("/")[0] for entry in saved_tensors(folder, "optimizer")}
    assert result.keys() == expected.keys() == trained
    for name, tensor in result.items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, expected[name], rtol=2e-6, atol=2e-7), name
        assert not torch.equal(tensor, weights[name]), name
    assert max(float((result[name] - weights[name]).abs().max()) for name in result) > 5e-4


@pytest.mark.quick
def test_ema_warmup_is_a_bound_that_rises_to_the_decay() -> None:
    with_it, without = EmaConfig(decay=0.999), EmaConfig(decay=0.999, warmup=False)
    assert [decay_at(step, with_it) for step in (0, 1, 90)] == [1 / 10, 2 / 11, 91 / 100]
    assert decay_at(8989, with_it) < 0.999 == decay_at(8990, with_it) == decay_at(10**6, with_it)
    assert decay_at(0, without) == 0.999


@pytest.mark.quick
def test_ema_follows_accepted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema, "SWAP_CHUNK_SIZE", 5)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((3, 4), (7,), (), (0, 2))]
    expected, followed = [weight.double() for weight in weights], EmaWeights(weights)

    def averages() -> list[torch.Tensor]:
        followed.swap()
        result = [weight.clone() for weight in weights]
        followed.swap()
        return result

    for step in range(60):
        taken, decay = step % 7 != 0, 0.9 if step % 5 else 0.0
        for weight in weights:
            weight.add_(torch.randn(weight.shape, generator=generator))
        before, kept = averages(), [weight.clone() for weight in weights]
        followed.update(torch.tensor(taken), decay)
        assert all(map(torch.equal, kept, weights)), "it is the average that moves"
        if not taken:
            assert all(map(torch.equal, before, averages()))
            continue
        for mean, weight in zip(expected, weights, strict=True):
            mean.mul_(decay).add_(weight, alpha=1 - decay)
        for mean, ours in zip(expected, averages(), strict=True):
            assert torch.allclose(ours.double(), mean, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory, parity_config: Path) -> Path:
    """A run of 20 steps that keeps an average and measures it at steps 10 and 20."""
    folder = tmp_path_factory.mktemp("averaged")
    assert train.main([str(parity_config), f"run.dir={folder}", "ema.decay=0.9"]) == 0
    return folder


def measured(folder: Path, weights: str) -> float:
    """The validation loss of the run's last checkpoint, from its files."""
    run = load_run(folder, weights=weights)  # type: ignore[arg-type]
    assert run.weights == weights and run.has_ema
    engine = start_engine(run.config.distributed, read_launcher_env({}), step_plan(run.config, 1))
    engine.model = run.model
    ids = validation_ids(run.store.split("validation"), run.config.validation.samples)
    with torch.no_grad():
        return validation_losses(run.objective, run.store, ids, run.config, engine).values["validation/total"]


def test_ema_evaluate_decides_what_a_validation_measures(averaged: Path, parity_config: Path, tmp_path: Path) -> None:
    """The setting does not change the training."""
    runs = {"averaged": averaged}
    for name, settings in (("not", ["ema={decay: 0.9, evaluate: false}"]), ("none", [])):
        runs[name] = tmp_path / name
        assert train.main([str(parity_config), f"run.dir={runs[name]}", *settings]) == 0
    curves = {name: records(folder) for name, folder in runs.items()}
    for curve in curves.values():
        assert all(curve[step][key] == curves["none"][step][key] for step in range(1, 21) for key in CURVE)
    result = {name: records(folder, "validation") for name, folder in runs.items()}
    assert {name: record[20]["weights"] for name, record in result.items()} == {
        "averaged": "ema",
        "not": "trained",
        "none": "trained",
    }
    totals = {name: record[20]["validation/total"] for name, record in result.items()}
    assert totals["not"] == totals["none"] != totals["averaged"]
    assert measured(averaged, "ema") == pytest.approx(totals["averaged"], rel=1e-6)
    assert measured(averaged, "trained") == pytest.approx(totals["none"], rel=1e-6)
    assert load_run(averaged).weights == "ema" and load_run(runs["not"]).weights == "trained"
    assert load_run(runs["none"]).weights == "trained" and not load_run(runs["none"]).has_ema
    with pytest.raises(DataError, match=r"no EMA of the weights .* expected --weights trained"):
        load_run(runs["none"], weights="ema")


def test_commands_report_which_weights_they_use(averaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, evaluations = {}, {}
    for weights in ("ema", "trained"):
        assert cli.main(["evaluate", str(averaged), "--texts", "2", "--samples", "8", "--weights", weights]) == 0
        assert cli.main(["sample", str(averaged), "--mode", "joint", "--weights", weights, "--length", "8"]) == 0
        shown[weights] = capsys.readouterr().out.splitlines()
        evaluations[weights] = json.loads((averaged / "evaluation.json").read_text())
        assert evaluations[weights]["weights"] == weights
    assert shown["ema"][0] == "step 20, EMA weights: 8 documents of split test"
    assert shown["trained"][0] == "step 20, trained weights: 8 documents of split test"
    # The generated text that follows may have line breaks.
    assert "step 20, EMA weights:" in shown["ema"][1:]
    assert "step 20, trained weights:" in shown["trained"][1:]
    assert evaluations["ema"]["bits_per_token"] != evaluations["trained"]["bits_per_token"]


def test_ema_may_be_switched_between_starts(
    parity_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def go(steps: int, *settings: str) -> str:
        every = ["checkpoint={every_steps: 1, keep_last: 9}", "validation.every=0"]
        arguments = [str(parity_config), f"run.dir={tmp_path}", f"train.steps={steps}", *every, *settings]
        assert train.main(arguments) == 0
        return capsys.readouterr().out

    def at(step: int, group: str = "model") -> dict[str, torch.Tensor]:
        return load_file(tmp_path / f"checkpoints/step-{step:08}" / f"{group}.safetensors")

    assert "  ema  " not in go(2)
    shown = go(3, "ema={decay: 0.75, warmup: false}")
    assert "the checkpoint has no EMA of the weights; it starts here from the present weights" in shown
    assert "ema          decay 0.75; validations use the EMA" in shown
    weights, next_ones, first_ema = at(2), at(3), at(3, "ema")
    for name, result in first_ema.items():
        assert torch.allclose(result, 0.75 * weights[name] + 0.25 * next_ones[name], rtol=1e-5, atol=1e-7), name

    # Those that are frozen have none; it starts again for those that thaw.
    frozen = go(4, "ema={decay: 0.75, warmup: false}", "freeze=[latent_stream]")
    assert "starts from their present values" not in frozen and not any(".latent." in name for name in at(4, "ema"))
    assert "the EMA of parameters that train from here on starts" in go(5, "ema={decay: 0.75, warmup: false}")
    for name, result in at(5, "ema").items():
        first = at(4)[name] if ".latent." in name else at(4, "ema")[name]
        assert torch.allclose(result, 0.75 * first + 0.25 * at(5)[name], rtol=1e-5, atol=1e-7), name
    assert "EMA of the weights ends here (ema.decay: 0)" in go(6)
    assert not (tmp_path / "checkpoints/step-00000006/ema.safetensors").exists()


@pytest.mark.parametrize("value", ["1", "-0.1", "true", "nan", "null"])
@pytest.mark.quick
def test_ema_decay_is_refused(value: str, parity_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"ema\.decay: "):
        load_config(parity_config, [f"ema.decay={value}"])
