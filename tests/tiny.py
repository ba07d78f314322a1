"""Tiny random language models with a byte-level tokenizer: every architecture of the table, made from its config alone.

Nothing is downloaded and any text can be encoded (one token a byte). The weights are drawn ten times wider than usual,
so that a random model prefers some tokens clearly and greedy decoding does not hang on the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS, PAD, START = "<|im_end|>", "<|pad|>", "<|im_start|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
# What each architecture needs beyond SHAPE. Sliding windows are shorter than the tests' sequences, so that they bite.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
}


def tiny_tokenizer(chat_template: str | None = CHATML, eos: str = EOS, pad: str = PAD) -> Any:
    """259 tokens: the 256 bytes, then <|im_end|>, <|pad|> and <|im_start|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([EOS, PAD, START])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(
    folder: Path,
    architecture: str = "llama",
    tie: bool = True,
    chat_template: str | None = CHATML,
    eos: str = EOS,
    pad: str = PAD,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint as `from_pretrained` reads it. `config` overrides entries of the model's config."""
    tokenizer = tiny_tokenizer(chat_template, eos, pad)
    kind, extra = ARCHITECTURES[architecture]
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    made = getattr(transformers, kind)(**{**SHAPE, **extra, **ids, "tie_word_embeddings": tie, **config})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
