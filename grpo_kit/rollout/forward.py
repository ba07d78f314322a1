"""A forward pass of a transformers module over left-padded prompts and a cache: what both engines on modules share."""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import Tensor
from transformers import Cache, PreTrainedModel


def check_prompts(prompt_ids: list[list[int]], n: int) -> None:
    if n < 1:
        raise ValueError(f"n, the completions of each prompt, must be at least 1, got {n}")
    if not prompt_ids or not all(prompt_ids):
        raise ValueError("generate needs at least one prompt, and every prompt at least one token")


def left_padded(prompt_ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [P, S], filled up on the left so that every prompt ends in the last column.

    The filling is the prompt's own first id: the repetition penalty looks at ids, not at the mask, and must not
    punish a token (the end, where it is the pad too) that the prompt does not hold.
    """
    longest = max(map(len, prompt_ids))
    ids = torch.tensor([[prompt[0]] * (longest - len(prompt)) + prompt for prompt in prompt_ids], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompt_ids], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    return ids, mask


def last_logits(module: PreTrainedModel | PeftModel, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """Logits [B, V] after the last column. ids [B, t] new tokens, mask [B, S] over everything so far."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = module(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits
