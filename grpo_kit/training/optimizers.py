"""The optimizers by transformers' names, and their state as plain tensors and numbers that safetensors and JSON hold.

All are AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). The 8-bit ones keep its two moments in bytes (Dettmers et
al. 2022, arXiv 2110.02861), the paged ones in memory that the GPU may move to the host.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# transformers' name → the class in bitsandbytes.optim; None is torch's own AdamW.
OPTIMIZERS: dict[str, str | None] = {
    "adamw_torch": None,
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
}


def check_optimizer(name: str, on_gpu: bool) -> None:
    """Raises ValueError if there is no such optimizer, or if it can't do on this hardware what it is for.

    On a CPU bitsandbytes' 8-bit AdamW works, and its paged ones would keep their state in ordinary memory.
    """
    if name not in OPTIMIZERS:
        close = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown optim {name!r}; there are {', '.join(OPTIMIZERS)}{hint}")
    if name.startswith("paged_") and not on_gpu:
        instead = "adamw_8bit" if name.endswith("8bit") else "adamw_torch"
        raise ValueError(
            f"the optimizer {name!r} needs an NVIDIA GPU: its state is in CUDA unified memory, which moves between the "
            f"GPU and the host; on a CPU use {instead!r}"
        )


def make_optimizer(
    name: str, parameters: Mapping[str, Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer over all parameters as one group. `check_optimizer` says beforehand whether it can work."""
    kind = OPTIMIZERS[name]
    if kind is None:
        return torch.optim.AdamW(parameters.values(), lr=learning_rate, weight_decay=weight_decay)
    import bitsandbytes

    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(
        parameters.values(), lr=learning_rate, weight_decay=weight_decay
    )
    return optimizer


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `restore_optimizer` needs: tensors named `parameter|key`, and the rest ready for JSON.

    The tensors are copies on the CPU, contiguous and each with memory of its own, as safetensors asks. The rest is the
    optimizer's class, its learning rate, and under "values" whatever it keeps of a parameter that is no tensor.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                # bitsandbytes shares its code table between all parameters, hence a copy even on the CPU
                tensors[f"{name}|{key}"] = value.detach().to("cpu", copy=True).contiguous()
            else:
                values[f"{name}|{key}"] = value
    numbers = {
        "optimizer": type(optimizer).__name__,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "values": values,
    }
    return tensors, numbers


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Parameter],
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
) -> None:
    """Put back what `optimizer_state` gave: the next step is then the one that would have followed. `tensors` stay as
    they are. Weight decay and the like remain the optimizer's own.

    `numbers` that hold nothing but the learning rate are of a checkpoint from before there was a choice: torch's AdamW.
    The optimizer's own `load_state_dict` decides where each tensor goes (torch's `step` stays on the CPU; the state of
    bitsandbytes' paged ones comes back as ordinary GPU memory). Raises ValueError if the state is of another optimizer
    or of other parameters.
    """
    saved, mine = numbers.get("optimizer", "AdamW"), type(optimizer).__name__
    if saved != mine:
        raise ValueError(
            f"the checkpoint's optimizer is {saved} and the run's is {mine}: choose the one it was made with"
        )
    state: dict[int, dict[str, Any]] = {}
    position = {name: index for index, name in enumerate(parameters)}
    copies = {joined: tensor.clone() for joined, tensor in tensors.items()}
    for joined, value in {**copies, **numbers.get("values", {})}.items():
        name, key = joined.rsplit("|", 1)
        if name not in position:
            raise ValueError(f"the checkpoint's optimizer has state of {name}, which is not trained in this run")
        state.setdefault(position[name], {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    groups[0]["lr"] = numbers["learning_rate"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
