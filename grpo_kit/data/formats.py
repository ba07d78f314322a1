"""The system prompts that the built-in tasks use unless told otherwise."""

from __future__ import annotations

NUMBER_ONLY = "Answer with the number only."

REASONING_FORMAT = """\
Think first, then answer. Write in exactly this format:
<reasoning>
your thoughts, step by step
</reasoning>
<answer>
the final answer only
</answer>"""
