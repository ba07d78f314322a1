"""Dependencies point one way. Read from the sources, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import grpo_kit

ROOT = Path(__file__).resolve().parents[2]

# widgets → training → {model, data, rewards, algorithms, store}, model → rollout → kernels, training → kernels.
# Two are added that go the same way: training handles the engine's Completion and Sampling, model calls kernels.
ARROWS: dict[str, set[str]] = {
    "widgets": {"training", "model", "data", "rewards", "algorithms", "store"},
    "training": {"model", "data", "rewards", "algorithms", "store", "rollout", "kernels"},
    "model": {"rollout", "kernels"},
    "rollout": {"kernels"},
    "kernels": set(),
    "data": set(),
    "rewards": set(),
    "algorithms": set(),
    "store": set(),
}
# The doors from the headless library to its front end; each opens inside a function, when something is to be shown: a
# run's panel, or the bars of a memory plan.
LAZY_DOORS = {("training/run.py", "widgets"), ("model/memory_plan.py", "widgets")}

FRONT_END = {"ipywidgets", "anywidget", "plotly", "IPython", "ipykernel", "matplotlib"}
MODELS = {"transformers", "peft", "bitsandbytes", "accelerate", "vllm", "trl"}
NEVER: dict[str, set[str]] = {
    "widgets": MODELS | {"torch"},
    "training": FRONT_END | {"trl"},
    "model": FRONT_END | {"trl"},
    "rollout": FRONT_END | {"trl"},
    "kernels": FRONT_END | MODELS,
    "data": FRONT_END | {"trl"},
    "rewards": FRONT_END | MODELS,
    "algorithms": FRONT_END | MODELS,
    "store": FRONT_END | MODELS | {"torch"},
}
# A reward may be a model of its own, a sequence classifier; it is loaded inside the function that is asked for it.
LAZY_MODEL = ("rewards/reward_model.py", "transformers")
NO_TORCH_AT_IMPORT = {"data", "rewards", "store", "widgets"}


@dataclass(frozen=True)
class Import:
    file: str  # "training/run.py"
    line: int
    module: str  # "grpo_kit.store.record", "torch.nn"
    in_function: bool

    @property
    def room(self) -> str:
        return self.file.split("/")[0]

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def target(self) -> str:
        """The room of grpo_kit that is imported; empty for anything else."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "grpo_kit" and len(parts) > 1 else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def modules_of(node: ast.AST, package: list[str]) -> list[str]:
    """The full names of the modules an import statement (or an import_module call) reaches."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module != "grpo_kit":
            return [module]
        return [home_of(alias.name) for alias in node.names]
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module"):
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def home_of(name: str) -> str:
    """`from grpo_kit import name` reaches the room that name lives in."""
    return grpo_kit._HOME.get(name, f"grpo_kit.{name}")


def imports_of(tree: ast.Module, file: str) -> Iterator[Import]:
    package = ["grpo_kit", *file.split("/")[:-1]]

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for module in modules_of(child, package):
                yield Import(file, getattr(child, "lineno", 0), module, in_function)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, in_function or is_function)

    return walk(tree, False)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for folder in (ROOT / "grpo_kit", ROOT / "widgets"):
        base = folder if folder.name == "grpo_kit" else ROOT
        for path in sorted(folder.rglob("*.py")):
            file = path.relative_to(base).as_posix()
            if file != "__init__.py":  # the lazy front door names every room
                found += imports_of(ast.parse(path.read_text(encoding="utf-8")), file)
    return found


IMPORTS = all_imports()


def breaks_an_arrow(item: Import) -> bool:
    if item.top != "grpo_kit" or item.target == item.room:
        return False
    if item.in_function and (item.file, item.target) in LAZY_DOORS:
        return False
    return item.target not in ARROWS[item.room]  # `import grpo_kit` itself is no room: import the room


def test_the_rooms_are_those_on_disk() -> None:
    rooms = {path.parent.name for path in (ROOT / "grpo_kit").glob("*/__init__.py")}
    assert rooms | {"widgets"} == set(ARROWS)


def test_the_arrows_make_no_circle() -> None:
    done: set[str] = set()
    while ready := {room for room, targets in ARROWS.items() if room not in done and targets <= done}:
        done |= ready
    assert done == set(ARROWS)


def test_rooms_import_along_the_arrows_only() -> None:
    assert [str(item) for item in IMPORTS if breaks_an_arrow(item)] == []


def test_rooms_leave_alone_what_is_not_theirs() -> None:
    found = [item for item in IMPORTS if item.top in NEVER[item.room]]
    assert [str(item) for item in found if not (item.in_function and (item.file, item.top) == LAZY_MODEL)] == []


def test_torch_is_not_loaded_by_rooms_that_can_do_without() -> None:
    early = [item for item in IMPORTS if item.top == "torch" and not item.in_function]
    assert [str(item) for item in early if item.room in NO_TORCH_AT_IMPORT] == []


@pytest.mark.parametrize(
    ("file", "code", "broken"),
    [
        ("rewards/numbers.py", "from grpo_kit.store import Record", True),
        ("rewards/numbers.py", "def f():\n    import grpo_kit.model", True),
        ("rewards/numbers.py", "from grpo_kit import load_model", True),
        ("rewards/numbers.py", "from ..data import rows", True),
        ("rewards/numbers.py", "from .base import Reward", False),
        ("rewards/numbers.py", "import grpo_kit", True),
        ("training/run.py", "def panel():\n    from grpo_kit.widgets import Panel", False),
        ("training/run.py", "from grpo_kit.widgets import Panel", True),
        ("model/memory_plan.py", "def plot():\n    from grpo_kit.widgets import memory_plot", False),
        ("model/memory_plan.py", "from grpo_kit.widgets import memory_plot", True),
        ("model/model.py", "def plot():\n    from grpo_kit.widgets import memory_plot", True),
        ("training/loop.py", "def panel():\n    importlib.import_module('grpo_kit.widgets')", True),
        ("training/loop.py", "from grpo_kit.kernels import linear_logprob", False),
        ("kernels/a.py", "from grpo_kit.rollout import Engine", True),
    ],
)
def test_the_reader_itself_sees_what_it_should(file: str, code: str, broken: bool) -> None:
    assert any(breaks_an_arrow(item) for item in imports_of(ast.parse(code), file)) is broken
