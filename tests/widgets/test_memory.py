"""The bars of a memory plan: numbers, the card's limit, and a picture that loads nothing."""

from __future__ import annotations

import inspect
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from grpo_kit.model import MemoryPlan, memory_parts, memory_plan
from grpo_kit.widgets import memory_picture, memory_plot
from grpo_kit.widgets.memory import COLORS
from tests.model.test_shape import real
from tests.widgets.fake_run import HOSTILE
from tests.widgets.test_picture import Page


def plan(gpu: str | float = "T4", name: str = "Qwen2.5-7B") -> MemoryPlan:
    config = real("Qwen2.5-7B")
    config.name_or_path = name
    return memory_plan(config, gpu)


def test_bars_hold_the_plans_numbers() -> None:
    made = plan()
    figure = memory_plot(made)
    drawn = {(phase, bar.name): size for bar in figure.data for phase, size in zip(bar.y, bar.x, strict=True)}
    rows = made.frame().itertuples(index=False)
    assert drawn == pytest.approx({(row.phase, row.part): row.gigabytes for row in rows})
    assert figure.layout.barmode == "stack"
    assert made.plot().data == figure.data


@pytest.mark.parametrize(("gpu", "words"), [("T4", "to spare"), (8, "does not fit, ")])
def test_the_cards_limit_is_a_line(gpu: str | float, words: str) -> None:
    made = plan(gpu)
    figure = memory_plot(made)
    (line,) = figure.layout.shapes
    assert line.x0 == line.x1 == made.gpu.total / 1e9
    assert f"{made.gpu.name}: {made.gpu.total / 1e9:.1f} GB" in figure.layout.annotations[0].text
    assert words in figure.layout.title.text


def test_parts_keep_their_colors_and_no_two_of_a_phase_share_one() -> None:
    for gpu, options in (("T4", {}), ("H200", {"max_prompt_length": 900, "max_completion_length": 16}), (4, {})):
        made = memory_plan(real("Qwen2.5-0.5B"), gpu, **options)
        colors = {bar.name: bar.marker.color for bar in memory_plot(made).data}
        assert colors == {part: COLORS[part] for part in colors}
        assert all(len({colors[part] for part in parts}) == len(parts) for parts in made.phases.values())
    source = inspect.getsource(memory_parts)
    assert all(f'"{part}"' in source for part in COLORS), "no color for a part that no plan has"


def svg(html: str) -> Any:
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


def numbers(element: Any, *names: str) -> list[float]:
    return [float(element.get(name)) for name in names]


@pytest.mark.parametrize("gpu", ["T4", 8])
def test_the_pictures_bars_are_as_long_as_what_they_stand_for(gpu: str | float) -> None:
    made = plan(gpu)
    picture = svg(memory_picture(made))
    left = min(float(box.get("x")) for box in picture.iter("rect"))
    (line,) = picture.iter("line")
    to_limit = float(line.get("x1")) - left
    rows = sorted({box.get("y") for box in picture.iter("rect")}, key=float)
    for y, parts in zip(rows, made.phases.values(), strict=True):
        boxes = [numbers(box, "x", "width") for box in picture.iter("rect") if box.get("y") == y]
        assert [width / to_limit for _, width in boxes] == pytest.approx(
            [size / made.gpu.total for size in parts.values()], abs=0.002
        )
        ends = [x + width for x, width in boxes]
        assert [x for x, _ in boxes[1:]] == pytest.approx(ends[:-1], abs=0.2), "side by side"
    _, _, wide, high = map(float, picture.get("viewBox").split())
    assert all(x + width <= wide for box in picture.iter("rect") for x, width in [numbers(box, "x", "width")])
    assert all(float(text.get("y")) <= high for text in picture.iter("text"))


def test_a_notebook_shows_bars_and_table_and_loads_nothing() -> None:
    made = plan()
    page = Page(made._repr_html_())
    assert "script" not in page.tags
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert made.verdict in page.text
    assert repr(made) in page.text


def test_names_are_not_read_as_html() -> None:
    made = plan(name=HOSTILE)
    page = Page(made._repr_html_())
    assert not {"script", "img"} & set(page.tags)
    assert HOSTILE in page.text
    assert "<img" not in memory_plot(made).layout.title.text
