"""Whether the vLLM engine keeps what it promises: base weights once, the adapter in place, the cache given back.

    python benchmarks/vllm_engine.py                           # vLLM has to be importable
    python benchmarks/vllm_engine.py --models Qwen2.5-1.5B

Shapes of real models, random weights in 4 bits, LoRA rank 32; each model in a process of its own. Measured:

start     seconds until vLLM is ready, of which importing it is a part
attach    GPU memory before and after the trainer's model is built on vLLM's weights, and the bytes of its frozen
          weights that lie in vLLM's tensors, and elsewhere
training  ten steps of GRPO, sampled by vLLM: the gap between its logprobs and the trainer's, over the tokens of each
          step's answers (mean of the last step)
adapter   the time of writing it into vLLM's tensors: the median of twenty
gap       after the ten updates: |logprob of the engine - logprob of the trainer| of tokens drawn at temperature 1 and
          at 0.7 with top-p 0.9, and beside it what the trainer says of the same tokens without its adapter: a gap as
          large as that would mean an adapter that was never written
cycles    five times: the cache released and taken again. GPU memory, as the driver counts it, each time

Writes vllm_engine.md and .json into benchmarks/results/ (or --into) after each row.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import report
import torch
from child_process import rows_of, say, send
from report import Row

RANK, LENGTH, CYCLES, STEPS = 32, 1024, 5, 10
PROMPTS, ANSWERS, TOKENS = 16, 8, 128
CHECKS = ("start", "attach", "training", "adapter", "gap", "gap, cut", "cycles")


def main() -> None:
    asked = arguments()
    if asked.one:
        for row in measurements(asked.one, asked.folder):
            say(str(row))
            send(row | report.where("vllm", "transformers", "peft", "bitsandbytes"))
        return
    rows: list[Row] = []
    for model in asked.models:
        from random_checkpoint import write_checkpoint

        write_checkpoint(model, asked.folder / f"random-{model}-bfloat16")
        expected: list[Row] = [{"model": model, "check": check} for check in CHECKS]
        given = ["--one", model, "--folder", str(asked.folder)]
        for row in rows_of(model, __file__, given, expected, asked.seconds):
            rows.append(row)
            report.keep("vllm_engine", rows, table(rows), asked.into)
    print(table(rows))


def arguments() -> argparse.Namespace:
    parser = report.arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["Qwen2.5-1.5B", "Llama-3.1-8B"])
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where models are, or are to be written")
    parser.add_argument("--seconds", type=float, default=600, help="after which a process is killed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def measurements(name: str, folder: Path) -> Iterator[Row]:
    made = Loaded(folder / f"random-{name}-bfloat16")
    yield {"model": name, "check": "start", "seconds": made.start_seconds}
    yield {"model": name, "check": "attach", **made.attached}
    yield {"model": name, "check": "training", **training(made.model)}
    yield {"model": name, "check": "adapter", **writing(made.model)}
    yield {"model": name, "check": "gap", **gap(made.model)}
    yield {"model": name, "check": "gap, cut", **gap(made.model, temperature=0.7, top_p=0.9)}
    yield {"model": name, "check": "cycles", **cycles(made.model)}


class Loaded:
    """The model as `load_model` makes it, step by step, with a look at the memory in between."""

    def __init__(self, path: Path):
        from transformers import AutoConfig, AutoTokenizer

        from grpo_kit.model.chat import Chat
        from grpo_kit.model.lora import add_lora
        from grpo_kit.model.model import LoadOptions, Model
        from grpo_kit.model.precision import choose_precision
        from grpo_kit.model.shared import build_on
        from grpo_kit.model.with_vllm import settings_for
        from grpo_kit.rollout import make_engine
        from grpo_kit.rollout.vllm import start_vllm

        precision, config = choose_precision(), AutoConfig.from_pretrained(path)
        options = LoadOptions(str(path), True, LENGTH, RANK, RANK, None, False, "vllm", seed=0, trust_remote_code=False)
        begun = time.perf_counter()
        vllm = start_vllm(settings_for(options, str(path), config, precision))
        self.start_seconds = time.perf_counter() - begun
        before = memory()
        module = build_on(vllm.weights(), config, precision)
        after = memory()
        self.attached = {**_named("before", before), **_named("after", after), **where_weights_lie(module, vllm.module)}
        chat = Chat(AutoTokenizer.from_pretrained(path), [config.eos_token_id])
        adapted = add_lora(module, RANK, RANK, seed=0)
        engine = make_engine("vllm", adapted, eos_ids=chat.eos_ids, decode=chat.decode, vllm=vllm)
        self.model = Model(adapted, chat, engine, precision, options, [], vllm)


def memory() -> tuple[float, float]:
    """GB: that torch has allocated, and that the driver has given away."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated() / 1e9, (total - free) / 1e9


def _named(when: str, found: tuple[float, float]) -> Row:
    return {f"allocated_gb_{when}": found[0], f"driver_gb_{when}": found[1]}


def where_weights_lie(ours: Any, theirs: Any) -> Row:
    """GB of frozen weights, with their scales, that are vLLM's, and that are not."""
    known = {tensor.untyped_storage().data_ptr() for tensor in _weights(theirs, "bnb_quant_state")}
    mine = {(t.untyped_storage().data_ptr(), t.data_ptr()): t for t in _weights(ours, "quant_state")}
    sizes = [(place[0] in known, tensor.numel() * tensor.element_size()) for place, tensor in mine.items()]
    return {f"{word}_gb": sum(size for is_so, size in sizes if is_so is wanted) / 1e9 for word, wanted in PLACES}


PLACES = (("shared", True), ("own", False))


def _weights(model: Any, state: str) -> Iterator[torch.Tensor]:
    for weight in model.parameters():
        yield weight.detach()
        found = getattr(weight, state, None)
        for one in found.values() if isinstance(found, dict) else [found] if found is not None else []:
            yield one.absmax


def training(model: Any) -> Row:
    """A reward that varies: of random weights nothing else can be asked."""
    import grpo_kit as gk

    def spread(completion: str) -> float:
        return float(len(set(completion)) % 7)

    data = gk.data.arithmetic(64, digits=2)
    with tempfile.TemporaryDirectory() as folder:
        run = gk.train(
            model,
            data,
            gk.RewardSet(gk.reward(spread)),
            steps=STEPS,
            prompts_per_step=4,
            num_generations=ANSWERS,
            max_completion_length=TOKENS,
            learning_rate=1e-3,
            run_dir=Path(folder) / "run",
        )
        run.wait()
        metrics = run.metrics
    return {"steps": len(metrics), "state": run.state, "sampler_gap": float(metrics["sampler_gap"].iloc[-1])}


def writing(model: Any) -> Row:
    seconds = [_seconds(model.engine.write_adapter) for _ in range(20)]
    weights = sum(weight.numel() for weight in model.trainable().values())
    return {"ms": 1e3 * statistics.median(seconds), "lora_weights": weights}


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


@torch.no_grad()
def gap(model: Any, **sampling: Any) -> Row:
    from grpo_kit.rollout import Sampling
    from grpo_kit.training.batch import Sequence, collate

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 250, (8 + 16 * i,), generator=generator).tolist() for i in range(PROMPTS)]
    asked = Sampling(max_tokens=TOKENS, seed=1, **sampling)
    groups = model.complete(prompts, asked, ANSWERS)
    answers = [Sequence(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group]
    found: dict[str, list[torch.Tensor]] = {"gap": [], "without_adapter": []}
    with model.lock:
        for start in range(0, len(answers), PROMPTS):
            some = answers[start : start + PROMPTS]
            batch = collate(some, list(range(len(some))), model.precision.device)
            for kind, apart in found.items():
                with model.adapter_set(kind == "gap"):
                    out = model.token_outputs(batch.packed, batch.first, batch.width, asked.temperature)
                apart.append((out.logprobs - batch.sampled).abs()[batch.token_mask.bool()])
    gaps, without = (torch.cat(apart) for apart in found.values())
    return {
        "tokens": len(gaps),
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "gap_mean": float(gaps.mean()),
        "gap_max": float(gaps.max()),
        "without_adapter_mean": float(without.mean()),
    }


def cycles(model: Any) -> Row:
    """Each with a call in between, so that the cache is used."""
    from grpo_kit.rollout import Sampling

    found: dict[str, list[float]] = {"released_gb": [], "held_gb": [], "release_ms": [], "acquire_ms": []}
    for _ in range(CYCLES):
        found["release_ms"].append(1e3 * _seconds(model.engine.release))
        found["released_gb"].append(memory()[1])
        found["acquire_ms"].append(1e3 * _seconds(model.engine.acquire))
        found["held_gb"].append(memory()[1])
        model.complete([[1, 2, 3]], Sampling(max_tokens=8), ANSWERS)
    return dict(found)


def table(rows: list[Row]) -> str:
    lines = [
        "# The vLLM engine",
        "",
        *(f"- {place}" for place in report.places(rows)),
        "",
        f"Random weights in 4 bits at the shapes of real models, LoRA rank {RANK}, sequences of up to {LENGTH} tokens. "
        f"Gaps: nats a token between engine and trainer, of {PROMPTS}·{ANSWERS} answers of up to {TOKENS} tokens after "
        f"{STEPS} steps of training.",
        "",
    ]
    body = [[row["model"], row["check"], _found(row)] for row in rows]
    return "\n".join([*lines, *report.grid(["model", "check", "found"], body), ""])


def _found(row: Row) -> str:
    if "failed" in row:
        return str(row["failed"])
    return WORDS[row["check"].partition(",")[0]](row)


def _of_attach(row: Row) -> str:
    more = 1e3 * (row["allocated_gb_after"] - row["allocated_gb_before"])
    return (
        f"{row['shared_gb']:.3f} GB of the trainer's frozen weights are vLLM's, {1e3 * row['own_gb']:.3f} MB its own; "
        f"allocated {row['allocated_gb_before']:.3f} GB before and {more:+.3f} MB after, the driver's "
        f"{row['driver_gb_before']:.3f} and {row['driver_gb_after']:.3f} GB"
    )


def _of_gap(row: Row) -> str:
    cut = f" with top-p {row['top_p']:g}" if row["top_p"] < 1 else ""
    return (
        f"temperature {row['temperature']:g}{cut}: {row['gap_mean']:.3g} on average, {row['gap_max']:.2g} at most, of "
        f"{row['tokens']:,} tokens; without the adapter {row['without_adapter_mean']:.2g} on average"
    )


def _of_cycles(row: Row) -> str:
    released, held = (", ".join(f"{size:.3f}" for size in row[key]) for key in ("released_gb", "held_gb"))
    release, acquire = (max(row[key]) for key in ("release_ms", "acquire_ms"))
    return f"released {released} GB (at most {release:.0f} ms); held {held} GB (at most {acquire:.0f} ms)"


WORDS: dict[str, Callable[[Row], str]] = {
    "start": lambda row: f"{row['seconds']:.0f} s",
    "attach": _of_attach,
    "training": lambda row: f"{row['steps']} steps, {row['state']}; gap in the last one {row['sampler_gap']:.3g}",
    "adapter": lambda row: f"{row['lora_weights'] / 1e6:.1f} M weights written in {row['ms']:.1f} ms",
    "gap": _of_gap,
    "cycles": _of_cycles,
}


if __name__ == "__main__":
    main()
