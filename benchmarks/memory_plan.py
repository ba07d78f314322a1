"""The memory plan held to what is measured: real shapes with random weights, real steps, the peak of each phase.

    python benchmarks/memory_plan.py

Each of eight configurations is written as a 4-bit checkpoint, loaded, and trained for two steps; the second one counts,
for the optimizer's state is there from its beginning. Answers are short, so prompts make the lengths: every token that
is sampled costs a launch of the whole model. Writes benchmarks/results/memory_plan.md and .json (or --into) after each
configuration.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from report import Row

PHASES = ("rollout", "update")


@dataclass(frozen=True)
class Case:
    """One configuration: a shape, and options by their usual names."""

    shape: str
    length: int
    completion: int
    prompts: int
    generations: int
    micro_batch: int
    optim: str = "adamw_torch"
    double_quant: bool = False
    offload: bool = False


CASES = (
    Case("Qwen2.5-0.5B", 1024, 64, 4, 8, 8192),
    Case("Qwen2.5-0.5B", 4096, 64, 4, 4, 16_384, "adamw_8bit", double_quant=True),
    Case("Qwen2.5-1.5B", 1024, 64, 4, 8, 4096, "adamw_8bit"),
    Case("Qwen2.5-1.5B", 2048, 128, 8, 8, 16_384, double_quant=True),
    Case("Llama-3.2-3B", 2048, 64, 4, 8, 8192, "paged_adamw_8bit"),
    Case("Llama-3.2-3B", 8192, 64, 2, 4, 16_384, offload=True),
    Case("Llama-3.1-8B", 1024, 64, 4, 8, 8192),
    Case("Llama-3.1-8B", 8192, 64, 1, 8, 8192, "adamw_8bit"),
)


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes on any machine, to try the script itself")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the configurations to run, from 0")
    asked = parser.parse_args()
    rows: list[Row] = []
    chosen = [case for number, case in enumerate(CASES) if asked.only is None or number in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            rows.append(one(shortened(case) if asked.small else case, Path(folder), asked.small))
            report.keep("memory_plan", rows, table(rows), asked.into)
    print(table(rows))


def shortened(case: Case) -> Case:
    """Without paging, which a CPU has not."""
    return Case(case.shape, case.length // 16, 4, 2, 2, 256, case.optim.removeprefix("paged_"), case.double_quant)


def one(case: Case, folder: Path, small: bool) -> Row:
    """Plan and measure one configuration."""
    import torch

    import grpo_kit as gk

    began = time.monotonic()
    cuda = torch.cuda.is_available()
    checkpoint = checkpoint_of(case, folder, small)
    load: Row = {"max_seq_length": case.length, "lora_rank": 32, "double_quant": case.double_quant}
    train: Row = {
        "prompts_per_step": case.prompts,
        "num_generations": case.generations,
        "max_completion_length": case.completion,
        "tokens_per_micro_batch": case.micro_batch,
        "optim": case.optim,
    }
    plan = gk.memory_plan(
        str(checkpoint),
        None if cuda else "H200",
        activation_offloading=case.offload,
        engine="transformers",
        **load,
        **train,
    )
    model = gk.load_model(str(checkpoint), engine="transformers", **load)
    run = gk.train(
        model,
        prompts(model, case.length - case.completion),
        gk.reward(ids),
        steps=2,
        run_dir=folder / "run",
        **({"activation_offloading": True} if case.offload else {}),
        **train,
    )
    run.wait()
    last = run.record.steps()[-1]
    measured = {phase: last.get(f"peak_gb_{phase}") for phase in PHASES}
    seen = plan.compare({phase: None if gb is None else gb * 1e9 for phase, gb in measured.items()})
    model.unload()
    shutil.rmtree(folder / "run")
    return {
        **asdict(case),
        "compared": json.loads(seen.to_json(orient="records")),
        "planned_parts": {phase: {part: size / 1e9 for part, size in of.items()} for phase, of in plan.phases.items()},
        "answer_tokens": last["length"],
        "seconds_rollout": last["seconds_rollout"],
        "seconds_update": last["seconds_update"],
        "seconds": time.monotonic() - began,
        **report.where(),
    }


def ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Means nothing, but differs from answer to answer."""
    return [sum(answer) % 1009 / 1009 for answer in completion_ids]


def prompts(model: Any, tokens: int) -> Any:
    """Sixteen prompts of exactly so many tokens, all different: one token a letter."""
    import grpo_kit as gk

    own = len(model.encode("a")) - 1
    return gk.data.from_rows([{"prompt": chr(ord("a") + i) * (tokens - own)} for i in range(16)])


def checkpoint_of(case: Case, folder: Path, small: bool) -> Path:
    """The one of the configuration before, if it will do: only one is on the disk."""
    from random_checkpoint import write_checkpoint

    wanted = folder / f"model-{case.shape}{'-double-quant' * case.double_quant}"
    if not wanted.exists():
        for other in folder.glob("model-*"):
            shutil.rmtree(other)
        write_checkpoint("tiny" if small else case.shape, wanted, double_quant=case.double_quant)
    return wanted


def table(rows: list[Row]) -> str:
    lines = [
        "# The memory plan beside measured peaks",
        "",
        f"{report.places(rows)[0]}. GB (10⁹ bytes) that torch allocated at most in "
        "each phase of the second step; random weights, 4-bit, LoRA of rank 32, `transformers` engine. Ratio: planned "
        "over measured, above 1 where too much was planned." + _corrected(rows),
        "",
        "| shape | tokens | step | micro-batch | settings | rollout: planned | measured | ratio | update: planned | "
        "measured | ratio | its fullest moment |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        settings = [row["optim"], *(name for name in ("double_quant", "offload") if row[name])]
        cells = [number(of[key]) for of in row["compared"] for key in ("planned", "measured", "ratio")]
        moment = list(row["planned_parts"]["update"])[-1]
        step = f"{row['prompts']} × {row['generations']} | {row['micro_batch']:,}"
        numbers = " | ".join(cells)
        lines.append(f"| {row['shape']} | {row['length']:,} | {step} | {', '.join(settings)} | {numbers} | {moment} |")
    return "\n".join([*lines, ""])


def _corrected(rows: list[Row]) -> str:
    """Whether the plan was changed after these peaks were measured."""
    if not any("planned_before" in row for row in rows):
        return ""
    return " The plan was corrected on these very runs (`planned_before` in the JSON rows): they don't test it anew."


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
