"""From one step's sequences and advantages to changed adapter weights: the policy-gradient update.

Each pass over the batch is one optimizer step, however many micro-batches it takes; the loss weighs every sequence by
the whole step, so cutting it differently changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_kit.algorithms import Algorithm, clipped_surrogate, get_algorithm, kl_k3
from grpo_kit.model import Model
from grpo_kit.training.batch import MicroBatch, Sequence, collate
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

    def mean(self, name: str) -> float | None:
        return self.total[name] / self.count[name] if self.count.get(name) else None


class Updater:
    """Owns the optimizer and, in float16, the gradient scaler. `pause_point` is called between micro-batches, with the
    model in a state that others may use."""

    def __init__(self, model: Model, options: TrainOptions):
        self.model, self.options = model, options
        self.algorithm: Algorithm = get_algorithm(options.algorithm)
        self.parameters = model.trainable()
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self.scaler = torch.amp.GradScaler(model.precision.device.type, enabled=model.precision.dtype == torch.float16)

    def set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value

    def update(
        self, sequences: list[Sequence], advantages: Tensor, pause_point: Callable[[], None]
    ) -> dict[str, float | None]:
        """Run `num_iterations` optimizer steps on the batch. advantages [N]. Returns the step's metrics.

        Until the first optimizer step an exception from `pause_point` leaves the weights as they were; from then on
        `pause_point` is not called, so that a step is never left half done.
        """
        options, device = self.options, self.model.precision.device
        lengths = torch.tensor([len(s.completion.token_ids) * s.trained for s in sequences])
        weights = self.algorithm.weights(lengths, options.max_completion_length).to(device)
        assert options.tokens_per_micro_batch is not None
        teaching = self._teaching(sequences, advantages)
        plan = micro_batches([len(sequences[i]) for i in teaching], options.tokens_per_micro_batch)
        batches = [collate(sequences, [teaching[i] for i in indices], device) for indices in plan]
        advantages = advantages.to(device)
        old: list[Tensor] = []
        reference: list[Tensor | None] = []
        sums, grad_norms, skipped = Sums(), [], 0
        for iteration in range(options.num_iterations):
            for number, batch in enumerate(batches):
                if iteration == 0:
                    pause_point()
                    reference.append(self._reference(batch, needed=options.beta > 0 or number == 0))
                logprobs, entropy = self._logprobs(batch)
                if iteration == 0:
                    old.append(logprobs.detach())
                    self._measure(sums, batch, logprobs.detach(), entropy.detach(), reference[number])
                loss = self._loss(batch, logprobs, old[number], reference[number], advantages, weights, sums)
                self.scaler.scale(loss).backward()
            norm, took = self._optimizer_step()
            grad_norms.append(norm)
            skipped += not took
        return {
            "kl": sums.mean("kl"),
            "entropy": sums.mean("entropy"),
            "sampler_gap": sums.mean("sampler_gap"),
            "clip_ratio": sums.mean("clip_ratio"),
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "skipped_updates": float(skipped),
        }

    def _teaching(self, sequences: list[Sequence], advantages: Tensor) -> list[int]:
        """The sequences that can move the weights: with beta = 0 an advantage of 0 is a gradient of 0, so its forward
        and backward pass are saved. If there are none, all are kept, so that the curves go on."""
        if self.options.beta > 0:
            return list(range(len(sequences)))
        kept = [i for i, s in enumerate(sequences) if s.trained and advantages[i] != 0]
        return kept or list(range(len(sequences)))

    def forget_gradients(self) -> None:
        """After an exception in the middle of `update`."""
        self.optimizer.zero_grad(set_to_none=True)

    def _logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        self.model.module.train()
        return self.model.logprobs(batch.ids, batch.mask, batch.first, batch.width, self.options.temperature)

    @torch.no_grad()
    def _reference(self, batch: MicroBatch, needed: bool) -> Tensor | None:
        """The untrained model's logprobs [B, T]. With beta = 0 they only serve the KL curve: the first micro-batch
        will do."""
        if not needed:
            return None
        self.model.module.eval()
        with self.model.adapter_set(False):
            return self.model.logprobs(batch.ids, batch.mask, batch.first, batch.width, self.options.temperature)[0]

    def _loss(
        self,
        batch: MicroBatch,
        logprobs: Tensor,
        old: Tensor,
        reference: Tensor | None,
        advantages: Tensor,
        weights: Tensor,
        sums: Sums,
    ) -> Tensor:
        options = self.options
        assert options.epsilon_high is not None
        per_token, clipped = clipped_surrogate(
            logprobs, old, advantages[batch.indices], options.epsilon, options.epsilon_high
        )
        if options.beta > 0:
            assert reference is not None
            per_token = per_token + options.beta * kl_k3(logprobs, reference)
        sums.add("clip_ratio", clipped.float(), batch.loss_mask)
        return (weights[batch.indices, None] * per_token * batch.loss_mask).sum()

    def _measure(
        self, sums: Sums, batch: MicroBatch, logprobs: Tensor, entropy: Tensor, reference: Tensor | None
    ) -> None:
        sums.add("entropy", entropy, batch.token_mask)
        sums.add("sampler_gap", (logprobs - batch.sampled).abs(), batch.token_mask)
        if reference is not None:
            sums.add("kl", kl_k3(logprobs, reference), batch.token_mask)

    def _optimizer_step(self) -> tuple[float, bool]:
        """Clip, step, and clear: returns the gradient norm before clipping and whether the weights moved.

        A gradient that is not finite moves nothing: in float16 the scaler shrinks and tries again next time; elsewhere
        it is dropped, since one NaN would spoil the adapter for good.
        """
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.max_grad_norm)
        finite = bool(norm.isfinite())
        if finite or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.engine.adapter_changed()
        return float(norm), finite
