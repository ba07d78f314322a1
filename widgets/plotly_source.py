"""The plotly.js that the installed plotly package carries, for pages that must fetch nothing.

Not a copy of it, and no CDN address: the browser gets these bytes through the kernel, once a page.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def plotly_js() -> bytes:
    """The text of `plotly.min.js` in UTF-8, about 4.5 MB."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
