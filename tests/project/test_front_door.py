"""`import grpo_kit`: quick, silent, light, and every name it offers has a home."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_kit


def python(code: str, root: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh Python in another folder, with the clone on its path and nothing installed from it."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)


def test_import_is_quick_silent_and_light(root: Path, tmp_path: Path) -> None:
    code = """
import sys, time
start = time.perf_counter()
import grpo_kit
seconds = time.perf_counter() - start
heavy = {"torch", "transformers", "numpy", "pandas", "ipywidgets", "anywidget", "plotly", "IPython"} & set(sys.modules)
print("sentinel", seconds < 1, sorted(heavy))
"""
    result = python(code, root, tmp_path)
    assert result.stdout == "sentinel True []\n"
    assert result.stderr == ""


def test_a_bare_clone_finds_the_widgets_and_leaks_no_top_level_name(root: Path, tmp_path: Path) -> None:
    code = """
import importlib.util, json, sys
sys.path = [p for p in sys.path if p]
import grpo_kit
print(json.dumps([importlib.util.find_spec("grpo_kit.widgets").origin, grpo_kit.__file__]))
"""
    result = python(code, root, tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [str(root / "widgets/__init__.py"), str(root / "grpo_kit/__init__.py")]


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in dir(grpo_kit) if not hasattr(grpo_kit, name)]
    assert missing == []
    assert set(grpo_kit.__all__) < set(dir(grpo_kit))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode_model'"):
        grpo_kit.lode_model  # noqa: B018


def test_the_version_is_the_packages(pyproject: dict) -> None:
    assert grpo_kit.__version__ == pyproject["project"]["version"]
