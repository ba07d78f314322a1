"""From one step's sequences and advantages to changed adapter weights: the policy-gradient update.

Each pass over the batch is one optimizer step, however many micro-batches it takes; the loss weighs every sequence by
the whole step, so cutting it differently changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from grpo_kit.algorithms import Algorithm, clipped_surrogate, get_algorithm, kl_k3
from grpo_kit.model import Model
from grpo_kit.training.batch import MicroBatch, Sequence, collate
from grpo_kit.training.give_up import PassGivenUp, can_be_given_up
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import micro_batches


@dataclass
class Sums:
    """Token sums over the first pass of a step, for its metrics; `of` counts what each was summed over."""

    total: dict[str, float] = field(default_factory=dict)
    count: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.total[name] = self.total.get(name, 0.0) + float((values * mask).sum())
        self.count[name] = self.count.get(name, 0.0) + float(mask.sum())

    def metrics(self) -> dict[str, float | None]:
        """The mean of each; None where nothing was counted."""
        names = ("kl", "entropy", "sampler_gap", "clip_ratio")
        return {name: self.total[name] / self.count[name] if self.count.get(name) else None for name in names}


class Updater:
    """Owns the optimizer and, in float16, the gradient scaler."""

    def __init__(self, model: Model, options: TrainOptions):
        self.model, self.options = model, options
        self.algorithm: Algorithm = get_algorithm(options.algorithm)
        self.parameters = model.trainable()
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self.moved = False  # whether the step being made has changed weights already
        self.scaler = torch.amp.GradScaler(model.precision.device.type, enabled=model.precision.dtype == torch.float16)

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def update(
        self,
        sequences: list[Sequence],
        advantages: Tensor,
        pause_point: Callable[[], None],
        unwanted: Callable[[bool], bool] = lambda first_try: False,
    ) -> dict[str, float | None]:
        """Run `num_iterations` optimizer steps on the batch. advantages [N]. Returns the step's metrics.

        `pause_point` is called before each micro-batch of the first pass, with the model in a state that others may
        use; a pass is given up and made again when `unwanted(first_try)` says so in its middle. Until the first
        optimizer step an exception from `pause_point` leaves the weights as they were; from then on neither is called,
        so that a step is never left half done.

        With beta = 0, sequences whose advantage is 0 have no gradient and are left out; a step without any other moves
        nothing, the optimizer's momentum included.
        """
        teaching = self._teaching(sequences, advantages)
        work = Passes(self, sequences, advantages, teaching or list(range(len(sequences))))
        if not teaching:
            self._until_done(work.measure_first, pause_point, unwanted)
            return {**work.sums.metrics(), "grad_norm": 0.0, "skipped_updates": 0.0}
        grad_norms, skipped = [], 0
        for number in range(len(work.batches)):
            self._until_done(partial(work.learn, number), pause_point, unwanted)
        for iteration in range(self.options.num_iterations):
            if iteration:
                for number in range(len(work.batches)):
                    work.learn(number)
            norm, took = self._optimizer_step()
            grad_norms.append(norm)
            skipped += not took
        mean_norm = sum(grad_norms) / len(grad_norms)
        return {**work.sums.metrics(), "grad_norm": mean_norm, "skipped_updates": float(skipped)}

    def forget_gradients(self) -> None:
        """After an exception in the middle of `update`."""
        self.optimizer.zero_grad(set_to_none=True)

    def _teaching(self, sequences: list[Sequence], advantages: Tensor) -> list[int]:
        """The sequences that can move the weights."""
        if self.options.beta > 0:
            return list(range(len(sequences)))
        return [i for i, s in enumerate(sequences) if s.trained and advantages[i] != 0]

    def _until_done(
        self, work: Callable[[], object], pause_point: Callable[[], None], unwanted: Callable[[bool], bool]
    ) -> None:
        """Do one pass over a micro-batch, again and again until it was not given up."""
        first_try = True
        while True:
            pause_point()
            try:
                with can_be_given_up(self.model.layers, partial(unwanted, first_try)):
                    work()
                    return
            except PassGivenUp:
                first_try = False

    def _optimizer_step(self) -> tuple[float, bool]:
        """Clip, step, and clear: returns the gradient norm before clipping and whether the weights moved.

        A gradient that is not finite moves nothing: in float16 the scaler shrinks and tries again next time; elsewhere
        it is dropped, since one NaN would spoil the adapter for good.
        """
        self.moved = True
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.max_grad_norm)
        finite = bool(norm.isfinite())
        if finite or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.engine.adapter_changed()
        return float(norm), finite


class Passes:
    """One step's batch, cut into micro-batches, and what is remembered of each between the passes over it."""

    def __init__(self, updater: Updater, sequences: list[Sequence], advantages: Tensor, chosen: list[int]):
        self.model, self.options, self.scaler = updater.model, updater.options, updater.scaler
        self.parameters = list(updater.parameters.values())
        device = self.model.precision.device
        lengths = torch.tensor([len(s.completion.token_ids) * s.trained for s in sequences])
        self.weights = updater.algorithm.weights(lengths, self.options.max_completion_length).to(device)  # [N]
        self.advantages = advantages.to(device)  # [N]
        assert self.options.tokens_per_micro_batch is not None
        plan = micro_batches([len(sequences[i]) for i in chosen], self.options.tokens_per_micro_batch)
        self.batches = [collate(sequences, [chosen[i] for i in indices], device) for indices in plan]
        self.old: dict[int, Tensor] = {}
        self.reference: dict[int, Tensor] = {}
        self.sums = Sums()

    def learn(self, number: int) -> Tensor:
        """Add the gradient of micro-batch `number` and return its part of the loss. Nothing is kept of a pass that ends
        in an exception."""
        batch, first_pass = self.batches[number], number not in self.old
        reference = self.reference[number] if number in self.reference else self._reference(number)
        logprobs, entropy = self._logprobs(batch, train=True)
        old = logprobs.detach() if first_pass else self.old[number]
        per_token, clipped = self._loss(batch, logprobs, old, reference)
        loss = (self.weights[batch.indices, None] * per_token * batch.loss_mask).sum()
        gradients = torch.autograd.grad(self.scaler.scale(loss), self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.sums.add("clip_ratio", clipped.float(), batch.loss_mask)
        if first_pass:
            self.old[number] = old
            self._measure(batch, old, entropy.detach(), reference)
        if reference is not None:
            self.reference[number] = reference
        return loss.detach()

    @torch.no_grad()
    def measure_first(self) -> None:
        """For a step without a gradient: the curves go on, from one micro-batch."""
        batch = self.batches[0]
        reference = self._reference(0)
        logprobs, entropy = self._logprobs(batch, train=False)
        self._measure(batch, logprobs, entropy, reference)
        self.sums.add("clip_ratio", torch.zeros_like(logprobs), batch.loss_mask)

    def _logprobs(self, batch: MicroBatch, train: bool) -> tuple[Tensor, Tensor]:
        """Logprob and entropy, [B, T] each. Only in train mode are activations recomputed in backward."""
        self.model.module.train(train)
        return self.model.logprobs(batch.ids, batch.mask, batch.first, batch.width, self.options.temperature)

    @torch.no_grad()
    def _reference(self, number: int) -> Tensor | None:
        """The untrained model's logprobs [B, T]. With beta = 0 they only serve the KL curve: the first micro-batch
        will do."""
        if self.options.beta == 0 and number > 0:
            return None
        with self.model.adapter_set(False):
            return self._logprobs(self.batches[number], train=False)[0]

    def _loss(
        self, batch: MicroBatch, logprobs: Tensor, old: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Per token, [B, T] each: the loss, and whether it was clipped."""
        options = self.options
        assert options.epsilon_high is not None
        per_token, clipped = clipped_surrogate(
            logprobs, old, self.advantages[batch.indices], options.epsilon, options.epsilon_high
        )
        if options.beta > 0:
            assert reference is not None
            per_token = per_token + options.beta * kl_k3(logprobs, reference)
        return per_token, clipped

    def _measure(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, reference: Tensor | None) -> None:
        self.sums.add("entropy", entropy, batch.token_mask)
        self.sums.add("sampler_gap", (logprobs - batch.sampled).abs(), batch.token_mask)
        if reference is not None:
            self.sums.add("kl", kl_k3(logprobs, reference), batch.token_mask)
