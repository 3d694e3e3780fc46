"""`parallelism_config`: replicas x shards of FSDP2 under every launcher, and all else refused. ZeRO-3's hpZ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from mmldlm.distributed.deepspeed_config import StepPlan, read_deepspeed_config, resolve_deepspeed_config
from mmldlm.distributed.launcher import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError
from tests.helpers.engine_runs import CURVE, accelerate, assert_same_run, difference, records, run, succeed, torchrun
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT

FP32 = 1e-5
PARALLELISM = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
REPLICATE, SHARD = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"


def launched(world_size: int = 4, local_world_size: int | None = None, **variables: str) -> dict[str, str]:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local_world_size or world_size)}
    return {**ranks, **sizes, **variables}


def accelerate_file(folder: Path, base: str, sizes: Mapping[str, object]) -> Path:
    tree = yaml.safe_load((ROOT / f"accelerate_configs/{base}.yaml").read_text())
    section = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump({**tree, "parallelism_config": section}))
    return folder / "accelerate.yaml"


@pytest.mark.quick
def test_replicas_and_shards_of_the_shipped_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    def read(name: str, *world: int) -> LauncherEnv:
        return read_launcher_env(launched(*world), accelerate_file=f"accelerate_configs/{name}.yaml")

    launch = read("fsdp2_hsdp")
    assert (launch.engine, launch.replicas, launch.sharding) == ("fsdp2", 2, "2 replicas x 2 shards")
    launch = read("zero3_hpz", 4, 2)
    assert (launch.engine, launch.secondary_partition, launch.sharding) == ("zero3", 2, "secondary partition of 2")
    assert read("fsdp2").sharding == read("zero3").sharding == ""


# Each variable that Accelerate reads: refused, naming the key and what to use instead, or without effect.
@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("TP_SIZE", "2", "tp_size: expected 1, found 2: no tensor parallelism here; use FSDP2 or ZeRO-3"),
        ("CP_SIZE", "2", "cp_size: expected 1, found 2: no context parallelism here; use memory.activation_check"),
        ("SP_SIZE", "4", "sp_size: expected 1, found 4: no sequence parallelism here; use memory.activation_check"),
        ("TP_SIZE", "two", "tp_size: expected a whole number from 1, found 'two'"),
        ("CP_SIZE", "0", "cp_size: expected a whole number from 1, found '0'"),
        ("DP_SHARD_SIZE", "2.0", "dp_shard_size: expected a whole number from 1, found '2.0'"),
        ("DP_REPLICATE_SIZE", "-1", "dp_replicate_size: expected a whole number from 1, found '-1'"),
        ("DP_REPLICATE_SIZE", "", "dp_replicate_size: expected a whole number from 1, found ''"),
        ("DP_SHARD_SIZE", "9" * 9999, "dp_shard_size: expected a whole number from 1, found '999"),
        ("CP_BACKEND", "deepspeed", "cp_backend: expected torch or nothing, found 'deepspeed'"),
        ("CP_COMM_STRATEGY", "alltoall", "cp_comm_strategy: expected allgather or nothing, found 'alltoall'"),
        ("SP_BACKEND", "torch", "sp_backend: expected deepspeed or nothing"),
        ("SP_SEQ_LENGTH", "512", "sp_seq_length: expected None or nothing, found '512'"),
        ("SP_SEQ_LENGTH_IS_VARIABLE", "False", "sp_seq_length_is_variable: expected True or nothing"),
        ("SP_ATTN_IMPLEMENTATION", "eager", "sp_attn_implementation: expected sdpa or nothing, found 'eager'"),
        ("PP_SIZE", "2", "pp_size: unknown; expected dp_replicate_size and dp_shard_size"),
    ],
)
@pytest.mark.parametrize("engine", [{}, FSDP2])
def test_refused_variables(name: str, value: str, complaint: str, engine: dict[str, str]) -> None:
    variables = {**engine, **PARALLELISM, REPLICATE: "2", SHARD: "2", f"PARALLELISM_CONFIG_{name}": value}
    with pytest.raises(ConfigError, match=f"^parallelism_config_{complaint}") as error:
        read_launcher_env(launched(**variables))
    assert len(str(error.value)) < 400


@pytest.mark.quick
@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({**FSDP2, REPLICATE: "2", SHARD: "4"}, "2 x dp_shard_size 4; expected a product of 4, the number of proc"),
        ({**FSDP2}, "1 x dp_shard_size 1; expected a product of 4, the number of processes"),
        ({**FSDP2, REPLICATE: "4"}, "nothing is sharded; use distributed_type: MULTI_GPU"),
        ({REPLICATE: "4"}, "without FSDP2; expected distributed_type: FSDP with fsdp_version: 2"),
        ({SHARD: "4"}, "without FSDP2; expected distributed_type: FSDP"),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero3.json",
                REPLICATE: "2",
                SHARD: "2",
            },
            "ZeRO-3 shards over all processes; zero_hpz_partition_size",
        ),
        (
            {**FSDP2, "ACCELERATE_USE_PARALLELISM_CONFIG": "1", REPLICATE: "2", SHARD: "2"},
            "ignores without ACCELERATE_USE_PARALLELISM_CONFIG=true",
        ),
    ],
)
def test_refused_sizes(variables: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=f"parallelism_config: found dp_replicate_size .*{complaint}"):
        read_launcher_env(launched(**{**PARALLELISM, **variables}))


HARMLESS = {
    "PARALLELISM_CONFIG_TP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_SIZE": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "None",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "True",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa",
}


def test_variables_set_by_hand(
    parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    """With torchrun and FSDP2's variables: hybrid sharding as from a file; and under DDP all defaults do nothing."""
    sizes = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    by_hand = {**HARMLESS, **PARALLELISM, **FSDP2, **sizes, REPLICATE: "2", SHARD: "2"}
    steps = ("train.steps=4",)
    forked.succeed("ddp", tmp_path / "hybrid", 4, parity_config, "train.micro_batch_size=1", *steps, **by_hand)
    assert "fsdp2, 4 processes, 2 replicas x 2 shards" in (tmp_path / "hybrid.log").read_text()
    forked.succeed("ddp", tmp_path / "ddp", 2, parity_config, *steps, **HARMLESS, **PARALLELISM)
    assert difference(tmp_path / "hybrid", single(*steps)) < FP32
    assert difference(tmp_path / "ddp", single(*steps)) < FP32


@pytest.mark.parametrize("size", ["tp_size", "cp_size", "sp_size"])
@pytest.mark.parametrize("launcher", ["forked", pytest.param("accelerate", marks=pytest.mark.slow)])
def test_other_parallelism_is_refused(
    size: str, launcher: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Tensor parallelism x shards ended with exit code 0 and wrong gradients; context parallelism did nothing."""
    file = accelerate_file(tmp_path, "fsdp2", {"dp_shard_size": 2, size: 2})
    given = [parity_config, f"run.dir={tmp_path / 'run'}"]
    if launcher == "forked":
        pids = forked.start("ddp", [*given, "--accelerate_config", file], 4, tmp_path / "log")
        assert forked.wait(pids) == dict.fromkeys(pids, 64), (tmp_path / "log").read_text()[-3000:]
        output = (tmp_path / "log").read_text()
    else:
        command = accelerate("fsdp2", 4, *given)
        command[command.index("accelerate_configs/fsdp2.yaml")] = str(file)
        done = run(command)
        assert done.returncode != 0
        output = done.stdout
    lines = [line for line in output.splitlines() if line.startswith("mmldlm: error")]
    # accelerate launch ends the others after the first.
    assert lines and all(f"parallelism_config_{size}: expected 1, found 2: no " in line for line in lines), output
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
@pytest.mark.parametrize("key", ["dp_replicate_size", "tp_size"])
def test_section_without_the_prefix_is_refused(key: str, tmp_path: Path) -> None:
    """Accelerate ignores such keys."""
    path = tmp_path / "x.yaml"
    path.write_text(f"{{distributed_type: FSDP, fsdp_config: {{fsdp_version: 2}}, parallelism_config: {{{key}: 2}}}}")
    with pytest.raises(ConfigError, match=f"parallelism_config.{key}: expected the name parallelism_config_{key}"):
        read_launcher_env(launched(), accelerate_file=str(path))


def test_ranks_with_different_engines_are_refused(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Ranks of other meshes would wait for one another until the timeout."""
    script = tmp_path / "alike.py"
    script.write_text(
        "import os\nfrom mmldlm.errors import exit_process\nfrom mmldlm.train import main\n"
        f"if os.environ['RANK'] == '3':\n    os.environ['{REPLICATE}'], os.environ['{SHARD}'] = '1', '4'\n"
        "exit_process(main())\n"
    )
    variables = {**PARALLELISM, **FSDP2, REPLICATE: "2", SHARD: "2"}
    given = [parity_config, f"run.dir={tmp_path / 'run'}"]
    pids = forked.start("ddp", given, 4, tmp_path / "log", str(script), **variables)
    log = tmp_path / "log"
    assert forked.wait(pids) == dict.fromkeys(pids, 64), log.read_text()[-3000:]
    assert "rank 3: engine is fsdp2, fsdp2 2 replicas x 2 shards on rank 0" in log.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [accelerate, torchrun])
def test_launchers(
    launcher: Callable[..., list[str]], parity_config: Path, single: Callable[..., Path], tmp_path: Path
) -> None:
    given = [parity_config, f"run.dir={tmp_path}", "train.micro_batch_size=1"]
    if launcher is torchrun:
        command = torchrun(4, *given, "--accelerate_config", "accelerate_configs/fsdp2_hsdp.yaml")
    else:
        command = accelerate("fsdp2_hsdp", 4, *given)
    assert "engine       fsdp2, 4 processes, 2 replicas x 2 shards" in succeed(command)
    assert_same_run(tmp_path, single(), FP32)


def test_settings_reach_the_engine(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Two shards on four processes: half of 16 bytes for each parameter; and our timeout for each group of the mesh."""
    out, short = tmp_path / "facts.json", ["train.steps=4", "validation.every=0", "checkpoint.every_steps=0"]
    given = (parity_config, "train.micro_batch_size=1", "guard.verify_updates_every=0", *short)
    forked.succeed("fsdp2_hsdp", tmp_path / "run", 4, *given, script="engine_probe.py", PROBE=str(out))
    facts = json.loads(out.read_text())
    assert facts["held"] == pytest.approx(16 / 2, rel=0.05)
    assert facts["fsdp_modules"] == ["", "blocks.0", "blocks.1"] and facts["parameters"] == ["torch.float32"]
    assert len(facts["timeouts_s"]) > 2 and set(facts["timeouts_s"]) == {120}
    report = json.loads((tmp_path / "run" / "startup.json").read_text())
    assert (report["engine"], report["sharding"]) == ("fsdp2", "2 replicas x 2 shards")
    assert "Slicing a flattened" not in (tmp_path / "run.log").read_text(), "a warning that users cannot act upon"


def test_replicas_share_the_gradient_norm(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Each replica sums over its shards by itself, and may round otherwise: here by far, in the gradients of one.

    All ranks have one norm, by which they clip, and take or skip a step together.
    """
    given = [parity_config, "train.steps=3", "train.micro_batch_size=1", "guard.grad_norm_spike=4"]
    given += ["guard.verify_updates_every=0"]
    forked.succeed("fsdp2_hsdp", tmp_path / "run", 4, *given, script="uneven_replicas.py", FACTS=str(tmp_path))
    norms = [json.loads((tmp_path / f"norms.rank{rank}.json").read_text()) for rank in range(4)]
    assert len(norms[0]) == 3 and norms == [norms[0]] * 4


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.name=muon", "latent.prediction=epsilon"),
        pytest.param(("precision=fp16",), marks=pytest.mark.slow),
        pytest.param(("precision=bf16",), marks=pytest.mark.slow),
    ],
)
def test_other_settings_follow_fsdp2(
    settings: tuple[str, ...], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    given = (parity_config, "train.steps=8", "validation.every=0", *settings)
    forked.succeed("fsdp2", tmp_path / "fsdp2", 2, *given)
    forked.succeed("fsdp2_hsdp", tmp_path / "hybrid", 4, *given, "train.micro_batch_size=1")
    assert difference(tmp_path / "hybrid", tmp_path / "fsdp2", CURVE[:1]) < 5e-3
    if settings[0] == "precision=fp16":
        scales = [[record["optim/loss_scale"] for record in records(run).values()] for run in tmp_path.glob("*/")]
        assert scales[0] == scales[1]


# --- ZeRO-3 with a secondary partition --------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("zero", "complaint"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 3}, "a number that divides the 4 processes, found 3"),
        ({"stage": 3, "zero_hpz_partition_size": 0}, "a number that divides the 4 processes, found 0"),
        ({"stage": 3, "zero_hpz_partition_size": True}, "a number that divides the 4 processes, found True"),
        ({"stage": 3, "zero_hpz_partition_size": "2"}, "a number that divides the 4 processes, found '2'"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, "expected ZeRO stage 3, found stage 2"),
    ],
)
def test_refused_secondary_partitions(zero: dict[str, object], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    with pytest.raises(ConfigError, match=f"zero_optimization.zero_hpz_partition_size: expected .*{complaint[-25:]}"):
        read_launcher_env(launched(), str(tmp_path / "ds.json"))


@pytest.mark.quick
def test_secondary_partition_is_that_of_a_node() -> None:
    path = "ds_configs/zero3_hpz.json"
    sizes = {"micro_batch_size": 2, "accumulation": 4, "global_batch_size": 16, "width": 64}
    plan = StepPlan(**sizes, clip_norm=1.0, precision="bf16")
    launch = read_launcher_env(launched(16, 8), str(ROOT / path))
    assert launch.secondary_partition == 8
    content, secondary = read_deepspeed_config(ROOT / path), launch.secondary_partition
    resolved = resolve_deepspeed_config(content, path, plan, secondary_partition=secondary)
    assert resolved["zero_optimization"]["zero_hpz_partition_size"] == 8
