"""The plain values handed to callers, and the one place where an answer's shape is checked.

Answers are read leniently where the contract is silent (what is not known is kept in ``extra``) and strictly where it
speaks: a sequence number is an integer and not negative, a payload an object, a time RFC 3339. The readers raise
ValueError, which says where something does not fit and what was expected there, and never quotes it.

Written out by hand: validators built by a library cost every importing program tens of milliseconds, this reads a page
of 1,000 items in about one.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ack", "ConversationInfo", "HistoryEvent", "Item", "Record", "Scope", "Scopes", "Workspace"]

R = TypeVar("R")

_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,99})?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)


@dataclass(frozen=True, slots=True)
class Ack:
    """The durability signal: the batch occupies the inclusive range ``first_seq`` to ``last_seq``."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Item:
    """One remembered object.

    ``seq`` is its position in the conversation, None while it is only on this machine. ``recorded_at`` is the server's
    commit time of its batch, None likewise. ``payload`` is the object as it was appended.
    """

    seq: int | None
    recorded_at: datetime | None
    payload: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """One row of ``list_conversations``; ``extra`` holds the fields that this version does not know or understand."""

    conversation_id: str
    items: int | None = None
    first_recorded_at: datetime | None = None
    last_recorded_at: datetime | None = None
    extra: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One change of a team record, as ``memory_history`` tells it; ``extra`` holds fields that are not known here."""

    sequence: int
    record_id: int
    at: datetime
    operation: str
    actor: dict[str, Any] = field(repr=False)
    reason: str = field(default="", repr=False)
    revision: int | None = None
    before_state: dict[str, Any] | None = field(default=None, repr=False)
    after_state: dict[str, Any] | None = field(default=None, repr=False)
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """:meth:`differences` of its two states. (An update's new text is in the first event of the new record.)"""
        return self.differences(self.before_state, self.after_state)

    @staticmethod
    def differences(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
        """The fields that differ between two states, each with both values; None where there is none, tags as lists."""
        old, new = _with_tags(before), _with_tags(after)
        both = {name: (old.get(name), new.get(name)) for name in {**old, **new}}
        return {name: values for name, values in both.items() if values[0] != values[1]}


@dataclass(frozen=True, slots=True)
class Scope:
    """Where team records live: :meth:`personal`, :meth:`team` or :meth:`shared`.

    Raises:
        ValueError: no such kind, or a ``team_id`` where there must be none, or none or a malformed one for a team.
    """

    kind: str
    team_id: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("personal", "team", "shared"):
            raise ValueError(f"a scope is personal, team or shared, not {self.kind!r}")
        if self.kind != "team" and self.team_id is not None:
            raise ValueError("only a team's scope has a team_id")
        if self.kind == "team" and not is_team_id(self.team_id):
            raise ValueError(f"a team_id is 1 to 64 characters from [a-zA-Z0-9_-], not {self.team_id!r}")

    @classmethod
    def personal(cls) -> Self:
        """The caller's own records, which is where a call without a scope goes."""
        return cls("personal")

    @classmethod
    def team(cls, team_id: str) -> Self:
        """The records of one team."""
        return cls("team", team_id)

    @classmethod
    def shared(cls) -> Self:
        """The records that all users share."""
        return cls("shared")


@dataclass(frozen=True, slots=True)
class Workspace:
    """One scope that the caller can read; ``extra`` holds fields that are not known here."""

    scope: Scope
    writable: bool
    extra: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Scopes:
    """Who the caller is (``user_id``, ``display_name``, ``client``, ``org_role``), and what they can read."""

    actor: dict[str, Any]
    workspaces: tuple[Workspace, ...]
    extra: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Record:
    """A team record; ``extra`` holds the fields that this version does not know or understand.

    ``status`` is active, superseded (by ``superseded_by``) or deleted. ``revision`` is what an update or a deletion has
    to name. The fields from ``previous_id`` on tell of the write that returned the record, and are empty elsewhere:

    ``previous_id``: the record that an update replaced by this one.
    ``deduplicated``: a save met an active record that says the same, and confirmed it; its text stays as it was.
    ``redacted``: the fields of which the server did not keep all that was sent, usually since it took something in them
    for a secret. That it adds tags, and keeps them in lower case, does not count. What it did to a ``reason`` shows
    only in the history.
    ``request_id``: under which the write went.
    """

    id: int
    revision: int
    status: str
    content: str = field(repr=False)
    type: str | None = None
    project: str | None = None
    tags: tuple[str, ...] = field(default=(), repr=False)
    context: str = field(default="", repr=False)
    importance: str | None = None
    branch: str = ""
    source_format: str | None = None
    superseded_by: int | None = None
    created_at: datetime | None = None
    last_confirmed: datetime | None = None
    created_by: dict[str, Any] = field(default_factory=dict, repr=False)
    updated_by: dict[str, Any] = field(default_factory=dict, repr=False)
    scope: Scope | None = None
    extra: dict[str, Any] = field(default_factory=dict, repr=False)
    previous_id: int | None = None
    deduplicated: bool = False
    redacted: tuple[str, ...] = ()
    request_id: str | None = None


class RowError(ValueError):
    """One entry of an answer's list does not fit, the one at ``row``; those before it do."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


# -- reading answers -------------------------------------------------------------------------------------------------


def read_ack(answer: dict[str, Any]) -> Ack:
    """What ``append_memory`` answers."""
    return Ack(_field(answer, "first_seq", _count), _field(answer, "last_seq", _count))


def read_items(answer: dict[str, Any]) -> list[Item]:
    """What ``replay_memory`` and ``recall_memory`` answer. The order is for the caller to judge."""
    return _rows(answer, "items", _item)


def read_conversations(answer: dict[str, Any]) -> list[ConversationInfo]:
    """What ``list_conversations`` answers. Only the id has to be there: the tool has no public schema."""
    return _rows(answer, "conversations", _conversation)


def read_events(answer: dict[str, Any]) -> list[HistoryEvent]:
    """What ``memory_history`` answers. The order is for the caller to judge."""
    return _rows(answer, "data", _event)


def read_record(answer: dict[str, Any]) -> Record:
    """What ``memory_get`` and the writing tools answer."""
    return _record(_field(answer, "data", _object), _scope_or_none(answer.get("scope")))


def read_records(answer: dict[str, Any]) -> list[Record]:
    """What ``memory_export`` answers. The order is for the caller to judge."""
    scope = _scope_or_none(answer.get("scope"))
    return _rows(answer, "data", lambda row: _record(row, scope))


def read_scopes(answer: dict[str, Any]) -> Scopes:
    """What ``memory_scopes`` answers. Workspaces of a kind that is not known here are in ``extra["workspaces"]``."""
    known: list[Workspace] = []
    unknown: list[dict[str, Any]] = []
    for row in _rows(answer, "workspaces", _object):
        scope = _scope_or_none(row.get("scope"))
        if scope is None:
            unknown.append(row)
            continue
        extra = {name: value for name, value in row.items() if name not in ("scope", "writable")}
        known.append(Workspace(scope, row.get("writable") is True, extra))
    extra = {name: value for name, value in answer.items() if name not in ("actor", "workspaces")}
    return Scopes(_field(answer, "actor", _object), tuple(known), extra | ({"workspaces": unknown} if unknown else {}))


def is_team_id(value: object) -> bool:
    """Whether it can name a team."""
    return (
        isinstance(value, str)
        and 1 <= len(value) <= 64
        and value.isascii()
        and value.replace("_", "a").replace("-", "a").isalnum()
    )


def check_range(name: str, value: object, least: int, most: int | None) -> None:
    """Raise ValueError, naming the argument and the value, unless it is an integer from ``least`` to ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    span = f"{least} or more" if most is None else f"{least} to {most:,}"
    raise ValueError(f"{name} must be {span}, not {value!r}")


def _item(row: dict[str, Any]) -> Item:
    seq, moment, payload = row.get("seq"), row.get("recorded_at"), row.get("payload")
    # In one go, since there may be a thousand; what does not fit is looked at once more, for the words of the error.
    if type(seq) is int and seq >= 0 and type(moment) is str and type(payload) is dict:
        try:
            return Item(seq, _moment_of(moment), payload)
        except (ValueError, OverflowError):
            pass
    return Item(_field(row, "seq", _count), _field(row, "recorded_at", _moment), _field(row, "payload", _object))


def _conversation(row: dict[str, Any]) -> ConversationInfo:
    known: dict[str, Any] = {}
    for name, read in (("items", _count), ("first_recorded_at", _moment), ("last_recorded_at", _moment)):
        try:
            known[name] = _field(row, name, read)
        except ValueError:
            continue
    conversation_id = _field(row, "conversation_id", _text)
    extra = {name: value for name, value in row.items() if name not in known and name != "conversation_id"}
    return ConversationInfo(conversation_id, **known, extra=extra)


def _event(row: dict[str, Any]) -> HistoryEvent:
    known: dict[str, Any] = {
        name: _field(row, name, read) for name, read in _EVENT_FIELDS.items() if row.get(name) is not None
    }
    missing = next((name for name in ("sequence", "record_id", "at", "operation", "actor") if name not in known), None)
    if missing is not None:
        raise ValueError(f"{missing} is missing")
    extra = {name: value for name, value in row.items() if name not in _EVENT_FIELDS}
    return HistoryEvent(**known, extra=extra)


def _record(row: dict[str, Any], scope: Scope | None) -> Record:
    known: dict[str, Any] = {name: _field(row, name, read) for name, read in _RECORD_MUST.items()}
    for name, read in _RECORD_MAY.items():
        try:
            known[name] = _field(row, name, read)
        except ValueError:
            continue
    extra = {
        name: value for name, value in row.items() if name not in known and not (value is None and name in _RECORD_MAY)
    }
    return Record(**known, scope=scope, extra=extra)


def _scope_or_none(value: object) -> Scope | None:
    if not isinstance(value, dict):
        return None
    try:
        return Scope(value.get("kind", "personal"), value.get("team_id"))
    except ValueError:
        return None


def _with_tags(state: dict[str, Any] | None) -> dict[str, Any]:
    decoded = dict(state or {})
    with suppress(KeyError, ValueError):
        decoded["tags"] = list(_tags(decoded["tags"]))
    return decoded


def _rows(answer: dict[str, Any], name: str, read: Callable[[dict[str, Any]], R]) -> list[R]:
    rows = answer.get(name)
    if not isinstance(rows, list):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004 - it is the answer that is wrong, not our caller
    values: list[R] = []
    for number, row in enumerate(rows):
        try:
            values.append(read(_object(row)))
        except ValueError as error:
            raise RowError(f"{name}[{number}]: {error}", number) from None
    return values


def _field(data: dict[str, Any], name: str, read: Callable[[object], R]) -> R:
    try:
        return read(data.get(name))
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from None


def _count(value: object) -> int:
    # type() and not isinstance(): true is no number, and nothing else comes out of a JSON parser.
    if type(value) is not int or value < 0:
        raise ValueError("not a whole number from 0")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")  # noqa: TRY004 - as above
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004 - as above
    return value


def _moment(value: object) -> datetime:
    try:
        return _moment_of(_text(value))
    except (ValueError, OverflowError):
        raise ValueError("not an RFC 3339 time") from None


@lru_cache(maxsize=256)  # the items of a batch share theirs
def _moment_of(text: str) -> datetime:
    # fromisoformat() alone would take much more than RFC 3339 has: weeks, hours without minutes, any separator.
    if not _RFC_3339.fullmatch(text):
        raise ValueError(text)
    if text[17:19] != "60":
        return datetime.fromisoformat(text.upper())
    return datetime.fromisoformat(f"{text[:17]}59{text[19:]}".upper()) + timedelta(seconds=1)  # a leap second


def _tags(value: object) -> tuple[str, ...]:
    # The server keeps the list as a text.
    try:
        tags = json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        tags = None
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("not a list of texts")
    return tuple(tags)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")  # noqa: TRY004 - as above
    return value


_RECORD_MUST: dict[str, Callable[[object], object]] = {
    "id": _count,
    "revision": _count,
    "status": _text,
    "content": _text,
}
_RECORD_MAY: dict[str, Callable[[object], object]] = {
    "type": _text,
    "project": _text,
    "tags": _tags,
    "context": _text,
    "importance": _text,
    "branch": _text,
    "source_format": _text,
    "superseded_by": _count,
    "created_at": _moment,
    "last_confirmed": _moment,
    "created_by": _object,
    "updated_by": _object,
    "previous_id": _count,
    "deduplicated": _flag,
}
_EVENT_FIELDS: dict[str, Callable[[object], object]] = {
    "sequence": _count,
    "record_id": _count,
    "at": _moment,
    "operation": _text,
    "actor": _object,
    "reason": _text,
    "revision": _count,
    "before_state": _object,
    "after_state": _object,
}
