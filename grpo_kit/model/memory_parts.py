"""What takes how much of the GPU's memory in training: one formula a part.

Two phases take turns on the card: the rollout samples answers, the update learns from them. Of each, the parts at its
fullest moment are counted, for prompts and answers as long as they may become, from the second step on, when the
optimizer has its state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_kit.kernels.decoder_layer import TILE as MLP_TILE
from grpo_kit.kernels.linear_logprob import CHUNK_BYTES as HEAD_TILE
from grpo_kit.model.precision import DTYPES
from grpo_kit.model.shape import Shape, nf4_bytes
from grpo_kit.rollout import check_engine, check_kv_cache
from grpo_kit.rollout.native.cache import SCALE_BYTES, columns_for
from grpo_kit.rollout.native.engine import SHARE_OF_FREE
from grpo_kit.rollout.native.prefill import CHUNK_TOKENS
from grpo_kit.rollout.native.slots import BUCKETS, bucket_for

Parts = dict[str, int]  # bytes by part

CUDA_CONTEXT = 500_000_000  # the driver's and the libraries' own, outside of what torch allocates
HEAD_ROWS = math.isqrt(HEAD_TILE // 8)  # of a tile of float32 logits, which is twice as wide as high
OFFLOAD_BUFFERS = 4  # layer inputs on the GPU while the others are with the host: in use, two coming, the last one
PAIRED = ("online_dpo", "online_ipo")
OPTIMIZERS = ("adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")


@dataclass(frozen=True)
class PlanOptions:
    """What decides about memory, by the names and with the defaults of `load_model` and `TrainOptions`.

    max_prompt_length: the longest prompt in tokens; what max_seq_length leaves beside the completion unless given.
    tokens_per_micro_batch, activation_offloading (layer inputs of the update to the host): derived from the card if
    None.
    beta: takes nothing, since the reference is the same model with its adapter off.
    engine: of the rollout; "auto" is the native one, as on a GPU.
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
    engine: str = "auto"
    kv_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, names in (("dtype", (None, *DTYPES)), ("optim", OPTIMIZERS)):
            if getattr(self, name) not in names:
                raise ValueError(f"{name} must be one of {', '.join(map(str, names))}; got {getattr(self, name)!r}")
        check_engine(self.engine)
        check_kv_cache(self.kv_cache_dtype, self.engine)
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
    def unit(self) -> int:
        """Sequences that stay together in the update."""
        return 2 if self.algorithm in PAIRED else 1


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
    if options.kv_cache_dtype is None:
        return 2 * shape.layers * shape.keys * options.width * sequences * tokens
    return 2 * shape.layers * (shape.keys + SCALE_BYTES * shape.kv_heads) * sequences * tokens


def prefill(shape: Shape, options: PlanOptions, at_once: int | None = None) -> int:
    """All prompts, or those of `at_once` tokens, through one MLP without gradients: beside 16-bit numbers, LoRA's in
    float32 (peft casts its inputs up), twice while they are scaled. And the mask of padded prompts, as bytes and as
    what attention adds."""
    width, tokens = options.width, options.prompts_per_step * options.prompt
    if at_once is not None:
        tokens = min(tokens, max(options.prompt, at_once // options.prompt * options.prompt))
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


def held_by_sampler(shape: Shape, options: PlanOptions, free: int) -> Parts:
    """What the native engine has from its first answers on: a slot's cache for each sequence, or for as many as find
    room in its share of the `free` bytes; the adapter in the compute format; what its captured token step writes, most
    of it the distributions that tokens are drawn from. Counted from its code. vLLM takes as much for a sequence, and
    for as many of full length as there can be: it is told before it knows how many will be asked for."""
    columns, wanted = columns_for(options.sequence), bucket_for(options.sequences)
    if options.engine == "vllm":
        columns, wanted = options.max_seq_length, BUCKETS[-1]
    possible = [n for n in BUCKETS if n <= wanted and kv_cache(shape, options, n, columns) <= SHARE_OF_FREE * free]
    slots = max(possible, default=1)
    token = slots * shape.vocab * (options.width + 4 * 4)
    return {
        "KV cache": kv_cache(shape, options, slots, columns),
        "LoRA to sample with": lora(shape, options) * options.width // 4,
        "a token step": token + dequantized(shape, options),
    }


# ---- the update ----


@dataclass(frozen=True)
class MicroBatch:
    """tokens: what goes through the model at once. rows: in attention, where each sequence has its prompt for itself.
    completions: of the tokens, those that the head sees."""

    tokens: int
    rows: int
    completions: int


def micro_batch(shape: Shape, options: PlanOptions) -> MicroBatch:
    """The fullest one, as training cuts them, with prompts as long as they may be; answers that are shorter than they
    may be fill it up. Packed, a prompt counts once for its answers; padded, every sequence has its own. What is larger
    than the budget and can't be parted goes alone."""
    assert options.tokens_per_micro_batch is not None
    budget, longest = options.tokens_per_micro_batch, options.max_completion_length
    if not shape.fused:
        fitting = budget // options.sequence // options.unit * options.unit
        count = max(options.unit, min(options.sequences, fitting))
        return MicroBatch(count * options.sequence, count * options.sequence, count * longest)
    groups = range(1, max(1, min(options.prompts_per_step, budget // (options.prompt + 1))) + 1)
    found = [_packed(options, budget, count) for count in groups]
    return MicroBatch(max(f.tokens for f in found), max(f.rows for f in found), max(f.completions for f in found))


def _packed(options: PlanOptions, budget: int, groups: int) -> MicroBatch:
    """With answers to so many prompts."""
    prompts, longest = groups * options.prompt, options.max_completion_length
    full = prompts + groups * options.num_generations * longest
    tokens = max(options.prompt + options.unit * longest, min(budget, full))
    sequences = max(options.unit, min(groups * options.num_generations, -(-(tokens - prompts) // longest)))
    return MicroBatch(tokens, tokens + (sequences - groups) * options.prompt, tokens - prompts)


def saved_inputs(shape: Shape, options: PlanOptions) -> int:
    """What the forward pass keeps: each layer's input."""
    return shape.layers * micro_batch(shape, options).tokens * shape.hidden * options.width


def saved_on_gpu(shape: Shape, options: PlanOptions) -> int:
    """All of them, or what is on its way while the others are with the host."""
    kept = min(OFFLOAD_BUFFERS, shape.layers) if options.activation_offloading else shape.layers
    return kept * micro_batch(shape, options).tokens * shape.hidden * options.width


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
    cut = micro_batch(shape, options)
    tokens, rows = cut.tokens, cut.rows
    if rows == tokens:
        return rows * (width * (5 * hidden + 3 * queries + 4 * keys) + 4 * queries)
    once = tokens * (width * (5 * hidden + 2 * queries + 2 * keys) + 4 * queries)
    return once + rows * (width * (4 * queries + 4 * keys) + 4 * queries)


def mlp_backward(shape: Shape, options: PlanOptions) -> int:
    """The attention half stays while the MLP goes through in tiles: gate, up and what is between them and down, whose
    gradients take their places. All tiles share the dense gate, up and down; a single tile has one at a time."""
    hidden, inner, width = shape.hidden, shape.intermediate, options.width
    tokens = micro_batch(shape, options).tokens
    held = tokens * (4 * hidden + 2 * shape.queries + 2 * shape.keys)
    tile = min(tokens, MLP_TILE) * (hidden + 3 * inner)
    weights_held = 3 if tokens > MLP_TILE else 1
    dense = weights_held * hidden * inner if options.load_in_4bit else 0
    return width * (held + tile + dense)


def plain_layer_backward(shape: Shape, options: PlanOptions) -> int:
    """A layer of transformers' own, in which autograd saves everything: counted from its code, not measured. With
    capped scores, all of them: in float32, and four times in 16 bits."""
    hidden, queries, keys, inner, width = shape.hidden, shape.queries, shape.keys, shape.intermediate, options.width
    each = width * (6 * hidden + 4 * queries + 2 * keys + 7 * inner) + 3 * 4 * hidden
    scores = options.sequence * shape.heads * (4 + 4 * width) if shape.eager else 0
    return micro_batch(shape, options).tokens * (each + scores) + dequantized(shape, options)


def head_backward(shape: Shape, options: PlanOptions) -> int:
    """A tile of float32 logits and its gradient; the float32 sum for its rows; hidden states before and after the last
    norm; those of the completions and their gradient, which PPO's critic reads in float32 too."""
    cut, hidden, width = micro_batch(shape, options), shape.hidden, options.width
    rows = cut.completions
    tile = HEAD_TILE + HEAD_TILE * width // 4 + 4 * min(rows, HEAD_ROWS) * hidden
    critic = 4 * rows * hidden if options.algorithm == "ppo" else 0
    return tile + 2 * width * cut.tokens * hidden + 2 * width * rows * hidden + critic


# ---- the phases, each at its fullest moment ----


def rollout_parts(shape: Shape, options: PlanOptions) -> Parts:
    """The `transformers` engine's: either while the prompts are read, or at the last token of answers that all grew as
    long as they may."""
    prompts = kv_cache(shape, options, options.prompts_per_step, options.prompt)
    answers = kv_cache(shape, options, options.sequences, options.sequence)
    return _fullest(
        {"KV cache": prompts, "reading the prompts": prefill(shape, options)},
        {"KV cache": answers, "drawing a token": last_token(shape, options)},
    )


def update_parts(shape: Shape, options: PlanOptions) -> Parts:
    """The sum of the gradients is there from the second micro-batch on; in the first it grows as the saved inputs go.
    AdamW of torch writes out a denominator for every weight."""
    adapter, layer = lora(shape, options), layer_backward(shape, options)
    before = adapter if micro_batch(shape, options).tokens < options.step_tokens else 0
    saved = saved_on_gpu(shape, options)
    return _fullest(
        {"gradients": before, "layer inputs": saved, "the head": head_backward(shape, options)},
        {"gradients": before, "layer inputs": saved, "one layer's backward": layer},
        {"gradients": adapter, "one layer's backward": layer},
        {"gradients": adapter, "the optimizer's step": adapter if options.optim == "adamw_torch" else 0},
    )


def _fullest(*moments: Parts) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def phases(shape: Shape, options: PlanOptions, total: int) -> dict[str, Parts]:
    """Both of them, each with what is there all the time, on a card of `total` bytes. What the native engine holds is
    not the update's: it stays if there is room, and goes if not."""
    always = {
        "CUDA context": CUDA_CONTEXT,
        **weights(shape, options),
        "LoRA": lora(shape, options),
        "optimizer": optimizer_state(shape, options)[0],
    }
    if options.engine == "transformers":
        rollout = rollout_parts(shape, options)
    else:
        held = held_by_sampler(shape, options, total - sum(always.values()))
        rollout = held | {"reading the prompts": prefill(shape, options, CHUNK_TOKENS)}
    return {"rollout": always | rollout, "update": always | update_parts(shape, options)}
