"""The plain values handed to callers, and the one place where an answer's shape is checked.

Answers are read leniently where the contract is silent (extra fields are kept or passed over) and strictly where it
speaks: a sequence number is an integer and not negative, a payload an object, a time RFC 3339.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, TypeAdapter, ValidationError

__all__ = ["Ack", "ConversationInfo", "HistoryEvent", "Item"]


def _text_only(value: object) -> object:
    # pydantic would read a number as seconds since 1970, which no server of this contract means.
    if value is not None and not isinstance(value, str):
        msg = "not an RFC 3339 timestamp"
        raise ValueError(msg)
    return value


Seq = Annotated[StrictInt, Field(ge=0)]
Timestamp = Annotated[datetime, BeforeValidator(_text_only)]


@dataclass(frozen=True, slots=True)
class Ack:
    """The durability signal: the batch occupies the inclusive range ``first_seq`` to ``last_seq``."""

    first_seq: Seq
    last_seq: Seq


@dataclass(frozen=True, slots=True)
class Item:
    """One remembered object.

    ``seq`` is its position in the conversation, None while it is only on this machine. ``recorded_at`` is the server's
    commit time of its batch, None likewise. ``payload`` is the object as it was appended.
    """

    seq: Seq | None
    recorded_at: Timestamp | None
    payload: dict[str, Any] = field(repr=False)


class ConversationInfo(BaseModel):
    """One row of ``list_conversations``; fields that this version does not know are kept as attributes."""

    model_config = ConfigDict(extra="allow", frozen=True)

    conversation_id: str
    items: int | None = None
    first_recorded_at: Timestamp | None = None
    last_recorded_at: Timestamp | None = None


class HistoryEvent(BaseModel):
    """One change of a team record, as ``memory_history`` tells it; unknown fields are kept as attributes."""

    model_config = ConfigDict(extra="allow", frozen=True)

    sequence: Seq
    record_id: int
    at: Timestamp
    operation: str
    actor: dict[str, Any] = Field(repr=False)
    reason: str = Field(default="", repr=False)
    revision: int | None = None
    before_state: dict[str, Any] | None = Field(default=None, repr=False)
    after_state: dict[str, Any] | None = Field(default=None, repr=False)


ACK: TypeAdapter[Ack] = TypeAdapter(Ack)
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
CONVERSATIONS: TypeAdapter[list[ConversationInfo]] = TypeAdapter(list[ConversationInfo])
EVENTS: TypeAdapter[list[HistoryEvent]] = TypeAdapter(list[HistoryEvent])


def shape_of(error: ValidationError) -> str:
    """Where the first thing is that does not fit, and why; never the value itself."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(step) for step in first['loc']) or 'the whole'}: {first['msg']}"


def check_range(name: str, value: object, least: int, most: int | None) -> None:
    """Raise ValueError, naming the argument and the value, unless it is an integer from ``least`` to ``most``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    span = f"{least} or more" if most is None else f"{least} to {most:,}"
    raise ValueError(f"{name} must be {span}, not {value!r}")
