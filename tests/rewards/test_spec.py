from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grpo_kit import rewards
from grpo_kit.rewards import Reward, RewardSet, from_spec

MADE = [
    rewards.exact_match(column="gold"),
    rewards.numeric_match(tolerance=0.1, weight=2.0, name="close_enough"),
    rewards.digits_with_bonus(number=0.5),
    rewards.number_close(width=0.2),
    rewards.xml_format(reasoning="think", prefix="<think>"),
    rewards.approximate_format(tags=("<SOLUTION>", "</SOLUTION>")),
    *rewards.gsm8k_rewards(),
    rewards.required_keywords(("refund", "order")),
    rewards.matches_reply(),
    rewards.too_long(100),
    rewards.names_recipient(column="to"),
    rewards.signature_block(signer="Anna"),
    rewards.length_penalty(100, unit="words"),
    rewards.human(wait=False, per_step=3, name="people"),
    rewards.repetition_penalty(ngram=4),
]


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.name)
def test_a_ready_made_reward_is_built_again_from_json(made: Reward):
    again = from_spec(json.loads(json.dumps(made.spec)))
    assert (again.name, again.weight, again.time_limit) == (made.name, made.weight, made.time_limit)
    assert again.columns == made.columns
    assert again.spec == made.spec
    row = {"answer": 7, "gold": "7", "reply": "yes", "to": "Anna"}
    texts = ["", "7", "<think>so</think><answer>7</answer>", "Thanks, Anna", "<SOLUTION>7</SOLUTION>"]
    before, after = (RewardSet(r).score(["p"] * 5, texts, [row] * 5).scores for r in (made, again))
    assert before == after


def test_every_ready_made_reward_has_a_source():
    assert all("def " + made.spec[0] in made.source for made in MADE if made.spec)


def test_a_spec_names_a_factory_and_nothing_else():
    with pytest.raises(ValueError, match="no ready-made reward 'eval'; there are approximate_format, digits"):
        from_spec(("eval", {}))


def test_importing_the_rewards_imports_no_heavy_package():
    code = (
        "import sys, grpo_kit.rewards as r; r.RewardSet(r.numeric_match()).score(['p'], ['7'], [{'answer': 7}]);"
        "print([m for m in ('torch', 'pandas', 'numpy', 'transformers', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
