"""The 16 values of NF4, and how a GPU looks four 4-bit weights up at once: byte permutes of PTX and their tables.

`prmt` picks four of the eight bytes of two registers by four selectors of 4 bits, of which three say which byte, and
the fourth replaces it by eight copies of its top bit (PTX ISA, prmt). So a word of four weights is itself a selector:
of a table of eight bytes with the top bit clear it gives a byte for each weight below 8, and 0 for the others. The
values below 8 are negative, those from 8 on positive. Four tables hold the low and the high bytes of both halves'
magnitudes; a weight is the positive half's number minus the negative half's, of which one is meant to be 0.

The top bit of a low byte may be set. Then that 0 is 255 units of the format's last place, which is lost in the
subtraction as less than half the last place of what it is subtracted from; only of the value 0 in bfloat16 it leaves
2.3e-38. So nothing is rounded but the tables.

All that is here is text and numbers; the kernel is in decode_linear_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Dettmers et al. 2023, arXiv 2305.14314, appendix E; a block's weights are these times its largest magnitude.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

TABLES = 8  # registers


def byte_tables(dtype: torch.dtype) -> Tensor:
    """[8] int32 for a 16-bit dtype: low bytes, then high bytes of the negative values' magnitudes, two registers each;
    then the same of the positive ones."""
    bits = torch.tensor(VALUES, dtype=torch.float64).abs().to(dtype).view(torch.uint8).view(2, 8, 2)
    return bits.transpose(1, 2).contiguous().view(torch.int32).flatten()  # [half, low | high, 8 bytes]


def ptx(dtype: torch.dtype) -> str:
    """Inline PTX for two neighbouring words at a time: $4 is the words, $5, $7, … $19 are `byte_tables`, each of which
    comes twice, and $0..$3 become the first to the fourth weights of both words, a pair of 16-bit numbers each.

    A word's first byte holds its weights 1 (low bits) and 0, the second 3 and 2.
    """
    table = [f"${5 + 2 * i}" for i in range(TABLES)]
    lines = [
        ".reg .b32 s, x, lo, hi, n0, n1, p0, p1, m;",
        "mov.b32 m, 0xbf80bf80;",  # -1 twice, in bfloat16
        "prmt.b32 s, $4, 0, 0x3120;",  # the first bytes of both words, then the second ones
        "xor.b32 x, s, 0x88888888;",
    ]
    for low, high in (("$1", "$0"), ("$3", "$2")):
        lines += [
            f"prmt.b32 n0, {table[0]}, {table[1]}, s;",
            f"prmt.b32 n1, {table[2]}, {table[3]}, s;",
            f"prmt.b32 p0, {table[4]}, {table[5]}, x;",
            f"prmt.b32 p1, {table[6]}, {table[7]}, x;",
        ]
        for weights, selector in ((low, "0x6240"), (high, "0x7351")):
            lines += [
                f"prmt.b32 lo, n0, n1, {selector};",
                f"prmt.b32 hi, p0, p1, {selector};",
                f"{_DIFFERENCE[dtype].format(weights)};",
            ]
        lines += ["shr.u32 s, s, 16;", "shr.u32 x, x, 16;"]
    return "\n".join(["{", *lines, "}"])


# hi - lo. A subtraction of bfloat16 needs sm90; fma has it from sm80 on, and fp16 is subtracted from sm53 on.
_DIFFERENCE = {torch.float16: "sub.rn.f16x2 {}, hi, lo", torch.bfloat16: "fma.rn.bf16x2 {}, lo, m, hi"}
