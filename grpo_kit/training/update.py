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

SKIPS_TO_WARN = 3  # updates skipped one after another; fewer are float16's scaler finding its level

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
        self.value_head = ValueHead(model.causal_lm.config.hidden_size, device) if algorithm.value_head else None
        self.trainee = Trainee(model, self.value_head, algorithm, options)
        self.parameters = {**model.trainable(), **self._critics_parameters()}
        self.optimizer = make_optimizer(options.optim, self.parameters, options.learning_rate, options.weight_decay)
        self.moved = False  # whether the step being made has changed weights already
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.precision.dtype == torch.float16)
        self.troubles: list[str] = []
        self._skipped_in_a_row = 0

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
        so that a step is never left half done.

        Sequences that have no gradient are left out; a step without any other moves nothing, the optimizer's momentum
        included.
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
        grad_norms, skipped = [], 0
        for iteration in range(self.options.num_iterations):
            if iteration:
                for number in range(len(work.batches)):
                    work.learn(number)
            norm, took = self._optimizer_step(work.bad)
            grad_norms.append(norm)
            skipped += not took
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
            return list(range(len(sequences)))
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

    def _optimizer_step(self, bad_loss: str | None) -> tuple[float, bool]:
        """Clip, step, and clear: returns the gradient norm before clipping and whether the weights moved.

        A gradient that is not finite moves nothing: in float16 the scaler shrinks and tries again next time; elsewhere
        it is dropped, since one NaN would spoil the adapter for good.
        """
        self.moved = True
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.options.max_grad_norm)
        finite = bool(norm.isfinite())
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if not finite:
            self._report(bad_loss)
        if finite or self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.engine.adapter_changed()
        return float(norm), finite

    def _report(self, bad_loss: str | None) -> None:
        """Say where the first number that is not finite was; in float16 only when it goes on, since a few are how the
        scaler finds its level."""
        if self.scaler.is_enabled() and self._skipped_in_a_row < SKIPS_TO_WARN:
            return
        gradients = ((f"gradient of {n}", p.grad) for n, p in self.parameters.items() if p.grad is not None)
        where = bad_loss or first_bad(gradients) or "their norm alone overflowed"
        times = f"{self._skipped_in_a_row} updates in a row were" if self._skipped_in_a_row > 1 else "An update was"
        self.troubles.append(f"{times} skipped: gradients are not finite. First bad tensor: {where}")

    def _skips(self, skipped: int) -> dict[str, float]:
        counted = {"skipped_updates": float(skipped)}
        return {**counted, "loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else counted
