"""Which engine samples, and why, in one line."""

from __future__ import annotations

ENGINES = ("auto", "transformers")


def choose_engine(requested: str, fast_inference: bool) -> tuple[str, str]:
    """Return `(name, reason)`. Raises ValueError for an engine there is not."""
    if requested not in ENGINES:
        raise ValueError(f"unknown engine {requested!r}; there are {', '.join(ENGINES)}")
    if requested == "transformers":
        return "transformers", "asked for"
    if fast_inference:
        return "transformers", "fast_inference was asked for, but no faster engine is built yet: sampling takes longer"
    return "transformers", "works on every device"
