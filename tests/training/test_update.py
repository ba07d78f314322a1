"""The update against an independent reference: plain transformers logits, one sequence at a time, no padding.

AdamW's first moment after one step is 0.1 · gradient, which is how the gradient is read.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch

from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.update import Updater
from tests.training.helpers import SOON, adapter, drawn_sequences, same

LENGTHS = [(9, 11), (10, 10), (8, 9), (7, 10), (9, 8), (6, 10), (5, 10), (8, 6)]  # prompt, completion: 20 to 14 tokens
EIGHT_BY_ONE, FOUR_BY_TWO, ONE_BY_EIGHT = 1, 40, 10_000
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -0.9, 1.0, 0.5, -1.6, 0.1])


@pytest.fixture
def sequences() -> list[Sequence]:
    return drawn_sequences(LENGTHS, seed=3)


@pytest.fixture
def trained(model):
    """The model as after some training: B is not 0, so gradients reach A and B."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def credit(advantages) -> Credit:
    return Credit(advantages, None, None, {})


def updater(model, **options) -> Updater:
    return Updater(model, derive(TrainOptions(**{"max_grad_norm": 1e9, "epsilon": 0.2, **options}), False)[0])


def gradient_of(model, sequences, advantages, **options):
    """The gradient of an update and its metrics; the weights are put back."""
    before, made = adapter(model), updater(model, **options)
    metrics = made.update(sequences, credit(advantages), None, lambda: None)
    gradient = {name: made.optimizer.state[p]["exp_avg"] / 0.1 for name, p in made.parameters.items()}
    put_back(model, before)
    return gradient, metrics


@torch.no_grad()
def put_back(model, weights):
    for name, parameter in model.trainable().items():
        parameter.copy_(weights[name])


def plain_logprobs(model, sequence, temperature=1.0):
    """[T], from the whole logits of one sequence."""
    ids = torch.tensor([sequence.prompt_ids + sequence.completion.token_ids])
    logits = model.module(input_ids=ids).logits[0, len(sequence.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(sequence.prompt_ids) :, None])[:, 0]


def plain_loss(model, sequences, advantages, olds, beta=0.0, epsilon=0.2, temperature=1.0):
    """GRPO, by the formula."""
    loss = torch.zeros(())
    for sequence, advantage, old in zip(sequences, advantages, olds, strict=True):
        logprobs = plain_logprobs(model, sequence, temperature)
        with torch.no_grad(), model.module.disable_adapter():
            gap = plain_logprobs(model, sequence, temperature)
        gap = gap - logprobs
        ratio = (logprobs - old).exp()
        clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
        token = -torch.minimum(ratio * advantage, clipped * advantage) + beta * (gap.exp() - gap - 1)
        loss = loss + token.mean() / len(sequences)
    return loss


def plain_gradient(model, sequences, advantages, **options):
    olds = [plain_logprobs(model, sequence, options.get("temperature", 1.0)).detach() for sequence in sequences]
    plain_loss(model, sequences, advantages, olds, **options).backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.trainable().items()}
    model.module.zero_grad(set_to_none=True)
    return gradient


def assert_close(one, other, rtol=1e-5):
    """To rtol of each tensor's largest entry: small entries are differences of large ones."""
    assert one.keys() == other.keys()
    for name in one:
        scale = float(other[name].abs().max())
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=rtol * scale + 1e-12, msg=name)


@pytest.mark.parametrize("budget", [EIGHT_BY_ONE, FOUR_BY_TWO, ONE_BY_EIGHT])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.5, 0.7)])
def test_the_gradient_is_the_formulas_however_the_step_is_cut(trained, sequences, budget, beta, temperature):
    options = {"beta": beta, "temperature": temperature}
    gradient, metrics = gradient_of(trained, sequences, ADVANTAGES, tokens_per_micro_batch=budget, **options)
    expected = plain_gradient(trained, sequences, ADVANTAGES, **options)
    assert_close(gradient, expected, rtol=2e-5)
    norm = torch.stack([g.pow(2).sum() for g in expected.values()]).sum().sqrt()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["clip_ratio"] == 0


def test_budgets_give_the_same_gradient_and_metrics(trained, sequences):
    runs = [
        gradient_of(trained, sequences, ADVANTAGES, beta=0.1, tokens_per_micro_batch=budget)
        for budget in (EIGHT_BY_ONE, FOUR_BY_TWO, ONE_BY_EIGHT)
    ]
    for gradient, metrics in runs[1:]:
        assert_close(gradient, runs[0][0])
        assert metrics == pytest.approx(runs[0][1], rel=1e-5, abs=1e-7)


def test_the_order_of_the_groups_is_indifferent(trained, sequences):
    order = [4, 5, 6, 7, 0, 1, 2, 3]
    gradient, metrics = gradient_of(trained, sequences, ADVANTAGES, beta=0.1)
    other, other_metrics = gradient_of(trained, [sequences[i] for i in order], ADVANTAGES[order], beta=0.1)
    assert_close(gradient, other)
    assert metrics == pytest.approx(other_metrics, rel=1e-5)


def test_two_iterations_keep_the_logprobs_from_before_the_first(trained, sequences):
    start = adapter(trained)
    made = updater(trained, num_iterations=2, learning_rate=5e-3, epsilon=0.2, tokens_per_micro_batch=FOUR_BY_TWO)
    metrics = made.update(sequences, credit(ADVANTAGES), None, lambda: None)
    got = adapter(trained)

    put_back(trained, start)
    optimizer = torch.optim.AdamW(trained.trainable().values(), lr=5e-3, weight_decay=0.0)
    olds = [plain_logprobs(trained, sequence).detach() for sequence in sequences]
    for _ in range(2):
        plain_loss(trained, sequences, ADVANTAGES, olds).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name: got[name] - start[name] for name in got}
    expected = {name: weight - start[name] for name, weight in adapter(trained).items()}
    # Adam divides by the gradient's size, so where it is nearly 0 its rounding shows: compare as wholes.
    gap = torch.stack([(moved[n] - expected[n]).norm() for n in moved]).norm()
    assert float(gap) < 1e-3 * float(torch.stack([e.norm() for e in expected.values()]).norm())
    assert metrics["clip_ratio"] > 0  # the second pass went so far that tokens were clipped


def test_the_first_pass_has_ratio_one_and_the_second_not(trained, sequences):
    options = {"epsilon": 1e-6, "learning_rate": 1e-3}
    assert gradient_of(trained, sequences, ADVANTAGES, **options)[1]["clip_ratio"] == 0
    assert gradient_of(trained, sequences, ADVANTAGES, num_iterations=2, **options)[1]["clip_ratio"] > 0.2


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_it_has_whatever_was_estimated_before(trained, sequences, shift):
    """Estimates are made in another mode of the model and in other micro-batches; they serve the credit only."""
    before = adapter(trained)
    made = updater(trained, top_entropy_quantile=0.5, num_iterations=2, epsilon=1e-6, learning_rate=1e-9)
    estimates = made.measure(sequences, lambda: None)
    estimates = replace(estimates, logprobs=estimates.logprobs + shift)
    metrics = made.update(sequences, credit(ADVANTAGES), estimates, lambda: None)
    put_back(trained, before)
    plain = updater(trained, top_entropy_quantile=0.5, num_iterations=2, epsilon=1e-6, learning_rate=1e-9)
    expected = plain.update(sequences, credit(ADVANTAGES), plain.measure(sequences, lambda: None), lambda: None)
    assert metrics == expected
    assert metrics["clip_ratio"] < 0.01  # with a ratio of e^-1 about half would be


def test_a_sequence_that_is_not_trained_adds_nothing_but_counts(trained, sequences):
    masked = [Sequence(s.prompt_ids, s.completion, trained=i not in (2, 5)) for i, s in enumerate(sequences)]
    silenced = ADVANTAGES.clone()
    silenced[[2, 5]] = 0.0  # the mean over sequences still divides by eight
    gradient, _ = gradient_of(trained, masked, ADVANTAGES)
    assert_close(gradient, plain_gradient(trained, sequences, silenced))


def with_critic(made, sequences, advantages):
    """Estimates, and credit of [N, T] with returns, as an algorithm with a critic needs them."""
    estimates = made.measure(sequences, lambda: None)
    each = advantages[:, None] * estimates.mask
    return Credit(each, each + 1, None, {}), estimates


def leaving_out(sequences, left_out):
    return [Sequence(s.prompt_ids, s.completion, trained=i not in left_out) for i, s in enumerate(sequences)]


PULLS = [{}, {"beta": 0.5}, {"entropy_coef": 0.1}, {"algorithm": "ppo"}]  # what moves a sequence without an advantage


@pytest.mark.parametrize("options", PULLS)
def test_a_step_with_all_sequences_left_out_moves_nothing(trained, sequences, options):
    """Neither is there a pull to the reference, an entropy bonus or a critic's loss, nor does momentum go on."""
    made = updater(trained, **options)
    critic = made.value_head is not None
    made.update(
        sequences, *(with_critic(made, sequences, ADVANTAGES) if critic else (credit(ADVANTAGES), None)), lambda: None
    )
    before = {name: parameter.detach().clone() for name, parameter in made.parameters.items()}
    masked = leaving_out(sequences, range(8))
    learned_from = with_critic(made, masked, ADVANTAGES) if critic else (credit(ADVANTAGES), None)
    metrics = made.update(masked, *learned_from, lambda: None)
    assert (metrics["grad_norm"], metrics["skipped_updates"]) == (0, 0)
    assert metrics["entropy"] > 0  # the curves go on
    assert same({name: parameter.detach() for name, parameter in made.parameters.items()}, before)


@pytest.mark.parametrize("options", PULLS)
def test_what_is_left_out_is_not_computed(trained, sequences, options, monkeypatch):
    made, rows, outputs = updater(trained, num_iterations=1, **options), [], trained.token_outputs
    masked = leaving_out(sequences, (2, 5))
    learned_from = (credit(ADVANTAGES), None)
    if made.value_head is not None:
        learned_from = with_critic(made, masked, ADVANTAGES)

    def counted(packed, *args):
        if torch.is_grad_enabled():
            rows.append(len(packed.rows))
        return outputs(packed, *args)

    monkeypatch.setattr(trained, "token_outputs", counted)
    made.update(masked, *learned_from, lambda: None)
    assert sum(rows) == 6


@pytest.mark.parametrize("beta", [0.0, 1e-3])
def test_no_advantage_no_gradient(model, sequences, beta):
    before, made = adapter(model), updater(model, beta=beta)
    metrics = made.update(sequences, credit(torch.zeros(8)), None, lambda: None)
    assert metrics["grad_norm"] == 0  # fresh adapter: the pull to the reference is 0 too
    assert metrics["entropy"] > 0  # the curves go on
    assert same(adapter(model), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(trained, sequences, bad):
    before, made = adapter(trained), updater(trained)
    metrics = made.update(sequences, credit(torch.tensor([bad, *ADVANTAGES[1:].tolist()])), None, lambda: None)
    assert metrics["skipped_updates"] == 1
    assert same(adapter(trained), before)
    metrics = made.update(
        sequences, credit(ADVANTAGES), None, lambda: None
    )  # and the next one is as if it had not been
    put_back(trained, before)
    untouched = gradient_of(trained, sequences, ADVANTAGES)[1]
    assert (metrics["skipped_updates"], metrics["grad_norm"]) == (0, untouched["grad_norm"])


class Spoiled:
    """Makes one entry of a gradient in the middle NaN while `on`."""

    def __init__(self, model):
        names = list(model.trainable())
        self.on, self.name = True, next(name for name in names if "layers.1." in name and "lora_B" in name)
        assert 0 < names.index(self.name) < len(names) - 1
        self.handle = model.trainable()[self.name].register_hook(self.spoil)

    def spoil(self, gradient):
        spoiled = gradient.clone()
        spoiled[0, 0] = math.nan if self.on else spoiled[0, 0]
        return spoiled


@pytest.fixture
def spoiled(trained):
    made = Spoiled(trained)
    yield made
    made.handle.remove()


def test_the_tensor_named_is_the_one_that_is_bad(trained, sequences, spoiled):
    """Clipping by a norm of NaN would have made them all NaN."""
    made = updater(trained, max_grad_norm=0.1)
    metrics = made.update(sequences, credit(ADVANTAGES), None, lambda: None)
    assert math.isnan(metrics["grad_norm"])
    (trouble,) = made.troubles
    assert trouble.startswith("The step's 1 update(s) changed nothing: gradients are not finite.")
    assert f"First bad tensor: gradient of {spoiled.name}: 1 of " in trouble


def test_steps_that_change_nothing_are_told_once_until_one_moves(trained, sequences, spoiled):
    made = updater(trained)

    def told(bad, advantages=ADVANTAGES):
        spoiled.on = bad
        made.update(sequences, credit(advantages), None, lambda: None)
        found = len(made.troubles)
        made.troubles.clear()
        return found

    assert [told(bad) for bad in (True, True, True)] == [1, 0, 0]
    assert told(True, torch.zeros(8)) == 0
    assert told(True) == 0  # a step without signal has moved nothing either
    assert [told(bad) for bad in (False, True, True)] == [0, 1, 0]


def test_a_step_of_which_some_updates_are_left_has_changed_something(trained, sequences, spoiled):
    made, before = updater(trained, num_iterations=2), adapter(trained)
    gradients = []

    def only_the_first(gradient):
        gradients.append(gradient)
        spoiled.on = len(gradients) == 1

    handle = trained.trainable()[spoiled.name].register_hook(only_the_first)
    spoiled.handle.remove()
    spoiled.handle = trained.trainable()[spoiled.name].register_hook(spoiled.spoil)
    metrics = made.update(sequences, credit(ADVANTAGES), None, lambda: None)
    handle.remove()
    assert metrics["skipped_updates"] == 1
    assert not made.troubles
    assert not same(adapter(trained), before)


def test_a_critic_that_is_not_finite_is_named(trained, sequences):
    made = updater(trained, algorithm="ppo", num_iterations=1)
    credit_of_tokens, estimates = with_critic(made, sequences, ADVANTAGES)
    with torch.no_grad():
        made.value_head.weight[0] = math.nan
    made.update(sequences, credit_of_tokens, estimates, lambda: None)
    (trouble,) = made.troubles
    assert "First bad tensor: the head's values: " in trouble


def test_advantages_that_are_not_finite_are_no_fault_of_the_model(trained, sequences):
    made = updater(trained)
    made.update(sequences, credit(torch.full((8,), math.inf)), None, lambda: None)
    (trouble,) = made.troubles
    assert "all that the model said is finite, advantages or ratios are not" in trouble


def test_kl_is_measured_against_the_model_without_adapter(model, sequences):
    made = updater(model, beta=0.1, learning_rate=1e-2)
    assert made.update(sequences, credit(ADVANTAGES), None, lambda: None)["kl"] == pytest.approx(0, abs=1e-7)
    with torch.no_grad():
        policy = [plain_logprobs(model, s) for s in sequences]
        with model.module.disable_adapter():
            gaps = [plain_logprobs(model, s) - p for s, p in zip(sequences, policy, strict=True)]
    expected = torch.cat([gap.exp() - gap - 1 for gap in gaps]).mean()
    measured = made.update(sequences, credit(ADVANTAGES), None, lambda: None)["kl"]
    assert measured == pytest.approx(float(expected), rel=1e-4)
    assert measured > 1e-4


def test_entropy_and_the_gap_to_the_sampler(trained, sequences):
    _, metrics = gradient_of(trained, sequences, ADVANTAGES)
    with torch.no_grad():
        logprobs = torch.cat([plain_logprobs(trained, s) for s in sequences])
    assert metrics["sampler_gap"] == pytest.approx(float((logprobs + 1).abs().mean()), rel=1e-5)
    assert 0 < metrics["entropy"] < torch.tensor(259.0).log()


def test_clipping_keeps_the_reported_norm(trained, sequences):
    free = gradient_of(trained, sequences, ADVANTAGES)[1]["grad_norm"]
    gradient, metrics = gradient_of(trained, sequences, ADVANTAGES, max_grad_norm=free / 4)
    assert metrics["grad_norm"] == pytest.approx(free)
    norm = torch.stack([g.pow(2).sum() for g in gradient.values()]).sum().sqrt()
    assert float(norm) == pytest.approx(free / 4, rel=1e-4)


def test_the_pause_point_comes_before_each_micro_batch_of_the_first_pass_only(trained, sequences):
    calls = []
    made = updater(trained, num_iterations=3, tokens_per_micro_batch=FOUR_BY_TWO)
    made.update(sequences, credit(ADVANTAGES), None, lambda: calls.append(1))
    assert len(calls) == 4


def test_questions_are_answered_between_the_micro_batches_of_later_passes(trained, sequences):
    """The lock is held all the time, and given up for a moment only."""
    options = {"num_iterations": 4, "tokens_per_micro_batch": FOUR_BY_TWO}
    start = adapter(trained)
    updater(trained, **options).update(sequences, credit(ADVANTAGES), None, lambda: None)
    undisturbed = adapter(trained)
    put_back(trained, start)

    made, answered, pauses = updater(trained, **options), threading.Event(), []
    asker = threading.Thread(target=lambda: (trained.generate("why?", max_tokens=2), answered.set()), daemon=True)

    def ask_before_the_last():
        pauses.append(1)
        if len(pauses) == 4:
            asker.start()
            while not trained.lock.wanted:
                pass

    with trained.lock:
        made.update(sequences, credit(ADVANTAGES), None, ask_before_the_last)
        assert answered.wait(SOON)
    asker.join(SOON)
    assert same(adapter(trained), undisturbed)


def test_what_a_pause_point_raises_leaves_the_weights(trained, sequences):
    class Stop(Exception):
        pass

    calls = []

    def stop_at_the_third():
        calls.append(1)
        if len(calls) == 3:
            raise Stop

    before, made = adapter(trained), updater(trained, num_iterations=2, tokens_per_micro_batch=FOUR_BY_TWO)
    with pytest.raises(Stop):
        made.update(sequences, credit(ADVANTAGES), None, stop_at_the_third)
    made.forget_gradients()
    assert same(adapter(trained), before)
    assert all(parameter.grad is None for parameter in trained.trainable().values())


@pytest.mark.parametrize("when", [1, 3, 6])
def test_a_pass_given_up_in_its_middle_is_made_again_and_counts_once(trained, sequences, when):
    """Two layers are checked forwards and backwards: the sixth check of a micro-batch is in its backward pass."""
    options = {"beta": 0.1, "tokens_per_micro_batch": FOUR_BY_TWO}
    plain, metrics = gradient_of(trained, sequences, ADVANTAGES, **options)
    checks, pauses = [], []

    def unwanted(first_try):
        checks.append(first_try)
        return first_try and checks.count(True) % 7 == when

    before, made = adapter(trained), updater(trained, **options)
    disturbed = made.update(sequences, credit(ADVANTAGES), None, lambda: pauses.append(1), unwanted)
    assert len(pauses) > 4, "nothing was given up"
    assert disturbed == metrics
    assert same({name: made.optimizer.state[p]["exp_avg"] / 0.1 for name, p in made.parameters.items()}, plain)
    put_back(trained, before)


def test_a_step_without_signal_moves_nothing_and_is_still_measured(trained, sequences):
    made = updater(trained)
    made.update(sequences, credit(ADVANTAGES), None, lambda: None)  # so that the optimizer has momentum
    before = adapter(trained)
    metrics = made.update(sequences, credit(torch.zeros(8)), None, lambda: None)
    assert same(adapter(trained), before)
    assert metrics["grad_norm"] == 0
    assert all(metrics[name] is not None for name in ("kl", "entropy", "sampler_gap", "clip_ratio"))


def test_where_tokens_count_the_same_those_of_untrained_sequences_do_not_count(trained, sequences):
    """Leaving sequences out of a step whose loss is a mean over tokens is the step without them."""
    masked = [Sequence(s.prompt_ids, s.completion, trained=i not in (2, 5)) for i, s in enumerate(sequences)]
    kept = [0, 1, 3, 4, 6, 7]
    gradient, _ = gradient_of(trained, masked, ADVANTAGES, algorithm="dapo")
    assert_close(gradient, gradient_of(trained, [sequences[i] for i in kept], ADVANTAGES[kept], algorithm="dapo")[0])
