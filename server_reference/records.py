"""The records of one scope of a team's memory, the events that changed them, and the file such events can come from.

A record is never changed in place: an update makes a new record and marks the old one as superseded, a deletion marks
it as deleted. Every change leaves an event, numbered by the scope; an update leaves two, the new record's first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .arguments import Refusal
from .scrub import is_indexed, scrubbed, without_private_parts, words
from .verbatim import NotJsonError, Number, dumps, loads

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["Event", "RecordsError", "Workspace", "plain", "read_events"]

Record = dict[str, Any]

_STATE: Final = ("id", "type", "content", "context", "project", "tags", "status", "superseded_by")
_CARRIED_OVER: Final = (
    "type",
    "project",
    "tags",
    "context",
    "branch",
    "importance",
    "source_format",
    "fts_project",
)
_GONE: Final = "Record unavailable"


class RecordsError(ValueError):
    """The records file is not in this module's format; the message names the line."""


class Event(NamedTuple):
    """One change. ``text`` is what ``memory_history`` shows of it; ``scope`` is None where it is found in every one."""

    sequence: int
    record_id: int
    scope: Any
    superseded_by: int | None
    text: str


@dataclass(slots=True)
class Workspace:
    """One scope: its events, records and answered requests. All that it returns of records are copies."""

    events: list[Event] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)
    requests: dict[tuple[str, str], tuple[str, Record]] = field(default_factory=dict)
    said: dict[int, list[str]] = field(default_factory=dict)
    """The words of each record that was compared so far. A record's text never changes."""
    last_id: int = 0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Workspace:
        """The scope as these events left it; what they do not tell of a record is as in a new one."""
        workspace = cls(sorted(events, key=lambda event: event.sequence))
        workspace.last_id = max((event.record_id for event in workspace.events), default=0)
        for event in workspace.events:
            workspace._take_over(event)
        return workspace

    def get(self, record_id: int) -> Record:
        """Raises :class:`Refusal`, as all here do."""
        if record_id not in self.records:
            raise Refusal("conflict", _GONE)
        return dict(self.records[record_id])

    def export(self, after: int, limit: int) -> list[Record]:
        return [dict(self.records[one]) for one in sorted(self.records) if one > after][:limit]

    def history(self, record_id: int, after: int, limit: int) -> list[str]:
        wanted = self._with_predecessors(record_id)
        if not any(event.record_id in wanted for event in self.events):
            raise Refusal("conflict", _GONE)
        found = (event.text for event in self.events if event.sequence > after and event.record_id in wanted)
        return [text for text, _ in zip(found, range(limit), strict=False)]

    def once(self, actor: Record, request_id: str | None, what: Any, write: Callable[[], Record]) -> Record:
        """The answer of ``write``, or the one that the same user's request of this id got before."""
        if request_id is None:
            return write()
        key, fingerprint = (actor["user_id"], request_id), json.dumps(what, sort_keys=True)
        if key in self.requests:
            earlier, answer = self.requests[key]
            if earlier != fingerprint:
                raise Refusal("conflict", "request_id was already used with different arguments")
            return dict(answer)
        answer = write()
        self.requests[key] = fingerprint, answer
        return dict(answer)

    def save(self, actor: Record, values: Mapping[str, Any]) -> Record:
        """A new record, or the confirmation of an active one that says the same."""
        kept, flags = _kept(values)
        said = words(kept["content"])
        for record in self.records.values():
            same_place = (record["type"], record["project"]) == (kept["type"], kept["project"])
            if same_place and record["status"] == "active" and self._says(record, said):
                record["last_confirmed"] = _moment("microseconds")
                if kept["source_format"] == "conversation":
                    record["source_format"] = "conversation"
                self._note("confirm", actor, "", record, before=_state(record))
                return {**record, "saved": True, "deduplicated": True, **flags}
        tags = dict.fromkeys(tag.strip().lower() for tag in kept["tags"])
        found = {"tags": json.dumps([tag for tag in tags if tag]), "fts_project": _searched_as(kept["project"])}
        return {**self._insert(actor, actor, "", kept | found), **flags}

    def update(self, actor: Record, record_id: int, expected: int, content: str, reason: str) -> Record:
        old = self._to_change(record_id, expected)
        kept, flags = _kept({"content": content, **{name: old[name] for name in _CARRIED_OVER}})
        answer = {**self._insert(old["created_by"], actor, reason, kept), **flags}
        self._close(old, actor, reason, status="superseded", superseded_by=answer["id"])
        return {**answer, "previous_id": old["id"]}

    def delete(self, actor: Record, record_id: int, expected: int, reason: str) -> Record:
        record = self._to_change(record_id, expected)
        self._close(record, actor, reason, status="deleted")
        return dict(record)

    def _to_change(self, record_id: int, expected: int) -> Record:
        record = self.records.get(record_id)
        if record is None:
            raise Refusal("conflict", _GONE)
        if record["revision"] != expected or record["status"] != "active":
            raise Refusal("conflict", "Revision changed; read the record before retrying")
        return record

    def _says(self, record: Record, said: list[str]) -> bool:
        if record["id"] not in self.said:
            self.said[record["id"]] = words(record["content"])
        return self.said[record["id"]] == said and is_indexed(said, record["content"])

    def _insert(self, author: Record, actor: Record, reason: str, values: Mapping[str, Any]) -> Record:
        self.last_id += 1
        record = {**_new(self.last_id, author, actor), **values}
        self.records[record["id"]] = record
        self._note("insert", actor, reason, record, before=None)
        return {**record, "saved": True, "deduplicated": False}

    def _close(self, record: Record, actor: Record, reason: str, **changes: Any) -> None:
        before = _state(record)
        record.update(changes, updated_by=actor, revision=record["revision"] + 1)
        self._note("update", actor, reason, record, before=before)

    def _note(self, operation: str, actor: Record, reason: str, record: Record, *, before: Record | None) -> None:
        event = {
            "sequence": self.events[-1].sequence + 1 if self.events else 1,
            "record_id": record["id"],
            "at": _moment("milliseconds"),
            "operation": operation,
            "actor": actor,
            "reason": reason,
            "revision": record["revision"],
            "before_state": before,
            "after_state": _state(record),
        }
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        self.events.append(Event(event["sequence"], record["id"], None, record["superseded_by"], text))

    def _take_over(self, event: Event) -> None:
        told = json.loads(event.text)
        state, actor, revision = told.get("after_state"), told.get("actor") or {}, told.get("revision")
        if not isinstance(state, dict):
            self.records.pop(event.record_id, None)
            return
        record = self.records.setdefault(event.record_id, _new(event.record_id, actor, actor))
        if told.get("operation") == "insert":
            record["created_at"] = record["last_confirmed"] = told.get("at")
        record.update({name: state[name] for name in _STATE[1:] if name in state}, updated_by=actor)
        record["revision"] = revision if isinstance(revision, int) else record["revision"]

    def _with_predecessors(self, record_id: int) -> set[int]:
        replaced: dict[int, set[int]] = defaultdict(set)
        for event in self.events:
            if event.superseded_by is not None:
                replaced[event.superseded_by].add(event.record_id)
        found: set[int] = set()
        ahead = {record_id}
        while ahead:
            found |= ahead
            ahead = set().union(*(replaced.get(one, ()) for one in ahead)) - found
        return found


def _moment(precision: str) -> str:
    return datetime.now(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def _state(record: Record) -> Record:
    return {name: record[name] for name in _STATE}


def _kept(values: Mapping[str, Any]) -> tuple[Record, Record]:
    """The values without what their author calls private, and the answer's flags of it."""
    texts = {name: without_private_parts(values[name]) for name in ("content", "context")}
    # What was left may look like a secret only now.
    kept = {name: scrubbed(text) for name, (text, _) in texts.items()}
    flags = {
        "privacy_redacted": any(kept[name] != text for name, (text, _) in texts.items()),
        "privacy_redacted_sections": sum(parts for _, parts in texts.values()),
    }
    return {**values, **kept}, flags


def _searched_as(project: str) -> str:
    return f"p{project.encode().hex()}"


def _new(record_id: int, author: Record, actor: Record) -> Record:
    moment = _moment("microseconds")
    return {
        "id": record_id,
        "session_id": "workspace",
        "type": "fact",
        "content": "",
        "context": "",
        "project": "general",
        "tags": "[]",
        "status": "active",
        "superseded_by": None,
        "confidence": 1.0,
        "source": "explicit",
        "created_at": moment,
        "last_confirmed": moment,
        "recall_count": 0,
        "last_recalled": None,
        "branch": "",
        "importance": "medium",
        "agent_id": None,
        "parent_agent_id": None,
        "source_format": "auto",
        "fts_project": _searched_as("general"),
        "created_by": author,
        "updated_by": actor,
        "revision": 1,
    }


def plain(value: Any) -> Any:
    """A value that :func:`~.verbatim.loads` returned with ordinary numbers in it."""
    if isinstance(value, Number):
        try:
            return json.loads(value.text)
        except ValueError:  # Python converts no more than some thousand digits
            return float(value.text)
    if isinstance(value, dict):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, list) else value


# -- the file ----------------------------------------------------------------------------------------------------------


def read_events(file: str | os.PathLike[str], scope_of: Callable[[object], Any]) -> list[Event]:
    """The events of a records file. ``scope_of`` reads the scope of a line; None says that it is none.

    Raises :class:`RecordsError`.
    """
    path = Path(file)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from error
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(_event(loads(line), scope_of))
        except NotJsonError as error:
            raise RecordsError(f"{path}, line {number}: {error}") from None
    places = [(event.scope, event.sequence) for event in events]
    if len(set(places)) != len(places):
        raise RecordsError(f"{path}: a sequence stands twice in one scope")
    return events


def _event(value: Any, scope_of: Callable[[object], Any]) -> Event:
    if not isinstance(value, dict):
        raise NotJsonError("an event must be a JSON object")
    scope = None
    if "scope" in value and (scope := scope_of(plain(value.pop("scope")))) is None:
        raise NotJsonError("scope must be personal, shared, or team with its team_id")
    after_state = value.get("after_state")
    superseded_by = after_state.get("superseded_by") if isinstance(after_state, dict) else None
    sequence, record_id, successor = (
        number.integer() if isinstance(number, Number) else None
        for number in (value.get("sequence"), value.get("record_id"), superseded_by)
    )
    if sequence is None or sequence < 1 or record_id is None or record_id < 1:
        raise NotJsonError("an event needs sequence and record_id, both integers above 0")
    return Event(sequence, record_id, scope, successor, dumps(value))
