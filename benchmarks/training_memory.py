"""Peak memory and time of one training step at 2,048 to 20,480 tokens: ours, TRL's and Unsloth's, on one GPU.

    python benchmarks/training_memory.py                                   # all three, one after the other
    python benchmarks/training_memory.py --systems grpo-kit --lengths 2048 --seconds 200
    UNSLOTH_SITE=/path/to/site-packages python benchmarks/training_memory.py   # where Unsloth has a place of its own

Llama-3.1-8B's shape with random weights in 4 bits, 8 completions; see training_step.py. Each system is a process
of its own. Writes training_memory.md and .json into benchmarks/results/ (or --into) after each row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import report
import training_step
from child_process import rows_of, say, send
from report import Row
from training_step import COMPLETIONS, SAME_WORK, SHAPE, WHOLE

LITTLE = {"tokens_per_micro_batch": 4096, "activation_offloading": True}  # ours, for little memory
LENGTHS = (2048, 4096, 8192, 20480)
ROWS = {WHOLE: (SAME_WORK, WHOLE), "Unsloth": ("Unsloth",), "TRL": ("TRL",)}  # what each system's process measures


def main() -> None:
    asked = arguments()
    if asked.one:
        for row in measurements(asked.one, asked):
            send(row)
        return
    from random_checkpoint import write_checkpoint  # imports transformers, which Unsloth wants to come before

    write_checkpoint(asked.shape, asked.checkpoint)
    rows: list[Row] = []
    for system in asked.systems:
        for row in in_own_process(system, asked):
            rows.append(row)
            report.keep("training_memory", rows, table(rows), asked.into)
    print(table(rows))


def arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--systems", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--checkpoint", type=Path, help="where the model is, or is to be written")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which a system's process is killed")
    parser.add_argument("--small", action="store_true", help="a tiny model on any machine, to try the script itself")
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.shape = "tiny" if asked.small else SHAPE
    asked.checkpoint = asked.checkpoint or Path(f"/tmp/random-{asked.shape}")
    return asked


def measurements(system: str, asked: argparse.Namespace) -> Iterator[Row]:
    more = LITTLE if system == WHOLE and not asked.small else {}
    dtype = "float32" if asked.small else "bfloat16"
    steps_of = training_step.SYSTEMS[system](asked.checkpoint, max(asked.lengths), dtype, COMPLETIONS, **more)
    place = report.where(*training_step.PACKAGES[system])
    for length in asked.lengths:
        steps: training_step.Steps = {}
        for name in ROWS[system]:
            say(f"{name}: first step at length {length}")
            row: Row = {"system": name, "model": asked.shape, "length": length, "completions": COMPLETIONS}
            try:
                steps = steps or steps_of(length)
                row |= training_step.measured(steps[name])
            except Exception as error:  # a peer's failure is a row like any other
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            yield row | place


def in_own_process(system: str, asked: argparse.Namespace) -> Iterator[Row]:
    lengths = [str(length) for length in asked.lengths]
    arguments = ["--one", system, "--checkpoint", str(asked.checkpoint), "--lengths", *lengths]
    expected: list[Row] = [{"system": name, "length": length} for length in asked.lengths for name in ROWS[system]]
    return rows_of(system, __file__, [*arguments, *["--small"] * asked.small], expected, asked.seconds)


def table(rows: list[Row]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines = [
        "# One training step: peak memory and time",
        "",
        *(f"- {place}" for place in report.places(rows)),
        "",
        f"{rows[0].get('model', SHAPE)}'s shape, random weights in 4 bits, LoRA rank 32, bfloat16, {COMPLETIONS} "
        "completions to one prompt of 512 tokens, total length as given. Peak of allocated GPU memory, and seconds of "
        "a forward and backward pass over all of them, the second of two repetitions. grpo-kit runs with "
        "activation_offloading and tokens_per_micro_batch=4096 (a longer sequence goes alone); its whole update is "
        "the same and the KL curve's reference pass, clipping and the optimizer. The peers take all completions at "
        f"once, as they do by themselves. Norm of the gradient over grpo-kit's: {norms(rows)}.",
        "",
    ]
    head = [f"{name}, whole update" if name == WHOLE else name for name in systems]
    against = [f"{name} / Unsloth" for name in head if name.startswith(WHOLE)]
    body = [_line(length, systems, rows) for length in dict.fromkeys(row["length"] for row in rows)]
    return "\n".join([*lines, *report.grid(["total length", *head, *against], body), ""])


def norms(rows: list[Row]) -> str:
    """Of each peer, over all lengths: whether it computes the same."""
    own = {row["length"]: row["grad_norm"] for row in rows if row["system"] == SAME_WORK and "grad_norm" in row}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["system"] not in (SAME_WORK, WHOLE) and "grad_norm" in row and row["length"] in own:
            found.setdefault(row["system"], []).append(row["grad_norm"] / own[row["length"]])
    words = [f"{name} {min(ratios):.2f} to {max(ratios):.2f}" for name, ratios in found.items()]
    return ", ".join(words) or "no peer was measured"


def _line(length: int, systems: list[str], rows: list[Row]) -> list[str]:
    its = {row["system"]: row for row in rows if row["length"] == length}
    peer = its.get("Unsloth", {}).get("seconds")
    seconds = [its.get(name, {}).get("seconds") for name in systems if name.startswith(WHOLE)]
    ratios = [f"{own / peer:.2f}×" if own and peer else "" for own in seconds]
    return [f"{length:,}", *(_cell(its.get(name)) for name in systems), *ratios]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return row.get("failed") or f"{row['peak_gb']:.1f} GB, {row['seconds']:.2f} s"


if __name__ == "__main__":
    main()
