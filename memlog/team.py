"""The tools of a team's memory server, with a personal token: records, their history, and writes to be repeated.

Every write carries a ``request_id``. The server remembers it for ever, per user and scope, and answers the same write
under the same id with what it answered first. So a write whose outcome is unknown is simply sent again: by this client
as its :class:`~memlog.retry.RetryPolicy` allows, and by the caller, also after a restart, who passes the id.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import UUID, uuid4

from memlog import limits, models, payload
from memlog.errors import (
    ConflictError,
    MemlogError,
    NotSavedError,
    PermanentError,
    ProtocolError,
    RateLimitedError,
    RecordUnavailableError,
    ReplacementRejectedError,
    RequestIdReusedError,
    RevisionChangedError,
    SequenceError,
    ServerError,
    TransientError,
)
from memlog.models import Scope
from memlog.protocol import Session
from memlog.replay import Export, History
from memlog.retry import RetryPolicy, retrying
from memlog.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from ssl import SSLContext
    from types import TracebackType

    from memlog.models import HistoryEvent, Record, Scopes
    from memlog.transport import Auth, BaseTransport

__all__ = ["TeamClient"]

T = TypeVar("T")

ScopeLike = Scope | Mapping[str, Any]

_CONTENT_CHARACTERS_MAX: Final = 200_000
_REASON_CHARACTERS_MAX: Final = 2000
_REDACTED: Final = "[REDACTED]"
_PRIVATE_TAG: Final = re.compile(r"<\s*(/?)private\s*>", re.IGNORECASE)
_TEXTS: Final[tuple[str, ...]] = ("content", "context", "project", "branch")
_INT64_MAX: Final = 2**63 - 1
"""The highest number that the server takes, and the id of a record that will never be."""

_CONFLICTS: Final[tuple[tuple[str, type[ConflictError]], ...]] = (
    ("request_id was already used", RequestIdReusedError),
    ("revision changed", RevisionChangedError),
    ("record unavailable", RecordUnavailableError),
    ("rejected by quality gate", ReplacementRejectedError),
)


class TeamClient:
    """A team's memory server. Belongs to the event loop of its first call, like :class:`memlog.client.Client`.

    Where a call takes a ``scope``, None is :meth:`Scope.personal`; a mapping such as the tools take is as good.

    Args:
        url: the address of the server's MCP endpoint, with or without the slash at its end.
        token: the personal token, sent as Bearer.
        timeout: the absolute limit of one attempt in seconds.
        retry: for reads and writes.
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

    # -- writing -------------------------------------------------------------------------------------------------------

    async def save(
        self,
        content: str,
        *,
        type: str = "fact",  # noqa: A002 - the tool's own word
        project: str = "general",
        tags: Iterable[str] = (),
        context: str = "",
        importance: str = "medium",
        source_format: str = "auto",
        branch: str = "",
        scope: ScopeLike | None = None,
        request_id: UUID | str | None = None,
        retry: RetryPolicy | None = None,
    ) -> Record:
        """Keep a text as a new record.

        If an active record of this scope, project and type says the same, in the same words, it is confirmed instead
        (``deduplicated``) and stays as it was. Look at ``redacted`` for what the server did not keep as it was sent.

        Args:
            content: 1 to 200,000 characters, not only spaces. The server takes a long while over words of more than
                some thousand letters.
            type: fact, decision, solution, lesson or convention.
            project: 1 to 128 characters.
            tags: up to 64, of up to 128 characters; the server keeps them in lower case, and may add some.
            context: up to 200,000 characters.
            importance: low, medium, high or critical.
            source_format: auto, which lets the server shorten what looks like a program's output or a long document to
                it, or conversation, which does not.
            branch: up to 128 characters.
            scope: where it goes.
            request_id: a UUID, for a write that may have to be taken up again after a cancellation or a restart. One of
                the client's own is taken if it is left out; the record and an error tell it as ``request_id``.
            retry: instead of the client's own.

        Raises:
            ValueError: an argument that the server would not take, if that can be told here.
            NotSavedError: the server's quality gate did not keep it.
            RequestIdReusedError: another write went by this ``request_id`` already.
            PermanentError: refused; AuthenticationError if the caller may not write there.
            TransientError: from the last attempt. The outcome is unknown, as after a cancellation: call again with its
                ``request_id`` and the same arguments, or ask :meth:`happened`.
        """
        _check_text("content", content, _CONTENT_CHARACTERS_MAX)
        if isinstance(tags, str):
            raise ValueError("tags must be several texts, not one")  # noqa: TRY004 - as all bad arguments here
        sent = {
            "content": content,
            "type": type,
            "project": project,
            # In one order, or the server would take the same write of another process for a different one.
            "tags": sorted(tags) if isinstance(tags, AbstractSet) else list(tags),
            "context": context,
            "importance": importance,
            "source_format": source_format,
            "branch": branch,
        }
        return await self._write("memory_save", sent, scope, request_id, retry)

    async def update(
        self,
        id: int,  # noqa: A002 - the tool's own word
        content: str,
        *,
        expected_revision: int,
        reason: str,
        scope: ScopeLike | None = None,
        request_id: UUID | str | None = None,
        retry: RetryPolicy | None = None,
    ) -> Record:
        """Replace a record's text. Returns the new record, which has an id of its own; ``previous_id`` is the old one.

        ``reason`` (1 to 2,000 characters) is what the history shows.

        Raises: as :meth:`save`, and
            RevisionChangedError: the record has another revision, or is superseded or deleted by now.
            RecordUnavailableError: there is no such record in this scope.
            ReplacementRejectedError: the server's quality gate refused the text.
        """
        models.check_range("id", id, 1, _INT64_MAX)
        models.check_range("expected_revision", expected_revision, 1, _INT64_MAX)
        _check_text("content", content, _CONTENT_CHARACTERS_MAX)
        _check_text("reason", reason, _REASON_CHARACTERS_MAX)
        sent = {"id": id, "expected_revision": expected_revision, "content": content, "reason": reason}
        return await self._write("memory_update", sent, scope, request_id, retry)

    async def delete(
        self,
        id: int,  # noqa: A002 - the tool's own word
        *,
        expected_revision: int,
        reason: str,
        scope: ScopeLike | None = None,
        request_id: UUID | str | None = None,
        retry: RetryPolicy | None = None,
    ) -> Record:
        """Mark a record as deleted; it and its history stay readable. In the history this is an update.

        Raises: as :meth:`update`.
        """
        models.check_range("id", id, 1, _INT64_MAX)
        models.check_range("expected_revision", expected_revision, 1, _INT64_MAX)
        _check_text("reason", reason, _REASON_CHARACTERS_MAX)
        sent = {"id": id, "expected_revision": expected_revision, "reason": reason}
        return await self._write("memory_delete", sent, scope, request_id, retry)

    async def happened(
        self,
        *,
        request_id: UUID | str | None = None,
        id: int | None = None,  # noqa: A002 - the tool's own word
        expected_revision: int | None = None,
        reason: str | None = None,
        content: str | None = None,
        scope: ScopeLike | None = None,
        retry: RetryPolicy | None = None,
    ) -> bool:
        """Whether a write of this user, whose answer was never seen, took place. Changes nothing.

        Ask in one of two ways, always in the scope of the write:

        ``happened(request_id=…)`` serves for every write, and needs nothing else. The histories do not show these ids,
        so the server is sent a deletion of a record that cannot exist, under the same id: it says "already used" if a
        write went by the id, and "no such record" if none did. That leaves no trace: no record, no event, and the id is
        as free as before. Needs the right to write.

        ``happened(id=…, expected_revision=…)`` serves for an update or a deletion whose id was lost, and for readers of
        the scope. It reads the history: each revision of a record comes about once, so the write took place if the
        event which ended ``expected_revision`` is of this user and is what was sent: the deletion, or with ``content``
        the update to that text, and with ``reason`` for that reason. Parts that the server redacted match anything; a
        text that it shortened (see ``source_format`` of :meth:`save`) is not known again. If the same user sent the
        same write twice under two ids, it cannot tell which of the two it was.

        True is final. False is true of the moment: a request that was cut off may still be on its way through the
        server, which works them off one by one. Where it matters, do not ask but send the write again under the same
        ``request_id``: it is then carried out exactly once, and answered.

        Raises:
            ValueError: not exactly one of the two ways.
            RecordUnavailableError: there is no record ``id`` in this scope.
            PermanentError, TransientError: from the last attempt.
        """
        if (request_id is None) == (id is None):
            raise ValueError("happened() takes either request_id or id")
        policy = self._retry if retry is None else retry
        if id is None:
            if any(given is not None for given in (expected_revision, reason, content)):
                raise ValueError("expected_revision, reason and content go with id")
            return await self._is_used(_as_request_id(request_id), scope, policy)
        models.check_range("id", id, 1, _INT64_MAX)
        models.check_range("expected_revision", expected_revision, 1, _INT64_MAX)
        assert expected_revision is not None
        return await self._is_told(id, expected_revision, reason=reason, content=content, scope=scope, retry=policy)

    async def _is_used(self, request_id: str, scope: ScopeLike | None, retry: RetryPolicy) -> bool:
        question = {
            "id": _INT64_MAX,
            "expected_revision": 1,
            "reason": "asks whether this request was carried out",
            "request_id": request_id,
        }
        try:
            await self._ask("memory_delete", question, scope, retry, lambda answer: answer)
        except RequestIdReusedError:
            return True
        except RecordUnavailableError:
            return False
        raise ProtocolError("memory_delete: a record was deleted that cannot exist")

    async def _is_told(
        self,
        record_id: int,
        expected_revision: int,
        *,
        reason: str | None,
        content: str | None,
        scope: ScopeLike | None,
        retry: RetryPolicy,
    ) -> bool:
        ended = expected_revision + 1
        after = 0
        while True:
            events = await self.memory_history(record_id, scope, after, retry=retry)
            found = [event for event in events if event.record_id == record_id and event.revision == ended]
            event = next((event for event in found if event.operation != "confirm"), None)
            if event is not None or len(events) < limits.HISTORY_EVENTS_MAX:
                break
            after = events[-1].sequence
        if event is None or (reason is not None and not _same(reason, event.reason)):
            return False
        myself = (await self.scopes(retry=retry)).actor.get("user_id")
        if event.actor.get("user_id") != myself:
            return False
        state = event.after_state or {}
        if content is None:
            return state.get("status") == "deleted"
        successor = state.get("superseded_by")
        if type(successor) is not int:
            return False
        return _same(content, (await self.get(successor, scope=scope, retry=retry)).content)

    async def _write(
        self,
        name: str,
        sent: dict[str, Any],
        scope: ScopeLike | None,
        request_id: UUID | str | None,
        retry: RetryPolicy | None,
    ) -> Record:
        identity = str(uuid4()) if request_id is None else _as_request_id(request_id)
        may_be_done = False

        async def attempt() -> Record:
            nonlocal may_be_done
            try:
                return _written(name, sent, await self._call(name, encoded))
            except TransientError as error:
                may_be_done = may_be_done or error.outcome == "unknown"
                raise

        encoded = _encoded({**sent, "request_id": identity}, scope)
        try:
            record = await retrying(self._retry if retry is None else retry, attempt)
        except MemlogError as error:
            error.request_id = identity
            if may_be_done and isinstance(error, PermanentError) and not isinstance(error, ConflictError):
                error.add_note("an earlier attempt of this write may have been carried out")
            raise
        return replace(record, request_id=identity)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def get(
        self,
        id: int,  # noqa: A002 - the tool's own word
        *,
        scope: ScopeLike | None = None,
        retry: RetryPolicy | None = None,
    ) -> Record:
        """One record, whatever its status.

        Raises:
            ValueError: an argument out of range.
            RecordUnavailableError: there is no such record in this scope.
            PermanentError, TransientError: from the last attempt.
        """
        models.check_range("id", id, 1, _INT64_MAX)
        return await self._ask("memory_get", {"id": id}, scope, retry, models.read_record)

    async def scopes(self, *, retry: RetryPolicy | None = None) -> Scopes:
        """Who the token belongs to, and what its user can read and write.

        Raises:
            PermanentError, TransientError: from the last attempt.
        """
        return await self._ask("memory_scopes", {}, None, retry, models.read_scopes)

    def export(self, *, scope: ScopeLike | None = None, after: int = 0, limit: int | None = None) -> Export:
        """All records of a scope by ascending id, superseded and deleted ones too: ``async for record in …``.

        Raises, from its first await on, SequenceError for a page that does not ascend behind ``after`` or is too long,
        and PermanentError and TransientError from the last attempt; the same object can be gone on with.
        """

        async def page(position: int, size: int) -> list[Record]:
            records = await self._ask(
                "memory_export", {"after": position, "limit": size}, scope, None, models.read_records
            )
            _verify([record.id for record in records], position, size, "the export")
            return records

        return Export(page, after=after, limit=limit)

    def history(
        self,
        id: int,  # noqa: A002 - the tool's own word
        *,
        scope: ScopeLike | None = None,
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
        scope: ScopeLike | None = None,
        after: int = 0,
        limit: int = limits.HISTORY_EVENTS_MAX,
        *,
        retry: RetryPolicy | None = None,
    ) -> list[HistoryEvent]:
        """One page of the history of a record and of all it replaced: ``limit`` (1 to 50) events at most, oldest first.

        ``after`` is the last ``sequence`` received. The numbers have gaps; fewer than ``limit`` mean the end. Asked for
        a record that was replaced, it tells nothing of the successor but its id, in the last event.

        Raises:
            ValueError: an argument out of range.
            RecordUnavailableError: the server knows no such record in this scope.
            SequenceError: an event is not behind the one before it.
            PermanentError, TransientError: from the last attempt.
        """
        models.check_range("id", id, 1, _INT64_MAX)
        models.check_range("after", after, 0, _INT64_MAX)
        models.check_range("limit", limit, 1, limits.HISTORY_EVENTS_MAX)
        arguments = {"id": id, "after": after, "limit": limit}
        events = await self._ask("memory_history", arguments, scope, retry, models.read_events)
        _verify([event.sequence for event in events], after, limit, "the history")
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

    async def _ask(
        self,
        name: str,
        arguments: dict[str, Any],
        scope: ScopeLike | None,
        retry: RetryPolicy | None,
        read: Callable[[dict[str, Any]], T],
    ) -> T:
        encoded = _encoded(arguments, scope)

        async def attempt() -> T:
            answer = await self._call(name, encoded)
            try:
                return read(answer)
            except ValueError as error:
                raise ProtocolError(f"{name}: {error}") from None

        return await retrying(self._retry if retry is None else retry, attempt)

    async def _call(self, name: str, arguments: bytes, *, timeout: float | None = None) -> dict[str, Any]:
        try:
            return await self._session.call_tool(name, arguments, timeout=timeout)
        except (ServerError, RateLimitedError) as error:
            known = _known(error)
            if known is error:
                raise
            raise known from error


def _known(error: ServerError | RateLimitedError) -> MemlogError:
    """The error as this server means it, or the same one."""
    said = (error.server_said or "").lower()
    details: dict[str, Any] = {
        "status": error.status,
        "code": error.code,
        "server_said": error.server_said,
        "retry_after": error.retry_after,
    }
    words = str(error.args[0])
    if isinstance(error, RateLimitedError):
        # Too many requests at this moment, and not too many by this caller.
        return ServerError(words, outcome="not_sent", **details) if "server busy" in said else error
    if error.code == "not_found":
        return RecordUnavailableError(words, outcome="refused", **details)
    if error.code != "conflict":
        return error
    if "identity changed" in said:
        return ServerError(words, outcome="not_sent", **details)
    kind = next((cls for start, cls in _CONFLICTS if start in said), ConflictError)
    return kind(words, outcome="refused", **details)


def _written(name: str, sent: dict[str, Any], answer: dict[str, Any]) -> Record:
    data = answer.get("data")
    if isinstance(data, dict) and data.get("saved") is False:
        quality = data.get("quality")
        raise NotSavedError(
            f"{name}: the server's quality gate did not keep the text",
            quality=quality if isinstance(quality, dict) else None,
            outcome="refused",
        )
    try:
        record = models.read_record(answer)
    except ValueError as error:
        raise ProtocolError(f"{name}: {error}") from None
    return replace(record, redacted=_redacted(sent, record))


def _redacted(sent: dict[str, Any], record: Record) -> tuple[str, ...]:
    if record.deduplicated:
        # What came back is the text of the earlier save. It says the same in the same words, or some were taken out.
        return () if _words(sent["content"]) == _words(record.content) else ("content",)
    altered = [name for name in _TEXTS if name in sent and sent[name] != getattr(record, name)]
    # The server puts tags in lower case, and adds some.
    if not {tag.strip().lower() for tag in sent.get("tags", ())} - {""} <= set(record.tags):
        altered.append("tags")
    return tuple(altered)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold().replace("ё", "е"))  # noqa: RUF001


def _same(sent: str, kept: str) -> bool:
    """Whether ``kept`` is what the server makes of ``sent``: without secrets, and without private parts."""
    return any(_is_filled(kept.split(_REDACTED), text) for text in (sent, _without_private_parts(sent)))


def _is_filled(parts: list[str], text: str) -> bool:
    """Whether the text is these parts in this order, with something between any two of them."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1 or not text.startswith(first):
        return text == first
    end = len(first)
    for part in parts[1:-1]:
        found = text.find(part, end + 1)
        if found < 0:
            return False
        end = found + len(part)
    return text.endswith(last) and len(text) - len(last) > end


def _without_private_parts(text: str) -> str:
    kept, level, end = "", 0, 0
    for tag in _PRIVATE_TAG.finditer(text):
        if level == 0:
            kept += text[end : tag.start()]
        level = max(0, level + (-1 if tag[1] else 1))
        end = tag.end()
    return kept if level else kept + text[end:]


def _encoded(arguments: dict[str, Any], scope: ScopeLike | None) -> bytes:
    if scope is None:
        return payload.dumps(arguments)
    if isinstance(scope, Scope):
        scope = {"kind": scope.kind} | ({} if scope.team_id is None else {"team_id": scope.team_id})
    return payload.dumps({**arguments, "scope": dict(scope)})


def _as_request_id(given: object) -> str:
    if isinstance(given, UUID):
        return str(given)
    try:
        return str(UUID(str(given)))
    except ValueError:
        raise ValueError(f"request_id must be a UUID, not {given!r}") from None


def _check_text(name: str, value: object, most: int) -> None:
    if not isinstance(value, str) or not value.strip() or len(value) > most:
        raise ValueError(f"{name} must be a text of 1 to {most:,} characters, not only spaces")


def _verify(numbers: Sequence[int], after: int, limit: int, what: str) -> None:
    last = after
    for number in numbers:
        if number <= last:
            raise SequenceError(f"{what} does not ascend", expected=last + 1, got=number)
        last = number
    if len(numbers) > limit:
        raise SequenceError("the server's page is longer than asked for", expected=limit, got=len(numbers))
