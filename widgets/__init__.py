"""What a person sees and clicks: the live panel, the static picture, the finished plots of a run and of several, the
bars of a memory plan.

Imported as `grpo_kit.widgets`, and only when something is to be shown. Nothing here touches a model:
a panel reads the run's record and calls the run's own controls.
"""

from __future__ import annotations

from .compare import compare
from .memory import memory_picture, memory_plot
from .panel import Panel
from .picture import Picture, picture
from .plot import plot
from .rating import RatingPanel

__all__ = ["Panel", "Picture", "RatingPanel", "compare", "memory_picture", "memory_plot", "picture", "plot"]
