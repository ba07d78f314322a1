"""What is said before vLLM is started, and how a model that shares its weights ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import grpo_kit as gk
from grpo_kit.model.chat import Chat
from grpo_kit.model.lora import add_lora
from grpo_kit.model.model import LoadOptions, Model
from grpo_kit.model.precision import Precision
from grpo_kit.model.shared import build_on
from grpo_kit.model.sources import Source
from grpo_kit.model.with_vllm import check_for_vllm
from grpo_kit.rollout import Sampling, VllmEngine
from tests.rollout.native.conftest import tiny
from tests.rollout.vllm.fakes import FakeLlm, FakeModel, Request, fake_vllm
from tests.tiny import tiny_tokenizer

BF16 = Precision(torch.device("cuda"), torch.bfloat16, "for a test")
CPU = Precision(torch.device("cpu"), torch.float32, "for a test")


def options(**changed: Any) -> LoadOptions:
    given: dict[str, Any] = {
        "name_or_path": "a/model",
        "load_in_4bit": True,
        "max_seq_length": 64,
        "lora_rank": 4,
        "lora_alpha": 4,
        "dtype": None,
        "fast_inference": False,
        "engine": "vllm",
        "seed": 0,
        "trust_remote_code": False,
    }
    return LoadOptions(**{**given, **changed})


def config(**entries: Any) -> Any:
    return SimpleNamespace(**{"model_type": "llama", **entries})


def test_what_was_tested_is_taken() -> None:
    check_for_vllm(options(), Source("a/model"), config(), BF16)
    check_for_vllm(options(), Source("a/model"), config(quantization_config={"load_in_4bit": True}), BF16)
    half = Precision(BF16.device, torch.float16, "asked for")
    check_for_vllm(options(load_in_4bit=False), Source("a/model"), config(), half)


@pytest.mark.parametrize(
    ("given", "source", "found", "dtype", "words"),
    [
        ({}, Source("a", "converted from GGUF: a.gguf"), {}, torch.bfloat16, "converted from GGUF.*engine='native'"),
        ({}, Source("a"), {"model_type": "gemma2"}, torch.bfloat16, "'gemma2' is not known.*engine='native'"),
        ({}, Source("a"), {"quantization_config": {"quant_method": "gptq"}}, torch.bfloat16, "by 'gptq'"),
        ({"double_quant": True}, Source("a"), {}, torch.bfloat16, "double_quant saves nothing: leave it out"),
        ({}, Source("a"), {}, torch.float16, "in bfloat16 whatever else is in torch.float16: leave dtype out"),
        ({"load_in_4bit": False}, Source("a"), {}, torch.float32, "samples in 16 bits"),
        ({"lora_rank": 600}, Source("a"), {}, torch.bfloat16, "up to rank 512, not 600"),
    ],
)
def test_what_cannot_work_is_said_before_vllm_starts(
    given: dict[str, Any], source: Source, found: dict[str, Any], dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)engine='vllm' can't load a/model: .*{words}"):
        check_for_vllm(options(**given), source, config(**found), Precision(BF16.device, dtype, "asked for"))


def test_a_second_start_in_a_process_is_refused_while_the_first_model_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_kit.rollout.vllm.start._started", True)
    with pytest.raises(ValueError, match="once in a process, and was: save the adapter and restart the kernel"):
        check_for_vllm(options(), Source("a/model"), config(), BF16)


def test_without_vllm_loading_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_kit.rollout.vllm.requirements.installed", lambda: None)
    with pytest.raises(ValueError, match=r"can't be started: .*pip install 'grpo-kit\[vllm\]'.*engine='native'"):
        gk.load_model("no/such-model", engine="vllm")


def draw(request: Request) -> int:
    return 97 + len(request.tokens)


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> tuple[Model, FakeLlm]:
    path = tiny_checkpoint()
    theirs = FakeModel(tiny("llama"), rank=8)
    vllm, llm = fake_vllm(theirs, draw)
    module = build_on(vllm.weights(), AutoConfig.from_pretrained(path), CPU)
    adapted = add_lora(module, 4, 4, seed=0)
    chat = Chat(tiny_tokenizer(), [256])
    engine = VllmEngine(adapted, vllm, eos_ids=chat.eos_ids, decode=chat.decode)
    return Model(adapted, chat, engine, CPU, options(), [], vllm), llm


def test_a_model_samples_with_it_and_can_change_engines_and_back(model: tuple[Model, FakeLlm]) -> None:
    made, llm = model
    (group,) = made.complete([[5]], Sampling(max_tokens=3))
    assert group[0].token_ids == [97, 98, 99]
    made.use_engine("transformers", "for a test")
    assert not llm.is_shut_down  # the weights are still its own
    made.complete([[5]], Sampling(max_tokens=3))
    made.use_engine("vllm", "for a test")
    assert made.complete([[5]], Sampling(max_tokens=3))[0][0].token_ids == [97, 98, 99]
    assert made.engine.holds_memory


def test_the_untrained_model_is_asked_without_the_adapter(model: tuple[Model, FakeLlm]) -> None:
    made, llm = model
    made.complete([[5]], Sampling(max_tokens=3), adapter=False)
    assert llm.asked[-1].adapter is None


def test_a_model_that_is_unloaded_shuts_vllm_down(model: tuple[Model, FakeLlm]) -> None:
    made, llm = model
    made.engine.release()
    made.unload()
    assert llm.is_shut_down
    made.unload()  # again is nothing
