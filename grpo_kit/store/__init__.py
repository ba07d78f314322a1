"""The run record: what a run did, on disk, readable while it still runs."""

from __future__ import annotations

from grpo_kit.store.record import Record

__all__ = ["Record"]
