"""Which engine samples, and why, in one line; and the engine of that name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from peft import PeftModel
from transformers import PreTrainedModel

from grpo_kit.rollout.engine import Engine
from grpo_kit.rollout.transformers_engine import TransformersEngine

ENGINES = ("auto", "transformers")


def choose_engine(requested: str, fast_inference: bool) -> tuple[str, str]:
    """Return `(name, reason)`. Raises ValueError for an engine there is not."""
    if requested not in ENGINES:
        raise ValueError(f"unknown engine {requested!r}; there are {', '.join(ENGINES)}")
    if requested == "transformers":
        return "transformers", "asked for"
    if fast_inference:
        return "transformers", "fast_inference was asked for, but no faster engine is built yet: sampling takes longer"
    return "transformers", "works on every device"


def make_engine(
    name: str,
    module: PreTrainedModel | PeftModel,
    *,
    eos_ids: Collection[int],
    decode: Callable[[list[int]], str],
) -> Engine:
    """The engine that `choose_engine` named. Raises ValueError for one there is not."""
    if name != TransformersEngine.name:
        raise ValueError(f"there is no engine {name!r} to be made; there is {TransformersEngine.name}")
    return TransformersEngine(module, eos_ids=eos_ids, decode=decode)
