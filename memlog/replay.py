"""Reading a log to its end: page → verify → yield, and after the log what has not reached it yet.

Iterators are classes, not generators: ``next_offset`` is right at every moment, an error or a cancellation loses
nothing, and iterating again goes on where it stopped. The end is a page shorter than asked for; nothing else is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from memlog import limits, stamps
from memlog.errors import ResponseTooLargeError
from memlog.models import HistoryEvent, Item
from memlog.reconcile import Batches, explain, key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

__all__ = ["History", "Pending", "Replay"]

T = TypeVar("T")

_FIRST_PAGE_ITEMS = 100


class _Pages(Generic[T]):
    """Pages from ``fetch(position, size)``, handed over entry by entry; ``after(entry)`` is the position behind it.

    ``fetch`` verifies what it returns: in order, nothing before the position, at most ``size`` entries.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Awaitable[list[T]]],
        after: Callable[[T], int],
        *,
        position: int,
        limit: int | None,
        page: tuple[int, int],
    ) -> None:
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            msg = f"a position is a number from 0, got {position!r}"
            raise ValueError(msg)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            msg = f"limit is None or a number from 0, got {limit!r}"
            raise ValueError(msg)
        self._fetch = fetch
        self._after = after
        self._position = position  # where the next page starts
        self._handed = position  # behind the last entry handed over
        self._left = limit
        self._size, self._size_max = page
        self._ready: deque[T] = deque()
        self._at_end = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (entry := self._take()) is None:
            if self._closed or self._left == 0 or not await self._advance():
                raise StopAsyncIteration
        return entry

    async def aclose(self) -> None:
        """End the iteration. Nothing is held open between two entries, so that leaving it alone is as good."""
        self._closed = True
        self._ready.clear()

    def _take(self) -> T | None:
        """The next entry, if it is here already."""
        while self._ready and self._left != 0:
            entry = self._hand_over(self._ready.popleft())
            if entry is not None:
                if self._left is not None:
                    self._left -= 1
                return entry
        return None

    def _hand_over(self, entry: T) -> T | None:
        """The entry as the reader sees it; None to pass over it."""
        self._handed = self._after(entry)
        return entry

    async def _advance(self) -> bool:
        """Fetch more; False at the end."""
        return not self._at_end and await self._next_page()

    async def _next_page(self) -> bool:
        while True:
            size = self._size if self._left is None else min(self._size, self._left)
            try:
                page = await self._fetch(self._position, size)
            except ResponseTooLargeError:
                if size == 1:
                    raise
                self._size = self._size_max = max(1, size // 2)
                continue
            # From here on nothing waits: a cancellation has either lost a page that was never seen, or nothing.
            self._size = min(self._size * 2, self._size_max)
            self._at_end = len(page) < size
            self._ready.extend(page)
            if page:
                self._position = self._after(page[-1])
            return bool(page)


class Pending(NamedTuple):
    """What waits to be sent to a conversation: payloads by batch, and ``start``, where the first item should land.

    ``start`` is None if nothing of it was ever sent, or nobody can tell. ``echoes`` as in LaneFacts.
    """

    start: int | None
    batches: list[list[dict[str, Any]]]
    echoes: tuple[Batches, ...] = ()


class Replay(_Pages[Item]):
    """A conversation from ``offset`` on, oldest item first: ``async for item in replay``.

    First everything the server holds, verified to be gapless; then, with ``pending``, what is only on this machine, as
    items with ``seq=None``. Each item comes once, whatever is acknowledged meanwhile. Stamped items come without their
    stamp, and once however often the log holds them, unless ``raw``. ``limit`` bounds the number of items.

    Waiting for a page is the only await: cancelled there, the same object goes on from ``next_offset``.

    Raises, from a :class:`~memlog.MemoryLog`: MemoryUnavailableError if the server cannot be read (which is not an end
    of the log), AuthenticationError, SequenceError if the server's numbering contradicts the contract,
    ResponseTooLargeError if a single item is more than an answer may hold (smaller pages are tried before).
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Awaitable[list[Item]]],
        *,
        offset: int = 0,
        limit: int | None = None,
        pending: Callable[[int], Awaitable[Pending | None]] | None = None,
        raw: bool = False,
        begin: Iterable[Item] = (),
    ) -> None:
        super().__init__(
            fetch, _behind_item, position=offset, limit=limit, page=(_FIRST_PAGE_ITEMS, limits.PAGE_ITEMS_MAX)
        )
        self._pending = pending
        self._raw = raw
        self._seen: dict[str, int] = {}  # the highest number of each writer
        self._ready.extend(begin)

    @property
    def next_offset(self) -> int:
        """Where to go on: behind the last item of the log that was handed over."""
        return self._handed

    def _hand_over(self, entry: Item) -> Item | None:
        if entry.seq is not None:
            self._handed = entry.seq + 1
        stamp = None if self._raw else stamps.read(entry.payload)
        if stamp is None:
            return entry
        if stamp.number <= self._seen.get(stamp.writer, -1):
            return None  # another copy, or the original of one that was sent from here and is still thought to wait
        self._seen[stamp.writer] = stamp.number
        return replace(entry, payload=stamps.without(entry.payload))

    async def _advance(self) -> bool:
        while True:
            if not self._at_end and await self._next_page():
                return True
            if not self._at_end:
                continue
            if self._pending is None:
                return False
            waiting = await self._pending(self._position)
            if waiting is None:  # something was acknowledged behind the page that looked like the last one
                self._at_end = False
                continue
            here = await self._landed(waiting)
            self._pending = None
            self._ready.extend(Item(None, None, payload) for batch in waiting.batches[here:] for payload in batch)
            return bool(self._ready)

    async def _landed(self, waiting: Pending) -> int:
        """How many of the waiting batches were in the pages already: sent, stored there, the answer on its way."""
        if waiting.start is None or not waiting.batches or waiting.start >= self._position:
            return 0
        count = self._position - waiting.start
        if count > limits.PAGE_ITEMS_MAX:
            return 0
        keys = [[key(payload) for payload in batch] for batch in waiting.batches]
        there = await self._fetch(waiting.start, count)
        found = explain(keys, there, waiting.start, echoes=waiting.echoes)
        return 0 if found is None else found.batches


def _behind_item(item: Item) -> int:
    assert item.seq is not None  # what comes from the log has a number
    return item.seq + 1


class History(_Pages[HistoryEvent]):
    """The events of a team record and its predecessors, oldest first: ``async for event in history``.

    Sequence numbers ascend, with gaps where other records changed. ``after`` is the last sequence already known.
    """

    def __init__(
        self, fetch: Callable[[int, int], Awaitable[list[HistoryEvent]]], *, after: int = 0, limit: int | None = None
    ) -> None:
        page = (limits.HISTORY_EVENTS_MAX, limits.HISTORY_EVENTS_MAX)
        super().__init__(fetch, lambda event: event.sequence, position=after, limit=limit, page=page)

    @property
    def next_after(self) -> int:
        """Where to go on: the sequence of the last event handed over."""
        return self._handed
