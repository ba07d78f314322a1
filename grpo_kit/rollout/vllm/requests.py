"""Between our words and vLLM's: what is asked of a request, and what its outputs say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from grpo_kit.rollout.engine import Sampling, stream_seed


@dataclass(frozen=True)
class Delta:
    """What a step brought for one request: its new tokens and their logprobs."""

    request: str
    token_ids: list[int]
    logprobs: list[float]


def sampling_arguments(sampling: Sampling, prompt: int, completion: int, eos_ids: Collection[int]) -> dict[str, Any]:
    """Of vLLM's SamplingParams, for completion `completion` of prompt `prompt`.

    The temperature is 1 or greedy: vLLM's logits are divided by the one asked for before it sees them, which makes its
    raw logprobs those of the contract, with any cut and at any temperature. Stop strings are looked for by the engine,
    as everywhere: vLLM is not told of them, and needs no tokenizer.
    """
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": 1.0 if sampling.temperature else 0.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": stream_seed(sampling.seed, prompt, completion),
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # the ids that end a completion are ours to name
        "stop_token_ids": sorted(eos_ids),
        "detokenize": False,
    }


def deltas(outputs: Iterable[Any]) -> Iterator[Delta]:
    """outputs: vLLM's RequestOutputs of one step, which hold what is new."""
    for output in outputs:
        new = output.outputs[0]
        ids = list(new.token_ids)
        if ids:
            told = zip(ids, new.logprobs, strict=True)
            yield Delta(output.request_id, ids, [by_token[token].logprob for token, by_token in told])
