"""`swiglu` against float64, against transformers' gated MLP, and its Triton kernels against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from grpo_kit.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward
from tests.kernels.launching import differentiate, launch
from tests.kernels.rounding import assert_kernel_equals_twin, assert_same_rounding

SIZES = [(3, 1), (7, 5), (2, 1024), (3, 1536), (2, 2731)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, up, gradient of the result)."""
    g = torch.Generator().manual_seed(rows)
    gate, up, grad = (torch.randn(rows, width, generator=g) for _ in range(3))
    return (3 * gate).to(dtype), up.to(dtype), grad.to(dtype)


def reference(gate: Tensor, up: Tensor, grad: Tensor) -> list[Tensor]:
    """The result and the gradients of gate and up by autograd, in float64."""
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    out = gate / (1 + torch.exp(-gate)) * up
    return [out.detach(), *torch.autograd.grad(out, [gate, up], grad.double())]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_equal_float64(size: tuple[int, int]) -> None:
    gate, up, grad = inputs(*size, torch.float32)
    out = swiglu(gate.requires_grad_(), up.requires_grad_())
    got = [out.detach(), *torch.autograd.grad(out, [gate, up], grad)]
    for ours, expected in zip(got, reference(gate.detach(), up.detach(), grad), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    gate, up, _ = inputs(4, 6, torch.float64)
    assert torch.autograd.gradcheck(swiglu, (gate.requires_grad_(), up.requires_grad_()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    gate, up, _ = inputs(7, 1536, dtype)
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=2))
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = Returns(gate), Returns(up), torch.nn.Identity()
    theirs = mlp(torch.empty(0))
    assert torch.equal(swiglu(gate, up), theirs)
    rounded_by_hand = torch.nn.functional.silu(gate.float()).to(dtype) * up
    assert_same_rounding(swiglu(gate, up), rounded_by_hand)


class Returns(torch.nn.Module):
    """A projection whose result is known beforehand."""

    def __init__(self, result: Tensor):
        super().__init__()
        self.result = result

    def forward(self, _: Tensor) -> Tensor:
        return self.result


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_16_bit_gradients(dtype: torch.dtype) -> None:
    # That of gate is the float64 one rounded; that of up is the incoming one times the rounded silu.
    gate, up, grad = inputs(3, 1536, dtype)
    grad_gate, grad_up = swiglu_backward(grad, gate, up)
    assert_same_rounding(grad_gate, reference(gate, up, grad)[1].to(dtype))
    assert_same_rounding(grad_up, (grad.double() * torch.nn.functional.silu(gate).double()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_equal_their_twins(size: tuple[int, int], dtype: torch.dtype) -> None:
    gate, up, grad = inputs(*size, dtype)
    fused = torch.cat([gate, up], 1)  # gate and up are its halves, views with twice the row stride
    width = size[1]
    got = launch("swiglu_triton.forward", fused[:, :width], fused[:, width:])
    assert_kernel_equals_twin(got, swiglu_forward(gate, up))
    grads = launch("swiglu_triton.backward", grad[:1].expand(size), fused[:, :width], fused[:, width:])
    for ours, expected in zip(grads, swiglu_backward(grad[:1].expand(size), gate, up), strict=True):
        assert_kernel_equals_twin(ours, expected)


def test_gradients_through_the_kernels() -> None:
    gate, up, grad = inputs(3, 1536, torch.float32)
    got = differentiate("swiglu", [gate, up], 2, [grad])
    for ours, expected in zip(got, reference(gate, up, grad), strict=True):
        assert_kernel_equals_twin(ours, expected.float())


def test_kernels_take_transposed_inputs() -> None:
    gate, up, grad = (x.T.contiguous().T for x in inputs(5, 9, torch.float32))
    assert_kernel_equals_twin(launch("swiglu_triton.forward", gate, up), swiglu_forward(gate, up))
    grads = launch("swiglu_triton.backward", grad, gate, up)
    for ours, expected in zip(grads, swiglu_backward(grad, gate, up), strict=True):
        assert_kernel_equals_twin(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_written_over_the_inputs_are_the_same(dtype: torch.dtype) -> None:
    gate, up, grad = inputs(3, 1536, dtype)
    apart = swiglu_backward(grad, gate, up)
    for ours, expected in zip(launch("swiglu_triton.backward", grad, gate, up, True), apart, strict=True):
        assert_kernel_equals_twin(ours, expected)
    over = swiglu_backward(grad, gate, up, over=True)
    assert over[0] is gate and over[1] is up
    assert torch.equal(gate, apart[0]) and torch.equal(up, apart[1])


def test_far_ends_stay_finite() -> None:
    gate = torch.tensor([[-60000.0, -100.0, 0.0, 100.0, 60000.0]], dtype=torch.float16)
    one = torch.ones_like(gate)
    ends = [torch.tensor([[0.0, 0.0, 0.0, 100.0, 60000.0]]), torch.tensor([[0.0, 0.0, 0.5, 1.0, 1.0]])]
    assert torch.equal(swiglu_forward(gate, one).float(), ends[0])
    assert torch.equal(swiglu_backward(one, gate, one)[0].float(), ends[1])
    assert torch.equal(launch("swiglu_triton.forward", gate, one).float(), ends[0])
    assert torch.equal(launch("swiglu_triton.backward", one, gate, one)[0].float(), ends[1])


def test_keeps_its_inputs_alone_and_as_they_were() -> None:
    gate, up, grad = inputs(3, 1536, torch.bfloat16)
    before = gate.clone(), up.clone()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = swiglu(gate.requires_grad_(), up.requires_grad_())
    out.backward(grad)
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


def test_no_rows() -> None:
    gate, up = torch.empty(0, 8, requires_grad=True), torch.empty(0, 8)
    swiglu(gate, up).sum().backward()
    assert gate.grad is not None and gate.grad.shape == (0, 8)
    assert launch("swiglu_triton.forward", torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 8)


def test_refuses_inputs_that_differ() -> None:
    with pytest.raises(ValueError, match=r"\(2, 4\) .* \(2, 3\)"):
        swiglu(torch.ones(2, 4), torch.ones(2, 3))
    with pytest.raises(ValueError, match="one dtype"):
        swiglu(torch.ones(2, 4), torch.ones(2, 4).half())
