"""What an algorithm is, and the one table of all of them.

To add one: write a file that calls `register`, name it in `algorithms/__init__.py`, and add its test.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

ESTIMATORS = ("group", "leave_one_out", "gae", "pairs")


@dataclass(frozen=True)
class Algorithm:
    """An advantage estimator, a loss, and the options that the two come with.

    summary, formula, source, when: what `explain` shows; the formula is LaTeX.
    loss:       for all but pairs `(logprobs, old_logprobs, advantages, mask, *, options…) → (loss, clipped)`, all of
                [B, T] (advantages [B] or [B, T]). For pairs `(chosen, rejected, *, options…) → loss`, all [P], of the
                two answers' log-ratios to the reference. Its keyword-only parameters are options of a run under the
                same names. A loss with a fifth parameter `correction` weighs by the sampler's gap itself.
    weights:    (lengths [N] of trained tokens, max_completion_length) → [N], the weight of each sequence's tokens
                in the loss of one optimizer step. The step's loss is Σ_i weights_i · Σ_t loss_it, however it is cut
                into micro-batches. Pairs ignore it: each counts the same.
    advantages: "group" (`group_advantages`), "leave_one_out", "gae" (with a value head) or "pairs".
    defaults:   options that differ from everyone's unless the user says otherwise.
    kl_in_reward: β·KL is taken off the reward and not added to the loss.
    whole_answers: its loss is one of the whole answer, so that no token can be left out of it.
    """

    name: str
    summary: str
    formula: str
    source: str
    when: str
    loss: Callable[..., Any]
    weights: Callable[[Tensor, int], Tensor]
    advantages: str = "group"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kl_in_reward: bool = False
    whole_answers: bool = False

    @property
    def value_head(self) -> bool:
        """Whether it needs a critic."""
        return self.advantages == "gae"

    @property
    def loss_options(self) -> tuple[str, ...]:
        """The options that its loss takes."""
        parameters = inspect.signature(self.loss).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    @property
    def corrects_itself(self) -> bool:
        """Whether its loss takes the sampler's correction as an argument."""
        return "correction" in inspect.signature(self.loss).parameters


ALGORITHMS: dict[str, Algorithm] = {}


def register(algorithm: Algorithm) -> None:
    """Add to the table. Raises ValueError if the name is taken or the estimator unknown."""
    if algorithm.name in ALGORITHMS:
        raise ValueError(f"an algorithm named {algorithm.name!r} is registered already")
    if algorithm.advantages not in ESTIMATORS:
        raise ValueError(f"advantages must be one of {', '.join(ESTIMATORS)}; got {algorithm.advantages!r}")
    ALGORITHMS[algorithm.name] = algorithm


def get_algorithm(name: str) -> Algorithm:
    """Look an algorithm up by name; ValueError names those there are."""
    if name not in ALGORITHMS:
        close = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown algorithm {name!r}; there are {', '.join(ALGORITHMS)}{hint}")
    return ALGORITHMS[name]
