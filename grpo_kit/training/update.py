"""From one step's sequences and their credit to changed adapter weights.

Each pass over the batch is one optimizer step, however many micro-batches it takes; the loss weighs every sequence by
the whole step, so cutting it differently changes nothing. A pass that runs out of memory is made again from its
beginning: without what the sampler holds if it holds anything, else with half the tokens to a micro-batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch

from grpo_kit.algorithms import get_algorithm
from grpo_kit.model import Model, ValueHead
from grpo_kit.training.batch import Sequence
from grpo_kit.training.credit import Credit, Estimates
from grpo_kit.training.finite import first_bad
from grpo_kit.training.give_up import PassGivenUp, can_be_given_up
from grpo_kit.training.memory import make_offload
from grpo_kit.training.optimizers import make_optimizer
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.passes import Measurement, Pass, Passes, Trainee
from grpo_kit.training.schedules import learning_rate_factor

SKIPS_TO_WARN = 3  # steps without an update one after another; fewer are float16's scaler finding its level
INDIVISIBLE = (
    "Each micro-batch is a single sequence (or pair) already, so a smaller tokens_per_micro_batch would change nothing."
)

Unwanted = Callable[[bool], bool]


def never(first_try: bool) -> bool:
    """For passes that nothing may interrupt."""
    return False


class Updater:
    """Owns the optimizer, the critic of PPO and, in float16, the gradient scaler.

    learning_rate: as it stands, before the schedule. troubles: sentences for the run's warnings, taken from it by the
    loop. tell_budget(before, after): called when memory ran out and micro-batches became smaller, for good.
    """

    def __init__(self, model: Model, options: TrainOptions):
        self.model, self.options, self.learning_rate = model, options, options.learning_rate
        algorithm = get_algorithm(options.algorithm)
        device = model.precision.device
        self.value_head = (
            ValueHead(model.causal_lm.get_output_embeddings().weight.shape[1], device) if algorithm.value_head else None
        )
        self.offload = make_offload(device, options)
        self.trainee = Trainee(model, self.value_head, algorithm, options, self.offload)
        self.parameters = {**model.trainable(), **self._critics_parameters()}
        self.optimizer = make_optimizer(options.optim, self.parameters, options.learning_rate, options.weight_decay)
        self.moved = False  # whether the step being made has changed weights already
        self.scaler = torch.amp.GradScaler(device.type, enabled=model.precision.dtype == torch.float16)
        self.troubles: list[str] = []
        self.tell_budget: Callable[[int, int], None] = lambda before, after: None
        self._steps_lost = 0
        self._told_of_full_host = False
        self._sampler_makes_room = False  # before every pass over a batch, once they did not fit side by side

    def set_learning_rate(self, value: float) -> None:
        self.learning_rate = value

    def limit_budget(self, tokens: int) -> None:
        """Micro-batches of no more tokens than that from now on."""
        self.trainee = self.trainee.with_budget(min(self.trainee.budget, tokens))

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
        those that need not. `pause_point` and `unwanted` as in `update`, and so is what happens without memory."""
        options, algorithm = self.options, self.trainee.algorithm
        needed = algorithm.value_head or (algorithm.kl_in_reward and options.beta) or options.top_entropy_quantile < 1
        if not needed:
            return None
        work = Measurement(self.trainee, sequences)
        self._pass(work, pause_point, unwanted)
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

        Raises torch.OutOfMemoryError, after which the gradients are to be forgotten, only when each micro-batch is a
        single sequence, or pair, already. If it comes later than in the first pass the weights have moved.

        Sequences that are left out of training, or whose credit moves nothing, are not computed; a step without any
        other changes nothing, the optimizer's momentum included.
        """
        teaching = self._teaching(sequences, credit)
        parameters = list(self.parameters.values())
        work = Passes(self.trainee, sequences, credit, estimates, teaching, self.scaler.scale, parameters)
        if not teaching:
            self._pass(work, pause_point, unwanted)
            return {**work.sums.metrics(), "grad_norm": 0.0, **self._skips(0)}
        assert self.options.num_iterations is not None
        grad_norms, skipped, bad = [], 0, None
        for _ in range(self.options.num_iterations):
            self._pass(work, pause_point, unwanted)
            pause_point, unwanted = self.model.lock.give_way, never
            norm, bad = self._optimizer_step()
            grad_norms.append(norm)
            skipped += bad is not None
        self._report(work.bad or bad, skipped)
        return {**work.sums.metrics(), "grad_norm": sum(grad_norms) / len(grad_norms), **self._skips(skipped)}

    def close(self) -> None:
        """Give back the host's memory."""
        if self.offload is not None:
            self.offload.close()

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

    def _pass(self, work: Pass, pause_point: Callable[[], None], unwanted: Unwanted) -> None:
        """Make one pass over all micro-batches, from its beginning with smaller ones until memory suffices."""
        work.begin()
        if self._sampler_makes_room:
            self.model.engine.release()
        while not all(self._fitted(work, job, pause_point, unwanted) for job in work.jobs()):
            self._forget(work)
            if self.model.engine.holds_memory:
                self._take_from_sampler()
            else:
                self._shrink(work)

    def _fitted(
        self, work: Pass, job: Callable[[], object], pause_point: Callable[[], None], unwanted: Unwanted
    ) -> bool:
        """Do one micro-batch, again and again until it was not given up, and return whether there was enough memory.
        Then the exception is gone, and with it the tensors that its frames held."""
        first_try = True
        while True:
            pause_point()
            try:
                with can_be_given_up(self.model, partial(unwanted, first_try)):
                    job()
                self._tell_of_full_host()
                return True
            except PassGivenUp:
                first_try = False
            except torch.OutOfMemoryError as error:
                if not work.divisible and not self.model.engine.holds_memory:
                    error.add_note(INDIVISIBLE)
                    raise
                return False

    def _tell_of_full_host(self) -> None:
        stayed = self.offload.stayed if self.offload is not None else 0
        if stayed and not self._told_of_full_host:
            self._told_of_full_host = True
            self.troubles.append(
                f"{stayed / 1e9:.1f} GB of what backward needs found no room in the host's memory and stays on the GPU"
            )

    def _take_from_sampler(self) -> None:
        self.model.engine.release()
        if not self._sampler_makes_room:
            self._sampler_makes_room = True
            self.troubles.append(
                "Memory ran out while the sampler kept its cache for the next step. From now on it gives the cache "
                "back before each update, which takes it a moment to make anew"
            )

    def _forget(self, work: Pass) -> None:
        """Nothing is left of the pass begun."""
        work.forget()
        if self.model.precision.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _shrink(self, work: Pass) -> None:
        """Smaller micro-batches for the pass begun and for all that follow."""
        before = self.trainee.budget
        work.shrink()
        self.trainee = work.trainee
        self.tell_budget(before, self.trainee.budget)

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
