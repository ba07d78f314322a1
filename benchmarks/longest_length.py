"""The longest sequence that trains in 15 GB and float16: ours, TRL's and Unsloth's, one completion at a time.

    python benchmarks/longest_length.py
    python benchmarks/longest_length.py --systems grpo-kit --shapes Llama-3.1-8B

A T4's profile on whatever GPU is there: no bfloat16 anywhere, torch's memory of the process capped, and for ours the
one attention kernel that a T4 has. Random weights in 4 bits, LoRA rank 32; of the lengths in LENGTHS, found by
bisection.
Writes longest_length.md and .json into benchmarks/results/ (or --into) after each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CAP_GB, DTYPE = 15.0, "float16"
SHAPES = ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-3.1-8B", "Qwen2.5-14B")
LENGTHS = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
SYSTEMS = ("grpo-kit", "Unsloth", "TRL")
Row = dict[str, Any]


def main() -> None:
    asked = arguments()
    if asked.one:
        print("ROW " + json.dumps(one(asked.one, asked.shapes[0], asked.checkpoints)), flush=True)
        return
    rows: list[Row] = []
    for shape in asked.shapes:
        for system in asked.systems:
            rows.append(in_own_process(system, shape, asked))
            write(rows, asked.into)
    print(table(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/random-float16"))
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def one(system: str, shape: str, checkpoints: Path) -> Row:
    import torch
    from random_checkpoint import write_checkpoint

    folder = write_checkpoint(shape, checkpoints / shape, torch.float16)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP_GB * 1e9 / total)
    import training_step

    step_of = training_step.SYSTEMS[system](folder, LENGTHS[-1], DTYPE, 1)
    if system == "grpo-kit":
        _attend_as_a_t4()
    tried: list[Row] = []
    low, high = -1, len(LENGTHS)  # the longest known to train, the shortest known not to
    while high - low > 1:
        middle = (low + high) // 2
        tried.append(attempt(step_of, LENGTHS[middle]))
        low, high = (middle, high) if "peak_gb" in tried[-1] else (low, middle)
    best = max((row for row in tried if "peak_gb" in row), key=lambda row: row["length"], default={"length": 0})
    import training_memory

    return {"system": system, "model": shape, **best, "tried": tried, **training_memory.where(system)}


def attempt(step_of: Any, length: int) -> Row:
    import torch
    import training_step

    try:
        row = {"length": length, **training_step.measured(step_of(length), 1)}
    except Exception as error:
        row = {"length": length, "failed": f"{type(error).__name__}: {error}"[:200]}
    gc.collect()
    torch.cuda.empty_cache()
    print(row, flush=True)
    return row


def _attend_as_a_t4() -> None:
    import torch

    from grpo_kit.kernels import choose_attention
    from grpo_kit.model import load

    assert load._loaded is not None
    load._loaded.trunk.attention = choose_attention((7, 5), torch.float16)


def in_own_process(system: str, shape: str, asked: argparse.Namespace) -> Row:
    environment = dict(os.environ)
    if system == "Unsloth" and "UNSLOTH_SITE" in os.environ:
        environment["PYTHONPATH"] = os.environ["UNSLOTH_SITE"]
    command = [sys.executable, __file__, "--one", system, "--shapes", shape, "--checkpoints", str(asked.checkpoints)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            row: Row = json.loads(line[4:])
            print(system, shape, row["length"], flush=True)
            return row
    print(done.stdout[-2000:], flush=True)
    return {
        "system": system,
        "model": shape,
        "length": 0,
        "failed": done.stdout[-300:],
        "date": time.strftime("%Y-%m-%d"),
    }


def write(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "longest_length.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "longest_length.md").write_text(table(rows))


def table(rows: list[Row]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    places = dict.fromkeys(f"{row['hardware']}, {row['versions']}, {row['date']}" for row in rows if "hardware" in row)
    lines = [
        "# The longest sequence that trains in 15 GB",
        "",
        *(f"- T4 profile on {place}" for place in places),
        "",
        f"Float16, torch's memory capped at {CAP_GB:g} GB, random weights in 4 bits, LoRA rank 32, one completion at a "
        f"time, prompt of 512 tokens included. Of the lengths {', '.join(f'{length:,}' for length in LENGTHS)}; "
        "in brackets the seconds of a step of that length, its first.",
        "",
        "| shape | " + " | ".join(systems) + " |",
        "| --- |" + " --- |" * len(systems),
    ]
    for shape in dict.fromkeys(row["model"] for row in rows):
        its = {row["system"]: row for row in rows if row["model"] == shape}
        lines.append(f"| {shape} | " + " | ".join(_cell(its.get(system)) for system in systems) + " |")
    return "\n".join([*lines, ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['length']:,} ({row['seconds']:.1f} s)" if "seconds" in row else "none"


if __name__ == "__main__":
    main()
