"""When two results of one formula count as equal, each computed in float32 and rounded at the same places."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_rounding(got: Tensor, expected: Tensor) -> None:
    """float32: equal to 1e-5. 16 bit: none further than two units in the last place, and 99 of 100 the same.

    A difference in the last bit of a float32 changes a rounding to 16 bits about once in 10,000 numbers; a rounding
    left out or added changes a quarter of them.
    """
    assert_within_two_units(got, expected)
    if got.dtype != torch.float32:
        assert (got != expected).float().sum() <= 0.01 * got.numel()


def assert_kernel_equals_twin(got: Tensor, expected: Tensor) -> None:
    """The same; but Triton's interpreter cuts bfloat16 numbers off instead of rounding them."""
    if got.dtype == torch.bfloat16 and not torch.cuda.is_available():
        assert_within_two_units(got, expected)
    else:
        assert_same_rounding(got, expected)


def assert_within_two_units(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    else:
        limits = torch.finfo(got.dtype)
        torch.testing.assert_close(got, expected, rtol=2 * limits.eps, atol=2 * limits.smallest_normal * limits.eps)
