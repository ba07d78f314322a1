"""A memory plan as bars: what each phase takes of the GPU, part by part, beside the card's limit.

Once as a plotly figure, once as a picture without any script, which is what a notebook shows by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from .curves import HEX

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# By part: gray and blue for what the model brings, green for the adapter, warm for the rollout, violet for the update.
COLORS = {
    "CUDA context": "#9aa4b0",
    "linear layers": "#2f6fde",
    "embeddings, head, norms": "#84aef0",
    "LoRA": "#1a9a6c",
    "optimizer": "#7cc9ad",
    "KV cache": "#d9822b",
    "reading the prompts": "#f0b678",
    "drawing a token": "#f0b678",
    "LoRA to sample with": "#a85a14",
    "a token step": "#f7dcb8",
    "gradients": "#6b3fb8",
    "layer inputs": "#9b6fe0",
    "the head": "#cdb6f0",
    "one layer's backward": "#cdb6f0",
    "the optimizer's step": "#cdb6f0",
}
WIDTH, ROW, LEFT, TOP = 760, 34, 62, 20
SCALE = WIDTH - LEFT - 60  # pixels of the longest bar; the rest is for its number


def memory_plot(plan: Any) -> Figure:
    """The phases of a `MemoryPlan` as stacked bars in gigabytes, and the card's limit as a line."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for part, color in _colors(plan).items():
        holding = {phase: parts[part] / 1e9 for phase, parts in plan.phases.items() if part in parts}
        hover = f"{_escaped(part)}: %{{x:.2f}} GB<extra></extra>"
        figure.add_bar(
            y=list(holding),
            x=list(holding.values()),
            orientation="h",
            name=_escaped(part),
            marker_color=color,
            hovertemplate=hover,
        )
    limit = plan.gpu.total / 1e9
    label = f"{_escaped(plan.gpu.name)}: {limit:.1f} GB"
    figure.add_vline(x=limit, line={"color": HEX["red"], "width": 2}, annotation_text=label, annotation_position="top")
    title = f"{_escaped(plan.name)}: {plan.verdict}"
    figure.update_layout(barmode="stack", template="plotly_white", height=330, title={"text": title})
    figure.update_layout(legend={"orientation": "h", "y": -0.28, "yanchor": "top", "traceorder": "normal"})
    figure.update_xaxes(title_text="GB", rangemode="tozero")
    figure.update_yaxes(categoryorder="array", categoryarray=list(plan.phases)[::-1])
    return figure


def memory_picture(plan: Any) -> str:
    """The same bars as HTML with one SVG: no script, nothing to load, its own background."""
    colors = _colors(plan)
    longest = max(plan.total, plan.gpu.total)
    height = TOP + ROW * len(plan.phases)
    bars = [_bar(phase, parts, colors, row, longest) for row, (phase, parts) in enumerate(plan.phases.items())]
    at = LEFT + SCALE * plan.gpu.total / longest
    side = "end" if at > WIDTH / 3 else "start"
    limit = (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{height}" stroke="{HEX["red"]}" stroke-width="2"/>'
        f'<text x="{at:.1f}" y="{TOP - 9}" text-anchor="{side}" fill="{HEX["red"]}">'
        f"{escape(plan.gpu.name)}: {plan.gpu.total / 1e9:.1f} GB</text>"
    )
    keys = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:9px;height:9px;border-radius:2px;'
        f'margin-right:5px;background:{color}"></span>{escape(part)}</span>'
        for part, color in colors.items()
    )
    return (
        '<div style="background:#fff;color:#1f2733;font:13px/1.45 system-ui,sans-serif;padding:12px;border-radius:10px;'
        f'max-width:{WIDTH}px"><b>{escape(plan.name)}</b>: {escape(plan.verdict)}'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="memory by phase" style="width:100%;display:block;'
        f'margin:6px 0;font-size:12px">{"".join(bars)}{limit}</svg>'
        f'<div style="display:flex;flex-wrap:wrap;gap:2px 14px;color:#5a6676;font-size:11.5px">{keys}</div></div>'
    )


def _bar(phase: str, parts: dict[str, int], colors: dict[str, str], row: int, longest: int) -> str:
    y, total = TOP + ROW * row + 6, sum(parts.values())
    boxes = "".join(
        f'<rect x="{LEFT + SCALE * start / longest:.1f}" y="{y}" width="{SCALE * size / longest:.1f}" '
        f'height="{ROW - 12}" fill="{colors[part]}"><title>{escape(part)}: {size / 1e9:.2f} GB</title></rect>'
        for part, start, size in _placed(parts)
    )
    middle = y + (ROW - 12) / 2 + 4
    return (
        f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end" fill="#1f2733">{escape(phase)}</text>{boxes}'
        f'<text x="{LEFT + SCALE * total / longest + 5:.1f}" y="{middle}" fill="#1f2733">{total / 1e9:.1f} GB</text>'
    )


def _placed(parts: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Each part with where it begins."""
    start = 0
    for part, size in parts.items():
        yield part, start, size
        start += size


def _colors(plan: Any) -> dict[str, str]:
    parts = dict.fromkeys(part for phase in plan.phases.values() for part in phase)
    return {part: COLORS.get(part, HEX["red"]) for part in parts}


def _escaped(text: str) -> str:
    """Plotly reads a little HTML in texts."""
    return escape(text, quote=False)
