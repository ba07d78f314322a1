"""TRL's trainers around a tiny Llama: the independent reference of losses and advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kit as gk
from grpo_kit.model import Model, load
from grpo_kit.model.lora import lora_parameters
from tests.algorithms.parity import EPSILON, EPSILON_HIGH, GENERATIONS, MAX_LENGTH, TEMPERATURE


@pytest.fixture(scope="module")
def ours(tiny_checkpoint: Callable[..., Path]) -> Iterator[Model]:
    """Our model, with an adapter that has learned something."""
    model = gk.load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.trainable().items():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    yield model
    model.unload()
    load._loaded = None


@pytest.fixture(scope="module")
def trl_trainer(
    ours: Model, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """TRL's GRPO trainer over a copy of the same weights and adapter; `trl_trainer.scores` says what its rewards
    give."""
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        per_device_train_batch_size=2 * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        **common(tmp_path_factory),
    )
    trainer = build(GRPOTrainer, arguments, ours, tiny_checkpoint)
    trainer.current_gradient_accumulation_steps = 1
    yield trainer
    trainer.model = None


@pytest.fixture(scope="module")
def rloo_trainer(
    ours: Model, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The same of TRL's RLOO trainer."""
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(
        per_device_train_batch_size=2 * GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=MAX_LENGTH,
        temperature=TEMPERATURE,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        **common(tmp_path_factory),
    )
    trainer = build(RLOOTrainer, arguments, ours, tiny_checkpoint)
    yield trainer
    trainer.model = None


@pytest.fixture(scope="module")
def dpo_trainer(
    ours: Model, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The same of TRL's Online DPO trainer."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    arguments = OnlineDPOConfig(
        per_device_train_batch_size=4, max_new_tokens=MAX_LENGTH, temperature=1.0, **common(tmp_path_factory)
    )
    trainer = build(OnlineDPOTrainer, arguments, ours, tiny_checkpoint)
    yield trainer
    trainer.model = None


def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every TRL configuration here shares."""
    return {
        "output_dir": str(tmp_path_factory.mktemp("trl")),
        "gradient_checkpointing": False,
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
    }


def build(kind: Any, arguments: Any, ours: Model, tiny_checkpoint: Callable[..., Path]) -> Any:
    """A trainer of TRL with our adapter."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    def first(completions: list[Any], **_: Any) -> list[float | None]:
        return [pair[0] for pair in trainer.scores]

    def second(completions: list[Any], **_: Any) -> list[float | None]:
        return [pair[1] for pair in trainer.scores]

    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), dtype=torch.float32),
        args=arguments,
        reward_funcs=[first, second],
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 2 * GENERATIONS}),
        processing_class=ours.chat.tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.model.train()
    copy_adapter(ours, trainer)
    return trainer


def copy_adapter(ours: Model, trainer: Any) -> None:
    """The same adapter in both."""
    theirs = lora_parameters(trainer.model)
    assert theirs.keys() == ours.trainable().keys()
    with torch.no_grad():
        for name, parameter in ours.trainable().items():
            theirs[name].copy_(parameter)
