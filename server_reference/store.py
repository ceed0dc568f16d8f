"""Site memory: conversations of verbatim items in one SQLite file, or in memory.

One thread owns the only connection. It takes all that has queued up, carries it out in order inside one transaction,
commits once, and only then tells the callers; so many small appends share one sync of the disk, and what was
acknowledged survives SIGKILL and power loss (WAL with ``synchronous=FULL``). A batch is stored whole or not at all.

Invariants: per conversation, ``seq`` counts from 0 without gaps; all items of a batch share one ``recorded_at``, and no
other batch has it. The store knows nothing of MCP and measures nothing but the length of a conversation.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Conversation", "FullError", "Store", "StoreUnusableError", "StoredItem"]

T = TypeVar("T")

GROUP_JOBS_MAX: Final = 256
"""Jobs carried out in one transaction, so that the first caller of a group never waits for a long queue."""

SCHEMA_VERSION: Final = 1
SCHEMA: Final = f"""
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY,
    site TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    items INTEGER NOT NULL,
    first_recorded_at TEXT NOT NULL,
    last_recorded_at TEXT NOT NULL,
    UNIQUE (site, conversation_id)
) STRICT;
CREATE TABLE items (
    conversation INTEGER NOT NULL REFERENCES conversations (id),
    seq INTEGER NOT NULL,
    recorded_at TEXT NOT NULL,
    payload TEXT NOT NULL,
    PRIMARY KEY (conversation, seq)
) STRICT;
PRAGMA user_version = {SCHEMA_VERSION};
"""
SQLITE_INTEGER_MAX: Final = 2**63 - 1


class StoreUnusableError(Exception):
    """The file cannot be opened as this server's database."""


class FullError(Exception):
    """The batch would make the conversation longer than it may be; nothing was stored."""


class StoredItem(NamedTuple):
    seq: int
    recorded_at: str
    payload: str


class Conversation(NamedTuple):
    conversation_id: str
    items: int
    first_recorded_at: str
    last_recorded_at: str


@dataclass(slots=True, frozen=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    writes: bool
    result: Future[Any]


class Store:
    """Opens (or makes) the database at once; its thread starts with the first job.

    The methods may be awaited in asyncio and in trio. A cancelled append was either not begun or is carried out whole.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, conversation_items_max: int = 100_000) -> None:
        if not 1 <= conversation_items_max <= 100_000:
            raise ValueError(f"conversation_items_max must be 1 to 100000, not {conversation_items_max}")
        self.conversation_items_max = conversation_items_max
        connection = _open(path)
        self._clock = _Clock(connection.execute("SELECT max(last_recorded_at) FROM conversations").fetchone()[0])
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # The thread holds no reference to the store: a store nobody closed ends with its last user, or the process.
        self._thread = threading.Thread(
            target=_serve, args=(connection, self._jobs), name="server_reference.store", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def close(self) -> None:
        """Carries out what is queued, then closes the file. More than once is fine."""
        self._end()
        self._thread.join()

    async def append(self, site: str, conversation_id: str, payloads: Sequence[str]) -> tuple[int, int]:
        """Stores the batch and returns its first and last seq once it is durable; raises :class:`FullError`."""
        cap, clock = self.conversation_items_max, self._clock

        def job(connection: sqlite3.Connection) -> tuple[int, int]:
            row = connection.execute(
                "SELECT id, items FROM conversations WHERE site = ? AND conversation_id = ?", (site, conversation_id)
            ).fetchone()
            first = row[1] if row else 0
            end = first + len(payloads)
            if end > cap:
                raise FullError
            now = clock.now()
            if row:
                key = row[0]
                connection.execute(
                    "UPDATE conversations SET items = ?, last_recorded_at = ? WHERE id = ?", (end, now, key)
                )
            else:
                key = connection.execute(
                    "INSERT INTO conversations (site, conversation_id, items, first_recorded_at, last_recorded_at)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (site, conversation_id, end, now, now),
                ).lastrowid
            connection.executemany(
                "INSERT INTO items (conversation, seq, recorded_at, payload) VALUES (?, ?, ?, ?)",
                ((key, seq, now, payload) for seq, payload in enumerate(payloads, first)),
            )
            return first, end - 1

        return await self._run(job, writes=True)

    async def replay(self, site: str, conversation_id: str, offset: int, limit: int) -> list[StoredItem]:
        """At most `limit` items from position `offset` on, ascending; none for a conversation that is not known."""

        def job(connection: sqlite3.Connection) -> list[StoredItem]:
            rows = connection.execute(
                "SELECT seq, recorded_at, payload FROM items WHERE seq >= ? AND conversation ="
                " (SELECT id FROM conversations WHERE site = ? AND conversation_id = ?) ORDER BY seq LIMIT ?",
                (min(offset, SQLITE_INTEGER_MAX), site, conversation_id, limit),
            )
            return [StoredItem(*row) for row in rows]

        return await self._run(job, writes=False)

    async def recall(self, site: str, conversation_id: str, limit: int) -> list[StoredItem]:
        """The `limit` most recent items, ascending."""

        def job(connection: sqlite3.Connection) -> list[StoredItem]:
            rows = connection.execute(
                "SELECT seq, recorded_at, payload FROM items WHERE conversation ="
                " (SELECT id FROM conversations WHERE site = ? AND conversation_id = ?) ORDER BY seq DESC LIMIT ?",
                (site, conversation_id, limit),
            )
            return [StoredItem(*row) for row in rows][::-1]

        return await self._run(job, writes=False)

    async def conversations(self, site: str, limit: int, after: str | None) -> list[Conversation]:
        """At most `limit` conversations of the site whose id is greater than `after`, ascending by id."""

        def job(connection: sqlite3.Connection) -> list[Conversation]:
            rows = connection.execute(
                "SELECT conversation_id, items, first_recorded_at, last_recorded_at FROM conversations"
                " WHERE site = ? AND conversation_id > ? ORDER BY conversation_id LIMIT ?",
                (site, after or "", limit),
            )
            return [Conversation(*row) for row in rows]

        return await self._run(job, writes=False)

    async def _run(self, job: Callable[[sqlite3.Connection], T], *, writes: bool) -> T:
        if not self._end.alive:
            raise StoreUnusableError("the store is closed")
        result: Future[T] = Future()
        self._jobs.put(_Job(job, writes, result))
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # trio: a thread may wait here, as only tests run this server under trio
            return await anyio.to_thread.run_sync(result.result)
        return await asyncio.wrap_future(result)


class _Clock:
    """Wall-clock time as RFC 3339 in microseconds, never the same twice and never backwards, also over a restart."""

    def __init__(self, last: str | None) -> None:
        self._last = datetime.fromisoformat(last) if last else datetime.min.replace(tzinfo=UTC)

    def now(self) -> str:
        self._last = max(datetime.now(UTC), self._last + timedelta(microseconds=1))
        return self._last.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def _open(path: str | os.PathLike[str] | None) -> sqlite3.Connection:
    # isolation_level=None: transactions begin where this module says so.
    try:
        connection = sqlite3.connect(path or ":memory:", timeout=1, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise StoreUnusableError(f"cannot open {os.fspath(path or ':memory:')}: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # One server to a file: a second one would number items from what it remembers, not from what is there.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            connection.executescript(f"BEGIN IMMEDIATE;{SCHEMA}COMMIT;")
        elif version != SCHEMA_VERSION:
            raise StoreUnusableError(f"{os.fspath(path or ':memory:')} is not a database of this server")  # noqa: TRY301
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise StoreUnusableError(f"cannot use {os.fspath(path or ':memory:')}: {error}") from error
    except StoreUnusableError:
        connection.close()
        raise
    return connection


def _serve(connection: sqlite3.Connection, jobs: queue.SimpleQueue[_Job | None]) -> None:
    open_for_jobs = True
    while open_for_jobs:
        group: list[_Job] = []
        job = jobs.get()
        while job is not None:
            if job.result.set_running_or_notify_cancel():
                group.append(job)
            if len(group) >= GROUP_JOBS_MAX:
                break
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                break
        open_for_jobs = job is not None
        _carry_out(connection, group)
        # A finished job must not be what keeps a store alive while this thread waits for the next one.
        del group, job
    connection.close()


def _carry_out(connection: sqlite3.Connection, group: Sequence[_Job]) -> None:
    outcomes: list[tuple[_Job, Any, Exception | None]] = []
    writes = any(job.writes for job in group)
    try:
        if writes:
            connection.execute("BEGIN IMMEDIATE")
        for job in group:
            try:
                outcomes.append((job, job.run(connection), None))
            except FullError as error:  # found before anything was written
                outcomes.append((job, None, error))
        if writes:
            connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001  # nothing of the group is durable, and each caller must hear so
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        outcomes = [(job, None, error) for job in group]
    for job, value, failure in outcomes:
        if failure is None:
            job.result.set_result(value)
        else:
            job.result.set_exception(failure)
