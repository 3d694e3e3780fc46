"""Samples are independent, padding has no effect, and all backends agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.errors import ConfigError
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
def test_unavailable_backend_is_refused() -> None:
    assert resolve_backend("auto", "cpu", False) == "sdpa"
    assert resolve_backend("auto", "cuda", False) == "sdpa"
    assert resolve_backend("auto", "cuda", True) == "varlen"
    assert resolve_backend("math", "cuda", True) == "math"
    for device, half in (("cpu", True), ("cuda", False)):
        with pytest.raises(ConfigError, match=r"attention\.backend.*varlen.*auto"):
            resolve_backend("varlen", device, half)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@latent_tokens
def test_varlen_equals_sdpa_on_cuda(latent_tokens: int) -> None:
    layout = PackedLayout(LENGTHS, latent_tokens, "cuda")
    streams = (len(LENGTHS) * latent_tokens, sum(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(rows, 3, 2, 32, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for rows in streams
    ]
    weights = [torch.randn(rows, 2, 32, generator=generator).to("cuda") for rows in streams]

    def attended(backend: Backend) -> list[Tensor]:
        attended_rows = rows_to_attend(backend, layout, layout.max_length)
        outputs = joint_attention(leaves[0], leaves[1], attended_rows, backend)
        loss = sum((out.float() * weight).sum() for out, weight in zip(outputs, weights, strict=True))
        return [*outputs, *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type]

    for one, other in zip(attended("varlen"), attended("sdpa"), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@latent_tokens
def test_network_with_varlen_equals_sdpa_on_cuda(latent_tokens: int) -> None:
    inputs = random_inputs(LENGTHS, latent_tokens).to("cuda")
    varlen, sdpa = (
        values_and_gradients(small_model(latent_tokens, backend, precision="bf16", device="cuda"), inputs)
        for backend in ("varlen", "sdpa")
    )
    for one, other in zip(varlen, sdpa, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-4
