"""Tokens a second on a CPU: the engine that is used there beside transformers' own generate.

    python benchmarks/cpu_rollouts.py

SmolLM2-135M in float32 with its adapter, 16 completions (8 to each of 2 prompts) of 64 tokens, no end token obeyed, in
one process: the two by turns, three times each after a warm-up; the fastest counts. Writes cpu_rollouts.md and .json
into benchmarks/results/ (or --into).
"""

from __future__ import annotations

import time

import report
import torch
from child_process import say
from report import Row
from rollout_engines import GROUP, Generate, with_generate

import grpo_kit as gk
from grpo_kit.rollout import Sampling, make_engine

PROMPTS, TOKENS, REPETITIONS = 2, 64, 3
PLAIN = "transformers generate"


def main() -> None:
    asked = report.arguments(__doc__).parse_args()
    rows = measurements()
    report.keep("cpu_rollouts", rows, table(rows), asked.into)
    print(table(rows))


def measurements() -> list[Row]:
    model = gk.load_model(load_in_4bit=False, dtype="float32")
    model.causal_lm.generation_config.eos_token_id = None
    engine = make_engine(model.engine.name, model.module, eos_ids=(), decode=model.chat.decode)
    prompts = [model.encode(row["prompt"]) for row in gk.data.arithmetic(64, digits=2)]
    longest = max(map(len, prompts))
    chosen = [prompt for prompt in prompts if len(prompt) == longest][:PROMPTS]  # generate is given no mask of padding
    lengths = [TOKENS] * PROMPTS * GROUP

    def ours(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        groups = engine.generate(prompts, Sampling(max_tokens=max(lengths)), GROUP)
        return [completion.token_ids for group in groups for completion in group]

    ways: dict[str, Generate] = {f"grpo-kit, {engine.name}": ours, PLAIN: with_generate(model.module.eval())}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(1 + REPETITIONS):
        for name, generate in ways.items():
            started = time.perf_counter()
            drawn = generate(chosen, lengths)
            taken = time.perf_counter() - started
            assert [len(tokens) for tokens in drawn] == lengths
            say(f"{name}: {taken:.2f} s")
            if repetition:  # the first warms up
                seconds[name].append(taken)
    shape = {"model": "SmolLM2-135M", "sequences": len(lengths), "tokens": sum(lengths)}
    place = {"threads": torch.get_num_threads(), **report.where("transformers")}
    return [
        {"engine": name, **shape, "tokens_per_second": sum(lengths) / min(taken), "seconds": taken, **place}
        for name, taken in seconds.items()
    ]


def table(rows: list[Row]) -> str:
    plain = next(row["tokens_per_second"] for row in rows if row["engine"] == PLAIN)
    body = [
        [row["engine"], f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_second'] / plain:.2f}×"] for row in rows
    ]
    lines = [
        "# Rollouts on a CPU",
        "",
        f"{report.places(rows)[0]}, {rows[0]['threads']} threads. SmolLM2-135M in float32 with LoRA, "
        f"{rows[0]['sequences']} completions of {TOKENS} tokens; the fastest of {REPETITIONS} by turns.",
        "",
    ]
    return "\n".join([*lines, *report.grid(["engine", "tokens a second", "against generate"], body), ""])


if __name__ == "__main__":
    main()
