"""One GRPO training step of each system on the same random tokens, for the scripts that measure it. A step is a forward
and a backward pass over the completions to one prompt of 512 tokens, QLoRA rank 32, beta = 0. Ours is measured twice:
so, and as the kit's whole update, with the KL curve's reference pass, clipping and the optimizer."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from child_process import say
from report import Row

SHAPE, COMPLETIONS = "Llama-3.1-8B", 8
PROMPT, RANK = 512, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for trying a script
WHOLE, SAME_WORK = "grpo-kit", "grpo-kit, forward and backward"
Step = Callable[[], float]  # makes one step; returns the gradient's norm
Steps = dict[str, Step]  # by what the table calls them
StepsOf = Callable[[int], Steps]  # for a total length


def measured(step: Step, repetitions: int = 2) -> dict[str, float]:
    """The last repetition's seconds and peak; the first one warms up."""
    for number in range(repetitions):
        gc.collect()
        _synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        norm = step()
        _synchronize()
        seconds = time.perf_counter() - started
        say(f"step {number + 1} of {repetitions}: {seconds:.2f} s")
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"peak_gb": peak / 1e9, "seconds": seconds, "grad_norm": norm}


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def attend_as_a_t4(model: Any) -> None:
    """Train with the one attention kernel that a T4 has."""
    from grpo_kit.kernels import choose_attention

    model.trunk.attention = choose_attention((7, 5), torch.float16)


def compare_ways(
    doc: str | None, name: str, compared: Callable[[Path], list[Row]], table: Callable[[list[Row]], str]
) -> None:
    """The script that measures several ways of ours in one process. compared: from the model's folder to the rows."""
    from random_checkpoint import write_checkpoint

    parser = report.arguments(doc)
    parser.add_argument("--checkpoint", type=Path, default=Path(f"/tmp/random-{SHAPE}"))
    asked = parser.parse_args()
    rows = compared(write_checkpoint(SHAPE, asked.checkpoint))
    report.keep(name, rows, table(rows), asked.into)
    print(table(rows))


def ids(count: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randint(4, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def ours(folder: Path, longest: int, dtype: str, completions: int, **options: Any) -> StepsOf:
    """The prompt is the group's own, as in a run, and computed once for those that share a micro-batch. The smaller
    work comes first: there is no optimizer state yet, as there is none with the peers."""
    say("importing")
    import grpo_kit as gk
    from grpo_kit.rollout import Completion
    from grpo_kit.training.batch import Sequence
    from grpo_kit.training.credit import Credit
    from grpo_kit.training.derive import derive
    from grpo_kit.training.memory import planned
    from grpo_kit.training.options import TrainOptions

    say("loading")
    model = gk.load_model(str(folder), load_in_4bit=True, max_seq_length=longest, lora_rank=RANK, dtype=dtype)
    vocabulary = model.causal_lm.config.vocab_size
    kind, updaters = _updater(), []

    def steps_of(length: int) -> Steps:
        own = length - PROMPT
        asked = TrainOptions(
            prompts_per_step=1, num_generations=max(2, completions), max_completion_length=own, **options
        )
        for used in updaters:
            used.close()  # the host's memory, before the next one takes its share
        memory = planned(model, asked, PROMPT)
        updaters[:] = [kind(model, derive(asked, on_gpu=DEVICE == "cuda", memory=memory)[0])]
        prompt = ids(1, PROMPT, vocabulary, 0)[0].tolist()
        drawn = ids(completions, own, vocabulary, 1)
        sequences = [Sequence(prompt, Completion(row.tolist(), [-10.0] * own, "length", "")) for row in drawn]
        credit = Credit(torch.randn(completions, generator=torch.Generator().manual_seed(2)), None, None, {})

        def step(whole: bool) -> float:
            updater = updaters[0].doing(whole)
            with model.lock:
                updater.optimizer.param_groups[0]["lr"] = 0.0  # every repetition does the same work
                metrics = updater.update(sequences, credit, None, lambda: None)
            return float(metrics["grad_norm"] or 0.0)

        return {SAME_WORK: partial(step, False), WHOLE: partial(step, True)}

    return steps_of


def _updater() -> Any:
    """The kit's updater, made to leave out what the peers are not measured with."""
    from grpo_kit.training.passes import Trainee
    from grpo_kit.training.update import Updater

    class WithoutReference(Trainee):
        def reference(self, batch: Any) -> torch.Tensor:
            return torch.zeros_like(batch.token_mask)

    class Either(Updater):
        def doing(self, whole: bool) -> Either:
            self.whole = whole
            self.trainee = (Trainee if whole else WithoutReference)(**vars(self.trainee))
            return self

        def _optimizer_step(self) -> tuple[float, str | None]:
            if self.whole:
                return super()._optimizer_step()
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients)) / self.scaler.get_scale()
            self.optimizer.zero_grad(set_to_none=True)
            return norm, None

    return Either


def trl(folder: Path, longest: int, dtype: str, completions: int) -> StepsOf:
    """TRL's trainer, gradient checkpointing, SDPA."""
    say("importing")
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    say("loading")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", device_map={"": DEVICE}
    )
    trainer = GRPOTrainer(
        model=model,
        args=_trl_config(GRPOConfig, longest, dtype, completions, gradient_checkpointing=True),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=_one_prompt(completions),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainer.model.enable_input_require_grads()
    trainer.model.train()
    return lambda length: {"TRL": _trl_step(trainer, length, completions)}


def unsloth(folder: Path, longest: int, dtype: str, completions: int) -> StepsOf:
    """Unsloth's model and patched trainer, with its own gradient checkpointing; a trainer for each length, since it
    remembers how it cut its batch."""
    say("importing")
    os.environ.update(HF_HUB_OFFLINE="1", UNSLOTH_DISABLE_STATISTICS="1")
    import unsloth  # noqa: F401 - it has to come first
    from trl import GRPOConfig, GRPOTrainer
    from unsloth import FastLanguageModel

    say("loading")
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=longest,
        load_in_4bit=True,
        fast_inference=False,
        dtype=getattr(torch, dtype),
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth",
    )

    def steps_of(length: int) -> Steps:
        trainer = GRPOTrainer(
            model=model,
            args=_trl_config(GRPOConfig, length, dtype, completions, max_steps=1),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=_one_prompt(completions),
            processing_class=tokenizer,
        )
        FastLanguageModel.for_training(trainer.model)
        tokens = torch.tensor(completions * (length - PROMPT), device=DEVICE)
        return {"Unsloth": _trl_step(trainer, length, completions, num_items_in_batch=tokens)}

    return steps_of


SYSTEMS: dict[str, Callable[..., StepsOf]] = {WHOLE: ours, "TRL": trl, "Unsloth": unsloth}
PACKAGES: dict[str, tuple[str, ...]] = {WHOLE: (), "TRL": ("trl",), "Unsloth": ("unsloth", "trl")}  # in its versions


def _trl_config(kind: Any, length: int, dtype: str, completions: int, **more: Any) -> Any:
    return kind(
        output_dir="/tmp/peer",
        per_device_train_batch_size=max(2, completions),  # TRL wants two at least; the batch that is timed is its own
        num_generations=max(2, completions),
        max_completion_length=length - PROMPT,
        report_to="none",
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        beta=0.0,
        **more,
    )


def _one_prompt(completions: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["Count."] * completions})


def _trl_step(trainer: Any, length: int, completions: int, **more: Any) -> Step:
    own, vocabulary = length - PROMPT, trainer.model.config.vocab_size

    def ones(width: int) -> torch.Tensor:
        return torch.ones(completions, width, dtype=torch.long, device=DEVICE)

    batch = {
        "prompt_ids": ids(1, PROMPT, vocabulary, 0).expand(completions, -1).contiguous().to(DEVICE),
        "prompt_mask": ones(PROMPT),
        "completion_ids": ids(completions, own, vocabulary, 1).to(DEVICE),
        "completion_mask": ones(own),
        "advantages": torch.randn(completions, generator=torch.Generator().manual_seed(2)).to(DEVICE),
        "num_items_in_batch": torch.tensor(completions * own, device=DEVICE),
        "old_per_token_logps": None,
        "ref_per_token_logps": None,
    }
    trainer.current_gradient_accumulation_steps = 1

    def step() -> float:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, dict(batch), **more)
        trainer.accelerator.backward(loss)
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        trainer.model.zero_grad()
        return norm

    return step
