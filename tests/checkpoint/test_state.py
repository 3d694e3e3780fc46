"""Weights, moments and the train state come back from a checkpoint exactly, or are refused by name."""

import json
import math

import pytest
import torch
from torch import nn

from mmldlm.checkpoint.manifest import Checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.slices import tensor_file_name
from mmldlm.checkpoint.state import (
    TrainState,
    clean_name,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import TensorFiles, write_tensors
from mmldlm.distributed.optimizers import MuonAdamW
from mmldlm.errors import DataError, NumericalError
from mmldlm.utils.partition import partition_by_size
from tests.helpers.save_checkpoint import save_checkpoint

pytestmark = pytest.mark.quick


def read(folder, name):
    """The tensors of one file."""
    return TensorFiles.of_file(folder / f"{name}.safetensors")


class Tied(nn.Module):
    def __init__(self, vocabulary: int = 11, width: int = 6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("derived", torch.ones(2), persistent=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def muon(parameters):
    matrices = [parameter for parameter in parameters if parameter.shape == (6, 6)]
    rest = [parameter for parameter in parameters if parameter.shape != (6, 6)]
    return MuonAdamW(matrices, {"lr": 1e-2}, [{"params": rest}], {"lr": 1e-2, "fused": True})


OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "plain_sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "muon": lambda parameters: muon(list(parameters)),
    "groups": lambda parameters: torch.optim.AdamW([{"params": [p]} for p in list(parameters)[::-1]], lr=1e-2),
}


def steps(model, optimizer, first, last):
    for step in range(first, last):
        tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def bits(tensors):
    return {
        name: (t.dtype, tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).tolist() if t.numel() else [])
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_equals_the_uninterrupted_run(tmp_path, name):
    torch.manual_seed(0)
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    steps(model, optimizer, 0, 5)
    store = CheckpointStore(tmp_path, Retention(last=1))
    save_checkpoint(
        store,
        5,
        {
            "model.safetensors": lambda path: write_tensors(path, model_state(model)),
            "optimizer.safetensors": lambda path: write_tensors(path, optimizer_state(optimizer, model)),
            "state.json": TrainState(step=5).to_json().encode(),
        },
        {},
    )
    saved = bits(optimizer_state(optimizer, model))
    steps(model, optimizer, 5, 10)

    torch.manual_seed(1)
    other = Tied()
    resumed = OPTIMIZERS[name](other.parameters())
    checkpoint = store.newest()
    load_model_state(other, TensorFiles.open(checkpoint, "model"))
    load_optimizer_state(resumed, other, TensorFiles.open(checkpoint, "optimizer"))
    assert bits(optimizer_state(resumed, other)) == saved
    assert other.head.weight is other.embedding.weight
    first = TrainState.from_json(checkpoint.file("state.json").read_bytes()).step
    steps(other, resumed, first, 10)
    assert bits(model_state(other)) == bits(model_state(model))
    assert bits(optimizer_state(resumed, other)) == bits(optimizer_state(optimizer, model))


def test_names_are_those_of_the_unwrapped_model():
    model = Tied()
    assert set(model_state(model)) == {"embedding.weight", "body.weight", "body.bias", "kept"}
    assert clean_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.module.w") == "blocks.0.module.w"
    assert set(model_state(nn.DataParallel(model))) == set(model_state(model))
    optimizer = OPTIMIZERS["fused"](model.parameters())
    steps(model, optimizer, 0, 1)
    assert "body.bias/exp_avg_sq" in optimizer_state(optimizer, model)


def test_loaded_state_shares_no_memory_with_what_was_read():
    model = Tied()
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    steps(model, optimizer, 0, 2)
    tensors = {name: tensor.clone() for name, tensor in optimizer_state(optimizer, model).items()}
    before = bits(tensors)
    load_optimizer_state(optimizer, model, tensors)
    steps(model, optimizer, 2, 4)
    assert bits(tensors) == before


def test_optimizer_without_state(tmp_path):
    model = Tied()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    write_tensors(tmp_path / "x.safetensors", optimizer_state(optimizer, model))
    load_optimizer_state(optimizer, model, read(tmp_path, "x"))
    assert not optimizer.state


def test_wrong_tensors_are_named_and_nothing_is_loaded():
    model = Tied()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    steps(model, optimizer, 0, 2)
    weights, moments = model_state(model), optimizer_state(optimizer, model)
    before = bits(weights), bits(moments)
    wrong = {("other" if name == "body.bias" else name): tensor + 1 for name, tensor in weights.items()}
    with pytest.raises(DataError, match=r"body\.bias.*other"):
        load_model_state(model, wrong)
    with pytest.raises(DataError, match=r"body\.weight.*\[6, 7\].*\[6, 6\]"):
        load_model_state(model, {**{n: t + 1 for n, t in weights.items()}, "body.weight": torch.zeros(6, 7)})
    wrong = {name.replace("body.bias/", "other/"): tensor + 1 for name, tensor in moments.items()}
    with pytest.raises(DataError, match=r"body\.bias.*other"):
        load_optimizer_state(optimizer, model, wrong)
    with pytest.raises(DataError, match=r"body\.weight/exp_avg.*\[36\]"):
        load_optimizer_state(optimizer, model, {**moments, "body.weight/exp_avg": torch.zeros(36)})
    assert (bits(model_state(model)), bits(optimizer_state(optimizer, model))) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_weights_are_never_saved(tmp_path, value, dtype):
    model = Tied().to(dtype)
    write_tensors(tmp_path / "largest", {"largest": torch.tensor([torch.finfo(dtype).max], dtype=dtype)})
    (tmp_path / "largest").unlink()
    with torch.no_grad():
        model.body.bias[3] = value
    store = CheckpointStore(tmp_path, Retention(last=1))
    with pytest.raises(NumericalError, match=r"body\.bias"):
        save_checkpoint(store, 1, {"model": lambda path: write_tensors(path, model_state(model))}, {})
    assert not list(tmp_path.iterdir())


def test_tensors_round_trip(tmp_path):
    base = torch.randn(4, 6)
    tensors = {
        "a": base,
        "view": base[1:3],
        "transposed": base.T,
        "half": base.bfloat16(),
        "integer": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    assert bits(read(tmp_path, "t")) == bits(tensors)
    (tmp_path / "t.safetensors").write_bytes(b"\xff" * 100)  # a header of 2**64 bytes
    for name in ("t", "absent"):
        with pytest.raises(DataError, match=f"{name}.safetensors"):
            read(tmp_path, name)


def test_tensors_of_several_files_and_their_owners(tmp_path):
    sizes = {"a": 100, "b": 60, "c": 50, "d": 10, "e": 0, "f": 0}
    owned = partition_by_size(sizes, 2)
    assert owned == partition_by_size(dict(reversed(sizes.items())), 2), "the same on every rank, whatever its order"
    assert [sum(sizes[name] for name in names) for names in owned] == [110, 110]
    tensors = {name: torch.full((2,), float(size)) for name, size in sizes.items()}
    for rank in (0, 1):
        write_tensors(tmp_path / tensor_file_name("model", rank, 2), {name: tensors[name] for name in owned[rank]})
    first, second = (TensorFiles.of_file(tmp_path / tensor_file_name("model", rank, 2)) for rank in (0, 1))
    files = first.overlay(second)
    assert bits(files) == bits(tensors) and set(files.filter(lambda name: name < "c")) == {"a", "b"}
    with pytest.raises(DataError, match="optimizer"):
        TensorFiles.open(Checkpoint(tmp_path, 1, {}, {}, {}), "optimizer")


def test_train_state():
    state = TrainState(step=3, samples_seen=24, best_validations=[1.5], loss_scale=2.0**16, steps_at_scale=7)
    for one in (state, TrainState()):
        assert TrainState.from_json(one.to_json()) == one
    values = json.loads(state.to_json())
    del values["tokens_seen"]
    with pytest.raises(DataError, match="more, tokens_seen"):
        TrainState.from_json(json.dumps({**values, "more": 1}))
    earlier = {key: value for key, value in values.items() if key not in ("judged_by", "best_step", "worse_in_a_row")}
    assert TrainState.from_json(json.dumps({**earlier, "tokens_seen": 0})) == state
    with pytest.raises(ValueError):
        TrainState(best_validations=[float("nan")]).to_json()


def test_validations_are_judged_by_one_loss() -> None:
    state = TrainState(best_validations=[0.5])  # of the sum, as earlier versions have it
    losses = [(10, 4.0, True), (20, 3.0, True), (30, 3.5, False), (40, math.nan, False), (50, 3.05, False)]
    for step, loss, is_best in losses:
        state.step = step
        assert state.judge("validation/text", loss, keep=1) == is_best, step
    assert (state.best_validations, state.best_step, state.last_validation, state.worse_in_a_row) == (
        [3.0],
        20,
        3.05,
        3,
    )
    assert state.overfitting() is None, "within 2 %"
    state.judge("validation/text", 3.1, keep=1)
    assert state.overfitting() == {"metric": "validation/text", "loss": 3.1, "lowest": 3.0, "lowest_step": 20}
    assert state.judge("validation/latent", 9.0, keep=1) and state.worse_in_a_row == 0, "of other modes"
    assert not TrainState().judge("validation/text", 1.0, keep=0)
