"""Every option of a run, checked before anything is loaded or computed. Names are the field's (TRL's) where it has
one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from grpo_kit.algorithms import ALGORITHMS, get_algorithm
from grpo_kit.algorithms.advantages import AGGREGATIONS, SCALES
from grpo_kit.algorithms.corrections import CORRECTIONS
from grpo_kit.algorithms.kl import KL_ESTIMATORS
from grpo_kit.rollout import Sampling
from grpo_kit.training.optimizers import check_optimizer
from grpo_kit.training.schedules import check_schedule, check_warmup

CLIP_MAX = 3.0  # of the sampler's correction, unless the user says otherwise
REWARD_ERROR_POLICIES = ("continue", "pause")


@dataclass(frozen=True)
class TrainOptions:
    """Options of `train`; None means "derive it", and what came out is in `run.settings` with the reason.

    The step: each draws `num_generations` answers to each of `prompts_per_step` prompts, and makes `num_iterations`
    optimizer steps on them. How many answers go through the model at once follows from `tokens_per_micro_batch`.

    The algorithm, by name (`grpo_kit.algorithms.explain()`), and what its loss takes:
    epsilon, epsilon_high, delta: how far the ratio to the old policy may move; delta bounds it for bad tokens too.
    sapo_*, vespo_*: shape of those losses' weights.
    beta, kl_estimator ("k1", "k2", "k3"), use_bias_correction_kl: the pull to the untrained model; the last multiplies
        its estimate by the ratio, which makes its gradient unbiased (DeepSeek-V3.2).
    scale_rewards, multi_objective_aggregation: what a group's advantages are divided by; whether rewards are normalised
        each by itself before they are summed (GDPO). normalize_advantages: RLOO's, over the step.
    dynamic_sampling_rounds: how many times groups that teach nothing are replaced by other prompts' (DAPO). Curves of
        reward and length stay those of the groups drawn first, `run.completions` are those learned from.
    gamma, lam, vf_coef, cliprange_value, whiten_rewards: PPO's critic.
    mask_truncated_completions: leave answers out of the loss that were cut at max_completion_length.
    entropy_coef: bonus for being unsure, per nat. top_entropy_quantile: learn from this share of the tokens only, those
        at which the policy was least sure.
    importance_sampling_correction ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask") and its
        importance_sampling_clip_max, _min: weigh by π_trainer / π_sampler. off_policy_mask_threshold: drop bad answers
        that the policy has left behind by more nats per token than this.

    Memory (`model.memory_plan()` shows where it goes): tokens_per_micro_batch is halved for good if memory runs out;
    activation_offloading keeps what backward needs of each layer in the host's memory.

    Optimizer: optim and lr_scheduler_type by transformers' names; the first warmup_steps steps rise linearly.
    max_grad_norm clips the gradient's norm.

    Judging: with `eval_data`, every eval_steps steps each held-out prompt is answered greedily and
    num_generations_eval times by sampling (0: not); an answer passes if the first reward gives it pass_threshold or
    more. canary: a prompt that is answered each time; the first held-out one unless given.
    """

    steps: int = 300
    prompts_per_step: int = 4
    num_generations: int = 8
    algorithm: str = "grpo"
    learning_rate: float = 5e-6

    beta: float | None = None
    kl_estimator: str | None = None
    use_bias_correction_kl: bool = False
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_pos: float | None = None
    sapo_temperature_neg: float | None = None
    vespo_k_pos: float | None = None
    vespo_lambda_pos: float | None = None
    vespo_k_neg: float | None = None
    vespo_lambda_neg: float | None = None
    scale_rewards: str | None = None
    multi_objective_aggregation: str | None = None
    normalize_advantages: bool | None = None
    dynamic_sampling_rounds: int | None = None
    gamma: float | None = None
    lam: float | None = None
    vf_coef: float | None = None
    cliprange_value: float | None = None
    whiten_rewards: bool | None = None
    num_iterations: int | None = None
    mask_truncated_completions: bool = False
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    importance_sampling_correction: str | None = None
    importance_sampling_clip_max: float | None = None
    importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None

    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    optim: str = "adamw_torch"
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    tokens_per_micro_batch: int | None = None
    activation_offloading: bool | None = None

    eval_steps: int | None = None
    num_generations_eval: int | None = None
    pass_threshold: float | None = None
    canary: str | None = None

    on_reward_error: str = "continue"
    checkpoint_every: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()
        for name, names in _NAMES.items():
            value = getattr(self, name)
            if value is not None and value not in names:
                raise ValueError(f"{name} must be one of {', '.join(names)}; got {value!r}")
        _check_fits(self)
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

    def _check_ranges(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least:g}, got {value}")
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in _SHARES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value}")

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
    "str": ((str,), "a text"),
}
_NAMES: dict[str, tuple[str, ...]] = {
    "scale_rewards": SCALES,
    "multi_objective_aggregation": AGGREGATIONS,
    "kl_estimator": KL_ESTIMATORS,
    "importance_sampling_correction": CORRECTIONS,
    "on_reward_error": REWARD_ERROR_POLICIES,
}
_AT_LEAST: dict[str, float] = {
    "steps": 1,
    "prompts_per_step": 1,
    "num_generations": 1,
    "beta": 0,
    "epsilon_high": 0,
    "dynamic_sampling_rounds": 0,
    "vf_coef": 0,
    "num_iterations": 1,
    "entropy_coef": 0,
    "max_completion_length": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "tokens_per_micro_batch": 1,
    "eval_steps": 1,
    "num_generations_eval": 0,
    "vespo_lambda_pos": 0,
    "vespo_lambda_neg": 0,
    "importance_sampling_clip_min": 0,
    "checkpoint_every": 1,
}
_ABOVE_ZERO = (
    "learning_rate",
    "epsilon",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "cliprange_value",
    "top_entropy_quantile",
    "importance_sampling_clip_max",
    "temperature",
    "max_grad_norm",
)
_SHARES = ("gamma", "lam", "top_entropy_quantile")

# Which options belong to which estimator of advantages. Given for another one they would do nothing.
_ESTIMATORS_OPTIONS: dict[str, tuple[str, ...]] = {
    "group": ("scale_rewards", "multi_objective_aggregation", "dynamic_sampling_rounds"),
    "leave_one_out": ("normalize_advantages", "dynamic_sampling_rounds"),
    "gae": ("gamma", "lam", "vf_coef", "cliprange_value", "whiten_rewards"),
    "pairs": ("dynamic_sampling_rounds",),
}


def _of_some_algorithms() -> set[str]:
    """Options that only some algorithms take."""
    loss = {name for algorithm in ALGORITHMS.values() for name in algorithm.loss_options}
    estimator = {name for names in _ESTIMATORS_OPTIONS.values() for name in names}
    return (loss | estimator) - {"beta"}


def options_of(algorithm_name: str) -> list[str]:
    """The options that this algorithm takes and some others don't."""
    algorithm = get_algorithm(algorithm_name)
    return sorted({*algorithm.loss_options, *_ESTIMATORS_OPTIONS[algorithm.advantages]} - {"beta"})


def _check_fits(options: TrainOptions) -> None:
    """Whether the options go together. An option that would do nothing is an error, not a surprise."""
    algorithm = get_algorithm(options.algorithm)
    check_optimizer(options.optim, on_gpu=True)
    check_schedule(options.lr_scheduler_type)
    taken = options_of(options.algorithm)
    for name in sorted(_of_some_algorithms() - set(taken)):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{options.algorithm} has no {name}; remove it, or choose another algorithm. It takes "
                f"{', '.join(taken)}"
            )
    least = 1 if algorithm.value_head else 2
    if options.num_generations < least:
        raise ValueError(
            f"num_generations must be at least {least}, got {options.num_generations}: {options.algorithm} compares "
            "the answers to one prompt with each other"
        )
    check_warmup(options.lr_scheduler_type, options.steps, options.warmup_steps)
    if options.kl_estimator == "k1" and not algorithm.kl_in_reward:
        raise ValueError(
            "kl_estimator='k1' in the loss has no gradient on average; take 'k2' or 'k3', or rloo or ppo, which take "
            "the KL off the reward"
        )
    if options.use_bias_correction_kl and algorithm.kl_in_reward:
        raise ValueError(f"{algorithm.name} has its KL in the reward, where use_bias_correction_kl does nothing")
    if options.top_entropy_quantile < 1 and algorithm.whole_answers:
        raise ValueError(
            f"{algorithm.name} has one ratio for the whole answer, so top_entropy_quantile can't leave tokens out of it"
        )
    if options.scale_rewards is not None and options.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError("normalize_then_sum divides by each reward's own std, so scale_rewards would do nothing")
    if options.canary == "":
        raise ValueError("canary is an empty text; give a question, or leave it out")
    _check_pairs(options)
    _check_correction(options)


def _check_correction(options: TrainOptions) -> None:
    bounds = (options.importance_sampling_clip_min, options.importance_sampling_clip_max)
    if options.importance_sampling_correction is None:
        if bounds != (None, None):
            raise ValueError(
                "importance_sampling_clip_min and _max bound a correction that is off: choose one by "
                f"importance_sampling_correction ({', '.join(CORRECTIONS)})"
            )
        return
    lowest, highest = bounds[0] or 0.0, bounds[1] or CLIP_MAX
    if lowest >= highest:
        raise ValueError(
            f"importance_sampling_clip_min={lowest:g} must be below importance_sampling_clip_max={highest:g}"
        )
    if options.algorithm == "vespo" and options.importance_sampling_correction.startswith("sequence"):
        raise ValueError("vespo multiplies the correction over the answer by itself; take token_truncate or token_mask")


def _check_pairs(options: TrainOptions) -> None:
    """Pairs have no loss for each token, so what weighs tokens does not apply; and they need a reference."""
    if get_algorithm(options.algorithm).advantages != "pairs":
        return
    for name, off in _NOT_FOR_PAIRS.items():
        if getattr(options, name) != off:
            raise ValueError(f"{options.algorithm} has no loss for each token, so {name} can't be used with it")
    if options.beta == 0:
        raise ValueError(f"{options.algorithm} needs beta above 0: it measures likelihoods against the reference")


_NOT_FOR_PAIRS: dict[str, Any] = {
    "kl_estimator": None,
    "use_bias_correction_kl": False,
    "entropy_coef": 0.0,
    "top_entropy_quantile": 1.0,
    "importance_sampling_correction": None,
    "off_policy_mask_threshold": None,
}
