"""The memory plan held to what is measured: real shapes with random weights, real steps, the peak of each phase.

    python benchmarks/memory_plan.py

Each of eight configurations is written as a 4-bit checkpoint, loaded, and trained for two steps; the second one counts,
for the optimizer's state is there from its beginning. Answers are short, so prompts make the lengths: every token that
is sampled costs a launch of the whole model. Writes benchmarks/results/memory_plan.md and .json (or --into) after each
configuration.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PHASES = ("rollout", "update")

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SHAPES: dict[str, tuple[str, tuple[int, int, int, int, int, int, bool]]] = {
    "Qwen2.5-0.5B": ("Qwen2Config", (896, 4864, 24, 14, 2, 151936, True)),
    "Qwen2.5-1.5B": ("Qwen2Config", (1536, 8960, 28, 12, 2, 151936, True)),
    "Llama-3.2-3B": ("LlamaConfig", (3072, 8192, 28, 24, 8, 128256, True)),
    "Llama-3.1-8B": ("LlamaConfig", (4096, 14336, 32, 32, 8, 128256, False)),
}
SMALL = ("LlamaConfig", (64, 128, 2, 4, 2, 512, True))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One configuration: a shape, and options by their usual names."""

    shape: str
    length: int
    completion: int
    prompts: int
    generations: int
    micro_batch: int
    optim: str = "adamw_torch"
    double_quant: bool = False
    offload: bool = False


CASES = (
    Case("Qwen2.5-0.5B", 1024, 64, 4, 8, 8192),
    Case("Qwen2.5-0.5B", 4096, 64, 4, 4, 16_384, "adamw_8bit", double_quant=True),
    Case("Qwen2.5-1.5B", 1024, 64, 4, 8, 4096, "adamw_8bit"),
    Case("Qwen2.5-1.5B", 2048, 128, 8, 8, 16_384, double_quant=True),
    Case("Llama-3.2-3B", 2048, 64, 4, 8, 8192, "paged_adamw_8bit"),
    Case("Llama-3.2-3B", 8192, 64, 2, 4, 16_384, offload=True),
    Case("Llama-3.1-8B", 1024, 64, 4, 8, 8192),
    Case("Llama-3.1-8B", 8192, 64, 1, 8, 8192, "adamw_8bit"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--small", action="store_true", help="tiny shapes on any machine, to try the script itself")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the configurations to run, from 0")
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    chosen = [case for number, case in enumerate(CASES) if asked.only is None or number in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            rows.append(one(shortened(case) if asked.small else case, Path(folder), asked.small))
            (asked.into / "memory_plan.json").write_text(json.dumps(rows, indent=1) + "\n")
            (asked.into / "memory_plan.md").write_text(table(rows))
    print(table(rows))


def shortened(case: Case) -> Case:
    """Without paging, which a CPU has not."""
    return Case(case.shape, case.length // 16, 4, 2, 2, 256, case.optim.removeprefix("paged_"), case.double_quant)


def one(case: Case, folder: Path, small: bool) -> Row:
    """Plan and measure one configuration."""
    import torch

    import grpo_kit as gk

    began = time.monotonic()
    cuda = torch.cuda.is_available()
    checkpoint = checkpoint_of(case, folder, small)
    load: Row = {"max_seq_length": case.length, "lora_rank": 32, "double_quant": case.double_quant}
    train: Row = {
        "prompts_per_step": case.prompts,
        "num_generations": case.generations,
        "max_completion_length": case.completion,
        "tokens_per_micro_batch": case.micro_batch,
        "optim": case.optim,
    }
    plan = gk.memory_plan(
        str(checkpoint), None if cuda else "H200", activation_offloading=case.offload, **load, **train
    )
    model = gk.load_model(str(checkpoint), engine="transformers", **load)
    run = gk.train(
        model,
        prompts(model, case.length - case.completion),
        gk.reward(ids),
        steps=2,
        run_dir=folder / "run",
        **({"activation_offloading": True} if case.offload else {}),
        **train,
    )
    run.wait()
    last = run.record.steps()[-1]
    measured = {phase: last.get(f"peak_gb_{phase}") for phase in PHASES}
    seen = plan.compare({phase: None if gb is None else gb * 1e9 for phase, gb in measured.items()})
    model.unload()
    shutil.rmtree(folder / "run")
    return {
        **asdict(case),
        "compared": json.loads(seen.to_json(orient="records")),
        "planned_parts": {phase: {part: size / 1e9 for part, size in of.items()} for phase, of in plan.phases.items()},
        "answer_tokens": last["length"],
        "seconds_rollout": last["seconds_rollout"],
        "seconds_update": last["seconds_update"],
        "seconds": time.monotonic() - began,
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Means nothing, but differs from answer to answer."""
    return [sum(answer) % 1009 / 1009 for answer in completion_ids]


def prompts(model: Any, tokens: int) -> Any:
    """Sixteen prompts of exactly so many tokens, all different: one token a letter."""
    import grpo_kit as gk

    own = len(model.encode("a")) - 1
    return gk.data.from_rows([{"prompt": chr(ord("a") + i) * (tokens - own)} for i in range(16)])


def checkpoint_of(case: Case, folder: Path, small: bool) -> Path:
    """The one of the configuration before, if it will do: only one is on the disk."""
    wanted = folder / f"model-{case.shape}{'-double-quant' * case.double_quant}"
    if not wanted.exists():
        for other in folder.glob("model-*"):
            shutil.rmtree(other)
        write_checkpoint(wanted, case, small)
    return wanted


def write_checkpoint(folder: Path, case: Case, small: bool) -> None:
    """A random model in NF4, made on the GPU, as `from_pretrained` reads it; 16-bit weights never reach the disk."""
    import torch
    import transformers
    from safetensors.torch import save_file

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=case.double_quant
    )
    config = config_of(*(SMALL if small else SHAPES[case.shape]))
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    in_4_bits(model.get_decoder(), device, case.double_quant)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = quantization.to_dict()
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def config_of(kind: str, sizes: tuple[int, int, int, int, int, int, bool]) -> Any:
    import transformers

    hidden, intermediate, layers, heads, kv_heads, vocab, tied = sizes
    return getattr(transformers, kind)(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=max(case.length for case in CASES),
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=257,
        architectures=[kind.replace("Config", "ForCausalLM")],
        dtype="bfloat16",
    )


def in_4_bits(decoder: Any, device: Any, double_quant: bool) -> None:
    """Replace every linear layer of the decoder, one after the other, so that few 16-bit ones are there twice."""
    import bitsandbytes
    import torch

    for parent in list(decoder.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, torch.nn.Linear):
                small = bitsandbytes.nn.Linear4bit(
                    linear.in_features,
                    linear.out_features,
                    bias=linear.bias is not None,
                    compress_statistics=double_quant,
                    quant_type="nf4",
                    device="meta",
                )
                weight = bitsandbytes.nn.Params4bit(
                    linear.weight.data, requires_grad=False, compress_statistics=double_quant, quant_type="nf4"
                )
                small.weight, small.bias = weight.to(device), linear.bias
                setattr(parent, name, small)


def tokenizer() -> Any:
    """The 256 bytes, then <|im_end|>, <|pad|> and <|im_start|>; the model has more tokens, which have no text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens(["<|im_end|>", "<|pad|>", "<|im_start|>"])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = CHATML
    return made


def table(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        "# The memory plan beside measured peaks",
        "",
        f"{first['hardware']}, {first['versions']}, {first['date']}. GB (10⁹ bytes) that torch allocated at most in "
        "each phase of the second step; random weights, 4-bit, LoRA of rank 32, `transformers` engine. Ratio: planned "
        "over measured, above 1 where too much was planned.",
        "",
        "| shape | tokens | step | micro-batch | settings | rollout: planned | measured | ratio | update: planned | "
        "measured | ratio | its fullest moment |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        settings = [row["optim"], *(name for name in ("double_quant", "offload") if row[name])]
        cells = [number(of[key]) for of in row["compared"] for key in ("planned", "measured", "ratio")]
        moment = list(row["planned_parts"]["update"])[-1]
        step = f"{row['prompts']} × {row['generations']} | {row['micro_batch']:,}"
        numbers = " | ".join(cells)
        lines.append(f"| {row['shape']} | {row['length']:,} | {step} | {', '.join(settings)} | {numbers} | {moment} |")
    return "\n".join([*lines, ""])


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
