"""The table of algorithms: what each is made of and comes with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from grpo_kit.algorithms import ALGORITHMS, get_algorithm, register
from grpo_kit.algorithms.gspo import sequence_surrogate, sequence_token_surrogate
from grpo_kit.algorithms.surrogate import token_surrogate
from grpo_kit.algorithms.weights import answer_sum, constant, per_answer, per_token
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions

OPTIONS = {field.name for field in fields(TrainOptions)}
WEIGHTS = {
    per_answer: {"grpo", "sapo", "gspo", "gspo_token"},
    per_token: {"bnpo", "dapo", "cispo", "vespo", "ppo"},
    constant: {"dr_grpo"},
    answer_sum: {"luspo", "rloo", "online_dpo", "online_ipo"},
}
# What the papers, or where they are silent TRL, set. What is not here is everyone's default.
DEFAULTS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"scale_rewards": "none"},
    "dapo": {"epsilon_high": 0.28, "dynamic_sampling_rounds": 2},
    "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo_token": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"epsilon_high": 4.0},
    "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "vespo": {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
    "rloo": {"beta": 0.05},
    "ppo": {"beta": 0.05, "num_iterations": 4},
    "online_dpo": {"beta": 0.1},
    "online_ipo": {"beta": 0.1},
}
ESTIMATORS = {"rloo": "leave_one_out", "ppo": "gae", "online_dpo": "pairs", "online_ipo": "pairs"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_each_is_made_of(name: str) -> None:
    it = ALGORITHMS[name]
    assert it.name == name and get_algorithm(name) is it
    assert [names for weights, names in WEIGHTS.items() if weights is it.weights] == [
        names for names in WEIGHTS.values() if name in names
    ]
    assert dict(it.defaults) == DEFAULTS.get(name, {})
    assert it.advantages == ESTIMATORS.get(name, "group")
    assert it.kl_in_reward == (name in ("rloo", "ppo"))
    assert it.value_head == (name == "ppo")
    assert it.corrects_itself == (name == "vespo")


def test_the_losses_that_are_shared() -> None:
    assert all(ALGORITHMS[name].loss is token_surrogate for name in ("grpo", "bnpo", "dr_grpo", "dapo"))
    assert all(ALGORITHMS[name].loss is sequence_surrogate for name in ("gspo", "luspo"))
    assert ALGORITHMS["gspo_token"].loss is sequence_token_surrogate


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_of_a_loss_is_an_option_of_a_run(name: str) -> None:
    it = ALGORITHMS[name]
    assert it.loss_options and set(it.loss_options) <= OPTIONS
    assert set(it.defaults) <= OPTIONS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_has_all_that_the_loss_needs(name: str) -> None:
    options = derive(TrainOptions(algorithm=name), on_gpu=False)[0]
    for option, value in ALGORITHMS[name].defaults.items():
        assert getattr(options, option) == value
    missing = {option for option in ALGORITHMS[name].loss_options if getattr(options, option) is None}
    assert missing <= {"delta"}  # None means unbounded there


def test_an_unknown_name_is_answered_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm 'dr-grpo'; there are .*dr_grpo.*did you mean 'dr_grpo'\?"):
        get_algorithm("dr-grpo")
    with pytest.raises(ValueError, match=r"there are (\w+, )+\w+$"):
        get_algorithm("zzzz")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register(get_algorithm("grpo"))
    assert ALGORITHMS["grpo"] is get_algorithm("grpo")


def test_an_unknown_estimator_is_refused() -> None:
    odd = replace(get_algorithm("grpo"), name="odd", advantages="median")
    with pytest.raises(ValueError, match="advantages must be one of group, leave_one_out, gae, pairs; got 'median'"):
        register(odd)
    assert "odd" not in ALGORITHMS
