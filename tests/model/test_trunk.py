"""The trainer's way through the decoder against transformers' own modules: values, gradients, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels import Offload, Packed, linear_logprob, pack
from grpo_kit.model import Model, load
from grpo_kit.model.trunk import why_not_fused
from tests.kernels.test_offload import DiaryLane
from tests.model.test_model import learn_something

Tiny = Callable[..., Path]
OPTIONS: dict[str, Any] = {"load_in_4bit": False, "max_seq_length": 16, "lora_rank": 4}
SEQUENCES = [([1, 2, 3], [4, 5, 6, 7]), ([1, 2, 3], [8, 9]), ([9, 8], [7, 6, 5, 4, 3]), ([1, 2, 3], [4] * 9)]
FUSED = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = ("gemma2", "gemma3", "phi3")


def gradients(model: Model, run: Callable[..., Tensor], packed: Packed, **more: Any) -> list[Tensor]:
    """Of a loss that every token of every sequence has a part in."""
    hidden = run(packed, **more)
    weights = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
    logprob, entropy = linear_logprob(hidden, model.causal_lm.get_output_embeddings().weight, packed.ids)
    loss = (hidden * weights).sum() + logprob.sum() + 0.3 * entropy.sum()
    return [hidden.detach(), *torch.autograd.grad(loss, list(model.trainable().values()))]


def assert_close(ours: list[Tensor], theirs: list[Tensor], close: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() <= close * other.abs().max()


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("architecture", FUSED)
def test_as_the_modules_say_it(architecture: str, four_bit: bool, tiny_checkpoint: Tiny) -> None:
    model = load.load_model(str(tiny_checkpoint(architecture)), **{**OPTIONS, "load_in_4bit": four_bit})
    assert model.trunk.fused
    learn_something(model)
    packed = pack(SEQUENCES)
    assert_close(gradients(model, model.trunk.hidden, packed), gradients(model, model.trunk.plain, packed), 1e-5)


def test_biases_count(tiny_checkpoint: Tiny) -> None:
    """Qwen2's queries, keys and values have some; a fresh model's are 0."""
    model = load.load_model(str(tiny_checkpoint("qwen2")), **OPTIONS)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("_proj.base_layer.bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    packed = pack(SEQUENCES)
    assert_close(gradients(model, model.trunk.hidden, packed), gradients(model, model.trunk.plain, packed), 1e-5)


@pytest.fixture
def model(tiny_checkpoint: Tiny) -> Iterator[Model]:
    yield load.load_model(str(tiny_checkpoint()), **OPTIONS)


def test_a_switched_off_adapter_is_not_seen(model: Model) -> None:
    packed = pack(SEQUENCES)
    with torch.no_grad():
        untrained = model.trunk.hidden(packed)
        learn_something(model)
        assert not torch.allclose(model.trunk.hidden(packed), untrained, atol=1e-3)
        with model.adapter_set(False):
            assert model.trunk.hidden(packed).equal(untrained)


def test_a_shared_prompt_is_computed_once_and_counts_for_all(model: Model) -> None:
    """The same sequences with prompts that look different to `pack` give the same gradients."""
    learn_something(model)
    together = pack(SEQUENCES)
    apart = [pack([sequence]) for sequence in SEQUENCES]
    assert sum(map(len, apart)) > len(together)
    head = model.causal_lm.get_output_embeddings().weight

    def own_tokens(packed: Packed) -> list[Tensor]:
        hidden = model.trunk.hidden(packed)
        total: Any = 0.0
        for row, mask, (beginning, _) in zip(packed.rows, packed.mask, chosen, strict=True):
            tokens = row[mask.bool()]
            before, own = tokens[len(beginning) - 1 : -1], tokens[len(beginning) :]
            total = total + (linear_logprob(hidden[before], head, packed.ids[own])[0]).sum()
        return list(torch.autograd.grad(total, list(model.trainable().values())))

    chosen = SEQUENCES
    ours = own_tokens(together)
    parts = []
    for packed, sequence in zip(apart, SEQUENCES, strict=True):
        chosen = [sequence]
        parts.append(own_tokens(packed))
    assert_close(ours, [torch.stack(each).sum(0) for each in zip(*parts, strict=True)], 1e-5)


@pytest.mark.parametrize("architecture", ["llama", *OTHERS])
def test_offloaded_or_not_the_gradients_are_the_same(architecture: str, tiny_checkpoint: Tiny) -> None:
    model = load.load_model(str(tiny_checkpoint(architecture)), **OPTIONS)
    learn_something(model)
    model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.module.train()
    packed = pack(SEQUENCES)
    expected = gradients(model, model.trunk.hidden, packed)
    with Offload(DiaryLane(), 2**30) as offload:
        for mine, other in zip(gradients(model, model.trunk.hidden, packed, offload=offload), expected, strict=True):
            assert mine.equal(other)
        assert offload.used > 0


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_families_run_as_transformers_has_them(architecture: str, tiny_checkpoint: Tiny) -> None:
    model = load.load_model(str(tiny_checkpoint(architecture)), **OPTIONS)
    assert not model.trunk.fused and "as transformers has it" in repr(model)


def test_a_window_shorter_than_the_model_may_see_is_not_ours(tiny_checkpoint: Tiny) -> None:
    model = load.load_model(str(tiny_checkpoint("mistral")), **{**OPTIONS, "max_seq_length": 17})
    assert not model.trunk.fused and "sees 16 tokens back" in model.trunk.reason


def test_weights_quantized_in_some_other_way_are_not_ours(tiny_checkpoint: Tiny) -> None:
    class Int8(torch.nn.Linear):
        pass

    model = load.load_model(str(tiny_checkpoint()), **OPTIONS)
    projection = model.trunk.layers[0].mlp.up_proj
    assert why_not_fused(model.trunk.decoder, 16) is None
    projection.base_layer.__class__ = Int8
    assert "only transformers reads" in str(why_not_fused(model.trunk.decoder, 16))


def test_another_activation_is_not_ours(tiny_checkpoint: Tiny) -> None:
    model = load.load_model(str(tiny_checkpoint(hidden_act="gelu")), **OPTIONS)
    assert not model.trunk.fused and "gelu" in model.trunk.reason


def test_whoever_ends_a_pass_is_asked_before_each_layer(model: Model) -> None:
    asked = []
    with model.trunk.watched(lambda: asked.append(1)):
        gradients(model, model.trunk.hidden, pack(SEQUENCES))
    assert len(asked) == 2 * len(model.trunk.layers)
