"""`rotary` against complex numbers in float64, against transformers, and its Triton kernel against its twin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from grpo_kit.kernels.rotary import rotary, rotate
from tests.kernels.launching import differentiate, launch
from tests.kernels.rounding import assert_kernel_equals_twin, assert_same_rounding


@dataclass(frozen=True)
class Shape:
    rows: int
    heads: int
    kv_heads: int
    width: int


# The last has more heads than the kernel turns at a time.
SHAPES = [Shape(1, 1, 1, 2), Shape(5, 3, 1, 6), Shape(3, 14, 2, 64), Shape(2, 9, 3, 80), Shape(2, 40, 8, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fused_qkv(shape: Shape, dtype: torch.dtype) -> Tensor:
    """[M, (heads + 2·kv_heads)·D], as one projection gives it."""
    g = torch.Generator().manual_seed(shape.rows)
    return torch.randn(shape.rows, (shape.heads + 2 * shape.kv_heads) * shape.width, generator=g).to(dtype)


def q_and_k(fused: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Views of `fused`: q [M, heads, D] and k [M, kv_heads, D]."""
    heads = fused.unflatten(1, (-1, shape.width))
    return heads[:, : shape.heads], heads[:, shape.heads : shape.heads + shape.kv_heads]


def table(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), [M, D] each, of random angles; the halves repeat."""
    g = torch.Generator().manual_seed(1)
    angle = (2 * math.pi * torch.rand(shape.rows, shape.width // 2, generator=g)).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A pair as a complex number, times the unit number of its angle; in float64."""
    half = x.shape[-1] // 2
    unit = torch.complex(cos.double(), sin.double())[:, None, :half]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * unit
    return torch.cat([turned.real, turned.imag], -1)


def gradients_of(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Incoming gradients laid out [heads, M, D], as attention gives them."""
    g = torch.Generator().manual_seed(2)
    grads = (torch.randn(x.transpose(0, 1).shape, generator=g).to(x.dtype).transpose(0, 1) for x in (q, k))
    return next(grads), next(grads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_float64(shape: Shape) -> None:
    cos, sin = table(shape, torch.float32)
    fused = fused_qkv(shape, torch.float32).requires_grad_()
    wide = fused.detach().double().requires_grad_()
    q, k = q_and_k(fused, shape)
    ours = rotary(q, k, cos, sin)
    expected = [reference(x, cos, sin) for x in q_and_k(wide, shape)]
    grads = gradients_of(q, k)
    torch.autograd.backward(ours, grads)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for got, right in zip([*ours, fused.grad], [*expected, wide.grad], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    shape = SHAPES[1]
    q, k = (x.clone().requires_grad_() for x in q_and_k(fused_qkv(shape, torch.float64), shape))
    cos, sin = table(shape, torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, cos, sin), (q, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_transformers_rotation_rounded_once(dtype: torch.dtype) -> None:
    shape = SHAPES[2]
    q, k = q_and_k(fused_qkv(shape, dtype), shape)
    cos, sin = table(shape, dtype)
    theirs = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float())
    for got, expected in zip(rotary(q, k, cos, sin), theirs, strict=True):
        assert_same_rounding(got, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_differs_from_transformers_by_its_roundings(dtype: torch.dtype) -> None:
    # Theirs is off by half a unit in the last place for each product and for the sum, ours for the sum alone.
    shape = SHAPES[2]
    q, k = q_and_k(fused_qkv(shape, dtype), shape)
    cos, sin = table(shape, dtype)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    for x, got, their in zip((q, k), rotary(q, k, cos, sin), theirs, strict=True):
        terms = (x * cos[:, None]).abs() + (rotate_half(x) * sin[:, None]).abs()
        assert ((got.float() - their.float()).abs() <= 1.5 * torch.finfo(dtype).eps * terms.float()).all()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_its_twin(shape: Shape, dtype: torch.dtype, inverse: bool) -> None:
    q, k = q_and_k(fused_qkv(shape, dtype), shape)
    cos, sin = table(shape, dtype)
    got = launch("rotary_triton.rotate", q, k, cos, sin, inverse)
    for ours, expected in zip(got, rotate(q, k, cos, sin, inverse), strict=True):
        assert_kernel_equals_twin(ours, expected)
        assert ours.is_contiguous()


def test_gradients_through_the_kernel() -> None:
    shape = SHAPES[2]
    q, k = q_and_k(fused_qkv(shape, torch.float32), shape)
    cos, sin = table(shape, torch.float32)
    grads = gradients_of(q, k)
    got = differentiate("rotary", [q, k, cos, sin], 2, list(grads))
    expected = [reference(x, cos, s) for s, pair in ((sin, (q, k)), (-sin, grads)) for x in pair]
    for ours, right in zip(got, expected, strict=True):
        assert_kernel_equals_twin(ours, right.float())


def test_kernel_takes_any_strides_and_float32_tables() -> None:
    shape = SHAPES[2]
    q, k = gradients_of(*q_and_k(fused_qkv(shape, torch.bfloat16), shape))  # heads outermost
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # and a last dimension that is not contiguous
    cos, sin = (x.repeat(1, 2)[:, : shape.width] for x in table(shape, torch.float32))
    got = launch("rotary_triton.rotate", q, k, cos, sin, True)
    for ours, expected in zip(got, rotate(q, k, cos, sin, True), strict=True):
        assert_kernel_equals_twin(ours, expected)


def test_no_rows() -> None:
    q, k, cos = torch.empty(0, 2, 8, requires_grad=True), torch.empty(0, 1, 8), torch.empty(0, 8)
    rotary(q, k, cos, cos)[0].sum().backward()
    assert q.grad is not None and q.grad.shape == (0, 2, 8)
    assert launch("rotary_triton.rotate", q.detach(), k, cos, cos, False)[1].shape == (0, 1, 8)


def test_keeps_cos_and_sin_alone() -> None:
    shape = SHAPES[2]
    q, k = q_and_k(fused_qkv(shape, torch.bfloat16).requires_grad_(), shape)
    cos, sin = table(shape, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        rotary(q, k, cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


def test_refuses_shapes_that_do_not_fit() -> None:
    q, k, cos = torch.ones(2, 3, 4), torch.ones(2, 1, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match="rotary needs"):
        rotary(q, k[:1], cos, cos)
    with pytest.raises(ValueError, match="rotary needs"):
        rotary(q, k, cos, cos[:, :2])
    with pytest.raises(ValueError, match="rotary needs"):
        rotary(q[0], k, cos, cos)
    with pytest.raises(ValueError, match="D even"):
        rotary(q[..., :3], k[..., :3], cos[:, :3], cos[:, :3])
