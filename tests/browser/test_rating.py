"""The rating panel in a real JupyterLab: clicks and keys reach the reward, training goes on, text stays text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

START = """
import threading
from fake_run import HOSTILE
from grpo_kit.rewards import RewardSet, human
from grpo_kit.widgets import RatingPanel

asked = human(time_limit=600)
prompts = [[{"role": "user", "content": f"What is {a} + 5? {HOSTILE}"}] for a in (3, 3, 4, 4)]
texts = [f"<think>3 and 5 make 8.</think> 8 {HOSTILE}", "It is 9, I guess.", "nine", ""]
scores = []
def train():
    table = RewardSet(asked).score(prompts, texts, [{}] * 4, step=12)
    scores.append([row[0] for row in table.values])
training = threading.Thread(target=train, daemon=True)
training.start()
panel = RatingPanel(asked)
panel
"""


def counter(page: Any, words: str) -> None:
    page.wait_for_function(
        "(words) => document.querySelector('.gk-counter')?.textContent.startsWith(words)", arg=words, timeout=60_000
    )


def test_clicks_and_keys_rate_until_training_goes_on(notebook: Callable[..., Any]) -> None:
    cells = [START, "training.join(60); print(scores, [(r.kind, r.value) for r in asked.ratings])"]
    nb = notebook("rating.ipynb", cells)
    page = nb.page
    nb.run(0)
    counter(page, "0 of 4 rated, training waits for you")
    assert "3 and 5 make 8." in page.locator(".gk-rateone .gk-ratetext").inner_text()
    assert "user: What is 3 + 5?" in page.locator(".gk-rateone .gk-prompt").inner_text()
    page.locator(".gk-good").click()
    counter(page, "1 of 4")
    page.wait_for_function("document.querySelector('.gk-rateone .gk-ratetext').textContent.includes('I guess')")
    page.keyboard.press("2")  # the clicked button has the focus: bad
    counter(page, "2 of 4")
    page.get_by_role("tab", name="two side by side").click()
    sides = page.locator(".gk-ratepair .gk-ratetext")
    assert sides.all_inner_texts() == ["nine", ""]
    page.keyboard.press("b")  # JupyterLab would insert a cell
    sides.first.focus()
    page.keyboard.press("b")
    assert page.locator(".jp-CodeCell").count() == len(cells)
    page.locator(".gk-better").first.click()
    page.locator(".gk-nothing").wait_for(timeout=60_000)
    assert "Nothing to rate" in page.locator(".gk-nothing").inner_text()
    page.wait_for_function("document.querySelector('.gk-counter').textContent === '3 ratings so far'")
    assert nb.value(1).strip() == "[[1.0, 0.0, 1.0, 0.0]] [('thumb', 1.0), ('thumb', 0.0), ('pair', 1.0)]"
    assert page.locator(".gk-panel :is(img, script, iframe)").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_reload_shows_what_is_still_open(notebook: Callable[..., Any]) -> None:
    nb = notebook("rating_reload.ipynb", [START])
    nb.run(0)
    counter(nb.page, "0 of 4")
    nb.page.locator(".gk-skip:visible").click()
    counter(nb.page, "1 of 4")
    nb.save()
    nb.page.wait_for_timeout(1000)
    nb.reload()
    counter(nb.page, "1 of 4")
    assert "I guess" in nb.page.locator(".gk-rateone .gk-ratetext").inner_text()
