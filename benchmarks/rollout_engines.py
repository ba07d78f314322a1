"""The engines that sample completions, ours and others, as one kind of function, for the script that times them.

All sample at temperature 1 from the whole distribution, with an adapter of rank 32 on every linear layer, and end a
completion at a length that they are told and nowhere else: random weights know no end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from child_process import say

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU is for trying a script
RANK, GROUP = 32, 8  # the adapter's; completions of a prompt
FEW = 8  # tokens that warm up an engine which captures nothing
OWN_CACHE = 0.5  # of a capped card's memory that is left: what the native engine takes of one that has no more
BLOCK, BATCH_TOKENS = 256, 8192  # of continuous batching: tokens of a block of its cache, and of a forward pass

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]


@dataclass(frozen=True)
class Setting:
    """sequences: the most at once. longest: prompt and completion together. cap_gb: all that torch may take."""

    checkpoint: Path
    adapter: Path
    dtype: str
    sequences: int
    longest: int
    cache_bytes: int
    cap_gb: float | None


@dataclass(frozen=True)
class Ready:
    """generate(prompts [P], lengths [P·GROUP]) returns the tokens of each completion. seconds: that building the engine
    took, beyond loading weights where these can be told apart. warm_up: the most tokens that a first call needs."""

    generate: Generate
    seconds: float = 0.0
    warm_up: int | None = None


def native(setting: Setting) -> Ready:
    """Ours. It is told no end token; where the lengths differ, the host ends each completion as it does for a stop
    string, one token step later than an end token would."""
    say("importing")
    import grpo_kit as gk
    from grpo_kit.rollout import Sampling, make_engine
    from grpo_kit.rollout.rows import Endings, Row

    class EndsAt(Endings):
        lengths: list[int]

        def append(self, row: Row, token: int, logprob: float, sampling: Sampling) -> None:
            super().append(row, token, logprob, sampling)
            if len(row.token_ids) == self.lengths[row.index]:
                row.finish_reason = row.finish_reason or "stop"

    say("loading")
    model = gk.load_model(
        str(setting.checkpoint),
        max_seq_length=setting.longest,
        lora_rank=RANK,
        dtype=setting.dtype,
        engine="native",
    )
    steps: Any = model.engine  # which knows what makes its token steps
    started = time.perf_counter()
    engine: Any = make_engine("native", model.module, eos_ids=(), decode=model.chat.decode, fused=steps.fused)
    seconds = time.perf_counter() - started
    if setting.cap_gb is not None and DEVICE == "cuda":  # a capped process still sees the whole GPU as free
        engine.cache_bytes = int(OWN_CACHE * (setting.cap_gb * 1e9 - torch.cuda.memory_allocated()))
    plain, by_length = engine.endings, EndsAt(frozenset(), model.chat.decode)

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        by_length.lengths = lengths
        engine.endings = plain if len(set(lengths)) == 1 else by_length
        groups = engine.generate(prompts, Sampling(max_tokens=max(lengths)), GROUP)
        return [completion.token_ids for group in groups for completion in group]

    return Ready(generate, seconds)


def transformers_generate(setting: Setting) -> Ready:
    """As it is: an eager forward pass with a growing cache."""
    return Ready(with_generate(_peft(setting)), warm_up=FEW)


def transformers_static(setting: Setting) -> Ready:
    """With a static cache, for which transformers compiles the forward pass by itself."""
    return Ready(with_generate(_peft(setting), cache_implementation="static"))


def with_generate(module: Any, **more: Any) -> Generate:
    """transformers' generate, with further options of its own. The module's generation config must name no end."""
    from transformers import GenerationConfig, StoppingCriteria

    class EndsAt(StoppingCriteria):
        def __init__(self, lengths: list[int], prompt: int):
            self.ends = torch.tensor(lengths, device=DEVICE) + prompt

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            return self.ends <= input_ids.shape[1]

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=DEVICE)
        config = GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            num_return_sequences=GROUP,
            pad_token_id=0,
            **more,
        )
        uneven = [EndsAt(lengths, ids.shape[1])] if len(set(lengths)) > 1 else []
        drawn = module.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=uneven
        )[:, ids.shape[1] :]
        if drawn.shape[1] < max(lengths):
            raise RuntimeError(f"generate ended after {drawn.shape[1]} of {max(lengths)} tokens")
        return [row[:length] for row, length in zip(drawn.tolist(), lengths, strict=True)]

    return generate


def transformers_continuous(setting: Setting) -> Ready:
    """Continuous batching; what it has captured is kept for the next call of the same size. Its cache has room for all
    sequences: left alone, it takes what memory there is."""
    module = _peft(setting)
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    blocks = setting.sequences * (setting.longest // BLOCK + 2)
    limits = ContinuousBatchingConfig(block_size=BLOCK, num_blocks=blocks, max_batch_tokens=BATCH_TOKENS)
    sizes: list[tuple[int, int]] = []

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        if sizes != [(len(lengths), max(lengths))]:
            module.destroy_cached_continuous_batching_manager()
            sizes[:] = [(len(lengths), max(lengths))]
        hints = WorkloadHints(max(map(len, prompts)), max(lengths), len(lengths))
        drawn: dict[str, list[int]] = {}
        with ExitStack() as stack:
            manager = stack.enter_context(
                module.continuous_batching_context_manager(
                    generation_config=config,
                    continuous_batching_config=limits,
                    persistent_manager=True,
                    workload_hints=hints,
                )
            )
            names = [
                manager.add_request(prompts[i // GROUP], max_new_tokens=length) for i, length in enumerate(lengths)
            ]
            while len(drawn) < len(lengths):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its thread ended before all completions had")
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(result.error)
                    drawn[result.request_id] = result.generated_tokens
        return [drawn[name] for name in names]

    return Ready(generate)


def _peft(setting: Setting) -> Any:
    """The same weights and adapter as plain transformers and peft load them, the adapter in 16 bits too."""
    say("importing")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    say("loading")
    dtype = getattr(torch, setting.dtype)
    base = AutoModelForCausalLM.from_pretrained(setting.checkpoint, dtype=dtype, device_map={"": DEVICE})
    base.generation_config.eos_token_id = None
    module = PeftModel.from_pretrained(base, str(setting.adapter), autocast_adapter_dtype=False)
    return module.eval()


def vllm(setting: Setting) -> Ready:
    """In this process, with CUDA graphs and an active adapter. It is asked for no logprobs, which training needs and
    ours gives. Its weights load while the engine is built, and count as start-up."""
    for name in ("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        os.environ.setdefault(name, "1")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER"):
        os.environ.setdefault(name, "0")
    say("importing")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    say("building the engine")
    started = time.perf_counter()
    engine = LLM(
        model=str(setting.checkpoint),
        dtype=setting.dtype,
        quantization="bitsandbytes",
        load_format="bitsandbytes",
        max_model_len=setting.longest,
        max_num_seqs=setting.sequences,
        gpu_memory_utilization=0.8,
        kv_cache_memory_bytes=setting.cache_bytes,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=RANK,
    )
    seconds = time.perf_counter() - started
    adapter = LoRARequest("adapter", 1, str(setting.adapter))

    def ask(prompts: list[list[int]], wanted: Any) -> list[list[int]]:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = engine.generate(asked, wanted, lora_request=adapter, use_tqdm=False)
        return [list(output.token_ids) for answer in answers for output in answer.outputs]

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        if len(set(lengths)) == 1:
            return ask(prompts, SamplingParams(n=GROUP, max_tokens=lengths[0], ignore_eos=True, detokenize=False))
        wanted = [SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths]
        return ask([prompts[i // GROUP] for i in range(len(lengths))], wanted)

    return Ready(generate, seconds)


ENGINES: dict[str, Callable[[Setting], Ready]] = {
    "native": native,
    "vllm": vllm,
    "transformers": transformers_generate,
    "transformers continuous batching": transformers_continuous,
    "transformers static cache": transformers_static,
}
PACKAGES: dict[str, tuple[str, ...]] = {
    name: ("vllm",) if name == "vllm" else ("transformers", "peft", "bitsandbytes") for name in ENGINES
}
