"""From scores to advantages, by hand: one test an estimator, with what the options change."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_kit.algorithms import get_algorithm
from grpo_kit.rewards import ScoreTable
from grpo_kit.rewards.score import Score
from grpo_kit.training.credit import Estimates, give_credit
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions

NAN = math.nan
SCORES = [[1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [None, None]]  # two groups of two, two rewards
MASK = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])


def table_of(scores=SCORES, weights=(1.0, 2.0)):
    rows = [[Score(value, "ok" if value is not None else "not applicable") for value in row] for row in scores]
    return ScoreTable([f"reward{i}" for i in range(len(weights))], list(weights), rows)


def credit(algorithm, table=None, estimates=None, totals=None, **options):
    table = table or table_of()
    chosen = derive(TrainOptions(algorithm=algorithm, num_generations=2, **options), on_gpu=False)[0]
    sums = torch.tensor([NAN if t is None else t for t in table.totals]) if totals is None else totals
    return give_credit(get_algorithm(algorithm), chosen, sums, table, estimates)


def estimates_of(logprobs=0.0, reference=None, values=None, mask=MASK, tokens=None):
    """tokens: those there are, if not all of them are trained."""
    logprobs = torch.zeros_like(mask) + logprobs
    reference = None if reference is None else torch.zeros_like(mask) + reference
    return Estimates(mask, mask if tokens is None else tokens, logprobs, torch.zeros_like(mask), reference, values)


# ---- groups ----


def test_groups_against_their_mean():
    """Totals 1, 2 | 3, none: the second group has nothing to compare."""
    made = credit("grpo")
    step = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert made.advantages.tolist() == pytest.approx([-step, step, 0, 0])
    assert (made.returns, made.pairs, made.metrics) == (None, None, {})
    assert made.of_answers() == made.advantages.tolist()


def test_what_a_group_is_divided_by():
    assert credit("dr_grpo").advantages.tolist() == pytest.approx([-0.5, 0.5, 0, 0])
    std = math.sqrt(((1 - 2) ** 2 + 0 + (3 - 2) ** 2) / 2)
    expected = 0.5 / (std + 1e-4)
    assert credit("grpo", scale_rewards="batch").advantages.tolist() == pytest.approx([-expected, expected, 0, 0])


def test_rewards_normalised_each_by_itself():
    """Reward 0 prefers the first, reward 1 the second: with weights 1 and 2 the second wins by the difference."""
    scores = [[1.0, 0.0], [0.0, 1.0], [5.0, 7.0], [5.0, 7.0]]
    made = credit("grpo", table_of(scores), multi_objective_aggregation="normalize_then_sum")
    one = 0.5 / (math.sqrt(0.5) + 1e-4)
    sums = [one - 2 * one, -one + 2 * one, 0, 0]
    std = math.sqrt(2 * one**2 / 3)
    assert made.advantages.tolist() == pytest.approx([total / (std + 1e-4) for total in sums])


def test_a_reward_that_did_not_apply_counts_for_nothing_there():
    scores = [[1.0, None], [0.0, None], [None, None], [2.0, 3.0]]
    made = credit("grpo", table_of(scores), multi_objective_aggregation="normalize_then_sum")
    assert made.advantages[0] > 0 > made.advantages[1]
    assert made.advantages[2:].tolist() == [0, 0]


# ---- leave one out ----


def test_against_the_others():
    made = credit("rloo", beta=0.0)
    assert made.advantages.tolist() == pytest.approx([-1, 1, 0, 0])
    assert made.metrics == {}


def test_the_kl_of_the_whole_answer_is_taken_off_first():
    """k1 = logprob − reference = 0.5 a token: 3, 2, 1 and 3 tokens."""
    made = credit("rloo", beta=0.1, estimates=estimates_of(-1.0, reference=-1.5))
    penalties = [0.15, 0.1, 0.05, 0.15]
    gap = (1 - penalties[0]) - (2 - penalties[1])
    assert made.advantages.tolist() == pytest.approx([gap, -gap, 0, 0])
    assert made.metrics["kl_penalty"] == pytest.approx(sum(penalties) / 4)


def test_the_kl_of_an_answer_that_is_left_out_counts_too():
    """It stays the baseline of the others, and so does what was taken off its reward."""
    left_out = MASK * torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    made = credit("rloo", beta=0.1, estimates=estimates_of(-1.0, reference=-1.5, mask=left_out, tokens=MASK))
    whole = credit("rloo", beta=0.1, estimates=estimates_of(-1.0, reference=-1.5))
    assert made.advantages.tolist() == whole.advantages.tolist()
    assert made.advantages[1].item() == pytest.approx((2 - 0.1) - (1 - 0.15))
    assert made.metrics == whole.metrics


def test_another_estimator_of_the_kl():
    made = credit("rloo", beta=0.1, kl_estimator="k2", estimates=estimates_of(-1.0, reference=-1.5))
    assert made.metrics["kl_penalty"] == pytest.approx(0.1 * 0.125 * (3 + 2 + 1 + 3) / 4)


def test_brought_to_mean_0_and_std_1():
    table = table_of([[1.0], [4.0], [0.0], [2.0]], weights=(1.0,))
    made = credit("rloo", table, beta=0.0, normalize_advantages=True)
    std = math.sqrt((9 + 9 + 4 + 4) / 3)
    assert made.advantages.tolist() == pytest.approx([x / (std + 1e-4) for x in (-3, 3, -2, 2)])


# ---- pairs ----


def test_pairs_and_ties():
    table = table_of([[1.0], [4.0], [2.0], [2.0]], weights=(1.0,))
    made = credit("online_dpo", table)
    assert made.pairs == [(1, 0)]
    assert made.advantages.tolist() == [-1, 1, 0, 0]
    assert made.metrics == {"pairs": 1.0, "tied_pairs": 1.0}
    assert made.returns is None


def test_an_answer_without_score_is_in_no_pair():
    made = credit("online_ipo")
    assert made.pairs == [(1, 0)]
    assert made.metrics == {"pairs": 1.0, "tied_pairs": 0.0}


# ---- a critic ----


def test_with_a_critic_by_hand():
    """gamma 0.9, lambda 0.5, beta 0.1, KL 0.5 at each token; values 1, 2, 3."""
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    values = torch.tensor([[1.0, 2, 3], [1, 2, 3]])
    table = table_of([[4.0], [1.0]], weights=(1.0,))
    estimates = estimates_of(-1.0, reference=-1.5, values=values, mask=mask)
    made = credit("ppo", table, estimates, gamma=0.9, lam=0.5, beta=0.1)

    def backwards(rewards, values):
        advantages, later, following = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            later = reward + 0.9 * following - value + 0.9 * 0.5 * later
            following = value
            advantages.insert(0, later)
        return advantages

    first = backwards([-0.05, -0.05, 4 - 0.05], [1.0, 2.0, 3.0])
    second = backwards([-0.05, 1 - 0.05], [1.0, 2.0])
    raw = torch.tensor(first + second)
    white = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    expected = torch.tensor([white[:3].tolist(), [*white[3:].tolist(), 0.0]])
    torch.testing.assert_close(made.advantages, expected)
    returns = torch.tensor([first, [*second, 0.0]]) + torch.tensor([[1.0, 2, 3], [1, 2, 0]])
    torch.testing.assert_close(made.returns, returns)
    of_tokens = torch.cat([returns[0], returns[1, :2]])
    assert made.metrics["explained_variance"] == pytest.approx(float(1 - raw.var() / of_tokens.var()), rel=1e-5)
    assert made.metrics["kl_penalty"] == pytest.approx((0.15 + 0.1) / 2)
    assert made.of_answers() == pytest.approx([float(white[:3].mean()), float(white[3:].mean())])


def test_a_perfect_critic_explains_everything_and_a_blind_one_nothing():
    mask = torch.ones(2, 2)
    table = table_of([[4.0], [1.0]], weights=(1.0,))
    perfect = torch.tensor([[4.0, 4.0], [1.0, 1.0]])
    made = credit("ppo", table, estimates_of(values=perfect, mask=mask), beta=0.0)
    assert made.metrics == {"explained_variance": 1.0}
    blind = credit("ppo", table, estimates_of(values=torch.zeros(2, 2), mask=mask), beta=0.0)
    assert blind.metrics == {"explained_variance": 0.0}


def test_returns_that_are_all_equal_have_no_variance_to_explain():
    made = credit(
        "ppo", table_of([[1.0], [1.0]], weights=(1.0,)), beta=0.0,
        estimates=estimates_of(values=torch.ones(2, 2), mask=torch.ones(2, 2)),
    )  # fmt: skip
    assert made.metrics == {"explained_variance": None}


def test_one_token_has_none_either():
    mask = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    table = table_of([[4.0], [1.0]], weights=(1.0,))
    made = credit("ppo", table, estimates_of(values=torch.zeros(2, 2), mask=mask), beta=0.0)
    assert made.metrics == {"explained_variance": None}


def test_an_answer_that_is_left_out_changes_nothing_for_the_others():
    """Neither mean nor variance of the advantages, nor what is explained."""
    values = torch.tensor([[1.0, 2, 3], [0.5, 1, 0]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    table = table_of([[4.0], [1.0]], weights=(1.0,))
    alone = credit("ppo", table, estimates_of(-1.0, reference=-1.2, values=values, mask=mask))
    more = estimates_of(
        -1.0, reference=-1.2, values=torch.cat([values, torch.full((2, 3), 9.0)]), mask=torch.cat([mask, mask * 0])
    )
    both = credit("ppo", table_of([[4.0], [1.0], [NAN], [7.0]], weights=(1.0,)), more)
    torch.testing.assert_close(both.advantages[:2], alone.advantages)
    assert not both.advantages[2:].any()
    assert both.metrics["explained_variance"] == pytest.approx(alone.metrics["explained_variance"])


def test_whitened_rewards_keep_their_mean():
    """Without a critic's opinion, and lambda 1, an advantage is the sum of the rewards that follow."""
    mask = torch.ones(2, 2)
    table = table_of([[4.0], [1.0]], weights=(1.0,))
    made = credit(
        "ppo", table, estimates_of(values=torch.zeros(2, 2), mask=mask), beta=0.0, lam=1.0, whiten_rewards=True
    )
    rewards = torch.tensor([0.0, 4.0, 0.0, 1.0])
    white = (rewards - rewards.mean()) / (rewards.var() + 1e-8).sqrt() + rewards.mean()
    expected = torch.stack([white[0] + white[1], white[1], white[2] + white[3], white[3]]).view(2, 2)
    torch.testing.assert_close(made.returns, expected)
