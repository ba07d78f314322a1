"""How much of the GPU vLLM takes, and for how many sequences at once: derived from the hardware, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_kit.rollout.native.slots import BUCKETS

SHARE_OF_FREE = 0.5  # of what the weights leave: the cache; the rest is for activations, graphs and the update
BLOCK = 16  # tokens of a block of the cache
SPARE_BLOCKS = 8  # vLLM keeps one to itself
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's LoRA kernels take
LARGE_CARD, MANY_TOKENS, FEW_TOKENS = 40 * 10**9, 8192, 2048

Note = tuple[str, str, str]


@dataclass(frozen=True)
class Sizes:
    """sequences: the most at once. step_tokens: the most that go through the model in a step, prompts included.
    graphs: the numbers of sequences for which a CUDA graph is captured. cache_bytes: keys and values of all sequences.
    rank: of the stacked LoRA tensors, filled up with zeros. utilization: the share of the GPU that has to be free.
    """

    sequences: int
    step_tokens: int
    graphs: tuple[int, ...]
    cache_bytes: int
    rank: int
    utilization: float

    def notes(self) -> list[Note]:
        """In words, with the reasons."""
        return [
            ("vLLM sequences", str(self.sequences), "the most that half of the free memory holds at full length"),
            ("vLLM cache", f"{self.cache_bytes / 1e9:.2f} GB", "for all of them; given back when the update needs it"),
            ("vLLM step", f"{self.step_tokens} tokens", f"{MANY_TOKENS} on a card of 40 GB or more, else {FEW_TOKENS}"),
            ("vLLM graphs", f"{len(self.graphs)}, for 1 to {self.sequences} sequences", "each takes start-up time"),
        ]


def choose_sizes(
    *, free: int, total: int, weights: int, token_bytes: int, max_seq_length: int, lora_rank: int
) -> Sizes:
    """For a GPU of `total` bytes, `free` of them free; weights: bytes that the model will take, adapter included;
    token_bytes: of one token's keys and values.

    Raises ValueError where not a single sequence fits, and for a rank that is too large.
    """
    limit = int(SHARE_OF_FREE * (free - weights))
    one = _cache_bytes(1, max_seq_length, token_bytes)
    if one > limit:
        raise ValueError(
            f"one sequence of {max_seq_length} tokens takes {one / 1e9:.2f} GB of cache, and vLLM may take "
            f"{max(limit, 0) / 1e9:.2f} GB beside the weights: lower max_seq_length or free some of the GPU's memory"
        )
    fitting = [n for n in BUCKETS if _cache_bytes(n, max_seq_length, token_bytes) <= limit]
    sequences = fitting[-1]
    return Sizes(
        sequences=sequences,
        step_tokens=MANY_TOKENS if total >= LARGE_CARD else FEW_TOKENS,
        graphs=tuple(fitting),
        cache_bytes=_cache_bytes(sequences, max_seq_length, token_bytes),
        rank=padded_rank(lora_rank),
        utilization=int(90 * free / total) / 100,
    )


def padded_rank(rank: int) -> int:
    """The smallest that vLLM has a kernel for."""
    fitting = [known for known in RANKS if known >= rank]
    if not fitting:
        raise ValueError(f"vLLM takes LoRA up to rank {RANKS[-1]}, not {rank}; engine='native' takes any")
    return fitting[0]


def _cache_bytes(sequences: int, tokens: int, token_bytes: int) -> int:
    return (sequences * -(-tokens // BLOCK) + SPARE_BLOCKS) * BLOCK * token_bytes
