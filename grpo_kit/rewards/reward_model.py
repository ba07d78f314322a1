"""A reward from a model that was trained to score: a transformers sequence classifier over prompt and completion.

Deliberately no training of it (that is `fit_ratings`, for a small one). transformers is imported when such a reward is
made, and only then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_kit.rewards.ratings import prompt_text
from grpo_kit.rewards.reward import Reward
from grpo_kit.rewards.score import Score

SECONDS = 600.0  # for one step's completions: the model is no code that could hang, but a CPU is slow


def reward_model(
    name_or_model: Any,
    tokenizer: Any = None,
    *,
    weight: float = 1.0,
    name: str | None = None,
    batch_size: int = 8,
    max_length: int = 1024,
    device: str | None = None,
) -> Reward:
    """What a sequence classifier says of prompt and completion: the logit if it has one label, and with two labels the
    logit of the second less that of the first (the log odds of "good"). Unbounded, so mind the weight.

    name_or_model: a name on the hub or a folder, or a loaded AutoModelForSequenceClassification with its `tokenizer`,
                   which is left as it is but for evaluation mode, and for `device` if that is given.
    max_length:    tokens, never more than the model can take. Longer texts lose their beginning, not the answer.
    device:        where a model loaded by name goes; the GPU if there is one.

    Prompts that are messages are written with the tokenizer's chat template, or without one as `role: content`; a
    prompt that is plain text stands directly in front of its completion. Given by name it survives a resume. Loads the
    model at once, in float32 (bfloat16 on GPUs that have it). Raises ValueError for another number of labels, and for
    a checkpoint without a trained head.
    """
    by_name = isinstance(name_or_model, (str, Path))
    if batch_size < 1 or max_length < 1:
        raise ValueError(f"batch_size and max_length must be at least 1, not {batch_size!r} and {max_length!r}")
    if not by_name and tokenizer is None:
        raise ValueError("a model that is loaded already needs its tokenizer: reward_model(model, tokenizer)")
    model = _loaded(str(name_or_model), device) if by_name else name_or_model
    if not by_name and device is not None:
        model.to(device)
    # A copy of the tokenizer: it is called from the training thread, and cuts on the other side.
    own = _tokenizer(str(name_or_model)) if tokenizer is None else copy.deepcopy(tokenizer)
    classifier = _Classifier(model, own, batch_size, max_length)

    def reward_model(prompts: Sequence[Any], completions: Sequence[str]) -> list[Score | float]:
        return classifier.scores(prompts, completions)

    options = {"batch_size": batch_size, "max_length": max_length, "device": device, "weight": weight, "name": name}
    spec = ("reward_model", {"name_or_model": _lasting(name_or_model), **options})
    resumable = by_name and tokenizer is None
    return Reward(
        reward_model,
        weight=weight,
        name=name or "reward_model",
        time_limit=SECONDS,
        spec=spec if resumable else None,
    )


class _Classifier:
    """A sequence classifier with its tokenizer, ready to score texts."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, max_length: int) -> None:
        labels = model.config.num_labels
        if labels not in (1, 2):
            raise ValueError(f"a reward model has one label or two, this one has {labels}: which of them is good?")
        self.model, self.tokenizer, self.labels = model.eval(), tokenizer, labels
        tokenizer.truncation_side = "left"
        text_config = model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        self.longest = min(max_length, tokenizer.model_max_length, positions or max_length)
        # Decoders score the last token that is not this one, so pads must be this one; without it they take no batch.
        self.pad = text_config.pad_token_id
        self.batch_size = 1 if self.pad is None else batch_size

    def scores(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[Score | float]:
        """N scores; the order and the company of the texts change none of them."""
        ids = [self._ids(prompt, str(text)) for prompt, text in zip(prompts, completions, strict=True)]
        # Texts of like length side by side, which spares padding.
        order = sorted((place for place in range(len(ids)) if ids[place]), key=lambda place: len(ids[place]))
        found: list[Score | float] = [Score(None, "not applicable", "there is nothing to read")] * len(ids)
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            for place, value in zip(places, self._values([ids[place] for place in places]), strict=True):
                found[place] = value
        return found

    def _ids(self, prompt: Any, completion: str) -> list[int]:
        if isinstance(prompt, str):
            text, special = prompt + completion, True
        elif self.tokenizer.chat_template:  # which writes the special tokens itself
            turns = [*prompt, {"role": "assistant", "content": completion}]
            text, special = self.tokenizer.apply_chat_template(turns, tokenize=False), False
        else:
            text, special = f"{prompt_text(prompt)}\n\nassistant: {completion}", True
        cut = {"truncation": True, "max_length": self.longest}
        return list(self.tokenizer(text, add_special_tokens=special, **cut).input_ids)

    def _values(self, ids: list[list[int]]) -> list[float]:
        """B values. Padded on the right, where neither positions nor what a decoder sees of the text change."""
        import torch

        width, device = max(map(len, ids)), self.model.device
        padded = [row + [self.pad] * (width - len(row)) for row in ids]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in ids]
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor(padded, device=device), attention_mask=torch.tensor(mask, device=device)
            ).logits.float()  # [B, labels]
        values: list[float] = (logits[:, 0] if self.labels == 1 else logits[:, 1] - logits[:, 0]).tolist()
        return values


def _loaded(name: str, device: str | None) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    half = place.type == "cuda" and torch.cuda.get_device_capability(place) >= (8, 0)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name, dtype=torch.bfloat16 if half else torch.float32, output_loading_info=True
    )
    # A plain language model loads too, with a head of random numbers.
    if info["missing_keys"]:
        raise ValueError(
            f"{name} is no trained reward model: it has no weights for {', '.join(sorted(info['missing_keys']))}"
        )
    return model.to(place)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _lasting(name: Any) -> str:
    """A folder's whole path, so that a resume from another folder finds it; a name on the hub as it is."""
    return str(Path(name).absolute()) if isinstance(name, (str, Path)) and Path(name).is_dir() else str(name)
