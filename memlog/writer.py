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
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from memlog import inbox, ledger, system
from memlog.directory import open_spools
from memlog.errors import BufferUnusableError, ClosedError, MemlogError
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
_generation = 0  # how many forks lie between this process and the first one


class Accepted:
    """One append on its way to the disk: one or more batches of a conversation, committed together.

    Completed by the writer thread, waited for from any thread or loop. Completing takes no lock: whoever waits adds
    itself and then looks again, whoever completes sets the state and then notifies.
    """

    __slots__ = (
        "__weakref__",
        "_generation",
        "_notify",
        "_stored",
        "batches",
        "conversation_id",
        "count",
        "first_id",
        "spool_name",
    )

    def __init__(self, conversation_id: str, batches: list[Batch]) -> None:
        self.conversation_id = conversation_id
        self.batches: list[Batch] | None = batches  # until stored
        self.count = len(batches)
        self.first_id = 0
        self.spool_name = ""
        self._stored: BaseException | bool = False
        self._notify: list[Callable[[], object]] | None = None
        self._generation = _generation

    def is_stored(self) -> bool:
        """Whether it is on disk; raises the error that prevents it for good."""
        if self._stored is False and self._generation != _generation:
            raise ClosedError("this append was not on disk yet when this process was forked from the one that made it")
        if isinstance(self._stored, BaseException):
            raise self._stored
        return self._stored

    def when_stored(self, notify: Callable[[], object]) -> None:
        """Call ``notify``, from any thread, once :meth:`is_stored` has an answer."""
        with _registering:
            self._notify = [*(self._notify or ()), notify]
        if self._stored is not False or self._generation != _generation:
            notify()

    def complete(self, error: BaseException | None = None) -> None:
        """Called by the writer, once."""
        self.batches = None
        self._stored = error or True
        for notify in self._notify or ():
            notify()


def after_fork_in_child() -> None:
    """What was accepted and not stored is the parent's; so is the lock between those who wait, if it was held."""
    global _registering, _generation  # noqa: PLW0603 - they belong to a process
    _registering = threading.Lock()
    _generation += 1


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
        return self.future.running() or self.future.set_running_or_notify_cancel()


class Writer:
    """The thread, and what others may look at while it runs: ``books``, ``oldest``, ``full`` and so on.

    ``allocate`` gives out the ids of the own spool, which are shared with whoever puts.
    """

    def __init__(self, directory: Path | None, listener: Listener, allocate: Callable[[], int]) -> None:
        self.queue: queue.SimpleQueue[Accepted | Command | None] = queue.SimpleQueue()
        self.at_rest = threading.RLock()  # held by this thread while it is in SQLite, whose locks a fork would copy
        self.committed_bytes = 0
        self.broken: BufferUnusableError | None = None
        self.full = False  # the disk takes nothing new, and acknowledgements have the room of the reserve
        self.books = Books()
        self.oldest: int | None = None
        self.held = 1
        self.earlier = Books()  # of the site's spools that are gone, as of the last look round
        self.sealed: frozenset[str] = frozenset()  # when it was opened
        self._listener = listener
        self._allocate = allocate
        self._stamp = new_writer()
        self._group: deque[Accepted | Command] = deque()  # taken from the queue, not looked at yet
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
        self._settled = False
        self._interrupted = False
        self.ended: Future[None] = Future()
        opened: Future[Spools] = Future()
        self.thread = system.start_thread(partial(self._live, directory, opened), "memlog-writer")
        self.spools = opened.result()

    def stop(self, timeout: float) -> Future[None]:
        """Store what was accepted within ``timeout`` seconds, give everything up and end; done when that is done."""
        self._deadline = time.monotonic() + timeout * 0.9  # the rest is for giving up in good order
        self.queue.put(None)
        return self.ended

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _live(self, directory: Path | None, opened: Future[Spools]) -> None:
        try:
            self.spools = open_spools(directory)
            self.sealed = frozenset(self.spools.sealed())
            self._publish()
        except BaseException as error:  # noqa: BLE001 - raised where start() was called
            opened.set_exception(error)
            self.ended.set_result(None)
            return
        opened.set_result(self.spools)
        try:
            while not self._is_done():
                try:
                    self._turn()
                except BaseException:  # noqa: BLE001 - met while another one was dealt with
                    self._interrupted = True
            self._refuse(self._reads, ClosedError("the log is closed"))
            with contextlib.suppress(sqlite3.Error), self.at_rest:
                self.spools.close()
        finally:
            if not self._stopping:
                self._break(RuntimeError("its thread has ended"))
            self.ended.set_result(None)

    def _is_done(self) -> bool:
        return self._stopping and not (self._group or self._accepted or self._commands)

    def _turn(self) -> None:
        try:
            if self._interrupted:
                self._collect()
            if not self._settled:
                self._settled = True
                self._look_after(self._settle_in)
            self._drain()
            self._work()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, MemoryError):
                self._undo()
                if not self._repair(error):
                    logger.exception("memlog: a defect in the buffer")
                    self._break(error)
            else:
                self._interrupted = True
                logger.exception("memlog: the buffer was interrupted; it goes on")

    def _collect(self) -> None:
        """After an interruption, which may have come anywhere: between the commit and the telling, say."""
        self._undo()
        own = self.spools.own
        group = []
        with self.at_rest:
            for entry in self._accepted:
                first = entry[1][0].id
                if not own.is_pending(first) and own.outcome(first) is None:
                    break
                group.append(entry)
        self._publish()
        self._finish_puts(group)
        self._try_later()
        self._interrupted = False

    def _drain(self) -> None:
        """Take what has queued up; nothing if something else is due first."""
        group = self._group
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

    def _patience(self) -> float | None:
        due = []
        if self._group or self._accepted or self._commands or self.full:
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

    def _work(self) -> None:
        if self.broken is not None:
            self._break(self.broken)
            return
        busy = bool(self._group)
        while self._group:
            self._sort(self._group[0])
            self._group.popleft()
        if self._accepted or self._commands or self.full:
            # Acknowledgements make room: on a full disk they are tried at once, all else waits for its time.
            due = time.monotonic() >= self._retry_at
            if due or (self.full and self._commands):
                self._commit(rows_too=due)
            self.spools.unstored = [row for _, rows in self._accepted for row in rows]
        if self.spools.adopted:
            self._look_after(self._release_drained)
        for command in self._reads[:]:
            if not (command.after_puts and self._accepted):
                self._read(command)
                self._reads.remove(command)
        if busy:
            self._dirty = True
            self._tidy_at = time.monotonic() + _IDLE_SECONDS
        house = self._house_at()
        if house is not None and house <= time.monotonic():
            self._look_after(self._keep_house)

    def _sort(self, entry: Accepted | Command) -> None:
        # Not twice: an interruption may have come before it was taken out of the group.
        if isinstance(entry, Accepted):
            if not self._accepted or self._accepted[-1][0] is not entry:
                self._accepted.append((entry, _rows_of(entry, self._stamp)))
        else:
            commands = self._commands if entry.writes else self._reads
            if entry.is_wanted() and entry not in commands[-1:]:
                commands.append(entry)

    def _read(self, command: Command) -> None:
        for attempt in range(0 if command.future.done() else 2):  # as after an interruption
            try:
                with self.at_rest:
                    result = command.function(self.spools)
            except (sqlite3.Error, DamagedError) as error:
                if attempt == 0 and is_damage(error) and self._repair(error):
                    continue
                reason = error.reason if isinstance(error, DamagedError) else str(error)
                command.future.set_exception(BufferUnusableError(str(self.spools.own.path), reason))
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                command.future.set_exception(_to_hand_over(error))
            else:
                command.future.set_result(result)
            return

    # --- committing --------------------------------------------------------------------------------------------------

    def _commit(self, *, rows_too: bool) -> None:
        """Commit all that waits, in groups; what the disk does not take keeps waiting."""
        while True:
            room = rows_too and (not self.full or self._reserve_again())
            group = self._next_group() if room else []
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
            self.full = self.full and not group
            if len(group) == len(self._accepted):
                self._get_well()
            self._finish(group, done)
            self._notice(healed)
        if room and not self._accepted:
            self.full = False
        if not self._accepted and not self.full:
            self._get_well()
        elif rows_too:
            self._try_later()

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
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                self._undo()
                commands.remove(command)
                command.future.set_exception(_to_hand_over(error))
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
        with self.at_rest:
            for spool in self.spools:
                with contextlib.suppress(sqlite3.Error):
                    spool.rollback()

    def _finish(self, group: list[tuple[Accepted, list[NewRow]]], done: list[tuple[Command, Any]]) -> None:
        """Tell everybody that it is on disk."""
        self._publish()
        for command, result in done:
            if not command.future.done():  # as after an interruption
                command.future.set_result(result)
        self._commands.clear()
        self._finish_puts(group)

    def _finish_puts(self, group: list[tuple[Accepted, list[NewRow]]]) -> None:
        self.committed_bytes += sum(row.size for entry, rows in group if entry.batches is not None for row in rows)
        for accepted, _ in group:
            accepted.complete()
        if group:
            items: dict[str, int] = {}
            for accepted, rows in group:
                whose = accepted.conversation_id
                items[whose] = items.get(whose, 0) + sum(row.items for row in rows)
            self._look_before_first(set(items))
            self._tell(self._listener.stored, items)
        del self._accepted[: len(group)]  # last: what an interruption keeps from being told is told again

    # --- a disk in trouble, and damage -------------------------------------------------------------------------------

    def _get_over(self, error: sqlite3.Error | OSError | DamagedError) -> bool:
        """Whether to try again at once; else it is tried later, or never again."""
        if isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and is_passing(error)):
            if not self._trouble:
                self._trouble = True  # told first: from here on appends may be refused
                self._tell(self._listener.disk_trouble, f"{error} ({error_name(error) or type(error).__name__})")
            if error_name(error) in ("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"):
                self._make_room()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._break(error)
                return False
            self._try_later()
            return False
        if self._repair(error):
            return True
        self._break(error)
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
        """On a full disk: let acknowledgements have the room of the reserve, and give back what they make."""
        self.full = True
        if self.spools.reserve is None:
            return
        dropped = self.spools.reserve.drop()
        # What could not be written whole takes room all the same, until the WAL is cut.
        with contextlib.suppress(sqlite3.Error), self.at_rest:
            for spool in self.spools:
                spool.checkpoint()
        if self._commands and dropped:
            try:
                with self.at_rest:
                    done = self._transact([], self._commands)
            except (sqlite3.Error, DamagedError):
                self._undo()
            else:
                self._finish([], done)
        self._give_back()

    def _give_back(self) -> None:
        with contextlib.suppress(sqlite3.Error), self.at_rest:
            for spool in self.spools:
                spool.tidy()

    def _reserve_again(self) -> bool:
        """Whether there is more room than the reserve takes: nothing new is stored in what acknowledgements need."""
        if self.spools.reserve is None:
            return True
        self._give_back()  # what was acknowledged since left its room inside the file
        return self.spools.reserve.make()

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

    def _break(self, error: Exception) -> None:
        """Give up for good: fail all that waits, and all that will come."""
        if self.broken is None:
            self.broken = BufferUnusableError(str(self.spools.own.path), str(error))
            logger.error("memlog: %s; what was not stored yet is lost with this process", self.broken)
        waiting = [entry for entry in self._group if isinstance(entry, Accepted)]
        # Only those that nobody has told yet: what is on disk stays stored.
        for accepted in [*(entry for entry, _ in self._accepted), *waiting]:
            if accepted.batches is not None:
                accepted.complete(self.broken)
        commands = [entry for entry in self._group if isinstance(entry, Command)]
        self._refuse([*self._commands, *self._reads, *commands], self.broken)
        self._group.clear()
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

    def _release_drained(self) -> None:
        with self.at_rest:
            self.spools.release_drained()

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
        if self.spools.directory is not None:
            with contextlib.suppress(OSError):  # sums are not worth stopping for
                self.earlier = ledger.totals(self.spools.directory)

    def _obey(self) -> None:
        """Carry out commands from outside."""
        for spool, file, intent in self.spools.intents():
            with self.at_rest:
                count = len(inbox.letters_of(spool, intent))
            if spool is self.spools.own:
                # Asked for when at rest: whoever forks keeps others from numbers, and waits for that.
                ids = iter([self._allocate() for _ in range(count)])
            else:
                ids = iter(range(spool.books.next_id, spool.books.next_id + count))
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
        with contextlib.suppress(sqlite3.Error), self.at_rest:
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


def store_in_line(directory: Path, accepted: Accepted, check: Callable[[Books], None]) -> None:
    """Store ``accepted`` here and now, without a thread. ``check`` sees the books, and raises if there is no room."""
    spools = open_spools(directory)
    own = spools.own
    try:
        check(spools.books)
        accepted.spool_name, accepted.first_id = own.name, own.books.next_id
        own.begin()
        own.store(_rows_of(accepted, new_writer()))
        own.commit()
    except (sqlite3.Error, OSError, DamagedError) as error:
        with contextlib.suppress(sqlite3.Error):
            own.rollback()
        raise BufferUnusableError(str(own.path), str(error)) from error
    finally:
        with contextlib.suppress(sqlite3.Error):
            spools.close()
    accepted.complete()


def _rows_of(entry: Accepted, stamp: str) -> list[NewRow]:
    rows = []
    for row_id, batch in enumerate(entry.batches or (), start=entry.first_id):
        body = batch.body if batch.parts is None else stamped(batch.parts, stamp, row_id)
        rows.append(NewRow(row_id, entry.conversation_id, batch.items, batch.size, body))
    return rows


def _to_hand_over(error: BaseException) -> Exception:
    # What ends a thread would end that of whoever asked, too.
    return error if isinstance(error, Exception) else MemlogError(f"the buffer was interrupted: {error!r}")
