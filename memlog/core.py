"""What the handles of one site and directory share: the buffer, and the client and sender in the engine's loop.

A :class:`Core` is counted: the first handle makes it, the last one closes it. It belongs to the process that made it;
in a forked child the same object starts a buffer and a sender of its own with the first use.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memlog import engine, stamps, system
from memlog.buffer import Buffer, BufferLimits
from memlog.client import Client
from memlog.directory import Adopted, Recounted, prepare_directory, site_directory
from memlog.errors import (
    BufferUnusableError,
    ClosedError,
    MemlogError,
    MemoryUnavailableError,
    PermanentError,
    RateLimitedError,
    ResponseTooLargeError,
    TransientError,
    from_record,
)
from memlog.events import Event
from memlog.inbox import Applied, send_anew
from memlog.models import Ack
from memlog.payload import decode_items
from memlog.replay import Pending
from memlog.report import DeadLetter, Duplicate, FlushReport, Statistics
from memlog.retry import NO_RETRY, RetryPolicy
from memlog.salvage import Salvage
from memlog.sender import Sender, Traffic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Future
    from ssl import SSLContext

    from memlog.directory import Notice, Spools
    from memlog.spool import NewRow, Place, Spool

logger = logging.getLogger("memlog")

T = TypeVar("T")

_EXIT_SECONDS = 2.0
_CLOSE_SECONDS = 2 * _EXIT_SECONDS + 1.0  # what closing is given beyond its flush, before it goes on without the caller
_RESTART_SECONDS = 1.0
_ending = False  # the interpreter is, and the hooks that were to store everything have run
_CHECK_ID = "memlog-check"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides whether two handles may share a core; compared as a whole."""

    url: str = field(repr=False)  # its query may hold a secret
    auth: Any = field(repr=False)
    buffer_dir: Path | None
    timeout: float
    retry: RetryPolicy
    limits: BufferLimits
    stamp: bool
    on_event: Callable[[Event], object] | None
    allow_insecure: bool
    ssl_context: SSLContext | None
    transport: Any

    def user(self) -> str | None:
        return self.auth[0] if isinstance(self.auth, tuple) else None

    def make_client(self) -> Client:
        return Client(
            self.url,
            auth=self.auth,
            timeout=self.timeout,
            retry=self.retry,
            allow_insecure=self.allow_insecure,
            ssl_context=self.ssl_context,
            transport=self.transport,
        )


class Core:
    """Buffer, client and sender of one site in one directory. The buffer tells it what was stored."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.handles = 0
        self.key = (":memory:", str(id(self)))
        self.gone = threading.Event()
        self.sealed: set[str] = set()
        self._unsent = 0  # what was said of it last
        directory = settings.buffer_dir
        if directory is not None:
            site = site_directory(directory, settings.url, settings.user())
            prepare_directory(directory, site, settings.url, settings.user())
            directory = site
        self.where = str(directory or ":memory:")
        self.buffer = Buffer(directory, settings.limits, self)
        engine.pause_at_forks()
        self._sending = Sending(self)
        if _ending:
            self.buffer.end(0)
            return
        with contextlib.suppress(system.NoThreadError):  # what is appended is stored in line
            self.buffer.start()
            self.sealed.update(self.buffer.sealed)
            if self.buffer.books.pending_batches:
                self.sending()

    def refuse_memory(self) -> None:
        """Raise where nothing is ever stored."""
        if self.settings.buffer_dir is None:
            raise BufferUnusableError(":memory:", "a buffer in memory puts nothing on disk")

    def sending(self) -> Sending:
        """The sending half of this process, started if need be; a forked child gets one of its own."""
        sending = self._sending
        if sending.is_stranded():
            with _lock:
                if self._sending is sending:
                    self.start_anew()
                sending = self._sending
        sending.start()
        return sending

    def start_anew(self) -> None:
        """Get another sending half, which starts when needed.

        In a forked child, where this one and who waits for it are the parent's; or its engine's thread has ended.
        """
        system.park(self._sending)
        self._sending = Sending(self)

    # --- told by the buffer, in the writer thread ------------------------------------------------------------------

    def stored(self, items: dict[str, int]) -> None:
        with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends: it stays on disk
            self.sending().wake(set(items))
        for conversation, count in items.items():
            self.tell(Event(kind="stored", conversation_id=conversation, items=count))

    def noticed(self, notice: Notice) -> None:
        match notice:
            case Adopted():
                self.sealed |= notice.sealed
                if notice.items:
                    self.tell(Event(kind="adopted", items=notice.items, reason=str(notice.path)))
                    with contextlib.suppress(RuntimeError):
                        self.sending().wake(set(notice.conversations))
            case Applied():
                self.sealed -= notice.released
                with contextlib.suppress(RuntimeError):
                    self.sending().wake(set(notice.requeued))
            case Salvage() | Recounted():
                self.tell(_event_of(notice))

    def disk_trouble(self, reason: str | None) -> None:
        self.tell(Event(kind="disk_trouble" if reason else "disk_ok", reason=reason))

    def tell(self, event: Event) -> None:
        """Log it, and hand it to the user's callback."""
        event.log()
        if self.settings.on_event is not None:
            with contextlib.suppress(RuntimeError):
                engine.callbacks().call(self.settings.on_event, event)

    # --- asked by the handles, in the engine's loop ------------------------------------------------------------------

    async def read(self, call: Callable[[Client], Awaitable[T]]) -> T:
        """A read over the engine, from any loop; what keeps it from being answered is MemoryUnavailableError."""
        return await engine.running().call(self._read, call)

    async def _read(self, call: Callable[[Client], Awaitable[T]]) -> T:
        sending = self.sending()
        deadline = None if self.settings.retry.total is None else time.monotonic() + self.settings.retry.total
        asked, pause = (await sending.ready()).gate.asked()
        while True:
            if asked is not None:
                if deadline is not None and time.monotonic() + pause > deadline:
                    raise _unavailable(asked, pause) from asked
                await asyncio.sleep(pause)
            try:
                return await sending.read(call)
            except ResponseTooLargeError:
                raise  # the one failure that whoever asked can cure, by asking for less
            except TransientError as error:
                raise _unavailable(error, error.retry_after) from error
            except RateLimitedError as error:
                asked = error
                pause = self.settings.retry.delay(1) if error.retry_after is None else error.retry_after

    async def check(self) -> None:
        sender = await self.sending().ready()
        await sender.client.replay_memory(_CHECK_ID, 0, 1, retry=NO_RETRY)

    async def outcome(self, spool_name: str, ids: range) -> Ack:
        """Wait for the outcome of every one of these batches."""
        sending = self.sending()
        ranges = [await sending.outcome(spool_name, row_id) for row_id in ids]
        return Ack(min(first for first, _ in ranges), max(last for _, last in ranges))

    async def confirm(self, spool_name: str, ids: range) -> None:
        """Return once these batches are on disk; ClosedError or MemlogError if that is not known here."""

        def look(spools: Spools) -> None:
            for row_id in ids:
                spools.outcome(spool_name, row_id)

        await _here(self.buffer.run(look, after_puts=True))

    async def flush(self, timeout: float | None, until: str) -> FlushReport:
        deadline = None if timeout is None else time.monotonic() + timeout
        sending = self.sending()
        acknowledged, refused = sending.counted
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                marks = await _here(self.buffer.run(lambda spools: spools.marks(), after_puts=until == "stored"))
                complete = until == "stored"
                while not complete:
                    sender = await sending.ready()  # anew: it may have been replaced
                    news = sender.news()
                    complete = await _here(self.buffer.run(lambda spools: spools.drained_to(marks)))
                    pause = sender.gate.until - time.monotonic()
                    hopeless = deadline is not None and time.monotonic() + max(pause, 0) > deadline
                    if complete or sender.gate.state == "blocked" or (sender.gate.state == "waiting" and hopeless):
                        break
                    await news.wait()
                if complete and until == "acknowledged":
                    with contextlib.suppress(MemlogError):  # it reports; what it cannot read now the next one will
                        await (await sending.ready()).audit()
        if not complete:
            # The time was too short to ask; nothing unstored, looked at first, and nothing pending answer it as well.
            complete = self.buffer.unstored_bytes == 0 and self.buffer.books.pending_items == 0
        return self.report(complete, since=(acknowledged, refused))

    def report(self, complete: bool, *, since: tuple[int, int] | None = None) -> FlushReport:
        """How things are, from memory; ``since`` is what :attr:`Sending.counted` was before."""
        sending = self._sending
        counted = sending.counted
        before = since or counted
        state, reason = sending.sender.state if sending.sender is not None else ("ok", None)
        return FlushReport(
            complete=complete,
            acknowledged=counted[0] - before[0],
            pending=self.buffer.books.pending_items,
            refused=counted[1] - before[1],
            state=state,
            reason=reason,
        )

    async def dead_letters(self) -> list[DeadLetter]:
        return await _here(self.buffer.run(_dead_letters))

    async def duplicates(self) -> list[Duplicate]:
        def read(spools: Spools) -> list[Duplicate]:
            return [Duplicate(*row) for row in spools.duplicates()]

        return await _here(self.buffer.run(read))

    async def pending(self, conversation_id: str, position: int) -> Pending:
        """What waits for the conversation, to somebody who has read its log up to ``position``."""
        found = await _here(self.buffer.run(lambda spools: spools.waiting(conversation_id, position)))
        sizes = [(place.size, place.items) for place in found.places]

        async def load(first: int, last: int) -> list[bytes | tuple[int, int] | None]:
            return await engine.running().call(self._load, found.places[first:last])

        return Pending(sizes, load, found.start, found.echoes, found.beyond, found.length)

    async def _load(self, places: list[Place]) -> list[bytes | tuple[int, int] | None]:
        return await _here(self.buffer.run(lambda spools: spools.bodies(places)))

    async def requeue(self, letter: DeadLetter, conversation_id: str) -> None:
        # Taken here and not in the writer thread, which would wait for a fork that waits for it.
        own_id = self.buffer.allocate_id()

        def write(spools: Spools) -> bool:
            spool, row = _take_letter(spools, letter)
            if spool is None or row is None:
                return False
            new_id = own_id if spool is spools.own else spool.books.next_id
            send_anew(spool, row, conversation_id, new_id)
            return True

        def done(future: Future[bool]) -> None:
            # Here and not after the wait, which may be cancelled: what is stored must be sent all the same.
            if not future.cancelled() and future.exception() is None and future.result():
                self.sealed.discard(conversation_id)
                with contextlib.suppress(system.NoThreadError):
                    self.sending().wake({conversation_id})

        future = self.buffer.run(write, writes=True)
        future.add_done_callback(done)
        await _here(future)

    async def drop(self, letter: DeadLetter) -> None:
        def write(spools: Spools) -> None:
            spool, row = _take_letter(spools, letter)
            if spool is not None and row is not None:
                spool.drop(row)

        await _here(self.buffer.run(write, writes=True))

    def statistics(self) -> Statistics:
        books, earlier = self.buffer.books, self.buffer.earlier
        sender = self._sending.sender
        state, reason = sender.state if sender is not None else ("ok", None)
        traffic = sender.traffic if sender is not None else Traffic()
        failures, last_error = traffic.failures, traffic.last_error
        oldest = self.buffer.oldest_pending
        return Statistics(
            state=state,
            reason=reason,
            stored_items=books.stored_items,
            acknowledged_items=books.acknowledged_items,
            pending_items=books.pending_items,
            refused_items=books.refused_items,
            dropped_items=books.dropped_items,
            stored_batches=books.stored_batches,
            acknowledged_batches=books.acknowledged_batches,
            pending_batches=books.pending_batches,
            refused_batches=books.refused_batches,
            dropped_batches=books.dropped_batches,
            pending_bytes=books.pending_bytes,
            unstored_bytes=self.buffer.unstored_bytes,
            requests_sent=traffic.requests_sent,
            requests_in_flight=sender.in_flight if sender else 0,
            duplicate_items=traffic.duplicate_items,
            forgotten_items=books.forgotten_items,
            lost_items=books.lost_items,
            forgotten_batches=books.forgotten_batches,
            lost_batches=books.lost_batches,
            oldest_pending_seconds=None if oldest is None else max(0.0, time.time() - oldest / 1e6),
            spools=self.buffer.spools_held,
            requests_acknowledged=traffic.requests_acknowledged,
            requests_invalid=failures["invalid"],
            requests_full=failures["full"],
            requests_throttled=failures["throttled"],
            requests_blocked=failures["blocked"],
            requests_transient=failures["transient"],
            requests_unknown=failures["unknown"],
            gate_seconds=sender.gate.closed_for() if sender else None,
            held_conversations=sender.held if sender else 0,
            sealed_conversations=len(self.sealed),
            last_error=last_error,
            last_error_seconds=None if last_error is None else max(0.0, time.monotonic() - traffic.failed_at),
            earlier_stored_items=earlier.stored_items,
            earlier_acknowledged_items=earlier.acknowledged_items,
            earlier_dropped_items=earlier.dropped_items,
            earlier_forgotten_items=earlier.forgotten_items,
            earlier_lost_items=earlier.lost_items,
        )

    def close_patience(self, flush_timeout: float | None) -> float | None:
        """How long the caller of ``close`` waits for :meth:`leave`, whose loop may be stuck."""
        return None if flush_timeout is None else max(flush_timeout, 0.0) + _CLOSE_SECONDS

    def left_alone(self) -> None:
        """Nobody waits for :meth:`leave` any longer: it ends when the engine goes on, or with the process."""
        logger.warning("memlog: closing takes too long and goes on by itself: %s", self.where)
        self._warn_unsent(self.buffer.books.pending_items)

    async def leave(self, flush_timeout: float | None) -> None:
        """A handle goes; the last one flushes and closes everything."""
        try:
            with contextlib.suppress(ClosedError, system.NoThreadError):  # the process ends
                await self.flush(flush_timeout, "acknowledged")
        finally:
            with _lock:
                # Counted only now: of several that leave at once, the last one to have flushed closes.
                self.handles -= 1
                last = self.handles == 0 and _cores.get(self.key) is self
                if last:
                    del _cores[self.key]
                    _closing.add(self)
            if last:
                await asyncio.shield(asyncio.get_running_loop().create_task(self._shut()))

    async def _shut(self) -> None:
        try:
            await self._sending.stop()
            books = self.buffer.books
            ended = asyncio.wrap_future(self.buffer.stop(_EXIT_SECONDS))
            done = bool((await asyncio.wait([ended], timeout=_EXIT_SECONDS))[0])
            self._warn_unstored(done)
            self._warn_unsent(self.buffer.books.pending_items if done else books.pending_items)
        finally:
            with _lock:
                _closing.discard(self)
            self.gone.set()

    def exit(self) -> None:
        """The process ends: store what was accepted, within bounds, and say what is unsent."""
        done = self.buffer.end(_EXIT_SECONDS)
        system.park(self)
        self._warn_unstored(done)
        self._warn_unsent(self.buffer.books.pending_items)

    def _warn_unstored(self, done: bool) -> None:
        if not done:
            logger.warning("memlog: the disk did not take everything within %g s: see %s", _EXIT_SECONDS, self.where)

    def _warn_unsent(self, pending: int) -> None:
        with _lock:  # whoever gave up waiting has said it, and so may the end of the process
            said, self._unsent = self._unsent, pending
        if pending and pending != said:
            kept = "lost with this process" if self.settings.buffer_dir is None else f"kept in {self.where}"
            cure = "" if self.settings.buffer_dir is None else "; opening the log again sends them"
            site = self.settings.url.partition("?")[0]  # a query may hold a secret
            logger.warning("memlog: %d item(s) for %s are unsent and %s%s", pending, site, kept, cure)


class Sending:
    """The half of a core that lives in the engine of one process: sender, client, and who waits for outcomes."""

    def __init__(self, core: Core) -> None:
        self.sender: Sender | None = None
        self._core = core
        self._lock = threading.Lock()
        self._task: Future[None] | None = None
        self._up = asyncio.Event()
        self._woken: set[str] = set()
        self._awaited: dict[tuple[str, int], asyncio.Event] = {}
        self._stopped = False
        self._engine: engine.Engine | None = None
        self._asking = 0
        self._nobody_asks = asyncio.Event()
        self._reading: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        if self._task is None:
            with self._lock:
                if self._task is None and not self._stopped:
                    self._engine = engine.running()
                    self._task = self._engine.spawn(self._run())

    def is_stranded(self) -> bool:
        """Whether the thread it lived in has ended."""
        return self._engine is not None and not self._engine.thread.is_alive()

    @property
    def counted(self) -> tuple[int, int]:
        """Items acknowledged and refused since the log was opened."""
        if self.sender is None:
            return 0, 0
        return self.sender.traffic.acknowledged_items, self.sender.traffic.refused_items

    async def _run(self) -> None:
        core = self._core
        client = core.settings.make_client()
        while True:
            before = self.sender
            self.sender = Sender(
                buffer=core.buffer,
                client=client,
                policy=core.settings.retry,
                tell=core.tell,
                resolved=self._resolved,
                sealed=core.sealed,
                traffic=before.traffic if before is not None else Traffic(),
            )
            self._up.set()
            self.sender.wake(self._woken)
            if before is not None:
                self._wake_all()
                before.news().set()  # who waits looks again, at the new one
            try:
                await self.sender.run()
            except ClosedError:
                return  # the buffer was closed first, by the end of the process
            except asyncio.CancelledError:
                raise
            except BaseException:
                logger.exception("memlog: sending stopped by a defect; items stay on disk, and it starts anew")
            await asyncio.sleep(_RESTART_SECONDS)

    async def ready(self) -> Sender:
        """The sender, once it is there."""
        await self._up.wait()
        assert self.sender is not None
        return self.sender

    async def read(self, call: Callable[[Client], Awaitable[T]]) -> T:
        """``call`` with the client; ClosedError if the log is closed meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._reading.add(task)
        try:
            return await call((await self.ready()).client)
        except asyncio.CancelledError:
            if self._stopped and task.uncancel() == 0:
                raise ClosedError("the log was closed while it was read") from None
            raise
        finally:
            self._reading.discard(task)

    def wake(self, conversations: set[str]) -> None:
        engine.running().soon(self._wake, conversations)

    def _wake(self, conversations: set[str]) -> None:
        if self.sender is None:
            self._woken |= conversations
        else:
            self.sender.wake(conversations)

    def _resolved(self, spool_name: str, ids: Iterable[int]) -> None:
        for row_id in ids:
            event = self._awaited.pop((spool_name, row_id), None)
            if event is not None:
                event.set()

    async def outcome(self, spool_name: str, row_id: int) -> tuple[int, int]:
        """Where the batch stands in the log; raises what refused it."""
        while True:
            last = self._stopped
            event = self._awaited.setdefault((spool_name, row_id), asyncio.Event())
            found = await self._ask(spool_name, row_id)
            if isinstance(found, tuple):
                return found
            if isinstance(found, dict):
                raise from_record(found)
            if isinstance(found, int):
                row_id = found
            elif last:
                raise ClosedError(
                    "the log is closed; a batch that was not acknowledged is on disk and goes out when it is opened"
                    " again"
                )
            else:
                await event.wait()

    async def _ask(self, spool_name: str, row_id: int) -> tuple[int, int] | dict[str, Any] | int | None:
        self._asking += 1
        self._nobody_asks.clear()
        try:
            return await _here(self._core.buffer.run(lambda spools: spools.outcome(spool_name, row_id)))
        finally:
            self._asking -= 1
            if self._asking == 0:
                self._nobody_asks.set()

    def _wake_all(self) -> None:
        for event in self._awaited.values():
            event.set()
        self._awaited.clear()

    async def stop(self) -> None:
        self._stopped = True
        for task in self._reading:
            task.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.wrap_future(self._task)
        self._wake_all()
        await asyncio.sleep(0)  # whoever waited asks once more: it may have been acknowledged just now
        if self._asking:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await self._nobody_asks.wait()
        if self.sender is not None:
            await self.sender.client.close()


# --- the process's cores ---------------------------------------------------------------------------------------------

_cores: dict[tuple[str, str], Core] = {}
_closing: set[Core] = set()  # their handles are gone, and their files not free yet
_lock = threading.RLock()


def join(settings: Settings) -> Core:
    settings.make_client()  # raises here, in the caller's face, what is wrong with URL and credentials
    key = None
    if settings.buffer_dir is not None:
        key = (str(settings.buffer_dir), site_directory(Path(), settings.url, settings.user()).name)
        _await_closing(key)
    with _lock:
        if key is None:
            core = Core(settings)
        else:
            existing = _cores.get(key)
            if existing is not None and existing.settings != settings:
                differing = [
                    name for name in vars(settings) if getattr(settings, name) != getattr(existing.settings, name)
                ]
                msg = f"this log is open already in this process with another {', '.join(differing)}"
                raise ValueError(msg)
            core = existing or Core(settings)
            core.key = key
        _cores[core.key] = core
        core.handles += 1
        return core


def _await_closing(key: tuple[str, str]) -> None:
    """Let a log whose ``close`` was cancelled get done with it: its file is taken up again then, and its order kept."""
    if engine.is_own_thread():
        return  # it would wait for itself
    with _lock:
        waiting = [core for core in _closing if core.key == key]
    for core in waiting:
        core.gone.wait(_EXIT_SECONDS)  # or there will be a second file


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.RLock()
    _closing.clear()  # by a thread of the parent's
    for core in list(_cores.values()):
        core.start_anew()
    system.at_worker_exit(_at_exit)


system.at_fork(in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    global _ending  # noqa: PLW0603 - there is one end
    _ending = True
    for core in [*_cores.values(), *_closing]:
        core.exit()


system.at_worker_exit(_at_exit)


def _event_of(notice: Salvage | Recounted) -> Event:
    if isinstance(notice, Recounted):
        reason = f"{notice.path} was not closed, and its books say that there was more than there is"
        return Event(kind="lost", items=notice.lost_items, reason=reason)
    what = f"{notice.reason}; the damaged file is kept as {notice.aside}"
    if notice.lost_items or not notice.books_known:
        unknown = "" if notice.books_known else ", or more: its books could not be read"
        reason = f"{what}; {notice.kept_items} item(s) in it go on{unknown}"
        return Event(kind="lost", items=notice.lost_items, reason=reason)
    return Event(kind="degraded", items=notice.kept_items, reason=what)


def _dead_letters(spools: Spools) -> list[DeadLetter]:
    letters = []
    for spool in spools:
        for row_id, conversation, items, size, refused_at, record, body in spool.refused():
            error = from_record(record)
            assert isinstance(error, PermanentError)
            at = datetime.fromtimestamp(refused_at / 1e6, UTC)
            payloads = [stamps.without(p) if stamps.read(p) else p for p in decode_items(body)]
            letters.append(DeadLetter(f"{spool.name}.{row_id}", conversation, items, size, at, error, payloads))
    return letters


def _take_letter(spools: Spools, letter: DeadLetter) -> tuple[Spool | None, NewRow | None]:
    spool_name, _, number = letter.id.rpartition(".")
    spool = spools.named(spool_name)
    if spool is None:
        return None, None
    spool.begin()
    return spool, spool.take_refused(int(number))


def _unavailable(error: MemlogError, retry_after: float | None) -> MemoryUnavailableError:
    return MemoryUnavailableError(
        f"the memory could not be read, which does not mean that it is empty: {error.args[0]}",
        retry_after=retry_after,
        status=error.status,
        code=error.code,
        server_said=error.server_said,
    )


async def _here(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
