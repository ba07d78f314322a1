"""What starting vLLM leaves behind: nothing."""

from __future__ import annotations

import io
import os
import random
import sys

import numpy as np
import pytest
import torch

from grpo_kit.rollout.vllm import surroundings


def test_variables_are_set_for_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "by the user")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(KeyError), surroundings.variables({"GIVEN": "by us", "NEW": "1"}):
        assert (os.environ["GIVEN"], os.environ["NEW"]) == ("by the user", "1")
        raise KeyError
    assert os.environ["GIVEN"] == "by the user" and "NEW" not in os.environ


def test_random_state_and_precision_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in surroundings.DURING_START:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    precision = torch.get_float32_matmul_precision()
    with surroundings.kept():
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_float32_matmul_precision("high")
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert torch.get_float32_matmul_precision() == precision
    assert not surroundings.DURING_START.keys() & os.environ.keys()


class Notebook(io.StringIO):
    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def test_a_notebooks_output_has_a_file_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook()
    monkeypatch.setattr(sys, "stdout", notebook)
    with surroundings.stdout_with_a_file():
        os.write(sys.stdout.fileno(), b"to nowhere")
        print("to the notebook", flush=True)
    assert notebook.getvalue() == "to the notebook\n" and sys.stdout is notebook


def test_an_output_with_a_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with surroundings.stdout_with_a_file():
            assert sys.stdout is output
