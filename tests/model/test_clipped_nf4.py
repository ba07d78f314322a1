"""NF4 clipped for what a layer reads: against a slow search by hand, and in the format of bitsandbytes."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch

from grpo_kit.model.clipped_nf4 import SHARES, clipped, nf4_values

# Dettmers et al. 2023 (arXiv 2305.14314), appendix E
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def by_hand(weight: np.ndarray, energy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stored values and each block's scale, one block and one share after the other, in float64."""
    flat, cost = weight.flatten(), np.tile(energy, weight.shape[0])
    values, scales = [], []
    for start in range(0, flat.size, 64):
        block, weigh = flat[start : start + 64], cost[start : start + 64]
        found = []
        for share in SHARES:
            scale = share * np.abs(block).max()
            rounded = scale * NF4[np.abs(block[:, None] / scale - NF4).argmin(1)]
            found.append(((weigh * (rounded - block) ** 2).sum(), scale, rounded))
        _, scale, rounded = min(found, key=lambda one: one[0])
        values.append(rounded)
        scales.append(scale)
    return np.concatenate(values).reshape(weight.shape), np.array(scales)


@pytest.mark.parametrize("shape", [(6, 128), (8, 96), (5, 30)], ids=["whole blocks", "across rows", "a last short one"])
def test_each_block_is_clipped_where_its_inputs_see_the_least_error(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    energy = torch.randn(shape[1], generator=generator).mul(2).exp()  # a few inputs are far larger than the others
    values, scales = by_hand(weight.double().numpy(), energy.double().numpy())
    packed, state = bnb.quantize_4bit(clipped(weight, energy), blocksize=64, quant_type="nf4")
    np.testing.assert_allclose(state.absmax.numpy(), scales, rtol=1e-6)
    np.testing.assert_allclose(bnb.dequantize_4bit(packed, state).numpy(), values, atol=1e-6)
    assert len(set((scales / np.abs(weight.numpy()).max()).round(3))) > 1


def test_the_error_that_large_inputs_see_falls() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, inputs = torch.randn(64, 256, generator=generator), torch.randn(500, 256, generator=generator)
    inputs[:, :4] *= 30
    energy = inputs.square().sum(0)

    def error(stored: torch.Tensor) -> float:
        return float((inputs.double() @ (stored - weight).double().T).square().sum())

    assert error(nf4_values(clipped(weight, energy))) < 0.6 * error(nf4_values(weight))


def test_what_is_stored_stays_when_it_is_stored_again() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, energy = torch.randn(16, 128, generator=generator), torch.rand(128, generator=generator)
    once = nf4_values(clipped(weight, energy))
    torch.testing.assert_close(nf4_values(once), once, rtol=0, atol=0)


def test_a_block_of_zeros_and_inputs_that_never_come() -> None:
    weight = torch.zeros(2, 64)
    assert torch.equal(nf4_values(clipped(weight, torch.ones(64))), weight)
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(clipped(weight, torch.zeros(64)), weight)
