"""Which modules are accepted, and in what words the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from grpo_kit.rollout.native import NativeEngine, NotSupported, examine
from tests.rollout.native.conftest import VOCABULARY, tiny
from tests.tiny import ARCHITECTURES, SHAPE

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "smollm3"])
def test_decoders_with_a_cache_of_keys_and_values_are_accepted(architecture: str, load: Callable[..., Any]) -> None:
    assert len(examine(load(architecture)).layers) == 2


def test_what_is_found_out_is_what_a_token_takes(load: Callable[..., Any]) -> None:
    shape = examine(load("gemma3", torch.float64))
    assert [(layer.heads, layer.key_width, layer.value_width) for layer in shape.layers] == [(2, 8, 8)] * 2
    assert {layer.window for layer in shape.layers} <= {16, None} and shape.dtype == torch.float64
    assert [layer.window for layer in examine(load("llama")).layers] == [None, None]


def of_kind(kind: str, **config: Any) -> Any:
    made = getattr(transformers, kind)(**{**SHAPE, "vocab_size": VOCABULARY, **config})
    with torch.random.fork_rng():
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent": (lambda: of_kind("MambaConfig"), "does not take .*past_key_values"),
    "mixture": (lambda: of_kind("MixtralConfig", num_local_experts=2), "mixture of experts"),
    "longrope": (lambda: tiny("phi3", rope_parameters=LONGROPE), r"\(longrope\) changes with the longest"),
    "linear attention": (
        lambda: of_kind("Qwen3NextConfig", layer_types=["linear_attention", "full_attention"], num_experts=0),
        "keeps more than keys and values",
    ),
    "alibi": (lambda: of_kind("BloomConfig"), "does not take position_ids"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_with_the_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    module = make()
    with pytest.raises(NotSupported, match=reason):
        NativeEngine(module, eos_ids=(), decode=str)


def test_a_module_that_goes_its_own_way_is_found_out() -> None:
    """One that counts positions by itself: the configuration says nothing of it, the trial does."""
    module = tiny("llama")
    own = module.model.rotary_emb.forward
    module.model.rotary_emb.forward = lambda x, position_ids: own(x, torch.zeros_like(position_ids))
    forward = module.model.forward
    module.model.forward = lambda **inputs: forward(**{**inputs, "attention_mask": None})
    with pytest.raises(NotSupported, match="LlamaForCausalLM"):
        examine(module)
