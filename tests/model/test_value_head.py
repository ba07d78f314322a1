"""PPO's critic: a linear layer in float32, whatever the model computes in."""

from __future__ import annotations

import pytest
import torch

import grpo_kit as gk
from grpo_kit.kernels import pack
from grpo_kit.model import ValueHead

CPU = torch.device("cpu")


def filled(size=3):
    head = ValueHead(size, CPU)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
        head.bias.fill_(0.25)
    return head


def test_it_starts_at_nothing():
    head = ValueHead(8, CPU)
    assert head(torch.randn(5, 8)).tolist() == [0.0] * 5
    assert sum(parameter.numel() for parameter in head.parameters()) == 9


def test_by_hand():
    values = filled()(torch.tensor([[1.0, 1.0, 2.0], [0.0, 1.0, 0.0]]))
    assert values.tolist() == [1 - 2 + 1 + 0.25, -2 + 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_float32_whatever_the_model_computes_in(dtype):
    large = torch.tensor([[256.0, 0.5, 0.0]], dtype=dtype)  # bfloat16 has no 255.25
    values = filled()(large)
    assert (values.dtype, values.tolist()) == (torch.float32, [256 - 1 + 0.25])


def test_gradients_reach_the_head_and_the_model_under_it():
    head, hidden = filled(), torch.tensor([[1.0, 1.0, 2.0]], dtype=torch.float16, requires_grad=True)
    (head(hidden) ** 2).sum().backward()
    assert head.weight.grad.tolist() == [0.5, 0.5, 1.0]  # 2·0.25·hidden
    assert head.bias.grad == 0.5
    assert hidden.grad.tolist() == [[0.5, -1.0, 0.25]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_model_puts_a_value_before_each_completion_token(tiny_checkpoint, dtype):
    """Of the hidden state from which the token is predicted, and 0 where there is no token."""
    path = str(tiny_checkpoint())
    model = gk.load_model(path, load_in_4bit=False, max_seq_length=64, lora_rank=4, dtype=dtype)
    head = ValueHead(model.causal_lm.config.hidden_size, CPU)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, len(head.weight)))
        head.bias.fill_(1.0)
        ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
        packed = pack([([5, 6], [7, 8, 9]), ([5], [6, 7])])
        outputs = model.token_outputs(packed, torch.tensor([2, 1]), 3, 1.0, head)
        assert model.token_outputs(packed, torch.tensor([2, 1]), 3, 1.0).values is None
        assert outputs.values.dtype == torch.float32
        close = 1e-4 if dtype == "float32" else 0.1
        for row, (length, start) in enumerate([(5, 2), (3, 1)]):
            states = model.causal_lm.get_decoder()(input_ids=ids[row : row + 1, :length]).last_hidden_state[0]
            expected = torch.zeros(3)
            expected[: length - start] = states[start - 1 : length - 1].float() @ head.weight + 1
            torch.testing.assert_close(outputs.values[row], expected, rtol=close, atol=close)
