"""What vLLM is told to take, by hand for two cards."""

from __future__ import annotations

import pytest

from grpo_kit.rollout.vllm import choose_sizes, padded_rank

TOKEN = 28 * 1024  # bytes of a token's keys and values: the 1.5B shape of Qwen2.5 (2 · 28 layers · 256 · 2 bytes)


def test_a_large_card_holds_the_most_sequences() -> None:
    sizes = choose_sizes(
        free=140 * 10**9, total=150 * 10**9, weights=2 * 10**9, token_bytes=TOKEN, max_seq_length=1000, lora_rank=32
    )
    assert sizes.sequences == 256 and sizes.graphs == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert sizes.cache_bytes == (256 * 63 + 8) * 16 * TOKEN  # blocks of 16 tokens, 8 to spare
    assert (sizes.step_tokens, sizes.rank, sizes.utilization) == (8192, 32, 0.84)


def test_a_small_card_holds_what_half_of_its_free_memory_does() -> None:
    free, weights = 20 * 10**9, 4 * 10**9
    sizes = choose_sizes(
        free=free, total=24 * 10**9, weights=weights, token_bytes=TOKEN, max_seq_length=4096, lora_rank=5
    )
    one = 4096 * TOKEN
    assert sizes.sequences == 64 and 64 * one <= (free - weights) / 2 < 128 * one
    assert sizes.cache_bytes <= (free - weights) / 2
    assert (sizes.step_tokens, sizes.rank) == (2048, 8)


def test_a_card_without_room_for_one_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="lower max_seq_length"):
        choose_sizes(
            free=10**9, total=24 * 10**9, weights=9 * 10**8, token_bytes=TOKEN, max_seq_length=32768, lora_rank=8
        )


def test_every_size_is_said_with_its_reason() -> None:
    sizes = choose_sizes(
        free=20 * 10**9, total=24 * 10**9, weights=0, token_bytes=TOKEN, max_seq_length=512, lora_rank=8
    )
    assert all(value and reason for _, value, reason in sizes.notes())


@pytest.mark.parametrize(("asked", "taken"), [(1, 1), (2, 8), (8, 8), (24, 32), (300, 320), (512, 512)])
def test_a_rank_is_filled_up_to_one_with_a_kernel(asked: int, taken: int) -> None:
    assert padded_rank(asked) == taken


def test_a_rank_beyond_all_of_them_is_an_error() -> None:
    with pytest.raises(ValueError, match="engine='native' takes any"):
        padded_rank(513)
