"""The directory of one site, and the spools in it that this process holds.

    buffer_dir/
      <host>-<port>-<digest>/    one site: endpoint and user decide, the password does not
        site.json                whose it is, for people
        <time>-<random>.db       a spool; beside it its lock

One process holds one spool of its own (the oldest free one, so that a restart finds its file and its order again) and
adopts other free ones that still hold something, in place, until they are drained. Rows never move between files.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memlog import system
from memlog.errors import BufferUnusableError, ClosedError, MemlogError
from memlog.payload import pack
from memlog.spool import Books, Spool, count_pending

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memlog.spool import Row

logger = logging.getLogger("memlog")


def site_directory(buffer_dir: Path, url: str, user: str | None) -> Path:
    """The folder below ``buffer_dir`` for one site: endpoint and user decide, the password does not."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    host = parts.hostname or ""
    identity = json.dumps([parts.scheme, host, port, parts.path.rstrip("/"), user])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", host)[:40]
    return buffer_dir / f"{readable}-{port}-{digest}"


def prepare_directory(buffer_dir: Path, site: Path, url: str, user: str | None) -> None:
    """Make ``site`` usable, note in it whose it is, and warn once about what the operator should know.

    BufferUnusableError if it cannot be written.
    """
    try:
        system.make_private_directory(buffer_dir)
        system.make_private_directory(site)
        reason = system.why_not_writable(site)
    except (FileExistsError, NotADirectoryError):
        reason = "it is not a directory"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise BufferUnusableError(str(buffer_dir), reason)
    parts = urlsplit(url)
    label = {"url": parts._replace(query="", fragment="").geturl(), "user": user}
    note = site / "site.json"
    try:
        system.make_private_file(note)
        if not note.stat().st_size:
            note.write_text(json.dumps(label), "utf-8")
    except OSError as error:
        raise BufferUnusableError(str(note), error.strerror or str(error)) from error
    _warn_about_other_sites(buffer_dir, site)
    volatile = system.why_not_durable(buffer_dir)
    if volatile is not None:
        logger.warning("memlog: what is buffered in %s may not last: %s", buffer_dir, volatile)


def _warn_about_other_sites(buffer_dir: Path, site: Path) -> None:
    for note in sorted(buffer_dir.glob("*/site.json")):
        if note.parent == site:
            continue
        waiting = 0
        for path in note.parent.glob("*.db"):
            pending = count_pending(path)
            # Counted before it is asked who holds it: whoever starts there now must not find it taken for long.
            with contextlib.suppress(OSError):
                lock = _lock_of(path) if pending else None
                if lock is not None:  # free: nobody is sending it
                    lock.release()
                    waiting += pending
        if waiting:
            with contextlib.suppress(OSError, ValueError):
                label = json.loads(note.read_text("utf-8"))
                logger.warning(
                    "memlog: %d item(s) in %s wait for another site: to send them, open a log there with url=%r and the"
                    " credentials of user %r",
                    waiting,
                    buffer_dir,
                    label.get("url"),
                    label.get("user"),
                )


def _lock_of(path: Path) -> system.KernelLock | None:
    return system.try_lock(path.with_suffix(".lock"))


def open_spools(directory: Path | None) -> Spools:
    """Take the spools that are free; a new one if none is. None is a buffer in memory."""
    if directory is None:
        return Spools(Spool.open(None, None), [])
    with contextlib.ExitStack() as undo:  # what was taken is free again if the rest fails
        own: Spool | None = None
        adopted: list[Spool] = []
        try:
            for path in sorted(directory.glob("*.db")):  # the name starts with the time of making
                spool = _take(path)
                if spool is None:
                    continue
                if own is not None and not spool.holds_something:
                    spool.close()
                    continue
                undo.callback(spool.close)
                if own is None:
                    own = spool
                else:
                    adopted.append(spool)
                    logger.info("memlog: adopted %s with %d item(s) to send", path, spool.books.pending_items)
            if own is None:
                path = directory / f"{time.time_ns() // 1000:016x}-{secrets.token_hex(4)}.db"
                own = _open(path, _lock_of(path))
        except OSError as error:
            raise BufferUnusableError(str(directory), error.strerror or str(error)) from error
        undo.pop_all()
        return Spools(own, adopted)


def _take(path: Path) -> Spool | None:
    lock = _lock_of(path)
    if lock is None:
        return None  # its owner lives
    try:
        return _open(path, lock)
    except BufferUnusableError as error:
        logger.warning("memlog: %s; it is left alone, and new items go to another file", error)
        return None


def _open(path: Path, lock: system.KernelLock | None) -> Spool:
    try:
        return Spool.open(path, lock)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


class Spools:
    """The spools this process holds: its own, where new batches go, and adopted ones. Used in the writer thread."""

    def __init__(self, own: Spool, adopted: list[Spool]) -> None:
        self.own = own
        self.adopted = adopted
        self._released = Books()
        self._released_duplicates: list[tuple[str, int, int]] = []

    def __iter__(self) -> Iterator[Spool]:
        yield self.own
        yield from self.adopted

    @property
    def books(self) -> Books:
        """The counters over all of them, those given back included."""
        return sum((spool.books for spool in self), self._released)

    def release_drained(self) -> None:
        """Let other processes have the adopted spools that hold nothing to send, or to decide about, any more."""
        for spool in self.adopted[:]:
            if not spool.holds_something:
                self.adopted.remove(spool)
                self._released += spool.books
                self._released_duplicates += spool.duplicates()
                spool.close()

    def duplicates(self) -> list[tuple[str, int, int]]:
        """The ranges that are second copies, those found by spools given back included."""
        return sorted({*self._released_duplicates, *(found for spool in self for found in spool.duplicates())})

    # --- all of them as one ------------------------------------------------------------------------------------------

    def named(self, name: str) -> Spool | None:
        """The held spool of that name."""
        return next((spool for spool in self if spool.name == name), None)

    def next_request(self, conversation: str, *, batches_max: int, items_max: int, bytes_max: int) -> list[Row]:
        """The batches of one conversation that go into its next request: whole, in order, as many as fit.

        Several spools are merged by the time of storing; order within a spool is always kept. A request never mixes
        spools, so that one transaction acknowledges it.
        """
        heads = [(next(rows, None), rows) for rows in (spool.pending(conversation) for spool in self)]
        waiting = [(head, rows) for head, rows in heads if head is not None]
        if not waiting:
            return []
        first, rest = min(waiting, key=lambda pair: pair[0].stored_at)
        border = min((head.stored_at for head, rows in waiting if rows is not rest), default=None)
        chosen = [first]
        size = first.size
        for row in rest:
            size += row.size
            if len(chosen) >= batches_max or size > bytes_max or (border is not None and row.stored_at > border):
                break
            chosen.append(row)
        return chosen[: pack([(row.items, row.size) for row in chosen], items_max=items_max, bytes_max=bytes_max)]

    def sealed(self) -> set[str]:
        """The conversations known to be full."""
        return {conversation for spool in self for conversation in spool.sealed_lanes()}

    def next_seq(self, conversation: str) -> int | None:
        """Where the conversation's next item should land, by the latest news; None if nothing was ever sent."""
        known = [seq for spool in self if (seq := spool.lane(conversation).next_seq) is not None]
        return max(known, default=None)

    def waiting(self, conversation: str, position: int) -> tuple[int | None, list[bytes]] | None:
        """:meth:`next_seq`, and the bodies of all that waits for the conversation, in order.

        None if something is known to be acknowledged at or behind ``position``: who read so far has not read it all.
        """
        if any(spool.acknowledged_past(conversation, position) for spool in self):
            return None
        # Merged and not sorted: a clock that was set back must not change the order within a spool.
        rows = heapq.merge(*(spool.pending(conversation) for spool in self), key=lambda row: row.stored_at)
        return self.next_seq(conversation), [row.body for row in rows]

    def marks(self) -> dict[str, int]:
        """Where each spool ends now, for :meth:`drained_to`."""
        return {spool.name: spool.books.next_id for spool in self}

    def drained_to(self, marks: dict[str, int]) -> bool:
        """Whether nothing is pending that was there when ``marks`` were taken."""
        for spool in self:
            first = spool.first_pending_id()
            if first is not None and first < marks.get(spool.name, 0):
                return False
        return True

    def outcome(self, spool_name: str, row_id: int) -> tuple[int, int] | dict[str, Any] | None:
        """The acknowledged range of a batch, or the record of the error that refused it; None while it is pending.

        ClosedError if its spool is not held here (any more), MemlogError if it was settled too long ago to be known.
        """
        spool = self.named(spool_name)
        if spool is None:
            raise ClosedError("the batch is in another process's buffer, or its buffer was drained and given back")
        found = spool.outcome(row_id)
        if found is None and not spool.is_pending(row_id):
            raise MemlogError(
                "the outcome of this batch is no longer kept: it was settled long ago, requeued, or dropped"
            )
        return found
