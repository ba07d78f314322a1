"""Engines that sample completions: one contract, several engines. They are handed torch modules and know no
`model/`."""

from grpo_kit.rollout.choose import check_engine, check_kv_cache, choose_engine, make_engine
from grpo_kit.rollout.engine import Completion, Engine, OnTokens, Sampling, stream_seed
from grpo_kit.rollout.native import NativeEngine, NotSupported, examine
from grpo_kit.rollout.transformers_engine import TransformersEngine
from grpo_kit.rollout.vllm import Vllm, VllmEngine, why_not_vllm

__all__ = [
    "Completion",
    "Engine",
    "NativeEngine",
    "NotSupported",
    "OnTokens",
    "Sampling",
    "TransformersEngine",
    "Vllm",
    "VllmEngine",
    "check_engine",
    "check_kv_cache",
    "choose_engine",
    "examine",
    "make_engine",
    "stream_seed",
    "why_not_vllm",
]
