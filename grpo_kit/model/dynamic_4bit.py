"""`quantize_dynamic`: a 4-bit checkpoint in which the layers that 4 bits would harm most keep their 16.

Where the bytes go is decided by measurement: `layer_errors.py` says how far each layer in 4 bits moves the model's
output, and those that move it most for each byte that they would save are kept. The idea is Unsloth's ("Dynamic 4-bit
Quantization", 2024), which keeps layers by their weight and activation errors.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from grpo_kit.model.calibration import calibration_ids
from grpo_kit.model.chat import Chat, Prompt
from grpo_kit.model.layer_errors import LayerError, Twin, linear_layers, make_twins, measure
from grpo_kit.model.precision import choose_precision
from grpo_kit.model.shape import nf4_bytes, quantization
from grpo_kit.model.sources import find_source

if TYPE_CHECKING:
    import pandas

SHOWN = 20  # rows of the table in the representation


@dataclass(frozen=True, eq=False)
class DynamicQuantization:
    """What `quantize_dynamic` made.

    folder:      the checkpoint; `load_model(folder)` and `AutoModelForCausalLM.from_pretrained(folder)` load it.
    table:       one row a linear layer, the most worth keeping first: layer, parameters, error (of its output: squared,
                 relative), kl (nats a token that it alone in 4 bits moves the model's output), extra_bytes (that 16
                 bits cost), kept.
    bytes:       of the weights in the checkpoint.  plain_bytes: of the same model in plain NF4, without double
                 quantization: 4.5 bits a weight of the linear layers, 16 of embeddings, head, norms and biases.
    """

    folder: Path
    table: pandas.DataFrame
    bytes: int
    plain_bytes: int

    def __repr__(self) -> str:
        kept, layers = int(self.table.kept.sum()), len(self.table)
        lines = [
            f"{self.folder}: {self.bytes / 1e6:.1f} MB, {self.bytes / self.plain_bytes - 1:+.1%} on plain NF4; "
            f"{kept} of {layers} linear layers in 16 bits",
            self.table.head(SHOWN).to_string(index=False, formatters=_FORMATS),
        ]
        return "\n".join(lines + ([f"… {layers - SHOWN} more rows in .table"] if layers > SHOWN else []))


_FORMATS: dict[str, Any] = {
    "parameters": "{:,}".format,
    "error": "{:.4f}".format,
    "kl": "{:.5f}".format,
    "extra_bytes": "{:,}".format,
    "kept": lambda kept: "yes" if kept else "",
}


def quantize_dynamic(
    name_or_path: str | Path,
    into: str | Path,
    budget: float = 0.10,
    prompts: Sequence[Prompt] | None = None,
    *,
    double_quant: bool = False,
    trust_remote_code: bool = False,
) -> DynamicQuantization:
    """Write a 4-bit checkpoint that keeps in 16 bits the linear layers which 4 bits would harm most.

    name_or_path: a 16- or 32-bit model, as for `load_model`; it has to fit into memory in 16 bits (32 on a CPU).
    into:         a folder that is new or empty; gets an ordinary bitsandbytes checkpoint and its tokenizer.
    budget:       how much larger than plain NF4 the weights may be: 0.10 is a tenth; at most 1.
    prompts:      what to measure on, a few dozen of the kind that the model will meet: strings or lists of messages
                  (an assistant's answer may be among them). None takes chats and prose of the kit's own.
    double_quant: the blocks' scales in 8 bits too. The budget stays, so more layers are kept with what that saves.

    The 4-bit weights themselves are rounded for what the layers read, see `clipped_nf4.py`: that costs no byte.

    Raises ValueError for a budget or prompts that can't work and for a model that is quantized already,
    FileExistsError for a folder that holds something, FileNotFoundError for a model that can't be found.
    """
    into = Path(into)
    _check(budget, prompts, into)
    path = find_source(str(name_or_path), trust_remote_code).path
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if quantization(config):
        raise ValueError(f"{name_or_path} is quantized already: name the 16-bit model that it was made from")
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    ids = calibration_ids(Chat(tokenizer, ()), prompts)
    model = _load(path, trust_remote_code)
    texts = [torch.tensor([text], device=model.device) for text in ids]
    twins = make_twins(model, texts, _progress)
    errors = measure(model, twins, texts, _progress)
    plain_bytes = _bytes(model, [], double_quant=False)
    room = plain_bytes * (1 + budget) - _bytes(model, [], double_quant)
    kept = choose(errors, room, double_quant)
    quantized = _quantized(model, config, twins, kept, double_quant)
    _save(quantized, tokenizer, into)
    return DynamicQuantization(into, _table(errors, kept, double_quant), _bytes(model, kept, double_quant), plain_bytes)


def choose(errors: Sequence[LayerError], room: float, double_quant: bool) -> list[str]:
    """Names of the layers to keep: those with the most KL for each extra byte, as long as they fit into `room`."""
    kept = []
    for layer in _by_worth(errors, double_quant):
        if extra_bytes(layer.weights, double_quant) <= room:
            room -= extra_bytes(layer.weights, double_quant)
            kept.append(layer.name)
    return kept


def extra_bytes(weights: int, double_quant: bool) -> int:
    """What a layer of that many weights costs in 16 bits, beyond what it costs in NF4 with its tables of values: 16 of
    the weights, and 256 of the scales where they are quantized too, in float32."""
    tables = 4 * (16 + 256 * double_quant)
    return 2 * weights - nf4_bytes(weights, double_quant) - tables


def _by_worth(errors: Sequence[LayerError], double_quant: bool) -> list[LayerError]:
    def worth(layer: LayerError) -> float:
        return layer.kl / max(1, extra_bytes(layer.weights, double_quant))

    return sorted(errors, key=worth, reverse=True)


def _check(budget: float, prompts: Sequence[Prompt] | None, into: Path) -> None:
    if not 0 < budget <= 1:
        raise ValueError(f"budget is a fraction of plain NF4's bytes, above 0 and at most 1, got {budget}")
    if isinstance(prompts, str):
        raise ValueError("prompts is a list of prompts, not one string")
    if prompts is not None and not len(prompts):
        raise ValueError("prompts is empty: give some to measure on, or None for the kit's own")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise FileExistsError(f"{into} exists and is not an empty folder: name another one, or remove it first")


def _load(path: str, trust_remote_code: bool) -> PreTrainedModel:
    precision = choose_precision(None)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=precision.dtype,
        attn_implementation="eager",  # right for every family, also for those that cap their scores
        trust_remote_code=trust_remote_code,
    )
    return torch.nn.Module.to(model, precision.device).requires_grad_(False).eval()


def _progress(what: str, done: int, total: int) -> None:
    print(f"\r{what}: {done} of {total}", end="\n" if done == total else "", flush=True)


def _bytes(model: PreTrainedModel, kept: Sequence[str], double_quant: bool) -> int:
    """Of the model's weights with these linear layers and all that is not linear in 16 bits, the rest in NF4."""
    saved = [
        extra_bytes(layer.weight.numel(), double_quant)
        for name, layer in linear_layers(model).items()
        if name not in kept
    ]
    return 2 * sum(weight.numel() for weight in model.parameters()) - sum(saved)


@torch.no_grad()
def _quantized(
    model: PreTrainedModel, config: Any, twins: dict[str, Twin], kept: Sequence[str], double_quant: bool
) -> PreTrainedModel:
    """The model in 4 bits. What NF4 stores for a layer is put into the layer first: quantizing that gives it again."""
    for name, layer in linear_layers(model).items():
        if name not in kept:
            layer.weight.copy_(twins[name].weight())
    dtype = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    head = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    plan = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*head, *kept],
    )
    quantized: PreTrainedModel = type(model).from_pretrained(
        None,
        config=config,
        state_dict=model.state_dict(),
        quantization_config=plan,
        dtype=dtype,
        device_map={"": model.device},
    )
    quantized.generation_config = model.generation_config
    return quantized


def _save(quantized: PreTrainedModel, tokenizer: Any, into: Path) -> None:
    """Under another name first, so that the folder is whole or not there."""
    unfinished = into.with_name(f"{into.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    quantized.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if into.exists():
        into.rmdir()
    unfinished.rename(into)


def _table(errors: Sequence[LayerError], kept: Sequence[str], double_quant: bool) -> pandas.DataFrame:
    import pandas

    rows = [
        {**asdict(layer), "extra_bytes": extra_bytes(layer.weights, double_quant), "kept": layer.name in kept}
        for layer in _by_worth(errors, double_quant)
    ]
    return pandas.DataFrame(rows).rename(columns={"name": "layer", "weights": "parameters"})
