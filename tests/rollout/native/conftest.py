"""Tiny models of every architecture, and ones that the fused token step takes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import PeftModel

from grpo_kit.model.lora import add_lora, lora_parameters
from grpo_kit.rollout import Engine
from tests.tiny import ARCHITECTURES, SHAPE

SMOLLM3 = ("SmolLM3Config", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16})
VOCABULARY = 259
# For the fused step: inner dimensions are multiples of 64, the outputs of k and v are not. Caps are low enough to be
# felt, and windows shorter than some rows.
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 16}
FUSED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 5.0},
    "phi3": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}, "sliding_window": 16},
}


def tiny(architecture: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A random model; see `tests.tiny` for its size. Its sliding window, where it has one, is 16."""
    kind, extra = {**ARCHITECTURES, "smollm3": SMOLLM3}[architecture]
    ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "pad_token_id": 257, "eos_token_id": 256}
    made = getattr(transformers, kind)(**{**SHAPE, **extra, **ids, "tie_word_embeddings": True, **config})
    attention = {"attn_implementation": "eager"} if architecture == "gemma2" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, **attention).to(dtype).eval()


def wide(
    architecture: str,
    four_bit: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    double_quant: bool = False,
    learned: float = 0.3,
    **config: Any,
) -> PeftModel:
    """A model of WIDE's size with an adapter of scale 1.5, whose weights are fresh (0) or of size `learned`. Norms and
    biases are not those of a fresh model."""
    module = tiny(architecture, dtype, **{**WIDE, **FUSED[architecture], **config}).to(device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("norm.weight", ".bias")):
                weight.copy_(name.endswith("weight") + 0.3 * torch.randn(weight.shape, generator=generator))
    if four_bit:
        for layer in module.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        setattr(part, name, in_nf4(linear, double_quant))
        module.is_loaded_in_4bit = True  # what peft asks
    adapted = add_lora(module, rank=4, alpha=6, seed=0)
    if learned:
        learn(adapted, learned)
    return adapted


def in_nf4(linear: torch.nn.Linear, double_quant: bool = False, kind: str = "nf4") -> Linear4bit:
    """The layer as bitsandbytes quantizes it."""
    weight = linear.weight.detach()
    made = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype)
    made.bias, made.support_avx512bf16_for_cpu = linear.bias, False
    made.weight = Params4bit(
        weight.cpu(), requires_grad=False, quant_type=kind, compress_statistics=double_quant, module=made
    ).to(weight.device)
    return made


@torch.no_grad()
def learn(module: PeftModel, size: float = 0.3) -> None:
    """Give the adapter an effect, in place as an optimizer does. It is as large as the model's own at 0.3."""
    generator = torch.Generator().manual_seed(2)
    for weight in lora_parameters(module).values():
        weight.copy_(size * torch.randn(weight.shape, generator=generator))


def assert_released(engine: Engine, held: list[weakref.ref[torch.Tensor]]) -> None:
    """Release the engine: these tensors are gone, without the garbage collector."""
    gc.disable()
    try:
        engine.release()
        assert all(tensor() is None for tensor in held)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def load() -> Callable[..., Any]:
    """`load("llama", torch.float64)` → a model, each made once: don't change it."""
    made: dict[Any, Any] = {}

    def get(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
        if (architecture, dtype) not in made:
            made[architecture, dtype] = tiny(architecture, dtype)
        return made[architecture, dtype]

    return get
