"""Between two layers there is a look, in both directions, and afterwards there is none."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.model.watch import watched


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4) for _ in range(3)]


def through(layers, hidden):
    for layer in layers:
        hidden = layer(hidden)
    return hidden.sum()


class Ended(Exception):
    pass


def ended_at(count, layers):
    """How many looks there were when the `count`-th ended the pass."""
    looks = []

    def check():
        looks.append(1)
        if len(looks) == count:
            raise Ended

    inputs = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(Ended), watched(layers, check):
        through(layers, inputs).backward()
    return len(looks)


@pytest.mark.parametrize("check", [1, 2, 3, 4, 5, 6])
def test_a_pass_can_be_ended_before_each_layer_forwards_and_backwards(layers, check):
    assert ended_at(check, layers) == check


def test_a_pass_that_is_not_is_unchanged_and_the_hooks_go(layers):
    plain = torch.autograd.grad(through(layers, torch.ones(2, 4)), layers[0].weight)[0]
    with watched(layers, lambda: None):
        seen = torch.autograd.grad(through(layers, torch.ones(2, 4)), layers[0].weight)[0]
    assert torch.equal(plain, seen)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    through(layers, torch.ones(2, 4))
