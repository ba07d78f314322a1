"""Checkpoints at the shapes of real models with random weights, in 4 bits, made on the GPU in seconds: for measuring
time and memory where no weights can be downloaded. They say nothing sensible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

LLAMA: dict[str, Any] = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072}
QWEN: dict[str, Any] = {"vocab_size": 151936, "rope_theta": 1000000.0, "max_position_embeddings": 131072}
EOS, PAD = 256, 257  # after the bytes
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shape(name: str) -> PreTrainedConfig:
    """The configuration of a published model, by name; "tiny" is none, and runs anywhere."""
    kind, base, (hidden, inner, layers, heads, kv_heads, tied) = SHAPES[name]
    config: PreTrainedConfig = kind(
        **base,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return config


SHAPES: dict[str, tuple[Any, dict[str, Any], tuple[int, int, int, int, int, bool]]] = {
    "Qwen2.5-0.5B": (Qwen2Config, QWEN, (896, 4864, 24, 14, 2, True)),
    "Qwen2.5-1.5B": (Qwen2Config, QWEN, (1536, 8960, 28, 12, 2, True)),
    "Qwen2.5-3B": (Qwen2Config, QWEN, (2048, 11008, 36, 16, 2, True)),
    "Qwen2.5-7B": (Qwen2Config, {**QWEN, "vocab_size": 152064}, (3584, 18944, 28, 28, 4, False)),
    "Qwen2.5-14B": (Qwen2Config, {**QWEN, "vocab_size": 152064}, (5120, 13824, 48, 40, 8, False)),
    "Llama-3.2-3B": (LlamaConfig, LLAMA, (3072, 8192, 28, 24, 8, True)),
    "Llama-3.1-8B": (LlamaConfig, LLAMA, (4096, 14336, 32, 32, 8, False)),
    "tiny": (Qwen2Config, {**QWEN, "vocab_size": 512}, (64, 128, 2, 4, 2, True)),
}


def write_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, double_quant: bool = False) -> Path:
    """A folder that transformers loads: NF4 weights, embeddings and head in `dtype`, a tokenizer of bytes. Never more
    than one weight is there in 16 bits."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True)
    config = shape(name)
    config.dtype = dtype
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=double_quant,
    )
    config.quantization_config = quantization.to_dict()
    save_file(_state(config, dtype, double_quant), folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(_empty(config, dtype)).__name__]
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "pad_token_id": PAD}))
    _tokenizer().save_pretrained(str(folder))
    return folder


def write_adapter(name: str, folder: Path, rank: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder that peft loads: LoRA on all linear layers, random on both sides, so that it does something."""
    if (folder / "adapter_config.json").exists():
        return folder
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(_empty(shape(name), dtype), lora)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(weight.shape, generator=generator).mul_(0.01).to(dtype)
        for name, weight in get_peft_model_state_dict(adapted).items()
    }
    folder.mkdir(parents=True)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapted.peft_config["default"].inference_mode = True
    adapted.peft_config["default"].save_pretrained(str(folder))
    return folder


def _empty(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    plain = type(config)(**{k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain, dtype=dtype)


def _state(config: PreTrainedConfig, dtype: torch.dtype, double_quant: bool) -> dict[str, torch.Tensor]:
    """Names as transformers saves them, on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    empty, state = _empty(config, dtype), {}
    linear = {n for n, m in empty.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    for name, parameter in empty.named_parameters():
        module, leaf = name.rsplit(".", 1)
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        if "norm" in name:
            weight.fill_(1.0)
        elif leaf == "bias":
            weight.zero_()
        else:
            weight.normal_(0, 0.02, generator=generator)
        if module in linear and leaf == "weight":
            packed = bnb.nn.Params4bit(
                weight, requires_grad=False, quant_type="nf4", compress_statistics=double_quant
            ).to(device)
            state[name] = packed.data.cpu()
            state |= {f"{name}.{k}": v.cpu() for k, v in packed.quant_state.as_dict(packed=True).items()}
        else:
            state[name] = weight.cpu()
    torch.cuda.empty_cache()  # the GPU is for what is measured next
    return state


def _tokenizer() -> PreTrainedTokenizerFast:
    """The 256 bytes, then <|im_end|>, <|pad|> and <|im_start|>; the model has more tokens, which have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens(["<|im_end|>", "<|pad|>", "<|im_start|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = CHATML
    return made
