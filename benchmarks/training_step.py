"""One GRPO training step of each system on the same random tokens: what `training_memory.py` and `longest_length.py`
measure. A step is a forward and a backward pass over the completions to one prompt of 512 tokens, QLoRA rank 32,
beta = 0; ours is the kit's whole update, with the KL curve's reference pass, clipping and the optimizer."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPT, RANK = 512, 32
Step = Callable[[], float]  # makes one step; returns the gradient's norm
StepOf = Callable[[int], Step]  # for a total length


def measured(step: Step, repetitions: int = 2) -> dict[str, float]:
    """The last repetition's seconds and peak; the first one warms up."""
    for _ in range(repetitions):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        norm = step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "seconds": seconds, "grad_norm": norm}


def ids(count: int, length: int, vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randint(4, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))


def ours(folder: Path, longest: int, dtype: str, completions: int, **options: Any) -> StepOf:
    """The prompt is the group's own, as in a run, and computed once for those that share a micro-batch."""
    import grpo_kit as gk
    from grpo_kit.rollout import Completion
    from grpo_kit.training.batch import Sequence
    from grpo_kit.training.credit import Credit
    from grpo_kit.training.derive import derive
    from grpo_kit.training.memory import planned
    from grpo_kit.training.options import TrainOptions
    from grpo_kit.training.update import Updater

    model = gk.load_model(str(folder), load_in_4bit=True, max_seq_length=longest, lora_rank=RANK, dtype=dtype)
    vocabulary = model.causal_lm.config.vocab_size
    updaters: list[Updater] = []

    def step_of(length: int) -> Step:
        own = length - PROMPT
        asked = TrainOptions(
            prompts_per_step=1, num_generations=max(2, completions), max_completion_length=own, **options
        )
        for used in updaters:
            used.close()  # the host's memory, before the next one takes its share
        updaters[:] = [Updater(model, derive(asked, on_gpu=True, memory=planned(model, asked, PROMPT))[0])]
        prompt = ids(1, PROMPT, vocabulary, 0)[0].tolist()
        drawn = ids(completions, own, vocabulary, 1)
        sequences = [Sequence(prompt, Completion(row.tolist(), [-10.0] * own, "length", "")) for row in drawn]
        credit = Credit(torch.randn(completions, generator=torch.Generator().manual_seed(2)), None, None, {})

        def step() -> float:
            with model.lock:
                updaters[0].optimizer.param_groups[0]["lr"] = 0.0  # every repetition does the same work
                metrics = updaters[0].update(sequences, credit, None, lambda: None)
            return float(metrics["grad_norm"] or 0.0)

        return step

    return step_of


def trl(folder: Path, longest: int, dtype: str, completions: int) -> StepOf:
    """TRL's trainer, gradient checkpointing, SDPA."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", device_map={"": 0}
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
    return lambda length: _trl_step(trainer, length, completions)


def unsloth(folder: Path, longest: int, dtype: str, completions: int) -> StepOf:
    """Unsloth's model and patched trainer, with its own gradient checkpointing; a trainer for each length, since it
    remembers how it cut its batch."""
    os.environ.update(HF_HUB_OFFLINE="1", UNSLOTH_DISABLE_STATISTICS="1")
    import unsloth  # noqa: F401 - it has to come first
    from trl import GRPOConfig, GRPOTrainer
    from unsloth import FastLanguageModel

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

    def step_of(length: int) -> Step:
        trainer = GRPOTrainer(
            model=model,
            args=_trl_config(GRPOConfig, length, dtype, completions, max_steps=1),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=_one_prompt(completions),
            processing_class=tokenizer,
        )
        FastLanguageModel.for_training(trainer.model)
        tokens = torch.tensor(completions * (length - PROMPT), device="cuda")
        return _trl_step(trainer, length, completions, num_items_in_batch=tokens)

    return step_of


SYSTEMS: dict[str, Callable[..., StepOf]] = {"grpo-kit": ours, "TRL": trl, "Unsloth": unsloth}


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

    return Dataset.from_dict({"prompt": ["w5 w6"] * completions})


def _trl_step(trainer: Any, length: int, completions: int, **more: Any) -> Step:
    own, vocabulary = length - PROMPT, trainer.model.config.vocab_size

    def ones(width: int) -> torch.Tensor:
        return torch.ones(completions, width, dtype=torch.long, device="cuda")

    batch = {
        "prompt_ids": ids(1, PROMPT, vocabulary, 0).expand(completions, -1).contiguous().cuda(),
        "prompt_mask": ones(PROMPT),
        "completion_ids": ids(completions, own, vocabulary, 1).cuda(),
        "completion_mask": ones(own),
        "advantages": torch.randn(completions, generator=torch.Generator().manual_seed(2)).cuda(),
        "num_items_in_batch": torch.tensor(completions * own, device="cuda"),
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
