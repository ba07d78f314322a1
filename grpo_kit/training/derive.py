"""What the user left open, filled in by the algorithm, the hardware or the usual value; each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_kit.algorithms import Algorithm, get_algorithm
from grpo_kit.training.optimizers import check_optimizer
from grpo_kit.training.options import CLIP_MAX, TrainOptions, options_of

# What an option is unless the user or the algorithm says otherwise; only those that the algorithm uses are filled in.
_DEFAULTS: dict[str, Any] = {
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "normalize_advantages": False,
    "dynamic_sampling_rounds": 0,
    "gamma": 1.0,
    "lam": 0.95,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "whiten_rewards": False,
    "epsilon": 0.2,
}


@dataclass(frozen=True)
class Setting:
    """One thing that was derived, and why."""

    name: str
    value: str
    reason: str


def derive(
    options: TrainOptions, on_gpu: bool, held_out: bool = False, memory: Budget | None = None
) -> tuple[TrainOptions, list[Setting]]:
    """Fill in what the user left open. What the user set is never changed. held_out: whether there is data to evaluate
    on. memory: what fits into the GPU's. Raises ValueError for an optimizer or offloading that can't work on this
    hardware, and for an evaluation of nothing."""
    check_optimizer(options.optim, on_gpu)
    derived: dict[str, tuple[Any, str]] = {}

    def fill(name: str, value: Any, reason: str) -> Any:
        """What holds: the user's value, or else the first one that was filled in."""
        given = getattr(options, name)
        return derived.setdefault(name, (value, reason))[0] if given is None else given

    _fill_for_algorithm(options, get_algorithm(options.algorithm), fill)
    _fill_for_checkups(options, held_out, fill)
    if options.importance_sampling_correction is not None:
        fill("importance_sampling_clip_max", CLIP_MAX, USUAL)
    _fill_for_memory(options, on_gpu, memory, fill)
    settings = [Setting(name, str(value), reason) for name, (value, reason) in derived.items()]
    filled = {name: value for name, (value, _) in derived.items()}
    return TrainOptions(**{**vars(options), **filled}), settings


@dataclass(frozen=True)
class Budget:
    """Of a memory plan: how many tokens at once, and whether layer inputs go to the host, with the reason."""

    tokens_per_micro_batch: int
    activation_offloading: bool
    reason: str


Fill = Callable[[str, Any, str], Any]
USUAL = "the usual value"


def _fill_for_algorithm(options: TrainOptions, algorithm: Algorithm, fill: Fill) -> None:
    unused = ["scale_rewards"] if options.multi_objective_aggregation == "normalize_then_sum" else []
    for name, value in algorithm.defaults.items():
        if name not in unused:
            fill(name, value, f"as {algorithm.name} defines it")
    beta = fill("beta", algorithm.defaults.get("beta", 0.0), USUAL)
    fill("num_iterations", algorithm.defaults.get("num_iterations", 1), USUAL)
    if beta and algorithm.advantages != "pairs":
        fill("kl_estimator", "k1" if algorithm.kl_in_reward else "k3", USUAL)
    elif beta == 0 and (options.kl_estimator is not None or options.use_bias_correction_kl):
        raise ValueError("kl_estimator and use_bias_correction_kl shape the pull of beta, which is 0: set beta above 0")
    for name in sorted(_DEFAULTS.keys() & set(options_of(algorithm.name)) - algorithm.defaults.keys()):
        if name not in unused:
            fill(name, _DEFAULTS[name], USUAL)
    if "epsilon_high" in algorithm.loss_options:
        own = algorithm.defaults.get("epsilon_high")
        epsilon = options.epsilon or algorithm.defaults.get("epsilon", _DEFAULTS["epsilon"])
        high = fill("epsilon_high", own or epsilon, f"as {algorithm.name} defines it" if own else "the same as epsilon")
        if options.delta is not None and options.delta <= 1 + high:
            raise ValueError(
                f"delta={options.delta} must be above 1 + epsilon_high = {1 + high:g}, or it clips good ones"
            )


def _fill_for_memory(options: TrainOptions, on_gpu: bool, memory: Budget | None, fill: Fill) -> None:
    if not on_gpu:
        if options.activation_offloading:
            raise ValueError(
                "activation_offloading moves what a GPU has to remember into the host's memory: no GPU here"
            )
        memory = Budget(512, False, "for a CPU")
    memory = memory or Budget(8192, False, "for a GPU")
    fill("tokens_per_micro_batch", memory.tokens_per_micro_batch, memory.reason)
    fill("activation_offloading", memory.activation_offloading, memory.reason)


def _fill_for_checkups(options: TrainOptions, held_out: bool, fill: Fill) -> None:
    if held_out or options.canary is not None:
        fill("eval_steps", options.checkpoint_every, "with every checkpoint")
    elif options.eval_steps is not None:
        raise ValueError("eval_steps says how often to evaluate, but there is nothing to ask: give eval_data or canary")
    if held_out:
        fill("num_generations_eval", 4, USUAL)
        fill("pass_threshold", 1.0, USUAL)
    elif options.num_generations_eval is not None or options.pass_threshold is not None:
        raise ValueError("num_generations_eval and pass_threshold are for held-out prompts: give eval_data")
