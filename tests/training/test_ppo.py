"""PPO through whole runs: its critic learns, and is part of the checkpoint."""

from __future__ import annotations

import statistics

import pytest
from safetensors.torch import load_file

import grpo_kit as gk
from grpo_kit.rewards import reward
from grpo_kit.rollout import Completion
from grpo_kit.training import resume
from grpo_kit.training.checkpoint import checkpoints
from tests.training.helpers import SOON, DrawnEngine, adapter, numbers

PPO = {
    "algorithm": "ppo", "prompts_per_step": 2, "num_generations": 4, "max_completion_length": 8,
    "learning_rate": 1e-2, "tokens_per_micro_batch": 10_000, "num_iterations": 2,
}  # fmt: skip


class TellingEngine(DrawnEngine):
    """Each answer is one number again and again, so that its first token tells what it will be worth."""

    def _answer(self, prompt, sampling, number):
        drawn = super()._answer(prompt, sampling, number)
        ids = [65 if drawn.token_ids[0] < 128 else 200] * len(drawn.token_ids)
        return Completion(ids, drawn.logprobs, drawn.finish_reason, " ".join(map(str, ids)))


@reward
def small_number(completion):
    return 2.0 if completion.startswith("65") else 1.0


@pytest.fixture
def begin(model, data, tmp_path):
    model.engine = TellingEngine()

    def begin(run_dir="run", **options):
        return gk.train(model, data, small_number, run_dir=tmp_path / run_dir, **{**PPO, **options})

    return begin


def finish(run):
    run.wait(SOON)
    assert run.state == "finished", run.error
    return run


def test_the_critic_learns(begin):
    rows = finish(begin(steps=40, num_generations=8, num_iterations=4, learning_rate=3e-3)).record.steps()
    losses = [row["value_loss"] for row in rows]
    explained = [row["explained_variance"] for row in rows if row["explained_variance"] is not None]
    assert losses[0] > 0.5  # it starts at 0, and returns are 1 or 2
    assert explained[0] == 0
    assert statistics.mean(losses[-10:]) < 0.2 * losses[0]
    assert statistics.median(explained[-20:]) > 0.3  # a mean is no measure: in some steps all answers are of a kind
    assert all(row["kl_penalty"] is not None for row in rows)


def test_a_checkpoint_holds_the_critic(begin, model):
    run = finish(begin(steps=2))
    last = checkpoints(run.directory)[-1]
    critic = load_file(last / "value_head.safetensors")
    assert critic["weight"].shape == (model.causal_lm.config.hidden_size,)
    assert critic["weight"].any()
    assert critic["bias"] != 0
    assert not load_file(checkpoints(run.directory)[0] / "value_head.safetensors")["weight"].any()
    assert "value_head.weight|exp_avg" in load_file(last / "optimizer.safetensors")
    assert "value_head" not in str(list(load_file(last / "adapter_model.safetensors")))  # so that peft can read it


def test_one_answer_a_prompt_will_do(begin, model):
    before = adapter(model)
    run = finish(begin(steps=3, num_generations=1, prompts_per_step=4))
    assert len(run.completions(1)) == 4
    assert any((before[name] != weight).any() for name, weight in adapter(model).items())


def test_an_answer_that_nobody_scored_is_left_out(begin, model, data, tmp_path):
    """The critic must not learn that it was worth nothing."""

    def shy(completion):
        return None

    before = adapter(model)
    run = finish(gk.train(model, data, shy, run_dir=tmp_path / "shy", steps=2, **PPO))
    assert [row["grad_norm"] for row in run.record.steps()] == [0.0, 0.0]
    assert [row["explained_variance"] for row in run.record.steps()] == [None, None]
    assert [row["dead_groups"] for row in run.record.steps()] == [None, None]
    assert all((before[name] == weight).all() for name, weight in adapter(model).items())


def test_without_the_critic_it_would_go_on_otherwise(begin, model):
    """So the checkpoint's critic is used: with a fresh one the numbers differ."""
    whole = finish(begin("whole", steps=4))
    model.reset_adapter()
    part = finish(begin("part", steps=2))
    model.reset_adapter()
    again = finish(resume(part.directory, model=model, rewards=small_number, steps=4))
    assert numbers(again) == numbers(whole)
    assert whole.record.steps()[2]["value_loss"] < 0.9 * whole.record.steps()[0]["value_loss"]
