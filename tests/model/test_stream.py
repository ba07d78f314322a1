"""An answer in pieces: together the same text, no character split, and nobody kept from the model by its reader."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_kit.model import Model, load
from grpo_kit.model.stream import stream_text
from grpo_kit.rollout import Completion, OnTokens, Sampling
from tests.tiny import tiny_tokenizer

Tiny = Callable[..., Path]
LIMIT = 20.0  # seconds after which something counts as stuck
TOKENIZER = tiny_tokenizer()


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def told(ids: list[int], read: Callable[[], None] = lambda: None, each: int = 1) -> Callable[[OnTokens], Completion]:
    """A sampling that tells of `each` tokens at a time; `read()` is called before all but the first."""

    def sample(on_tokens: OnTokens) -> Completion:
        row: list[int] = []
        for start in range(0, len(ids), each):
            if row:
                read()
            row += ids[start : start + each]
            on_tokens([row])
        return Completion(row, [0.0] * len(row), "length", decode(row))

    return sample


def in_step(ids: list[int]) -> list[str]:
    """The pieces, where the reader has read all that there is before the next token comes."""
    turn = threading.Semaphore(0)
    pieces: list[str] = []
    waiting = [True]

    def looked(so_far: list[int]) -> str:
        turn.release()  # decoding comes after a token was taken
        return decode(so_far)

    def read() -> None:
        if waiting[0]:
            waiting[0] = turn.acquire(timeout=LIMIT)

    pieces += stream_text(told(ids, read), looked)
    assert waiting[0]
    return pieces


# ---- text ----


def test_a_piece_a_token() -> None:
    assert in_step(ids_of("seven")) == list("seven")


def test_a_character_of_several_bytes_comes_whole() -> None:
    text = "a é€🙂z"  # of 1, 1, 2, 3, 4 and 1 bytes, a token each
    assert len(ids_of(text)) == 12
    assert in_step(ids_of(text)) == list(text)


def test_bytes_that_are_no_character_come_when_that_is_sure() -> None:
    euro = ids_of("€")
    broken = [*ids_of("a"), *euro[:2], *ids_of("b"), *euro[:1]]
    assert in_step(broken) == ["a", "�b", "�"]
    assert decode(broken) == "a�b�"


@pytest.mark.parametrize("each", [1, 2, 5, 100])
def test_pieces_add_up_however_the_tokens_come(each: int) -> None:
    text = "Zwölf €, ∀x: 🙂🙃 naïve."
    pieces = list(stream_text(told(ids_of(text), each=each), decode))
    assert "".join(pieces) == text
    assert all(pieces) and not any("�" in piece for piece in pieces)


def test_an_answer_without_text_has_no_piece() -> None:
    assert list(stream_text(told([256]), decode)) == []


def test_what_comes_only_with_the_completion_is_given_too() -> None:
    def sample(on_tokens: OnTokens) -> Completion:
        on_tokens([ids_of("ab")])
        return Completion(ids_of("abcd"), [0.0] * 4, "length", "abcd")

    assert "".join(stream_text(sample, decode)) == "abcd"


def test_an_error_of_the_sampling_is_raised_to_the_reader() -> None:
    def sample(on_tokens: OnTokens) -> Completion:
        on_tokens([ids_of("ab")])
        raise ZeroDivisionError("in the engine")

    with pytest.raises(ZeroDivisionError, match="in the engine"):
        list(stream_text(sample, decode))


def test_closing_ends_the_sampling_at_its_next_token() -> None:
    go, ended, raised = threading.Event(), threading.Event(), []

    def sample(on_tokens: OnTokens) -> Completion:
        try:
            on_tokens([ids_of("a")])
            assert go.wait(LIMIT)
            on_tokens([ids_of("ab")])
        except Exception as error:
            raised.append(type(error).__name__)
            raise
        finally:
            ended.set()
        raise AssertionError("sampled on")

    pieces: Any = stream_text(sample, decode)
    assert next(pieces) == "a"
    pieces.close()
    go.set()
    assert ended.wait(LIMIT)
    assert raised == ["_Closed"]


# ---- the model ----


@pytest.fixture
def model(tiny_checkpoint: Tiny) -> Iterator[Model]:
    yield load.load_model(str(tiny_checkpoint()), load_in_4bit=False, max_seq_length=400, lora_rank=4)


CASES: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "temperature": 1.5},
    {"temperature": 0.0},
    {"seed": 3, "adapter": False, "top_p": 0.9},
]


@pytest.mark.parametrize("options", CASES)
def test_the_pieces_are_the_answer(options: dict[str, Any], model: Model) -> None:
    """Random bytes: many that are no character, and some that are of two."""
    whole = model.generate("Hi", max_tokens=80, **options)
    pieces = list(model.generate("Hi", max_tokens=80, stream=True, **options))
    assert "".join(pieces) == whole
    chat = [{"role": "user", "content": "Hi"}]
    assert "".join(model.generate(chat, max_tokens=80, stream=True, **options)) == whole


def test_a_stop_string_ends_the_stream(model: Model) -> None:
    whole = model.generate("Hi", max_tokens=30, seed=1)
    stop = (whole[3],)
    expected = model.generate("Hi", max_tokens=30, seed=1, stop=stop)
    assert expected == whole[: whole.index(whole[3]) + 1]
    assert "".join(model.generate("Hi", max_tokens=30, seed=1, stop=stop, stream=True)) == expected


def test_only_one_answer_can_be_streamed(model: Model) -> None:
    for prompts, n in ((["Hi"], 1), (["Hi", "Ho"], 1), ("Hi", 2), ([], 1)):
        with pytest.raises(ValueError, match="stream=True writes one answer"):
            model.generate(prompts, n=n, stream=True)
    with pytest.raises(ValueError, match="top_p must be above 0"):
        model.generate("Hi", top_p=0.0, stream=True)
    with pytest.raises(ValueError, match="the longest prompt has"):
        model.generate("Hi" * 300, stream=True)


def test_a_stream_counts_as_a_question_when_seeds_are_drawn(model: Model) -> None:
    drawn = {"".join(model.generate("Hi", max_tokens=12, stream=True)) for _ in range(3)}
    assert len(drawn) == 3


def slowly(model: Model, tokens: list[int]) -> None:
    """Have the model's engine note in `tokens` how many it has sampled, a few milliseconds apart."""
    generate = model.engine.generate

    def watched(prompt_ids: Any, sampling: Sampling, n: int, between: Any, on_tokens: OnTokens | None) -> Any:
        def note(rows: list[list[int]]) -> None:
            tokens.append(len(rows[0]))
            time.sleep(0.005)
            if on_tokens is not None:
                on_tokens(rows)

        return generate(prompt_ids, sampling, n, between, note)

    model.engine.generate = watched  # type: ignore[method-assign]


def free(model: Model) -> bool:
    """Whether another thread gets the model."""
    got = threading.Event()

    def take() -> None:
        with model.lock:
            got.set()

    threading.Thread(target=take, daemon=True).start()
    return got.wait(LIMIT)


@pytest.fixture
def never_ending(model: Model) -> Model:
    model.engine.eos_ids = frozenset()  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("how", ["closed", "dropped", "broken off"])
def test_a_stream_left_gives_the_model_back(how: str, never_ending: Model) -> None:
    model, tokens = never_ending, []
    expected = model.generate("Hi", max_tokens=12, temperature=0)
    slowly(model, tokens)
    pieces = model.generate("Hi", max_tokens=350, seed=1, stream=True)
    assert tokens == []  # nothing is sampled before the first piece is asked for
    if how == "broken off":
        for _ in pieces:
            break
    else:
        next(pieces)
    if how == "closed":
        pieces.close()
    del pieces
    gc.collect()
    assert free(model)
    assert tokens[-1] < 350
    assert model.generate("Hi", max_tokens=12, temperature=0) == expected


def test_a_reader_who_waits_keeps_nobody_from_the_model(never_ending: Model) -> None:
    model = never_ending
    whole = model.generate("Hi", max_tokens=40, seed=1)
    pieces = model.generate("Hi", max_tokens=40, seed=1, stream=True)
    first = next(pieces)
    assert free(model)  # though the reader has read one piece of many
    assert isinstance(model.generate("Ho", max_tokens=3), str)
    assert first + "".join(pieces) == whole


def test_who_holds_the_lock_is_told_so_instead_of_waiting_for_ever(model: Model) -> None:
    with model.lock, pytest.raises(RuntimeError, match="this thread holds the model's lock"):
        next(model.generate("Hi", max_tokens=3, stream=True))


def test_two_streams_at_once_come_one_after_the_other(model: Model) -> None:
    wholes = [model.generate("Hi", max_tokens=30, seed=seed) for seed in (1, 2)]
    streams = [model.generate("Hi", max_tokens=30, seed=seed, stream=True) for seed in (1, 2)]
    found = ["", ""]
    for _ in range(60):
        for number, stream in enumerate(streams):
            found[number] += next(stream, "")
    assert found == wholes
