"""vLLM's tensors under the names that transformers has for them, as views: nothing is copied.

vLLM joins q, k and v, and gate and up, into one tensor each. Its 4-bit weights are then one packed row of bytes, in
which each part begins at an offset and has a quantization state of its own; plain weights and biases are joined by
rows. A layer with LoRA around it keeps them one level deeper, and a vocabulary may be filled up with rows that no token
has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

WRAPPED = ".base_layer."
KNOWN_ONLY = "its layout of this model is not the one that was tested; engine='native' needs no vLLM"


@dataclass(frozen=True)
class Packed:
    """A 4-bit weight: bytes [N·K/2, 1], and bitsandbytes' QuantState, whose scales are float32, one for each block."""

    data: Tensor
    state: Any


@dataclass(frozen=True)
class Place:
    """Where a module of transformers is in vLLM: the module's name there, and which part of it."""

    module: str
    part: int = 0


class SharedWeights:
    """The weights of vLLM's model `module`. joined: its parts by the name of the whole (vLLM's
    `packed_modules_mapping`)."""

    def __init__(self, module: nn.Module, joined: Mapping[str, Sequence[str]]):
        self._tensors = {name.replace(WRAPPED, "."): tensor for name, tensor in module.named_parameters()}
        self._modules = {name.removesuffix(WRAPPED[:-1]): found for name, found in module.named_modules()}
        self._joined = joined

    def place(self, module: str) -> Place:
        """Of a module by transformers' name."""
        return place_of(module, self._modules, self._joined)

    def packed(self, module: str) -> Packed | None:
        """The 4-bit weight of a linear layer; None where it is kept plainly, or is not known."""
        place = self.place(module)
        whole: Any = self._tensors.get(f"{place.module}.weight")
        states = getattr(whole, "bnb_quant_state", None)
        if whole is None or states is None:
            return None
        first, last = whole.bnb_shard_offsets.tolist()[place.part : place.part + 2]
        return Packed(whole.detach()[first:last], states[place.part])

    def plain(self, name: str, shape: Sequence[int]) -> Tensor:
        """A weight, bias or table by transformers' name and shape. Raises ValueError where vLLM has none like it."""
        module, leaf = name.rsplit(".", 1)
        place = self.place(module)
        whole = self._tensors.get(f"{place.module}.{leaf}")
        if whole is None:
            raise ValueError(f"vLLM has no {name}: {KNOWN_ONLY}")
        first = sum(self._rows(place.module)[: place.part]) if place.module != module else 0
        view = whole.detach()[first : first + shape[0]]
        if tuple(view.shape) != tuple(shape) or not view.is_floating_point():
            raise ValueError(
                f"vLLM's {name} is {tuple(view.shape)} in {view.dtype}, transformers' {tuple(shape)}: {KNOWN_ONLY}"
            )
        return view

    def _rows(self, module: str) -> Sequence[int]:
        """Of each part of a joined layer."""
        layer: Any = self._modules[module]
        rows: Sequence[int] = layer.output_sizes
        return rows


def place_of(module: str, known: Mapping[str, object], joined: Mapping[str, Sequence[str]]) -> Place:
    """known: the modules that vLLM has, by name."""
    parent, _, leaf = module.rpartition(".")
    for whole, parts in joined.items():
        if leaf in parts and f"{parent}.{whole}" in known:
            return Place(f"{parent}.{whole}", list(parts).index(leaf))
    return Place(module)
