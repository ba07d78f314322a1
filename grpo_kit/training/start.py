"""`train` and `resume`: check everything, set up the run's folder and record, start the thread, return."""

from __future__ import annotations

import difflib
import importlib.metadata
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_kit.data import check_lengths
from grpo_kit.model import Model, load_model
from grpo_kit.rewards import Reward, RewardSet, from_spec
from grpo_kit.store import Record
from grpo_kit.training.checkpoint import checkpoints, load_checkpoint, read_state
from grpo_kit.training.options import TrainOptions, derive
from grpo_kit.training.run import Run
from grpo_kit.training.step import Prompts

if TYPE_CHECKING:
    from datasets import Dataset

Rewards = RewardSet | Reward | Callable[..., Any]
VERSIONS_OF = ("grpo-kit", "torch", "transformers", "peft", "bitsandbytes", "datasets")


def train(model: Model, data: Dataset, rewards: Rewards, *, run_dir: str | Path | None = None, **options: Any) -> Run:
    """Start training in the background and return at once; displaying the returned `Run` shows its live panel.

    data:    a Dataset with a `prompt` column (see `grpo_kit.data`) and the columns that the rewards name.
    rewards: a RewardSet, or a single reward function.
    options: see `TrainOptions`: steps, prompts_per_step, num_generations, learning_rate, algorithm, beta, …
    run_dir: where the record and the checkpoints go; `runs/<time>_<model>_<algorithm>` unless given.

    A run of the same model that is still going is stopped cleanly first. Raises ValueError, before anything is
    computed, for options, columns or prompts that can't work.
    """
    chosen, settings = derive(_options(options), on_gpu=model.precision.device.type == "cuda")
    reward_set = rewards if isinstance(rewards, RewardSet) else RewardSet(rewards)
    reward_set.check_columns([name for name in data.column_names if name != "prompt"])
    prompts = _prompts(data, model, chosen.max_completion_length)
    if model.stop_run is not None:
        model.stop_run()
    directory = _new_directory(run_dir, model, chosen)
    data.to_parquet(str(directory / "data.parquet"))
    record = Record(directory / "run.sqlite")
    record.write_run(
        {
            "options": asdict(chosen),
            "settings": [asdict(setting) for setting in settings],
            "model": asdict(model.options),
            "model_notes": model.notes,
            "rewards": [_describe(reward) for reward in reward_set.rewards],
            "versions": _versions(),
            "hardware": _hardware(model),
        }
    )
    run = Run(model, prompts, reward_set, chosen, settings, record, directory)
    run.start()
    return run


def resume(
    run_dir: str | Path, *, model: Model | None = None, rewards: Rewards | None = None, steps: int | None = None
) -> Run:
    """Go on with a run from its last checkpoint, also in a new kernel; steps after that checkpoint are made again.

    model:   the one loaded, or None to load the one that the run was made with.
    rewards: None rebuilds ready-made rewards and looks functions up by name in the notebook (rerun their cells first).
    steps:   how many steps to end at, if not the number that the run began with.

    Raises FileNotFoundError if the folder holds no run, ValueError if a reward can't be found or the model doesn't fit.
    """
    directory = Path(run_dir)
    if not (directory / "run.sqlite").exists():
        raise FileNotFoundError(f"{directory} holds no run (no run.sqlite in it)")
    record = Record(directory / "run.sqlite")
    info = record.run_info()
    found = checkpoints(directory)
    if not found:
        raise FileNotFoundError(
            f"{directory} holds no checkpoint: the run ended before its first one; start it anew with train"
        )
    reward_set = (
        _rewards_again(info["rewards"])
        if rewards is None
        else rewards
        if isinstance(rewards, RewardSet)
        else RewardSet(rewards)
    )
    if model is None:
        model = load_model(**info["model"])
    if model.stop_run is not None:
        model.stop_run()
    from datasets import Dataset

    data = Dataset.from_parquet(str(directory / "data.parquet"))
    chosen, settings = derive(_options_again(info["options"], steps), on_gpu=model.precision.device.type == "cuda")
    prompts = _prompts(data, model, chosen.max_completion_length)
    run = Run(model, prompts, reward_set, chosen, settings, record, directory)
    with model.lock:
        load_checkpoint(found[-1], model, run._stepper.updater)
    state = read_state(found[-1])
    for name, weight in state["weights"].items():
        if name in reward_set.names:
            reward_set.set_weight(name, weight)
    record.forget_after(state["step"])
    run.start(after_step=state["step"], elapsed=state["elapsed"])
    return run


def _options(given: dict[str, Any]) -> TrainOptions:
    known = [field.name for field in fields(TrainOptions)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"train has no option {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}")
            )
    return TrainOptions(**given)


def _options_again(saved: dict[str, Any], steps: int | None) -> TrainOptions:
    return TrainOptions(**{**saved, **({} if steps is None else {"steps": steps})})


def _prompts(data: Dataset, model: Model, max_completion_length: int) -> Prompts:
    token_ids = check_lengths(data, model, max_completion_length)
    rows = [dict(row) for row in data]
    return Prompts([row.pop("prompt") for row in rows], token_ids, rows)


def _new_directory(run_dir: str | Path | None, model: Model, options: TrainOptions) -> Path:
    if run_dir is None:
        name = re.sub(r"[^\w.-]", "", Path(model.options.name_or_path).name)
        run_dir = Path("runs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{name}_{options.algorithm}"
    directory = Path(run_dir)
    if (directory / "run.sqlite").exists():
        raise ValueError(
            f"{directory} holds a run already: go on with it by resume({str(directory)!r}), or choose another run_dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _describe(reward: Reward) -> dict[str, Any]:
    return {"name": reward.name, "weight": reward.weight, "spec": reward.spec, "source": reward.source}


def _rewards_again(described: list[dict[str, Any]]) -> RewardSet:
    """Ready-made rewards from their recipe; the notebook's own by name. Recorded source code is never run."""
    main = vars(sys.modules["__main__"])
    missing = [d["name"] for d in described if not d["spec"] and d["name"] not in main]
    if missing:
        raise ValueError(
            f"the run was made with reward functions that this notebook does not define yet: {', '.join(missing)}. "
            "Rerun their cells (the run's record keeps their source), or pass rewards="
        )
    return RewardSet(*(from_spec(d["spec"]) if d["spec"] else main[d["name"]] for d in described))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _hardware(model: Model) -> dict[str, Any]:
    return {"device": str(model.precision.device), "reason": model.precision.reason, "threads": torch.get_num_threads()}
