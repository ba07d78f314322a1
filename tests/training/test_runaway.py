"""Curves that run away, and those of successes that only look like it."""

from __future__ import annotations

import pytest

from grpo_kit.training.runaway import Runaway, runaways

KEYS = ("reward", "kl", "entropy", "length", "truncated")

# A real run that went well: SmolLM2-135M-Instruct on one-digit sums, beta 0, learning rate 3e-4, 16 answers a step.
# Of 3, the reward goes from 0.6 to 2.5; entropy falls to a fiftieth, KL jumps to 9 once, then groups differ no more.
HEALTHY = [
    (0.42, 0.0, 1.524, 11.875, 0.938),
    (0.67, 0.003, 1.721, 11.688, 0.875),
    (0.55, 0.018, 1.461, 11.562, 0.812),
    (0.69, 0.043, 1.248, 11.188, 0.688),
    (0.71, 0.068, 1.53, 10.188, 0.562),
    (0.74, 0.063, 1.429, 8.812, 0.375),
    (0.93, 0.242, 1.402, 10.812, 0.75),
    (0.88, 0.084, 1.343, 10.625, 0.562),
    (1.14, 0.083, 1.482, 11.062, 0.688),
    (1.82, 0.159, 0.805, 9.812, 0.25),
    (1.71, 0.135, 0.771, 9.75, 0.438),
    (1.71, 0.252, 0.83, 10.812, 0.562),
    (1.88, 0.193, 0.685, 10.0, 0.312),
    (2.3, 0.138, 0.588, 9.75, 0.25),
    (1.92, 0.44, 0.583, 9.812, 0.25),
    (2.2, 0.191, 0.298, 8.562, 0.062),
    (2.15, 0.384, 0.341, 9.25, 0.125),
    (2.45, 0.338, 0.494, 9.125, 0.125),
    (2.36, 0.24, 0.493, 8.938, 0.062),
    (2.52, 0.369, 0.095, 8.375, 0.0),
    (2.54, 0.251, 0.05, 8.25, 0.0),
    (2.52, 0.396, 0.253, 8.375, 0.0),
    (2.33, 9.15, 0.187, 9.125, 0.0),
    (2.51, 0.273, 0.03, 8.75, 0.0),
    (2.54, 0.215, 0.02, 8.25, 0.0),
    (2.49, 1.888, 0.2, 8.625, 0.0),
    (2.21, 0.517, 0.042, 8.562, 0.0),
    (2.54, 0.287, 0.052, 8.25, 0.0),
    (2.54, 0.314, 0.049, 8.25, 0.0),
    (2.52, 0.427, 0.022, 8.5, 0.0),
]


def rows_of(values):
    return [dict(zip(KEYS, row, strict=True)) for row in values]


def curve(steps=20, **metrics):
    """Rows of a run in which nothing happens, but for what is given: a function of the step from 0, or its values."""
    still = {"reward": lambda n: 0.5 + 0.1 * (n % 3), "kl": 0.01, "entropy": 1.0, "length": 50.0, "truncated": 0.02}
    at = {**still, **metrics}
    return [{key: value(n) if callable(value) else value for key, value in at.items()} for n in range(steps)]


def warned(rows):
    return {warning.key for warning in runaways(rows)}


def ever_warned(rows):
    return set().union(*(warned(rows[:end]) for end in range(len(rows) + 1)))


def text(rows, key):
    return next(warning.text for warning in runaways(rows) if warning.key == key)


def rising(n):
    return 0.6 + 0.09 * n


# --- successes


def test_a_real_success_is_silent_at_every_step():
    assert ever_warned(rows_of(HEALTHY)) == set()


def test_a_success_whose_answers_shrink_to_the_point_is_silent():
    """Answers from 8 to 3 tokens, KL up to 2 nats, entropy down to nearly nothing, while the reward rises."""
    success = {
        "reward": rising,
        "kl": lambda n: 2.0 * (n / 19) ** 2,
        "entropy": lambda n: 1.5 * 0.75**n,
        "length": lambda n: 8 - 5 * n / 19,
        "truncated": lambda n: max(0.0, 0.5 - n / 10),
    }
    assert ever_warned(curve(**success)) == set()


def test_a_run_in_which_nothing_happens_is_silent():
    assert ever_warned(curve(60)) == set()


def test_answers_that_grow_longer_within_the_limit_are_silent():
    assert ever_warned(curve(40, length=lambda n: 50 * 1.08**n, reward=rising)) == set()


def test_answers_that_were_cut_off_all_along_are_not_growing_into_the_limit():
    assert ever_warned(curve(length=lambda n: 10 + 2 * n, truncated=0.3)) == set()


def test_a_model_that_can_do_it_already_may_lose_its_entropy():
    assert ever_warned(curve(40, reward=lambda n: 0.95 if n in (1, 3) else 1.0, entropy=lambda n: 0.8**n)) == set()


# --- KL


def test_kl_that_runs_away_without_a_better_reward():
    rows = curve(kl=lambda n: 0.02 * 1.3**n)  # 0.8 to 2.9 at the end
    assert warned(rows) == {"kl"}
    said = text(rows, "kl")
    assert "1.7 nats per token over the last 5 steps, 0.47 over the 5 before, 0.034 at the start" in said
    assert "the reward went from 0.6 to 0.6" in said
    assert "Lower learning_rate or raise beta" in said and "gamed" in said


def test_kl_that_runs_away_with_a_reward_that_rises_needs_more():
    assert warned(curve(kl=lambda n: 0.02 * 1.3**n, reward=rising)) == set()
    assert warned(curve(kl=lambda n: 0.2 * 1.3**n, reward=rising)) == {"kl"}


def test_kl_that_is_high_but_stays_where_it_is():
    assert warned(curve(kl=lambda n: min(0.3 * n, 2.0))) == set()


def test_kl_that_grows_fast_but_is_small():
    assert warned(curve(kl=lambda n: 0.001 * 1.3**n)) == set()


def test_one_spike_is_no_runaway():
    for at in range(10, 20):
        assert warned(curve(kl=lambda n, at=at: 40.0 if n == at else 0.1)) == set()


# --- entropy


def test_entropy_that_collapses_without_a_better_reward():
    rows = curve(entropy=lambda n: 0.8**n)
    assert warned(rows) == {"entropy"}
    assert "collapsed: 0.023 nats per token over the last 5 steps, 0.64 at the start" in text(rows, "entropy")
    assert "entropy_coef" in text(rows, "entropy")


def test_a_model_that_was_sure_from_the_start_has_not_collapsed():
    assert warned(curve(entropy=0.03)) == set()


def test_entropy_that_explodes():
    rows = curve(entropy=lambda n: 1.0 + 0.1 * n)
    assert warned(rows) == {"entropy"}
    assert "exploding: 2.7 nats per token over the last 5 steps, 1.2 at the start" in text(rows, "entropy")


def test_a_good_exploration_is_no_explosion_but_noise_is():
    assert warned(curve(entropy=lambda n: 1.0 + 0.1 * n, reward=rising)) == set()
    assert warned(curve(entropy=lambda n: 1.0 + 0.3 * n, reward=rising)) == {"entropy"}
    assert warned(curve(entropy=lambda n: 0.2 + 0.02 * n)) == set()  # from very sure to sure


# --- length


def test_answers_that_grow_into_the_limit():
    rows = curve(length=lambda n: 50 + 5 * n, truncated=lambda n: 0.02 * n, reward=rising)
    assert warned(rows) == {"length"}
    said = text(rows, "length")
    assert "135 tokens on average over the last 5 steps, 60 at the start, with 34% of them cut off (4% at" in said
    assert "max_completion_length" in said


def test_without_knowing_what_was_cut_off_growth_is_no_warning():
    assert warned(curve(length=lambda n: 50 + 5 * n, truncated=None)) == set()


@pytest.mark.parametrize(("start", "end", "expected"), [(8, 1, True), (8, 3, False), (200, 15, True), (200, 60, False)])
def test_answers_that_shrink_to_almost_nothing(start, end, expected):
    rows = curve(length=lambda n: max(end, start - start * n / 12), truncated=0.0)
    assert warned(rows) == ({"length"} if expected else set())
    assert warned([{**row, "reward": rising(n)} for n, row in enumerate(rows)]) == set()


def test_a_model_that_always_gave_short_answers_has_not_shrunk():
    assert warned(curve(length=2.0)) == set()


# --- what is not known


def test_fewer_than_ten_values_say_nothing():
    rows = curve(kl=lambda n: 0.2 * 1.5**n)
    assert "kl" in warned(rows[:14]) and ever_warned(rows[:9]) == set()
    sparse = [{**row, "kl": row["kl"] if n % 2 else None} for n, row in enumerate(rows)]
    assert warned(sparse) == {"kl"}
    assert warned(sparse[:18]) == set()  # 9 values


def test_none_and_missing_values_are_skipped():
    rows = curve(kl=lambda n: 0.02 * 1.3**n)
    nothing = [{}, dict.fromkeys(KEYS), {"kl": float("nan"), "reward": None}]
    assert runaways([*nothing, *rows[:10], *nothing, *rows[10:], *nothing]) == runaways(rows)


def test_without_a_reward_only_the_extremes_count():
    assert warned(curve(kl=lambda n: 0.02 * 1.3**n, entropy=lambda n: 0.8**n, reward=None)) == set()
    rows = curve(kl=lambda n: 0.2 * 1.3**n, reward=None)
    assert "the reward is unknown" in text(rows, "kl")


def test_several_at_once_come_in_one_order():
    rows = curve(kl=lambda n: 0.02 * 1.3**n, entropy=lambda n: 0.8**n, length=lambda n: max(1.0, 50 - 5 * n))
    assert [type(warning) for warning in runaways(rows)] == [Runaway] * 3
    assert [warning.key for warning in runaways(rows)] == ["kl", "entropy", "length"]
