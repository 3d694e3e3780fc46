"""`mmldlm convert lgdlm CONFIG.yaml`: keys are renamed or listed, docs/migration.md has all, and the config trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mmldlm import cli, train
from mmldlm.config import RunConfig, load_config
from mmldlm.contrib.lgdlm.config import RENAMED, convert_config
from mmldlm.settings.declaration import leaves
from tests.helpers.lgdlm_configs import NAMES, write_configs
from tests.helpers.lgdlm_folders import make_samples, write_pairs
from tests.helpers.metrics import read_metrics
from tests.helpers.paths import ROOT
from tests.helpers.user_errors import assert_user_error


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_configs(tmp_path_factory.mktemp("lgdlm") / "configs")


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_each_key_of_the_four_files_is_renamed_or_listed(
    name: str, configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", "lgdlm", str(configs / f"{name}.yaml"), str(tmp_path / "new")]) == 0
    listed = re.search("not converted, see docs/migration.md: (.*)", capsys.readouterr().out)[1].split(", ")
    text = (tmp_path / "new" / f"{name}.yaml").read_text()
    assert [line[4:].split(":")[0] for line in text.splitlines() if line.startswith("#   ")] == listed
    config = load_config(tmp_path / "new" / f"{name}.yaml")
    assert config.optim.lr == 1e-4 and config.optim.betas == (0.9, 0.99), "read by LGDLM, unlike beta1 and beta2"
    assert (config.model.width, config.checkpoint.every_steps, config.loss.latent) == (1024, 5000, "mse")
    assert config.precision == ("fp32" if name in ("mmdit_1024d", "mmdit_e5") else "bf16")
    assert {"model.n_heads", "optimizer.beta2"} <= set(listed) and not {"model.n_blocks", "data.num_workers"} & set(
        listed
    )
    explained = (ROOT / "docs/migration.md").read_text()
    assert [key for key in listed if f"`{key}" not in explained] == []


@pytest.mark.quick
def test_every_new_name_is_a_setting_that_the_page_and_error_messages_name() -> None:
    known, page = {key for key, _ in leaves(RunConfig)}, (ROOT / "docs/migration.md").read_text()
    for old, new in RENAMED.items():
        assert (
            new in known and f"`{new}`" in page and f"`{old.removeprefix('TORCH_')}`" in page.replace("`TORCH_", "`")
        ), old


@pytest.mark.quick
@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ("training.train_batch_size=4", {"train.micro_batch_size": 4, "train.global_batch_size": 4}),
        ("L2T_TRAIN_BS=4", {"train.micro_batch_size": 4, "train.global_batch_size": 4}),
        ("NPROC_PER_NODE=8", {"train.micro_batch_size": 16, "train.global_batch_size": 128}),
        ("NPROC_PER_NODE=8 NNODES=2", {"train.global_batch_size": 256}),
        ("training.world_size=2", {"train.global_batch_size": 32}),
        ("LEARNING_RATE=7e-05", {"optim.lr": 7e-5}),
        ("L2T_STEPS=7", {"train.steps": 7}),
        ("DTYPE=float16", {"precision": "fp16"}),
        ("DTYPE=fp32 training.dtype=bf16", {"precision": "bf16"}),
        ("L2T_COMPILE=true", {"compile.scope": "regional"}),
        ("LATENT_LOSS_WEIGHT=0.1", {"loss.latent_weight": 0.1, "loss.latent": "mse"}),
        ("loss.loss_type=unconditional", {"mode": "joint"}),
        ("+training.lr_schedule=linear", {"schedule.lr": "linear"}),
        ("model.latent_beta_schedule=sigmoid", {"latent.process": "vp_sigmoid"}),
        ("model.latent_parameterization=v_param", {"latent.prediction": "v"}),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1200", {"distributed.heartbeat_timeout_s": 1200}),
        ("NCCL_TIMEOUT=7200", {"distributed.timeout_s": 7200}),
        ("NCCL_BLOCKING_WAIT=0", {"distributed.blocking_wait": False}),
        ("NCCL_SOCKET_IFNAME=eth0", {"distributed.nccl.NCCL_SOCKET_IFNAME": "eth0"}),
        ("L2T_RUN_NAME=mine", {"run.dir": "runs/mine"}),
    ],
)
def test_values_of_keys_and_variables(assignments: str, expected: dict[str, Any], configs: Path) -> None:
    settings, _ = convert_config(configs / "mmdit_preprocessed.yaml", assignments.split())
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("assignment", "setting"),
    [
        ("training.loss_type=sequential", ""),
        ("loss.loss_type=[l2t]", "mode"),
        ("training.dtype=fp64", "precision"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=12000000", "distributed.heartbeat_timeout_s"),
        ("L2T_SAVE_DIR=old", ""),
        ("training.resume=old/latest", ""),
        ("ptimizer.lr=1", ""),
    ],
)
def test_a_key_or_value_without_a_counterpart_is_listed(assignment: str, setting: str, configs: Path) -> None:
    settings, left = convert_config(configs / "mmdit_preprocessed.yaml", [assignment])
    assert assignment.split("=")[0] in left and setting not in settings


@pytest.mark.quick
def test_files_of_defaults_are_read_if_they_are_there(configs: Path, tmp_path: Path) -> None:
    alone = write_configs(tmp_path / "alone", groups=())
    assert "optim.betas" not in convert_config(alone / "mmdit_1024d.yaml")[0]
    together, _ = convert_config(configs / "mmdit_1024d.yaml")
    assert together["optim.betas"] == [0.9, 0.99] and together["log.every"] == 100, "the file itself comes last"
    broken = tmp_path / "broken.yaml"
    broken.write_text("defaults: 5\nmodel: {n_blocks: 3}\n")
    assert convert_config(broken)[0]["model.depth"] == 3


@pytest.mark.quick
@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.train_batch_size=many", "train.micro_batch_size: expected whole number, found 'many'"),
        ("optimizer.lr=fast", "converted: optim.lr: expected number, found 'fast'"),
        ("NPROC_PER_NODE=two", "NPROC_PER_NODE: expected a whole number, at least 1, found 'two'"),
    ],
)
def test_a_value_that_the_setting_refuses_is_named(
    assignment: str, message: str, configs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main(["convert", "lgdlm", str(configs / "mmdit.yaml"), str(tmp_path / "new"), assignment])
    assert_user_error((status, capsys.readouterr().err), 64, message)
    assert not (tmp_path / "new").exists()


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
    steps = "L2T_STEPS=3 L2T_LOG_FREQ=1 L2T_EVAL_FREQ=0 L2T_SAVE_FREQ=3 DATA_WORKERS=0 L2T_RUN_NAME=mine"
    config = str(configs / "mmdit_preprocessed.yaml")
    assert cli.main(["convert", "lgdlm", config, "new", *small.split(), *steps.split()]) == 0
    assert cli.main(["convert", "lgdlm", "old/sonar", "converted"]) == 0
    (prepare,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")]
    words = prepare.replace(" TOKENIZER", f" {samples.tokenizer}").replace(" STORE", " store").split()[2:]
    assert cli.main([*words, "--max-length", "64"]) == 0
    assert train.main(["new/mmdit_preprocessed.yaml", "data.path=store"]) == 0
    records = [record for record in read_metrics(tmp_path / "runs/mine/metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3]


@pytest.mark.quick
def test_the_keys_that_its_users_have(tmp_path: Path) -> None:
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
    new = load_config(tmp_path / "new/small.yaml")
    assert new.memory.activation_checkpointing == "full" and new.model.depth == 4 and new.mode == "l2t"
    assert (new.data.prefetch_factor, new.data.persistent_workers, new.data.num_workers) == (3, False, 2)
    assert (new.train.global_batch_size, new.train.micro_batch_size, new.train.steps) == (128, 16, 900)
    assert (new.distributed.timeout_s, new.distributed.blocking_wait) == (600, True)
    assert new.distributed.heartbeat_timeout_s == 1200 and new.distributed.nccl["NCCL_SOCKET_NTHREADS"] == 2
    header = [line for line in (tmp_path / "new/small.yaml").read_text().splitlines() if line.startswith("#   ")]
    assert header == [
        f"#   {line}" for line in ("NNODES: 2", "NODE_RANK: 0", "NPROC_PER_NODE: 4", "MASTER_ADDR: 'node0'")
    ]


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
def test_an_empty_file_is_no_config(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.yaml").write_text(text)
    code = cli.main(["convert", "lgdlm", str(tmp_path / "empty.yaml"), str(tmp_path / "new")])
    assert_user_error((code, capsys.readouterr().err), 64, "empty.yaml", "found no")
