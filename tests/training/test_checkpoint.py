"""Checkpoints: whole or not there, exact, and without a line of pickle."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import grpo_kit as gk
from grpo_kit.rollout import Completion
from grpo_kit.training.batch import Sequence
from grpo_kit.training.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from grpo_kit.training.credit import Credit
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.update import Updater
from tests.training.helpers import adapter, same

SEQUENCES = [Sequence([1, 2, 3], Completion([4, 5, n], [-1.0] * 3, "eos", "")) for n in (6, 7)]
ADVANTAGES = torch.tensor([1.0, -1.0])


def credit(advantages) -> Credit:
    return Credit(advantages, None, None, {})


@pytest.fixture
def updater(model) -> Updater:
    made = Updater(model, derive(TrainOptions(learning_rate=1e-2), on_gpu=False)[0])
    made.update(SEQUENCES, credit(ADVANTAGES), None, lambda: None)
    return made


def moments(updater):
    return {
        f"{name}|{key}": value.clone()
        for name, parameter in updater.parameters.items()
        for key, value in updater.optimizer.state[parameter].items()
    }


def test_everything_comes_back_exactly(model, updater, tmp_path):
    updater.set_learning_rate(3e-4)
    updater.schedule(7)
    folder = save_checkpoint(tmp_path, 7, model, updater, {"elapsed": 1.5})
    weights, state = adapter(model), moments(updater)
    updater.update(SEQUENCES, credit(-ADVANTAGES), None, lambda: None)
    after = adapter(model)
    assert not same(after, weights)

    model.reset_adapter()
    fresh = Updater(model, updater.options)
    load_checkpoint(folder, model, fresh)
    assert same(adapter(model), weights)
    assert same(moments(fresh), state)
    assert fresh.optimizer.param_groups[0]["lr"] == 3e-4
    assert (read_state(folder)["step"], read_state(folder)["elapsed"]) == (7, 1.5)
    fresh.update(SEQUENCES, credit(-ADVANTAGES), None, lambda: None)
    assert same(adapter(model), after)  # bit for bit: Adam's step count is back as well


def test_nothing_is_pickled(model, updater, tmp_path):
    folder = save_checkpoint(tmp_path, 1, model, updater, {})
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".json", ".safetensors", ".md"}
    assert {"adapter_model.safetensors", "optimizer.safetensors", "state.json"} <= {p.name for p in folder.iterdir()}


def test_peft_can_read_it(model, updater, tmp_path):
    from peft import PeftConfig

    folder = save_checkpoint(tmp_path, 1, model, updater, {})
    assert PeftConfig.from_pretrained(str(folder)).r == 4


def test_the_last_two_are_kept(model, updater, tmp_path):
    for step in (0, 2, 4, 10):
        save_checkpoint(tmp_path, step, model, updater, {})
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000004", "step-000010"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_no_run_no_checkpoints(tmp_path):
    assert checkpoints(tmp_path) == []


def test_an_unfinished_one_does_not_count_and_is_cleared_away(model, updater, tmp_path):
    save_checkpoint(tmp_path, 2, model, updater, {})
    unfinished = tmp_path / "checkpoints" / "step-000004.unfinished"
    unfinished.mkdir()
    (unfinished / "adapter_model.safetensors").write_bytes(b"half")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]
    save_checkpoint(tmp_path, 6, model, updater, {})
    assert not unfinished.exists()


def test_one_of_the_same_step_is_replaced(model, updater, tmp_path):
    save_checkpoint(tmp_path, 2, model, updater, {"elapsed": 1.0})
    save_checkpoint(tmp_path, 2, model, updater, {"elapsed": 2.0})
    (only,) = (tmp_path / "checkpoints").iterdir()
    assert read_state(only)["elapsed"] == 2.0


def test_killed_between_the_two_renames_the_old_one_counts(model, updater, tmp_path):
    folder = save_checkpoint(tmp_path, 0, model, updater, {"elapsed": 1.0})
    shutil.move(folder, folder.with_suffix(".replaced"))
    shutil.copytree(folder.with_suffix(".replaced"), folder.with_suffix(".unfinished"))
    (found,) = checkpoints(tmp_path)
    load_checkpoint(found, model, updater)
    save_checkpoint(tmp_path, 0, model, updater, {"elapsed": 2.0})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000"]


def test_a_replaced_one_that_was_not_cleared_away_does_not_count(model, updater, tmp_path):
    folder = save_checkpoint(tmp_path, 3, model, updater, {})
    shutil.copytree(folder, folder.with_suffix(".replaced"))
    assert checkpoints(tmp_path) == [folder]


def test_another_rank_is_refused_in_words(model, updater, tmp_path, tiny_checkpoint):
    folder = save_checkpoint(tmp_path, 1, model, updater, {})
    other = gk.load_model(str(tiny_checkpoint(chat_template=None)), load_in_4bit=False, max_seq_length=64, lora_rank=2)
    before = adapter(other)
    with pytest.raises(ValueError, match=r"another model or LoRA rank than the one loaded .*rank 2"):
        load_checkpoint(folder, other, Updater(other, updater.options))
    assert same(adapter(other), before)


def test_a_fresh_optimizer_has_nothing_to_save(model, tmp_path):
    fresh = Updater(model, derive(TrainOptions(), on_gpu=False)[0])
    folder = save_checkpoint(tmp_path, 0, model, fresh, {})
    load_checkpoint(folder, model, fresh)
    assert not moments_or_none(fresh)
    assert json.loads((folder / "state.json").read_text())["optimizer"] == {
        "optimizer": "AdamW",
        "learning_rate": 5e-6,
        "values": {},
    }


def moments_or_none(updater):
    return dict(updater.optimizer.state)


def test_the_model_saves_as_it_would_without_a_run(model, updater, tmp_path):
    """A checkpoint can be loaded as an adapter."""
    folder = save_checkpoint(tmp_path, 1, model, updater, {})
    saved = model.save_adapter(tmp_path / "saved")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folder / name).read_bytes() == (saved / name).read_bytes()


def test_a_checkpoint_made_without_a_scaler_starts_a_fresh_one(model, updater, tmp_path):
    """A run begun where bfloat16 works may go on where only float16 does."""
    folder = save_checkpoint(tmp_path, 1, model, updater, {"elapsed": 0.0})
    assert read_state(folder)["scaler"] == {}
    half = Updater(model, updater.options)
    half.scaler = torch.amp.GradScaler("cpu", enabled=True)
    load_checkpoint(folder, model, half)
    assert half.scaler.get_scale() == torch.amp.GradScaler("cpu", enabled=True).get_scale()
