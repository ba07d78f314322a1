"""A reward model's scores against a forward pass of the bare model, one text at a time and unpadded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_kit.rewards import RewardSet, from_spec, reward_model
from tests.tiny import SHAPE, save_tiny, tiny_tokenizer

PROMPTS = ["What is 3 + 5?", "Say hi.", "Write a poem about the sea, please.", "?"]
TEXTS = ["8", "", "The sea is wide, " * 5, "What do you mean, question mark?"]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def classifier(kind: str = "Qwen2Config", labels: int = 1, pad: int | None = 257, **changes: Any) -> Any:
    config = getattr(transformers, kind)(
        **{**SHAPE, "vocab_size": 259, "pad_token_id": pad, "eos_token_id": 256, "num_labels": labels, **changes}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def encoder(labels: int = 1) -> Any:
    shape = {"hidden_dropout_prob": 0.5, "max_position_embeddings": 512}
    return classifier("BertConfig", labels, **shape)


def direct(model: Any, tokenizer: Any, text: str) -> list[float]:
    """The logits of one unpadded text."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0].tolist()


def scored(reward: Any, prompts: list[Any] = PROMPTS, texts: list[str] = TEXTS) -> list[Any]:
    table = RewardSet(reward).score(prompts, texts, [{}] * len(texts))
    assert {score.reason for row in table.scores for score in row} == {"ok"}
    return [row[0] for row in table.values]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [classifier, encoder], ids=["decoder", "encoder"])
def test_scores_are_those_of_a_direct_pass_whatever_is_beside_them(make: Any, side: str) -> None:
    model, tokenizer = make(), tiny_tokenizer()
    tokenizer.padding_side = side
    expected = [direct(model, tokenizer, p + t)[0] for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert max(expected) - min(expected) > 1e-3
    for size in (1, 3, 8):
        assert scored(reward_model(model, tokenizer, batch_size=size)) == pytest.approx(expected, abs=1e-5)
    assert scored(reward_model(model, tokenizer), PROMPTS[::-1], TEXTS[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    assert (tokenizer.padding_side, tokenizer.truncation_side) == (side, "right")


def test_a_pad_that_is_the_end_token_changes_nothing() -> None:
    model, tokenizer = classifier(pad=256), tiny_tokenizer(pad="<|im_end|>")
    turns = [[*chat, {"role": "assistant", "content": text}] for chat, text in zip(CHATS, TEXTS, strict=True)]
    expected = [direct(model, tokenizer, tokenizer.apply_chat_template(turn, tokenize=False))[0] for turn in turns]
    assert scored(reward_model(model, tokenizer), CHATS) == pytest.approx(expected, abs=1e-5)


def test_without_a_pad_token_texts_go_one_by_one() -> None:
    model, tokenizer = classifier(pad=None), tiny_tokenizer()
    expected = [direct(model, tokenizer, p + t)[0] for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert scored(reward_model(model, tokenizer)) == pytest.approx(expected, abs=1e-5)


def test_two_labels_give_the_second_less_the_first() -> None:
    model, tokenizer = classifier(labels=2), tiny_tokenizer()
    logits = [direct(model, tokenizer, p + t) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert scored(reward_model(model, tokenizer)) == pytest.approx([good - bad for bad, good in logits], abs=1e-5)


def test_other_numbers_of_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="one label or two, this one has 3"):
        reward_model(classifier(labels=3), tiny_tokenizer())


def test_messages_are_written_with_the_chat_template() -> None:
    model, tokenizer = classifier(), tiny_tokenizer()
    text = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    assert scored(reward_model(model, tokenizer), CHATS[1:2], ["hi"]) == pytest.approx(direct(model, tokenizer, text))


def test_messages_without_a_template_are_written_as_lines() -> None:
    model, tokenizer = classifier(), tiny_tokenizer(chat_template=None)
    expected = direct(model, tokenizer, "user: Say hi.\n\nassistant: hi")
    assert scored(reward_model(model, tokenizer), CHATS[1:2], ["hi"]) == pytest.approx(expected)


def test_a_text_too_long_loses_its_beginning() -> None:
    model, tokenizer = classifier(), tiny_tokenizer()
    reward = reward_model(model, tokenizer, max_length=10)
    assert scored(reward, ["x" * 90], ["0123456789"]) == pytest.approx(direct(model, tokenizer, "0123456789"))
    beyond = reward_model(encoder(), tokenizer, max_length=10_000)  # the encoder has 512 positions
    assert scored(beyond, ["x"], ["y" * 2000]) == pytest.approx(direct(encoder(), tokenizer, "y" * 512), abs=1e-5)


def test_nothing_to_read_is_not_applicable() -> None:
    table = RewardSet(reward_model(classifier(), tiny_tokenizer())).score(["", "a"], ["", ""], [{}, {}])
    assert [row[0].reason for row in table.scores] == ["not applicable", "ok"]


def test_by_name_it_is_loaded_and_built_again_from_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = classifier(), tiny_tokenizer()
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    monkeypatch.chdir(tmp_path)
    made = reward_model("judge", weight=0.5, name="judge", batch_size=2, device="cpu")
    expected = scored(reward_model(model, tokenizer))
    assert scored(made) == pytest.approx(expected, abs=1e-5)
    monkeypatch.chdir("/")
    again = from_spec(json.loads(json.dumps(made.spec)))
    assert (again.name, again.weight, again.time_limit, again.spec) == ("judge", 0.5, made.time_limit, made.spec)
    assert scored(again) == scored(made)
    assert "def reward_model" in made.source


def test_given_as_a_model_it_has_no_spec_and_needs_a_tokenizer() -> None:
    assert reward_model(classifier(), tiny_tokenizer()).spec is None
    with pytest.raises(ValueError, match="needs its tokenizer"):
        reward_model(classifier())
    with pytest.raises(ValueError, match="at least 1"):
        reward_model(classifier(), tiny_tokenizer(), batch_size=0)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no trained reward model: it has no weights for score\.weight"):
        reward_model(save_tiny(tmp_path / "lm", num_labels=1), device="cpu")
