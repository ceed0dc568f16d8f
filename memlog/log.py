"""`open_log` and what it returns: handles on a :class:`~memlog.core.Core`.

Appending touches only the buffer; everything that waits crosses to the engine and back.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio

from memlog import core, engine
from memlog.buffer import Accepted, BufferLimits
from memlog.errors import ClosedError, ConversationFullError, MemoryUnavailableError, ResponseTooLargeError
from memlog.limits import CONVERSATION_ITEMS_MAX, PAGE_ITEMS_MAX
from memlog.models import check_range
from memlog.payload import Batch, check_conversation_id, encode, encode_batch, encode_batches
from memlog.replay import Listing, Pending, Replay
from memlog.retry import RetryPolicy
from memlog.stamps import STAMP_BYTES
from memlog.system import NoThreadError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping
    from concurrent.futures import Future
    from ssl import SSLContext
    from types import TracebackType

    from pydantic import BaseModel

    from memlog.core import Core
    from memlog.events import Event
    from memlog.models import Ack, ConversationInfo, Item
    from memlog.report import DeadLetter, Duplicate, FlushReport, Statistics
    from memlog.sync import SyncMemoryLog


_RECEIPT_ID = re.compile(r"([0-9a-f]{16})\.([0-9]{1,18})(?:-([0-9]{1,18}))?")
_RECEIPT_BATCHES_MAX = 1_000_000  # of one append
_SLACK_SECONDS = 1.0  # what a deadline is given to be kept by the engine, before it is kept without it


class Receipt(Accepted):
    """What ``append`` returns. Ignoring it costs nothing; awaiting it means :meth:`stored`."""

    __slots__ = ("_ack", "_core", "_recalled")

    def __init__(self, core: Core, conversation_id: str, batches: list[Batch]) -> None:
        super().__init__(conversation_id, batches)
        self._core = core
        self._ack: Ack | None = None
        self._recalled = False

    @classmethod
    def _recall(cls, core: Core, receipt_id: str) -> Receipt:
        match = _RECEIPT_ID.fullmatch(receipt_id) if isinstance(receipt_id, str) else None
        first, last = (int(match[2]), int(match[3] or match[2])) if match else (1, 0)
        if match is None or not 0 <= last - first < _RECEIPT_BATCHES_MAX:
            msg = f"not the id of a receipt: {receipt_id!r:.80}"
            raise ValueError(msg)
        receipt = cls(core, "", [])
        receipt.spool_name, receipt.first_id, receipt.count = match[1], first, last - first + 1
        receipt._recalled = True
        return receipt

    @property
    def id(self) -> str:
        """Names this append in this machine's buffer; once it is stored, for good: see :meth:`MemoryLog.receipt`."""
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
        if self._ack is None:
            with anyio.fail_after(timeout):
                if not self._recalled:
                    await self._taken()
                self._ack = await engine.running().call(self._core.outcome, self.spool_name, self._ids)
        return self._ack

    @property
    def _ids(self) -> range:
        return range(self.first_id, self.first_id + self.count)

    async def _taken(self) -> None:
        if self._recalled:
            await engine.running().call(self._core.confirm, self.spool_name, self._ids)
            return
        while not self.is_stored():
            done = anyio.Event()
            self.when_stored(engine.waker(done.set))
            await done.wait()

    def __await__(self) -> Generator[Any, Any, None]:
        return self.stored().__await__()

    def __repr__(self) -> str:
        whose = f" of conversation {self.conversation_id}" if self.conversation_id else ""
        return f"<Receipt {self.id}{whose}>"


class Conversation:
    """One conversation of a log. Appending is for any thread, any loop, a signal handler or ``__del__``."""

    __slots__ = ("_core", "_log", "id")

    def __init__(self, log: MemoryLog, core: Core, conversation_id: str) -> None:
        self.id = conversation_id
        self._log = log
        self._core = core

    def append(self, item: Mapping[str, object] | BaseModel) -> Receipt:
        """Hand over one JSON object and go on at once; never waits for disk or network.

        The bytes are taken now: changing ``item`` afterwards changes nothing. Raises, with nothing stored:
        InvalidItemError or TooLargeError (the caller's own mistake), BufferFullError, ConversationFullError (known to
        be full: go on in a new conversation), ClosedError, BufferUnusableError.
        """
        if self._core.settings.stamp:
            part = encode(item, to_stamp=True)
            return self._put([Batch(b"", 1, len(part) + STAMP_BYTES, [part])])
        body = encode(item)
        return self._put([Batch(body, 1, len(body))])

    def extend(self, items: Iterable[Mapping[str, object] | BaseModel], *, atomic: bool = True) -> Receipt:
        """Hand over several objects in order, as one batch that is stored, sent and refused whole.

        A batch is 1 to 250 items and at most 1 MiB. With ``atomic=False`` more is cut into batches of that size under
        one receipt: stored together, sent one after the other. Raises as :meth:`append`, with nothing stored.
        """
        stamp = self._core.settings.stamp
        return self._put([encode_batch(items, to_stamp=stamp)] if atomic else encode_batches(items, to_stamp=stamp))

    def _put(self, batches: list[Batch]) -> Receipt:
        if self._log.closed:
            raise ClosedError("the log is closed")
        if self.id in self._core.sealed:
            raise ConversationFullError(self.id, CONVERSATION_ITEMS_MAX)
        receipt = Receipt(self._core, self.id, batches)
        self._core.buffer.put(receipt, sum([batch.size for batch in batches]))
        return receipt

    def replay(
        self,
        offset: int = 0,
        *,
        limit: int | None = None,
        include_pending: bool = True,
        raw: bool = False,
        on_unavailable: Literal["raise", "pending"] = "raise",
        follow: bool = False,
    ) -> Replay:
        """The conversation from ``offset`` on: ``async for item in chat.replay()``. See :class:`Replay`.

        Items that are only on this machine come last, with ``seq`` and ``recorded_at`` None, unless
        ``include_pending`` is false. Stamps are removed, and further copies of stamped items passed over, unless
        ``raw``.

        ``on_unavailable="pending"``: where the server cannot be read, or not any further, go on with what is pending
        instead of raising MemoryUnavailableError, and set :attr:`Replay.degraded`. Then items may be missing, and items
        that arrived without an answer may come twice, unless they are stamped.

        ``follow=True``: at the end of the log wait for more, asking every 0.2 to 5 seconds, until the replay or the log
        is closed. Pending items come when they are in the log. An outage is raised, as without; iterating on misses
        nothing. ValueError together with ``on_unavailable="pending"``.
        """
        self._log.refuse_closed()
        degrade = _degrades(on_unavailable, include_pending)
        if follow and degrade:
            msg = 'follow waits for the server; it does not go with on_unavailable="pending"'
            raise ValueError(msg)
        return Replay(
            self._page,
            conversation_id=self.id,
            offset=offset,
            limit=limit,
            pending=self._pending if include_pending and not follow else None,
            raw=raw,
            ahead=self._ahead,
            degrade=degrade,
            follow=(lambda: not self._log.closed) if follow else None,
        )

    async def recall(
        self,
        limit: int = 100,
        *,
        include_pending: bool = True,
        on_unavailable: Literal["raise", "pending"] = "raise",
    ) -> list[Item]:
        """The newest ``limit`` (1 to 1000) items, oldest of them first, over what is pending too.

        ``on_unavailable="pending"``: only what is pending, where the server cannot be read. No item has a ``seq`` then,
        and an empty list says nothing of the log; :meth:`replay` tells the difference.

        Raises as :class:`Replay`; ValueError for another ``limit``.
        """
        self._log.refuse_closed()
        degrade = _degrades(on_unavailable, include_pending)
        check_range("limit", limit, 1, PAGE_ITEMS_MAX)
        begin: list[Item] = []
        start, at_end, degraded = 0, True, False
        try:
            begin, start, at_end = await self._newest(limit)
        except MemoryUnavailableError:
            if not degrade:
                raise
            degraded = True
        while True:
            replay = Replay(
                self._page,
                conversation_id=self.id,
                offset=start,
                pending=self._pending if include_pending else None,
                begin=begin,
                at_end=at_end,
                degrade=degrade,
                degraded=degraded,
            )
            found: deque[Item] = deque(maxlen=limit)
            async for item in replay:
                found.append(item)
            first = start - len(begin)
            if len(found) == limit or first == 0 or replay.degraded:
                return list(found)
            # Some were copies of stamped items: as many are wanted from further back.
            begin, start, at_end = [], max(0, first - limit), False

    async def _newest(self, limit: int) -> tuple[list[Item], int, bool]:
        """The newest items of the log, where reading goes on behind them, and whether that is the end.

        If they are too large for one answer there are none, and reading begins where they do.
        """
        try:
            items = await self._core.read(lambda client: client.recall_memory(self.id, limit))
        except ResponseTooLargeError:
            # The newest one says where the log ends; the pages of a replay get as small as they have to.
            newest = await self._core.read(lambda client: client.recall_memory(self.id, 1))
            return [], max(0, _end_of(newest) - limit), False
        return items, _end_of(items), True

    async def _page(self, offset: int, size: int) -> list[Item]:
        return await self._core.read(lambda client: client.replay_page(self.id, offset, size))

    def _ahead(self, offset: int, size: int) -> _Ahead:
        return _Ahead(self._page, offset, size)

    async def _pending(self, position: int) -> Pending:
        return await engine.running().call(self._core.pending, self.id, position)

    def __repr__(self) -> str:
        return f"<Conversation {self.id}>"


class _Ahead:
    """A page that is fetched in the engine meanwhile. Given up or forgotten, it ends there by itself."""

    __slots__ = ("_engine", "_future")

    def __init__(self, fetch: Callable[[int, int], Coroutine[Any, Any, list[Item]]], offset: int, size: int) -> None:
        self._engine = engine.running()
        self._future: Future[list[Item]] = self._engine.spawn(fetch(offset, size))

    async def come(self) -> list[Item] | None:
        if engine.running() is not self._engine:
            return None  # forked since: the page comes to the parent
        return await engine.outcome(self._future)

    def drop(self) -> None:
        self._future.cancel()


class MemoryLog:
    """A buffered log of conversations; from :func:`open_log`, usable at once, and an async context manager.

    Leaving the context flushes for ``flush_timeout`` seconds and closes. Not closing is legal: what was accepted is
    stored when the process ends, and sent the next time a log is opened there.
    """

    def __init__(self, core: Core, flush_timeout: float | None) -> None:
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
        with anyio.move_on_after(flush_patience(timeout)):
            return await engine.running().call(self._core.flush, timeout, until)
        return self._core.report(complete=False)

    async def check(self) -> None:
        """Make one read-only call and return if it was answered: a start-up probe.

        Raises the very error it met: AuthenticationError, ConnectionFailedError, RedirectRefusedError, ….
        """
        self.refuse_closed()
        await engine.running().call(self._core.check)

    def statistics(self) -> Statistics:
        """The log at this moment, from memory: never waits."""
        return self._core.statistics()

    def receipt(self, receipt_id: str) -> Receipt:
        """The receipt of an earlier append, perhaps of an earlier process, by its :attr:`Receipt.id`.

        ``stored()`` returns if the append is on this machine's disk, be it pending, acknowledged or refused;
        ``acknowledged()`` waits and answers as the first receipt would, and follows a dead letter that was requeued.
        Both raise MemlogError if nothing is known of it (any more), and ClosedError if it waits in the buffer of
        another process that lives. Where ``stored()`` had not returned when a process died, its number may have been
        given out again. ValueError: not an id at all.
        """
        self.refuse_closed()
        return Receipt._recall(self._core, receipt_id)  # noqa: SLF001 - the log makes receipts

    async def dead_letters(self) -> list[DeadLetter]:
        """The batches that were refused and wait for a decision, oldest first."""
        self.refuse_closed()
        return await engine.running().call(self._core.dead_letters)

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

    def list_conversations(self) -> AsyncIterator[ConversationInfo]:
        """The conversations that the server holds for this site: ``async for info in log.list_conversations()``.

        Each with its ``conversation_id`` and what else the server tells. One that is only pending is not among them.
        Raises as :class:`Replay` from the first await on; iterating again goes on where it stopped.
        """
        self.refuse_closed()
        return Listing(self._conversations)

    async def _conversations(self, limit: int, after: str | None) -> list[ConversationInfo]:
        return await self._core.read(lambda client: client.list_conversations(limit, after))

    async def duplicates(self) -> list[Duplicate]:
        """The ranges of the remote log that were found to be second copies, left by requests that were sent twice."""
        self.refuse_closed()
        return await engine.running().call(self._core.duplicates)

    @property
    def sync(self) -> SyncMemoryLog:
        """The blocking face of this log, with the same names; works while a loop runs in the calling thread."""
        from memlog.sync import SyncMemoryLog  # noqa: PLC0415 - the face knows the log, the log only hands it out

        return SyncMemoryLog(self)

    async def close(self) -> None:
        """Flush for ``flush_timeout`` seconds, then let go of the buffer. Idempotent; unsent items stay on disk.

        Takes a few seconds more at the most, whatever is stuck: then a warning says what is unsent, and closing goes on
        without the caller, as it does if this is cancelled.
        """
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(NoThreadError):  # the interpreter ends, which stores what was accepted
            with anyio.move_on_after(self._core.close_patience(self._flush_timeout)):
                await engine.running().call(self._core.leave, self._flush_timeout)
                return
            self._core.left_alone()

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
    retry: RetryPolicy = RetryPolicy(),
    limits: BufferLimits = BufferLimits(),
    stamp: bool = False,
    on_event: Callable[[Event], object] | None = None,
    allow_insecure: bool = False,
    ssl_context: SSLContext | None = None,
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
        stamp: mark each item, under a key ``_memlog`` of its own (56 bytes, counted), so that reading passes over
            copies even where several writers share a conversation. Items that have the key themselves are refused.
        on_event: called with each :class:`memlog.events.Event` in a thread of its own. Its exceptions are logged.
        allow_insecure: permit Basic credentials over plain http beyond this machine.
        ssl_context: for https, instead of the authorities of the system and of ``SSL_CERT_FILE`` or ``SSL_CERT_DIR``.
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
    if auth is None and (text := os.environ.get("MEMLOG_AUTH")):
        user, colon, password = text.partition(":")
        if not colon:
            msg = "MEMLOG_AUTH must be user:password"
            raise ValueError(msg)
        auth = (user, password)
    directory = _directory(buffer_dir)
    settings = core.Settings(
        url=url,
        auth=auth,
        buffer_dir=directory,
        timeout=timeout,
        retry=retry,
        limits=limits,
        stamp=stamp,
        on_event=on_event,
        allow_insecure=allow_insecure,
        ssl_context=ssl_context,
        transport=transport,
    )
    return MemoryLog(core.join(settings), flush_timeout)


def _degrades(on_unavailable: str, include_pending: bool) -> bool:
    if on_unavailable not in ("raise", "pending"):
        msg = f'on_unavailable is "raise" or "pending", got {on_unavailable!r}'
        raise ValueError(msg)
    if on_unavailable == "pending" and not include_pending:
        msg = 'on_unavailable="pending" goes on with what is pending, which include_pending=False leaves out'
        raise ValueError(msg)
    return on_unavailable == "pending"


def flush_patience(timeout: float | None) -> float | None:
    """How long the caller of ``flush(timeout)`` waits for the engine, which may be stuck, to keep the time."""
    return None if timeout is None else max(timeout, 0.0) + _SLACK_SECONDS


def _end_of(items: list[Item]) -> int:
    return items[-1].seq + 1 if items and items[-1].seq is not None else 0


def _directory(buffer_dir: str | os.PathLike[str] | None) -> Path | None:
    if buffer_dir is None:
        buffer_dir = os.environ.get("MEMLOG_BUFFER_DIR") or None
    if buffer_dir is None:
        import platformdirs  # noqa: PLC0415 - only for who does not say where

        buffer_dir = platformdirs.user_state_path("memlog", appauthor=False)
    if buffer_dir == ":memory:":
        return None
    return Path(os.path.realpath(buffer_dir))
