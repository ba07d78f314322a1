"""Which engine samples, and why, in one line; and the engine of that name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from peft import PeftModel
from transformers import PreTrainedModel

from grpo_kit.rollout.engine import Engine
from grpo_kit.rollout.native import NativeEngine, SlotCache, TokenStep
from grpo_kit.rollout.transformers_engine import TransformersEngine
from grpo_kit.rollout.vllm import Vllm, VllmEngine

ENGINES = ("auto", "native", "transformers", "vllm")


def check_engine(requested: str) -> None:
    """Raises ValueError for an engine there is not."""
    if requested not in ENGINES:
        raise ValueError(f"unknown engine {requested!r}; there are {', '.join(ENGINES)}")


def choose_engine(
    requested: str, fast_inference: bool, *, on_gpu: bool, why_not_native: Callable[[], str | None]
) -> tuple[str, str]:
    """Return `(name, reason)`. `why_not_native()` says why the native engine can't run the model, None if it can; it
    may take a moment and is asked only where that matters. "vllm" is for those who ask for it: the native engine is
    faster beside a trainer's 4-bit weights, and needs no start.

    Raises ValueError for an engine there is not, or that can't run the model.
    """
    check_engine(requested)
    if requested in ("transformers", "vllm"):
        return requested, "asked for"
    if requested == "auto" and not on_gpu:
        wanted = "fast_inference was asked for, but " if fast_inference else ""
        return "transformers", f"{wanted}what makes native faster is a GPU's; without one the plain engine does as well"
    obstacle = why_not_native()
    if requested == "native":
        if obstacle:
            raise ValueError(f"engine='native' can't sample with this model: {obstacle}; engine='transformers' can")
        return "native", "asked for"
    if obstacle:
        return "transformers", f"native can't: {obstacle}"
    return "native", "a GPU, and a model whose token step can be one CUDA graph"


def make_engine(
    name: str,
    module: PreTrainedModel | PeftModel,
    *,
    eos_ids: Collection[int],
    decode: Callable[[list[int]], str],
    fused: Callable[[SlotCache], TokenStep | None] | None = None,
    vllm: Vllm | None = None,
) -> Engine:
    """The engine that `choose_engine` named; `fused` is for the native one, `vllm` (with the module's weights) for that
    of its name. Raises ValueError for one there is not."""
    if name == NativeEngine.name:
        return NativeEngine(module, eos_ids=eos_ids, decode=decode, fused=fused)
    if name == TransformersEngine.name:
        return TransformersEngine(module, eos_ids=eos_ids, decode=decode)
    if name == VllmEngine.name:
        if vllm is None:
            raise ValueError("the weights of this model are not vLLM's: load it with engine='vllm'")
        assert isinstance(module, PeftModel)
        return VllmEngine(module, vllm, eos_ids=eos_ids, decode=decode)
    names = (NativeEngine.name, TransformersEngine.name, VllmEngine.name)
    raise ValueError(f"there is no engine {name!r} to be made; there are {', '.join(names)}")
