"""The blocking face: the same log with the same names, for code without a loop, or beside one.

Each call runs on the engine's loop while the calling thread waits, so it works in a plain script, in a worker thread,
and also in a thread whose own loop is running (which it then holds up). From memlog's own threads it raises
RuntimeError, and an ``on_event`` callback may use it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from memlog import engine
from memlog.buffer import BufferLimits
from memlog.log import flush_patience
from memlog.log import open_log as _open_log
from memlog.retry import RetryPolicy
from memlog.system import NoThreadError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
    from ssl import SSLContext
    from types import TracebackType

    from pydantic import BaseModel

    from memlog.events import Event
    from memlog.log import Conversation, MemoryLog, Receipt
    from memlog.models import Ack, ConversationInfo, Item
    from memlog.replay import Replay
    from memlog.report import DeadLetter, Duplicate, FlushReport, Statistics

T = TypeVar("T")

__all__ = ["SyncConversation", "SyncMemoryLog", "SyncReceipt", "SyncReplay", "open_log"]


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
) -> SyncMemoryLog:
    """:func:`memlog.open_log` with the blocking face; the same settings, errors and environment."""
    return _open_log(
        url,
        auth=auth,
        buffer_dir=buffer_dir,
        flush_timeout=flush_timeout,
        timeout=timeout,
        retry=retry,
        limits=limits,
        stamp=stamp,
        on_event=on_event,
        allow_insecure=allow_insecure,
        ssl_context=ssl_context,
        transport=transport,
    ).sync


class SyncReceipt:
    """:class:`memlog.Receipt`, blocking."""

    __slots__ = ("_receipt",)

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt

    @property
    def id(self) -> str:
        """Names this append in this machine's buffer; once it is stored, for good."""
        return self._receipt.id

    def stored(self, timeout: float | None = None) -> None:
        """Wait until it is on this machine's disk, synced; TimeoutError after ``timeout`` seconds changes nothing."""
        engine.refuse_own_thread()
        if self._receipt._recalled:  # noqa: SLF001 - two faces of one thing
            engine.running().block(self._receipt.stored, timeout)
            return
        self._receipt._core.refuse_memory()  # noqa: SLF001 - two faces of one thing
        done = threading.Event()
        self._receipt.when_stored(done.set)
        if not self._receipt.is_stored() and not done.wait(timeout):
            msg = "not stored yet"
            raise TimeoutError(msg)
        self._receipt.is_stored()

    def acknowledged(self, timeout: float | None = None) -> Ack:
        """Wait until it is in the remote log; as :meth:`memlog.Receipt.acknowledged`."""
        return engine.running().block(self._receipt.acknowledged, timeout)

    def __repr__(self) -> str:
        return repr(self._receipt)


class SyncReplay:
    """:class:`memlog.Replay` for a plain ``for``; of several threads each gets other items."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._lock = threading.Lock()

    @property
    def next_offset(self) -> int:
        """Where to go on: behind the last item of the log that was handed over."""
        return self._replay.next_offset

    @property
    def degraded(self) -> bool:
        """Whether the server could not be read, so that of the log something may be missing."""
        return self._replay.degraded

    def skip(self) -> None:
        """Pass over the item at ``next_offset``; as :meth:`memlog.Replay.skip`."""
        self._replay.skip()

    def pages(self) -> Iterator[list[Item]]:
        """The same iteration in lists; as :meth:`memlog.Replay.pages`."""
        return _Each(self._replay.pages())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self._lock:
            item = self._replay._take()  # noqa: SLF001 - most items are here already and need no crossing
            if item is None:
                try:
                    item = engine.running().block(self._replay.__anext__)
                except StopAsyncIteration:
                    raise StopIteration from None
            return item

    def close(self) -> None:
        """End the iteration, also for a thread that waits for it."""
        engine.running().block(self._replay.close)


class _Each(Generic[T]):
    """An asynchronous iteration for a plain ``for``."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            return engine.running().block(self._source.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None


class SyncConversation:
    """:class:`memlog.Conversation`, blocking."""

    __slots__ = ("_conversation",)

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @property
    def id(self) -> str:
        """The conversation's id."""
        return self._conversation.id

    def append(self, item: Mapping[str, object] | BaseModel) -> SyncReceipt:
        """Hand over one JSON object and go on at once; as :meth:`memlog.Conversation.append`."""
        return SyncReceipt(self._conversation.append(item))

    def extend(self, items: Iterable[Mapping[str, object] | BaseModel], *, atomic: bool = True) -> SyncReceipt:
        """Hand over several objects as one batch; as :meth:`memlog.Conversation.extend`."""
        return SyncReceipt(self._conversation.extend(items, atomic=atomic))

    def replay(
        self,
        offset: int = 0,
        *,
        limit: int | None = None,
        include_pending: bool = True,
        raw: bool = False,
        on_unavailable: Literal["raise", "pending"] = "raise",
        follow: bool = False,
    ) -> SyncReplay:
        """``for item in chat.replay()``; as :meth:`memlog.Conversation.replay`."""
        return SyncReplay(
            self._conversation.replay(
                offset,
                limit=limit,
                include_pending=include_pending,
                raw=raw,
                on_unavailable=on_unavailable,
                follow=follow,
            )
        )

    def recall(
        self,
        limit: int = 100,
        *,
        include_pending: bool = True,
        on_unavailable: Literal["raise", "pending"] = "raise",
    ) -> list[Item]:
        """The newest items; as :meth:`memlog.Conversation.recall`."""
        return engine.running().block(
            self._conversation.recall, limit, include_pending=include_pending, on_unavailable=on_unavailable
        )

    def __repr__(self) -> str:
        return repr(self._conversation)


class SyncMemoryLog:
    """:class:`memlog.MemoryLog`, blocking, and a plain context manager. Closing either face closes the handle."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def conversation(self, conversation_id: str) -> SyncConversation:
        """The conversation of that id; as :meth:`memlog.MemoryLog.conversation`."""
        return SyncConversation(self._log.conversation(conversation_id))

    def flush(
        self, timeout: float | None = None, *, until: Literal["acknowledged", "stored"] = "acknowledged"
    ) -> FlushReport:
        """Wait until everything appended before is acknowledged; as :meth:`memlog.MemoryLog.flush`."""
        try:
            return engine.running().block_for(flush_patience(timeout), self._log.flush, timeout, until=until)
        except TimeoutError:
            return self._log._core.report(complete=False)  # noqa: SLF001 - two faces of one thing

    def check(self) -> None:
        """Make one read-only call and raise what it met; as :meth:`memlog.MemoryLog.check`."""
        engine.running().block(self._log.check)

    def statistics(self) -> Statistics:
        """The log at this moment; never waits."""
        return self._log.statistics()

    def receipt(self, receipt_id: str) -> SyncReceipt:
        """The receipt of an earlier append by its id; as :meth:`memlog.MemoryLog.receipt`."""
        return SyncReceipt(self._log.receipt(receipt_id))

    def dead_letters(self) -> list[DeadLetter]:
        """The batches that were refused and wait for a decision."""
        return engine.running().block(self._log.dead_letters)

    def requeue(self, letter: DeadLetter, *, conversation_id: str | None = None) -> None:
        """Send a dead letter again; as :meth:`memlog.MemoryLog.requeue`."""
        engine.running().block(self._log.requeue, letter, conversation_id=conversation_id)

    def drop(self, letter: DeadLetter) -> None:
        """Throw a dead letter away for good."""
        engine.running().block(self._log.drop, letter)

    def list_conversations(self) -> Iterator[ConversationInfo]:
        """The conversations that the server holds; as :meth:`memlog.MemoryLog.list_conversations`."""
        return _Each(self._log.list_conversations())

    def duplicates(self) -> list[Duplicate]:
        """The ranges of the remote log that were found to be second copies."""
        return engine.running().block(self._log.duplicates)

    def close(self) -> None:
        """Flush for ``flush_timeout`` seconds, then let go of the buffer; as :meth:`memlog.MemoryLog.close`."""
        engine.refuse_own_thread()
        if self._log.closed:
            return
        self._log.closed = True
        core, seconds = self._log._core, self._log._flush_timeout  # noqa: SLF001 - two faces of one thing
        try:
            engine.running().block_for(core.close_patience(seconds), core.leave, seconds)
        except NoThreadError:
            pass  # the interpreter ends, which stores what was accepted
        except TimeoutError:
            core.left_alone()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._log)
