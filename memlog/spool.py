"""One spool: a SQLite file with the batches of one process, and the books over them.

A batch is in exactly one table: ``pending`` until the server answers, then ``acknowledged`` (its range only) or
``refused`` (a dead letter, with its bytes). ``books`` counts what ever happened, in the same transactions, so that

    stored = acknowledged + pending + refused + dropped

holds after every commit. ``lane`` keeps what is known of a conversation on the server: ``next_seq``, the number that
the next item should get, written before the first request and with every acknowledgement.

The file belongs to whoever holds the kernel lock beside it, and is read and written over one connection in one thread:
SQLite before 3.51.3 can lose commits where two connections write. This module knows no thread, no loop, no network.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from memlog import system
from memlog.errors import BufferUnusableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

APPLICATION_ID = 0x6D6C6F67  # "mlog"
SQLITE_OLDEST = (3, 35, 0)  # RETURNING
ACKNOWLEDGED_KEPT = 10_000
"""Acknowledged ranges stay readable for this many batches: replay needs those of the last seconds."""

_SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE pending (
    id INTEGER PRIMARY KEY,
    conversation TEXT NOT NULL,
    items INTEGER NOT NULL CHECK (items > 0),
    size INTEGER NOT NULL CHECK (size > 0),
    crc INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX pending_by_lane ON pending (conversation, id);
CREATE TABLE acknowledged (
    turn INTEGER PRIMARY KEY,
    id INTEGER NOT NULL UNIQUE,
    conversation TEXT NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL
);
CREATE INDEX acknowledged_by_lane ON acknowledged (conversation, last_seq);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY,
    conversation TEXT NOT NULL,
    items INTEGER NOT NULL,
    size INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    refused_at INTEGER NOT NULL,
    error TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE TABLE lane (
    conversation TEXT PRIMARY KEY,
    next_seq INTEGER,
    sealed INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE duplicate (
    conversation TEXT NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    UNIQUE (conversation, first_seq, last_seq)
);
CREATE TABLE books (
    next_id INTEGER NOT NULL,
    stored_batches INTEGER NOT NULL, stored_items INTEGER NOT NULL,
    acknowledged_batches INTEGER NOT NULL, acknowledged_items INTEGER NOT NULL,
    refused_batches INTEGER NOT NULL, refused_items INTEGER NOT NULL,
    dropped_batches INTEGER NOT NULL, dropped_items INTEGER NOT NULL,
    pending_batches INTEGER NOT NULL, pending_items INTEGER NOT NULL, pending_bytes INTEGER NOT NULL
);
INSERT INTO books VALUES (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
"""

MIGRATIONS: tuple[str, ...] = (_SCHEMA_1,)
"""The n-th script brings a file from version n to n + 1. Scripts are only ever added."""


@dataclass(slots=True)
class Books:
    """The spool's counters, in items and batches; field names are the column names."""

    next_id: int = 1
    stored_batches: int = 0
    stored_items: int = 0
    acknowledged_batches: int = 0
    acknowledged_items: int = 0
    refused_batches: int = 0
    refused_items: int = 0
    dropped_batches: int = 0
    dropped_items: int = 0
    pending_batches: int = 0
    pending_items: int = 0
    pending_bytes: int = 0

    def __add__(self, other: Books) -> Books:
        return Books(*(getattr(self, name) + getattr(other, name) for name in _BOOK_COLUMNS))


_BOOK_COLUMNS = tuple(Books.__dataclass_fields__)


class NewRow(NamedTuple):
    """A batch on its way into ``pending``; the order of the columns."""

    id: int
    conversation: str
    items: int
    size: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """A pending batch: the very bytes to send, and where it lives."""

    spool: Spool = field(repr=False)
    id: int
    conversation: str
    items: int
    size: int
    stored_at: int
    body: bytes = field(repr=False)


class LaneFacts(NamedTuple):
    """What the held spools know of a conversation on the server."""

    next_seq: int | None
    sealed: bool


class Spool:
    """An open, locked spool file. Every method is called in the thread that opened it.

    Writing methods expect to be inside :meth:`begin` … :meth:`commit`; the caller groups them.
    """

    def __init__(self, path: Path | None, lock: system.KernelLock | None, db: sqlite3.Connection, name: str) -> None:
        self.path = path
        self.name = name
        self.books = Books()
        self._books_before = Books()
        self.opened_at = 1  # the id of the first batch that was not there when it was opened
        self._lock = lock
        self._db = db
        self._acknowledged_since_trim = ACKNOWLEDGED_KEPT  # processes may be short, so the first one in each trims

    # --- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path | None, lock: system.KernelLock | None) -> Spool:
        """Open or create the file at ``path`` under ``lock``; None is a spool in memory.

        Raises BufferUnusableError, with the file untouched, if it is not a spool, damaged, or from a newer version.
        """
        where = ":memory:" if path is None else str(path)
        if sqlite3.sqlite_version_info < SQLITE_OLDEST:
            raise BufferUnusableError(where, f"SQLite {sqlite3.sqlite_version} is older than 3.35")
        try:
            if path is not None:
                system.make_private_file(path)
            db = sqlite3.connect(where, timeout=5.0, isolation_level=None, check_same_thread=True)
        except (OSError, sqlite3.Error) as error:
            raise BufferUnusableError(where, str(error)) from error
        try:
            _prepare(db)
            name = db.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()[0]
            spool = cls(path, lock, db, name)
            spool.books = spool._read_books()
            spool._books_before = replace(spool.books)
            spool.opened_at = spool.books.next_id
        except _NotOursError as error:
            db.close()
            raise BufferUnusableError(where, str(error)) from None
        except sqlite3.Error as error:
            db.close()
            raise BufferUnusableError(where, f"{error}; the file was left as it is") from error
        return spool

    def close(self) -> None:
        """Close the file and give up its lock. What is pending stays pending."""
        self._db.close()
        if self._lock is not None:
            self._lock.release()

    def abandon(self) -> sqlite3.Connection:
        """In a forked child: let go without touching the file. The connection returned must never be closed."""
        if self._lock is not None:
            self._lock.forget()
        return self._db

    def begin(self) -> None:
        """Start a transaction; a no-op inside one."""
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
            self._books_before = replace(self.books)

    def commit(self) -> None:
        """Make everything since :meth:`begin` durable, books included; a no-op outside a transaction."""
        if self._db.in_transaction:
            columns = ", ".join(f"{name} = ?" for name in _BOOK_COLUMNS)
            values = [getattr(self.books, name) for name in _BOOK_COLUMNS]
            self._db.execute(f"UPDATE books SET {columns}", values)  # noqa: S608 - column names of our own
            self._db.execute("COMMIT")
            self._books_before = replace(self.books)

    def rollback(self) -> None:
        """Undo everything since :meth:`begin`."""
        # Not read again: a disk that failed a commit may fail that, too, and the books would be wrong from then on.
        self.books = replace(self._books_before)
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def tidy(self) -> None:
        """Give space back to the file system; for idle moments."""
        # executescript steps the pragma to its end; execute() would free a single page.
        self._db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")

    def _read_books(self) -> Books:
        return Books(*self._db.execute(f"SELECT {', '.join(_BOOK_COLUMNS)} FROM books").fetchone())  # noqa: S608 - as above

    @property
    def holds_something(self) -> bool:
        """Whether there is something to send, or a dead letter to decide about."""
        return self.books.pending_batches > 0 or self.books.refused_batches > 0

    # --- writing, inside a transaction -----------------------------------------------------------------------------

    def store(self, rows: Sequence[NewRow]) -> None:
        """Add batches to ``pending``."""
        now = time.time_ns() // 1000
        self._db.executemany(
            "INSERT INTO pending (id, conversation, items, size, crc, stored_at, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(row.id, row.conversation, row.items, row.size, zlib.crc32(row.body), now, row.body) for row in rows],
        )
        books = self.books
        items = sum(row.items for row in rows)
        books.next_id = max(books.next_id, max(row.id for row in rows) + 1)
        books.stored_batches += len(rows)
        books.stored_items += items
        books.pending_batches += len(rows)
        books.pending_items += items
        books.pending_bytes += sum(row.size for row in rows)

    def acknowledge(self, rows: Sequence[Row], first_seq: int) -> None:
        """Move ``rows``, sent in this order in one request, to ``acknowledged``; ``first_seq`` is the first item's."""
        taken = {row.id for row in self._take_pending(rows)}
        for row in rows:
            if row.id in taken:
                self._db.execute(
                    "INSERT INTO acknowledged (id, conversation, first_seq, last_seq) VALUES (?, ?, ?, ?)",
                    (row.id, row.conversation, first_seq, first_seq + row.items - 1),
                )
                self.books.acknowledged_batches += 1
                self.books.acknowledged_items += row.items
            first_seq += row.items
        self._acknowledged_since_trim += len(rows)
        if self._acknowledged_since_trim > ACKNOWLEDGED_KEPT // 10:
            self._acknowledged_since_trim = 0
            # By their turn and not by id: one that waited for long has a low id, and somebody who waits for it.
            query = "DELETE FROM acknowledged WHERE turn <= (SELECT max(turn) FROM acknowledged) - ?"
            self._db.execute(query, (ACKNOWLEDGED_KEPT,))

    def refuse(self, rows: Sequence[Row], error: dict[str, Any]) -> None:
        """Move ``rows`` to the dead letters, with the reason."""
        now = time.time_ns() // 1000
        text = json.dumps(error, ensure_ascii=False)
        for row in self._take_pending(rows):
            self._db.execute(
                "INSERT INTO refused (id, conversation, items, size, crc, stored_at, refused_at, error, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.id,
                    row.conversation,
                    row.items,
                    row.size,
                    zlib.crc32(row.body),
                    row.stored_at,
                    now,
                    text,
                    row.body,
                ),
            )
            self.books.refused_batches += 1
            self.books.refused_items += row.items

    def _take_pending(self, rows: Sequence[Row]) -> Iterator[Row]:
        for row in rows:
            if self._db.execute("DELETE FROM pending WHERE id = ?", (row.id,)).rowcount == 1:
                self.books.pending_batches -= 1
                self.books.pending_items -= row.items
                self.books.pending_bytes -= row.size
                yield row

    def take_refused(self, row_id: int) -> NewRow | None:
        """Remove a dead letter and return it; None if it is not there (any more). The caller counts where it goes."""
        found = self._db.execute(
            "DELETE FROM refused WHERE id = ? RETURNING id, conversation, items, size, body", (row_id,)
        ).fetchone()
        if found is None:
            return None
        row = NewRow(*found)
        self.books.refused_batches -= 1
        self.books.refused_items -= row.items
        return row

    def requeue(self, row: NewRow, new_id: int) -> None:
        """Put what :meth:`take_refused` returned back into ``pending`` as ``new_id``, behind what waits there."""
        self.store([row._replace(id=new_id)])
        self.books.stored_batches -= 1  # it had been stored before
        self.books.stored_items -= row.items

    def drop(self, row: NewRow) -> None:
        """Count what :meth:`take_refused` returned as thrown away by the user."""
        self.books.dropped_batches += 1
        self.books.dropped_items += row.items

    def note_lane(self, conversation: str, *, next_seq: int | None = None, sealed: bool | None = None) -> None:
        """Remember what is known of the conversation on the server; None leaves a fact as it is."""
        self._db.execute(
            "INSERT INTO lane (conversation, next_seq, sealed) VALUES (?, ?, coalesce(?, 0)) ON CONFLICT (conversation)"
            " DO UPDATE SET next_seq = coalesce(excluded.next_seq, next_seq), sealed = coalesce(?, sealed)",
            (conversation, next_seq, sealed, sealed),
        )

    def note_duplicate(self, conversation: str, first_seq: int, last_seq: int) -> None:
        """Remember that this range of the log holds a second copy."""
        self._db.execute("INSERT OR IGNORE INTO duplicate VALUES (?, ?, ?)", (conversation, first_seq, last_seq))

    def note(self, key: str, value: float | str | None) -> None:
        """Keep a single value over restarts; None removes it."""
        if value is None:
            self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))

    # --- reading ---------------------------------------------------------------------------------------------------

    def noted(self, key: str) -> Any:
        """What :meth:`note` kept, or None."""
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return found and found[0]

    def lanes(self, *, inherited: bool = False) -> list[str]:
        """The conversations with something pending; with ``inherited``, stored before the spool was opened here."""
        bound = self.opened_at if inherited else self.books.next_id
        return [row[0] for row in self._db.execute("SELECT DISTINCT conversation FROM pending WHERE id < ?", (bound,))]

    def sealed_lanes(self) -> list[str]:
        """The conversations known to be full."""
        return [row[0] for row in self._db.execute("SELECT conversation FROM lane WHERE sealed")]

    def lane(self, conversation: str) -> LaneFacts:
        """What is known of the conversation on the server."""
        found = self._db.execute("SELECT next_seq, sealed FROM lane WHERE conversation = ?", (conversation,)).fetchone()
        return LaneFacts(None, sealed=False) if found is None else LaneFacts(found[0], sealed=bool(found[1]))

    def pending(self, conversation: str) -> Iterator[Row]:
        """The conversation's batches in order, read as they are consumed. Bytes that changed on disk raise."""
        cursor = self._db.execute(
            "SELECT id, items, size, stored_at, crc, body FROM pending WHERE conversation = ? ORDER BY id",
            (conversation,),
        )
        for row_id, items, size, stored_at, crc, body in cursor:
            if zlib.crc32(body) != crc:
                raise BufferUnusableError(str(self.path), f"batch {row_id} of conversation {conversation} is damaged")
            yield Row(self, row_id, conversation, items, size, stored_at, body)

    def first_pending_id(self) -> int | None:
        """The oldest pending batch's id."""
        found: tuple[int | None] = self._db.execute("SELECT min(id) FROM pending").fetchone()
        return found[0]

    def oldest_pending(self) -> int | None:
        """When the oldest pending batch was stored, in microseconds since 1970."""
        found: tuple[int] | None = self._db.execute("SELECT stored_at FROM pending ORDER BY id LIMIT 1").fetchone()
        return found and found[0]

    def acknowledged_past(self, conversation: str, seq: int) -> bool:
        """Whether a batch is known to be acknowledged at or past ``seq``."""
        query = "SELECT 1 FROM acknowledged WHERE conversation = ? AND last_seq >= ? LIMIT 1"
        return self._db.execute(query, (conversation, seq)).fetchone() is not None

    def is_pending(self, row_id: int) -> bool:
        """Whether the batch still waits to be sent."""
        return self._db.execute("SELECT 1 FROM pending WHERE id = ?", (row_id,)).fetchone() is not None

    def outcome(self, row_id: int) -> tuple[int, int] | dict[str, Any] | None:
        """The acknowledged range of a batch, or the record of the error that refused it, or None: neither is known."""
        found = self._db.execute("SELECT first_seq, last_seq FROM acknowledged WHERE id = ?", (row_id,)).fetchone()
        if found is not None:
            return (found[0], found[1])
        found = self._db.execute("SELECT error FROM refused WHERE id = ?", (row_id,)).fetchone()
        return None if found is None else json.loads(found[0])

    def duplicates(self) -> list[tuple[str, int, int]]:
        """The ranges of :meth:`note_duplicate`."""
        return self._db.execute("SELECT * FROM duplicate ORDER BY conversation, first_seq").fetchall()

    def refused(self) -> Iterator[tuple[int, str, int, int, int, dict[str, Any], bytes]]:
        """The dead letters: id, conversation, items, size, refused_at (microseconds), error record, body."""
        query = "SELECT id, conversation, items, size, refused_at, error, body FROM refused ORDER BY id"
        for row_id, conversation, items, size, refused_at, error, body in self._db.execute(query):
            yield row_id, conversation, items, size, refused_at, json.loads(error), body


class _NotOursError(Exception):
    pass


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    db.execute("PRAGMA mmap_size = 0")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    owner = db.execute("PRAGMA application_id").fetchone()[0]
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not (empty and version == 0) and owner != APPLICATION_ID:
        msg = "the file is a database, but not one of memlog's"
        raise _NotOursError(msg)
    if version > len(MIGRATIONS):
        known = len(MIGRATIONS)
        msg = f"it was written by a newer version (format {version}, this one knows {known}): upgrade memlog-sdk"
        raise _NotOursError(msg)
    if empty:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect only before the journal mode is set
    db.execute("PRAGMA journal_mode = WAL")
    # FULL: a commit is on the disk when it returns. Grouped as they are, it costs nothing over NORMAL.
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")
    db.execute("PRAGMA journal_size_limit = 16777216")
    while version < len(MIGRATIONS):
        script = MIGRATIONS[version]
        version += 1
        db.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {version}; PRAGMA application_id = {APPLICATION_ID};"
        )
        if db.execute("SELECT 1 FROM meta WHERE key = 'name'").fetchone() is None:
            db.execute("INSERT INTO meta VALUES ('name', ?)", (secrets.token_hex(8),))
        db.execute("COMMIT")


def count_pending(path: Path) -> int:
    """How many items wait in the spool file at ``path``, read without taking part in it; 0 if it cannot be read."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.2)
    except sqlite3.Error:
        return 0
    try:
        found: tuple[int] = db.execute("SELECT pending_items FROM books").fetchone()
        return found[0]
    except sqlite3.Error:
        return 0
    finally:
        db.close()
