"""The reference server's tools with a contract: their schemas word for word, and each limit of the contract at its boundary."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from server_helpers import CHAT, Caller, in_process

pytestmark = pytest.mark.asyncio

UINT64 = {"format": "uint64", "minimum": 0, "type": "integer"}
STRING = {"type": "string"}
ITEM = {
    "properties": {
        "payload": {"additionalProperties": True, "type": "object"},
        "recorded_at": STRING,
        "seq": UINT64,
    },
    "required": ["seq", "recorded_at", "payload"],
    "type": "object",
}
PAGE = {"items": {"items": {"$ref": "#/$defs/McpMemoryItem"}, "type": "array"}}
SCHEMAS: dict[str, tuple[Any, Any]] = {
    "append_memory": (
        {
            "properties": {
                "conversation_id": STRING,
                "items": {
                    "items": {"additionalProperties": True, "type": "object"},
                    "maxItems": 250,
                    "minItems": 1,
                    "type": "array",
                },
            },
            "required": ["conversation_id", "items"],
            "title": "AppendMemoryRequest",
            "type": "object",
        },
        {
            "properties": {"first_seq": UINT64, "last_seq": UINT64},
            "required": ["first_seq", "last_seq"],
            "title": "AppendMemoryResponse",
            "type": "object",
        },
    ),
    "replay_memory": (
        {
            "properties": {
                "conversation_id": STRING,
                "limit": {"format": "uint64", "minimum": 0, "maximum": 1000, "type": "integer"},
                "offset": {"default": 0, "format": "uint64", "minimum": 0, "type": "integer"},
            },
            "required": ["conversation_id", "limit"],
            "title": "ReplayMemoryRequest",
            "type": "object",
        },
        {
            "properties": PAGE,
            "required": ["items"],
            "title": "ReplayMemoryResponse",
            "type": "object",
            "$defs": {"McpMemoryItem": ITEM},
        },
    ),
    "recall_memory": (
        {
            "properties": {
                "conversation_id": STRING,
                "limit": {"format": "uint64", "minimum": 1, "maximum": 1000, "type": "integer"},
            },
            "required": ["conversation_id", "limit"],
            "title": "RecallMemoryRequest",
            "type": "object",
        },
        {
            "properties": PAGE,
            "required": ["items"],
            "title": "RecallMemoryResponse",
            "type": "object",
            "$defs": {"McpMemoryItem": ITEM},
        },
    ),
    "list_conversations": (
        {
            "properties": {
                "after": STRING,
                "limit": {"format": "uint64", "minimum": 1, "maximum": 1000, "type": "integer"},
            },
            "required": ["limit"],
            "title": "ListConversationsRequest",
            "type": "object",
        },
        {
            "properties": {
                "conversations": {"items": {"$ref": "#/$defs/McpConversation"}, "type": "array"},
            },
            "required": ["conversations"],
            "title": "ListConversationsResponse",
            "type": "object",
            "$defs": {
                "McpConversation": {
                    "properties": {
                        "conversation_id": STRING,
                        "first_recorded_at": STRING,
                        "items": {"format": "uint64", "minimum": 1, "type": "integer"},
                        "last_recorded_at": STRING,
                    },
                    "required": ["conversation_id", "items", "first_recorded_at", "last_recorded_at"],
                    "type": "object",
                }
            },
        },
    ),
    "memory_history": (
        {
            "additionalProperties": False,
            "properties": {
                "after": {"default": 0, "minimum": 0, "type": "integer"},
                "id": {"exclusiveMinimum": 0, "type": "integer"},
                "limit": {"default": 50, "maximum": 50, "minimum": 1, "type": "integer"},
                "scope": {
                    "additionalProperties": False,
                    "properties": {
                        "kind": {"default": "personal", "enum": ["personal", "team", "shared"], "type": "string"},
                        "team_id": {"pattern": "^[a-zA-Z0-9_-]{1,64}$", "type": ["string", "null"]},
                    },
                    "type": "object",
                },
            },
            "required": ["id"],
            "title": "MemoryHistoryRequest",
            "type": "object",
        },
        None,
    ),
}


def without_descriptions(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: without_descriptions(value)
            for key, value in schema.items()
            if not (key == "description" and isinstance(value, str))
        }
    return [without_descriptions(value) for value in schema] if isinstance(schema, list) else schema


def described(schema: Any) -> bool:
    """Whether every property of every object says what it is."""
    if isinstance(schema, list):
        return all(map(described, schema))
    if not isinstance(schema, dict):
        return True
    properties = schema.get("properties", {})
    return all(described(value) for value in schema.values()) and all(
        "description" in value or name == "kind" for name, value in properties.items()
    )


@pytest.mark.contract("C2", "C8", "C10", "C12")
async def test_the_listed_schemas_are_those_of_the_contract() -> None:
    """Contract: names, types, formats, bounds, defaults, titles and what is required; descriptions are our own."""
    async with in_process() as caller:
        answer = await caller.post('{"jsonrpc":"2.0","id":1,"method":"tools/list"}')
        tools = answer.json()["result"]["tools"]
    listed = {
        tool["name"]: (without_descriptions(tool["inputSchema"]), without_descriptions(tool.get("outputSchema")))
        for tool in tools
    }
    assert {name: listed[name] for name in SCHEMAS} == SCHEMAS
    assert set(listed) - set(SCHEMAS) == {
        f"memory_{name}" for name in ("save", "update", "delete", "get", "export", "scopes")
    }
    assert all(output is None for name, (_, output) in listed.items() if name.startswith("memory_"))
    assert all(tool["description"] and described(tool["inputSchema"]) for tool in tools)
    assert all(described(tool["outputSchema"]) for tool in tools if "outputSchema" in tool)


@pytest.mark.contract("C4", "C7")
async def test_seq_counts_from_zero_without_gaps_and_a_batch_shares_one_time() -> None:
    """Contract: the range is inclusive; all items of a batch share one `recorded_at`, RFC 3339, no other batch has."""
    async with in_process() as caller:
        assert await caller.append({"n": 0}) == {"first_seq": 0, "last_seq": 0}
        assert await caller.append({"n": 1}, {"n": 2}) == {"first_seq": 1, "last_seq": 2}
        assert await caller.append({"n": 3}, chat="another_one") == {"first_seq": 0, "last_seq": 0}
        items = await caller.replay()
    assert [(item["seq"], item["payload"]) for item in items] == [(n, {"n": n}) for n in range(3)]
    times = [item["recorded_at"] for item in items]
    assert times[0] < times[1] == times[2]
    assert all(datetime.fromisoformat(time).utcoffset() is not None and time[-8] == "." for time in times)


@pytest.mark.contract("C1")
@pytest.mark.parametrize("identifier", ["a" * 8, "Z" * 64, "-_-_-_-_", "12345678"])
async def test_an_id_of_the_contract_is_accepted(identifier: str) -> None:
    """Contract: 8-64 characters from [A-Za-z0-9_-]."""
    async with in_process() as caller:
        await caller.append({}, chat=identifier)
        assert len(await caller.replay(identifier)) == 1


@pytest.mark.contract("C1")
@pytest.mark.parametrize("identifier", ["a" * 7, "a" * 65, "a" * 8 + "\n", "aaaaaaaé", "a b c d e", "", 12345678, None])
@pytest.mark.parametrize("tool", ["append_memory", "replay_memory", "recall_memory"])
async def test_any_other_id_is_refused_outright(tool: str, identifier: Any) -> None:
    """Contract: a malformed id never falls back to a fresh conversation."""
    more = {"items": [{}]} if tool == "append_memory" else {"limit": 1}
    async with in_process() as caller:
        assert await caller.refused(tool, conversation_id=identifier, **more) == "invalid_conversation_id"
        assert await caller.refused(tool, **more) == "invalid_conversation_id"
        assert (await caller.call("list_conversations", limit=1))["conversations"] == []


async def refused_and_nothing_stored(caller: Caller, items: Any) -> str:
    code = await caller.refused("append_memory", conversation_id=CHAT, items=items)
    assert await caller.replay() == []
    return code


@pytest.mark.contract("C2")
async def test_a_batch_holds_1_to_250_items() -> None:
    """Contract: both ends are allowed, 0 and 251 are not."""
    async with in_process() as caller:
        assert await refused_and_nothing_stored(caller, []) == "invalid_items"
        assert await refused_and_nothing_stored(caller, [{}] * 251) == "too_many_items"
        assert await caller.append({}) == {"first_seq": 0, "last_seq": 0}
        assert await caller.append(*[{}] * 250) == {"first_seq": 1, "last_seq": 250}


def item_of(size: int, filling: str = "x") -> dict[str, str]:
    """An object whose compact JSON has exactly this many bytes."""
    count, rest = divmod(size - len('{"t":""}'), len(filling.encode()))
    return {"t": filling * count + "x" * rest}


@pytest.mark.contract("C2")
@pytest.mark.parametrize("filling", ["x", "記", "🙂"])
async def test_an_item_of_262144_bytes_is_accepted_and_one_more_byte_is_not(filling: str) -> None:
    """Contract: measured as compact UTF-8, also where the caller sent escapes and white space."""
    async with in_process() as caller:
        # json.dumps escapes all that is not ASCII, so the request itself is much longer.
        assert await refused_and_nothing_stored(caller, [{}, item_of(262_145, filling)]) == "item_too_large"
        await caller.append(item_of(262_144, filling))
        spaced = json.dumps({"conversation_id": CHAT, "items": [item_of(262_144, filling)]}, indent=8)
        assert (await caller.raw_call("append_memory", spaced)).json()["result"]["isError"] is False
        assert [item["payload"] for item in await caller.replay()] == [item_of(262_144, filling)] * 2


@pytest.mark.contract("C2")
async def test_a_batch_of_1048576_bytes_is_accepted_and_one_more_byte_is_not() -> None:
    """Contract: the sum of the items' own bytes, without what stands between them."""
    full = [item_of(262_144)] * 3
    async with in_process() as caller:
        too_much = [*full, item_of(262_144 - 8), item_of(9)]
        assert await refused_and_nothing_stored(caller, too_much) == "batch_too_large"
        assert await caller.append(*full, item_of(262_144 - 8), item_of(8)) == {"first_seq": 0, "last_seq": 4}


@pytest.mark.contract("C2", "C4")
async def test_a_conversation_is_full_at_its_cap_and_a_batch_that_would_pass_it_leaves_nothing() -> None:
    """Contract: the cap itself is allowed; all items of a batch or none. Another conversation is not affected."""
    async with in_process(conversation_items_max=5) as caller:
        await caller.append(*[{}] * 4)
        assert await caller.refused("append_memory", conversation_id=CHAT, items=[{}, {}]) == "conversation_full"
        assert await caller.append({}) == {"first_seq": 4, "last_seq": 4}
        assert await caller.refused("append_memory", conversation_id=CHAT, items=[{}]) == "conversation_full"
        assert len(await caller.replay()) == 5
        assert await caller.append({}, chat="another_one") == {"first_seq": 0, "last_seq": 0}


@pytest.mark.contract("C2")
async def test_a_conversation_holds_100000_items_and_not_one_more() -> None:
    """Contract: 100,000, unless a lower cap was set."""
    async with in_process() as caller:
        for _ in range(400):
            await caller.append(*[{}] * 250)
        assert await caller.refused("append_memory", conversation_id=CHAT, items=[{}]) == "conversation_full"
        assert [item["seq"] for item in await caller.replay(limit=3, offset=99_998)] == [99_998, 99_999]


@pytest.mark.contract("C3", "C4")
@pytest.mark.parametrize("odd", [[], "text", 7, None, True, [{}]])
async def test_an_item_that_is_no_object_refuses_the_whole_batch(odd: Any) -> None:
    """Contract: items is an array of objects."""
    async with in_process() as caller:
        assert await refused_and_nothing_stored(caller, [{"good": 1}, odd]) == "invalid_items"


@pytest.mark.contract("C3")
@pytest.mark.parametrize("odd", [{}, {"0": {}}, "[{}]", 7, None, True])
async def test_items_that_are_no_array_are_refused(odd: Any) -> None:
    """Contract: items is an array of objects."""
    async with in_process() as caller:
        assert await refused_and_nothing_stored(caller, odd) == "invalid_items"


@pytest.mark.contract("C8")
async def test_replay_pages_by_position_until_a_short_page() -> None:
    """Contract: offset is the position; an empty page ends the log; an unknown conversation is empty, not an error."""
    async with in_process() as caller:
        await caller.append(*({"n": n} for n in range(7)))

        async def page(**arguments: Any) -> list[int]:
            return [item["seq"] for item in await caller.replay(**arguments)]

        assert await page(limit=3) == [0, 1, 2]
        assert await page(limit=3, offset=3) == [3, 4, 5]
        assert await page(limit=3, offset=6) == [6]
        assert await page(limit=3, offset=7) == []
        assert await page(limit=3, offset=2**64 - 1) == []
        assert await page(limit=0) == []
        assert await page(chat="unknown_but_fine") == []


@pytest.mark.contract("C8", "C10")
@pytest.mark.parametrize(("tool", "lowest"), [("replay_memory", 0), ("recall_memory", 1), ("list_conversations", 1)])
async def test_a_limit_is_an_integer_from_its_minimum_to_1000(tool: str, lowest: int) -> None:
    """Contract: both ends are allowed; a fraction, a text or nothing is not a limit."""
    arguments = {} if tool == "list_conversations" else {"conversation_id": CHAT}
    async with in_process() as caller:
        for limit in (lowest, 1000):
            await caller.call(tool, limit=limit, **arguments)
        for limit in (lowest - 1, 1001, 10**30, 1.5, "10", None, True, [1]):
            assert await caller.refused(tool, limit=limit, **arguments) == "invalid_parameters"
        assert await caller.refused(tool, **arguments) == "invalid_parameters"


@pytest.mark.contract("C8")
@pytest.mark.parametrize("offset", [-1, 2**64, 0.5, "0", None])
async def test_an_offset_is_an_unsigned_64_bit_integer(offset: Any) -> None:
    """Contract: format uint64, minimum 0."""
    async with in_process() as caller:
        code = await caller.refused("replay_memory", conversation_id=CHAT, limit=1, offset=offset)
    assert code == "invalid_parameters"


@pytest.mark.contract("C10")
async def test_recall_answers_with_the_latest_items_in_ascending_order() -> None:
    """Ours: the contract shows no schema for it."""
    async with in_process() as caller:
        await caller.append(*({"n": n} for n in range(7)))
        recalled = (await caller.call("recall_memory", conversation_id=CHAT, limit=3))["items"]
        assert [(item["seq"], item["payload"]["n"]) for item in recalled] == [(4, 4), (5, 5), (6, 6)]
        assert recalled == await caller.replay(offset=4)
        assert (await caller.call("recall_memory", conversation_id="unknown_but_fine", limit=3)) == {"items": []}


@pytest.mark.contract("C10")
async def test_conversations_are_listed_by_id_page_by_page() -> None:
    """Ours: `after` is exclusive; each row tells how many items and when."""
    async with in_process() as caller:
        for chat in ("chat_bbb", "chat_aaa", "chat_ccc"):
            await caller.append({}, {}, chat=chat)
        await caller.append({}, chat="chat_bbb")
        first = (await caller.call("list_conversations", limit=2))["conversations"]
        rest = (await caller.call("list_conversations", limit=2, after=first[-1]["conversation_id"]))["conversations"]
        items = await caller.replay("chat_bbb")
        assert await caller.refused("list_conversations", limit=2, after=7) == "invalid_parameters"
    assert [row["conversation_id"] for row in first + rest] == ["chat_aaa", "chat_bbb", "chat_ccc"]
    assert first[1] == {
        "conversation_id": "chat_bbb",
        "items": 3,
        "first_recorded_at": items[0]["recorded_at"],
        "last_recorded_at": items[2]["recorded_at"],
    }


async def test_an_unknown_tool_is_an_error_of_the_protocol() -> None:
    """Ours, after the protocol: -32602, for what is not one of its tools."""
    async with in_process() as caller:
        for params in ({"name": "forget_memory"}, {"name": 7}, {}, {"name": "append_memory", "arguments": []}):
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            assert (await caller.post(json.dumps(message))).json()["error"]["code"] == -32602
