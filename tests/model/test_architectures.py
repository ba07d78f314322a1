"""The eight families: each loads with LoRA, answers, and trains two steps on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import grpo_kit as gk

# SmolLM2 is a Llama with tied embeddings.
FAMILIES = {
    "llama": {"architecture": "llama", "tie": False},
    "smollm2": {"architecture": "llama", "tie": True},
    "mistral": {"architecture": "mistral", "tie": False},
    "qwen2": {"architecture": "qwen2", "tie": True},
    "qwen3": {"architecture": "qwen3", "tie": True},
    "gemma2": {"architecture": "gemma2", "tie": True},
    "gemma3": {"architecture": "gemma3", "tie": True},
    "phi3": {"architecture": "phi3", "tie": False},
}


def letter_sum(completion: str) -> float:
    """Differs between any two answers of a random model, so that there is something to learn."""
    return sum(map(ord, completion)) / 1000


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_answers_and_trains(family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint(**FAMILIES[family])
    model = gk.load_model(str(folder), load_in_4bit=False, max_seq_length=96, lora_rank=4)
    assert isinstance(model.generate("Hello", max_tokens=4), str)
    before = {name: weight.detach().clone() for name, weight in model.trainable().items()}
    frozen = {name: w.detach().clone() for name, w in model.module.named_parameters() if not w.requires_grad}

    run = gk.train(
        model,
        gk.data.arithmetic(4),
        letter_sum,
        run_dir=tmp_path / "run",
        steps=2,
        prompts_per_step=1,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-3,
    )
    run.wait(timeout=120)

    assert run.state == "finished", run.error
    for row in run.record.steps():
        assert row["sampler_gap"] < 1e-3
        for name in ("kl", "entropy", "grad_norm", "reward", "sampler_gap", "clip_ratio"):
            assert math.isfinite(row[name]), name
    assert any(not torch.equal(weight, before[name]) for name, weight in model.trainable().items())
    assert len(frozen) > 0
    for name, weight in model.module.named_parameters():
        assert name not in frozen or torch.equal(weight, frozen[name]), name
