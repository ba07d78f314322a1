"""No file of the project changes another package, and the library leaves the environment as it found it: one file says
a few things to vLLM by it, which has no other ears for them, and takes them back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("grpo_kit", "widgets", "notebooks", "benchmarks", "tests")
LIBRARY = ("grpo_kit", "widgets")
PUTS_BACK = ROOT / "grpo_kit/rollout/vllm/surroundings.py"  # as its own tests hold it to

FOREIGN = {"torch", "transformers", "peft", "vllm", "bitsandbytes", "accelerate", "datasets", "trl", "triton", "numpy"}
ENVIRONMENT_CALLS = {"update", "setdefault", "pop", "popitem", "clear"}


def sources(folders: tuple[str, ...]) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def foreign_names(tree: ast.Module) -> set[str]:
    """The names under which a file knows other packages, their modules, classes and functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.split(".")[0] in FOREIGN]
            names |= {alias.asname or alias.name.split(".")[0] for alias in aliases}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN and not node.level:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def written(tree: ast.Module) -> Iterator[ast.expr]:
    """Everything that is assigned to, deleted, or handed to setattr and delattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in {"setattr", "delattr"}:
            yield ast.Attribute(node.args[0], "attribute", ast.Store(), lineno=node.lineno)


def patches(tree: ast.Module) -> list[str]:
    names = foreign_names(tree)
    found = []
    for target in written(tree):
        owner = target.value if isinstance(target, ast.Attribute | ast.Subscript) else target
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
        if isinstance(owner, ast.Name) and owner.id in names:
            found.append(f"line {target.lineno}: {ast.unparse(target)}")
    return found


def environment_changes(tree: ast.Module) -> list[str]:
    found: list[ast.expr] = [
        node
        for node in written(tree)
        if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node.value) in {"os.environ", "environ"}
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        owner, _, method = ast.unparse(call.func).rpartition(".")
        if (owner in {"os.environ", "environ"} and method in ENVIRONMENT_CALLS) or method in {"putenv", "unsetenv"}:
            found.append(call)
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in found]


@pytest.mark.parametrize("path", sources(FOLDERS), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_other_package_is_changed(path: Path) -> None:
    assert patches(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "path", [path for path in sources(LIBRARY) if path != PUTS_BACK], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_the_environment_is_left_alone(path: Path) -> None:
    assert environment_changes(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("import torch\ntorch.nn.Linear.forward = f", 1),
        ("import torch.nn as nn\nnn.Linear = f", 1),
        ("from transformers.models.llama import modeling_llama as m\nm.LlamaMLP.forward = f", 1),
        ("from peft import PeftModel\nsetattr(PeftModel, 'x', 1)", 1),
        ("import torch\ntorch.backends.cuda.matmul.allow_tf32 = True", 1),
        ("import torch\ndel torch.compile", 1),
        ("import torch\nx = torch.zeros(3)\nx[0] = 1\nx.grad = None", 0),
        ("import torch\nself.torch = torch", 0),
    ],
)
def test_the_reader_sees_a_patch(code: str, count: int) -> None:
    assert len(patches(ast.parse(code))) == count


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("os.environ['A'] = '1'", 1),
        ("del os.environ['A']", 1),
        ("os.environ.setdefault('A', '1')", 1),
        ("os.putenv('A', '1')", 1),
        ("env = {**os.environ, 'A': '1'}\nos.environ.get('A')", 0),
    ],
)
def test_the_reader_sees_a_change_of_the_environment(code: str, count: int) -> None:
    assert len(environment_changes(ast.parse(code))) == count
