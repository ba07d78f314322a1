"""Finding a model's files: folders, GGUF files, names; and what is said when there are none. No network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kit.model.sources import find_source


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HF_HUB_OFFLINE=1, which the hub's client reads when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grpo_kit" / "gguf"


def test_a_folder_is_taken_as_it_is(tiny_checkpoint: Callable[..., Path]) -> None:
    source = find_source(str(tiny_checkpoint()))
    assert (source.path, source.note) == (str(tiny_checkpoint()), "")


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a config\.json nor a \.gguf file"):
        find_source(str(tmp_path))


def test_a_gguf_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        find_source(str(tmp_path / "no.gguf"))


def test_two_ggufs_in_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"holds 2 GGUF files; name the one you mean: a\.gguf, b\.gguf"):
        find_source(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no_such_model", "./no/such/folder", "/no/such/folder"])
def test_an_unknown_name_says_what_was_tried_and_what_to_do(name: str, offline: None) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no folder here and could not be read.*HF_HUB_OFFLINE is set.*pip"):
        find_source(name)


def test_without_a_connection_the_reason_is_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    for proxy in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing listens
    with pytest.raises(FileNotFoundError, match=r"no connection to 127\.0\.0\.1"):
        find_source("nobody/no-such-model")


def write_gguf(path: Path, folder: Path) -> None:
    """The tiny Llama as llama.cpp would store it, in float32, with its byte-level tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "ab", "cd"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in state.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        array = weight.numpy()
        for kind, count in heads.items():  # llama.cpp keeps the two halves of a rotary pair side by side
            if kind in name:
                rows, width = array.shape
                array = array.reshape(count, 2, rows // count // 2, width).swapaxes(1, 2).reshape(rows, width)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), numpy.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_a_folder_once(tmp_path: Path, cache: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    original = tiny_checkpoint(vocab_size=261)  # two more than its tokenizer: a GGUF without merges can't be read
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original)

    source = find_source(str(path))
    assert Path(source.path).parent == cache and source.note == f"converted from GGUF: {path}"
    ids = torch.arange(20)[None]
    found, expected = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (source.path, original)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
    assert "quantization_config" not in json.loads((Path(source.path) / "config.json").read_text())

    stamp = (Path(source.path) / "config.json").stat().st_mtime_ns
    assert find_source(str(path)).path == source.path
    assert (Path(source.path) / "config.json").stat().st_mtime_ns == stamp
    assert [folder.name for folder in cache.iterdir()] == [Path(source.path).name]  # nothing unfinished is left
