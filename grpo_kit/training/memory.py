"""How much GPU memory a phase of a step takes at most."""

from __future__ import annotations

import torch


def begin_peak(device: torch.device) -> None:
    """Count the peak from here on. It is torch's own statistic of the device, one for the whole process: who reads
    `torch.cuda.max_memory_allocated` beside a run sees the peak since the run's last phase began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float | None:
    """The most that tensors have taken at once since `begin_peak`, in GB (1e9 bytes), those of the notebook included;
    None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
