"""`linear_logprob` in tiles against plain torch in float64: in Triton's interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kit.kernels import linear_logprob
from grpo_kit.kernels.linear_logprob import Head, LinearLogprob
from tests.kernels.launching import where_kernels_run
from tests.kernels.test_linear_logprob import HEADS, reference

pytest.importorskip("triton")
from grpo_kit.kernels.logit_tiles import Tiles

ROWS, WIDTH, VOCAB = 7, 16, 37
UNEVEN = Tiles(rows=4, columns=20)


def inputs(dtype: torch.dtype = torch.float32, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=g).to(dtype)
    weight = (size * torch.randn(VOCAB, WIDTH, generator=g)).to(dtype)
    token_ids = torch.randint(VOCAB, (ROWS,), generator=g)
    token_ids[:2] = torch.tensor([0, VOCAB - 1])
    return hidden, weight, token_ids


def upstream() -> tuple[Tensor, Tensor]:
    """The gradients that come in: of the logprobs and of the entropies, [N] each."""
    g = torch.Generator().manual_seed(9)
    return torch.randn(ROWS, generator=g), torch.randn(ROWS, generator=g)


def of_logprobs(rows: int) -> tuple[Tensor, Tensor]:
    """The gradients that come in from the sum of the logprobs."""
    return torch.ones(rows), torch.zeros(rows)


def in_tiles(hidden: Tensor, weight: Tensor, token_ids: Tensor, tiles: Tiles, **head: Any) -> Any:
    return LinearLogprob.apply(hidden, weight, token_ids, Head(**head), tiles)


def outcome(function: Any, given: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], trained: bool = True) -> list[Any]:
    """[logprob, entropy, gradient of hidden, gradient of weight]; the last is None if the weight is not trained."""
    hidden, weight = given[0].detach().requires_grad_(), given[1].detach().requires_grad_(trained)
    made = function(hidden, weight, given[2])
    # The same as handing `grads` to torch.autograd.backward, which imports sympy for it.
    sum((one * grad.to(one.dtype)).sum() for one, grad in zip(made, grads, strict=True)).backward()
    assert hidden.grad is not None
    return [made[0].detach(), made[1].detach(), hidden.grad, weight.grad]


def tiled(given: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], tiles: Tiles = UNEVEN, **head: Any) -> list[Tensor]:
    return where_kernels_run(outcome, partial(in_tiles, tiles=tiles, **head), given, grads)


def exact(given: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], **head: Any) -> list[Tensor]:
    """The same in float64, from the numbers as they are in their formats."""
    return outcome(partial(reference, **head), (given[0].double(), given[1].double(), given[2]), grads)


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_values_and_gradients_equal_float64(head: dict[str, Any]) -> None:
    ours = tiled(inputs(), upstream(), **head)
    for got, expected in zip(ours, exact(inputs(), upstream(), **head), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("tiles", [Tiles(ROWS, VOCAB), Tiles(2, 36), Tiles(100, 9)], ids=str)
def test_the_tile_does_not_matter(tiles: Tiles) -> None:
    ours = tiled(inputs(), upstream(), tiles=tiles)
    for got, expected in zip(ours, exact(inputs(), upstream()), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6)


def test_a_tile_may_be_wider_than_a_program() -> None:
    """5,000 columns: the row's program makes two rounds, the gradient has three programs a row."""
    g = torch.Generator().manual_seed(1)
    weight = torch.randn(5000, WIDTH, generator=g)
    given = inputs()[0], weight, torch.tensor([0, 4095, 4096, 4999, 1, 2047, 2048])
    ours = tiled(given, upstream(), tiles=Tiles(ROWS, 5000))
    for got, expected in zip(ours, exact(given, upstream()), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("head", HEADS[::4], ids=str)
def test_sixteen_bits_round_gradients_only(head: dict[str, Any], dtype: torch.dtype, epsilon: float) -> None:
    """Logits are float32, so the values are; gradients are rounded twice, of the logits and of the result."""
    ours = tiled(inputs(dtype), upstream(), **head)
    expected = exact(inputs(dtype), upstream(), **head)
    assert [t.dtype for t in ours] == [torch.float32, torch.float32, dtype, dtype]
    assert max(error(*pair) for pair in zip(ours[:2], expected[:2], strict=True)) < 1e-5
    assert max(error(*pair) for pair in zip(ours[2:], expected[2:], strict=True)) < 3 * epsilon


def test_the_public_operation_takes_this_way_where_triton_is_ready() -> None:
    given, operation = inputs(torch.bfloat16), partial(linear_logprob, chunk_bytes=4 * 120, temperature=0.7)
    ours, products = where_kernels_run(recorded, operation, given, upstream())
    expected = exact(given, upstream(), temperature=0.7)
    assert max(rows * columns for rows, columns in shapes(products, "mm")) <= 120
    assert max(error(*pair) for pair in zip(ours, expected, strict=True)) < 3 * 2**-8


def test_hidden_may_be_wider_than_the_weight() -> None:
    """On a GPU the last norm gives float32 where the head is 16 bits."""
    hidden, weight, token_ids = inputs()
    narrow = weight.bfloat16()
    ours = tiled((hidden, narrow, token_ids), upstream())
    expected = exact((hidden.bfloat16(), narrow, token_ids), upstream())
    assert [t.dtype for t in ours[2:]] == [torch.float32, torch.bfloat16]
    assert max(error(*pair) for pair in zip(ours, expected, strict=True)) < 3 * 2**-8


# ---- gradients of any size ----


@pytest.mark.parametrize("scale", [2.0**18, 2.0**-40, 1e-30], ids=str)
def test_float16_survives_incoming_gradients_beyond_its_range(scale: float) -> None:
    """hidden in float32, so that the result has the range that its 16-bit logits' gradient has not."""
    hidden, weight, token_ids = inputs(size=0.1)
    given = hidden.half().float(), weight.half(), token_ids
    grads = upstream()[0] * scale, upstream()[1] * scale
    got = tiled(given, grads)[2]
    assert error(got, exact(given, grads)[2]) < 2 * 2**-11


def test_float16_result_of_a_loss_scaler() -> None:
    """65,536 and more come in; the gradients that go out fit in float16."""
    given, grads = inputs(torch.float16, size=0.1), tuple(g * 2.0**16 for g in upstream())
    got = tiled(given, grads)[2]
    expected = exact(given, grads)[2]
    assert max(g.abs().max() for g in grads) > 65504 > expected.abs().max()
    assert error(got, expected) < 3 * 2**-11


def test_float16_keeps_small_probabilities() -> None:
    """One of 6e-6, which is all that this gradient comes from; float16 without a lift would round it to 6 bits."""
    given = torch.ones(1, 1), torch.tensor([[0.0], [-12.0]]).half(), torch.tensor([0])
    assert error(tiled(given, of_logprobs(1))[2], exact(given, of_logprobs(1))[2]) < 2**-10


def test_rows_of_very_different_gradients_keep_their_own_precision() -> None:
    hidden, weight, token_ids = inputs()
    given = hidden.half().float(), weight.half(), token_ids
    sizes = 10.0 ** torch.arange(-9, 12, 3)  # [ROWS]
    grads = upstream()[0] * sizes, upstream()[1] * sizes
    ours, expected = tiled(given, grads), exact(given, grads)
    for row in range(ROWS):
        assert error(ours[2][row], expected[2][row]) < 2 * 2**-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_incoming_gradient_is_honoured_exactly(dtype: torch.dtype) -> None:
    """A gradient scaler multiplies the loss by a power of two; float32 must only shift the exponent."""
    hidden, weight, token_ids = inputs()
    given = hidden, weight.to(dtype), token_ids
    grads = upstream()
    plain, scaled = tiled(given, grads)[2], tiled(given, tuple(g * 2.0**16 for g in grads))[2]
    assert torch.equal(plain * 2.0**16, scaled)


def test_no_incoming_gradient_gives_zeros() -> None:
    zeros = torch.zeros(ROWS)
    some = upstream()[0] * (torch.arange(ROWS) != 2)
    assert not any(t.any() for t in tiled(inputs(torch.float16), (zeros, zeros))[2:])
    ours, expected = tiled(inputs(), (some, zeros)), exact(inputs(), (some, zeros))
    assert not ours[2][2].any()
    assert max(error(*pair) for pair in zip(ours[2:], expected[2:], strict=True)) < 1e-5


def test_sums_over_tiles_are_float32() -> None:
    """Thirty tiles of equal logits and weights: the gradient is 0; summed in bfloat16 it would be far from it."""
    count = 300
    given = torch.zeros(1, 1), torch.ones(count, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    grad = tiled(given, of_logprobs(1), tiles=Tiles(1, 10))[2]
    assert grad.abs().item() <= 2**-8  # 1/300 rounded, 299 times, and 299/300


# ---- values ----


def test_far_apart_logits_give_exact_values_and_finite_gradients() -> None:
    given = torch.tensor([[1000.0]]), torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([0])
    logprob, entropy, grad, _ = tiled(given, (torch.ones(1), torch.ones(1)), tiles=Tiles(1, 1))
    assert logprob.item() == -2000.0 and entropy.item() == 0.0
    assert grad.item() == pytest.approx(-2.0)


def test_a_far_saturated_softcap_stays_finite() -> None:
    given = torch.tensor([[1000.0]]), torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([1])
    logprob, _, grad, _ = tiled(given, of_logprobs(1), softcap=2.0)
    assert logprob.item() == pytest.approx(-math.log(math.exp(-2) + 1 + math.exp(2)), rel=1e-6)
    assert grad.isfinite().all()


def test_token_outside_the_vocabulary_is_nan_and_harms_no_other_row() -> None:
    hidden, weight, token_ids = inputs()
    expected = reference(hidden, weight, token_ids)[0]
    token_ids[3], token_ids[5] = VOCAB, -100
    logprob = tiled((hidden, weight, token_ids), upstream())[0]
    assert logprob.isnan().nonzero().flatten().tolist() == [3, 5]
    others = ~logprob.isnan()
    torch.testing.assert_close(logprob[others].double(), expected[others], rtol=1e-5, atol=3e-6)


def test_strided_inputs() -> None:
    hidden, weight, token_ids = inputs()
    strided = (
        torch.stack([hidden, hidden + 1], 1)[:, 0],
        weight.T.contiguous().T,
        torch.stack([token_ids, token_ids + 1], 1)[:, 0],
    )
    for got, expected in zip(tiled(strided, upstream()), exact(inputs(), upstream()), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=3e-6)


def test_no_rows_are_no_error() -> None:
    given = torch.zeros(0, WIDTH), torch.ones(VOCAB, WIDTH), torch.zeros(0, dtype=torch.int64)
    tiles = Tiles.within(2**20, 0, VOCAB)
    logprob, entropy, _, grad_weight = tiled(given, (torch.ones(0), torch.ones(0)), tiles=tiles)
    assert logprob.shape == entropy.shape == (0,)
    assert grad_weight.shape == (VOCAB, WIDTH) and not grad_weight.any()


# ---- what is computed, what is held ----


class Products(TorchDispatchMode):
    """Records the shape of every product that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.made.append((func.overloadpacket.__name__, tuple(out.shape)))
        return out


def recorded(*args: Any) -> tuple[list[Any], list[tuple[str, tuple[int, ...]]]]:
    """`outcome`, and the products that it made."""
    with Products() as products:
        return outcome(*args), products.made


def shapes(products: list[tuple[str, tuple[int, ...]]], wanted: str) -> list[tuple[int, ...]]:
    """Of the logits' products, "mm", or of the gradients', "addmm"."""
    return [shape for name, shape in products if name == wanted]


@pytest.mark.parametrize("trained", [False, True])
def test_frozen_head_gets_no_gradient_and_costs_no_product(trained: bool) -> None:
    operation = partial(in_tiles, tiles=UNEVEN)
    ours, products = where_kernels_run(recorded, operation, inputs(), of_logprobs(ROWS), trained)
    assert (ours[3] is not None) == trained
    tiles = [(rows, columns) for rows in (4, 3) for columns in (20, 17)]
    assert shapes(products, "mm") == tiles * 2  # forward, and once more in backward
    to_hidden = [shape for shape in shapes(products, "addmm") if shape[0] in (4, 3)]
    assert to_hidden == [(rows, WIDTH) for rows, _ in tiles]
    to_weight = [(columns, WIDTH) for _, columns in tiles] if trained else []
    assert [shape for shape in shapes(products, "addmm") if shape[0] not in (4, 3)] == to_weight


@pytest.mark.parametrize(
    ("bytes_", "rows", "vocabulary", "expected"),
    [
        (128 * 2**20, 131072, 128256, Tiles(4096, 8192)),
        (128 * 2**20, 131072, 262144, Tiles(4096, 8192)),
        (64 * 2**20, 131072, 151936, Tiles(2912, 5760)),
        (128 * 2**20, 300, 128256, Tiles(300, 111744)),
        (128 * 2**20, 64, 128256, Tiles(64, 128256)),
        (128 * 2**20, 131072, 1000, Tiles(33554, 1000)),
        (4, 131072, 128256, Tiles(1, 1)),
        (0, 131072, 128256, Tiles(1, 1)),
        (128 * 2**20, 0, 128256, Tiles(1, 128256)),
    ],
)
def test_tiles_fit_in_their_bytes(bytes_: int, rows: int, vocabulary: int, expected: Tiles) -> None:
    assert Tiles.within(bytes_, rows, vocabulary) == expected
    assert expected.rows * expected.columns * 4 <= max(4, bytes_)
