"""The team half: the change history of shared records, read from a file and never changed here.

The file holds one event a line, as ``memory_history`` returns it:

    {"sequence": 31, "record_id": 812, "at": "2026-09-25T09:14:02.118Z", "operation": "insert",
     "actor": {"user_id": "vasya", "display_name": "Vasya", "client": "codex"}, "reason": "", "revision": 1,
     "before_state": null, "after_state": {"id": 812, ..., "superseded_by": null}}

A line may also name the place the record lives in, ``"scope": {"kind": "team", "team_id": "engineering"}``, which is
not part of the answer; a line without one is found in every scope. Sequences count per scope and may have gaps.
Events are returned word for word. Every team token may read every scope.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .arguments import Arguments, Refusal, integer
from .verbatim import NotJsonError, Number, dumps, loads

if TYPE_CHECKING:
    import os

    from .auth import Identity

__all__ = ["RecordsError", "Team"]

PAGE_EVENTS_MAX: Final = 50
INT64_MAX: Final = 2**63 - 1
TEAM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class RecordsError(ValueError):
    """The records file is not in this module's format; the message names the line."""


class _Scope(NamedTuple):
    kind: str
    team_id: str | None

    def answer(self) -> str:
        tags = [f"scope:{self.kind}", *([f"team:{self.team_id}"] if self.team_id else [])]
        return f'"scope":{dumps({"kind": self.kind, "team_id": self.team_id})},"scope_tags":{dumps(tags)}'


class _Event(NamedTuple):
    sequence: int
    record_id: int
    scope: _Scope | None
    superseded_by: int | None
    text: str


class Team:
    """Answers ``memory_history`` from the events of one file; without a file no record is known."""

    def __init__(self, records: str | os.PathLike[str] | None = None) -> None:
        self._events = sorted(_read(Path(records)), key=lambda event: event.sequence) if records else []

    def history(self, arguments: Arguments, identity: Identity) -> str:
        """The answer as JSON text: the record's events and those of all it replaced. Raises :class:`Refusal`."""
        if identity.user is None:
            raise Refusal("forbidden", "memory_history needs a personal team token")
        if unknown := sorted(set(arguments) - {"scope", "id", "after", "limit"}):
            raise Refusal("invalid_request", f"unexpected argument: {unknown[0][:64]}")
        scope = _scope(arguments["scope"]) if "scope" in arguments else _Scope("personal", None)
        if scope is None:
            raise Refusal("invalid_request", "scope must be personal, shared, or team with its team_id")
        record = integer(arguments, "id", 1, INT64_MAX, code="invalid_request")
        after = integer(arguments, "after", 0, INT64_MAX, default=0, code="invalid_request")
        limit = integer(arguments, "limit", 1, PAGE_EVENTS_MAX, default=PAGE_EVENTS_MAX, code="invalid_request")
        events = [event for event in self._events if event.scope in (None, scope)]
        wanted = _with_predecessors(record, events)
        if not any(event.record_id in wanted for event in events):
            raise Refusal("conflict", "Record unavailable")
        page = [event.text for event in events if event.sequence > after and event.record_id in wanted][:limit]
        return f'{{{scope.answer()},"data":[{",".join(page)}]}}'


def _with_predecessors(record: int, events: list[_Event]) -> set[int]:
    replaced: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event.superseded_by is not None:
            replaced[event.superseded_by].add(event.record_id)
    found: set[int] = set()
    ahead = {record}
    while ahead:
        found |= ahead
        ahead = set().union(*(replaced.get(one, ()) for one in ahead)) - found
    return found


def _scope(value: object) -> _Scope | None:
    if not isinstance(value, dict) or not set(value) <= {"kind", "team_id"}:
        return None
    kind, team_id = value.get("kind"), value.get("team_id")
    if kind == "team" and isinstance(team_id, str) and TEAM_ID.fullmatch(team_id):
        return _Scope(kind, team_id)
    if kind in ("personal", "shared") and isinstance(kind, str) and team_id is None:
        return _Scope(kind, None)
    return None


def _read(path: Path) -> list[_Event]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error
    events: list[_Event] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(_event(loads(line)))
        except NotJsonError as error:
            raise RecordsError(f"{path}, line {number}: {error}") from None
    places = [(event.scope, event.sequence) for event in events]
    if len(set(places)) != len(places):
        raise RecordsError(f"{path}: a sequence stands twice in one scope")
    return events


def _event(value: Any) -> _Event:
    if not isinstance(value, dict):
        raise NotJsonError("an event must be a JSON object")
    scope = None
    if "scope" in value and (scope := _scope(value.pop("scope"))) is None:
        raise NotJsonError("scope must be personal, shared, or team with its team_id")
    after_state = value.get("after_state")
    superseded_by = after_state.get("superseded_by") if isinstance(after_state, dict) else None
    sequence, record_id, successor = (
        number.integer() if isinstance(number, Number) else None
        for number in (value.get("sequence"), value.get("record_id"), superseded_by)
    )
    if sequence is None or sequence < 1 or record_id is None or record_id < 1:
        raise NotJsonError("an event needs sequence and record_id, both integers above 0")
    return _Event(sequence, record_id, scope, successor, dumps(value))
