"""What each linear layer would cost a model if it alone were in 4 bits: at its own output, and at the model's.

The error at a layer's own output says little about the model's. What matters is how far the model's distribution moves,
KL(16 bit ‖ 4 bit), and that is had for all layers at once from one backward pass. Let d be the change of a layer's
output, g the gradient of log p(y) in it, and y drawn from the model itself at every position. To second order,

    KL = ½ E_y[(Σ g·d)²]                                  the Fisher information along d (Martens 2014, arXiv 1412.1193)

since a score has mean zero and the scores of different positions are uncorrelated. One draw of y for each text is
enough to tell the layers apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bitsandbytes import functional as bnb
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_kit.model.clipped_nf4 import clipped
from grpo_kit.model.shape import NF4_BLOCK

Progress = Callable[[str, int, int], None]  # what is done, how many are, of how many

_OVERFLOW = "{} is not finite: these prompts take this model beyond what its number format can hold"


@dataclass(frozen=True)
class LayerError:
    """error: ‖Wx − Q(W)x‖² / ‖Wx‖² over all tokens. kl: nats a token that the model's output moves away."""

    name: str
    weights: int
    error: float
    kl: float


class Twin:
    """A linear layer's weight in NF4, and the sums over what the layer read while its twin was watching."""

    def __init__(self, layer: nn.Linear, energy: Tensor):
        packed = bnb.quantize_4bit(clipped(layer.weight, energy), blocksize=NF4_BLOCK, quant_type="nf4")
        self._packed = packed
        self.changed = self.output = self.pull = self.pull_squared = torch.zeros((), device=layer.weight.device)

    def weight(self) -> Tensor:
        """[out, in], float32."""
        return bnb.dequantize_4bit(*self._packed)

    def watch(self, layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> None:
        """A forward hook: how the output would change, and later by what that would pull at the model's."""
        with torch.no_grad():
            change = nn.functional.linear(inputs[0], self.weight().to(layer.weight.dtype) - layer.weight)
            product = output if layer.bias is None else output - layer.bias
            self.changed = self.changed + change.float().square().sum()
            self.output = self.output + product.float().square().sum()
        output.register_hook(partial(self._add_pull, change))

    def _add_pull(self, change: Tensor, gradient: Tensor) -> None:
        self.pull = self.pull + (change.float() * gradient.float()).sum()

    def end_text(self) -> None:
        self.pull_squared = self.pull_squared + self.pull.square()
        self.pull = torch.zeros_like(self.pull)


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """By name, those that bitsandbytes takes: all but the head."""
    head = model.get_output_embeddings()
    return {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and layer is not head}


def make_twins(model: PreTrainedModel, texts: list[Tensor], progress: Progress) -> dict[str, Twin]:
    """The layers in 4 bits, each rounded for what it reads in these texts ([1, T] token ids)."""
    layers, energies = linear_layers(model), _input_energies(model, texts, progress)
    twins = {}
    for done, (name, layer) in enumerate(layers.items(), 1):
        twins[name] = Twin(layer, energies[name])
        progress("layers rounded", done, len(layers))
    return twins


@torch.enable_grad()
def measure(
    model: PreTrainedModel, twins: dict[str, Twin], texts: list[Tensor], progress: Progress
) -> list[LayerError]:
    """What each layer's twin would do to the answers to these texts ([1, T] token ids). The model stays as it is.

    Raises FloatingPointError if the model's own numbers overflow.
    """
    layers = linear_layers(model)
    generator = torch.Generator(model.device).manual_seed(0)
    model.enable_input_require_grads()
    with ExitStack() as hooks:
        for name, twin in twins.items():
            hooks.enter_context(layers[name].register_forward_hook(twin.watch))
        for done, text in enumerate(texts, 1):
            _score_own_words(model, text, generator)
            for twin in twins.values():
                twin.end_text()
            progress("texts measured", done, len(texts))
    model.disable_input_require_grads()
    tokens = sum(text.numel() for text in texts)
    return [_layer_error(name, layers[name], twin, tokens) for name, twin in twins.items()]


def _score_own_words(model: PreTrainedModel, text: Tensor, generator: torch.Generator) -> None:
    """Backward from the log probability of words that the model itself would have said at each place."""
    logprobs = model(input_ids=text, use_cache=False).logits[0].float().log_softmax(-1)  # [T, V]
    if not logprobs.isfinite().all():
        raise FloatingPointError(_OVERFLOW.format("the model's answer"))
    own = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)  # [T, 1]
    logprobs.gather(1, own).sum().backward()


def _layer_error(name: str, layer: nn.Linear, twin: Twin, tokens: int) -> LayerError:
    kl = float(twin.pull_squared) / 2 / tokens
    if not math.isfinite(kl):
        raise FloatingPointError(_OVERFLOW.format(f"the gradient at {name}"))
    return LayerError(name, layer.weight.numel(), float(twin.changed / twin.output), kl)


@torch.no_grad()
def _input_energies(model: PreTrainedModel, texts: list[Tensor], progress: Progress) -> dict[str, Tensor]:
    """For each layer, the sum of squares of each of its inputs over all tokens: [in], float32."""
    sums = {
        name: torch.zeros(layer.in_features, device=layer.weight.device) for name, layer in linear_layers(model).items()
    }

    def add(total: Tensor, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        total += inputs[0].float().square().flatten(0, -2).sum(0)

    with ExitStack() as hooks:
        for name, layer in linear_layers(model).items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(add, sums[name])))
        for done, text in enumerate(texts, 1):
            model(input_ids=text, use_cache=False)
            progress("texts read", done, len(texts))
    return sums
