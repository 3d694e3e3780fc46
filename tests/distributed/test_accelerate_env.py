"""Every variable that the installed accelerate reads leaves the curve as it is, or is refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import accelerate
import pytest

from mmldlm.distributed.accelerate_env import (
    BOOLEANS,
    DEEPSPEED_VARIABLES,
    IGNORED,
    IGNORED_UNDER_FSDP,
    REFUSED,
    REFUSED_UNDER_FSDP,
    check_variables,
)
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.errors import ConfigError
from tests.helpers.engine_runs import record_list
from tests.helpers.forked_runs import ForkedRuns

NAME = re.compile(r"(ACCELERATE|FSDP|PARALLELISM_CONFIG)_[A-Z0-9_]*[A-Z0-9]")
SHORT = ("train.steps=3", "validation.every=0", "checkpoint.every_steps=0", "distributed.timeout_s=120")
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
# They select engine and precision, by `read_launcher_env`.
SELECTING = frozenset({"ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "FSDP_VERSION"})
PARALLELISM_VARIABLES = frozenset({"ACCELERATE_USE_PARALLELISM_CONFIG"}) | {
    f"PARALLELISM_CONFIG_{name}"
    for name in (
        "CP_BACKEND",
        "CP_COMM_STRATEGY",
        "CP_SIZE",
        "DP_REPLICATE_SIZE",
        "DP_SHARD_SIZE",
        "SP_ATTN_IMPLEMENTATION",
        "SP_BACKEND",
        "SP_SEQ_LENGTH",
        "SP_SEQ_LENGTH_IS_VARIABLE",
        "SP_SIZE",
        "TP_SIZE",
    )
}
# Without effect on a run, and nothing that its user would miss: output, other devices, other models, options of what is
# refused above.
WITHOUT_EFFECT = frozenset(
    {
        "ACCELERATE_ALLOW_CP_STANDALONE",
        "ACCELERATE_BYPASS_DEVICE_MAP",
        "ACCELERATE_DEBUG_RDV_FILE",
        "ACCELERATE_DOWNCAST_BF16",
        "ACCELERATE_DYNAMO_MODE",
        "ACCELERATE_DYNAMO_USE_DYNAMIC",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        "ACCELERATE_ENABLE_RICH",
        "ACCELERATE_INIT_INCLUDE_BUFFERS",
        "ACCELERATE_LOG_LEVEL",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
    }
) | {
    f"ACCELERATE_FP8_{name}"
    for name in (
        "AMAX_COMPUTE_ALGO",
        "AMAX_HISTORY_LEN",
        "BACKEND",
        "ENABLE_FSDP_FLOAT8_ALL_GATHER",
        "FORMAT",
        "INTERVAL",
        "MARGIN",
        "OPT_LEVEL",
        "OVERRIDE_DGRAD",
        "OVERRIDE_FPROP",
        "OVERRIDE_WGRAD",
        "PAD_INNER_DIM",
        "USE_AUTOCAST_DURING_EVAL",
        "USE_MXFP8_BLOCK_SCALING",
    )
}
# Set together, with values that Accelerate would act on or choke on.
HARMLESS = IGNORED.keys() | IGNORED_UNDER_FSDP.keys() | WITHOUT_EFFECT
VALUES = {"text": "unknown", "number": "8", "flag": "true"}


def variables_in(source: ast.Module) -> Iterator[str]:
    """Yield names of variables in a module: whole ones, and `prefix + "NAME"` with the prefixes of its function."""
    functions = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    for scope in [source, *functions]:
        prefixes = {
            target.id: node.value.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, str)
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
                yield node.value
            if (
                scope is not source
                and isinstance(node, ast.BinOp)
                and isinstance(node.left, ast.Name)
                and isinstance(node.right, ast.Constant)
                and NAME.fullmatch(name := f"{prefixes.get(node.left.id, '')}{node.right.value}")
            ):
                yield name


@pytest.fixture(scope="module")
def installed() -> set[str]:
    """Names in the installed accelerate, but for its own tests: all that it reads, and some that it only sets."""
    folder = Path(accelerate.__file__).parent
    files = [path for path in folder.rglob("*.py") if "test_utils" not in path.parts]
    return {name for path in files for name in variables_in(ast.parse(path.read_text(encoding="utf-8")))}


@pytest.mark.quick
def test_variables_of_the_installed_accelerate_are_classified(installed: set[str]) -> None:
    """Another version of accelerate with a new variable fails here until its effect is known."""
    classes = (
        SELECTING,
        BOOLEANS.keys(),
        PARALLELISM_VARIABLES,
        DEEPSPEED_VARIABLES | REFUSED.keys(),
        REFUSED_UNDER_FSDP.keys(),
        IGNORED.keys(),
        IGNORED_UNDER_FSDP.keys(),
        WITHOUT_EFFECT,
    )
    classified = {name for names in classes for name in names}
    assert sum(map(len, classes)) == len(classified), "a variable has one class"
    assert installed - classified == set() and classified - installed == set()
    assert {"ACCELERATE_FP8_MARGIN", "FSDP_VERSION", "PARALLELISM_CONFIG_TP_SIZE"} <= installed, "prefixes are found"


@pytest.mark.quick
@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_UNDER_FSDP])
def test_refused_variables_name_what_to_use(name: str) -> None:
    variable = {**REFUSED, **REFUSED_UNDER_FSDP}[name]
    base = {**LAUNCHED, **(FSDP if name in REFUSED_UNDER_FSDP else {})}
    for value in ("true", "8", "inductor"):
        with pytest.raises(
            ConfigError, match=f"{re.escape(variable.key)}: expected .*, found {value}; use "
        ) as refusal:
            read_launcher_env({**base, name: value})
        assert variable.reason in str(refusal.value) and "\n" not in str(refusal.value)
    for value in ("", *variable.neutral):
        assert read_launcher_env({**base, name: value}).notices == ()


@pytest.mark.quick
@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{BOOLEANS[name]}: expected true or false, found FULL_SHARD"):
        check_variables({**FSDP, name: "FULL_SHARD"})
    assert check_variables({**FSDP, name: "False"}) == check_variables({**FSDP, name: "1"}) == ()


@pytest.mark.quick
def test_all_problems_are_in_one_line() -> None:
    given = {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD", "ACCELERATE_USE_CPU": "1"}
    with pytest.raises(ConfigError) as refusal:
        read_launcher_env({**LAUNCHED, **given})
    keys = ("fsdp_version: expected 2", "fsdp_reshard_after_forward: expected true", "use_cpu: expected false")
    assert all(key in str(refusal.value) for key in keys)


@pytest.mark.quick
def test_ignored_variables_are_told_once_each() -> None:
    given = {**LAUNCHED, **FSDP, **dict.fromkeys(HARMLESS, "x")}
    told = read_launcher_env(given).notices
    keys = [variable.key for variable in (IGNORED | IGNORED_UNDER_FSDP).values()]
    assert [notice.partition(": ")[0] for notice in told] == keys
    assert all(" has no effect: " in notice for notice in told)


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(record["loss/total"], record["optim/grad_norm"]) for record in record_list(folder)]


@pytest.mark.parametrize(
    "engine", ["single", "fsdp2", *(pytest.param(e, marks=pytest.mark.slow) for e in ("ddp", "zero2"))]
)
def test_harmless_variables_leave_the_curve(
    engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """All of them at once; so Accelerate reads none of them."""
    names = HARMLESS | {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"}
    processes = 1 if engine == "single" else 2
    # Only variables of the engine in use are refused: the others must have no effect.
    names |= {*REFUSED_UNDER_FSDP} if engine != "fsdp2" else set()
    forked.succeed(engine, tmp_path / "without", processes, parity_config, *SHORT)
    assert len(curve(tmp_path / "without")) == 3
    for kind, value in VALUES.items():
        forked.succeed(engine, tmp_path / kind, processes, parity_config, *SHORT, **dict.fromkeys(names, value))
        assert curve(tmp_path / kind) == curve(tmp_path / "without"), kind


@pytest.mark.parametrize(
    ("name", "value"), [("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8"), ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")]
)
def test_a_refused_variable_ends_the_start(
    name: str,
    value: str,
    parity_config: Path,
    two_ranks: Callable[..., list[int]],
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    ranks = two_ranks("ddp", parity_config, *SHORT, f"run.dir={tmp_path / 'run'}", **{name: value})
    assert forked.wait(ranks) == dict.fromkeys(ranks, 64)
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "error" in line]
    assert len(lines) == 2 and all(REFUSED[name].reason in line for line in lines) and not (tmp_path / "run").exists()
