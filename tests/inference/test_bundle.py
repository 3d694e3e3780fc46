"""Bundles of `mmldlm export`: they generate what their run does, and every damaged byte is named."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmldlm
from mmldlm import cli
from mmldlm.batch import PackedLayout
from mmldlm.checkpoint.manifest import verify_checkpoint, write_checkpoint_manifest
from mmldlm.checkpoint.slices import SlicedTensor, TensorGroup
from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.errors import ConfigError, DataError, MmldlmError, UsageError
from mmldlm.evaluation import BITS, Evaluation, EvaluationConfig
from mmldlm.evaluation.likelihood import text_bound
from mmldlm.inference.model import Model, Samples
from mmldlm.loading.load import LoadedRun
from mmldlm.utils.files import file_info
from tests.helpers.paths import ROOT
from tests.helpers.ports import free_port
from tests.helpers.user_errors import assert_user_error

TEXTS = ["The rose of soil and water.", "The wave."]
CONDITIONS: dict[str, dict[str, Any]] = {
    "l2t": {"mode": "l2t", "texts": TEXTS, "count": 2},
    "t2l": {"texts": TEXTS},
    "joint": {"count": 3, "lengths": [5, 6, 7], "steps": 3},
}


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(a: Samples, b: Samples) -> bool:
    return a.texts == b.texts and a.tokens == b.tokens and a.latents.tobytes() == b.latents.tobytes()


def run_python(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def evaluated_dir(tmp_path_factory: pytest.TempPathFactory, short_run_dir: Path) -> Path:
    """A trained run with an evaluation, whose folder the tests may change."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(short_run_dir, folder)
    assert cli.main(["evaluate", str(folder), "--texts", "4", "--samples", "20"]) == 0
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, evaluated_dir: Path) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "out"
    assert cli.main(["export", str(evaluated_dir), str(out)]) == 0
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()} == {0o666 & ~umask}
    return out


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    return mmldlm.load(bundle)


def test_a_bundle_computes_what_its_run_does(model: Model, evaluated_dir: Path) -> None:
    run_model = mmldlm.load(evaluated_dir)
    layout, tokens = PackedLayout((4, 3), latent_tokens=1), torch.arange(10, 17)
    latents = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([0.5, 0.25]), torch.tensor([0.0, 0.75])
    outputs = [each.run.model(tokens, latents, *times, layout, torch.arange(7), None) for each in (model, run_model)]
    for name, ours, theirs in zip(outputs[0]._fields, *outputs, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs), name
    for arguments in CONDITIONS.values():
        assert same(model.sample(**arguments), run_model.sample(**arguments))
    given, expected = model.score(TEXTS, model.encode(TEXTS)), run_model.score(TEXTS, run_model.encode(TEXTS))
    assert given.nats.tobytes() == expected.nats.tobytes()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_defaults_of_the_caller_change_nothing(bundle: Path, model: Model, device: str) -> None:
    expected = model.sample(**CONDITIONS["l2t"]), model.score(TEXTS, model.encode(TEXTS))
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(device)
    try:
        other = mmldlm.load(bundle)
        found = other.sample(**CONDITIONS["l2t"]), other.score(TEXTS, other.encode(TEXTS))
        assert torch.ones(1).dtype == torch.float64 and torch.ones(1).device.type == device, "the caller's stay"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert same(expected[0], found[0]) and expected[1].nats.tobytes() == found[1].nats.tobytes()


def test_export_is_deterministic_and_repeats_itself(bundle: Path, evaluated_dir: Path, tmp_path: Path) -> None:
    for source in (evaluated_dir, bundle):
        assert cli.main(["export", str(source), str(tmp_path / source.name)]) == 0
        assert folder_bytes(tmp_path / source.name) == folder_bytes(bundle)
    assert {path.name for path in tmp_path.iterdir()} == {evaluated_dir.name, bundle.name}, "nothing else is left"
    # Nothing tells where it was made.
    assert not [name for name, content in folder_bytes(bundle).items() if str(evaluated_dir.parent).encode() in content]


def test_the_card_has_the_figures_with_their_baselines(
    bundle: Path, evaluated_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = json.loads((evaluated_dir / "evaluation.json").read_text())
    card = (bundle / "README.md").read_text()
    bits = f"{evaluation['l2t']['bits_per_token']:.3f}"
    assert card.startswith("---\nlibrary_name: mmldlm\n") and bits in card and "shuffled" in card
    # Figures of other weights, or of other data, are not shown as those of the bundle.
    (tmp_path / "card.md").write_text("Made by **tests**.")
    other = tmp_path / "run"
    shutil.copytree(evaluated_dir, other)

    def has_no_figures() -> bool:
        assert cli.main(["export", str(other), str(tmp_path / "out"), "--card", str(tmp_path / "card.md")]) == 0
        card, has_file = (tmp_path / "out/README.md").read_text(), (tmp_path / "out/evaluation.json").exists()
        shutil.rmtree(tmp_path / "out")
        assert "Made by **tests**." in card and "no figures" in capsys.readouterr().out
        return bits not in card and not has_file

    for key, value in {"step": 19, "weights": "ema", "data_manifest": "0" * 64}.items():
        (other / "evaluation.json").write_text(json.dumps({**evaluation, key: value}))
        assert has_no_figures(), key
    # The same steps of the same folder, trained again with another seed.
    shutil.copy2(evaluated_dir / "evaluation.json", other)
    settings = [f"run.dir={other}", "resume=never", "run.seed=99", "data.num_workers=0"]
    assert cli.main(["train", str(evaluated_dir / "config.yaml"), *settings]) == 0
    assert has_no_figures()


def test_every_flipped_byte_is_named(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    names = sorted(folder_bytes(copy))
    assert {"manifest.json", "config.json", "model.safetensors", "README.md", "evaluation.json"} < set(names)
    for name in names:
        path = copy / name
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            status = cli.main(["sample", str(copy), "--mode", "joint"])
            assert_user_error((status, capsys.readouterr().err), 65, str(path))
        path.unlink()
        status = cli.main(["sample", str(copy), "--mode", "joint"])
        assert_user_error((status, capsys.readouterr().err), 65, name)
        path.write_bytes(content)
    assert cli.main(["sample", str(copy), "--mode", "joint"]) == 0


def test_commands_take_a_bundle(
    bundle: Path, evaluated_dir: Path, tiny_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--text", TEXTS[0]], ["--mode", "t2l", "--text", TEXTS[0]], ["--mode", "joint", "-n", "2"]):
        shown = []
        for source in (bundle, evaluated_dir):
            assert cli.main(["sample", str(source), *arguments]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]
    before = folder_bytes(bundle)
    (tmp_path / "own.txt").write_text("\n".join(TEXTS))
    for command in (["sample", "--texts"], ["score"]):
        written = []
        for name, source in (("bundle", bundle), ("run", evaluated_dir)):
            out = tmp_path / f"{command[0]}-{name}.jsonl"
            assert cli.main([command[0], str(source), *command[1:], str(tmp_path / "own.txt"), "--out", str(out)]) == 0
            written.append((out.read_bytes(), out.with_suffix(".json").read_bytes()))
        assert written[0] == written[1]
    capsys.readouterr()
    few = ["--texts", "4", "--samples", "20"]
    out = tmp_path / "results"
    assert cli.main(["evaluate", str(bundle), "--data", str(tiny_store), "--out", str(out), *few]) == 0
    assert (out / "evaluation.json").read_bytes() == (evaluated_dir / "evaluation.json").read_bytes()
    capsys.readouterr()
    status = cli.main(["evaluate", str(bundle), "--out", str(out), *few])
    assert_user_error((status, capsys.readouterr().err), 65, "has no samples", "--data", alone=False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["evaluate", str(bundle), "--data", str(tiny_store), *few])
    assert "--out" in capsys.readouterr().err
    assert folder_bytes(bundle) == before


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "exists already"),
        (["--card", "/nowhere"], 65, "--card: /nowhere"),
        (["--weights", "ema"], 65, "no EMA of the weights"),
    ],
)
def test_export_refuses(
    evaluated_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    expected: str,
) -> None:
    out = tmp_path / "out"
    if not arguments:
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))
    status = cli.main(["export", str(evaluated_dir), str(out), *arguments])
    assert_user_error((status, capsys.readouterr().err), code, expected)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_that_fails_leaves_nothing(
    evaluated_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmldlm.inference.bundle.write_checkpoint_manifest", fail)
    with pytest.raises(OSError, match="No space"):
        from mmldlm.tools.export import main

        main([str(evaluated_dir), str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_an_export_takes_nothing_from_others(
    evaluated_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a user's folder beside OUT, nor an OUT that another process makes meanwhile."""
    out, theirs, sync = tmp_path / "out", tmp_path / ".out.tmp" / "precious", os.fsync
    theirs.parent.mkdir()
    theirs.touch()

    def sync_late(descriptor: int) -> None:
        if not out.exists():
            out.mkdir()
            (out / "file").write_text("another process's")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_late)
    assert_user_error((cli.main(["export", str(evaluated_dir), str(out)]), capsys.readouterr().err), 2, str(out))
    assert {path.name for path in tmp_path.rglob("*")} == {".out.tmp", "precious", "out", "file"}


def test_a_run_samples_without_its_store(
    evaluated_dir: Path, tmp_path: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"text": ["--text", TEXTS[0]], "joint": ["--mode", "joint"]}
    shown = {}
    for name, each in arguments.items():
        assert cli.main(["sample", str(evaluated_dir), *each]) == 0
        shown[name] = capsys.readouterr().out
    moved = tmp_path / "run"
    shutil.copytree(evaluated_dir, moved)
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(config.replace(str(tiny_store), "/nowhere"))
    for name, each in arguments.items():
        assert cli.main(["sample", str(moved), *each]) == 0
        output = capsys.readouterr()
        assert output.out == shown[name] and output.err.count("\n") == 1 and "/nowhere: the run's data" in output.err
    status = cli.main(["evaluate", str(moved)])
    assert_user_error((status, capsys.readouterr().err.splitlines()[-1] + "\n"), 65, "has no samples", alone=False)
    # Runs of earlier versions have no description of their data.
    shutil.rmtree(moved / "data")
    status = cli.main(["sample", str(moved), *arguments["joint"]])
    assert_user_error((status, capsys.readouterr().err), 65, "/nowhere", "--data")


def test_scores_are_those_of_the_evaluation(
    model: Model, short_run: LoadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmldlm.inference.model.GRID_TEXTS", 30)  # all documents, as the evaluation has it
    evaluation = Evaluation(short_run, EvaluationConfig(samples=30))
    texts = evaluation.decode(evaluation.tokens)
    for condition, latents in (("none", None), ("own", evaluation.raw_latents)):
        bound = text_bound(evaluation, condition)  # type: ignore[arg-type]
        score = model.score(texts, latents, batch_size=7)
        assert score.tokens.tolist() == evaluation.lengths.tolist()
        # Other micro-batches round differently.
        np.testing.assert_allclose(score.nats, bound.nats, rtol=1e-4)
        bits = score.bits_per_token
        assert bits.value == pytest.approx(bound.nats.sum() / evaluation.lengths.sum() * BITS, rel=1e-4)
        assert bits.interval[0] < bits.value < bits.interval[1] and np.isfinite(score.standard_errors).all()


def test_standard_errors_of_scores_are_those_of_repetitions(model: Model) -> None:
    scores = [model.score(TEXTS, seed=seed, draws=16) for seed in range(24)]
    spread = np.std([score.nats for score in scores], axis=0, ddof=1)
    expected = np.sqrt(np.mean([score.standard_errors**2 for score in scores], axis=0))
    np.testing.assert_allclose(spread, expected, rtol=0.5)
    one, two = (model.score(TEXTS, draws=draws) for draws in (1, 2))  # of two draws half their difference
    np.testing.assert_allclose(two.standard_errors, np.abs(two.nats - one.nats), rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"mode": "l2t"}, UsageError, "mode l2t: found no condition"),
        ({"mode": "joint", "texts": TEXTS}, UsageError, "mode joint: found texts"),
        ({"texts": TEXTS, "latents": np.zeros((2, 8), np.float32)}, UsageError, "found texts and latents"),
        ({"mode": "sideways"}, UsageError, "mode sideways"),
        ({"count": 0}, UsageError, "count: .*1.* 0"),
        ({"lengths": 999}, UsageError, "lengths: expected 1 to 32"),
        ({"count": 3, "lengths": [4, 5]}, UsageError, "lengths: .* 2"),
        ({"texts": TEXTS, "lengths": 4}, UsageError, "lengths: .*t2l"),
        ({"latents": np.zeros((2, 9), np.float32)}, DataError, r"expected float \[n, 1, 8\]"),
        ({"latents": np.full((2, 8), np.nan, np.float32)}, DataError, "row 0"),
        ({"steps": 0}, ConfigError, "sampling.steps: must be at least 1, found 0"),
        ({"temprature": 1.0}, ConfigError, "unknown key 'sampling.temprature', expected one of steps, temperature"),
        ({"mode": "l2t", "texts": ["zzz qqq"]}, DataError, "no latent for 'zzz qqq'"),
    ],
)
def test_sample_refuses(model: Model, arguments: dict[str, Any], error: type[MmldlmError], expected: str) -> None:
    with pytest.raises(error, match=expected):
        model.sample(**arguments)


BARE = """
import sys

ALLOWED = {'torch', 'torchgen', 'functorch', 'numpy', 'tokenizers', 'safetensors', 'mmldlm'} | {  # and torch's own
    'typing_extensions', 'sympy', 'mpmath', 'networkx', 'jinja2', 'markupsafe', 'fsspec', 'filelock', 'triton'
}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        if top not in ALLOWED | sys.stdlib_module_names and not top.startswith('_sysconfigdata'):
            raise ModuleNotFoundError(f'{name} is not installed in this test', name=top)


sys.meta_path.insert(0, Refuse())
"""

BARE_LIBRARY = """
import mmldlm

assert 'torch' not in sys.modules, 'importing mmldlm is cheap'
model = mmldlm.load(sys.argv[1])
texts = ['The rose of soil and water.', 'The wave.']
samples = model.sample(texts=texts, mode='l2t', count=2)
model.sample(texts=texts)
model.sample(count=2, steps=3)
assert model.score(texts).bits_per_token.value > 0
assert not {'yaml', 'pydantic', 'accelerate', 'huggingface_hub', 'torch._dynamo', 'sympy'} & set(sys.modules)
print(samples.texts)
"""


def test_a_bundle_loads_with_four_packages(bundle: Path, model: Model) -> None:
    result = run_python("-c", BARE + BARE_LIBRARY, bundle, cwd=bundle)
    assert result.stdout.strip() == str(model.sample(texts=TEXTS, mode="l2t", count=2).texts)


BARE_COMMANDS = """
import shlex
from mmldlm import cli

for command in sys.argv[1:]:
    print(cli.main(shlex.split(command)), flush=True)
try:
    import mmldlm
    mmldlm.load(shlex.split(sys.argv[-1])[1])
except mmldlm.errors.UsageError as error:
    print(error)
"""


SHARDED = """
import sys

import mmldlm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

dist.init_process_group('gloo')
model = mmldlm.load(bundle := sys.argv[1], 'cpu').run.model
[torch.nn.init.zeros_(parameter) for parameter in model.parameters()]
fully_shard(model, mesh=dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),)))
state = model.state_dict()
dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(bundle))
for name, tensor in load_file(f'{bundle}/model.safetensors').items():
    assert torch.equal(state[name].full_tensor(), tensor), name
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_distributed_checkpoints_read_it(bundle: Path, tmp_path: Path, processes: int) -> None:
    """Plain torch.distributed.checkpoint reads the weights into a model, sharded among the processes."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", processes, "--master_port", free_port()]
    run_python(*launch, script, bundle)


def test_a_bundle_that_takes_other_vectors_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Taken for a plain bundle, it would decode vectors of another encoder as its own latents."""
    aligned = shutil.copytree(bundle, tmp_path / "aligned")
    saved = verify_checkpoint(aligned)
    matrix = torch.zeros(3, 8)
    write_tensors(aligned / "alignment.safetensors", {"matrix": matrix})
    files = {name: file_info(aligned / name) for name in (*saved.files, "alignment.safetensors")}
    group = TensorGroup(1, {"matrix": SlicedTensor.like(matrix, ((0, 0),))})
    write_checkpoint_manifest(aligned, saved.step, files, dict(saved.info), {**saved.tensors, "alignment": group})
    with pytest.raises(DataError, match="mmldlm align"):
        mmldlm.load(aligned)


def test_sample_works_with_four_packages(
    bundle: Path, evaluated_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that `mmldlm export` prints, and its siblings; a run folder needs more, and says what."""
    commands = [
        f"sample {bundle} --text 'The wave.' -n 2",
        f"sample {bundle} --mode t2l --text 'The wave.' sampling.t2l_steps=2",
        f"sample {bundle} --mode joint --out {tmp_path / 'latents.npy'}",
        f"sample {bundle} --interpolate 'The wave.' 'The rose.' --points 2",
        f"sample {bundle} sampling.steps=0 --mode joint",
    ]
    status = [cli.main(shlex.split(command)) for command in commands]
    expected = capsys.readouterr()
    result = run_python("-c", BARE + BARE_COMMANDS, *commands, f"sample {evaluated_dir} --mode joint")
    assert status == [0, 0, 0, 0, 64]
    codes = [line for line in result.stdout.splitlines() if line in ("0", "2", "64")]
    assert codes == [*map(str, status), "2"]
    shown = [line for line in result.stdout.splitlines() if line not in codes]
    reason = f"{evaluated_dir}: a run folder needs the package yaml"
    assert shown[:-1] == expected.out.splitlines() and shown[-1].startswith(reason)
    assert expected.err in result.stderr and f"mmldlm: error: {reason}" in result.stderr


def test_from_pretrained_names_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (tmp_path / "none", "runs/none", "./runs/no/such", "none"):
        with pytest.raises(DataError, match=f"^{name}: "):
            Model.from_pretrained(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=str(tmp_path / "empty")):
        Model.from_pretrained(tmp_path / "empty")


def test_hub_mixin_saves_and_loads(model: Model, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model.save_pretrained(tmp_path / "saved")
    assert folder_bytes(tmp_path / "saved") == folder_bytes(bundle), "the card is ours"
    arguments = CONDITIONS["l2t"]
    expected = model.sample(**arguments)
    assert same(Model.from_pretrained(tmp_path / "saved", device="cpu").sample(**arguments), expected)
    # Of the hub's cache, which consists of links to files named by their hashes.
    cache, commit = tmp_path / "cache" / "models--someone--model", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    for number, (name, content) in enumerate(folder_bytes(bundle).items()):
        blob, link = cache / "blobs" / str(number), cache / "snapshots" / commit / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(blob)
    cached = Model.from_pretrained("someone/model", cache_dir=tmp_path / "cache")
    assert same(cached.sample(**arguments), expected)
