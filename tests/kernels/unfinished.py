"""Random `Parts`, what they amount to in float64, and how near to that a consumer has to come."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.kernels.decode_parts import Parts
from tests.kernels.launching import skip_products_in


@dataclass(frozen=True)
class Case:
    """rank 0: the adapter is off."""

    dtype: torch.dtype
    rows: int
    parts: int
    rank: int
    bias: bool


# Ranks below, at, between and above the smallest product of a tensor core; rows of less and more than one tile.
CASES = [
    Case(dtype, *rest)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for rest in [(1, 1, 0, False), (5, 3, 0, True), (16, 1, 1, True), (19, 3, 20, False), (3, 3, 128, True)]
]


def unfinished(case: Case, sizes: tuple[int, ...]) -> Parts:
    """Sums of about 1, a view of a tensor that is not a number elsewhere.

    The sums are multiples of 2⁻¹⁰, so that adding them up is exact in any order: LoRA's lowered x is rounded alike
    everywhere.
    """
    g = torch.Generator().manual_seed(case.rows)
    outputs = sum(sizes)
    width = outputs + len(sizes) * case.rank
    held = torch.full((case.parts, case.rows + 2, width + 8), float("nan"))
    sums = held[:, 1:-1, 4:-4]
    sums.copy_((torch.randn(sums.shape, generator=g) / case.parts**0.5 * 1024).round() / 1024)
    lora_b = torch.randn(outputs, case.rank, generator=g) / max(case.rank, 1) ** 0.5
    bias = torch.randn(outputs, generator=g).to(case.dtype) if case.bias else None
    return Parts(sums, sizes, case.dtype, lora_b.to(case.dtype) if case.rank else None, bias)


def finished64(parts: Parts) -> Tensor:
    """y [B, N] in float64, with the two roundings that are meant: of LoRA's lowered x, and of y."""
    total = parts.sums.double().sum(0)
    ys, start = [], 0
    for i, size in enumerate(parts.sizes):
        mine = slice(start, start := start + size)
        y = total[:, mine]
        if parts.bias is not None:
            y = y + parts.bias[mine].double()
        if parts.lora_b is not None:
            low = total[:, parts.outputs + i * parts.rank :][:, : parts.rank]
            y = y + rounded(low, parts.dtype) @ parts.lora_b[mine].double().T
        ys.append(y)
    return rounded(torch.cat(ys, 1), parts.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def nibbles_by_hand(x: Tensor) -> Tensor:
    """[B, K] with element k of each span of W at W/4·(k mod 4) + k // 4, one column after the other; W is the largest
    of 256, 128 and 64 that divides K."""
    out = torch.full_like(x, float("nan"))
    wide = math.gcd(x.shape[1], 256)
    for k in range(x.shape[1]):
        out[:, k // wide * wide + wide // 4 * (k % wide % 4) + k % wide // 4] = x[:, k]
    return out


def skip_what_the_interpreter_cannot(case: Case) -> None:
    if case.rank:
        skip_products_in(case.dtype)


def assert_near(got: Tensor, exact: Tensor, in_interpreter: bool = False) -> None:
    """`got`, numbers of about 1, against float64 numbers that were rounded at the same places.

    float32: equal to 1e-5. 16 bit: none off by more than two units of the last place of 1 (or of itself, if it is
    larger), and 99 of 100 the same, or all but a pair that is turned together; a rounding left out changes a quarter
    of them. Triton's interpreter cuts bfloat16 off instead of rounding it, each time a rounding is meant: up to 8 units
    there.
    """
    assert got.shape == exact.shape
    if got.dtype == torch.float32:
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        return
    cut = in_interpreter and got.dtype == torch.bfloat16 and not torch.cuda.is_available()
    units = (got.double() - exact).abs() / (torch.finfo(got.dtype).eps * exact.abs().clamp(min=1))
    assert units.max() <= (8 if cut else 2)
    assert cut or (got != exact.to(got.dtype)).sum() <= max(2, 0.01 * got.numel())
