"""`open_log` and what it returns: composition and lifetime.

A :class:`MemoryLog` is a handle. Handles of the same endpoint, site and directory share one :class:`_Core`: the buffer
with its writer thread, and the client and sender in the engine's loop. Appending touches only the buffer; everything
that waits crosses to the engine and back.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import anyio

from memlog import engine, limits
from memlog.buffer import Accepted, Buffer, BufferLimits, prepare_directory, site_directory
from memlog.client import Client
from memlog.errors import (
    BufferUnusableError,
    ClosedError,
    ConversationFullError,
    MemlogError,
    MemoryUnavailableError,
    PermanentError,
    RateLimitedError,
    TransientError,
    from_record,
)
from memlog.events import Event
from memlog.models import Ack, Item
from memlog.payload import Batch, check_conversation_id, decode_items, encode, encode_batch, encode_batches
from memlog.replay import Pending, Replay
from memlog.retry import NO_RETRY, RetryPolicy
from memlog.sender import Sender, State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from concurrent.futures import Future
    from types import TracebackType

    from pydantic import BaseModel

    from memlog.buffer import Spools
    from memlog.sync import SyncMemoryLog

logger = logging.getLogger("memlog")

T = TypeVar("T")

_EXIT_SECONDS = 2.0
_CHECK_ID = "memlog-check"


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushReport:
    """What :meth:`MemoryLog.flush` saw. Counts are items.

    ``complete``: nothing that had been appended before is left. ``acknowledged`` and ``refused``: became so meanwhile.
    ``pending``: on this machine, not at the server. ``state`` and ``reason`` as in :class:`Statistics`.
    """

    complete: bool
    acknowledged: int
    pending: int
    refused: int
    state: State
    reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """A log at one moment. ``state``: ``ok``; ``waiting`` (sending goes on by itself); ``blocked`` (an operator must act).

    The books, over the files this log holds: stored = acknowledged + pending + refused + dropped, in items as in
    batches. ``unstored_bytes`` are accepted and not yet on disk. Traffic counts since the log was opened.
    """

    state: State
    reason: str | None
    stored_items: int
    acknowledged_items: int
    pending_items: int
    refused_items: int
    dropped_items: int
    stored_batches: int
    acknowledged_batches: int
    pending_batches: int
    refused_batches: int
    dropped_batches: int
    pending_bytes: int
    unstored_bytes: int
    requests_sent: int
    requests_in_flight: int
    duplicate_items: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A batch that the server refused, kept on disk with the reason until it is requeued or dropped."""

    id: str
    conversation_id: str
    items: int
    bytes: int
    refused_at: datetime
    error: PermanentError
    payloads: list[dict[str, Any]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A range of a conversation's log, inclusive, that holds a second copy of what stands elsewhere in it."""

    conversation_id: str
    first_seq: int
    last_seq: int


class Receipt(Accepted):
    """What ``append`` returns. Ignoring it costs nothing; awaiting it means :meth:`stored`."""

    __slots__ = ("_core",)

    def __init__(self, core: _Core, conversation_id: str, batches: list[Batch]) -> None:
        super().__init__(conversation_id, batches)
        self._core = core

    @property
    def id(self) -> str:
        """Names this append in this machine's buffer, for good."""
        last = f"-{self.first_id + self.count - 1}" if self.count > 1 else ""
        return f"{self.spool_name}.{self.first_id}{last}"

    async def stored(self, timeout: float | None = None) -> None:
        """Wait until it is on this machine's disk, synced.

        TimeoutError after ``timeout`` seconds, which changes nothing, as cancelling does. BufferUnusableError: the disk
        failed for good, or the buffer is in memory and stores nothing.
        """
        self._core.refuse_memory()
        with anyio.fail_after(timeout):
            await self._taken()

    async def acknowledged(self, timeout: float | None = None) -> Ack:
        """Wait until it is in the remote log, and return where.

        Raises the PermanentError that refused it, if it became a dead letter. TimeoutError after ``timeout`` seconds,
        which changes nothing, as cancelling does. ClosedError: the log was closed first; the batch is on disk and goes
        out when a log is opened there again.
        """
        with anyio.fail_after(timeout):
            await self._taken()
            return await engine.running().call(self._core.outcome, self)

    async def _taken(self) -> None:
        while not self.is_stored():
            done = anyio.Event()
            self.when_stored(engine.waker(done.set))
            await done.wait()

    def __await__(self) -> Any:
        return self.stored().__await__()

    def __repr__(self) -> str:
        return f"<Receipt {self.id} of conversation {self.conversation_id}>"


# --- what users hold -------------------------------------------------------------------------------------------------


class Conversation:
    """One conversation of a log. Appending is for any thread, any loop, a signal handler or ``__del__``."""

    __slots__ = ("_core", "_log", "id")

    def __init__(self, log: MemoryLog, core: _Core, conversation_id: str) -> None:
        self.id = conversation_id
        self._log = log
        self._core = core

    def append(self, item: Mapping[str, object] | BaseModel) -> Receipt:
        """Hand over one JSON object and go on at once; never waits for disk or network.

        The bytes are taken now: changing ``item`` afterwards changes nothing. Raises, with nothing stored:
        InvalidItemError or TooLargeError (the caller's own mistake), BufferFullError, ConversationFullError (known to
        be full: go on in a new conversation), ClosedError, BufferUnusableError.
        """
        body = encode(item)
        return self._put([Batch(body, 1, len(body))])

    def extend(self, items: Iterable[Mapping[str, object] | BaseModel], *, atomic: bool = True) -> Receipt:
        """Hand over several objects in order, as one batch that is stored, sent and refused whole.

        A batch is 1 to 250 items and at most 1 MiB. With ``atomic=False`` more is cut into batches of that size under
        one receipt: stored together, sent one after the other. Raises as :meth:`append`, with nothing stored.
        """
        return self._put([encode_batch(items)] if atomic else encode_batches(items))

    def _put(self, batches: list[Batch]) -> Receipt:
        if self._log.closed:
            raise ClosedError("the log is closed")
        if self.id in self._core.sealed:
            raise ConversationFullError(self.id, limits.CONVERSATION_ITEMS_MAX)
        receipt = Receipt(self._core, self.id, batches)
        self._core.buffer.put(receipt, sum([batch.size for batch in batches]))
        return receipt

    def replay(self, offset: int = 0, *, limit: int | None = None, include_pending: bool = True) -> Replay:
        """The conversation from ``offset`` on: ``async for item in chat.replay()``. See :class:`Replay`.

        Items that are only on this machine come last, with ``seq`` and ``recorded_at`` None, unless
        ``include_pending`` is false.
        """
        self._log.refuse_closed()
        pending = self._pending if include_pending else None
        return Replay(self._page, offset=offset, limit=limit, pending=pending)

    async def recall(self, limit: int = 100, *, include_pending: bool = True) -> list[Item]:
        """The newest ``limit`` (1 to 1000) items, oldest of them first, over what is pending too.

        Raises as :class:`Replay`; ValueError for another ``limit``.
        """
        self._log.refuse_closed()
        items = await self._core.read(lambda client: client.recall_memory(self.id, limit))
        end = items[-1].seq + 1 if items and items[-1].seq is not None else 0
        return [*items, *[item async for item in self.replay(end, include_pending=include_pending)]][-limit:]

    async def _page(self, offset: int, size: int) -> list[Item]:
        return await self._core.read(lambda client: client.replay_memory(self.id, offset, size))

    async def _pending(self, position: int) -> Pending | None:
        return await engine.outcome(self._core.buffer.run(lambda spools: _pending(spools, self.id, position)))

    def __repr__(self) -> str:
        return f"<Conversation {self.id}>"


class MemoryLog:
    """A buffered log of conversations; from :func:`open_log`, usable at once, and an async context manager.

    Leaving the context flushes for ``flush_timeout`` seconds and closes. Not closing is legal: what was accepted is
    stored when the process ends, and sent the next time a log is opened there.
    """

    def __init__(self, core: _Core, flush_timeout: float | None) -> None:
        self._core = core
        self._flush_timeout = flush_timeout
        self.closed = False

    def conversation(self, conversation_id: str) -> Conversation:
        """The conversation of that id: 8 to 64 characters from ``[A-Za-z0-9_-]``, never derived from personal data.

        Costs nothing and asks nobody. InvalidConversationIdError otherwise.
        """
        return Conversation(self, self._core, check_conversation_id(conversation_id))

    async def flush(
        self, timeout: float | None = None, *, until: Literal["acknowledged", "stored"] = "acknowledged"
    ) -> FlushReport:
        """Wait until everything appended before, here or by a process whose buffer was taken over, is acknowledged.

        Returns, complete or not, after ``timeout`` seconds at the latest, and early when nothing can move: sending is
        blocked, or the server asked for a pause beyond the deadline. Never raises for the network. ``until="stored"``
        waits for the disk only.
        """
        self.refuse_closed()
        if until not in ("acknowledged", "stored"):
            msg = f'until is "acknowledged" or "stored", got {until!r}'
            raise ValueError(msg)
        return await engine.running().call(self._core.flush, timeout, until)

    async def check(self) -> None:
        """Make one read-only call and return if it was answered: a start-up probe.

        Raises the very error it met: AuthenticationError, ConnectionFailedError, RedirectRefusedError, ….
        """
        self.refuse_closed()
        await engine.running().call(self._core.check)

    def statistics(self) -> Statistics:
        """The log at this moment, from memory: never waits."""
        return self._core.statistics()

    async def dead_letters(self) -> list[DeadLetter]:
        """The batches that were refused and wait for a decision, oldest first."""
        self.refuse_closed()
        return await engine.outcome(self._core.buffer.run(_dead_letters))

    async def requeue(self, letter: DeadLetter, *, conversation_id: str | None = None) -> None:
        """Send a dead letter again, in its own conversation or another one, behind what waits there.

        On return it is stored as pending. Does nothing if it is no dead letter any more.
        """
        self.refuse_closed()
        target = check_conversation_id(conversation_id or letter.conversation_id)
        await engine.running().call(self._core.requeue, letter, target)

    async def drop(self, letter: DeadLetter) -> None:
        """Throw a dead letter away for good. Does nothing if it is no dead letter any more."""
        self.refuse_closed()
        await engine.running().call(self._core.drop, letter)

    async def duplicates(self) -> list[Duplicate]:
        """The ranges of the remote log that were found to be second copies, left by requests that were sent twice."""
        self.refuse_closed()

        def read(spools: Spools) -> list[Duplicate]:
            return [Duplicate(*row) for spool in spools for row in spool.duplicates()]

        return await engine.outcome(self._core.buffer.run(read))

    @property
    def sync(self) -> SyncMemoryLog:
        """The blocking face of this log, with the same names; works while a loop runs in the calling thread."""
        from memlog.sync import SyncMemoryLog  # noqa: PLC0415 - the face knows the log, the log only hands it out

        return SyncMemoryLog(self)

    async def close(self) -> None:
        """Flush for ``flush_timeout`` seconds, then let go of the buffer. Idempotent; unsent items stay on disk."""
        if self.closed:
            return
        self.closed = True
        await engine.running().call(self._core.leave, self._flush_timeout)

    def refuse_closed(self) -> None:
        """Raise ClosedError on a closed handle."""
        if self.closed:
            raise ClosedError("the log is closed; what was stored is on disk and goes out when it is opened again")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<MemoryLog {self._core.where}{' closed' if self.closed else ''}>"


def open_log(
    url: str | None = None,
    *,
    auth: Any = None,
    buffer_dir: str | os.PathLike[str] | None = None,
    flush_timeout: float | None = 5.0,
    timeout: float = 30.0,
    retry: RetryPolicy | None = None,
    limits: BufferLimits | None = None,
    stamp: bool = False,
    on_event: Callable[[Event], object] | None = None,
    allow_insecure: bool = False,
    transport: Any = None,
) -> MemoryLog:
    """Open the buffered log of one site; needs neither network nor loop, and the result is usable at once.

    Args:
        url: the site memory's MCP endpoint. None reads ``MEMLOG_URL``.
        auth: ``(user, password)`` for Basic, a token for Bearer, or an ``httpx.Auth``. None reads ``MEMLOG_AUTH``
            (``user:password``), and where that is not set sends no credentials.
        buffer_dir: where unsent items are kept, below it a folder per endpoint and user. None reads
            ``MEMLOG_BUFFER_DIR``, else takes the platform's place for a user's state. ``":memory:"`` keeps them in
            memory, where they do not outlive the process.
        flush_timeout: seconds that ``close`` waits for the server; None waits for as long as it takes.
        timeout: seconds for one request.
        retry: patience of reads, and the pace of sending; see :class:`RetryPolicy`.
        limits: what the buffer may hold; see :class:`BufferLimits`.
        stamp: not available yet; True raises ValueError.
        on_event: called with each :class:`memlog.events.Event` in a thread of its own. Its exceptions are logged.
        allow_insecure: permit Basic credentials over plain http beyond this machine.
        transport: an ``httpx.AsyncBaseTransport`` instead of the network, for tests.

    Opening the same endpoint, user and directory again in one process returns another handle on the same buffer and
    sender. What an earlier process left there is sent at once, before and in order with what is appended now.

    Raises:
        ValueError: no or an unusable URL, or the log is open already with other settings.
        BufferUnusableError: the directory cannot be used, with the reason.
    """
    url = url or os.environ.get("MEMLOG_URL")
    if not url:
        msg = "no server: pass url= or set MEMLOG_URL"
        raise ValueError(msg)
    if stamp:
        msg = "stamp=True is not available in this version"
        raise ValueError(msg)
    if auth is None and (text := os.environ.get("MEMLOG_AUTH")):
        user, colon, password = text.partition(":")
        if not colon:
            msg = "MEMLOG_AUTH must be user:password"
            raise ValueError(msg)
        auth = (user, password)
    directory = _directory(buffer_dir)
    settings = _Settings(
        url=url,
        auth=auth,
        buffer_dir=directory,
        timeout=timeout,
        retry=retry or RetryPolicy(),
        limits=limits or BufferLimits(),
        on_event=on_event,
        allow_insecure=allow_insecure,
        transport=transport,
    )
    return MemoryLog(_join_core(settings), flush_timeout)


def _directory(buffer_dir: str | os.PathLike[str] | None) -> Path | None:
    if buffer_dir is None:
        buffer_dir = os.environ.get("MEMLOG_BUFFER_DIR") or None
    if buffer_dir is None:
        import platformdirs  # noqa: PLC0415 - only for who does not say where

        buffer_dir = platformdirs.user_state_path("memlog", appauthor=False)
    if buffer_dir == ":memory:":
        return None
    return Path(os.path.realpath(buffer_dir))


# --- what handles share ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What decides whether two handles may share a core; compared as a whole."""

    url: str
    auth: Any = field(repr=False)
    buffer_dir: Path | None
    timeout: float
    retry: RetryPolicy
    limits: BufferLimits
    on_event: Callable[[Event], object] | None
    allow_insecure: bool
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
            transport=self.transport,
        )


class _Core:
    """Buffer, client and sender of one site in one directory. The buffer tells it what was stored."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings
        self.handles = 0
        self.sealed: set[str] = set()
        self._sending = _Sending(self)  # its client raises here what is wrong with URL and credentials
        directory = settings.buffer_dir
        if directory is not None:
            site = site_directory(directory, settings.url, settings.user())
            prepare_directory(directory, site, settings.url, settings.user())
            directory = site
        self.where = str(directory or ":memory:")
        self.buffer = Buffer(directory, settings.limits, self)
        self.buffer.start()
        self.sealed.update(self.buffer.run(_sealed).result())
        if self.buffer.books.pending_batches:
            self.sending()

    def refuse_memory(self) -> None:
        """Raise where nothing is ever stored."""
        if self.settings.buffer_dir is None:
            raise BufferUnusableError(":memory:", "a buffer in memory puts nothing on disk")

    def sending(self) -> _Sending:
        """The sending half of this process, started if need be; a forked child gets one of its own."""
        if self._sending.pid != os.getpid():
            self._sending = _Sending(self)
        self._sending.start()
        return self._sending

    # --- told by the buffer, in the writer thread ------------------------------------------------------------------

    def stored(self, conversations: set[str]) -> None:
        with contextlib.suppress(RuntimeError):  # no new threads while the interpreter ends: it stays on disk
            self.sending().wake(conversations)

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
        client = self.sending().client
        deadline = None if self.settings.retry.total is None else time.monotonic() + self.settings.retry.total
        while True:
            try:
                return await call(client)
            except TransientError as error:
                raise _unavailable(error) from error
            except RateLimitedError as error:
                pause = error.retry_after if error.retry_after is not None else self.settings.retry.delay(1)
                if deadline is not None and time.monotonic() + pause > deadline:
                    raise _unavailable(error) from error
                await asyncio.sleep(pause)

    async def check(self) -> None:
        await self.sending().client.replay_memory(_CHECK_ID, 0, 1, retry=NO_RETRY)

    async def outcome(self, receipt: Receipt) -> Ack:
        """Wait for the outcome of every batch of ``receipt``."""
        sending = self.sending()
        ids = range(receipt.first_id, receipt.first_id + receipt.count)
        ranges = [await sending.outcome(receipt.spool_name, row_id) for row_id in ids]
        return Ack(ranges[0][0], ranges[-1][1])

    async def flush(self, timeout: float | None, until: str) -> FlushReport:
        deadline = None if timeout is None else time.monotonic() + timeout
        sender = await self.sending().ready()
        acknowledged, refused = sender.traffic.acknowledged_items, sender.traffic.refused_items
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                marks = await _here(self.buffer.run(lambda spools: {spool.name: spool.books.next_id for spool in spools}))
                complete = until == "stored"
                while not complete:
                    news = sender.news()
                    complete = await _here(self.buffer.run(lambda spools: _drained(spools, marks)))
                    pause = sender.gate.until - time.monotonic()
                    hopeless = deadline is not None and time.monotonic() + max(pause, 0) > deadline
                    if complete or sender.gate.state == "blocked" or (sender.gate.state == "waiting" and hopeless):
                        break
                    await news.wait()
        state, reason = sender.state
        return FlushReport(
            complete=complete,
            acknowledged=sender.traffic.acknowledged_items - acknowledged,
            pending=self.buffer.books.pending_items,
            refused=sender.traffic.refused_items - refused,
            state=state,
            reason=reason,
        )

    async def requeue(self, letter: DeadLetter, conversation_id: str) -> None:
        spool_name, row_id = _parse_id(letter.id)

        def write(spools: Spools) -> bool:
            for spool in spools:
                if spool.name == spool_name:
                    spool.begin()
                    row = spool.take_refused(row_id)
                    if row is not None:
                        new_id = self.buffer.allocate_id() if spool is spools.own else spool.books.next_id
                        spool.requeue(row._replace(conversation=conversation_id), new_id)
                        spool.note_lane(conversation_id, sealed=False)
                        return True
            return False

        if await _here(self.buffer.run(write, writes=True)):
            self.sealed.discard(conversation_id)
            self.sending().wake({conversation_id})

    async def drop(self, letter: DeadLetter) -> None:
        spool_name, row_id = _parse_id(letter.id)

        def write(spools: Spools) -> None:
            for spool in spools:
                if spool.name == spool_name:
                    spool.begin()
                    row = spool.take_refused(row_id)
                    if row is not None:
                        spool.drop(row)

        await _here(self.buffer.run(write, writes=True))

    def statistics(self) -> Statistics:
        books = self.buffer.books
        sender = self._sending.sender
        state, reason = sender.state if sender is not None else ("ok", None)
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
            requests_sent=sender.traffic.requests_sent if sender else 0,
            requests_in_flight=sender.in_flight if sender else 0,
            duplicate_items=sender.traffic.duplicate_items if sender else 0,
        )

    async def leave(self, flush_timeout: float | None) -> None:
        """A handle goes; the last one flushes and closes everything."""
        with _registry_lock:
            self.handles -= 1
            last = self.handles == 0
        try:
            await self.flush(flush_timeout, "acknowledged")
        finally:
            if last:
                with _registry_lock:
                    last = self.handles == 0 and _forget(self)
                if last:
                    await asyncio.shield(asyncio.get_running_loop().create_task(self._shut()))

    async def _shut(self) -> None:
        await self._sending.stop()
        books = self.buffer.books
        done = await asyncio.to_thread(self.buffer.close, _EXIT_SECONDS)
        self._warn_unsent(self.buffer.books.pending_items if done else books.pending_items, stored=done)

    def exit(self) -> None:
        """The process ends: store what was accepted, within bounds, and say what is unsent."""
        done = self.buffer.close(_EXIT_SECONDS)
        self._warn_unsent(self.buffer.books.pending_items, stored=done)

    def _warn_unsent(self, pending: int, *, stored: bool) -> None:
        if not stored:
            logger.warning("memlog: the disk did not take everything within %g s: see %s", _EXIT_SECONDS, self.where)
        if pending:
            kept = "lost with this process" if self.settings.buffer_dir is None else f"kept in {self.where}"
            cure = "" if self.settings.buffer_dir is None else "; opening the log again sends them"
            logger.warning("memlog: %d item(s) for %s are unsent and %s%s", pending, self.settings.url, kept, cure)


class _Sending:
    """The half of a core that lives in the engine of one process: client, sender, and who waits for outcomes."""

    def __init__(self, core: _Core) -> None:
        self.pid = os.getpid()
        self.client = core.settings.make_client()
        self.sender: Sender | None = None
        self._core = core
        self._lock = threading.Lock()
        self._task: Future[None] | None = None
        self._up = threading.Event()
        self._woken: set[str] = set()
        self._awaited: dict[tuple[str, int], asyncio.Event] = {}
        self._stopped = False

    def start(self) -> None:
        if self._task is None:
            with self._lock:
                if self._task is None and not self._stopped:
                    self._task = engine.running().spawn(self._run())

    async def _run(self) -> None:
        core = self._core
        self.sender = Sender(
            buffer=core.buffer,
            client=self.client,
            policy=core.settings.retry,
            tell=core.tell,
            resolved=self._resolved,
            sealed=core.sealed,
        )
        self.sender.wake(self._woken)
        try:
            await self.sender.run()
        except ClosedError:
            pass  # the buffer was closed first, by the end of the process
        except Exception:
            logger.exception("memlog: sending stopped by a defect; items stay on disk")
            raise

    async def ready(self) -> Sender:
        while self.sender is None:
            await asyncio.sleep(0)
        return self.sender

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
        while not self._stopped:
            event = self._awaited.setdefault((spool_name, row_id), asyncio.Event())
            found = await _here(self._core.buffer.run(lambda spools: _outcome(spools, spool_name, row_id)))
            if isinstance(found, tuple):
                return found
            if isinstance(found, dict):
                raise from_record(found)
            await event.wait()
        raise ClosedError("the log was closed before the batch was acknowledged; it is on disk")

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.wrap_future(self._task)
        for event in self._awaited.values():
            event.set()
        self._awaited.clear()
        await self.client.close()


# --- the process's cores ---------------------------------------------------------------------------------------------

_cores: dict[tuple[str, str], _Core] = {}
_registry_lock = threading.RLock()


def _join_core(settings: _Settings) -> _Core:
    with _registry_lock:
        if settings.buffer_dir is None:
            core = _Core(settings)
            _cores[":memory:", str(id(core))] = core
        else:
            key = (str(settings.buffer_dir), site_directory(Path(), settings.url, settings.user()).name)
            existing = _cores.get(key)
            if existing is not None and existing.settings != settings:
                differing = [name for name in vars(settings) if getattr(settings, name) != getattr(existing.settings, name)]
                msg = f"this log is open already in this process with another {', '.join(differing)}"
                raise ValueError(msg)
            core = existing or _Core(settings)
            _cores[key] = core
        core.handles += 1
        return core


def _forget(core: _Core) -> bool:
    for key, value in list(_cores.items()):
        if value is core:
            del _cores[key]
            return True
    return False


@atexit.register
def _at_exit() -> None:
    for core in list(_cores.values()):
        core.exit()


# --- reads in the writer thread --------------------------------------------------------------------------------------


def _sealed(spools: Spools) -> list[str]:
    return [conversation for spool in spools for conversation in spool.sealed_lanes()]


def _drained(spools: Spools, marks: dict[str, int]) -> bool:
    return all((spool.first_pending_id() or marks.get(spool.name, 0)) >= marks.get(spool.name, 0) for spool in spools)


def _outcome(spools: Spools, spool_name: str, row_id: int) -> tuple[int, int] | dict[str, Any] | None:
    for spool in spools:
        if spool.name == spool_name:
            found = spool.outcome(row_id)
            if found is None and not spool.is_pending(row_id):
                raise MemlogError("the outcome of this batch is no longer kept: it was settled long ago")
            return found
    raise ClosedError("the batch is in the buffer of another process, or was delivered and its buffer given back")


def _pending(spools: Spools, conversation: str, position: int) -> Pending | None:
    if any(spool.acknowledged_past(conversation, position) for spool in spools):
        return None
    known = [seq for spool in spools if (seq := spool.lane(conversation).next_seq) is not None]
    rows = sorted((row for spool in spools for row in spool.pending(conversation)), key=lambda row: row.stored_at)
    return Pending(max(known, default=None), [decode_items(row.body) for row in rows])


def _dead_letters(spools: Spools) -> list[DeadLetter]:
    letters = []
    for spool in spools:
        for row_id, conversation, items, size, refused_at, record, body in spool.refused():
            error = from_record(record)
            assert isinstance(error, PermanentError)
            at = datetime.fromtimestamp(refused_at / 1e6, UTC)
            letters.append(
                DeadLetter(f"{spool.name}.{row_id}", conversation, items, size, at, error, decode_items(body))
            )
    return letters


def _parse_id(letter_id: str) -> tuple[str, int]:
    spool_name, _, number = letter_id.rpartition(".")
    return spool_name, int(number)


def _unavailable(error: MemlogError) -> MemoryUnavailableError:
    return MemoryUnavailableError(
        f"the memory could not be read, which does not mean that it is empty: {error.args[0]}",
        retry_after=error.retry_after,
        status=error.status,
        code=error.code,
        server_said=error.server_said,
    )


async def _here(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
