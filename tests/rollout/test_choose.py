"""Which engine samples, and why."""

from __future__ import annotations

import pytest

from grpo_kit.rollout import NotSupported, check_engine, check_kv_cache, choose_engine, make_engine


def nothing() -> None:
    return None


def recurrent() -> None:
    raise NotSupported("its layers are recurrent")


def unasked() -> None:
    raise AssertionError("this takes a moment and does not matter here")


def test_a_gpu_has_the_native_engine_where_the_model_allows_it() -> None:
    name, reason = choose_engine("auto", False, on_gpu=True, examine_native=nothing)
    assert name == "native" and reason
    name, reason = choose_engine("auto", True, on_gpu=True, examine_native=recurrent)
    assert name == "transformers" and "its layers are recurrent" in reason


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_has_the_plain_one_and_says_what_fast_inference_comes_to(fast: bool) -> None:
    name, reason = choose_engine("auto", fast, on_gpu=False, examine_native=unasked)
    assert name == "transformers" and ("fast_inference" in reason) is fast


def test_what_is_asked_for_is_what_samples() -> None:
    asked = ("transformers", "asked for")
    assert choose_engine("transformers", True, on_gpu=True, examine_native=unasked) == asked
    assert choose_engine("native", False, on_gpu=False, examine_native=nothing) == ("native", "asked for")


def test_vllm_samples_only_where_it_is_asked_for_and_holds_the_weights() -> None:
    assert choose_engine("vllm", False, on_gpu=True, examine_native=unasked) == ("vllm", "asked for")
    with pytest.raises(ValueError, match="not vLLM's: load it with engine='vllm'"):
        make_engine("vllm", None, eos_ids=(), decode=str)  # type: ignore[arg-type]


def test_an_engine_that_cannot_run_the_model_is_an_error_where_it_was_asked_for() -> None:
    with pytest.raises(ValueError, match="'native' can't sample with this model: its layers are recurrent"):
        choose_engine("native", False, on_gpu=True, examine_native=recurrent)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_cache_in_8_bits_asks_for_the_engine_that_has_it(on_gpu: bool) -> None:
    name, reason = choose_engine("auto", False, on_gpu=on_gpu, examine_native=nothing, kv_cache_dtype="int8")
    assert (name, reason) == ("native", "kv_cache_dtype='int8' is its option")
    with pytest.raises(ValueError, match="its layers are recurrent; engine='transformers' can, without kv_cache_dtype"):
        choose_engine("auto", False, on_gpu=on_gpu, examine_native=recurrent, kv_cache_dtype="int8")


def test_a_cache_format_that_is_not_there_or_not_the_engines_is_an_error() -> None:
    for engine in ("auto", "native"):
        check_kv_cache("int8", engine)
    check_kv_cache(None, "transformers")
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'fp8'; there are None, 'int8'"):
        check_kv_cache("fp8", "auto")
    with pytest.raises(ValueError, match="an option of the native engine, and engine='transformers' was asked for"):
        check_kv_cache("int8", "transformers")


def test_an_engine_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'vlm'; there are auto, native, transformers, vllm"):
        check_engine("vlm")


def test_an_engine_there_is_not_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="no engine 'vlm' to be made; there are native, transformers, vllm"):
        make_engine("vlm", None, eos_ids=(), decode=str)  # type: ignore[arg-type]
