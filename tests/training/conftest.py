"""A tiny random model, prompts of a few tokens, and rewards that tell its answers apart."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kit as gk
from grpo_kit.model import Model
from grpo_kit.training import Run
from tests.training.helpers import QUICK, WatchedEngine, letters


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tiny_checkpoint: Callable[..., Path]) -> Iterator[Model]:
    """With a fresh adapter. Whatever a test leaves running is stopped."""
    loaded = gk.load_model(str(tiny_checkpoint(chat_template=None)), load_in_4bit=False, max_seq_length=64, lora_rank=4)
    loaded.reset_adapter()
    engine = loaded.engine
    yield loaded
    if loaded.stop_run is not None:
        loaded.stop_run()
    loaded.engine = engine


@pytest.fixture(scope="session")
def data() -> Any:
    return gk.data.from_rows([{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(5)])


@pytest.fixture
def start(model: Model, data: Any, tmp_path: Path) -> Callable[..., Run]:
    """`train` on the tiny model, in small; options override."""

    def start(*rewards: Any, run_dir: str = "run", **options: Any) -> Run:
        reward_set = gk.RewardSet(*(rewards or (letters,)))
        return gk.train(model, data, reward_set, run_dir=tmp_path / run_dir, **{**QUICK, **options})

    return start


@pytest.fixture
def notebook() -> Iterator[Callable[[str], types.ModuleType]]:
    """`notebook(code)` runs a cell in a module of its own, again and again the same one."""
    module = types.ModuleType("a_notebook")
    sys.modules[module.__name__] = module

    def run_cell(code: str) -> types.ModuleType:
        exec(code, vars(module))
        return module

    yield run_cell
    del sys.modules[module.__name__]


@pytest.fixture
def engine(model: Model) -> WatchedEngine:
    model.engine = WatchedEngine(model.engine)
    return model.engine
