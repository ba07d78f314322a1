from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from grpo_kit.store import Record
from grpo_kit.widgets import Picture, picture
from tests.widgets.fake_run import HOSTILE, FakeRun


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser would read them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_all_text_is_escaped(tmp_path: Path) -> None:
    def hostile(step: int, row: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        row[f"rewards/{HOSTILE}"] = 0.5
        for answer in answers:
            answer["scores"][HOSTILE] = [None, "error", HOSTILE]

    run = FakeRun(tmp_path, ready=3, change_rows=hostile)
    run.name = HOSTILE
    run.record.add_event("warning", HOSTILE, 2)
    page = Page(picture(run))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) > 3


def test_shows_curves_marks_and_the_last_answers(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=12, edit_step=7)
    run.set_state("finished")
    html = picture(run)
    page = Page(html)
    assert page.tags.count("svg") == 6
    assert page.tags.count("polygon") == 1
    assert html.count('class="mark"') == 6
    assert "finished" in page.text
    assert "step 12 / 300" in page.text
    assert "timeout" in page.text
    assert "number_close is failing." in page.text


def test_takes_a_record_and_loads_nothing(tmp_path: Path) -> None:
    FakeRun(tmp_path, ready=2).record.close()
    html = picture(Record(tmp_path / "run.sqlite"))
    page = Page(html)
    assert "step 2" in page.text
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert "url(" not in html
    assert "@import" not in html


def test_an_empty_run_is_a_picture_too(tmp_path: Path) -> None:
    assert "step 0" in Page(picture(FakeRun(tmp_path))).text


def test_one_step_and_missing_values(tmp_path: Path) -> None:
    def gaps(step: int, row: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        row["kl"] = row["reward"] = row["length"] = None
        answers[0]["total"] = answers[0]["advantage"] = None

    assert "–" in Page(picture(FakeRun(tmp_path, ready=1, change_rows=gaps))).text


def test_long_answers_are_cut_with_a_word_about_it(tmp_path: Path) -> None:
    def long(step: int, row: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        answers[0]["text"] = "x" * 2000

    assert "(500 more characters)" in Page(picture(FakeRun(tmp_path, ready=1, change_rows=long))).text


def test_a_notebook_displays_the_run_as_it_was(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, ready=2)
    shown = Picture(run)
    run.write_step()
    assert "step 2" in Page(shown._repr_html_()).text


def test_evaluations_the_same_question_and_skipped_updates(tmp_path: Path) -> None:
    html = picture(FakeRun(tmp_path, ready=100, evaluate_every=10, float16=True))
    page = Page(html)
    assert page.tags.count("svg") == 7
    assert html.count('class="mark"') == 7, "the edited reward; evaluations are no marks"
    assert "now 92 %, before training 22 %" in page.text
    assert "within 4 tries" in page.text
    assert "2 updates were skipped in 100 steps: float16 overflowed, loss scale now 16,384" in page.text
    assert "sampler and trainer differ by 0.004 nats a token, 0.13 at most" in page.text
    answers = [page.text.index(f"step {step} ") for step in (100, 90, 80, 70, 60, 50, 40)]
    assert answers == sorted(answers)
    assert page.text.index("and 3 between") < page.text.index("before training <reasoning>")
    assert HOSTILE in page.text
    assert not {"script", "img"} & set(page.tags)


def test_a_run_without_evaluations_has_none_of_it(tmp_path: Path) -> None:
    text = Page(picture(FakeRun(tmp_path, ready=3))).text
    for words in ("held-out", "The same question", "skipped"):
        assert words not in text.split("</style>")[-1]
