"""`quantize_dynamic`: what is kept, what it weighs, and that anybody can load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import grpo_kit as gk
from grpo_kit.model.dynamic_4bit import choose, extra_bytes
from grpo_kit.model.layer_errors import LayerError

Tiny = Callable[..., Path]
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
PROMPTS = ["What is 2 + 2?", [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]]
IDS = torch.tensor([list(b"A text that nobody has measured on.")])


def quantize(tiny_checkpoint: Tiny, into: Path, **options: Any) -> gk.model.DynamicQuantization:
    return gk.quantize_dynamic(tiny_checkpoint(**SHAPE), into, **{"budget": 0.2, "prompts": PROMPTS, **options})


def read(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def in_4bit(model: torch.nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)}


@pytest.mark.parametrize("double_quant", [False, True], ids=["", "double quantization"])
def test_the_checkpoint_weighs_what_it_says_within_the_budget(
    double_quant: bool, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    result = quantize(tiny_checkpoint, tmp_path / "out", double_quant=double_quant)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert result.bytes == tensor_bytes(stored)
    assert result.plain_bytes == plain_bytes(tiny_checkpoint(**SHAPE), tmp_path / "plain")
    assert result.plain_bytes < result.bytes <= 1.2 * result.plain_bytes
    cheapest = result.table[~result.table.kept].extra_bytes.min()
    assert result.bytes + cheapest > 1.2 * result.plain_bytes, "a layer more would have fitted"


def tensor_bytes(stored: dict[str, torch.Tensor]) -> int:
    """Without the note on how to read them that bitsandbytes puts beside each layer's codes, scales and tables."""
    return sum(value.nbytes for name, value in stored.items() if not name.endswith("quant_state.bitsandbytes__nf4"))


def plain_bytes(source: Path, folder: Path) -> int:
    plan = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(
        source, quantization_config=plan, dtype=torch.bfloat16, device_map={"": "cpu"}
    ).save_pretrained(folder)
    return tensor_bytes(load_file(folder / "model.safetensors"))


def test_double_quantization_buys_more_layers(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    once = quantize(tiny_checkpoint, tmp_path / "once")
    twice = quantize(tiny_checkpoint, tmp_path / "twice", double_quant=True)
    assert twice.table[twice.table.kept].parameters.sum() > once.table[once.table.kept].parameters.sum()
    assert all(layer.weight.quant_state.nested for layer in in_4bit(read(tmp_path / "twice")).values())


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "own head"])
def test_kept_layers_are_as_they_were_and_the_others_near(tie: bool, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    result = quantize(lambda **shape: tiny_checkpoint(tie=tie, **shape), tmp_path / "out")
    before, after = read(tiny_checkpoint(tie=tie, **SHAPE)), read(tmp_path / "out")
    assert set(in_4bit(after)) == set(result.table.layer[~result.table.kept])
    assert 0 < result.table.kept.sum() < len(result.table) == 14
    for name, value in before.named_parameters():
        now = after.get_parameter(name)
        if (layer := name.removesuffix(".weight")) in in_4bit(after):
            stored = bitsandbytes.functional.dequantize_4bit(now.data, now.quant_state).float()
            assert (stored - value).norm() / value.norm() < 0.15, layer
        else:
            assert torch.equal(now, value.bfloat16()), name


def test_the_file_is_what_transformers_and_load_model_read(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    result = quantize(tiny_checkpoint, tmp_path / "out")
    expected = read(tiny_checkpoint(**SHAPE))
    expected.load_state_dict({name: value.float() for name, value in by_hand(tmp_path / "out").items()}, strict=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for layer in in_4bit(theirs).values():
        layer.compute_dtype = torch.float32
    ours = gk.load_model(str(tmp_path / "out"), max_seq_length=64, lora_rank=4)
    with torch.no_grad():
        logits = expected(IDS).logits
        for model in (theirs, ours.causal_lm):
            # equal on most machines; some processors multiply 4-bit weights in bfloat16
            assert (model(IDS).logits - logits).norm() < 0.02 * logits.norm()
    assert isinstance(ours.generate("Hi", max_tokens=3), str)
    assert AutoTokenizer.from_pretrained(result.folder).chat_template


def by_hand(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the file: two codes a byte, the first in the upper half, times the scale of each 64."""
    stored = load_file(folder / "model.safetensors")
    weights = {name: value for name, value in stored.items() if name.endswith((".weight", ".bias"))}
    for name in [name for name, value in weights.items() if value.dtype == torch.uint8]:
        codes = torch.stack([stored[name] >> 4, stored[name] & 15], -1).flatten().long()
        out = read(folder).get_submodule(name.removesuffix(".weight")).out_features
        values = stored[f"{name}.quant_map"][codes].view(-1, 64) * stored[f"{name}.absmax"][:, None]
        weights[name] = values.view(out, -1)
    return weights


def test_the_more_is_kept_the_nearer_it_is(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    with torch.no_grad():
        full = read(tiny_checkpoint(**SHAPE))(IDS).logits.log_softmax(-1)
        far = []
        for budget in (1e-9, 0.3, 1.0):
            quantize(tiny_checkpoint, tmp_path / str(budget), budget=budget)
            near = read(tmp_path / str(budget))(IDS).logits.float().log_softmax(-1)
            far.append(float((full.exp() * (full - near)).sum(-1).mean()))
    assert far[0] > 1.2 * far[1] > 1.44 * far[2]


def test_the_config_is_that_of_any_bitsandbytes_checkpoint(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    result = quantize(tiny_checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    made_with = config["quantization_config"]
    assert made_with["quant_method"] == "bitsandbytes" and made_with["bnb_4bit_quant_type"] == "nf4"
    assert set(made_with["llm_int8_skip_modules"]) == {"lm_head", *result.table.layer[result.table.kept]}
    assert config["dtype"] == "bfloat16"
    assert not list(tmp_path.glob("*.unfinished"))


def test_the_table_and_its_picture_in_words(
    tiny_checkpoint: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quantize(tiny_checkpoint, tmp_path / "out", prompts=None)
    table = result.table
    assert list(table) == ["layer", "parameters", "error", "kl", "extra_bytes", "kept"]
    worth = table.kl / table.extra_bytes
    assert worth.is_monotonic_decreasing and table.kept[0]
    assert ((table.error > 0) & (table.error < 0.05)).all()
    lines = repr(result).split("\n")
    assert lines[0].endswith(f"{table.kept.sum()} of 14 linear layers in 16 bits")
    assert f"{result.bytes / result.plain_bytes - 1:+.1%} on plain NF4" in lines[0]
    assert len(lines) == 2 + 14 and table.layer[0] in lines[2] and lines[2].endswith("yes")
    said = capsys.readouterr().out
    assert "texts read: 18 of 18\n" in said and "\rlayers rounded: 14 of 14\n" in said
    assert "texts measured: 18 of 18\n" in said


def test_layers_are_chosen_by_what_a_byte_brings_and_skipped_where_they_do_not_fit() -> None:
    def layer(name: str, weights: int, kl: float) -> LayerError:
        return LayerError(name, weights, error=0.0, kl=kl)

    # of 64 weights, 128 bytes instead of 32 + 4 and a table of 64; of 640, 1,280 instead of 320 + 40 + 64
    assert [extra_bytes(weights, False) for weights in (64, 640, 6400)] == [28, 856, 9136]
    assert extra_bytes(6400, True) == 12_800 - 3200 - 100 - 4 - 4 * (16 + 256)
    errors = [layer("small", 64, 1.0), layer("large", 6400, 50.0), layer("middle", 640, 4.0), layer("tiny", 64, 0.1)]
    assert choose(errors, 2000, False) == ["small", "middle", "tiny"]
    assert choose(errors, 9999, False) == ["small", "large", "tiny"]
    assert choose(errors, 27, False) == []


def test_what_cannot_work_is_said_before_anything_is_loaded(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    for budget in (0, -0.1, 1.01, 10, float("nan")):
        with pytest.raises(ValueError, match="budget is a fraction of plain NF4's bytes"):
            gk.quantize_dynamic("not/looked-for", tmp_path / "out", budget=budget)
    with pytest.raises(ValueError, match="prompts is empty"):
        gk.quantize_dynamic("not/looked-for", tmp_path / "out", prompts=[])
    with pytest.raises(ValueError, match="not one string"):
        gk.quantize_dynamic("not/looked-for", tmp_path / "out", prompts="What?")
    with pytest.raises(FileExistsError, match="exists and is not an empty folder"):
        gk.quantize_dynamic("not/looked-for", tiny_checkpoint())
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="exists and is not an empty folder"):
        gk.quantize_dynamic("not/looked-for", tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        gk.quantize_dynamic(tmp_path, tmp_path / "out")


def test_a_model_that_is_quantized_already_is_refused_and_an_empty_folder_taken(
    tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    quantize(tiny_checkpoint, tmp_path / "out")
    with pytest.raises(ValueError, match="quantized already: name the 16-bit model"):
        gk.quantize_dynamic(tmp_path / "out", tmp_path / "again")
