"""A reward: a Python function that scores completions, with a name, a weight and a time limit.

Two kinds of function serve:

- per sample, it has a parameter `completion`: called once per completion and returns a number, None or a Score;
- batched, as TRL has them, it has a parameter `completions` (or `**kwargs` beside `completion_ids` or `prompts`):
  called once per batch with lists, returns a list.

Both are called by keyword and get only what their signature names; with `**kwargs`, all there is. Deliberately no
scoring here (that is scoring.py): a Reward only knows what its function asks for.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, overload

GIVEN_PER_SAMPLE = ("completion", "prompt", "completion_ids", "step")
GIVEN_BATCHED = ("completions", "prompts", "completion_ids", "step", "trainer_state")

SECONDS_PER_SAMPLE = 5.0
SECONDS_BATCHED = 30.0

_HOW_TO = """ Write it like this:

    def right_answer(completion, answer):            # one completion, and columns of your data by name
        return 1.0 if last_number(completion) == answer else 0.0

    def right_answers(completions, answer, **kwargs):  # TRL style: lists in, a list of as many numbers out
        return [1.0 if last_number(c) == a else 0.0 for c, a in zip(completions, answer)]"""


class Reward:
    """A scoring function with its name, weight and time limit (seconds per call; 5, or 30 for a batched one).

    function: see the module. batched: TRL style. columns: the data columns it needs, which are its required
    parameters other than those every reward is given, and `needs`. spec: (factory name, keyword arguments) if a
    ready-made factory built it. source: the function's text, or "" where Python cannot find it; recorded, never run.

    Raises TypeError for a function that cannot serve, ValueError for a bad name, weight or time limit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        weight: float = 1.0,
        time_limit: float | None = None,
        name: str | None = None,
        needs: Iterable[str] = (),
        spec: tuple[str, dict[str, Any]] | None = None,
    ) -> None:
        self.name = name or _name_of(function)
        parameters = _parameters(function, self.name)
        self.batched = _is_batched(parameters, self.name)
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.weight = checked_weight(weight, self.name)
        self.time_limit = _checked_limit(time_limit, self.batched, self.name)
        self.spec = spec
        self.source = _source(function)
        self.accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.accepts = frozenset(n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        given = GIVEN_BATCHED if self.batched else GIVEN_PER_SAMPLE
        required = [n for n in parameters if n in self.accepts and parameters[n].default is inspect.Parameter.empty]
        self.columns = tuple(dict.fromkeys([n for n in required if n not in given] + list(needs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as it was written."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Reward({self.name!r}, weight={self.weight:g}, time_limit={self.time_limit:g})"


@overload
def reward(function: Callable[..., Any], /) -> Reward: ...
@overload
def reward(
    function: None = None, /, *, weight: float = 1.0, time_limit: float | None = None, name: str | None = None
) -> Callable[[Callable[..., Any]], Reward]: ...
@overload
def reward(
    function: Callable[..., Any], /, *, weight: float = 1.0, time_limit: float | None = None, name: str | None = None
) -> Reward: ...
def reward(
    function: Callable[..., Any] | None = None,
    /,
    *,
    weight: float = 1.0,
    time_limit: float | None = None,
    name: str | None = None,
) -> Reward | Callable[[Callable[..., Any]], Reward]:
    """Makes a function a Reward: `@reward`, `@reward(weight=2.0)` or `reward(function, weight=2.0)`."""
    if function is None:
        return functools.partial(Reward, weight=weight, time_limit=time_limit, name=name)
    return Reward(function, weight=weight, time_limit=time_limit, name=name)


def ready_made(
    function: Callable[..., Any],
    factory: str,
    weight: float,
    name: str | None,
    needs: Iterable[str] = (),
    **options: Any,
) -> Reward:
    """The Reward that the factory called `factory` returns; its spec lets a resumed run build it again."""
    spec = (factory, {**options, "weight": weight, "name": name})
    return Reward(function, weight=weight, name=name or factory, needs=needs, spec=spec)


def checked_weight(weight: float, name: str) -> float:
    """weight as a float; ValueError unless it is a finite number."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ValueError(f"the weight of {name!r} must be a finite number, not {weight!r}")
    return float(weight)


def _checked_limit(limit: float | None, batched: bool, name: str) -> float:
    if limit is None:
        return SECONDS_BATCHED if batched else SECONDS_PER_SAMPLE
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(f"the time limit of {name!r} must be a number of seconds above 0, not {limit!r}")
    return float(limit)


def _name_of(function: Any) -> str:
    if isinstance(function, Reward):
        raise TypeError(f"{function.name!r} is a Reward already; set its weight where it is made")
    if not callable(function):
        hint = " Put a * before the list: RewardSet(*rewards)." if isinstance(function, (list, tuple)) else ""
        raise TypeError(f"a reward is a function, not {type(function).__name__}.{hint}")
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        raise ValueError('a lambda has no name to show; write reward(lambda completion: ..., name="short_name")')
    return name


def _parameters(function: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name!r} shows no signature to call it by; wrap it in a function.{_HOW_TO}") from error
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"{name!r} takes {parameter.name!r} by position only; remove the / from its parameters")
    return parameters


def _is_batched(parameters: dict[str, inspect.Parameter], name: str) -> bool:
    single, batched = "completion" in parameters, "completions" in parameters
    if single and batched:
        raise TypeError(f"{name!r} has both `completion` and `completions`; keep one.{_HOW_TO}")
    # TRL has functions that look only at the ids or the prompts; such plural lists with **kwargs tell them.
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    batched = batched or (not single and everything and ("prompts" in parameters or "completion_ids" in parameters))
    if not single and not batched:
        raise TypeError(f"{name!r} has no parameter `completion` or `completions`.{_HOW_TO}")
    return batched


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
