"""The matrix products of a token step: a few rows times 4-bit weights as they are stored, and LoRA's x·Aᵀ.

What comes out is unfinished (`Parts`): bias and LoRA's B are its consumer's. It computes no gradients, and it is not
for training, where the rows are so many that making the weights dense costs little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kit.kernels.decode_parts import BLOCK, Parts, natural_order
from grpo_kit.kernels.nf4_lookup import VALUES
from grpo_kit.kernels.triton_ready import use_triton

MOST_ROWS = 256  # of the kernel; for many more, dense weights multiplied at full speed are faster
MOST_WEIGHTS = 3  # q, k and v


@dataclass(frozen=True)
class Nf4:
    """A matrix [N, K] in bitsandbytes' "nf4" with blocks of 64 along K, a multiple of 64.

    words: int16 [N, K/4], a view of the packed bytes: byte j of a row holds the weights 2j (its high bits) and 2j + 1.
    absmax: float32 [N, K/64]; one that is quantized itself has to be made dense first.

    Raises ValueError if the shapes or dtypes don't fit.
    """

    words: Tensor
    absmax: Tensor

    def __post_init__(self) -> None:
        words, absmax = self.words, self.absmax
        fits = words.dim() == 2 and absmax.shape == (words.shape[0], words.shape[1] // 16) and words.shape[1] % 16 == 0
        if not fits or words.dtype != torch.int16 or absmax.dtype != torch.float32:
            raise ValueError(
                "Nf4 needs int16 words [N, K/4] and float32 absmax [N, K/64]; "
                f"got {words.dtype} {tuple(words.shape)} and {absmax.dtype} {tuple(absmax.shape)}"
            )
        if not words.is_contiguous() or not absmax.is_contiguous():
            raise ValueError("Nf4 needs contiguous words and absmax, as bitsandbytes stores them")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0], 4 * self.words.shape[1]

    def dense(self) -> Tensor:
        """[N, K] in float32: each weight is its value times its block's absmax. Plain torch, and large in memory."""
        byte = self.words.view(torch.uint8).int()  # [N, K/2]
        codes = torch.stack((byte >> 4, byte & 15), -1).flatten(1)
        values = torch.tensor(VALUES, dtype=torch.float32, device=codes.device)[codes]
        return (values.unflatten(1, (-1, BLOCK)) * self.absmax[..., None]).flatten(1)


@dataclass(frozen=True)
class DecodeGroup:
    """One to three layers with the same input x [B, K], as q, k and v have it; N outputs side by side, in dtype T.

    weights: of each layer, 4-bit, or a Tensor [N_i, K] in T and natural order where it was not quantized.
    lora_a: [n·r, K] in T and in nibble order, the n layers' one after the other; lora_b: [N, r] in T, times LoRA's
    scaling; both None where the adapter is off. bias: [N] in T, or None.

    Raises ValueError if the shapes don't fit.
    """

    weights: tuple[Nf4 | Tensor, ...]
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        inner = {weight.shape[1] for weight in self.weights}
        if not 1 <= len(self.weights) <= MOST_WEIGHTS or len(inner) != 1 or self.inner % BLOCK:
            raise ValueError(
                f"a DecodeGroup has 1 to {MOST_WEIGHTS} weights [N_i, K] with one K, a multiple of {BLOCK}; "
                f"got {[tuple(weight.shape) for weight in self.weights]}"
            )
        if (self.lora_a is None) != (self.lora_b is None):
            raise ValueError("a DecodeGroup has both of lora_a and lora_b, or neither where the adapter is off")
        if self.lora_a is not None and self.lora_a.shape != (len(self.weights) * self.rank, self.inner):
            raise ValueError(
                f"a DecodeGroup of {len(self.weights)} weights of rank {self.rank} needs lora_a "
                f"[{len(self.weights) * self.rank}, {self.inner}]; got {tuple(self.lora_a.shape)}"
            )

    @property
    def inner(self) -> int:
        """K."""
        return self.weights[0].shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """N_i of each layer."""
        return tuple(weight.shape[0] for weight in self.weights)

    @property
    def rank(self) -> int:
        """r of one layer; 0 where the adapter is off."""
        return 0 if self.lora_b is None else self.lora_b.shape[1]

    def unfinished(self, sums: Tensor, dtype: torch.dtype) -> Parts:
        """`sums` [S, B, N + n·r] with what is left to do to them."""
        return Parts(sums, self.sizes, dtype, self.lora_b, self.bias)


def decode_linear(x: Tensor, group: DecodeGroup) -> Parts:
    """x·Wᵀ of the group's matrices side by side, then x·Aᵀ, with x [B, K] in T and in nibble order.

    On a GPU from sm80 on, 4-bit weights in groups without others are read as they are stored for up to 256 rows; else
    weights are made dense one after the other, and the products are rounded to T. Nothing depends on numbers in the
    tensors but the result, so a CUDA graph may hold the call; the first call on a device comes before its capture.

    Raises ValueError if x and the group don't fit.
    """
    _check(x, group)
    if not use_triton(x):
        return multiply(x, group)
    if not _suits_kernel(x, group):
        return multiply_dense(x, group)
    from grpo_kit.kernels import decode_linear_triton as fused

    return fused.multiply(x, group)


def multiply(x: Tensor, group: DecodeGroup) -> Parts:
    """The twin: all in float32, S = 1."""
    weights = [weight.dense() if isinstance(weight, Nf4) else weight.float() for weight in group.weights]
    sums = [natural_order(x.float()) @ weight.T for weight in weights]
    if group.lora_a is not None:
        sums.append(x.float() @ group.lora_a.float().T)
    return group.unfinished(torch.cat(sums, 1)[None], x.dtype)


def multiply_dense(x: Tensor, group: DecodeGroup) -> Parts:
    """The same for many rows: weights and products in T, one matrix made dense at a time. S = 1."""
    width = sum(group.sizes) + len(group.sizes) * group.rank
    sums = torch.empty(1, len(x), width, dtype=torch.float32, device=x.device)
    natural, start = natural_order(x), 0
    for weight, size in zip(group.weights, group.sizes, strict=True):
        plain = _dense(weight, x.dtype) if isinstance(weight, Nf4) else weight
        sums[0, :, start : start + size] = natural @ plain.T
        start += size
    if group.lora_a is not None:
        sums[0, :, start:] = x @ group.lora_a.T
    return group.unfinished(sums, x.dtype)


def reaches_tensor_cores(device: torch.device) -> bool:
    """Whether Triton multiplies 16-bit numbers on the tensor cores of this GPU, as it does from sm80 on. Without them
    the kernel has four times as many instructions for 8 rows and twenty times for 64."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _suits_kernel(x: Tensor, group: DecodeGroup) -> bool:
    fast = x.dtype != torch.float32 and reaches_tensor_cores(x.device)
    return fast and len(x) <= MOST_ROWS and all(isinstance(weight, Nf4) for weight in group.weights)


def _dense(weight: Nf4, dtype: torch.dtype) -> Tensor:
    if not use_triton(weight.absmax):
        return weight.dense().to(dtype)
    from grpo_kit.kernels import nf4_dense_triton as fused

    return fused.dense(weight, dtype)


def _check(x: Tensor, group: DecodeGroup) -> None:
    if x.dim() != 2 or x.shape[1] != group.inner or not x.is_contiguous():
        raise ValueError(f"decode_linear needs x [B, {group.inner}], contiguous; got {tuple(x.shape)} {x.stride()}")
    tensors = [weight for weight in group.weights if isinstance(weight, Tensor)]
    tensors += [tensor for tensor in (group.lora_a, group.lora_b) if tensor is not None]
    if wrong := {tensor.dtype for tensor in tensors} - {x.dtype}:
        raise ValueError(f"decode_linear needs dense weights and LoRA in x's {x.dtype}; got {wrong}")
