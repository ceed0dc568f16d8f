"""The site's four tools: what each is called, what it takes, what it answers, and where each limit lies.

A call that the tool itself refuses is answered with an ``isError`` result, as text only: structured content would have
to be what the tool's output schema says, and clients check that. The text is

    {"error": {"code": CODE, "message": TEXT}}

with one CODE a condition, stable: ``invalid_conversation_id``, ``invalid_items`` (not 1 or more JSON objects, or
nested too deeply), ``too_many_items``, ``item_too_large``, ``batch_too_large``, ``conversation_full``,
``invalid_parameters`` (any other argument), ``unprocessable_parameters`` (a Bearer token where the site's Basic
credentials are needed). The tools of :mod:`.team_tools` belong to the team half and answer in that half's manner,
always as text: ``{"error": TEXT, "code": CODE}`` with ``invalid_request``, ``conflict``, ``forbidden`` or
``unavailable``; and plain words where the arguments violate the schema.

Sizes are bytes of compact UTF-8 JSON, which is also what is stored; a size or number equal to a limit is accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .arguments import Arguments, Refusal, SchemaError, integer
from .store import FullError, Store, StoredItem
from .verbatim import NESTING_MAX, NotJsonError, dumps, quote

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from .auth import Identity
    from .team import Team

__all__ = ["TOOLS", "Result", "Tool", "ToolBox"]

CONVERSATION_ID: Final = re.compile(r"[A-Za-z0-9_-]{8,64}")
BATCH_ITEMS_MAX: Final = 250
ITEM_BYTES_MAX: Final = 262_144
BATCH_BYTES_MAX: Final = 1_048_576
PAGE_ITEMS_MAX: Final = 1000
UINT64_MAX: Final = 2**64 - 1


def _uint64(description: str, *, minimum: int = 0, maximum: int | None = None, default: int | None = None) -> Any:
    schema: dict[str, Any] = {"description": description, "format": "uint64", "minimum": minimum, "type": "integer"}
    if maximum is not None:
        schema["maximum"] = maximum
    if default is not None:
        schema["default"] = default
    return schema


def _text(description: str) -> Any:
    return {"description": description, "type": "string"}


def _schema(title: str, properties: Any, required: Iterable[str], **more: Any) -> Any:
    return {"properties": properties, "required": list(required), "title": title, "type": "object", **more}


_ITEM: Final[Any] = {
    "properties": {
        "payload": {
            "additionalProperties": True,
            "description": "The object as it was appended: same keys, same order, same numbers.",
            "type": "object",
        },
        "recorded_at": _text("When the item's batch was committed, RFC 3339. Shared by the whole batch."),
        "seq": _uint64("Position in the conversation, counted from 0 without gaps."),
    },
    "required": ["seq", "recorded_at", "payload"],
    "type": "object",
}
_ITEMS: Final[Any] = {"items": {"$ref": "#/$defs/McpMemoryItem"}, "type": "array"}
_ID_RULE: Final = "8-64 characters from `[A-Za-z0-9_-]`, minted by the client, never derived from personal data."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What ``tools/list`` says of one tool. ``of_site`` tells the four that need the site's Basic credentials.

    ``answer`` is the whole of a tool that has nothing to do with memory, see :mod:`.conformance`.
    """

    name: str
    description: str
    input_schema: Any
    output_schema: Any = None
    of_site: bool = True
    answer: Callable[[Arguments], Result] | None = None


TOOLS: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        Tool(
            name="append_memory",
            description=(
                "Adds a batch of JSON objects to the end of a conversation, whole or not at all, and answers with the "
                "range of sequence numbers it got once the batch is durable. Needs the site's Basic credentials."
            ),
            input_schema=_schema(
                "AppendMemoryRequest",
                {
                    "conversation_id": _text(f"The conversation to append to: {_ID_RULE} A malformed id is refused."),
                    "items": {
                        "description": (
                            "The objects to remember, in order, kept verbatim. 1 to 250 objects; each at most 256 KiB "
                            "and together at most 1 MiB of JSON; a conversation holds at most 100,000."
                        ),
                        "items": {"additionalProperties": True, "type": "object"},
                        "maxItems": BATCH_ITEMS_MAX,
                        "minItems": 1,
                        "type": "array",
                    },
                },
                ["conversation_id", "items"],
            ),
            output_schema=_schema(
                "AppendMemoryResponse",
                {
                    "first_seq": _uint64("Sequence number of the batch's first item."),
                    "last_seq": _uint64("Sequence number of the batch's last item; the range is inclusive."),
                },
                ["first_seq", "last_seq"],
            ),
        ),
        Tool(
            name="replay_memory",
            description=(
                "Reads a conversation by position, in ascending order. Start at 0, go on at the last sequence number "
                "plus one, stop at a page shorter than the limit. Needs the site's Basic credentials."
            ),
            input_schema=_schema(
                "ReplayMemoryRequest",
                {
                    "conversation_id": _text(f"The conversation to read: {_ID_RULE} One that is not known is empty."),
                    "limit": _uint64(
                        "How many items to return at most. A shorter page, also an empty one, ends the log.",
                        maximum=PAGE_ITEMS_MAX,
                    ),
                    "offset": _uint64("Sequence number to start from, which is the position in the log.", default=0),
                },
                ["conversation_id", "limit"],
            ),
            output_schema=_schema(
                "ReplayMemoryResponse",
                {"items": {"description": "The items from the offset on, ascending.", **_ITEMS}},
                ["items"],
                **{"$defs": {"McpMemoryItem": _ITEM}},
            ),
        ),
        Tool(
            name="recall_memory",
            description=(
                "Reads the most recent items of a conversation, in ascending order. Needs the site's Basic credentials."
            ),
            input_schema=_schema(
                "RecallMemoryRequest",
                {
                    "conversation_id": _text(f"The conversation to read: {_ID_RULE} One that is not known is empty."),
                    "limit": _uint64("How many items to return at most.", minimum=1, maximum=PAGE_ITEMS_MAX),
                },
                ["conversation_id", "limit"],
            ),
            output_schema=_schema(
                "RecallMemoryResponse",
                {"items": {"description": "The last items of the conversation, ascending.", **_ITEMS}},
                ["items"],
                **{"$defs": {"McpMemoryItem": _ITEM}},
            ),
        ),
        Tool(
            name="list_conversations",
            description=(
                "Lists the site's conversations, ascending by id. Go on after the last id; stop at a page shorter "
                "than the limit. Needs the site's Basic credentials."
            ),
            input_schema=_schema(
                "ListConversationsRequest",
                {
                    "after": _text("Return only conversations whose id is greater than this one."),
                    "limit": _uint64("How many conversations to return at most.", minimum=1, maximum=PAGE_ITEMS_MAX),
                },
                ["limit"],
            ),
            output_schema=_schema(
                "ListConversationsResponse",
                {
                    "conversations": {
                        "description": "The conversations, ascending by id.",
                        "items": {"$ref": "#/$defs/McpConversation"},
                        "type": "array",
                    }
                },
                ["conversations"],
                **{
                    "$defs": {
                        "McpConversation": {
                            "properties": {
                                "conversation_id": _text("The id the client minted."),
                                "first_recorded_at": _text("When the first batch was committed, RFC 3339."),
                                "items": _uint64("How many items the conversation holds.", minimum=1),
                                "last_recorded_at": _text("When the latest batch was committed, RFC 3339."),
                            },
                            "required": ["conversation_id", "items", "first_recorded_at", "last_recorded_at"],
                            "type": "object",
                        }
                    }
                },
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Result:
    """A tool's answer as JSON text; ``structured`` says whether it is sent as structured content too."""

    text: str
    structured: bool = True
    is_error: bool = False
    ack: tuple[int, int] | None = None
    """The range an append was given."""


class ToolBox:
    """Carries out calls. Knows who calls and what they ask, not how it travelled."""

    def __init__(self, store: Store, team: Team) -> None:
        self._store = store
        self._team = team
        self._site_tools: Mapping[str, Callable[[str, Arguments], Awaitable[Result]]] = {
            "append_memory": self._append,
            "replay_memory": self._replay,
            "recall_memory": self._recall,
            "list_conversations": self._list,
        }

    async def call(self, tool: Tool, arguments: Arguments, identity: Identity) -> Result:
        """The answer, also where it is a refusal. Raises only for what is the server's own trouble."""
        if tool.answer is not None:
            return tool.answer(arguments)
        if not tool.of_site:
            return self._of_team(tool.name, arguments, identity)
        try:
            return await self._site_tools[tool.name](_site(identity), arguments)
        except Refusal as refused:
            text = f'{{"error":{{"code":{quote(refused.code)},"message":{quote(refused.message)}}}}}'
            return Result(text, structured=False, is_error=True)

    async def _append(self, site: str, arguments: Arguments) -> Result:
        conversation_id = _conversation_id(arguments)
        payloads = _payloads(arguments.get("items"))
        try:
            first, last = await self._store.append(site, conversation_id, payloads)
        except FullError:
            cap = self._store.conversation_items_max
            raise Refusal("conversation_full", f"a conversation holds at most {cap} items") from None
        return Result(append_answer(first, last), ack=(first, last))

    async def _replay(self, site: str, arguments: Arguments) -> Result:
        conversation_id = _conversation_id(arguments)
        limit = integer(arguments, "limit", 0, PAGE_ITEMS_MAX, code="invalid_parameters")
        offset = integer(arguments, "offset", 0, UINT64_MAX, default=0, code="invalid_parameters")
        return _items(await self._store.replay(site, conversation_id, offset, limit))

    async def _recall(self, site: str, arguments: Arguments) -> Result:
        conversation_id = _conversation_id(arguments)
        limit = integer(arguments, "limit", 1, PAGE_ITEMS_MAX, code="invalid_parameters")
        return _items(await self._store.recall(site, conversation_id, limit))

    async def _list(self, site: str, arguments: Arguments) -> Result:
        limit = integer(arguments, "limit", 1, PAGE_ITEMS_MAX, code="invalid_parameters")
        after = arguments.get("after")
        if after is not None and type(after) is not str:
            raise Refusal("invalid_parameters", "after must be a string")
        found = ",".join(
            f'{{"conversation_id":"{row.conversation_id}","items":{row.items},'
            f'"first_recorded_at":"{row.first_recorded_at}","last_recorded_at":"{row.last_recorded_at}"}}'
            for row in await self._store.conversations(site, limit, after)
        )
        return Result(f'{{"conversations":[{found}]}}')

    def _of_team(self, name: str, arguments: Arguments, identity: Identity) -> Result:
        try:
            return Result(self._team.call(name, arguments, identity), structured=False)
        except SchemaError as violated:
            return Result(str(violated), structured=False, is_error=True)
        except Refusal as refused:
            text = f'{{"error":{quote(refused.message)},"code":{quote(refused.code)}}}'
            return Result(text, structured=False, is_error=True)


def _site(identity: Identity) -> str:
    if identity.site is None:
        raise Refusal("unprocessable_parameters", "Basic authentication with the site's credentials is required")
    return identity.site


def append_answer(first: int, last: int) -> str:
    return f'{{"first_seq":{first},"last_seq":{last}}}'


def _items(rows: Iterable[StoredItem]) -> Result:
    # Every part but the payload is of our own making, and the payload is spliced in as it was stored.
    items = ",".join(
        f'{{"seq":{seq},"recorded_at":"{recorded_at}","payload":{payload}}}' for seq, recorded_at, payload in rows
    )
    return Result(f'{{"items":[{items}]}}')


def _conversation_id(arguments: Arguments) -> str:
    value = arguments.get("conversation_id")
    if type(value) is not str or CONVERSATION_ID.fullmatch(value) is None:
        raise Refusal("invalid_conversation_id", "conversation_id must be 8-64 characters from [A-Za-z0-9_-]")
    return value


def _payloads(items: object) -> list[str]:
    if type(items) is not list or not items:
        raise Refusal("invalid_items", f"items must be an array of 1 to {BATCH_ITEMS_MAX} objects")
    if len(items) > BATCH_ITEMS_MAX:
        raise Refusal("too_many_items", f"items holds {len(items)} objects, at most {BATCH_ITEMS_MAX} are allowed")
    payloads: list[str] = []
    total = 0
    for position, item in enumerate(items):
        if type(item) is not dict:
            raise Refusal("invalid_items", f"items[{position}] is not a JSON object")
        try:
            payload = dumps(item)
        except NotJsonError:
            raise Refusal("invalid_items", f"items[{position}] is nested more than {NESTING_MAX} levels deep") from None
        size = len(payload) if payload.isascii() else len(payload.encode("utf-8"))
        if size > ITEM_BYTES_MAX:
            raise Refusal("item_too_large", f"items[{position}] has {size} bytes, at most {ITEM_BYTES_MAX} allowed")
        total += size
        payloads.append(payload)
    if total > BATCH_BYTES_MAX:
        raise Refusal("batch_too_large", f"the batch has {total} bytes, at most {BATCH_BYTES_MAX} are allowed")
    return payloads
