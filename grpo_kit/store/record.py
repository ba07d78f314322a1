"""The record of one run: one SQLite file with its metrics, completions, events and people's ratings.

The training loop writes a step in one transaction; panels, DataFrames and resume read the same file, from any
thread or process, while it is written. Not a checkpoint: weights and optimizer state live elsewhere.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.store.frames import completions_to_frame, events_to_frame, metrics_to_frame, ratings_to_frame
from grpo_kit.store.rows import (
    COMPLETION_KEYS,
    RATING_KEYS,
    completion_values,
    metrics_to_json,
    rating_values,
    storable,
    to_json,
)

if TYPE_CHECKING:
    import pandas

APPLICATION_ID = 0x6772706F  # "grpo": tells a run's record from any other SQLite file
BUSY_SECONDS = 30.0  # how long to wait for another process that is writing to the same record

# AUTOINCREMENT: an event's id is never used again, even after forget_after, so "id > since" misses nothing.
VERSION_1 = (
    "CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE steps (step INTEGER PRIMARY KEY, time REAL NOT NULL, metrics TEXT NOT NULL)",
    """CREATE TABLE completions (
        step INTEGER NOT NULL, "index" INTEGER NOT NULL, "group" INTEGER NOT NULL, prompt TEXT NOT NULL,
        text TEXT NOT NULL, scores TEXT NOT NULL, total REAL, advantage REAL, tokens INTEGER NOT NULL,
        finish_reason TEXT NOT NULL, PRIMARY KEY (step, "index"))""",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, step INTEGER, kind TEXT NOT NULL,
        text TEXT NOT NULL, data TEXT)""",
)
VERSION_2 = (
    """CREATE TABLE ratings (
        id INTEGER PRIMARY KEY, kind TEXT NOT NULL, prompt TEXT NOT NULL, text TEXT NOT NULL, value REAL NOT NULL,
        other TEXT, step INTEGER, time REAL NOT NULL, reward TEXT NOT NULL)""",
)
SCHEMA = (VERSION_1, VERSION_2)  # what each version added
SCHEMA_VERSION = len(SCHEMA)
COMPLETION_COLUMNS = ("step", *COMPLETION_KEYS)
QUOTED_COLUMNS = ", ".join(f'"{column}"' for column in COMPLETION_COLUMNS)
RATING_COLUMNS = ", ".join(RATING_KEYS)


class Record:
    """One run's file. Every method may be called from any thread.

    Writing goes through one connection behind a lock, a transaction a call. Reading opens a short-lived connection
    of its own, so a reader never waits for the writer and never holds it up; it goes on working after `close()`.
    """

    def __init__(self, path: Path | str) -> None:
        """Create the record at `path` (and its folder), or open the one that is there; one of an older version is
        brought up to date.

        Raises ValueError if the file is not a run's record or was written by a newer grpo-kit, OSError if the disk
        can't hold it.
        """
        self.path = Path(path).absolute()
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder; give the path of the record in it (run.sqlite)")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._writer: sqlite3.Connection | None = _open_writer(self.path)

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r}, last_step={self.last_step()})"

    # -- writing ------------------------------------------------------------------------------------------------

    def write_run(self, info: dict[str, Any]) -> None:
        """Keep facts about the run: configuration, versions, hardware. JSON values; a key written again is replaced.

        Raises TypeError, naming the key, for a value that JSON can't hold.
        """
        rows = [(storable(key, "a key of info"), to_json(value, f"info[{key!r}]")) for key, value in info.items()]
        with self._transaction() as writer:
            writer.executemany("INSERT OR REPLACE INTO run (key, value) VALUES (?, ?)", rows)

    def write_step(self, step: int, metrics: dict[str, float | None], completions: list[dict[str, Any]]) -> None:
        """Write a finished step: its metrics and its N completions, all or nothing.

        `step` counts from 1. Numbers may be Python's, numpy's or torch's; NaN and infinity become None. A completion
        has the keys index, group, prompt, text, scores ({reward: [value or None, reason, detail]}), total, advantage,
        tokens and finish_reason. Raises ValueError if the step is recorded already or a completion lacks a key,
        TypeError for values of the wrong type.
        """
        step = int(step)
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        measured = metrics_to_json(metrics)
        rows = completion_values(step, completions)
        marks = ", ".join("?" * len(COMPLETION_COLUMNS))
        with self._transaction() as writer:
            if writer.execute("SELECT 1 FROM steps WHERE step = ?", (step,)).fetchone():
                raise ValueError(
                    f"step {step} is in {self.path} already, and no step is written twice; "
                    f"to go on from an earlier step call forget_after({step - 1}) first"
                )
            writer.execute("INSERT INTO steps (step, time, metrics) VALUES (?, ?, ?)", (step, time.time(), measured))
            writer.executemany(f"INSERT INTO completions ({QUOTED_COLUMNS}) VALUES ({marks})", rows)

    def add_event(self, kind: str, text: str, step: int | None = None, data: dict[str, Any] | None = None) -> int:
        """Note that something happened; returns the event's id (rising, never used again)."""
        values = (
            time.time(),
            None if step is None else int(step),
            storable(kind, "an event's kind"),
            storable(text, "an event's text"),
            None if data is None else to_json(data, "an event's data"),
        )
        with self._transaction() as writer:
            cursor = writer.execute("INSERT INTO events (time, step, kind, text, data) VALUES (?, ?, ?, ?, ?)", values)
            return int(cursor.lastrowid or 0)

    def add_rating(
        self,
        kind: str,
        prompt: str,
        text: str,
        value: float,
        *,
        other: str | None = None,
        step: int | None = None,
        time: float | None = None,
        reward: str = "human",
    ) -> int:
        """Keep what a person said about a completion; returns the rating's id.

        kind: "thumb" (text is good, value 1, or bad, 0) or "pair" (text is better than other). time: seconds since
        1970, now unless given. reward: the name of the reward that asked. Raises TypeError for values of the wrong
        type, ValueError for a value that is not finite.
        """
        values = rating_values(kind, prompt, text, value, other, step, time, reward)
        marks = ", ".join("?" * len(RATING_KEYS))
        with self._transaction() as writer:
            cursor = writer.execute(f"INSERT INTO ratings ({RATING_COLUMNS}) VALUES ({marks})", values)
            return int(cursor.lastrowid or 0)

    def forget_after(self, step: int) -> int:
        """Delete every step, completion and event later than `step`, as a resume from a checkpoint at `step` needs.

        Events that belong to no step stay, and so do all ratings: a person's work is never thrown away. Returns the
        number of steps removed.
        """
        with self._transaction() as writer:
            removed = writer.execute("DELETE FROM steps WHERE step > ?", (int(step),)).rowcount
            writer.execute("DELETE FROM completions WHERE step > ?", (int(step),))
            writer.execute("DELETE FROM events WHERE step > ?", (int(step),))
            return removed

    def close(self) -> None:
        """End writing, and leave a single file behind if no other process has it open. Safe to call twice."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # -- reading ------------------------------------------------------------------------------------------------

    def run_info(self) -> dict[str, Any]:
        """All that write_run has written."""
        return {key: json.loads(value) for key, value in self._read("SELECT key, value FROM run ORDER BY rowid")}

    def last_step(self) -> int:
        """The highest recorded step, 0 when there is none."""
        return int(self._read("SELECT COALESCE(MAX(step), 0) FROM steps")[0][0])

    def steps(self, since: int = 0) -> list[dict[str, Any]]:
        """Steps later than `since`, in order: {"step": 1, "time": seconds since 1970, **metrics}."""
        rows = self._read("SELECT step, time, metrics FROM steps WHERE step > ? ORDER BY step", (int(since),))
        return [{"step": step, "time": when, **json.loads(metrics)} for step, when, metrics in rows]

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """Events with an id above `since`, in order: {"id", "time", "step", "kind", "text", "data"}."""
        rows = self._read("SELECT id, time, step, kind, text, data FROM events WHERE id > ? ORDER BY id", (int(since),))
        return [
            {"id": number, "time": when, "step": step, "kind": kind, "text": text, "data": data and json.loads(data)}
            for number, when, step, kind, text, data in rows
        ]

    def completions(self, step: int | None = None) -> list[dict[str, Any]]:
        """The completions of `step` (None: of the latest step) by index; [] if that step is not recorded."""
        wanted = "(SELECT MAX(step) FROM steps)" if step is None else "?"
        query = f'SELECT {QUOTED_COLUMNS} FROM completions WHERE step = {wanted} ORDER BY "index"'
        rows = self._read(query, () if step is None else (int(step),))
        found = [dict(zip(COMPLETION_COLUMNS, row, strict=True)) for row in rows]
        return [{**row, "scores": json.loads(row["scores"])} for row in found]

    def ratings(self) -> list[dict[str, Any]]:
        """All ratings in the order in which they were given: {"kind", "prompt", "text", "value", "other" (None for a
        thumb), "step", "time", "reward"}."""
        rows = self._read(f"SELECT {RATING_COLUMNS} FROM ratings ORDER BY id")
        return [dict(zip(RATING_KEYS, row, strict=True)) for row in rows]

    def metrics_frame(self) -> pandas.DataFrame:
        """One row a step: step, time and a float column per metric (NaN where not measured)."""
        return metrics_to_frame(self.steps())

    def completions_frame(self, step: int | None = None) -> pandas.DataFrame:
        """One row a completion of `step` (None: the latest): see grpo_kit.store.frames.completions_to_frame."""
        return completions_to_frame(self.completions(step))

    def events_frame(self) -> pandas.DataFrame:
        """One row an event: id, time, step, kind, text, data."""
        return events_to_frame(self.events())

    def ratings_frame(self) -> pandas.DataFrame:
        """One row a rating: kind, prompt, text, value, other, step, time, reward."""
        return ratings_to_frame(self.ratings())

    # -- connections --------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._writer is None:
                raise RuntimeError(f"{self.path} is closed for writing; open it again with Record(path)")
            with self._writer:  # commits, or rolls back on any exception
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with closing(_connect(self.path, "rw")) as reader:
            reader.execute("PRAGMA query_only = ON")
            return reader.execute(query, values).fetchall()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """`mode` "rw" never creates a file, "rwc" does. Transactions are opened by hand (isolation_level None)."""
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _open_writer(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "rwc")
    try:
        version = _version(connection, path)  # before WAL mode is set: that would already change a stranger's file
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise OSError(f"{path} can't be read while it is written on this file system; keep the run on a local disk")
        # In WAL mode NORMAL is safe against a killed process: what is committed has been handed to the operating
        # system. Only a power cut may cost the last steps, and even then the file stays whole.
        connection.execute("PRAGMA synchronous = NORMAL")
        if version < SCHEMA_VERSION:
            _bring_up_to_date(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The version of this record of ours, 0 for an empty file; raises ValueError if it is neither."""
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.OperationalError:  # locked, unreadable: says nothing about what the file is
        raise
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not the record of a run ({error}); choose another path") from error
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION_ID:
        raise ValueError(f"{path} is some other program's SQLite file, not the record of a run; choose another path")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} was written by a newer grpo-kit (record version {version}, this one reads up to "
            f"{SCHEMA_VERSION}); upgrade with: pip install -U grpo-kit"
        )
    return int(version)


def _bring_up_to_date(connection: sqlite3.Connection, path: Path) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        version = _version(connection, path)  # again: another process may have been quicker
        for statements in SCHEMA[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
