"""Each optimizer's state goes through safetensors and JSON and comes back exactly."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_kit.training.optimizers import (
    OPTIMIZERS,
    check_optimizer,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HERE = [name for name in OPTIMIZERS if ON_GPU or not name.startswith("paged_")]


def fresh():
    """A small matrix and two that bitsandbytes keeps in 8 bits (from 4,096 values on), one of them without gradient;
    the last is large enough to be paged."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"small": (4, 3), "large": (64, 96), "still": (64, 96), "paged": (400, 300)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for name, shape in shapes.items()
    }


def take(optimizer, parameters, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parameters.items():
            if name != "still":
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)
        optimizer.step()


def weights(parameters):
    return {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", HERE)
def test_saved_and_restored_it_goes_on_bit_for_bit(name, tmp_path):
    whole = fresh()
    take(make_optimizer(name, whole, 1e-2, 0.1), whole, range(6))

    first = fresh()
    begun = make_optimizer(name, first, 5e-3, 0.1)
    begun.param_groups[0]["lr"] = 1e-2
    take(begun, first, range(3))
    tensors, numbers = optimizer_state(begun, first)
    save_file(tensors, tmp_path / "optimizer.safetensors")
    text = json.dumps(numbers)

    second = fresh()
    for key, value in weights(first).items():
        second[key].data.copy_(value)
    resumed = make_optimizer(name, second, 5e-3, 0.1)
    take(resumed, second, [7])  # what it holds before is gone afterwards
    for key, value in weights(first).items():
        second[key].data.copy_(value)
    read = load_file(tmp_path / "optimizer.safetensors")
    restore_optimizer(resumed, second, read, json.loads(text))
    assert resumed.param_groups[0]["lr"] == 1e-2
    assert second["still"] not in resumed.state or not resumed.state[second["still"]]
    take(resumed, second, range(3, 6))
    assert same(weights(second), weights(whole))
    assert same(read, load_file(tmp_path / "optimizer.safetensors"))  # restoring took copies


@pytest.mark.parametrize("name", HERE)
def test_what_is_saved_does_not_change_with_the_next_step(name):
    parameters = fresh()
    optimizer = make_optimizer(name, parameters, 1e-2, 0.0)
    take(optimizer, parameters, [0])
    tensors, _ = optimizer_state(optimizer, parameters)
    before = {key: value.clone() for key, value in tensors.items()}
    take(optimizer, parameters, [1])
    assert same(tensors, before)


def test_torchs_state_is_named_as_ever_and_its_step_stays_on_the_cpu():
    parameters = fresh()
    optimizer = make_optimizer("adamw_torch", parameters, 1e-2, 0.0)
    take(optimizer, parameters, [0])
    tensors, numbers = optimizer_state(optimizer, parameters)
    moved = ("small", "large", "paged")
    assert tensors.keys() == {f"{name}|{key}" for name in moved for key in ("step", "exp_avg", "exp_avg_sq")}
    assert numbers == {"optimizer": "AdamW", "learning_rate": 1e-2, "values": {}}
    resumed = make_optimizer("adamw_torch", parameters, 1e-2, 0.0)
    restore_optimizer(resumed, parameters, tensors, numbers)
    assert resumed.state[parameters["small"]]["step"].device.type == "cpu"
    assert resumed.state[parameters["small"]]["exp_avg"].device == parameters["small"].device


def test_a_checkpoint_from_before_there_was_a_choice_restores():
    parameters = {"w": torch.nn.Parameter(torch.ones(2, device=DEVICE))}
    optimizer = make_optimizer("adamw_torch", parameters, 1e-2, 0.0)
    old = {"w|step": torch.tensor(3.0), "w|exp_avg": torch.ones(2), "w|exp_avg_sq": torch.full((2,), 4.0)}
    restore_optimizer(optimizer, parameters, old, {"learning_rate": 3e-4})
    state = optimizer.state[parameters["w"]]
    assert (state["step"], optimizer.param_groups[0]["lr"]) == (3.0, 3e-4)
    assert state["exp_avg_sq"].tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match=r"optimizer is AdamW and the run's is AdamW8bit"):
        restore_optimizer(make_optimizer("adamw_8bit", parameters, 1e-2, 0.0), parameters, old, {"learning_rate": 3e-4})


def test_a_state_from_before_the_first_step_restores():
    parameters = fresh()
    optimizer = make_optimizer("adamw_torch", parameters, 1e-2, 0.0)
    tensors, numbers = optimizer_state(optimizer, parameters)
    assert tensors == {}
    take(optimizer, parameters, [0])
    restore_optimizer(optimizer, parameters, tensors, numbers)
    assert not optimizer.state


def test_state_of_other_parameters_is_refused():
    parameters = fresh()
    optimizer = make_optimizer("adamw_torch", parameters, 1e-2, 0.0)
    with pytest.raises(ValueError, match=r"state of elsewhere, which is not trained"):
        restore_optimizer(optimizer, parameters, {"elsewhere|step": torch.tensor(1.0)}, {"learning_rate": 1e-2})


def test_eight_bits_are_eight_bits_and_move_the_weights_as_adamw_does():
    """The first step of Adam is one learning rate along the gradient's sign, less the decay: w·(1 − lr·decay) − lr."""
    parameters = {"w": torch.nn.Parameter(torch.ones(64, 64, device=DEVICE))}
    optimizer = make_optimizer("adamw_8bit", parameters, 0.1, 0.5)
    parameters["w"].grad = torch.full((64, 64), 2.0, device=DEVICE)
    optimizer.step()
    assert torch.allclose(parameters["w"].detach().cpu(), torch.full((64, 64), 0.85), atol=1e-5)
    assert optimizer.state[parameters["w"]]["state1"].dtype == torch.uint8


def test_unknown_names_get_a_hint():
    with pytest.raises(ValueError, match=r"unknown optim 'adamw_8bits'; there are adamw_torch, .*'adamw_8bit'\?"):
        check_optimizer("adamw_8bits", on_gpu=True)
    with pytest.raises(ValueError, match=r"paged_adamw_8bit$"):
        check_optimizer("zzz", on_gpu=True)


@pytest.mark.parametrize(
    ("name", "instead"), [("paged_adamw_32bit", "adamw_torch"), ("paged_adamw_8bit", "adamw_8bit")]
)
def test_paged_ones_are_refused_without_a_gpu(name, instead):
    check_optimizer(name, on_gpu=True)
    with pytest.raises(ValueError, match=rf"needs an NVIDIA GPU.*on a CPU use '{instead}'"):
        check_optimizer(name, on_gpu=False)


def test_the_others_work_anywhere():
    for name in ("adamw_torch", "adamw_8bit"):
        check_optimizer(name, on_gpu=False)
        check_optimizer(name, on_gpu=True)


def test_the_names_are_transformers():
    from transformers.training_args import OptimizerNames

    assert set(OPTIMIZERS) <= {name.value for name in OptimizerNames}


def test_torchs_optimizer_does_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # importing it now raises
    for name in OPTIMIZERS:
        check_optimizer(name, on_gpu=True)
    parameters = {"w": torch.nn.Parameter(torch.ones(1))}
    optimizer = make_optimizer("adamw_torch", parameters, 1e-3, 0.0)
    restore_optimizer(optimizer, parameters, *optimizer_state(optimizer, parameters))
    with pytest.raises(ImportError):
        make_optimizer("adamw_8bit", parameters, 1e-3, 0.0)
