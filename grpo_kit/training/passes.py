"""The passes of one step over its batch: cut into micro-batches, measured where an algorithm must know the models'
opinion first, learned from as often as asked. Each can be begun again with smaller micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from grpo_kit.algorithms import Algorithm, high_entropy_mask, kl_estimate
from grpo_kit.kernels import Offload
from grpo_kit.model import Model, TokenOutputs, ValueHead
from grpo_kit.training.batch import MicroBatch, Sequence, collate
from grpo_kit.training.credit import Credit, Estimates
from grpo_kit.training.finite import first_bad, first_bad_output
from grpo_kit.training.objective import Known, Loss, pair_objective, policy_objective
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import micro_batches, padded_micro_batches
from grpo_kit.training.sampler_gap import SEQUENCE_GAP, bound

MEANS = ("kl", "entropy", "sampler_gap", "sampler_gap_share", "clip_ratio")
HIGHEST = ("sampler_gap_max",)
IMPOSSIBLE = 1e3  # nats: a gap that stands for one to a probability of 0, with which sums stay finite


@dataclass
class Sums:
    """Sums over a step, for its metrics (of clip_ratio over all its passes, of others over the first); `count` says
    over what: tokens, or sequences. `highest`: the largest value seen."""

    total: dict[str, float] = field(default_factory=dict)
    count: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.total[name] = self.total.get(name, 0.0) + float((values * mask).sum())
        self.count[name] = self.count.get(name, 0.0) + float(mask.sum())

    def raise_to(self, name: str, values: Tensor) -> None:
        """Remember the largest of the values, all of which are 0 or more."""
        self.highest[name] = max(self.highest.get(name, 0.0), float(values.max()))

    def metrics(self) -> dict[str, float | None]:
        """The mean of each, and the largest of some; None where nothing was counted."""
        names = dict.fromkeys([*MEANS, *self.total])
        means = {name: self.total[name] / self.count[name] if self.count.get(name) else None for name in names}
        return {**means, **{name: self.highest.get(name) for name in HIGHEST}}


@dataclass(frozen=True)
class Trainee:
    """What learns: the model with its adapter, the critic if there is one, and by which rules."""

    model: Model
    value_head: ValueHead | None
    algorithm: Algorithm
    options: TrainOptions
    offload: Offload | None = None

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch at most."""
        assert self.options.tokens_per_micro_batch is not None
        return self.options.tokens_per_micro_batch

    def with_budget(self, tokens: int) -> Trainee:
        """The same, learning in other micro-batches."""
        return replace(self, options=replace(self.options, tokens_per_micro_batch=tokens))

    def outputs(self, batch: MicroBatch, train: bool) -> TokenOutputs:
        """[B, T] each. To train, within `offloading`, they can be differentiated."""
        self.model.module.train(train)
        return self.model.token_outputs(
            batch.packed,
            batch.first,
            batch.width,
            self.options.temperature,
            self.value_head,
            self.offload if train else None,
        )

    def offloading(self) -> AbstractContextManager[Any]:
        """Around a forward and its backward pass."""
        return self.offload or nullcontext()

    def outputs_of_modules(self, batch: MicroBatch) -> TokenOutputs:
        """The same through modules that can be looked at."""
        self.model.module.train(False)
        return self.model.token_outputs_of_modules(batch.packed, batch.first, batch.width, self.options.temperature)

    @torch.no_grad()
    def reference(self, batch: MicroBatch) -> Tensor:
        """The untrained model's logprobs [B, T]."""
        self.model.module.train(False)
        with self.model.adapter_set(False):
            return self.model.token_outputs(batch.packed, batch.first, batch.width, self.options.temperature).logprobs


def cut(trainee: Trainee, sequences: list[Sequence], units: list[list[int]]) -> list[MicroBatch]:
    """Micro-batches within the trainee's budget; the sequences of a unit stay together, in order."""
    way = micro_batches if trainee.model.trunk.fused else padded_micro_batches
    plan = way([[sequences[i].size for i in unit] for unit in units], trainee.budget)
    device = trainee.model.precision.device
    return [collate(sequences, list(chain.from_iterable(units[u] for u in chosen)), device) for chosen in plan]


class Pass:
    """Something that is done with a step's sequences, one micro-batch after another; `units` of them stay together."""

    def __init__(self, trainee: Trainee, sequences: list[Sequence], units: list[list[int]]):
        self.trainee, self._sequences, self._units = trainee, sequences, units
        self.batches = cut(trainee, sequences, units)

    def begin(self) -> None:
        """Called before the jobs of a pass."""

    def jobs(self) -> list[Callable[[], object]]:
        """What a pass consists of: one job for each micro-batch as they are cut now."""
        raise NotImplementedError

    def forget(self) -> None:
        """All that was done since `begin`."""

    @property
    def divisible(self) -> bool:
        """Whether any micro-batch is more than one unit."""
        return len(self.batches) < len(self._units)

    def shrink(self) -> None:
        """Halve the budget, as often as it takes to cut the sequences otherwise; they must be divisible."""
        before = [batch.indices for batch in self.batches]
        while [batch.indices for batch in self.batches] == before:
            self.trainee = self.trainee.with_budget(self.trainee.budget // 2)
            self.batches = cut(self.trainee, self._sequences, self._units)

    def _blank(self, value: float) -> Tensor:
        """[N, T], with T the length of the step's longest completion."""
        widest = max(len(sequence.completion.token_ids) for sequence in self._sequences)
        return torch.full((len(self._sequences), widest), value, device=self.trainee.model.precision.device)


class Measurement(Pass):
    """A pass over all sequences that changes nothing; what it found is in `estimates` at the end."""

    def __init__(self, trainee: Trainee, sequences: list[Sequence]):
        super().__init__(trainee, sequences, [[i] for i in range(len(sequences))])
        blank = self._blank(0.0)
        self._found = {name: blank.clone() for name in ("mask", "tokens", "logprobs", "entropy", "reference", "values")}

    def jobs(self) -> list[Callable[[], object]]:
        return [partial(self.measure, number) for number in range(len(self.batches))]

    @torch.no_grad()
    def measure(self, number: int) -> None:
        batch = self.batches[number]
        outputs = self.trainee.outputs(batch, train=False)
        found = {
            "mask": batch.loss_mask,
            "tokens": batch.token_mask,
            "logprobs": outputs.logprobs,
            "entropy": outputs.entropy,
        }
        if self.trainee.options.beta:
            found["reference"] = self.trainee.reference(batch)
        if outputs.values is not None:
            found["values"] = outputs.values
        for name, values in found.items():
            self._found[name][batch.indices, : batch.width] = values

    @property
    def estimates(self) -> Estimates:
        has_reference, has_values = bool(self.trainee.options.beta), self.trainee.value_head is not None
        return Estimates(
            self._found["mask"],
            self._found["tokens"],
            self._found["logprobs"],
            self._found["entropy"],
            self._found["reference"] if has_reference else None,
            self._found["values"] if has_values else None,
        )


class Passes(Pass):
    """One step's batch, and what is remembered of each sequence between the passes over it.

    teaching: the sequences that can move the weights; where there are none, a pass is `measure_first` alone.
    old [N, T]: logprobs from before the step, NaN where they are still to be found.
    """

    def __init__(
        self,
        trainee: Trainee,
        sequences: list[Sequence],
        credit: Credit,
        estimates: Estimates | None,
        teaching: list[int],
        scale: Callable[[Tensor], Tensor],
        parameters: list[torch.nn.Parameter],
    ):
        units = [list(pair) for pair in credit.pairs] if credit.pairs else [[i] for i in teaching]
        super().__init__(trainee, sequences, units or [[i] for i in range(len(sequences))])
        self.credit, self.scale, self.parameters, self.teaching = credit, scale, parameters, teaching
        self.algorithm, self.options = trainee.algorithm, trainee.options
        device = trainee.model.precision.device
        lengths = torch.tensor([len(s.completion.token_ids) * s.trained for s in sequences])
        self.weights = self.algorithm.weights(lengths, self.options.max_completion_length).to(device)  # [N]
        self.advantages = credit.advantages.to(device)  # [N] or [N, T]
        self.token_weight = 1.0 / max(1, int(lengths.sum()))
        self.chosen, self.entropy_weight = self._least_sure(estimates)
        self.estimates = estimates
        self.old, self._references = self._blank(torch.nan), self._blank(torch.nan)
        self._seen: set[int] = set()  # the sequences that a pass has been over: they are measured once
        self._added: set[torch.nn.Parameter] = set()  # whose gradients have their part of the present micro-batch
        self.sums = Sums()
        self.bad: str | None = None  # where a loss was not finite, in words

    def begin(self) -> None:
        self._at_begin = deepcopy((self.old, self._seen, self.sums))

    def jobs(self) -> list[Callable[[], object]]:
        if not self.teaching:
            return [self.measure_first]
        return [partial(self.learn, number) for number in range(len(self.batches))]

    def forget(self) -> None:
        self.old, self._seen, self.sums = deepcopy(self._at_begin)
        self._added.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def learn(self, number: int) -> Tensor:
        """Add the gradient of micro-batch `number` and return its part of the loss.

        Where this ends in an exception some of the gradients may be added already. Called again for the same
        micro-batch it adds the others; else all is to be forgotten."""
        batch = self.batches[number]
        reference = self._reference(number)
        with self.trainee.offloading():
            outputs = self.trainee.outputs(batch, train=True)
            old = _of(self.old, batch)
            old = torch.where(old.isnan(), outputs.logprobs.detach(), old)
            loss = self._objective(batch, outputs, old, reference)
            self._explain(loss.value, batch, outputs)
            self._add_gradients(self.scale(loss.value))
        self.sums.add("clip_ratio", loss.clipped.float(), batch.loss_mask)
        self.old[batch.indices, : batch.width] = old
        if not self._seen.issuperset(batch.indices):
            self._seen.update(batch.indices)
            self._measure(batch, outputs, reference)
            for name, part in loss.parts.items():
                self.sums.add(name, part.detach(), batch.loss_mask if part.dim() == 2 else torch.ones_like(part))
        if reference is not None:
            self._references[batch.indices, : batch.width] = reference
        return loss.value.detach()

    def _add_gradients(self, loss: Tensor) -> None:
        """As backward comes to them, so that those of a micro-batch never lie beside the sum."""
        left = [parameter for parameter in self.parameters if parameter not in self._added]
        hooks = [parameter.register_post_accumulate_grad_hook(self._added.add) for parameter in left]
        try:
            loss.backward(inputs=left)
        finally:
            for hook in hooks:
                hook.remove()
        self._added.clear()

    @torch.no_grad()
    def measure_first(self) -> None:
        """For a step without a gradient: the curves go on, from one micro-batch."""
        batch = self.batches[0]
        outputs = self.trainee.outputs(batch, train=False)
        self._measure(batch, outputs, self._reference(0))
        self.sums.add("clip_ratio", torch.zeros_like(outputs.logprobs), batch.loss_mask)

    def _least_sure(self, estimates: Estimates | None) -> tuple[Tensor | None, float]:
        """The mask of `top_entropy_quantile` [N, T], and the weight of each token in the entropy bonus."""
        if self.options.top_entropy_quantile == 1:
            return None, self.token_weight
        assert estimates is not None
        chosen = high_entropy_mask(estimates.entropy, estimates.mask, self.options.top_entropy_quantile)
        return chosen, 1.0 / max(1.0, float(chosen.sum()))

    def _reference(self, number: int) -> Tensor | None:
        """[B, T]. With beta = 0 it only serves the KL curve: the first micro-batch will do, once."""
        batch = self.batches[number]
        seen = self._seen.issuperset(batch.indices)
        if self.estimates is not None and self.estimates.reference is not None:
            return _of(self.estimates.reference, batch)
        if self.options.beta == 0 and (number > 0 or seen):
            return None
        return _of(self._references, batch) if seen else self.trainee.reference(batch)

    def _objective(self, batch: MicroBatch, outputs: TokenOutputs, old: Tensor, reference: Tensor | None) -> Loss:
        known = Known(
            weights=self.weights[batch.indices],
            token_weight=self.token_weight,
            entropy_weight=self.entropy_weight,
            advantages=_of(self.advantages, batch),
            mask=batch.loss_mask,
            old=old,
            sampled=batch.sampled,
            reference=reference,
            chosen=_maybe_of(self.chosen, batch),
            old_values=_maybe_of(self.estimates.values if self.estimates else None, batch),
            returns=_maybe_of(self.credit.returns, batch),
        )
        if self.credit.pairs is not None:
            return pair_objective(self.algorithm, self.options, outputs, known, len(self.credit.pairs))
        return policy_objective(self.algorithm, self.options, outputs, known)

    def _explain(self, loss: Tensor, batch: MicroBatch, outputs: TokenOutputs) -> None:
        """Find out, once a step, which part of the model made a loss that is not finite."""
        if self.bad is not None or bool(loss.isfinite()):
            return
        model, module = self.trainee.model.causal_lm, None
        with torch.no_grad(), suppress(torch.OutOfMemoryError):  # the padded batch may not fit beside the packed one
            module = first_bad_output(model, lambda: self.trainee.outputs_of_modules(batch))
        heads = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "values": outputs.values}
        head = first_bad((f"the head's {name}", values) for name, values in heads.items() if values is not None)
        self.bad = module or head or "the loss itself: all that the model said is finite, advantages or ratios are not"

    def _measure(self, batch: MicroBatch, outputs: TokenOutputs, reference: Tensor | None) -> None:
        logprobs = outputs.logprobs.detach()
        self.sums.add("entropy", outputs.entropy.detach(), batch.token_mask)
        self._compare(logprobs, batch)
        if reference is not None:
            self.sums.add("kl", kl_estimate(logprobs, reference), batch.token_mask)

    def _compare(self, logprobs: Tensor, batch: MicroBatch) -> None:
        """How far the sampler's logprobs are from the trainer's [B, T]: `sampler_gap`, the mean over tokens;
        `sampler_gap_max`, the largest; `sampler_gap_share`, the share of the sequences whose own mean is too large to
        be rounding."""
        known = batch.token_mask * ~batch.sampled.isnan()  # an engine may not tell the probability of every token
        gap = ((logprobs - batch.sampled).abs().nan_to_num() * known).clamp(max=IMPOSSIBLE)
        tokens = known.sum(-1)  # [B]
        if not tokens.any():
            return
        beyond = gap.sum(-1) > tokens * bound(SEQUENCE_GAP, self.options.temperature)
        self.sums.add("sampler_gap", gap, known)
        self.sums.add("sampler_gap_share", beyond.float(), (tokens > 0).float())
        self.sums.raise_to("sampler_gap_max", gap)


def _of(step: Tensor, batch: MicroBatch) -> Tensor:
    """A micro-batch's part of what was computed for the whole step: [N] → [B], [N, T] → [B, width]."""
    return step[batch.indices] if step.dim() == 1 else step[batch.indices, : batch.width]


def _maybe_of(step: Tensor | None, batch: MicroBatch) -> Tensor | None:
    return None if step is None else _of(step, batch)
