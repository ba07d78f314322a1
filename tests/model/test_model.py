"""The loaded model: asking it, with and without its adapter; logprobs for training; saving."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kit.kernels import pack
from grpo_kit.model import Model, load
from grpo_kit.rollout import Sampling
from tests.tiny import CHATML, EOS

Tiny = Callable[..., Path]
OPTIONS: dict[str, Any] = {"load_in_4bit": False, "max_seq_length": 64, "lora_rank": 4}


def learn_something(model: Model, seed: int = 0) -> None:
    """Give the adapter an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.trainable().values():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


@pytest.fixture
def model(tiny_checkpoint: Tiny) -> Iterator[Model]:
    yield load.load_model(str(tiny_checkpoint()), **OPTIONS)


def test_one_prompt_gives_a_string_and_a_list_a_list(model: Model) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert isinstance(model.generate("Hi", max_tokens=3), str)
    assert isinstance(model.generate(chat, max_tokens=3), str)
    for prompts in (["Hi", "Ho"], [chat, chat], ["Hi", chat]):
        answers = model.generate(prompts, max_tokens=3)
        assert len(answers) == 2 and all(isinstance(answer, str) for answer in answers)
    assert [len(group) for group in model.generate(["Hi", "Ho"], max_tokens=3, n=4)] == [4, 4]
    assert len(model.generate("Hi", max_tokens=3, n=4)) == 4


def test_a_seed_repeats_and_without_one_every_call_draws_anew(model: Model) -> None:
    assert model.generate("Hi", max_tokens=12, seed=5) == model.generate("Hi", max_tokens=12, seed=5)
    assert model.generate("Hi", max_tokens=12) != model.generate("Hi", max_tokens=12)


def test_without_the_adapter_it_answers_as_the_untrained_model(model: Model, tiny_checkpoint: Tiny) -> None:
    untrained = model.generate(["Hi", "2+2="], max_tokens=12, temperature=0)
    learn_something(model)
    assert model.generate(["Hi", "2+2="], max_tokens=12, temperature=0) != untrained
    assert model.generate(["Hi", "2+2="], max_tokens=12, temperature=0, adapter=False) == untrained
    model.reset_adapter()
    assert model.generate(["Hi", "2+2="], max_tokens=12, temperature=0) == untrained
    assert all(weight.requires_grad for weight in model.trainable().values())


def test_an_answer_ends_where_the_models_length_does(model: Model) -> None:
    prompt = list(range(60))
    completion = model.complete([prompt], Sampling(max_tokens=50, temperature=0))[0][0]
    assert len(completion.token_ids) <= 4
    with pytest.raises(ValueError, match="the longest prompt has 64 tokens, the model was loaded for 64"):
        model.complete([list(range(64))], Sampling(max_tokens=5))


def test_sampling_options_are_checked_by_name(model: Model) -> None:
    with pytest.raises(ValueError, match="top_p must be above 0"):
        model.generate("Hi", max_tokens=3, top_p=0.0)
    with pytest.raises(TypeError, match="top_pp"):
        model.generate("Hi", max_tokens=3, top_pp=0.5)


def test_a_stop_string_is_honoured(model: Model) -> None:
    whole = model.generate("Hi", max_tokens=20, seed=1)
    assert len(whole) > 4
    assert model.generate("Hi", max_tokens=20, seed=1, stop=(whole[2],)) == whole[: whole.index(whole[2]) + 1]


def test_the_turns_end_ends_an_answer_although_the_tokenizer_names_another(tiny_checkpoint: Tiny) -> None:
    model = load.load_model(str(tiny_checkpoint(eos="<|pad|>", eos_token_id=[3, 4])), **OPTIONS)
    turn_end = model.chat.tokenizer.convert_tokens_to_ids(EOS)
    assert model.engine.eos_ids == {3, 4, turn_end, model.chat.tokenizer.pad_token_id}


def test_a_thinking_template_puts_its_tag_in_front_of_answers(tiny_checkpoint: Tiny) -> None:
    template = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
    model = load.load_model(str(tiny_checkpoint(chat_template=template)), **OPTIONS)
    assert model.render("Hi").endswith("<think>\n")
    assert model.generate("Hi", max_tokens=5).startswith("<think>\n")
    assert len(model.complete([model.encode("Hi")], Sampling(max_tokens=5))[0][0].token_ids) <= 5


HEADS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 5.0},
    "gemma3": {},
    "phi3": {"tie": False},
}


@pytest.mark.parametrize("architecture", HEADS)
def test_logprobs_equal_a_plain_forward_pass(architecture: str, tiny_checkpoint: Tiny) -> None:
    """Ragged rows, temperature, entropy; and 0 where a row has no token."""
    model = load.load_model(str(tiny_checkpoint(architecture, **HEADS[architecture])), **OPTIONS)
    learn_something(model)
    rows = [(list(range(5)), [9, 8, 7]), (list(range(40, 43)), [1]), (list(range(60, 80)), [3, 4, 5, 6, 7])]
    first = torch.tensor([len(prompt) for prompt, _ in rows])
    with torch.no_grad():
        outputs = model.token_outputs(pack(rows), first, width=5, temperature=0.7)
        logprobs, entropy = outputs.logprobs, outputs.entropy
        for row, (prompt, answer) in enumerate(rows):
            logits = model.module(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            log_p = (logits.double() / 0.7).log_softmax(-1)
            expected = log_p[torch.arange(len(answer)), answer]
            torch.testing.assert_close(logprobs[row, : len(answer)].double(), expected, rtol=0, atol=1e-5)
            expected = -(log_p.exp() * log_p).sum(-1)
            torch.testing.assert_close(entropy[row, : len(answer)].double(), expected, rtol=0, atol=1e-5)
            assert not logprobs[row, len(answer) :].any() and not entropy[row, len(answer) :].any()


def test_logprobs_of_scaled_heads() -> None:
    """Cohere multiplies its logits, Granite divides them; an entry of 1 or None changes nothing."""

    class Config:
        def __init__(self, **entries: Any):
            vars(self).update(entries)

    class Head:
        def __init__(self, **entries: Any):
            self.causal_lm = type("CausalLM", (), {"config": Config(**entries)})

    for entries, scale, softcap in (
        ({}, 1.0, None),
        ({"logit_scale": 0.0625}, 0.0625, None),
        ({"logits_scaling": 8.0}, 0.125, None),
        ({"logit_scale": None, "final_logit_softcapping": 30.0}, 1.0, 30.0),
    ):
        found = Model._head_options(Head(**entries))  # type: ignore[arg-type]
        assert found == {"logit_scale": scale, "softcap": softcap}


def test_a_saved_adapter_is_an_ordinary_peft_folder(model: Model, tmp_path: Path, tiny_checkpoint: Tiny) -> None:
    learn_something(model)
    folder = model.save_adapter(tmp_path / "adapter")
    ids = torch.tensor([model.encode("What is 2 + 2?")])
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), dtype=torch.float32), folder
    )
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.module(ids).logits, rtol=1e-6, atol=1e-6)
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    assert json.loads((folder / "grpo_kit.json").read_text())["lora_rank"] == 4


def test_asking_leaves_the_global_random_state_alone(model: Model) -> None:
    before = torch.get_rng_state()
    model.generate("Hi", max_tokens=5)
    model.reset_adapter()
    assert torch.equal(torch.get_rng_state(), before)
