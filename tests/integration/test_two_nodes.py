"""Training on two nodes, as network namespaces: equal to one node, and with a lost connection."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_runs import record_list
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.two_nodes import TwoNodes, one_node, unavailable
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

ENGINES = ["ddp", "fsdp2", "zero2"]
TIMEOUT_S = 5


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    if reason := unavailable():
        pytest.skip(reason)
    with TwoNodes(tmp_path / "logs") as result:
        yield result


def curve(run: Path) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss/total"], record["optim/grad_norm"]) for record in record_list(run)]


def exits(run: Path) -> list[int]:
    return [json.loads((run / name).read_text())["code"] for name in ("exit.json", "exit.rank1.json")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nodes_follow_the_curve_of_one(nodes: TwoNodes, tiny_config: Path, tmp_path: Path, engine: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert one_node(tmp_path / "logs-one", engine, tiny_config, f"run.dir={one}") == 0
    started = nodes.launch(engine, tiny_config, f"run.dir={two}")
    assert [process.wait(TEST_TIMEOUT_S) for process in started] == [0, 0], nodes.log()
    assert [step for step, _, _ in curve(one)] == list(range(1, 9))
    assert curve(two) == curve(one)
    # The check went first, on each node; then a process of each trained.
    assert nodes.log().count("\nready") == 2 and exits(two) == [0, 0]


@pytest.mark.parametrize(
    "engine", [name if name == "ddp" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def test_lost_connection_ends_both_nodes_and_resumes(
    nodes: TwoNodes, tiny_config: Path, forked: ForkedRuns, tmp_path: Path, engine: str
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    # Neither warm-up nor rate may follow from the number of steps, which is another one after the cut.
    settings = [tiny_config, f"distributed.timeout_s={TIMEOUT_S}", "schedule.lr=constant", "optim.warmup_steps=1"]
    settings.append("validation.every=0")
    settings += ["checkpoint.every_steps=2", "train.global_batch_size=128", "model.width=64", "model.depth=4"]

    started = nodes.launch(engine, *settings, "train.steps=100000", f"run.dir={run}", NODE_CHECK="skip")
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(curve(run)) >= 3, "three steps")
    wait_until((run / "checkpoints" / "step-00000002").is_dir, "the first checkpoint")
    nodes.cut()
    assert [process.wait(TEST_TIMEOUT_S) for process in started] == [1, 1], nodes.log()  # the launcher's own code
    assert exits(run) == [76, 76], nodes.log()
    assert [nodes.processes(node) for node in range(2)] == [[], []]

    nodes.mend()
    steps = len(curve(run)) + 4
    settings.append(f"train.steps={steps}")
    started = nodes.launch(engine, *settings, f"run.dir={run}", NODE_CHECK="skip")
    assert [process.wait(TEST_TIMEOUT_S) for process in started] == [0, 0], nodes.log()
    assert exits(run) == [0, 0]
    forked.succeed(engine, whole, 2, *settings)
    assert [step for step, _, _ in curve(whole)] == list(range(1, steps + 1))
    assert curve(run) == curve(whole)
    resumed = [record["step"] for record in record_list(run, "resume")]
    assert len(resumed) == 1 and resumed[0] >= 2


@pytest.mark.slow
def test_dead_process_is_replaced_on_both_nodes(nodes: TwoNodes, tiny_config: Path, tmp_path: Path) -> None:
    """MAX_RESTARTS over two nodes: one loses its process, the other notices, and both start again."""
    run, settings = tmp_path / "run", ["distributed.timeout_s=5", "train.steps=60", "validation.every=0"]
    settings += ["checkpoint.every_steps=2", "train.global_batch_size=128", f"run.dir={tmp_path / 'run'}"]
    started = nodes.launch("ddp", tiny_config, *settings, NODE_CHECK="skip", MAX_RESTARTS=1)
    wait_until(lambda: (run / "checkpoints" / "step-00000002").is_dir(), "a checkpoint")
    (trainer,) = [result for result in nodes.processes(1) if "RANK" in result.environ()]
    trainer.kill()
    assert [process.wait(TEST_TIMEOUT_S) for process in started] == [0, 0], nodes.log()
    assert [step for step, _, _ in curve(run)] == list(range(1, 61))
    assert len(record_list(run, "resume")) == 1


@pytest.mark.slow
def test_a_check_sees_both_nodes_and_leaves_nothing(nodes: TwoNodes, tiny_config: Path, tmp_path: Path) -> None:
    started = nodes.launch("ddp", tiny_config, f"run.dir={tmp_path / 'new/run'}", "--check")
    assert [process.wait(TEST_TIMEOUT_S) for process in started] == [0, 0], nodes.log()
    log = nodes.log()
    for line in (
        "started ddp (ranks: 2, nodes: 2)",
        "  rank 0: node0, CPU, network interface wire",
        "  rank 1: node1, CPU, network interface wire",
        f"one run folder: {tmp_path / 'new/run'}",
    ):
        assert line in log
    assert re.search(r"\n  all-reduce, gloo: [\d,]+ us for 4 bytes, \d+\.\d\d GB/s\nready\n", log)
    assert not (tmp_path / "new").exists()


def test_a_check_finds_a_lost_connection(nodes: TwoNodes, tiny_config: Path, tmp_path: Path) -> None:
    nodes.cut()
    run = tmp_path / "run"
    started = nodes.launch("ddp", tiny_config, f"run.dir={run}", "--check", NODE_CHECK="skip", CHECK_TIMEOUT=2)
    assert [process.wait(TEST_TIMEOUT_S) for process in started] == [1, 1], nodes.log()
    last = [(tmp_path / "logs" / f"node{node}.log").read_text().rstrip().rpartition("\n")[2] for node in range(2)]
    assert "waiting for clients. 1/2 clients joined." in last[0]
    assert "failed to connect to any network address of (10.77.0.1, 29500)" in last[1]
    assert not run.exists()
