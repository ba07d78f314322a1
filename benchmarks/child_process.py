"""Measuring in a process of its own: each row is handed on as soon as it is there, so that one that hangs or is killed
loses only what it had not reached."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]
MARK, WIDEST = "ROW ", 300  # what begins the line of a row; the characters that are shown of any other line
SITES = {"unsloth": "UNSLOTH_SITE", "vllm": "VLLM_SITE"}  # peers whose packages may have a place of their own


def say(stage: str) -> None:
    """In the child: what it is at now."""
    print(stage, flush=True)


def send(row: Row) -> None:
    """In the child: a row for the parent."""
    print(MARK + json.dumps(row), flush=True)


def rows_of(name: str, script: str, arguments: Sequence[str], expected: Sequence[Row], seconds: float) -> Iterator[Row]:
    """Run a script and yield the rows that it sends; everything else it prints is shown, with the seconds since its
    start.

    seconds: after so many it is killed. expected: a part of each row that should come; for each that none has, a row
    follows at the end, with the reason as `failed`.
    """
    child = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_environment(name),
    )
    missing, last, started = list(expected), "", time.monotonic()
    try:
        for line in _lines(child, started + seconds):
            if line.startswith(MARK):
                row: Row = json.loads(line[len(MARK) :])
                missing = [part for part in missing if not part.items() <= row.items()]
                _show(name, started, str(row))
                yield row
                if not missing:
                    return  # its tidying up is not waited for
            elif line.strip():
                last = line.strip()
                _show(name, started, last)
        reason = _reason(child, started, seconds, last)
    finally:
        child.kill()
        child.wait()
    _show(name, started, reason)
    for part in missing:
        yield {**part, "failed": reason}


def _lines(child: subprocess.Popen[str], deadline: float) -> Iterator[str]:
    """Until the child has ended or its time is over. A process that the child leaves behind may hold the pipe open, so
    its end is not waited for."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(child, lines), daemon=True).start()
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=min(left, 1.0))
        except queue.Empty:
            if child.poll() is not None:
                return
            continue
        if line is None:
            return
        yield line


def _read(child: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


def _reason(child: subprocess.Popen[str], started: float, seconds: float, last: str) -> str:
    if time.monotonic() >= started + seconds:
        return f"not reached within {seconds:g} s"
    return f"ended with status {child.wait()}: {last[:WIDEST]}"


def _show(name: str, started: float, text: str) -> None:
    print(f"[{name} {time.monotonic() - started:.1f} s] {text[:WIDEST]}", flush=True)


def _environment(name: str) -> dict[str, str]:
    """Without progress bars, and with the packages of a peer that has a place of its own."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    for peer, place in SITES.items():
        if peer in name.lower() and place in os.environ:
            environment["PYTHONPATH"] = os.environ[place]
    return environment
