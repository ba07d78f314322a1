"""Options are checked in words before anything is computed, and what is derived never touches what was set."""

from __future__ import annotations

import pytest

from grpo_kit.training import TrainOptions
from grpo_kit.training.options import derive

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
    assert (filled.scale_rewards, filled.epsilon_high, filled.tokens_per_micro_batch) == ("group", 0.28, 16_384)
    assert ("epsilon_high", "0.28", "as dapo defines it") in [(s.name, s.value, s.reason) for s in settings]
    assert derive(TrainOptions(algorithm="dr_grpo"), on_gpu=True)[0].scale_rewards == "none"


def test_what_the_user_set_stays_and_is_not_listed():
    asked = TrainOptions(
        algorithm="dapo", scale_rewards="batch", multi_objective_aggregation="normalize_then_sum", epsilon=0.1,
        epsilon_high=0.5, beta=0.1, kl_estimator="k2", num_iterations=2, dynamic_sampling_rounds=1,
        tokens_per_micro_batch=7,
    )  # fmt: skip
    filled, settings = derive(asked, on_gpu=True)
    assert filled == asked
    assert settings == []


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
