"""`linear_logprob` side by side: forward and backward of the logprobs of a frozen head, on one GPU.

    python benchmarks/linear_logprob.py

Against torch with all the logits, against Liger's three operations for this (skipped where liger-kernel lacks), and
against the floor: the three products of the same shapes alone. Liger's `triton_grpo_loss` is left out, since it starts
from all the logits. Results are checked against float32 on some rows. Writes linear_logprob.md and .json into
benchmarks/results/ (or --into) after every row, and stops measuring after 55 seconds of GPU time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_kit.kernels import linear_logprob

TOKENS, VOCABULARIES, HIDDEN = (8192, 32768, 131072), (128256, 151936), 4096
REPEATS, ENOUGH_SECONDS, BUDGET_SECONDS = 3, 1.0, 55.0
CHECKED_ROWS = 256
FLOOR = "three products alone (the floor)"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    into = parser.parse_args().into
    rows: list[Row] = []
    for tokens in TOKENS:
        for vocabulary in VOCABULARIES:
            measure(rows, into, Given.random(tokens, vocabulary, HIDDEN, torch.device("cuda")))
    print(table(rows))


def measure(rows: list[Row], into: Path, given: Given) -> None:
    """Every system on one shape, a row each; written after each."""
    expected = given.expected()
    for name, system in SYSTEMS.items():
        spent = sum(row["spent"] for row in rows)
        row = given.shape() | {"system": name} | outcome(system, given, expected, BUDGET_SECONDS - spent) | machine()
        floor = next((r["seconds"] for r in rows if r["system"] == FLOOR and given.shape().items() <= r.items()), None)
        row["ratio"] = row["seconds"] / floor if floor and row["seconds"] else None
        rows.append(row)
        write(rows, into)
        print(cells(row), flush=True)


def write(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "linear_logprob.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "linear_logprob.md").write_text(table(rows))


# ---- what is computed ----


@dataclass
class Given:
    """One shape's inputs, in bfloat16 on a GPU: logits with a standard deviation of 1.3, gradients of any sign."""

    hidden: Tensor  # [N, H], a leaf
    weight: Tensor  # [V, H], frozen
    token_ids: Tensor  # [N]
    incoming: Tensor  # [N], float32: the gradient of the logprobs

    @classmethod
    def random(cls, tokens: int, vocabulary: int, width: int, device: torch.device) -> Given:
        g = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        hidden = torch.randn(tokens, width, generator=g, device=device, dtype=dtype)
        weight = torch.randn(vocabulary, width, generator=g, device=device, dtype=dtype) * (1.3 / width**0.5)
        token_ids = torch.randint(vocabulary, (tokens,), generator=g, device=device)
        incoming = torch.randn(tokens, generator=g, device=device)
        return cls(hidden.requires_grad_(), weight, token_ids, incoming)

    def shape(self) -> Row:
        return {"tokens": len(self.hidden), "vocab": len(self.weight), "hidden": self.hidden.shape[1]}

    def expected(self) -> tuple[Tensor, Tensor]:
        """Logprobs [R] and their gradient of hidden [R, H] of the first rows, in float32."""
        first = slice(CHECKED_ROWS)
        hidden = self.hidden.detach()[first].float().requires_grad_()
        logprob = picked(F.linear(hidden, self.weight.float()).log_softmax(-1), self.token_ids[first])
        logprob.backward(self.incoming[first])
        assert hidden.grad is not None
        return logprob.detach(), hidden.grad


def picked(of_all: Tensor, token_ids: Tensor) -> Tensor:
    return of_all.gather(-1, token_ids[:, None]).squeeze(-1)


System = Callable[[Given], Tensor | None]  # forward and backward; the logprobs [N]


def products(given: Given) -> None:
    """hidden·weightᵀ, again as backward recomputes it, and a gradient of that shape · weight."""
    hidden, rows = given.hidden.detach(), 4096
    grad = torch.empty_like(hidden)
    logits = hidden.new_empty(min(rows, len(hidden)), len(given.weight))
    for start in range(0, len(hidden), rows):
        some = hidden[start : start + rows]
        held = logits[: len(some)]
        torch.matmul(some, given.weight.T, out=held)
        torch.matmul(some, given.weight.T, out=held)
        torch.matmul(held, given.weight, out=grad[start : start + rows])


def ours(given: Given) -> Tensor:
    logprob, _ = linear_logprob(given.hidden, given.weight, given.token_ids)
    logprob.backward(given.incoming)
    return logprob


def all_logits(given: Given) -> Tensor:
    logprob = picked(F.linear(given.hidden, given.weight).float().log_softmax(-1), given.token_ids)
    logprob.backward(given.incoming)
    return logprob


def liger_cross_entropy(given: Given) -> Tensor:
    """Gradients a token, which `reduction="none"` has honoured since 0.8.5 by computing the logits twice."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    options = (None, None, -100, 0.0, 0.0, "none")  # bias … label smoothing, reduction
    loss = LigerFusedLinearCrossEntropyFunction.apply(given.hidden, given.weight, given.token_ids, *options)[0]
    loss.backward(-given.incoming)
    return -loss


def liger_selective(given: Given) -> Tensor:
    """The part of LigerFusedLinearGRPOLoss that makes the logprobs of one chunk."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    logprob = LigerFusedLinearPPOBase.chunk_forward(given.hidden[None], given.weight, given.token_ids[None])[0]
    logprob.backward(given.incoming)
    return logprob


def liger_scaled(given: Given) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    loss, _ = LigerFusedLinearScaledCrossEntropyFunction.apply(
        given.hidden, given.weight, given.token_ids, return_entropy=True
    )
    loss.backward(-given.incoming)
    return -loss


SYSTEMS: dict[str, System] = {
    FLOOR: products,
    "linear_logprob": ours,
    "torch, all logits": all_logits,
    "Liger FusedLinearCrossEntropy, reduction none": liger_cross_entropy,
    "Liger chunked logprob of its GRPO loss": liger_selective,
    "Liger FusedLinearScaledCrossEntropy": liger_scaled,
}
WITH_ENTROPY = ("linear_logprob", "Liger FusedLinearScaledCrossEntropy")


# ---- how it is measured ----


def outcome(system: System, given: Given, expected: tuple[Tensor, Tensor], left: float) -> Row:
    """Seconds, memory and errors, or the reason why there are none."""
    row: Row = {"seconds": None, "peak_gb": None, "logprob_error": None, "gradient_error": None, "reason": None}
    started = time.perf_counter()
    try:
        if left <= 0:
            raise TimeoutError(f"the {BUDGET_SECONDS:.0f} seconds for all were over")
        row |= repeated(system, given, expected)
    except Exception as error:
        row["reason"] = reason(error)
    given.hidden.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    return row | {"spent": time.perf_counter() - started}


def repeated(system: System, given: Given, expected: tuple[Tensor, Tensor]) -> Row:
    """Median of a few runs after one that compiles, which is the check; slow ones are run less often."""
    made = once(system, given)
    row = errors(made.logprob, given.hidden.grad, expected)
    runs = [once(system, given)]
    while len(runs) < REPEATS and sum(run.seconds for run in runs) < ENOUGH_SECONDS:
        runs.append(once(system, given))
    return row | {
        "seconds": statistics.median(run.seconds for run in runs),
        "peak_gb": runs[-1].peak / 1e9,
        "runs": len(runs),
    }


@dataclass
class Made:
    seconds: float
    peak: int  # bytes above the inputs
    logprob: Tensor | None


def once(system: System, given: Given) -> Made:
    given.hidden.grad = None
    if not given.hidden.is_cuda:
        started = time.perf_counter()
        logprob = system(given)
        return Made(time.perf_counter() - started, 0, logprob)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    logprob = system(given)
    end.record()
    end.synchronize()
    return Made(start.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() - before, logprob)


def errors(logprob: Tensor | None, grad: Tensor | None, expected: tuple[Tensor, Tensor]) -> Row:
    """The largest difference of a logprob, in nats, and the gradient's distance relative to its length."""
    if logprob is None or grad is None:
        return {}
    rows = len(expected[0])
    distance = (grad[:rows].float() - expected[1]).norm() / expected[1].norm()
    worst = (logprob.detach()[:rows].float() - expected[0]).abs().max()
    return {"logprob_error": worst.item(), "gradient_error": distance.item()}


def reason(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def machine() -> Row:
    names = ("torch", "triton", "liger-kernel")
    versions = [f"{name} {version}" for name in names if (version := installed(name))]
    cuda = torch.cuda.is_available()
    return {
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "date": time.strftime("%Y-%m-%d"),
    }


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- what is written ----


def table(rows: list[Row]) -> str:
    places = dict.fromkeys(f"{row['hardware']}, {row['versions']}, {row['date']}" for row in rows)
    lines = [
        "# Logprobs of a frozen head, forward and backward",
        "",
        "; ".join(places) + ".",
        "",
        f"bfloat16, hidden size {rows[0]['hidden']}, random inputs, a random gradient of every logprob. Median of up "
        f"to {REPEATS} runs. Memory is the peak above the inputs and includes the gradient of hidden. Errors are "
        f"against float32 on the first {CHECKED_ROWS} rows: the largest of a logprob in nats, and the distance of the "
        "gradient relative to its length. Systems with an asterisk compute the entropy, too.",
        "",
        "| tokens | vocabulary | system | seconds | to the floor | peak memory | logprob error | gradient error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(cells(row) for row in rows),
    ]
    return "\n".join([*lines, ""])


def cells(row: Row) -> str:
    name = row["system"] + (" *" if row["system"] in WITH_ENTROPY else "")
    head = f"| {row['tokens']:,} | {row['vocab']:,} | {name} |"
    if row["reason"]:
        return f"{head} {row['reason'].replace('|', '/')} | | | | |"
    ratio = f"{row['ratio']:.2f}×" if row["ratio"] else ""
    wrong = [f"{row[key]:.1e}" if row[key] is not None else "" for key in ("logprob_error", "gradient_error")]
    return f"{head} {row['seconds']:.3f} | {ratio} | {row['peak_gb']:.2f} GB | {wrong[0]} | {wrong[1]} |"


if __name__ == "__main__":
    main()
