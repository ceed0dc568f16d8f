"""One typed method per tool of the site's memory, in the caller's own event loop and without a buffer.

A :class:`Client` says what happened and leaves it at that: an append is attempted once, a read is tried again for as
long as its :class:`~memlog.retry.RetryPolicy` allows. What the contract promises about an answer is verified before
the answer is handed out, so that an odd server is an error and never a short conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

from memlog import limits, models, payload
from memlog.errors import ProtocolError, SequenceError
from memlog.protocol import Session
from memlog.replay import PAGE_ANSWER_BYTES_MAX, Replay
from memlog.retry import RetryPolicy, retrying
from memlog.transport import Transport, answer_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from ssl import SSLContext
    from types import TracebackType

    from memlog.models import Ack, ConversationInfo, Item
    from memlog.protocol import Era
    from memlog.transport import Auth, BaseTransport

__all__ = ["Client"]

T = TypeVar("T")


class Client:
    """The tools of one memory server, for one site.

    An async context manager; using it without and calling :meth:`close` is as good. It belongs to the event loop of its
    first call, asyncio or trio, and may be shared by any number of tasks there.

    Args:
        url: the address of the server's MCP endpoint.
        auth: ``(user, password)`` for Basic, a token for Bearer, any ``httpx.Auth``, or a plain function that returns
            one of the first two and is asked again after a 401. It runs in the event loop: it should not block.
        timeout: the absolute limit of one attempt in seconds.
        retry: for reads.
        allow_insecure: send credentials over plain http to another machine all the same.
        ssl_context: for https, instead of the authorities of the system and of ``SSL_CERT_FILE`` or ``SSL_CERT_DIR``.
        transport: stands in for the network in tests (an ``httpx.AsyncBaseTransport``).
        era: of the protocol; ``"auto"`` asks the server once, ``"modern"`` and ``"legacy"`` save the question.

    Raises:
        ValueError: an argument that cannot be meant. Nothing is sent before the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        auth: Auth | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        allow_insecure: bool = False,
        ssl_context: SSLContext | None = None,
        transport: BaseTransport | None = None,
        era: Era = "auto",
    ) -> None:
        self._transport = Transport(
            url,
            auth=auth,
            timeout=timeout,
            allow_insecure=allow_insecure,
            transport=transport,
            ssl_context=ssl_context,
        )
        self._session = Session(self._transport, era=era)
        self._retry = RetryPolicy() if retry is None else retry

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.where!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls under way end by themselves, later ones raise ClosedError. From any task."""
        await self._session.close()

    async def append_memory(self, conversation_id: str, items: Sequence[payload.ItemLike]) -> Ack:
        """Append 1 to 250 items as one atomic batch, in one attempt, and return the range they occupy.

        Never tried again by itself: on an error whose ``outcome`` is ``"unknown"`` the batch may be in the log, also
        after a cancellation.

        Raises:
            PermanentError: found here before sending (``outcome`` is ``"not_sent"``) or refused by the server.
                RateLimitedError says in ``retry_after`` when to come back.
            TransientError: the same call may be made again; the contract tolerates the duplicate it may cause.
        """
        payload.check_conversation_id(conversation_id)
        batch = payload.encode_batch(items)
        return await self.append_encoded(conversation_id, batch.body, batch.items)

    async def append_encoded(self, conversation_id: str, body: bytes, items: int) -> Ack:
        """Append ``items`` items that are encoded already, as :class:`memlog.payload.Batch` holds them.

        Raises: as :meth:`append_memory`; a ProtocolError where the acknowledgement does not fit the batch.
        """
        arguments = b'{"conversation_id":"%b","items":[%b]}' % (conversation_id.encode(), body)
        answer = await self._session.call_tool("append_memory", arguments, conversation_id=conversation_id)
        try:
            ack = models.read_ack(answer)
        except ValueError as error:
            raise ProtocolError(f"append_memory: not an acknowledgement: {error}") from None
        if ack.last_seq - ack.first_seq + 1 != items:
            raise ProtocolError(
                f"append_memory: {items} items were sent, acknowledged are {ack.first_seq} to {ack.last_seq}"
            )
        return ack

    async def replay_memory(
        self,
        conversation_id: str,
        offset: int = 0,
        limit: int = limits.PAGE_ITEMS_MAX,
        *,
        retry: RetryPolicy | None = None,
    ) -> list[Item]:
        """One page: up to ``limit`` (1 to 1,000) items from position ``offset``, ascending and without a gap.

        Fewer than ``limit`` mean that the end of the log was reached; an unknown conversation reads as empty.

        Raises:
            ValueError: offset or limit out of range.
            SequenceError: the page does not start at ``offset``, has a gap, or is longer than asked for.
            PermanentError, TransientError: from the last attempt.
        """
        payload.check_conversation_id(conversation_id)
        models.check_range("offset", offset, 0, None)
        models.check_range("limit", limit, 1, limits.PAGE_ITEMS_MAX)
        arguments = {"conversation_id": conversation_id, "offset": offset, "limit": limit}
        items = await self._read("replay_memory", arguments, models.read_items, retry)
        _verify(items, offset, limit)
        return items

    def replay(self, conversation_id: str, offset: int = 0, *, limit: int | None = None) -> Replay:
        """The conversation from ``offset`` on, to its end or ``limit`` items: ``async for item in client.replay(id)``.

        Raises, from its first await on, what :meth:`replay_memory` raises; the same object can be gone on with.
        """
        payload.check_conversation_id(conversation_id)

        async def page(position: int, size: int) -> list[Item]:
            return await self.replay_page(conversation_id, position, size)

        return Replay(page, conversation_id=conversation_id, offset=offset, limit=limit)

    async def replay_page(self, conversation_id: str, offset: int, limit: int) -> list[Item]:
        """:meth:`replay_memory`, but an answer that takes much memory is ResponseTooLargeError, unless of one item."""
        if limit == 1:
            return await self.replay_memory(conversation_id, offset, limit)
        token = answer_limit.set(PAGE_ANSWER_BYTES_MAX)
        try:
            return await self.replay_memory(conversation_id, offset, limit)
        finally:
            answer_limit.reset(token)

    async def recall_memory(
        self, conversation_id: str, limit: int = 100, *, retry: RetryPolicy | None = None
    ) -> list[Item]:
        """The last ``limit`` (1 to 1,000) items, ascending whatever the order in which the server gives them.

        Raises: as :meth:`replay_memory`.
        """
        payload.check_conversation_id(conversation_id)
        models.check_range("limit", limit, 1, limits.PAGE_ITEMS_MAX)
        arguments = {"conversation_id": conversation_id, "limit": limit}
        items = await self._read("recall_memory", arguments, models.read_items, retry)
        if len(items) > 1 and _seq(items[0]) > _seq(items[-1]):
            items.reverse()
        if items:
            _verify(items, _seq(items[0]), limit)
        return items

    async def list_conversations(
        self, limit: int = 100, after: str | None = None, *, retry: RetryPolicy | None = None
    ) -> list[ConversationInfo]:
        """Up to ``limit`` (1 to 1,000) conversations of the site, those behind ``after`` in the server's order.

        Raises:
            ValueError: limit out of range.
            PermanentError, TransientError: from the last attempt.
        """
        models.check_range("limit", limit, 1, limits.PAGE_ITEMS_MAX)
        arguments: dict[str, object] = {"limit": limit}
        if after is not None:
            arguments["after"] = after
        return await self._read("list_conversations", arguments, models.read_conversations, retry)

    async def call_tool(
        self, name: str, arguments: Mapping[str, object] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """The open door: call any tool once, and return the JSON object it answers with.

        Raises:
            InvalidItemError: the arguments are not JSON.
            PermanentError, TransientError: as the server or the network had it.
        """
        encoded = payload.dumps({} if arguments is None else arguments)
        return await self._session.call_tool(name, encoded, timeout=timeout)

    async def _read(
        self,
        name: str,
        arguments: Mapping[str, object],
        read: Callable[[dict[str, Any]], T],
        retry: RetryPolicy | None,
    ) -> T:
        encoded = payload.dumps(arguments)

        async def attempt() -> T:
            answer = await self._session.call_tool(name, encoded)
            try:
                return read(answer)
            except ValueError as error:
                # As transient as no answer at all: it may come from a server that is just being replaced.
                row = error.row if isinstance(error, models.RowError) else None
                raise ProtocolError(f"{name}: {error}", row=row) from None

        return await retrying(self._retry if retry is None else retry, attempt)


def _verify(items: list[Item], offset: int, limit: int) -> None:
    for expected, item in enumerate(items, start=offset):
        if item.seq != expected:
            raise SequenceError("the server's page does not count on", expected=expected, got=_seq(item))
    if len(items) > limit:
        end = offset + limit - 1
        raise SequenceError("the server's page is longer than asked for", expected=end, got=_seq(items[-1]))


def _seq(item: Item) -> int:
    assert item.seq is not None
    return item.seq
