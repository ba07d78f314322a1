"""A run's checkpoints: everything the next step depends on, in safetensors and JSON, written whole or not at all.

What is not here needs no saving: data order and sampler seeds follow from the run's seed and the step's number.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from grpo_kit.model import Model
from grpo_kit.model.lora import save_lora
from grpo_kit.training.optimizers import optimizer_state, restore_optimizer
from grpo_kit.training.update import Updater

KEEP = 2
REPLACED = ".replaced"
VALUE_HEAD = "value_head.safetensors"


def save_checkpoint(run_dir: Path, step: int, model: Model, updater: Updater, state: dict[str, Any]) -> Path:
    """Write `checkpoints/step-000012` after step 12, and remove all but the last two. The caller holds the model's
    lock.

    The folder appears under its name only when it is complete, so a process killed in between leaves the one before.
    """
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    unfinished = folder.with_suffix(".unfinished")
    for left in folder.parent.glob("*.unfinished"):
        shutil.rmtree(left)
    unfinished.mkdir(parents=True)
    save_lora(model.module, unfinished)
    if updater.value_head is not None:
        save_file(updater.value_head.state_dict(), unfinished / VALUE_HEAD)
    tensors, numbers = optimizer_state(updater.optimizer, updater.parameters)
    save_file(tensors, unfinished / "optimizer.safetensors")
    whole = {"step": step, "optimizer": numbers, "scaler": updater.scaler.state_dict(), **state}
    (unfinished / "state.json").write_text(json.dumps(whole, indent=1))
    _put_in_place(unfinished, folder)
    for old in checkpoints(run_dir)[:-KEEP]:
        shutil.rmtree(old)
    return folder


def checkpoints(run_dir: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted(p for p in found if not p.suffix or (p.suffix == REPLACED and not p.with_suffix("").exists()))


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return dict(json.loads((folder / "state.json").read_text()))


def load_checkpoint(folder: Path, model: Model, updater: Updater) -> None:
    """Put adapter, critic, optimizer and scaler back. Raises ValueError if the checkpoint is of another
    model or adapter."""
    adapter = load_file(folder / "adapter_model.safetensors")
    trainable = {name.replace(".default.", "."): parameter for name, parameter in model.trainable().items()}
    fits = adapter.keys() == trainable.keys() and all(adapter[name].shape == trainable[name].shape for name in adapter)
    if not fits:
        raise ValueError(
            f"the checkpoint {folder} was made for another model or LoRA rank than the one loaded "
            f"({model.options.name_or_path}, rank {model.options.lora_rank})"
        )
    set_peft_model_state_dict(model.module, adapter)
    if updater.value_head is not None:
        updater.value_head.load_state_dict(load_file(folder / VALUE_HEAD))
    tensors, numbers = load_file(folder / "optimizer.safetensors"), read_state(folder)["optimizer"]
    restore_optimizer(updater.optimizer, updater.parameters, tensors, numbers)
    scaler = read_state(folder)["scaler"]
    if scaler:  # empty in a checkpoint of hardware that needs none; a fresh one then starts here
        updater.scaler.load_state_dict(scaler)
    model.engine.adapter_changed()


def _put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename; a checkpoint of the same step is moved aside first and counts until the new one is there."""
    replaced = folder.with_suffix(REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    os.replace(unfinished, folder)
    shutil.rmtree(replaced, ignore_errors=True)
