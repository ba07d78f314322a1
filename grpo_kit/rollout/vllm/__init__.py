"""The vLLM engine, in this process: it samples with vLLM while the trainer reads the same weights.

vLLM is imported when an engine is started and not before. What is vLLM's own to know (how it is started, where it keeps
weights and LoRA, how its cache is given back) is in the files of this folder, one subject each.
"""

from grpo_kit.rollout.vllm.engine import VllmEngine
from grpo_kit.rollout.vllm.process import Vllm
from grpo_kit.rollout.vllm.requirements import TESTED, why_not_vllm
from grpo_kit.rollout.vllm.sizes import Sizes, choose_sizes, padded_rank
from grpo_kit.rollout.vllm.start import Settings, start_vllm, was_started
from grpo_kit.rollout.vllm.weights import Packed, SharedWeights

__all__ = [
    "TESTED",
    "Packed",
    "Settings",
    "SharedWeights",
    "Sizes",
    "Vllm",
    "VllmEngine",
    "choose_sizes",
    "padded_rank",
    "start_vllm",
    "was_started",
    "why_not_vllm",
]
