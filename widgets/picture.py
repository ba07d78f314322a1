"""A run as one piece of static HTML: what a saved notebook shows on GitHub, in nbviewer or on paper.

No script and nothing to load, so it also holds no hover and no zoom. All text from the model, the data and the
reward functions is escaped.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from .curves import Card, cards, held_out_cards, marks, record_of
from .heldout import canary
from .svg import Line, chart
from .warnings import find, reward_names, sampler_gap, skipped_updates
from .words import clock, number, percent

Row = dict[str, Any]

SHOWN_GROUPS = 2  # groups of the last step; the rest is in run.completions()
SHOWN_ANSWERS = 8
SHOWN_CHARACTERS = 1500
SHOWN_CANARY = 8  # answers to the question asked all through the run: the newest, and the one before training
ONE_LINE = 80  # characters of such an answer before it is opened

_STYLE = (Path(__file__).parent / "static" / "picture.css").read_text(encoding="utf-8")


def picture(record_or_run: Any) -> str:
    """HTML of a run's header line, curves, answers to the same question, warnings and last completions.

    Takes a `Run` or a `Record`.
    """
    record = record_of(record_or_run)
    rows, completions, events = record.steps(), record.completions(), record.events()
    event_marks = marks(events)
    parts = [
        f'<div class="gkp"><style>{_STYLE}</style>',
        _header(record_or_run, rows),
        '<div class="cards">',
        *(_card(card, event_marks) for card in cards(rows)),
        '</div><div class="held">',
        *(_card(card, event_marks) for card in held_out_cards(events)),
        _canary(events),
        "</div>",
        *(_warning(warning) for warning in find(rows, completions, events)),
        *_groups(completions, reward_names(rows)),
        "</div>",
    ]
    return "".join(parts)


class Picture:
    """The picture as an object that a notebook displays: the run as it was when this was made."""

    def __init__(self, record_or_run: Any) -> None:
        self.html = picture(record_or_run)

    def _repr_html_(self) -> str:
        return self.html


def _header(record_or_run: Any, rows: list[Row]) -> str:
    step = rows[-1]["step"] if rows else 0
    asked = getattr(record_or_run, "steps", None)
    total = f" / {asked}" if isinstance(asked, int) else ""  # a Record's `steps` is a method
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    facts = [
        f"<b>{escape(str(getattr(record_or_run, 'state', 'recorded')))}</b>",
        f"<span><b>step {step}</b>{total}</span>",
    ]
    if seconds:
        each = f"{sum(seconds) / len(seconds):.1f}"
        facts.append(f'<span class="soft">{clock(sum(seconds))} · <b>{each} s</b>/step</span>')
    name = getattr(record_or_run, "name", None)
    if name:
        facts.append(f'<span class="soft">{escape(name)}</span>')
    facts += [
        f'<span class="soft">{escape(said)}</span>' for said in (skipped_updates(rows), sampler_gap(rows)) if said
    ]
    return f'<div class="head">{"".join(facts)}</div>'


def _card(card: Card, event_marks: list[tuple[int, str]]) -> str:
    keys = "".join(_key(line, card) for line in card.lines if len(card.lines) > 1 or line.spread)
    return (
        f'<div class="card" title="{escape(card.term)}"><div class="top"><span class="soft">{escape(card.title)}</span>'
        f"<b>{escape(card.value)}</b></div>{chart(card.title, card.steps, card.lines, event_marks, card.share)}"
        f'<div class="note">{keys or escape(card.term)}</div></div>'
    )


def _key(line: Line, card: Card) -> str:
    """A line's color and name, with its newest value where the card's top right doesn't say it."""
    value = line.values[-1] if line.values else None
    said = "" if line.spread else f" <b>{percent(value) if card.share else number(value)}</b>"
    return f'<span><i class="key" style="background:var(--{line.color})"></i>{escape(line.name)}{said}</span>'


def _canary(events: list[Row]) -> str:
    question, answers = canary(events)
    if not answers:
        return ""
    lines = [_opened(*answer) for answer in answers]
    between = len(answers) - SHOWN_CANARY
    if between > 0:
        lines[SHOWN_CANARY - 1 : -1] = [f'<div class="line soft">and {between} between</div>']
    return (
        '<div class="card canary"><div class="soft" title="canary: one prompt, answered again and again">'
        f"The same question through the run</div><pre>{_cut(question)}</pre>{''.join(lines)}</div>"
    )


def _opened(step: int, answer: str) -> str:
    """An answer as one line, which opens where there is more of it."""
    when = f'<span class="soft">{"before training" if step == 0 else f"step {step}"}</span>'
    line = " ".join(answer.split())
    if line == answer and len(line) <= ONE_LINE:
        return f'<div class="line">{when} <code>{escape(line)}</code></div>'
    cut = escape(line[:ONE_LINE]) + ("…" if len(line) > ONE_LINE else "")
    return f"<details><summary>{when} <code>{cut}</code></summary><pre>{_cut(answer)}</pre></details>"


def _warning(warning: dict[str, str]) -> str:
    title, text, todo = (escape(warning[part]) for part in ("title", "text", "todo"))
    return f'<div class="warn"><b>{title}</b> {text} {todo}</div>'


def _groups(completions: list[Row], names: list[str]) -> list[str]:
    groups: dict[int, list[Row]] = {}
    for row in completions:
        groups.setdefault(row["group"], []).append(row)
    return [_group(answers, names) for answers in list(groups.values())[:SHOWN_GROUPS]]


def _group(answers: list[Row], names: list[str]) -> str:
    first = answers[0]
    heads = ["answer", *names, "total", "advantage", "tokens", "end"]
    head = "".join(f'<th class="{"n" if index else ""}">{escape(text)}</th>' for index, text in enumerate(heads))
    body = "".join(_answer(row, names) for row in answers[:SHOWN_ANSWERS])
    left = len(answers) - SHOWN_ANSWERS
    more = f'<div class="note">and {left} more answers</div>' if left > 0 else ""
    return (
        f'<div class="card group"><div class="soft">step {first["step"]}, prompt {first["group"] + 1}</div>'
        f"<pre>{_cut(first['prompt'])}</pre><table><tr>{head}</tr>{body}</table>{more}</div>"
    )


def _answer(row: Row, names: list[str]) -> str:
    scores = "".join(f'<td class="n">{_score(row["scores"].get(name))}</td>' for name in names)
    advantage = row["advantage"]
    signed = number(None) if advantage is None else f"{advantage:+.2f}".replace("-", "−")
    color = "inherit" if not advantage else "var(--green)" if advantage > 0 else "var(--red)"
    return (
        f'<tr><td><pre>{_cut(row["text"])}</pre></td>{scores}<td class="n">{number(row["total"])}</td>'
        f'<td class="n" style="color:{color}">{signed}</td><td class="n">{row["tokens"]}</td>'
        f'<td class="n">{escape(row["finish_reason"])}</td></tr>'
    )


def _score(score: list[Any] | None) -> str:
    if score is None:
        return number(None)
    value, reason, detail = score
    if value is not None:
        return number(value)
    return f'<span class="soft" title="{escape(detail)}">{escape(reason)}</span>'


def _cut(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return escape(text)
    return escape(text[:SHOWN_CHARACTERS]) + f"… ({len(text) - SHOWN_CHARACTERS} more characters)"
