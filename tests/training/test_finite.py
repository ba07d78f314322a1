"""Where NaN and infinity came from, in words."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.training.finite import first_bad, first_bad_output

NAN, INF = float("nan"), float("inf")


class Block(torch.nn.Module):
    """Two layers, and arithmetic of its own between them: `scale` times."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.up, self.down, self.scale = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), scale

    def forward(self, hidden, attention_mask=None):
        return (self.down(self.up(hidden)) * self.scale, None)


class Model(torch.nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embed, self.blocks = torch.nn.Embedding(10, 4), torch.nn.ModuleList(blocks)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden, _ = block(hidden, attention_mask=torch.full((1, 1), -INF))
        return {"logits": hidden}


IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model(Block(), Block())


def said(model, ids=IDS):
    words = first_bad_output(model, lambda: model(ids))
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in model.modules())
    return words


def test_the_first_bad_tensor_is_named_and_counted():
    bad = torch.zeros(64, 64)
    bad[0, :10], bad[1, 0], bad[2, 0] = NAN, INF, -INF
    named = [("a", torch.ones(3)), ("grad of lora_B", bad), ("c", torch.tensor(NAN))]
    assert first_bad(named) == "grad of lora_B: 12 of 4,096 values are NaN or infinite"
    assert first_bad(named[2:]) == "c: 1 of 1 values is NaN or infinite"
    assert first_bad(named[:1]) is None


def test_whole_numbers_are_skipped_and_every_float_is_read():
    assert first_bad([("q", torch.zeros(4, dtype=torch.uint8)), ("ids", torch.zeros(4, dtype=torch.int64))]) is None
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        assert first_bad([("w", torch.tensor([1.0, NAN]).to(dtype))]) == "w: 1 of 2 values is NaN or infinite"


def test_a_sound_model_is_sound(model):
    assert said(model) is None


def test_a_poisoned_weight_is_found_in_its_layer(model):
    model.blocks[1].down.weight.data[0, 0] = NAN
    words = said(model)
    assert words.startswith("output of blocks.1.down (Linear): 3 of 12 values are NaN or infinite, in float32; ")
    assert "its inputs were finite, the largest finite value " in words
    assert words.endswith("its own weight is not finite: weight: 1 of 32 values is NaN or infinite")


def test_an_overflow_in_half_precision_shows_how_large_the_inputs_were():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)).half()
    for layer in model:
        layer.weight.data.fill_(1.0)
    words = first_bad_output(model, lambda: model(torch.tensor([[20_000.0, 20_000.0]], dtype=torch.float16)))
    assert words == (
        "output of 1 (Linear): 1 of 1 values is NaN or infinite, in float16, whose largest is 65,504; "
        "its inputs were finite, the largest finite value 40,000"
    )


def test_a_modules_own_arithmetic_is_blamed_on_it_and_not_on_the_layers_in_it():
    model = Model(Block(scale=INF), Block())
    words = said(model)
    assert words.startswith("output of blocks.0 (Block): 12 of 12 values")
    assert "its inputs were finite" in words  # the mask's infinities are meant


def test_what_came_in_bad_is_said_to_have_come_in_so():
    layer = torch.nn.Linear(2, 2)
    words = first_bad_output(layer, lambda: layer(torch.tensor([[7.0, INF]])))
    assert words.startswith("output of the whole model (Linear): 2 of 2 values")
    assert words.endswith("its inputs were not finite already, the largest finite value 7")
    assert first_bad_output(layer, lambda: layer(torch.full((1, 2), NAN))).endswith(
        "its inputs were not finite already"
    )


def test_an_embedding_has_no_inputs_to_blame(model):
    model.embed.weight.data[2] = NAN
    words = said(model)
    assert words.startswith("output of embed (Embedding): 4 of 12 values")
    assert "it has no inputs that could be so" in words


def test_an_exception_is_passed_on_and_the_hooks_are_gone(model):
    def call():
        model(IDS)
        raise KeyError("in the call")

    with pytest.raises(KeyError, match="in the call"):
        first_bad_output(model, call)
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in model.modules())


def test_looking_changes_neither_outputs_nor_gradients(model):
    def gradient():
        model.zero_grad()
        model(IDS)["logits"].sum().backward()
        return model.blocks[0].up.weight.grad.clone()

    plain, watched = gradient(), []
    assert first_bad_output(model, lambda: watched.append(gradient())) is None
    assert torch.equal(plain, watched[0])


def test_modules_that_were_not_called_are_not_blamed(model):
    model.blocks[0].up.weight.data.fill_(NAN)
    assert first_bad_output(model, lambda: model.blocks[1](torch.ones(1, 4))) is None
