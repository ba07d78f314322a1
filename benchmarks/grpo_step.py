"""Seconds of a whole GRPO step by phase, on one GPU: ours and TRL's, with transformers' generation and with vLLM.

    python benchmarks/grpo_step.py                                        # all, one after the other
    python benchmarks/grpo_step.py --systems grpo-kit --models Llama-3.1-8B --seconds 200 --add
    VLLM_SITE=/path/to/site-packages python benchmarks/grpo_step.py       # where vLLM has a place of its own, with TRL

Random weights in 4 bits, bfloat16, LoRA rank 32, gradient checkpointing, one prompt of 256 tokens, 8 completions of
512: no end token is obeyed. Three steps, of which the last is reported. Each system trains each model in a process of
its own. "rollout" is sampling, "update" all passes over the answers and the optimizer's step, "other" the rest, such as
rewards and, with TRL, making the batch. Our update also makes the KL curve's reference pass. Writes grpo_step.md and
.json into benchmarks/results/ (or --into) after each system.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from child_process import rows_of, say, send
from report import Row

PROMPT, COMPLETION, GROUP, RANK, STEPS = 256, 512, 8, 32, 3
MODELS = ("Qwen2.5-1.5B", "Llama-3.1-8B")
PHASES = ("rollout", "update", "other")
OURS = "grpo-kit"
KEY = ("system", "model", "phase")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for trying the script


def main() -> None:
    asked = arguments()
    if asked.one:
        for row in measurements(asked.one, asked.models[0], asked):
            send(row)
        return
    from random_checkpoint import write_checkpoint  # imports transformers, which takes a while

    rows: list[Row] = []
    for model in asked.models:
        write_checkpoint(model, asked.folder / f"random-{model}", torch.float32 if asked.small else torch.bfloat16)
        for system in asked.systems:
            expected: list[Row] = [{"system": system, "model": model, "phase": phase} for phase in PHASES]
            options = ["--one", system, "--models", model, "--folder", str(asked.folder), *["--small"] * asked.small]
            rows += rows_of(f"{system}, {model}", __file__, options, expected, asked.seconds)
            known = (report.earlier("grpo_step", asked.into, rows, KEY) if asked.add else []) + rows
            report.keep("grpo_step", known, table(known), asked.into)
    print(table(known))


def arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where models are, or are to be written")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which a process is killed")
    parser.add_argument("--add", action="store_true", help="to the rows that are there, instead of anew")
    parser.add_argument("--small", action="store_true", help="a tiny model on any machine, to try the script itself")
    parser.add_argument("--one", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.small:
        asked.models = ["tiny"]
    asked.prompt, asked.completion = (64, 16) if asked.small else (PROMPT, COMPLETION)
    asked.dtype = "float32" if asked.small else "bfloat16"
    return asked


def measurements(system: str, model: str, asked: argparse.Namespace) -> list[Row]:
    seconds = SYSTEMS[system](asked.folder / f"random-{model}", asked)
    place = report.where("transformers", *(["trl"] if system != OURS else []), *(["vllm"] if "vLLM" in system else []))
    shape: Row = {"prompt": asked.prompt, "completion": asked.completion, "completions": GROUP}
    return [
        {"system": system, "model": model, "phase": phase, "seconds": seconds[phase], **shape, **place}
        for phase in PHASES
    ]


def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Means nothing, but differs from answer to answer."""
    return [sum(answer) % 1009 / 1009 for answer in completion_ids]


def ours(checkpoint: Path, asked: argparse.Namespace) -> Row:
    say("importing")
    from memory_plan import prompts

    import grpo_kit as gk
    from grpo_kit.rollout import make_engine

    say("loading")
    longest = asked.prompt + asked.completion
    model = gk.load_model(str(checkpoint), max_seq_length=longest, lora_rank=RANK, dtype=asked.dtype, engine="native")
    steps: Any = model.engine  # which knows what makes its token steps
    model.engine = make_engine("native", model.module, eos_ids=(), decode=model.chat.decode, fused=steps.fused)

    with tempfile.TemporaryDirectory() as folder:
        run = gk.train(
            model,
            prompts(model, asked.prompt),
            gk.reward(score),
            run_dir=Path(folder) / "run",
            steps=STEPS,
            prompts_per_step=1,
            num_generations=GROUP,
            max_completion_length=asked.completion,
        )
        while run.alive:
            time.sleep(0.5)
        for row in run.record.steps():
            say(f"step {row['step']}: {row['seconds']:.2f} s, rollout {row['seconds_rollout']:.2f} s")
        if run.state != "finished":
            raise RuntimeError("; ".join(event["text"] for event in run.record.events()[-3:]))
    if row["length"] != asked.completion:
        raise RuntimeError(f"completions have {row['length']} tokens, not {asked.completion} each")
    rollout, update = row["seconds_rollout"], row["seconds_update"]
    return {"rollout": rollout, "update": update, "other": row["seconds"] - rollout - update}


def trl_transformers(checkpoint: Path, asked: argparse.Namespace) -> Row:
    return _trl(checkpoint, asked, generation_kwargs={"min_new_tokens": asked.completion})


def trl_vllm(checkpoint: Path, asked: argparse.Namespace) -> Row:
    """vLLM in the same process. TRL hands it the merged weights before each rollout."""
    import os

    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    return _trl(
        checkpoint,
        asked,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=asked.prompt + asked.completion,
        generation_kwargs={"ignore_eos": True},
    )


def _trl(checkpoint: Path, asked: argparse.Namespace, **options: Any) -> Row:
    say("importing")
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Timed(GRPOTrainer):
        """Adds up what sampling takes, and what preparing the batch around it takes."""

        def _generate(self, prompts: list[Any]) -> Any:
            started = now()
            generated = super()._generate(prompts)
            self.rollout = now() - started
            return generated

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            started = now()
            inputs = super()._prepare_inputs(generation_batch)
            self.prepared = now() - started
            return inputs

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            update = now() - self.started - trainer.prepared
            phases = {"rollout": trainer.rollout, "update": update, "other": trainer.prepared - trainer.rollout}
            steps.append(phases)
            say(f"step {len(steps)}: {phases}")

    def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        if {len(answer) for answer in completion_ids} != {asked.completion}:
            raise RuntimeError(f"completions have {[*map(len, completion_ids)]} tokens, not {asked.completion} each")
        return score(completion_ids)

    say("loading")
    steps: list[Row] = []
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, asked.dtype), attn_implementation="sdpa", device_map={"": DEVICE}
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=GROUP,
                num_generations=GROUP,
                max_completion_length=asked.completion,
                max_steps=STEPS,
                gradient_checkpointing=True,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                bf16=asked.dtype == "bfloat16",
                use_cpu=DEVICE == "cpu",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                **options,
            ),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": [chr(ord("a") + i) * asked.prompt for i in range(16)]}),
            processing_class=AutoTokenizer.from_pretrained(checkpoint),
            peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Steps()],
        )
        trainer.train()
    return steps[-1]


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


SYSTEMS: dict[str, Callable[[Path, argparse.Namespace], Row]] = {
    OURS: ours,
    "TRL, transformers": trl_transformers,
    "TRL, vLLM": trl_vllm,
}


def table(rows: list[Row]) -> str:
    known = next((row for row in rows if "seconds" in row), {})
    lines = [
        "# A whole GRPO step, by phase",
        "",
        *(f"- {place}" for place in report.places(rows)),
        "",
        f"Random weights in 4 bits, LoRA rank {RANK}, gradient checkpointing, {GROUP} completions of "
        f"{known.get('completion')} tokens to one prompt of {known.get('prompt')}. Seconds of the last of {STEPS} "
        "steps; ours with the KL curve's reference pass in its update.",
        "",
    ]
    body = []
    for model, system in sorted(dict.fromkeys((row["model"], row["system"]) for row in rows)):
        seconds, own = (_phases(model, name, rows) for name in (system, OURS))
        if isinstance(seconds, str):
            body.append([model, system, seconds, "", "", "", ""])
            continue
        times = "" if isinstance(own, str) else f"{sum(seconds) / sum(own):.2f}×"
        body.append([model, system, *(f"{part:.2f}" for part in [*seconds, sum(seconds)]), times])
    return "\n".join([*lines, *report.grid(["model", "system", *PHASES, "step", f"/ {OURS}"], body), ""])


def _phases(model: str, system: str, rows: list[Row]) -> list[float] | str:
    """Seconds of each phase, or why there are none."""
    its = [row for row in rows if (row["model"], row["system"]) == (model, system)]
    failed = next((row["failed"] for row in its if "failed" in row), None if its else "not measured")
    return failed or [next(row["seconds"] for row in its if row["phase"] == phase) for phase in PHASES]


if __name__ == "__main__":
    main()
