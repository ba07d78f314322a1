"""Tokens a second that each engine samples, on one GPU: ours, vLLM, transformers' generate and continuous batching.

    python benchmarks/rollouts.py                                          # all, one after the other
    python benchmarks/rollouts.py --engines native vllm --models Llama-3.1-8B --sequences 8 --seconds 300 --add
    python benchmarks/rollouts.py --lengths geometric --sequences 64       # long-tailed lengths, the same for all
    python benchmarks/rollouts.py --dtype float16 --cap-gb 15 --engines native transformers    # a T4's profile
    VLLM_SITE=/path/to/site-packages python benchmarks/rollouts.py         # where vLLM has a place of its own

Shapes of real models, random weights in 4 bits, LoRA rank 32 active, prompts of 256 tokens, 8 completions of each, of
512 tokens, or of lengths from a geometric distribution with mean 200, at most 2,048. Each engine samples each model in
a process of its own; at each number of sequences first to warm up, then, with other prompts, timed.

Share of the floor: the time that reading alone would take, over the time taken. A token step reads the weights of the
layers (NF4 with a float32 scale for each 64: 4.5 bits each) and of the head (16 bits), and the keys and values so far
of each sequence; there are as many token steps as the longest completion has tokens:

    bytes   = longest · (4.5/8 · layer weights + 2 · head weights) + per token · Σᵢ (nᵢ · prompt + nᵢ · (nᵢ + 1) / 2)
    seconds = bytes / read bandwidth

with nᵢ the tokens of completion i, `per token` the bytes of a token's keys and values, and as the bandwidth what
summing a tensor of 4 GB reaches on the same GPU. Adapter, prefill and sampling are not in it.

Start-up: what building the engine took, and the first call more than the second at the same tokens a second. Writes
rollouts.md and .json (rollouts_geometric, rollouts_t4_profile, …) into benchmarks/results/ (or --into) after each row.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import report
import torch
from child_process import rows_of, say, send
from report import Row
from rollout_engines import DEVICE, ENGINES, GROUP, PACKAGES, RANK, Ready, Setting
from training_step import ids

MODELS, SEQUENCES = ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama-3.1-8B"), (8, 16, 64, 256)
DEFAULT = list(ENGINES)[:4]
MEAN, CAP = 200, 2048  # of geometric lengths
NF4_BYTES = 4.5 / 8
KEY = ("engine", "model", "sequences")


def main() -> None:
    asked = arguments()
    if asked.one:
        for row in measurements(asked.one, asked.models[0], asked):
            send(row)
        return
    rows: list[Row] = []
    asked.bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    for model in asked.models:
        for engine in asked.engines:
            for row in in_own_process(engine, model, asked):
                rows.append(row)
                known = (report.earlier(name_of(asked), asked.into, rows, KEY) if asked.add else []) + rows
                report.keep(name_of(asked), known, table(known), asked.into)
    print(table(known))


def arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--engines", nargs="+", default=DEFAULT, choices=list(ENGINES))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES), help=f"multiples of {GROUP}")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--lengths", choices=("fixed", "geometric"), default="fixed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cap-gb", type=float, help="the most memory that torch may take")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where models are, or are to be written")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which a process is killed")
    parser.add_argument("--add", action="store_true", help="to the rows that are there, instead of anew")
    parser.add_argument("--small", action="store_true", help="a tiny model on any machine, to try the script itself")
    parser.add_argument("--one", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--bandwidth", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.small and not asked.one:
        asked.models, asked.sequences, asked.dtype = ["tiny"], [8, 16], "float32"
        asked.prompt, asked.completion = 16, 24
    return asked


def name_of(asked: argparse.Namespace) -> str:
    return "rollouts" + "_geometric" * (asked.lengths == "geometric") + "_t4_profile" * (asked.cap_gb is not None)


def read_bandwidth() -> float:
    """Bytes a second: the fastest of twenty sums over a tensor of 4 GB (a CPU: 64 MB)."""
    tensor = torch.zeros(10**9 if DEVICE == "cuda" else 16 * 10**6, device=DEVICE)
    return tensor.numel() * tensor.element_size() / min(_seconds(tensor.sum) for _ in range(20))


def in_own_process(engine: str, model: str, asked: argparse.Namespace) -> Iterator[Row]:
    from random_checkpoint import write_adapter, write_checkpoint

    dtype = getattr(torch, asked.dtype)
    write_checkpoint(model, asked.folder / f"random-{model}-{asked.dtype}", dtype)
    write_adapter(model, asked.folder / f"random-{model}-{asked.dtype}-lora", RANK, dtype)
    arguments = ["--one", engine, "--models", model, "--sequences", *map(str, asked.sequences)]
    for name in ("prompt", "completion", "lengths", "dtype", "cap_gb", "folder", "bandwidth"):
        if getattr(asked, name) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(getattr(asked, name))]
    expected: list[Row] = [
        {"engine": engine, "model": model, "sequences": count, "lengths": asked.lengths} for count in asked.sequences
    ]
    return rows_of(f"{engine}, {model}", __file__, arguments, expected, asked.seconds)


def measurements(engine: str, model: str, asked: argparse.Namespace) -> Iterator[Row]:
    if asked.cap_gb is not None and DEVICE == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked.cap_gb * 1e9 / total))
    checkpoint = asked.folder / f"random-{model}-{asked.dtype}"
    config = json.loads((checkpoint / "config.json").read_text())
    lengths_of = {count: completion_lengths(count, asked) for count in asked.sequences}
    longest = asked.prompt + (CAP if asked.lengths == "geometric" else asked.completion)
    most = max(asked.sequences)
    ready = ENGINES[engine](
        Setting(
            checkpoint,
            asked.folder / f"{checkpoint.name}-lora",
            asked.dtype,
            sequences=most,
            longest=longest,
            cache_bytes=int(1.1 * most * longest * token_bytes(config)),
            cap_gb=asked.cap_gb,
        )
    )
    place = report.where(*PACKAGES[engine])
    for count, lengths in lengths_of.items():
        say(f"{count} sequences")
        row: Row = {"engine": engine, "model": model, "sequences": count, "lengths": asked.lengths}
        row |= {"prompt": asked.prompt, "tokens": sum(lengths), "longest": max(lengths), "dtype": asked.dtype}
        try:
            row |= measured(ready, lengths, asked.prompt, config)
            row["share_of_floor"] = floor_bytes(config, asked.prompt, lengths) / asked.bandwidth / row["seconds"]
            row["bandwidth_tb_s"] = asked.bandwidth / 1e12
        except Exception as error:  # a peer's failure is a row like any other
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        gc.collect()
        torch.cuda.empty_cache()
        yield row | place


def completion_lengths(count: int, asked: argparse.Namespace) -> list[int]:
    if asked.lengths == "fixed":
        return [asked.completion] * count
    drawn = torch.empty(count).geometric_(1 / MEAN, generator=torch.Generator().manual_seed(0))
    return [int(length) for length in drawn.clamp(1, CAP).tolist()]


def measured(ready: Ready, lengths: list[int], prompt: int, config: Row) -> Row:
    """The second call's speed; the first one warms up, with other prompts: nothing may be in a cache."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    warm_up = [min(length, ready.warm_up or length) for length in lengths]
    seconds = []
    for seed, wanted in enumerate((warm_up, lengths)):
        prompts = ids(len(lengths) // GROUP, prompt, config["vocab_size"], seed).tolist()
        drawn: list[list[int]] = []
        seconds.append(_seconds(lambda: drawn.extend(ready.generate(prompts, wanted))))  # noqa: B023 - called at once
        if [len(tokens) for tokens in drawn] != wanted:
            raise RuntimeError("the completions have not the lengths that were asked for")
        say(f"{sum(wanted)} tokens in {seconds[-1]:.2f} s")
    extra = seconds[0] - seconds[1] * max(warm_up) / max(lengths)
    return {
        "tokens_per_second": sum(lengths) / seconds[1],
        "seconds": seconds[1],
        "startup_s": ready.seconds + max(0.0, extra),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0,
    }


def _seconds(work: Callable[[], object]) -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def token_bytes(config: Row) -> int:
    """Of a token's keys and values in 16 bits."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def floor_bytes(config: Row, prompt: int, lengths: list[int]) -> float:
    """What sampling has to read, see above."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * config["num_key_value_heads"])
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * inner)
    weights = NF4_BYTES * layers + 2 * hidden * config["vocab_size"]
    seen = sum(length * prompt + length * (length + 1) / 2 for length in lengths)
    return max(lengths) * weights + token_bytes(config) * seen


def table(rows: list[Row]) -> str:
    known = next((row for row in rows if "tokens_per_second" in row), {})
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    cases = sorted(dict.fromkeys((row["model"], row["sequences"]) for row in rows))
    fixed = rows[0]["lengths"] == "fixed"
    each = f"{known.get('longest')} tokens" if fixed else f"geometric lengths, mean {MEAN}, at most {CAP:,} tokens"
    lines = [
        "# Rollouts: tokens a second",
        "",
        *(f"- {place}" for place in report.places(rows)),
        "",
        f"Random weights in 4 bits, LoRA rank {RANK} active, {known.get('dtype')}; {GROUP} completions to each prompt "
        f"of {known.get('prompt')} tokens, {each}; read bandwidth {known.get('bandwidth_tb_s', 0):.2f} TB/s. Each: "
        "tokens a second of the second call, prefill included; its share of the floor that reading weights, keys and "
        "values sets; start-up (the engine, and the first call more than the second; vLLM's with loading its weights); "
        "peak of allocated GPU memory.",
        "",
    ]
    peers = [engine for engine in engines if engine != "native"] if "native" in engines else []
    body = []
    for model, count in cases:
        its = {row["engine"]: row for row in rows if (row["model"], row["sequences"]) == (model, count)}
        cells = [_cell(its.get(engine)) for engine in engines]
        body.append([model, str(count), *cells, *(_times(its.get("native"), its.get(peer)) for peer in peers)])
    head = ["model", "sequences", *engines, *(f"native / {peer}" for peer in peers)]
    return "\n".join([*lines, *report.grid(head, body), ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return str(row["failed"])
    return (
        f"{row['tokens_per_second']:,.0f}/s, {row['share_of_floor']:.0%}, {row['startup_s']:.1f} s, "
        f"{row['peak_gb']:.1f} GB"
    )


def _times(own: Row | None, peer: Row | None) -> str:
    ours, theirs = (row.get("tokens_per_second") if row else None for row in (own, peer))
    return f"{ours / theirs:.2f}×" if ours and theirs else ""


if __name__ == "__main__":
    main()
