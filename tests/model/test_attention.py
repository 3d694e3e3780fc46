"""Samples are independent, padding has no effect, and all backends agree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import _registry, restore_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.batch import PackedLayout
from mmldlm.config import load_config
from mmldlm.data.store import Store
from mmldlm.errors import ConfigError
from mmldlm.loading.factory import attention_backend, build_meta_model, describe_attention, take_flash_attention_4
from mmldlm.model.attention import Backend, joint_attention, resolve_backend, rows_to_attend
from mmldlm.model.mmdit import MMDiT, Prediction
from tests.helpers.padded_reference import padded_forward
from tests.helpers.small_model import MASK, PAD, Inputs, random_inputs, small_model

# Equal neighbors form groups; equal strangers (3 ... 3) do not.
LENGTHS = (3, 3, 7, 1, 3, 16)

latent_tokens = pytest.mark.parametrize("latent_tokens", [1, 3])
backends = pytest.mark.parametrize("backend", ["sdpa", "math"])


def text_parts(prediction: Prediction, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return prediction.text.split(lengths)


@pytest.mark.quick
@latent_tokens
@backends
def test_samples_are_independent(latent_tokens: int, backend: Backend) -> None:
    """The gradient of sample i's outputs by sample j's tokens, latents and times is exactly zero."""
    model, inputs = small_model(latent_tokens, backend), random_inputs(LENGTHS, latent_tokens)
    embedded: list[Tensor] = []
    model.token_embedding.register_forward_hook(lambda _, __, out: embedded.append(out))
    latents, t_text, t_latent = (x.clone().requires_grad_() for x in (inputs.latents, inputs.t_text, inputs.t_latent))
    prediction = Inputs(inputs.tokens, latents, t_text, t_latent, LENGTHS).run(model)
    generator = torch.Generator().manual_seed(1)
    for i, logits in enumerate(text_parts(prediction, LENGTHS)):
        outputs = {"text": logits[:, :MASK], "latent": prediction.latent[i]}
        for name, output in outputs.items():
            weighed = (output * torch.randn(output.shape, generator=generator)).sum()
            by_token, *by_rest = torch.autograd.grad(
                weighed, [embedded[0], latents, t_text, t_latent], retain_graph=True
            )
            for j, by_text in enumerate(by_token.split(LENGTHS)):
                gradients = [by_text, *(gradient[j] for gradient in by_rest)]
                if i == j:
                    assert all(bool((gradient != 0).any()) for gradient in gradients), f"{name} ignores its own sample"
                else:
                    assert all(bool((gradient == 0).all()) for gradient in gradients), f"{name} of {i} sees {j}"


@pytest.mark.quick
@latent_tokens
def test_predictions_do_not_depend_on_sample_order(latent_tokens: int) -> None:
    model, inputs = small_model(latent_tokens), random_inputs(LENGTHS, latent_tokens)
    order = [5, 0, 3, 4, 2, 1]
    whole, shuffled = inputs.run(model), inputs.rows(order).run(model)
    parts = text_parts(whole, LENGTHS)
    torch.testing.assert_close(shuffled.text, torch.cat([parts[row] for row in order]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shuffled.latent, whole.latent[order], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shuffled.length_logits, whole.length_logits[order], rtol=1e-5, atol=1e-5)


@pytest.mark.quick
@latent_tokens
@pytest.mark.parametrize(
    "config",
    [{}, {"mlp": "gelu", "tie_embeddings": False}, {"modulation_rank": 0, "latent_width": 32}],
    ids=["default", "gelu-untied", "unfactored-wide"],
)
def test_unpadded_equals_padded_with_a_mask(latent_tokens: int, config: dict[str, object]) -> None:
    model, inputs = small_model(latent_tokens, **config), random_inputs(LENGTHS, latent_tokens)
    longest = max(LENGTHS)
    padded = torch.full((len(LENGTHS), longest), PAD)
    real = torch.arange(longest) < torch.tensor(LENGTHS)[:, None]
    padded[real] = inputs.tokens
    logits, latent, lengths = padded_forward(model, padded, inputs.latents, inputs.t_text, inputs.t_latent, real)
    unpadded = inputs.run(model)
    words = slice(0, MASK)
    torch.testing.assert_close(unpadded.text[:, words], logits[real][:, words], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unpadded.latent, latent, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unpadded.length_logits, lengths, rtol=1e-5, atol=1e-5)


def values_and_gradients(model: MMDiT, inputs: Inputs) -> list[Tensor]:
    prediction = inputs.run(model)
    generator = torch.Generator().manual_seed(1)
    outputs = [prediction.text[:, :MASK], prediction.latent, prediction.length_logits]
    weights = [torch.randn(output.shape, generator=generator).to(output.device) for output in outputs]
    model.zero_grad()
    torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum().backward()
    return [*outputs, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.quick
@latent_tokens
def test_backends_agree_in_values_and_gradients(latent_tokens: int) -> None:
    inputs = random_inputs(LENGTHS, latent_tokens)
    groups, dense = (values_and_gradients(small_model(latent_tokens, b), inputs) for b in ("sdpa", "math"))
    assert len(groups) == len(dense) > 40
    for one, other in zip(groups, dense, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.quick
def test_joint_order_keeps_samples_together() -> None:
    layout = PackedLayout((2, 1, 4), latent_tokens=2)
    assert layout.joint_order.tolist() == [0, 1, 6, 7, 2, 3, 8, 4, 5, 9, 10, 11, 12]
    assert layout.joint_order[layout.joint_inverse].tolist() == list(range(13))
    assert layout.joint_offsets.tolist() == [0, 4, 7, 13]
    assert [tuple(group) for group in PackedLayout((2, 2, 5, 2), 1).groups] == [
        (0, 2, 0, 4, 2),
        (2, 3, 4, 9, 5),
        (3, 4, 9, 11, 2),
    ]


@pytest.mark.quick
@latent_tokens
def test_joint_indices_of_any_lengths(latent_tokens: int) -> None:
    lengths = tuple(torch.randint(1, 40, (50,), generator=torch.Generator().manual_seed(0)).tolist())
    layout = PackedLayout(lengths, latent_tokens)
    expected, start = [], 50 * latent_tokens
    for sample, length in enumerate(lengths):
        expected += [*range(sample * latent_tokens, (sample + 1) * latent_tokens), *range(start, start + length)]
        start += length
    assert layout.joint_order.tolist() == expected
    assert layout.joint_inverse[layout.joint_order].tolist() == list(range(start))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("device", "precision", "head_width", "capability", "expected"),
    [
        ("cpu", "fp32", 64, None, "sdpa"),
        ("cpu", "bf16", 64, None, "sdpa"),
        ("cuda", "bf16", 64, None, "varlen"),  # a plan for another machine
        ("cuda", "bf16", 64, (9, 0), "varlen"),
        ("cuda", "fp16", 256, (8, 0), "varlen"),
        ("cuda", "bf16", 100, (9, 0), "sdpa"),
        ("cuda", "bf16", 264, (9, 0), "efficient"),
        ("cuda", "bf16", 208, (8, 0), "varlen"),
        ("cuda", "bf16", 208, (8, 9), "efficient"),
        ("cuda", "bf16", 256, (8, 9), "varlen"),
        ("cuda", "bf16", 224, (12, 0), "efficient"),
        ("cuda", "fp16", 64, (7, 5), "efficient"),
        ("cuda", "fp16", 100, (7, 0), "sdpa"),
        ("cuda", "bf16", 64, (7, 5), "sdpa"),  # neither kernel exists there in bf16
        ("cuda", "fp32", 64, (9, 0), "efficient"),
        ("cuda", "fp32", 100, (7, 0), "efficient"),
        ("cuda", "fp32", 50, (9, 0), "sdpa"),
    ],
)
def test_auto_takes_a_kernel_that_runs(
    device: str, precision: str, head_width: int, capability: tuple[int, int] | None, expected: Backend
) -> None:
    where = (device, precision, head_width, capability)
    assert resolve_backend("auto", *where) == expected
    assert resolve_backend(expected, *where) == expected
    assert resolve_backend("math", *where) == "math"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("backend", "where", "complaint"),
    [
        ("varlen", ("cpu", "bf16", 64, None), "varlen needs CUDA, found cpu; .* sdpa"),
        ("efficient", ("cpu", "fp32", 64, None), "efficient needs CUDA, found cpu; .* sdpa"),
        ("varlen", ("cuda", "fp32", 64, (9, 0)), "varlen needs precision bf16 or fp16, found fp32; .* efficient"),
        ("varlen", ("cuda", "fp16", 64, (7, 5)), "varlen needs .* 8.0 or newer, found 7.5; .* efficient"),
        ("varlen", ("cuda", "bf16", 100, (9, 0)), "varlen needs a head width .* found 100; .* sdpa"),
        ("varlen", ("cuda", "bf16", 264, (9, 0)), "varlen needs a head width .* found 264; .* efficient"),
        ("varlen", ("cuda", "bf16", 224, (8, 6)), "varlen needs a head width .* 8.6, found 224; .* efficient"),
        ("efficient", ("cuda", "bf16", 64, (7, 0)), "efficient needs .* in bf16, found 7.0; .* sdpa"),
        ("efficient", ("cuda", "fp16", 100, (7, 0)), "efficient needs .* multiple of 8, found 100; .* sdpa"),
        ("efficient", ("cuda", "fp32", 50, (9, 0)), "efficient needs .* multiple of 4, found 50; .* sdpa"),
    ],
)
def test_backend_that_does_not_run_is_refused(
    backend: str, where: tuple[str, str, int, tuple[int, int] | None], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^attention\.backend: {complaint}$") as error:
        resolve_backend(backend, *where)
    assert str(error.value).endswith(resolve_backend("auto", *where))


@pytest.mark.quick
@pytest.mark.parametrize(("precision", "capability"), [("fp16", (7, 5)), ("fp32", (9, 0))])
def test_network_on_cuda_has_the_kernel_of_its_gpu(
    precision: str, capability: tuple[int, int], tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stub of a GPU, which only says what it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = load_config(None, [f"precision={precision}"])
    assert build_meta_model(config, Store.open(tiny_store).manifest, "cuda").backend == "efficient"


BF16, UNASKED = "precision=bf16", AssertionError("asked for")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "capability", "error", "warnings"),
    [
        ([BF16], (9, 0), RuntimeError("torn"), 1),
        (["precision=fp16"], (10, 0), ImportError("no compiler", name="cutlass"), 1),
        ([BF16], (9, 0), ImportError("not installed", name="flash_attn.cute"), 0),
        ([BF16], (8, 9), UNASKED, 0),
        ([BF16], (12, 0), UNASKED, 0),
        ([BF16, "attention.backend=varlen"], (9, 0), UNASKED, 0),
        (["precision=fp32"], (9, 0), UNASKED, 0),
    ],
)
def test_flash_attention_4_that_fails_is_left_out(
    settings: list[str], capability: object, error: Exception, warnings: int, monkeypatch: Any, caplog: Any
) -> None:
    """On a stub of a GPU, by PyTorch's registry: a warning says why, but where it is not installed or does not fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", Mock(side_effect=error))
    take_flash_attention_4.cache_clear()
    for _ in range(2):
        backend = attention_backend(load_config(None, settings), "cuda")
        assert describe_attention(backend) == backend == ("efficient" if "precision=fp32" in settings else "varlen")
    assert [str(error) in record.getMessage() for record in caplog.records] == [True] * warnings


@pytest.mark.quick
@pytest.mark.parametrize("outputs", [5, 2])
def test_flash_attention_4_is_taken_if_a_call_each_way_succeeds(outputs: int, monkeypatch: Any, caplog: Any) -> None:
    """PyTorch's registry gives the operators kernels, here for the CPU; one returns what PyTorch does not expect."""
    library = torch.library.Library("aten", "IMPL")

    def forward(query: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        state = torch.zeros(2, dtype=torch.uint64)
        return (query.clone(), query.new_zeros(query.shape[1::-1]).float(), state, state[0], query[:0])[:outputs]

    def register() -> SimpleNamespace:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", lambda grad, *_, **__: (grad.clone(), grad + 0, grad * 1), "CPU")
        return SimpleNamespace(remove=library._destroy)

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", register)
    take_flash_attention_4.cache_clear()
    take_flash_attention_4(64, torch.bfloat16, "cpu")
    names = [describe_attention("varlen"), describe_attention("efficient"), len(caplog.records)]
    restore_flash_attention_impl(_raise_warn=False)
    assert names == (["varlen (FlashAttention 4)", "efficient", 0] if outputs == 5 else ["varlen", "efficient", 1])


class Calls(TorchDispatchMode):
    """Records the arguments, by name, of all calls of an operator."""

    def __init__(self, operator: torch._ops.OpOverload):
        super().__init__()
        self.operator, self.calls = operator, list[dict[str, object]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is self.operator:
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_efficient_attention_is_one_call_of_its_operator(dtype: torch.dtype) -> None:
    """It has no kernel on a CPU: fake tensors check shapes, of gradients as well, and the arguments by their names."""
    operator, heads, width = torch.ops.aten._efficient_attention_forward.default, 2, 16
    with FakeTensorMode(allow_non_fake_inputs=True), Calls(operator) as recorder:
        layout = PackedLayout(LENGTHS, 3)
        rows = (len(LENGTHS) * 3, sum(LENGTHS))
        leaves = [torch.randn(count, 3, heads, width, dtype=dtype, requires_grad=True) for count in rows]
        attended_rows = rows_to_attend("efficient", layout, max(LENGTHS))
        outputs = joint_attention(leaves[0], leaves[1], attended_rows, "efficient")
        gradients = torch.autograd.grad([out.sum() for out in outputs], leaves)
        assert [tuple(out.shape) for out in outputs] == [(count, heads, width) for count in rows]
        assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]
        assert {out.dtype for out in (*outputs, *gradients)} == {dtype}
        (call,) = recorder.calls
        for name in ("query", "key", "value"):
            tensor = call[name]
            assert isinstance(tensor, Tensor) and tuple(tensor.shape) == (1, sum(rows), heads, width)
            assert tensor.stride(-1) == 1, "the kernel needs contiguous heads"
        assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is layout.joint_offsets
        assert layout.joint_offsets.dtype == torch.int32
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == max(LENGTHS) + 3
        assert (call["bias"], call["dropout_p"], call["custom_mask_type"]) == (None, 0.0, 0)
        assert call["compute_log_sumexp"] is True and call.get("scale") is None
        with torch.no_grad():
            joint_attention(leaves[0], leaves[1], attended_rows, "efficient")
        assert not recorder.calls[-1].get("compute_log_sumexp")


@pytest.fixture
def efficient_on_cpu() -> Iterator[None]:
    """Give the operator a kernel for the CPU, by its description: softmax(q k / sqrt(K)) v between two offsets each."""

    def kernel(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, *_, **__):  # type: ignore[no-untyped-def]
        out = torch.empty_like(query)
        bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
        for (first, last), (first_key, last_key) in bounds:
            q, k, v = query[0, first:last], key[0, first_key:last_key], value[0, first_key:last_key]
            scores = torch.einsum("qhk,shk->hqs", q, k) * q.shape[-1] ** -0.5
            out[0, first:last] = torch.einsum("hqs,shk->qhk", scores.softmax(-1), v)
        nothing = torch.empty(0, dtype=torch.int64)
        return out, torch.empty(0), nothing, nothing, 0, 0

    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", kernel, "CPU")
    yield
    library._destroy()


@pytest.mark.quick
@latent_tokens
def test_efficient_attention_stays_within_samples(latent_tokens: int, efficient_on_cpu: None) -> None:
    layout = PackedLayout(LENGTHS, latent_tokens)
    generator = torch.Generator().manual_seed(0)
    rows = (len(LENGTHS) * latent_tokens, sum(LENGTHS))
    latent, text = (torch.randn(count, 3, 2, 16, generator=generator) for count in rows)
    with torch.no_grad():
        outputs, expected = (
            joint_attention(latent, text, rows_to_attend(name, layout, 100), name) for name in ("efficient", "sdpa")
        )
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@latent_tokens
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("varlen", torch.bfloat16), ("efficient", torch.bfloat16), ("efficient", torch.float32)]
)
def test_kernels_for_offsets_equal_sdpa_on_cuda(kernel: Backend, dtype: torch.dtype, latent_tokens: int) -> None:
    layout = PackedLayout(LENGTHS, latent_tokens, "cuda")
    streams = (len(LENGTHS) * latent_tokens, sum(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(rows, 3, 2, 32, generator=generator).to("cuda", dtype).requires_grad_() for rows in streams]
    weights = [torch.randn(rows, 2, 32, generator=generator).to("cuda") for rows in streams]

    def attended(backend: Backend) -> list[Tensor]:
        attended_rows = rows_to_attend(backend, layout, layout.max_length)
        outputs = joint_attention(leaves[0], leaves[1], attended_rows, backend)
        loss = sum((out.float() * weight).sum() for out, weight in zip(outputs, weights, strict=True))
        return [*outputs, *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(attended(kernel), attended("sdpa"), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@latent_tokens
@pytest.mark.parametrize("kernel", ["varlen", "efficient"])
def test_network_with_offsets_equals_sdpa_on_cuda(kernel: Backend, latent_tokens: int) -> None:
    inputs = random_inputs(LENGTHS, latent_tokens).to("cuda")
    packed, sdpa = (
        values_and_gradients(small_model(latent_tokens, backend, precision="bf16", device="cuda"), inputs)
        for backend in (kernel, "sdpa")
    )
    for one, other in zip(packed, sdpa, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-4


@pytest.mark.quick
def test_a_pytorch_without_a_choice_of_flash_attention_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("activate_flash_attention_impl", "restore_flash_attention_impl", "current_flash_attention_impl")
    for name in names:
        monkeypatch.delattr(torch.nn.attention, name)
    take_flash_attention_4.__wrapped__(64, torch.bfloat16, "cpu")
    assert describe_attention("varlen") == "varlen"
