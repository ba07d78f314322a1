"""The loss of a micro-batch: what the options add, in which order, and what silences what. Numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import TokenOutputs
from grpo_kit.training.derive import derive
from grpo_kit.training.objective import Known, pair_objective, policy_objective
from grpo_kit.training.options import TrainOptions

MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
OLD = torch.tensor([[-1.0, -2.0], [-1.5, 0.0]])
ADVANTAGES = torch.tensor([1.0, -2.0])
WEIGHTS = torch.tensor([0.25, 0.5])  # GRPO's: 1 / (2 answers · 2 and 1 tokens)


def known(**changed) -> Known:
    made = Known(
        weights=WEIGHTS, token_weight=1 / 3, entropy_weight=1 / 3, advantages=ADVANTAGES, mask=MASK, old=OLD,
        sampled=OLD, reference=None, chosen=None, old_values=None, returns=None,
    )  # fmt: skip
    return replace(made, **changed)


def outputs(logprobs=OLD, entropy=0.5, values=None) -> TokenOutputs:
    leaf = logprobs.clone().requires_grad_()
    return TokenOutputs(leaf, torch.full_like(MASK, entropy).requires_grad_(), values)


def objective(said, fixed, algorithm="grpo", **options):
    chosen = derive(TrainOptions(algorithm=algorithm, **options), on_gpu=False)[0]
    return policy_objective(get_algorithm(algorithm), chosen, said, fixed)


def gradient(loss, leaf):
    return torch.autograd.grad(loss.value, leaf)[0]


def close(tensor, expected):
    torch.testing.assert_close(tensor, torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_each_token_counts_by_its_answers_weight():
    said = outputs()
    loss = objective(said, known())
    assert loss.value.item() == pytest.approx(-(0.25 * 1 * 2 + 0.5 * -2 * 1))
    close(gradient(loss, said.logprobs), [[-0.25, -0.25], [1.0, 0.0]])  # at ratio 1: −weight · A; no token, no gradient
    assert not loss.clipped.any()
    assert loss.parts == {}


def test_half_a_step_is_half_its_loss():
    """However a step is cut, its parts add up."""
    whole = objective(outputs(), known()).value.item()
    halves = [
        objective(
            TokenOutputs(OLD[i : i + 1], MASK[i : i + 1], None),
            known(weights=WEIGHTS[i : i + 1], advantages=ADVANTAGES[i : i + 1], mask=MASK[i : i + 1],
                  old=OLD[i : i + 1], sampled=OLD[i : i + 1]),
        ).value
        for i in range(2)
    ]  # fmt: skip
    assert sum(halves).item() == pytest.approx(whole)


def test_a_clipped_token_has_no_gradient_but_is_still_pulled_to_the_reference():
    said = outputs(OLD + torch.tensor([[0.5, 0.0], [0.0, 0.0]]))  # ratio 1.65 with a good advantage
    loss = objective(said, known())
    assert loss.clipped.tolist() == [[True, False], [False, False]]
    assert gradient(loss, said.logprobs)[0, 0] == 0
    said = outputs(OLD + torch.tensor([[0.5, 0.0], [0.0, 0.0]]))
    loss = objective(said, known(reference=OLD), beta=0.1)
    close(gradient(loss, said.logprobs)[0, 0], 0.25 * 0.1 * (1 - math.exp(-0.5)))  # k3' = 1 − e^(ref − logprob)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k3", math.exp(0.3) - 1 - 0.3), ("k2", 0.3**2 / 2)], ids=["k3", "k2"]
)
def test_the_pull_to_the_reference(estimator, expected):
    plain = objective(outputs(), known()).value.item()
    pulled = objective(outputs(), known(reference=OLD + 0.3), beta=0.1, kl_estimator=estimator)
    assert pulled.value.item() - plain == pytest.approx(0.1 * expected * (2 * 0.25 + 0.5), rel=1e-4)


def test_the_bias_corrected_pull():
    """The estimate times the ratio, through which the gradient goes too."""
    moved = OLD + 0.1
    said = outputs(moved)
    with_ratio = objective(said, known(reference=OLD, advantages=torch.zeros(2)), beta=1.0, use_bias_correction_kl=True)
    k3 = math.exp(-0.1) - 1 + 0.1
    assert with_ratio.value.item() == pytest.approx(k3 * math.exp(0.1), rel=1e-5)
    slope = math.exp(0.1) * (k3 + 1 - math.exp(-0.1))
    close(gradient(with_ratio, said.logprobs), [[0.25 * slope, 0.25 * slope], [0.5 * slope, 0.0]])


@pytest.mark.parametrize("algorithm", ["rloo", "ppo"])
def test_a_kl_in_the_reward_is_not_in_the_loss_too(algorithm):
    more = {"old_values": MASK * 0, "returns": MASK * 0} if algorithm == "ppo" else {}
    values = MASK * 0 if algorithm == "ppo" else None
    far = objective(outputs(values=values), known(reference=OLD + 3, **more), algorithm, beta=0.5)
    near = objective(outputs(values=values), known(reference=OLD, **more), algorithm, beta=0.5)
    assert far.value.item() == near.value.item()


# ---- which tokens ----


def test_only_the_least_sure_tokens_teach_and_all_are_pulled():
    chosen = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    said = outputs()
    loss = objective(said, known(chosen=chosen), top_entropy_quantile=0.3)
    close(gradient(loss, said.logprobs), [[0.0, -0.25], [0.0, 0.0]])
    said = outputs()
    pulled = objective(said, known(chosen=chosen, reference=OLD - 1), top_entropy_quantile=0.3, beta=0.1)
    pull = 0.1 * (1 - math.exp(-1))
    close(gradient(pulled, said.logprobs), [[0.25 * pull, 0.25 * (pull - 1)], [0.5 * pull, 0.0]])


def test_the_entropy_bonus():
    said = outputs(entropy=0.5)
    plain, loss = objective(outputs(), known()), objective(said, known(), entropy_coef=0.2)
    assert (loss.value - plain.value).item() == pytest.approx(-0.2 * 0.5)  # the mean over the step's tokens
    close(gradient(loss, said.entropy), [[-0.2 / 3, -0.2 / 3], [-0.2 / 3, 0.0]])


def test_the_entropy_bonus_looks_at_the_chosen_only():
    chosen = torch.tensor([[0.0, 1.0], [0.0, 1.0]])  # the last one does not exist
    said = outputs()
    loss = objective(said, known(chosen=chosen, entropy_weight=1.0), entropy_coef=0.2, top_entropy_quantile=0.3)
    close(gradient(loss, said.entropy), [[0.0, -0.2], [0.0, 0.0]])


def test_bad_answers_left_behind_are_silenced_and_still_pulled():
    sampled = OLD + torch.tensor([[2.0, 2.0], [2.0, 0.0]])  # the policy is 2 nats a token below the sampler
    said = outputs()
    loss = objective(said, known(sampled=sampled), off_policy_mask_threshold=1.0)
    close(gradient(loss, said.logprobs), [[-0.25, -0.25], [0.0, 0.0]])
    kept = outputs()
    close(gradient(objective(kept, known(sampled=sampled), off_policy_mask_threshold=2.5), kept.logprobs)[1, 0], 1.0)
    pulled = outputs()
    loss = objective(pulled, known(sampled=sampled, reference=OLD - 1), off_policy_mask_threshold=1.0, beta=0.1)
    close(gradient(loss, pulled.logprobs)[1, 0], 0.5 * 0.1 * (1 - math.exp(-1)))


# ---- the sampler's gap ----


def test_tokens_weighed_by_the_samplers_gap():
    sampled = OLD - torch.tensor([[math.log(2), math.log(8)], [math.log(0.5), 0.0]])  # ratios 2, 8 and ½
    said = outputs()
    loss = objective(said, known(sampled=sampled), importance_sampling_correction="token_truncate")
    close(gradient(loss, said.logprobs), [[-0.5, -0.75], [0.5, 0.0]])  # at most 3
    close(loss.parts["correction"] * MASK, [[2.0, 3.0], [0.5, 0.0]])
    said = outputs()
    loss = objective(said, known(sampled=sampled), importance_sampling_correction="token_mask")
    close(gradient(loss, said.logprobs), [[-0.5, 0.0], [0.5, 0.0]])
    said = outputs()
    loss = objective(
        said,
        known(sampled=sampled),
        importance_sampling_correction="sequence_truncate",
        importance_sampling_clip_max=10.0,
    )
    close(gradient(loss, said.logprobs), [[-2.5, -2.5], [0.5, 0.0]])  # 2 · 8, at most 10, for both
    close(loss.parts["correction"], [[10.0, 10.0], [0.5, 0.5]])


def test_it_does_not_weigh_the_pull_to_the_reference():
    sampled, reference = OLD - math.log(2), OLD - 1
    said = outputs()
    loss = objective(
        said, known(sampled=sampled, reference=reference, advantages=torch.zeros(2)),
        importance_sampling_correction="token_truncate", beta=0.1,
    )  # fmt: skip
    close(gradient(loss, said.logprobs)[0, 0], 0.25 * 0.1 * (1 - math.exp(-1)))


def test_vespo_weighs_by_it_itself():
    """Once, inside of φ: with a gap of ln 2 a token, W = 4 for the first answer."""
    said = outputs()
    loss = objective(
        said, known(sampled=OLD - math.log(2)), "vespo", importance_sampling_correction="token_truncate",
        vespo_k_pos=1.0, vespo_lambda_pos=0.5,
    )  # fmt: skip
    # The second token of the second answer does not exist: its correction is 1.
    phi = 4**1.0 * math.exp(0.5 * (1 - 4))
    close(gradient(loss, said.logprobs)[0], [-0.25 * phi, -0.25 * phi])


# ---- the critic ----


def test_the_critics_loss_counts_each_token_once():
    values = torch.tensor([[1.0, 2.0], [0.5, 9.0]], requires_grad=True)
    returns = torch.tensor([[2.0, 2.0], [0.0, 0.0]])
    fixed = known(old_values=values.detach(), returns=returns)
    loss = objective(outputs(values=values), fixed, "ppo", vf_coef=0.3, beta=0.0)
    plain = objective(outputs(values=values), fixed, "ppo", vf_coef=0.0, beta=0.0)
    assert (loss.value - plain.value).item() == pytest.approx(0.3 * (0.5 + 0 + 0.125) / 3)
    close(gradient(loss, values), [[-0.1, 0.0], [0.05, 0.0]])
    close(loss.parts["value_loss"] * MASK, [[0.5, 0.0], [0.125, 0.0]])


def test_the_critic_may_not_jump():
    values = torch.tensor([[1.5, 0.0], [0.0, 0.0]], requires_grad=True)
    fixed = known(old_values=torch.zeros(2, 2), returns=torch.full((2, 2), 2.0))
    loss = objective(outputs(values=values), fixed, "ppo", cliprange_value=0.2, vf_coef=1.0, beta=0.0)
    assert loss.parts["value_loss"][0, 0].item() == pytest.approx(0.5 * (0.2 - 2) ** 2)
    assert gradient(loss, values)[0, 0] == 0


# ---- pairs ----


def of_pairs(logprobs, pairs_of_step, algorithm="online_dpo", **options):
    chosen = derive(TrainOptions(algorithm=algorithm, **options), on_gpu=False)[0]
    said = outputs(logprobs)
    loss = pair_objective(get_algorithm(algorithm), chosen, said, known(reference=OLD), pairs_of_step)
    return loss, said


def test_pairs_by_hand():
    """Better: 0.3 + 0.1 above the reference, worse: 0.2 below."""
    moved = OLD + torch.tensor([[0.3, 0.1], [-0.2, 5.0]])
    loss, said = of_pairs(moved, 4, beta=0.5)
    margin = 0.5 * 0.6
    assert loss.value.item() == pytest.approx(math.log(1 + math.exp(-margin)) / 4, rel=1e-5)
    slope = 0.5 / (1 + math.exp(margin)) / 4
    close(gradient(loss, said.logprobs), [[-slope, -slope], [slope, 0.0]])
    assert loss.parts["pair_accuracy"].tolist() == [1.0]
    assert not loss.clipped.any()
    ipo, _ = of_pairs(moved, 4, "online_ipo", beta=0.5)
    assert ipo.value.item() == pytest.approx((0.6 - 1) ** 2 / 4, rel=1e-5)


def test_a_pair_that_the_model_sees_the_other_way():
    loss, _ = of_pairs(OLD + torch.tensor([[-0.3, 0.0], [0.2, 0.0]]), 1)
    assert loss.parts["pair_accuracy"].tolist() == [0.0]
