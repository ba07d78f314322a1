"""Which engine samples, and why, in one line; and the engine of that name."""

from __future__ import annotations

from collections.abc import Callable, Collection

from peft import PeftModel
from transformers import PreTrainedModel

from grpo_kit.rollout.engine import Engine
from grpo_kit.rollout.native import CacheShape, NativeEngine, NotSupported, SlotCache, TokenStep
from grpo_kit.rollout.transformers_engine import TransformersEngine
from grpo_kit.rollout.vllm import Vllm, VllmEngine

ENGINES = ("auto", "native", "transformers", "vllm")
KV_CACHE_DTYPES = (None, "int8")


def check_engine(requested: str) -> None:
    """Raises ValueError for an engine there is not."""
    if requested not in ENGINES:
        raise ValueError(f"unknown engine {requested!r}; there are {', '.join(ENGINES)}")


def check_kv_cache(kv_cache_dtype: str | None, engine: str) -> None:
    """Raises ValueError for a format there is not, or that an engine of this name does not have."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        known = ", ".join(map(repr, KV_CACHE_DTYPES))
        raise ValueError(f"unknown kv_cache_dtype {kv_cache_dtype!r}; there are {known}")
    if kv_cache_dtype is not None and engine not in ("auto", NativeEngine.name):
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} is an option of the native engine, and engine={engine!r} was asked "
            "for: leave one of them out"
        )


def choose_engine(
    requested: str,
    fast_inference: bool,
    *,
    on_gpu: bool,
    examine_native: Callable[[], object],
    kv_cache_dtype: str | None = None,
) -> tuple[str, str]:
    """Return `(name, reason)`. `examine_native()` raises NotSupported, with the reason, if the native engine can't run
    the model; it may take a moment and is asked only where that matters. A kv_cache_dtype asks for the native engine,
    the only one that has it. "vllm" is for those who ask for it: the native engine is faster beside a trainer's 4-bit
    weights, and needs no start.

    Raises ValueError for an engine there is not, or that can't run the model.
    """
    check_engine(requested)
    check_kv_cache(kv_cache_dtype, requested)
    if requested in ("transformers", "vllm"):
        return requested, "asked for"
    asked = requested == "native" or kv_cache_dtype is not None
    if not asked and not on_gpu:
        wanted = "fast_inference was asked for, but " if fast_inference else ""
        return "transformers", f"{wanted}what makes native faster is a GPU's; without one the plain engine does as well"
    try:
        examine_native()
    except NotSupported as obstacle:
        if asked:
            without = "" if kv_cache_dtype is None else ", without kv_cache_dtype"
            raise ValueError(
                f"engine='native' can't sample with this model: {obstacle}; engine='transformers' can{without}"
            ) from obstacle
        return "transformers", f"native can't: {obstacle}"
    if requested == "native":
        return "native", "asked for"
    if asked:
        return "native", f"kv_cache_dtype={kv_cache_dtype!r} is its option"
    return "native", "a GPU, and a model whose token step can be one CUDA graph"


def make_engine(
    name: str,
    module: PreTrainedModel | PeftModel,
    *,
    eos_ids: Collection[int],
    decode: Callable[[list[int]], str],
    fused: Callable[[SlotCache], TokenStep | None] | None = None,
    shape: CacheShape | None = None,
    kv_cache_dtype: str | None = None,
    vllm: Vllm | None = None,
) -> Engine:
    """The engine that `choose_engine` named; fused, shape and kv_cache_dtype are the native one's, vllm (which has the
    module's weights) is for that of its name. Raises ValueError for one there is not."""
    if name == NativeEngine.name:
        return NativeEngine(
            module, eos_ids=eos_ids, decode=decode, fused=fused, shape=shape, kv_cache_dtype=kv_cache_dtype
        )
    if name == TransformersEngine.name:
        return TransformersEngine(module, eos_ids=eos_ids, decode=decode)
    if name == VllmEngine.name:
        if vllm is None:
            raise ValueError("the weights of this model are not vLLM's: load it with engine='vllm'")
        assert isinstance(module, PeftModel)
        return VllmEngine(module, vllm, eos_ids=eos_ids, decode=decode)
    names = (NativeEngine.name, TransformersEngine.name, VllmEngine.name)
    raise ValueError(f"there is no engine {name!r} to be made; there are {', '.join(names)}")
