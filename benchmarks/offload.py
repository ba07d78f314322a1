"""What activation offloading costs: one update with layer inputs on the GPU and with them in the host's memory.

    python benchmarks/offload.py

Llama-3.1-8B's shape, random weights in 4 bits, two completions, one sequence at a time; see training_step.py. The same
model in one process, on and off in turns. Writes offload.md and .json into benchmarks/results/ (or --into).
"""

from __future__ import annotations

import statistics
from pathlib import Path

import report
import training_step
from report import Row

LENGTHS, COMPLETIONS, TURNS = (4096, 20480), 2, 3


def compared(folder: Path) -> list[Row]:
    ways = {
        kept: training_step.ours(
            folder, max(LENGTHS), "bfloat16", COMPLETIONS, tokens_per_micro_batch=1024, activation_offloading=offloading
        )
        for kept, offloading in (("on the GPU", False), ("in the host's memory", True))
    }
    return [row for length in LENGTHS for row in in_turns(length, ways)]


def in_turns(length: int, ways_of: dict[str, training_step.StepsOf]) -> list[Row]:
    ways = {kept: steps_of(length)[training_step.WHOLE] for kept, steps_of in ways_of.items()}
    made: dict[str, list[dict[str, float]]] = {kept: [] for kept in ways}
    for _ in range(TURNS):
        for kept, step in ways.items():
            made[kept].append(training_step.measured(step, 1))
    place = report.where()
    return [
        {
            "length": length,
            "layer_inputs": kept,
            "seconds": statistics.median(turn["seconds"] for turn in turns[1:]),  # the first one warms up
            "peak_gb": turns[-1]["peak_gb"],
            "grad_norm": turns[-1]["grad_norm"],
            **place,
        }
        for kept, turns in made.items()
    ]


def table(rows: list[Row]) -> str:
    head = ["total length", "layer inputs", "seconds", "ratio", "peak memory", "gradient's norm"]
    lines = [
        "# What activation offloading costs",
        "",
        f"{report.places(rows)[0]}. {training_step.SHAPE}'s shape, random "
        f"weights in 4 bits, LoRA rank 32, bfloat16, {COMPLETIONS} completions, one sequence at a time. "
        "A whole update. Both ways have an optimizer of their own on the one model: the peaks hold the states of two.",
        "",
    ]
    body = []
    for row in rows:
        base = next(r for r in rows if r["length"] == row["length"])
        seconds = [f"{row['seconds']:.2f}", f"{row['seconds'] / base['seconds']:.3f}×"]
        others = [f"{row['peak_gb']:.1f} GB", f"{row['grad_norm']:.4f}"]
        body.append([f"{row['length']:,}", row["layer_inputs"], *seconds, *others])
    return "\n".join([*lines, *report.grid(head, body), ""])


if __name__ == "__main__":
    training_step.compare_ways(__doc__, "offload", compared, table)
