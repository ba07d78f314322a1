"""`rms_norm` against float64, against transformers' LlamaRMSNorm, and its Triton kernels against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from grpo_kit.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_forward
from tests.kernels.launching import differentiate, launch
from tests.kernels.rounding import assert_kernel_equals_twin, assert_same_rounding

EPS = 1e-5
# Programs of 2,048, 256, 32, 3 and 1 rows; the last rows and columns fill none of them.
SIZES = [(3, 1), (300, 5), (70, 64), (5, 576), (2, 3000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x, weight, gradient of the result); rows of x differ in size, by up to a hundred times."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=g) * torch.logspace(-1, 1, rows)[:, None]
    weight = 1 + 0.3 * torch.randn(width, generator=g)
    return x.to(dtype), weight.to(dtype), torch.randn(rows, width, generator=g).to(dtype)


def reference(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient of x by autograd, in float64."""
    x = x.double().requires_grad_()
    normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return normed.detach(), torch.autograd.grad(normed, x, grad.double())[0]


def strided(x: Tensor) -> Tensor:
    """The same numbers as columns of a wider tensor."""
    wide = torch.full((x.shape[0], x.shape[1] + 24), float("nan"), dtype=x.dtype)
    wide[:, 16:-8] = x
    return wide[:, 16:-8]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradient_equal_float64(size: tuple[int, int]) -> None:
    x, weight, grad = inputs(*size, torch.float32)
    normed = rms_norm(x.requires_grad_(), weight, EPS)
    normed.backward(grad)
    expected, expected_grad = reference(x.detach(), weight, grad)
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), expected_grad, rtol=1e-5, atol=1e-5)


def test_gradcheck() -> None:
    x, weight, _ = inputs(4, 6, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight, EPS), x.requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    x, weight, _ = inputs(70, 64, dtype)
    theirs = LlamaRMSNorm(64, EPS).to(dtype)
    theirs.weight.data = weight
    assert torch.equal(rms_norm(x, weight, EPS), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bit_gradient_is_the_float64_one_rounded(dtype: torch.dtype) -> None:
    x, weight, grad = inputs(70, 64, dtype)
    rms_norm(x.requires_grad_(), weight, EPS).backward(grad)
    assert x.grad is not None
    assert_same_rounding(x.grad, reference(x.detach(), weight, grad)[1].to(dtype))


def test_float32_weight_of_a_16_bit_input() -> None:
    x, weight, _ = inputs(5, 64, torch.float16)
    theirs = LlamaRMSNorm(64, EPS)
    theirs.weight.data = weight.float()
    assert torch.equal(rms_norm(x, weight.float(), EPS), theirs(x))
    assert_kernel_equals_twin(launch("rms_norm_triton.forward", x, weight.float(), EPS)[0], theirs(x).detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_equal_their_twins(size: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, grad = inputs(*size, dtype)
    normed, rstd = rms_norm_forward(x, weight, EPS)
    got, got_rstd = launch("rms_norm_triton.forward", strided(x), weight, EPS)
    assert_kernel_equals_twin(got, normed)
    assert_kernel_equals_twin(got_rstd, rstd)
    grad_x = launch("rms_norm_triton.backward", strided(grad), strided(x), weight, rstd)
    assert_kernel_equals_twin(grad_x, rms_norm_backward(grad, x, weight, rstd))


def test_gradient_through_the_kernels() -> None:
    x, weight, grad = inputs(70, 64, torch.float32)
    got = differentiate("rms_norm", [x, weight, EPS], 1, [grad])
    for ours, expected in zip(got, reference(x, weight, grad), strict=True):
        assert_kernel_equals_twin(ours, expected.float())


def test_kernels_take_an_expanded_gradient_and_a_transposed_input() -> None:
    x, weight, grad = inputs(7, 20, torch.float32)
    x, grad = x.T.contiguous().T, grad[:1].expand(7, 20)
    normed, rstd = rms_norm_forward(x, weight, EPS)
    assert_kernel_equals_twin(launch("rms_norm_triton.forward", x, weight, EPS)[0], normed)
    grad_x = launch("rms_norm_triton.backward", grad, x, weight, rstd)
    assert_kernel_equals_twin(grad_x, rms_norm_backward(grad, x, weight, rstd))


def test_no_rows() -> None:
    x = torch.empty(0, 8, requires_grad=True)
    rms_norm(x, torch.ones(8), EPS).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 8)
    assert launch("rms_norm_triton.forward", torch.empty(0, 8), torch.ones(8), EPS)[0].shape == (0, 8)


def test_keeps_its_input_and_one_number_a_row() -> None:
    x, weight, _ = inputs(5, 576, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        rms_norm(x.requires_grad_(), weight, EPS)
    assert [(tuple(t.shape), t.dtype) for t in kept if t is not weight] == [
        ((5, 576), torch.bfloat16),
        ((5,), torch.float32),
    ]


def test_refuses_what_it_cannot_do() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match="frozen"):
        rms_norm(x, weight.requires_grad_(), EPS)
    with pytest.raises(ValueError, match=r"\(2, 4\) and \(3,\)"):
        rms_norm(x, torch.ones(3), EPS)
    with pytest.raises(ValueError, match=r"x \[M, D\]"):
        rms_norm(torch.ones(1, 2, 4), torch.ones(4), EPS)
