"""A small reward model learned from people's ratings: linear in features of the text, fitted in a moment.

A comparison counts by the likelihood of Bradley and Terry (Rank analysis of incomplete block designs, 1952), as in
Christiano et al., Deep reinforcement learning from human preferences (2017, https://arxiv.org/abs/1706.03741); a thumb
by that of logistic regression. With a ridge penalty the sum is strictly convex: one optimum, the same each time.

Deliberately no network and no pickle: what was learned is a list of numbers in a JSON file.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_kit.rewards.ratings import Rating, last_thumbs, prompt_text
from grpo_kit.rewards.reward import Reward

Features = Callable[[list[str]], Any]

FEWEST = 10  # ratings; with fewer the weights are mostly the penalty's
RIDGE = 0.1  # of the squared weights, half of it beside the sum of the ratings' losses: their prior has deviation 3
BUCKETS = 384  # of the hash of character n-grams
LONGEST_NGRAM = 3
FORMAT = "grpo-kit rating model 1"


@dataclass(frozen=True)
class Fit:
    """What was learned. Utility of a feature vector f: weights · (f - mean) / scale + bias, its score the sigmoid.

    weights, mean: D numbers. scale: the root mean square length of the centred features. accuracy: the share of the
    ratings it was fitted to that it agrees with. ratings: how many those were.
    """

    weights: list[float]
    mean: list[float]
    scale: float
    bias: float
    accuracy: float
    ratings: int


class RatingModel(Reward):
    """The reward that `fit_ratings` returns. accuracy: agreement with the ratings it learned from, 0 to 1 (a score on
    its own homework). rating_count: how many they were."""

    def __init__(
        self,
        fit: Fit,
        features: Features | None,
        weight: float,
        name: str,
        spec: tuple[str, dict[str, Any]] | None,
    ) -> None:
        def rating_model(prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
            texts = [(prompt_text(p), str(c)) for p, c in zip(prompts, completions, strict=True)]
            return _scores(fit, _features_of(texts, features))

        super().__init__(rating_model, weight=weight, name=name, spec=spec)
        self.fit = fit

    @property
    def accuracy(self) -> float:
        return self.fit.accuracy

    @property
    def rating_count(self) -> int:
        return self.fit.ratings

    def __repr__(self) -> str:
        agrees = f"agrees with {self.accuracy:.0%} of the {self.rating_count} ratings it learned from"
        return f"RatingModel({self.name!r}, weight={self.weight:g}, {agrees})"


def fit_ratings(
    ratings: Iterable[Rating | Mapping[str, Any]],
    *,
    features: Features | None = None,
    weight: float = 1.0,
    name: str = "rating_model",
    save_to: str | Path | None = None,
) -> RatingModel:
    """A reward learned from ratings: 0 to 1, the probability that a person would give thumbs up (learned from
    comparisons alone: a score that is higher for what would be preferred, 0.5 for the average answer).

    ratings:  `HumanReward.ratings`, or the rows of a record's `ratings()`. Of several thumbs for an answer the last
              one counts.
    features: called with N texts, each a prompt, an empty line and a completion; returns N rows of D numbers (an
              array or tensor), for example embeddings. Unless given: length and character n-grams of the completion.
    save_to:  a JSON file for what was learned, with which the reward survives a resume; for the default features only.

    Raises ValueError for fewer than 10 ratings, for thumbs that are all alike and nothing else, and for features of
    another shape or that are not finite.
    """
    if features is not None and save_to is not None:
        raise ValueError("only a model on the default features can be saved: a resume could not find yours again")
    fit = _fit([r if isinstance(r, Rating) else Rating(**r) for r in ratings], features)
    if save_to is None:
        return RatingModel(fit, features, weight, name, None)
    path = Path(save_to).absolute()
    _save(fit, path)
    return rating_model(str(path), weight=weight, name=name)


def rating_model(path: str | Path, *, weight: float = 1.0, name: str | None = None) -> RatingModel:
    """The reward that `fit_ratings(..., save_to=path)` has learned.

    Raises FileNotFoundError if the file is gone and ValueError if it holds something else.
    """
    where = Path(path).absolute()
    if not where.is_file():
        raise FileNotFoundError(
            f"{where} is gone: fit the ratings again with fit_ratings(ratings, save_to={str(where)!r})"
        )
    spec = ("rating_model", {"path": str(where), "weight": weight, "name": name})
    return RatingModel(_load(where), None, weight, name or "rating_model", spec)


def text_features(texts: Sequence[str]) -> Any:
    """[N, 1 + 384] float64: the logarithm of the length, and the square roots of the shares that the text's runs of 1
    to 3 characters have, hashed (so that this part of each row has length 1)."""
    import torch

    return torch.tensor([_row(text) for text in texts], dtype=torch.float64).reshape(len(texts), 1 + BUCKETS)


def _row(text: str) -> list[float]:
    sizes = range(1, LONGEST_NGRAM + 1)
    ngrams = Counter(text[start : start + n] for n in sizes for start in range(len(text) - n + 1))
    buckets = [0] * BUCKETS
    for ngram, count in ngrams.items():
        buckets[zlib.crc32(ngram.encode("utf-8", "surrogatepass")) % BUCKETS] += count
    total = max(1, ngrams.total())
    return [math.log1p(len(text)), *(math.sqrt(count / total) for count in buckets)]


def _features_of(texts: list[tuple[str, str]], features: Features | None) -> Any:
    """[N, D] float64 on the CPU."""
    import torch

    if features is None:
        return text_features([completion for _, completion in texts])
    with torch.no_grad():
        found = torch.as_tensor(features([f"{prompt}\n\n{completion}" for prompt, completion in texts]))
    if found.ndim != 2 or len(found) != len(texts):
        raise ValueError(
            f"features must be {len(texts)} rows of numbers for {len(texts)} texts, not {tuple(found.shape)}"
        )
    return found.to("cpu", torch.float64)


def _fit(ratings: list[Rating], features: Features | None) -> Fit:
    import torch

    pairs = [rating for rating in ratings if rating.kind == "pair"]
    thumbs = last_thumbs(ratings)
    _check_enough(len(pairs), list(thumbs.values()))
    better = [(rating.prompt, rating.text) for rating in pairs]
    worse = [(rating.prompt, str(rating.other)) for rating in pairs]
    raw = _features_of([*better, *worse, *thumbs], features)  # [2P + T, D]
    if not raw.isfinite().all():
        raise ValueError("the features hold numbers that are not finite")
    mean = raw.mean(0)
    scale = float((raw - mean).square().sum(1).mean().sqrt()) or 1.0
    rows = torch.cat(
        [(raw - mean) / scale, torch.ones(len(raw), 1, dtype=torch.float64)], 1
    )  # the last one is the bias
    first, second, alone = rows.split([len(pairs), len(pairs), len(thumbs)])
    signs = 2 * torch.tensor(list(thumbs.values()), dtype=torch.float64) - 1
    # Both likelihoods are the logistic one: of the difference of a pair, and of a thumb's text with its sign.
    agreement = torch.cat([first - second, signs[:, None] * alone])  # [P + T, D + 1]
    weights = _most_likely(agreement)
    agreed = float((agreement @ weights > 0).double().mean())
    *linear, bias = weights.tolist()
    return Fit(linear, mean.tolist(), scale, bias, agreed, len(agreement))


def _check_enough(pairs: int, thumbs: list[float]) -> None:
    count = pairs + len(thumbs)
    if count < FEWEST:
        raise ValueError(f"{count} ratings are too few to learn from: it takes at least {FEWEST} thumbs or comparisons")
    if not pairs and len(set(thumbs)) == 1:
        raise ValueError(f"all {count} thumbs point the same way: it takes some of the other kind, or comparisons")


def _most_likely(agreement: Any) -> Any:
    """[D] weights w that minimise Σ log(1 + exp(-agreement·w)) + RIDGE/2 · |w|². agreement: [M, D]."""
    import torch

    weights = torch.zeros(agreement.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Any:
        optimizer.zero_grad()
        value = torch.nn.functional.softplus(-(agreement @ weights)).sum() + RIDGE / 2 * weights.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weights.detach()


def _scores(fit: Fit, features: Any) -> list[float]:
    import torch

    weights, mean = (torch.tensor(values, dtype=torch.float64) for values in (fit.weights, fit.mean))
    if features.shape[1] != len(weights):
        raise ValueError(f"the model was fitted to {len(weights)} features, now there are {features.shape[1]}")
    scores: list[float] = torch.sigmoid((features - mean) / fit.scale @ weights + fit.bias).tolist()
    return scores


def _save(fit: Fit, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"format": FORMAT, **asdict(fit)}), encoding="utf-8")
    os.replace(part, path)  # so that a run being resumed finds the old file or the new one


def _load(path: Path) -> Fit:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no rating model: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no rating model that this grpo-kit can read")
    return Fit(**values)
