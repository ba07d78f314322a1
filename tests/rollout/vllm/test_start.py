"""What vLLM is started with."""

from __future__ import annotations

from typing import Any

from grpo_kit.rollout.vllm import Settings, Sizes
from grpo_kit.rollout.vllm.start import engine_arguments

SIZES = Sizes(sequences=64, step_tokens=2048, graphs=(1, 8, 64), cache_bytes=10**9, rank=32, utilization=0.8)


def arguments(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "path": "a/folder",
        "dtype": "bfloat16",
        "load_in_4bit": True,
        "max_seq_length": 1024,
        "adapted": ["v_proj", "q_proj"],
        "sizes": SIZES,
    }
    return engine_arguments(Settings(**{**given, **changed}))


def test_sizes_and_lengths_are_passed_on() -> None:
    made = arguments()
    assert (made["model"], made["dtype"], made["max_model_len"]) == ("a/folder", "bfloat16", 1024)
    assert (made["max_num_seqs"], made["max_num_batched_tokens"], made["kv_cache_memory_bytes"]) == (64, 2048, 10**9)
    assert made["cudagraph_capture_sizes"] == [1, 8, 64] and made["gpu_memory_utilization"] == 0.8
    assert (made["max_loras"], made["max_lora_rank"]) == (1, 32)
    assert made["lora_target_modules"] == ["q_proj", "v_proj"]


def test_logits_are_the_trainers() -> None:
    made = arguments()
    assert made["hf_overrides"] == {"head_dtype": "float32"} and made["logprobs_mode"] == "raw_logprobs"


def test_only_4_bit_weights_are_quantized() -> None:
    assert arguments()["quantization"] == "bitsandbytes"
    assert "quantization" not in arguments(load_in_4bit=False)
