"""`explain`: what an algorithm computes, where that is written, and when to use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_kit.algorithms.registry import ALGORITHMS, Algorithm, get_algorithm

ESTIMATOR_WORDS = {
    "group": "each answer against the mean of its group",
    "leave_one_out": "each answer against the mean of the others of its group",
    "gae": "each token against what a critic expected (a value head is trained along)",
    "pairs": "the best answer of a group against its worst, and so on inwards",
}
SYMBOLS = (
    r"$w_{it} = \pi_\theta(o_{it}) / \pi_{\mathrm{old}}(o_{it})$: how much likelier a token has become since it was "
    r"sampled; $A$: advantage; $|o_i|$: tokens of answer $i$; $N$: answers of the step."
)


@dataclass(frozen=True)
class Explanation:
    """Shows itself as typeset text in a notebook and as plain text elsewhere."""

    algorithm: Algorithm

    @property
    def defaults(self) -> Mapping[str, Any]:
        """The options it comes with, where they differ from everyone's."""
        return self.algorithm.defaults

    def _repr_markdown_(self) -> str:
        it = self.algorithm
        return "\n\n".join(
            [
                f"**{it.name}**: {it.summary}",
                f"$${it.formula}$$",
                SYMBOLS,
                f"- **Compares** {ESTIMATOR_WORDS[it.advantages]}",
                f"- **Use it** {_in_a_sentence(it.when)}",
                f"- **Comes with** {self._options()}",
                f"- **Source** {it.source}",
            ]
        )

    def __repr__(self) -> str:
        it = self.algorithm
        lines = {
            "formula": it.formula,
            "compares": ESTIMATOR_WORDS[it.advantages],
            "when": it.when,
            "comes with": self._options(),
            "source": it.source,
        }
        return "\n".join([f"{it.name}: {it.summary}", *(f"  {what:<11}{text}" for what, text in lines.items())])

    def _options(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.defaults.items()) or "no options of its own"


def explain(name: str | None = None) -> Explanation | Overview:
    """Formula, source and use of the algorithm `name`; without a name, a table of all. ValueError for an unknown
    one."""
    return Overview() if name is None else Explanation(get_algorithm(name))


class Overview:
    """All algorithms, a line each."""

    def _repr_markdown_(self) -> str:
        rows = [f"| `{it.name}` | {it.summary} | {it.when} |" for it in ALGORITHMS.values()]
        return "\n".join(["| algorithm | what it does | when |", "| --- | --- | --- |", *rows])

    def __repr__(self) -> str:
        width = max(map(len, ALGORITHMS))
        return "\n".join(f"{it.name:<{width}}  {it.summary}" for it in ALGORITHMS.values())


def _in_a_sentence(text: str) -> str:
    return f"for: {text[0].lower()}{text[1:]}" if not text.startswith(("When", "As")) else text[0].lower() + text[1:]
