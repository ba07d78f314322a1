"""A whole GRPO run of a 1.5B model in 4 GB: three steps through the public API, with torch's memory capped.

    python benchmarks/little_memory.py
    python benchmarks/little_memory.py --small     # a tiny model on any machine, to try the script itself

Qwen2.5-1.5B's shape, random weights in 4 bits, float16 and the one attention kernel of a T4; 8 answers to a prompt of
256 tokens, 1,024 together: random weights hardly ever end an answer. Options that decide about memory are those that
`gk.memory_plan` derives for a card of that size. Writes little_memory.md and .json into benchmarks/results/ (or
--into).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import memory_plan
import report
import torch
import training_step
from child_process import say
from random_checkpoint import write_checkpoint
from report import Row

import grpo_kit as gk
from grpo_kit.training import RunFailed

CAP_GB, STEPS = 4.0, 3
SHAPE, LENGTH, COMPLETION = "Qwen2.5-1.5B", 1024, 768
UNSLOTHS_GB = 5
COLUMNS = ("peak_gb_rollout", "peak_gb_update", "seconds_rollout", "seconds_update", "length", "skipped_updates")
HEAD = (
    "step",
    "rollout: peak",
    "update: peak",
    "rollout",
    "update",
    "tokens of an answer",
    "update skipped",
    "memory ran out",
)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model on any machine, to try the script itself")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        say("writing the checkpoint")
        checkpoint = write_checkpoint("tiny" if asked.small else SHAPE, Path(folder) / "model", torch.float16)
        row = measured(checkpoint, Path(folder) / "run", asked.small)
    report.keep("little_memory", [row], table(row), asked.into)
    print(table(row))


def measured(checkpoint: Path, run_dir: Path, small: bool) -> Row:
    """A run that fails is told of in the row, with the steps that it made."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP_GB * 1e9 / total)
    completion = 16 if small else COMPLETION
    load: Row = {"max_seq_length": LENGTH - COMPLETION + completion, "dtype": "float16" if on_gpu else "float32"}
    train: Row = {"prompts_per_step": 1, "num_generations": 8, "max_completion_length": completion}
    derived = gk.memory_plan(str(checkpoint), CAP_GB, **load, **train)
    options = derived.options
    if on_gpu:
        train["tokens_per_micro_batch"] = options.tokens_per_micro_batch
        train["activation_offloading"] = options.activation_offloading
    say("loading")
    model = gk.load_model(str(checkpoint), **load)
    if on_gpu:
        training_step.attend_as_a_t4(model)
    say("training")
    started = time.monotonic()
    data = memory_plan.prompts(model, LENGTH - COMPLETION)
    run = gk.train(model, data, gk.reward(memory_plan.ids), steps=STEPS, run_dir=run_dir, **train)
    failed = followed(run)
    events = run.record.events()
    return {
        "model": "tiny" if small else SHAPE,
        "cap_gb": CAP_GB if on_gpu else None,
        **load,
        **train,
        "planned_gb": {phase: sum(parts.values()) / 1e9 for phase, parts in derived.phases.items()},
        "steps": [{"step": step["step"], **{name: step.get(name) for name in COLUMNS}} for step in run.record.steps()],
        "out_of_memory": [[event["step"], event["text"]] for event in events if event["kind"] == "out of memory"],
        "warnings": [event["text"] for event in events if event["kind"] == "warning"],
        **({"failed": failed} if failed else {}),
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else None,
        "seconds": time.monotonic() - started,
        **report.where(),
    }


def followed(run: Any) -> str | None:
    """Wait for the run, saying when a step is done; returns what it failed with, if it did."""
    for step in range(1, STEPS + 1):
        try:
            run.wait(until_step=step)
        except RunFailed as error:
            say(str(error))
            return next((event["text"] for event in run.record.events() if event["kind"] == "failed"), str(error))
        say(f"step {step}: {run.record.steps()[-1]}")
    run.wait()
    return None


def table(row: Row) -> str:
    cap = "not capped" if row["cap_gb"] is None else f"capped at {row['cap_gb']:g} GB"
    names = [name for name in ("tokens_per_micro_batch", "activation_offloading") if name in row]
    options = ", ".join(f"{name}={row[name]}" for name in names) or "nothing: there is no GPU"
    ran_out = {step: text for step, text in row["out_of_memory"]}
    body = [
        [
            str(step["step"]),
            *(_gb(step[f"peak_gb_{phase}"]) for phase in memory_plan.PHASES),
            *(f"{step[f'seconds_{phase}']:.1f} s" for phase in memory_plan.PHASES),
            f"{step['length']:,.0f}",
            "yes" if step["skipped_updates"] else "no",
            ran_out.get(step["step"], "no"),
        ]
        for step in row["steps"]
    ]
    lines = [
        f"# A whole run in {CAP_GB:g} GB",
        "",
        f"{report.places([row])[0]}; torch's memory {cap}. {row['model']}'s shape, random weights in 4 bits, LoRA rank "
        f"32, {row['dtype']}, the attention kernel of a T4; {STEPS} GRPO steps of 1 prompt of {LENGTH - COMPLETION} "
        f"tokens and 8 answers, {row['max_seq_length']:,} tokens together. Peaks are of what torch "
        f"allocated; with its cache it held {_gb(row['reserved_gb'])} at most. "
        f"`gk.memory_plan` for a card of {CAP_GB:g} GB derived {options}, and planned "
        f"{' and '.join(f'{_gb(planned - 0.5)} of {phase}' for phase, planned in row['planned_gb'].items())} (without "
        f"CUDA's own). Unsloth publishes {UNSLOTHS_GB} GB.",
        "",
        *report.grid(HEAD, body),
        *(["", f"It failed: {row['failed']}"] if "failed" in row else []),
        "",
    ]
    return "\n".join(lines)


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} GB"


if __name__ == "__main__":
    main()
