"""Does float16 with a gradient scaler train? The recipe for a T4 (4-bit weights, float16, float32 LoRA), on any GPU.

    python benchmarks/fp16_recipe.py

Two parts. Qwen2.5-1.5B's shape with random weights, under a cap of 15 GB: 20 steps, in which nothing may become NaN.
And SmolLM2 on one-digit sums in float16 and in float32, three seeds: do both learn? Writes
benchmarks/results/fp16_recipe.md and .json (or --into).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

CAP_GB = 15
QWEN = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SMOLLM2 = os.environ.get("SMOLLM2", "HuggingFaceTB/SmolLM2-135M-Instruct")  # or the path of its GGUF file
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each in a process of its own")
    parser.add_argument("--small", action="store_true", help="a tiny shape on any machine, to try the script itself")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one, asked.small)))
        return
    parts = [["shape"], *([dtype, str(seed)] for dtype in ("float16", "float32") for seed in range(3))]
    done: dict[int, Row] = {}
    asked.into.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = {pool.submit(in_own_process, part, asked.small): place for place, part in enumerate(parts)}
        for future in as_completed(running):
            done[running[future]] = future.result()
            rows = [done[place] for place in sorted(done)]
            (asked.into / "fp16_recipe.json").write_text(json.dumps(rows, indent=1) + "\n")
            (asked.into / "fp16_recipe.md").write_text(table(rows))
    print(table(rows))


def in_own_process(part: list[str], small: bool) -> Row:
    command = [sys.executable, __file__, "--one", *part, *(["--small"] if small else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(part)}:\n{done.stderr[-3000:]}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def one(part: list[str], small: bool) -> Row:
    import torch

    if not small:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GB * 1e9 / total))
    with tempfile.TemporaryDirectory() as folder:
        if part[0] == "shape":
            return shape(Path(folder), small)
        return sums(Path(folder), part[0], int(part[1]), small)


def shape(folder: Path, small: bool) -> Row:
    """20 steps of the 1.5B shape. The reward means nothing, but differs from answer to answer."""
    import transformers

    import grpo_kit as gk
    from grpo_kit.model.sources import find_source

    config = {**QWEN, **({"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 128} if small else {})}
    dtype = "bfloat16" if not small else "float32"
    made = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**config), dtype=dtype)
    made.save_pretrained(folder / "shape")
    del made
    source = find_source(SMOLLM2, trust_remote_code=False)
    transformers.AutoTokenizer.from_pretrained(source.path).save_pretrained(folder / "shape")

    def ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(answer) % 1009 / 1009 for answer in completion_ids]

    model = gk.load_model(
        str(folder / "shape"), load_in_4bit=not small, max_seq_length=1024, lora_rank=32, dtype="float16"
    )
    run = gk.train(
        model,
        gk.data.arithmetic(200, digits=2),
        gk.reward(ids),
        steps=20,
        prompts_per_step=4,
        num_generations=8 if not small else 2,
        max_completion_length=64 if not small else 4,
        learning_rate=1e-5,
        beta=0.04,
        run_dir=folder / "shape-run",
    )
    run.wait()
    return {"what": "shape of Qwen2.5-1.5B, 4-bit, random weights", "dtype": "float16", **seen(run, model)}


def sums(folder: Path, dtype: str, seed: int, small: bool) -> Row:
    """The quickstart's recipe."""
    import grpo_kit as gk

    @gk.reward(weight=2.0)
    def right_answer(completion: str, answer: int) -> float:
        return 1.0 if gk.rewards.last_number(completion) == answer else 0.0

    @gk.reward
    def brief(completion: str, answer: int) -> float:
        right = gk.rewards.last_number(completion) == answer
        return max(0.0, 1 - len(completion.strip()) / 20) if right else 0.0

    model = gk.load_model(SMOLLM2, load_in_4bit=False, max_seq_length=512, lora_rank=16, dtype=dtype)
    run = gk.train(
        model,
        gk.data.arithmetic(500, digits=1, split="train"),
        gk.RewardSet(right_answer, brief),
        eval_data=gk.data.arithmetic(23, digits=1, split="test"),
        steps=30 if not small else 2,
        prompts_per_step=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=3e-4,
        eval_steps=30,
        num_generations_eval=0,
        seed=seed,
        run_dir=folder / f"{dtype}-{seed}",
    )
    run.wait()
    accuracy = run.evaluations["accuracy"].tolist()
    return {"what": "SmolLM2, one-digit sums", "dtype": dtype, "seed": seed, "accuracy": accuracy, **seen(run, model)}


def seen(run: Any, model: Any) -> Row:
    import torch

    rows = run.record.steps()
    numbers = ("kl", "entropy", "grad_norm", "sampler_gap")
    cuda = torch.cuda.is_available()
    return {
        "steps": len(rows),
        "reward": [row["reward"] for row in rows],
        "skipped_updates": sum(row["skipped_updates"] for row in rows),
        "skipped_at": [row["step"] for row in rows if row["skipped_updates"]],
        "loss_scale": rows[-1].get("loss_scale"),
        "not_finite": [
            f"{name} at step {row['step']}"
            for row in rows
            for name in numbers
            if (row[name] is None or not math.isfinite(row[name])) and not row["skipped_updates"]
        ],
        "weights_finite": all(bool(p.isfinite().all()) for p in model.trainable().values()),
        "warnings": [event["text"] for event in run.record.events() if event["kind"] == "warning"],
        "seconds": sum(row["seconds"] for row in rows) / len(rows),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        "# float16 with a gradient scaler: the recipe for a T4",
        "",
        f"T4 profile on {first['hardware']} (float16, no bfloat16 anywhere, at most {CAP_GB} GB): {first['versions']}, "
        f"{first['date']}. The scaler starts at 65,536 and halves with each skipped update.",
        "",
        "| run | dtype | steps | reward, first five → last five | held-out before → after | skipped updates | last "
        "loss scale | not finite |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        reward = row["reward"]
        ends = f"{sum(reward[:5]) / len(reward[:5]):.2f} → {sum(reward[-5:]) / len(reward[-5:]):.2f}"
        accuracy = row.get("accuracy")
        held_out = f"{accuracy[0]:.2f} → {accuracy[-1]:.2f}" if accuracy else ""
        bad = ", ".join(row["not_finite"]) or ("nothing" if row["weights_finite"] else "adapter weights")
        scale = "" if row["loss_scale"] is None else f"{row['loss_scale']:,.0f}"
        lines.append(
            f"| {row['what']} | {row['dtype']} | {row['steps']} | {ends} | {held_out} | {row['skipped_updates']:.0f} | "
            f"{scale} | {bad} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
