"""A language model's shape, read from its config alone: sizes, what its weights take, how many a LoRA adapter has.

Nothing is loaded. Known are decoders made of attention and one gated MLP a layer; the plan of memory starts here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Families whose layers train through the kit's own pieces, and those that train through transformers' layers.
FUSED = ("llama", "mistral", "qwen2", "qwen3")
PLAIN = ("cohere", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "ministral", "olmo2", "phi3", "smollm3")

_ONE_QKV = ("phi3",)  # q, k and v as one linear layer
_ONE_GATE_UP = ("glm4", "phi3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")

NF4_BLOCK = 64  # weights that share a scale
SCALES_BLOCK = 256  # scales that share a scale, where they are quantized too


@dataclass(frozen=True)
class Shape:
    """family: the config's model_type. head_dim: of one head; its queries together are `queries` wide, keys (and
    values) `keys`. tied: the head is the embedding. eager: attention scores are held whole, because they are capped.
    in_16_bits: names of modules that a checkpoint which is quantized already left as they were; None if it is not.
    """

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    eager: bool = False
    in_16_bits: tuple[str, ...] | None = None

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def fused(self) -> bool:
        return self.family in FUSED

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer: name → (out, in)."""
        hidden, inner = self.hidden, self.intermediate
        qkv = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys}
        if self.family in _ONE_QKV:
            qkv = {"qkv_proj": sum(qkv.values())}
        gate_up = {"gate_up_proj": 2 * inner} if self.family in _ONE_GATE_UP else {"gate_proj": inner, "up_proj": inner}
        return {
            **{f"self_attn.{name}": (out, hidden) for name, out in qkv.items()},
            "self_attn.o_proj": (hidden, self.queries),
            **{f"mlp.{name}": (out, hidden) for name, out in gate_up.items()},
            "mlp.down_proj": (hidden, inner),
        }

    @property
    def linear_weights(self) -> int:
        """Weights in the linear layers of one decoder layer."""
        return sum(out * wide for out, wide in self.linears.values())

    @property
    def other_weights(self) -> int:
        """Everything that stays in 16 bits: embeddings, the head unless it is tied to them, norms, biases."""
        biases = self.queries + 2 * self.keys if self.qkv_bias else 0
        head_norms = 2 * self.head_dim if self.family == "qwen3" else 0
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.layers * (2 * self.hidden + biases + head_norms) + self.hidden

    @property
    def linear_tensors(self) -> tuple[list[int], list[int]]:
        """Weights of each linear layer of the decoder: of those that 4-bit quantization takes, and of those that a
        checkpoint which is quantized already left in 16 bits."""
        sizes = {name: out * wide for name, (out, wide) in self.linears.items()}
        if not self.in_16_bits:
            return list(sizes.values()) * self.layers, []
        taken: list[int] = []
        left: list[int] = []
        for layer in range(self.layers):
            for name, size in sizes.items():
                (left if self._is_left(f"model.layers.{layer}.{name}") else taken).append(size)
        return taken, left

    def _is_left(self, name: str) -> bool:
        """The ways in which transformers matches `llm_int8_skip_modules`."""
        left = self.in_16_bits or ()
        return any(name == part or name.startswith(f"{part}.") or name.endswith(f".{part}") for part in left)

    def lora_tensors(self, rank: int) -> list[int]:
        """Elements of each of the adapter's tensors: A and B of every linear layer of the decoder."""
        one_layer = [size for out, wide in self.linears.values() for size in (rank * wide, out * rank)]
        return one_layer * self.layers


def read_shape(config: Any) -> Shape:
    """The shape of a transformers config; of a model that also sees or hears, its language model's.

    Raises ValueError for a mixture of experts, for a family that isn't known, and for a checkpoint that is quantized in
    another way than by bitsandbytes in 4 bits.
    """
    text = getattr(config, "text_config", None) or config
    _check(text)
    heads, hidden = text.num_attention_heads, text.hidden_size
    return Shape(
        family=text.model_type,
        layers=text.num_hidden_layers,
        hidden=hidden,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        vocab=text.vocab_size,
        tied=bool(text.tie_word_embeddings),
        qkv_bias=text.model_type == "qwen2" or bool(getattr(text, "attention_bias", False)),
        eager=bool(getattr(text, "attn_logit_softcapping", None)),
        in_16_bits=_left_by_checkpoint(quantization(config)),
    )


def quantization(config: Any) -> dict[str, Any]:
    """How a checkpoint is quantized already, as it says itself; empty if it is not."""
    made_with = getattr(config, "quantization_config", None) or {}
    return dict(made_with) if isinstance(made_with, dict) else dict(made_with.to_dict())


def _check(text: Any) -> None:
    family = getattr(text, "model_type", None)
    if any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS):
        raise ValueError(f"{family} is a mixture of experts, which the memory plan does not know")
    if family not in FUSED + PLAIN:
        raise ValueError(
            f"the memory plan does not know how the family {family!r} is built; it knows "
            f"{', '.join(sorted(FUSED + PLAIN))}"
        )
    missing = [name for name in _NEEDED if not isinstance(getattr(text, name, None), int)]
    if missing:
        raise ValueError(f"the config does not say {', '.join(missing)}, which the memory plan needs")


def _left_by_checkpoint(made_with: dict[str, Any]) -> tuple[str, ...] | None:
    if not made_with:
        return None
    if not (made_with.get("load_in_4bit") or made_with.get("_load_in_4bit")):
        raise ValueError(
            f"the checkpoint is quantized by {made_with.get('quant_method')!r}; the memory plan knows 4-bit ones by "
            "bitsandbytes only"
        )
    return tuple(made_with.get("llm_int8_skip_modules") or ())


def nf4_bytes(weights: int, double_quant: bool) -> int:
    """Half a byte a weight and the scales: a float32 for each 64, or with double quantization a byte for each 64 and a
    float32 for each 256 of those (Dettmers et al. 2023, arXiv 2305.14314, section 3)."""
    scales = -(-weights // NF4_BLOCK)
    return -(-weights // 2) + (scales + 4 * -(-scales // SCALES_BLOCK) if double_quant else 4 * scales)
