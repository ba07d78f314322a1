"""What stays in memory when a notebook's load cell is run again: the same call, and a call with other arguments.

    python benchmarks/load_twice.py

Prints resident memory and the number of models alive after each load.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from pathlib import Path

import grpo_kit as gk


def main() -> None:
    report("before the first load")
    model = gk.load_model(load_in_4bit=False, lora_rank=16)
    model.generate("What is 2 + 2?", max_tokens=2)  # touches every weight: files are mapped and read when needed
    report("loaded once")
    again = gk.load_model(load_in_4bit=False, lora_rank=16)
    report(f"the same call again (same object: {again is model})")
    other = gk.load_model(load_in_4bit=False, lora_rank=8)
    other.generate("What is 2 + 2?", max_tokens=2)
    report(f"rank {other.options.lora_rank} instead of {model.options.lora_rank}, the first name still bound")


def report(when: str) -> None:
    from transformers import PreTrainedModel

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed counts as free only once it is back with the system
    models = [thing for thing in gc.get_objects() if isinstance(thing, PreTrainedModel) and hasattr(thing, "lm_head")]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gigabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e9
    print(f"{gigabytes:5.2f} GB resident (peak {peak:.2f}), models alive: {len(models)}  {when}")


if __name__ == "__main__":
    main()
