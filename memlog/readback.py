"""Reading the log back: what became of a request, when its answer does not say.

The reads are here, the reasoning is in :mod:`memlog.reconcile`. What the reader is told of a conversation
(:class:`~memlog.spool.LaneFacts`) was stored before the first request left and with every acknowledgement, so that it
answers the same after a crash. Where somebody else appends, too, only stamps prove anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memlog import limits, stamps
from memlog.errors import MemlogError, ProtocolError, ResponseTooLargeError
from memlog.payload import decode_items
from memlog.reconcile import Batches, Explanation, explain, key
from memlog.retry import NO_RETRY

if TYPE_CHECKING:
    from memlog.client import Client
    from memlog.models import Ack, Item
    from memlog.spool import LaneFacts, Row

READ_BACK_ITEMS = limits.PAGE_ITEMS_MAX
"""How much of the log is read to find out about one request; a tail that fills this proves nothing."""


class Reset(NamedTuple):
    """The log is not the one that was appended to: emptied, or restored from a backup. ``length``: what it has now."""

    length: int


class Readback:
    """Asks the server's log about requests, one read at a time and never twice: who asks knows when to ask again."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def canary(self, conversation: str) -> MemlogError | None:
        """Read with the same credentials; what that met, or None if it went well."""
        try:
            await self._read(conversation, 0, 1)
        except MemlogError as error:
            return error
        return None

    async def length(self, conversation: str) -> int:
        """How long the conversation is, in about 2 log2(length) reads of one item."""

        async def holds(seq: int) -> bool:
            return bool(await self._read(conversation, seq, 1))

        if not await holds(0):
            return 0
        last, step = 0, 1
        while await holds(last + step):
            last += step
            step *= 2
        missing = last + step
        while missing - last > 1:
            middle = (last + missing) // 2
            last, missing = (middle, missing) if await holds(middle) else (last, middle)
        return missing

    async def landed(self, conversation: str, facts: LaneFacts, rows: list[Row]) -> Explanation | Reset | None:
        """Which of ``rows``, and of the lane's echoes, the log holds past its known end; None: it proves nothing."""
        assert facts.next_seq is not None
        stamped = are_stamped(rows)
        if facts.shared and not stamped:
            return None
        start = facts.next_seq
        offset = start - 1 if facts.anchor is not None and start > 0 else start
        tail = await self._tail(conversation, offset, READ_BACK_ITEMS)
        if tail is None:
            return None
        full = len(tail) == READ_BACK_ITEMS
        if offset < start:
            if not tail or key(tail[0].payload) != facts.anchor:
                return Reset(await self.length(conversation))
            tail = tail[1:]
        return None if full else explain(keys_of(rows), tail, start, echoes=facts.echoes, stamped=stamped)

    async def check(
        self, conversation: str, facts: LaneFacts, rows: list[Row], ack: Ack
    ) -> tuple[Explanation, bool, bool]:
        """Hold an acknowledgement against what was expected: gapless numbering tells what happened in between.

        Besides what landed where: whether somebody else appends, too, and whether the log was reset. ProtocolError if
        the range does not hold what was sent.
        """
        start = facts.next_seq
        assert start is not None
        as_told = Explanation(len(rows), ack.first_seq, ())
        if ack.first_seq == start:
            return as_told, False, False
        waiting, stamped = keys_of(rows), are_stamped(rows)
        items = ack.last_seq + 1 - ack.first_seq
        gap = ack.first_seq - start
        if 0 < gap <= READ_BACK_ITEMS - items:
            tail = await self._tail(conversation, start, gap + items)
            between, named = (None, None) if tail is None else (tail[:gap], tail[gap:])
        else:
            between, named = None, await self._tail(conversation, ack.first_seq, items)
        if named is not None:
            there = explain(waiting, named, ack.first_seq)
            if there is None or there.batches < len(rows):
                reason = "the acknowledgement names a range that does not hold what was sent"
                raise ProtocolError(f"conversation {conversation}: {reason}", outcome="unknown")
        if between is None or (facts.shared and not stamped):
            return as_told, gap > 0, gap < 0
        found = explain(waiting, between, start, echoes=facts.echoes, stamped=stamped)
        if found is None:
            return as_told, True, False
        copies = found.copies(waiting)
        ours = sum(last - first + 1 for first, last in copies)
        return as_told._replace(duplicates=copies), ours < gap, False

    async def echoes(self, conversation: str, facts: LaneFacts) -> Explanation | None:
        """Which of the lane's echoes arrived past the known end, while nothing waits; None: it proves nothing."""
        assert facts.next_seq is not None
        if facts.shared:
            return Explanation(0, facts.next_seq, ())  # told already that duplicates are possible
        tail = await self._tail(conversation, facts.next_seq, READ_BACK_ITEMS)
        if tail is None or len(tail) == READ_BACK_ITEMS:
            return None
        return explain([], tail, facts.next_seq, echoes=facts.echoes)

    async def _tail(self, conversation: str, start: int, limit: int) -> list[Item] | None:
        """``limit`` items of the log from ``start``, or fewer at its end; None if that is more than an answer holds."""
        try:
            return await self._read(conversation, start, limit)
        except ResponseTooLargeError:
            return None

    async def _read(self, conversation: str, offset: int, limit: int) -> list[Item]:
        return await self._client.replay_memory(conversation, offset, limit, retry=NO_RETRY)


def keys_of(rows: list[Row]) -> Batches:
    """The rows as :func:`~memlog.reconcile.explain` compares them."""
    return [[key(payload) for payload in decode_items(row.body)] for row in rows]


def are_stamped(rows: list[Row]) -> bool:
    """Whether every item of the rows carries a stamp."""
    return all(stamps.read(payload) is not None for row in rows for payload in decode_items(row.body))
