"""What a person sees and clicks: the live panel, the static picture and the finished plots of a run.

Imported as `grpo_kit.widgets`, and only when something is to be shown. Nothing here touches a model:
a panel reads the run's record and calls the run's own controls.
"""

from __future__ import annotations

from .panel import Panel
from .picture import Picture, picture
from .plot import plot

__all__ = ["Panel", "Picture", "picture", "plot"]
