"""The run record: what is written is what is read, from any thread and process, whatever dies."""

from __future__ import annotations

import json
import math
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

from grpo_kit.store import Record
from grpo_kit.store.record import VERSION_1

ROOT = Path(__file__).resolve().parents[2]


def completion(index=0, **changes):
    row = {
        "index": index, "group": index // 2, "prompt": "What is 3 + 5?", "text": "8",
        "scores": {"right_answer": [1.0, "ok", ""], "format": [None, "not applicable", "no tag"]},
        "total": 2.0, "advantage": 0.5, "tokens": 3, "finish_reason": "eos",
    }  # fmt: skip
    return {**row, **changes}


@pytest.fixture
def record(tmp_path):
    with_record = Record(tmp_path / "run.sqlite")
    yield with_record
    with_record.close()


def python(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_new_record_is_empty(record):
    assert (record.last_step(), record.steps(), record.completions(), record.events()) == (0, [], [], [])
    assert record.run_info() == {}
    assert list(record.metrics_frame().columns) == ["step", "time"]
    assert len(record.completions_frame()) == len(record.events_frame()) == 0


def test_a_step_comes_back_as_written(record):
    before = time.time()
    record.write_step(1, {"reward": 1.5, "rewards/format": None}, [completion(1), completion(0)])
    (step,) = record.steps()
    assert before <= step.pop("time") <= time.time()
    assert step == {"step": 1, "reward": 1.5, "rewards/format": None}
    assert record.completions() == [{"step": 1, **completion(0)}, {"step": 1, **completion(1)}]
    assert record.last_step() == 1


def test_rows_later_than_since_come_in_order(record):
    for step in (1, 2, 3):
        record.write_step(step, {"reward": float(step)}, [completion(text=f"step {step}")])
    assert [(row["step"], row["reward"]) for row in record.steps(since=1)] == [(2, 2.0), (3, 3.0)]
    assert [row["text"] for row in record.completions()] == ["step 3"]
    assert [row["text"] for row in record.completions(2)] == ["step 2"]
    assert record.completions(9) == []


def test_the_latest_step_may_have_no_completions(record):
    record.write_step(1, {}, [completion()])
    record.write_step(2, {}, [])
    assert record.completions() == []


def test_no_step_is_written_twice(record):
    record.write_step(1, {"reward": 1.0}, [completion(text="first")])
    with pytest.raises(ValueError, match=r"step 1 is in .*forget_after\(0\)"):
        record.write_step(1, {"reward": 2.0}, [completion(text="second")])
    assert record.steps()[0]["reward"] == 1.0
    assert [row["text"] for row in record.completions()] == ["first"]


def test_a_refused_step_leaves_nothing_and_the_record_usable(record):
    with pytest.raises(ValueError, match="same 'index'"):
        record.write_step(1, {}, [completion(0), completion(0)])
    with pytest.raises(ValueError, match="count from 1, not 0"):
        record.write_step(0, {}, [])
    with pytest.raises(ValueError, match="can't be called 'time'"):
        record.write_step(1, {"time": 1.0}, [])
    with pytest.raises(TypeError, match="metric 'reward' must be a number or None, not 'high'"):
        record.write_step(1, {"reward": "high"}, [])
    with pytest.raises(ValueError, match=r"step 1, completion 1: missing \['tokens'\], unknown \['length'\]"):
        bad = completion(1, length=3)
        del bad["tokens"]
        record.write_step(1, {}, [completion(0), bad])
    with pytest.raises(ValueError, match="says that it is of step 2"):
        record.write_step(1, {}, [completion(step=2)])
    with pytest.raises(ValueError, match="score 'right_answer' must be"):
        record.write_step(1, {}, [completion(scores={"right_answer": 1.0})])
    with pytest.raises(TypeError, match="text must be a string, not None"):
        record.write_step(1, {}, [completion(text=None)])
    assert record.last_step() == 0 and record.completions(1) == []
    record.write_step(1, {}, [completion()])
    assert record.last_step() == 1


def test_a_failure_inside_the_transaction_rolls_all_of_it_back(record):
    with sqlite3.connect(record.path) as other:
        other.execute('INSERT INTO completions VALUES (1, 1, 0, "", "", "{}", 0, 0, 0, "eos")')
    with pytest.raises(sqlite3.IntegrityError):
        record.write_step(1, {"reward": 1.0}, [completion(0), completion(1)])
    assert record.last_step() == 0 and len(record.completions(1)) == 1


def test_numbers_that_are_not_finite_become_null(record):
    row = completion(scores={"a": [math.nan, "not finite", ""]}, total=math.inf, advantage=-math.inf)
    record.write_step(1, {"kl": math.nan, "reward": math.inf, "clip_ratio": -math.inf, "tokens": 10**400}, [row])
    (step,) = record.steps()
    assert [step[name] for name in ("kl", "reward", "clip_ratio", "tokens")] == [None] * 4
    (read,) = record.completions()
    assert (read["scores"], read["total"], read["advantage"]) == ({"a": [None, "not finite", ""]}, None, None)


def test_numpy_and_torch_scalars_are_numbers(record):
    torch = pytest.importorskip("torch")
    row = completion(
        numpy.int64(0), group=torch.tensor(0), tokens=numpy.int32(7), total=numpy.float32(0.5),
        advantage=torch.tensor(-0.25, dtype=torch.bfloat16), scores={"a": (numpy.float64(1.5), "ok", "")},
    )  # fmt: skip
    record.write_step(numpy.int64(1), {"kl": torch.tensor([0.125]), "length": numpy.float16(2), "ok": True}, [row])
    record.write_run({"seed": numpy.int64(3), "rate": torch.tensor(0.5)})
    (step,) = record.steps()
    assert (step["kl"], step["length"], step["ok"]) == (0.125, 2.0, 1.0)
    (read,) = record.completions()
    expected = (0, 0, 7, 0.5, -0.25, {"a": [1.5, "ok", ""]})
    assert tuple(read[key] for key in ("index", "group", "tokens", "total", "advantage", "scores")) == expected
    assert record.run_info() == {"seed": 3, "rate": 0.5}
    with pytest.raises(TypeError, match="metric 'kl' must be a number"):
        record.write_step(2, {"kl": torch.tensor([1.0, 2.0])}, [])


HOSTILE = [
    "", "naïve Ω 漢字 🙂 \u202e\u200b", "zero\x00byte\x01\x1b[31m", "'); DROP TABLE steps; --",
    "<script>alert(1)</script>", '"\\\r\n\u2028', "x" * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_any_text_survives(record, text):
    row = completion(prompt=text, text=text, scores={text: [1.0, "ok", text]})
    record.write_step(1, {f"rewards/{text}": 1.0}, [row])
    record.add_event("note", text, data={text: [text]})
    record.write_run({text: {text: text}})
    (read,) = record.completions()
    assert (read["prompt"], read["text"], read["scores"]) == (text, text, {text: [1.0, "ok", text]})
    assert record.steps()[0][f"rewards/{text}"] == 1.0
    assert (record.events()[0]["text"], record.events()[0]["data"]) == (text, {text: [text]})
    assert record.run_info() == {text: {text: text}}


def test_lone_surrogates_are_replaced_not_fatal(record):
    record.write_step(1, {}, [completion(text="a\ud800b", scores={"r": [None, "error", "\udfff"]})])
    record.add_event("note", "\ud83d", data={"why": "\udc00"})
    assert record.completions()[0]["text"] == "a\ufffdb"
    assert record.completions()[0]["scores"]["r"][2] == "\ufffd"
    assert record.events()[0]["data"] == {"why": "\ufffd"}


def test_run_info_merges_and_replaces(record):
    record.write_run({"config": {"steps": 3, "names": ("a", "b")}, "loss": math.nan})
    record.write_run({"config": {"steps": 5}, "versions": {"torch": "2.11"}})
    assert record.run_info() == {"config": {"steps": 5}, "loss": None, "versions": {"torch": "2.11"}}
    with pytest.raises(TypeError, match=r"info\['config'\]\['path'\] can't be written as JSON"):
        record.write_run({"config": {"path": object()}, "new": 1})
    assert "new" not in record.run_info()


def test_events_have_rising_ids_that_are_never_used_again(record):
    assert record.add_event("started", "The run started.") == 1
    assert record.add_event("warning", "No reward varies.", step=2, data={"reward": "format"}) == 2
    (event,) = record.events(since=1)
    assert event.pop("time") == pytest.approx(time.time(), abs=60)
    assert event == {"id": 2, "step": 2, "kind": "warning", "text": "No reward varies.", "data": {"reward": "format"}}
    assert record.events()[0]["step"] is None and record.events()[0]["data"] is None
    record.forget_after(1)
    assert record.add_event("resumed", "The run goes on.") == 3


def test_an_event_keeps_empty_data(record):
    record.add_event("note", "nothing more", data={})
    assert record.events()[0]["data"] == {}


def test_forget_after_removes_what_is_later(record):
    record.add_event("started", "no step")
    for step in (1, 2, 3, 4):
        record.write_step(step, {"reward": float(step)}, [completion(0), completion(1)])
        record.add_event("note", f"at {step}", step=step)
    assert record.forget_after(2) == 2
    assert [row["step"] for row in record.steps()] == [1, 2]
    assert record.completions(3) == [] and len(record.completions()) == 2
    assert [event["text"] for event in record.events()] == ["no step", "at 1", "at 2"]
    assert record.forget_after(2) == 0
    record.write_step(3, {"reward": 30.0}, [])
    assert record.steps(since=2)[0]["reward"] == 30.0


def test_frames(record):
    record.write_step(1, {"reward": 1.0, "kl": None}, [])
    rows = [
        completion(0),
        completion(1, scores={"right_answer": [0.0, "ok", ""], "text": [2.0, "ok", ""]}, total=None),
    ]
    record.write_step(2, {"reward": 2.0, "kl": None, "entropy": 0.5}, rows)
    record.add_event("note", "hello", step=2)
    record.add_event("note", "no step")
    metrics = record.metrics_frame()
    assert list(metrics.columns) == ["step", "time", "reward", "kl", "entropy"]
    assert list(metrics["step"]) == [1, 2] and list(metrics["reward"]) == [1.0, 2.0]
    assert metrics["kl"].dtype == "float64" and metrics["kl"].isna().all()
    assert list(metrics["entropy"].isna()) == [True, False]
    frame = record.completions_frame()
    assert list(frame.columns) == [
        "step", "index", "group", "prompt", "text", "right_answer", "format", "rewards/text",
        "total", "advantage", "tokens", "finish_reason", "reasons",
    ]  # fmt: skip
    assert list(frame["right_answer"]) == [1.0, 0.0] and list(frame["text"]) == ["8", "8"]
    assert list(frame["total"].isna()) == [False, True] and frame["rewards/text"][1] == 2.0
    assert list(frame["reasons"]) == ["format: not applicable (no tag)", ""]
    assert len(record.completions_frame(1)) == 0
    events = record.events_frame()
    assert list(events["text"]) == ["hello", "no step"] and events["step"][0] == 2 and events["step"].isna()[1]


def test_a_reader_thread_sees_whole_steps_while_they_are_written(record):
    seen, errors, done = [], [], threading.Event()

    def watch():
        while not done.is_set():
            step = record.last_step()
            rows = record.completions(step) if step else []
            if step and len(rows) != 8:
                errors.append((step, len(rows)))
            seen.extend(row["step"] for row in record.steps(since=seen[-1] if seen else 0))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(1, 101):
        record.write_step(step, {"reward": 1.0}, [completion(index, text="word " * 500) for index in range(8)])
    time.sleep(0.2)
    done.set()
    watcher.join()
    assert errors == [] and seen == list(range(1, 101))


def test_a_reader_in_mid_read_does_not_hold_the_writer_up(record):
    record.write_step(1, {"reward": 1.0}, [completion()])
    with sqlite3.connect(record.path) as other:
        other.execute("BEGIN")
        assert other.execute("SELECT COUNT(*) FROM steps").fetchone() == (1,)
        started = time.monotonic()
        record.write_step(2, {"reward": 2.0}, [completion()])
        assert time.monotonic() - started < 5
        assert other.execute("SELECT COUNT(*) FROM steps").fetchone() == (1,)  # its own, older view
    other.close()
    assert record.last_step() == 2


def test_many_threads_may_write(record):
    def write(first):
        for step in range(first, first + 10):
            record.write_step(step, {}, [completion()])
            record.add_event("note", "wrote", step=step)

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 11, 21, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row["step"] for row in record.steps()] == list(range(1, 41)) and len(record.events()) == 40


READER = """
import json
from grpo_kit.store import Record
record = Record(sys.argv[1])
print(json.dumps([record.steps()[0]["reward"], record.completions()[0]["text"], record.last_step()]))
"""


def test_a_second_process_reads_what_is_written_so_far(record):
    record.write_step(1, {"reward": 1.25}, [completion(text="größer ✓")])
    output, _ = python(READER, str(record.path)).communicate(timeout=60)
    assert json.loads(output) == [1.25, "größer ✓", 1]
    record.write_step(2, {"reward": 2.5}, [])
    assert record.last_step() == 2


WRITER = """
from grpo_kit.store import Record
record = Record(sys.argv[1])
step = record.last_step()
while True:
    step += 1
    rows = [dict(index=i, group=0, prompt="p" * 3000, text="t" * 3000, scores={"a": [1.0, "ok", ""]}, total=float(step),
                 advantage=0.0, tokens=1, finish_reason="eos") for i in range(16)]
    record.write_step(step, {"reward": float(step)}, rows)
    print(step, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_writer_leaves_no_half_step_and_loses_none(tmp_path):
    path, chance, reported = tmp_path / "run.sqlite", random.Random(0), 0
    for _ in range(12):
        writer = python(WRITER, str(path))
        writer.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.05))
        writer.send_signal(signal.SIGKILL)
        lines = writer.stdout.read().split()
        writer.wait()
        reported = max([reported, *map(int, lines)])
        record = Record(path)
        steps = [row["step"] for row in record.steps()]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= reported
        for step in steps[-3:]:
            rows = record.completions(step)
            assert [row["index"] for row in rows] == list(range(16)) and {row["total"] for row in rows} == {float(step)}
        assert record.completions(steps[-1] + 1) == []
        record.close()
    with sqlite3.connect(path) as check:
        assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    check.close()


def test_reading_goes_on_after_close_and_writing_says_why_not(tmp_path):
    record = Record(tmp_path / "deep" / "er" / "run.sqlite")
    record.write_step(1, {"reward": 1.0}, [completion()])
    record.close()
    record.close()
    assert record.last_step() == 1
    assert [path.name for path in record.path.parent.iterdir()] == ["run.sqlite"]
    with pytest.raises(RuntimeError, match="closed for writing"):
        record.add_event("note", "too late")
    again = Record(record.path)
    again.write_step(2, {}, [])
    assert record.last_step() == 2
    again.close()


def test_a_path_with_odd_characters(tmp_path):
    record = Record(tmp_path / "a?b#c %41 ü" / "run.sqlite")
    record.write_step(1, {}, [])
    record.close()
    assert record.path.exists() and Record(record.path).last_step() == 1


def test_a_file_that_is_not_a_record_is_refused_and_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(ValueError, match="not the record of a run"):
        Record(text)
    assert text.read_text() == "not a database " * 100
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE steps (step)")
    connection.close()
    before = other.read_bytes()
    with pytest.raises(ValueError, match="some other program's"):
        Record(other)
    assert other.read_bytes() == before
    with pytest.raises(IsADirectoryError, match=r"run\.sqlite"):
        Record(tmp_path)


def test_a_record_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "run.sqlite"
    Record(path).close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(ValueError, match=r"newer grpo-kit \(record version 3"):
        Record(path)


def make_version_1(path):
    """A record as the first version wrote it, with one step in it."""
    with sqlite3.connect(path) as connection:
        for statement in VERSION_1:
            connection.execute(statement)
        connection.execute("PRAGMA application_id = 1735553135")
        connection.execute("PRAGMA user_version = 1")
        connection.execute("INSERT INTO steps VALUES (1, 100.0, '{\"reward\": 1.5}')")
    connection.close()


def test_a_record_of_an_older_version_opens_and_takes_ratings(tmp_path):
    path = tmp_path / "run.sqlite"
    make_version_1(path)
    record = Record(path)
    assert record.steps() == [{"step": 1, "time": 100.0, "reward": 1.5}]
    assert record.ratings() == [] and len(record.ratings_frame()) == 0
    record.write_step(2, {"reward": 2.5}, [completion()])
    record.add_rating("thumb", "p", "t", 1.0)
    record.close()
    again = Record(path)
    assert again.last_step() == 2 and [rating["text"] for rating in again.ratings()] == ["t"]
    again.close()


def test_two_may_bring_an_old_record_up_to_date_at_once(tmp_path):
    path, opened, errors = tmp_path / "run.sqlite", [], []
    make_version_1(path)

    def open_it():
        try:
            opened.append(Record(path))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and [record.ratings() for record in opened] == [[]] * 6
    for record in opened:
        record.close()


def test_ratings_come_back_as_given(record):
    before = time.time()
    record.add_rating("thumb", "What is 3 + 5?", "8", 1, step=4)
    record.add_rating("pair", "What is 3 + 5?", "8", 1.0, other="7 \ud800", step=None, time=12.5, reward="taste")
    first, second = record.ratings()
    assert before <= first.pop("time") <= time.time()
    thumb = {"kind": "thumb", "prompt": "What is 3 + 5?", "text": "8", "value": 1.0, "other": None, "step": 4}
    assert first == {**thumb, "reward": "human"}
    pair = {**thumb, "kind": "pair", "other": "7 \ufffd", "step": None, "time": 12.5, "reward": "taste"}
    assert second == pair
    frame = record.ratings_frame()
    assert list(frame.columns) == ["kind", "prompt", "text", "value", "other", "step", "time", "reward"]
    assert list(frame["value"]) == [1.0, 1.0] and frame["step"][0] == 4 and list(frame["step"].isna()) == [False, True]
    with pytest.raises(TypeError, match="text must be a string"):
        record.add_rating("thumb", "p", None, 1.0)
    for kind, value in [("thumb", math.nan), ("thumb", 0.5), ("pair", 2), ("thumb", None), ("stars", 1.0), (None, 1.0)]:
        with pytest.raises(ValueError, match=f"a thumb or a pair of value 0 or 1, not {kind!r} of {value!r}"):
            record.add_rating(kind, "p", "t", value)
    assert len(record.ratings()) == 2


def test_forgetting_steps_keeps_ratings(record):
    for step in (1, 2, 3):
        record.write_step(step, {}, [completion()])
        record.add_rating("thumb", "p", f"t{step}", 1.0, step=step)
    assert record.forget_after(1) == 2
    assert [rating["step"] for rating in record.ratings()] == [1, 2, 3]


def test_a_deleted_record_is_not_silently_made_anew(tmp_path):
    record = Record(tmp_path / "run.sqlite")
    record.close()
    record.path.unlink()
    with pytest.raises(sqlite3.OperationalError):
        record.steps()
    assert not record.path.exists()


def test_importing_the_store_is_light():
    code = "import grpo_kit.store; print(sorted({'torch', 'pandas', 'numpy', 'datasets'} & set(sys.modules)))"
    output, _ = python(code).communicate(timeout=60)
    assert output.strip() == "[]"
