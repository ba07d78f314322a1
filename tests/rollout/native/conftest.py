"""Tiny models of every architecture, and both engines on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.tiny import ARCHITECTURES, SHAPE

SMOLLM3 = ("SmolLM3Config", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 16})
VOCABULARY = 259


def tiny(architecture: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A random model; see `tests.tiny` for its size. Its sliding window, where it has one, is 16."""
    kind, extra = {**ARCHITECTURES, "smollm3": SMOLLM3}[architecture]
    ids = {"vocab_size": VOCABULARY, "bos_token_id": None, "pad_token_id": 257, "eos_token_id": 256}
    made = getattr(transformers, kind)(**{**SHAPE, **extra, **ids, "tie_word_embeddings": True, **config})
    attention = {"attn_implementation": "eager"} if architecture == "gemma2" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32, **attention).to(dtype).eval()


@pytest.fixture(scope="session")
def load() -> Callable[..., Any]:
    """`load("llama", torch.float64)` → a model, each made once: don't change it."""
    made: dict[Any, Any] = {}

    def get(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
        if (architecture, dtype) not in made:
            made[architecture, dtype] = tiny(architecture, dtype)
        return made[architecture, dtype]

    return get
