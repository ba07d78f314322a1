"""Prompts with answers, as `datasets.Dataset`s: built-in tasks, the user's own rows, and a look at the exact prompt."""

from __future__ import annotations

from grpo_kit.data.arithmetic import arithmetic
from grpo_kit.data.formats import NUMBER_ONLY, REASONING_FORMAT
from grpo_kit.data.gsm8k import gsm8k
from grpo_kit.data.preview import check_lengths, preview
from grpo_kit.data.reasoning_gym import reasoning_gym
from grpo_kit.data.rows import from_rows

__all__ = [
    "NUMBER_ONLY",
    "REASONING_FORMAT",
    "arithmetic",
    "check_lengths",
    "from_rows",
    "gsm8k",
    "preview",
    "reasoning_gym",
]
