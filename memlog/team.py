"""The tools of a team's memory server, with a personal token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from memlog import limits, models, payload
from memlog.errors import InvalidRequestError, ProtocolError, SequenceError, ServerError
from memlog.protocol import Session
from memlog.replay import History
from memlog.retry import RetryPolicy, retrying
from memlog.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from ssl import SSLContext
    from types import TracebackType

    from memlog.models import HistoryEvent
    from memlog.transport import Auth, BaseTransport

__all__ = ["TeamClient"]

_NOT_PASSING_CODES = frozenset({"conflict", "not_found"})
"""Codes of this server that no waiting changes: the record does not exist, or is another one by now."""


class TeamClient:
    """A team's memory server. Belongs to the event loop of its first call, like :class:`memlog.client.Client`.

    Args:
        url: the address of the server's MCP endpoint, with or without the slash at its end.
        token: the personal token, sent as Bearer.
        timeout: the absolute limit of one attempt in seconds.
        retry: for reads.
        allow_insecure: send the token over plain http to another machine all the same.
        ssl_context: for https, instead of the authorities of the system and of ``SSL_CERT_FILE`` or ``SSL_CERT_DIR``.
        transport: stands in for the network in tests (an ``httpx.AsyncBaseTransport``).

    Raises:
        ValueError: an argument that cannot be meant. Nothing is sent before the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        token: Auth | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        allow_insecure: bool = False,
        ssl_context: SSLContext | None = None,
        transport: BaseTransport | None = None,
    ) -> None:
        self._transport = Transport(
            url,
            auth=token,
            timeout=timeout,
            allow_insecure=allow_insecure,
            transport=transport,
            ssl_context=ssl_context,
        )
        self._session = Session(self._transport)
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

    def history(
        self,
        id: int,  # noqa: A002 - the tool's own word
        *,
        scope: Mapping[str, object] | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> History:
        """All events of a record and of the versions it replaced: ``async for event in team.history(815)``.

        Raises, from its first await on, what :meth:`memory_history` raises; the same object can be gone on with.
        """

        async def page(position: int, size: int) -> list[HistoryEvent]:
            return await self.memory_history(id, scope, position, size)

        return History(page, after=after, limit=limit)

    async def memory_history(
        self,
        id: int,  # noqa: A002 - the tool's own word
        scope: Mapping[str, object] | None = None,
        after: int = 0,
        limit: int = limits.HISTORY_EVENTS_MAX,
        *,
        retry: RetryPolicy | None = None,
    ) -> list[HistoryEvent]:
        """One page of the history of a record and of all it replaced: ``limit`` (1 to 50) events at most, oldest first.

        ``after`` is the last ``sequence`` received. The numbers have gaps; fewer than ``limit`` mean the end.

        Raises:
            ValueError: an argument out of range.
            InvalidRequestError: the server knows no such record in this scope.
            SequenceError: an event is not behind the one before it.
            PermanentError, TransientError: from the last attempt.
        """
        models.check_range("id", id, 1, None)
        models.check_range("after", after, 0, None)
        models.check_range("limit", limit, 1, limits.HISTORY_EVENTS_MAX)
        arguments: dict[str, object] = {"id": id, "after": after, "limit": limit}
        if scope is not None:
            arguments["scope"] = dict(scope)
        encoded = payload.dumps(arguments)

        async def attempt() -> list[HistoryEvent]:
            answer = await self._call("memory_history", encoded)
            try:
                return models.read_events(answer)
            except ValueError as error:
                raise ProtocolError(f"memory_history: {error}") from None

        events = await retrying(self._retry if retry is None else retry, attempt)
        _verify(events, after, limit)
        return events

    async def call_tool(
        self, name: str, arguments: Mapping[str, object] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """The open door: call any tool once, and return the JSON object it answers with.

        Raises:
            InvalidItemError: the arguments are not JSON.
            PermanentError, TransientError: as the server or the network had it.
        """
        return await self._call(name, payload.dumps({} if arguments is None else arguments), timeout=timeout)

    async def _call(self, name: str, arguments: bytes, *, timeout: float | None = None) -> dict[str, Any]:
        try:
            return await self._session.call_tool(name, arguments, timeout=timeout)
        except ServerError as error:
            if error.code not in _NOT_PASSING_CODES:
                raise
            raise InvalidRequestError(
                str(error.args[0]),
                outcome="refused",
                status=error.status,
                code=error.code,
                server_said=error.server_said,
            ) from error


def _verify(events: list[HistoryEvent], after: int, limit: int) -> None:
    last = after
    for event in events:
        if event.sequence <= last:
            raise SequenceError("the history does not ascend", expected=last + 1, got=event.sequence)
        last = event.sequence
    if len(events) > limit:
        raise SequenceError("the server's page is longer than asked for", expected=limit, got=len(events))
