"""The loaded model: one set of weights with a LoRA adapter, asked by the notebook and trained by the loop.

Whoever uses the weights holds `model.lock`; the training loop lets others in between its micro-batches and tokens.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from grpo_kit.kernels import Offload, Packed, gather, linear_logprob
from grpo_kit.model.chat import Chat, Prompt
from grpo_kit.model.decode_layers import step_for
from grpo_kit.model.lock import ModelLock
from grpo_kit.model.lora import lora_parameters, reset_lora, save_lora
from grpo_kit.model.memory_plan import MemoryPlan, memory_plan
from grpo_kit.model.precision import Precision
from grpo_kit.model.stream import stream_text
from grpo_kit.model.trunk import Trunk
from grpo_kit.model.value_head import ValueHead
from grpo_kit.rollout import Completion, Engine, OnTokens, Sampling, Vllm, make_engine


@dataclass(frozen=True)
class LoadOptions:
    """What `load_model` was asked for; kept with every run so that it can be loaded again."""

    name_or_path: str
    load_in_4bit: bool
    max_seq_length: int
    lora_rank: int
    lora_alpha: int
    dtype: str | None
    fast_inference: bool
    engine: str
    seed: int
    trust_remote_code: bool
    double_quant: bool = False
    kv_cache_dtype: str | None = None


@dataclass(frozen=True)
class TokenOutputs:
    """Of B completions of up to T tokens: logprobs and entropy (nats) and, with a value head, values; float32 [B, T]
    each, 0 where a completion has no token."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class Model:
    """A causal language model with one trainable LoRA adapter. Made by `load_model`.

    options: what was asked for.  notes: what was derived from it, and why, as (what, value, reason).
    module, chat, engine, precision: the parts, for those who want to reach in.
    """

    def __init__(
        self,
        module: PeftModel,
        chat: Chat,
        engine: Engine,
        precision: Precision,
        options: LoadOptions,
        notes: list[tuple[str, str, str]],
        vllm: Vllm | None = None,  # that the weights belong to
    ):
        self._vllm = vllm
        self._module: PeftModel | None = module
        self.chat, self.engine, self.precision, self.options, self.notes = chat, engine, precision, options, notes
        self.trunk = Trunk(module, precision, options.max_seq_length)
        self.notes.append(("training pass", *self.trunk.in_words()))
        self.lock = ModelLock()
        self.max_seq_length = options.max_seq_length
        self.stop_run: Callable[[], None] | None = None  # set by a live run: asks it to stop and waits until it has
        self._questions = 0

    # ---- the notebook's side ----

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_tokens: int = 256,
        *,
        n: int = 1,
        adapter: bool = True,
        temperature: float = 1.0,
        seed: int | None = None,
        stream: bool = False,
        **sampling: Any,
    ) -> Any:
        """Answer with the current adapter, or with `adapter=False` as the untrained model would.

        prompts: one string, one list of messages, or a list of either. Returns a string for one prompt and a list of
        strings for a list; with n > 1 a list of n strings in place of each. `temperature=0` is greedy. Without a seed
        every call draws anew. An answer ends where prompt and answer reach `max_seq_length`, which may be before
        `max_tokens`. Further options are those of `Sampling` (top_p, top_k, min_p, repetition_penalty, stop).

        stream=True, for one prompt and n = 1: returns an iterator over the answer's text in pieces, as it is written.
        Sampling begins at the first piece and ends when the iterator is closed, or dropped; a reader that is slow holds
        up nobody.

        May be called while a run trains: the run makes room for it. Raises ValueError for prompts that leave no room.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], dict))
        batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item,arg-type]
        if seed is None:
            self._questions += 1
            seed = self._questions
        options = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, **sampling)
        if stream:
            if not single or n != 1:
                raise ValueError("stream=True writes one answer: give a single prompt, not a list of them, and n=1")
            prompt = self.chat.encode(batch[0])
            self._fitting([prompt], options)  # what can't be answered is said at once, not at the first piece
            return self._stream(prompt, options, adapter)
        answers = self.complete([self.chat.encode(prompt) for prompt in batch], options, n, adapter=adapter)
        texts = [[completion.text for completion in group] if n > 1 else group[0].text for group in answers]
        return texts[0] if single else texts

    def complete(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        n: int = 1,
        *,
        adapter: bool = True,
        between_tokens: Callable[[], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        """`generate` for those who speak token ids: n completions of each prompt, cut so that they fit the model's
        length. between_tokens, on_tokens: see `Engine.generate`."""
        fitting = self._fitting(prompt_ids, sampling)
        with self.lock, self.adapter_set(adapter):
            return self.engine.generate(prompt_ids, fitting, n, between_tokens, on_tokens)

    def _stream(self, prompt: list[int], sampling: Sampling, adapter: bool) -> Iterator[str]:
        if self.lock.held:
            raise RuntimeError(
                "this thread holds the model's lock, for which a stream's sampling would wait in vain: ask without "
                "stream=True, or outside of `with model.lock`"
            )

        def sample(on_tokens: OnTokens) -> Completion:
            return self.complete([prompt], sampling, adapter=adapter, on_tokens=on_tokens)[0][0]

        yield from stream_text(sample, self.chat.decode)

    def _fitting(self, prompt_ids: list[list[int]], sampling: Sampling) -> Sampling:
        """Cut so that prompts and completions fit the model's length."""
        room = self.max_seq_length - max(map(len, prompt_ids), default=0)
        if room < 1:
            raise ValueError(
                f"the longest prompt has {self.max_seq_length - room} tokens, the model was loaded for "
                f"{self.max_seq_length}: shorten the prompt or load with a larger max_seq_length"
            )
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def memory_plan(self, gpu: str | float | None = None, **options: Any) -> MemoryPlan:
        """Where the GPU's memory will go in training. gpu: the one at hand unless named; options: those of `train` that
        matter (see `grpo_kit.memory_plan`)."""
        names = ("load_in_4bit", "double_quant", "max_seq_length", "lora_rank", "dtype")
        loaded = {name: getattr(self.options, name) for name in names}
        if self.engine.name == "native":
            loaded["kv_cache_dtype"] = self.options.kv_cache_dtype
        return memory_plan(self.options.name_or_path, gpu, **{**loaded, "engine": self.engine.name, **options})

    def render(self, prompt: Prompt) -> str:
        """The exact text that the model is given for a prompt."""
        return self.chat.render(prompt)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of `render(prompt)`."""
        return self.chat.encode(prompt)

    def save_adapter(self, folder: str | Path) -> Path:
        """Write the adapter as an ordinary peft folder (`PeftModel.from_pretrained` reads it) and the tokenizer
        beside it."""
        folder = Path(folder)
        with self.lock:
            save_lora(self.module, folder)
        self.chat.tokenizer.save_pretrained(str(folder))
        (folder / "grpo_kit.json").write_text(json.dumps(asdict(self.options), indent=1))
        return folder

    def reset_adapter(self) -> None:
        """Forget what was learned: the adapter is as fresh as after loading."""
        with self.lock:
            reset_lora(self.module, self.options.seed)
            self.engine.adapter_changed()

    def stop_live_run(self) -> None:
        """Stop the run that trains this model, if there is one, and wait until it has ended."""
        stop = self.stop_run  # read once: a run that ends by itself clears it
        if stop is not None:
            stop()

    def unload(self) -> None:
        """Stop a live run and free the weights. The object remains, but can't be asked any more."""
        self.stop_live_run()
        with self.lock:
            self._module = None
            self.__dict__.pop("engine", None)
            self.__dict__.pop("trunk", None)
            vllm, self._vllm = self._vllm, None
        if vllm is not None:
            vllm.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __repr__(self) -> str:
        if self._module is None:
            return f"<Model {self.options.name_or_path}: unloaded>"
        width = max(len(what) for what, _, _ in self.notes)
        lines = [
            f"{what:<{width}}  {value}" + (f"  ({reason})" if reason else "") for what, value, reason in self.notes
        ]
        return "\n".join([f"Model {self.options.name_or_path}", *lines])

    # ---- the training loop's side; the caller holds the lock ----

    def use_engine(self, name: str, reason: str) -> None:
        """Sample with engine `name` from now on; `reason` goes into the notes. Nothing where it does so already.

        Raises ValueError for an engine there is not.
        """
        if self.engine.name == name:
            return
        notes = [("engine now", name, reason)]
        fused = step_for(name, self.module, self.precision, notes)
        engine = make_engine(
            name,
            self.module,
            eos_ids=self.chat.eos_ids,
            decode=self.chat.decode,
            fused=fused,
            kv_cache_dtype=self.options.kv_cache_dtype,
            vllm=self._vllm,
        )
        self.engine.release()
        self.engine = engine
        self.notes += notes

    @property
    def module(self) -> PeftModel:
        if self._module is None:
            raise RuntimeError(
                f"this model ({self.options.name_or_path}) was unloaded when another one was loaded; use the new one"
            )
        return self._module

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model under the adapter."""
        module: PreTrainedModel = self.module.get_base_model()  # type: ignore[assignment]
        return module

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name."""
        return lora_parameters(self.module)

    @contextmanager
    def adapter_set(self, on: bool) -> Iterator[None]:
        """Within the block the model answers with its adapter, or as the untrained one."""
        module = self.module
        if on:
            yield
        else:
            with module.disable_adapter():
                yield

    def token_outputs(
        self,
        packed: Packed,
        first: Tensor,
        width: int,
        temperature: float,
        value_head: ValueHead | None = None,
        offload: Offload | None = None,
    ) -> TokenOutputs:
        """What the model says of each sequence's completion tokens.

        packed: B sequences of prompt and completion. first [B]: where in each the completion starts. width: the longest
        completion. offload keeps in the host's memory what backward needs. The heads run over completion tokens only.
        """
        return self._heads(self.trunk.hidden(packed, offload), packed, first, width, temperature, value_head)

    def token_outputs_of_modules(self, packed: Packed, first: Tensor, width: int, temperature: float) -> TokenOutputs:
        """The same through transformers' own modules, for those who look at them."""
        return self._heads(self.trunk.plain(packed), packed, first, width, temperature, None)

    def _heads(
        self,
        hidden: Tensor,
        packed: Packed,
        first: Tensor,
        width: int,
        temperature: float,
        value_head: ValueHead | None,
    ) -> TokenOutputs:
        at = first[:, None] + torch.arange(width, device=first.device)  # [B, width]: columns of the completion tokens
        real = at < packed.mask.sum(-1, keepdim=True)
        rows, columns = real.nonzero(as_tuple=True)
        source = at[rows, columns]
        # [N, H]: what the model knew before each token
        before = gather(hidden, packed.rows[rows, source - 1], packed.shared)
        flat_logprob, flat_entropy = linear_logprob(
            before,
            self.causal_lm.get_output_embeddings().weight,
            packed.ids[packed.rows[rows, source]],
            temperature=temperature,
            **self._head_options(),
        )

        def placed(flat: Tensor) -> Tensor:
            return flat.new_zeros(real.shape).index_put((rows, columns), flat)

        values = None if value_head is None else placed(value_head(before))
        return TokenOutputs(placed(flat_logprob), placed(flat_entropy), values)

    def _head_options(self) -> dict[str, Any]:
        """Cohere multiplies its logits, Granite divides them, Gemma 2 caps them."""
        config = self.causal_lm.config
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return {"logit_scale": float(scale), "softcap": getattr(config, "final_logit_softcapping", None)}
