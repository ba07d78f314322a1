"""The live panel in a real JupyterLab: what arrives, what a click does and how soon, what hostile text does."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

START = """
import tempfile, threading, time
from fake_run import FakeRun
from grpo_kit.widgets import Panel
run = FakeRun(tempfile.mkdtemp(), steps={steps}, seconds={seconds}, ready={ready})
{before}
panel = Panel(run)
{after}
panel
"""
# As Colab does: what a thread sends to a widget is lost.
LOSE_WHAT_THREADS_SEND = """
from ipykernel.kernelbase import Kernel
session, lost, asked = Kernel.instance().session, [], set()
session_send, receive = session.send, panel._receive
def send(stream, msg_or_type, *args, **kwargs):
    if msg_or_type == "comm_msg" and threading.current_thread() is not threading.main_thread():
        lost.append(msg_or_type)
        return None
    return session_send(stream, msg_or_type, *args, **kwargs)
session.send = send
panel._msg_callbacks.callbacks.clear()
panel.on_msg(lambda *message: (asked.add(threading.current_thread().name), receive(*message)))
run.start()
"""
LOSE_EVERY_THIRD = """
class Lossy(Panel):
    count = 0
    def send(self, content, buffers=None):
        self.count += 1
        if content["type"] == "plotly" or self.count % 3:
            super().send(content, buffers)
panel = Lossy(run)
"""
SPIN = "end = time.monotonic() + 4\nwhile time.monotonic() < end: pass"
CLICK = "(selector) => { const now = Date.now() / 1000; document.querySelector(selector).click(); return now; }"
# What the first chart draws: the x of its raw line.
DRAWN = "() => [...(document.querySelector('.gk-plot')?.data?.[2]?.x ?? [])]"


def start(steps: int = 5000, seconds: float = 0.2, ready: int = 0, before: str = "", after: str = "run.start()") -> str:
    return START.format(steps=steps, seconds=seconds, ready=ready, before=before, after=after)


def wait_for_step(page: Any, step: int) -> None:
    page.wait_for_function(f"Number(document.querySelector('.gk-panel')?.dataset.step) >= {step}", timeout=60_000)


def wait_for_drawn(page: Any, step: int) -> list[int]:
    """Steps that the first chart shows, once it shows `step`."""
    page.wait_for_function(f"() => ({DRAWN})().includes({step})", timeout=60_000)
    return list(page.evaluate(DRAWN))


def wait_for_state(page: Any, state: str) -> None:
    page.wait_for_selector(f".gk-dot[data-state='{state}']", state="attached", timeout=30_000)


def calls(nb: Any, index: int) -> list[tuple[float, str]]:
    """(when, what) of the controls called so far; the cell at `index` is `print(run.calls)`."""
    return list(ast.literal_eval(nb.value(index)))


def test_panel_appears_draws_and_takes_no_global_name(notebook: Callable[..., Any]) -> None:
    nb = notebook("appears.ipynb", [start(ready=30)])
    nb.run(0)
    drawn = wait_for_drawn(nb.page, 35)
    assert drawn == list(range(1, len(drawn) + 1))
    assert nb.page.locator(".gk-plot .main-svg").count() >= 6
    assert nb.page.evaluate("typeof window.Plotly") == "undefined"
    text = nb.page.locator(".gk-panel").inner_text()
    for words in ("running", "/ 5000", "left", "total reward", "right_answer", "changes apply from the next step"):
        assert words in text


def test_pause_resume_and_stop_take_effect_at_once(notebook: Callable[..., Any]) -> None:
    nb = notebook("buttons.ipynb", [start(), "time.sleep(4)", SPIN, "print(run.calls)"])
    page = nb.page
    nb.run(0)
    wait_for_step(page, 3)

    def click(selector: str) -> float:
        page.wait_for_selector(f"{selector}:enabled", timeout=30_000)
        return float(page.evaluate(CLICK, selector))

    def delay(clicked: float, what: str) -> float:
        when, called = calls(nb, 3)[-1]
        assert called == what
        return when - clicked

    clicked = click(".gk-pause")
    wait_for_state(page, "paused")
    assert delay(clicked, "pause") < 1, "no cell was running"
    click(".gk-pause")
    wait_for_state(page, "running")
    assert calls(nb, 3)[-1][1] == "resume"

    for index, kind in ((1, "sleeping"), (2, "spinning")):
        nb.run(index, wait=False)
        time.sleep(1)  # rows are pushed while the cell runs, which is what could route the click behind it
        clicked = click(".gk-pause")
        page.wait_for_function("window.cellIsDone", timeout=60_000)
        assert delay(clicked, "pause") < 1, f"a cell was {kind}"
        wait_for_state(page, "paused")
        click(".gk-pause")
        wait_for_state(page, "running")

    click(".gk-stop")
    assert page.locator(".gk-stop").inner_text() == "Stop now?"
    assert calls(nb, 3)[-1][1] == "resume"
    clicked = click(".gk-stop")
    wait_for_state(page, "stopped")
    assert delay(clicked, "stop") < 1
    assert not page.locator(".gk-pause").is_visible()


def test_edits_reach_the_run_and_refusals_are_said(notebook: Callable[..., Any]) -> None:
    nb = notebook("edits.ipynb", [start(), "print(run.learning_rate, run.weights['xml_format'])"])
    page = nb.page
    nb.run(0)
    wait_for_step(page, 2)
    rate = page.get_by_label("learning rate", exact=True)
    rate.fill("1e-6")
    rate.press("Enter")
    weight = page.get_by_label("xml_format", exact=True)
    weight.fill("0.25")
    weight.press("Enter")
    page.wait_for_function("document.querySelector('.gk-log summary').textContent.includes('option changed')")
    assert nb.value(1).split() == ["1e-06", "0.25"]
    assert rate.input_value() == "1e-6"
    rate.fill("7")
    rate.press("Enter")
    problem = page.locator(".gk-problem:visible")
    problem.wait_for(timeout=30_000)
    assert "between 0 and 1" in problem.inner_text()
    page.wait_for_timeout(1500)  # rows that arrive meanwhile leave what was typed and why it was refused
    assert problem.is_visible()
    assert rate.input_value() == "7"
    rate.press("Escape")
    assert rate.input_value() == "1e-6"
    assert not problem.is_visible()
    assert nb.value(1).split() == ["1e-06", "0.25"]


def test_reload_brings_everything_back(notebook: Callable[..., Any]) -> None:
    nb = notebook("reload.ipynb", [start(ready=40)])
    nb.run(0)
    wait_for_drawn(nb.page, 42)
    nb.save()
    nb.page.wait_for_timeout(1000)
    nb.reload()
    drawn = wait_for_drawn(nb.page, 45)
    assert drawn == list(range(1, len(drawn) + 1))
    wait_for_step(nb.page, len(drawn) + 3)
    assert nb.page.locator(".gk-table tbody tr").count() == 4


def test_every_row_arrives_where_threads_cannot_send(notebook: Callable[..., Any]) -> None:
    cells = [start(after=""), LOSE_WHAT_THREADS_SEND, "time.sleep(3)", "print(len(lost), asked)", "print(run.calls)"]
    nb = notebook("colab.ipynb", cells)
    page = nb.page
    nb.comms_over_subshells("disabled")
    nb.run(0)
    page.wait_for_selector(".gk-panel", timeout=60_000)
    nb.run(1)
    wait_for_drawn(page, 10)
    nb.run(2)  # nothing can arrive while a cell runs; afterwards all of it does
    before = int(page.get_attribute(".gk-panel", "data-step") or 0)
    drawn = wait_for_drawn(page, before + 20)
    assert drawn == list(range(1, len(drawn) + 1))
    said = nb.value(3)
    assert "{'MainThread'}" in said
    assert int(said.split()[0]) > 10
    clicked = page.evaluate(CLICK, ".gk-pause")
    wait_for_state(page, "paused")
    assert calls(nb, 4)[-1][0] - clicked < 1


def test_lost_messages_leave_no_gap(notebook: Callable[..., Any]) -> None:
    nb = notebook("lossy.ipynb", [start(seconds=0.3, after=LOSE_EVERY_THIRD + "run.start()")])
    nb.run(0)
    drawn = wait_for_drawn(nb.page, 30)
    assert drawn == list(range(1, len(drawn) + 1))


def test_a_resume_in_place_redraws(notebook: Callable[..., Any]) -> None:
    cells = [start(ready=30, after=""), "run.record.forget_after(20); run.step = 20; run.notify()", "run.write_step()"]
    nb = notebook("resume.ipynb", cells)
    nb.run(0)
    wait_for_drawn(nb.page, 30)
    nb.run(1)
    nb.page.wait_for_function(f"() => ({DRAWN})().length === 20", timeout=30_000)
    nb.run(2)
    assert wait_for_drawn(nb.page, 21) == list(range(1, 22))


def test_hostile_text_is_shown_and_does_nothing(notebook: Callable[..., Any]) -> None:
    hostile = """
from fake_run import HOSTILE
run.name = HOSTILE
run.weights[HOSTILE] = 1.0
def add(step, row, answers):
    row[f"rewards/{HOSTILE}"] = 0.5
    for answer in answers:
        answer["scores"][HOSTILE] = [None, "error", HOSTILE]
run._change_rows = add
for _ in range(12):
    run.write_step()
run.record.add_event("warning", HOSTILE, 3)
run.set_state("failed", f"Traceback\\nValueError: {HOSTILE}")
"""
    nb = notebook("hostile.ipynb", [start(before=hostile, after="")])
    page = nb.page
    nb.run(0)
    wait_for_drawn(page, 12)
    page.locator(".gk-failed summary").click()
    page.locator(".gk-log summary").click()
    plot = page.locator(".gk-plot").nth(1)
    plot.hover()
    page.wait_for_timeout(1000)
    literal = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    for place in (".gk-prompt", ".gk-text >> nth=1", ".gk-failed", ".gk-log", ".gk-note >> nth=1", ".gk-knobs"):
        assert page.locator(place).first.text_content().count("<script>") or place == ".gk-text >> nth=1"
    assert literal in page.locator(".gk-completions").text_content()
    assert page.locator(".gk-panel :is(img, script, iframe)").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_hidden_page_draws_once_when_it_is_seen_again(notebook: Callable[..., Any]) -> None:
    nb = notebook("hidden.ipynb", [start()])
    page = nb.page
    nb.run(0)
    wait_for_drawn(page, 3)
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden }); }"
    page.evaluate(hide, True)
    page.wait_for_timeout(500)
    drawn = len(page.evaluate(DRAWN))
    wait_for_step(page, drawn + 10)
    assert len(page.evaluate(DRAWN)) == drawn
    page.evaluate(hide, False)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    seen = wait_for_drawn(page, drawn + 10)
    assert seen == list(range(1, len(seen) + 1))


def test_the_table_keeps_still_while_it_is_read(notebook: Callable[..., Any]) -> None:
    nb = notebook("reading.ipynb", [start()])
    page = nb.page
    nb.run(0)
    wait_for_step(page, 2)
    page.locator(".gk-text").first.hover()
    label = page.locator(".gk-steplabel")
    shown = label.inner_text()
    step = int(page.get_attribute(".gk-panel", "data-step") or 0)
    wait_for_step(page, step + 5)
    assert label.inner_text() == shown or int(label.inner_text().split()[1]) <= step + 1
    assert "move the pointer away" in page.locator(".gk-completions").inner_text()
    page.mouse.move(5, 5)
    page.wait_for_function(f"Number(document.querySelector('.gk-steplabel').textContent.split(' ')[1]) > {step + 3}")
    page.get_by_label("previous step").click()
    page.get_by_text("newest", exact=True).wait_for(timeout=30_000)


def test_held_out_accuracy_and_the_same_question(notebook: Callable[..., Any]) -> None:
    fake = "run = FakeRun(tempfile.mkdtemp(), ready=20, evaluate_every=10, float16=True)"
    cells = [start(before=fake, after=""), "for _ in range(10): run.write_step()"]
    cells += ["run.record.forget_after(20); run.step = 20; run.notify()"]
    nb = notebook("heldout.ipynb", cells)
    page = nb.page
    dots = "() => [...(document.querySelector('.gk-exact .gk-plot')?.data?.[0]?.x ?? [])].join()"
    steps = "() => [...document.querySelectorAll('.gk-canary time')].map((time) => time.textContent).join()"
    nb.run(0)
    page.wait_for_function(f"() => ({dots})() === '0,10,20'", timeout=60_000)
    held_out = page.locator(".gk-exact")
    assert "before training 22 %" in held_out.inner_text()
    assert "within 4 tries" in held_out.inner_text()
    assert page.evaluate(steps) == "step 20,step 10,before training"
    assert "2 updates were skipped in 20 steps" in page.locator(".gk-header").inner_text()
    assert page.locator(".gk-log summary").inner_text() == "What happened nothing yet"

    first = page.locator(".gk-canary details").last
    line, answer = first.locator("summary"), first.locator(".gk-full")
    assert line.bounding_box()["height"] < 30
    assert not answer.is_visible()
    line.click()
    assert answer.is_visible()
    assert "<script>window.hacked=1</script>" in answer.inner_text()
    assert page.locator(".gk-panel :is(img, script)").count() == 0
    assert page.evaluate("window.hacked") is None

    nb.run(1)
    page.wait_for_function(f"() => ({dots})() === '0,10,20,30'", timeout=30_000)
    assert page.evaluate(steps) == "step 30,step 20,step 10,before training"
    assert answer.is_visible(), "what was opened stays open"
    nb.run(2)
    page.wait_for_function(f"() => ({dots})() === '0,10,20'", timeout=30_000)
    assert page.evaluate(steps) == "step 20,step 10,before training"


def test_a_run_without_evaluations_shows_no_card_for_them(notebook: Callable[..., Any]) -> None:
    nb = notebook("not_evaluated.ipynb", [start(ready=3, after="")])
    nb.run(0)
    wait_for_drawn(nb.page, 3)
    for card in (".gk-heldout", ".gk-exact", ".gk-canary", ".gk-skipped"):
        assert not nb.page.locator(card).is_visible()
