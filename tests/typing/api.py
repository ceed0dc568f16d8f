"""How memlog is written down by people who type-check. Read by mypy in strict mode, never run.

``assert_type`` holds what comes out; an ignored error holds what must not go in: where memlog stops objecting, mypy
calls the comment unused and the test fails.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import datetime
from typing import Any, Literal, TypedDict, assert_type

from pydantic import BaseModel

import memlog
import memlog.sync
from memlog import errors, payload
from memlog.retry import RetryPolicy, Verdict, classify, parse_retry_after


class Turn(TypedDict):
    role: str
    text: str


class Call(TypedDict, total=False):
    name: str
    arguments: dict[str, Any]


class Message(BaseModel):
    role: Literal["user", "assistant"]
    text: str = ""


TURN: Turn = {"role": "user", "text": "hello"}
CALL: Call = {"name": "search"}
WORDS: dict[str, str] = {"role": "user", "text": "hello"}
NUMBERS: dict[str, int] = {"n": 1}
OBJECTS: dict[str, object] = {"role": "user", "parts": [1, None]}
ANYTHING: dict[str, Any] = {"role": "user"}
ORDERED: OrderedDict[str, str] = OrderedDict(role="user")
MESSAGE = Message(role="user")


# -- what goes in


async def what_append_takes(chat: memlog.Conversation) -> None:
    chat.append({"role": "user", "text": "hello", "tags": ["a", 1, None]})
    chat.append(TURN)
    chat.append(CALL)
    chat.append(WORDS)
    chat.append(NUMBERS)
    chat.append(OBJECTS)
    chat.append(ANYTHING)
    chat.append(ORDERED)
    chat.append(MESSAGE)
    chat.append(MESSAGE.model_dump(mode="json"))


async def what_extend_takes(chat: memlog.Conversation, turns: list[Turn], messages: tuple[Message, ...]) -> None:
    chat.extend([{"role": "user"}, {"role": "assistant", "n": 1}])
    chat.extend(turns)
    chat.extend(messages, atomic=False)
    chat.extend([WORDS])
    chat.extend([OBJECTS, TURN, MESSAGE])
    words: list[dict[str, str]] = [WORDS]
    chat.extend(words)


async def what_they_do_not_take(chat: memlog.Conversation) -> None:
    chat.append("text")  # type: ignore[arg-type]
    chat.append(b"{}")  # type: ignore[arg-type]
    chat.append(None)  # type: ignore[arg-type]
    chat.append([TURN])  # type: ignore[arg-type]
    chat.append({1: "key"})  # type: ignore[dict-item]
    numbered: dict[int, str] = {1: "key"}
    chat.append(numbered)  # type: ignore[arg-type]
    chat.extend(TURN)  # type: ignore[arg-type]
    chat.extend(["text"])  # type: ignore[list-item]
    chat.extend([TURN], True)  # type: ignore[call-arg]


# -- what comes out


async def what_a_log_gives() -> None:
    async with memlog.open_log(
        "https://memory.example.org/mcp",
        auth=("site", "secret"),
        buffer_dir="./memory",
        flush_timeout=5.0,
        retry=memlog.RetryPolicy(attempts=None),
        limits=memlog.BufferLimits(),
    ) as log:
        assert_type(log, memlog.MemoryLog)
        chat = log.conversation(memlog.new_conversation_id())
        assert_type(chat, memlog.Conversation)

        receipt = chat.append(TURN)
        assert_type(receipt, memlog.Receipt)
        assert_type(chat.extend([TURN]), memlog.Receipt)
        assert_type(receipt.id, str)
        assert_type(await receipt.stored(timeout=1.0), None)
        assert_type(await receipt, None)
        ack = await receipt.acknowledged()
        assert_type(ack, memlog.Ack)
        assert_type(ack.first_seq, int)
        assert_type(ack.last_seq, int)

        replay = chat.replay(3, limit=10, include_pending=False)
        assert_type(replay, memlog.Replay)
        assert_type(replay.next_offset, int)
        assert_type(replay.degraded, bool)
        async for page in chat.replay(on_unavailable="pending").pages():
            assert_type(page, list[memlog.Item])
        async for info in log.list_conversations():
            assert_type(info.conversation_id, str)
        async for item in replay:
            what_an_item_is(item)
        assert_type([item async for item in chat.replay()], list[memlog.Item])
        assert_type(await chat.recall(5), list[memlog.Item])

        report = await log.flush(timeout=5, until="stored")
        assert_type(report, memlog.FlushReport)
        assert_type(report.complete, bool)
        assert_type(report.acknowledged, int)
        assert_type(report.pending, int)
        assert_type(report.refused, int)
        assert_type(report.reason, str | None)
        assert_type(await log.check(), None)
        assert_type(log.statistics(), memlog.Statistics)
        assert_type(log.statistics().reason, str | None)
        assert_type(await log.dead_letters(), list[memlog.DeadLetter])
        await log.flush(until="someday")  # type: ignore[arg-type]
    assert_type(await log.close(), None)


def what_an_item_is(item: memlog.Item) -> None:
    assert_type(item.seq, int | None)
    assert_type(item.recorded_at, datetime | None)
    assert_type(item.payload, dict[str, Any])
    text: str = item.payload["text"]
    parts: list[int] = item.payload["parts"]
    assert_type((text, parts), tuple[str, list[int]])
    item.seq = 4  # type: ignore[misc]


def what_the_blocking_face_gives() -> None:
    with memlog.sync.open_log("https://memory.example.org/mcp", auth=("site", "secret")) as log:
        chat = log.conversation("c_7f3a9b2e41")
        receipt = chat.append(TURN)
        chat.append(WORDS)
        chat.append(OBJECTS)
        chat.append(MESSAGE)
        chat.append("text")  # type: ignore[arg-type]
        assert_type(receipt.stored(timeout=1.0), None)
        assert_type(receipt.acknowledged(), memlog.Ack)
        assert_type(chat.extend([TURN, MESSAGE], atomic=False).id, str)
        for item in chat.replay():
            what_an_item_is(item)
        assert_type(list(chat.replay(limit=3)), list[memlog.Item])
        assert_type(list(chat.replay(follow=True).pages()), list[list[memlog.Item]])
        assert_type(chat.recall(), list[memlog.Item])
        assert_type(log.flush(timeout=5), memlog.FlushReport)
        assert_type(log.check(), None)
        assert_type(log.statistics(), memlog.Statistics)
        assert_type(log.dead_letters(), list[memlog.DeadLetter])
        assert_type(log.close(), None)


def one_log_has_both_faces(log: memlog.MemoryLog) -> None:
    assert_type(log.sync.flush(), memlog.FlushReport)
    assert_type(log.sync.conversation("c_7f3a9b2e41").recall(), list[memlog.Item])


async def what_a_client_gives() -> None:
    async with memlog.Client("https://memory.example.org/mcp", auth=("site", "secret")) as client:
        assert_type(await client.append_memory("c_7f3a9b2e41", [TURN, WORDS, MESSAGE]), memlog.Ack)
        turns: list[Turn] = [TURN]
        assert_type(await client.append_memory("c_7f3a9b2e41", turns), memlog.Ack)
        assert_type(await client.replay_memory("c_7f3a9b2e41", offset=0, limit=10), list[memlog.Item])
        assert_type(await client.recall_memory("c_7f3a9b2e41"), list[memlog.Item])
        assert_type(await client.call_tool("append_memory", {"n": 1}), dict[str, Any])
        for conversation in await client.list_conversations():
            assert_type(conversation.conversation_id, str)
            assert_type(conversation.first_recorded_at, datetime | None)


# -- errors, and the pure parts


def who_must_act(error: memlog.MemlogError) -> float | None:
    if isinstance(error, errors.InvalidItemError):
        assert_type(error.path, str)
    elif isinstance(error, errors.TooLargeError):
        assert_type(error.what, Literal["item", "batch", "count"])
        assert_type(error.size, int | None)
    elif isinstance(error, memlog.PermanentError):
        assert_type(error.outcome, Literal["not_sent", "refused"])
    elif isinstance(error, memlog.TransientError):
        assert_type(error.outcome, Literal["not_sent", "unknown"])
    assert_type(classify(error), Verdict)
    return error.retry_after


def what_the_pure_parts_give(now: datetime) -> None:
    assert_type(payload.encode(TURN), bytes)
    assert_type(payload.encode_batch(turn for turn in [TURN]), payload.Batch)
    assert_type(payload.decode_items(b"{}"), list[dict[str, Any]])
    assert_type(parse_retry_after("120", now=now), float | None)
    assert_type(RetryPolicy(total=None).delay(3), float)
    RetryPolicy(5)  # type: ignore[call-arg]
    RetryPolicy(attempts="5")  # type: ignore[arg-type]
