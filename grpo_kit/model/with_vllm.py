"""Loading for the vLLM engine: vLLM reads the checkpoint, then the trainer's model is built on its weights.

Everything that can't work is said before vLLM is started, which takes a while.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from grpo_kit.model.memory_parts import PlanOptions, lora, weights
from grpo_kit.model.model import LoadOptions
from grpo_kit.model.precision import Precision
from grpo_kit.model.shape import quantization, read_shape
from grpo_kit.model.shared import build_on
from grpo_kit.model.sources import Source
from grpo_kit.rollout.vllm import Settings, Sizes, Vllm, choose_sizes, padded_rank, start_vllm, was_started

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers vLLM joins in the way that `SharedWeights` reads
INSTEAD = "load with engine='native'"
Note = tuple[str, str, str]


def check_for_vllm(options: LoadOptions, source: Source, config: Any, precision: Precision) -> None:
    """Raises ValueError for what vLLM's weights can't be shared of."""
    obstacle = _why_not(options, source, config, precision)
    if obstacle:
        raise ValueError(f"engine='vllm' can't load {options.name_or_path}: {obstacle}")


def _why_not(options: LoadOptions, source: Source, config: Any, precision: Precision) -> str | None:
    family, made_with = getattr(config, "model_type", None), quantization(config)
    if was_started():
        return f"vLLM can be started once in a process, and was: save the adapter and restart the kernel, or {INSTEAD}"
    if source.note:
        return f"it is {source.note}, and vLLM is given checkpoints in transformers' format: {INSTEAD}"
    if family not in FAMILIES:
        return f"where vLLM keeps the weights of {family!r} is not known, only of {', '.join(FAMILIES)}: {INSTEAD}"
    if made_with and not made_with.get("load_in_4bit"):
        return f"it is quantized by {made_with.get('quant_method')!r}, not in 4 bits by bitsandbytes: {INSTEAD}"
    if options.double_quant:
        return "vLLM keeps the scales of 4-bit weights in float32, so double_quant saves nothing: leave it out"
    return _why_not_dtype(bool(made_with) or options.load_in_4bit, precision.dtype) or _why_not_rank(options.lora_rank)


def _why_not_dtype(four_bit: bool, dtype: torch.dtype) -> str | None:
    if four_bit and dtype != torch.bfloat16:
        return f"vLLM multiplies 4-bit weights in bfloat16 whatever else is in {dtype}: leave dtype out"
    if dtype == torch.float32:
        return "vLLM samples in 16 bits: leave dtype out"
    return None


def _why_not_rank(rank: int) -> str | None:
    try:
        padded_rank(rank)
    except ValueError as error:
        return str(error)
    return None


def load_with_vllm(
    options: LoadOptions, path: str, config: Any, precision: Precision, notes: list[Note]
) -> tuple[PreTrainedModel, Vllm]:
    """vLLM and, on its weights, the trainer's model, which has no adapter yet."""
    settings = settings_for(options, path, config, precision)
    vllm = start_vllm(settings)
    try:
        module = build_on(vllm.weights(), config, precision)
    except Exception:
        vllm.close()
        raise
    module.generation_config = _generation_config(path, module)
    notes += _notes(config, settings)
    return module, vllm


def settings_for(options: LoadOptions, path: str, config: Any, precision: Precision) -> Settings:
    """What vLLM is started with, for the GPU as it is now."""
    return Settings(
        path=path,
        dtype=str(precision.dtype).removeprefix("torch."),
        load_in_4bit=bool(quantization(config)) or options.load_in_4bit,
        max_seq_length=options.max_seq_length,
        adapted=[name.rpartition(".")[2] for name in read_shape(config).linears],
        sizes=_sizes(options, config, precision),
        trust_remote_code=options.trust_remote_code,
    )


def _sizes(options: LoadOptions, config: Any, precision: Precision) -> Sizes:
    shape = read_shape(config)
    plan = PlanOptions(
        load_in_4bit=options.load_in_4bit,
        max_seq_length=options.max_seq_length,
        lora_rank=options.lora_rank,
        max_completion_length=options.max_seq_length - 1,
    )
    free, total = torch.cuda.mem_get_info(precision.device)
    # LoRA is there in float32 to be trained and once more, in 16 bits, to be sampled with.
    taken = sum(weights(shape, plan).values()) + lora(shape, plan) * 3 // 2
    return choose_sizes(
        free=free,
        total=total,
        weights=taken,
        token_bytes=2 * shape.layers * shape.keys * precision.dtype.itemsize,
        max_seq_length=options.max_seq_length,
        lora_rank=options.lora_rank,
    )


def _generation_config(path: str, module: PreTrainedModel) -> GenerationConfig:
    """As `from_pretrained` reads it: it may name more end tokens than the model's config."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:  # there is none
        return GenerationConfig.from_model_config(module.config)


def _notes(config: Any, settings: Settings) -> list[Note]:
    notes = [("base weights", "once", "the trainer's are views of vLLM's")]
    if quantization(config):
        notes.append(("quantization", "as in the checkpoint", "it is quantized already"))
    elif settings.load_in_4bit:
        notes.append(("quantization", "NF4, blocks of 64", "by vLLM, which rounds their scales to 8 bits on the way"))
    return notes + settings.sizes.notes()
