"""LoRA on every linear layer of the decoder, by peft, in float32, seeded without touching the global random state."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def add_lora(module: PreTrainedModel, rank: int, alpha: int, seed: int) -> PeftModel:
    """Freeze `module` and put a fresh adapter on all its linear layers but the head. Its output is unchanged: B
    starts at 0."""
    module.requires_grad_(False)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0, bias="none"
    )
    with torch.random.fork_rng():
        adapted = get_peft_model(module, config, autocast_adapter_dtype=True)
    reset_lora(adapted, seed)
    return adapted


def lora_parameters(module: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters by name, in the module's order."""
    return {name: parameter for name, parameter in module.named_parameters() if ".lora_" in name}


def save_lora(module: PeftModel, folder: Path) -> None:
    """Write the adapter as peft does. The hub is not asked if the vocabulary grew: embeddings are never trained."""
    module.save_pretrained(str(folder), save_embedding_layers=False)


@torch.no_grad()
def reset_lora(module: PeftModel, seed: int) -> None:
    """Make the adapter fresh: B = 0, so that the model answers like the untrained one, and A uniform as in a new
    nn.Linear.

    The numbers are drawn on the CPU by a generator of their own: the same on every device, and no global state is
    touched.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in lora_parameters(module).items():
        if ".lora_B." in name:
            parameter.zero_()
        else:
            bound = parameter.shape[1] ** -0.5  # kaiming_uniform(a=√5): 1/√fan_in
            parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)
