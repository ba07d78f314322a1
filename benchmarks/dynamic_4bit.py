"""What do 4 bits cost SmolLM2, and how much of that does `quantize_dynamic` bring back?

    python benchmarks/dynamic_4bit.py

Perplexity on benchmarks/perplexity_text.txt (written for this, and not what the layers are measured on) of the same
weights in several formats, all computed in float32. Writes benchmarks/results/dynamic_4bit.md and .json.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import grpo_kit as gk
from grpo_kit.model.sources import find_source

RESULTS = Path(__file__).parent / "results"
TEXT = Path(__file__).parent / "perplexity_text.txt"
SMOLLM2 = os.environ.get("SMOLLM2", "HuggingFaceTB/SmolLM2-135M-Instruct")  # or the path of its GGUF file
WINDOW = 1024  # tokens that are read at a time
PARTS = 20  # the text without one of them at a time says how sure a number is
NOTHING = 1e-9  # a budget that no layer fits into


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = in_16_bits(folder / "16 bits")
        ids = AutoTokenizer.from_pretrained(source)(TEXT.read_text(), return_tensors="pt").input_ids
        measured = {}
        for name, path in formats(source, folder):
            measured[name] = {"logprobs": logprobs(path, ids), "bytes": on_disk(path), "kept": kept(path)}
            print(f"{name}: perplexity {perplexity(losses(measured[name], ids)):.3f}", flush=True)
    rows = [row(name, measured, ids) for name in measured]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "dynamic_4bit.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "dynamic_4bit.md").write_text(table(rows))
    print(table(rows))


def in_16_bits(folder: Path) -> Path:
    """The checkpoint that every format is made from."""
    path = find_source(SMOLLM2).path
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def formats(source: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and checkpoint of each, made when it is asked for."""
    yield "16 bits", source
    yield "plain NF4", plain(source, folder / "plain")
    yield "NF4, double quantization", plain(source, folder / "double", bnb_4bit_use_double_quant=True)
    dynamic = gk.quantize_dynamic(source, folder / "dynamic", budget=0.10)
    print(dynamic)
    left = ["lm_head", *dynamic.table.layer[dynamic.table.kept]]
    yield "the same layers kept, the rest plain NF4", plain(source, folder / "left", llm_int8_skip_modules=left)
    gk.quantize_dynamic(source, folder / "clipped", budget=NOTHING)
    yield "no layer kept, NF4 clipped for what layers read", folder / "clipped"
    yield "dynamic", folder / "dynamic"
    gk.quantize_dynamic(source, folder / "both", budget=0.10, double_quant=True)
    yield "dynamic, double quantization", folder / "both"


def plain(source: Path, folder: Path, **plan: Any) -> Path:
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, **plan
    )
    AutoModelForCausalLM.from_pretrained(
        source, quantization_config=settings, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).save_pretrained(folder)
    return folder


@torch.no_grad()
def logprobs(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of every token of the vocabulary after each token of the text: [T - 1, V]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.modules():
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = torch.float32
    pieces = [ids[:, start : start + WINDOW] for start in range(0, ids.shape[1] - 1, WINDOW)]
    return torch.cat([model(piece).logits[0].log_softmax(-1) for piece in pieces])[: ids.shape[1] - 1]


def losses(format: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """Nats of each token of the text but the first: [T - 1]."""
    loss: torch.Tensor = -format["logprobs"].gather(1, ids[0, 1:, None])[:, 0]
    return loss


def perplexity(loss: torch.Tensor) -> float:
    return float(loss.mean().exp())


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def kept(path: Path) -> int | str:
    """How many linear layers the checkpoint names as left in 16 bits, beside the head."""
    made_with = json.loads((path / "config.json").read_text()).get("quantization_config")
    if made_with is None:
        return "all"
    return len(set(made_with.get("llm_int8_skip_modules") or []) - {"lm_head"})


def row(name: str, measured: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    format, full, nf4 = measured[name], measured["16 bits"], measured["plain NF4"]
    loss, least, most = (losses(one, ids) for one in (format, full, nf4))

    def recovered(chosen: torch.Tensor) -> float:
        best, worst = perplexity(least[chosen]), perplexity(most[chosen])
        return (worst - perplexity(loss[chosen])) / (worst - best)

    everything = torch.ones(len(loss), dtype=torch.bool)
    return {
        "format": name,
        "bytes": format["bytes"],
        "of_plain": format["bytes"] / nf4["bytes"] - 1,
        "layers_kept": format["kept"],
        "perplexity": perplexity(loss),
        "kl": float((full["logprobs"].exp() * (full["logprobs"] - format["logprobs"])).sum(-1).mean()),
        "recovered": recovered(everything),
        "recovered_error": jackknife(recovered, len(loss)),
        "tokens": len(loss),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def jackknife(statistic: Callable[[torch.Tensor], float], tokens: int) -> float:
    """The standard error of a statistic of the text, from leaving out one of its parts at a time."""
    part = torch.arange(tokens) * PARTS // tokens
    values = torch.tensor([statistic(part != left_out) for left_out in range(PARTS)])
    return float(((PARTS - 1) * values.var(correction=0)).sqrt())


def table(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    lines = [
        "# 4 bits, and what `quantize_dynamic` brings back",
        "",
        f"{first['hardware']}, {first['versions']}, {first['date']}; SmolLM2-135M-Instruct, whose weights come from a "
        "Q4_1 GGUF (they had been through 4 bits of another kind once) and are in bfloat16 here. Perplexity on "
        f"{first['tokens']:,} tokens of `perplexity_text.txt` in windows of {WINDOW:,}, computed in float32; KL is "
        "KL(16 bits ‖ format), nats a token. Recovered: of the perplexity that plain NF4 adds, ± a standard error "
        f"(jackknife over {PARTS} parts of the text). Layers are measured on the texts of `calibration.py`.",
        "",
        "| format | MB on disk | against plain NF4 | layers kept | perplexity | KL | recovered |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in rows:
        share = f"{round(one['recovered'], 2) + 0:.0%} ± {one['recovered_error']:.0%}"
        lines.append(
            f"| {one['format']} | {one['bytes'] / 1e6:.1f} | {one['of_plain']:+.1%} | {one['layers_kept']} | "
            f"{one['perplexity']:.2f} | {one['kl']:.4f} | {share if one['format'] not in _FIXED else ''} |"
        )
    return "\n".join(lines) + "\n"


_FIXED = ("16 bits", "plain NF4")  # recovered is 100 % and 0 % of these by definition


if __name__ == "__main__":
    main()
