"""grpo_kit: teach a language model to reason with reinforcement learning, from a notebook.

    import grpo_kit as gk

    model = gk.load_model("Qwen/Qwen2.5-1.5B-Instruct", load_in_4bit=True)
    run = gk.train(model, gk.data.arithmetic(500), gk.RewardSet(my_reward), steps=300)

This file holds no code of the library. It names what is public and imports each piece when it is
first asked for, so that `import grpo_kit` is quick, prints nothing and touches neither torch nor a
GPU. The notebook front end (`grpo_kit.widgets`) is reached only when a panel is shown.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_kit import algorithms, data, kernels, rewards, rollout, store, training
    from grpo_kit import model as model
    from grpo_kit.model import Model, load_model, memory_plan, quantize_dynamic
    from grpo_kit.rewards import Reward, RewardSet, Score, reward
    from grpo_kit.training import Run, evaluate, resume, train

__version__ = "0.1.0"

__all__ = [
    "Model",
    "Reward",
    "RewardSet",
    "Run",
    "Score",
    "algorithms",
    "data",
    "evaluate",
    "kernels",
    "load_model",
    "memory_plan",
    "model",
    "quantize_dynamic",
    "resume",
    "reward",
    "rewards",
    "rollout",
    "store",
    "train",
    "training",
]

# An installed package carries grpo_kit/widgets; in a clone the folder lies beside grpo_kit/.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "widgets").is_dir() and (_root / "widgets" / "__init__.py").is_file():
    __path__.append(str(_root))
del _root

_SUBMODULES = frozenset(
    {"algorithms", "data", "kernels", "model", "rewards", "rollout", "store", "training", "widgets"}
)

_HOME = {
    "Model": "grpo_kit.model",
    "load_model": "grpo_kit.model",
    "memory_plan": "grpo_kit.model",
    "quantize_dynamic": "grpo_kit.model",
    "Reward": "grpo_kit.rewards",
    "RewardSet": "grpo_kit.rewards",
    "Score": "grpo_kit.rewards",
    "reward": "grpo_kit.rewards",
    "Run": "grpo_kit.training",
    "evaluate": "grpo_kit.training",
    "resume": "grpo_kit.training",
    "train": "grpo_kit.training",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"grpo_kit.{name}")
    if name in _HOME:
        # Kept in the package from now on, so the lookup happens once.
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module 'grpo_kit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "widgets", "__version__"})
