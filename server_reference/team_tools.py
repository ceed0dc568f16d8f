"""The tools of team records: what each takes, and what a call that takes no notice of it is told.

``memory_history`` has a public contract. The others are named and shaped after the team server that stands behind it.
A violation of a schema is answered in plain text with the words that JSON Schema validators of that server use.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from .tools import Tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["INT64_MAX", "TEAM_TOOLS", "complaint"]

INT64_MAX: Final = 2**63 - 1
PAGE_MAX: Final = 50
CONTENT_CHARACTERS_MAX: Final = 200_000


def _whole(description: str, **more: Any) -> Any:
    return {"description": description, "type": "integer", **more}


def _text(description: str, most: int, least: int | None = None, **more: Any) -> Any:
    shortest = {} if least is None else {"minLength": least}
    return {"description": description, "maxLength": most, **shortest, "type": "string", **more}


def _one_of(description: str, default: str, *choices: str) -> Any:
    return {"default": default, "description": description, "enum": list(choices), "type": "string"}


_SCOPE: Final[Any] = {
    "additionalProperties": False,
    "description": "Where the record lives; the caller's own space where it is left out.",
    "properties": {
        "kind": {
            "default": "personal",
            "description": "Whose space.",
            "enum": ["personal", "team", "shared"],
            "type": "string",
        },
        "team_id": {
            "description": "Needed for kind `team`, and only there.",
            "pattern": "^[a-zA-Z0-9_-]{1,64}$",
            "type": ["string", "null"],
        },
    },
    "type": "object",
}
_ID: Final = _whole("The record.", exclusiveMinimum=0)
_LIMIT: Final = _whole("How many to return at most.", default=PAGE_MAX, maximum=PAGE_MAX, minimum=1)
_CONTENT: Final = _text("The text to remember.", CONTENT_CHARACTERS_MAX, 1)
_REASON: Final = _text("Why; the history shows it.", 2000, 1)
_REVISION: Final = _whole("The record's revision as it was read; another one is a conflict.", exclusiveMinimum=0)
_REQUEST_ID: Final[Any] = {
    "default": None,
    "description": "A UUID. The same write under the same id is carried out once and answered alike.",
    "format": "uuid",
    "type": ["string", "null"],
}


def _tool(name: str, title: str, description: str, required: tuple[str, ...], **properties: Any) -> Tool:
    schema = {
        "additionalProperties": False,
        "properties": properties,
        **({"required": list(required)} if required else {}),
        "title": title,
        "type": "object",
    }
    return Tool(
        name=name, description=f"{description} Needs a personal team token.", input_schema=schema, of_site=False
    )


TEAM_TOOLS: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        _tool(
            "memory_history",
            "MemoryHistoryRequest",
            "Pages through the changes of a team record and of the earlier records it replaced, oldest first; "
            "`after` is the last sequence seen.",
            ("id",),
            scope=_SCOPE,
            id=_ID,
            after=_whole("Return only events with a greater sequence.", default=0, minimum=0),
            limit=_LIMIT,
        ),
        _tool("memory_scopes", "MemoryScopesRequest", "Lists the spaces that the caller can read.", ()),
        _tool(
            "memory_save",
            "MemorySaveRequest",
            "Keeps a text as a new record, or confirms the active record that says the same.",
            ("content",),
            scope=_SCOPE,
            content=_CONTENT,
            type=_one_of("The kind of record.", "fact", "fact", "decision", "solution", "lesson", "convention"),
            project=_text("What it belongs to.", 128, 1, default="general"),
            tags={
                "default": [],
                "description": "Words to find it by, each of at most 128 characters.",
                "items": {"type": "string"},
                "maxItems": 64,
                "type": "array",
            },
            context=_text("What else should be known of it.", CONTENT_CHARACTERS_MAX, default=""),
            importance=_one_of("How much it matters.", "medium", "low", "medium", "high", "critical"),
            source_format=_one_of("What the text is.", "auto", "auto", "conversation"),
            branch=_text("The branch of the code.", 128, default=""),
            request_id=_REQUEST_ID,
        ),
        _tool("memory_get", "MemoryGetRequest", "Reads one record.", ("id",), scope=_SCOPE, id=_ID),
        _tool(
            "memory_update",
            "MemoryUpdateRequest",
            "Replaces a record's text by way of a new record, whose id it returns.",
            ("id", "expected_revision", "content", "reason"),
            scope=_SCOPE,
            id=_ID,
            expected_revision=_REVISION,
            content=_CONTENT,
            reason=_REASON,
            request_id=_REQUEST_ID,
        ),
        _tool(
            "memory_delete",
            "MemoryDeleteRequest",
            "Marks a record as deleted; its history stays.",
            ("id", "expected_revision", "reason"),
            scope=_SCOPE,
            id=_ID,
            expected_revision=_REVISION,
            reason=_REASON,
            request_id=_REQUEST_ID,
        ),
        _tool(
            "memory_export",
            "MemoryExportRequest",
            "Pages through all records of a space, ascending by id, superseded and deleted ones too; "
            "`after` is the last id seen.",
            (),
            scope=_SCOPE,
            after=_whole("Return only records with a greater id.", default=0, minimum=0),
            limit=_LIMIT,
        ),
    )
}


# -- schemas -----------------------------------------------------------------------------------------------------------

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "null": (type(None),),
}


def complaint(value: Any, schema: Any) -> str | None:
    """What is wrong with the value; None if nothing is. Of several things the outermost, and of these the last by name.

    Only for the keywords that the schemas above use.
    """
    found = max(_complaints(value, schema, ()), default=None, key=lambda one: (-len(one[0]), one[0]))
    return None if found is None else found[1]


def _complaints(value: Any, schema: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if "enum" in schema and value not in schema["enum"]:
        yield place, f"{value!r} is not one of {schema['enum']!r}"
        return
    types = schema.get("type", [])
    wanted = types if isinstance(types, list) else [types]
    if not any(_is(value, one) for one in wanted):
        fault = "valid under any of the given schemas" if len(wanted) > 1 else f"of type {wanted[0]!r}"
        yield place, f"{value!r} is not {fault}"
        return
    for said in (*_of_number(value, schema), *_of_text(value, schema)):
        yield place, said
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            yield place, f"{value!r} is too long"
        for index, member in enumerate(value):
            yield from _complaints(member, schema["items"], (*place, index))
    if isinstance(value, dict):
        properties = schema["properties"]
        if extra := sorted(set(value) - set(properties)):
            names, verb = ", ".join(map(repr, extra)), "was" if len(extra) == 1 else "were"
            yield place, f"Additional properties are not allowed ({names} {verb} unexpected)"
        for name in schema.get("required", ()):
            if name not in value:
                yield place, f"{name!r} is a required property"
        for name in properties:
            if name in value:
                yield from _complaints(value[name], properties[name], (*place, name))


def _of_number(value: Any, schema: Any) -> Iterator[str]:
    if not _is(value, "integer"):
        return
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{value!r} is less than or equal to the minimum of {schema['exclusiveMinimum']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{value!r} is less than the minimum of {schema['minimum']}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{value!r} is greater than the maximum of {schema['maximum']}"


def _of_text(value: Any, schema: Any) -> Iterator[str]:
    if not isinstance(value, str):
        return
    if len(value) < schema.get("minLength", 0):
        yield f"{value!r} should be non-empty"
    if len(value) > schema.get("maxLength", len(value)):
        yield f"{value!r} is too long"
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        yield f"{value!r} does not match {schema['pattern']!r}"


def _is(value: Any, kind: str) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    return isinstance(value, _TYPES[kind])
