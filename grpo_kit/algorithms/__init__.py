"""Advantages and losses: pure functions on tensors, one formula each, with its source. Knows no model and no run.

Start with `explain()`; each algorithm's file holds its loss and says what it comes with.
"""

from grpo_kit.algorithms import (  # noqa: F401  (each registers itself)
    bnpo,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    luspo,
    online_dpo,
    ppo,
    rloo,
    sapo,
    vespo,
)
from grpo_kit.algorithms.advantages import dead_groups, group_advantages, leave_one_out, normalized_per_reward
from grpo_kit.algorithms.corrections import high_entropy_mask, off_policy_mask, sampler_correction
from grpo_kit.algorithms.explain import explain
from grpo_kit.algorithms.gae import gae, token_rewards, whiten
from grpo_kit.algorithms.kl import kl_estimate
from grpo_kit.algorithms.online_dpo import rank_pairs
from grpo_kit.algorithms.ppo import value_loss
from grpo_kit.algorithms.registry import ALGORITHMS, Algorithm, get_algorithm, register
from grpo_kit.algorithms.surrogate import clipped_surrogate

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "clipped_surrogate",
    "dead_groups",
    "explain",
    "gae",
    "get_algorithm",
    "group_advantages",
    "high_entropy_mask",
    "kl_estimate",
    "leave_one_out",
    "normalized_per_reward",
    "off_policy_mask",
    "rank_pairs",
    "register",
    "sampler_correction",
    "token_rewards",
    "value_loss",
    "whiten",
]
