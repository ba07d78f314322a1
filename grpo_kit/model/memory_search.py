"""Settings that would fit where those of a memory plan do not: the mildest change first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_kit.model.memory_parts import micro_batch

if TYPE_CHECKING:
    from grpo_kit.model.memory_plan import MemoryPlan

BUDGETS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768)  # tokens in a micro-batch


@dataclass(frozen=True)
class Suggestion:
    """changes: what is set anew, on top of the suggestions before it. settings: all of it. total: the plan's then."""

    changes: dict[str, Any]
    settings: dict[str, Any]
    total: int
    fits: bool


def search(plan: MemoryPlan) -> list[Suggestion]:
    """Try one kind of change after the other; of each the mildest that fits, or else the strongest, if it helps. What
    the later ones made needless goes again."""
    kept: list[dict[str, Any]] = []
    best = plan
    for kind in _CHANGES:
        tried = [(changes, best.changed(changes)) for changes in kind(best)]
        if not tried:
            continue
        changes, better = next((pair for pair in tried if pair[1].fits), tried[-1])
        if better.total < best.total:
            best = better
            kept.append(changes)
        if best.fits:
            return _one_after_the_other(plan, _needed(plan, kept))
    return _one_after_the_other(plan, kept)


def _needed(plan: MemoryPlan, kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for changes in list(kept):
        others = [other for other in kept if other is not changes]
        # double quantization builds on 4 bits
        if "load_in_4bit" not in changes and plan.changed(*others).fits:
            kept = others
    return kept


def _one_after_the_other(plan: MemoryPlan, kept: list[dict[str, Any]]) -> list[Suggestion]:
    found, settings = [], dict[str, Any]()
    for changes in kept:
        settings = settings | changes
        changed = plan.changed(settings)
        found.append(Suggestion(changes, settings, changed.total, changed.fits))
    return found


def _smaller_micro_batches(plan: MemoryPlan) -> list[dict[str, Any]]:
    options, now = plan.options, micro_batch(plan.shape, plan.options).tokens
    longest = options.prompt + options.unit * options.max_completion_length
    sizes = [size for size in reversed(BUDGETS) if longest < size < now] + ([longest] if longest < now else [])
    return [{"tokens_per_micro_batch": size} for size in sizes]


def _offload(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [] if plan.options.activation_offloading else [{"activation_offloading": True}]


def _eight_bit_optimizer(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [{"optim": "adamw_8bit"}] if plan.options.optim == "adamw_torch" else []


def _four_bit(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [] if plan.options.load_in_4bit else [{"load_in_4bit": True}]


def _double_quant(plan: MemoryPlan) -> list[dict[str, Any]]:
    """A checkpoint that is quantized already is taken as it is."""
    possible = plan.options.load_in_4bit and not plan.options.double_quant and plan.shape.in_16_bits is None
    return [{"double_quant": True}] if possible else []


def _fewer_prompts(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [{"prompts_per_step": count} for count in _halved(plan.options.prompts_per_step, 1)]


def _fewer_answers(plan: MemoryPlan) -> list[dict[str, Any]]:
    return [{"num_generations": count} for count in _halved(plan.options.num_generations, 2)]


def _shorter_answers(plan: MemoryPlan) -> list[dict[str, Any]]:
    """Where the longest prompt is what an answer leaves, the whole sequence becomes shorter: prompts stay."""
    lengths = _halved(plan.options.max_completion_length, 64)
    if plan.asked.max_prompt_length is not None:
        return [{"max_completion_length": length} for length in lengths]
    return [{"max_completion_length": n, "max_seq_length": plan.options.prompt + n} for n in lengths]


def _halved(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


_CHANGES = (
    _smaller_micro_batches,
    _offload,
    _eight_bit_optimizer,
    _four_bit,
    _double_quant,
    _fewer_prompts,
    _fewer_answers,
    _shorter_answers,
)
