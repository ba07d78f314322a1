"""The next token of each row, chosen on the device by launches alone: nothing waits for the host, so it can be captured
in a CUDA graph. Draws what `rollout.sampling.next_tokens` draws from the same numbers, without a sum over the whole
vocabulary in float64."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from grpo_kit.kernels.decode_sample import invert, logprob_of, sample
from grpo_kit.rollout.engine import Sampling
from grpo_kit.rollout.sampling import warpers


@dataclass(frozen=True)
class Cuts:
    """The part of `Sampling` that decides which operations run; a graph is captured for one of them."""

    greedy: bool
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, sampling: Sampling) -> Cuts:
        return cls(
            sampling.temperature == 0,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
        )

    @property
    def needs_context(self) -> bool:
        return self.repetition_penalty != 1.0


def choose(
    logits: Tensor, uniform: Tensor, temperature: Tensor, cuts: Cuts, context: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their logprobs [B] float32 under softmax(logits / temperature).

    logits [B, V]; uniform [B] float64 in [0, 1); temperature: a scalar tensor (1 for greedy); context [B, S]: the ids
    so far, needed for a repetition penalty.
    """
    chain = warpers(
        Sampling(
            max_tokens=1,
            top_k=cuts.top_k,
            top_p=cuts.top_p,
            min_p=cuts.min_p,
            repetition_penalty=cuts.repetition_penalty,
        )
    )
    if not chain:
        return sample(logits, uniform, temperature, cuts.greedy)
    scaled = logits.float() / temperature
    cut: Tensor = chain(context, scaled)  # type: ignore[arg-type]
    tokens = cut.argmax(-1) if cuts.greedy else invert(cut.softmax(-1), uniform)
    return tokens, logprob_of(scaled, tokens)
