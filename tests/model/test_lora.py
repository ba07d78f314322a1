"""The adapter: which layers, fresh and seeded, and peft's own output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_kit.model.lora import add_lora, lora_parameters, reset_lora


def adapted(folder: Path, seed: int = 0) -> PeftModel:
    return add_lora(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), rank=4, alpha=8, seed=seed)


@pytest.mark.parametrize("tie", [True, False])
def test_every_linear_layer_but_the_head(tie: bool, tiny_checkpoint: Callable[..., Path]) -> None:
    module = adapted(tiny_checkpoint(tie=tie))
    names = lora_parameters(module)
    assert len(names) == 2 * 2 * 7  # A and B, two layers, q k v o gate up down
    assert not any("lm_head" in name or "embed" in name for name in names)
    assert all(weight.dtype == torch.float32 and weight.requires_grad for weight in names.values())
    assert {name for name, weight in module.named_parameters() if weight.requires_grad} == set(names)


def test_a_fresh_adapter_changes_no_logit(tiny_checkpoint: Callable[..., Path]) -> None:
    ids = torch.arange(12)[None]
    plain = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), dtype=torch.float32)
    assert torch.equal(adapted(tiny_checkpoint())(ids).logits, plain(ids).logits)


def test_the_start_depends_on_the_seed_alone_and_touches_no_global_state(tiny_checkpoint: Callable[..., Path]) -> None:
    before = torch.get_rng_state()
    first = {name: weight.detach().clone() for name, weight in lora_parameters(adapted(tiny_checkpoint())).items()}
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again = lora_parameters(adapted(tiny_checkpoint()))
    other = lora_parameters(adapted(tiny_checkpoint(), seed=1))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, other[name]) == (".lora_B." in name)


def test_reset_starts_as_a_new_linear_layer_does(tiny_checkpoint: Callable[..., Path]) -> None:
    module = adapted(tiny_checkpoint())
    first = {name: weight.detach().clone() for name, weight in lora_parameters(module).items()}
    with torch.no_grad():
        for weight in lora_parameters(module).values():
            weight.add_(1.0)
    reset_lora(module, seed=0)
    for name, weight in lora_parameters(module).items():
        assert torch.equal(weight, first[name])
        if ".lora_A." in name:
            bound = weight.shape[1] ** -0.5
            assert weight.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
