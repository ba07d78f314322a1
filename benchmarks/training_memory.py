"""Peak memory and time of one training step at 2,048 to 20,480 tokens: ours, TRL's and Unsloth's, on one GPU.

    python benchmarks/training_memory.py                                   # all three, one after the other
    python benchmarks/training_memory.py --systems grpo-kit --lengths 2048
    UNSLOTH_SITE=/path/to/site-packages python benchmarks/training_memory.py   # where Unsloth has a place of its own

Llama-3.1-8B's shape with random weights in 4 bits, 8 completions; see training_step.py. Each system is a process
of its own. Writes training_memory.md and .json into benchmarks/results/ (or --into) after each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPE, DTYPE, COMPLETIONS = "Llama-3.1-8B", "bfloat16", 8
SMALL = {"tokens_per_micro_batch": 4096, "activation_offloading": True}  # ours, for little memory
LENGTHS = (2048, 4096, 8192, 20480)
SYSTEMS = ("grpo-kit", "Unsloth", "TRL")
Row = dict[str, Any]


def main() -> None:
    asked = arguments()
    if asked.one:
        for row in measurements(asked.one, asked.lengths, asked.checkpoint):
            print("ROW " + json.dumps(row), flush=True)
        return
    from random_checkpoint import write_checkpoint

    write_checkpoint(SHAPE, asked.checkpoint)
    rows: list[Row] = []
    for system in asked.systems:
        rows += in_own_process(system, asked.lengths, asked)
        write(rows, asked.into)
    print(table(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/random-8b"))
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def measurements(system: str, lengths: list[int], checkpoint: Path) -> Iterator[Row]:
    import training_step

    more = SMALL if system == "grpo-kit" else {}
    step_of = training_step.SYSTEMS[system](checkpoint, max(lengths), DTYPE, COMPLETIONS, **more)
    for length in lengths:
        row: Row = {"system": system, "model": SHAPE, "length": length, "completions": COMPLETIONS}
        try:
            row |= training_step.measured(step_of(length))
        except Exception as error:  # a peer's failure is a row like any other
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield row | where(system)


def where(system: str) -> Row:
    import importlib.metadata as metadata

    import torch

    own = {"grpo-kit": "torch", "TRL": "trl", "Unsloth": "unsloth"}[system]
    return {
        "hardware": torch.cuda.get_device_name(),
        "versions": f"{own} {metadata.version(own)}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
    }


def in_own_process(system: str, lengths: list[int], asked: argparse.Namespace) -> list[Row]:
    environment = dict(os.environ)
    if system == "Unsloth" and "UNSLOTH_SITE" in os.environ:
        environment["PYTHONPATH"] = os.environ["UNSLOTH_SITE"]
    command = [sys.executable, __file__, "--one", system, "--checkpoint", str(asked.checkpoint), "--lengths"]
    done = subprocess.run(
        [*command, *map(str, lengths)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    found: list[Row] = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    for row in found:
        print(row, flush=True)
    if len(found) < len(lengths):
        print(f"{system}:\n{done.stdout[-2000:]}", flush=True)
    return found


def write(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training_memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "training_memory.md").write_text(table(rows))


def table(rows: list[Row]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    places = dict.fromkeys(f"{row['hardware']}, {row['versions']}, {row['date']}" for row in rows)
    lines = [
        "# One training step: peak memory and time",
        "",
        *(f"- {place}" for place in places),
        "",
        f"{SHAPE}'s shape, random weights in 4 bits, LoRA rank 32, bfloat16, {COMPLETIONS} completions to one "
        "prompt of 512 tokens, total length as given. Peak of allocated GPU memory, and seconds of a forward and "
        "backward pass over all of them. grpo-kit runs with activation_offloading and tokens_per_micro_batch=4096 (a "
        "longer sequence goes alone), and its seconds are of its whole update: the KL curve's reference pass, clipping "
        "and the optimizer included. The second of two repetitions.",
        "",
        "| total length | " + " | ".join(systems) + " | time against Unsloth |",
        "| --- |" + " --- |" * (len(systems) + 1),
    ]
    for length in dict.fromkeys(row["length"] for row in rows):
        its = {row["system"]: row for row in rows if row["length"] == length}
        cells = [_cell(its.get(system)) for system in systems]
        both = [its.get(name, {}).get("seconds") for name in ("grpo-kit", "Unsloth")]
        ratio = f"{both[0] / both[1]:.2f}×" if all(both) else ""
        lines.append(f"| {length:,} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join([*lines, ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return row.get("failed") or f"{row['peak_gb']:.1f} GB, {row['seconds']:.2f} s"


if __name__ == "__main__":
    main()
