"""Every error of memlog: one class per condition, wherever it is found. The class says who must act.

    MemlogError
    ├ PermanentError            do not send this again as it is
    │  ├ InvalidItemError           the caller: the item is not what the log can keep
    │  ├ TooLargeError              the caller: an item, a batch or a count above the contract's limit
    │  ├ InvalidConversationIdError the caller
    │  ├ InvalidRequestError        the caller: anything else the server calls invalid
    │  ├ ConversationFullError      the caller: start a successor conversation
    │  ├ RateLimitedError           the caller of `Client`: wait `retry_after`; a log waits by itself
    │  ├ AuthenticationError        the operator: credentials, or the kind of token
    │  ├ ConflictError              the caller: a team record is not as the call takes it to be
    │  │  ├ RevisionChangedError        read the record again
    │  │  ├ RecordUnavailableError      there is none of this id in this scope
    │  │  ├ RequestIdReusedError        the id belongs to another write, which was carried out
    │  │  └ ReplacementRejectedError    write another text
    │  └ NotSavedError              the caller: the team server's quality gate does not keep this text
    ├ TransientError            nobody: retry
    │  ├ ConnectionFailedError
    │  ├ TimedOutError
    │  ├ ServerError
    │  ├ ProtocolError
    │  ├ RedirectRefusedError
    │  └ ResponseTooLargeError
    ├ BufferFullError           the caller: slow down, or the operator: bring the server back
    ├ BufferUnusableError       the operator: the directory or a file in it
    ├ ClosedError               the caller: the log was closed
    ├ SequenceError             the operator: the server's numbering contradicts the contract
    └ MemoryUnavailableError    nobody: a read could not be answered, which is not the same as empty

An error carries its data as attributes and survives ``pickle`` and ``copy``. No message holds a payload or a
credential. ``outcome`` says what became of a request: ``"not_sent"``, ``"refused"`` (the server said no, nothing was
stored) or ``"unknown"`` (it may have been carried out).
"""

from __future__ import annotations

from typing import Any, Literal, Self

__all__ = [
    "AuthenticationError",
    "BufferFullError",
    "BufferUnusableError",
    "ClosedError",
    "ConflictError",
    "ConnectionFailedError",
    "ConversationFullError",
    "InvalidConversationIdError",
    "InvalidItemError",
    "InvalidRequestError",
    "MemlogError",
    "MemoryUnavailableError",
    "NotSavedError",
    "PermanentError",
    "ProtocolError",
    "RateLimitedError",
    "RecordUnavailableError",
    "RedirectRefusedError",
    "ReplacementRejectedError",
    "RequestIdReusedError",
    "ResponseTooLargeError",
    "RevisionChangedError",
    "SequenceError",
    "ServerError",
    "TimedOutError",
    "TooLargeError",
    "TransientError",
]

Outcome = Literal["not_sent", "refused", "unknown"]


class MemlogError(Exception):
    """Base of all. ``retry_after`` is in seconds, or None where waiting is not known to help.

    ``status`` is the HTTP status, ``code`` the JSON-RPC or tool error code and ``server_said`` the server's own words
    (trimmed, never a payload), each None where there was none. ``request_id`` is that of the team write which failed.
    ``next_offset`` is where the replay that raised it goes on, of ``conversation_id``.
    """

    request_id: str | None = None
    conversation_id: str | None = None
    next_offset: int | None = None

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        status: int | None = None,
        code: int | str | None = None,
        server_said: str | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status
        self.code = code
        self.server_said = server_said

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way back calls __init__ with `args`, which no subclass with data of its own survives.
        return _restore, (type(self), self.args, self.__dict__.copy())

    def __str__(self) -> str:
        said = f' (the server said: "{self.server_said}")' if self.server_said else ""
        place = f" of conversation {self.conversation_id}" if self.conversation_id else ""
        where = "" if self.next_offset is None else f" (to go on from offset {self.next_offset}{place})"
        return f"{super().__str__()}{said}{where}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__str__()!r})"


def _restore(cls: type[MemlogError], args: tuple[Any, ...], data: dict[str, Any]) -> MemlogError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(data)
    return error


class PermanentError(MemlogError):
    """Do not send this again as it is."""

    def __init__(self, message: str, *, outcome: Literal["not_sent", "refused"] = "not_sent", **details: Any) -> None:
        super().__init__(message, **details)
        self.outcome = outcome

    def about(self, conversation_id: str) -> Self:
        """This error with the conversation named in its message."""
        if self.args and conversation_id not in str(self.args[0]):
            self.args = (f"conversation {conversation_id}: {self.args[0]}",)
        return self


class InvalidItemError(PermanentError):
    """The item is not a JSON object that comes back as it went in. ``path`` is a JSON path such as ``$.a[3]``."""

    def __init__(self, path: str, reason: str, **details: Any) -> None:
        super().__init__(f"the item cannot be kept: {path}: {reason}", **details)
        self.path = path
        self.reason = reason


class TooLargeError(PermanentError):
    """``what`` is ``"item"`` or ``"batch"`` (``size`` and ``limit`` in bytes) or ``"count"`` (in items).

    ``size`` and ``limit`` are None where only the server measured.
    """

    def __init__(
        self, what: Literal["item", "batch", "count"], size: int | None, limit: int | None, **details: Any
    ) -> None:
        unit = "items" if what == "count" else "bytes"
        subject = {"item": "the item", "batch": "the batch", "count": "the number of items"}[what]
        if size is None or limit is None:
            text = f"{subject} is too large for the server"
        elif size < limit:
            text = f"{subject} must be at least 1 {unit[:-1]}, this is {size:,}"
        else:
            text = f"{subject} may be at most {limit:,} {unit}, this is {size:,}"
        super().__init__(text, **details)
        self.what = what
        self.size = size
        self.limit = limit


class InvalidConversationIdError(PermanentError):
    """8 to 64 characters from ``[A-Za-z0-9_-]``; :func:`memlog.new_conversation_id` mints one."""

    def __init__(self, reason: str, **details: Any) -> None:
        super().__init__(f"not a conversation id: {reason}", **details)
        self.reason = reason


class InvalidRequestError(PermanentError):
    """The server calls the request invalid, and none of the narrower classes says why."""


class ConversationFullError(PermanentError):
    """The conversation holds all the items it may (``limit``); go on in a new one."""

    conversation_id: str

    def __init__(self, conversation_id: str, limit: int, **details: Any) -> None:
        super().__init__(f"conversation {conversation_id} is full: it may hold at most {limit:,} items", **details)
        self.conversation_id = conversation_id
        self.limit = limit


class RateLimitedError(PermanentError):
    """The site exceeded its rate limit. Permanent for this call: come back after ``retry_after`` seconds."""


class AuthenticationError(PermanentError):
    """The credentials were refused, or are of the wrong kind for this tool. A log keeps everything and waits."""


class ConflictError(PermanentError):
    """The team's records are not as the call takes them to be. It changed nothing; ``server_said`` has the reason."""


class RevisionChangedError(ConflictError):
    """The record has another revision by now, or is not active any more: read it, and decide anew."""


class RecordUnavailableError(ConflictError):
    """The server knows no such record in this scope."""


class RequestIdReusedError(ConflictError):
    """Another write of the same user went by this ``request_id`` in this scope, and was carried out."""


class ReplacementRejectedError(ConflictError):
    """The server's quality gate refused the text of an update."""


class NotSavedError(PermanentError):
    """The server's quality gate did not keep the text; ``quality`` is what it says of it, if it says anything."""

    def __init__(self, message: str, *, quality: dict[str, Any] | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.quality = quality


class TransientError(MemlogError):
    """Nothing is wrong with the request: try again."""

    def __init__(self, message: str, *, outcome: Literal["not_sent", "unknown"] = "unknown", **details: Any) -> None:
        super().__init__(message, **details)
        self.outcome = outcome


class ConnectionFailedError(TransientError):
    """No connection, or it broke."""


class TimedOutError(TransientError):
    """No answer in time."""


class ServerError(TransientError):
    """The server failed, or answered with a status (``status``) or code nobody has agreed on."""


class ProtocolError(TransientError):
    """The answer is not what the protocol or the contract calls an answer: a proxy's page, a wrong address, a bug.

    ``row`` is the place in its list, from 0, of the one entry that could not be read; None if it is not that.
    ``code`` is "json" if the answer should be JSON and is not.
    """

    def __init__(self, message: str, *, row: int | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.row = row


class RedirectRefusedError(TransientError):
    """The server points elsewhere (``location``); credentials and payloads are not carried there."""

    def __init__(self, message: str, *, location: str | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.location = location


class ResponseTooLargeError(TransientError):
    """The answer exceeded ``limit`` bytes and was cut."""

    def __init__(self, message: str, *, limit: int, **details: Any) -> None:
        super().__init__(message, **details)
        self.limit = limit


class BufferFullError(MemlogError):
    """Nothing was stored: ``bytes`` of at most ``limit`` bytes are held, ``what`` is "unstored", "disk" or "memory".

    ``what`` is "device" if there is no room left on the disk itself, whoever took it; ``limit`` is 0 then.
    """

    def __init__(
        self,
        what: Literal["unstored", "disk", "memory", "device"],
        bytes: int,  # noqa: A002 - the public name of the attribute
        limit: int,
        **details: Any,
    ) -> None:
        where = {"unstored": "waiting for the disk", "disk": "on disk", "memory": "in memory", "device": ""}[what]
        held = f"the buffer is full: {bytes:,} bytes {where}, at most {limit:,}"
        if what == "device":
            held = f"the disk is full: it has no room beyond the {bytes:,} bytes that wait"
        super().__init__(f"{held}; nothing of this append was stored", **details)
        self.what = what
        self.bytes = bytes
        self.limit = limit


class BufferUnusableError(MemlogError):
    """The directory or a file in it cannot be used (``path``, ``reason``); nothing was stored there by this call."""

    def __init__(self, path: str, reason: str, **details: Any) -> None:
        super().__init__(f"the buffer at {path} cannot be used: {reason}", **details)
        self.path = path
        self.reason = reason


class ClosedError(MemlogError):
    """The log was closed. What was stored before is on disk and goes out when a log is opened there again."""


class SequenceError(MemlogError):
    """The server's numbering contradicts the contract: ``got`` where ``expected`` should stand.

    ``got`` is None if the item ``expected``, which was read or acknowledged before, is gone or another one by now: the
    log was changed or reset underneath.
    """

    def __init__(self, message: str, *, expected: int, got: int | None, **details: Any) -> None:
        place = f"item {expected}" if got is None else f"expected {expected}, got {got}"
        super().__init__(f"{message}: {place}", **details)
        self.expected = expected
        self.got = got


class MemoryUnavailableError(MemlogError):
    """A read could not be answered. That is not the same as an empty conversation; the cause is chained."""


def to_record(error: MemlogError) -> dict[str, Any]:
    """The error as JSON, to be kept beside what it is about."""
    return {"type": type(error).__name__, "args": list(error.args), "data": dict(error.__dict__)}


def from_record(record: dict[str, Any]) -> MemlogError:
    """What :func:`to_record` kept; an error class that this version does not know comes back as PermanentError."""
    name = record.get("type")
    cls = globals()[name] if name in __all__ else PermanentError
    return _restore(cls, tuple(record.get("args", ())), {**_DEFAULTS, **record.get("data", {})})


_DEFAULTS = {"retry_after": None, "status": None, "code": None, "server_said": None, "outcome": "refused"}
