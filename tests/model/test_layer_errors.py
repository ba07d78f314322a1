"""What a layer in 4 bits costs: its output's error against products by hand, its effect against exact derivatives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jvp
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_kit.model.layer_errors import linear_layers, make_twins, measure

Tiny = Callable[..., Path]
TEXT = torch.tensor([[72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33, 10, 66, 121, 101]])


def quiet(what: str, done: int, total: int) -> None:
    pass


def load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"], ids=["no bias", "biases"])
def test_the_outputs_error_is_that_of_the_products(architecture: str, tiny_checkpoint: Tiny) -> None:
    model = load(tiny_checkpoint(architecture))
    twins = make_twins(model, [TEXT], quiet)
    errors = {one.name: one for one in measure(model, twins, [TEXT, TEXT.flip(1)], quiet)}
    read: dict[str, list[Tensor]] = {name: [] for name in twins}
    for name, layer in linear_layers(model).items():
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: read[name].append(inputs[0].double()[0]))
    with torch.no_grad():
        model(TEXT), model(TEXT.flip(1))
    for name, layer in linear_layers(model).items():
        inputs, weight = torch.cat(read[name]), layer.weight.double()  # [tokens, in]
        change = inputs @ (twins[name].weight().double() - weight).T
        expected = change.square().sum() / (inputs @ weight.T).square().sum()
        assert errors[name].error == pytest.approx(float(expected), rel=1e-4)
        assert errors[name].weights == layer.weight.numel()


def test_the_effect_is_the_second_order_kl_of_the_models_output(tiny_checkpoint: Tiny) -> None:
    model = load(tiny_checkpoint())
    twins = make_twins(model, [TEXT], quiet)
    draws = 120
    for one in measure(model, twins, [TEXT] * draws, quiet):
        # half a chi-square with `draws` degrees of freedom: its relative standard deviation is 13 %
        assert one.kl == pytest.approx(exact_kl(model, one.name, twins[one.name].weight()), rel=0.45), one.name


def exact_kl(model: PreTrainedModel, name: str, stored: Tensor) -> float:
    """½ Σ_t Var_p(change of the logits) / T, in float64 and by forward differentiation."""
    model = load(model.config._name_or_path).double()
    weight = model.get_submodule(name).weight.detach()

    def logits(changed: Tensor) -> Tensor:
        return functional_call(model, {f"{name}.weight": changed}, (TEXT,), {"use_cache": False}).logits[0]

    out, change = jvp(logits, (weight,), (stored.double() - weight,))  # [T, V] each
    p = out.softmax(-1)
    variance = (p * change.square()).sum(-1) - (p * change).sum(-1).square()
    return float(variance.sum() / 2 / TEXT.numel())


def test_the_model_is_left_as_it_was(tiny_checkpoint: Tiny) -> None:
    model = load(tiny_checkpoint())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure(model, make_twins(model, [TEXT], quiet), [TEXT], quiet)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())
    assert not model(TEXT).logits.requires_grad


def test_numbers_that_overflow_are_an_error(tiny_checkpoint: Tiny) -> None:
    model = load(tiny_checkpoint())
    twins = make_twins(model, [TEXT], quiet)
    model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(torch.inf)
    with pytest.raises(FloatingPointError, match="the model's answer is not finite"):
        measure(model, twins, [TEXT], quiet)


def test_the_head_is_no_layer_to_quantize(tiny_checkpoint: Tiny) -> None:
    names = linear_layers(load(tiny_checkpoint(tie=False)))
    assert len(names) == 2 * 7 and "lm_head" not in names
