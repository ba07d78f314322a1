"""Whether the model sampled is the model trained: the gap between the engine's logprobs and the trainer's, judged after
each step, and what follows where it is too large. The gap itself is measured in `passes`.

Both sides know the same weights, so all that may lie between them is rounding: differently fused kernels in 16 bits are
0.005 to 0.02 nats apart on the mean of the tokens, and 0.3 on single unlikely ones. An adapter that stays behind, a
wrong mask or wrong positions move most tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_kit.model import Model
from grpo_kit.store import Record
from grpo_kit.training.options import TrainOptions

MEAN_GAP = 0.05  # nats per token over the step: at least 2.5 times what rounding does
SEQUENCE_GAP = 0.1  # nats per token of one answer, whose few tokens average less of the rounding away
SEQUENCE_SHARE = 0.2  # of the answers beyond that: more than one odd answer of eight, less than one bad group of four
PERSISTS = 2  # steps in a row until the engine is given up: a single one may be an answer of few unlikely tokens

EXACT = "transformers"  # samples with the training model's own modules, one operation after another
ENGINE = "engine"  # the record's key of an engine that was fallen back to: its name, the reason and after which step

Row = Mapping[str, Any]


def bound(nats: float, temperature: float) -> float:
    """A bound at this temperature: below 1 logits are multiplied up, and their rounding with them."""
    return nats / min(1.0, temperature)


def is_beyond(row: Row, temperature: float) -> bool:
    """Whether a step's metrics say that the model sampled was another one. Reads "sampler_gap" and
    "sampler_gap_share"; an engine that tells no logprobs (None) can't be judged.

    The largest gap decides nothing: one token that both hold for nearly impossible may be far apart.
    """
    mean, share = row.get("sampler_gap") or 0.0, row.get("sampler_gap_share") or 0.0
    return mean > bound(MEAN_GAP, temperature) or share > SEQUENCE_SHARE


class SamplerCheck:
    """Warns of a gap beyond the bounds, and has the model sampled by the exact engine once the gap persists.

    An engine that was given up is in the record, and a resumed run does without it too.
    """

    def __init__(self, model: Model, options: TrainOptions, record: Record):
        self.model, self.options, self.record = model, options, record
        self._in_a_row = 0

    def go_on(self, rows: Sequence[Row]) -> str:
        """Before the first step of a resumed run, with the metrics of all steps made: take up the count, and the
        engine that was fallen back to. Returns what is to be said of that."""
        kept = self.record.run_info().get(ENGINE)
        since = kept["step"] if kept else 0
        for row in rows:
            beyond = row["step"] > since and is_beyond(row, self.options.temperature)
            self._in_a_row = self._in_a_row + 1 if beyond else 0
        if not kept:
            return ""
        self.model.use_engine(kept["name"], kept["reason"])
        return f"{kept['name']} samples, {kept['reason']}"

    def check(self, row: Row) -> tuple[str, dict[str, Any]] | None:
        """Look at a step's metrics. Returns a warning and its data where there is something new to say; with an
        "engine" in the data the model has changed it. The caller holds the model's lock."""
        if not is_beyond(row, self.options.temperature):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row == 1:
            return f"The model sampled may not be the model trained. {self._seen(row)} {self._outlook()}", _figures(row)
        if self._in_a_row < PERSISTS or self.model.engine.name == EXACT:
            return None
        return self._fall_back(row)

    def _fall_back(self, row: Row) -> tuple[str, dict[str, Any]]:
        given_up, seen, step = self.model.engine.name, self._seen(row), row["step"]
        reason = f"instead of {given_up}, whose logprobs were not the trainer's: {_words(row)} in step {step}"
        self.model.use_engine(EXACT, reason)
        self._in_a_row = 0
        kept = {"name": EXACT, "reason": reason, "step": step}
        self.record.write_run({ENGINE: kept, "model_notes": self.model.notes})
        return (
            f"{given_up} is given up: {PERSISTS} steps in a row it sampled another model than the one trained. "
            f"{seen} From now on {EXACT} samples, with the training model's own modules: that is exact and "
            f"slower. It stays so, also when the run is resumed; another run begins with {given_up} again once "
            "the model is loaded anew.",
            {**_figures(row), "engine": EXACT, "given_up": given_up},
        )

    def _seen(self, row: Row) -> str:
        mean, answer = (bound(nats, self.options.temperature) for nats in (MEAN_GAP, SEQUENCE_GAP))
        return (
            f"The logprobs of {self.model.engine.name} and of the trainer differ by {_words(row)}; "
            f"{row.get('sampler_gap_share') or 0:.0%} of the answers are more than {answer:.2g} off. Rounding explains "
            f"less than half of {mean:.2g} on average. Answers of another model teach this one wrongly."
        )

    def _outlook(self) -> str:
        if self.model.engine.name != EXACT:
            return f"If the next step shows it again, the run goes on with the slower, exact engine {EXACT}."
        return (
            f"{EXACT} samples with the training model's own modules, so there is no engine to fall back to, and the "
            "run goes on: stop it and load the model anew. Should it come back, the training pass computes something "
            "else than the model's modules do; that is a bug of grpo-kit, please report it."
        )


def _words(row: Row) -> str:
    return f"{row.get('sampler_gap') or 0:.2g} nats a token on average, {row.get('sampler_gap_max') or 0:.2g} at most"


def _figures(row: Row) -> dict[str, Any]:
    return {name: row.get(name) for name in ("sampler_gap", "sampler_gap_max", "sampler_gap_share")}
