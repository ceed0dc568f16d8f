"""The plain values handed to callers, and the one place where an answer's shape is checked.

Answers are read leniently where the contract is silent (what is not known is kept in ``extra``) and strictly where it
speaks: a sequence number is an integer and not negative, a payload an object, a time RFC 3339. The readers raise
ValueError, which says where something does not fit and what was expected there, and never quotes it.

Written out by hand: validators built by a library cost every importing program tens of milliseconds, this reads a page
of 1,000 items in about one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ack", "ConversationInfo", "HistoryEvent", "Item"]

R = TypeVar("R")


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


def check_range(name: str, value: object, least: int, most: int | None) -> None:
    """Raise ValueError, naming the argument and the value, unless it is an integer from ``least`` to ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    span = f"{least} or more" if most is None else f"{least} to {most:,}"
    raise ValueError(f"{name} must be {span}, not {value!r}")


def _item(row: dict[str, Any]) -> Item:
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


def _rows(answer: dict[str, Any], name: str, read: Callable[[dict[str, Any]], R]) -> list[R]:
    rows = answer.get(name)
    if not isinstance(rows, list):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004 - it is the answer that is wrong, not our caller
    values: list[R] = []
    for number, row in enumerate(rows):
        try:
            values.append(read(_object(row)))
        except ValueError as error:
            raise ValueError(f"{name}[{number}]: {error}") from None
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
        moment = datetime.fromisoformat(_text(value).upper())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError("not an RFC 3339 time")
    return moment


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
