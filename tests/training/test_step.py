"""One step from rows to record, with an engine and rewards that can be foreseen."""

from __future__ import annotations

import math

import pytest
import torch

import grpo_kit.training.step as step_module
from grpo_kit.rewards import RewardSet, reward
from grpo_kit.rollout import Completion, Sampling, stream_seed
from grpo_kit.store import Record
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import rows_of_step
from grpo_kit.training.prompts import Prompts
from grpo_kit.training.step import Stepper
from tests.training.helpers import QUICK, adapter, same


class ScriptedEngine:
    """Answers every prompt with the same completions, and keeps what it was asked."""

    name = "scripted"

    def __init__(self, completions: list[Completion]):
        self.completions = completions
        self.asked: list[tuple[list[list[int]], Sampling, int]] = []

    def generate(self, prompt_ids, sampling, n=1, between_tokens=None, on_tokens=None):
        self.asked.append((prompt_ids, sampling, n))
        return [self.completions[:n] for _ in prompt_ids]

    def adapter_changed(self):
        pass


COMPLETIONS = [
    Completion([10, 11, 256], [-1.0, -1.0, -1.0], "eos", "ab"),
    Completion([12, 13, 14, 15], [-2.0] * 4, "length", "cdef"),
    Completion([16, 256], [-1.0, -1.0], "eos", "g"),
]


@reward(weight=2.0)
def size(completion):
    return float(len(completion))


@reward
def even(completion, answer):
    return 1.0 if len(completion) % 2 == 0 and answer >= 0 else None


@pytest.fixture
def engine(model):
    model.engine = ScriptedEngine(COMPLETIONS)
    return model.engine


@pytest.fixture
def record(tmp_path):
    made = Record(tmp_path / "run.sqlite")
    yield made
    made.close()


def stepper(model, record, rewards=None, clock=lambda: 0.0, **options) -> Stepper:
    chosen, _ = derive(TrainOptions(**{**QUICK, "steps": 10, **options}), on_gpu=False)
    messages = [[{"role": "user", "content": f"{n}?"}] for n in range(4)]
    prompts = Prompts(messages, [model.encode(m) for m in messages], [{"answer": n} for n in range(4)])
    return Stepper(model, prompts, rewards or RewardSet(size, even), chosen, record, clock)


def make_step(made, number=1):
    with made.model.lock:
        return made.step(number, lambda: None)


def test_the_engine_is_asked_for_the_steps_rows_with_the_steps_seed(model, engine, record):
    made = stepper(model, record, temperature=0.7, seed=5)
    make_step(made, 3)
    ((prompt_ids, sampling, n),) = engine.asked
    assert prompt_ids == [model.encode(f"{row}?") for row in rows_of_step(3, 4, 2, seed=5)]
    assert sampling == Sampling(max_tokens=6, temperature=0.7, seed=stream_seed(5, "step", 3))
    assert n == 3


def test_metrics_by_hand(model, engine, record):
    make_step(stepper(model, record))
    (row,) = record.steps()
    totals = [2 * 2 + 1, 2 * 4 + 1, 2 * 1] * 2
    mean = sum(totals) / 6
    assert row["reward"] == pytest.approx(mean)
    assert row["reward_std"] == pytest.approx(math.sqrt(sum((t - mean) ** 2 for t in totals) / 5))
    assert row["rewards/size"] == pytest.approx(7 / 3)
    assert row["rewards/size/none"] == 0
    assert row["rewards/even"] == 1
    assert row["rewards/even/none"] == pytest.approx(1 / 3)
    assert row["length"] == 3
    assert row["truncated"] == pytest.approx(1 / 3)
    assert row["tokens"] == 18
    assert row["dead_groups"] == 0
    assert row["learning_rate"] == 1e-3


def test_completions_as_they_are_recorded(model, engine, record):
    make_step(stepper(model, record))
    rows = record.completions()
    drawn = rows_of_step(1, 4, 2, seed=0)
    assert [row["index"] for row in rows] == list(range(6))
    assert [row["group"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["prompt"] for row in rows] == [model.render(f"{drawn[i // 3]}?") for i in range(6)]
    assert [row["text"] for row in rows] == ["ab", "cdef", "g"] * 2
    assert [row["tokens"] for row in rows] == [3, 4, 2] * 2
    assert [row["finish_reason"] for row in rows] == ["eos", "length", "eos"] * 2
    assert rows[2]["scores"] == {"size": [1.0, "ok", ""], "even": [None, "not applicable", ""]}
    assert [row["total"] for row in rows] == [5, 9, 2] * 2
    std = math.sqrt(((5 - 16 / 3) ** 2 + (9 - 16 / 3) ** 2 + (2 - 16 / 3) ** 2) / 2)
    expected = [(total - 16 / 3) / (std + 1e-4) for total in (5, 9, 2)]
    assert [row["advantage"] for row in rows] == pytest.approx(expected * 2, rel=1e-5)


def test_each_completion_is_scored_with_its_own_row(model, engine, record):
    seen = []

    @reward
    def watching(completion, answer, prompt, completion_ids, step):
        seen.append((prompt[0]["content"], answer, completion, list(completion_ids), step))
        return float(len(seen))

    make_step(stepper(model, record, RewardSet(watching)), 2)
    rows = [row for row in rows_of_step(2, 4, 2, seed=0) for _ in range(3)]
    texts, ids = [c.text for c in COMPLETIONS] * 2, [c.token_ids for c in COMPLETIONS] * 2
    assert seen == [(f"{row}?", row, text, i, 2) for row, text, i in zip(rows, texts, ids, strict=True)]


def test_others_may_use_the_model_while_rewards_are_scored(model, engine, record):
    @reward
    def asks(completion):  # runs in another thread than the step
        with model.lock:
            return float(len(completion))

    table = make_step(stepper(model, record, RewardSet(asks)))
    assert {score.reason for score in table.column("asks")} == {"ok"}


def test_masked_completions_are_those_cut_off(model, engine, record):
    engine.completions = [COMPLETIONS[1]] * 2 + [Completion([3, 4], [-1.0, -1.0], "length", "longer text")]
    before = adapter(model)
    make_step(stepper(model, record, mask_truncated_completions=True))
    assert record.steps()[0]["grad_norm"] == 0  # all were cut off, so none is trained
    assert same(adapter(model), before)
    make_step(stepper(model, record), 2)
    assert record.steps()[1]["grad_norm"] > 0


def test_groups_scored_alike_are_dead(model, engine, record):
    make_step(stepper(model, record, RewardSet(reward(lambda completion: 1.0, name="one"))))
    (row,) = record.steps()
    assert (row["dead_groups"], row["reward_std"], row["grad_norm"]) == (1, 0, 0)


def test_nothing_scored_is_none_and_not_nan(model, engine, record):
    make_step(stepper(model, record, RewardSet(reward(lambda completion: None, name="shy"))))
    (row,) = record.steps()
    assert (row["reward"], row["reward_std"], row["rewards/shy"], row["rewards/shy/none"]) == (None, None, None, 1)
    assert {(c["total"], c["advantage"]) for c in record.completions()} == {(None, 0.0)}


def test_seconds_go_by_the_clock_given(model, engine, record):
    ticks = iter([0.0, 10.0, 12.0, 12.5, 15.0])  # start, scoring from and to, rolled out, end
    make_step(stepper(model, record, clock=lambda: next(ticks)))
    (row,) = record.steps()
    names = ("seconds", "seconds_rollout", "seconds_reward", "seconds_update")
    assert [row[name] for name in names] == [15, 10.5, 2, 2.5]


def test_the_peak_of_memory_is_that_of_each_phase(model, engine, record, monkeypatch):
    """The engine takes 3 GB, scoring 1 and the update 2."""
    held, peaks = [0.0], []

    def take(gigabytes):
        held[0] = max(held[0], gigabytes)

    monkeypatch.setattr(step_module, "begin_peak", lambda device: held.__setitem__(0, 0.0))
    monkeypatch.setattr(step_module, "peak_gb", lambda device: peaks.append(held[0]) or held[0])
    made = stepper(
        model, record, RewardSet(reward(lambda completion: take(1.0) or float(len(completion)), name="size"))
    )
    generate, update = engine.generate, made.updater.update
    monkeypatch.setattr(engine, "generate", lambda *args: take(3.0) or generate(*args))
    monkeypatch.setattr(made.updater, "update", lambda *args: take(2.0) or update(*args))
    take(9.0)  # before the step
    make_step(made)
    (row,) = record.steps()
    assert (row["peak_gb_rollout"], row["peak_gb_update"]) == (3, 2)
    assert peaks == [3, 2]


def test_a_cpu_has_no_peak(model, engine, record):
    make_step(stepper(model, record))
    (row,) = record.steps()
    assert (row["peak_gb_rollout"], row["peak_gb_update"]) == (None, None)


def test_an_exception_at_a_pause_point_leaves_weights_and_record(model, engine, record):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    before, made = adapter(model), stepper(model, record)
    with pytest.raises(Stop), model.lock:
        made.step(1, stop)
    assert same(adapter(model), before)
    assert record.last_step() == 0


def test_a_step_leaves_the_global_random_state_alone(model, record):
    state = torch.get_rng_state()
    make_step(stepper(model, record))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_step_twice_is_the_same(model, record):
    made = stepper(model, record)
    make_step(made, 1)
    model.reset_adapter()
    again = stepper(model, record)
    record.forget_after(0)
    first = record.completions()
    make_step(again, 1)
    assert first == []
    texts = [row["text"] for row in record.completions()]
    model.reset_adapter()
    record.forget_after(0)
    make_step(stepper(model, record), 1)
    assert [row["text"] for row in record.completions()] == texts


# ---- groups that were replaced ----


class Uneven:
    """Tells the answers of some rows apart only, and raises on some."""

    def __init__(self, dead=(), raises=()):
        self.dead, self.raises = dead, raises

    def reward(self):
        @reward(name="uneven")
        def uneven(completion, answer):
            if answer in self.raises:
                raise RuntimeError("oh")
            return 1.0 if answer in self.dead else float(len(completion))

        return RewardSet(uneven)


def test_what_was_drawn_for_groups_that_were_replaced_is_returned_and_counted(model, engine, record):
    """Both of the step's rows are dead, one of them because its reward fails; of the two drawn for them both live."""
    failing, dead = rows_of_step(1, 4, 2, seed=0)
    made = stepper(model, record, Uneven([dead], [failing]).reward(), algorithm="dapo")
    table = make_step(made)
    assert [score.reason for score in table.column("uneven")] == ["error"] * 3 + ["ok"] * 9
    assert (table.names, table.weights) == (["uneven"], [1.0])
    (row,) = record.steps()
    assert (row["refilled_groups"], row["dead_groups"]) == (2, 1)
    assert row["tokens"] == 4 * 9  # of four groups
    assert row["length"] == 3
    asked = [prompt for prompt_ids, _, _ in engine.asked for prompt in prompt_ids]
    assert sorted(asked) == [model.encode(f"{n}?") for n in range(4)]  # no row twice
    kept = record.completions()
    assert len(kept) == 6
    assert {completion["scores"]["uneven"][1] for completion in kept} == {"ok"}


def test_without_a_refill_the_scores_are_those_of_the_step(model, engine, record):
    table = make_step(stepper(model, record, Uneven().reward(), algorithm="dapo"))
    assert len(table.scores) == 6
    assert record.steps()[0]["tokens"] == 18


def test_each_step_begins_to_count_anew(model, engine, record):
    made = stepper(model, record, Uneven(range(4)).reward(), algorithm="dapo", dynamic_sampling_rounds=1)
    assert [len(make_step(made, number).scores) for number in (1, 2)] == [12, 12]
    assert [row["tokens"] for row in record.steps()] == [36, 36]


def test_rewards_normalised_each_by_itself_are_dead_only_together(model, engine, record):
    """Lengths 2, 4, 1 against −2, −4, −1: the sums are alike, the rewards are not."""
    both = RewardSet(size, reward(lambda completion: -2.0 * len(completion), name="against"))
    make_step(stepper(model, record, both, algorithm="dapo", multi_objective_aggregation="normalize_then_sum"))
    make_step(stepper(model, record, both, algorithm="dapo"), 2)
    first, second = record.steps()
    assert (first["dead_groups"], first["refilled_groups"], len(first)) == (0, 0, len(second))
    assert second["dead_groups"] == 1
    assert second["tokens"] == 3 * first["tokens"]  # two rounds of two groups, in vain


def test_a_critic_learns_from_any_group(model, engine, record):
    make_step(stepper(model, record, RewardSet(reward(lambda completion: 1.0, name="one")), algorithm="ppo"))
    (row,) = record.steps()
    assert row["dead_groups"] is None
    assert row["grad_norm"] > 0
