"""What is measured before a step learns equals a plain look at each sequence, however the step is cut."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import ValueHead
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.passes import Measurement, Sums, Trainee, cut
from grpo_kit.training.update import Updater
from tests.training.helpers import drawn_sequences

LENGTHS = [(9, 3), (4, 7), (8, 1), (7, 10), (3, 8)]
BUDGETS = [1, 25, 40, 10_000]
TEMPERATURE = 0.7


@pytest.fixture
def sequences():
    return drawn_sequences(LENGTHS, seed=5, untrained=(1,))


@pytest.fixture
def trained(model):
    """With an adapter that makes it another model than the reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def trainee_of(model, algorithm="ppo", **options) -> Trainee:
    chosen = derive(TrainOptions(algorithm=algorithm, temperature=TEMPERATURE, **options), on_gpu=False)[0]
    head = None
    if get_algorithm(algorithm).value_head:
        head = ValueHead(model.causal_lm.config.hidden_size, torch.device("cpu"))
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, len(head.weight)))
            head.bias.fill_(0.5)
    return Trainee(model, head, get_algorithm(algorithm), chosen)


def measured(trainee, sequences):
    work = Measurement(trainee, sequences)
    for number in reversed(range(len(work.batches))):  # the order is indifferent
        work.measure(number)
    return work.estimates


@torch.no_grad()
def plain(trainee, sequence):
    """Logprobs, entropy, reference and values of one sequence, from all its logits."""
    model, start = trainee.model, len(sequence.prompt_ids)
    ids = torch.tensor([sequence.prompt_ids + sequence.completion.token_ids])
    model.module.eval()

    def log_softmax():
        return (model.module(input_ids=ids).logits[0, start - 1 : -1].double() / TEMPERATURE).log_softmax(-1)

    log_p = log_softmax()
    with model.module.disable_adapter():
        reference = log_softmax()
    states = model.causal_lm.get_decoder()(input_ids=ids).last_hidden_state[0, start - 1 : -1]
    tokens = ids[0, start:, None]
    return {
        "logprobs": log_p.gather(-1, tokens)[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "reference": reference.gather(-1, tokens)[:, 0],
        "values": trainee.value_head(states) if trainee.value_head else None,
    }


@pytest.mark.parametrize("budget", BUDGETS)
def test_estimates_are_those_of_each_sequence_by_itself(trained, sequences, budget):
    trainee = trainee_of(trained, beta=0.1, tokens_per_micro_batch=budget)
    found = measured(trainee, sequences)
    assert found.mask.tolist() == [
        [float(s.trained and t < len(s.completion.token_ids)) for t in range(10)] for s in sequences
    ]
    assert found.tokens.tolist() == [[float(t < len(s.completion.token_ids)) for t in range(10)] for s in sequences]
    for row, sequence in enumerate(sequences):
        tokens = len(sequence.completion.token_ids)
        for name, expected in plain(trainee, sequence).items():
            values = getattr(found, name)
            assert values.shape == (5, 10)
            torch.testing.assert_close(values[row, :tokens].double(), expected.double(), rtol=1e-4, atol=1e-4, msg=name)
            assert not values[row, tokens:].any()
    assert (found.logprobs - found.reference).abs().max() > 0.1


def test_nothing_is_measured_that_is_not_needed(trained, sequences):
    found = measured(trainee_of(trained, "rloo", beta=0.0), sequences)
    assert (found.reference, found.values) == (None, None)
    found = measured(trainee_of(trained, "rloo", beta=0.1), sequences)
    assert found.reference is not None
    assert found.values is None


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"algorithm": "grpo", "beta": 0.1}, False),
        ({"algorithm": "grpo", "top_entropy_quantile": 0.5}, True),
        ({"algorithm": "rloo"}, True),
        ({"algorithm": "rloo", "beta": 0.0}, False),
        ({"algorithm": "ppo", "beta": 0.0}, True),
        ({"algorithm": "online_dpo"}, False),
    ],
)
def test_who_must_look_first(model, sequences, options, needed):
    made, pauses = Updater(model, derive(TrainOptions(**options), on_gpu=False)[0]), []
    found = made.measure(sequences, lambda: pauses.append(1))
    assert (found is not None) == bool(pauses) == needed


def test_measuring_can_be_given_up_and_leaves_no_gradient(trained, sequences):
    options = derive(TrainOptions(algorithm="rloo", tokens_per_micro_batch=40), on_gpu=False)[0]
    made, tries = Updater(trained, options), []

    def unwanted(first_try):
        tries.append(first_try)
        return first_try and tries.count(True) % 3 == 2

    disturbed = made.measure(sequences, lambda: None, unwanted)
    assert False in tries
    calm = made.measure(sequences, lambda: None)
    assert torch.equal(disturbed.logprobs, calm.logprobs)
    assert torch.equal(disturbed.reference, calm.reference)
    assert not disturbed.logprobs.requires_grad
    assert all(parameter.grad is None for parameter in trained.trainable().values())


# ---- cutting ----


def test_units_stay_together_and_in_order(model, sequences):
    pairs = [[3, 0], [2, 4]]
    batches = cut(trainee_of(model, "online_dpo", tokens_per_micro_batch=1), sequences, pairs)
    assert [batch.indices for batch in batches] == [[3, 0], [2, 4]]
    (both,) = cut(trainee_of(model, "online_dpo", tokens_per_micro_batch=10_000), sequences, pairs)
    assert both.indices == [3, 0, 2, 4]


def test_the_budget_counts_all_of_a_unit(model, sequences):
    """Pairs of 29 and 20 tokens."""
    for budget, expected in ((49, 1), (48, 2)):
        trainee = trainee_of(model, "online_dpo", tokens_per_micro_batch=budget)
        assert len(cut(trainee, sequences, [[3, 0], [2, 4]])) == expected


@pytest.mark.parametrize(("budget", "halved"), [(10_000, 39), (40, 20), (25, 12)])
def test_shrinking_cuts_otherwise(model, sequences, budget, halved):
    """All together are 60 tokens: whatever holds them is one micro-batch, and no smaller one."""
    work = Measurement(trainee_of(model, tokens_per_micro_batch=budget), sequences)
    before = [batch.indices for batch in work.batches]
    work.shrink()
    assert work.trainee.budget == halved
    after = [batch.indices for batch in work.batches]
    assert after != before
    assert after == [batch.indices for batch in cut(work.trainee, sequences, [[i] for i in range(5)])]
    assert sorted(i for indices in after for i in indices) == [0, 1, 2, 3, 4]


def test_what_is_one_unit_each_is_not_divisible(model, sequences):
    for budget, divisible in ((1, False), (17, False), (25, True), (10_000, True)):
        assert Measurement(trainee_of(model, tokens_per_micro_batch=budget), sequences).divisible == divisible


# ---- sums ----


def test_means_over_all_that_was_counted():
    sums = Sums()
    sums.add("entropy", torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    sums.add("entropy", torch.tensor([[10.0]]), torch.tensor([[1.0]]))
    sums.add("more", torch.tensor([4.0]), torch.tensor([1.0]))
    sums.add("kl", torch.tensor([4.0]), torch.tensor([0.0]))
    nothing = dict.fromkeys(["kl", "sampler_gap", "sampler_gap_share", "clip_ratio", "sampler_gap_max"])
    assert sums.metrics() == {**nothing, "entropy": 4.0, "more": 4.0}


def test_the_largest_of_all_micro_batches():
    sums = Sums()
    sums.raise_to("sampler_gap_max", torch.tensor([[0.5, 2.0], [0.25, 0.0]]))
    sums.raise_to("sampler_gap_max", torch.tensor([[1.0]]))
    assert sums.metrics()["sampler_gap_max"] == 2.0
