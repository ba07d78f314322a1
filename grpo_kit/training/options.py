"""Every option of a run, checked before anything is loaded or computed. Names are the field's (TRL's) where it has
one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from grpo_kit.algorithms import get_algorithm
from grpo_kit.algorithms.advantages import SCALES
from grpo_kit.rollout import Sampling

REWARD_ERROR_POLICIES = ("continue", "pause")


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train`; None means "derive it", and what came out is in `run.settings` with the reason.

    steps, prompts_per_step, num_generations: each step draws `num_generations` answers to each of `prompts_per_step`
    prompts. How many of them go through the model at once is a third thing, derived from `tokens_per_micro_batch`.
    """

    steps: int = 300
    prompts_per_step: int = 4
    num_generations: int = 8
    algorithm: str = "grpo"
    learning_rate: float = 5e-6
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    scale_rewards: str | None = None
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    tokens_per_micro_batch: int | None = None
    on_reward_error: str = "continue"
    checkpoint_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        get_algorithm(self.algorithm)
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least:g}, got {value}")
        for name in ("learning_rate", "epsilon", "temperature", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.scale_rewards is not None and self.scale_rewards not in SCALES:
            raise ValueError(f"scale_rewards must be one of {', '.join(SCALES)}; got {self.scale_rewards!r}")
        if self.on_reward_error not in REWARD_ERROR_POLICIES:
            raise ValueError(
                f"on_reward_error must be one of {', '.join(REWARD_ERROR_POLICIES)}; got {self.on_reward_error!r}"
            )
        self.sampling(seed=0)  # checks the sampling options

    def _check_types(self) -> None:
        for field in fields(self):
            kind, value = str(field.type).split(" | ")[0], getattr(self, field.name)
            if value is None and str(field.type).endswith("None"):
                continue
            types, words = _TYPES[kind]
            fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
            if not fits or (kind == "float" and not math.isfinite(value)):
                raise ValueError(f"{field.name} must be {words}, got {value!r}")

    def sampling(self, seed: int) -> Sampling:
        """How a step's completions are drawn."""
        return Sampling(
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
        )


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a finite number"),
    "bool": ((bool,), "True or False"),
    "str": ((str,), "a name"),
}

_AT_LEAST: dict[str, float] = {
    "steps": 1,
    "prompts_per_step": 1,
    "num_generations": 2,
    "beta": 0,
    "epsilon_high": 0,
    "num_iterations": 1,
    "max_completion_length": 1,
    "weight_decay": 0,
    "tokens_per_micro_batch": 1,
    "checkpoint_every": 1,
}


@dataclass(frozen=True)
class Setting:
    """One thing that was derived, and why."""

    name: str
    value: str
    reason: str


def derive(options: TrainOptions, on_gpu: bool) -> tuple[TrainOptions, list[Setting]]:
    """Fill in what the user left open. What the user set is never changed."""
    algorithm = get_algorithm(options.algorithm)
    derived: dict[str, tuple[object, str]] = {}
    if options.scale_rewards is None:
        derived["scale_rewards"] = (algorithm.scale_rewards, f"as {algorithm.name} defines it")
    if options.epsilon_high is None and algorithm.epsilon_high is None:
        derived["epsilon_high"] = (options.epsilon, "the same as epsilon")
    elif options.epsilon_high is None:
        derived["epsilon_high"] = (algorithm.epsilon_high, f"as {algorithm.name} defines it")
    if options.tokens_per_micro_batch is None:
        tokens, why = (16_384, "a GPU") if on_gpu else (512, "a CPU")
        derived["tokens_per_micro_batch"] = (tokens, f"for {why}")
    settings = [Setting(name, str(value), reason) for name, (value, reason) in derived.items()]
    filled = {name: value for name, (value, _) in derived.items()}
    return TrainOptions(**{**vars(options), **filled}), settings
