"""Launcher files that users bring: each is the launch of a shipped file, or is refused with the edit to make.

`launcher_files/` has the settings of the examples of accelerate (config_yaml_templates), TRL and dLLM
(accelerate_configs); the others are written by the installed `accelerate config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from accelerate.commands.config.default import write_basic_config

from mmldlm.config import load_config, resolve_precision
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError
from tests.helpers.accelerate_files import QUESTIONNAIRES, answer_questionnaire, launched_environments
from tests.helpers.engine_runs import BIN, CURVE, difference, environment, exit_record, run
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port

FOLDER = Path(__file__).parent / "launcher_files"
SHORT = ("train.steps=4", "validation.every=0", "checkpoint.every_steps=0")
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of the loss: those of test_engine_parity


@dataclass(frozen=True)
class Expected:
    """What becomes of a file: it runs, or it is refused with a line that has the texts of the edit."""

    engine: str = ""
    precision: str = "fp32"
    edit: tuple[str, ...] = ()  # texts of the refusal
    processes: int = 2


FSDP1 = ("fsdp_version: expected 2, found 1",)
FILES = {
    "config_fsdp2": Expected("fsdp2"),
    "config_fsdp2_bf16": Expected("fsdp2", "bf16"),
    "config_multi_gpu": Expected("ddp"),
    "config_multi_gpu_bf16": Expected("ddp", "bf16"),
    "config_one_gpu": Expected("single", processes=1),
    "config_default": Expected("single", processes=1),
    "config_fsdp1": Expected(edit=(*FSDP1, "fsdp_reshard_after_forward: expected true or false, found FULL_SHARD")),
    "config_multi_cpu": Expected(edit=("MULTI_GPU",)),
    "config_dynamo": Expected(edit=("dynamo_backend: expected nothing, found inductor", "compile.scope: regional")),
    "accelerate_multi_gpu": Expected("ddp", "bf16"),
    "accelerate_multi_node": Expected("ddp"),
    "accelerate_single_gpu": Expected("single", "bf16", processes=1),
    "accelerate_fsdp": Expected(edit=FSDP1),
    "accelerate_fp8": Expected(edit=("fp8",), processes=1),
    "trl_fsdp2": Expected("fsdp2", "bf16"),
    "trl_multi_gpu": Expected("ddp", "bf16"),
    "trl_single_gpu": Expected("single", "bf16", processes=1),
    "trl_fsdp1": Expected(edit=(*FSDP1, "fsdp_reshard_after_forward: expected true or false, found FULL_SHARD")),
    "dllm_fsdp2": Expected("fsdp2", "bf16"),
    "dllm_ddp": Expected("ddp"),
    "dllm_cpu": Expected("single", processes=1),
    "dllm_fsdp": Expected(edit=FSDP1),
}
SHIPPED = {"single": "gpu", "ddp": "ddp", "fsdp2": "fsdp2"}  # the launches whose curves are compared elsewhere


@pytest.fixture
def launcher_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return the path of a file, which the installed accelerate writes if it is not a committed one."""

    def path(name: str) -> Path:
        if name == "config_default":
            write_basic_config(save_location=str(tmp_path / "default.json"))
            return tmp_path / "default.json"
        if name not in QUESTIONNAIRES:
            return FOLDER / f"{name}.yaml"
        answer_questionnaire(QUESTIONNAIRES[name], tmp_path / f"{name}.yaml", monkeypatch)
        return tmp_path / f"{name}.yaml"

    return path


def torchrun_environments(processes: int) -> list[dict[str, str]]:
    place = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ranks = [{**place, **master, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(processes))]
    return ranks if processes > 1 else [{}]


def outcome(read: Callable[[], LauncherEnv]) -> LauncherEnv | ConfigError:
    try:
        return replace(read(), launcher="")
    except ConfigError as error:
        return error


@pytest.mark.quick
def test_docs_name_every_shipped_file() -> None:
    engines = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "accelerate_configs").glob("*") if f"`{path.name}`" not in engines]
    assert not missing, f"docs/engines.md: the table of engines lacks {', '.join(missing)}"


@pytest.mark.quick
def test_no_committed_file_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("*")} | QUESTIONNAIRES.keys() | {"config_default"} == FILES.keys()


@pytest.mark.quick
@pytest.mark.parametrize("name", FILES)
def test_a_file_means_the_same_under_both_launchers(
    name: str, launcher_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --config_file` and torchrun with `--accelerate_config`: the same launch, or both refused."""
    expected, file = FILES[name], launcher_file(name)
    by_file = [
        outcome(lambda given=given: read_launcher_env(given, accelerate_file=str(file)))  # type: ignore[misc]
        for given in torchrun_environments(expected.processes)
    ]
    options = ["--num_processes", str(expected.processes), "--num_machines", "1"]
    try:
        given = launched_environments(file, options, expected.processes, monkeypatch)
    except RuntimeError as error:  # Accelerate's launcher itself refuses it: fp8 without its library
        assert name == "accelerate_fp8" and "FP8" in str(error)
        by_launcher = by_file
    else:
        by_launcher = [outcome(lambda env=env: read_launcher_env(env)) for env in given]  # type: ignore[misc]
    # For MULTI_CPU accelerate's launcher starts one process, for itself a reason to refuse it.
    for file_result, launcher_result in zip(by_file, by_launcher, strict=bool(expected.engine)):
        if expected.engine:
            assert isinstance(file_result, LauncherEnv), file_result
            assert file_result == launcher_result
            shipped = f"{ROOT}/accelerate_configs/{SHIPPED[expected.engine]}.yaml"
            same = read_launcher_env(torchrun_environments(expected.processes)[file_result.rank], None, shipped)
            same = replace(same, launcher="", mixed_precision=file_result.mixed_precision, accelerate={})
            assert replace(file_result, accelerate={}) == same
            assert file_result.accelerate.get("FSDP_RESHARD_AFTER_FORWARD", "true") == "true"
            precision = resolve_precision(load_config(None), file_result.mixed_precision).precision
            assert precision == expected.precision
        else:
            for result in (file_result, launcher_result):
                assert isinstance(result, ConfigError), result
                assert all(text.lower() in str(result).lower() for text in expected.edit), result
                assert "\n" not in str(result)


def check_run(folder: Path, expected: Expected, single: Callable[..., Path]) -> None:
    """Check curve and report of a run under one of the files."""
    report = exit_record(folder, "startup.json")
    assert (report["engine"], report["precision"]) == (expected.engine, expected.precision)
    assert load_config(folder / "config.yaml", may_extend=False).precision == expected.precision
    reference = single(*SHORT, f"precision={expected.precision}")
    assert difference(folder, reference, CURVE) < TOLERANCE[expected.precision]


def test_a_refused_file_ends_the_start(
    launcher_file: Callable[[str], Path], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    log, file = tmp_path / "log", launcher_file("trl_fsdp1")
    ranks = forked.start("ddp", (parity_config, f"run.dir={tmp_path / 'run'}", "--accelerate_config", file), 2, log)
    assert forked.wait(ranks) == dict.fromkeys(ranks, 64)
    lines = log.read_text().splitlines()
    assert len(lines) == 1 and not (tmp_path / "run").exists(), lines
    assert all(line.startswith("mmldlm: error: ") and FSDP1[0] in line for line in lines), lines


def by_accelerate_launch(file: Path, processes: int, *arguments: object) -> list[str]:
    options = ["--num_processes", processes, "--num_machines", 1, "--main_process_port", free_port()]
    command = [BIN / "accelerate", "launch", "--config_file", file, *options, "-m", "mmldlm.train", *arguments]
    return [str(word) for word in command]


@pytest.mark.parametrize(
    "name", [name if name == "trl_fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in FILES]
)
def test_files_under_accelerate_launch(
    name: str, launcher_file: Callable[[str], Path], parity_config: Path, single: Callable[..., Path], tmp_path: Path
) -> None:
    """The same with the real launcher, as users start it."""
    expected, folder = FILES[name], tmp_path / "run"
    command = by_accelerate_launch(launcher_file(name), expected.processes, parity_config, f"run.dir={folder}", *SHORT)
    done = run(command, environment(HF_HOME=str(tmp_path)))
    if expected.engine:
        assert done.returncode == 0, done.stdout[-3000:]
        check_run(folder, expected, single)
    else:
        assert done.returncode != 0 and not folder.exists()
        lines = done.stdout.splitlines()
        refusals = [line for line in lines if line.startswith(("mmldlm: error: ", "RuntimeError: "))]
        assert refusals and all(text.lower() in refusals[0].lower() for text in expected.edit), done.stdout[-3000:]


@pytest.mark.quick
def test_single_gpu_files_with_several_processes(launcher_file: Callable[[str], Path]) -> None:
    """TRL's file for one GPU says eight processes, of which accelerate's launcher starts one."""
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"distributed_type: MULTI_GPU.*`num_processes: 1`"):
        read_launcher_env(dict(launched))
    with pytest.raises(ConfigError, match="expected MULTI_GPU, FSDP or DEEPSPEED for 2 processes, found NO"):
        read_launcher_env(torchrun_environments(2)[0], accelerate_file=str(launcher_file("trl_single_gpu")))


@pytest.mark.quick
@pytest.mark.parametrize("key", ["fsdp_reshard_after_forwrd", "reshard"])
def test_a_misspelt_key_of_a_section_is_named(key: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text().replace("fsdp_reshard_after_forward:", f"{key}:")
    )
    with pytest.raises(ConfigError, match=f"fsdp_config: unknown key '{key}'"):
        read_launcher_env(torchrun_environments(2)[0], accelerate_file=str(file))


def test_a_section_of_another_engine_is_refused(tmp_path: Path) -> None:
    """Accelerate passes it over, and DDP would train where ZeRO was asked for."""
    path = tmp_path / "multi.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: 'no'\nnum_processes: 2\nuse_cpu: false\n"
        "deepspeed_config: {deepspeed_config_file: z2.json, zero3_init_flag: false}\n"
    )
    with pytest.raises(ConfigError, match="deepspeed_config: no effect under distributed_type: MULTI_GPU"):
        read_launcher_env({"WORLD_SIZE": "2"}, accelerate_file=str(path))
