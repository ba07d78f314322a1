"""What must not matter to a run does not matter: how a step is cut, padded and ordered, and where it was stopped.

The answers are fixed (`DrawnEngine`), each step's others, so two runs differ by their arithmetic alone. The tiny model
computes in float64 here, head and critic included: what is left between two runs is rounding at 1e-16, which Adam, who
divides by the gradient's size, may blow up by some orders, and a wrong weight or a padded token in a sum is at 1e-3.
Compared are, step by step, the gradient's norm, entropy and KL, and all weights. A run that was stopped and resumed is
in float32, as everybody's, and equal bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import grpo_kit as gk
import grpo_kit.model.model as model_module
import grpo_kit.training.step as step_module
from grpo_kit.model import Model, TokenOutputs, ValueHead
from grpo_kit.rewards import RewardSet, reward
from grpo_kit.store import Record
from grpo_kit.training import resume
from grpo_kit.training.checkpoint import checkpoints
from grpo_kit.training.derive import derive
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.order import rows_of_step
from grpo_kit.training.prompts import Prompts
from grpo_kit.training.step import Stepper
from tests.training.helpers import SOON, DrawnEngine, adapter, numbers, same

PROMPTS, EACH = 2, 4
# Prompts of 4 tokens, counted once, and answers of 5 to 8: into 26 tokens two or three go, into 40 two pairs or three.
CUTS = {"8 times 1": 1, "two or three at a time": 26, "at once": 10_000}
PAIR_CUTS = {"4 pairs": 1, "two or three pairs at a time": 40, "at once": 10_000}
SMALL: dict[str, Any] = {
    "steps": 30, "prompts_per_step": PROMPTS, "num_generations": EACH, "max_completion_length": 8,
    "learning_rate": 1e-2, "max_grad_norm": 0.5, "tokens_per_micro_batch": 10_000,
}  # fmt: skip
EXACT = 1e-9  # of the largest entry
ROUNDED = 1e-5  # where some numbers are float32: advantages and the weights of sequences always are
SCALED = 2e-3


@reward
def digits(completion):
    """Of a `DrawnEngine`'s answer: between 0 and 1, hardly ever the same for two."""
    return sum(int(n) * (i + 1) for i, n in enumerate(completion.split())) % 101 / 101


def plain_head(hidden, weight, token_ids, *, temperature, logit_scale, softcap):
    """`linear_logprob` in the dtype of its inputs."""
    assert (logit_scale, softcap) == (1.0, None)
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(-1, token_ids[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def plain_norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


@pytest.fixture
def double(tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """The tiny model in float64, its adapter as after some training, answered for by a `DrawnEngine`."""
    path = str(tiny_checkpoint(chat_template=None))
    loaded = gk.load_model(path, load_in_4bit=False, max_seq_length=64, lora_rank=4, seed=64)  # a model of its own
    torch.set_default_dtype(torch.float64)
    loaded.module.double()
    monkeypatch.setattr(model_module, "linear_logprob", plain_head)
    monkeypatch.setattr(LlamaRMSNorm, "forward", plain_norm)  # the reference's; its own is float32 whatever it is given
    monkeypatch.setattr(ValueHead, "forward", lambda self, hidden: hidden @ self.weight + self.bias)
    loaded.engine = DrawnEngine(tells=True)
    begin_anew(loaded)
    yield loaded
    torch.set_default_dtype(torch.float32)


@torch.no_grad()
def begin_anew(model: Model) -> None:
    """B is not 0, so that gradients reach A from the first step on, and the reference is another model."""
    model.reset_adapter()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trainable().items():
        if ".lora_B." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.1)


class Trace:
    """A run's steps: metrics of each, weights (the critic's too) after each, and how many rows each pass had."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.rows: list[int] = []


def trace(model: Model, folder: Path, rewards: Any = digits, outputs: Any = None, **options: Any) -> Trace:
    """`outputs` in the place of `model.token_outputs`."""
    begin_anew(model)
    chosen, _ = derive(TrainOptions(**{**SMALL, **options}), on_gpu=False)
    questions = [f"{n} + 1?" for n in range(5)]
    prompts = Prompts(questions, [[48 + n, 43, 49, 63] for n in range(5)], [{} for _ in questions])
    made, outputs = Trace(), outputs or model.token_outputs

    def counted(packed, *args):
        if torch.is_grad_enabled():
            made.rows.append(len(packed.rows))
        return outputs(packed, *args)

    vars(model)["token_outputs"] = counted
    with closing(Record(folder / "run.sqlite")) as record, model.lock:
        stepper = Stepper(model, prompts, RewardSet(rewards), chosen, record, lambda: 0.0)
        record.forget_after(0)
        for step in range(1, chosen.steps + 1):
            stepper.step(step, lambda: None)
            weights = {name: parameter.detach().clone() for name, parameter in stepper.updater.parameters.items()}
            made.weights.append(weights)
        made.metrics = record.steps()
    del vars(model)["token_outputs"]
    return made


def assert_same_run(one: Trace, other: Trace, names=("grad_norm", "entropy", "kl"), close: float = EXACT) -> None:
    assert len(one.metrics) == len(other.metrics) == len(one.weights) == len(other.weights)
    for row, other_row in zip(one.metrics, other.metrics, strict=True):
        for name in names:
            assert row[name] == pytest.approx(other_row[name], rel=close, abs=close), (row["step"], name)
    for step, (weights, others) in enumerate(zip(one.weights, other.weights, strict=True), 1):
        for name in weights:
            largest = float(others[name].abs().max())
            gap = float((weights[name] - others[name]).abs().max())
            assert gap <= close * largest, (step, name, gap / largest)


def moved(made: Trace) -> float:
    """How far the weights went, as a whole: a comparison of runs that learn nothing would be worth nothing."""
    first, last = made.weights[0], made.weights[-1]
    return float(torch.stack([(last[name] - first[name]).norm() for name in last]).norm())


# ---- micro-batches ----

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.05, "steps": 30},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "dapo": {"algorithm": "dapo"},
    "gspo": {"algorithm": "gspo", "num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.02},
    "cispo": {"algorithm": "cispo", "num_iterations": 2, "epsilon_high": 0.1},
    "sapo": {"algorithm": "sapo", "num_iterations": 2},
    "luspo": {"algorithm": "luspo", "num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.02},
    "vespo": {"algorithm": "vespo", "num_iterations": 2},
    "rloo": {"algorithm": "rloo", "beta": 0.05, "num_iterations": 2},
    "ppo": {"algorithm": "ppo", "num_iterations": 2},
    "online_dpo": {"algorithm": "online_dpo", "num_iterations": 2},
    "online_ipo": {"algorithm": "online_ipo"},
    "entropy": {"entropy_coef": 0.01},
    "least sure": {"top_entropy_quantile": 0.3, "entropy_coef": 0.01, "num_iterations": 2},
    "sampler": {"importance_sampling_correction": "sequence_truncate", "num_iterations": 2},
    "cut off": {"mask_truncated_completions": True, "importance_sampling_correction": "token_mask", "beta": 0.05},
    "off policy": {"algorithm": "dapo", "beta": 0.05, "off_policy_mask_threshold": 0.5, "use_bias_correction_kl": True},
    "GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
}


def taught(made, options):
    """How many sequences each step learns from: all, but for those that were cut off where these are left out."""
    left_out = [row["truncated"] if options.get("mask_truncated_completions") else 0 for row in made.metrics]
    return [round(PROMPTS * EACH * (1 - share)) for share in left_out]


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_do_not_matter(double, tmp_path, case):
    options = {"steps": 4, **CASES[case]}
    pairs = options.get("algorithm", "").startswith("online")
    cuts = PAIR_CUTS if pairs else CUTS
    made = {name: trace(double, tmp_path, tokens_per_micro_batch=cut, **options) for name, cut in cuts.items()}
    one, some, at_once = made.values()
    size = 2 if pairs else 1
    passes = [n for n in taught(at_once, options) for _ in range(options.get("num_iterations", 1))]
    assert at_once.rows == passes
    assert sum(some.rows) == sum(passes) and size < max(some.rows) < max(passes)
    assert one.rows == [size] * (sum(passes) // size)
    names = {"grad_norm", "entropy", "clip_ratio", "value_loss", "explained_variance", "correction", "pair_accuracy"}
    if pairs or "beta" in options or case == "ppo":
        names.add("kl")  # without a pull to the reference it is measured on one micro-batch only
    names &= one.metrics[0].keys()
    assert_same_run(one, at_once, names)
    assert_same_run(some, at_once, names)
    assert moved(at_once) > 0.1
    if "epsilon_high" in options:
        assert any(row["clip_ratio"] for row in one.metrics)


def test_the_comparison_can_fail(double, tmp_path):
    one = trace(double, tmp_path, steps=3, beta=0.05)
    with pytest.raises(AssertionError):
        assert_same_run(one, trace(double, tmp_path, steps=3, beta=0.05 * (1 + 1e-6)))


# ---- padding ----


def rows_of(tokens, first):
    """The sequences of a packed batch, each with all its tokens, and where their completions start."""
    places = zip(tokens.rows, tokens.mask, first, strict=True)
    return [(tokens.ids[row[real.bool()]], int(start)) for row, real, start in places]


def said(model, hidden, tokens, temperature):
    """Logprobs and entropy of `tokens` [T], each by the hidden state before it [T, H]."""
    logits = hidden @ model.causal_lm.get_output_embeddings().weight.T / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def together(each, width):
    """[T] of each sequence, filled up to [B, width]."""
    logprobs, entropies = (
        [torch.nn.functional.pad(x, (0, width - len(x))) for x in some] for some in zip(*each, strict=True)
    )
    return TokenOutputs(torch.stack(logprobs), torch.stack(entropies), None)


def padded_left(model):
    def outputs(tokens, first, width, temperature, value_head=None, offload=None):
        rows, longest = rows_of(tokens, first), tokens.rows.shape[1] + 3
        left = torch.full((len(rows), longest), 77)  # any id will do
        real = torch.zeros_like(left)
        for place, (row, _) in enumerate(rows):
            left[place, longest - len(row) :], real[place, longest - len(row) :] = row, 1
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        decoder = model.causal_lm.get_decoder()
        hidden = decoder(input_ids=left, attention_mask=real, position_ids=positions, use_cache=False).last_hidden_state
        each = [
            said(model, hidden[place, start - len(row) - 1 : -1], row[start:], temperature)
            for place, (row, start) in enumerate(rows)
        ]
        return together(each, width)

    return outputs


def packed(model):
    def outputs(tokens, first, width, temperature, value_head=None, offload=None):
        rows = rows_of(tokens, first)
        lengths = [len(row) for row, _ in rows]
        mine = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        decoder, line = model.causal_lm.get_decoder(), torch.cat([row for row, _ in rows])[None]
        hidden = decoder(input_ids=line, attention_mask=mine, position_ids=positions, use_cache=False).last_hidden_state
        parts = hidden[0].split(lengths)
        each = [
            said(model, part[at - 1 : -1], row[at:], temperature) for part, (row, at) in zip(parts, rows, strict=True)
        ]
        return together(each, width)

    return outputs


@pytest.mark.parametrize("layout", [padded_left, packed])
def test_where_the_padding_is_does_not_matter(double, tmp_path, layout):
    options = {"beta": 0.05, "temperature": 0.8}
    right = trace(double, tmp_path, **options)
    assert_same_run(right, trace(double, tmp_path, outputs=layout(double), **options))
    assert moved(right) > 0.1


# ---- order, scale, repetition ----


def backwards(step, *more):
    return rows_of_step(step, *more)[::-1]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "rloo", "ppo", "online_dpo"])
def test_the_order_of_the_groups_does_not_matter(double, tmp_path, monkeypatch, algorithm):
    options = {"algorithm": algorithm, "beta": 0.05, "steps": 30 if algorithm == "grpo" else 4}
    forwards = trace(double, tmp_path, **options)
    monkeypatch.setattr(step_module, "rows_of_step", backwards)
    assert_same_run(trace(double, tmp_path, **options), forwards)
    assert moved(forwards) > 0.1


@reward
def eightfold(completion):
    return 8 * digits.function(completion)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"])
def test_the_scale_of_rewards_does_not_matter_where_groups_are_normalised(double, tmp_path, algorithm):
    """But for the 1e-4 that is added to a group's std: with a std above 0.1 advantages differ by less than 1e-3. Adam
    adds the differences up over the steps."""
    options = {"algorithm": algorithm, "steps": 30 if algorithm == "grpo" else 4}
    plain = trace(double, tmp_path, **options)
    eight = trace(double, tmp_path, rewards=eightfold, **options)
    assert_same_run(eight, plain, ["entropy"], close=SCALED)
    for row, other in zip(eight.metrics, plain.metrics, strict=True):
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=SCALED)
        assert row["reward"] == pytest.approx(8 * other["reward"], rel=1e-5)
    assert eight.metrics[0]["grad_norm"] != plain.metrics[0]["grad_norm"]  # the floor is there
    assert moved(plain) > 0.1


def test_it_does_matter_where_they_are_not(double, tmp_path):
    plain = trace(double, tmp_path, algorithm="dr_grpo", steps=1)
    eight = trace(double, tmp_path, algorithm="dr_grpo", steps=1, rewards=eightfold)
    assert eight.metrics[0]["grad_norm"] == pytest.approx(8 * plain.metrics[0]["grad_norm"], rel=1e-5)


# ---- two updates on one batch ----


def logprobs_by_hand(model, prompt, tokens):
    ids = torch.tensor([prompt + tokens])
    logits = model.module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def grpo_by_hand(model, batch, olds, references, beta, epsilon=0.2):
    """Of (prompt, tokens, advantage): the formula, one sequence at a time."""
    loss = torch.zeros(())
    for (prompt, tokens, advantage), old, reference in zip(batch, olds, references, strict=True):
        now = logprobs_by_hand(model, prompt, tokens)
        gap = reference - now
        ratio = (now - old).exp()
        token = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
        loss = loss + (token + beta * (gap.exp() - gap - 1)).mean() / len(batch)
    return loss


def batch_by_hand(model, step, options):
    batch = []
    for row in rows_of_step(step, 5, PROMPTS, options.seed):
        prompt = [48 + row, 43, 49, 63]
        seed = step_module.stream_seed(options.seed, "step", step)
        answers = model.engine.generate([prompt], options.sampling(seed=seed), EACH)[0]
        scores = torch.tensor([digits.function(answer.text) for answer in answers]).float()
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        batch += [(prompt, a.token_ids, float(x)) for a, x in zip(answers, advantages, strict=True)]
    return batch


def test_two_updates_on_a_batch_are_two_optimizer_steps(double, tmp_path):
    """Against a training loop of a few lines: 15 steps of two updates each, with clipping of ratios and gradients."""
    beta, rate = 0.05, SMALL["learning_rate"]
    made = trace(double, tmp_path, steps=15, beta=beta, num_iterations=2, tokens_per_micro_batch=26)
    assert any(row["clip_ratio"] for row in made.metrics)

    begin_anew(double)
    options = TrainOptions(**{**SMALL, "steps": 15})
    weights = double.trainable()
    optimizer = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)
    for step in range(1, options.steps + 1):
        batch, norms = batch_by_hand(double, step, options), []
        olds = [logprobs_by_hand(double, prompt, tokens).detach() for prompt, tokens, _ in batch]
        with torch.no_grad(), double.module.disable_adapter():
            references = [logprobs_by_hand(double, prompt, tokens) for prompt, tokens, _ in batch]
        for _ in range(2):
            grpo_by_hand(double, batch, olds, references, beta).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), options.max_grad_norm)))
            optimizer.step()
            optimizer.zero_grad()
        assert made.metrics[step - 1]["grad_norm"] == pytest.approx(sum(norms) / 2, rel=ROUNDED)
        for name, weight in weights.items():
            gap = (made.weights[step - 1][name] - weight).abs().max()
            assert gap <= ROUNDED * weight.abs().max(), (step, name)


# ---- stopped and resumed ----


def finish(run):
    run.wait(SOON)
    assert run.state == "finished", run.error
    return run


def stopped_after(step, start, engine, **options):
    """A run that is told to stop once it has made `step` steps."""
    begun = threading.Event()
    engine.before = lambda asked: begun.wait(SOON)
    run = start(**options)
    run.subscribe(lambda: run.stop() if run.step == step else None)
    begun.set()
    run.wait(SOON)
    assert (run.state, run.step) == ("stopped", step)


def saved(directory):
    """All tensors of the last checkpoint."""
    last = checkpoints(directory)[-1]
    assert last.name == "step-000030"
    return {f"{file.name} {name}": t for file in last.glob("*.safetensors") for name, t in load_file(file).items()}


RESUMED: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 4, "num_iterations": 2},
    "adamw_8bit": {"optim": "adamw_8bit", "weight_decay": 0.1},
    "ppo": {"algorithm": "ppo", "num_iterations": 1},
    "online_dpo": {"algorithm": "online_dpo"},
    "dapo": {"algorithm": "dapo", "top_entropy_quantile": 0.5},
    "rloo": {"algorithm": "rloo", "lr_scheduler_type": "linear"},
}


@reward
def often_alike(completion):
    """The same for all answers of a group every now and then, so that groups are replaced."""
    return float(sum(map(int, completion.split())) % 100 < 25)


@pytest.fixture
def large(tiny_checkpoint):
    """With a rank at which bitsandbytes keeps its moments in bytes: from 4,096 weights of a tensor on."""
    path = str(tiny_checkpoint(chat_template=None))
    loaded = gk.load_model(path, load_in_4bit=False, max_seq_length=64, lora_rank=128)
    loaded.reset_adapter()
    return loaded


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_resumed_in_its_middle_is_the_run_never_stopped(request, data, tmp_path, case):
    model = request.getfixturevalue("large" if case == "adamw_8bit" else "model")
    rewards = RewardSet(often_alike if case == "dapo" else digits)
    engine = DrawnEngine()

    def start(run_dir):
        model.reset_adapter()
        model.engine = engine
        options = {**SMALL, **RESUMED[case], "checkpoint_every": 100}
        return gk.train(model, data, rewards, run_dir=tmp_path / run_dir, **options)

    whole = finish(start(run_dir="whole"))
    weights = adapter(model)
    stopped_after(15, start, engine, run_dir="part")
    model.reset_adapter()
    again = finish(resume(tmp_path / "part", model=model, rewards=rewards))

    assert [row["step"] for row in again.record.steps()] == list(range(1, 31))
    assert numbers(again) == numbers(whole)
    assert same(adapter(model), weights)
    tensors = saved(again.directory)
    assert same(tensors, saved(whole.directory))
    rows = whole.record.steps()
    assert rows[14]["grad_norm"] != rows[15]["grad_norm"]
    if case == "ppo":
        assert tensors["value_head.safetensors weight"].any()
        assert tensors["optimizer.safetensors value_head.weight|exp_avg"].any()
    if case == "adamw_8bit":
        assert torch.uint8 in {tensor.dtype for tensor in tensors.values()}
    if case == "dapo":
        assert sum(row["refilled_groups"] for row in rows[:15]) > 0 < sum(row["refilled_groups"] for row in rows[15:])
    if case == "grpo":
        assert rows[14]["learning_rate"] > rows[15]["learning_rate"]  # the schedule went on falling
