"""A pass through a model, given up before any of its layers in either direction, whichever way it is run."""

from __future__ import annotations

import pytest
import torch

import grpo_kit as gk
from grpo_kit.kernels import pack
from grpo_kit.training.give_up import PassGivenUp, can_be_given_up

PACKED = pack([([1, 2], [3, 4, 5])])


def gradients(model):
    return torch.autograd.grad(model.trunk.hidden(PACKED).sum(), list(model.trainable().values()))


@pytest.fixture(params=["llama", "gemma2"])
def model(request, tiny_checkpoint):
    """One that runs through our own layers, and one that does not."""
    loaded = gk.load_model(str(tiny_checkpoint(request.param)), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    assert loaded.trunk.fused is (request.param == "llama")
    yield loaded
    loaded.unload()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_before_each_of_two_layers_in_both_directions(model, count):
    checks = []

    def unwanted():
        checks.append(1)
        return len(checks) == count

    with pytest.raises(PassGivenUp), can_be_given_up(model, unwanted):
        gradients(model)
    assert len(checks) == count


def test_afterwards_no_one_asks_and_the_pass_is_as_it_was(model):
    plain = gradients(model)
    with can_be_given_up(model, lambda: False):
        assert all(a.equal(b) for a, b in zip(gradients(model), plain, strict=True))
    with pytest.raises(PassGivenUp), can_be_given_up(model, lambda: True):
        gradients(model)
    assert all(a.equal(b) for a, b in zip(gradients(model), plain, strict=True))
