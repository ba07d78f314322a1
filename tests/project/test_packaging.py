"""What is installed is what lies on disk, from pip and conda alike, and the exact versions fit the ranges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TESTED_EXTRAS = ("lab", "dev", "reasoning-gym")


def package_folders(root: Path) -> dict[str, Path]:
    """Package name to folder, for every folder that holds Python files."""
    folders = {}
    for base in (root / "grpo_kit", root / "widgets"):
        for path in [base, *base.rglob("*")]:
            if path.is_dir() and any(path.glob("*.py")):
                relative = path.relative_to(root).parts
                name = ".".join(relative if relative[0] == "grpo_kit" else ("grpo_kit", *relative))
                folders[name] = path
    return folders


def test_the_packages_are_the_folders_on_disk(root: Path, pyproject: dict[str, Any]) -> None:
    folders = package_folders(root)
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(folders)
    assert [name for name, folder in folders.items() if not (folder / "__init__.py").is_file()] == []


def test_files_other_than_python_are_packaged(root: Path, pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["setuptools"]["package-data"]
    folders = package_folders(root)
    packaged = {path for package, globs in patterns.items() for glob in globs for path in folders[package].glob(glob)}
    kept_out = (".py", ".pyc")
    found = {
        path
        for base in (root / "grpo_kit", root / "widgets")
        for path in base.rglob("*")
        if path.is_file() and path.suffix not in kept_out and "__pycache__" not in path.parts
    }
    assert sorted(found - packaged) == []


def test_the_exact_versions_lie_in_the_ranges(root: Path, pyproject: dict[str, Any]) -> None:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in exact.items()}
    extras = pyproject["project"]["optional-dependencies"]
    wanted = [*pyproject["project"]["dependencies"], *(line for extra in TESTED_EXTRAS for line in extras[extra])]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"constraints.txt lacks {name}"
        assert versions[name] in requirement.specifier, f"constraints.txt: {name}=={versions[name]}, not {requirement}"


def test_conda_users_get_what_pip_users_get(root: Path, pyproject: dict[str, Any]) -> None:
    environment = yaml.safe_load((root / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == pyproject["project"]["name"]
    python, pip, from_pip = environment["dependencies"]
    assert python == "python" + pyproject["project"]["requires-python"]
    assert pip == "pip"
    (line,) = from_pip["pip"]
    match = re.fullmatch(r"-e \.\[([a-z-]+)\]", line)
    assert match and match[1] in pyproject["project"]["optional-dependencies"]
    assert f"-e '.[{match[1]}]'" in (root / "Makefile").read_text(encoding="utf-8"), "make demo installs another set"
