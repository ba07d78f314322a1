"""Operations that must be fast or small in memory, each with a plain-torch twin. Knows nothing of transformers."""

from grpo_kit.kernels.linear_logprob import linear_logprob

__all__ = ["linear_logprob"]
