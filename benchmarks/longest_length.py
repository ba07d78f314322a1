"""The longest sequence that trains in 15 GB and float16: ours, TRL's and Unsloth's, one completion at a time.

    python benchmarks/longest_length.py
    python benchmarks/longest_length.py --systems grpo-kit --shapes Llama-3.1-8B --seconds 200

A T4's profile on whatever GPU is there: no bfloat16 anywhere, torch's memory of the process capped, and for ours the
one attention kernel that a T4 has. Random weights in 4 bits, LoRA rank 32; of the lengths in LENGTHS, found by
bisection. Each system and shape is a process of its own.
Writes longest_length.md and .json into benchmarks/results/ (or --into) after each length that was tried.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Iterator
from pathlib import Path

import report
import torch
import training_step
from child_process import rows_of, say, send
from report import Row
from training_step import DEVICE, WHOLE

CAP_GB = 15.0
LITTLE = {"activation_offloading": True}  # as the memory plan has it for such a card
SHAPES = ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-3.1-8B", "Qwen2.5-14B")
LENGTHS = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
SYSTEMS = (WHOLE, "Unsloth", "TRL")


def main() -> None:
    asked = arguments()
    if asked.one:
        for row in bisected(asked.one, asked.shapes[0], asked.checkpoints / asked.shapes[0]):
            send(row)
        return
    from random_checkpoint import write_checkpoint  # imports transformers, which Unsloth wants to come before

    rows: dict[tuple[str, str], Row] = {}
    for shape in asked.shapes:
        write_checkpoint(shape, asked.checkpoints / shape, torch.float16)
        for system in asked.systems:
            for row in in_own_process(system, shape, asked):
                before = rows.get((system, shape), {})
                row |= {"beside": asked.beside}
                rows[system, shape] = {**row, **before, "failed": row["failed"]} if "failed" in row else row
                report.keep("longest_length", list(rows.values()), table(list(rows.values())), asked.into)
    print(table(list(rows.values())))


def arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--checkpoints", type=Path, default=Path("/tmp/random-float16"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which a process is killed")
    parser.add_argument("--beside", action="store_true", help="other processes use the GPU: say so in the table")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def bisected(system: str, shape: str, checkpoint: Path) -> Iterator[Row]:
    """A row after each length tried: the longest so far, and what is `untried`, which is nothing in the last one."""
    on_gpu = DEVICE == "cuda"  # on a CPU, to try the script, nothing is capped
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP_GB * 1e9 / total)
    more = LITTLE if system == WHOLE and on_gpu else {}
    dtype = "float16" if on_gpu else "float32"
    steps_of = training_step.SYSTEMS[system](checkpoint, LENGTHS[-1], dtype, 1, **more)
    if system == WHOLE and on_gpu:
        from grpo_kit.model import load

        training_step.attend_as_a_t4(load._loaded)
    place = report.where(*training_step.PACKAGES[system])
    tried: list[Row] = []
    low, high = -1, len(LENGTHS)  # the longest known to train, the shortest known not to
    while high - low > 1:
        middle = (low + high) // 2
        tried.append(attempt(system, steps_of, LENGTHS[middle]))
        low, high = (middle, high) if "peak_gb" in tried[-1] else (low, middle)
        best = max((row for row in tried if "peak_gb" in row), key=lambda row: row["length"], default={"length": 0})
        untried = list(LENGTHS[low + 1 : high])
        yield {"system": system, "model": shape, **best, "untried": untried, "tried": list(tried), **place}


def attempt(system: str, steps_of: training_step.StepsOf, length: int) -> Row:
    say(f"first step at length {length}")
    try:
        row = {"length": length, **training_step.measured(steps_of(length)[system], 1)}
    except Exception as error:
        row = {"length": length, "failed": f"{type(error).__name__}: {error}"[:200]}
        say(row["failed"])
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return row


def in_own_process(system: str, shape: str, asked: argparse.Namespace) -> Iterator[Row]:
    arguments = ["--one", system, "--shapes", shape, "--checkpoints", str(asked.checkpoints)]
    expected: Row = {"system": system, "model": shape, "untried": []}
    for row in rows_of(system, __file__, arguments, [expected], asked.seconds):
        yield {**row, "length": 0, "untried": list(LENGTHS)} if "failed" in row else row


def table(rows: list[Row]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines = [
        "# The longest sequence that trains in 15 GB",
        "",
        *(f"- T4 profile on {place}" for place in report.places(rows)),
        "",
        f"Float16, torch's memory capped at {CAP_GB:g} GB, random weights in 4 bits, LoRA rank 32, one completion at a "
        f"time, prompt of 512 tokens included. Of the lengths {', '.join(f'{length:,}' for length in LENGTHS)}; "
        "in brackets the peak of allocated memory at that length. An update only, no rollout. grpo-kit runs with "
        "activation_offloading, its step is the whole update, and its attention that of a T4; the host's memory was "
        "not limited. The peers attend as the card at hand does."
        + (" Measured beside other processes on the same GPU." if any(row.get("beside") for row in rows) else ""),
        "",
    ]
    body = []
    for shape in dict.fromkeys(row["model"] for row in rows):
        its = {row["system"]: row for row in rows if row["model"] == shape}
        body.append([shape, *(_cell(its.get(system)) for system in systems)])
    return "\n".join([*lines, *report.grid(["shape", *systems], body), ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    found = f"{row['length']:,} ({row['peak_gb']:.1f} GB)" if "peak_gb" in row else "none"
    if not row["untried"]:
        return found
    untried = ", ".join(f"{length:,}" for length in row["untried"])
    return f"at least {found}; {untried} {row.get('failed', 'still to be tried')}"


if __name__ == "__main__":
    main()
