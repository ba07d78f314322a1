"""Advantages and losses: pure functions on tensors, one formula each, with its source. Knows no model and no run."""

from grpo_kit.algorithms import bnpo, dapo, dr_grpo, grpo  # noqa: F401  (each registers itself)
from grpo_kit.algorithms.advantages import dead_groups, group_advantages
from grpo_kit.algorithms.registry import ALGORITHMS, Algorithm, get_algorithm, register
from grpo_kit.algorithms.surrogate import clipped_surrogate, kl_k3

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "clipped_surrogate",
    "dead_groups",
    "get_algorithm",
    "group_advantages",
    "kl_k3",
    "register",
]
