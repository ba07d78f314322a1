"""Whether the native engine samples the model that is trained: its greedy tokens beside those of transformers' own
generate, and its logprobs beside the trainer's.

    python benchmarks/sampler_truth.py                  # 200 prompts
    python benchmarks/sampler_truth.py --prompts 16     # fewer, for a CPU

SmolLM2-135M with an adapter that does something, on sums of different lengths, up to 64 tokens. Greedy in float32:
whole answers have to be identical; where one is not, the gap between the logits of the two tokens at the first
difference says whether it was a tie. Logprobs: of 4 answers to each prompt at temperature 1, in float32 and on a GPU
also with 4-bit weights in the 16 bits that it computes in. Writes sampler_truth.md and .json into benchmarks/results/
(or --into) after each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import report
import torch
from child_process import say
from report import Row

import grpo_kit as gk
from grpo_kit.rollout import Sampling
from grpo_kit.training.batch import Sequence, collate

TOKENS, ANSWERS, AT_ONCE = 64, 4, 20
ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    asked = parser.parse_args()
    rows: list[Row] = []
    for row in measurements(asked.prompts):
        say(str(row))
        rows.append(row | report.where("transformers"))
        report.keep("sampler_truth", rows, table(rows), asked.into)
    print(table(rows))


def measurements(count: int) -> Iterator[Row]:
    model = loaded(load_in_4bit=False, dtype="float32")
    prompts = ragged_prompts(model, count)
    yield greedy(model, prompts)
    yield logprobs(model, prompts)
    if ON_GPU:
        yield logprobs(loaded(load_in_4bit=True), prompts)


def loaded(**options: Any) -> Any:
    model = gk.load_model(engine="native", **options)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.trainable().items():
        if "lora_B" in name:  # zero in a fresh adapter
            weight.data.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    model.engine.adapter_changed()
    return model


def ragged_prompts(model: Any, count: int) -> list[list[int]]:
    """Sums of two to five digits, every other one without a system prompt."""
    sets = [
        gk.data.arithmetic(count, digits=digits, operations="+-*", **({"system": None} if digits % 2 else {}))
        for digits in (2, 3, 4, 5)
    ]
    return [model.encode(sets[i % len(sets)][i]["prompt"]) for i in range(count)]


def greedy(model: Any, prompts: list[list[int]]) -> Row:
    drawn = [group[0].token_ids for group in model.complete(prompts, Sampling(max_tokens=TOKENS, temperature=0))]
    expected = [
        answer
        for start in range(0, len(prompts), AT_ONCE)
        for answer in _generated(model, prompts[start : start + AT_ONCE])
    ]
    gaps = [
        _gap(model, prompt, ours, theirs)
        for prompt, ours, theirs in zip(prompts, drawn, expected, strict=True)
        if ours != theirs
    ]
    return {
        "check": "greedy",
        "precision": _precision(model),
        "prompts": len(prompts),
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
        "tokens": sum(map(len, drawn)),
        "identical": 1 - len(gaps) / len(prompts),
        "logit_gaps_at_first_difference": gaps,
    }


def _generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' generate, up to the end token."""
    longest, ends = max(map(len, prompts)), sorted(model.chat.eos_ids)
    ids = torch.tensor([[ends[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    device = model.precision.device
    rows = model.module.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )[:, longest:].tolist()
    lengths = [next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@torch.no_grad()
def _gap(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """Of the logits of the two tokens at the first difference."""
    at = next(i for i, (own, other) in enumerate(zip(ours, theirs, strict=False)) if own != other)
    ids = torch.tensor([prompt + theirs[:at]], device=model.precision.device)
    logits = model.module(input_ids=ids).logits[0, -1].float()
    return float(logits[theirs[at]] - logits[ours[at]])


@torch.no_grad()
def logprobs(model: Any, prompts: list[list[int]]) -> Row:
    groups = model.complete(prompts, Sampling(max_tokens=TOKENS, seed=1), ANSWERS)
    answers = [Sequence(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    gaps = []
    with model.lock:
        model.module.eval()
        for start in range(0, len(answers), AT_ONCE):
            some = answers[start : start + AT_ONCE]
            batch = collate(some, list(range(len(some))), model.precision.device)
            trained = model.token_outputs(batch.packed, batch.first, batch.width, 1.0).logprobs
            gaps.append((trained - batch.sampled).abs()[batch.token_mask.bool()])
    gap = torch.cat(gaps)
    return {
        "check": "logprobs",
        "precision": _precision(model),
        "prompts": len(prompts),
        "tokens": len(gap),
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
    }


def _precision(model: Any) -> str:
    return str(model.precision.dtype).removeprefix("torch.") + ", 4-bit weights" * model.options.load_in_4bit


def table(rows: list[Row]) -> str:
    lines = [
        "# Whether the model sampled is the model trained",
        "",
        *(f"- {place}" for place in report.places(rows)),
        "",
        f"SmolLM2-135M with an adapter, `native` engine, up to {TOKENS} tokens. Greedy: beside transformers' own "
        f"generate. Logprobs: of {ANSWERS} sampled answers to each prompt, nats a token between engine and trainer.",
        "",
    ]
    body = [[row["check"], row["precision"], str(row["prompts"]), f"{row['tokens']:,}", _found(row)] for row in rows]
    return "\n".join([*lines, *report.grid(["check", "precision", "prompts", "tokens", "found"], body), ""])


def _found(row: Row) -> str:
    if row["check"] == "logprobs":
        return f"gap {row['gap_mean']:.2g} on average, {row['gap_max']:.2g} at most"
    gaps = row["logit_gaps_at_first_difference"]
    more = f"; logits {max(map(abs, gaps)):.2g} apart at most where they part" if gaps else ""
    return f"{row['identical']:.1%} of the answers identical{more}"


if __name__ == "__main__":
    main()
