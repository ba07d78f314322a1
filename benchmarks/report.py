"""How these benchmarks keep what they measured: the rows as JSON, and beside them a table for people."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A script's, with its docstring as the help and --into."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    return parser


def keep(name: str, rows: list[Row], table: str, folder: Path) -> None:
    """Write name.json and name.md. Called again with more rows it writes both anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table)


def earlier(name: str, folder: Path, rows: list[Row], key: Sequence[str]) -> list[Row]:
    """What name.json holds of other things than these rows: those that differ in one of the key's columns."""
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    measured = {tuple(row.get(column) for column in key) for row in rows}
    kept: list[Row] = json.loads(path.read_text())
    return [row for row in kept if tuple(row.get(column) for column in key) not in measured]


def where(*packages: str) -> Row:
    """This machine, torch's version and those of other packages, and the day: part of every row."""
    import torch

    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return {
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": ", ".join([*versions, f"torch {torch.__version__}", f"Python {platform.python_version()}"]),
        "date": time.strftime("%Y-%m-%d"),
    }


def places(rows: Iterable[Row]) -> list[str]:
    """In words, each once; a row that nothing could measure has none."""
    known = (row for row in rows if "hardware" in row)
    return list(dict.fromkeys(f"{row['hardware']}, {row['versions']}, {row['date']}" for row in known))


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
