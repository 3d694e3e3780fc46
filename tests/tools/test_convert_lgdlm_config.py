"""`mmldlm convert lgdlm CONFIG.yaml`: each key of LGDLM has an outcome, and the config that it gives trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli, train
from mmldlm.config import RunConfig, load_config
from mmldlm.settings.declaration import flat_settings, leaves
from mmldlm.settings.fields import nearest_key
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.convert.lgdlm_config import Row, convert_config
from mmldlm.tools.convert.lgdlm_keys import RULES, VARIABLES, Outcome
from tests.helpers.lgdlm_configs import NAMES, write_configs
from tests.helpers.lgdlm_folders import make_samples, write_pairs
from tests.helpers.metrics import read_metrics
from tests.helpers.user_errors import assert_user_error

PLACES = [name for name in RULES if name.isupper()]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_configs(tmp_path_factory.mktemp("lgdlm") / "configs")


def convert(config: Path, *assignments: str) -> dict[str, Any]:
    return convert_config(config, assignments).settings


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_each_key_of_the_four_files_has_an_outcome(
    name: str, configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", "lgdlm", str(configs / f"{name}.yaml"), str(tmp_path / "new")]) == 0
    assert "unknown" not in capsys.readouterr().out
    config = load_config(tmp_path / "new" / f"{name}.yaml")
    assert config.optim.lr == 1e-4 and config.optim.betas == (0.9, 0.99), "read by LGDLM, unlike beta1 and beta2"
    assert (config.model.width, config.model.num_heads, config.checkpoint.every_steps) == (1024, 16, 5000)
    assert config.precision == ("fp32" if name in ("mmdit_1024d", "mmdit_e5") else "bf16")
    table = (tmp_path / "new" / f"{name}.md").read_text()
    lines = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    tree = read_yaml(configs / f"{name}.yaml")
    assert {f"{group}.{key}" for group, keys in tree.items() if isinstance(keys, dict) for key in keys} <= {
        ".".join(key.split(".")[:2]) for key in lines
    }
    assert all(line.count(" | ") == 4 and not line.endswith("|  |  |") for line in lines.values())
    assert "`model.depth: " in lines["model.n_blocks"] and " renamed " in lines["model.n_blocks"]
    assert " kept " in lines["data.num_workers"] and " dropped " in lines["model.n_heads"]


@pytest.mark.quick
def test_every_outcome_is_a_setting_or_says_why(configs: Path) -> None:
    known = {key for key, _ in leaves(RunConfig)}
    shell = [f"{name}={value}" for name, value in zip(PLACES, [1] * len(PLACES), strict=True)]
    rows: list[Row] = [row for name in NAMES for row in convert_config(configs / f"{name}.yaml", shell).rows]
    assert {row.key for row in rows} >= set(PLACES)
    for row in rows:
        assert row.outcome is not None, row
        assert row.outcome.settings or row.outcome.why or row.key == "logging.run_name", row
        for target in row.outcome.settings:
            assert target in known or target.startswith(("--", "distributed.nccl.")), row


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_error_messages_suggest_what_the_converter_writes(name: str, configs: Path) -> None:
    known = {known for known, _ in leaves(RunConfig)}
    renamed = [row for row in convert_config(configs / f"{name}.yaml").rows if row.kind == "renamed" and row.outcome]
    silent = [row.key for row in renamed if nearest_key(row.key, known) == "see docs/settings.md for the keys"]
    assert set(silent) <= {"optimizer.type"}
    for row in renamed:
        assert row.outcome and (row.key in silent or nearest_key(row.key, known).split("'")[1] in row.outcome.settings)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("training.train_batch_size=4", {"train.micro_batch_size": 4, "train.global_batch_size": 4}),
        ("L2T_TRAIN_BS=4", {"train.micro_batch_size": 4, "train.global_batch_size": 4}),
        ("NPROC_PER_NODE=8", {"train.micro_batch_size": 16, "train.global_batch_size": 128}),
        ("NPROC_PER_NODE=8 NNODES=2", {"train.global_batch_size": 256, "validation.samples": 50 * 16 * 16}),
        ("training.world_size=2", {"train.global_batch_size": 32}),
        ("LEARNING_RATE=7e-05", {"optim.lr": 7e-5}),
        ("L2T_STEPS=7", {"train.steps": 7}),
        ("DTYPE=float16", {"precision": "fp16"}),
        ("L2T_COMPILE=true", {"compile.scope": "regional"}),
        ("GRAD_CLIP_NORM=0.5", {"optim.clip_norm": 0.5}),
        ("LATENT_LOSS_WEIGHT=0.1", {"loss.latent_weight": 0.1, "loss.latent": "mse"}),
        ("loss.loss_type=unconditional", {"mode": "joint"}),
        ("loss.loss_type=random", {"mode": {"joint": 1, "l2t": 1, "t2l": 1}}),
        ("loss.loss_type=random +training.mode_weights=[0,2,1]", {"mode": {"joint": 0, "l2t": 2, "t2l": 1}}),
        ("loss.loss_type=mixed", {"mode": {"joint": 0.5, "l2t": 0.25, "t2l": 0.25}}),
        ("loss.loss_type=sequential", {"mode": "joint", "mode_schedule": {5000: "l2t", 15000: "t2l"}}),
        ("training.lr_schedule=linear", {"schedule.lr": "linear", "schedule.min_lr_ratio": 0.0}),
        ("model.latent_beta_schedule=sigmoid", {"latent.process": "vp_sigmoid"}),
        ("model.latent_parameterization=v_param", {"latent.prediction": "v"}),
        ("model.hidden_size=96", {"model.width": 96, "model.num_heads": 1}),
        ("model.hidden_size=768", {"model.num_heads": 12}),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1200", {"distributed.heartbeat_timeout_s": 1200}),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=12000000", {"distributed.heartbeat_timeout_s": None}),
        ("NCCL_TIMEOUT=7200", {"distributed.timeout_s": 7200}),
        ("NCCL_BLOCKING_WAIT=0", {"distributed.blocking_wait": False}),
        ("NCCL_SOCKET_IFNAME=eth0", {"distributed.nccl.NCCL_SOCKET_IFNAME": "eth0"}),
        ("training.resume=old/latest", {"resume": None}),
        ("ptimizer.lr=1", {"optim.lr": 1e-4}),
    ],
)
def test_values_of_keys_and_variables(assignment: str, expected: dict[str, Any], configs: Path) -> None:
    settings = convert(configs / "mmdit_preprocessed.yaml", *assignment.split())
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.quick
def test_variables_stand_for_keys_and_later_values_win(configs: Path) -> None:
    assert set(VARIABLES.values()) <= set(RULES)
    file = configs / "mmdit_preprocessed.yaml"
    assert convert(file, "DTYPE=fp32", "training.dtype=bf16")["precision"] == "bf16"
    rows = {row.key: row for row in convert_config(file, ["DTYPE=fp32"]).rows}
    assert rows["training.dtype (DTYPE)"].value == "fp32" and "training.dtype" not in rows


@pytest.mark.quick
def test_files_of_defaults_are_read_if_they_are_there(configs: Path, tmp_path: Path) -> None:
    alone = write_configs(tmp_path / "alone", groups=())
    assert convert(alone / "mmdit_1024d.yaml")["optim.betas"] == [0.9, 0.95]
    assert "optim.name" in convert(alone / "mmdit_1024d.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("defaults: 5\nmodel: {n_blocks: 3}\n")
    assert convert(broken)["model.depth"] == 3
    together = convert_config(configs / "mmdit_1024d.yaml")
    assert together.settings["log.every"] == 100, "the file itself comes last"
    assert next(row for row in together.rows if row.key == "optimizer.beta2").outcome == Outcome(
        {}, "read by nothing: optimizer.betas, of optimizer/adam.yaml, were the optimizer's"
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ("model.type=diffusion", "model.type: expected multimodal_mmdit, found 'diffusion'; no other can be converted"),
        ("training.dtype=fp64", "training.dtype: expected bf16, bfloat16, fp16"),
        ("training.train_batch_size=many", "training.train_batch_size: expected a whole number, at least 1, found 'ma"),
        ("loss.loss_type=[l2t]", "loss.loss_type: expected unconditional, l2t, t2l"),
        ("training.lr_schedule=[cosine]", "training.lr_schedule: expected constant, cosine, linear, found ['cosine']"),
        ("loss.loss_type=both", "loss.loss_type: expected unconditional, l2t, t2l"),
        ("+training.loss_type=t2l", "mode is 'l2t' by loss.loss_type and 't2l' by training.loss_type; expected one"),
        ("optimizer.lr=fast", "converted: optim.lr: expected number, found 'fast'"),
        ("NCCL_BLOCKING_WAIT=2", "NCCL_BLOCKING_WAIT: expected 0 or 1, found 2"),
        ("training.mode_weights=[1] loss.loss_type=random", "training.mode_weights: expected 3 numbers, found [1]"),
        (
            "training.sequential_schedule=5 loss.loss_type=sequential",
            "training.sequential_schedule: expected a list of maps with type and steps, found 5",
        ),
    ],
)
def test_what_cannot_be_converted_is_named(
    assignments: str, message: str, configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = configs / "mmdit_preprocessed.yaml", tmp_path / "new"
    words = re.split(" (?=[a-z+])", assignments)  # values may contain spaces
    status = cli.main(["convert", "lgdlm", str(source), str(out), *words])
    assert_user_error((status, capsys.readouterr().err), 64, f"{source}", message)
    assert not out.exists()


@pytest.mark.quick
def test_wrong_arguments(configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(configs / "mmdit.yaml"), str(tmp_path / "new")
    for arguments, message in (
        ([source, out, "--layout", "pairs"], "a file is converted as a run config, expected no options of data"),
        ([source, out, "more"], "expected one folder to write to, found 2"),
        ([str(configs), out, "a=1"], "is no file; expected no KEY=VALUE, found a=1"),
    ):
        assert cli.main(["convert", "lgdlm", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["convert", "lgdlm", source, out]) == 0
    assert cli.main(["convert", "lgdlm", source, out]) == 2
    assert "mmdit.yaml: exists already; expected another folder" in capsys.readouterr().err


def test_from_data_and_config_of_lgdlm_to_a_run(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")
    monkeypatch.chdir(tmp_path)
    samples = make_samples(tmp_path)
    write_pairs(tmp_path / "old/sonar", samples)
    small = "model.hidden_size=32 model.n_blocks=1 model.cond_dim=32 training.warmup_steps=0 L2T_TRAIN_BS=8 DTYPE=fp32"
    steps = "L2T_STEPS=3 L2T_LOG_FREQ=1 L2T_EVAL_FREQ=3 logging.num_eval_batches=1 L2T_SAVE_FREQ=3 DATA_WORKERS=0"
    files = f"tokenizer.path={samples.tokenizer} model.max_seq_len=64 L2T_RUN_NAME=mine"
    assignments = f"{small} {steps} {files}".split()
    assert cli.main(["convert", "lgdlm", str(configs / "mmdit_preprocessed.yaml"), "new", *assignments]) == 0
    printed = capsys.readouterr().out.splitlines()
    (command,) = [line for line in printed if line.startswith("Next: ")]
    assert command == "Next: mmldlm convert lgdlm old/sonar converted"
    assert cli.main(command.split()[2:]) == 0
    options = printed[-1].split(", with ")[1]
    assert options == f"--validation-fraction 0.05 --max-length 64 --tokenizer {samples.tokenizer} --out data/mine"
    (prepare,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")]
    words = [word for word in prepare.split()[2:] if word not in ("--tokenizer", "TOKENIZER", "--out", "STORE")]
    assert cli.main([*words, *options.split()]) == 0
    assert train.main(["new/mmdit_preprocessed.yaml"]) == 0
    records = [record for record in read_metrics(tmp_path / "runs/mine/metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert flat_settings(load_config(tmp_path / "runs/mine/config.yaml"))["model.depth"] == 1


@pytest.mark.quick
def test_the_keys_that_its_users_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "small.yaml"
    config.write_text(
        "model: {use_gradient_checkpointing: true, n_blocks: 4}\n"
        "data: {prefetch_factor: 3, persistent_workers: false}\n"
        "training: {train_batch_size: 8, loss_type: l2t}\n"
    )
    shell = ["NNODES=2", "NODE_RANK=0", "NPROC_PER_NODE=4", "MASTER_ADDR=node0", "L2T_TRAIN_BS=16", "DATA_WORKERS=2"]
    shell += ["L2T_BASE_STEPS=900", "NCCL_TIMEOUT=600", "NCCL_BLOCKING_WAIT=1", "NCCL_SOCKET_NTHREADS=2"]
    shell += ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1200"]
    assert cli.main(["convert", "lgdlm", str(config), str(tmp_path / "new"), *shell]) == 0
    assert "unknown" not in capsys.readouterr().out
    new = load_config(tmp_path / "new/small.yaml")
    assert new.memory.activation_checkpointing == "full" and new.model.depth == 4 and new.mode == "l2t"
    assert (new.data.prefetch_factor, new.data.persistent_workers, new.data.num_workers) == (3, False, 2)
    assert (new.train.global_batch_size, new.train.micro_batch_size, new.train.steps) == (128, 16, 900)
    assert (new.distributed.timeout_s, new.distributed.blocking_wait) == (600, True)
    assert new.distributed.heartbeat_timeout_s == 1200 and new.distributed.nccl["NCCL_SOCKET_NTHREADS"] == 2


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
def test_an_empty_file_is_no_config(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").write_text(text)
    code = cli.main(["convert", "lgdlm", str(tmp_path / "empty.yaml"), str(tmp_path / "new")])
    assert_user_error((code, capsys.readouterr().err), 64, "empty.yaml", "found no")
