"""`parallelism_config`: replicas x shards of FSDP2 under every launcher."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmldlm.distributed.launch import read_launcher_env
from tests.helpers.engine_runs import LAUNCHED
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
}
REPLICATE, SHARD = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"


@pytest.mark.quick
def test_variables_set_by_hand_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside options that mean nothing at a size of 1."""
    monkeypatch.chdir(ROOT)
    four = {**LAUNCHED, "WORLD_SIZE": "4"}
    options = {"TP_SIZE": "1", "CP_SIZE": "1", "CP_COMM_STRATEGY": "alltoall", "SP_BACKEND": "deepspeed"}
    others = {f"PARALLELISM_CONFIG_{name}": value for name, value in options.items()}
    by_hand = read_launcher_env({**four, **FSDP2, **others, REPLICATE: "2", SHARD: "2"})
    by_file = read_launcher_env(four, accelerate_file="accelerate_configs/fsdp2_hsdp.yaml")
    assert replace(by_hand, accelerate={}) == replace(by_file, accelerate={}) and by_hand.replicas == 2


def test_ranks_with_different_engines_are_refused(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Ranks of other meshes would wait for one another until the timeout."""
    script = tmp_path / "alike.py"
    script.write_text(
        "import os\nfrom mmldlm.errors import exit_process\nfrom mmldlm.train import main\n"
        f"if os.environ['RANK'] == '3':\n    os.environ['{REPLICATE}'], os.environ['{SHARD}'] = '1', '4'\n"
        "exit_process(main())\n"
    )
    variables = {**FSDP2, REPLICATE: "2", SHARD: "2"}
    given = [parity_config, f"run.dir={tmp_path / 'run'}"]
    pids = forked.start("ddp", given, 4, tmp_path / "log", str(script), **variables)
    log = tmp_path / "log"
    assert forked.wait(pids) == dict.fromkeys(pids, 64), log.read_text()[-3000:]
    assert "rank 3: engine is fsdp2, fsdp2 2 replicas x 2 shards on rank 0" in log.read_text()
    assert not (tmp_path / "run").exists()


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
