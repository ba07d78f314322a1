"""Losses, gradients, steps and advantages equal TRL 1.16's, on the same tiny Llama with the same adapter.

TRL's own `compute_loss` is driven with hand-made inputs: ragged prompts padded on the left, ragged completions padded
on the right, old logprobs far enough from the current ones that clipping matters. Ours runs the updater's code on the
same tokens, cut into micro-batches in several ways, none of which may change the result.

Two deliberate differences. TRL's grpo, bnpo and dr_grpo normalise each micro-batch by itself (for bnpo with ragged
lengths that is another loss), ours the whole optimizer step: TRL gets the step as one micro-batch here, where both mean
the same. And TRL multiplies the KL term by the importance ratio unless told otherwise (use_bias_correction_kl, after
DeepSeek-V3.2), ours is DeepSeekMath's equation 3 as printed: TRL is told otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import group_advantages
from grpo_kit.model import Model
from grpo_kit.model.lora import lora_parameters
from grpo_kit.rollout import Completion
from grpo_kit.training.batch import Sequence
from grpo_kit.training.options import TrainOptions, derive
from grpo_kit.training.update import Passes, Sums, Updater

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]
TEMPERATURE, EPSILON, EPSILON_HIGH, MAX_LENGTH = 0.7, 0.2, 0.28, 9
PROMPT_LENGTHS = [5, 5, 11, 11, 3, 3, 8, 8]
COMPLETION_LENGTHS = [9, 2, 1, 9, 6, 4, 9, 7]  # nine is the most there may be: those are truncated
N = len(COMPLETION_LENGTHS)
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, 0.0, -0.2, -1.6])
TOKEN_BUDGETS = [1, 45, 10_000]  # each sequence alone; batches of 2 to 8; all together


def sequences(masked: bool) -> list[Sequence]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for prompt, length in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True):
        draw = torch.randint(250, (prompt + length,), generator=generator).tolist()
        reason = "length" if length == MAX_LENGTH else "eos"
        completion = Completion(draw[prompt:], [0.0] * length, reason, "")
        made.append(Sequence(draw[:prompt], completion, trained=not (masked and reason == "length")))
    return made


def trl_inputs(batch: list[Sequence]) -> dict[str, Tensor]:
    """As TRL's own `_generate_and_score_completions` lays them out; a masked completion has a mask of zeros."""
    prompt, completion = max(PROMPT_LENGTHS), max(COMPLETION_LENGTHS)
    made = {
        "prompt_ids": torch.full((N, prompt), 257),
        "prompt_mask": torch.zeros(N, prompt, dtype=torch.int64),
        "completion_ids": torch.full((N, completion), 257),
        "completion_mask": torch.zeros(N, completion, dtype=torch.int64),
    }
    for row, sequence in enumerate(batch):
        made["prompt_ids"][row, prompt - len(sequence.prompt_ids) :] = torch.tensor(sequence.prompt_ids)
        made["prompt_mask"][row, prompt - len(sequence.prompt_ids) :] = 1
        length = len(sequence.completion.token_ids)
        made["completion_ids"][row, :length] = torch.tensor(sequence.completion.token_ids)
        made["completion_mask"][row, :length] = int(sequence.trained)
    return {**made, "advantages": ADVANTAGES, "num_items_in_batch": made["completion_mask"].sum()}


def trl_logprobs(trainer: Any, inputs: dict[str, Tensor]) -> Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, max(COMPLETION_LENGTHS))[0]


def trl_loss(trainer: Any, name: str, beta: float, inputs: dict[str, Tensor]) -> Tensor:
    trainer.loss_type, trainer.beta = name, beta
    if beta:
        with trainer.model.disable_adapter():
            inputs = {**inputs, "ref_per_token_logps": trl_logprobs(trainer, inputs)}
    trainer.model.train()
    return trainer.compute_loss(trainer.model, dict(inputs))


def our_updater(model: Model, name: str, beta: float, budget: int, **options: Any) -> Updater:
    chosen = TrainOptions(
        algorithm=name,
        beta=beta,
        epsilon=EPSILON,
        epsilon_high=EPSILON_HIGH,
        temperature=TEMPERATURE,
        max_completion_length=MAX_LENGTH,
        tokens_per_micro_batch=budget,
        **options,
    )
    return Updater(model, derive(chosen, on_gpu=False)[0])


def our_loss(updater: Updater, batch: list[Sequence], old: Tensor | None) -> tuple[float, Sums]:
    """One pass over the batch, with old logprobs from outside. The gradients stay in the parameters."""
    work, total = Passes(updater, batch, ADVANTAGES, list(range(len(batch)))), 0.0
    for number, part in enumerate(work.batches):
        if old is not None:
            work.old[number] = old[part.indices, : part.width]
        total += work.learn(number).item()
    return total, work.sums


def gradients(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Relative to each tensor's largest value: 1e-5."""
    for name, expected in theirs.items():
        largest = expected.abs().max().item()
        assert largest > 0, name
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-5 * largest, msg=lambda m, name=name: name + m)


@pytest.mark.parametrize("moved", [False, True], ids=["on policy", "old logprobs differ"])
@pytest.mark.parametrize("masked", [False, True], ids=["all trained", "truncated masked"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients(name: str, beta: float, masked: bool, moved: bool, ours: Model, trl_trainer: Any) -> None:
    batch = sequences(masked)
    inputs, old = trl_inputs(batch), None
    if moved:
        noise = 0.4 * torch.randn(N, max(COMPLETION_LENGTHS), generator=torch.Generator().manual_seed(2))
        old = trl_logprobs(trl_trainer, trl_inputs(sequences(masked=False))) + noise
        inputs["old_per_token_logps"] = old
    loss = trl_loss(trl_trainer, name, beta, inputs)
    loss.backward()
    theirs = gradients(lora_parameters(trl_trainer.model))

    for budget in TOKEN_BUDGETS:
        our_total, sums = our_loss(our_updater(ours, name, beta, budget), batch, old)
        assert our_total == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert_close(gradients(ours.trainable()), theirs)
        clipped = sums.metrics()["clip_ratio"]
        assert clipped == pytest.approx(trl_trainer._metrics["train"]["clip_ratio/region_mean"][-1], abs=1e-6)
        assert (clipped > 0.1) == moved  # else this test would not look at clipping


@pytest.mark.parametrize("name", LOSSES)
def test_two_optimizer_steps_on_one_batch(name: str, ours: Model, trl_trainer: Any) -> None:
    """The whole of `Updater.update` with num_iterations=2, against TRL's loss with clipping and AdamW by hand."""
    from tests.algorithms.conftest import copy_adapter

    start = {name: parameter.detach().clone() for name, parameter in ours.trainable().items()}
    batch = sequences(masked=True)
    try:
        updater = our_updater(ours, name, 0.04, 45, num_iterations=2, learning_rate=1e-2, max_grad_norm=0.5)
        metrics = updater.update(batch, ADVANTAGES, pause_point=lambda: None)

        theirs = lora_parameters(trl_trainer.model)
        optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.0)
        inputs = trl_inputs(batch)
        old = trl_logprobs(trl_trainer, inputs)
        norms = []
        for _ in range(2):
            trl_loss(trl_trainer, name, 0.04, {**inputs, "old_per_token_logps": old}).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()

        assert metrics["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-4)
        for key, parameter in ours.trainable().items():
            assert (parameter - start[key]).abs().max() > 1e-3
            # Adam divides by the gradient's size, so a tiny entry's rounding weighs as much as a large one's.
            assert (parameter - theirs[key]).norm() <= 1e-3 * (parameter - start[key]).norm(), key
    finally:
        with torch.no_grad():
            for key, parameter in ours.trainable().items():
                parameter.copy_(start[key])
        copy_adapter(ours, trl_trainer)


# Two reward functions' scores of two groups of four; None means that the function does not apply.
SCORES: dict[str, list[tuple[float | None, float | None]]] = {
    "all scored": [(1, 0), (0, 0.5), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0), (1, 3)],
    "some by one function only": [(1, None), (None, 0.5), (1, 1), (0, 0), (2, 0), (2, 0), (0, None), (1, 3)],
    "one unscored": [(1, 0), (None, None), (1, 1), (0, 0), (2, 0), (2, 0), (0, 0), (1, 3)],
    "a group unscored": [(None, None)] * 4 + [(2, 0), (2, 0), (0, 0), (1, 3)],
    "one of a group scored": [(None, None), (1, 1), (None, None), (None, None), (2, 0), (2, 0), (0, 0), (1, 3)],
    "a dead group": [(1, 1)] * 4 + [(2, 0), (2, 0), (0, 0), (1, 3)],
}


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("case", SCORES)
def test_advantages(case: str, scale: str, trl_trainer: Any) -> None:
    """TRL's own `_generate_and_score_completions`, from its reward functions to its advantages."""
    trl_trainer.scale_rewards, trl_trainer.beta, trl_trainer.scores = scale, 0.0, SCORES[case]
    theirs = trl_trainer._generate_and_score_completions([{"prompt": "a"}] * 4 + [{"prompt": "b"}] * 4)["advantages"]
    totals = [float("nan") if one is None and two is None else (one or 0.0) + (two or 0.0) for one, two in SCORES[case]]
    torch.testing.assert_close(group_advantages(torch.tensor(totals), 4, scale), theirs, rtol=1e-5, atol=1e-6)
