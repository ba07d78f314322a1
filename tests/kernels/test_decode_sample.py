"""`sample` against probabilities added up in float64: the twin, and the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels.decode_sample import invert, plain_sample, sample
from tests.kernels.launching import launch

KERNELS = "decode_sample_triton.sample"
VOCABULARIES = [5, 300, 4096, 9001]  # below the kernel's block, one block, several and a rest
LAST = 1 - 2**-53  # the largest number below 1


def numbers(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_of(rows: int, vocabulary: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3


def assert_drawn(drawn: tuple[Tensor, Tensor], logits: Tensor, uniform: Tensor, temperature: float) -> None:
    """Each token is the one whose share of [0, 1) holds the row's number; borders are known to a millionth."""
    tokens, logprobs = drawn
    exact = (logits.double() / temperature).log_softmax(-1)
    ends = exact.exp().cumsum(-1).gather(-1, tokens[:, None])[:, 0]
    own = exact.gather(-1, tokens[:, None])[:, 0]
    assert (uniform < ends + 1e-6).all() and (uniform >= ends - own.exp() - 1e-6).all()
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_twin_draws_by_the_number(vocabulary: int) -> None:
    logits, uniform = logits_of(500, vocabulary), numbers(500)
    assert_drawn(plain_sample(logits, uniform, torch.tensor(0.7), greedy=False), logits, uniform, 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_kernels_draw_by_the_number(vocabulary: int, dtype: torch.dtype) -> None:
    logits, uniform = logits_of(40, vocabulary).to(dtype), numbers(40)
    assert_drawn(launch(KERNELS, logits, uniform, torch.tensor(0.7), False), logits, uniform, 0.7)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_greedy_takes_the_first_of_the_likeliest(vocabulary: int) -> None:
    logits = logits_of(6, vocabulary).round()  # whole numbers: many equals
    likeliest = [row.index(max(row)) for row in logits.tolist()]
    for tokens, logprobs in (
        plain_sample(logits, numbers(6), torch.tensor(1.0), greedy=True),
        launch(KERNELS, logits, numbers(6), torch.tensor(1.0), True),
    ):
        assert tokens.tolist() == likeliest
        exact = logits.double().log_softmax(-1)[range(6), likeliest]
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
def test_the_only_possible_token_is_drawn_whatever_the_number(uniform: float) -> None:
    places = [0, 4095, 4096, 8191, 9000]
    logits = torch.full((5, 9001), -torch.inf)
    logits[range(5), places] = 2.0
    given = logits, torch.full((5,), uniform, dtype=torch.float64), torch.tensor(1.0), False
    assert plain_sample(*given)[0].tolist() == places
    tokens, logprobs = launch(KERNELS, *given)
    assert tokens.tolist() == places and logprobs.tolist() == [0.0] * 5


def test_the_borders_between_tokens_and_blocks_of_the_kernels() -> None:
    logits = torch.full((1, 9001), -torch.inf)
    logits[0, [300, 310, 5000, 9000]] = 0.0  # a quarter each
    borders = [0.0, 0.24999, 0.25, 0.5, 0.75, LAST]
    given = logits.expand(6, -1), torch.tensor(borders, dtype=torch.float64), torch.tensor(1.0), False
    expected = [300, 300, 310, 5000, 9000, 9000]
    assert plain_sample(*given)[0].tolist() == launch(KERNELS, *given)[0].tolist() == expected


def test_kernels_take_any_row_stride() -> None:
    logits, uniform = logits_of(12, 5000), numbers(12)
    wide = torch.cat([logits, torch.full((12, 72), 9.0)], 1)[:, :5000]
    assert_drawn(launch(KERNELS, wide, uniform, torch.tensor(1.0), False), logits, uniform, 1.0)


def test_logits_that_are_no_numbers_give_a_logprob_that_is_none() -> None:
    logits = logits_of(2, 5000)
    logits[1, 17] = torch.nan
    tokens, logprobs = launch(KERNELS, logits, numbers(2), torch.tensor(1.0), False)
    assert logprobs.isnan().tolist() == [False, True] and 0 <= tokens[1] < 5000


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"uniform \[B\] float64.*torch\.float32"):
        sample(torch.zeros(2, 5), torch.zeros(2), torch.tensor(1.0), greedy=False)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        sample(torch.zeros(2, 5), torch.zeros(3, dtype=torch.float64), torch.tensor(1.0), greedy=False)


@pytest.mark.parametrize("place", [0, 255, 256, 600, 999])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
def test_the_only_weight_is_drawn_whatever_the_number(place: int, uniform: float) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, place] = 0.3
    assert invert(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [place]


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 300), (0.24999, 300), (0.25, 310), (0.5, 700), (LAST, 701)])
def test_the_borders_between_weights_and_blocks(uniform: float, token: int) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, [300, 310, 700, 701]] = 0.25
    assert invert(weights, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_what_has_no_weight_is_never_drawn() -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(4000, 1003, generator=generator) * (torch.rand(4000, 1003, generator=generator) < 0.01)
    drawn = invert(weights, numbers(4000))
    assert (weights.gather(-1, drawn[:, None]) > 0).all()
