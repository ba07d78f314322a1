"""The memory plan: where every gigabyte of the GPU will go, computed from the model's config before it is loaded.

The parts are counted in `memory_parts`; here is what is derived from the card, and the plan as people see it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import psutil
from transformers import AutoConfig, PreTrainedConfig

from grpo_kit.model.gpus import Gpu, find_gpu
from grpo_kit.model.memory_parts import CUDA_CONTEXT, Parts, PlanOptions, optimizer_state, phases, saved_inputs
from grpo_kit.model.memory_search import BUDGETS, Suggestion, search
from grpo_kit.model.shape import Shape, quantization, read_shape
from grpo_kit.model.sources import find_source

if TYPE_CHECKING:
    import pandas

OFFLOAD_FROM = 0.6  # of the card: an update that takes more moves its layer inputs to the host
HOST_SHARE = 0.5  # of the host's free memory that pinned layer inputs may take: nothing else can use it meanwhile
TO_SPARE = 0.1  # of the card, left free by a token budget that is derived: fragments, and the notebook's own tensors


# ---- what is derived from the card ----


def best_token_budget(shape: Shape, gpu: Gpu, options: PlanOptions) -> int:
    """The largest `tokens_per_micro_batch` whose update leaves a tenth of the card free; the smallest if none does."""
    for budget in reversed(BUDGETS):
        settled = _with_offload(shape, gpu, replace(options, tokens_per_micro_batch=budget))
        if _update(shape, gpu, settled) <= (1 - TO_SPARE) * gpu.total:
            return budget
    return BUDGETS[0]


def offload_pays(shape: Shape, gpu: Gpu, options: PlanOptions) -> bool:
    """Whether the update would fill much of the card without, and the host has room. Of another machine's host nothing
    is known: it is taken to have."""
    if _update(shape, gpu, replace(options, activation_offloading=False)) <= OFFLOAD_FROM * gpu.total:
        return False
    return not gpu.at_hand or saved_inputs(shape, options) <= HOST_SHARE * _host_memory()


def _host_memory() -> int:
    return int(psutil.virtual_memory().available)


def _update(shape: Shape, gpu: Gpu, options: PlanOptions) -> int:
    return sum(phases(shape, options, gpu.total)["update"].values())


def _with_offload(shape: Shape, gpu: Gpu, options: PlanOptions) -> PlanOptions:
    return (
        options
        if options.activation_offloading is not None
        else replace(options, activation_offloading=offload_pays(shape, gpu, options))
    )


# ---- the plan ----


@dataclass(frozen=True)
class MemoryPlan:
    """Made by `memory_plan`. Displays as a table, in a notebook with a bar for each phase.

    phases: "rollout" and "update", each with its parts in bytes. options: asked for and derived; asked: without the
    derived ones. notes: on what was derived or is uncertain, as (what, value, reason).
    """

    name: str
    gpu: Gpu
    shape: Shape
    asked: PlanOptions
    options: PlanOptions
    phases: dict[str, Parts]
    notes: list[tuple[str, str, str]]

    @property
    def total(self) -> int:
        """Bytes that the card must hold: the larger phase's, CUDA's own included."""
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def free(self) -> int:
        """Bytes that stay free in the larger phase; below 0 if it does not fit."""
        return self.gpu.total - self.total

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def offloaded(self) -> int:
        """Bytes with the host: layer inputs of one micro-batch, and a paged optimizer's state."""
        inputs = saved_inputs(self.shape, self.options) if self.options.activation_offloading else 0
        return inputs + optimizer_state(self.shape, self.options)[1]

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """Settings that would fit, each added to those before it: the mildest first. Empty if the plan fits; if even
        the last one does not, the model is too large for the card."""
        return [] if self.fits else search(self)

    def changed(self, *changes: dict[str, Any]) -> MemoryPlan:
        """The plan with other settings; later ones win."""
        together = {name: value for some in changes for name, value in some.items()}
        return _plan(self.name, self.shape, self.gpu, replace(self.asked, **together))

    def frame(self) -> pandas.DataFrame:
        """One row a part: phase, part, gigabytes (10⁹ bytes)."""
        import pandas

        rows = [(phase, part, size / 1e9) for phase, parts in self.phases.items() for part, size in parts.items()]
        return pandas.DataFrame(rows, columns=["phase", "part", "gigabytes"])

    def compare(self, measured: Mapping[str, float | None]) -> pandas.DataFrame:
        """The plan beside bytes measured by `torch.cuda.max_memory_allocated` in each phase: phase, planned and
        measured gigabytes without CUDA's own, which torch does not see, and their ratio (above 1: planned too much)."""
        import pandas

        planned = {phase: (sum(parts.values()) - CUDA_CONTEXT) / 1e9 for phase, parts in self.phases.items()}
        rows = [(phase, planned[phase], None if peak is None else peak / 1e9) for phase, peak in measured.items()]
        frame = pandas.DataFrame(rows, columns=["phase", "planned", "measured"]).astype({"measured": "float64"})
        return frame.assign(ratio=frame["planned"] / frame["measured"])

    def plot(self) -> Any:
        """The phases as stacked bars beside the card's limit: a plotly figure."""
        from grpo_kit.widgets import memory_plot

        return memory_plot(self)

    @property
    def verdict(self) -> str:
        if not self.fits:
            return f"does not fit, {_gb(-self.free)} too much"
        tight = ", which fragments may take" if self.free < self.gpu.total / 20 else ""
        return f"fits, {_gb(self.free)} to spare{tight}"

    def __repr__(self) -> str:
        head = f"Memory plan for {self.name} on {self.gpu.name} ({_gb(self.gpu.total)}): {self.verdict}"
        return "\n".join([head, *self._table(), "", *_aligned([self._work(), *self.notes]), *self._advice()])

    def _repr_html_(self) -> str:
        """The bars as a picture, which needs no script, and the table below."""
        from grpo_kit.widgets import memory_picture

        return f"{memory_picture(self)}<pre>{escape(repr(self))}</pre>"

    def _table(self) -> list[str]:
        parts = dict.fromkeys(part for parts in self.phases.values() for part in parts)
        width = max(map(len, parts))
        rows = {part: [phase.get(part) for phase in self.phases.values()] for part in parts}
        rows["total"] = [sum(phase.values()) for phase in self.phases.values()]
        rows["free"] = [self.gpu.total - size for size in rows["total"] if size is not None]
        head = " ".join([" " * width, *(f"{phase:>9}" for phase in self.phases)]) + "   (GB)"
        cells = [" ".join([f"{name:<{width}}", *map(_cell, sizes)]).rstrip() for name, sizes in rows.items()]
        return [head, *cells]

    def _work(self) -> tuple[str, str, str]:
        options = self.options
        asked = f"{options.prompts_per_step} prompts × {options.num_generations} answers"
        lengths = f"of up to {options.prompt:,} and {options.max_completion_length:,} tokens"
        return "step", asked, f"{lengths}: {options.step_tokens:,} together"

    def _advice(self) -> list[str]:
        if not self.suggestions:
            return []
        lines = ["", "One after the other, these would bring it to"]
        for suggestion in self.suggestions:
            changes = ", ".join(f"{name}={value!r}" for name, value in suggestion.changes.items())
            lines.append(f"  {_gb(suggestion.total):>9}  {changes}" + ("  (fits)" if suggestion.fits else ""))
        return lines if self.suggestions[-1].fits else [*lines, "This card is too small for the model."]


def memory_plan(name_or_path: str | PreTrainedConfig, gpu: str | float | None = None, **options: Any) -> MemoryPlan:
    """Plan the GPU's memory from a model's config: nothing is loaded.

    name_or_path: as for `load_model`, or a transformers config.
    gpu:     "T4", "L4", "A100 80GB", …, a number of gigabytes, or None for the card at hand.
    options: those of `load_model` and `train` that decide about memory; see `PlanOptions`.

    Raises ValueError for options that can't work, a family of models or a card that is not known, and without gpu= on a
    machine that has none; FileNotFoundError for a model that can't be found.
    """
    asked, card = _options(options), find_gpu(gpu)
    config = _config(name_or_path) if isinstance(name_or_path, str) else name_or_path
    name = name_or_path if isinstance(name_or_path, str) else config.name_or_path or config.model_type
    plan = _plan(name, read_shape(config), card, _as_in_checkpoint(asked, quantization(config)))
    if getattr(config, "text_config", None):
        plan.notes.append(("weights", "language model only", "what it sees or hears with is not counted"))
    return plan


def _config(name: str) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(find_source(name).path)
    return config


def _as_in_checkpoint(asked: PlanOptions, made_with: dict[str, Any]) -> PlanOptions:
    """A checkpoint that is quantized already is taken as it is, as `load_model` does."""
    if not made_with:
        return asked
    double_quant = bool(made_with.get("bnb_4bit_use_double_quant"))
    if asked.double_quant and not double_quant:
        raise ValueError("double_quant=True, but the checkpoint is quantized already, without double quantization")
    return replace(asked, load_in_4bit=True, double_quant=double_quant)


def _options(given: dict[str, Any]) -> PlanOptions:
    known = [field.name for field in fields(PlanOptions)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
            raise ValueError(f"{name!r} is no option that decides about memory{hint}")
    return PlanOptions(**given)


def _plan(name: str, shape: Shape, gpu: Gpu, asked: PlanOptions) -> MemoryPlan:
    options = asked
    if asked.tokens_per_micro_batch is None:
        options = replace(options, tokens_per_micro_batch=best_token_budget(shape, gpu, asked))
    options = _with_offload(shape, gpu, options)
    found = phases(shape, options, gpu.total)
    return MemoryPlan(name, gpu, shape, asked, options, found, _notes(shape, asked, options))


def _notes(shape: Shape, asked: PlanOptions, options: PlanOptions) -> list[tuple[str, str, str]]:
    smallest = options.tokens_per_micro_batch == BUDGETS[0]
    derived = "the smallest" if smallest else "its update leaves a tenth of the card free"
    budget = f"{options.tokens_per_micro_batch:,}"
    notes = [("tokens_per_micro_batch", budget, derived if asked.tokens_per_micro_batch is None else "asked for")]
    place = "wait in the host's memory" if options.activation_offloading else "stay on the GPU"
    inputs = f"{_gb(saved_inputs(shape, options))} of layer inputs {place}"
    notes.append(("activation_offloading", "on" if options.activation_offloading else "off", inputs))
    paged = optimizer_state(shape, options)[1]
    if paged:
        notes.append(("optimizer", "paged", f"{_gb(paged)} of its state in the host's memory"))
    if shape.in_16_bits is not None:
        notes.append(("quantization", "as in the checkpoint", "it is quantized already"))
    if options.engine != "transformers":
        sampler = "native" if options.engine == "auto" else options.engine
        cache = "" if options.kv_cache_dtype is None else f", its KV cache in {options.kv_cache_dtype}"
        reason = "what it holds stays during the update, or goes if that needs the room"
        notes.append(("sampler", f"{sampler}{cache}", reason))
    if not shape.fused:
        reason = "this family trains through transformers' own layers, counted from their code"
        notes.append(("update", "rough", reason))
    return notes


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _cell(size: int | None) -> str:
    return " " * 9 if size is None else f"{size / 1e9:>9.2f}"


def _aligned(notes: list[tuple[str, str, str]]) -> list[str]:
    width = max(len(what) for what, _, _ in notes)
    return [f"{what:<{width}}  {value}" + (f"  ({reason})" if reason else "") for what, value, reason in notes]
