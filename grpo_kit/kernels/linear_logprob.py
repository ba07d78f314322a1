"""From hidden states and the head's weight to the logprob of given tokens and the entropy, without ever holding all
the logits.

Every algorithm and every pass (policy, old, reference) goes through this one operation. It does not sample and it does
not know what a sequence is: rows are independent. The forward pass keeps two numbers a row; backward recomputes the
logits, a chunk of rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20


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
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    return _LinearLogprob.apply(hidden, weight, token_ids, _Head(temperature, logit_scale, softcap), rows)


class _Head:
    """The pointwise part between the matmul and the softmax, with its derivative."""

    def __init__(self, temperature: float, logit_scale: float, softcap: float | None):
        self.temperature, self.logit_scale, self.softcap = temperature, logit_scale, softcap

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        raw = (hidden.to(weight.dtype) @ weight.T).float() * self.logit_scale  # [rows, V]
        if self.softcap is not None:
            raw = self.softcap * torch.tanh(raw / self.softcap)
        return raw / self.temperature

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """From the gradient of the logits to that of the matmul's result; both [rows, V]."""
        grad = grad * (self.logit_scale / self.temperature)
        if self.softcap is not None:
            grad = grad * (1 - (logits * (self.temperature / self.softcap)) ** 2)
        return grad


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token_ids: Tensor, head: _Head, rows: int
    ) -> tuple[Tensor, Tensor]:
        logprob = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprob)
        log_z = torch.empty_like(logprob)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = head.logits(hidden[chunk], weight)
            log_z[chunk] = logits.logsumexp(-1)
            logprob[chunk] = logits.gather(-1, token_ids[chunk, None]).squeeze(-1) - log_z[chunk]
            entropy[chunk] = log_z[chunk] - (logits.softmax(-1) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, token_ids, log_z, entropy)
        ctx.head, ctx.rows = head, rows
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token_ids, log_z, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        for start in range(0, len(hidden), ctx.rows):
            chunk = slice(start, start + ctx.rows)
            logits = ctx.head.logits(hidden[chunk], weight)
            log_p = logits - log_z[chunk, None]
            p = log_p.exp()
            # d logprob / d logits = onehot − p;  d entropy / d logits = −p·(log p + entropy)
            grad = -p * (grad_logprob[chunk, None] + grad_entropy[chunk, None] * (log_p + entropy[chunk, None]))
            grad.scatter_add_(-1, token_ids[chunk, None], grad_logprob[chunk, None])
            grad = ctx.head.gradient(grad, logits).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[chunk].to(weight.dtype)).float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
