"""`decode_linear`: the twin, the way over dense weights and the Triton kernels, against float64 and bitsandbytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor

from grpo_kit.kernels.decode_linear import DecodeGroup, Nf4, decode_linear, multiply_dense
from grpo_kit.kernels.decode_parts import Parts, nibble_order
from tests.kernels.launching import launch, skip_products_in
from tests.kernels.unfinished import rounded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    inner: int
    rows: int
    rank: int


# One to three matrices, below a tile, of one, just above one, of several; K with each span of the nibble order, an odd
# number of blocks, or one block; each tile of rows full and not, and two of the largest; ranks of no tile, of a part of
# one, of several.
CASES = [
    Case((72,), 192, 1, 0),
    Case((130, 16, 48), 64, 3, 5),
    Case((64, 65), 320, 8, 32),
    Case((40, 24), 576, 16, 1),
    Case((136, 64, 8), 192, 17, 5),
    Case((129,), 320, 64, 32),
    Case((40, 24), 768, 8, 5),
    Case((72,), 512, 16, 5),
    Case((33,), 640, 7, 3),
    Case((129,), 512, 33, 32),
    Case((40, 24), 256, 130, 5),
    Case((72,), 192, 100, 0),
]


@dataclass(frozen=True)
class Given:
    """x and lora_a in nibble order; low [n·r, K] in natural order, dense [N, K] in float32 what bitsandbytes says."""

    x: Tensor
    group: DecodeGroup
    low: Tensor
    dense: Tensor

    def exact(self, weights: Tensor) -> Tensor:
        """[B, N + n·r] in float64 with these `weights`, an element at a time in the sense of nibble order."""
        both = nibble_order(torch.cat([weights.double(), self.low.double()]))
        return self.x.double() @ both.T


def quantized(outputs: int, inner: int, seed: int) -> tuple[Nf4, Tensor]:
    weight = torch.randn(outputs, inner, generator=torch.Generator().manual_seed(seed))
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    words = packed.flatten().view(torch.int16).view(outputs, inner // 4)
    return Nf4(words, state.absmax.view(outputs, inner // 64)), dequantize_4bit(packed, state)


def given(case: Case, dtype: torch.dtype) -> Given:
    """Numbers that make sums of about 1."""
    g = torch.Generator().manual_seed(case.rows)
    x = (torch.randn(case.rows, case.inner, generator=g) / case.inner**0.5).to(dtype)
    weights = [quantized(size, case.inner, seed) for seed, size in enumerate(case.sizes)]
    low = torch.randn(len(case.sizes) * case.rank, case.inner, generator=g).to(dtype)
    lora_b = torch.randn(sum(case.sizes), case.rank, generator=g).to(dtype)
    bias = torch.randn(sum(case.sizes), generator=g).to(dtype)
    lora = (nibble_order(low), lora_b) if case.rank else (None, None)
    group = DecodeGroup(tuple(nf4 for nf4, _ in weights), *lora, bias)
    return Given(nibble_order(x), group, low, torch.cat([dense for _, dense in weights]))


def as_multiplied(group: DecodeGroup, dtype: torch.dtype) -> Tensor:
    """[N, K] in float64: values and absmax rounded to the dtype in which they are multiplied, and their product too."""
    blocks = [
        (weight.dense().unflatten(1, (-1, 64)) / weight.absmax[..., None], weight.absmax[..., None].double())
        for weight in group.weights
        if isinstance(weight, Nf4)
    ]
    return torch.cat(
        [rounded(rounded(value, dtype) * rounded(absmax, dtype), dtype).flatten(1) for value, absmax in blocks]
    )


def assert_sums(got: Parts, group: DecodeGroup, exact: Tensor, unit: float = 1e-5) -> None:
    assert got.sizes == group.sizes and got.rank == group.rank and got.bias is not None
    torch.testing.assert_close(got.sums.double().sum(0), exact, rtol=unit, atol=unit)


def test_nf4_is_what_bitsandbytes_says_it_is() -> None:
    nf4, dense = quantized(24, 192, seed=0)
    assert nf4.shape == (24, 192)
    assert torch.equal(nf4.dense(), dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_equals_float64(case: Case, dtype: torch.dtype) -> None:
    here = given(case, dtype)
    got = decode_linear(here.x, here.group)
    assert got.dtype == dtype
    assert_sums(got, here.group, here.exact(here.dense))


def test_finished_is_a_linear_layer_with_lora() -> None:
    """Everything together in natural order, so that an order that is only consistent with itself is not enough."""
    here = given(Case((40, 24), 128, 3, 5), torch.float32)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 128, generator=g)
    low = (x @ here.low.T).split(5, 1)
    lora_b, bias = here.group.lora_b, here.group.bias
    assert lora_b is not None and bias is not None
    update = torch.cat([low[0] @ lora_b[:40].T, low[1] @ lora_b[40:].T], 1)
    expected = x @ here.dense.T + bias + update
    torch.testing.assert_close(decode_linear(nibble_order(x), here.group).finished(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 100])
def test_over_dense_weights(rows: int, dtype: torch.dtype) -> None:
    here = given(Case((40, 24, 72), 192, rows, 5), dtype)
    unit = max(torch.finfo(dtype).eps * 2, 1e-5)  # weights and products are rounded to it
    assert_sums(multiply_dense(here.x, here.group), here.group, here.exact(here.dense), unit)
    in_triton = launch("decode_linear.multiply_dense", here.x, here.group)
    cut = dtype == torch.bfloat16 and not torch.cuda.is_available()  # as Triton's interpreter rounds it
    assert_sums(in_triton, here.group, here.exact(here.dense), unit * (1 + cut))


@pytest.mark.parametrize("shape", [(72, 192), (3, 64), (40, 576)], ids=str)
def test_dense_is_what_bitsandbytes_says(shape: tuple[int, int]) -> None:
    nf4, dense = quantized(*shape, seed=1)
    assert torch.equal(launch("nf4_dense_triton.dense", nf4, torch.float32), dense)
    assert torch.equal(launch("nf4_dense_triton.dense", nf4, torch.float16), dense.half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_that_is_not_quantized(dtype: torch.dtype) -> None:
    here = given(Case((40, 24), 128, 5, 5), dtype)
    plain = torch.randn(24, 128, generator=torch.Generator().manual_seed(9)).to(dtype)
    mixed = DecodeGroup((here.group.weights[0], plain), here.group.lora_a, here.group.lora_b, here.group.bias)
    exact = here.exact(torch.cat([here.dense[:40], plain.float()]))
    assert_sums(decode_linear(here.x, mixed), mixed, exact)
    assert_sums(multiply_dense(here.x, mixed), mixed, exact, max(torch.finfo(dtype).eps * 2, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_rounds_the_weights_alone(case: Case, dtype: torch.dtype) -> None:
    skip_products_in(dtype)
    here = given(case, dtype)
    got = launch("decode_linear_triton.multiply", here.x, here.group)
    assert got.dtype == dtype
    assert_sums(got, here.group, here.exact(as_multiplied(here.group, dtype)))
    assert_sums(got, here.group, here.exact(here.dense), max(torch.finfo(dtype).eps * 2, 1e-5))


@pytest.mark.parametrize("parts", [2, 3, 5, 9])
def test_kernel_in_parts_of_unequal_length(parts: int) -> None:
    fused = triton_kernel()
    here = given(Case((40, 24), 576, 8, 5), torch.float16)
    got = launch("decode_linear_triton.multiply_in_parts", here.x, here.group, parts, fused.TILES[0])
    assert len(got.sums) == parts
    assert_sums(got, here.group, here.exact(as_multiplied(here.group, torch.float16)))


def test_parts_fill_an_h200() -> None:
    """Tiles of 32 outputs with 2 warps, steps of 256 inputs, 132 multiprocessors; layers with LoRA of rank 32."""
    parts = triton_kernel().parts_of_a_product
    assert parts(2 * (6144 // 32 + 6), 4096 // 256, 132) == 4  # q, k, v of an 8B model: 3 are not enough to be equal
    assert parts(2 * (4096 // 32 + 2), 4096 // 256, 132) == 4  # o
    assert parts(2 * (28672 // 32 + 4), 4096 // 256, 132) == 1  # gate and up
    assert parts(2 * (4096 // 32 + 2), 14336 // 256, 132) == 4  # down
    assert parts(2 * (1536 // 32 + 2), 8960 // 256, 132) == 10  # down of a 1.5B model: none up to 16 is equal
    assert parts(2 * 8, 8192 // 256, 132) == 16  # no more than are added up well
    assert parts(2 * 24, 1536 // 256, 132) == 6  # each has a step
    assert parts(2, 1, 132) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiles_for_sm80_with_wide_copies(dtype: torch.dtype) -> None:
    """What the interpreter leaves out: the inline PTX and its types. No GPU is needed."""
    fused = triton_kernel()
    compiled = compiled_for_sm80(fused._multiply, fused.TILES[0], dtype)
    assert "prmt.b32 n0" in compiled.asm["ptx"]
    # Bytes at a time: 16 of words and of x, 8 of absmax.
    assert set(re.findall(r"cp\.async\.c.*, (0x\w+), %", compiled.asm["ptx"])) == {"0x10", "0x8"}


def compiled_for_sm80(kernel: Any, tile: Any, dtype: torch.dtype) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from grpo_kit.kernels.nf4_lookup import ptx

    mine = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype]
    pointers = {"x": mine, "lora_a": mine, "sums": "*fp32", "table": "*i32"}
    pointers |= {f"words{i}": "*i16" for i in range(3)} | {f"absmax{i}": "*fp32" for i in range(3)}
    constants = {"PTX": ptx(dtype), "ROWS": tile.rows, "OUTPUTS": tile.outputs, "STAGES": tile.stages}
    constants |= {"BLOCKS": tile.blocks, "SPAN": 256, "CHAINED": False}
    names = kernel.arg_names
    signature = {name: pointers.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": tile.warps})


def triton_kernel() -> Any:
    pytest.importorskip("triton")
    from grpo_kit.kernels import decode_linear_triton

    return decode_linear_triton


def test_nf4_refuses_what_does_not_fit_together() -> None:
    words, absmax = torch.zeros(8, 32, dtype=torch.int16), torch.ones(8, 2)
    with pytest.raises(ValueError, match=r"torch\.int16 \(8, 24\)"):
        Nf4(words[:, :24], absmax)
    with pytest.raises(ValueError, match=r"torch\.int32"):
        Nf4(words.int(), absmax)
    with pytest.raises(ValueError, match=r"\(8, 1\)"):
        Nf4(words, absmax[:, :1])
    with pytest.raises(ValueError, match=r"contiguous"):
        Nf4(words.T.contiguous().T, absmax)


def test_refuses_what_does_not_fit_together() -> None:
    weight = Nf4(torch.zeros(8, 32, dtype=torch.int16), torch.ones(8, 2))
    with pytest.raises(ValueError, match=r"1 to 3 weights.*\[\]"):
        DecodeGroup(())
    with pytest.raises(ValueError, match=r"1 to 3 weights"):
        DecodeGroup((weight,) * 4)
    with pytest.raises(ValueError, match=r"one K.*\(8, 128\), \(8, 64\)"):
        DecodeGroup((weight, torch.zeros(8, 64)))
    with pytest.raises(ValueError, match=r"multiple of 64.*\(8, 96\)"):
        DecodeGroup((torch.zeros(8, 96),))
    with pytest.raises(ValueError, match=r"both of lora_a and lora_b"):
        DecodeGroup((weight,), lora_a=torch.zeros(4, 128))
    with pytest.raises(ValueError, match=r"rank 4 needs lora_a \[8, 128\]; got \(4, 128\)"):
        DecodeGroup((weight, weight), torch.zeros(4, 128), torch.zeros(16, 4))
    group = DecodeGroup((weight,), torch.zeros(4, 128), torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"x \[B, 128\].*\(2, 64\)"):
        decode_linear(torch.zeros(2, 64), group)
    with pytest.raises(ValueError, match=r"contiguous"):
        decode_linear(torch.zeros(128, 2).T, group)
    with pytest.raises(ValueError, match=r"torch\.float16.*torch\.float32"):
        decode_linear(torch.zeros(2, 128, dtype=torch.float16), group)
