"""A small vLLM made by hand: its engine, which hands over each step one later than it launched it, and its model, whose
weights are joined and packed the way that vLLM's are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import bitsandbytes.functional as bnb
import torch
from torch import Tensor, nn

from grpo_kit.rollout.vllm import Vllm
from grpo_kit.rollout.vllm.cache import KvCache
from grpo_kit.rollout.vllm.process import Words

JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PADDING = 64  # a vocabulary is filled up to a multiple of it
ADAPTER = "the adapter"


# ---- the engine ----


@dataclass
class Request:
    prompt: list[int]
    arguments: dict[str, Any]
    adapter: Any
    tokens: list[int] = field(default_factory=list)
    over: bool = False


class FakeLlm:
    """draw(request) is the next token of a request. The logprob that it tells is what its logits are multiplied by when
    the token is launched, negative, so that a test sees it."""

    def __init__(self, module: nn.Module, draw: Callable[[Request], int], longest: int = 64):
        self.draw, self.requests, self.forgotten, self.steps = draw, {}, 0, 0
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
        runner = SimpleNamespace(model=module)
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.launched: deque[list[Any]] = deque()
        self.is_shut_down = False
        core = SimpleNamespace(scheduler=self, batch_queue=self.launched)
        self.engine_core = SimpleNamespace(engine_core=core, shutdown=self._shut_down)
        self.asked: list[Request] = []

    requests: dict[str, Request]

    def _shut_down(self) -> None:
        self.is_shut_down = True

    def add_request(self, name: str, prompt: list[int], arguments: dict[str, Any], lora_request: Any) -> None:
        self.requests[name] = Request(prompt, arguments, lora_request)
        self.asked.append(self.requests[name])

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    has_requests = has_unfinished_requests

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def reset_prefix_cache(self) -> None:
        assert not self.launched, "something was still under way"
        self.forgotten += 1

    def step(self) -> list[Any]:
        self.steps += 1
        going = [(name, request) for name, request in self.requests.items() if not request.over]
        if going:
            self.launched.append([self._next(name, request) for name, request in going])
            if len(self.launched) < 2 and any(not request.over for _, request in going):
                return []
        arrived = self.launched.popleft() if self.launched else []
        told = [output for output in arrived if output.request_id in self.requests]
        for output in told:
            if output.last:
                del self.requests[output.request_id]
        return told

    def _next(self, name: str, request: Request) -> Any:
        token = self.draw(request)
        request.tokens.append(token)
        full = len(request.tokens) == request.arguments["max_tokens"]
        request.over = full or token in request.arguments["stop_token_ids"]
        scale = self.model_executor.driver_worker.model_runner.model.logits_processor.scale
        new = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-scale)}])
        return SimpleNamespace(request_id=name, outputs=[new], last=request.over)


def fake_vllm(module: nn.Module, draw: Callable[[Request], int], longest: int = 64) -> tuple[Vllm, FakeLlm]:
    llm = FakeLlm(module, draw, longest)
    entry = SimpleNamespace(tag="kv_cache", handle=(0, 100), is_asleep=False)
    cache = KvCache(lambda: [entry], lambda handle: None, lambda: None)
    return Vllm(llm, Words(parameters=dict, prompt=list, adapter=ADAPTER), cache), llm


# ---- the model ----


class FakeModel(nn.Module):
    """vLLM's model with the weights of transformers' `source`, which is left as it is. four_bit: its linear layers are
    quantized, each by itself. rank: of the stacked LoRA, if there is to be one."""

    packed_modules_mapping = JOINED

    def __init__(self, source: Any, four_bit: bool = True, rank: int | None = None, scale: float = 1.0):
        super().__init__()
        self.logits_processor = nn.Module()
        self.logits_processor.scale = scale  # type: ignore[assignment]
        done: set[str] = set()
        for name, module in source.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                self._add_linear(source, name, four_bit, rank, done)
            elif isinstance(getattr(module, "weight", None), nn.Parameter):
                self._add(name, _leaf(_padded(module.weight) if module.weight.dim() == 2 else module.weight))
        if source.config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens

    def _add(self, name: str, module: nn.Module) -> None:
        at: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(leaf, module)

    def _add_linear(self, source: Any, name: str, four_bit: bool, rank: int | None, done: set[str]) -> None:
        parent, _, leaf = name.rpartition(".")
        whole, parts = next(((w, p) for w, p in JOINED.items() if leaf in p), (leaf, [leaf]))
        if f"{parent}.{whole}" in done:
            return
        done.add(f"{parent}.{whole}")
        linears = [source.get_submodule(f"{parent}.{part}") for part in parts]
        base = nn.Module()
        base.weight = _packed(linears) if four_bit else _joined([linear.weight for linear in linears])
        if linears[0].bias is not None:
            base.bias = _joined([linear.bias for linear in linears])
        base.output_sizes = [linear.out_features for linear in linears]  # type: ignore[assignment]
        self._add(f"{parent}.{whole}", base if rank is None else _with_lora(base, linears, rank))


def _leaf(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return module


def _joined(weights: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([weight.detach() for weight in weights]), requires_grad=False)


def _padded(table: Tensor) -> Tensor:
    """Rows that nobody may read."""
    rows = -len(table) % PADDING
    return torch.cat([table.detach(), table.new_full((rows, table.shape[1]), torch.nan)])


def _packed(linears: Sequence[nn.Linear]) -> nn.Parameter:
    """States in another order than the parts, as vLLM's dictionaries have them."""
    made = [bnb.quantize_4bit(linear.weight.detach(), quant_type="nf4") for linear in linears]
    whole: Any = nn.Parameter(torch.cat([data for data, _ in made]), requires_grad=False)
    whole.bnb_quant_state = {place: made[place][1] for place in reversed(range(len(made)))}
    ends = [0, *(sum(len(data) for data, _ in made[: place + 1]) for place in range(len(made)))]
    whole.bnb_shard_offsets = torch.tensor(ends)
    parameter: nn.Parameter = whole
    return parameter


def _with_lora(base: nn.Module, linears: Sequence[nn.Linear], rank: int) -> nn.Module:
    layer: Any = nn.Module()
    layer.base_layer = base
    layer.lora_a_stacked = tuple(torch.zeros(1, 1, rank, linear.in_features) for linear in linears)
    layer.lora_b_stacked = tuple(torch.zeros(1, 1, linear.out_features, rank) for linear in linears)
    wrapped: nn.Module = layer
    return wrapped
