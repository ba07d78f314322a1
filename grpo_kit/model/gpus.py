"""GPUs by name, with the memory that torch finds on them: a plan can be made for a card that is not at hand."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

GIB = 2**30

# GiB that torch reports in total, which is less than the name promises (ECC and the driver take their part) and differs
# a little by driver: the smallest of what its out-of-memory messages say.
GPUS: dict[str, float] = {
    "T4": 14.56,
    "P100": 15.89,
    "V100 16GB": 15.77,
    "V100 32GB": 31.73,
    "L4": 22.03,
    "A10G": 22.05,
    "RTX 3090": 23.56,
    "RTX 4090": 23.52,
    "A100 40GB": 39.38,
    "A100 80GB": 79.14,
    "H100": 79.10,
    "H200": 139.72,
}
_SMALLER = {"a100": "A100 40GB", "v100": "V100 16GB"}  # a name that two cards have


@dataclass(frozen=True)
class Gpu:
    """total: bytes, as `torch.cuda.get_device_properties` reports them. at_hand: it is this machine's."""

    name: str
    total: int
    at_hand: bool = False


def find_gpu(gpu: str | float | None) -> Gpu:
    """A card by its name ("T4", "A100 80GB", "rtx-4090"; "A100" is the smaller one), by its gigabytes (10⁹ bytes), or
    the one at hand for None. Raises ValueError for anything else, and for None on a machine without a GPU."""
    if gpu is None:
        return _at_hand()
    if isinstance(gpu, str):
        return _by_name(gpu)
    if isinstance(gpu, bool) or not gpu > 0:
        raise ValueError(f"gpu must be a name, or gigabytes above 0; got {gpu!r}")
    return Gpu("a card", round(gpu * 1e9))


def _at_hand() -> Gpu:
    if not torch.cuda.is_available():
        raise ValueError(
            f"there is no GPU here, and a memory plan is for one: name it by gpu=, {', '.join(GPUS)}, or its gigabytes"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, properties.total_memory, at_hand=True)


def _by_name(name: str) -> Gpu:
    by_plain_name = {_plain(known): known for known in GPUS} | _SMALLER
    known = by_plain_name.get(_plain(name))
    if known is None:
        raise ValueError(f"unknown gpu {name!r}; there are {', '.join(GPUS)}, or give its gigabytes as a number")
    return Gpu(known, round(GPUS[known] * GIB))


def _plain(name: str) -> str:
    """What "NVIDIA A100-80GB" and "a100 80" have in common."""
    return re.sub(r"nvidia|tesla|geforce|gb$|[^a-z0-9]", "", name.lower())
