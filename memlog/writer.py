"""The writer: the thread that owns the spools of one directory, and does everything that touches them.

It drains what has queued up, commits it once (group commit), and then completes the receipts. Commands run in the same
thread, in order, so that no lock is ever held over a disk operation, and no second connection exists.

While the disk is in trouble, what was accepted waits in ``Spools.unstored`` and is tried again, seldom; reading goes
on. On a full disk acknowledgements go first: they get the room of the reserve, and make more. A damaged file is
replaced by what can be read of it (:mod:`memlog.salvage`), and the rest goes on.

When nothing else is to do, it gives space back, looks for spools that others have left, and carries out commands from
outside. This module knows no event loop and no network.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from memlog import inbox
from memlog.directory import open_spools
from memlog.errors import BufferUnusableError, ClosedError
from memlog.schema import DamagedError, error_name, is_damage, is_passing
from memlog.spool import Books, NewRow
from memlog.stamps import new_writer, stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from memlog.directory import Notice, Spools
    from memlog.payload import Batch

logger = logging.getLogger("memlog")

T = TypeVar("T")

_GROUP_ENTRIES_MAX = 512
_GROUP_BYTES_MAX = 4 * 1024 * 1024
_RETRY_SECONDS = (0.05, 2.0)
_IDLE_SECONDS = 1.0
_TIDY_SECONDS = 30.0  # without a quiet second, space is given back at this pace
SCAN_SECONDS = 5.0
_SCAN_SECONDS_MIN = 0.05  # however many conversations are new
_KNOWN_MAX = 10_000
_REPAIRS = (3, 60.0)  # so many in so many seconds: beyond, the disk is not to be written to

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


def renew_lock_in_child() -> None:
    """In a forked child: another thread of the parent may have held the lock between those who wait."""
    global _registering  # noqa: PLW0603 - locks belong to a process, and so does this
    _registering = threading.Lock()


class Listener(Protocol):
    """Whom the buffer tells. Called in the writer thread: return at once."""

    def stored(self, items: dict[str, int]) -> None:
        """These conversations have something new to send: so many items."""

    def disk_trouble(self, reason: str | None) -> None:
        """The disk stopped taking commits, or (None) takes them again. Once per change."""

    def noticed(self, notice: Notice) -> None:
        """Something happened to the spools that nobody here asked for."""


class Command:
    """A function to run in the writer thread, and its outcome."""

    __slots__ = ("after_puts", "function", "future", "writes")

    def __init__(self, function: Callable[[Spools], Any], *, writes: bool, after_puts: bool) -> None:
        self.function = function
        self.writes = writes
        self.after_puts = after_puts
        self.future: Future[Any] = Future()

    def is_wanted(self) -> bool:
        """Whether nobody cancelled it; from here on nobody can."""
        return self.future.set_running_or_notify_cancel()


class Writer:
    """The thread, and what others may look at while it runs: ``books``, ``oldest``, ``full`` and so on.

    ``allocate`` gives out the ids of the own spool, which are shared with whoever puts.
    """

    def __init__(self, directory: Path | None, listener: Listener, allocate: Callable[[], int]) -> None:
        self.queue: queue.SimpleQueue[Accepted | Command | None] = queue.SimpleQueue()
        self.at_rest = threading.Lock()  # held while a transaction is open
        self.committed_bytes = 0
        self.broken: BufferUnusableError | None = None
        self.full = False  # not even the reserve could be made again
        self.books = Books()
        self.oldest: int | None = None
        self.held = 1
        self.sealed: frozenset[str] = frozenset()  # when it was opened
        self._listener = listener
        self._allocate = allocate
        self._stamp = new_writer()
        self._accepted: list[tuple[Accepted, list[NewRow]]] = []  # not on disk yet
        self._commands: list[Command] = []  # not committed yet
        self._reads: list[Command] = []  # not done yet
        self._known: set[str] = set()
        self._repairs: list[float] = []
        self._trouble = False
        self._delay = _RETRY_SECONDS[0]
        self._retry_at = 0.0
        self._dirty = True
        self._tidy_at = self._tidied_at = time.monotonic()
        self._scan_at = 0.0
        self._scanned_at = 0.0
        self._deadline: float | None = None
        self._stopping = False
        opened: Future[Spools] = Future()
        self.thread = threading.Thread(target=self._live, args=(directory, opened), name="memlog-writer", daemon=True)
        self.thread.start()
        self.spools = opened.result()

    def stop(self, timeout: float) -> bool:
        """Store what was accepted, give everything up and end; whether that was done in ``timeout`` seconds."""
        self._deadline = time.monotonic() + timeout
        self.queue.put(None)
        self.thread.join(timeout)
        return not self.thread.is_alive()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _live(self, directory: Path | None, opened: Future[Spools]) -> None:
        try:
            self.spools = open_spools(directory)
            self.sealed = frozenset(self.spools.sealed())
            self._publish()
        except BaseException as error:  # noqa: BLE001 - raised where start() was called
            opened.set_exception(error)
            return
        opened.set_result(self.spools)
        self._look_after(self._settle_in)
        while not self._stopping or self._accepted or self._commands:
            group = self._drain()
            try:
                self._work(group)
            except Exception as error:
                self._undo()
                if not self._repair(error):
                    logger.exception("memlog: a defect in the buffer")
                    self._break(error, group)
        self._refuse(self._reads, ClosedError("the log is closed"))
        with contextlib.suppress(sqlite3.Error):
            self.spools.close()

    def _drain(self) -> list[Accepted | Command]:
        """What has queued up; empty if something else is due first."""
        group: list[Accepted | Command] = []
        size = 0
        try:
            entry = self.queue.get(timeout=self._patience())
            while len(group) < _GROUP_ENTRIES_MAX and size < _GROUP_BYTES_MAX:
                if entry is None:
                    self._stopping = True
                    self._retry_at = 0.0
                    break
                group.append(entry)
                if isinstance(entry, Accepted):
                    size += sum(batch.size for batch in entry.batches or ())
                if len(group) < _GROUP_ENTRIES_MAX and size < _GROUP_BYTES_MAX:
                    entry = self.queue.get_nowait()
        except queue.Empty:
            pass
        return group

    def _patience(self) -> float | None:
        due = []
        if self._accepted or self._commands or self.full:
            due.append(self._retry_at)
        if (house := self._house_at()) is not None:
            due.append(house)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _house_at(self) -> float | None:
        """When housekeeping is due; not while the disk is in trouble, and not at the end."""
        if self._stopping or self._trouble or self.broken is not None:
            return None
        due = [] if self.spools.directory is None else [self._scan_at]
        if self._dirty:
            due.append(min(self._tidy_at, self._tidied_at + _TIDY_SECONDS))
        return min(due, default=None)

    def _work(self, group: list[Accepted | Command]) -> None:
        if self.broken is not None:
            self._break(self.broken, group)
            return
        for entry in group:
            if isinstance(entry, Accepted):
                self._accepted.append((entry, list(self._rows_of(entry))))
            elif entry.is_wanted():
                (self._commands if entry.writes else self._reads).append(entry)
        if self._accepted or self._commands or self.full:
            # Acknowledgements make room: on a full disk they are tried at once, all else waits for its time.
            if time.monotonic() >= self._retry_at or (self.full and self._commands):
                self._commit()
            self.spools.unstored = [row for _, rows in self._accepted for row in rows]
        if self.spools.adopted:
            self._look_after(self.spools.release_drained)
        reads, self._reads = self._reads, []
        for command in reads:
            if command.after_puts and self._accepted:
                self._reads.append(command)
            else:
                self._read(command)
        if group:
            self._dirty = True
            self._tidy_at = time.monotonic() + _IDLE_SECONDS
        due = self._house_at()
        if due is not None and due <= time.monotonic():
            self._look_after(self._keep_house)

    def _rows_of(self, entry: Accepted) -> Iterable[NewRow]:
        for row_id, batch in enumerate(entry.batches or (), start=entry.first_id):
            body = batch.body if batch.parts is None else stamped(batch.parts, self._stamp, row_id)
            yield NewRow(row_id, entry.conversation_id, batch.items, batch.size, body)

    def _read(self, command: Command) -> None:
        for attempt in range(2):
            try:
                result = command.function(self.spools)
            except (sqlite3.Error, DamagedError) as error:
                if attempt == 0 and is_damage(error) and self._repair(error):
                    continue
                reason = error.reason if isinstance(error, DamagedError) else str(error)
                command.future.set_exception(BufferUnusableError(str(self.spools.own.path), reason))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                command.future.set_exception(error)
            else:
                command.future.set_result(result)
            return

    # --- committing --------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Commit all that waits, in groups; what the disk does not take keeps waiting."""
        while True:
            if self.full and self.spools.reserve is not None:
                self.full = not self.spools.reserve.make()
            group = [] if self.full else self._next_group()
            if not group and not self._commands:
                break
            rows = [row for _, rows in group for row in rows]
            try:
                with self.at_rest:
                    healed = self.spools.heal()
                    done = self._transact(rows, self._commands)
            except (sqlite3.Error, OSError, DamagedError) as error:
                self._undo()
                if not self._get_over(error):
                    return
                continue
            if len(group) == len(self._accepted):
                self._get_well()
            self._finish(group, done)
            self._notice(healed)
        if self._accepted or self.full:
            self._try_later()
        else:
            self._get_well()

    def _next_group(self) -> list[tuple[Accepted, list[NewRow]]]:
        group, size = [], 0
        for entry in self._accepted[:_GROUP_ENTRIES_MAX]:
            group.append(entry)
            size += sum(row.size for row in entry[1])
            if size >= _GROUP_BYTES_MAX:
                break
        return group

    def _transact(self, rows: list[NewRow], commands: list[Command]) -> list[tuple[Command, Any]]:
        """One transaction a spool. A command that raises is taken out of ``commands``, and the rest runs again."""
        if rows:
            self.spools.own.begin()
            self.spools.own.store(rows)
        done = []
        for command in commands:
            try:
                done.append((command, command.function(self.spools)))
            except (sqlite3.Error, DamagedError):
                raise
            except Exception as error:  # noqa: BLE001 - handed to whoever asked
                self._undo()
                commands.remove(command)
                command.future.set_exception(error)
                return self._transact(rows, commands)
        # The own spool last: if another one's commit fails, all of this runs again, and the new rows must not be there
        # yet. Commands find their work done the second time.
        for spool in [*self.spools.adopted, self.spools.own]:
            spool.commit()
        for spool in self.spools:
            with contextlib.suppress(sqlite3.Error, OSError):  # only housekeeping
                spool.limit_wal()
        return done

    def _undo(self) -> None:
        for spool in self.spools:
            with contextlib.suppress(sqlite3.Error):
                spool.rollback()

    def _finish(self, group: list[tuple[Accepted, list[NewRow]]], done: list[tuple[Command, Any]]) -> None:
        """Tell everybody that it is on disk."""
        self._publish()
        del self._accepted[: len(group)]
        self._commands.clear()
        self.committed_bytes += sum(row.size for _, rows in group for row in rows)
        for command, result in done:
            command.future.set_result(result)
        for accepted, _ in group:
            accepted.complete()
        if group:
            items: dict[str, int] = {}
            for accepted, rows in group:
                whose = accepted.conversation_id
                items[whose] = items.get(whose, 0) + sum(row.items for row in rows)
            self._look_before_first(set(items))
            self._tell(self._listener.stored, items)

    # --- a disk in trouble, and damage -------------------------------------------------------------------------------

    def _get_over(self, error: sqlite3.Error | OSError | DamagedError) -> bool:
        """Whether to try again at once; else it is tried later, or never again."""
        if isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and is_passing(error)):
            if error_name(error) == "SQLITE_FULL":
                self._make_room()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._break(error, [])
                return False
            if not self._trouble:
                self._trouble = True
                self._tell(self._listener.disk_trouble, f"{error} ({error_name(error) or type(error).__name__})")
            self._try_later()
            return False
        if self._repair(error):
            return True
        self._break(error, [])
        return False

    def _get_well(self) -> None:
        if self._trouble and not self.full:
            self._trouble = False
            self._delay = _RETRY_SECONDS[0]
            self._tell(self._listener.disk_trouble, None)

    def _try_later(self) -> None:
        delay = _RETRY_SECONDS[0] if self._stopping else self._delay
        self._retry_at = time.monotonic() + delay
        self._delay = min(self._delay * 2, _RETRY_SECONDS[1])

    def _make_room(self) -> None:
        """On a full disk: let acknowledgements have the room of the reserve, and find out whether they made some."""
        if self.spools.reserve is None:
            return
        dropped = self.spools.reserve.drop()
        if self._commands and dropped:
            try:
                with self.at_rest:
                    done = self._transact([], self._commands)
            except (sqlite3.Error, DamagedError):
                self._undo()
            else:
                self._finish([], done)
        with contextlib.suppress(sqlite3.Error), self.at_rest:
            for spool in self.spools:
                spool.tidy()
        self.full = not self.spools.reserve.make()

    def _repair(self, error: BaseException) -> bool:
        """Whether a file was found damaged and is replaced, so that what met ``error`` can be tried again."""
        now = time.monotonic()
        self._repairs = [when for when in self._repairs if now - when < _REPAIRS[1]]
        if len(self._repairs) >= _REPAIRS[0]:
            return False
        self._repairs.append(now)
        healed: list[Notice] = []
        with self.at_rest:
            found = self.spools.find_damage(error)
            # What the disk refuses now is tried again with the next commit.
            with contextlib.suppress(sqlite3.Error, OSError, BufferUnusableError):
                healed = self.spools.heal()
        self._publish()
        self._notice(healed)
        return found

    def _break(self, error: Exception, group: list[Accepted | Command]) -> None:
        """Give up for good: fail all that waits, and all that will come."""
        if self.broken is None:
            self.broken = BufferUnusableError(str(self.spools.own.path), str(error))
            logger.error("memlog: %s; what was not stored yet is lost with this process", self.broken)
        waiting = [entry for entry in group if isinstance(entry, Accepted)]
        # Only those that nobody has told yet: what is on disk stays stored.
        for accepted in [*(entry for entry, _ in self._accepted), *waiting]:
            if accepted.batches is not None:
                accepted.complete(self.broken)
        commands = [entry for entry in group if isinstance(entry, Command)]
        self._refuse([*self._commands, *self._reads, *commands], self.broken)
        self._accepted, self._commands, self._reads = [], [], []

    def _refuse(self, commands: Iterable[Command], error: Exception) -> None:
        for command in commands:
            if not command.future.done():
                command.future.set_exception(error)

    # --- looking after the spools -------------------------------------------------------------------------------------

    def _settle_in(self) -> None:
        """What need not hold up the opening."""
        with self.at_rest:
            news = [notice for spool in list(self.spools) for notice in self.spools.examine(spool)]
        self._notice(news)
        self._keep_house()

    def _keep_house(self) -> None:
        now = time.monotonic()
        if self.spools.directory is not None and now >= self._scan_at:
            self._scan()
            self._obey()
            if self.spools.reserve is not None:
                self.spools.reserve.make()
        if self._dirty and now >= min(self._tidy_at, self._tidied_at + _TIDY_SECONDS):
            self._tidied_at = now
            with self.at_rest:
                more = [spool.tidy() for spool in self.spools]
            self._dirty = any(more)

    def _look_before_first(self, conversations: set[str]) -> None:
        """A process that died may have left something of a conversation that is new here: it must go out first."""
        if conversations <= self._known:
            return
        if len(self._known) > _KNOWN_MAX:
            self._known.clear()
        self._known |= conversations
        if self.spools.directory is not None and time.monotonic() - self._scanned_at > _SCAN_SECONDS_MIN:
            self._look_after(self._scan)

    def _scan(self) -> None:
        self._scanned_at = time.monotonic()
        self._scan_at = self._scanned_at + SCAN_SECONDS
        with self.at_rest:
            news = self.spools.scan()
        self._notice(news)

    def _obey(self) -> None:
        """Carry out commands from outside."""
        for spool, file, intent in self.spools.intents():
            if spool is self.spools.own:
                # Asked for outside the transaction: whoever forks keeps others from numbers, and waits for its end.
                ids = iter([self._allocate() for _ in inbox.letters_of(spool, intent)])
            else:
                ids = iter(range(spool.books.next_id, spool.books.next_id + len(inbox.letters_of(spool, intent))))
            try:
                with self.at_rest:
                    spool.begin()
                    applied = inbox.apply(spool, intent, ids.__next__)
                    spool.commit()
            except BaseException:
                self._undo()
                raise
            file.unlink(missing_ok=True)
            logger.info("memlog: carried out a command from outside: %s", intent.do)
            self._notice([applied] if applied else [])

    def _look_after(self, duty: Callable[[], None]) -> None:
        try:
            duty()
        except (sqlite3.Error, OSError, BufferUnusableError) as error:
            # Only housekeeping, for which there is another time; if it is damage, then now.
            if is_damage(error):
                self._repair(error)
        except Exception:
            logger.exception("memlog: a defect in looking after the buffer")
            self._scan_at = time.monotonic() + 60.0
            self._dirty = False
        self._publish()

    # --- telling -----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self.books = self.spools.books
        self.held = 1 + len(self.spools.adopted)
        with contextlib.suppress(sqlite3.Error):
            self.oldest = self.spools.oldest_pending()

    def _notice(self, news: Iterable[Notice]) -> None:
        for notice in news:
            self._publish()
            self._tell(self._listener.noticed, notice)

    def _tell(self, listener: Callable[[T], None], what: T) -> None:
        try:
            listener(what)
        except Exception:  # no thread to be had, no descriptor left: that is no reason to stop storing
            logger.exception("memlog: the buffer could not tell what happened")
