"""The algorithms side by side: SmolLM2 on one-digit sums, the quickstart's recipe, on the CPU, several seeds each.

    python benchmarks/compare_algorithms.py                      # one run after the other
    python benchmarks/compare_algorithms.py --jobs 8 --threads 2 # eight at a time, two threads each
    python benchmarks/compare_algorithms.py --only rloo --seeds 0

Every run is a process of its own, so that its peak memory is its own. Runs that are in the results already are not made
again: delete compare_algorithms.json to start anew. Writes compare_algorithms.md, .json and .svg into
benchmarks/results/ (or --into).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "ppo", "online_dpo")
BASELINE = "grpo"
STEPS, EVAL_STEPS = 30, 10
SMOLLM2 = os.environ.get("SMOLLM2", "HuggingFaceTB/SmolLM2-135M-Instruct")  # or the path of its GGUF file
Row = dict[str, Any]


def main() -> None:
    asked = arguments()
    if asked.one:
        print(json.dumps(one(asked.one, asked.seeds[0], asked.threads)))
        return
    names = asked.only or ALGORITHMS
    kept = asked.into / "compare_algorithms.json"
    rows: list[Row] = json.loads(kept.read_text()) if kept.exists() else []
    made = {(row["algorithm"], row["seed"]) for row in rows}
    todo = [(name, seed) for seed in asked.seeds for name in names if (name, seed) not in made]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for done in as_completed(pool.submit(in_own_process, *job, asked) for job in todo):
            rows = sorted([*rows, done.result()], key=lambda row: (ALGORITHMS.index(row["algorithm"]), row["seed"]))
            write(rows, asked.into)  # what is done is kept, whatever comes
    print(table(rows))


def write(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compare_algorithms"
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(rows))
    path.with_suffix(".svg").write_text(drawing(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, help="these algorithms only")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(name: str, seed: int, asked: argparse.Namespace) -> Row:
    command = [sys.executable, __file__, "--one", name, "--seeds", str(seed), "--threads", str(asked.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}:\n{done.stderr[-3000:]}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    row["hardware"] += f", {asked.jobs} runs at a time with {asked.threads} threads each"
    print(f"{name:<11} seed {seed}: held-out {row['accuracy'][0]:.2f} → {row['accuracy'][-1]:.2f}", flush=True)
    return row


def one(name: str, seed: int, threads: int) -> Row:
    """One run, with its curves."""
    import torch

    import grpo_kit as gk

    torch.set_num_threads(threads)

    @gk.reward(weight=2.0)
    def right_answer(completion: str, answer: int) -> float:
        return 1.0 if gk.rewards.last_number(completion) == answer else 0.0

    @gk.reward
    def brief(completion: str, answer: int) -> float:
        if gk.rewards.last_number(completion) != answer:
            return 0.0
        return max(0.0, 1 - len(completion.strip()) / 20)

    model = gk.load_model(SMOLLM2, load_in_4bit=False, max_seq_length=512, lora_rank=16)
    with tempfile.TemporaryDirectory() as folder:
        run = gk.train(
            model,
            gk.data.arithmetic(500, digits=1, split="train"),
            gk.RewardSet(right_answer, brief),
            eval_data=gk.data.arithmetic(23, digits=1, split="test"),
            algorithm=name,
            steps=STEPS,
            prompts_per_step=4,
            num_generations=4,
            max_completion_length=12,
            learning_rate=3e-4,
            eval_steps=EVAL_STEPS,
            num_generations_eval=0,
            seed=seed,
            run_dir=Path(folder) / "run",
        )
        run.wait()
        rows, evaluations = run.record.steps(), run.evaluations
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return {
        "algorithm": name,
        "seed": seed,
        "reward": [row["reward"] for row in rows],
        "length": [row["length"] for row in rows],
        "kl": [row["kl"] for row in rows],
        "eval_step": evaluations["step"].tolist(),
        "accuracy": evaluations["accuracy"].tolist(),
        "seconds": statistics.median(row["seconds"] for row in rows),
        "seconds_rollout": statistics.median(row["seconds_rollout"] for row in rows),
        "peak_gb": kilobytes * 1024 / 1e9,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- what is written ----


def table(rows: list[Row]) -> str:
    places = dict.fromkeys(f"{row['hardware']}, {row['versions']}, {row['date']}" for row in rows)
    lines = [
        "# The algorithms on one-digit sums",
        "",
        *(f"- {place}: {_made_there(rows, place)}" for place in places),
        "",
        f"SmolLM2-135M-Instruct in float32, LoRA rank 16, {STEPS} steps of 4 prompts with 4 answers of at most 12 "
        "tokens, learning rate 3e-4 for all, every other option as the algorithm defines it. Held-out accuracy of "
        "greedy answers to 23 sums; rewards are means of five steps (the most there is: 3). A number for each seed, "
        f"in order. Time is the median step against {BASELINE}'s on the same machine; memory is the process's peak, "
        "model included.",
        "",
        "| algorithm | seeds | held-out before → after | reward, first five | last five | time a step | peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        its = [row for row in rows if row["algorithm"] == name]
        after = ", ".join(f"{row['accuracy'][-1]:.2f}" for row in its)
        early = ", ".join(f"{mean(row['reward'][:5]):.2f}" for row in its)
        late = ", ".join(f"{mean(row['reward'][-5:]):.2f}" for row in its)
        seeds = ", ".join(str(row["seed"]) for row in its)
        memory = max(row["peak_gb"] for row in its)
        lines.append(
            f"| {name} | {seeds} | {its[0]['accuracy'][0]:.2f} → {after} | {early} | {late} | {_relative(its, rows)} | "
            f"{memory:.2f} GB |"
        )
    return "\n".join([*lines, "", "![curves](compare_algorithms.svg)", ""])


def _made_there(rows: list[Row], place: str) -> str:
    there = [row for row in rows if f"{row['hardware']}, {row['versions']}, {row['date']}" == place]
    return f"{len(there)} of the {len(rows)} runs"


def _relative(its: list[Row], rows: list[Row]) -> str:
    """Median step against the baseline's, over the machines where both ran."""
    ratios = []
    for row in its:
        others = [r["seconds"] for r in rows if r["algorithm"] == BASELINE and r["hardware"] == row["hardware"]]
        if others:
            ratios.append(row["seconds"] / mean(others))
    return f"{mean(ratios):.2f}×" if ratios else ""


def mean(values: Any) -> float:
    return statistics.fmean(list(values))


WIDTH, HEIGHT, PER_ROW, TOP_REWARD = 230, 170, 4, 3.0


def drawing(rows: list[Row]) -> str:
    """One small chart an algorithm: each seed's reward thin, their mean thick, the first algorithm's mean in grey."""
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    high = -(-len(names) // PER_ROW) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PER_ROW * WIDTH} {high}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    grey = averaged([row["reward"] for row in rows if row["algorithm"] == names[0]])
    for place, name in enumerate(names):
        curves = [row["reward"] for row in rows if row["algorithm"] == name]
        parts.append(f'<g transform="translate({place % PER_ROW * WIDTH},{place // PER_ROW * HEIGHT})">')
        parts.append(f'<text x="30" y="16" font-weight="bold">{name}</text>')
        for reward in (0, 1, 2, 3):
            y = point(0, reward)[1]
            parts.append(f'<path d="M30 {y:.1f}H{WIDTH - 10}" stroke="#ddd"/>')
            parts.append(f'<text x="24" y="{y + 4:.1f}" text-anchor="end" fill="#666">{reward}</text>')
        parts.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end" fill="#666">step {STEPS}</text>')
        parts += [line(smooth(curve), "#7aa6d8", 0.8) for curve in curves]
        parts.append(line(smooth(grey), "#aaa", 1.5))
        parts.append(line(smooth(averaged(curves)), "#1f5fa8", 2.2))
        parts.append("</g>")
    return "".join([*parts, "</svg>\n"])


def averaged(curves: list[list[float]]) -> list[float]:
    return [mean(values) for values in zip(*curves, strict=True)]


def smooth(curve: list[float]) -> list[float]:
    """Mean of the last five steps."""
    return [mean(curve[max(0, i - 4) : i + 1]) for i in range(len(curve))]


def point(step: float, reward: float) -> tuple[float, float]:
    return 30 + (WIDTH - 40) * step / (STEPS - 1), HEIGHT - 24 - (HEIGHT - 54) * reward / TOP_REWARD


def line(curve: list[float], color: str, width: float) -> str:
    at = " ".join("{:.1f},{:.1f}".format(*point(step, reward)) for step, reward in enumerate(curve))
    return f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="{width}"/>'


if __name__ == "__main__":
    main()
