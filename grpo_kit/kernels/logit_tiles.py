"""`linear_logprob` in tiles of rows × vocabulary, for CUDA: cuBLAS makes a tile of float32 logits, one Triton kernel
reads it.

Forward reads each tile once and keeps four numbers a row. Backward makes each tile again, reads it once and writes its
gradient once in the weight's dtype, for the second product. All sums, also those over the tiles, are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kit.kernels.linear_logprob import Head
from grpo_kit.kernels.triton_ready import unit_stride

ALIGNED = 128  # columns: cuBLAS wants leading dimensions in multiples of 16 bytes, and whole blocks
# With incoming gradients below 1, those of the logits stay below 1 + ln V < 16. 2¹⁰ more lifts small probabilities out
# of float16's subnormals (under 2⁻¹⁴) and is still below its 65,504.
LIFT = 2.0**10


@dataclass(frozen=True)
class Tiles:
    """The two passes of `linear_logprob` with at most `rows` × `columns` logits held at a time."""

    rows: int
    columns: int

    @classmethod
    def within(cls, chunk_bytes: int, rows: int, vocabulary: int) -> Tiles:
        """Tiles whose float32 logits fit in `chunk_bytes`, about twice as wide as high.

        That shape moves the fewest bytes: every block of rows reads the weight again, every block of columns the sum of
        grad_hidden.
        """
        elements = max(1, chunk_bytes // 4)
        high = max(1, min(rows, math.isqrt(elements // 2)))
        wide = min(vocabulary, elements // high)
        if ALIGNED < wide < vocabulary:
            wide -= wide % ALIGNED
        return cls(max(1, min(rows, elements // wide)), wide)

    def forward(self, hidden: Tensor, weight: Tensor, token_ids: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        """`(logprob, entropy, log_z)`, float32 and [N] each. A token outside the vocabulary has the logprob NaN."""
        token_ids = unit_stride(token_ids)
        state = _empty_state(len(hidden), hidden.device)
        scratch = self._scratch(torch.float32, hidden.device)
        with torch.cuda.device_of(hidden):
            for rows in _blocks(len(hidden), self.rows):
                some = hidden[rows].to(weight.dtype)
                for tokens in _blocks(len(weight), self.columns):
                    logits = _product(some, weight[tokens].T, scratch)
                    _reduce_tile(logits, tokens.start, token_ids[rows], state[:, rows], head)
        peak, total, spread, picked = state
        log_total = total.log()
        # Relative to the row's largest logit nothing cancels, however large the logits are.
        return picked - peak - log_total, log_total - spread / total, peak + log_total

    def backward(
        self,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        head: Head,
        wants: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden and weight in their dtypes, None where not wanted.

        saved: hidden, weight, token_ids, log_z, entropy. grads: those of logprob and entropy, [N] each.
        """
        hidden, weight, token_ids, log_z, entropy = saved
        token_ids = unit_stride(token_ids)
        # A gradient scaler's 65,536 would overflow a 16-bit gradient, and a mean over 131,072 tokens be lost in it. So
        # each row is divided by the power of two above its largest incoming gradient, and multiplied again in float32.
        unit = _power_of_two_above(torch.maximum(grads[0].abs(), grads[1].abs()))  # [N]
        terms = torch.stack([log_z, entropy, *(grad * (LIFT / unit) for grad in grads)])  # [4, N]
        scale = head.slope / LIFT
        to_hidden = _HiddenGradient(hidden, unit * scale, self.rows) if wants[0] else None
        to_weight = _WeightGradient(weight, unit, scale) if wants[1] else None
        scratch = self._scratch(torch.float32, hidden.device), self._scratch(weight.dtype, hidden.device)
        with torch.cuda.device_of(hidden):
            for rows in _blocks(len(hidden), self.rows):
                some = hidden[rows].to(weight.dtype)
                for tokens in _blocks(len(weight), self.columns):
                    logits = _product(some, weight[tokens].T, scratch[0])
                    grad = _gradient_tile(logits, tokens.start, token_ids[rows], terms[:, rows], head, scratch[1])
                    if to_hidden:
                        to_hidden.add(grad, weight[tokens])
                    if to_weight:
                        to_weight.add(grad, some, rows, tokens)
                if to_hidden:
                    to_hidden.finish(rows)
        return to_hidden.grad if to_hidden else None, to_weight.finished() if to_weight else None

    def _scratch(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[rows, columns], each row's start aligned."""
        aligned = -(-self.columns // ALIGNED) * ALIGNED
        return torch.empty(self.rows, aligned, dtype=dtype, device=device)


class _HiddenGradient:
    """Sums one block of rows over the vocabulary in float32 and casts it when it is whole."""

    def __init__(self, hidden: Tensor, factor: Tensor, rows: int):
        self.grad = torch.empty_like(hidden)
        self._factor = factor[:, None]
        self._sum = torch.zeros(rows, hidden.shape[1], dtype=torch.float32, device=hidden.device)

    def add(self, grad: Tensor, weight: Tensor) -> None:
        _add_product(grad, weight, self._sum[: len(grad)])

    def finish(self, rows: slice) -> None:
        place = self.grad[rows]
        torch.mul(self._sum[: len(place)], self._factor[rows], out=place)
        self._sum.zero_()


class _WeightGradient:
    """Sums over the rows in float32. Each row has its own unit: hidden is multiplied by it, relative to the largest."""

    def __init__(self, weight: Tensor, unit: Tensor, scale: float):
        self._dtype = weight.dtype
        self._sum = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        largest = unit.max() if len(unit) else unit.new_ones(())
        self._relative = (unit / largest)[:, None]  # powers of two up to 1: the products are exact
        self._factor = largest * scale

    def add(self, grad: Tensor, hidden: Tensor, rows: slice, tokens: slice) -> None:
        _add_product(grad.T, hidden * self._relative[rows].to(hidden.dtype), self._sum[tokens])

    def finished(self) -> Tensor:
        return self._sum.mul_(self._factor).to(self._dtype)


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _empty_state(rows: int, device: torch.device) -> Tensor:
    """[4, N]: a row's largest logit, Σ exp(logit − largest), Σ exp(logit − largest)·(logit − largest), its token's."""
    state = torch.zeros(4, rows, dtype=torch.float32, device=device)
    state[0] = torch.finfo(torch.float32).min
    state[3] = math.nan
    return state


def _power_of_two_above(value: Tensor) -> Tensor:
    """2ᵉ with value / 2ᵉ in [½, 1); 1 for 0."""
    return torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent.clamp(-100, 100))


def _product(a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
    """a·b in a corner of `scratch`, float32 whatever the operands are."""
    out = scratch[: a.shape[0], : b.shape[1]]
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)  # torch has out_dtype on CUDA only; a CPU is here to test


def _add_product(a: Tensor, b: Tensor, total: Tensor) -> None:
    """total += a·b, in float32 whatever the operands are."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a.float(), b.float(), out=total)


# ---- the kernels ----


def _reduce_tile(logits: Tensor, first_token: int, token_ids: Tensor, state: Tensor, head: Head) -> None:
    """Merge the raw logits [R, C] of the tokens from `first_token` on into `state` [4, R]; token_ids [R]."""
    rows, columns = logits.shape
    inner, outer = _constants(head)
    _reduce[(rows,)](
        logits, logits.stride(0), columns, first_token, token_ids, state, state.stride(0), inner, outer,
        SOFTCAP=head.softcap is not None, BLOCK=min(4096, triton.next_power_of_2(columns)), num_warps=8,
    )  # fmt: skip


def _gradient_tile(
    logits: Tensor, first_token: int, token_ids: Tensor, terms: Tensor, head: Head, scratch: Tensor
) -> Tensor:
    """The gradient of the raw logits [R, C] but for `head.slope`, in a corner of `scratch`.

    terms [4, R]: log_z, entropy and the gradients that come in for logprob and entropy.
    """
    rows, columns = logits.shape
    grad = scratch[:rows, :columns]
    inner, outer = _constants(head)
    block = min(2048, triton.next_power_of_2(columns))
    _gradient[(rows, triton.cdiv(columns, block))](
        logits, logits.stride(0), grad, grad.stride(0), columns, first_token, token_ids, terms, terms.stride(0),
        inner, outer, SOFTCAP=head.softcap is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return grad


def _constants(head: Head) -> tuple[float, float]:
    """(inner, outer) with logit = outer·tanh(inner·raw), or outer·raw without a softcap."""
    if head.softcap is None:
        return 1.0, head.slope
    return head.logit_scale / head.softcap, head.softcap / head.temperature


# The numbers of rows and where a tile starts change from call to call: specialized on, kernels would compile again.
@triton.jit(do_not_specialize=["first_token", "state_stride"])
def _reduce(
    logits, stride, columns, first_token, token_ids, state, state_stride, inner, outer,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # row·stride passes 2³¹
    logits += row * stride
    state += row
    peak = tl.load(state)
    total = tl.load(state + state_stride)
    spread = tl.load(state + 2 * state_stride)
    block = 0
    while block * BLOCK < columns:  # the interpreter has no range up to an argument
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < columns
        capped = _capped(tl.load(logits + at, mask=inside, other=0.0), inner, SOFTCAP)
        logit = tl.where(inside, outer * capped, -3.0e38)  # weighs nothing; finite, so that 0·logit is 0
        new = tl.maximum(peak, tl.max(logit, 0))
        below = logit - new
        weight = tl.exp(below)
        shrink = tl.exp(peak - new)
        spread = (spread + (peak - new) * total) * shrink + tl.sum(weight * below, 0)
        total = total * shrink + tl.sum(weight, 0)
        peak = new
        block += 1
    tl.store(state, peak)
    tl.store(state + state_stride, total)
    tl.store(state + 2 * state_stride, spread)
    token = tl.load(token_ids + row) - first_token
    here = (token >= 0) & (token < columns)
    picked = outer * _capped(tl.load(logits + token, mask=here, other=0.0), inner, SOFTCAP)
    tl.store(state + 3 * state_stride, picked, mask=here)


@triton.jit(do_not_specialize=["first_token", "terms_stride"])
def _gradient(
    logits, stride, grad, grad_stride, columns, first_token, token_ids, terms, terms_stride, inner, outer,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    terms += row
    log_z = tl.load(terms)
    entropy = tl.load(terms + terms_stride)
    of_logprob = tl.load(terms + 2 * terms_stride)
    of_entropy = tl.load(terms + 3 * terms_stride)
    token = tl.load(token_ids + row) - first_token
    capped = _capped(tl.load(logits + row * stride + at, mask=inside, other=0.0), inner, SOFTCAP)
    log_p = outer * capped - log_z
    # d logprob / d logits = onehot − p;  d entropy / d logits = −p·(log p + entropy)
    out = -tl.exp(log_p) * (of_logprob + of_entropy * (log_p + entropy)) + tl.where(at == token, of_logprob, 0.0)
    if SOFTCAP:
        out *= 1 - capped * capped
    tl.store(grad + row * grad_stride + at, out, mask=inside)


@triton.jit
def _capped(raw, inner, SOFTCAP: tl.constexpr):
    """tanh(inner·raw), or raw; Triton has no tanh of its own that every version and the interpreter know."""
    if SOFTCAP:
        x = inner * raw
        e = tl.exp(-2 * tl.abs(x))
        raw = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
    return raw
