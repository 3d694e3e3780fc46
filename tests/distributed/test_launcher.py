"""The launcher's environment and files: what they select, and what is refused before training."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mmldlm import train
from mmldlm.config import RunConfig, load_config, resolve_precision
from mmldlm.distributed.deepspeed_config import StepPlan, read_deepspeed_config, resolve_deepspeed_config
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.errors import ConfigError
from tests.helpers.engine_runs import ENGINES, LAUNCHED, accelerate, environment, exit_record, run, succeed, torchrun
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

PLAN = StepPlan(micro_batch_size=2, accumulation=4, global_batch_size=16, clip_norm=1.0, precision="bf16", width=64)


@pytest.mark.quick
def test_no_launcher_is_one_process() -> None:
    launch = read_launcher_env({})
    assert (launch.engine, launch.rank, launch.world_size, launch.nodes) == ("single", 0, 1, 1)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_config_file_selects_the_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    launch = read_launcher_env(dict(LAUNCHED), accelerate_file=f"accelerate_configs/{engine}.yaml")
    assert (launch.engine, launch.rank, launch.world_size) == (engine, 1, 2)
    assert (launch.mixed_precision, launch.notices) == ("no", ())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("world_size", "variables", "nodes", "on_node"),
    [
        (16, {"LOCAL_WORLD_SIZE": "8"}, 2, 8),
        (12, {"LOCAL_WORLD_SIZE": "8"}, 2, 8),
        (12, {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 2, 4),  # torchrun, on the smaller node
        (16, {"CROSS_RANK": "0", "CROSS_SIZE": "2", "LOCAL_SIZE": "8"}, 2, 8),  # the deepspeed launcher
        (12, {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "4"}, 2, 4),
    ],
)
def test_nodes_and_their_processes(world_size: int, variables: dict[str, str], nodes: int, on_node: int) -> None:
    environment = {**LAUNCHED, "WORLD_SIZE": str(world_size), **variables}
    if "CROSS_RANK" in variables:
        del environment["LOCAL_WORLD_SIZE"]
    launch = read_launcher_env(environment)
    assert (launch.nodes, launch.local_world_size) == (nodes, on_node)
    assert environment["LOCAL_WORLD_SIZE"] == str(on_node), "the loader's workers are by this"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"MASTER_ADDR": "a"}, "every process would train its own copy"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK and LOCAL_RANK are not set"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "but WORLD_SIZE and MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "but MASTER_ADDR and MASTER_PORT not; expected all five"),
        ({**LAUNCHED, "MASTER_PORT": ""}, "but MASTER_PORT not"),
        ({"RANK": "3"}, "RANK: expected less than WORLD_SIZE, which is 1, found 3"),
        ({**LAUNCHED, "WORLD_SIZE": "two"}, "WORLD_SIZE: expected a whole number, found 'two'"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "fsdp2 is requested, but no process group"),
        ({**LAUNCHED, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: expected 2, found 1"),
        (
            {
                **LAUNCHED,
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_ACTIVATION_CHECKPOINTING": "true",
            },
            "use memory.activation_checkpointing in the run config",
        ),
        (
            {**LAUNCHED, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "1"},
            "fsdp_config.fsdp_offload_params: expected false, found 1; use accelerate_configs/zero3_offload.yaml",
        ),
        ({**LAUNCHED, "ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed_config_file: expected a DeepSpeed file"),
        (
            {
                **LAUNCHED,
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json",
            },
            "nowhere.json does not exist",
        ),
    ],
)
def test_refused_launches(changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("(", r"\(")):
        read_launcher_env(dict(changes))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("deepspeed", "accelerate_file", "complaint"),
    [
        ("[" * 100_000, None, "is not readable JSON"),
        ("[]", None, "expected a JSON object, found list"),
        ('{"zero_optimization": {"stage": {}}}', None, r"stage: expected 1, 2 or 3, found \{\}"),
        ('{"zero_optimization": {"stage": 2, "offload_optimizer": [1]}}', None, "offload_optimizer: expected keys"),
        (None, "{distributed_type: FSDP, fsdp_config: [1]}", "fsdp_config: expected keys below it, found"),
        (None, "{distributed_type: DEEPSPEED, deepspeed_config: x}", "deepspeed_config: expected keys below it"),
        (None, "{distributed_type: [FSDP]}", "distributed_type: expected NO, MULTI_GPU, FSDP or DEEPSPEED"),
    ],
)
def test_malformed_launcher_files(
    deepspeed: str | None, accelerate_file: str | None, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(deepspeed or accelerate_file or "")
    with pytest.raises(ConfigError, match=complaint):
        read_launcher_env(dict(LAUNCHED), str(path) if deepspeed else None, str(path) if accelerate_file else None)


@pytest.mark.quick
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine.startswith("zero")])
def test_auto_is_filled_from_the_run_config(engine: str) -> None:
    path = ROOT / "ds_configs" / f"{engine}.json"
    result = resolve_deepspeed_config(read_deepspeed_config(path), str(path), PLAN)
    assert '"auto"' not in json.dumps(result)
    assert result["gradient_accumulation_steps"] == 4 and result["train_micro_batch_size_per_gpu"] == 2
    assert result["train_batch_size"] == 16 and result["gradient_clipping"] == 1.0 and result["bf16"]["enabled"] is True


@pytest.mark.quick
@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2, but 4 by the run config"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping is 0.5, but 1.0 by the run config \(optim.clip_norm\)"),
        ({"train_batch_size": 32}, "train_batch_size is 32, but 16"),
        ({"bf16": {"enabled": False}}, r"bf16.enabled is false, but true by the run config \(precision\)"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, but false"),
        ({"prescale_gradients": "auto"}, 'prescale_gradients: "auto" is not supported here'),
    ],
)
def test_contradicting_deepspeed_file_is_refused(section: dict[str, object], complaint: str) -> None:
    config = {"zero_optimization": {"stage": 2}, **section}
    with pytest.raises(ConfigError, match=complaint):
        resolve_deepspeed_config(config, "x.json", PLAN)


def test_a_taken_port_names_itself_and_the_options(
    parity_config: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        host, client = two_ranks("ddp", parity_config, f"run.dir={tmp_path / 'run'}", MASTER_PORT=str(port))
        assert forked.wait([host]) == {host: 64}  # the other waits for an answer until its launcher ends it
        forked.kill([client])
    (error,) = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("mmldlm: error: ")]
    assert error.startswith(f"mmldlm: error: launcher: port {port} of 127.0.0.1 is in use; ")
    assert all(option in error for option in ("--main_process_port", "--master_port", "MASTER_PORT"))


def test_a_deepspeed_file_with_another_accumulation(parity_config: Path, tmp_path: Path) -> None:
    file = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps({**file, "gradient_accumulation_steps": 4, "gradient_clipping": 9.0}))
    done = run(torchrun(2, parity_config, f"run.dir={tmp_path / 'run'}", "--deepspeed_config", tmp_path / "ds.json"))
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    assert "gradient_accumulation_steps is 4, but 2 by the run config" in done.stdout
    assert "gradient_clipping is 9.0, but 2.0 by the run config" in done.stdout


def test_a_cpu_config_that_would_train_separate_copies(parity_config: Path, tmp_path: Path) -> None:
    done = run(accelerate("cpu", 2, parity_config, f"run.dir={tmp_path / 'run'}"))
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    assert "every process would train its own copy" in done.stdout


def test_missing_processes_are_refused(parity_config: Path, tmp_path: Path) -> None:
    """Two are asked for, one is started: it says so instead of waiting for half an hour. Here after 2 s, not 30."""
    alone = environment(**{**LAUNCHED, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29653"})
    settings = [f"run.dir={tmp_path / 'run'}", "distributed.timeout_s=2"]
    imports = "import sys; from mmldlm import train; from mmldlm.distributed import process_group"
    program = f"{imports}; process_group.RENDEZVOUS_TIMEOUT_S = 1.0, 300.0"
    done = run([sys.executable, "-c", f"{program}; sys.exit(train.main())", str(parity_config), *settings], env=alone)
    assert done.returncode == 76 and "rendezvous of 2 processes at 127.0.0.1:29653 failed" in done.stdout


def test_two_sources_of_the_precision(parity_config: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((ROOT / "accelerate_configs/ddp.yaml").read_text())
    (tmp_path / "ddp.yaml").write_text(yaml.safe_dump({**tree, "mixed_precision": "bf16"}))
    command = accelerate("ddp", 2, parity_config, f"run.dir={tmp_path / 'run'}", "precision=fp32")
    command[command.index("accelerate_configs/ddp.yaml")] = str(tmp_path / "ddp.yaml")
    done = run(command)
    assert done.returncode != 0 and "mixed_precision: bf16 in the launcher's config, but precision: fp32" in done.stdout
    assert "precision: auto or bf16 here" in done.stdout


LAUNCH_ALIKE_BUT = """
import os, sys
from mmldlm.errors import exit_process
from mmldlm.train import main
if os.environ["RANK"] == "1":
    sys.argv.append({change!r})
exit_process(main())
"""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("optim.lr=0.5", "rank 1: config.optim.lr is 0.5, 0.001 on rank 0"),
        ("data.path=/nowhere", "rank 1: /nowhere"),
    ],
)
def test_ranks_with_different_configs_are_refused(
    change: str,
    complaint: str,
    parity_config: Path,
    two_ranks: Callable[..., list[int]],
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    """The deviating one and its key are named, and all end without waiting for one another until a timeout."""
    script = tmp_path / "alike.py"
    script.write_text(LAUNCH_ALIKE_BUT.format(change=change))
    given = (parity_config, f"run.dir={tmp_path / 'run'}", f"distributed.timeout_s={2 * TEST_TIMEOUT_S:g}")
    ranks = two_ranks("ddp", *given, script=str(script))
    codes, log = forked.wait(ranks), (tmp_path / "log").read_text()
    assert codes.keys() == set(ranks) and all(codes.values()), log[-3000:]
    assert complaint in log, log[-3000:]
    assert not (tmp_path / "run").exists()


def test_shipped_single_process_files(parity_config: Path, single: Callable[..., Path], tmp_path: Path) -> None:
    command = accelerate("cpu", 1, parity_config, f"run.dir={tmp_path}", "train.steps=2")
    assert "engine       single, 1 process on" in succeed(command)
    report = json.loads((tmp_path / "startup.json").read_text())
    assert report["launcher"] == "accelerate launch" and report["versions"]["torch"] and report["ranks"][0]["host"]
    assert exit_record(tmp_path)["code"] == 0


@pytest.mark.quick
@pytest.mark.setting("precision")
def test_precision_auto_is_the_launchers() -> None:
    """A precision that the run config names stays; the launcher's `no` contradicts none."""
    for requested, mixed_precision, expected in (
        ("auto", "no", "fp32"),
        ("auto", "bf16", "bf16"),
        ("auto", "fp16", "fp16"),
        ("bf16", "no", "bf16"),
        ("bf16", "bf16", "bf16"),
        ("fp32", "no", "fp32"),
    ):
        config = load_config(None, [f"precision={requested}"])
        assert resolve_precision(config, mixed_precision).precision == expected
    with pytest.raises(ConfigError, match='expected mixed_precision: "no" there, or precision: auto or fp16 here'):
        resolve_precision(load_config(None, ["precision=bf16"]), "fp16")
    with pytest.raises(ConfigError, match=r"mixed_precision: expected no, bf16 or fp16 .*, found fp8"):
        read_launcher_env({"ACCELERATE_MIXED_PRECISION": "fp8"})
    assert RunConfig().precision == "auto", "so files with a mixed_precision run as they are"


@pytest.mark.quick
def test_dry_run_knows_the_launchers_precision(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fp16.yaml").write_text("{distributed_type: NO, mixed_precision: fp16}")
    for options, launched, expected in (
        ([], "no", "fp32"),
        ([], "bf16", "bf16"),
        (["--accelerate_config", str(tmp_path / "fp16.yaml")], "", "fp16"),
    ):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
        assert train.main(["--dry-run", str(tiny_config), *options]) == 0
        assert f"\nprecision: {expected}\n" in capsys.readouterr().out
