"""From hidden states and the head's weight to the logprob of given tokens and the entropy, without ever holding all
the logits.

Every algorithm and every pass (policy, old, reference) goes through this one operation. It does not sample and it does
not know what a sequence is: rows are independent. The forward pass keeps two numbers a row; backward recomputes the
logits: on CUDA a tile of rows × vocabulary at a time (`logit_tiles`), elsewhere in plain torch, a chunk of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kit.kernels.triton_ready import use_triton

if TYPE_CHECKING:
    from grpo_kit.kernels.logit_tiles import Tiles

CHUNK_BYTES = 128 * 2**20


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Return `(logprob, entropy)`, float32 and shape [N] each, in nats.

    hidden [N, H], weight [V, H], token_ids [N] (int64, in 0..V-1).

    logits = softcap·tanh(logit_scale·hidden·weightᵀ / softcap) / temperature; logprob is their log-softmax at
    `token_ids`, entropy is that of the whole distribution. Both are differentiable; gradients reach `hidden` always
    and `weight` only if it requires them, so a frozen head costs nothing. `chunk_bytes` bounds the float32 logits held
    at one time.

    Raises ValueError if the shapes don't fit together or the temperature is not above zero.
    """
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or token_ids.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"linear_logprob needs hidden [N, H], weight [V, H] and token_ids [N]; got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(token_ids.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 to take logprobs, got {temperature}")
    way = _way(len(hidden), weight, chunk_bytes)
    return LinearLogprob.apply(hidden, weight, token_ids, Head(temperature, logit_scale, softcap), way)


def _way(rows: int, weight: Tensor, chunk_bytes: int) -> Tiles | Chunks:
    if use_triton(weight):
        from grpo_kit.kernels.logit_tiles import Tiles

        return Tiles.within(chunk_bytes, rows, len(weight))
    return Chunks(max(1, chunk_bytes // (4 * len(weight))))


@dataclass(frozen=True)
class Head:
    """The pointwise part between the matmul and the softmax."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def slope(self) -> float:
        """d logits / d matmul, but for the softcap."""
        return self.logit_scale / self.temperature


class LinearLogprob(torch.autograd.Function):
    """The operation, one way or the other: `way` has its two passes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor, head: Head, way: Tiles | Chunks
    ) -> tuple[Tensor, Tensor]:
        logprob, entropy, log_z = way.forward(hidden, weight, token_ids, head)
        ctx.save_for_backward(hidden, weight, token_ids, log_z, entropy)
        ctx.head, ctx.way = head, way
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wants = ctx.needs_input_grad[:2]
        return *ctx.way.backward(ctx.saved_tensors, grads, ctx.head, wants), None, None, None


@dataclass(frozen=True)
class Chunks:
    """The twin: the two passes of `linear_logprob` in plain torch, with at most `rows` rows of logits at a time."""

    rows: int

    def forward(self, hidden: Tensor, weight: Tensor, token_ids: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        """`(logprob, entropy, log_z)`, float32 and [N] each."""
        logprob = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprob)
        log_z = torch.empty_like(logprob)
        for start in range(0, len(hidden), self.rows):
            chunk = slice(start, start + self.rows)
            logits = _logits(hidden[chunk], weight, head)
            log_z[chunk] = logits.logsumexp(-1)
            logprob[chunk] = logits.gather(-1, token_ids[chunk, None]).squeeze(-1) - log_z[chunk]
            entropy[chunk] = log_z[chunk] - (logits.softmax(-1) * logits).sum(-1)
        return logprob, entropy, log_z

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
        grad_logprob, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants[1] else None
        for start in range(0, len(hidden), self.rows):
            chunk = slice(start, start + self.rows)
            logits = _logits(hidden[chunk], weight, head)
            log_p = logits - log_z[chunk, None]
            p = log_p.exp()
            # d logprob / d logits = onehot − p;  d entropy / d logits = −p·(log p + entropy)
            grad = -p * (grad_logprob[chunk, None] + grad_entropy[chunk, None] * (log_p + entropy[chunk, None]))
            grad.scatter_add_(-1, token_ids[chunk, None], grad_logprob[chunk, None])
            grad = _gradient_of_matmul(grad, logits, head).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[chunk].to(weight.dtype)).float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _logits(hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
    raw = (hidden.to(weight.dtype) @ weight.T).float() * head.logit_scale  # [rows, V]
    if head.softcap is not None:
        raw = head.softcap * torch.tanh(raw / head.softcap)
    return raw / head.temperature


def _gradient_of_matmul(grad: Tensor, logits: Tensor, head: Head) -> Tensor:
    """From the gradient of the logits to that of the matmul's result; both [rows, V]."""
    grad = grad * head.slope
    if head.softcap is not None:
        grad = grad * (1 - (logits * (head.temperature / head.softcap)) ** 2)
    return grad
