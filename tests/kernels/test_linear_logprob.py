"""`linear_logprob` against plain torch in float64: values, gradients, chunks, number formats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kit.kernels import linear_logprob

ROWS, WIDTH, VOCAB = 7, 6, 11
HEADS = [
    {},
    {"temperature": 0.7},
    {"logit_scale": 0.25, "temperature": 1.3},
    {"softcap": 3.0},
    {"softcap": 2.0, "logit_scale": 1.5, "temperature": 0.6},
]


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=g).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (ROWS,), generator=g)


def upstream() -> tuple[Tensor, Tensor]:
    """The gradients that come in: of the logprobs and of the entropies, [N] each."""
    g = torch.Generator().manual_seed(9)
    return torch.randn(ROWS, generator=g), torch.randn(ROWS, generator=g)


def reference(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The whole matrix of logits, in float64."""
    logits = hidden.double() @ weight.double().T * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(token_ids)), token_ids], -(log_p.exp() * log_p).sum(-1)


def gradients(function: Any, dtype: torch.dtype = torch.float32, scale: float = 1.0, **head: Any) -> list[Tensor]:
    """[logprob, entropy, gradient of hidden, gradient of weight] of one call on the same inputs."""
    hidden, weight, token_ids = inputs(dtype)
    logprob, entropy = function(hidden, weight, token_ids, **head)
    torch.autograd.backward([logprob, entropy], [(scale * g).to(logprob.dtype) for g in upstream()])
    assert hidden.grad is not None and weight.grad is not None
    return [logprob.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, ROWS, 100])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_values_and_gradients_equal_float64(head: dict[str, Any], rows_at_once: int) -> None:
    ours = gradients(linear_logprob, chunk_bytes=4 * VOCAB * rows_at_once, **head)
    for got, expected in zip(ours, gradients(reference, **head), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_numbers_by_hand() -> None:
    # Logits 0 and ln 3: probabilities 1/4 and 3/4, entropy ln 4 − 3/4·ln 3.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprob, entropy = linear_logprob(hidden, weight, torch.tensor([1]))
    assert logprob.item() == pytest.approx(-0.2876820724, rel=1e-6)
    assert entropy.item() == pytest.approx(0.5623351446, rel=1e-6)


def test_entropy_alone_has_a_gradient() -> None:
    got, expected = [], []
    for function, into in ((linear_logprob, got), (reference, expected)):
        hidden, weight, token_ids = inputs()
        function(hidden, weight, token_ids, temperature=0.8)[1].sum().backward()
        into += [hidden.grad, weight.grad]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_half_precision_stays_within_its_rounding(head: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Logits are rounded once, to the weight's dtype: relative to the largest value, a few of its epsilons."""
    ours = gradients(linear_logprob, dtype, chunk_bytes=4 * VOCAB * 3, **head)
    assert [t.dtype for t in ours] == [torch.float32, torch.float32, dtype, dtype]
    for got, expected in zip(ours, gradients(reference, dtype, **head), strict=True):
        assert (got.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max()


def test_hidden_may_be_wider_than_the_weight() -> None:
    """On a GPU the last norm gives float32 where the head is 16 bits."""
    hidden, weight, token_ids = inputs()
    narrow = weight.detach().bfloat16()
    logprob, _ = linear_logprob(hidden, narrow, token_ids)
    logprob.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    expected = reference(hidden.detach().bfloat16(), narrow, token_ids)[0]
    torch.testing.assert_close(logprob.double(), expected, rtol=2e-2, atol=2e-2)


class MatmulShapes(TorchDispatchMode):
    """Records the shape of every product that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.seen.append(tuple(out.shape))
        return out


def test_frozen_head_gets_no_gradient_and_costs_no_product() -> None:
    hidden, weight, token_ids = inputs()
    weight.requires_grad_(False)
    with MatmulShapes() as products:
        linear_logprob(hidden, weight, token_ids)[0].sum().backward()
    assert weight.grad is None
    # The logits, the logits again in backward, the gradient of hidden; a weight's would be [V, H].
    assert products.seen == [(ROWS, VOCAB), (ROWS, VOCAB), (ROWS, WIDTH)]
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, gradients_of_logprob_only(), rtol=1e-5, atol=1e-6)


def gradients_of_logprob_only() -> Tensor:
    hidden, weight, token_ids = inputs()
    reference(hidden, weight, token_ids)[0].sum().backward()
    assert hidden.grad is not None
    return hidden.grad


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_chunk_bytes_bounds_the_logits_held_at_once(rows_at_once: int) -> None:
    hidden, weight, token_ids = inputs()
    with MatmulShapes() as products:
        logprob, entropy = linear_logprob(hidden, weight, token_ids, chunk_bytes=4 * VOCAB * rows_at_once)
        (logprob.sum() + entropy.sum()).backward()
    logits = [shape for shape in products.seen if shape[1] == VOCAB]
    assert max(shape[0] for shape in logits) == rows_at_once
    assert sum(shape[0] for shape in logits) == 2 * ROWS  # forward, and once more in backward


def test_incoming_gradient_is_honoured_exactly() -> None:
    """A gradient scaler multiplies the loss by a power of two; float32 must only shift the exponent."""
    plain, scaled = gradients(linear_logprob), gradients(linear_logprob, scale=2.0**16)
    for one, other in zip(plain[2:], scaled[2:], strict=True):
        assert torch.equal(one * 2.0**16, other)


def test_no_rows_are_no_error() -> None:
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    logprob, entropy = linear_logprob(hidden, torch.ones(VOCAB, WIDTH), torch.zeros(0, dtype=torch.int64))
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,)


def test_far_apart_logits_give_finite_gradients() -> None:
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    logprob, entropy = linear_logprob(hidden, torch.tensor([[1.0], [0.0], [-1.0]]), torch.tensor([2]))
    (logprob + entropy).sum().backward()
    assert logprob.item() == -2000.0 and entropy.item() == 0.0
    assert hidden.grad is not None and hidden.grad.item() == pytest.approx(-2.0)


@pytest.mark.parametrize(
    ("hidden", "weight", "token_ids"),
    [((2, 3), (5, 4), (2,)), ((2, 3), (5, 3), (3,)), ((1, 2, 3), (5, 3), (2,)), ((2, 3), (3,), (2,))],
)
def test_shapes_that_do_not_fit_are_named(hidden: Any, weight: Any, token_ids: Any) -> None:
    with pytest.raises(ValueError, match=r"hidden \[N, H\], weight \[V, H\] and token_ids \[N\]; got"):
        linear_logprob(torch.zeros(hidden), torch.zeros(weight), torch.zeros(token_ids, dtype=torch.int64))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_above_zero(temperature: float) -> None:
    hidden, weight, token_ids = inputs()
    with pytest.raises(ValueError, match="temperature must be above 0"):
        linear_logprob(hidden, weight, token_ids, temperature=temperature)
