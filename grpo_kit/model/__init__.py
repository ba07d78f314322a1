"""Load a 4-bit model with LoRA, ask it, keep it: everything about the weights that is not training."""

from grpo_kit.model.chat import Chat
from grpo_kit.model.dynamic_4bit import DynamicQuantization, quantize_dynamic
from grpo_kit.model.load import load_model
from grpo_kit.model.memory_parts import PlanOptions
from grpo_kit.model.memory_plan import MemoryPlan, memory_plan
from grpo_kit.model.model import LoadOptions, Model, TokenOutputs
from grpo_kit.model.precision import Precision, choose_precision, dtype_for_capability
from grpo_kit.model.value_head import ValueHead

__all__ = [
    "Chat",
    "DynamicQuantization",
    "LoadOptions",
    "MemoryPlan",
    "Model",
    "PlanOptions",
    "Precision",
    "TokenOutputs",
    "ValueHead",
    "choose_precision",
    "dtype_for_capability",
    "load_model",
    "memory_plan",
    "quantize_dynamic",
]
