"""One decoder layer as a recomputed unit, against the same formula written plainly in float64. That it is the layer of
real models is held in tests/model/test_trunk.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from grpo_kit.kernels import (
    DecoderLayer,
    Frozen,
    Group,
    Offload,
    Surroundings,
    attention_memory,
    choose_attention,
    decoder_layer,
    pack,
)
from tests.kernels.test_offload import DiaryLane

H, INNER, HEADS, KV, D, RANK, EPS = 12, 20, 3, 1, 4, 2, 1e-5
SEQUENCES = [([1, 2, 3], [4, 5, 6, 7]), ([1, 2, 3], [8]), ([9], [7, 6, 5])]


def draw(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64) * 0.5


def make_layer(seed: int = 0, head_norms: bool = False) -> DecoderLayer:
    g = torch.Generator().manual_seed(seed)

    def group(inputs: int, *outs: int) -> Group:
        weights = [draw(g, n, inputs) for n in outs]
        lora = [draw(g, *shape).requires_grad_() for n in outs for shape in ((RANK, inputs), (n, RANK))]
        return Group(tuple(Frozen((lambda w=w: w), None, 2.0) for w in weights), tuple(lora))  # type: ignore[misc]

    return DecoderLayer(
        attention_norm=draw(g, H),
        mlp_norm=draw(g, H),
        query_norm=draw(g, D) if head_norms else None,
        key_norm=draw(g, D) if head_norms else None,
        qkv=group(H, HEADS * D, KV * D, KV * D),
        out=group(HEADS * D, H),
        gate_up=group(H, INNER, INNER),
        down=group(INNER, H),
        head_dim=D,
        scale=0.4,
        eps=EPS,
    )


def nothing() -> None:
    pass


def surroundings(check: Callable[[], None] = nothing) -> Surroundings:
    packed = pack(SEQUENCES)
    angles = packed.positions[:, None].double() * torch.tensor([1.0, 0.1], dtype=torch.float64)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return Surroundings(packed, cos, sin, choose_attention(None, torch.float64), check)


def plainly(x: Tensor, layer: DecoderLayer, around: Surroundings) -> Tensor:
    """The same with torch's operations, sequence by sequence; of a shared token the first sequence's result counts."""

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y * (y.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight

    def linear(y: Tensor, group: Group, i: int) -> Tensor:
        out = y @ group.layers[i].dense().T
        return out + 2.0 * (y @ group.lora[2 * i].T) @ group.lora[2 * i + 1].T if group.lora else out

    def turned(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    result = torch.zeros_like(x)
    packed = around.packed
    for row, mask in zip(packed.rows.flip(0), packed.mask.flip(0), strict=True):
        tokens = row[mask.bool()]
        y, cos, sin = x[tokens], around.cos[tokens], around.sin[tokens]
        h = norm(y, layer.attention_norm)
        q, k, v = (linear(h, layer.qkv, i).unflatten(-1, (-1, D)) for i in range(3))
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = norm(q, layer.query_norm), norm(k, layer.key_norm)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = k.repeat_interleave(HEADS, 1), v.repeat_interleave(HEADS, 1)
        o = scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, scale=0.4)
        y = y + linear(o.transpose(0, 1).flatten(1), layer.out, 0)
        h = norm(y, layer.mlp_norm)
        y = y + linear(silu(linear(h, layer.gate_up, 0)) * linear(h, layer.gate_up, 1), layer.down, 0)
        result = result.index_put((tokens,), y)
    return result


def gradients(function: Callable[[Tensor], Tensor], layer: DecoderLayer) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    x = draw(g, 12, H).requires_grad_()
    y = function(x)
    lora = [weight for group in layer.groups for weight in group.lora]
    return [y.detach(), *torch.autograd.grad(y, [x, *lora], draw(g, 12, H))]


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_memory, "SMALL", 0)


@pytest.mark.parametrize("tile", [1, 5, 4096])
@pytest.mark.parametrize("offloaded", ["", "x", "x and attention"])
@pytest.mark.parametrize("head_norms", [False, True])
def test_values_and_gradients(head_norms: bool, offloaded: str, tile: int) -> None:
    layer, around = (
        make_layer(head_norms=head_norms),
        replace(surroundings(), tile=tile, remember="attention" in offloaded),
    )
    with Offload(DiaryLane(), 2**30) as offload:
        ours = gradients(lambda x: decoder_layer(x, layer, around, offload if offloaded else None), layer)
        assert (offload.used > 0) is bool(offloaded)
    for mine, theirs in zip(ours, gradients(lambda x: plainly(x, layer, around), layer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_the_input_is_all_that_is_kept() -> None:
    kept: list[Tensor] = []
    x = torch.randn(12, H, dtype=torch.float64, requires_grad=True)

    def pack_hook(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        decoder_layer(x, make_layer(), surroundings(), None)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def test_without_the_adapter_the_frozen_weights_alone() -> None:
    layer, around = make_layer(), surroundings()
    off = replace(
        layer,
        **{name: replace(getattr(layer, name), lora=()) for name in ("qkv", "out", "gate_up", "down")},
    )
    x = draw(torch.Generator().manual_seed(1), 12, H)
    torch.testing.assert_close(decoder_layer(x, off, around, None), plainly(x, off, around), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_pass_may_be_ended_in_either_direction(calls: int) -> None:
    """The second call is that of backward."""
    count = 0

    def check() -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise InterruptedError

    x = torch.zeros(12, H, dtype=torch.float64, requires_grad=True)
    with pytest.raises(InterruptedError):
        decoder_layer(x, make_layer(), surroundings(check), None).sum().backward()
    assert count == calls
