"""Starting vLLM in this process: from a checkpoint in transformers' format to an engine with an empty adapter.

Nothing of vLLM's is replaced, and of the environment only what `surroundings` names, while it starts.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from grpo_kit.rollout.vllm import progress, surroundings
from grpo_kit.rollout.vllm.cache import KvCache
from grpo_kit.rollout.vllm.process import Vllm, Words
from grpo_kit.rollout.vllm.sizes import Sizes

SLOT = 1  # of the only adapter
_started = False


@dataclass(frozen=True)
class Settings:
    """path: a folder or a hub name. dtype: "bfloat16" or another name. adapted: names of the linear layers that have
    LoRA, as transformers has them ("q_proj")."""

    path: str
    dtype: str
    load_in_4bit: bool
    max_seq_length: int
    adapted: Collection[str]
    sizes: Sizes
    trust_remote_code: bool = False


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """Of vLLM's EngineArgs."""
    sizes = settings.sizes
    four_bit = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"} if settings.load_in_4bit else {}
    return {
        "model": settings.path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        **four_bit,
        "max_model_len": settings.max_seq_length,
        "max_num_seqs": sizes.sequences,
        "max_num_batched_tokens": max(sizes.step_tokens, sizes.sequences),
        "kv_cache_memory_bytes": sizes.cache_bytes,
        "gpu_memory_utilization": sizes.utilization,
        "enable_cumem_allocator": True,  # memory that can leave its addresses: see `cache`
        "enable_prefix_caching": True,  # a prompt is read once for all its completions
        # Graphs of the token step without torch.compile, which would take a minute to start and gains little beside
        # 4-bit products.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "cudagraph_capture_sizes": list(sizes.graphs),
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": sizes.rank,
        "lora_target_modules": sorted(settings.adapted),
        "hf_overrides": {"head_dtype": "float32"},  # logits as the trainer has them
        "logprobs_mode": "raw_logprobs",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def was_started() -> bool:
    """vLLM can be started once in a process: its allocator serves one engine, and some of vLLM's caches keep memory of
    it for good."""
    return _started


def start_vllm(settings: Settings) -> Vllm:
    """Takes about a minute, and says what it is at. The adapter is all zeros. See `was_started`."""
    global _started
    _started = True
    tell = progress.clock(partial(print, flush=True))
    with surroundings.kept():
        tell("importing it")
        import vllm  # noqa: F401 - sets up the log that is to be followed

        with progress.followed(tell):
            started = _start(settings)
        tell("ready")
    return started


def _start(settings: Settings) -> Vllm:
    from vllm.device_allocator import cumem
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    stream = torch.cuda.Stream()
    config = EngineArgs(**engine_arguments(settings)).create_engine_config()
    adapter = LoRARequest(lora_name="grpo-kit", lora_int_id=SLOT, lora_path="written in place")
    with torch.cuda.stream(stream):
        llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        _take_slot(llm, adapter)
    torch.cuda.synchronize()
    gc.unfreeze()  # the notebook's own garbage, which vLLM has declared permanent
    cache = KvCache(
        entries=lambda: cumem.CuMemAllocator.get_instance().pointer_to_data.values(),
        unmap=cumem.unmap_and_release,
        remap=lambda: llm.collective_rpc("wake_up", kwargs={"tags": ["kv_cache"]}),
    )
    words = Words(partial(SamplingParams, output_kind=RequestOutputKind.DELTA), tokens_input, adapter)
    return Vllm(llm, words, cache, stream)


def _take_slot(llm: Any, adapter: Any) -> None:
    """Give the adapter its place as vLLM does for those that it warms up with, which come from no file either."""
    runner = llm.model_executor.driver_worker.model_runner
    runner.lora_manager.add_dummy_lora(adapter, rank=1)
    runner.add_lora(adapter)
