"""`init`: a new run starts from the weights of another, in the same bits under every engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mmldlm import cli, train
from mmldlm.checkpoint.manifest import MANIFEST, verify_checkpoint
from mmldlm.checkpoint.tensors import read_range
from mmldlm.config import RunConfig, load_config
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import ConfigError, DataError
from mmldlm.loading.factory import build_meta_model
from mmldlm.loading.warm_start import WarmStart, find_source, warm_start
from mmldlm.model.initial_weights import InitialWeights
from mmldlm.prepare.pipeline import prepare
from mmldlm.utils.files import sha256
from tests.helpers.engine_runs import record_list, saved_tensors
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.sample_corpus import flip_bit, small_config, write_corpus
from tests.helpers.tiny_config import TINY
from tests.helpers.user_errors import assert_user_error

LATENT_NAMES = {"latent_in.weight", "latent_in.bias", "latent_position", "latent_head.weight", "latent_head.bias"}
SHORT = ("train.steps=2", "validation.every=0", "checkpoint.every_steps=0", "data.num_workers=0")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> dict[str, Path]:
    """Another corpus with longer texts, with tokenizer and encoder of the tiny store and with its own."""
    folder = tmp_path_factory.mktemp("stores")
    corpus, made = write_corpus(folder / "corpus.txt", 400, seed=1), {"same": tiny_store}
    shared = {"tokenizer": str(tiny_store / "tokenizer"), "encoder": str(tiny_store), "channels": None}
    for name, options in {"shared": shared, "own": {}}.items():
        prepare(small_config(folder / name, corpus, max_length=40, **options), progress=False)
        made[name] = folder / name
    assert Store.open(made["own"]).manifest.vocab_size == Store.open(tiny_store).manifest.vocab_size == 300
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """A trained run with an EMA, by which it evaluates."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.yaml").write_text(TINY.format(run=folder / "run", store=tiny_store))
    assert train.main([str(folder / "config.yaml"), *SHORT, "train.steps=6", "ema.decay=0.9"]) == 0
    return folder / "run"


@pytest.fixture
def plan(stores: dict[str, Path], source: Path, tmp_path: Path) -> Callable[..., tuple[WarmStart, InitialWeights]]:
    """Return what a run on a store with these settings takes, and its initial weights."""
    path = tmp_path / "plan.yaml"

    def planned(store: str, *settings: str) -> tuple[WarmStart, InitialWeights]:
        path.write_text(TINY.format(run=tmp_path / "run", store=stores[store]))
        config: RunConfig = load_config(path, [f"init.from={source}", *settings])
        opened = Store.open(stores[store])
        initial = build_meta_model(config, opened.manifest, "cpu").initial_weights(config.run.seed)
        return warm_start(find_source(config.init), config, opened, initial), initial

    return planned


def new_names(start: WarmStart, initial: InitialWeights) -> set[str]:
    """Names of the tensors that are the initial ones, at least in part, and not constant."""
    return {
        name for name in initial if torch.equal(start.weights[name][-1:], initial[name][-1:]) and initial[name].any()
    }


def expected_weights(start: Mapping[str, torch.Tensor], initial: InitialWeights, skip: str) -> dict[str, torch.Tensor]:
    """Weights of a run on longer texts from those of its source, without the names that begin with `skip`."""
    weights = {name: initial[name] for name in initial} | {
        name: tensor for name, tensor in start.items() if not name.startswith(skip)
    }
    for name in ("length_head.out.weight", "length_head.out.bias"):
        weights[name] = torch.cat([start[name], initial[name][len(start[name]) :]])
    return weights


@pytest.mark.setting("init.from", "init.skip", "init.embeddings")
@pytest.mark.parametrize(
    ("engine", "processes"),
    [
        ("single", 1),
        ("fsdp2", 3),
        ("zero3", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("ddp", 2), ("fsdp2_hsdp", 4), ("zero1", 2), ("zero2", 3), ("zero3_offload", 2))
        ),
    ],
)
def test_every_engine_starts_from_the_same_bits(
    engine: str,
    processes: int,
    source: Path,
    stores: dict[str, Path],
    plan: Callable[..., tuple[WarmStart, InitialWeights]],
    forked: ForkedRuns,
    tmp_path: Path,
) -> None:
    """Each rank reads its part of the EMA weights of another run, of a file, and of the initial weights."""
    table = torch.randn(300, 32, generator=torch.Generator().manual_seed(5))
    save_file({"wte": table.half(), "other": table[:7]}, tmp_path / "table.safetensors")
    settings = [
        *("init.skip=[blocks.1.*]", f"init.embeddings={tmp_path / 'table.safetensors'}:wte"),
        *(*SHORT, "train.steps=1", "train.global_batch_size=12", "train.micro_batch_size=1"),
        *("freeze=[latent_stream, text_encoder]", "precision=bf16"),
    ]
    start, initial = plan("shared", *settings)
    trained = saved_tensors(source) | saved_tensors(source, "ema")
    weights = expected_weights(trained, initial, "blocks.1.") | {"token_embedding.weight": table.half().float()}
    assert initial["length_head.out.weight"].shape[0] == 40 > trained["length_head.out.weight"].shape[0]
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in weights.items()}, tmp_path / "expected.safetensors"
    )
    assert all(torch.equal(start.weights[name], weights[name]) for name in weights)
    given = [tmp_path / "plan.yaml", f"init.from={source}", *settings]
    variables = {"EXPECTED": str(tmp_path / "expected.safetensors")}
    run = tmp_path / "run"
    forked.succeed(engine, run, processes, *given, script="local_state.py", **variables)
    saved = saved_tensors(run)
    frozen = [name for name in weights if ".latent." in name or name.startswith("token_embedding")]
    assert frozen and all(torch.equal(saved[name], weights[name]) for name in frozen), (
        "frozen parts keep what they took"
    )
    report, log = json.loads((run / "startup.json").read_text())["init"], run.with_suffix(".log").read_text()
    assert report["from"] == "run" and report["taken"]["text_encoder"] == table.numel()
    assert "weights from" in log and "EMA weights of step 6" in log and "length_head.out.weight [40, 32]" in log


def test_any_part_of_a_tensor_has_the_bits_of_the_whole(plan: Callable[..., tuple[WarmStart, InitialWeights]]) -> None:
    """Across the border between the rows that are taken and those that are new."""
    start, initial = plan("shared")
    for name in ("length_head.out.weight", "blocks.0.text.qkv.weight", "latent_head.bias"):
        whole = start.weights[name].flatten()
        cuts = sorted({*range(0, len(whole), max(1, len(whole) // 17)), len(whole)})
        for begin in cuts:
            for end in [cut for cut in cuts if cut >= begin]:
                assert torch.equal(read_range(start.weights, name, begin, end), whole[begin:end])
    assert not new_names(start, initial), "only lengths that the source did not see, and these start at zero"


@pytest.mark.quick
def test_what_the_data_determine_is_new_where_they_differ(
    plan: Callable[..., tuple[WarmStart, InitialWeights]],
) -> None:
    """A vocabulary or latents of the same size are taken only if they mean the same."""
    start, initial = plan("own")
    # Biases and the latent head start at zero.
    assert new_names(start, initial) == {"token_embedding.weight", "latent_in.weight", "latent_position"}
    assert not any(start.weights[name].any() for name in ("latent_head.weight", "latent_in.bias"))
    notes = "\n".join(start.notes)
    assert "another tokenizer: token_embedding.weight [300, 32]" in notes and "other latents: latent_position" in notes
    assert {name for name in initial if name in notes} >= LATENT_NAMES
    assert start.origin["new"]["text_encoder"] == 9600 and "text_stream" not in start.origin["new"]
    start, initial = plan("same", "latent.prediction=v")
    assert {name.partition(".")[0] for name in new_names(start, initial)} == {"latent_final"}
    assert "  other settings there: latent.prediction: x0 -> v" in start.notes


@pytest.mark.quick
def test_latents_keep_the_scale_of_the_weights(
    plan: Callable[..., tuple[WarmStart, InitialWeights]], stores: dict[str, Path]
) -> None:
    of_source, of_data = (Store.open(stores[name]).manifest.latent for name in ("same", "shared"))
    assert (of_source.mean, of_source.rms) != (of_data.mean, of_data.rms)
    scale = plan("shared")[0].latents
    assert (scale.mean, scale.rms) == (of_source.mean, of_source.rms)
    # Estimates of latents are clipped to this norm, so none in either corpus may be longer.
    opened = Store.open(stores["shared"]).split("train")
    raw = opened.gather(np.arange(len(opened)))[2]
    longest = torch.from_numpy(scale.standardize(raw)).norm(dim=-1).max()
    assert scale.max_norm >= longest * (1 - 1e-3) and scale.max_norm >= of_source.max_norm
    for store, skip in (("own", []), ("shared", ["latent_encoder"])):
        assert plan(store, f"init.skip={skip}")[0].latents == Store.open(stores[store]).manifest.latent


@pytest.mark.quick
def test_another_network_is_refused_unless_skipped(plan: Callable[..., tuple[WarmStart, InitialWeights]]) -> None:
    with pytest.raises(DataError, match=r"init.from: .*blocks.2.text.* is missing there and \[.*\] here, and 17 other"):
        plan("same", "model.depth=3")
    start, initial = plan("same", "model.depth=3", "init.skip=[blocks.2.*]")
    assert {name.rpartition(".")[0][:8] for name in new_names(start, initial)} == {"blocks.2"}
    assert any("init.skip: blocks.2.text" in note for note in start.notes)
    with pytest.raises(DataError, match=r"blocks.1.* is \[.*\] there and missing here"):
        plan("same", "model.depth=1")
    assert plan("same", "model.depth=1", "init.skip=[blocks.1.*]")[0].origin["new"] == {}
    with pytest.raises(DataError, match=r"token_embedding.weight is \[300, 32\] there and \[300, 64\] here"):
        plan("same", "model.width=64")
    with pytest.raises(DataError, match=r"text_head.weight is missing there and \[300, 32\] here, and 0 other"):
        plan("same", "model.tie_embeddings=false")
    start, initial = plan("same", "init.skip=[backbone, noise_times]")
    assert {*start.origin["new"]} == {"text_stream", "latent_stream", "noise_times"}
    with pytest.raises(ConfigError, match=r"init.skip: found block\.\*"):
        plan("same", "init.skip=[block.*]")
    with pytest.raises(ConfigError, match=r"skip.*does nothing without init.from"):
        load_config(None, ["init.skip=[backbone]"])


def test_runs_checkpoints_and_bundles_are_sources(
    source: Path, plan: Callable[..., tuple[WarmStart, InitialWeights]], tmp_path: Path
) -> None:
    ema, trained = saved_tensors(source, "ema"), saved_tensors(source)
    assert not torch.equal(ema["latent_in.weight"], trained["latent_in.weight"])
    (checkpoint,) = (source / "checkpoints").iterdir()
    for weights in ("ema", "trained"):
        assert cli.main(["export", str(source), str(tmp_path / weights), "--weights", weights]) == 0
    for path, expected in {source: ema, checkpoint: ema, tmp_path / "ema": ema, tmp_path / "trained": trained}.items():
        start, _ = plan("same", f"init.from={path}")
        assert all(torch.equal(start.weights[name], tensor) for name, tensor in expected.items()), path
        origin = {key: start.origin[key] for key in ("from", "step", "manifest")}
        folder = checkpoint if path == source else path
        assert origin == {"from": path.name, "step": 6, "manifest": sha256(folder / MANIFEST)}
        assert not start.origin["new"]
    no_average = tmp_path / "trained-run"
    shutil.copytree(source, no_average)
    path = no_average / "checkpoints" / checkpoint.name
    flip_bit(path / "ema.safetensors")
    with pytest.raises(DataError, match=r"init.from: .*ema.safetensors has SHA-256"):
        plan("same", f"init.from={path}")
    with pytest.raises(DataError, match=r"init.from: .*gone: not a run folder"):
        plan("same", f"init.from={tmp_path / 'gone'}")


@pytest.mark.quick
def test_embeddings_of_any_file(
    plan: Callable[..., tuple[WarmStart, InitialWeights]], stores: dict[str, Path], tmp_path: Path
) -> None:
    table, file = torch.randn(300, 32), tmp_path / "model.safetensors"

    def planned(tensors: dict[str, torch.Tensor], name: str = "") -> torch.Tensor:
        save_file(tensors, file)
        start, _ = plan("own", "init.from=", f"init.embeddings={file}{name and ':'}{name}")
        assert start.origin["embeddings"]["sha256"] == sha256(file) and "from" not in start.origin
        return start.weights["token_embedding.weight"]

    bf16 = {"wte.weight": table.bfloat16(), "norm": torch.ones(3), "ids": torch.ones(2, 2, dtype=torch.int64)}
    assert torch.equal(planned(bf16), table.bfloat16().float())
    assert torch.equal(planned({"a": table, "b": table[:, :3].contiguous()}, "a"), table)
    assert torch.equal(planned({"a": table + 1, "token_embedding.weight": table}), table)
    with pytest.raises(DataError, match=r"its matrices are a, b; expected .*safetensors:NAME"):
        planned({"a": table, "b": table + 1})
    with pytest.raises(DataError, match=r"its matrices are a; expected"):
        planned({"a": table}, "wte")
    for shape in ((299, 32), (301, 32), (300, 16)):
        with pytest.raises(DataError, match=rf"a is \[{shape[0]}, {shape[1]}\], expected \[300, 32\]"):
            planned({"a": torch.zeros(shape)})
    save_file({"a": table}, file)
    Tokenizer.load(stores["same"] / "tokenizer").save(tmp_path)
    with pytest.raises(DataError, match=r"belongs to .*tokenizer.json, not the data's tokenizer"):
        planned({"a": table})
    Tokenizer.load(stores["own"] / "tokenizer").save(tmp_path)
    assert torch.equal(planned({"a": table}), table)
    file.write_bytes(b"no tensors")
    with pytest.raises(DataError, match=r"cannot read .*model.safetensors"):
        plan("own", "init.from=", f"init.embeddings={file}")
    file.unlink()
    with pytest.raises(DataError, match=r"init.embeddings: .*no such file"):
        plan("own", "init.from=", f"init.embeddings={file}")
    with pytest.raises(ConfigError, match=r"init.embeddings: expected FILE.safetensors"):
        load_config(None, ["init.embeddings=model.pt"])


@pytest.mark.quick
def test_embeddings_of_a_tokenizer_without_special_tokens(stores: dict[str, Path], tmp_path: Path) -> None:
    """`prepare` has added [MASK] and [PAD] behind the tokens of such a tokenizer; their rows are new."""
    config = load_config(None, [f"init.embeddings={tmp_path}/a.safetensors", "model.width=32", "model.num_heads=2"])
    store = Store.open(stores["own"])
    manifest = replace(store.manifest, mask_id=298, pad_id=299)
    store, table = store.with_manifest(manifest), torch.randn(298, 32)
    initial = build_meta_model(config, manifest, "cpu").initial_weights(3)
    save_file({"a": table}, tmp_path / "a.safetensors")
    start = warm_start(find_source(config.init), config, store, initial)
    expected = torch.cat([table, initial["token_embedding.weight"][298:]])
    assert torch.equal(start.weights["token_embedding.weight"], expected)
    assert any("[MASK] and [PAD]" in note for note in start.notes)


def test_resumed_runs_keep_their_weights_and_their_origin(
    source: Path, stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(source, tmp_path / "source")
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(TINY.format(run=run, store=stores["shared"]))
    given = [str(config), *SHORT]
    assert train.main([*given, f"init.from={tmp_path / 'source'}"]) == 0
    origin = json.loads((run / "startup.json").read_text())["init"]
    shutil.rmtree(tmp_path / "source")
    capsys.readouterr()
    assert train.main([*given, f"init.from={tmp_path / 'source'}", "train.steps=3"]) == 0
    assert "changed since: init" not in capsys.readouterr().out
    assert train.main([*given, "train.steps=4"]) == 0
    assert f"changed since: init.from: {tmp_path / 'source'} -> " in capsys.readouterr().out
    assert cli.main(["export", str(run), str(tmp_path / "bundle")]) == 0
    for folder in (run / "checkpoints/step-00000002", run / "checkpoints/step-00000004", tmp_path / "bundle"):
        assert verify_checkpoint(folder).info["init"] == origin, folder
    files = [path for path in (tmp_path / "bundle").rglob("*") if path.is_file()]
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()], "no folder is named"
    assert "started from source, step 6," in (tmp_path / "bundle/README.md").read_text()
    # From step 0 the source is needed again.
    status = train.main([*given, f"init.from={tmp_path / 'source'}", "resume=never"])
    assert_user_error((status, capsys.readouterr().err), 65, "init.from", str(tmp_path / "source"), alone=False)


def test_a_warm_start_continues_where_its_source_was(source: Path, stores: dict[str, Path], tmp_path: Path) -> None:
    """On the source's own data the first loss is that of its EMA weights, not that of initial ones."""
    losses = {}
    for name, settings in {"warm": (f"init.from={source}",), "cold": ()}.items():
        config = tmp_path / f"{name}.yaml"
        config.write_text(TINY.format(run=tmp_path / name, store=stores["same"]))
        assert train.main([str(config), *SHORT, "train.steps=1", *settings]) == 0
        losses[name] = record_list(tmp_path / name)[0]["loss/text"]
    assert losses["warm"] < losses["cold"] - 0.1, losses


def test_a_check_says_what_a_run_would_take(
    source: Path, stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TINY.format(run=tmp_path / "run", store=stores["own"]))
    check = ["train", str(config), "--check", "--processes", "1"]
    for more, code, status, found in (([], 0, "ok", "another tokenizer"), (["model.depth=3"], 65, "FAIL", "blocks.2")):
        assert cli.main([*check, f"init.from={source}", *more]) == code
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == [status, "init"])
        assert found in line
    assert cli.main(check) == 0 and " init " not in capsys.readouterr().out
    assert asdict(load_config(config).init) == {"from_": None, "skip": [], "embeddings": None}
