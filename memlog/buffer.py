"""The buffer: takes batches at once, and has them on this machine's disk milliseconds later.

:meth:`Buffer.put` checks the limits, hands the batch to the *writer* thread over a queue and returns. The writer drains
what has queued up, commits it once (group commit) and then completes the receipts. Everything that reads or writes a
spool goes through that thread as a command, in order: no lock is ever held over a disk operation, and no second
connection exists.

Which files those are is decided in :mod:`memlog.directory`. This module knows no event loop and no network.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from memlog import system
from memlog.directory import open_spools
from memlog.errors import BufferFullError, BufferUnusableError, ClosedError
from memlog.spool import Books, NewRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memlog.directory import Spools
    from memlog.payload import Batch

logger = logging.getLogger("memlog")

T = TypeVar("T")

_GROUP_ENTRIES_MAX = 512
_GROUP_BYTES_MAX = 4 * 1024 * 1024
_IDLE_SECONDS = 1.0
_RETRY_SECONDS = (0.05, 2.0)
_FORK_WAIT_SECONDS = 5.0

_PASSING_ERRORS = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_NOMEM")
"""The disk is in trouble and may get out of it; anything else is damage or a bug, and waiting does not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """What the buffer may hold; beyond it ``append`` raises BufferFullError and nothing is dropped.

    ``unstored_bytes``: accepted and not yet on disk, which only a stalled disk lets grow (default 64 MiB).
    ``disk_bytes``: pending on disk, which an outage of the server lets grow (default 4 GiB). Both count payload bytes.
    A buffer in memory holds ``unstored_bytes`` in all.
    """

    unstored_bytes: int = 64 * 1024 * 1024
    disk_bytes: int = 4 * 1024 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("unstored_bytes", "disk_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                msg = f"BufferLimits.{name} must be a number of bytes above 0, got {value!r}"
                raise ValueError(msg)


_registering = threading.Lock()  # between those who wait for one receipt


class Accepted:
    """One append on its way to the disk: one or more batches of a conversation, committed together.

    Completed by the writer thread, waited for from any thread or loop. Completing takes no lock: whoever waits adds
    itself and then looks again, whoever completes sets the state and then notifies.
    """

    __slots__ = ("__weakref__", "_notify", "_stored", "batches", "conversation_id", "count", "first_id", "spool_name")

    def __init__(self, conversation_id: str, batches: list[Batch]) -> None:
        self.conversation_id = conversation_id
        self.batches: list[Batch] | None = batches  # until stored
        self.count = len(batches)
        self.first_id = 0
        self.spool_name = ""
        self._stored: BaseException | bool = False
        self._notify: list[Callable[[], object]] | None = None

    def is_stored(self) -> bool:
        """Whether it is on disk; raises the error that prevents it for good."""
        if isinstance(self._stored, BaseException):
            raise self._stored
        return self._stored

    def when_stored(self, notify: Callable[[], object]) -> None:
        """Call ``notify``, from any thread, once :meth:`is_stored` has an answer."""
        with _registering:
            self._notify = [*(self._notify or ()), notify]
        if self._stored is not False:
            notify()

    def complete(self, error: BaseException | None = None) -> None:
        """Called by the writer, once."""
        self.batches = None
        self._stored = error or True
        for notify in self._notify or ():
            notify()


class Listener(Protocol):
    """Whom the buffer tells. Called in the writer thread: return at once."""

    def stored(self, conversations: set[str]) -> None:
        """These conversations have something new to send."""

    def disk_trouble(self, reason: str | None) -> None:
        """The disk stopped taking commits, or (None) takes them again. Once per change."""


class _Command:
    __slots__ = ("function", "future", "writes")

    def __init__(self, function: Callable[[Spools], Any], *, writes: bool) -> None:
        self.function = function
        self.writes = writes
        self.future: Future[Any] = Future()

    def is_wanted(self) -> bool:
        """Whether nobody cancelled it; from here on nobody can."""
        return self.future.set_running_or_notify_cancel()

    def __call__(self, spools: Spools) -> None:
        try:
            result = self.function(spools)
        except sqlite3.Error as error:
            self.future.set_exception(BufferUnusableError(str(spools.own.path), str(error)))
        except BaseException as error:  # noqa: BLE001 - handed to whoever asked
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Buffer:
    """The spools of one site in one directory, and the thread that owns them.

    ``directory`` is the site's own (see :mod:`memlog.directory`), or None for a buffer in memory. Nothing is opened
    before :meth:`start`. After a fork the child starts anew, with a spool and a thread of its own.
    """

    def __init__(self, directory: Path | None, limits: BufferLimits, listener: Listener) -> None:
        self.directory = directory
        self._limits = limits
        self._pending_max = limits.unstored_bytes if directory is None else limits.disk_bytes
        self._listener = listener
        self._closed = False
        self._full: str | None = None
        self._reset()
        _alive.add(self)
        _hook_forks()

    def _reset(self) -> None:
        # Reentrant: append must work in a signal handler or a __del__ that interrupts another append.
        self._lock = threading.RLock()
        self._writer: _Writer | None = None
        self._next_id = 0
        self._accepted_bytes = 0

    def start(self) -> None:
        """Open the spools and start the writer; BufferUnusableError if that cannot be. Does nothing if it runs."""
        with self._lock:
            if self._closed:
                raise ClosedError("the log is closed")
            if self._writer is None:
                writer = _Writer(self.directory, self._listener)
                self._next_id = writer.spools.own.books.next_id
                self._accepted_bytes = 0
                self._writer = writer

    def _running(self) -> _Writer:
        if self._writer is None or self._closed:
            self.start()
        assert self._writer is not None
        return self._writer

    def put(self, accepted: Accepted, size: int) -> None:
        """Take ``accepted`` (``size`` payload bytes in all) and return at once; it is wholly in, or this raises.

        BufferFullError: nothing was taken. ClosedError: likewise. BufferUnusableError: the disk failed for good.
        """
        with self._lock:
            writer = self._running()
            if writer.broken is not None:
                raise writer.broken
            unstored = self._accepted_bytes - writer.committed_bytes
            if unstored + size > self._limits.unstored_bytes:
                raise self._refusal("unstored", unstored, self._limits.unstored_bytes)
            on_disk = writer.books.pending_bytes + unstored
            if on_disk + size > self._pending_max:
                raise self._refusal("disk" if self.directory else "memory", on_disk, self._pending_max)
            self._full = None
            accepted.spool_name = writer.spools.own.name
            # In one statement: a signal handler that appends, too, gets ids of its own.
            accepted.first_id, self._next_id = self._next_id, self._next_id + accepted.count
            self._accepted_bytes += size
            writer.queue.put(accepted)

    def _refusal(self, what: Any, held: int, limit: int) -> BufferFullError:
        error = BufferFullError(what, held, limit)
        if self._full != what:
            self._full = what
            logger.warning("memlog: %s (%s)", error, self.directory or ":memory:")
        return error

    def allocate_id(self) -> int:
        """An id for a batch that goes into the own spool on another way than :meth:`put`."""
        with self._lock:
            self._next_id += 1
            return self._next_id - 1

    def run(self, function: Callable[[Spools], T], *, writes: bool = False) -> Future[T]:
        """Run ``function`` in the writer thread, after all that was put before.

        With ``writes`` it runs inside a transaction per spool that it begins, and the future completes after the
        commit; it may then run more than once, each time from the same state. Without, it must only read.
        """
        with self._lock:
            writer = self._running()
            command = _Command(function, writes=writes)
            if writer.broken is not None:
                command.future.set_exception(writer.broken)
            else:
                writer.queue.put(command)
            return command.future

    @property
    def books(self) -> Books:
        """The counters as of the last commit."""
        writer = self._writer
        return writer.books if writer is not None else Books()

    @property
    def unstored_bytes(self) -> int:
        """Payload bytes accepted and not yet on disk."""
        writer = self._writer
        return max(0, self._accepted_bytes - writer.committed_bytes) if writer is not None else 0

    @property
    def spool_path(self) -> Path | None:
        """The own spool's file; None in memory, or before the start."""
        return self._writer.spools.own.path if self._writer is not None else None

    def close(self, timeout: float) -> bool:
        """Store what was accepted, give up the spools, end the thread; whether that was done in ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            writer = self._writer
        return writer is None or writer.stop(timeout)

    # --- forks: the child must not touch what it inherited ----------------------------------------------------------

    def _before_fork(self) -> bool:
        """Whether the writer is at rest now; it is not if its disk is stuck, and the fork goes on all the same."""
        self._lock.acquire()
        return self._writer is not None and self._writer.at_rest.acquire(timeout=_FORK_WAIT_SECONDS)

    def _after_fork_in_parent(self, at_rest: bool) -> None:
        if at_rest and self._writer is not None:
            self._writer.at_rest.release()
        self._lock.release()

    def _after_fork_in_child(self) -> None:
        if self._writer is not None:
            # Closing an inherited connection would take the parent's locks and files with it.
            system.park(self._writer, *[spool.abandon() for spool in self._writer.spools])
        self._reset()


class _Writer:
    """The thread that owns the spools, and its loop."""

    def __init__(self, directory: Path | None, listener: Listener) -> None:
        self.queue: queue.SimpleQueue[Accepted | _Command | None] = queue.SimpleQueue()
        self.at_rest = threading.Lock()  # held while a transaction is open
        self.committed_bytes = 0
        self.broken: BufferUnusableError | None = None
        self._listener = listener
        self._deadline: float | None = None
        self._stopping = threading.Event()
        opened: Future[Spools] = Future()
        self.thread = threading.Thread(target=self._live, args=(directory, opened), name="memlog-writer", daemon=True)
        self.thread.start()
        self.spools = opened.result()
        self.books = self.spools.books

    def stop(self, timeout: float) -> bool:
        self._deadline = time.monotonic() + timeout
        self.queue.put(None)
        self._stopping.set()
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def _live(self, directory: Path | None, opened: Future[Spools]) -> None:
        try:
            self.spools = open_spools(directory)
            self.books = self.spools.books
        except BaseException as error:  # noqa: BLE001 - raised where start() was called
            opened.set_exception(error)
            return
        opened.set_result(self.spools)
        running, tidy = True, True
        while running:
            try:
                entry = self.queue.get(timeout=None if tidy else _IDLE_SECONDS)
            except queue.Empty:
                tidy = True
                self._tidy()
                continue
            group, running = self._drain(entry)
            tidy = False
            try:
                self._write(group)
            except Exception as error:
                logger.exception("memlog: a defect in the buffer")
                # Only those that nobody has told yet: what is on disk stays stored.
                waiting = [entry for entry in group if isinstance(entry, Accepted) and entry.batches is not None]
                self._break(error, waiting, [e for e in group if isinstance(e, _Command) and not e.future.done()])
        with contextlib.suppress(sqlite3.Error):
            for spool in self.spools:
                spool.close()

    def _drain(self, entry: Accepted | _Command | None) -> tuple[list[Accepted | _Command], bool]:
        group: list[Accepted | _Command] = []
        size = 0
        while entry is not None:
            group.append(entry)
            if isinstance(entry, Accepted):
                size += _size_of(entry)
            if len(group) >= _GROUP_ENTRIES_MAX or size >= _GROUP_BYTES_MAX:
                return group, True
            try:
                entry = self.queue.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _write(self, group: list[Accepted | _Command]) -> None:
        """Commit the group, however long the disk is in trouble, and complete what was asked."""
        accepted = [entry for entry in group if isinstance(entry, Accepted)]
        wanted = [entry for entry in group if isinstance(entry, _Command) and entry.is_wanted()]
        commands = [command for command in wanted if command.writes]
        rows = [row for entry in accepted for row in _rows_of(entry)]
        delay = _RETRY_SECONDS[0]
        in_trouble = False
        while rows or commands:
            try:
                with self.at_rest:
                    done = self._transact(rows, commands)
            except sqlite3.Error as error:
                with contextlib.suppress(sqlite3.Error):
                    for spool in self.spools:
                        spool.rollback()
                name = getattr(error, "sqlite_errorname", "")
                if not name.startswith(_PASSING_ERRORS) or self._given_up():
                    self._break(error, accepted, commands)
                    break
                if not in_trouble:
                    in_trouble = True
                    self._tell(self._listener.disk_trouble, f"{error} ({name})")
                if self._stopping.wait(delay):
                    time.sleep(_RETRY_SECONDS[0])
                delay = min(delay * 2, _RETRY_SECONDS[1])
            else:
                self.books = self.spools.books
                self.committed_bytes += sum(row.size for row in rows)
                for command, result in done:
                    command.future.set_result(result)
                for entry in accepted:
                    entry.complete()
                if rows:
                    self._tell(self._listener.stored, {row.conversation for row in rows})
                break
        if in_trouble and self.broken is None:
            self._tell(self._listener.disk_trouble, None)
        self.spools.release_drained()
        for command in wanted:
            if not command.writes:
                command(self.spools)

    def _transact(self, rows: list[NewRow], commands: list[_Command]) -> list[tuple[_Command, Any]]:
        """One transaction a spool. A command that raises is taken out of ``commands``, and the rest runs again."""
        if rows:
            self.spools.own.begin()
            self.spools.own.store(rows)
        done = []
        for command in commands:
            try:
                done.append((command, command.function(self.spools)))
            except sqlite3.Error:
                raise
            except Exception as error:  # noqa: BLE001 - handed to whoever asked
                for spool in self.spools:
                    spool.rollback()
                commands.remove(command)
                command.future.set_exception(error)
                return self._transact(rows, commands)
        # The own spool last: if another one's commit fails, all of this runs again, and the new rows must not be there
        # yet. Commands find their work done the second time.
        for spool in [*self.spools.adopted, self.spools.own]:
            spool.commit()
        return done

    def _tell(self, listener: Callable[[T], None], what: T) -> None:
        try:
            listener(what)
        except Exception:  # no thread to be had, no descriptor left: that is no reason to stop storing
            logger.exception("memlog: the buffer could not tell what happened")

    def _given_up(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _break(self, error: Exception, accepted: list[Accepted], commands: list[_Command]) -> None:
        self.broken = BufferUnusableError(str(self.spools.own.path), str(error))
        logger.error("memlog: %s; what was not stored yet is lost with this process", self.broken)
        for entry in accepted:
            entry.complete(self.broken)
        for command in commands:
            command.future.set_exception(self.broken)

    def _tidy(self) -> None:
        # It is only housekeeping: what fails is tried again in the next idle moment.
        with contextlib.suppress(sqlite3.Error), self.at_rest:
            for spool in self.spools:
                spool.tidy()


def _size_of(entry: Accepted) -> int:
    return sum(batch.size for batch in entry.batches or ())


def _rows_of(entry: Accepted) -> Iterator[NewRow]:
    for number, batch in enumerate(entry.batches or ()):
        yield NewRow(entry.first_id + number, entry.conversation_id, batch.items, batch.size, batch.body)


_alive: weakref.WeakSet[Buffer] = weakref.WeakSet()
_hooked = False


def _hook_forks() -> None:
    global _hooked  # noqa: PLW0603 - the hooks cannot be taken back, so they are set once, and not by an import
    if _hooked:
        return
    _hooked = True
    held = threading.local()  # several threads may fork at once; each runs its three hooks itself

    def before() -> None:
        # In one order: two threads that fork at once would wait for each other otherwise.
        buffers = sorted(_alive, key=id)
        held.buffers = [(buffer, buffer._before_fork()) for buffer in buffers]  # noqa: SLF001 - the buffer's own hooks

    def in_parent() -> None:
        for buffer, at_rest in held.__dict__.pop("buffers", ()):
            buffer._after_fork_in_parent(at_rest)  # noqa: SLF001

    def in_child() -> None:
        for buffer, _ in held.__dict__.pop("buffers", ()):
            buffer._after_fork_in_child()  # noqa: SLF001

    system.at_fork(before=before, in_parent=in_parent, in_child=in_child)
