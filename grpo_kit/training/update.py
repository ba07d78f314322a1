"""From one step's sequences and their credit to changed adapter weights.

Each pass over the batch is one optimizer step, however many micro-batches it takes; the loss weighs every sequence by
the whole step, so cutting it differently changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import Model, ValueHead
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, Estimates
from grpo_kit.training.finite import first_bad
from grpo_kit.training.give_up import PassGivenUp, can_be_given_up
from grpo_kit.training.optimizers import make_optimizer
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.passes import Measurement, Passes, Trainee
from grpo_kit.training.schedules import learning_rate_factor

SKIPS_TO_WARN = 3  # steps without an update one after another; fewer are float16's scaler finding its level

Unwanted = Callable[[bool], bool]


def never(first_try: bool) -> bool:
    """For passes that nothing may interrupt."""
    return False


class Updater:
    """Owns the optimizer, the critic of PPO and, in float16, the gradient scaler.

    learning_rate: as it stands, before the schedule. troubles: sentences for the run's warnings, taken from it by the
    loop.
    """

    def __init__(self, model: Model, options: TrainOptions):
        self.model, self.options, self.learning_rate = model, options, options.learning_rate
        algorithm = get_algorithm(options.algorithm)
        device = model.precision.device
        self.value_head = (
            ValueHead(model.causal_lm.get_output_embeddings().weight.shape[1], device) if algorithm.value_head else None
        )
        self.trainee = Trainee(model, self.value_head, algorithm, options)
        self.parameters = {**model.trainable(), **self._critics_parameters()}
        self.optimizer = make_optimizer(options.optim, self.parameters, options.learning_rate, options.weight_decay)
        self.moved = False  # whether the step being made has changed weights already
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.precision.dtype == torch.float16)
        self.troubles: list[str] = []
        self._steps_lost = 0

    def set_learning_rate(self, value: float) -> None:
        self.learning_rate = value

    def schedule(self, step: int) -> float:
        """Set the optimizer to the learning rate of step `step` (from 1), and return it."""
        options = self.options
        factor = learning_rate_factor(options.lr_scheduler_type, step, options.steps, options.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * factor
        return self.learning_rate * factor

    def measure(
        self, sequences: list[Sequence], pause_point: Callable[[], None], unwanted: Unwanted = never
    ) -> Estimates | None:
        """What the models say of the sequences, for algorithms that must know it before they give credit; None for
        those that need not. `pause_point` and `unwanted` as in `update`."""
        options, algorithm = self.options, self.trainee.algorithm
        needed = algorithm.value_head or (algorithm.kl_in_reward and options.beta) or options.top_entropy_quantile < 1
        if not needed:
            return None
        work = Measurement(self.trainee, sequences)
        for number in range(len(work.batches)):
            self._until_done(partial(work.measure, number), pause_point, unwanted)
        return work.estimates

    def update(
        self,
        sequences: list[Sequence],
        credit: Credit,
        estimates: Estimates | None,
        pause_point: Callable[[], None],
        unwanted: Unwanted = never,
    ) -> dict[str, float | None]:
        """Run `num_iterations` optimizer steps on the batch. Returns the step's metrics.

        `pause_point` is called before each micro-batch of the first pass, with the model in a state that others may
        use; a pass is given up and made again when `unwanted(first_try)` says so in its middle. Until the first
        optimizer step an exception from `pause_point` leaves the weights as they were; from then on neither is called,
        so that a step is never left half done, and only questions are let in between micro-batches.

        Sequences that are left out of training, or whose credit moves nothing, are not computed; a step without any
        other changes nothing, the optimizer's momentum included.
        """
        teaching = self._teaching(sequences, credit)
        parameters = list(self.parameters.values())
        work = Passes(self.trainee, sequences, credit, estimates, teaching, self.scaler.scale, parameters)
        if not teaching:
            self._until_done(work.measure_first, pause_point, unwanted)
            return {**work.sums.metrics(), "grad_norm": 0.0, **self._skips(0)}
        assert self.options.num_iterations is not None
        for number in range(len(work.batches)):
            self._until_done(partial(work.learn, number), pause_point, unwanted)
        grad_norms, skipped, bad = [], 0, None
        for iteration in range(self.options.num_iterations):
            if iteration:
                for number in range(len(work.batches)):
                    self.model.lock.give_way()
                    work.learn(number)
            norm, bad = self._optimizer_step()
            grad_norms.append(norm)
            skipped += bad is not None
        self._report(work.bad or bad, skipped)
        return {**work.sums.metrics(), "grad_norm": sum(grad_norms) / len(grad_norms), **self._skips(skipped)}

    def forget_gradients(self) -> None:
        """After an exception in the middle of `update`."""
        self.optimizer.zero_grad(set_to_none=True)

    def _critics_parameters(self) -> dict[str, torch.nn.Parameter]:
        if self.value_head is None:
            return {}
        return {f"value_head.{name}": parameter for name, parameter in self.value_head.named_parameters()}

    def _teaching(self, sequences: list[Sequence], credit: Credit) -> list[int]:
        """The sequences that can move the weights."""
        if credit.pairs is not None:
            return [i for pair in credit.pairs for i in pair]
        algorithm, options = self.trainee.algorithm, self.options
        moves_all = (options.beta and not algorithm.kl_in_reward) or options.entropy_coef or algorithm.value_head
        if moves_all:
            return [i for i, s in enumerate(sequences) if s.trained]
        return [i for i, s in enumerate(sequences) if s.trained and credit.advantages[i] != 0]

    def _until_done(self, work: Callable[[], object], pause_point: Callable[[], None], unwanted: Unwanted) -> None:
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

    def _optimizer_step(self) -> tuple[float, str | None]:
        """Clip, step, and clear: returns the gradient's norm before clipping and, where the weights did not move, why.

        A gradient that is not finite moves nothing: in float16 the scaler shrinks and tries again next time; elsewhere
        it is dropped, since one NaN would spoil the adapter for good.
        """
        self.moved = True
        self.scaler.unscale_(self.optimizer)
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm, bad = torch.nn.utils.get_total_norm(gradients.values()), None
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.options.max_grad_norm, norm)
        else:
            named = ((f"gradient of {name}", gradient) for name, gradient in gradients.items())
            bad = first_bad(named) or "the gradients' norm alone overflowed"
        if bad is None:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.engine.adapter_changed()
        return float(norm), bad

    def _report(self, bad: str | None, skipped: int) -> None:
        """Say once where the first number that is not finite was; in float16 only when whole steps stay without an
        update, since a few skipped ones are how the scaler finds its level."""
        if skipped < (self.options.num_iterations or 1):
            self._steps_lost = 0
            return
        self._steps_lost += 1
        if self._steps_lost == (SKIPS_TO_WARN if self.scaler.is_enabled() else 1):
            times = f"{self._steps_lost} steps in a row" if self._steps_lost > 1 else f"The step's {skipped} update(s)"
            self.troubles.append(f"{times} changed nothing: gradients are not finite. First bad tensor: {bad}")

    def _skips(self, skipped: int) -> dict[str, float]:
        counted = {"skipped_updates": float(skipped)}
        return {**counted, "loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else counted
