"""Groups of frozen linear layers with LoRA against the formula in float64, by torch's own autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.kernels import Frozen, Group
from grpo_kit.kernels.lora_linear import project

ROWS, IN, OUTS, RANK, SCALING = 9, 7, (5, 3), 2, 1.5


def tensors(seed: int = 0) -> dict[str, list[Tensor]]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "weights": [draw(n, IN) for n in OUTS],
        "biases": [draw(OUTS[0])],
        "lora": [draw(*shape) for n in OUTS for shape in ((RANK, IN), (n, RANK))],
        "x": [draw(ROWS, IN)],
        "grads": [draw(ROWS, n) for n in OUTS],
    }


def group(made: dict[str, list[Tensor]], dtype: torch.dtype, lora: tuple[Tensor, ...]) -> Group:
    """The first layer has a bias, the second none."""
    biases: list[Tensor | None] = [made["biases"][0].to(dtype), None]
    return Group(
        tuple(
            Frozen((lambda w=weight: w.to(dtype)), bias, SCALING)  # type: ignore[misc]
            for weight, bias in zip(made["weights"], biases, strict=True)
        ),
        lora,
    )


def expected(made: dict[str, list[Tensor]], adapter: bool) -> tuple[list[Tensor], list[Tensor]]:
    x, *lora = (t.clone().requires_grad_() for t in (*made["x"], *made["lora"]))
    outs = [x @ weight.T for weight in made["weights"]]
    outs[0] = outs[0] + made["biases"][0]
    if adapter:
        outs = [out + SCALING * (x @ a.T) @ b.T for out, a, b in zip(outs, lora[0::2], lora[1::2], strict=True)]
    wanted = [x, *lora] if adapter else [x]
    return outs, list(torch.autograd.grad(outs, wanted, made["grads"]))


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_values_and_gradients(dtype: torch.dtype, close: float, adapter: bool) -> None:
    made = tensors()
    x = made["x"][0].to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)  # LoRA's weights are float32 whatever the rest is
    lora = tuple(t.to(wide).requires_grad_() for t in made["lora"]) if adapter else ()
    outs = project(x, group(made, dtype, lora))
    grads = torch.autograd.grad(outs, [x, *lora], [g.to(dtype) for g in made["grads"]])
    outs_expected, grads_expected = expected(made, adapter)
    for mine, theirs in zip([*outs, *grads], [*outs_expected, *grads_expected], strict=True):
        assert (mine.double() - theirs).norm() <= close * theirs.norm()
    assert all(grad.dtype == wide for grad in grads[1:])


def test_gradients_of_lora_alone_where_the_input_needs_none() -> None:
    made = tensors()
    lora = tuple(t.clone().requires_grad_() for t in made["lora"])
    outs = project(made["x"][0], group(made, torch.float64, lora))
    grads = torch.autograd.grad(outs, lora, made["grads"])
    for mine, theirs in zip(grads, expected(made, True)[1][1:], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_held_group_asks_for_its_weights_once() -> None:
    asked: list[Any] = []

    def dense() -> Tensor:
        asked.append(1)
        return torch.eye(IN, dtype=torch.float64)

    held = Group((Frozen(dense, None, 1.0),), ()).held()
    x = tensors()["x"][0]
    assert project(x, held)[0].equal(x) and project(x, held)[0].equal(x)
    assert len(asked) == 1
