"""PPO against an independent reference: loops over answers and tokens in plain Python, in float64, written from the
formulas of the papers (and of TRL's PPO, which TRL 1.16 no longer ships).

What TRL's did is not copied where it was a defect: padding was inferred from token ids (an answer's own end token could
be taken for padding), the critic's mask was one position too long, and every mean was the micro-batch's, so that
cutting a batch differently changed the loss. All means are the optimizer step's here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import gae, get_algorithm, kl_estimate, token_rewards, value_loss, whiten
from grpo_kit.algorithms.ppo import ppo_loss
from grpo_kit.model import Model
from grpo_kit.rewards import ScoreTable
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, Estimates, give_credit
from grpo_kit.training.update import Updater
from tests.algorithms.parity import (
    COMPLETION_LENGTHS,
    EPSILON,
    EPSILON_HIGH,
    MAX_LENGTH,
    TEMPERATURE,
    TOKEN_BUDGETS,
    N,
    assert_close,
    gradients,
    our_pass,
    our_updater,
    sequences,
)

Rows = list[list[float]]  # of each answer, its own tokens only
CLIP_VALUE = 0.15
SCORES = [1.0, 0.0, 2.5, -1.0, 0.5, 3.0, 0.0, 1.5]


# ---- the reference ----


def plain_kl(policy: Rows, reference: Rows, estimator: str) -> Rows:
    def one(p: float, q: float) -> float:
        return p - q if estimator == "k1" else math.exp(q - p) - 1 - (q - p)

    return [[one(p, q) for p, q in zip(*rows, strict=True)] for rows in zip(policy, reference, strict=True)]


def plain_rewards(scores: list[float], kl: Rows, beta: float) -> Rows:
    made = [[-beta * k for k in row] for row in kl]
    for row, score in zip(made, scores, strict=True):
        if row:
            row[-1] += score
    return made


def plain_whiten(rows: Rows, shift_mean: bool = True) -> Rows:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    back = 0.0 if shift_mean else mean
    return [[(x - mean) / math.sqrt(variance + 1e-8) + back for x in row] for row in rows]


def plain_gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """By the sum Â_t = Σ_l (γλ)^l · δ_{t+l}, not by the recursion."""
    advantages = []
    for reward, value in zip(rewards, values, strict=True):
        following = [*value, 0.0][1:]
        deltas = [r + gamma * f - v for r, f, v in zip(reward, following, value, strict=True)]
        advantages.append(
            [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
        )
    returns = [[a + v for a, v in zip(*rows, strict=True)] for rows in zip(advantages, values, strict=True)]
    return advantages, returns


def plain_policy_loss(now: Any, old: float, advantage: float) -> Any:
    """Of one token; `now` may be a number or a scalar that remembers its gradient."""
    ratio = torch.exp(now - old) if isinstance(now, Tensor) else math.exp(now - old)
    near = min(max(ratio, 1 - EPSILON), 1 + EPSILON_HIGH)
    return max(-advantage * ratio, -advantage * near)


def plain_value_loss(now: Any, old: float, target: float) -> Any:
    near = min(max(now, old - CLIP_VALUE), old + CLIP_VALUE)
    return 0.5 * max((now - target) ** 2, (near - target) ** 2)


# ---- pure functions ----


def ragged(seed: int, lengths: list[int] = COMPLETION_LENGTHS) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=torch.float64).tolist() for length in lengths]


def padded(rows: Rows) -> Tensor:
    """What stands behind an answer's end must not matter."""
    made = torch.full((len(rows), MAX_LENGTH), 7.0, dtype=torch.float64)
    for row, values in zip(made, rows, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return made


def mask_of(lengths: list[int] = COMPLETION_LENGTHS) -> Tensor:
    return (torch.arange(MAX_LENGTH) < torch.tensor(lengths)[:, None]).double()


def assert_rows(found: Tensor, expected: Rows) -> None:
    for row, values in zip(found, expected, strict=True):
        assert row[: len(values)].tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
        assert (row[len(values) :] == 0).all()


LENGTHS = [[9, 2, 1, 9, 6, 4, 9, 7], [3, 0, 1, 5, 9, 2, 0, 4]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_token_rewards(estimator: str, lengths: list[int]) -> None:
    policy, reference = ragged(1, lengths), ragged(2, lengths)
    kl = kl_estimate(padded(policy), padded(reference), estimator)
    found = token_rewards(torch.tensor(SCORES).double(), kl, mask_of(lengths), 0.3)
    assert_rows(found, plain_rewards(SCORES, plain_kl(policy, reference, estimator), 0.3))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.7, 0.0)])
def test_gae(gamma: float, lam: float, lengths: list[int]) -> None:
    rewards, values = ragged(3, lengths), ragged(4, lengths)
    found = gae(padded(rewards), padded(values), mask_of(lengths), gamma, lam)
    for ours, expected in zip(found, plain_gae(rewards, values, gamma, lam), strict=True):
        assert_rows(ours, expected)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten(shift_mean: bool) -> None:
    rows = [[3 * x + 5 for x in row] for row in ragged(5)]
    assert_rows(whiten(padded(rows), mask_of(), shift_mean), plain_whiten(rows, shift_mean))


def test_losses_of_tokens() -> None:
    now, old, advantages, values, old_values, returns = (ragged(seed) for seed in range(6, 12))
    loss, clipped = ppo_loss(
        *(padded(rows) for rows in (now, old, advantages)), mask_of(), epsilon=EPSILON, epsilon_high=EPSILON_HIGH
    )
    critic = value_loss(padded(values), padded(old_values), padded(returns), CLIP_VALUE)
    for i, length in enumerate(COMPLETION_LENGTHS):
        expected = [plain_policy_loss(now[i][t], old[i][t], advantages[i][t]) for t in range(length)]
        assert loss[i, :length].tolist() == pytest.approx(expected, rel=1e-9)
        expected = [plain_value_loss(values[i][t], old_values[i][t], returns[i][t]) for t in range(length)]
        assert critic[i, :length].tolist() == pytest.approx(expected, rel=1e-9)
    assert 0.1 < clipped[mask_of().bool()].double().mean() < 0.9


# ---- the whole update ----


def plain_outputs(model: Model, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Logprobs [T] and the hidden states [T, H] from before each token: one answer, no padding, whole logits."""
    ids = torch.tensor([sequence.prompt_ids + sequence.completion.token_ids])
    start = len(sequence.prompt_ids)
    said = model.module(input_ids=ids, output_hidden_states=True)
    logprobs = (said.logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
    return logprobs, said.hidden_states[-1][0, start - 1 : -1]


@pytest.fixture
def critic(ours: Model) -> Iterator[Any]:
    """`critic(updater)`: give it a value head that has learned something, and return its weight and bias."""

    def learned(updater: Updater) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        assert updater.value_head is not None
        weight, bias = updater.value_head.weight, updater.value_head.bias
        with torch.no_grad():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(12)))
            bias.fill_(0.2)
        return weight, bias

    yield learned
    ours.module.zero_grad(set_to_none=True)


def rows_of(values: Tensor, mask: Tensor) -> Rows:
    return [row[kept.bool()].double().tolist() for row, kept in zip(values, mask, strict=True)]


def shifted(estimates: Estimates) -> Estimates:
    """As from before a first update: ratios and values leave their bounds."""
    generator = torch.Generator().manual_seed(13)
    blank = estimates.mask * torch.randn(estimates.mask.shape, generator=generator)
    other = estimates.mask * torch.randn(estimates.mask.shape, generator=generator)
    return replace(estimates, logprobs=estimates.logprobs + 0.4 * blank, values=estimates.values + 0.3 * other)


def credited(updater: Updater, estimates: Estimates) -> Credit:
    return give_credit(
        updater.trainee.algorithm, updater.options, torch.tensor(SCORES), ScoreTable([], [], []), estimates
    )


@pytest.mark.parametrize("masked", [False, True], ids=["all trained", "truncated masked"])
@pytest.mark.parametrize(
    ("beta", "estimator", "whiten_rewards"), [(0.3, "k1", False), (0.3, "k3", True), (0.0, None, False)]
)
def test_update(
    beta: float, estimator: str | None, whiten_rewards: bool, masked: bool, ours: Model, critic: Any
) -> None:
    """What is measured, what credit comes of it, and the loss with the gradients of adapter and critic, by autograd
    over the loss as written above, however the step is cut."""
    batch = sequences(masked)
    options = {
        "beta": beta,
        "kl_estimator": estimator,
        "whiten_rewards": whiten_rewards,
        "gamma": 0.97,
        "lam": 0.9,
        "vf_coef": 0.4,
        "cliprange_value": CLIP_VALUE,
    }
    for budget in TOKEN_BUDGETS:
        updater = our_updater(ours, "ppo", budget, **options)
        weight, bias = critic(updater)
        measured = updater.measure(batch, lambda: None)
        assert measured is not None
        estimates = shifted(measured)
        credit = credited(updater, estimates)
        total, sums = our_pass(updater, batch, credit, estimates)
        found = gradients(updater.parameters)

        loss, critics_loss, expected = plain_pass(ours, updater, batch, measured, estimates, credit, weight, bias)
        assert total == pytest.approx(loss, rel=1e-5)
        assert_close(found, expected)
        assert found.keys() == expected.keys() and {"value_head.weight", "value_head.bias"} < found.keys()
        assert sums.metrics()["value_loss"] == pytest.approx(critics_loss, rel=1e-5)
        assert sums.metrics()["clip_ratio"] > 0.1


def plain_pass(
    model: Model,
    updater: Updater,
    batch: list[Sequence],
    measured: Estimates,
    estimates: Estimates,
    credit: Credit,
    weight: torch.nn.Parameter,
    bias: torch.nn.Parameter,
) -> tuple[float, float, dict[str, Tensor]]:
    """The loss, the critic's mean part of it, and the gradients. Checks measurement and credit on its way."""
    options, mask = updater.options, estimates.mask
    assert options.gamma is not None and options.lam is not None and options.beta is not None
    taught = [i for i in range(N) if batch[i].trained]
    assert [i for i in range(N) if mask[i].any()] == taught
    model.module.train(False)
    said = {i: plain_outputs(model, batch[i]) for i in taught}
    values = {i: hidden @ weight + bias for i, (_, hidden) in said.items()}
    for i in taught:
        length = len(batch[i].completion.token_ids)
        torch.testing.assert_close(measured.logprobs[i, :length], said[i][0].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(measured.values[i, :length], values[i].detach(), rtol=1e-5, atol=1e-5)

    old, old_values = rows_of(estimates.logprobs, mask), rows_of(estimates.values, mask)
    kl = [[0.0] * len(row) for row in old]
    if options.beta:
        with torch.no_grad(), model.module.disable_adapter():
            for i in taught:
                plain = plain_outputs(model, batch[i])[0]
                torch.testing.assert_close(estimates.reference[i, : len(plain)], plain, rtol=1e-5, atol=1e-5)
        kl = plain_kl(old, rows_of(estimates.reference, mask), str(options.kl_estimator))
    rewards = plain_rewards(SCORES, kl, options.beta)
    if options.whiten_rewards:
        rewards = plain_whiten(rewards, shift_mean=False)
    raw, returns = plain_gae(rewards, old_values, options.gamma, options.lam)
    advantages = plain_whiten(raw)
    for ours, expected in ((credit.advantages, advantages), (credit.returns, returns)):
        for found, row in zip(rows_of(ours, mask), expected, strict=True):
            assert found == pytest.approx(row, rel=1e-5, abs=1e-5)

    tokens = sum(len(row) for row in old)
    policy, critics = torch.zeros(()), torch.zeros(())
    for i in taught:
        for t in range(len(old[i])):
            policy = policy + plain_policy_loss(said[i][0][t], old[i][t], advantages[i][t]) / tokens
            critics = critics + plain_value_loss(values[i][t], old_values[i][t], returns[i][t]) / tokens
    loss = policy + options.vf_coef * critics
    loss.backward()
    return loss.item(), critics.item(), gradients(updater.parameters)


def test_two_optimizer_steps_move_adapter_and_critic(ours: Model) -> None:
    """`Updater.update` from measurement on: the critic starts at 0 and learns along, and the adapter with it."""
    start = {key: parameter.detach().clone() for key, parameter in ours.trainable().items()}
    try:
        updater = our_updater(ours, "ppo", 45, num_iterations=2, learning_rate=1e-2)
        batch = sequences()
        estimates = updater.measure(batch, lambda: None)
        assert estimates is not None and not estimates.values.any()
        metrics = updater.update(batch, credited(updater, estimates), estimates, lambda: None)
        after = updater.measure(batch, lambda: None)
        assert after is not None and after.values.any()
        returns = credited(updater, estimates).returns
        gap = ((after.values - returns)[after.mask.bool()] ** 2).mean()
        assert gap < (returns[after.mask.bool()] ** 2).mean(), "the critic is nearer to the returns than 0 was"
        assert metrics["value_loss"] == pytest.approx(0.5 * float((returns[after.mask.bool()] ** 2).mean()), rel=1e-5)
    finally:
        with torch.no_grad():
            for key, parameter in ours.trainable().items():
                parameter.copy_(start[key])


def test_the_critic_is_ppos_alone(ours: Model) -> None:
    assert get_algorithm("ppo").value_head
    assert our_updater(ours, "grpo", 45).value_head is None
