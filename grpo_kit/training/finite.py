"""Where a number that is none came from: the first tensor, or the first module of a pass, with NaN or infinity in it.

For a run that has met one already: every look copies a count from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def first_bad(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Words about the first tensor that holds NaN or infinity, such as "grad of lora_B: 12 of 4,096 values are NaN or
    infinite"; None if there is none. Tensors of whole numbers, as quantized weights are, hold neither."""
    for name, tensor in named:
        bad = _count_bad(tensor)
        if bad:
            return f"{name}: {_words(bad, tensor)}"
    return None


def first_bad_output(module: torch.nn.Module, call: Callable[[], Any]) -> str | None:
    """Run `call()`, and say which submodule of `module` was the first to put out NaN or infinity; None if none did.

    First is the one that finished first, an innermost module before those around it: a module with submodules is named
    only if its own arithmetic is to blame. The words say whether its inputs were finite, how large they were, and
    whether a parameter in it is not finite. What `call` raises is passed on. The hooks are gone afterwards in any case;
    the caller sees to it that nobody else uses the module meanwhile.
    """
    found: list[str] = []

    def look(name: str, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if found:
            return
        bad = next((tensor for tensor in _tensors(output) if _count_bad(tensor)), None)
        if bad is not None:
            found.append(_story(name, layer, [args, kwargs], bad))

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, kwargs, output: look(name, layer, args, kwargs, output)

    handles = [
        submodule.register_forward_hook(hook(name), with_kwargs=True) for name, submodule in module.named_modules()
    ]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _story(name: str, layer: torch.nn.Module, inputs: Any, output: Tensor) -> str:
    where = f"{name} ({type(layer).__name__})" if name else f"the whole model ({type(layer).__name__})"
    limit = f", whose largest is {torch.finfo(output.dtype).max:,.0f}" if output.dtype == torch.float16 else ""
    kind = f"{str(output.dtype).removeprefix('torch.')}{limit}"
    parts = [f"output of {where}: {_words(_count_bad(output), output)}, in {kind}", _about_inputs(inputs)]
    weight = first_bad(layer.named_parameters())
    if weight is not None:
        parts.append(f"its own weight is not finite: {weight}")
    return "; ".join(parts)


def _about_inputs(inputs: Any) -> str:
    tensors = [tensor.detach() for tensor in _tensors(inputs)]
    if not tensors:
        return "it has no inputs that could be so"
    state = "not finite already" if any(_count_bad(tensor) for tensor in tensors) else "finite"
    sizes = [float(finite.float().abs().max()) for tensor in tensors if (finite := tensor[_finite(tensor)]).numel()]
    return f"its inputs were {state}" + (f", the largest finite value {max(sizes):,.6g}" if sizes else "")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in a module's inputs or output. Attention masks are not looked at: their infinities
    are meant."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if "mask" not in str(key):
                yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _count_bad(tensor: Tensor) -> int:
    if not tensor.is_floating_point():
        return 0
    return int((~_finite(tensor)).sum())


def _finite(tensor: Tensor) -> Tensor:
    """Where it is; torch can't tell of 8-bit floats."""
    values = tensor.detach()
    return (values.float() if values.element_size() == 1 else values).isfinite()


def _words(bad: int, tensor: Tensor) -> str:
    return f"{bad:,} of {tensor.numel():,} values {'is' if bad == 1 else 'are'} NaN or infinite"
