"""What the tests against TRL share: a ragged batch, in our form and in TRL's, and one pass over it on either side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import Model
from grpo_kit.model.lora import lora_parameters
from grpo_kit.rollout import Completion
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, Estimates
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.passes import Passes, Sums
from grpo_kit.training.update import Updater

TEMPERATURE, EPSILON, EPSILON_HIGH, MAX_LENGTH, GENERATIONS = 0.7, 0.2, 0.28, 9, 4
PROMPT_LENGTHS = [5, 5, 11, 11, 3, 3, 8, 8]
COMPLETION_LENGTHS = [9, 2, 1, 9, 6, 4, 9, 7]  # nine is the most there may be: those are truncated
N = len(COMPLETION_LENGTHS)
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, 0.0, -0.2, -1.6])
TOKEN_BUDGETS = [1, 45, 10_000]  # each sequence alone; batches of 2 to 8; all together
PAD = 257


def sequences(masked: bool = False, sampled: Tensor | None = None) -> list[Sequence]:
    """The batch. masked: the truncated ones are left out. sampled [N, T]: what the engine said of each token."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for row, (prompt, length) in enumerate(zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)):
        draw = torch.randint(250, (prompt + length,), generator=generator).tolist()
        reason = "length" if length == MAX_LENGTH else "eos"
        said = [0.0] * length if sampled is None else sampled[row, :length].tolist()
        completion = Completion(draw[prompt:], said, reason, "")
        made.append(Sequence(draw[:prompt], completion, trained=not (masked and reason == "length")))
    return made


def trl_inputs(batch: list[Sequence], advantages: Tensor = ADVANTAGES) -> dict[str, Tensor]:
    """As TRL's own `_generate_and_score_completions` lays them out; a masked completion has a mask of zeros."""
    count = len(batch)
    prompt = max(len(s.prompt_ids) for s in batch)
    completion = max(len(s.completion.token_ids) for s in batch)
    made = {
        "prompt_ids": torch.full((count, prompt), PAD),
        "prompt_mask": torch.zeros(count, prompt, dtype=torch.int64),
        "completion_ids": torch.full((count, completion), PAD),
        "completion_mask": torch.zeros(count, completion, dtype=torch.int64),
    }
    for row, sequence in enumerate(batch):
        made["prompt_ids"][row, prompt - len(sequence.prompt_ids) :] = torch.tensor(sequence.prompt_ids)
        made["prompt_mask"][row, prompt - len(sequence.prompt_ids) :] = 1
        length = len(sequence.completion.token_ids)
        made["completion_ids"][row, :length] = torch.tensor(sequence.completion.token_ids)
        made["completion_mask"][row, :length] = int(sequence.trained)
    return {**made, "advantages": advantages, "num_items_in_batch": made["completion_mask"].sum()}


def trl_logprobs(trainer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[N, T], by TRL's own forward pass."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        width = inputs["completion_ids"].shape[1]
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]


def moved(trainer: Any, seed: int = 31, scale: float = 1.0) -> Tensor:
    """Logprobs [N, T] so far from the current ones that single tokens' ratios and whole answers' leave the bounds."""
    generator = torch.Generator().manual_seed(seed)
    noise = 0.5 * torch.randn(N, MAX_LENGTH, generator=generator) + 0.3 * torch.randn(N, 1, generator=generator)
    return trl_logprobs(trainer, trl_inputs(sequences())) + scale * noise


def our_updater(model: Model, name: str, budget: int, **options: Any) -> Updater:
    """Ready to make passes, with what TRL is set to here."""
    clip = {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH}
    common = {
        **{option: value for option, value in clip.items() if option in get_algorithm(name).loss_options},
        "temperature": TEMPERATURE,
        "max_completion_length": MAX_LENGTH,
        "num_generations": GENERATIONS,
        "tokens_per_micro_batch": budget,
    }
    return Updater(model, derive(TrainOptions(algorithm=name, **{**common, **options}), on_gpu=False)[0])


def credit_of(advantages: Tensor = ADVANTAGES) -> Credit:
    return Credit(advantages, None, None, {})


def from_before(old: Tensor | None) -> Estimates | None:
    """Estimates that only say what the logprobs were before the step."""
    if old is None:
        return None
    ones = torch.ones_like(old)
    return Estimates(ones, ones, old, torch.zeros_like(old), None, None)


def our_pass(
    updater: Updater, batch: list[Sequence], credit: Credit, estimates: Estimates | None = None
) -> tuple[float, Sums]:
    """The loss of one pass over the batch, as of a later one if estimates say what the logprobs were before. The
    gradients stay in the parameters."""
    parameters = list(updater.parameters.values())
    work = Passes(updater.trainee, batch, credit, estimates, list(range(len(batch))), lambda loss: loss, parameters)
    if estimates is not None:
        work.old = estimates.logprobs.clone()
    return sum(work.learn(number).item() for number in range(len(work.batches))), work.sums


def gradients(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def backward(trainer: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return gradients(lora_parameters(trainer.model))


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Relative to each tensor's largest value: 1e-5."""
    for name, expected in theirs.items():
        largest = expected.abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-5 * largest, msg=lambda m, name=name: name + m)


def assert_same_pass(
    model: Model,
    name: str,
    batch: list[Sequence],
    credit: Credit,
    estimates: Estimates | None,
    loss: float,
    theirs: dict[str, Tensor],
    budgets: list[int] = TOKEN_BUDGETS,
    **options: Any,
) -> list[Sums]:
    """Our loss and gradients are TRL's, however the step is cut into micro-batches. Returns our sums of each cut."""
    found = []
    for budget in budgets:
        updater = our_updater(model, name, budget, **options)
        updater.forget_gradients()  # of a comparison that failed
        total, sums = our_pass(updater, batch, credit, estimates)
        assert total == pytest.approx(loss, rel=1e-5, abs=1e-6), f"{total} is not {loss}"
        assert_close(gradients(updater.parameters), theirs)
        found.append(sums)
    return found
