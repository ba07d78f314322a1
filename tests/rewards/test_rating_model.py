"""The model learned from ratings: its optimum against the equations solved by hand, and what it learns and refuses."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kit.rewards import Rating, Reward, RewardSet, fit_ratings, from_spec, rating_model
from grpo_kit.rewards.rating_model import RIDGE, text_features


def thumb(text: str, value: float, time: float = 0.0) -> Rating:
    return Rating("thumb", "p", text, value, time=time)


def pair(better: str, worse: str) -> Rating:
    return Rating("pair", "p", better, 1.0, worse)


def scores(made: Reward, texts: list[str]) -> list[Any]:
    table = RewardSet(made).score(["p"] * len(texts), texts, [{}] * len(texts))
    return [row[0] for row in table.values]


def has_x(texts: list[str]) -> Any:
    """[N, 1]: 1 for an answer with an x, else 0."""
    return [[float("x" in text.split("\n\n")[1])] for text in texts]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def root(function: Any, low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def test_comparisons_give_the_weight_that_bradley_and_terry_would() -> None:
    # Nine people prefer x, three prefer o. Features 1 and 0 in equal number: centred and scaled ±1, differences ±2.
    ratings = [pair("x", "o")] * 9 + [pair("o", "x")] * 3
    expected = root(lambda w: -2 * 9 * sigmoid(-2 * w) + 2 * 3 * sigmoid(2 * w) + RIDGE * w, -10, 10)
    made = fit_ratings(ratings, features=has_x)
    assert made.fit.weights == pytest.approx([expected], abs=1e-6)
    assert (made.fit.bias, made.fit.mean, made.fit.scale) == (pytest.approx(0), [0.5], 0.5)
    assert scores(made, ["x", "o"]) == pytest.approx([sigmoid(expected), sigmoid(-expected)], abs=1e-6)
    assert (made.accuracy, made.rating_count) == (0.75, 12)


def test_thumbs_give_the_weights_of_logistic_regression_with_a_ridge() -> None:
    up = {1.0: 5, 0.0: 2}  # of six answers each with and without an x
    ratings = [thumb(f"{'x' if x else 'o'}{i}", float(i < up[x])) for x in (1.0, 0.0) for i in range(6)]
    made = fit_ratings(ratings, features=has_x)
    (w,), b = made.fit.weights, made.fit.bias
    errors = {1: 6 * sigmoid(w + b) - 5, -1: 6 * sigmoid(b - w) - 2}  # Σ (σ - y) where the feature is ±1
    assert errors[1] - errors[-1] + RIDGE * w == pytest.approx(0, abs=1e-6)
    assert errors[1] + errors[-1] + RIDGE * b == pytest.approx(0, abs=1e-6)
    assert made.accuracy == pytest.approx(9 / 12)


def answers(polite: bool, seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    words = ["the", "order", "will", "arrive", "on", "monday", "we", "looked", "into", "it", "and", "found", "nothing"]
    said = [" ".join(chance.choices(words, k=chance.randint(5, 25))) for _ in range(count)]
    return [f"{text}, thank you for your patience" if polite else f"{text}, whatever" for text in said]


def test_it_learns_what_people_prefer_and_knows_it_in_new_answers() -> None:
    good, bad = answers(True, 0, 12), answers(False, 1, 12)
    both = [pair(one, other) for one, other in zip(good[:6], bad[:6], strict=True)]
    both += [thumb(text, 1.0) for text in good[6:]] + [thumb(text, 0.0) for text in bad[6:]]
    made = fit_ratings(both)
    assert (made.accuracy, made.rating_count) == (1.0, 18)
    assert repr(made) == "RatingModel('rating_model', weight=1, agrees with 100% of the 18 ratings it learned from)"
    new_good, new_bad = scores(made, answers(True, 2, 20)), scores(made, answers(False, 3, 20))
    assert all(0 <= score <= 1 for score in new_good + new_bad)
    assert min(new_good) > max(new_bad)


def test_it_learns_to_prefer_short_answers() -> None:
    sentence = "so it is with all of these things that we have said and done before and after the war"
    words = sentence.split()
    long, short = [" ".join(words[i:] * 4) for i in range(10)], [" ".join(words[i : i + 4]) for i in range(10)]
    made = fit_ratings([pair(one, other) for one, other in zip(short, long, strict=True)])
    assert scores(made, ["it is so"])[0] > 0.5 > scores(made, ["it is so with all of these things " * 10])[0]


def test_the_same_ratings_give_the_same_model_in_any_form() -> None:
    ratings = [thumb(text, 1.0) for text in answers(True, 0, 6)] + [thumb(text, 0.0) for text in answers(False, 1, 6)]
    rows = [{**vars(rating)} for rating in ratings]
    assert fit_ratings(ratings).fit == fit_ratings(rows).fit


def test_the_last_thumb_counts() -> None:
    ratings = [thumb(f"{i % 2}{i}", float(i % 2), time=1.0) for i in range(12)]
    changed = [thumb(rating.text, 1 - rating.value, time=2.0) for rating in ratings]
    assert fit_ratings([*ratings, *changed]).fit == fit_ratings(changed).fit


def test_too_few_ratings_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="3 ratings are too few to learn from: it takes at least 10"):
        fit_ratings([thumb(str(i), 1.0) for i in range(3)])
    with pytest.raises(ValueError, match="all 12 thumbs point the same way"):
        fit_ratings([thumb(str(i), 1.0) for i in range(12)])
    with pytest.raises(ValueError, match="0 ratings"):
        fit_ratings([])


def test_features_of_ones_own_see_prompt_and_answer() -> None:
    seen: list[str] = []

    def features(texts: list[str]) -> torch.Tensor:
        seen.extend(texts)
        return torch.tensor([[float(len(text)), 1.0] for text in texts], dtype=torch.float16)

    made = fit_ratings([pair("longer", "short")] * 10, features=features, name="mine", weight=2.0)
    assert set(seen) == {"p\n\nlonger", "p\n\nshort"}
    assert (made.name, made.weight, made.spec) == ("mine", 2.0, None)
    assert scores(made, ["longer"])[0] > 0.5


@pytest.mark.parametrize("features", [lambda texts: [1.0] * len(texts), lambda texts: [[1.0]]])
def test_features_of_another_shape_are_refused(features: Any) -> None:
    with pytest.raises(ValueError, match="features must be 20 rows of numbers for 20 texts"):
        fit_ratings([pair("a", "b")] * 10, features=features)


def test_features_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        fit_ratings([pair("a", "b")] * 10, features=lambda texts: [[math.nan]] * len(texts))


def test_features_that_are_all_alike_say_nothing() -> None:
    made = fit_ratings([pair("a", "b")] * 10, features=lambda texts: [[3.0]] * len(texts))
    assert scores(made, ["a", "b"]) == [0.5, 0.5]


def test_the_default_features_of_two_texts() -> None:
    empty, aa = text_features(["", "aa"]).tolist()
    assert empty == [0.0] * 385
    # Two a and one aa: shares 2/3 and 1/3.
    assert aa[0] == pytest.approx(math.log(3))
    assert sorted(aa[1:])[-3:] == pytest.approx([0.0, math.sqrt(1 / 3), math.sqrt(2 / 3)])
    assert text_features(["\ud800 🙂"]).isfinite().all()


def test_saved_it_is_built_again_from_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ratings = [thumb(text, 1.0) for text in answers(True, 0, 6)] + [thumb(text, 0.0) for text in answers(False, 1, 6)]
    made = fit_ratings(ratings, weight=0.5, name="taste", save_to="models/taste.json")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["taste.json"]
    monkeypatch.chdir("/")
    again = from_spec(json.loads(json.dumps(made.spec)))
    assert (again.name, again.weight, again.spec) == ("taste", 0.5, made.spec)
    assert isinstance(again, type(made)) and again.fit == made.fit == fit_ratings(ratings).fit
    assert (again.accuracy, again.rating_count) == (made.accuracy, 12)
    assert scores(again, answers(True, 5, 3)) == scores(made, answers(True, 5, 3))
    assert "def rating_model" in made.source


def test_files_that_are_gone_or_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is gone: fit the ratings again with fit_ratings"):
        rating_model(tmp_path / "none.json")
    for text in ("not json", "[]", '{"format": "another"}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="is no rating model"):
            rating_model(tmp_path / "other.json")
    with pytest.raises(ValueError, match="only a model on the default features can be saved"):
        fit_ratings([pair("a", "b")] * 10, features=has_x, save_to=tmp_path / "mine.json")
