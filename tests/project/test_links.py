"""The project's address stands in pyproject.toml; every badge, link and install line agrees with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", *NOTEBOOKS]

# Addresses that point at a repository: GitHub itself, its raw files, and Colab's view of it.
HOSTS = r"(?:github\.com|raw\.githubusercontent\.com|colab\.research\.google\.com/github)"
OWN = re.compile(HOSTS + r"/([\w.-]+/grpo[-_]kit)(?:\.git)?(?![\w-])", re.IGNORECASE)
COLAB = re.compile(r"https://colab\.research\.google\.com/github/[^\s)\"\\]+")
RELATIVE = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)|src=\"(?!https?://|data:)([^\"]+)\"")


@pytest.fixture(scope="module")
def repository(pyproject: dict[str, Any]) -> str:
    """ "owner/name"."""
    return pyproject["project"]["urls"]["Repository"].removeprefix("https://github.com/")


def test_the_address_is_a_repository(repository: str) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_the_project_agree(page: Path, repository: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert [slug for slug in OWN.findall(text) if slug != repository] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_badge_opens_a_notebook_that_exists(page: Path, repository: str) -> None:
    badges = COLAB.findall(page.read_text(encoding="utf-8"))
    prefix = f"https://colab.research.google.com/github/{repository}/blob/main/"
    assert [badge for badge in badges if not badge.startswith(prefix)] == []
    assert [badge for badge in badges if not (ROOT / badge.removeprefix(prefix)).is_file()] == []
    if page.suffix == ".ipynb":
        assert f"{prefix}notebooks/{page.name}" in badges, "a notebook carries a badge that opens itself in Colab"


def test_the_readme_points_at_files_that_exist() -> None:
    targets = [a or b for a, b in RELATIVE.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert targets
    assert [target for target in targets if not (ROOT / target.split("#")[0]).exists()] == []
