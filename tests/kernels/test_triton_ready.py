"""Which tensors may go to a Triton kernel, and what is said where Triton lacks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from grpo_kit.kernels import triton_ready
from grpo_kit.kernels.triton_ready import unit_stride, use_triton


@dataclass
class FakeTensor:
    dtype: torch.dtype
    is_cuda: bool = True


@pytest.fixture(autouse=True)
def looks_afresh() -> Iterator[None]:
    triton_ready._importable.cache_clear()
    yield
    triton_ready._importable.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cuda_tensors_of_the_usual_dtypes(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    assert use_triton(FakeTensor(dtype))


def test_neither_the_cpu_nor_float64() -> None:
    assert not use_triton(torch.ones(1))
    assert not use_triton(FakeTensor(torch.float64))
    assert not use_triton(FakeTensor(torch.int64))


def test_without_triton_it_warns_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.language", None)
    with pytest.warns(RuntimeWarning, match=r"triton\.language.*plain torch"):
        assert not use_triton(FakeTensor(torch.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_triton(FakeTensor(torch.float16))


def test_unit_stride_copies_only_what_it_must() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert unit_stride(x[:, 1:3]).data_ptr() == x[:, 1:3].data_ptr()
    assert unit_stride(x.T).stride(-1) == 1
    assert torch.equal(unit_stride(x.T), x.T)
