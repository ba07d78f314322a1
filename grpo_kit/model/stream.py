"""An answer as it is written: the text of one completion in pieces, while a thread of its own samples it.

The reader sets no pace. What is sampled waits for it, so a reader that is slow, or never comes back, keeps nobody from
the model for longer than the answer takes. Knows neither model nor lock: `sample` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from grpo_kit.rollout import Completion, OnTokens

# How bytes decode that are no character yet. Tokenizers with a token for each byte also take back characters that were
# whole, if bytes follow them that are none: for such noise alone the pieces are better than the text.
UNFINISHED = "\ufffd"

Sample = Callable[[OnTokens], Completion]


class _Closed(Exception):
    """Raised out of the sampling when nobody reads any more."""


class _Sampling(threading.Thread):
    """Samples and puts into `arrived` the tokens as they come, then the completion, or what was raised."""

    def __init__(self, sample: Sample):
        super().__init__(name="grpo-kit stream", daemon=True)
        self._sample = sample
        self._sent = 0
        self.closed = False  # set by the reader: the sampling ends at its next token
        self.arrived: SimpleQueue[list[int] | Completion | BaseException] = SimpleQueue()

    def run(self) -> None:
        try:
            self.arrived.put(self._sample(self._on_tokens))
        except BaseException as error:
            self.arrived.put(error)

    def _on_tokens(self, rows: list[list[int]]) -> None:
        if self.closed:
            raise _Closed
        self.arrived.put(rows[0][self._sent :])
        self._sent = len(rows[0])


def stream_text(sample: Sample, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Pieces of the text that `sample(on_tokens)` gives, none of them empty; together they are its completion's text.

    sample: draws one completion and tells `on_tokens` of it, as `Engine.generate` does; begun at the first `next`.
    decode: token ids to text. A character whose bytes have not all come is held back. Whatever `sample` raises is
    raised here. Closing the iterator ends the sampling.
    """
    sampling = _Sampling(sample)
    sampling.start()
    ids: list[int] = []
    given = ""
    try:
        while True:
            news = sampling.arrived.get()
            if isinstance(news, BaseException):
                raise news
            if isinstance(news, Completion):
                break
            ids += news
            if sampling.arrived.empty():  # else the reader lags behind, and more tokens make one piece
                text = decode(ids).rstrip(UNFINISHED)
                if len(text) > len(given) and text.startswith(given):
                    yield text[len(given) :]
                    given = text
        if len(news.text) > len(given):
            yield news.text[len(given) :]
    finally:
        sampling.closed = True
