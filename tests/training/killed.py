"""A script that trains the tiny model or goes on with it, and is killed in the middle when told so.

    python killed.py CHECKPOINT
    > RUN_FOLDER PART EVENTS

Each line makes a new process, which is killed (SIGKILL, by its own hand, so that the moment is exact) at the EVENTS-th
function call or return in grpo_kit's files whose path holds PART; 0 EVENTS let it finish. The answer is one line with
the process's exit status. Processes are forked from one that has done little but import: starting Python anew takes
seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import grpo_kit as gk
from grpo_kit.training import resume, train

PACKAGE = str(Path(gk.__file__).parent)
STEPS = 12


def letters(completion: str) -> float:
    return sum(map(ord, completion)) % 101 / 101


class Killer:
    """A profile function that ends the process at the n-th event in the files that are meant."""

    def __init__(self, part: str, events: int):
        self.part, self.left = part, events

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and self.part in file:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def load(checkpoint: str) -> gk.Model:
    return gk.load_model(checkpoint, load_in_4bit=False, max_seq_length=64, lora_rank=4)


def work(checkpoint: str, folder: str) -> None:
    """What a person does who wants the run to be finished whatever happens."""
    try:
        run = resume(folder)
    except FileNotFoundError:
        model = load(checkpoint)
        data = gk.data.from_rows([{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(5)])
        rewards = gk.RewardSet(letters, gk.rewards.number_close(weight=0.5))
        run = train(
            model, data, rewards, run_dir=folder, steps=STEPS, checkpoint_every=2, prompts_per_step=2, beta=0.02,
            num_generations=2, max_completion_length=4, learning_rate=1e-2, tokens_per_micro_batch=64,
        )  # fmt: skip
    run.wait()


def fork(checkpoint: str, folder: str, part: str, events: int) -> int:
    """Exit status of the process: -9 if it was killed."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if events:
            killer = Killer(part, events)
            threading.setprofile(killer)
            sys.setprofile(killer)
        try:
            work(checkpoint, folder)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    load(sys.argv[1]).unload()  # so that all that it takes is imported
    for line in sys.stdin:
        folder, part, events = line.split()
        print(fork(sys.argv[1], folder, part, int(events)), flush=True)
