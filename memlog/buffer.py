"""The buffer: takes batches at once, and has them on this machine's disk milliseconds later.

:meth:`Buffer.put` checks the limits, hands the batch to the *writer* thread (:mod:`memlog.writer`) over a queue and
returns. Everything else that concerns a spool is a command for that thread: see :meth:`Buffer.run`. Forks are dealt
with here: a child starts anew, with a spool and a thread of its own.

This module knows no event loop and no network.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from memlog import system
from memlog.errors import BufferFullError, BufferUnusableError, ClosedError
from memlog.spool import Books
from memlog.writer import Accepted, Command, Listener, Writer, after_fork_in_child, store_in_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from memlog.directory import Spools

__all__ = ["Accepted", "Buffer", "BufferLimits", "Listener"]

logger = logging.getLogger("memlog")

T = TypeVar("T")

_FORK_WAIT_SECONDS = 5.0


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
        self._in_line = False
        self._said = False
        self._full: str | None = None
        self._reset()
        _alive.add(self)
        _hook_forks()

    def _reset(self) -> None:
        # Reentrant: append must work in a signal handler or a __del__ that interrupts another append.
        self._lock = threading.RLock()
        self._writer: Writer | None = None
        self._next_id = 0
        self._accepted_bytes = 0
        self._putting = False
        self._behind: deque[Accepted] = deque()

    def start(self) -> None:
        """Open the spools and start the writer; BufferUnusableError if that cannot be. Does nothing if it runs.

        NoThreadError if there is no thread to be had; :meth:`put` works all the same, unless the buffer is in memory.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the log is closed")
            if self._writer is None:
                writer = Writer(self.directory, self._listener, self.allocate_id)
                self._next_id = writer.spools.own.books.next_id
                self._accepted_bytes = 0
                self._writer = writer

    def _running(self) -> Writer:
        if self._writer is None or self._closed:
            self.start()
        assert self._writer is not None
        return self._writer

    def put(self, accepted: Accepted, size: int) -> None:
        """Take ``accepted`` (``size`` payload bytes in all) and return at once; it is wholly in, or this raises.

        BufferFullError: nothing was taken. ClosedError: likewise. BufferUnusableError: the disk failed for good.
        """
        with self._lock:
            try:
                writer = None if self._in_line else self._running()
            except system.NoThreadError:
                writer = None
            if writer is None:
                self._put_in_line(accepted, size)
                return
            if writer.broken is not None:
                raise writer.broken
            if writer.full:
                raise self._refusal("device", self.unstored_bytes + writer.books.pending_bytes, 0)
            unstored = self._accepted_bytes - writer.committed_bytes
            if unstored + size > self._limits.unstored_bytes:
                raise self._refusal("unstored", unstored, self._limits.unstored_bytes)
            on_disk = writer.books.pending_bytes + unstored
            if on_disk + size > self._pending_max:
                raise self._refusal("disk" if self.directory else "memory", on_disk, self._pending_max)
            self._full = None
            accepted.spool_name = writer.spools.own.name
            self._accepted_bytes += size
            if self._putting:
                # A signal handler or a __del__ interrupts another append that has its number, but not its place yet.
                accepted.first_id, self._next_id = self._next_id, self._next_id + accepted.count
                self._behind.append(accepted)
                return
            self._let_behind_in(writer)
            try:
                # In one statement, which nothing interrupts: whoever comes in between gets a later number and place.
                accepted.first_id, self._next_id, self._putting = self._next_id, self._next_id + accepted.count, True
                writer.queue.put(accepted)
            finally:
                self._let_behind_in(writer)

    def _put_in_line(self, accepted: Accepted, size: int) -> None:
        """No thread to be had, or the interpreter ends and the writer has: on disk when this returns."""
        if self.directory is None:
            raise BufferUnusableError(":memory:", "the process ends, or has no thread to give")
        if self._writer is not None and not self._writer.ended.done():
            raise BufferUnusableError(str(self.directory), "the process ends, and its disk does not answer")

        def check(books: Books) -> None:
            if books.pending_bytes + size > self._pending_max:
                raise self._refusal("disk", books.pending_bytes, self._pending_max)

        store_in_line(self.directory, accepted, check)
        if not self._said:
            self._said = True
            text = "memlog: no thread is there to send: unsent items are kept in %s; opening the log again sends them"
            logger.warning(text, self.directory)

    def _let_behind_in(self, writer: Writer) -> None:
        while True:
            while self._behind:
                writer.queue.put(self._behind.popleft())
            self._putting = False
            if not self._behind:  # again: the interruption may have come just before
                return

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

    def run(self, function: Callable[[Spools], T], *, writes: bool = False, after_puts: bool = False) -> Future[T]:
        """Run ``function`` in the writer thread, after all that was put before.

        What was put is stored then, or is in ``Spools.unstored`` while the disk does not take it; with ``after_puts``
        that is waited for.

        With ``writes`` it runs inside a transaction per spool that it begins, and the future completes after the
        commit; it may then run more than once, each time from the same state. Without, it must only read.
        """
        with self._lock:
            writer = self._running()
            command = Command(function, writes=writes, after_puts=after_puts)
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
    def earlier(self) -> Books:
        """The counters of the site's spools that are gone, whoever held them, as of the last look round."""
        writer = self._writer
        return writer.earlier if writer is not None else Books()

    @property
    def unstored_bytes(self) -> int:
        """Payload bytes accepted and not yet on disk."""
        writer = self._writer
        return max(0, self._accepted_bytes - writer.committed_bytes) if writer is not None else 0

    @property
    def sealed(self) -> frozenset[str]:
        """The conversations that were known to be full when the buffer was opened."""
        return self._writer.sealed if self._writer is not None else frozenset()

    @property
    def oldest_pending(self) -> int | None:
        """When the oldest pending batch was stored, in microseconds since 1970, as of the last commit."""
        return self._writer.oldest if self._writer is not None else None

    @property
    def spools_held(self) -> int:
        """How many spool files this process holds."""
        writer = self._writer
        return writer.held if writer is not None and not writer.ended.done() else 0

    @property
    def spool_path(self) -> Path | None:
        """The own spool's file; None in memory, or before the start."""
        return self._writer.spools.own.path if self._writer is not None else None

    def stop(self, timeout: float) -> Future[None]:
        """Store what was accepted within ``timeout`` seconds, give up the spools, end the thread; done when it has."""
        with self._lock:
            self._closed = True
            writer = self._writer
        if writer is not None:
            return writer.stop(timeout)
        nothing: Future[None] = concurrent.futures.Future()
        nothing.set_result(None)
        return nothing

    def close(self, timeout: float) -> bool:
        """:meth:`stop`, and whether that was done in ``timeout`` seconds."""
        return bool(concurrent.futures.wait([self.stop(timeout)], timeout).done)

    def end(self, timeout: float) -> bool:
        """:meth:`close` because the interpreter ends: what is put from now on is stored in the calling thread."""
        self._in_line = True
        return self.close(timeout)

    # --- forks: the child must not touch what it inherited ----------------------------------------------------------

    def _before_fork(self) -> bool:
        """Whether the writer is at rest now; it is not if its disk is stuck, and the fork goes on all the same."""
        self._lock.acquire()
        try:
            return self._writer is not None and self._writer.at_rest.acquire(timeout=_FORK_WAIT_SECONDS)
        except BaseException:
            self._lock.release()
            raise

    def _after_fork_in_parent(self, at_rest: bool) -> None:
        if at_rest and self._writer is not None:
            self._writer.at_rest.release()
        self._lock.release()

    def _after_fork_in_child(self) -> None:
        if self._writer is not None:
            # Closing an inherited connection would take the parent's locks and files with it.
            system.park(self._writer, *[spool.abandon() for spool in self._writer.spools])
        self._reset()


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
        held.buffers = []
        for buffer in sorted(_alive, key=id):
            held.buffers.append((buffer, buffer._before_fork()))  # noqa: SLF001 - the buffer's own hooks

    def in_parent() -> None:
        for buffer, at_rest in held.__dict__.pop("buffers", ()):
            buffer._after_fork_in_parent(at_rest)  # noqa: SLF001

    def in_child() -> None:
        after_fork_in_child()
        held.__dict__.clear()
        for buffer in list(_alive):
            buffer._after_fork_in_child()  # noqa: SLF001

    system.at_fork(before=before, in_parent=in_parent, in_child=in_child)
