"""Options are checked in words before anything is computed, and what is derived never touches what was set."""

from __future__ import annotations

import pytest

from grpo_kit.algorithms import ALGORITHMS
from grpo_kit.training import TrainOptions
from grpo_kit.training.derive import Budget, derive
from grpo_kit.training.options import options_of

NAN, INF = float("nan"), float("inf")

BAD = [
    ("steps", 0), ("steps", 2.5), ("steps", "ten"), ("steps", True), ("steps", None),
    ("prompts_per_step", 0), ("num_generations", 1), ("num_iterations", 0), ("checkpoint_every", 0),
    ("max_completion_length", 0), ("tokens_per_micro_batch", 0), ("seed", "abc"), ("seed", 1.0),
    ("learning_rate", 0), ("learning_rate", -1e-6), ("learning_rate", NAN), ("learning_rate", INF),
    ("learning_rate", "fast"), ("beta", -0.1), ("beta", NAN), ("epsilon", 0), ("epsilon_high", -1),
    ("max_grad_norm", 0), ("weight_decay", -1), ("temperature", 0), ("temperature", INF),
    ("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("min_p", 1), ("repetition_penalty", 0),
    ("mask_truncated_completions", "no"), ("mask_truncated_completions", 1),
    ("warmup_steps", -1), ("warmup_steps", 2.0), ("entropy_coef", -0.1), ("top_entropy_quantile", 0),
    ("top_entropy_quantile", 1.1), ("importance_sampling_clip_max", 0), ("importance_sampling_correction", "token"),
    ("eval_steps", 0), ("num_generations_eval", -1), ("pass_threshold", NAN), ("canary", 3), ("delta", INF),
    ("kl_estimator", "k4"), ("multi_objective_aggregation", "sum"), ("optim", "adam"),
    ("use_bias_correction_kl", None), ("off_policy_mask_threshold", "far"), ("dynamic_sampling_rounds", -1),
    ("scale_rewards", "median"), ("on_reward_error", "ignore"), ("algorithm", "grop"), ("algorithm", 3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        TrainOptions(**{name: value})


def test_the_words_say_what_would_do():
    with pytest.raises(ValueError, match="num_generations must be at least 2, got 1"):
        TrainOptions(num_generations=1)
    with pytest.raises(ValueError, match="learning_rate must be a finite number, got nan"):
        TrainOptions(learning_rate=NAN)
    with pytest.raises(ValueError, match=r"steps must be a whole number, got 2\.5"):
        TrainOptions(steps=2.5)
    with pytest.raises(ValueError, match=r"on_reward_error must be one of continue, pause; got 'ignore'"):
        TrainOptions(on_reward_error="ignore")
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        TrainOptions(algorithm="grop")


# Option sets that are refused, and the words that say why.
REFUSED = [
    ({"gamma": 1.5, "algorithm": "ppo"}, "gamma must lie between 0 and 1, got 1.5"),
    ({"lam": -0.5, "algorithm": "ppo"}, "lam must lie between 0 and 1"),
    ({"cliprange_value": 0.0, "algorithm": "ppo"}, "cliprange_value must be above 0"),
    ({"vf_coef": -1.0, "algorithm": "ppo"}, "vf_coef must be at least 0"),
    ({"whiten_rewards": 1, "algorithm": "ppo"}, "whiten_rewards must be True or False"),
    ({"sapo_temperature_pos": 0.0, "algorithm": "sapo"}, "sapo_temperature_pos must be above 0"),
    ({"sapo_temperature_neg": 0.0, "algorithm": "sapo"}, "sapo_temperature_neg must be above 0"),
    ({"num_generations": 0, "algorithm": "ppo"}, "num_generations must be at least 1"),
    ({"num_generations": 1, "algorithm": "rloo"}, "num_generations must be at least 2, got 1: rloo compares"),
    ({"warmup_steps": 11, "steps": 10, "lr_scheduler_type": "cosine"}, "warmup_steps must be from 0 to the run's 10"),
    ({"warmup_steps": 5}, "the schedule 'constant' has no warm-up"),
    ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
    ({"optim": "adamw_8bits"}, "did you mean 'adamw_8bit'"),
    ({"kl_estimator": "k1"}, "kl_estimator='k1' in the loss has no gradient on average; take 'k2' or 'k3'"),
    ({"algorithm": "online_dpo", "beta": 0.0}, "online_dpo needs beta above 0"),
    ({"delta": 1.2}, "delta=1.2 must be above 1 \\+ epsilon_high = 1.2"),
    ({"delta": 1.5, "epsilon": 0.1, "epsilon_high": 0.5}, "delta=1.5 must be above 1 \\+ epsilon_high = 1.5"),
    ({"delta": 1.25, "algorithm": "dapo"}, "delta=1.25 must be above 1 \\+ epsilon_high = 1.28"),
    ({"delta": 1.0004, "algorithm": "gspo"}, "must be above 1 \\+ epsilon_high = 1.0004"),
    *(({"algorithm": name, "top_entropy_quantile": 0.5}, f"{name} has one ratio for the whole answer")
      for name in ("rloo", "gspo", "luspo")),
    *(({"algorithm": name, "use_bias_correction_kl": True}, f"{name} has its KL in the reward")
      for name in ("rloo", "ppo")),
    ({"use_bias_correction_kl": True}, "the pull of beta, which is 0: set beta above 0"),
    ({"use_bias_correction_kl": True, "beta": 0.0}, "set beta above 0"),
    ({"kl_estimator": "k2"}, "set beta above 0"),
    ({"kl_estimator": "k1", "algorithm": "rloo", "beta": 0.0}, "set beta above 0"),
    ({"importance_sampling_clip_max": 2.0}, "bound a correction that is off: choose one by importance_sampling_corr"),
    ({"importance_sampling_clip_min": 0.5}, "bound a correction that is off"),
    ({"importance_sampling_correction": "token_mask", "importance_sampling_clip_min": 2.0,
      "importance_sampling_clip_max": 2.0}, "clip_min=2 must be below importance_sampling_clip_max=2"),
    ({"importance_sampling_correction": "token_mask", "importance_sampling_clip_min": 3.0}, "clip_min=3 must be below"),
    ({"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"}, "scale_rewards would do nothing"),
    ({"num_generations_eval": 4}, "for held-out prompts: give eval_data"),
    ({"num_generations_eval": 0}, "give eval_data"),
    ({"pass_threshold": 0.5, "canary": "?"}, "give eval_data"),
    ({"canary": ""}, "canary is an empty text"),
    ({"algorithm": "vespo", "importance_sampling_correction": "sequence_mask"}, "take token_truncate or token_mask"),
    *(({"algorithm": "online_ipo", name: value}, f"online_ipo has no loss for each token, so {name} can't")
      for name, value in [("kl_estimator", "k3"), ("use_bias_correction_kl", True), ("entropy_coef", 0.1),
                          ("top_entropy_quantile", 0.5), ("importance_sampling_correction", "token_mask"),
                          ("off_policy_mask_threshold", 1.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        derive(TrainOptions(**options), on_gpu=False)


ACCEPTED = [
    {"delta": 1.1, "algorithm": "gspo"},  # far above its epsilon_high of 4e-4
    {"delta": 1.3, "algorithm": "dapo"},
    {"delta": 1.15, "epsilon": 0.1},
    {"top_entropy_quantile": 1.0, "algorithm": "gspo"},
    {"top_entropy_quantile": 0.5, "algorithm": "gspo_token"},
    {"use_bias_correction_kl": True, "beta": 0.1},
    {"kl_estimator": "k2", "algorithm": "rloo"},  # whose beta is above 0 by itself
    {"importance_sampling_correction": "token_mask", "importance_sampling_clip_min": 2.9},
    {"scale_rewards": "batch", "multi_objective_aggregation": "sum_then_normalize"},
]


@pytest.mark.parametrize("options", ACCEPTED)
def test_options_that_do(options):
    filled, _ = derive(TrainOptions(**options), on_gpu=False)
    assert {name: getattr(filled, name) for name in options} == options


SPECIAL = {  # a value for each option that only some algorithms take
    "epsilon": 0.1, "epsilon_high": 0.3, "delta": 2.0, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.0,
    "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0, "vespo_lambda_neg": 1.0, "scale_rewards": "none",
    "multi_objective_aggregation": "sum_then_normalize", "normalize_advantages": False, "dynamic_sampling_rounds": 0,
    "gamma": 1.0, "lam": 1.0, "vf_coef": 0.1, "cliprange_value": 0.2, "whiten_rewards": False,
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_option_that_would_do_nothing_is_refused(algorithm):
    """Off or on: whoever writes it believes that it matters."""
    taken = set(options_of(algorithm))
    assert taken <= SPECIAL.keys()
    TrainOptions(algorithm=algorithm, **{name: SPECIAL[name] for name in taken})
    for name in SPECIAL.keys() - taken:
        with pytest.raises(ValueError, match=f"{algorithm} has no {name}; remove it, or choose another algorithm"):
            TrainOptions(algorithm=algorithm, **{name: SPECIAL[name]})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_that_an_algorithm_takes_stays_open(algorithm):
    filled, settings = derive(TrainOptions(algorithm=algorithm), on_gpu=False)
    for name in (*options_of(algorithm), "beta", "num_iterations", "tokens_per_micro_batch"):
        assert getattr(filled, name) is not None or name == "delta", name
    assert (filled.kl_estimator is not None) == (algorithm in ("rloo", "ppo"))  # elsewhere there is none, or beta is 0
    for name in SPECIAL.keys() - set(options_of(algorithm)):
        assert getattr(filled, name) is None, name
    assert len({setting.name for setting in settings}) == len(settings)
    assert derive(filled, on_gpu=False) == (filled, [])  # so that a resumed run finds nothing open


def test_what_each_algorithm_comes_with():
    def of(algorithm, *names):
        filled = derive(TrainOptions(algorithm=algorithm), on_gpu=False)[0]
        return tuple(getattr(filled, name) for name in names)

    assert of("grpo", "beta", "kl_estimator", "num_iterations", "epsilon", "delta") == (0.0, None, 1, 0.2, None)
    assert of("dapo", "dynamic_sampling_rounds", "epsilon", "epsilon_high") == (2, 0.2, 0.28)
    assert of("gspo", "epsilon", "epsilon_high") == (3e-4, 4e-4)
    assert of("cispo", "epsilon_high") == (4.0,)
    assert of("rloo", "beta", "kl_estimator", "normalize_advantages") == (0.05, "k1", False)
    assert of("ppo", "beta", "kl_estimator", "num_iterations") == (0.05, "k1", 4)
    assert of("ppo", "gamma", "lam", "vf_coef", "cliprange_value") == (1.0, 0.95, 0.1, 0.2)
    assert of("online_dpo", "beta") == (0.1,)
    assert of("sapo", "sapo_temperature_pos", "sapo_temperature_neg") == (1.0, 1.05)


def test_how_the_kl_is_estimated_is_derived_only_where_it_is():
    for algorithm, estimator in (("grpo", "k3"), ("gspo", "k3"), ("rloo", "k1"), ("ppo", "k1")):
        assert derive(TrainOptions(algorithm=algorithm, beta=0.1), on_gpu=False)[0].kl_estimator == estimator
        assert derive(TrainOptions(algorithm=algorithm, beta=0.0), on_gpu=False)[0].kl_estimator is None


def test_the_bound_of_a_correction_is_derived_only_with_one():
    def found(**options):
        filled, settings = derive(TrainOptions(**options), on_gpu=False)
        return filled.importance_sampling_clip_max, "importance_sampling_clip_max" in {s.name for s in settings}

    assert found() == (None, False)
    assert found(importance_sampling_correction="token_truncate") == (3.0, True)
    assert found(importance_sampling_correction="token_mask", importance_sampling_clip_max=2.0) == (2.0, False)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo"])
def test_rewards_normalised_each_by_itself_need_no_scale(algorithm):
    asked = TrainOptions(algorithm=algorithm, multi_objective_aggregation="normalize_then_sum")
    filled, settings = derive(asked, on_gpu=False)
    assert filled.scale_rewards is None
    assert "scale_rewards" not in {setting.name for setting in settings}


def test_how_to_evaluate_is_derived_only_with_held_out_prompts():
    filled, settings = derive(TrainOptions(), on_gpu=False, held_out=True)
    assert (filled.num_generations_eval, filled.pass_threshold) == (4, 1.0)
    assert {"num_generations_eval", "pass_threshold"} <= {setting.name for setting in settings}
    filled, settings = derive(TrainOptions(canary="?"), on_gpu=False)
    assert (filled.num_generations_eval, filled.pass_threshold) == (None, None)
    asked = TrainOptions(num_generations_eval=0, pass_threshold=0.5)
    filled, _ = derive(asked, on_gpu=False, held_out=True)
    assert (filled.num_generations_eval, filled.pass_threshold) == (0, 0.5)


def test_when_to_evaluate_is_derived_only_where_there_is_something_to_ask():
    assert derive(TrainOptions(checkpoint_every=7), on_gpu=False)[0].eval_steps is None
    for options, held_out in (
        (TrainOptions(checkpoint_every=7), True),
        (TrainOptions(checkpoint_every=7, canary="?"), False),
    ):
        filled, settings = derive(options, on_gpu=False, held_out=held_out)
        assert filled.eval_steps == 7
        assert ("eval_steps", "7", "with every checkpoint") in [(s.name, s.value, s.reason) for s in settings]
    assert derive(TrainOptions(eval_steps=3), on_gpu=False, held_out=True)[0].eval_steps == 3
    with pytest.raises(ValueError, match="nothing to ask: give eval_data or canary"):
        derive(TrainOptions(eval_steps=3), on_gpu=False)


def test_a_paged_optimizer_needs_a_gpu():
    assert derive(TrainOptions(optim="paged_adamw_8bit"), on_gpu=True)[0].optim == "paged_adamw_8bit"
    with pytest.raises(ValueError, match="on a CPU use 'adamw_8bit'"):
        derive(TrainOptions(optim="paged_adamw_8bit"), on_gpu=False)


def test_whole_numbers_will_do_for_numbers():
    options = TrainOptions(beta=0, learning_rate=1, temperature=1)
    assert (options.beta, options.learning_rate) == (0, 1)


def test_what_is_open_is_derived_and_listed_with_the_reason():
    filled, settings = derive(TrainOptions(), on_gpu=False)
    assert (filled.scale_rewards, filled.epsilon_high, filled.tokens_per_micro_batch) == ("group", 0.2, 512)
    listed = {setting.name: (setting.value, setting.reason) for setting in settings}
    assert listed["scale_rewards"] == ("group", "the usual value")
    assert listed["epsilon_high"] == ("0.2", "the same as epsilon")
    assert listed["tokens_per_micro_batch"][0] == "512"
    assert "CPU" in listed["tokens_per_micro_batch"][1]


def test_the_algorithm_and_the_device_decide():
    filled, settings = derive(TrainOptions(algorithm="dapo"), on_gpu=True)
    assert (filled.scale_rewards, filled.epsilon_high, filled.tokens_per_micro_batch) == ("group", 0.28, 8192)
    assert ("epsilon_high", "0.28", "as dapo defines it") in [(s.name, s.value, s.reason) for s in settings]
    assert derive(TrainOptions(algorithm="dr_grpo"), on_gpu=True)[0].scale_rewards == "none"


def test_what_the_user_set_stays_and_is_not_listed():
    asked = TrainOptions(
        algorithm="dapo", scale_rewards="batch", multi_objective_aggregation="sum_then_normalize", epsilon=0.1,
        epsilon_high=0.5, beta=0.1, kl_estimator="k2", num_iterations=2, dynamic_sampling_rounds=1,
        tokens_per_micro_batch=7, activation_offloading=True,
    )  # fmt: skip
    filled, settings = derive(asked, on_gpu=True, memory=Budget(1, False, "a plan"))
    assert filled == asked
    assert settings == []


def test_what_a_memory_plan_makes_room_for_is_taken_and_its_reason_told():
    filled, settings = derive(TrainOptions(), on_gpu=True, memory=Budget(3072, True, "a plan"))
    assert (filled.tokens_per_micro_batch, filled.activation_offloading) == (3072, True)
    assert ("activation_offloading", "True", "a plan") in [(s.name, s.value, s.reason) for s in settings]


def test_nothing_is_offloaded_where_there_is_no_gpu():
    filled, _ = derive(TrainOptions(), on_gpu=False)
    assert (filled.tokens_per_micro_batch, filled.activation_offloading) == (512, False)
    with pytest.raises(ValueError, match="no GPU here"):
        derive(TrainOptions(activation_offloading=True), on_gpu=False)


def test_epsilon_high_follows_the_epsilon_set():
    assert derive(TrainOptions(epsilon=0.1), on_gpu=False)[0].epsilon_high == 0.1


def test_deriving_touches_only_what_was_open():
    asked = TrainOptions(steps=3, beta=0.04, seed=9)
    filled, settings = derive(asked, on_gpu=False)
    derived = {setting.name for setting in settings}
    assert {name for name, value in vars(filled).items() if value != getattr(asked, name)} == derived


def test_sampling_carries_the_options():
    sampling = TrainOptions(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_completion_length=12).sampling(seed=3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 5, 0.1)
    assert (sampling.max_tokens, sampling.seed) == (12, 3)
