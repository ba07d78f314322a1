"""Advantages: numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import dead_groups, group_advantages, leave_one_out, normalized_per_reward

NAN = float("nan")


def advantages(rewards: list[float], num_generations: int, scale: str = "group") -> list[float]:
    return group_advantages(torch.tensor(rewards), num_generations, scale).tolist()


def test_divided_by_the_groups_own_std() -> None:
    # Group 1: mean 2, unbiased std 1. Group 2: mean 4, unbiased std √((9+1+16)/2) = √13.
    found = advantages([1.0, 2.0, 3.0, 1.0, 3.0, 8.0], 3)
    first, second = 1 / (1 + 1e-4), 1 / (math.sqrt(13) + 1e-4)
    assert found == pytest.approx([-first, 0.0, first, -3 * second, -1 * second, 4 * second], rel=1e-6)


def test_divided_by_the_steps_std_around_the_groups_mean() -> None:
    # All: mean 2.5, deviations −1.5 −.5 .5 1.5, unbiased variance 5/3. Group means are 1.5 and 3.5.
    step = 1 / (math.sqrt(5 / 3) + 1e-4)
    assert advantages([1.0, 2.0, 3.0, 4.0], 2, "batch") == pytest.approx([-0.5 * step, 0.5 * step] * 2, rel=1e-6)


def test_not_divided() -> None:
    assert advantages([0.0, 3.0, 10.0, 20.0], 2, "none") == [-1.5, 1.5, -5.0, 5.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscored_completions_move_no_mean_and_get_zero(scale: str) -> None:
    found = advantages([1.0, NAN, 3.0, 0.0, 0.0, 0.0], 3, scale)
    divisor = {"group": math.sqrt(2) + 1e-4, "batch": math.sqrt(1.7) + 1e-4, "none": 1.0}[scale]
    # batch: 1, 3, 0, 0, 0 have mean 0.8 and squares 0.04 + 4.84 + 3·0.64 = 6.8 over 4.
    assert found == pytest.approx([-1 / divisor, 0.0, 1 / divisor, 0.0, 0.0, 0.0], rel=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[NAN] * 4, [NAN, 5.0, NAN, NAN], [2.0] * 4])
def test_nothing_to_learn_is_zero_and_never_nan(rewards: list[float], scale: str) -> None:
    assert advantages(rewards, 2, scale) == [0.0] * 4


def test_half_precision_rewards_are_computed_in_float32() -> None:
    assert group_advantages(torch.tensor([1.0, 2.0], dtype=torch.float16), 2).dtype == torch.float32


def test_unknown_scale_and_ragged_groups_are_errors() -> None:
    with pytest.raises(ValueError, match="scale_rewards must be one of group, batch, none; got 'std'"):
        advantages([1.0, 2.0], 2, "std")
    with pytest.raises(ValueError, match="5 rewards can't be split into groups of 2"):
        advantages([1.0] * 5, 2)


def test_dead_groups() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 2.0, NAN, NAN, NAN, 3.0, 0.3, 0.1 + 0.2])
    #                       alike     apart     unscored   one scored  alike but for rounding
    assert dead_groups(rewards, 2).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("total", [0.7, 2.65, 0.1, -1.4])
def test_a_group_scored_alike_gets_exactly_nothing(scale, total):
    """The float32 mean of eight times 0.7 is not 0.7."""
    rewards = torch.tensor([total] * 8 + [0.0, 1.0] * 4)
    assert group_advantages(rewards, 8, scale)[:8].tolist() == [0.0] * 8


# ---- leave one out ----


def test_each_against_the_mean_of_the_others() -> None:
    # 1, 2, 6: others' means 4, 3.5, 1.5. 0, 0, 3: 1.5, 1.5, 0.
    found = leave_one_out(torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0]), 3)
    assert found.tolist() == pytest.approx([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0])


def test_unscored_ones_are_nobodys_others() -> None:
    found = leave_one_out(torch.tensor([1.0, NAN, 6.0, NAN, 5.0, NAN]), 3)
    assert found.tolist() == [-5.0, 0.0, 5.0, 0.0, 0.0, 0.0]


def test_normalised_over_the_steps_scored_answers() -> None:
    # −5, 5, 2, −2, and twice 0 from the fourth group, scored alike: unbiased variance 58/5. The only one scored of the
    # third group isn't counted.
    rewards = torch.tensor([1.0, 6.0, NAN, 3.0, 1.0, NAN, 9.0, NAN, NAN, 4.0, 4.0, NAN])
    scale = 1 / (math.sqrt(58 / 5) + 1e-4)
    expected = [-5 * scale, 5 * scale, 0, 2 * scale, -2 * scale, 0, 0, 0, 0, 0, 0, 0]
    assert leave_one_out(rewards, 3, normalize=True).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("total", [0.7, 2.65, 0.1, -1.4])
def test_left_out_of_a_group_scored_alike_there_is_exactly_nothing(total: float, normalize: bool) -> None:
    """Neither rounding of the others' mean, nor of the step's."""
    rewards = torch.tensor([total] * 8 + [0.1, 0.7, 0.3] * 2 + [0.2, 0.9])
    found = leave_one_out(rewards, 8, normalize)
    assert found[:8].tolist() == [0.0] * 8 and found[8:].abs().min() > 0


def test_leave_one_out_of_ragged_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 rewards can't be split into groups of 2"):
        leave_one_out(torch.zeros(5), 2)


# ---- each reward by itself ----


def test_each_reward_is_normalised_before_they_are_summed() -> None:
    # First group: 0, 2 → ∓1/√2 of std √2; second reward 30, 10 → ±1/√2. Weights 1 and 3: sums ±√2 (all but 1e-4).
    # Second group: only the first reward varies: ∓1/√2. Step: mean 0, unbiased variance (2 + 2 + ½ + ½)/3 = 5/3.
    scores = torch.tensor([[0.0, 30.0], [2.0, 10.0], [1.0, 5.0], [5.0, 5.0]])
    found = normalized_per_reward(scores, torch.tensor([1.0, 3.0]), 2)
    step = math.sqrt(5 / 3)
    expected = [math.sqrt(2) / step, -math.sqrt(2) / step, -math.sqrt(0.5) / step, math.sqrt(0.5) / step]
    assert found.tolist() == pytest.approx(expected, rel=5e-4)


def test_a_reward_that_does_not_apply_is_left_out_and_a_group_in_which_nothing_varies_gets_nothing() -> None:
    # Sums: ∓1/√2 by the first reward, the second is NaN once and varies nowhere; dead; and one without any score.
    scores = torch.tensor([[0.0, NAN], [2.0, 7.0], [1.0, 4.0], [1.0, 4.0], [NAN, NAN], [3.0, NAN]])
    found = normalized_per_reward(scores, torch.ones(2), 2)
    # Five sums (one is NaN): −1/√2, 1/√2, 0, 0, 0: unbiased variance 1/4.
    assert found.tolist() == pytest.approx([-math.sqrt(2), math.sqrt(2), 0, 0, 0, 0], rel=5e-4)
    assert found[2:].tolist() == [0.0] * 4


def test_normalised_rewards_of_ragged_groups_are_an_error() -> None:
    with pytest.raises(ValueError, match="5 rewards can't be split into groups of 2"):
        normalized_per_reward(torch.zeros(5, 2), torch.ones(2), 2)
