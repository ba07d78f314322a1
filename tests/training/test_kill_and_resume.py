"""A run killed again and again, and resumed each time in a new process, is the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file

from grpo_kit.store import Record
from grpo_kit.training.checkpoint import checkpoints
from tests.training.helpers import NOT_THE_SAME_TWICE, same

SCRIPT = Path(__file__).parent / "killed.py"
STEPS, PER_STEP = 12, 4
# Where to kill, and among how many calls and returns the moment is drawn: those of resuming and of three to four steps,
# so that some of the processes come to write a checkpoint and some do not.
WHERE = (("/", 22_000), ("checkpoint.py", 80), ("store/", 6_000), ("update.py", 200), ("passes.py", 1_400))
KILLS = 10


@pytest.fixture(scope="module")
def processes(tiny_checkpoint):
    """`processes(folder, part, events)` → the exit status of a new process; see killed.py."""
    root = SCRIPT.parents[2]
    command = [sys.executable, str(SCRIPT), str(tiny_checkpoint(chat_template=None))]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as server:

        def ask(folder: Path, part: str = "-", events: int = 0) -> int:
            print(folder, part, events, file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield ask
        server.stdin.close()


def result(folder: Path):
    """All numbers but the times, all completions, and the last checkpoint's tensors."""
    with closing(Record(folder / "run.sqlite")) as record:
        rows = [{k: v for k, v in row.items() if k not in NOT_THE_SAME_TWICE} for row in record.steps()]
        completions = {step: record.completions(step) for step in range(1, STEPS + 2)}
    last = checkpoints(folder)[-1]
    tensors = [load_file(last / name) for name in ("adapter_model.safetensors", "optimizer.safetensors")]
    return rows, completions, tensors


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_ten_kills_change_nothing(processes, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert processes(whole) == 0

    rng, lasts = random.Random(0), []
    for kill in range(KILLS):
        part, most = WHERE[kill % len(WHERE)]
        assert processes(killed, part, rng.randint(1, most)) == -9
        found = checkpoints(killed)
        lasts.append(json.loads((found[-1] / "state.json").read_text())["step"] if found else None)
    assert processes(killed) == 0
    assert len(set(lasts)) > 3  # the kills fell into different parts of the run
    assert lasts[-1] < STEPS

    rows, completions, tensors = result(whole)
    rows_killed, completions_killed, tensors_killed = result(killed)
    assert [row["step"] for row in rows_killed] == list(range(1, STEPS + 1))
    assert [len(completions_killed[step]) for step in range(1, STEPS + 2)] == [PER_STEP] * STEPS + [0]
    assert rows_killed == rows
    assert completions_killed == completions
    assert all(same(one, other) for one, other in zip(tensors_killed, tensors, strict=True))
    assert not list((killed / "checkpoints").glob("*.unfinished"))
