"""Kill a run of SmolLM2-135M ten times at random moments, resume it each time in a new process, and compare it with the
run that was never killed.

    python benchmarks/kill_and_resume.py [FOLDER]

Takes some ten minutes on a CPU. Prints a line a kill and one with the verdict; exit status 1 if anything differs.
The small twin of this, on a tiny random model, is tests/training/test_kill_and_resume.py.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

STEPS, PROMPTS, GENERATIONS, TOKENS, KILLS = 12, 2, 4, 12, 10
LEFT_OUT = {"time", "seconds", "seconds_rollout", "seconds_reward", "seconds_update"}


def main(folder: Path) -> int:
    whole, killed = folder / "whole", folder / "killed"
    began = time.monotonic()
    if training(whole).wait() != 0:
        return 1
    a_step = step_seconds(whole)
    print(f"never killed: {STEPS} steps of {a_step:.1f} s in {time.monotonic() - began:.0f} s")
    rng = random.Random(0)
    for kill in range(1, KILLS + 1):
        process = training(killed)
        wait_until_it_trains(process, killed)
        time.sleep(rng.uniform(0, 3.5 * a_step))  # a checkpoint comes every second step: some attempts reach it
        process.kill()
        over = process.wait() == 0
        print(f"kill {kill}: " + ("too late, the run was finished" if over else f"after step {last_step(killed)}"))
    if training(killed).wait() != 0:
        return 1
    differences = compare(whole, killed)
    print(f"{KILLS} kills, {STEPS} steps of {PROMPTS}x{GENERATIONS}: " + ("; ".join(differences) or "nothing differs"))
    return 1 if differences else 0


def training(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--train", str(folder)], stderr=subprocess.DEVNULL)


def wait_until_it_trains(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Its first new event says so; loading takes longer than training, and kills there would all be alike."""
    before = last_event(folder)
    while process.poll() is None and last_event(folder) == before:
        time.sleep(0.1)


def train(folder: str) -> None:
    """The part that is killed."""
    import grpo_kit as gk

    try:
        run = gk.resume(folder, rewards=rewards())
    except FileNotFoundError:
        model = gk.load_model(load_in_4bit=False, lora_rank=8)
        run = gk.train(
            model, gk.data.arithmetic(50), rewards(), run_dir=folder, steps=STEPS, prompts_per_step=PROMPTS, beta=0.02,
            num_generations=GENERATIONS, max_completion_length=TOKENS, checkpoint_every=2, learning_rate=1e-4,
        )  # fmt: skip
    run.wait()


def rewards() -> Any:
    import grpo_kit as gk

    def size(completion: str) -> float:
        return len(completion) / 50

    return gk.RewardSet(gk.rewards.number_close(), gk.reward(size, weight=0.5))


def compare(whole: Path, killed: Path) -> list[str]:
    """What differs between the two runs, in words."""
    from safetensors.torch import load_file

    from grpo_kit.training.checkpoint import checkpoints

    found = []
    (steps, completions), (steps_killed, completions_killed) = recorded(whole), recorded(killed)
    if [row["step"] for row in steps_killed] != list(range(1, STEPS + 1)):
        found.append(f"steps recorded: {[row['step'] for row in steps_killed]}")
    if steps != steps_killed:
        found.append("metrics differ")
    if completions != completions_killed:
        found.append("completions differ")
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(checkpoints(run)[-1] / name) for run in (whole, killed))
        if one.keys() != other.keys() or not all(one[key].equal(other[key]) for key in one):
            found.append(f"{name} differs")
    return found


def recorded(folder: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    from grpo_kit.store import Record

    with closing(Record(folder / "run.sqlite")) as record:
        rows = [{name: value for name, value in row.items() if name not in LEFT_OUT} for row in record.steps()]
        return rows, [record.completions(row["step"]) for row in rows]


def last_step(folder: Path) -> int:
    return len(recorded(folder)[0])


def step_seconds(folder: Path) -> float:
    from grpo_kit.store import Record

    with closing(Record(folder / "run.sqlite")) as record:
        return sum(row["seconds"] for row in record.steps()) / STEPS


def last_event(folder: Path) -> int:
    from grpo_kit.store import Record

    if not (folder / "run.sqlite").exists():
        return 0
    with closing(Record(folder / "run.sqlite")) as record:
        return max((event["id"] for event in record.events()), default=0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary)))
