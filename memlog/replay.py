"""Reading a log to its end: page → verify → yield, and after the log what has not reached it yet.

Iterators are classes, not generators: ``next_offset`` is right at every moment, an error or a cancellation loses
nothing, and iterating again goes on where it stopped. The end is a page shorter than asked for; nothing else is.

Each page but the first begins with the last item of the one before it, which must still be the same. So a log that is
reset, restored or cut short while it is read is an error and never a shorter conversation. So is one that ends before
what this machine knows to be acknowledged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

import anyio
from pydantic_core import to_json

from memlog import limits, payload, stamps
from memlog.errors import MemlogError, MemoryUnavailableError, ProtocolError, ResponseTooLargeError, SequenceError
from memlog.models import ConversationInfo, HistoryEvent, Item, Record
from memlog.reconcile import Batches, explain, key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

__all__ = ["Ahead", "Export", "History", "Listing", "Pages", "Pending", "Replay"]

T = TypeVar("T")

PAGE_ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
"""What a page of several items may take on the wire, where each item can be more than four times as long as it is."""

_PAGE_BYTES = 2 * 1024 * 1024  # of items, so that two pages at a time are no burden and a round trip is not felt
_VALUE_BYTES = 64
_FIRST_PAGE_ITEMS = 128  # nothing is known of the items yet
_GROWTH = 8
_SAMPLE_ITEMS = 16
_PROBE_PAGES = 16  # that went well before a size is tried that was too large
_POLL_SECONDS = (0.2, 5.0)
_WATCH_SECONDS = 0.2  # how long the end of a log that is followed may go unnoticed


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
        self._waiting: anyio.CancelScope | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (entry := self._take()) is None:
            if self._closed or self._left == 0 or not await self._wait():
                raise StopAsyncIteration
        return entry

    def pages(self) -> Pages[T]:
        """The same iteration in lists, each of what one answer brought and never empty.

        Entries that were handed over already, this way or singly, do not come again.
        """
        return Pages(self)

    async def close(self) -> None:
        """End the iteration, also for whoever waits for it. Leaving it alone is as good."""
        self._closed = True
        self._ready.clear()
        if self._waiting is not None:
            self._waiting.cancel()

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

    def _hand_over(self, entry: T) -> T | None:
        """The entry as the reader sees it; None to pass over it."""
        self._handed = self._after(entry)
        return entry

    async def _wait(self) -> bool:
        """:meth:`_advance`, for one task at a time, since two would fetch the same page. False when it is closed."""
        if self._waiting is not None:
            raise RuntimeError("somebody waits for this iteration already: each task needs one of its own")
        self._waiting = scope = anyio.CancelScope()
        with scope:
            try:
                return await self._advance()
            finally:
                self._waiting = None
        return False

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


class Pages(Generic[T]):
    """What :meth:`Replay.pages` returns."""

    def __init__(self, source: _Pages[T]) -> None:
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[T]:
        page = [await anext(self._source)]
        while (entry := self._source._take()) is not None:  # noqa: SLF001 - the other half of one thing
            page.append(entry)
        return page


class Ahead(Protocol):
    """A page that is on its way. ``come`` waits for it, None if it got lost; ``drop`` gives it up."""

    async def come(self) -> list[Item] | None: ...

    def drop(self) -> None: ...


class Pending(NamedTuple):
    """What waited to be sent to a conversation at one moment, when its log had been read up to a position.

    ``sizes`` has the bytes and items of each batch, in order. ``load(first, last)`` gives the bodies of those from
    ``first`` on, without ``last``; for one that was acknowledged since its range, for one that is gone None.

    ``start`` is where the first item should land, None if it was never sent or nobody can tell; ``echoes`` as in
    LaneFacts. ``beyond``: what says that the log is longer than it was read. ``length``: what it must have at least.
    """

    sizes: Sequence[tuple[int, int]]
    load: Callable[[int, int], Awaitable[Sequence[bytes | tuple[int, int] | None]]]
    start: int | None = None
    echoes: tuple[Batches, ...] = ()
    beyond: frozenset[object] = frozenset()
    length: int = 0


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

    Waiting for a page is the only await: cancelled there, the same object goes on from ``next_offset``. One task at a
    time may wait (RuntimeError). A page holds about 2 MiB of items, 1,000 at most. From a :class:`~memlog.MemoryLog`
    the next one is fetched meanwhile.

    Raises, from a :class:`~memlog.MemoryLog`: MemoryUnavailableError if the server cannot be read (which is not an end
    of the log), AuthenticationError, SequenceError if the server's numbering contradicts the contract or an item that
    was read or acknowledged is gone or changed, ResponseTooLargeError if a single item is more than an answer may hold
    (smaller pages are tried before), ClosedError if the log was closed. The error's ``conversation_id`` and
    ``next_offset`` say where to go on; iterating on tries again from there. An item that cannot be read is an error
    when its turn comes, and can be passed over with :meth:`skip`.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Awaitable[list[Item]]],
        *,
        conversation_id: str | None = None,
        offset: int = 0,
        limit: int | None = None,
        pending: Callable[[int], Awaitable[Pending]] | None = None,
        raw: bool = False,
        begin: Iterable[Item] = (),
        at_end: bool = False,
        ahead: Callable[[int, int], Ahead] | None = None,
        degrade: bool = False,
        degraded: bool = False,
        follow: Callable[[], bool] | None = None,
    ) -> None:
        """``begin``: the items before ``offset``, read already; ``at_end``: the log was seen to end there.

        ``pending(position)`` tells what waits. For ``degrade`` see :meth:`Conversation.replay`; ``follow()`` says
        whether there is still a log to follow.
        """
        super().__init__(
            fetch, _behind_item, position=offset, limit=limit, page=(_FIRST_PAGE_ITEMS, limits.PAGE_ITEMS_MAX)
        )
        self._conversation_id = conversation_id
        self._raw = raw
        self._seen: dict[str, int] = {}  # the highest number of each writer
        self._ready.extend(begin)
        self._at_end = at_end or degraded
        self._last: _Mark | None = None  # of the item before the position
        self._good_pages = 0
        self._probe_pages = _PROBE_PAGES
        self._bad = range(0)  # somewhere in it stands an item that cannot be read
        self._unreadable: int | None = None
        self._begin_ahead = ahead
        self._ahead: tuple[_Request, Ahead] | None = None
        self._look = pending
        self._beyond: frozenset[object] = frozenset()  # of the last look; the log was read once more since
        self._pending: Pending | None = None
        self._batches = 0  # of it that were handed over, or stood in the pages
        self._degrade = degrade
        self._degraded = degraded
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
        """End the iteration, also for whoever waits for it.

        Leaving it alone is as good: at most one page more is fetched, and thrown away.
        """
        await super().close()
        if self._ahead is not None:
            self._ahead[1].drop()
            self._ahead = None

    def _hand_over(self, entry: Item) -> Item | None:
        if entry.seq is not None:
            self._handed = entry.seq + 1
        if self._raw or stamps.KEY not in entry.payload or (stamp := stamps.read(entry.payload)) is None:
            return entry
        if stamp.number <= self._seen.get(stamp.writer, -1):
            return None  # another copy, or the original of one that was sent from here and is still thought to wait
        self._seen[stamp.writer] = stamp.number
        return replace(entry, payload=stamps.without(entry.payload))

    async def _advance(self) -> bool:
        try:
            return await (self._read_on() if self._follow is None else self._tail(self._follow))
        except MemlogError as error:
            error.conversation_id, error.next_offset = self._conversation_id, self._handed
            raise

    async def _read_on(self) -> bool:
        """The next page, or the next of what waits; False behind both."""
        while True:
            try:
                if not self._at_end:
                    if await self._next_page():
                        return True
                elif self._pending is not None:
                    return await self._next_pending(self._pending)
                elif self._look is not None:
                    await self._look_for_pending(self._look)
                else:
                    return False
            except MemoryUnavailableError:
                if not self._degrade or self._unreadable is not None:
                    raise
                self._degraded = self._at_end = True

    async def _tail(self, lives: Callable[[], bool]) -> bool:
        """The next page, however long it takes; False when there is no log any more."""
        while lives():
            if self._at_end:
                watch = anyio.current_time() + self._poll
                # In steps: the log may be closed from another loop or thread, which no anyio.Event can be.
                while (left := watch - anyio.current_time()) > 0 and lives():  # noqa: ASYNC110
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
                if request.known + request.size == 1:
                    raise
                self._shrink(request.size)
                continue
            except MemlogError as error:
                await self._look_for_the_item(error, request)
                continue
            # From here on nothing waits: a cancellation has either lost a page that was never seen, or nothing.
            new = self._checked(page, request)
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
        size = self._size
        if self._position < self._bad.stop:
            # Up to the bad item where its place is known; else it is looked for by halves.
            good = self._bad.start - self._position
            size = min(size, good if good > 0 else (self._bad.stop - self._position) // 2)
        if self._left is not None:
            size = min(size, self._left - len(self._ready))
        known = 1 if self._last is not None and self._size_max > 1 else 0  # else an answer can hold only one
        return _Request(self._position, max(1, min(size, limits.PAGE_ITEMS_MAX - known)), known)

    def _look_ahead(self) -> None:
        if self._begin_ahead is not None and (self._left is None or self._left > len(self._ready)):
            request = self._request()
            self._ahead = request, self._begin_ahead(request.position - request.known, request.known + request.size)

    def _checked(self, page: list[Item], request: _Request) -> list[Item]:
        """The new items of the page; SequenceError if what was read before is not there as it was."""
        if not request.known or self._last is None:
            return page
        if not page or not self._last.fits(page[0]):
            raise SequenceError("the log is not what it was while it was read", expected=request.position - 1, got=None)
        return page[1:]

    def _measure(self, page: list[Item]) -> None:
        """Let the size of pages follow that of items, and ask for the last item again."""
        self._last = _Mark(page[-1])
        sample = page[:: -(-len(page) // _SAMPLE_ITEMS)]
        average = sum(map(_weight, sample)) // len(sample) + 1
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

    async def _look_for_the_item(self, error: MemlogError, request: _Request) -> None:
        """Raise ``error``, unless one item of the page is at fault and there may be others before it to be read."""
        bad = _at_fault(error, request)
        if bad is None:
            raise error
        if _row(error) is None and request.position >= self._bad.stop and not await self._can_answer():
            raise error  # it is not about any item
        self._bad = bad
        if len(bad) == 1 and bad.start == request.position:
            self._unreadable = request.position
            error.add_note(f"this is item {request.position}; Replay.skip() passes over it")
            raise error

    async def _can_answer(self) -> bool:
        """Whether the server answers properly where no item can stand."""
        try:
            await self._fetch(limits.CONVERSATION_ITEMS_MAX, 1)
        except MemlogError:
            return False
        return True

    # --- pending

    async def _look_for_pending(self, look: Callable[[int], Awaitable[Pending]]) -> None:
        """See what waits, unless that shows that the log has not been read to its end."""
        found = await look(self._position)
        here: int | None = 0
        if not self._degraded:
            if found.beyond and found.beyond != self._beyond:
                # Something was acknowledged behind the page that looked like the last one.
                self._beyond, self._at_end = found.beyond, False
                return
            if found.length > self._position:
                self._beyond, self._at_end = frozenset(), False
                raise SequenceError("the log ends before what it acknowledged", expected=self._position, got=None)
            here = await self._landed(found)
        if here is not None:
            self._pending, self._batches = found, here

    async def _landed(self, waiting: Pending) -> int | None:
        """How many of the waiting batches were in the pages already: sent, stored there, the answer on its way.

        None if the answer of one came just now: what waits has to be looked at again.
        """
        start = self._position if waiting.start is None else waiting.start
        items = self._position - start
        leading = sum(total <= items for total in accumulate(count for _, count in waiting.sizes))
        if not leading or items > limits.PAGE_ITEMS_MAX:
            return 0
        bodies = await waiting.load(0, leading)
        if any(isinstance(body, tuple) for body in bodies):
            return None
        batches = [payload.decode_items(body) if isinstance(body, bytes) else [] for body in bodies]
        try:
            there = await self._again(start, self._position)
        except MemlogError as error:
            if _at_fault(error, _Request(start, items, 0)) is None:
                raise
            return 0  # what nobody can read is nothing of ours
        keys = [[key(entry) for entry in batch] for batch in batches]
        found = explain(keys, there, start, echoes=waiting.echoes)
        return 0 if found is None else found.batches

    async def _next_pending(self, pending: Pending) -> bool:
        """Make ready about a page of what waits; False if nothing is left."""
        while (first := self._batches) < len(pending.sizes):
            last, size = first, 0
            while last < len(pending.sizes) and last - first < limits.PAGE_ITEMS_MAX:
                size += pending.sizes[last][0]
                if last > first and size > _PAGE_BYTES:
                    break
                last += 1
            found = _joined(await pending.load(first, last))
            payloads = [entry for part in found for entry in await self._payloads(part)]
            self._batches = last
            self._ready.extend(Item(None, None, entry) for entry in payloads)
            if payloads:
                return True
        return False

    async def _payloads(self, found: bytes | tuple[int, int] | None) -> list[dict[str, Any]]:
        if isinstance(found, bytes):
            return payload.decode_items(found)
        if found is None:  # refused meanwhile: it does not wait any more
            return []
        try:  # acknowledged meanwhile: it is in the log
            return [item.payload for item in await self._again(found[0], found[1] + 1)]
        except MemoryUnavailableError:
            if not self._degraded:
                raise
            return []

    async def _again(self, start: int, stop: int) -> list[Item]:
        """These items of the log, whose end was seen to be behind them."""
        there: list[Item] = []
        size = limits.PAGE_ITEMS_MAX
        while (place := start + len(there)) < stop:
            size = min(size, stop - place)
            try:
                page = await self._fetch(place, size)
            except ResponseTooLargeError:
                if size == 1:
                    raise
                size = max(1, size // 4)
                continue
            if not page:
                raise SequenceError("the log is not what it was while it was read", expected=place, got=None)
            there += page
        return there


def _behind_item(item: Item) -> int:
    assert item.seq is not None  # what comes from the log has a number
    return item.seq + 1


class _Mark:
    """What an item looked like when it was read; its payload is the reader's since then, to be changed at will."""

    def __init__(self, item: Item) -> None:
        self._recorded_at = item.recorded_at
        self._text = _text(item)
        self._key = key(item.payload) if self._text is None else b""

    def fits(self, item: Item) -> bool:
        if item.recorded_at != self._recorded_at:
            return False
        if self._text is None:
            return key(item.payload) == self._key
        if _text(item) == self._text:
            return True
        # The names of an object have no order, and a server may give another one each time. That is seldom, and slow.
        try:
            return key(item.payload) == key(payload.loads(self._text))
        except ValueError:
            return False  # 1e999 is read as infinity, which is no JSON any more


def _weight(item: Item) -> int:
    """The bytes of an item, and something for each value in it: small ones take many times as much in memory."""
    text = _text(item)
    if text is None:
        return limits.ITEM_BYTES_MAX
    return len(text) + _VALUE_BYTES * (text.count(b"{") + text.count(b"[") + text.count(b'","'))


def _text(item: Item) -> bytes | None:
    # Not by payload.dumps, which walks through all values to check them: these are from a parser.
    try:
        return to_json(item.payload)
    except ValueError:
        return None  # somebody else's, and nothing that memlog would have sent


def _joined(found: Iterable[bytes | tuple[int, int] | None]) -> list[bytes | tuple[int, int] | None]:
    """Ranges that follow each other as one, which takes one call."""
    joined: list[bytes | tuple[int, int] | None] = []
    for part in found:
        before = joined[-1] if joined else None
        if isinstance(part, tuple) and isinstance(before, tuple) and before[1] + 1 == part[0]:
            joined[-1] = before[0], part[1]
        else:
            joined.append(part)
    return joined


def _at_fault(error: MemlogError, request: _Request) -> range | None:
    """Where in the page the item stands that cannot be read; None if it is not that which ``error`` is about."""
    new, row = range(request.position, request.position + request.size), _row(error)
    if row is None:
        return new if error.code == "json" else None  # one bad value, and the whole answer is no JSON
    place = request.position - request.known + row
    return range(place, place + 1) if place in new else None


def _row(error: MemlogError) -> int | None:
    cause = error if isinstance(error, ProtocolError) else error.__cause__
    return cause.row if isinstance(cause, ProtocolError) else None


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
        self._lock = anyio.Lock()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConversationInfo:
        while not self._ready:
            if self._at_end:
                raise StopAsyncIteration
            async with self._lock:
                if not self._ready and not self._at_end:
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
