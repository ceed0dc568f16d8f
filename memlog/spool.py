"""One spool: a SQLite file with the batches of one process, and the books over them.

A batch is in exactly one table: ``pending`` until the server answers, then ``acknowledged`` (its range only) or
``refused`` (a dead letter, with its bytes). ``books`` counts what ever happened, in the same transactions, so that

    stored = acknowledged + pending + refused + dropped + forgotten + lost

holds after every commit; *forgotten* is what was acknowledged so long ago that its range is no longer kept. ``lane``
keeps what is known of a conversation on the server: ``next_seq``, the number that the next item should get, written
before the first request and with every acknowledgement. It goes when all else of the conversation has gone.

The file belongs to whoever holds the kernel lock beside it, and is read and written over one connection in one thread:
SQLite before 3.51.3 can lose commits where two connections write. Its format is in :mod:`memlog.schema`; what becomes
of a damaged one, in :mod:`memlog.salvage`. This module knows no thread, no loop, no network.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from memlog import system
from memlog.errors import BufferUnusableError
from memlog.schema import (
    WAL_BYTES_MAX,
    DamagedError,
    companions,
    connect,
    error_name,
    is_passing,
    read_only,
    wal_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T")

ACKNOWLEDGED_KEPT = 10_000
"""Acknowledged ranges stay readable for this many batches: replay needs those of the last seconds."""

LANES_KEPT = 100_000
"""Conversations known to be full or shared are remembered, up to so many, beyond their acknowledged ranges."""

ECHOES_KEPT = 8
"""Requests of one conversation that are remembered as sent twice."""

DUPLICATES_KEPT = 10_000
"""Ranges that are second copies; the event told of each when it was found."""

INTENTS_KEPT = 1_000
"""Commands from outside that are remembered as carried out; each needs that only until its file is gone."""

MOVED_KEPT = 1_000
"""Dead letters that were requeued, and whose new numbers are remembered."""

_MOVED = "moved-"
_IDLE = (  # lanes that nothing else in the file mentions
    "NOT EXISTS (SELECT 1 FROM acknowledged WHERE conversation = lane.conversation)"
    " AND NOT EXISTS (SELECT 1 FROM pending WHERE conversation = lane.conversation)"
    " AND NOT EXISTS (SELECT 1 FROM echo WHERE conversation = lane.conversation)"
    " AND conversation NOT IN (SELECT conversation FROM refused)"
)
_CHECKED_BYTES_MAX = 256 * 1024 * 1024  # a check of the structure reads all of it, at 0.5 to 2 GB a second
_TIDY_PAGES = 4096
_SCARCE_BYTES = 8 * 1024 * 1024  # a group of batches, and as much again


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
    forgotten_batches: int = 0
    forgotten_items: int = 0
    lost_batches: int = 0
    lost_items: int = 0
    pending_batches: int = 0
    pending_items: int = 0
    pending_bytes: int = 0

    def __add__(self, other: Books) -> Books:
        return Books(*(getattr(self, name) + getattr(other, name) for name in _BOOK_COLUMNS))

    @property
    def holds_something(self) -> bool:
        """Whether there is something to send, or a dead letter to decide about."""
        return self.pending_batches > 0 or self.refused_batches > 0

    def close(self) -> int:
        """Make the equation hold again after rows vanished or came back; how many items are lost by that."""
        lost_before = self.lost_items
        for unit in ("batches", "items"):
            places = (getattr(self, f"{place}_{unit}") for place in _PLACES)
            missing = getattr(self, f"stored_{unit}") - sum(places)
            name = f"lost_{unit}" if missing > 0 else f"stored_{unit}"
            setattr(self, name, getattr(self, name) + abs(missing))
        return self.lost_items - lost_before

    def checksum(self) -> int:
        """What is stored with them, so that a damaged counter is found out."""
        return zlib.crc32(repr([getattr(self, name) for name in _BOOK_COLUMNS]).encode())


_PLACES = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
_BOOK_COLUMNS = tuple(Books.__dataclass_fields__)


class NewRow(NamedTuple):
    """A batch on its way into ``pending``; the order of the columns."""

    id: int
    conversation: str
    items: int
    size: int
    body: bytes


def checksum(row: NewRow | Row, stored_at: int) -> int:
    """What is stored with a batch: over its bytes, and over what says where they go."""
    whose = f"{row.id} {row.conversation} {row.items} {row.size} {stored_at}"
    return zlib.crc32(row.body, zlib.crc32(whose.encode()))


@dataclass(slots=True, eq=False, repr=False)
class Row:
    """A pending batch: the very bytes to send, and where it lives."""

    spool: Spool = field(repr=False)
    id: int
    conversation: str
    items: int
    size: int
    stored_at: int
    body: bytes = field(repr=False)


class Place(NamedTuple):
    """Where a pending batch is: the file, None in memory, and its number there; and how large it is."""

    path: Path | None
    id: int
    items: int
    size: int
    stored_at: int


class LaneFacts(NamedTuple):
    """What a spool knows of a conversation on the server.

    ``next_seq``: where its next item should land; None if nothing was ever sent. ``anchor``: the key of the item before
    that, where it is known. ``shared``: somebody else appends, too. ``echoes``: requests that were sent again, whose
    first sending may yet arrive, as the keys of their items by batch.
    """

    next_seq: int | None = None
    anchor: bytes | None = None
    sealed: bool = False
    shared: bool = False
    echoes: tuple[list[list[bytes]], ...] = ()


class Spool:
    """An open, locked spool file. Every method is called in the thread that opened it.

    Writing methods expect to be inside :meth:`begin` … :meth:`commit`; the caller groups them.
    """

    def __init__(self, path: Path | None, lock: system.KernelLock | None, db: sqlite3.Connection) -> None:
        self.path = path
        self.name = ""
        self.books = Books()
        self._books_before = Books()
        self.opened_at = 1  # the id of the first batch that was not there when it was opened
        self.was_clean = True  # the last owner closed it
        self._lock = lock
        self._db = db
        # Processes may be short, so the first acknowledgement in each trims.
        self._acknowledged_since_trim = self._acknowledged_since_sweep = ACKNOWLEDGED_KEPT
        self._wal_blocked_at = 0

    # --- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path | None, lock: system.KernelLock | None) -> Spool:
        """Open or create the file at ``path`` under ``lock``; None is a spool in memory.

        Raises BufferUnusableError, with the file untouched, if it is not a spool, damaged (then it is a DamagedError),
        or from a newer version.
        """
        spool = cls(path, lock, connect(path))
        try:
            spool._load()
        except BaseException as error:
            spool._db.close()
            if isinstance(error, sqlite3.Error):
                kind = BufferUnusableError if is_passing(error) else DamagedError
                raise kind(str(path), f"{error}; the file was left as it is") from error
            raise
        spool.opened_at = spool.books.next_id
        return spool

    def reopen(self) -> None:
        """Go on with the file that stands in the place of the old one now; ids given out already stay given out."""
        next_id = max(self.books.next_id, self._books_before.next_id)
        self._db = connect(self.path)
        self._load()
        self.books.next_id = self._books_before.next_id = max(next_id, self.books.next_id)

    def _load(self) -> None:
        self.name = self.noted("name")
        if not isinstance(self.name, str):
            raise DamagedError(str(self.path), "it has no name")
        # A new file has no mark yet, and one that was cut off has the mark of its opening.
        self.was_clean = self.noted("clean") in (None, 1)
        trusted = self._read_books()
        if not trusted:
            self.recount(trusted=False)
        self._books_before = replace(self.books)
        try:
            self.begin()
            self.note("clean", 0)
            self.commit()
        except sqlite3.Error as error:
            # A full disk: the next opening may skip a check that it needs. Not to open would be worse.
            self.rollback()
            if not is_passing(error):
                raise

    def examine(self, seconds: float) -> int:
        """After an unclean stop: hold the file against itself, and the books against the rows; how many items are lost.

        Raises DamagedError if the structure is damaged. Looks at what can be looked at in about ``seconds``: every
        batch is checked once more when it is read.
        """
        if self.path is None:
            return 0
        deadline = time.monotonic() + seconds
        self._db.set_progress_handler(lambda: time.monotonic() > deadline, 100_000)
        try:
            if self.path.stat().st_size <= _CHECKED_BYTES_MAX:
                found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise DamagedError(str(self.path), str(found))
            before = replace(self.books)
            self.begin()
            lost = self.recount(trusted=True)
            if self.books == before:
                self.rollback()
            else:
                self.commit()
        except sqlite3.OperationalError as error:
            self.rollback()
            if error_name(error) == "SQLITE_INTERRUPT":
                return 0
            raise
        else:
            return lost
        finally:
            self._db.set_progress_handler(None, 0)

    def recount(self, *, trusted: bool) -> int:
        """Count the rows again; ``trusted``: the counters of what has no rows any more can be believed."""
        query = "SELECT count(*), coalesce(sum(items), 0), coalesce(max(id), 0), coalesce(sum(size), 0) FROM "
        pending = self._db.execute(query + "pending").fetchone()
        refused = self._db.execute(query + "refused").fetchone()
        books = self.books = replace(self.books) if trusted else Books()
        books.pending_batches, books.pending_items, _, books.pending_bytes = pending
        books.refused_batches, books.refused_items = refused[:2]
        past = self._db.execute(
            "SELECT count(*), coalesce(sum(last_seq + 1 - first_seq), 0), coalesce(max(id), 0) FROM acknowledged"
        ).fetchone()
        if not trusted:
            books.acknowledged_batches, books.acknowledged_items = past[:2]
        books.next_id = max(books.next_id, pending[2] + 1, refused[2] + 1, past[2] + 1)
        return books.close()

    def close(self) -> None:
        """Close the file and give up its lock. What is pending stays pending."""
        with contextlib.suppress(sqlite3.Error):
            self.rollback()
            self.begin()
            self.note("clean", 1)
            self.commit()
        self.let_go()
        if self._lock is not None:
            self._lock.release()

    def let_go(self) -> None:
        """Close the file as it is, under its lock."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def discard(self) -> None:
        """Remove the file and all that belongs to it, and give up its lock. Its books must be kept elsewhere before."""
        assert self.path is not None
        self.let_go()
        remove(self.path)
        if self._lock is not None:
            # Under the lock, so that whoever waits for it sees that the file it has locked is gone.
            self._lock.path.unlink(missing_ok=True)
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
            columns = ", ".join(f"{name} = ?" for name in (*_BOOK_COLUMNS, "crc"))
            values = [*(getattr(self.books, name) for name in _BOOK_COLUMNS), self.books.checksum()]
            self._db.execute(f"UPDATE books SET {columns}", values)  # noqa: S608 - column names of our own
            self._db.execute("COMMIT")
            self._books_before = replace(self.books)

    def rollback(self) -> None:
        """Undo everything since :meth:`begin`."""
        # Not read again: a disk that failed a commit may fail that, too, and the books would be wrong from then on.
        self.books = replace(self._books_before)
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def tidy(self) -> bool:
        """Give space back to the file system, a few MiB at a time, for idle moments; whether there is more to give."""
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        # executescript steps the pragma to its end; execute() would free a single page.
        self._db.executescript(f"PRAGMA incremental_vacuum({_TIDY_PAGES});")
        self.checkpoint()
        return free > _TIDY_PAGES

    def checkpoint(self) -> None:
        """Bring the WAL into the file and cut it to nothing, unless somebody reads from it just now."""
        # Without waiting: a reader from outside must not hold up who wants to store.
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._db.execute("PRAGMA busy_timeout = 5000")

    def limit_wal(self) -> None:
        """:meth:`checkpoint` if the WAL has grown past its limit; a reader in the way is given a few MiB more.

        Also if the disk is nearly full: bringing the WAL into the file takes room, which there is only as yet.
        """
        if self.path is None:
            return
        try:
            size = wal_of(self.path).stat().st_size
        except FileNotFoundError:
            return
        available = system.available_bytes(self.path.parent)
        scarce = available is not None and size > 0 and available < size + _SCARCE_BYTES
        if scarce or size > max(WAL_BYTES_MAX, self._wal_blocked_at + WAL_BYTES_MAX // 4):
            self.checkpoint()
            size = wal_of(self.path).stat().st_size
            self._wal_blocked_at = size if size > WAL_BYTES_MAX else 0

    def _read_books(self) -> bool:
        """Read the counters; whether they can be believed."""
        found = peek_books(self._db)
        if found is not None:
            self.books = found
        return found is not None

    @property
    def holds_something(self) -> bool:
        """Whether there is something to send, or a dead letter to decide about."""
        return self.books.holds_something

    # --- writing, inside a transaction -----------------------------------------------------------------------------

    def store(self, rows: Sequence[NewRow]) -> None:
        """Add batches to ``pending``."""
        now = time.time_ns() // 1000
        self._db.executemany(
            "INSERT INTO pending (id, conversation, items, size, crc, stored_at, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*row[:4], checksum(row, now), now, row.body) for row in rows],
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
        self._acknowledged_since_sweep += len(rows)
        if self._acknowledged_since_trim > ACKNOWLEDGED_KEPT // 10:
            self._acknowledged_since_trim = 0
            self._forget_ranges()
        if self._acknowledged_since_sweep > ACKNOWLEDGED_KEPT:  # looks at every lane, which takes some milliseconds
            self._acknowledged_since_sweep = 0
            self._forget_lanes()

    def _forget_ranges(self) -> None:
        # By their turn and not by id: one that waited for long has a low id, and somebody who waits for it.
        old = "FROM acknowledged WHERE turn <= (SELECT max(turn) FROM acknowledged) - ?"
        query = f"SELECT count(*), coalesce(sum(last_seq + 1 - first_seq), 0) {old}"
        found: tuple[int, int] = self._db.execute(query, (ACKNOWLEDGED_KEPT,)).fetchone()
        self._db.execute(f"DELETE {old}", (ACKNOWLEDGED_KEPT,))
        books = self.books
        # A salvage may bring ranges back that had been forgotten already.
        batches, items = min(found[0], books.acknowledged_batches), min(found[1], books.acknowledged_items)
        books.acknowledged_batches -= batches
        books.acknowledged_items -= items
        books.forgotten_batches += batches
        books.forgotten_items += items

    def _forget_lanes(self) -> None:
        """Forget conversations of which nothing else is here any more: the next batch looks for their end anew."""
        self._db.execute(f"DELETE FROM lane WHERE {_IDLE} AND NOT sealed AND NOT shared")  # noqa: S608 - our own words
        # Of what is left it would have to be found out again: by a refusal that it is full, perhaps too late that it is
        # shared.
        if self._db.execute("SELECT count(*) FROM lane").fetchone()[0] > LANES_KEPT:
            rest = f"SELECT conversation FROM lane WHERE {_IDLE} ORDER BY shared DESC LIMIT -1 OFFSET ?"  # noqa: S608
            self._db.execute(f"DELETE FROM lane WHERE conversation IN ({rest})", (LANES_KEPT,))  # noqa: S608

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
                    checksum(row, row.stored_at),
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
            "DELETE FROM refused WHERE id = ? RETURNING id, conversation, items, size, body, stored_at, crc", (row_id,)
        ).fetchone()
        if found is None:
            return None
        row = NewRow(*found[:5])
        _check(self.path, row, *found[5:])
        self.books.refused_batches -= 1
        self.books.refused_items -= row.items
        return row

    def requeue(self, row: NewRow, new_id: int) -> None:
        """Put what :meth:`take_refused` returned back into ``pending`` as ``new_id``, behind what waits there."""
        self.store([row._replace(id=new_id)])
        self.books.stored_batches -= 1  # it had been stored before
        self.books.stored_items -= row.items
        self.note(f"{_MOVED}{row.id:020}", new_id)  # for whoever still has the old receipt
        old = "SELECT key FROM meta WHERE key LIKE ? ORDER BY key DESC LIMIT -1 OFFSET ?"
        self._db.execute(f"DELETE FROM meta WHERE key IN ({old})", (f"{_MOVED}%", MOVED_KEPT))  # noqa: S608 - our own words

    def drop(self, row: NewRow) -> None:
        """Count what :meth:`take_refused` returned as thrown away by the user."""
        self.books.dropped_batches += 1
        self.books.dropped_items += row.items

    def note_lane(self, conversation: str, *, sealed: bool | None = None, shared: bool | None = None) -> None:
        """Remember what is known of the conversation on the server; None leaves a fact as it is."""
        self._db.execute(
            "INSERT INTO lane (conversation, sealed, shared) VALUES (:id, coalesce(:sealed, 0), coalesce(:shared, 0))"
            " ON CONFLICT (conversation) DO UPDATE SET sealed = coalesce(:sealed, sealed),"
            " shared = coalesce(:shared, shared)",
            {"id": conversation, "sealed": sealed, "shared": shared},
        )

    def note_end(self, conversation: str, next_seq: int, anchor: bytes | None) -> None:
        """Remember where the conversation's next item should land, and the key of the item before that."""
        self._db.execute(
            "INSERT INTO lane (conversation, next_seq, anchor) VALUES (?, ?, ?) ON CONFLICT (conversation)"
            " DO UPDATE SET next_seq = excluded.next_seq, anchor = excluded.anchor",
            (conversation, next_seq, anchor),
        )

    def note_echo(self, conversation: str, keys: list[list[bytes]]) -> None:
        """Remember a request that is about to be sent again, once however often: the latest few of a conversation."""
        text = json.dumps([[key.hex() for key in batch] for batch in keys])
        self._db.execute("DELETE FROM echo WHERE conversation = ? AND keys = ?", (conversation, text))
        self._db.execute("INSERT INTO echo VALUES (?, ?, ?)", (conversation, time.time_ns() // 1000, text))
        self._db.execute(
            "DELETE FROM echo WHERE conversation = ? AND rowid NOT IN"
            " (SELECT rowid FROM echo WHERE conversation = ? ORDER BY rowid DESC LIMIT ?)",
            (conversation, conversation, ECHOES_KEPT),
        )

    def forget_echoes(self, before: int, conversation: str | None = None) -> None:
        """Forget the requests sent again before this time (microseconds since 1970), of one conversation or of all."""
        query = "DELETE FROM echo WHERE sent_at < ? AND conversation = coalesce(?, conversation)"
        self._db.execute(query, (before, conversation))

    def note_duplicate(self, conversation: str, first_seq: int, last_seq: int) -> None:
        """Remember that this range of the log holds a second copy."""
        self._db.execute("INSERT OR IGNORE INTO duplicate VALUES (?, ?, ?)", (conversation, first_seq, last_seq))
        query = "DELETE FROM duplicate WHERE rowid <= (SELECT max(rowid) FROM duplicate) - ?"
        self._db.execute(query, (DUPLICATES_KEPT,))

    def note(self, key: str, value: float | str | None) -> None:
        """Keep a single value over restarts; None removes it."""
        if value is None:
            self._db.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, value))

    def note_intent(self, intent_id: str) -> bool:
        """Remember that a command from outside is carried out; whether that is news."""
        added: bool = self._db.execute("INSERT OR IGNORE INTO intent (id) VALUES (?)", (intent_id,)).rowcount == 1
        query = "DELETE FROM intent WHERE turn <= (SELECT max(turn) FROM intent) - ?"
        self._db.execute(query, (INTENTS_KEPT,))
        return added

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
        return _lane(self._db, conversation)

    def lanes_with_echoes(self) -> list[str]:
        """The conversations of :meth:`note_echo`."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT conversation FROM echo")]

    def pending(self, conversation: str) -> Iterator[Row]:
        """The conversation's batches in order, read as they are consumed. Bytes that changed on disk raise."""
        cursor = self._db.execute(
            "SELECT id, items, size, body, stored_at, crc FROM pending WHERE conversation = ? ORDER BY id",
            (conversation,),
        )
        for row_id, items, size, body, stored_at, crc in cursor:
            _check(self.path, NewRow(row_id, conversation, items, size, body), stored_at, crc)
            yield Row(self, row_id, conversation, items, size, stored_at, body)

    def places(self, conversation: str) -> list[Place]:
        """The conversation's batches in order, without their bytes."""
        return _places(self._db, self.path, conversation)

    def bodies(self, ids: Sequence[int]) -> list[bytes | tuple[int, int] | None]:
        """The bytes of each batch while it is pending, then its acknowledged range; None if it is neither."""
        return _bodies(self._db, self.path, ids)

    def first_pending_id(self) -> int | None:
        """The oldest pending batch's id."""
        found: tuple[int | None] = self._db.execute("SELECT min(id) FROM pending").fetchone()
        return found[0]

    def oldest_pending(self) -> int | None:
        """When the oldest pending batch was stored, in microseconds since 1970."""
        found: tuple[int] | None = self._db.execute("SELECT stored_at FROM pending ORDER BY id LIMIT 1").fetchone()
        return found and found[0]

    def is_pending(self, row_id: int) -> bool:
        """Whether the batch still waits to be sent."""
        return self._db.execute("SELECT 1 FROM pending WHERE id = ?", (row_id,)).fetchone() is not None

    def outcome(self, row_id: int) -> tuple[int, int] | dict[str, Any] | None:
        """The acknowledged range of a batch, or the record of the error that refused it, or None: neither is known."""
        return _outcome(self._db, row_id)

    def requeued_as(self, row_id: int) -> int | None:
        """The number under which a dead letter of this number goes on, if it was requeued."""
        found: int | None = self.noted(f"{_MOVED}{row_id:020}")
        return found

    def duplicates(self) -> list[tuple[str, int, int]]:
        """The ranges of :meth:`note_duplicate`."""
        return self._db.execute("SELECT * FROM duplicate ORDER BY conversation, first_seq").fetchall()

    def refused_ids(self, conversation: str | None = None) -> list[int]:
        """The numbers of the dead letters, in order; of one conversation, or of all."""
        query = "SELECT id FROM refused WHERE ? IS NULL OR conversation = ? ORDER BY id"
        return [row[0] for row in self._db.execute(query, (conversation, conversation))]

    def refused(self) -> Iterator[tuple[int, str, int, int, int, dict[str, Any], bytes]]:
        """The dead letters: id, conversation, items, size, refused_at (microseconds), error record, body."""
        query = "SELECT id, conversation, items, size, body, stored_at, crc, refused_at, error FROM refused ORDER BY id"
        for *columns, stored_at, crc, refused_at, error in self._db.execute(query):
            row = NewRow(*columns)
            _check(self.path, row, stored_at, crc)
            yield *row[:4], refused_at, json.loads(error), row.body


def count_pending(path: Path) -> int:
    """How many items wait in the spool file at ``path``, read without taking part in it; 0 if it cannot be read."""
    found = peek(path)
    return 0 if found is None else found.pending_items


def peek(path: Path) -> Books | None:
    """The counters of the spool file at ``path``, read without taking part in it; None if they cannot be read."""
    with contextlib.suppress(sqlite3.Error), read_only(path) as db:
        return peek_books(db)
    return None


def peek_outcome(path: Path, name: str, row_id: int) -> tuple[int, int] | dict[str, Any] | None:
    """:meth:`Spool.outcome` from outside; None also if the file at ``path`` is not the spool of that name."""
    with contextlib.suppress(sqlite3.Error), read_only(path) as db:
        if db.execute("SELECT 1 FROM meta WHERE key = 'name' AND value = ?", (name,)).fetchone() is not None:
            return _outcome(db, row_id)
    return None


def peek_lane(path: Path, conversation: str) -> tuple[LaneFacts, list[Place]] | None:
    """:meth:`Spool.lane` and :meth:`Spool.places` at one moment, from outside; None if the file is no readable spool.

    BufferUnusableError: it cannot be read just now.
    """

    def look(db: sqlite3.Connection) -> tuple[LaneFacts, list[Place]]:
        db.execute("BEGIN")
        return _lane(db, conversation), _places(db, path, conversation)

    return _look_into(path, look)


def peek_bodies(path: Path, ids: Sequence[int]) -> list[bytes | tuple[int, int] | None]:
    """:meth:`Spool.bodies` from outside; None also where the file is no readable spool. Raises as :func:`peek_lane`."""
    return _look_into(path, lambda db: _bodies(db, path, ids)) or [None] * len(ids)


def _look_into(path: Path, look: Callable[[sqlite3.Connection], T]) -> T | None:
    try:
        with read_only(path) as db:
            return look(db)
    except (OSError, ValueError, sqlite3.Error, DamagedError) as error:
        # What is damaged, gone or none of ours is its owner's matter, or nobody's. Trouble that passes is told.
        if isinstance(error, sqlite3.Error) and is_passing(error) and path.is_file() and os.access(path, os.R_OK):
            raise BufferUnusableError(str(path), str(error)) from error
        return None


def _check(path: Path | None, row: NewRow, stored_at: int, crc: int) -> None:
    if not isinstance(row.body, bytes) or checksum(row, stored_at) != crc:
        raise DamagedError(str(path), f"batch {row.id} of conversation {row.conversation} is damaged")


def _lane(db: sqlite3.Connection, conversation: str) -> LaneFacts:
    query = "SELECT next_seq, anchor, sealed, shared FROM lane WHERE conversation = ?"
    found = db.execute(query, (conversation,)).fetchone()
    if found is None:
        return LaneFacts()
    rows = db.execute("SELECT keys FROM echo WHERE conversation = ? ORDER BY rowid", (conversation,))
    echoes = tuple([[bytes.fromhex(key) for key in batch] for batch in json.loads(row[0])] for row in rows)
    return LaneFacts(found[0], found[1], bool(found[2]), bool(found[3]), echoes)


def _places(db: sqlite3.Connection, path: Path | None, conversation: str) -> list[Place]:
    query = "SELECT id, items, size, stored_at FROM pending WHERE conversation = ? ORDER BY id"
    return [Place(path, *row) for row in db.execute(query, (conversation,))]


def _bodies(db: sqlite3.Connection, path: Path | None, ids: Sequence[int]) -> list[bytes | tuple[int, int] | None]:
    found: list[bytes | tuple[int, int] | None] = []
    query = "SELECT id, conversation, items, size, body, stored_at, crc FROM pending WHERE id = ?"
    for row_id in ids:
        columns = db.execute(query, (row_id,)).fetchone()
        if columns is None:
            outcome = _outcome(db, row_id)
            found.append(outcome if isinstance(outcome, tuple) else None)
            continue
        row = NewRow(*columns[:5])
        _check(path, row, *columns[5:])
        found.append(row.body)
    return found


def _outcome(db: sqlite3.Connection, row_id: int) -> tuple[int, int] | dict[str, Any] | None:
    found = db.execute("SELECT first_seq, last_seq FROM acknowledged WHERE id = ?", (row_id,)).fetchone()
    if found is not None:
        return (found[0], found[1])
    found = db.execute("SELECT error FROM refused WHERE id = ?", (row_id,)).fetchone()
    return None if found is None else json.loads(found[0])


def peek_books(db: sqlite3.Connection) -> Books | None:
    """The counters in the file behind ``db``; None if they are damaged."""
    row = db.execute(f"SELECT {', '.join(_BOOK_COLUMNS)}, crc FROM books").fetchone()  # noqa: S608 - column names of our own
    if row is None or not all(isinstance(value, int) for value in row[:-1]):
        return None
    books = Books(*row[:-1])
    return books if row[-1] == books.checksum() or (row[-1] is None and books == Books()) else None


def remove(path: Path) -> None:
    """Remove a spool file nobody uses, and all that belongs to it but its lock."""
    for file in (*companions(path), path.with_suffix(".reserve"), path):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a command nobody has read yet keeps its place
        inbox_of(path).rmdir()


def inbox_of(path: Path) -> Path:
    """Where commands for the owner of the spool file at ``path`` are put."""
    return path.with_suffix(".inbox")
