"""DAPO: every token of the batch counts the same, and good rare tokens may grow further (clip-higher).

L = Σ_i Σ_t ℓ_it / Σ_i |o_i| with ε_high = 0.28           DAPO, https://arxiv.org/abs/2503.14476, equation 8
"""

from __future__ import annotations

from grpo_kit.algorithms.bnpo import weights
from grpo_kit.algorithms.registry import Algorithm, register

register(
    Algorithm(
        name="dapo",
        summary="Group advantages, each token weighs the same, clip-higher keeps exploration alive.",
        source="DAPO, https://arxiv.org/abs/2503.14476, equation 8",
        weights=weights,
        epsilon_high=0.28,
    )
)
