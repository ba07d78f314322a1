"""Which vLLM is taken, and what is said of the others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from grpo_kit.rollout.vllm import TESTED, why_not_vllm
from grpo_kit.rollout.vllm.requirements import why_not_gpu, why_not_version


@pytest.mark.parametrize("version", ["0.26.0", "0.26.3", "0.26.0+cu130", "0.26.1.post1"])
def test_tested_versions_are_taken(version: str) -> None:
    assert why_not_version(version) is None


@pytest.mark.parametrize("version", ["0.25.2", "0.27.0", "1.0"])
def test_others_are_named_with_the_tested_range(version: str) -> None:
    reason = why_not_version(version)
    assert reason and version in reason and str(TESTED) in reason and "grpo-kit[vllm]" in reason


def test_without_vllm_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = why_not_version(None)
    assert reason and "pip install 'grpo-kit[vllm]'" in reason
    monkeypatch.setattr("grpo_kit.rollout.vllm.requirements.installed", lambda: "0.20.0")
    assert "0.20.0" in str(why_not_vllm())


def test_without_a_gpu_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "GPU" in str(why_not_gpu())


@pytest.mark.parametrize(
    ("device", "capability", "words"), [(1, (9, 0), "CUDA_VISIBLE_DEVICES"), (0, (7, 5), "bfloat16"), (0, (8, 0), "")]
)
def test_an_old_or_another_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: int, capability: tuple[int, int], words: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: device)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    reason = why_not_gpu()
    assert reason is None if not words else words in str(reason)


def test_the_extra_installs_what_was_tested() -> None:
    pyproject = Path(__file__).resolve().parents[3] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (requirement,) = map(Requirement, extras["vllm"])
    assert requirement.name == "vllm" and requirement.specifier == TESTED
