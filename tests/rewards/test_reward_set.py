from __future__ import annotations

import sys
import types

import pytest

from grpo_kit.rewards import Reward, RewardSet, numeric_match, reward


def one(completion):
    return 1.0


def long(completions, **kwargs):
    return [float(len(c)) for c in completions]


def test_plain_functions_are_wrapped():
    rewards = RewardSet(one, reward(long, weight=0.5))
    assert rewards.names == ["one", "long"]
    assert rewards.weights == {"one": 1.0, "long": 0.5}
    assert all(isinstance(item, Reward) for item in rewards.rewards)


def test_two_of_one_name_and_none_at_all_are_refused():
    with pytest.raises(ValueError, match="two rewards are called 'one'; give one of them another name"):
        RewardSet(one, reward(one, weight=2.0))
    with pytest.raises(ValueError, match="at least one"):
        RewardSet()


def test_the_table_of_a_batch():
    rewards = RewardSet(reward(one, weight=2.0), reward(long, weight=-0.5))
    table = rewards.score(["p"] * 3, ["", "ab", "abcd"], [{}] * 3)
    assert table.names == ["one", "long"]
    assert table.weights == [2.0, -0.5]
    assert table.values == [[1.0, 0.0], [1.0, 2.0], [1.0, 4.0]]
    assert table.totals == [2.0, 1.0, 0.0]


def test_weights_change_from_the_next_score_on():
    rewards = RewardSet(one)
    before = rewards.score(["p"], ["c"], [{}])
    rewards.set_weight("one", 3)
    assert before.totals == [1.0]
    assert rewards.score(["p"], ["c"], [{}]).totals == [3.0]
    with pytest.raises(ValueError, match="no reward is called 'two'; there are one"):
        rewards.set_weight("two", 1.0)
    with pytest.raises(ValueError, match="finite"):
        rewards.set_weight("one", float("nan"))


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 completions but 1 rows"):
        RewardSet(one).score(["p", "p"], ["a", "b"], [{}])
    with pytest.raises(ValueError, match="1 completions but 2 completion_ids"):
        RewardSet(one).score(["p"], ["a"], [{}], completion_ids=[[1], [2]])


def test_columns_are_checked_before_training():
    rewards = RewardSet(one, numeric_match(column="gold"))
    rewards.check_columns(["gold", "question"])
    with pytest.raises(ValueError, match="'numeric_match' needs the data column 'gold'; the data has question, answer"):
        rewards.check_columns(["question", "answer"])


@pytest.fixture
def notebook():
    """A module that stands for a notebook's __main__; run(code) is running a cell."""
    module = types.ModuleType("fake_notebook")
    sys.modules["fake_notebook"] = module
    module.run = lambda code: exec(code, module.__dict__)  # type: ignore[attr-defined]
    module.run("from grpo_kit.rewards import reward")  # type: ignore[attr-defined]
    yield module
    del sys.modules["fake_notebook"]


def score(rewards: RewardSet) -> list:
    return rewards.score(["p"], ["c"], [{}]).values[0]


def test_a_rerun_cell_replaces_a_plain_function(notebook):
    notebook.run("def right(completion): return 1.0")
    rewards = RewardSet(notebook.right, one)
    assert rewards.refresh() == []
    notebook.run("def right(completion): return 2.0")
    assert rewards.refresh() == ["right"]
    assert score(rewards) == [2.0, 1.0]
    assert rewards.refresh() == []


def test_a_rerun_cell_replaces_a_decorated_function(notebook):
    notebook.run("@reward(weight=2.0)\ndef right(completion): return 1.0")
    rewards = RewardSet(notebook.right)
    notebook.run("@reward(weight=2.0, time_limit=1.0)\ndef right(completions): return [2.0] * len(completions)")
    assert rewards.refresh() == ["right"]
    assert score(rewards) == [2.0]
    assert rewards.rewards[0].batched
    assert rewards.rewards[0].time_limit == 1.0


def test_a_live_weight_stays_unless_the_decorators_changes(notebook):
    notebook.run("@reward(weight=2.0)\ndef right(completion): return 1.0")
    rewards = RewardSet(notebook.right)
    rewards.set_weight("right", 0.5)
    notebook.run("@reward(weight=2.0)\ndef right(completion): return 1.5")
    rewards.refresh()
    assert rewards.weights == {"right": 0.5}
    notebook.run("@reward(weight=3.0)\ndef right(completion): return 1.5")
    rewards.refresh()
    assert rewards.weights == {"right": 3.0}


def test_a_plain_function_leaves_weight_and_limit_as_they_were(notebook):
    notebook.run("def right(completion): return 1.0")
    rewards = RewardSet(reward(notebook.right, weight=2.0, time_limit=1.0))
    notebook.run("def right(completion): return 1.5")
    assert rewards.refresh() == ["right"]
    assert rewards.weights == {"right": 2.0}
    assert rewards.rewards[0].time_limit == 1.0


@pytest.mark.parametrize(
    "cell",
    [
        "right = 5",
        "right = None",
        "del right",
        "def right(text): return 1.0",
        "class right: pass",
        "right = print",
        "@reward\ndef other(completion): return 2.0",
    ],
)
def test_what_cannot_serve_replaces_nothing(notebook, cell):
    notebook.run("def right(completion): return 1.0")
    rewards = RewardSet(notebook.right)
    notebook.run(cell)
    assert rewards.refresh() == []
    assert score(rewards) == [1.0]


def test_a_reward_under_another_name_is_found_by_its_functions(notebook):
    notebook.run("@reward(name='accuracy')\ndef right(completion): return 1.0")
    rewards = RewardSet(notebook.right)
    notebook.run("@reward(name='precision')\ndef right(completion): return 2.0")
    assert rewards.refresh() == ["accuracy"]
    assert rewards.names == ["accuracy"]  # the run's columns keep their name
    assert notebook.right.name == "precision"
    assert score(rewards) == [2.0]


def test_a_named_lambda_is_found_by_the_rewards_name(notebook):
    notebook.run("short = reward(lambda completion: 1.0, name='short')")
    rewards = RewardSet(notebook.short)
    assert rewards.refresh() == []
    notebook.run("short = reward(lambda completion: 2.0, name='short')")
    assert rewards.refresh() == ["short"]
    assert score(rewards) == [2.0]


def test_ready_made_rewards_and_inner_functions_stay(notebook):
    notebook.run("def make():\n    def right(completion): return 1.0\n    return right\nmade = make()")
    rewards = RewardSet(notebook.made, numeric_match())
    notebook.run("def right(completion): return 2.0")
    assert rewards.refresh() == []


def test_a_module_that_is_gone_changes_nothing(notebook):
    notebook.run("def right(completion): return 1.0")
    notebook.right.__module__ = "gone"
    assert RewardSet(notebook.right).refresh() == []
