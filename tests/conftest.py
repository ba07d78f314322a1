"""What every test shares: the markers' rules. Nothing heavy is imported here.

Browser tests need Chromium and playwright. Without them they are skipped on a person's machine, and
`--require-browser` (as CI says) makes their absence an error, so that they cannot silently stop running.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors are slower on many threads, and the order of a sum should not depend on the machine."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(architecture="llama", tie=True, chat_template=…, eos=…, seed=0, **config)` → a saved folder.

    See `tests/tiny.py` for what it holds. The same arguments give the same folder: don't write into it.
    """
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", **options: Any) -> Path:
        from tests.tiny import save_tiny

        key = repr((architecture, sorted(options.items(), key=str)))
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[key]

    return make
