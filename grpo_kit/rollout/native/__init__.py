"""The native engine: the training model's own modules, sampled in slots of one cache by CUDA graphs."""

from grpo_kit.rollout.native.cache import CacheShape, SlotCache
from grpo_kit.rollout.native.engine import NativeEngine
from grpo_kit.rollout.native.session import TokenStep
from grpo_kit.rollout.native.support import NotSupported, examine

__all__ = ["CacheShape", "NativeEngine", "NotSupported", "SlotCache", "TokenStep", "examine"]
