"""A batch with a long tail, packed and padded: time, memory and the same gradients.

    python benchmarks/packing.py

16 completions of 100 to 4,000 tokens to one prompt of 256. Llama-3.1-8B's shape, random weights in 4 bits; every way
cuts its micro-batches at 16,384 tokens. Writes packing.md and .json into benchmarks/results/ (or --into).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
import training_step
from report import Row
from training_step import DEVICE

import grpo_kit as gk
from grpo_kit.kernels import Packed, pack
from grpo_kit.training.order import Tokens, micro_batches, padded_micro_batches

LENGTHS = (100, 120, 150, 180, 220, 270, 330, 400, 500, 600, 750, 900, 1200, 1600, 2500, 4000)
PROMPT, BUDGET = 256, 16_384


def compared(folder: Path) -> list[Row]:
    model = gk.load_model(str(folder), max_seq_length=8192, lora_rank=32, dtype="bfloat16")
    vocabulary = model.causal_lm.config.vocab_size
    prompt = training_step.ids(1, PROMPT, vocabulary, 0)[0].tolist()
    answers = [training_step.ids(1, n, vocabulary, n)[0].tolist() for n in LENGTHS]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a fresh adapter has B = 0 and no gradient for A
        for weight in model.trainable().values():
            weight.copy_(0.01 * torch.randn(weight.shape, generator=generator))
    ways = {
        "packed, the prompt once": (micro_batches, 0, [(prompt, answer) for answer in answers], model.trunk.hidden),
        "packed, a prompt each": (micro_batches, 1, [([], prompt + answer) for answer in answers], model.trunk.hidden),
        "padded, the same layers": (padded_micro_batches, 2, [([], prompt + a) for a in answers], model.trunk.hidden),
        "padded, transformers' modules": (
            padded_micro_batches,
            1,
            [([], prompt + a) for a in answers],
            model.trunk.plain,
        ),
    }
    rows, first = [], None
    for name, (cut, mode, sequences, run) in ways.items():
        parts = cut([[Tokens(len(b) or i, len(b), len(o))] for i, (b, o) in enumerate(sequences)], BUDGET)
        found: list[torch.Tensor] = []

        def step(
            parts: Any = parts, mode: int = mode, sequences: Any = sequences, run: Any = run, found: Any = found
        ) -> float:
            found[:] = gradients(model, run, [[sequences[i] for i in part] for part in parts], pad=mode == 2)
            return float(torch.nn.utils.get_total_norm(found))

        row: Row = {"way": name, "micro_batches": len(parts), **training_step.measured(step)}
        first = first or [grad.clone() for grad in found]
        gap = torch.nn.utils.get_total_norm([a - b for a, b in zip(found, first, strict=True)])
        rows.append({**row, "gap": float(gap) / rows[0]["grad_norm"] if rows else 0.0, **report.where()})
    return rows


def gradients(model: Any, run: Callable[[Packed], torch.Tensor], batches: list[Any], pad: bool) -> list[torch.Tensor]:
    """Of the mean logprob of all completion tokens."""
    model.module.train()
    weights, total = list(model.trainable().values()), None
    for batch in batches:
        longest = max(len(b) + len(o) for b, o in batch)
        filled = [(b, o + [0] * (longest - len(b) - len(o))) for b, o in batch] if pad else batch
        packed = pack(filled, DEVICE)
        first = torch.tensor([PROMPT] * len(batch), device=DEVICE)
        width = max(len(b) + len(o) for b, o in filled) - PROMPT
        outputs = model._heads(run(packed), packed, first, width, 1.0, None)
        real = [len(b) + len(o) - PROMPT for b, o in batch]
        mask = torch.arange(width, device=DEVICE) < torch.tensor(real, device=DEVICE)[:, None]
        loss = (outputs.logprobs * mask).sum() / sum(LENGTHS)
        grads = torch.autograd.grad(loss, weights)
        total = list(grads) if total is None else [a.add_(b) for a, b in zip(total, grads, strict=True)]
    assert total is not None
    return total


def table(rows: list[Row]) -> str:
    head = ["way", "micro-batches", "seconds", "ratio", "peak memory", "gap"]
    lines = [
        "# A long-tailed batch, packed and padded",
        "",
        f"{report.places(rows)[0]}. {training_step.SHAPE}'s shape, random "
        f"weights in 4 bits, LoRA rank 32, bfloat16; {len(LENGTHS)} completions of {LENGTHS[0]} to {LENGTHS[-1]:,} "
        f"tokens, prompt of {PROMPT}, micro-batches of at most {BUDGET:,} tokens. Forward and backward. "
        "Gap: the distance of the gradients from the first row's, relative to their norm (bfloat16 rounds at 0.004).",
        "",
    ]
    body = []
    for row in rows:
        seconds = [f"{row['seconds']:.2f}", f"{row['seconds'] / rows[0]['seconds']:.2f}×"]
        body.append([row["way"], str(row["micro_batches"]), *seconds, f"{row['peak_gb']:.1f} GB", f"{row['gap']:.4f}"])
    return "\n".join([*lines, *report.grid(head, body), ""])


if __name__ == "__main__":
    training_step.compare_ways(__doc__, "packing", compared, table)
