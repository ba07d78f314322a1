"""float16 with its gradient scaler, here on the CPU; and what a run says and does when numbers stop being finite."""

from __future__ import annotations

import math

import pytest
import torch

import grpo_kit as gk
from grpo_kit.training import resume
from grpo_kit.training.checkpoint import checkpoints, read_state
from tests.training.helpers import QUICK, SOON, DrawnEngine, adapter, events, letters, numbers, same


@pytest.fixture
def half(tiny_checkpoint):
    """The tiny model in float16."""
    path = str(tiny_checkpoint(chat_template=None))
    loaded = gk.load_model(path, load_in_4bit=False, max_seq_length=64, lora_rank=4, dtype="float16")
    loaded.reset_adapter()
    loaded.engine = DrawnEngine()
    return loaded


@pytest.fixture
def half_untied(tiny_checkpoint):
    """Its head has a weight of its own, that may be spoiled: the model is loaded for one test."""
    path = str(tiny_checkpoint(chat_template=None, tie=False))
    loaded = gk.load_model(path, load_in_4bit=False, max_seq_length=64, lora_rank=4, dtype="float16")
    loaded.reset_adapter()
    loaded.engine = DrawnEngine()
    return loaded


def begin(model, data, folder, **options):
    return gk.train(model, data, letters, run_dir=folder, **{**QUICK, "steps": 6, **options})


def finish(run):
    run.wait(SOON)
    assert run.state == "finished", run.error
    return run


class InfiniteAt:
    """Makes the gradient of one parameter infinite at some of a run's steps."""

    def __init__(self, model, steps):
        self.name, parameter = next((n, p) for n, p in model.trainable().items() if "lora_B" in n)
        self.engine, self.steps = model.engine, steps
        self.engine.asked = 0
        self.hook = parameter.register_hook(lambda g: g + math.inf if self.engine.asked in self.steps else g)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()


# ---- float16 ----


def test_a_run_in_float16(half, data, tmp_path):
    before = adapter(half)
    assert {parameter.dtype for parameter in half.trainable().values()} == {torch.float32}
    run = finish(begin(half, data, tmp_path / "run"))
    rows = run.record.steps()
    assert [row["loss_scale"] for row in rows] == [65536.0] * 6
    assert [row["skipped_updates"] for row in rows] == [0.0] * 6
    assert all(0 < row["grad_norm"] < 100 for row in rows)  # of the gradients as they are, not scaled up
    assert not same(adapter(half), before)
    assert not events(run, "warning")


def test_gradients_are_those_of_float32_nearly(half, data, tmp_path, tiny_checkpoint):
    rough = finish(begin(half, data, tmp_path / "half", steps=1)).record.steps()[0]
    path = str(tiny_checkpoint(chat_template=None))
    full = gk.load_model(path, load_in_4bit=False, max_seq_length=64, lora_rank=4)
    full.reset_adapter()
    full.engine = DrawnEngine()
    exact = finish(begin(full, data, tmp_path / "full", steps=1)).record.steps()[0]
    assert "loss_scale" not in exact
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert rough["entropy"] == pytest.approx(exact["entropy"], rel=0.01)
    full.unload()  # another test's engine is no DrawnEngine


def test_an_infinite_gradient_is_skipped_and_the_scale_halved(half, data, tmp_path):
    with InfiniteAt(half, {2}):
        run = finish(begin(half, data, tmp_path / "run"))
    rows = run.record.steps()
    assert [row["skipped_updates"] for row in rows] == [0, 1, 0, 0, 0, 0]
    assert [row["loss_scale"] for row in rows] == [65536.0] + [32768.0] * 5
    assert rows[1]["grad_norm"] is None  # infinite
    assert all(torch.isfinite(weight).all() for weight in adapter(half).values())
    assert not events(run, "warning")  # once is how the scaler finds its level


def test_the_update_that_is_skipped_moves_nothing(half, data, tmp_path):
    with InfiniteAt(half, {1}):
        before = adapter(half)
        finish(begin(half, data, tmp_path / "run", steps=1))
    assert same(adapter(half), before)


def test_a_norm_that_alone_overflows_moves_nothing_either(half, data, tmp_path):
    """The scaler looks for infinities in the gradients; there are none, and without a norm there is no clipping."""
    before = adapter(half)
    hook = next(iter(half.trainable().values())).register_hook(lambda gradient: gradient * 0 + 1e30)
    try:
        run = finish(begin(half, data, tmp_path / "run", steps=1))
    finally:
        hook.remove()
    assert run.record.steps()[0]["skipped_updates"] == 1
    assert same(adapter(half), before)


def test_the_third_in_a_row_is_a_warning_that_names_the_tensor(half, data, tmp_path):
    with InfiniteAt(half, {2, 3, 4}) as broken:
        run = finish(begin(half, data, tmp_path / "run"))
    (warning,) = events(run, "warning")
    assert warning["step"] == 4
    assert "3 steps in a row changed nothing" in warning["text"]
    assert f"gradient of {broken.name}" in warning["text"]
    rows = run.record.steps()
    assert [row["skipped_updates"] for row in rows] == [0, 1, 1, 1, 0, 0]
    assert rows[-1]["loss_scale"] == 65536.0 / 8


def test_it_comes_once_and_again_only_after_a_step_that_moved(half, data, tmp_path):
    with InfiniteAt(half, {1, 2, 3, 4, 5, 7, 8, 9}):
        run = finish(begin(half, data, tmp_path / "run", steps=9))
    assert [warning["step"] for warning in events(run, "warning")] == [3, 9]


def test_logits_that_overflow_are_the_heads(half_untied, data, tmp_path):
    """In float16 they do beyond 65,504, and no module of the model puts them out."""
    with torch.no_grad():
        half_untied.causal_lm.get_output_embeddings().weight.mul_(5e4)
    run = finish(begin(half_untied, data, tmp_path / "run", steps=3))
    (warning,) = events(run, "warning")
    assert "First bad tensor: the head's logprobs: " in warning["text"]


def test_three_that_are_not_in_a_row_are_none(half, data, tmp_path):
    with InfiniteAt(half, {1, 2, 4, 5}):
        assert not events(finish(begin(half, data, tmp_path / "run")), "warning")


def test_the_scale_survives_a_resume(half, data, tmp_path):
    with InfiniteAt(half, {1, 3}):
        whole = finish(begin(half, data, tmp_path / "whole"))
    weights = adapter(half)
    half.reset_adapter()
    with InfiniteAt(half, {1, 3}):
        part = finish(begin(half, data, tmp_path / "part", steps=3))
    assert read_state(checkpoints(part.directory)[-1])["scaler"]["scale"] == 65536.0 / 4
    half.reset_adapter()
    again = finish(resume(part.directory, model=half, rewards=letters, steps=6))
    assert numbers(again) == numbers(whole)
    assert same(adapter(half), weights)


# ---- float32 ----


def test_in_float32_the_first_one_is_a_warning(model, data, tmp_path):
    model.engine = DrawnEngine()
    with InfiniteAt(model, {2, 3, 5}) as broken:
        run = finish(begin(model, data, tmp_path / "run"))
    warnings = events(run, "warning")
    assert [warning["step"] for warning in warnings] == [2, 5]
    for warning in warnings:
        assert "The step's 1 update(s) changed nothing" in warning["text"]
        assert f"gradient of {broken.name}" in warning["text"]
    rows = run.record.steps()
    assert [row["skipped_updates"] for row in rows] == [0, 1, 1, 0, 1, 0]
    assert all("loss_scale" not in row for row in rows)
    assert all(torch.isfinite(weight).all() for weight in adapter(model).values())


def test_a_weight_that_is_none_is_found_and_the_run_goes_on(model, data, tmp_path):
    model.engine = DrawnEngine()
    layer = model.causal_lm.get_decoder().layers[1].mlp.down_proj.base_layer
    before, whole = adapter(model), layer.weight.detach().clone()
    try:
        with torch.no_grad():
            layer.weight[3, 5] = math.nan
        run = finish(begin(model, data, tmp_path / "run", steps=3))
    finally:
        with torch.no_grad():
            layer.weight.copy_(whole)
    (warning,) = events(run, "warning")
    assert warning["step"] == 1
    text = warning["text"]
    assert "layers.1.mlp.down_proj" in text
    assert "its own weight is not finite" in text
    assert [row["skipped_updates"] for row in run.record.steps()] == [1, 1, 1]
    assert same(adapter(model), before)
    assert math.isfinite(finish(begin(model, data, tmp_path / "healed", steps=1)).record.steps()[0]["grad_norm"])
