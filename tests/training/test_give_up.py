"""A pass given up in its middle leaves nothing behind, and is made again."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.training.give_up import PassGivenUp, can_be_given_up


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4) for _ in range(3)]


def through(layers, hidden):
    for layer in layers:
        hidden = layer(hidden)
    return hidden.sum()


def given_up_at(count, layers):
    """How many checks were made when the `count`-th said that the pass is unwanted."""
    checks = []

    def unwanted():
        checks.append(1)
        return len(checks) == count

    inputs = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(PassGivenUp), can_be_given_up(layers, unwanted):
        through(layers, inputs).backward()
    return len(checks)


@pytest.mark.parametrize("check", [1, 2, 3, 4, 5, 6])
def test_it_can_be_given_up_before_each_layer_forwards_and_backwards(layers, check):
    assert given_up_at(check, layers) == check


def test_a_pass_that_is_wanted_is_unchanged_and_the_hooks_go(layers):
    plain = torch.autograd.grad(through(layers, torch.ones(2, 4)), layers[0].weight)[0]
    with can_be_given_up(layers, lambda: False):
        watched = torch.autograd.grad(through(layers, torch.ones(2, 4)), layers[0].weight)[0]
    assert torch.equal(plain, watched)
    with pytest.raises(PassGivenUp), can_be_given_up(layers, lambda: True):
        through(layers, torch.ones(2, 4))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    through(layers, torch.ones(2, 4))
