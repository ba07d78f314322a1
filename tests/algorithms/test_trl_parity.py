"""Losses, gradients and steps of the GRPO family equal TRL 1.16's, on the same tiny Llama with the same adapter.

TRL's own `compute_loss` is driven with hand-made inputs: ragged prompts padded on the left, ragged completions padded
on the right, old logprobs far enough from the current ones that clipping matters. Ours runs the updater's code on the
same tokens, cut into micro-batches in several ways, none of which may change the result.

Deliberate differences, each of which says so at its test too:

- TRL's grpo, bnpo, dr_grpo, sapo and luspo normalise each micro-batch by itself (for bnpo with ragged lengths that is
  another loss), and it takes the threshold of top_entropy_quantile and the mean of the entropy bonus there; ours are
  the whole optimizer step's. TRL gets the step as one micro-batch here, where both mean the same.
- TRL's cispo caps the ratio at epsilon_high itself, MiniMax-M1 (equations 4 and 5) and ours at 1 + epsilon_high.
- TRL multiplies the KL term by the importance ratio unless told otherwise, ours is DeepSeekMath's equation 3 as printed
  unless use_bias_correction_kl is on. Then TRL takes the loss's own ratio, ours always the token's, as DeepSeek-V3.2
  prints it: gspo and luspo differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kit.algorithms import get_algorithm, sampler_correction
from grpo_kit.algorithms.corrections import CORRECTIONS
from grpo_kit.model import Model
from grpo_kit.model.lora import lora_parameters
from tests.algorithms.conftest import copy_adapter
from tests.algorithms.parity import (
    ADVANTAGES,
    COMPLETION_LENGTHS,
    EPSILON,
    EPSILON_HIGH,
    MAX_LENGTH,
    N,
    assert_same_pass,
    backward,
    credit_of,
    from_before,
    moved,
    our_updater,
    sequences,
    trl_inputs,
    trl_logprobs,
)

# What TRL calls them: loss_type and importance_sampling_level.
CALLED = {
    "grpo": ("grpo", "token"),
    "bnpo": ("bnpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "token"),
    "vespo": ("vespo", "token"),
    "gspo": ("grpo", "sequence"),
    "luspo": ("luspo", "sequence"),
}
# (truncated answers masked, old logprobs apart from the current ones, beta)
CASES = {
    "on policy, with KL": (False, False, 0.04),
    "on policy, masked": (True, False, 0.0),
    "moved": (False, True, 0.0),
    "moved, masked, with KL": (True, True, 0.04),
}
TOKEN_CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo"]
CLIPPED = [*TOKEN_CLIPPED, "gspo", "luspo"]


def trl_loss(
    trainer: Any,
    name: str,
    inputs: dict[str, Tensor],
    beta: float = 0.0,
    delta: float | None = None,
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    use_bias_correction_kl: bool = False,
    off_policy_mask_threshold: float | None = None,
    corrected: bool = False,
    level: str | None = None,
) -> Tensor:
    """TRL's compute_loss, every setting of it said anew. corrected: `inputs` hold an importance_sampling_ratio."""
    trainer.loss_type, trainer.importance_sampling_level = CALLED[name]
    trainer.importance_sampling_level = level or trainer.importance_sampling_level
    trainer.epsilon_low, trainer.epsilon_high = EPSILON, 1 + EPSILON_HIGH if name == "cispo" else EPSILON_HIGH
    trainer.beta, trainer.args.delta, trainer.args.use_bias_correction_kl = beta, delta, use_bias_correction_kl
    trainer.entropy_coef, trainer._entropy_bonus_enabled = entropy_coef, entropy_coef != 0
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = top_entropy_quantile, off_policy_mask_threshold
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrected
    trainer.model.train()
    if beta:
        with trainer.model.disable_adapter():
            inputs = {**inputs, "ref_per_token_logps": trl_logprobs(trainer, inputs)}
    try:
        return trainer.compute_loss(trainer.model, dict(inputs))
    finally:
        trainer.use_vllm = False


def made_for(name: str, trainer: Any) -> tuple[Tensor, Tensor]:
    """Advantages, and logprobs from before the step. vespo's weight is a steep function of a sum over the answer, and
    its loss a difference of large numbers: float32 carries that to 1e-5 only where neither is at its worst."""
    if name == "vespo":
        return ADVANTAGES.where(ADVANTAGES > 0, ADVANTAGES / 10), moved(trainer, scale=0.3)
    return ADVANTAGES, moved(trainer)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CALLED)
def test_loss_and_gradients(name: str, case: str, ours: Model, trl_trainer: Any) -> None:
    masked, is_moved, beta = CASES[case]
    batch, (advantages, before) = sequences(masked), made_for(name, trl_trainer)
    inputs, old = trl_inputs(batch, advantages), before if is_moved else None
    if old is not None:
        inputs["old_per_token_logps"] = old
    loss = trl_loss(trl_trainer, name, inputs, beta)
    theirs = backward(trl_trainer, loss)

    credit = credit_of(advantages)
    for sums in assert_same_pass(ours, name, batch, credit, from_before(old), loss.item(), theirs, beta=beta):
        clipped = sums.metrics()["clip_ratio"]
        if name in TOKEN_CLIPPED:  # TRL's mean for gspo and luspo is over answers, not tokens
            assert clipped == pytest.approx(trl_trainer._metrics["train"]["clip_ratio/region_mean"][-1], abs=1e-6)
        if name in CLIPPED:
            assert (clipped > 0.1) == is_moved  # else this test would not look at clipping


@pytest.mark.parametrize("name", CALLED)
def test_two_optimizer_steps_on_one_batch(name: str, ours: Model, trl_trainer: Any) -> None:
    """The whole of `Updater.update` with num_iterations=2, against TRL's loss with clipping and AdamW by hand."""
    start = {name: parameter.detach().clone() for name, parameter in ours.trainable().items()}
    batch = sequences(masked=True)
    try:
        updater = our_updater(ours, name, 45, beta=0.04, num_iterations=2, learning_rate=1e-2, max_grad_norm=0.5)
        metrics = updater.update(batch, credit_of(), None, pause_point=lambda: None)

        theirs = lora_parameters(trl_trainer.model)
        optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.0)
        inputs = trl_inputs(batch)
        old = trl_logprobs(trl_trainer, inputs)
        norms = []
        for _ in range(2):
            trl_loss(trl_trainer, name, {**inputs, "old_per_token_logps": old}, 0.04).backward()
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


@pytest.mark.parametrize("name", CLIPPED)
def test_two_sided_clipping(name: str, ours: Model, trl_trainer: Any) -> None:
    batch, old = sequences(), moved(trl_trainer) - 0.3  # a policy that has become surer of all it said
    inputs = {**trl_inputs(batch), "old_per_token_logps": old}
    loss = trl_loss(trl_trainer, name, inputs, delta=1.5)
    assert loss.item() != pytest.approx(trl_loss(trl_trainer, name, inputs).item(), rel=1e-3), "δ was never reached"
    theirs = backward(trl_trainer, loss)
    assert_same_pass(ours, name, batch, credit_of(), from_before(old), loss.item(), theirs, delta=1.5)


# One ratio for the whole answer leaves no token out: TRL scales the answer's loss by its share of unsure tokens.
WHOLE = [name for name in CALLED if get_algorithm(name).whole_answers]


@pytest.mark.parametrize(
    ("name", "quantile", "masked"),
    [(name, 1.0, False) for name in CALLED] + [(name, 0.4, True) for name in CALLED if name not in WHOLE],
)
def test_entropy_bonus_and_the_least_sure_tokens(
    name: str, quantile: float, masked: bool, ours: Model, trl_trainer: Any
) -> None:
    """The threshold is the step's in ours, the micro-batch's in TRL, which has the step as one here. Neither silences
    the pull to the reference."""
    options = {"entropy_coef": 0.05, "top_entropy_quantile": quantile, "beta": 0.04}
    batch, (advantages, old) = sequences(masked), made_for(name, trl_trainer)
    loss = trl_loss(trl_trainer, name, {**trl_inputs(batch, advantages), "old_per_token_logps": old}, **options)
    theirs = backward(trl_trainer, loss)
    estimates = our_updater(ours, name, 45, **options).measure(batch, lambda: None)
    estimates = from_before(old) if estimates is None else replace(estimates, logprobs=old)
    assert_same_pass(ours, name, batch, credit_of(advantages), estimates, loss.item(), theirs, **options)


@pytest.mark.parametrize("name", CALLED)
def test_kl_with_the_bias_corrected(name: str, ours: Model, trl_trainer: Any) -> None:
    """For gspo and luspo TRL multiplies by the sequence's ratio. There the reference is TRL's loss without KL, plus
    TRL's KL of token ratios, which is what it computes where no answer has an advantage."""
    batch, (advantages, old) = sequences(), made_for(name, trl_trainer)
    inputs = {**trl_inputs(batch, advantages), "old_per_token_logps": old}
    loss = trl_loss(trl_trainer, name, inputs, 0.4, use_bias_correction_kl=True)
    if CALLED[name][1] == "sequence":
        quiet = {**inputs, "advantages": torch.zeros(N)}
        kl = trl_loss(trl_trainer, name, quiet, 0.4, use_bias_correction_kl=True, level="token")
        expected = trl_loss(trl_trainer, name, inputs) + kl
        assert expected.item() != pytest.approx(loss.item(), rel=1e-3)
        loss = expected
    theirs = backward(trl_trainer, loss)
    options = {"beta": 0.4, "use_bias_correction_kl": True}
    assert_same_pass(ours, name, batch, credit_of(advantages), from_before(old), loss.item(), theirs, **options)


@pytest.mark.parametrize("name", CALLED)
def test_bad_answers_that_were_left_behind_are_dropped(name: str, ours: Model, trl_trainer: Any) -> None:
    """off_policy_mask_threshold measures from the sampler's logprobs, which are neither the old nor the current ones
    here. The pull to the reference stays."""
    (advantages, old), sampled = made_for(name, trl_trainer), moved(trl_trainer, seed=3)
    batch = sequences(sampled=sampled)
    inputs = {**trl_inputs(batch, advantages), "old_per_token_logps": old, "sampling_per_token_logps": sampled}
    loss = trl_loss(trl_trainer, name, inputs, 0.04, off_policy_mask_threshold=0.05)
    kept = trl_loss(trl_trainer, name, inputs, 0.04).item()
    dropped = trl_loss(trl_trainer, name, inputs, 0.04, off_policy_mask_threshold=-9.0).item()
    assert min(abs(loss.item() - kept), abs(loss.item() - dropped)) > 1e-3, "some are kept, some dropped"
    theirs = backward(trl_trainer, loss)
    options = {"beta": 0.04, "off_policy_mask_threshold": 0.05}
    assert_same_pass(ours, name, batch, credit_of(advantages), from_before(old), loss.item(), theirs, **options)


CORRECTED = [
    *[("grpo", mode, clip_min) for mode in CORRECTIONS for clip_min in (None, 0.8)],
    ("gspo", "token_truncate", 0.8),
    ("cispo", "token_mask", 0.8),
    ("luspo", "sequence_mask", None),
    ("sapo", "sequence_truncate", None),
    *[("vespo", mode, clip_min) for mode in ("token_truncate", "token_mask") for clip_min in (None, 0.8)],
]


@pytest.mark.parametrize(("name", "mode", "clip_min"), CORRECTED)
def test_sampler_correction(name: str, mode: str, clip_min: float | None, ours: Model, trl_trainer: Any) -> None:
    """TRL's own `_generate_and_score_completions` as with vLLM, given our tokens and made-up logprobs of a sampler, one
    of them unknown. Its ratio is ours, and the losses that it weighs are equal; vespo takes it into its own weight."""
    advantages, old = made_for(name, trl_trainer)
    sampled = moved(trl_trainer, seed=3, scale=0.3 if name == "vespo" else 1.0)
    sampled[0, 4] = torch.nan
    batch = sequences(sampled=sampled)
    inputs = trl_inputs_with_vllm(trl_trainer, batch, mode, 1.2, clip_min)
    now, mask = inputs["old_per_token_logps"], inputs["completion_mask"].float()
    ratio = sampler_correction(now, sampled, mask, mode, 1.2, clip_min)
    torch.testing.assert_close(ratio, inputs["importance_sampling_ratio"], rtol=1e-6, atol=1e-6)
    assert ((ratio == 1.2) | (ratio == 0)).any(), "the bound was never reached"

    # And the policy has moved on since: two ratios, not one.
    ratio = sampler_correction(old, sampled, mask, mode, 1.2, clip_min)
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "importance_sampling_ratio": ratio}
    loss = trl_loss(trl_trainer, name, inputs, 0.04, corrected=True)
    theirs = backward(trl_trainer, loss)
    options = {
        "beta": 0.04,
        "importance_sampling_correction": mode,
        "importance_sampling_clip_max": 1.2,
        "importance_sampling_clip_min": clip_min,
    }
    credit = credit_of(advantages)
    for sums in assert_same_pass(ours, name, batch, credit, from_before(old), loss.item(), theirs, **options):
        expected = (ratio * mask).sum() / mask.sum()
        assert sums.metrics()["correction"] == pytest.approx(expected.item(), rel=1e-5)


def trl_inputs_with_vllm(
    trainer: Any, batch: list[Any], mode: str, clip_max: float, clip_min: float | None
) -> dict[str, Tensor]:
    """What TRL makes of the batch where vLLM has sampled it."""
    said = [[None if p != p else p for p in s.completion.logprobs] for s in batch]
    completions = [s.completion.token_ids for s in batch]
    trainer._generate = lambda prompts: (
        [s.prompt_ids for s in batch],
        completions,
        None,
        [""] * N,
        said,
        {},
        None,
        None,
    )
    trainer.scores, trainer.beta, trainer.scale_rewards = [(0.0, 1.0)] * N, 0.0, "group"
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_max, trainer.vllm_importance_sampling_clip_min = clip_max, clip_min
    try:
        made = trainer._generate_and_score_completions([{"prompt": "a"}] * N)
    finally:
        del trainer._generate
        trainer.use_vllm = False
    assert made["completion_mask"].sum(-1).tolist() == COMPLETION_LENGTHS
    assert made["completion_ids"].shape == (N, MAX_LENGTH)
    return made
