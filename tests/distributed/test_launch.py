"""The launcher's environment and files: what they select, and what is refused before training."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import accelerate as accelerate_package
import pytest
import yaml
from accelerate.utils import TorchDynamoPlugin, named_module_tensors
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from mmldlm import train
from mmldlm.config import RunConfig, load_config, resolve_precision
from mmldlm.distributed.launch import PASSED_ON, REFUSED, read_launcher_env
from mmldlm.distributed.library_calls import PREFIXES, library_call
from mmldlm.errors import ConfigError, NumericalError
from tests.helpers.engine_runs import ENGINES, LAUNCHED, accelerate, exit_record, record_list, run, succeed
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S

FSDP = {**LAUNCHED, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
HYBRID = {**FSDP, "WORLD_SIZE": "4", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
REPLICATE, SHARD = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"
SHORT = ("train.steps=3", "validation.every=0", "checkpoint.every_steps=0", "distributed.timeout_s=120")


@pytest.mark.quick
def test_no_launcher_is_one_process() -> None:
    launch = read_launcher_env({})
    assert (launch.engine, launch.rank, launch.world_size, launch.nodes) == ("single", 0, 1, 1)


@pytest.mark.quick
@pytest.mark.parametrize("engine", ENGINES)
def test_config_file_selects_the_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    launch = read_launcher_env(dict(LAUNCHED), accelerate_file=f"accelerate_configs/{engine}.yaml")
    assert (launch.engine, launch.rank, launch.world_size) == (engine, 1, 2)
    assert (launch.mixed_precision, launch.notices, launch.sharding) == ("no", (), "")


@pytest.mark.quick
def test_replicas_and_shards_of_the_shipped_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    four = {**LAUNCHED, "WORLD_SIZE": "4"}
    launch = read_launcher_env(four, accelerate_file="accelerate_configs/fsdp2_hsdp.yaml")
    assert (launch.engine, launch.replicas, launch.sharding) == ("fsdp2", 2, "2 replicas x 2 shards")
    launch = read_launcher_env(four, accelerate_file="accelerate_configs/zero3_hpz.yaml")
    assert (launch.engine, launch.sharding) == ("zero3", "secondary partition of 2"), "the processes of a node"


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


REFUSED_LAUNCHES: list[tuple[dict[str, str], str]] = [
    # Only a part of a process group.
    ({"MASTER_ADDR": "a"}, "every process would train its own copy"),
    ({"WORLD_SIZE": "2"}, "every process would train its own copy"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "every process would train its own copy"),
    ({"PMI_SIZE": "2"}, "every process would train its own copy"),
    ({"RANK": "0", "LOCAL_RANK": "0"}, "but WORLD_SIZE and MASTER_ADDR and MASTER_PORT not"),
    ({**LAUNCHED, "MASTER_PORT": ""}, "but MASTER_PORT not; expected all five"),
    ({**LAUNCHED, "WORLD_SIZE": "two"}, "WORLD_SIZE: expected a whole number, found 'two'"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "FSDP is requested, but RANK"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is requested, but RANK"),
    ({**FSDP, "ACCELERATE_USE_DEEPSPEED": "true"}, "both FSDP and DeepSpeed are requested"),
    (
        {**LAUNCHED, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"},
        r"nowhere.json: cannot be read: No such file.*relative to ",
    ),
    # Values of Accelerate's variables.
    ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision: expected no, bf16 or fp16"),
    ({**LAUNCHED, "ACCELERATE_USE_FSDP": "true"}, "fsdp_version: expected 2, found 1"),
    ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}, "fsdp_reshard_after_forward: expected true or false"),
    ({"ACCELERATE_CPU_AFFINITY": "7"}, "cpu_affinity: expected true or false, found 7"),
    ({**LAUNCHED, "ACCELERATE_USE_CPU": "1"}, "use_cpu: expected false, found 1"),
    ({**LAUNCHED, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"}, "found 8; use train.global_batch_size"),
    # Other kinds of parallelism.
    *(({**HYBRID, f"PARALLELISM_CONFIG_{name}_SIZE": "2"}, "expected 1, found 2: only") for name in ("TP", "CP", "SP")),
    ({**HYBRID, SHARD: "2.0"}, "PARALLELISM_CONFIG_DP_SHARD_SIZE: expected a whole number, found '2.0'"),
    ({**HYBRID, REPLICATE: "2", SHARD: "4"}, "2 x .* 4: expected a product of 4, the number of processes"),
    (HYBRID, "1 x .* 1: expected a product of 4"),
    ({**HYBRID, REPLICATE: "4"}, "4 x .* 1: expected .* several shards"),
    ({**HYBRID, "ACCELERATE_USE_FSDP": "false", SHARD: "4"}, "expected distributed_type: FSDP with fsdp_version: 2"),
    (
        {**HYBRID, "ACCELERATE_USE_PARALLELISM_CONFIG": "1", REPLICATE: "2", SHARD: "2"},
        "expected .* and ACCELERATE_USE_PARALLELISM_CONFIG=true",
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("variables", "complaint"), REFUSED_LAUNCHES)
def test_refused_launches(variables: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refusal:
        read_launcher_env(dict(variables))
    assert "\n" not in str(refusal.value)


@pytest.mark.quick
@pytest.mark.parametrize("name", REFUSED)
def test_refused_variables_name_what_to_use(name: str) -> None:
    for value in ("true", "8", "inductor"):
        with pytest.raises(ConfigError, match=f"expected nothing, found {value}; use {re.escape(REFUSED[name])}"):
            read_launcher_env({**FSDP, name: value})
    for value in ("", "no", "False", "none"):
        assert read_launcher_env({**FSDP, name: value}).engine == "fsdp2"
    if name.startswith("FSDP_"):
        assert read_launcher_env({**LAUNCHED, name: "8"}).engine == "ddp", "of an engine that is not in use"


@pytest.mark.quick
def test_all_refused_variables_are_in_one_line() -> None:
    given = {**FSDP, "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD", "ACCELERATE_USE_CPU": "1"}
    with pytest.raises(ConfigError, match=r"fsdp_version.*fsdp_reshard_after_forward.*use_cpu"):
        read_launcher_env(given)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{distributed_type: MULTI_GPU, nonsense: 1}", r"unknown keys .*nonsense.* \(ValueError in accelerate\)"),
        ("{distributed_type: FSDP, mixed_precision: no}", 'mixed_precision: expected "no" in quotes, .* found False'),
        (
            "{distributed_type: [FSDP]}",
            "expected MULTI_GPU, FSDP or DEEPSPEED for 2 processes, found",
        ),
        ("{distributed_type: NO}", "expected MULTI_GPU, FSDP or DEEPSPEED for 2 processes, found NO"),
        # Accelerate ignores the key, which has another name.
        (
            "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, parallelism_config: {dp_replicate_size: 2}}",
            "parallelism_config: unknown key 'dp_replicate_size'",
        ),
    ],
)
def test_refused_accelerate_files(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        read_launcher_env(dict(LAUNCHED), accelerate_file=str(tmp_path / "file.yaml"))
    assert "\n" not in str(refusal.value)
    assert not any(name.startswith(PREFIXES) for name in os.environ)


@pytest.mark.quick
def test_only_one_source_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"zero2.json here, ds_configs/zero3.json in the accelerate config"):
        read_launcher_env(dict(LAUNCHED), "ds_configs/zero2.json", "accelerate_configs/zero3.yaml")
    with pytest.raises(ConfigError, match="but accelerate launch has its own --config_file"):
        read_launcher_env({**LAUNCHED, "ACCELERATE_MIXED_PRECISION": "no"}, None, "accelerate_configs/ddp.yaml")


@pytest.mark.quick
def test_only_what_libraries_say_of_a_value_is_an_error_of_the_user() -> None:
    """A bug keeps its traceback, and a user error its exit code."""
    line = r"^f.json: stage: .*found 9 \(ValidationError in pydantic\)"
    with pytest.raises(ConfigError, match=line) as caught, library_call("f.json", {}):
        DeepSpeedZeroConfig(stage=9)
    assert caught.value.__cause__ is not None
    with pytest.raises(ConfigError, match=r"FOO.*in accelerate"), library_call("f.json", {}):
        TorchDynamoPlugin(backend="foo")  # an enumeration of the standard library refuses it
    for error in (AssertionError("ours"), ValueError("ours"), NumericalError("nan")):
        with pytest.raises(type(error)) as raised, library_call("f.json", {}):
            raise error
        assert raised.value is error
    with pytest.raises(AttributeError), library_call("f.json", {}):
        list(named_module_tensors(None))  # in Accelerate, as where a version of it has changed


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("zero2", marks=pytest.mark.slow)])
def test_no_other_variable_of_accelerate_has_an_effect(
    engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """All that the installed version reads, with a value that it would act on or choke on."""
    sources = [path.read_text(encoding="utf-8") for path in Path(accelerate_package.__file__).parent.rglob("*.py")]
    names = set(re.findall(r"\b(?:ACCELERATE|FSDP|MEGATRON_LM)_[A-Z0-9_]*[A-Z0-9]\b", "\n".join(sources)))
    assert {"FSDP_STATE_DICT_TYPE", "ACCELERATE_DEBUG_MODE"} < names
    selecting = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_VERSION"}
    names -= {*PASSED_ON, *REFUSED, *selecting, "ACCELERATE_USE_PARALLELISM_CONFIG"}
    names = {name for name in names if "DEEPSPEED" not in name and name != "ACCELERATE_CONFIG_DS_FIELDS"}
    curves = []
    for folder, variables in ((tmp_path / "without", {}), (tmp_path / "with", dict.fromkeys(names, "8"))):
        forked.succeed(engine, folder, 2, parity_config, *SHORT, **variables)
        curves.append([(r["loss/total"], r["optim/grad_norm"]) for r in record_list(folder)])
    assert len(curves[0]) == 3 and curves[0] == curves[1]


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


@pytest.mark.slow  # what accelerate's launcher sets for such a file: test_a_file_means_the_same_under_both_launchers
def test_a_cpu_config_that_would_train_separate_copies(parity_config: Path, tmp_path: Path) -> None:
    done = run(accelerate("cpu", 2, parity_config, f"run.dir={tmp_path / 'run'}"))
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    assert "every process would train its own copy" in done.stdout


def test_missing_processes_are_refused(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Two are asked for, one is started: it says so instead of waiting for half an hour. Here after 2 s, not 30."""
    alone = {**LAUNCHED, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "from mmldlm.distributed import process_group\nfrom tests.helpers.trainer_scripts import train_and_exit\n"
        "process_group.RENDEZVOUS_TIMEOUT_S = 1.0, 300.0\ntrain_and_exit()\n"
    )
    given = [parity_config, f"run.dir={tmp_path / 'run'}", "distributed.timeout_s=2"]
    pids = forked.start("single", given, 1, log, str(script), **alone)
    assert forked.wait(pids) == dict.fromkeys(pids, 76)
    assert f"rendezvous of 2 processes at 127.0.0.1:{alone['MASTER_PORT']} failed" in log.read_text()


def test_two_sources_of_the_precision(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    tree = yaml.safe_load((ROOT / "accelerate_configs/ddp.yaml").read_text())
    (tmp_path / "ddp.yaml").write_text(yaml.safe_dump({**tree, "mixed_precision": "bf16"}))
    given = [parity_config, f"run.dir={tmp_path / 'run'}", "precision=fp32"]
    pids = forked.start("ddp", [*given, "--accelerate_config", tmp_path / "ddp.yaml"], 2, tmp_path / "log")
    named = ("mixed_precision: bf16", "precision: fp32", "precision: auto or bf16")
    assert forked.wait(pids) == dict.fromkeys(pids, 64)
    assert all(text in (tmp_path / "log").read_text() for text in named)


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


@pytest.mark.slow  # accelerate's launcher itself: test_files_under_accelerate_launch
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
    with pytest.raises(ConfigError, match=r"mixed_precision: fp16 .* precision: bf16 .* precision: auto or fp16"):
        resolve_precision(load_config(None, ["precision=bf16"]), "fp16")
    assert RunConfig().precision == "auto", "so files with a mixed_precision run as they are"


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
