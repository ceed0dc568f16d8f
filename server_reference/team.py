"""The team half: who may do what in which scope, and what the tools of team records answer.

Records live in scopes: everybody's own, one for each team, and one that all share. They are kept in memory, and begin
with what a file of events (one a line, as ``memory_history`` returns it) tells of them:

    {"sequence": 31, "record_id": 812, "at": "2026-09-25T09:14:02.118Z", "operation": "insert",
     "actor": {"user_id": "vasya", "display_name": "Vasya", "client": "codex"}, "reason": "", "revision": 1,
     "before_state": null, "after_state": {"id": 812, ..., "superseded_by": null}}

A line may also name the place the record lives in, ``"scope": {"kind": "team", "team_id": "engineering"}``, which is
not part of the answer; a line without one is found in every scope. Sequences count per scope and may have gaps. The
file's events are returned word for word, and the file is never written.

With members, a team is open to those named, and a ``reader`` among them changes nothing; without any, everybody may
write everywhere.

What the real server does besides is left out: it adds words of a vocabulary to the tags, shortens what it takes for a
program's output, may refuse a text for its quality, and finds records by what they mean.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from .arguments import Arguments, Refusal, SchemaError
from .records import RecordsError, Workspace, plain, read_events
from .scrub import scrubbed
from .team_tools import INT64_MAX, TEAM_TOOLS, complaint

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from .auth import Identity

__all__ = ["ROLES", "RecordsError", "Team"]

ROLES: Final = ("reader", "editor", "manager")
TEAM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_WRITES: Final = frozenset({"memory_save", "memory_update", "memory_delete"})
_RESERVED_TAGS: Final = ("scope:", "team:", "user:")
_DASHED: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UUID: Final = re.compile(rf"(?:urn:uuid:)?{_DASHED}|\{{{_DASHED}\}}|[0-9a-f]{{32}}", re.IGNORECASE)


class _Scope(NamedTuple):
    kind: str
    team_id: str | None = None

    def told(self) -> dict[str, Any]:
        return {"kind": self.kind, "team_id": self.team_id}

    def answer(self, data: str) -> str:
        tags = [f"scope:{self.kind}", *([f"team:{self.team_id}"] if self.team_id else [])]
        return f'{{"scope":{_json(self.told())},"scope_tags":{_json(tags)},"data":{data}}}'


class Team:
    """Answers the tools of :data:`.team_tools.TEAM_TOOLS`.

    Args:
        records: a file of events to begin with.
        members: team to user to role, one of :data:`ROLES`; None leaves every team open to everybody.

    Raises:
        ValueError: an unknown role, or no name for a team.
        RecordsError: the file.
    """

    def __init__(
        self,
        records: str | os.PathLike[str] | None = None,
        members: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        for team, roles in (members or {}).items():
            if TEAM_ID.fullmatch(team) is None:
                raise ValueError("a team's name is 1 to 64 characters from [A-Za-z0-9_-]")
            if unknown := sorted(set(roles.values()) - set(ROLES)):
                raise ValueError(f"there is no role {unknown[0]!r}, only {', '.join(ROLES)}")
        self._members = members
        self._told = read_events(records, _scope) if records else []
        self._workspaces: dict[tuple[_Scope, str | None], Workspace] = {}

    def call(self, name: str, arguments: Arguments, identity: Identity) -> str:
        """The answer as JSON text. Raises :class:`Refusal` and :class:`SchemaError`."""
        if identity.user is None:
            raise Refusal("forbidden", f"{name} needs a personal team token")
        given = plain(dict(arguments))
        schema = TEAM_TOOLS[name].input_schema
        if (violated := complaint(given, schema)) is not None:
            raise SchemaError(f"Input validation error: {violated}")
        defaults = {key: rule["default"] for key, rule in schema["properties"].items() if "default" in rule}
        values = defaults | scrubbed(given)
        if complaint(values, schema) is not None:
            raise Refusal("invalid_request", "too long, with the marks in place of its secrets")
        actor = {
            "user_id": identity.user,
            "display_name": identity.user,
            "client": "team-token",
            "org_role": "member",
        }
        if name == "memory_scopes":
            return _json({"actor": actor, "workspaces": self._scopes(identity.user)})
        scope = _scope(values.pop("scope", {}))
        if scope is None:
            raise Refusal("invalid_request", "scope: team_id is required only for team scope")
        _check(values)
        if not self._allowed(identity.user, scope, name in _WRITES):
            raise Refusal("forbidden", "Workspace is read-only")
        return scope.answer(self._answer(name, values, self._workspace(scope, identity.user), actor))

    def _answer(self, name: str, values: dict[str, Any], workspace: Workspace, actor: dict[str, Any]) -> str:
        if name not in _WRITES:
            _check_numbers(values)
        if name == "memory_get":
            return _json(workspace.get(values["id"]))
        if name == "memory_export":
            return _json(workspace.export(values["after"], values["limit"]))
        if name == "memory_history":
            return f"[{','.join(workspace.history(values['id'], values['after'], values['limit']))}]"
        request_id = values.pop("request_id")

        def write() -> dict[str, Any]:
            _check_numbers(values)
            if name == "memory_save":
                return workspace.save(actor, values)
            if name == "memory_delete":
                return workspace.delete(actor, values["id"], values["expected_revision"], values["reason"])
            return workspace.update(
                actor, values["id"], values["expected_revision"], values["content"], values["reason"]
            )

        return _json(workspace.once(actor, request_id, [name, values], write))

    def _allowed(self, user: str, scope: _Scope, to_write: bool) -> bool:
        if scope.kind != "team" or self._members is None:
            return True
        role = self._members.get(scope.team_id or "", {}).get(user)
        if role is None:
            raise Refusal("forbidden", "Workspace unavailable")
        return not to_write or role != "reader"

    def _workspace(self, scope: _Scope, user: str) -> Workspace:
        key = scope, user if scope.kind == "personal" else None
        if key not in self._workspaces:
            self._workspaces[key] = Workspace.of(event for event in self._told if event.scope in (None, scope))
        return self._workspaces[key]

    def _scopes(self, user: str) -> list[dict[str, Any]]:
        if self._members is None:
            used = [scope for scope, _ in self._workspaces] + [event.scope for event in self._told if event.scope]
            teams = sorted({scope.team_id for scope in used if scope.kind == "team"})
        else:
            teams = sorted(team for team, roles in self._members.items() if user in roles)
        scopes = [_Scope("personal"), *(_Scope("team", team) for team in teams), _Scope("shared")]
        return [
            {
                "key": _key(scope, user),
                "scope": scope.told(),
                "owner_id": user if scope.kind == "personal" else None,
                "writable": self._allowed(user, scope, to_write=True),
            }
            for scope in scopes
        ]


def _key(scope: _Scope, user: str) -> str:
    if scope.kind == "shared":
        return scope.kind
    return f"{scope.kind}_{hashlib.sha256((scope.team_id or user).encode()).hexdigest()}"


def _check(values: dict[str, Any]) -> None:
    """What a schema cannot say. Raises :class:`Refusal`; ``request_id`` is in its usual form afterwards."""
    if "content" in values and not values["content"].strip():
        raise Refusal("invalid_request", "content must be non-empty text")
    if any(len(tag) > 128 or tag.startswith(_RESERVED_TAGS) for tag in values.get("tags", ())):
        raise Refusal("invalid_request", "tags: at most 128 characters, and not reserved for scopes")
    if (request_id := values.get("request_id")) is not None:
        if _UUID.fullmatch(request_id) is None:
            raise Refusal("invalid_request", "request_id should be a valid UUID")
        values["request_id"] = str(UUID(request_id))
    for name in ("id", "after", "expected_revision", "limit"):
        if name in values:
            values[name] = int(values[name])


def _check_numbers(values: dict[str, Any]) -> None:
    """What a database cannot look for. Raises :class:`Refusal`."""
    if max(values.get("id", 0), values.get("after", 0)) > INT64_MAX:
        raise Refusal("unavailable", "Workspace operation failed")


def _scope(value: object) -> _Scope | None:
    if not isinstance(value, dict) or not set(value) <= {"kind", "team_id"}:
        return None
    kind, team_id = value.get("kind", "personal"), value.get("team_id")
    if kind == "team" and isinstance(team_id, str) and TEAM_ID.fullmatch(team_id):
        return _Scope(kind, team_id)
    if kind in ("personal", "shared") and isinstance(kind, str) and team_id is None:
        return _Scope(kind)
    return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
