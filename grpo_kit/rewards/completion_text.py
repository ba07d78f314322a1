"""Completions as TRL reward functions expect them, whichever way they were written.

TRL hands a reward function plain strings when the prompts are strings, and one-message conversations,
`[{"role": "assistant", "content": text}]`, when they are conversations. Published functions are written for one
of the two: some call `len(c)` or `re.search(pattern, c)`, others read `c[0]["content"]`. `CompletionText` answers
both, so a function copied from elsewhere works unchanged.

It is deliberately not a list: iterating gives characters, and `isinstance(c, str)` is true. A function that checks
the type first therefore takes its branch for strings, which is right.
"""

from __future__ import annotations

from typing import Any, SupportsIndex


class CompletionText(str):
    """The completion's text, whose first and last item also read like the one message of a conversation."""

    __slots__ = ()

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice) or key.__index__() not in (0, -1):
            return str.__getitem__(self, key)
        # An empty completion is still one message with empty content, so no IndexError here.
        return _Message(str.__getitem__(self, key) if self else "", str(self))


class _Message(str):
    """One character of a completion that also answers ["content"] and ["role"] like a chat message."""

    _fields: dict[str, str]

    def __new__(cls, character: str, content: str) -> _Message:
        message = super().__new__(cls, character)
        message._fields = {"role": "assistant", "content": content}
        return message

    def __getitem__(self, key: Any) -> str:
        return self._fields[key] if isinstance(key, str) else super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The message's field `key`, as of a dict."""
        return self._fields.get(key, default)
