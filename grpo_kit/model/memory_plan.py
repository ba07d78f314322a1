"""The memory plan: where every gigabyte of the GPU will go, computed from the model's config before it is loaded.

Two phases take turns on the card: the rollout samples answers, the update learns from them. Of each, the parts at its
fullest moment are planned, for prompts and answers as long as they may become, from the second step on, when the
optimizer has its state. The rollout is the `transformers` engine's. First the formulas, one function a part; then what
is derived from the card, the plan itself, and the search for settings that fit.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import psutil
from transformers import AutoConfig, PreTrainedConfig

from grpo_kit.kernels.linear_logprob import CHUNK_BYTES as HEAD_TILE
from grpo_kit.model.gpus import Gpu, find_gpu
from grpo_kit.model.precision import DTYPES
from grpo_kit.model.shape import Shape, nf4_bytes, quantization, read_shape
from grpo_kit.model.sources import find_source

if TYPE_CHECKING:
    import pandas

Parts = dict[str, int]  # bytes by part

CUDA_CONTEXT = 500_000_000  # the driver's and the libraries' own, outside of what torch allocates
HEAD_ROWS = math.isqrt(HEAD_TILE // 8)  # of a tile of float32 logits, which is twice as wide as high
MLP_TILE = 4096  # tokens that go through an MLP at one time in backward
OFFLOAD_BUFFERS = 4  # layer inputs on the GPU while the others are with the host: in use, two coming, the last one
OFFLOAD_FROM = 0.6  # of the card: an update that takes more moves its layer inputs to the host
HOST_SHARE = 0.5  # of the host's free memory that pinned layer inputs may take: nothing else can use it meanwhile
TO_SPARE = 0.1  # of the card, left free by a token budget that is derived: fragments, and the notebook's own tensors
BUDGETS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768)  # tokens in a micro-batch
OPTIMIZERS = ("adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")


@dataclass(frozen=True)
class PlanOptions:
    """What decides about memory, by the names and with the defaults of `load_model` and `TrainOptions`.

    max_prompt_length: the longest prompt in tokens; what max_seq_length leaves beside the completion unless given.
    tokens_per_micro_batch, activation_offloading (layer inputs of the update to the host): derived from the card if
    None.
    beta: takes nothing, since the reference is the same model with its adapter off.
    """

    load_in_4bit: bool = True
    double_quant: bool = False
    max_seq_length: int = 1024
    lora_rank: int = 32
    dtype: str | None = None
    algorithm: str = "grpo"
    optim: str = "adamw_torch"
    prompts_per_step: int = 4
    num_generations: int = 8
    max_prompt_length: int | None = None
    max_completion_length: int = 256
    tokens_per_micro_batch: int | None = None
    beta: float | None = None
    activation_offloading: bool | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, names in (("dtype", (None, *DTYPES)), ("optim", OPTIMIZERS)):
            if getattr(self, name) not in names:
                raise ValueError(f"{name} must be one of {', '.join(map(str, names))}; got {getattr(self, name)!r}")
        if self.double_quant and not self.load_in_4bit:
            raise ValueError("double_quant=True quantizes the scales of 4-bit weights: it needs load_in_4bit=True")
        if self.prompt < 1 or self.sequence > self.max_seq_length:
            raise ValueError(
                f"max_seq_length={self.max_seq_length} does not hold a prompt of {max(1, self.prompt)} and a "
                f"completion of {self.max_completion_length} tokens"
            )

    @property
    def width(self) -> int:
        """Bytes of a number that is neither 4-bit nor kept in float32."""
        return 4 if self.dtype == "float32" else 2

    @property
    def prompt(self) -> int:
        left = self.max_seq_length - self.max_completion_length
        return left if self.max_prompt_length is None else self.max_prompt_length

    @property
    def sequence(self) -> int:
        return self.prompt + self.max_completion_length

    @property
    def sequences(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def step_tokens(self) -> int:
        """Tokens of a step: a prompt is there once for all its answers."""
        return self.prompts_per_step * (self.prompt + self.num_generations * self.max_completion_length)

    @property
    def micro_batch(self) -> int:
        """Tokens that go through the model at once in the update."""
        assert self.tokens_per_micro_batch is not None
        return max(min(self.tokens_per_micro_batch, self.step_tokens), self.sequence)

    @property
    def attention_rows(self) -> int:
        """Tokens of a micro-batch's sequences, each with its prompt."""
        sequences = self.micro_batch * self.sequences // self.step_tokens
        return max(self.micro_batch, min(sequences, self.sequences) * self.sequence)

    @property
    def micro_batch_completions(self) -> int:
        """Of these, tokens of completions: the head sees no others."""
        return min(self.micro_batch, self.sequences * self.max_completion_length)


_COUNTS = (
    "max_seq_length",
    "lora_rank",
    "prompts_per_step",
    "num_generations",
    "max_prompt_length",
    "max_completion_length",
    "tokens_per_micro_batch",
)

# ---- what is there all the time ----


def weights(shape: Shape, options: PlanOptions) -> Parts:
    """Linear layers in 4 bits with their scales; the rest, and what a quantized checkpoint left so, in 16."""
    taken, left = shape.linear_tensors
    linear = sum(nf4_bytes(size, options.double_quant) for size in taken)
    return {
        "linear layers": (linear if options.load_in_4bit else options.width * sum(taken)) + options.width * sum(left),
        "embeddings, head, norms": options.width * shape.other_weights,
    }


def lora(shape: Shape, options: PlanOptions) -> int:
    """Float32."""
    return 4 * sum(shape.lora_tensors(options.lora_rank))


def optimizer_state(shape: Shape, options: PlanOptions) -> tuple[int, int]:
    """Bytes on the GPU and with the host: bitsandbytes pages tensors of 100,000 elements or more."""
    eight_bit, paged = options.optim.endswith("8bit"), options.optim.startswith("paged")
    gpu = host = 0
    for elements in shape.lora_tensors(options.lora_rank):
        moments = _moments(elements, eight_bit)
        if paged and elements >= 100_000:
            host += moments
        else:
            gpu += moments
    return gpu, host


def _moments(elements: int, eight_bit: bool) -> int:
    """Adam's two: float32, or bytes with a float32 scale for each 256; bitsandbytes leaves tensors of less than 4,096
    elements in float32."""
    if not eight_bit or elements < 4096:
        return 2 * 4 * elements
    return 2 * (elements + 4 * -(-elements // 256))


# ---- the rollout ----


def kv_cache(shape: Shape, options: PlanOptions, sequences: int, tokens: int) -> int:
    """Keys and values of every layer; windows that would keep less are not looked at."""
    return 2 * shape.layers * shape.keys * options.width * sequences * tokens


def prefill(shape: Shape, options: PlanOptions) -> int:
    """All prompts at once through one MLP without gradients: beside 16-bit numbers, LoRA's in float32 (peft casts its
    inputs up), twice while they are scaled. And the mask of padded prompts, as bytes and as what attention adds."""
    width, tokens = options.width, options.prompts_per_step * options.prompt
    mlp = tokens * ((2 * width + 8) * shape.intermediate + (3 * width + 4) * shape.hidden)
    scores = tokens * options.prompt * shape.heads * (2 * width + 4) if shape.eager else 0
    return mlp + dequantized(shape, options) + tokens * options.prompt * (1 + width) + scores


def last_token(shape: Shape, options: PlanOptions) -> int:
    """The largest of three: a layer's attention, a weight, the distributions that tokens are drawn from (float32
    logits and logprobs, float64 probabilities and their sums)."""
    draw = options.sequences * shape.vocab * (options.width + 4 + 4 + 8 + 8)
    return max(layer_cache_copies(shape, options), dequantized(shape, options), draw)


def layer_cache_copies(shape: Shape, options: PlanOptions) -> int:
    """Of one layer: the cache grows by concatenation, keys before values, so half of it is there twice; then grouped
    heads are written out for attention with a mask."""
    tokens = options.sequences * options.sequence
    grown = shape.keys * options.width * tokens
    written_out = 2 * shape.queries * options.width * tokens if shape.kv_heads < shape.heads else 0
    return max(grown, written_out)


def dequantized(shape: Shape, options: PlanOptions) -> int:
    """The largest weight in 16 bits, while it is multiplied by."""
    return options.width * shape.hidden * shape.intermediate if options.load_in_4bit else 0


# ---- the update: M tokens at once ----


def saved_inputs(shape: Shape, options: PlanOptions) -> int:
    """What the forward pass keeps: each layer's input."""
    return shape.layers * options.micro_batch * shape.hidden * options.width


def saved_on_gpu(shape: Shape, options: PlanOptions) -> int:
    """All of them, or what is on its way while the others are with the host."""
    kept = min(OFFLOAD_BUFFERS, shape.layers) if options.activation_offloading else shape.layers
    return kept * options.micro_batch * shape.hidden * options.width


def layer_backward(shape: Shape, options: PlanOptions) -> int:
    """One layer computed again, with its gradients: the larger half, and the attention's weight multiplied by."""
    if not shape.fused:
        return plain_layer_backward(shape, options)
    weight = options.width * shape.hidden * shape.queries if options.load_in_4bit else 0
    return max(attention_backward(shape, options), mlp_backward(shape, options)) + weight


def attention_backward(shape: Shape, options: PlanOptions) -> int:
    """The layer's input and its norm with gradients; q, k, v before and after rotation, and theirs; q's in float32, as
    flash attention sums it. Sequences that share a prompt have it once but in attention: there each has q, k, v, the
    result and all their gradients for itself."""
    hidden, queries, keys, width = shape.hidden, shape.queries, shape.keys, options.width
    rows = options.attention_rows
    if rows == options.micro_batch:
        return rows * (width * (5 * hidden + 3 * queries + 4 * keys) + 4 * queries)
    once = options.micro_batch * (width * (5 * hidden + 2 * queries + 2 * keys) + 4 * queries)
    return once + rows * (width * (4 * queries + 4 * keys) + 4 * queries)


def mlp_backward(shape: Shape, options: PlanOptions) -> int:
    """The attention half stays while the MLP goes through in tiles; gate, up and down are dequantized once for all
    tiles."""
    hidden, inner, width = shape.hidden, shape.intermediate, options.width
    held = options.micro_batch * (4 * hidden + 2 * shape.queries + 2 * shape.keys)
    tile = min(options.micro_batch, MLP_TILE) * (2 * hidden + 4 * inner)
    dense = 3 * hidden * inner if options.load_in_4bit else 0
    return width * (held + tile + dense)


def plain_layer_backward(shape: Shape, options: PlanOptions) -> int:
    """A layer of transformers' own, in which autograd saves everything: counted from its code, not measured. With
    capped scores, all of them: in float32, and four times in 16 bits."""
    hidden, queries, keys, inner, width = shape.hidden, shape.queries, shape.keys, shape.intermediate, options.width
    each = width * (6 * hidden + 4 * queries + 2 * keys + 7 * inner) + 3 * 4 * hidden
    scores = options.sequence * shape.heads * (4 + 4 * width) if shape.eager else 0
    return options.micro_batch * (each + scores) + dequantized(shape, options)


def head_backward(shape: Shape, options: PlanOptions) -> int:
    """A tile of float32 logits and its gradient; the float32 sum for its rows; hidden states before and after the last
    norm; those of the completions and their gradient, which PPO's critic reads in float32 too."""
    rows, hidden, width = options.micro_batch_completions, shape.hidden, options.width
    tile = HEAD_TILE + HEAD_TILE * width // 4 + 4 * min(rows, HEAD_ROWS) * hidden
    critic = 4 * rows * hidden if options.algorithm == "ppo" else 0
    return tile + 2 * width * options.micro_batch * hidden + 2 * width * rows * hidden + critic


# ---- the phases, each at its fullest moment ----


def rollout_parts(shape: Shape, options: PlanOptions) -> Parts:
    """Either while the prompts are read, or at the last token of answers that all grew as long as they may."""
    prompts = kv_cache(shape, options, options.prompts_per_step, options.prompt)
    answers = kv_cache(shape, options, options.sequences, options.sequence)
    return _fullest(
        {"KV cache": prompts, "reading the prompts": prefill(shape, options)},
        {"KV cache": answers, "drawing a token": last_token(shape, options)},
    )


def update_parts(shape: Shape, options: PlanOptions) -> Parts:
    """Gradients of the micro-batches so far are there from the second on; those of the present one grow as the saved
    inputs go. AdamW of torch writes out a denominator for every weight."""
    adapter, layer = lora(shape, options), layer_backward(shape, options)
    before = adapter if options.micro_batch < options.step_tokens else 0
    saved = saved_on_gpu(shape, options)
    return _fullest(
        {"gradients": before, "layer inputs": saved, "the head": head_backward(shape, options)},
        {"gradients": before, "layer inputs": saved, "one layer's backward": layer},
        {"gradients": before + adapter, "one layer's backward": layer},
        {"gradients": adapter, "the optimizer's step": adapter if options.optim == "adamw_torch" else 0},
    )


def _fullest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def _phases(shape: Shape, options: PlanOptions) -> dict[str, Parts]:
    always = {
        "CUDA context": CUDA_CONTEXT,
        **weights(shape, options),
        "LoRA": lora(shape, options),
        "optimizer": optimizer_state(shape, options)[0],
    }
    return {
        "rollout": always | rollout_parts(shape, options),
        "update": always | update_parts(shape, options),
    }


# ---- what is derived from the card ----


def best_token_budget(shape: Shape, gpu: Gpu, options: PlanOptions) -> int:
    """The largest `tokens_per_micro_batch` whose update leaves a tenth of the card free; the smallest if none does."""
    for budget in reversed(BUDGETS):
        settled = _with_offload(shape, gpu, replace(options, tokens_per_micro_batch=budget))
        if _update(shape, settled) <= (1 - TO_SPARE) * gpu.total:
            return budget
    return BUDGETS[0]


def offload_pays(shape: Shape, gpu: Gpu, options: PlanOptions) -> bool:
    """Whether the update would fill much of the card without, and the host has room. Of another machine's host nothing
    is known: it is taken to have."""
    if _update(shape, replace(options, activation_offloading=False)) <= OFFLOAD_FROM * gpu.total:
        return False
    return not gpu.at_hand or saved_inputs(shape, options) <= HOST_SHARE * _host_memory()


def _host_memory() -> int:
    return int(psutil.virtual_memory().available)


def _update(shape: Shape, options: PlanOptions) -> int:
    return sum(_phases(shape, options)["update"].values())


def _with_offload(shape: Shape, gpu: Gpu, options: PlanOptions) -> PlanOptions:
    return (
        options
        if options.activation_offloading is not None
        else replace(options, activation_offloading=offload_pays(shape, gpu, options))
    )


# ---- the plan ----


@dataclass(frozen=True)
class Suggestion:
    """changes: what is set anew, on top of the suggestions before it. settings: all of it. total: the plan's then."""

    changes: dict[str, Any]
    settings: dict[str, Any]
    total: int
    fits: bool


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
        return [] if self.fits else _search(self)

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
    return MemoryPlan(name, gpu, shape, asked, options, _phases(shape, options), _notes(shape, asked, options))


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


# ---- the search for settings that fit ----


def _search(plan: MemoryPlan) -> list[Suggestion]:
    """Try one kind of change after the other; of each the mildest that fits, or else the strongest, if it helps. What
    the later ones made needless goes again."""
    kept: list[dict[str, Any]] = []
    best = plan
    for kind in _CHANGES:
        tried = [(changes, _changed(best, changes)) for changes in kind(best)]
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
        if "load_in_4bit" not in changes and _changed(plan, *others).fits:
            kept = others
    return kept


def _one_after_the_other(plan: MemoryPlan, kept: list[dict[str, Any]]) -> list[Suggestion]:
    found, settings = [], dict[str, Any]()
    for changes in kept:
        settings = settings | changes
        changed = _changed(plan, settings)
        found.append(Suggestion(changes, settings, changed.total, changed.fits))
    return found


def _changed(plan: MemoryPlan, *changes: dict[str, Any]) -> MemoryPlan:
    together = {name: value for some in changes for name, value in some.items()}
    return _plan(plan.name, plan.shape, plan.gpu, replace(plan.asked, **together))


def _smaller_micro_batches(plan: MemoryPlan) -> list[dict[str, Any]]:
    longest, now = plan.options.sequence, plan.options.micro_batch
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
