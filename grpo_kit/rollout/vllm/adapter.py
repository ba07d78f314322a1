"""The trainer's LoRA written into vLLM's, in place: no file, no new request, nothing allocated.

vLLM stacks the adapters that it may serve: for each linear layer, and each part of a joined one, A [slots, 1, R, K] and
B [slots, 1, N, R] in the model's dtype. There is one slot here. R is the trainer's rank or the next that vLLM has a
kernel for: what is beyond stays zero. B is multiplied by the adapter's scale, as vLLM itself does when it loads one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from grpo_kit.rollout.vllm.weights import place_of

ADAPTER = "default"


@dataclass(frozen=True)
class Pair:
    """One layer's LoRA in the trainer (`source`), and where vLLM has it: a [r, K], b [N, r]."""

    source: LoraLayer
    a: Tensor
    b: Tensor

    def write(self) -> None:
        self.a.copy_(_weight(self.source.lora_A))
        torch.mul(_weight(self.source.lora_B), self.source.scaling[ADAPTER], out=self.b)  # in float32, then rounded


def pairs(module: PeftModel, stacked: Mapping[str, Any], joined: Mapping[str, Sequence[str]]) -> list[Pair]:
    """stacked: vLLM's layers with LoRA by name; joined: the parts of its joined layers.

    Raises ValueError for a layer that vLLM would sample without its LoRA.
    """
    base = module.get_base_model()
    return [_pair(name, layer, stacked, joined) for name, layer in base.named_modules() if isinstance(layer, LoraLayer)]


def is_on(module: PeftModel) -> bool:
    """Whether the adapter is on, as `PeftModel.disable_adapter` leaves it."""
    return not any(layer.disable_adapters for layer in module.modules() if isinstance(layer, LoraLayer))


@torch.no_grad()
def write(written: Sequence[Pair]) -> None:
    for pair in written:
        pair.write()


def _pair(name: str, source: LoraLayer, stacked: Mapping[str, Any], joined: Mapping[str, Sequence[str]]) -> Pair:
    place = place_of(name, stacked, joined)
    layer = stacked.get(place.module)
    if layer is None or place.part >= len(layer.lora_a_stacked):
        raise ValueError(f"vLLM has no LoRA for {name}, which the adapter changes; engine='native' has")
    a, b = _weight(source.lora_A), _weight(source.lora_B)
    slot_a, slot_b = layer.lora_a_stacked[place.part][0, 0], layer.lora_b_stacked[place.part][0, 0]  # [R, K], [N, R]
    rank, inner, rows = len(a), a.shape[1], len(b)
    if rank > len(slot_a) or inner != slot_a.shape[1] or rows != len(slot_b):
        raise ValueError(f"vLLM's LoRA of {name} is {tuple(slot_a.shape)}, {tuple(slot_b.shape)}, not rank {rank}")
    return Pair(source, slot_a[:rank], slot_b[:, :rank])


def _weight(matrices: Any) -> Tensor:
    weight: Tensor = matrices[ADAPTER].weight.detach()
    return weight
