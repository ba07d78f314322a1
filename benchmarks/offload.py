"""What activation offloading costs: one update with layer inputs on the GPU and with them in the host's memory.

    python benchmarks/offload.py

Llama-3.1-8B's shape, random weights in 4 bits, two completions, one sequence at a time; see training_step.py. The same
model in one process, on and off in turns. Writes offload.md and .json into benchmarks/results/ (or --into).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import training_memory
import training_step
from random_checkpoint import write_checkpoint

LENGTHS, COMPLETIONS, TURNS = (4096, 20480), 2, 3
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/random-8b"))
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    folder = write_checkpoint(training_memory.SHAPE, asked.checkpoint)
    rows = [row for length in LENGTHS for row in compared(folder, length)]
    asked.into.mkdir(parents=True, exist_ok=True)
    (asked.into / "offload.json").write_text(json.dumps(rows, indent=1) + "\n")
    (asked.into / "offload.md").write_text(table(rows))
    print(table(rows))


def compared(folder: Path, length: int) -> list[Row]:
    ways = {
        kept: training_step.ours(
            folder, max(LENGTHS), "bfloat16", COMPLETIONS, tokens_per_micro_batch=1024, activation_offloading=offloading
        )(length)
        for kept, offloading in (("on the GPU", False), ("in the host's memory", True))
    }
    made: dict[str, list[dict[str, float]]] = {kept: [] for kept in ways}
    for _ in range(TURNS):
        for kept, step in ways.items():
            made[kept].append(training_step.measured(step, 1))
    place = training_memory.where("grpo-kit")
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
    lines = [
        "# What activation offloading costs",
        "",
        f"{rows[0]['hardware']}, {rows[0]['versions']}, {rows[0]['date']}. {training_memory.SHAPE}'s shape, random "
        f"weights in 4 bits, LoRA rank 32, bfloat16, {COMPLETIONS} completions, one sequence at a time. "
        "A whole update.",
        "",
        "| total length | layer inputs | seconds | ratio | peak memory | gradient's norm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        base = next(r for r in rows if r["length"] == row["length"])
        lines.append(
            f"| {row['length']:,} | {row['layer_inputs']} | {row['seconds']:.2f} | "
            f"{row['seconds'] / base['seconds']:.3f}× | {row['peak_gb']:.1f} GB | {row['grad_norm']:.4f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
