"""`decode_attention` against torch's attention in float64, a row at a time; its Triton kernels in both launches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_kit.kernels.decode_attention import decode_attention
from grpo_kit.kernels.int8_tokens import Int8Tokens, hadamard_matrix
from tests.kernels.launching import launch, skip_products_in, where_kernels_run
from tests.kernels.unfinished import nibbles_by_hand

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# heads, kv_heads, D: groups of 1, 4, 7 and 16; D that fill a power of two and that don't.
SHAPES = [(4, 4, 80), (8, 2, 64), (7, 1, 128), (2, 2, 96), (16, 1, 64), (4, 2, 256)]
LENGTH = 150  # fills no tile
POSITIONS = [0, 149, 31, 64]
SCALE = 0.2
# (window, softcap): a window that one row fills to the last column and one exceeds, one of less than a tile, a cap that
# bends most scores, and both.
SIGHTS = [(32, None), (5, None), (None, 3.0), (100, 3.0)]


def inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, positions: list[int] = POSITIONS, window: int | None = None
) -> list[Tensor]:
    """[q, keys, values, positions]; a slot and columns more than needed, and NaN wherever no row sees anything."""
    heads, kv_heads, width = shape
    g = torch.Generator().manual_seed(heads)
    q = torch.randn(len(positions), heads, width, generator=g)
    caches = 2 * torch.randn(2, len(positions) + 1, kv_heads, LENGTH + 8, width, generator=g)
    for slot, position in enumerate(positions):
        caches[:, slot, :, position + 1 :] = math.nan
        if window is not None:
            caches[:, slot, :, : max(position + 1 - window, 0)] = math.nan
    caches[:, -1] = math.nan
    return [q.to(dtype), *caches.to(dtype), torch.tensor(positions)]


def in_8_bits(given: list[Tensor]) -> list[Any]:
    """The same with keys and values in 8 bits; scales are NaN where no row sees anything."""
    q, keys, values, positions = given
    hadamard = hadamard_matrix(q.shape[2], q.dtype, q.device)
    held = [Int8Tokens.zeros(tuple(keys.shape), matrix, q.device) for matrix in (hadamard, None)]
    for own, new in zip(held, (keys, values), strict=True):
        own[:] = new.nan_to_num()
        own.scales.masked_fill_(new[..., 0].isnan(), math.nan)
    return [q, *held, positions]


def as_stored(given: list[Any]) -> list[Tensor]:
    """What 8-bit keys and values stand for, exactly."""
    q, keys, values, positions = given
    return [q, keys.stored(torch.float64), values.stored(torch.float64), positions]


def reference(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """[B, heads·D] in float64 and nibble order."""
    rows = []
    for b, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(position + 1 - window, 0)
        k, v = (x[b, :, first : position + 1].double() for x in (keys, values))
        rows.append(attention(q[b, :, None].double(), k, v, softcap).flatten())
    return nibbles_by_hand(torch.stack(rows))


def attention(q: Tensor, keys: Tensor, values: Tensor, softcap: float | None) -> Tensor:
    """[heads, 1, D] of q [heads, 1, D], keys and values [kv_heads, T, D]; torch's own unless there is a softcap."""
    if softcap is None:
        return scaled_dot_product_attention(q, keys, values, scale=SCALE, enable_gqa=True)
    keys, values = (x.repeat_interleave(len(q) // len(x), 0) for x in (keys, values))
    bent = softcap * torch.tanh(torch.einsum("hqd,htd->hqt", q, keys) * SCALE / softcap)
    return torch.einsum("hqt,htd->hqd", bent.softmax(-1), values)


def assert_accurate(got: Tensor, given: list[Tensor], window: int | None = None, softcap: float | None = None) -> None:
    """Rounded are the weights, whose errors the values multiply, and the result. Triton's interpreter cuts bfloat16
    numbers off, so both errors may be a whole unit in the last place and not half of one."""
    q, keys, values, positions = given
    unit = max(torch.finfo(q.dtype).eps, 1e-5)
    expected = reference(*given, window, softcap)
    size = reference(q, keys, values.abs(), positions, window, softcap)
    assert got.dtype == q.dtype and got.shape == expected.shape
    assert ((got.double() - expected).abs() <= unit * (expected.abs() + size)).all()


def in_parts(given: list[Tensor], parts: int, group: int = 16, *sight: float | None) -> Any:
    return launch("decode_attention_triton.attend_in_parts", *given, SCALE, parts, group, *sight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twin_equals_torch_in_float64(shape: tuple[int, int, int]) -> None:
    given = inputs(shape, torch.float64)
    torch.testing.assert_close(decode_attention(*given, SCALE, LENGTH), reference(*given))


@pytest.mark.parametrize(("window", "softcap"), SIGHTS)
def test_twin_sees_and_bends_as_it_is_told(window: int | None, softcap: float | None) -> None:
    given = inputs((8, 2, 64), torch.float64, window=window)
    got = decode_attention(*given, SCALE, LENGTH, window, softcap)
    torch.testing.assert_close(got, reference(*given, window, softcap))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twin_rounds_once(dtype: torch.dtype) -> None:
    given = inputs((8, 2, 64), dtype)
    got = decode_attention(*given, SCALE, LENGTH)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), reference(*given), rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_of_every_shape(shape: tuple[int, int, int], parts: int) -> None:
    given = inputs(shape, torch.float16)
    assert_accurate(in_parts(given, parts), given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_kernels_of_every_dtype(parts: int, dtype: torch.dtype) -> None:
    skip_products_in(dtype)
    given = inputs((7, 1, 128), dtype)
    assert_accurate(in_parts(given, parts), given)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("window", "softcap"), SIGHTS)
def test_kernels_see_and_bend_as_they_are_told(window: int | None, softcap: float | None, parts: int) -> None:
    given = inputs((8, 2, 64), torch.float32, window=window)
    assert_accurate(in_parts(given, parts, 16, window, softcap), given, window, softcap)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_reads_8_bits(shape: tuple[int, int, int]) -> None:
    given = in_8_bits(inputs(shape, torch.float32))
    got = decode_attention(*given, SCALE, LENGTH)
    torch.testing.assert_close(got.double(), reference(*as_stored(given)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_read_8_bits_of_every_shape(shape: tuple[int, int, int], parts: int) -> None:
    given = in_8_bits(inputs(shape, torch.float16))
    assert_accurate(in_parts(given, parts), as_stored(given))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), *SIGHTS])
def test_kernels_read_8_bits_as_they_are_told(window: int | None, softcap: float | None, parts: int) -> None:
    given = in_8_bits(inputs((8, 2, 64), torch.float32, window=window))
    assert_accurate(in_parts(given, parts, 16, window, softcap), as_stored(given), window, softcap)


def test_small_values_in_8_bits_do_not_vanish() -> None:
    """A weight times a scale of 1e-7 is below what float16 holds; the largest of such products is taken for 1."""
    q, keys, values, positions = inputs((8, 2, 64), torch.float16)
    given = in_8_bits([q, keys, values.float() * 1e-5, positions])
    got = in_parts(given, 1)
    expected = reference(*as_stored(given))
    assert (got.double() - expected).norm() <= 0.01 * expected.norm()


def test_more_parts_than_most_rows_can_fill() -> None:
    given = inputs((8, 2, 64), torch.float32)
    assert_accurate(in_parts(given, 9), given)


def test_kernels_without_padding_to_tensor_cores() -> None:
    given = inputs((6, 2, 64), torch.float16)
    for parts in (1, 3):
        assert_accurate(in_parts(given, parts, group=4), given)


def test_large_scores_do_not_overflow() -> None:
    q, *caches = inputs((8, 2, 64), torch.float16)
    given = [q * 1000, *caches]
    for parts in (1, 3):
        assert_accurate(in_parts(given, parts), given)
        assert_accurate(in_parts(given, parts, 16, None, 30.0), given, None, 30.0)


def test_choice_of_kernels() -> None:
    given = inputs((8, 2, 64), torch.float32)
    assert_accurate(where_kernels_run(decode_attention, *given, SCALE, LENGTH), given)
    assert_accurate(where_kernels_run(decode_attention, *given, SCALE, LENGTH, 32, 3.0), given, 32, 3.0)


def test_kernels_take_any_strides() -> None:
    """q a part of a wider row, keys with heads beside columns, values with slots inside columns, every second one."""
    q, keys, values, positions = given = inputs((8, 2, 64), torch.float32)
    q = torch.cat([torch.full_like(q, math.nan), q], -1)[..., 64:]
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    values = values.permute(2, 0, 1, 3).repeat_interleave(2, 0)[::2].permute(1, 2, 0, 3)
    positions = positions.repeat_interleave(2)[::2]
    for parts in (1, 3):
        assert_accurate(in_parts([q, keys, values, positions], parts), given)


@pytest.mark.parametrize(
    ("rows", "length", "parts"),
    [
        (8, 768, 8),  # 64 × 8 programs on 132 multiprocessors, each over 96 columns
        (1, 768, 12),  # no part is shorter than 64 columns
        (64, 768, 1),
        (256, 768, 1),
        (256, 4096, 4),  # no part is longer than 1,024, so that a row longer than the others ends in time
        (1, 65536, 64),
        (1, 1, 1),
    ],
)
def test_parts_fill_the_gpu(rows: int, length: int, parts: int) -> None:
    assert launch("decode_attention_triton.parts_of_a_row", rows * 8, length, 132) == parts


def test_a_window_far_out_in_more_parts_than_it_fills() -> None:
    """128 of 4,001 columns: parts are cut from these, of 32 columns each; the last five of nine are empty."""
    far, g = 4000, torch.Generator().manual_seed(0)
    keys, values = torch.full((2, 1, 2, far + 1, 64), math.nan)
    for cache in (keys, values):
        cache[:, :, -128:] = torch.randn(1, 2, 128, 64, generator=g)
    given = [torch.randn(1, 2, 64, generator=g), keys, values, torch.tensor([far])]
    assert_accurate(where_kernels_run(decode_attention, *given, SCALE, far + 1, 128), given, 128)
    assert_accurate(in_parts(given, 9, 16, 128), given, 128)


def test_refuses_what_it_cannot_do() -> None:
    q, keys, values, positions = inputs((8, 2, 64), torch.float32)
    with pytest.raises(ValueError, match="heads a multiple of kv_heads"):
        decode_attention(q[:, :7], keys, values, positions, SCALE, LENGTH)
    with pytest.raises(ValueError, match="S ≥ B"):
        decode_attention(q, keys[:3], values[:3], positions, SCALE, LENGTH)
    with pytest.raises(ValueError, match=r"length of 1\.\.L"):
        decode_attention(q, keys, values, positions, SCALE, LENGTH + 9)
    with pytest.raises(ValueError, match="one dtype"):
        decode_attention(q, keys.half(), values.half(), positions, SCALE, LENGTH)
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        decode_attention(q, keys.mT.contiguous().mT, values, positions, SCALE, LENGTH)
    held = in_8_bits([q, keys, values, positions])
    with pytest.raises(ValueError, match="both keys and values in 8 bits, and contiguous, or neither"):
        decode_attention(q, held[1], values, positions, SCALE, LENGTH)
    with pytest.raises(ValueError, match="both keys and values in 8 bits, and contiguous, or neither"):
        decode_attention(q, held[1][:, :, 1:], held[2][:, :, 1:], positions, SCALE, LENGTH)
    with pytest.raises(ValueError, match="at most 16"):
        decode_attention(q.repeat(1, 3, 1), keys[:, :1], values[:, :1], positions, SCALE, LENGTH)
    with pytest.raises(ValueError, match="multiple of 64"):
        decode_attention(q[..., :36], keys[..., :36], values[..., :36], positions, SCALE, LENGTH)
    for wrong in [(0, None), (None, 0.0)]:
        with pytest.raises(ValueError, match="window and a softcap above 0"):
            decode_attention(q, keys, values, positions, SCALE, LENGTH, *wrong)
