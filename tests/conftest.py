"""What every test shares: the markers' rules. Nothing heavy is imported here.

Browser tests need Chromium and playwright. Without them they are skipped on a person's machine, and
`--require-browser` (as CI says) makes their absence an error, so that they cannot silently stop running.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-browser", action="store_true", help="fail instead of skipping where Chromium lacks")


def missing_for_browser() -> str:
    """What a browser test lacks on this machine, in words; empty when nothing does."""
    if not CHROMIUM.is_file():
        return f"no Chromium at {CHROMIUM}: apt-get install chromium, or set CHROMIUM to its path"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install playwright"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    missing = missing_for_browser()
    if missing and config.getoption("--require-browser"):
        raise pytest.UsageError(f"--require-browser: {missing}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_for_browser()
    for item in items:
        if missing and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=missing))
