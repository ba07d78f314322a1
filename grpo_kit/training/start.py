"""`train` and `resume`: check everything, set up the run's folder and record, start the thread, return."""

from __future__ import annotations

import difflib
import importlib.metadata
import platform
import re
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, fields
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_kit.model import Model, load_model
from grpo_kit.rewards import RewardSet
from grpo_kit.store import Record
from grpo_kit.training.checkpoint import checkpoints, load_checkpoint, read_state
from grpo_kit.training.derive import derive
from grpo_kit.training.evaluate import Rewards, without_people
from grpo_kit.training.memory import planned
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.prompts import Prompts, ready_prompts
from grpo_kit.training.recall import describe, recall_weights, rewards_again
from grpo_kit.training.run import BUDGET, Run
from grpo_kit.training.run_lock import RunLock, refuse_if_elsewhere

if TYPE_CHECKING:
    from datasets import Dataset

TRL_NAMES = {
    "loss_type": "algorithm",
    "max_steps": "steps",
    "eval_dataset": "eval_data",
    "importance_sampling_level": 'algorithm="gspo" ("sequence") or "gspo_token"',
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "num_ppo_epochs": "num_iterations",
    "vllm_importance_sampling_correction": "importance_sampling_correction",
    "vllm_importance_sampling_mode": "importance_sampling_correction",
    "reward_weights": "the weight of each reward, gk.reward(weight=2.0),",
}
DATA, EVAL_DATA = "data.parquet", "eval_data.parquet"
VERSIONS_OF = ("grpo-kit", "torch", "transformers", "peft", "bitsandbytes", "datasets")


def train(
    model: Model,
    data: Dataset,
    rewards: Rewards,
    *,
    eval_data: Dataset | None = None,
    run_dir: str | Path | None = None,
    **options: Any,
) -> Run:
    """Start training in the background and return at once; displaying the returned `Run` shows its live panel.

    data:    a Dataset with a `prompt` column (see `grpo_kit.data`) and the columns that the rewards name.
    rewards: a RewardSet, or a single reward function.
    options: see `TrainOptions`: steps, prompts_per_step, num_generations, learning_rate, algorithm, beta, …
    eval_data: held-out prompts with the same columns, answered every `eval_steps` steps; `run.evaluations` and the
             panel show how many are right.
    run_dir: where the record and the checkpoints go; `runs/<time>_<model>_<algorithm>` unless given.

    A run of the same model that is still going is stopped cleanly first. Raises ValueError, before anything is
    computed, for options, columns or prompts that can't work.
    """
    on_gpu = model.precision.device.type == "cuda"
    asked, reward_set = _options(options), _reward_set(rewards)
    derive(asked, on_gpu, held_out=eval_data is not None)  # what can't work is said before any prompt is looked at
    prompts = _ready(data, model, reward_set, asked)
    memory = planned(model, asked, longest_prompt=max(map(len, prompts.token_ids)))
    chosen, settings = derive(asked, on_gpu, held_out=eval_data is not None, memory=memory)
    held_out = None if eval_data is None else _ready(eval_data, model, without_people(reward_set), chosen)
    _check_canary(model, chosen)
    directory = _new_directory(run_dir, model, chosen)
    model.stop_live_run()
    with ExitStack() as undo:
        lock = RunLock(directory)
        undo.callback(lock.release)
        _write_data(data, directory / DATA)
        if eval_data is not None:
            _write_data(eval_data, directory / EVAL_DATA)
        record = Record(directory / "run.sqlite")
        undo.callback(record.close)
        run = Run(model, prompts, held_out, reward_set, chosen, settings, record, directory, lock)
        record.write_run(
            {
                "options": asdict(chosen),
                "settings": [asdict(setting) for setting in settings],
                "model": asdict(model.options),
                "model_notes": model.notes,
                "rewards": describe(reward_set),
                "knobs": run.knobs(),
                "versions": _versions(),
                "hardware": _hardware(model),
            }
        )
        run.start()
        undo.pop_all()
    return run


def resume(
    run_dir: str | Path, *, model: Model | None = None, rewards: Rewards | None = None, steps: int | None = None
) -> Run:
    """Go on with a run from its last checkpoint, also in a new kernel; steps after that checkpoint are made again.

    model:   the one loaded, or None to load the one that the run was made with.
    rewards: None rebuilds ready-made rewards and looks functions up by name in the notebook (rerun their cells first).
    steps:   how many steps to end at, if not the number that the run was to make.

    Learning rate and weights are those last in use, but for a weight that the rewards' definition gives anew;
    micro-batches stay as small as they became when memory ran out, and an engine that was given up stays so. A run of
    the same model that is still going is stopped cleanly first.

    Raises FileNotFoundError if the folder holds no run, ValueError if a reward can't be found, the model doesn't fit
    or another process is working on the run.
    """
    directory = Path(run_dir).absolute()
    if not (directory / "run.sqlite").exists():
        raise FileNotFoundError(f"{directory} holds no run (no run.sqlite in it)")
    _last_checkpoint(directory)
    refuse_if_elsewhere(directory)
    with ExitStack() as undo:
        record = Record(directory / "run.sqlite")
        undo.callback(record.close)
        info = record.run_info()
        reward_set = rewards_again(info["rewards"]) if rewards is None else _reward_set(rewards)
        model = model or load_model(**info["model"])
        model.stop_live_run()
        lock = RunLock(directory)
        undo.callback(lock.release)
        info, checkpoint = record.run_info(), _last_checkpoint(directory)  # a run just stopped has left newer ones
        state = read_state(checkpoint)
        on_gpu = model.precision.device.type == "cuda"
        eval_data = _read_data(directory / EVAL_DATA) if (directory / EVAL_DATA).exists() else None
        asked = _options_again(info, steps, state["step"])
        prompts = _ready(_read_data(directory / DATA), model, reward_set, asked)
        memory = planned(model, asked, longest_prompt=max(map(len, prompts.token_ids)))
        chosen, settings = derive(asked, on_gpu, held_out=eval_data is not None, memory=memory)
        held_out = None if eval_data is None else _ready(eval_data, model, without_people(reward_set), chosen)
        _check_canary(model, chosen)
        run = Run(model, prompts, held_out, reward_set, chosen, settings, record, directory, lock)
        with model.lock:
            load_checkpoint(checkpoint, model, run._stepper.updater)
        recall_weights(reward_set, info["rewards"], info["knobs"]["weights"])
        run.go_on_after(state["step"], state["elapsed"], info["knobs"]["learning_rate"], info.get(BUDGET))
        record.forget_after(state["step"])
        derived = [asdict(setting) for setting in settings]
        record.write_run(
            {"options": asdict(chosen), "settings": derived, "rewards": describe(reward_set), "knobs": run.knobs()}
        )
        run.start()
        undo.pop_all()
    return run


def _reward_set(rewards: Rewards) -> RewardSet:
    return rewards if isinstance(rewards, RewardSet) else RewardSet(rewards)


def _last_checkpoint(directory: Path) -> Path:
    found = checkpoints(directory)
    if not found:
        raise FileNotFoundError(
            f"{directory} holds no checkpoint: the run ended before its first one; start it anew with train"
        )
    return found[-1]


def _options(given: dict[str, Any]) -> TrainOptions:
    known = [field.name for field in fields(TrainOptions)]
    for name in given:
        if name in TRL_NAMES:
            raise ValueError(f"train has no option {name!r}; what TRL calls so is {TRL_NAMES[name]} here")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"train has no option {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known)}")
            )
    return TrainOptions(**given)


def _options_again(info: dict[str, Any], steps: int | None, made: int) -> TrainOptions:
    """The options as the user gave them: what was derived is open again, for this machine may be another one."""
    derived = {setting["name"]: None for setting in info["settings"]}
    chosen = TrainOptions(**{**info["options"], **derived, **({} if steps is None else {"steps": steps})})
    if chosen.steps < made:
        raise ValueError(f"the run has made {made} steps already, so it can't end at {chosen.steps}")
    return chosen


def _check_canary(model: Model, options: TrainOptions) -> None:
    if options.canary is None:
        return
    room = model.max_seq_length - len(model.encode(options.canary))
    if room < options.max_completion_length:
        raise ValueError(
            f"the canary leaves room for {max(room, 0)} tokens of an answer, and max_completion_length is "
            f"{options.max_completion_length}: shorten it, or load the model with a larger max_seq_length"
        )


def _ready(data: Dataset, model: Model, rewards: RewardSet, options: TrainOptions) -> Prompts:
    rewards.check_columns([name for name in data.column_names if name != "prompt"])
    return ready_prompts(data, model, options.max_completion_length)


# By pyarrow itself: datasets would show a progress bar of its own, and copy what it reads into its cache.


def _write_data(data: Dataset, path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(data.with_format("arrow")[:], path)


def _read_data(path: Path) -> Dataset:
    from datasets import Dataset
    from pyarrow import parquet

    return Dataset(parquet.read_table(path))


def _new_directory(run_dir: str | Path | None, model: Model, options: TrainOptions) -> Path:
    if run_dir is not None:
        directory = Path(run_dir).absolute()
        if _holds_a_run(directory):
            raise ValueError(
                f"{directory} holds a run already: go on with it by resume({str(run_dir)!r}), or choose another run_dir"
            )
    else:
        model_name = re.sub(r"[^\w.-]", "", Path(model.options.name_or_path).name)
        name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{model_name}_{options.algorithm}"
        names = chain([name], (f"{name}_{n}" for n in count(2)))  # two runs may begin in the same second
        directory = next(path for path in (Path("runs", name).absolute() for name in names) if not path.exists())
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _holds_a_run(directory: Path) -> bool:
    """Whether there is anything to resume or to lose: a run that was killed before its first checkpoint has neither."""
    if not (directory / "run.sqlite").exists():
        return False
    with closing(Record(directory / "run.sqlite")) as record:
        if checkpoints(directory) or record.last_step():
            return True
    RunLock(directory).release()  # raises ValueError if a run is just about to begin there
    return False


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
