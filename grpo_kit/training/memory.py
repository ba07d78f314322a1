"""How much GPU memory the phases of a step may take, by the plan, and do."""

from __future__ import annotations

import psutil
import torch

from grpo_kit.kernels import CudaLane, Offload
from grpo_kit.model import Model, PlanOptions
from grpo_kit.model.memory_plan import HOST_SHARE
from grpo_kit.training.derive import Budget
from grpo_kit.training.options import TrainOptions


def planned(model: Model, options: TrainOptions, longest_prompt: int) -> Budget | None:
    """What `model.memory_plan` derives for these options; None on a CPU. A family that it can't read gets a cautious
    guess."""
    if model.precision.device.type != "cuda":
        return None
    names = PlanOptions.__dataclass_fields__.keys() & vars(options).keys()
    asked = {name: getattr(options, name) for name in names}
    asked["max_prompt_length"] = longest_prompt
    asked["max_completion_length"] = min(options.max_completion_length, model.max_seq_length - longest_prompt)
    try:
        plan = model.memory_plan(**asked).options
    except (ValueError, OSError) as error:  # a family it does not know, a source that is gone
        return Budget(4096, False, f"a guess, there is no memory plan: {error}")
    assert plan.tokens_per_micro_batch is not None and plan.activation_offloading is not None
    return Budget(plan.tokens_per_micro_batch, plan.activation_offloading, "what the memory plan makes room for")


def make_offload(device: torch.device, options: TrainOptions) -> Offload | None:
    """Host memory for what backward needs, pinned as it is used, up to a share of what is free now."""
    if not options.activation_offloading:
        return None
    return Offload(CudaLane(device), int(HOST_SHARE * psutil.virtual_memory().available))


def begin_peak(device: torch.device) -> None:
    """Count the peak from here on. It is torch's own statistic of the device, one for the whole process: who reads
    `torch.cuda.max_memory_allocated` beside a run sees the peak since the run's last phase began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """The most that tensors have taken at once since `begin_peak`, in GB (1e9 bytes), those of the notebook included;
    None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
