"""Which families are known to whom, and that no linear layer of a known one is overlooked."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.model.decode_layers import why_not_fused_step
from grpo_kit.model.families import SAMPLED, TRAINED, kind_of, projections, why_not_read
from grpo_kit.model.trunk import why_not_fused
from tests.rollout.native.conftest import FUSED, WIDE, tiny

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("architecture", FUSED)
def test_every_linear_layer_is_in_one_group(architecture: str) -> None:
    for layer in tiny(architecture).model.layers:
        found = [module for group in projections(layer) for module in group]
        linear = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
        assert len(found) == len(linear) and {*map(id, found)} == {*map(id, linear)}
        for group in projections(layer):
            assert len({module.in_features for module in group}) == 1


@pytest.mark.parametrize("architecture", FUSED)
def test_more_families_are_sampled_than_trained(architecture: str) -> None:
    module = tiny(architecture, **WIDE)
    name = kind_of(module.model.layers[0])
    assert why_not_fused_step(module) is None and name in SAMPLED
    refused = None if architecture in LLAMAS else f"{name} is run as transformers has it"
    assert why_not_fused(module.model, 16) == refused and (name in TRAINED) is (refused is None)


def test_a_decoder_without_layers_is_none_of_ours() -> None:
    assert why_not_read(torch.nn.Linear(2, 2), SAMPLED) == "Linear is run as transformers has it"
