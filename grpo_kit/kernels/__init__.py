"""Operations that must be fast or small in memory, each with a plain-torch twin. Knows nothing of transformers."""

from grpo_kit.kernels.attention import Attention, choose_attention
from grpo_kit.kernels.decoder_layer import DecoderLayer, Surroundings, decoder_layer
from grpo_kit.kernels.linear_logprob import linear_logprob
from grpo_kit.kernels.lora_linear import Frozen, Group
from grpo_kit.kernels.offload import CudaLane, Offload
from grpo_kit.kernels.packing import Packed, gather, pack
from grpo_kit.kernels.rms_norm import rms_norm

__all__ = [
    "Attention",
    "CudaLane",
    "DecoderLayer",
    "Frozen",
    "Group",
    "Offload",
    "Packed",
    "Surroundings",
    "choose_attention",
    "decoder_layer",
    "gather",
    "linear_logprob",
    "pack",
    "rms_norm",
]
