"""Which vLLM the engine was tested with, and on what hardware it makes sense. Asked before anything is loaded."""

from __future__ import annotations

import importlib.metadata

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

TESTED = SpecifierSet(">=0.26.0,<0.27")  # as the extra `vllm` in pyproject.toml says
INSTALL = "pip install 'grpo-kit[vllm]'"
OLDEST = (8, 0)  # compute capability


def why_not_vllm() -> str | None:
    """Why vLLM can't be started here, with what to do; None if it can."""
    return why_not_version(installed()) or why_not_gpu()


def installed() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_version(version: str | None) -> str | None:
    """The engine reads tensors that vLLM keeps to itself and may rearrange: a version is taken once it was tested."""
    if version is None:
        return f"vLLM is not installed: {INSTALL}"
    if not TESTED.contains(Version(version).base_version):
        return f"vLLM {version} is installed, and tested are {TESTED}: {INSTALL} brings one of these"
    return None


def why_not_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "vLLM needs an NVIDIA GPU, and there is none here"
    device = torch.cuda.current_device()
    if device != 0:
        return f"vLLM takes the first GPU and the current one is {device}: choose the GPU by CUDA_VISIBLE_DEVICES"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return (
            f"vLLM multiplies 4-bit weights in bfloat16, for which compute capability {capability[0]}.{capability[1]} "
            "has no units"
        )
    return None
