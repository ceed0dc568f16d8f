"""The directory of one site, and the spools in it that this process holds.

    buffer_dir/
      <host>-<port>-<digest>/    one site: endpoint and user decide, the password does not
        site.json                whose it is, for people
        ledger.json              the totals of spools that are gone (:mod:`memlog.ledger`)
        <time>-<random>.db       a spool; beside it
          .lock                    held by its owner
          .reserve                 room for a full disk (:mod:`memlog.reserve`)
          .inbox/                  commands from outside (:mod:`memlog.inbox`)
          .db.corrupt-<time>       what a damaged file of that name held (:mod:`memlog.salvage`)

One process holds one spool of its own (the oldest free one, so that a restart finds its file and its order again) and
adopts other free ones that still hold something, in place, until they are drained; it looks for them while it runs.
Rows never move between files. A spool that is drained, and nobody's own, is removed after an hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import logging
import os
import re
import secrets
import sqlite3
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from memlog import inbox, ledger, system
from memlog.errors import BufferUnusableError, ClosedError, MemlogError
from memlog.payload import pack
from memlog.reserve import Reserve
from memlog.salvage import finish, recover, salvage, unfinished
from memlog.schema import DamagedError, is_damage, is_passing
from memlog.spool import Books, LaneFacts, Place, Spool, count_pending, peek, peek_bodies, peek_lane, peek_outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from memlog.inbox import Applied, Intent
    from memlog.salvage import Salvage
    from memlog.spool import NewRow, Row

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


DRAINED_KEPT_SECONDS = 3600.0
"""How long a drained spool that is nobody's own stays, so that the outcome of its batches can be asked for."""

_EXAMINE_SECONDS = 5.0


class Adopted(NamedTuple):
    """A spool that another process left, with something in it, is held here now."""

    path: Path
    items: int
    conversations: frozenset[str]
    sealed: frozenset[str]


class Recounted(NamedTuple):
    """The books of a spool said that there was more than there is."""

    path: Path
    lost_items: int


class Waiting(NamedTuple):
    """What waits for a conversation, to somebody who has read its log up to a position.

    ``places``: in order; the first should land at ``start``, which is None if that cannot be told. ``echoes``: as in
    LaneFacts. ``beyond``: the ends that spools know of, by which the log is longer. ``length``: what it must have at
    least, by the most modest of the spools that are held here.
    """

    places: list[Place]
    start: int | None
    echoes: tuple[list[list[bytes]], ...]
    beyond: frozenset[tuple[int, int]]
    length: int


Notice: TypeAlias = "Adopted | Recounted | Salvage | Applied"
"""What happened to the spools that nobody here asked for."""


def open_spools(directory: Path | None) -> Spools:
    """Take the spools that are free; a new one if none is. None is a buffer in memory.

    What takes time is left to :meth:`Spools.examine` and :meth:`Spools.scan`.
    """
    if directory is None:
        return Spools(Spool.open(None, None), [])
    with contextlib.ExitStack() as undo:  # what was taken is free again if the rest fails
        own: Spool | None = None
        adopted: list[Spool] = []
        left_alone: set[Path] = set()
        try:
            _finish_what_was_cut_off(directory)
            for path in sorted(directory.glob("*.db")):  # the name starts with the time of making
                if own is not None and (books := peek(path)) is not None and not books.holds_something:
                    continue
                spool = _take(path, left_alone)
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
        return Spools(own, adopted, left_alone)


def _take(path: Path, left_alone: set[Path]) -> Spool | None:
    try:
        lock = _lock_of(path)
    except OSError as error:
        place = path.with_suffix(".lock")
        if not isinstance(error, PermissionError) and (place.is_file() or not os.path.lexists(place)):
            raise  # no locks can be had here
        left_alone.add(path)
        _warn_left_alone(BufferUnusableError(str(path), f"its lock cannot be used: {error.strerror}"))
        return None
    if lock is None:
        return None  # its owner lives
    try:
        return _open(path, lock)
    except DamagedError:
        return None  # a matter for the scan
    except BufferUnusableError as error:
        if not path.is_dir() and not _may_pass(error, path):
            left_alone.add(path)
            _warn_left_alone(error)
        return None


def _warn_left_alone(error: BufferUnusableError) -> None:
    logger.warning("memlog: %s; it is left alone, and new items go to another file", error)


def _open(path: Path, lock: system.KernelLock | None) -> Spool:
    try:
        try:
            return Spool.open(path, lock)
        except BufferUnusableError as error:
            # Even opening takes a few bytes, and a full disk has several names for that.
            cause = error.__cause__
            passing = isinstance(cause, sqlite3.Error) and is_passing(cause)
            if not passing or not Reserve(path.with_suffix(".reserve")).drop():
                raise
            return Spool.open(path, lock)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


class Spools:
    """The spools this process holds: its own, where new batches go, and adopted ones. Used in the writer thread.

    ``unstored`` is what was accepted and the disk does not take for now; empty whenever the disk is well.
    """

    def __init__(self, own: Spool, adopted: list[Spool], left_alone: Iterable[Path] = ()) -> None:
        self.own = own
        self.adopted = adopted
        self.unstored: list[NewRow] = []
        self.directory = own.path.parent if own.path is not None else None
        self.reserve = Reserve(own.path.with_suffix(".reserve")) if own.path is not None else None
        self._left_alone = set(left_alone)
        self._put_off: set[Path] = set()  # told of, and tried again with each scan
        self._ailing: dict[str, str] = {}  # the spools that need a fresh file, by name, and why
        self._released: dict[str, tuple[Path, Books]] = {}
        self._released_duplicates: list[tuple[str, int, int]] = []

    def __iter__(self) -> Iterator[Spool]:
        yield self.own
        yield from self.adopted

    @property
    def books(self) -> Books:
        """The counters over all of them, those given back included."""
        return sum((spool.books for spool in self), sum((books for _, books in self._released.values()), Books()))

    def close(self) -> None:
        """Give them all up."""
        for spool in self:
            spool.close()

    def release_drained(self) -> None:
        """Let other processes have the adopted spools that hold nothing to send, or to decide about, any more."""
        for spool in self.adopted[:]:
            if not spool.holds_something:
                assert spool.path is not None
                self.adopted.remove(spool)
                self._released[spool.name] = (spool.path, spool.books)
                self._released_duplicates += spool.duplicates()
                spool.close()

    # --- what others left, and damage ---------------------------------------------------------------------------------

    def scan(self) -> list[Notice]:
        """Look for spools that nobody holds (any more): adopt what has something in it, save what is damaged.

        Bounded work per spool that lives; a drained one that is old enough is removed.
        """
        if self.directory is None:
            return []
        _finish_what_was_cut_off(self.directory)
        _give_files_to_logs_without(self.directory)
        news: list[Notice] = []
        for path in self._of_others():
            if path in self._left_alone:
                continue
            try:
                news += self._consider(path)
            except (OSError, sqlite3.Error, BufferUnusableError) as error:
                # Its own trouble, and no reason to leave the others where they are. The next scan tries again.
                if path not in self._put_off:
                    self._put_off.add(path)
                    logger.warning("memlog: %s cannot be taken over just now, and is tried again: %s", path, error)
        # What is removed, here or by a neighbour, is in the ledger, and counts there.
        self._released = {name: given for name, given in self._released.items() if given[0].exists()}
        return news

    def _consider(self, path: Path) -> list[Notice]:
        if _is_empty(path) and not _is_old(path):
            return []  # without its lock, even for a moment: whoever starts just now may want the file
        lock = _lock_of(path)
        if lock is None:
            return []  # its owner lives
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            if not path.exists():
                lock.path.unlink(missing_ok=True)
                return []
            if _is_empty(path):
                self._remove_if_old(path, lock)
                return []
            news: list[Notice] = []
            try:
                spool = Spool.open(path, lock)
            except DamagedError as error:
                news.append(salvage(path, error.reason))
                spool = Spool.open(path, lock)
            except BufferUnusableError as error:
                if not path.is_dir():
                    if _may_pass(error, path):
                        raise
                    self._left_alone.add(path)
                    _warn_left_alone(error)
                    return []
                news.append(salvage(path, "there is a directory in its place"))
                spool = Spool.open(path, lock)
            undo.pop_all()
        self.adopted.append(spool)
        self._put_off.discard(path)
        self._released.pop(spool.name, None)  # it was held here before, and counts once
        with contextlib.suppress(OSError, sqlite3.Error, BufferUnusableError):  # healing is tried again
            news += self.examine(spool)
        news.append(_adoption_of(spool))
        return news

    def _remove_if_old(self, path: Path, lock: system.KernelLock) -> None:
        with contextlib.suppress(OSError, sqlite3.Error, BufferUnusableError):
            if not _is_old(path):
                return
            spool = Spool.open(path, lock)
            assert self.directory is not None
            entered = spool.books == Books() or ledger.enter(self.directory, spool.name, path.name, spool.books)
            if entered and not spool.holds_something:
                spool.discard()
            else:
                spool.close()

    def examine(self, spool: Spool) -> list[Notice]:
        """After an unclean stop, hold the file against itself, and give it a fresh one if it is damaged."""
        if spool.was_clean or spool.path is None:
            return []
        try:
            lost = spool.examine(_EXAMINE_SECONDS)
        except (sqlite3.Error, DamagedError) as error:
            if not is_damage(error):
                return []  # the disk: what is damaged is found out when it is read
            self.suspect(spool, str(error))
            return self.heal()
        return [Recounted(spool.path, lost)] if lost else []

    def suspect(self, spool: Spool, reason: str) -> None:
        """Note that the file of ``spool`` is damaged; :meth:`heal` gives it a fresh one."""
        self._ailing[spool.name] = reason

    def heal(self) -> list[Notice]:
        """Give every spool that was found damaged a fresh file. OSError or sqlite3.Error if the disk refuses: again."""
        news: list[Notice] = []
        for name, reason in list(self._ailing.items()):
            spool = self.named(name)
            if spool is not None:
                news.append(recover(spool, reason))
            del self._ailing[name]
        return news

    def find_damage(self, error: BaseException) -> bool:
        """Whether some held spool is damaged, which would explain ``error``; it is noted for :meth:`heal`."""
        for spool in self:
            if spool.path is None:
                continue
            if isinstance(error, DamagedError) and error.path == str(spool.path):
                self.suspect(spool, error.reason)
                continue
            try:
                spool.rollback()
                spool.examine(_EXAMINE_SECONDS)
            except (sqlite3.Error, DamagedError) as found:
                if is_damage(found):
                    self.suspect(spool, str(found))
        if not self._ailing and is_damage(error) and not self.adopted and self.own.path is not None:
            self.suspect(self.own, str(error))
        return bool(self._ailing)

    # --- commands from outside ---------------------------------------------------------------------------------------

    def intents(self) -> list[tuple[Spool, Path, Intent]]:
        """The commands that wait for the owner of the held spools."""
        return [
            (spool, file, intent)
            for spool in self
            if spool.path is not None
            for file, intent in inbox.collect(spool.path)
        ]

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

    def waiting(self, conversation: str, position: int) -> Waiting:
        """What waits for the conversation, in the spools of processes that live beside this one, too.

        For somebody who has read the log up to ``position``. What is accepted and not yet on disk is only this
        process's. A file that cannot be read, since it is damaged or none of ours, is passed over.
        """
        held = [(spool.lane(conversation), spool.places(conversation)) for spool in self]
        others = list(self._beside(conversation))
        # Merged and not sorted: a clock that was set back must not change the order within a spool.
        places = list(heapq.merge(*(places for _, places in held + others), key=lambda place: place.stored_at))
        start, echoes = _start_of([held, *([other] for other in others)], places[0].path if places else None)
        unstored = [
            Place(self.own.path, row.id, row.items, row.size, 0)
            for row in self.unstored
            if row.conversation == conversation
        ]
        ends = [facts.next_seq or 0 for facts, _ in held + others]
        beyond = frozenset((number, end) for number, end in enumerate(ends) if end > position)
        length = min((end for end in ends[: len(held)] if end), default=0)
        return Waiting(places + unstored, start, echoes, beyond, length)

    def bodies(self, places: Iterable[Place]) -> list[bytes | tuple[int, int] | None]:
        """What became of these batches of :meth:`waiting`: still pending, acknowledged there, or gone."""
        held = {spool.path: spool for spool in self}
        unstored = {row.id: row.body for row in self.unstored}
        found: list[bytes | tuple[int, int] | None] = []
        for path, group in itertools.groupby(places, key=lambda place: place.path):
            ids = [place.id for place in group]
            spool = held.get(path)
            if spool is None:
                assert path is not None
                found += peek_bodies(path, ids)
            else:
                bodies = spool.bodies(ids)
                own = unstored if spool is self.own else {}
                found += [own.get(row_id) if body is None else body for row_id, body in zip(ids, bodies, strict=True)]
        return found

    def is_used_elsewhere(self, conversation: str, end: int) -> bool:
        """Whether another process has something for the conversation, or has sent what stands behind ``end``."""
        return any(places or (facts.next_seq or 0) > end for facts, places in self._beside(conversation))

    def _beside(self, conversation: str) -> Iterator[tuple[LaneFacts, list[Place]]]:
        """What the spools of other processes, as far as they can be read, hold and know of the conversation."""
        for path in self._of_others():
            if (found := peek_lane(path, conversation)) is not None:
                yield found

    def _of_others(self) -> list[Path]:
        """The files in the directory that this process does not hold."""
        if self.directory is None:
            return []
        held = {spool.path for spool in self}
        return sorted(path for path in self.directory.glob("*.db") if path not in held)

    def oldest_pending(self) -> int | None:
        """When the oldest pending batch was stored, in microseconds since 1970."""
        return min((when for spool in self if (when := spool.oldest_pending()) is not None), default=None)

    def marks(self) -> dict[str, int]:
        """Where each spool ends now, for :meth:`drained_to`."""
        marks = {spool.name: spool.books.next_id for spool in self}
        marks[self.own.name] = max([marks[self.own.name], *(row.id + 1 for row in self.unstored)])
        return marks

    def drained_to(self, marks: dict[str, int]) -> bool:
        """Whether nothing is pending that was there when ``marks`` were taken."""
        for spool in self:
            first = spool.first_pending_id()
            if first is not None and first < marks.get(spool.name, 0):
                return False
        mark = marks.get(self.own.name, 0)
        return not any(row.id < mark for row in self.unstored)

    def outcome(self, spool_name: str, row_id: int) -> tuple[int, int] | dict[str, Any] | int | None:
        """The acknowledged range of a batch, or the record of the error that refused it; None while it is pending.

        A number, if it was refused and then requeued: it goes on under that one.
        ClosedError if its spool is not held here (any more), MemlogError if it was settled too long ago to be known.
        """
        spool = self.named(spool_name)
        if spool is None:
            # Another process's: what it has settled can be read all the same.
            files = self.directory.glob("*.db") if self.directory is not None else ()
            found = next((found for path in files if (found := peek_outcome(path, spool_name, row_id))), None)
            if found is None:
                raise ClosedError("the batch is in another process's buffer, or its buffer was drained and removed")
            return found
        if spool is self.own and any(row.id == row_id for row in self.unstored):
            return None
        found = spool.outcome(row_id)
        if found is not None or spool.is_pending(row_id):
            return found
        moved = spool.requeued_as(row_id)
        if moved is not None:
            return moved
        if row_id >= spool.books.next_id or row_id < 1:
            raise MemlogError(f"nothing was ever stored as number {row_id} of spool {spool_name}")
        raise MemlogError("the outcome of this batch is no longer kept: it was settled long ago, or dropped")


def _start_of(
    groups: list[list[tuple[LaneFacts, list[Place]]]], first: Path | None
) -> tuple[int | None, tuple[list[list[bytes]], ...]]:
    """Where the first of what waits should land, and what may come before it; None if nobody can tell.

    ``groups`` are the spools of each process, and ``first`` that of the first batch. It can be told only where one
    process alone has something to send, and no other is known to have sent something since.
    """
    senders = [group for group in groups if any(places for _, places in group)]
    if len(senders) != 1:
        return None, ()
    (sender,) = senders
    ends = [facts.next_seq for facts, _ in sender if facts.next_seq is not None]
    sent = any(facts.next_seq is not None for facts, places in sender if places and places[0].path == first)
    if not sent or any(facts.shared for facts, _ in sender):
        return None, ()
    start = max(ends)
    if any((facts.next_seq or 0) > start for group in groups if group is not sender for facts, _ in group):
        return None, ()
    return start, tuple(echo for facts, _ in sender for echo in facts.echoes)


def _is_empty(path: Path) -> bool:
    books = peek(path)
    return books is not None and not books.holds_something and not any(inbox.collect(path))


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime >= DRAINED_KEPT_SECONDS
    return False


def _may_pass(error: BufferUnusableError, path: Path) -> bool:
    """Whether it was the disk that refused, which may get over it."""
    cause = error.__cause__
    return isinstance(cause, sqlite3.Error) and is_passing(cause) and path.is_file()


def _give_files_to_logs_without(directory: Path) -> None:
    """A write-ahead log whose file is gone may hold batches: an empty file in its place is salvaged with it."""
    for wal in directory.glob("*.db-wal"):
        path = wal.with_name(wal.name.removesuffix("-wal"))
        if path.exists() or not wal.is_file() or (lock := _lock_of(path)) is None:
            continue
        try:
            if not path.exists() and wal.exists():
                system.make_private_file(path)
        finally:
            lock.release()


def _finish_what_was_cut_off(directory: Path) -> None:
    for path in unfinished(directory):
        lock = _lock_of(path)
        if lock is not None:
            try:
                finish(path)
            finally:
                lock.release()


def _adoption_of(spool: Spool) -> Adopted:
    assert spool.path is not None
    logger.info("memlog: adopted %s with %d item(s) to send", spool.path, spool.books.pending_items)
    waiting = frozenset(spool.lanes(inherited=True))
    return Adopted(spool.path, spool.books.pending_items, waiting, frozenset(spool.sealed_lanes()))
