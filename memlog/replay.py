"""Reading a log to its end: page → verify → yield, and after the log what has not reached it yet.

Iterators are classes, not generators: ``next_offset`` is right at every moment, an error or a cancellation loses
nothing, and iterating again goes on where it stopped. The end is a page shorter than asked for; nothing else is.

Each page but the first begins with the last item of the one before it, which must still be the same. So a log that is
reset, restored or cut short while it is read is an error and never a shorter conversation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

import anyio

from memlog import limits, payload, stamps
from memlog.errors import MemlogError, MemoryUnavailableError, ProtocolError, ResponseTooLargeError, SequenceError
from memlog.models import ConversationInfo, HistoryEvent, Item, Record
from memlog.reconcile import Batches, explain, key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

__all__ = ["Ahead", "Export", "History", "Listing", "Pages", "Pending", "Replay"]

T = TypeVar("T")

PAGE_ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
"""What a page of several items may take on the wire, where each item can be more than four times as long as it is."""

_PAGE_BYTES = 2 * 1024 * 1024  # of items, so that two pages at a time are no burden and a round trip is not felt
_FIRST_PAGE_ITEMS = 128  # nothing is known of the items yet
_GROWTH = 8
_SAMPLE_ITEMS = 16
_PROBE_PAGES = 16  # that went well before a size is tried that was too large
_POLL_SECONDS = (0.2, 5.0)
_WATCH_SECONDS = 0.2  # how long an end may go unnoticed
_ANYWHERE = 2**62


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

    def pages(self) -> Pages[T]:
        """The same iteration in lists, each of what one answer brought and never empty.

        Entries that were handed over already, this way or singly, do not come again.
        """
        return Pages(self)

    async def close(self) -> None:
        """End the iteration. Leaving it alone is as good: at most one page more is fetched, and thrown away."""
        self._closed = True
        self._ready.clear()

    async def aclose(self) -> None:
        """:meth:`close`, for :func:`contextlib.aclosing`."""
        await self.close()

    def _take(self) -> T | None:
        """The next entry, if it is here already."""
        while self._ready and self._left != 0:
            entry = self._hand_over(self._ready.popleft())
            if entry is not None:
                if self._left is not None:
                    self._left -= 1
                return entry
        return None

    def _take_all(self) -> list[T]:
        """All entries that are here already."""
        entries = []
        while (entry := self._take()) is not None:
            entries.append(entry)
        return entries

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
            if self._closed:
                return False
            self._size = min(self._size * 2, self._size_max)
            self._at_end = len(page) < size
            self._ready.extend(page)
            if page:
                self._position = self._after(page[-1])
            return bool(page)


class Pages(Generic[T]):
    """What :meth:`Replay.pages` returns."""

    def __init__(self, source: _Pages[T]) -> None:
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[T]:
        first = await anext(self._source)
        return [first, *self._source._take_all()]  # noqa: SLF001 - the other half of one thing


class Ahead(Protocol):
    """A page that is on its way. ``come`` waits for it, None if it got lost; ``drop`` gives it up."""

    async def come(self) -> list[Item] | None: ...

    def drop(self) -> None: ...


class Pending(NamedTuple):
    """What waits to be sent to a conversation: payloads by batch, and ``start``, where the first item should land.

    ``start`` is None if nothing of it was ever sent, or nobody can tell. ``echoes`` as in LaneFacts.
    """

    start: int | None
    batches: list[list[dict[str, Any]]]
    echoes: tuple[Batches, ...] = ()


class _Request(NamedTuple):
    """A page as it is asked for: ``size`` new items, behind ``known`` (0 or 1) that was read before."""

    position: int
    size: int
    known: int


class Replay(_Pages[Item]):
    """A conversation from ``offset`` on, oldest item first: ``async for item in replay``.

    First everything the server holds, verified to be gapless; then, with ``pending``, what is only on this machine, as
    items with ``seq=None``. Each item comes once, whatever is acknowledged meanwhile. Stamped items come without their
    stamp, and once however often the log holds them, unless ``raw``. ``limit`` bounds the number of items. With
    ``follow`` the end of the log is waited at for more, until it is closed.

    Waiting for a page is the only await: cancelled there, the same object goes on from ``next_offset``. A page holds
    about 2 MiB of items, 1,000 at most. From a :class:`~memlog.MemoryLog` the next one is fetched meanwhile.

    Raises, from a :class:`~memlog.MemoryLog`: MemoryUnavailableError if the server cannot be read (which is not an end
    of the log), AuthenticationError, SequenceError if the server's numbering contradicts the contract or an item that
    was read is gone or changed, ResponseTooLargeError if a single item is more than an answer may hold (smaller pages
    are tried before). Iterating on tries again, from ``next_offset``. An item that cannot be read is an error when its
    turn comes, and can be passed over with :meth:`skip`.
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
        ahead: Callable[[int, int], Ahead] | None = None,
        degrade: bool = False,
        degraded: bool = False,
        follow: Callable[[], bool] | None = None,
    ) -> None:
        """For ``degrade`` see :meth:`Conversation.replay`; ``follow()`` says whether there is still a log to follow."""
        super().__init__(
            fetch, _behind_item, position=offset, limit=limit, page=(_FIRST_PAGE_ITEMS, limits.PAGE_ITEMS_MAX)
        )
        self._pending = pending
        self._raw = raw
        self._seen: dict[str, int] = {}  # the highest number of each writer
        self._ready.extend(begin)
        self._last: tuple[object, bytes] | None = None  # time and key of the item before the position
        self._good_pages = 0
        self._probe_pages = _PROBE_PAGES
        self._readable: int | None = None  # items before one that cannot be read
        self._unreadable: int | None = None
        self._begin_ahead = ahead
        self._ahead: tuple[_Request, Ahead] | None = None
        self._degrade = degrade
        self._degraded = self._at_end = degraded
        self._follow = follow
        self._poll = _POLL_SECONDS[0]

    @property
    def next_offset(self) -> int:
        """Where to go on: behind the last item of the log that was handed over."""
        return self._handed

    @property
    def degraded(self) -> bool:
        """Whether the server could not be read, so that of the log something may be missing."""
        return self._degraded

    def skip(self) -> None:
        """Pass over the item at ``next_offset``, after the error that it cannot be read. ValueError otherwise."""
        if self._unreadable is None or self._unreadable != self._handed:
            raise ValueError("there is no item to skip: the last error was not about a single item")
        self._unreadable = self._last = None
        self._handed = self._position = self._handed + 1

    async def close(self) -> None:
        """End the iteration. Leaving it alone is as good: at most one page more is fetched, and thrown away."""
        await super().close()
        if self._ahead is not None:
            self._ahead[1].drop()
            self._ahead = None

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
        if self._follow is not None:
            return await self._tail(self._follow)
        while True:
            try:
                if not self._at_end and await self._next_page():
                    return True
                if self._closed:
                    return False
                if not self._at_end:
                    continue
                if self._pending is None:
                    return False
                waiting = await self._pending(_ANYWHERE if self._degraded else self._position)
                if waiting is None:  # something was acknowledged behind the page that looked like the last one
                    self._at_end = False
                    continue
                here = 0 if self._degraded else await self._landed(waiting)
            except MemoryUnavailableError:
                if not self._degrade or self._unreadable is not None:
                    raise
                self._degraded = self._at_end = True
                continue
            self._pending = None
            self._ready.extend(Item(None, None, payload) for batch in waiting.batches[here:] for payload in batch)
            return bool(self._ready)

    async def _tail(self, lives: Callable[[], bool]) -> bool:
        """The next page, however long it takes; False when there is no log any more."""
        while not self._closed and lives():
            if self._at_end:
                watch = anyio.current_time() + self._poll
                # In steps: it may be ended from another loop or thread, which no anyio.Event can be.
                while (left := watch - anyio.current_time()) > 0 and not self._closed and lives():  # noqa: ASYNC110
                    await anyio.sleep(min(left, _WATCH_SECONDS))
                self._poll = min(self._poll * 1.5, _POLL_SECONDS[1])
                self._at_end = False
                continue
            try:
                if await self._next_page():
                    self._poll = _POLL_SECONDS[0]
                    return True
            except MemlogError:
                if lives():
                    raise
        return False

    # --- pages

    async def _next_page(self) -> bool:
        while True:
            self._unreadable = None
            request, ahead = self._request(), None
            if self._ahead is not None:
                (request, ahead), self._ahead = self._ahead, None
            try:
                page = await ahead.come() if ahead is not None else None
                if page is None:
                    ahead = None
                    page = await self._fetch(request.position - request.known, request.known + request.size)
            except ResponseTooLargeError:
                if request.size == 1:
                    raise
                self._shrink(request.size)
                continue
            except MemlogError as error:
                self._look_for_the_item(error, request)
                continue
            # From here on nothing waits: a cancellation has either lost a page that was never seen, or nothing.
            if self._closed:
                return False
            new = self._checked(page, request)
            self._readable = None
            # What was fetched ahead may have ended where the log did then; it ends where it does when that is reached.
            self._at_end = len(new) < request.size and ahead is None
            self._ready.extend(new)
            if new:
                self._position = self._after(new[-1])
                self._measure(new)
            if len(new) == request.size:
                self._look_ahead()
            if new or self._at_end:
                return bool(new)

    def _request(self) -> _Request:
        size = self._size if self._readable is None else min(self._size, self._readable)
        if self._left is not None:
            size = max(1, min(size, self._left - len(self._ready)))
        known = 1 if self._last is not None and size > 1 else 0
        return _Request(self._position, min(size, limits.PAGE_ITEMS_MAX - known), known)

    def _look_ahead(self) -> None:
        if self._begin_ahead is not None and (self._left is None or self._left > len(self._ready)):
            request = self._request()
            self._ahead = request, self._begin_ahead(request.position - request.known, request.known + request.size)

    def _checked(self, page: list[Item], request: _Request) -> list[Item]:
        """The new items of the page; SequenceError if what was read before is not there as it was."""
        if not request.known:
            return page
        if not page or _identity(page[0]) != self._last:
            raise SequenceError("the log is not what it was while it was read", expected=request.position - 1, got=None)
        return page[1:]

    def _measure(self, page: list[Item]) -> None:
        """Let the size of pages follow that of items, and ask for the last item again."""
        self._last = _identity(page[-1])
        sample = page[:: -(-len(page) // _SAMPLE_ITEMS)]
        average = sum(map(_length, sample)) // len(sample) + 1
        self._good_pages += 1
        if self._good_pages >= self._probe_pages and self._size_max < limits.PAGE_ITEMS_MAX:
            self._size_max = min(2 * self._size_max, limits.PAGE_ITEMS_MAX)
            self._good_pages = 0
        self._size = max(1, min(_PAGE_BYTES // average, self._size * _GROWTH, self._size_max))

    def _shrink(self, size: int) -> None:
        """A page was too large. Such a size is tried again, but each time after twice as many that went well."""
        if self._size_max < limits.PAGE_ITEMS_MAX:
            self._probe_pages *= 2
        self._size = self._size_max = max(1, size // 4)
        self._good_pages = 0

    def _look_for_the_item(self, error: MemlogError, request: _Request) -> None:
        """Raise ``error``, unless only one item of the page is at fault and there are others before it to be read."""
        cause = error if isinstance(error, ProtocolError) else error.__cause__
        row = cause.row if isinstance(cause, ProtocolError) else None
        if row is None or row < request.known or row - request.known >= request.size:
            raise error
        if row == request.known:
            self._unreadable = request.position
            error.add_note(f"this is item {request.position}; Replay.skip() passes over it")
            raise error
        self._readable = row - request.known

    # --- pending

    async def _landed(self, waiting: Pending) -> int:
        """How many of the waiting batches were in the pages already: sent, stored there, the answer on its way."""
        if waiting.start is None or not waiting.batches or waiting.start >= self._position:
            return 0
        if self._position - waiting.start > limits.PAGE_ITEMS_MAX:
            return 0
        keys = [[key(payload) for payload in batch] for batch in waiting.batches]
        found = explain(keys, await self._again(waiting.start), waiting.start, echoes=waiting.echoes)
        return 0 if found is None else found.batches

    async def _again(self, start: int) -> list[Item]:
        """What the pages held from ``start`` on."""
        there: list[Item] = []
        while (left := self._position - start - len(there)) > 0:
            size = min(left, limits.PAGE_ITEMS_MAX)
            while True:
                try:
                    page = await self._fetch(start + len(there), size)
                    break
                except ResponseTooLargeError:
                    if size == 1:
                        raise
                    size = max(1, size // 4)
            there += page
            if len(page) < size:
                break
        return there


def _behind_item(item: Item) -> int:
    assert item.seq is not None  # what comes from the log has a number
    return item.seq + 1


def _identity(item: Item) -> tuple[object, bytes]:
    # Not the item itself: its payload is the reader's by the time of the next page, to be changed at will.
    return item.recorded_at, key(item.payload)


def _length(item: Item) -> int:
    try:
        return len(payload.dumps(item.payload))
    except (MemlogError, ValueError, RecursionError):
        return limits.ITEM_BYTES_MAX  # somebody else's, and nothing that memlog would have sent


class Listing:
    """The conversations of a site in the server's order: ``async for info in log.list_conversations()``.

    After an error, iterating again goes on where it stopped. Raises as :class:`Replay`, and ProtocolError from a server
    that gives the same page again for ever.
    """

    def __init__(self, fetch: Callable[[int, str | None], Awaitable[list[ConversationInfo]]]) -> None:
        self._fetch = fetch
        self._ready: deque[ConversationInfo] = deque()
        self._last: str | None = None
        self._first: str | None = None  # of the last page
        self._at_end = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConversationInfo:
        while not self._ready:
            if self._at_end:
                raise StopAsyncIteration
            await self._next_page()
        return self._ready.popleft()

    async def _next_page(self) -> None:
        page = await self._fetch(limits.PAGE_ITEMS_MAX, self._last)
        self._at_end = len(page) < limits.PAGE_ITEMS_MAX
        if not page:
            return
        if len(page) > limits.PAGE_ITEMS_MAX or page[0].conversation_id in (self._first, self._last):
            self._at_end = False
            raise ProtocolError("list_conversations: the server's pages do not go on from each other")
        self._first, self._last = page[0].conversation_id, page[-1].conversation_id
        self._ready.extend(page)


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


class Export(_Pages[Record]):
    """All records of a scope, superseded and deleted ones too, by ascending id: ``async for record in export``.

    ``after`` is the last id already known. What changes meanwhile comes as it was when its page was read.
    """

    def __init__(
        self, fetch: Callable[[int, int], Awaitable[list[Record]]], *, after: int = 0, limit: int | None = None
    ) -> None:
        page = (limits.EXPORT_RECORDS_MAX, limits.EXPORT_RECORDS_MAX)
        super().__init__(fetch, lambda record: record.id, position=after, limit=limit, page=page)

    @property
    def next_after(self) -> int:
        """Where to go on: the id of the last record handed over."""
        return self._handed
