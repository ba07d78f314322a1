"""The inline PTX of the NF4 kernel, run line by line on Python's integers, for every byte at every place."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from bitsandbytes.functional import get_4bit_type

from grpo_kit.kernels.nf4_lookup import VALUES, byte_tables, ptx

KINDS = [torch.float16, torch.bfloat16]


def permute(a: int, b: int, selector: int) -> int:
    """prmt.b32, as the PTX ISA has it: of the bytes of b:a, one for each 4 bits of the selector's lower half."""
    table = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    picked = []
    for place in range(4):
        choice = selector >> 4 * place & 15
        byte = table[choice & 7]
        picked.append((255 if byte & 128 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(picked), "little")


def pair(register: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([register], dtype=torch.int64).to(torch.uint32).view(dtype).double()


def by_halves(formula: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[..., int]:
    def computed(*registers: int) -> int:
        exact = formula(*(pair(register, dtype) for register in registers))
        return int(exact.to(dtype).view(torch.uint32))

    return computed


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permute,
    "sub.rn.f16x2": by_halves(lambda a, b: a - b, torch.float16),
    "fma.rn.bf16x2": by_halves(lambda a, b, c: a * b + c, torch.bfloat16),
}


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """The registers at the end."""
    registers = dict(inputs)
    for line in text.strip("{}").split(";"):
        if match := re.fullmatch(r"\s*([a-z][\w.]+) (.+)", line):
            target, *operands = match[2].split(", ")
            values = [registers[name] if name in registers else int(name, 0) for name in operands]
            registers[target] = INSTRUCTIONS[match[1]](*values)
    return registers


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_byte_gives_the_rounded_values_in_the_order_of_the_words(dtype: torch.dtype) -> None:
    tables = [table & 0xFFFFFFFF for table in byte_tables(dtype).tolist()]
    inputs = {f"${5 + 2 * i}": table for i, table in enumerate(tables)}
    for byte in range(256):
        words = [byte, (byte + 37) % 256, 255 - byte, byte ^ 0x5A]  # the first word's two bytes, then the second's
        after = run(ptx(dtype), {**inputs, "$4": int.from_bytes(bytes(words), "little")})
        got = torch.stack([pair(after[f"${i}"], dtype) for i in range(4)], 1)  # [word, weight]
        nibbles = [nibble for packed in words for nibble in (packed >> 4, packed & 15)]
        expected = torch.tensor(VALUES)[nibbles].to(dtype).double().view(2, 4)
        # Exact; but in bfloat16 the 0 is 2.3e-38, see nf4_lookup.
        torch.testing.assert_close(got, expected, rtol=0, atol=0 if dtype == torch.float16 else 2.4e-38)


def test_only_the_tables_are_inputs() -> None:
    for dtype in KINDS:
        assert set(re.findall(r"\$\d+", ptx(dtype))) == {f"${i}" for i in (*range(5), *range(5, 20, 2))}


def test_values_are_bitsandbytes_own() -> None:
    assert torch.equal(torch.tensor(VALUES), get_4bit_type("nf4", device="cpu"))
