"""The number format follows the hardware's units, or the user."""

from __future__ import annotations

import pytest
import torch

from grpo_kit.model import choose_precision, dtype_for_capability


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((6, 0), torch.float16),
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),  # a T4, where torch says that bf16 is supported
        ((8, 0), torch.bfloat16),
        ((8, 9), torch.bfloat16),
        ((9, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_compute_capability_decides(capability: tuple[int, int], dtype: torch.dtype) -> None:
    found, reason = dtype_for_capability(*capability)
    assert found == dtype
    assert f"{capability[0]}.{capability[1]}" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_a_cpu_computes_in_float32_unless_asked_otherwise() -> None:
    assert choose_precision().dtype == torch.float32 and choose_precision().device.type == "cpu"
    assert choose_precision("bfloat16").dtype == torch.bfloat16
    assert choose_precision("bfloat16").reason == "asked for"


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of float32, float16, bfloat16.*'fp8'"):
        choose_precision("fp8")
