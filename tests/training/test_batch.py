"""A micro-batch, laid out by hand."""

from __future__ import annotations

import torch

from grpo_kit.rollout import Completion
from grpo_kit.training.batch import Sequence, collate

SEQUENCES = [
    Sequence([5, 6], Completion([7], [-0.5], "eos", "")),
    Sequence([1], Completion([2, 3, 4], [-1.0, -2.0, -3.0], "length", ""), trained=False),
    Sequence([9, 9, 9], Completion([8, 0], [-0.25, -0.75], "eos", "")),
]


def test_prompt_and_completion_stand_side_by_side():
    batch = collate(SEQUENCES, [0, 1, 2], torch.device("cpu"))
    assert batch.packed.ids.tolist() == [5, 6, 7, 1, 2, 3, 4, 9, 9, 9, 8, 0]  # the last 0 is a token
    assert batch.packed.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.first.tolist() == [2, 1, 3]
    assert batch.width == 3


def test_over_the_completions():
    batch = collate(SEQUENCES, [0, 1, 2], torch.device("cpu"))
    assert batch.token_mask.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    assert batch.loss_mask.tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0]]  # the second is not trained
    assert batch.sampled.tolist() == [[-0.5, 0, 0], [-1, -2, -3], [-0.25, -0.75, 0]]


def test_only_the_chosen_in_their_order():
    batch = collate(SEQUENCES, [2, 0], torch.device("cpu"))
    assert batch.indices == [2, 0]
    assert batch.packed.ids.tolist() == [9, 9, 9, 8, 0, 5, 6, 7]
    assert batch.token_mask.tolist() == [[1, 1], [1, 0]]


def test_a_sequence_is_as_long_as_its_tokens():
    assert [len(sequence) for sequence in SEQUENCES] == [3, 4, 5]


def test_answers_to_one_prompt_share_it():
    group = [Sequence([5, 6], Completion([token], [-0.5], "eos", "")) for token in (7, 8)]
    assert collate(group, [0, 1], torch.device("cpu")).packed.ids.tolist() == [5, 6, 7, 8]
