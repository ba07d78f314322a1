"""A reward that people give: thumbs and comparisons of completions, while the run waits or goes on.

The reward keeps a list of open questions, which a panel (`grpo_kit.widgets.RatingPanel`) or a script answers from
another thread. Deliberately no front end and no disk here: a run that is told of the reward keeps its ratings.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from grpo_kit.rewards.ratings import Key, Rating, human_scores, prompt_text
from grpo_kit.rewards.reward import SECONDS_BATCHED, Reward
from grpo_kit.rewards.score import Score

MOST_OPEN = 200  # questions kept while training goes on; of more, the newest
MOST_CLOSED = 200  # answered or withdrawn questions that can still be answered anew, or compared with
GRACE = 15.0  # seconds between the end of the reward's own waiting and the limit that scoring sets it
SLICE = 0.5  # seconds; a waiting thread that scoring has given up hears of it after so long

_log = logging.getLogger(__name__)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Question:
    """One completion to be rated. prompt and text are plain text; equal prompts can be compared."""

    id: int
    step: int | None
    prompt: str
    text: str

    @property
    def key(self) -> Key:
        return self.prompt, self.text


@dataclass(frozen=True)
class Progress:
    """How far the rating is. waits: training waits for it, and `rated` of `asked` questions of this step are settled;
    otherwise `rated` counts all ratings so far and `asked` the open questions. seconds_left: of the waiting."""

    waits: bool
    rated: int
    asked: int
    seconds_left: float | None


class HumanReward(Reward):
    """Collects ratings of completions from people; see `human`. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        wait: bool = True,
        time_limit: float = 600.0,
        per_step: int | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        _check(time_limit, per_step)

        def human(prompts: Sequence[Any], completions: Sequence[str], step: int | None = None) -> list[Score]:
            return self._score(prompts, completions, step)

        options = {"wait": wait, "time_limit": time_limit, "per_step": per_step, "weight": weight, "name": name}
        enforced = time_limit + GRACE if wait else SECONDS_BATCHED
        super().__init__(human, weight=weight, time_limit=enforced, name=name or "human", spec=("human", options))
        self.wait, self.patience, self.per_step = wait, float(time_limit), per_step
        self._changed = threading.Condition()
        self._open: dict[int, Question] = {}
        self._closed: dict[int, Question] = {}
        self._waits: list[_Wait] = []
        self._ids = 0
        self._ratings: list[Rating] = []
        self._scores: dict[Key, float] = {}
        self._keep: Callable[[Rating], None] | None = None
        self._unkept: list[Rating] = []
        self._keeping = threading.Lock()
        self._given_up = False
        self._subscribers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        how = f"training waits up to {self.patience:g} s" if self.wait else "training goes on"
        return f"HumanReward({self.name!r}, weight={self.weight:g}, {len(self._ratings)} ratings, {how})"

    # -- for people, panels and scripts -------------------------------------------------------------------------

    def open(self) -> list[Question]:
        """The questions that nobody has answered yet, oldest first."""
        with self._changed:
            return list(self._open.values())

    def pairs(self) -> list[tuple[Question, Question]]:
        """Comparisons worth asking for: the open questions of each prompt two by two, and one that is left over beside
        one that was answered. A prompt with nothing to compare with has none."""
        with self._changed:
            of_prompt: dict[str, list[Question]] = {}
            for question in self._open.values():
                of_prompt.setdefault(question.prompt, []).append(question)
            rated = {old.prompt: old for old in self._closed.values() if old.key in self._scores}
        found = []
        for prompt, questions in of_prompt.items():
            if len(questions) % 2 and prompt in rated:
                questions = [*questions, rated[prompt]]
            found += list(pairwise(questions))[::2]
        return found

    @property
    def ratings(self) -> list[Rating]:
        """All ratings known, those that `attach` brought included."""
        with self._changed:
            return list(self._ratings)

    def progress(self) -> Progress:
        """How far the rating is, in numbers for a panel."""
        with self._changed:
            if not self._waits:
                return Progress(False, len(self._ratings), len(self._open), None)
            asked = [number for wait in self._waits for number in wait.ids]
            settled = sum(number not in self._open for number in asked)
            until = max(wait.until for wait in self._waits)
            return Progress(True, settled, len(asked), max(0.0, until - time.monotonic()))

    def rate(self, id: int, up: bool) -> None:
        """Thumbs up (score 1.0) or down (0.0) for a question; answering again changes the answer.

        Raises ValueError for a question that does not exist or is long gone.
        """
        with self._changed:
            question = self._question(id)
            self._close(question)
            self._note("thumb", question, None, 1.0 if up else 0.0)
        self._tell()
        self._hand_over()

    def prefer(self, better_id: int, worse_id: int) -> None:
        """One completion is better than another one of the same prompt; both count as answered.

        Raises ValueError for two prompts, for one question twice, and for a question that does not exist.
        """
        with self._changed:
            better, worse = self._question(better_id), self._question(worse_id)
            if better.prompt != worse.prompt:
                said = f"questions {better_id} and {worse_id} have different prompts"
                raise ValueError(f"{said}: only answers to the same prompt can be compared")
            if better.text == worse.text:
                raise ValueError(f"questions {better_id} and {worse_id} are the same answer")
            self._close(better)
            self._close(worse)
            self._note("pair", better, worse, 1.0)
        self._tell()
        self._hand_over()

    def skip(self, id: int) -> None:
        """Leave a question unanswered; the reward does not apply to that completion. ValueError as for `rate`."""
        with self._changed:
            self._close(self._question(id))
        self._tell()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback()` called, by whichever thread it was, when questions or ratings changed; it must be quick.
        One that raises is not called again, and the log says so. Returns the function that ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback) if callback in self._subscribers else None

    # -- for the run --------------------------------------------------------------------------------------------

    def attach(self, keep: Callable[[Rating], None], known: list[Rating]) -> None:
        """From now on hand each new rating to `keep`, at once those given while nobody kept them.

        known: ratings of the run's record; those that another reward asked for are left alone. Ends the state that
        `give_up` set. What `keep` raises reaches the caller here and of `rate` and `prefer`; the rating counts all the
        same, and is handed over again with the next one.
        """
        with self._changed:
            mine = [rating for rating in known if rating.reward == self.name]
            self._ratings = sorted(dict.fromkeys([*mine, *self._ratings]), key=lambda rating: rating.time)
            self._scores = human_scores(self._ratings)
            self._unkept = [rating for rating in self._unkept if rating not in mine]
            self._keep, self._given_up = keep, False
        self._tell()
        self._hand_over()

    def give_up(self) -> None:
        """The run is being stopped: end the waiting, and do not wait again before the next `attach`."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._tell()

    # -- scoring ------------------------------------------------------------------------------------------------

    def _score(self, prompts: Sequence[Any], completions: Sequence[str], step: int | None) -> list[Score]:
        keys = [(prompt_text(prompt), str(text)) for prompt, text in zip(prompts, completions, strict=True)]
        with self._changed:
            asked = self._ask(keys, step)
        self._tell()
        if self.wait:
            self._wait_for(asked)
        with self._changed:
            return [self._score_of(key) for key in keys]

    def _score_of(self, key: Key) -> Score:
        value = self._scores.get(key)
        return Score(None, "not applicable", "nobody has rated it") if value is None else Score(value)

    def _ask(self, keys: list[Key], step: int | None) -> list[Question]:
        """Open a question for each completion chosen that is neither rated nor asked about; those that are open now."""
        already = {question.key: question for question in self._open.values()}
        asked = []
        for key in chosen(keys, self.per_step):
            if key in self._scores:
                continue
            if key not in already:
                self._ids += 1
                already[key] = self._open[self._ids] = Question(self._ids, step, *key)
            asked.append(already[key])
        if not self.wait:
            for question in list(self._open.values())[:-MOST_OPEN]:
                self._close(question)
        return asked

    def _wait_for(self, asked: list[Question]) -> None:
        """Until all of `asked` is settled, the time is over or the run gives up; what is left then is withdrawn."""
        with self._waiting(asked) as wait, self._changed:
            while any(number in self._open for number in wait.ids) and not self._given_up:
                left = wait.until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, SLICE))
        self._tell()

    @contextmanager
    def _waiting(self, asked: list[Question]) -> Iterator[_Wait]:
        wait = _Wait([question.id for question in asked], time.monotonic() + self.patience)
        try:
            with self._changed:
                self._waits.append(wait)
            yield wait
        finally:
            with self._changed:
                self._waits = [other for other in self._waits if other is not wait]
                for question in asked:
                    if question.id in self._open:
                        self._close(question)

    # -- small things, called holding the lock ------------------------------------------------------------------

    def _question(self, id: int) -> Question:
        found = self._open.get(id) or self._closed.get(id)
        if found is None:
            raise ValueError(f"there is no question {id!r} (any more); open() lists those that there are")
        return found

    def _close(self, question: Question) -> None:
        same = [other for other in self._open.values() if other.key == question.key]  # one withdrawn may be asked anew
        for closed in (*same, question):
            self._open.pop(closed.id, None)
            self._closed.pop(closed.id, None)  # so that it counts among the newest
            self._closed[closed.id] = closed
        for old in list(self._closed)[:-MOST_CLOSED]:
            del self._closed[old]
        self._changed.notify_all()

    def _note(self, kind: str, question: Question, other: Question | None, value: float) -> None:
        text = None if other is None else other.text
        rating = Rating(kind, question.prompt, question.text, value, text, question.step, time.time(), self.name)
        self._ratings.append(rating)
        self._unkept.append(rating)
        self._scores = human_scores(self._ratings)

    # -- small things, called without the lock ------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give `keep` what it has not got yet. Not holding the lock: the disk may be slow, and training goes on."""
        with self._keeping:  # one at a time, so in order and none twice
            while True:
                with self._changed:
                    if self._keep is None or not self._unkept:
                        return
                    keep, rating = self._keep, self._unkept[0]
                keep(rating)
                with self._changed:
                    self._unkept = [other for other in self._unkept if other is not rating]

    def _tell(self) -> None:
        for callback in list(self._subscribers):
            try:
                callback()
            except Exception as error:  # a panel's trouble is nobody else's
                self._subscribers = [other for other in self._subscribers if other is not callback]
                _log.warning("a subscriber of %r was dropped: %r", self.name, error)


@dataclass(frozen=True, eq=False)
class _Wait:
    """One batch that training waits for: its questions' ids, and when the waiting ends on the monotonic clock."""

    ids: list[int]
    until: float


def human(
    *,
    wait: bool = True,
    time_limit: float = 600.0,
    per_step: int | None = None,
    weight: float = 1.0,
    name: str | None = None,
) -> HumanReward:
    """Scores that people give: thumbs up 1.0, thumbs down 0.0, or the share of the comparisons that a completion won
    (an estimate of its win rate; a thumb counts for more). The reward does not apply to what nobody rated.

    wait:       True holds each step until its completions are rated, or for `time_limit` seconds (a finite number).
                Meanwhile Stop ends the waiting at once, and Pause takes effect when it is over.
                False never holds it: a completion counts if the very same answer to the same prompt was rated before,
                and the newest 200 questions stay open, for `fit_ratings` to learn from.
    per_step:   how many completions to ask about, spread evenly over the step, whole groups first so that there is
                something to compare; None asks about all.

    Equal answers to a prompt are asked about once. Raises ValueError for a time limit or a number that can't work.
    """
    return HumanReward(wait=wait, time_limit=time_limit, per_step=per_step, weight=weight, name=name)


def chosen(keys: list[Key], wanted: int | None) -> list[Key]:
    """`wanted` different ones of `keys` (None: all), in order: evenly spread groups (equal prompts), each whole but for
    the last one, of which evenly spread answers. Always the same choice."""
    groups: dict[str, list[Key]] = {}
    for key in dict.fromkeys(keys):
        groups.setdefault(key[0], []).append(key)
    if wanted is None or wanted >= sum(map(len, groups.values())):
        return list(dict.fromkeys(keys))
    candidates = (_spread(list(groups.values()), count) for count in range(1, len(groups) + 1))
    enough = next(some for some in candidates if sum(map(len, some)) >= wanted)
    found: list[Key] = []
    for group in enough:
        found += _spread(group, min(len(group), wanted - len(found)))
    return found


def _spread(items: list[Item], count: int) -> list[Item]:
    """`count` of the items at even distances, beginning with the first."""
    return [items[place * len(items) // count] for place in range(count)]


def _check(time_limit: float, per_step: int | None) -> None:
    number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if not number or not math.isfinite(time_limit) or time_limit <= 0:
        raise ValueError(f"time_limit must be a finite number of seconds above 0, not {time_limit!r}")
    if per_step is not None and (not isinstance(per_step, int) or isinstance(per_step, bool) or per_step < 1):
        raise ValueError(f"per_step must be a whole number of completions, at least 1, or None, not {per_step!r}")
