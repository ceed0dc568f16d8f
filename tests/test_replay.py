"""Reading a conversation back: verified, to its end and no further, once each, whatever happens meanwhile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from books import PATIENCE, QUICK, until
from raw_server import McpStub, RawServer, tool_result

from memlog import Client, Item, Replay, RetryPolicy, open_log
from memlog.errors import (
    AuthenticationError,
    MemoryUnavailableError,
    ProtocolError,
    ResponseTooLargeError,
    SequenceError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from raw_server import Seen

    from memlog import Conversation, MemoryLog
    from memlog.testing import ReferenceServer

CHAT = "conversation-1"

ITEM_BYTES_MAX = 262_144


def numbered(count: int, start: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(start, start + count)]


def a_log(server: ReferenceServer, tmp_path: Path, **settings: Any) -> MemoryLog:
    return open_log(server.url, auth=server.auth, buffer_dir=tmp_path, **{"retry": QUICK, **settings})


async def filled(log: MemoryLog, count: int, conversation: str = CHAT) -> Conversation:
    """The conversation with ``count`` items in the log."""
    chat = log.conversation(conversation)
    if count:
        await chat.extend(numbered(count), atomic=False).acknowledged(PATIENCE)
    return chat


async def numbers(replay: Replay) -> list[int]:
    return [item.payload["n"] async for item in replay]


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C7", "C8")
@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 300, 301, 1750])
async def test_a_conversation_comes_back_whole_whatever_its_length(
    count: int, server: ReferenceServer, tmp_path: Path
) -> None:
    """C8: also where the last page is exactly full, so that only an empty one tells the end; C7: numbered from 0."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, count)
            replay = chat.replay()
            items = [item async for item in replay]
            assert [item.seq for item in items] == list(range(count))
            assert [item.payload for item in items] == numbered(count)
            assert all(item.recorded_at is not None and item.recorded_at.tzinfo is not None for item in items)
            assert [item.recorded_at for item in items] == sorted(item.recorded_at for item in items)
            assert replay.next_offset == count
            assert [item async for item in replay] == []
        async with Client(server.url, auth=server.auth) as client:
            assert [item async for item in client.replay(CHAT)] == items


@pytest.mark.anyio
@pytest.mark.contract("C8")
@pytest.mark.parametrize(
    ("offset", "limit"),
    [
        (0, 0),
        (0, 1),
        (0, 100),
        (0, 250),
        (0, 1000),
        (249, None),
        (250, None),
        (251, None),
        (10**6, None),
        (99, 2),
        (5, 120),
    ],
)
async def test_offset_and_limit_cut_out_a_range(
    offset: int, limit: int | None, server: ReferenceServer, tmp_path: Path
) -> None:
    """C8: an offset past the end is empty and no error; a limit of 0 means none, and asks nobody."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 250)
            expected = list(range(250))[offset:][:limit]
            calls = server.counters.calls["replay_memory"]
            replay = chat.replay(offset, limit=limit)
            assert replay.next_offset == offset
            assert await numbers(replay) == expected
            assert replay.next_offset == (expected[-1] + 1 if expected else offset)
            if limit == 0:
                assert server.counters.calls["replay_memory"] == calls
        async with Client(server.url, auth=server.auth) as client:
            assert await numbers(client.replay(CHAT, offset, limit=limit)) == expected


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("offset", "limit"), [(-1, None), (True, None), ("0", None), (0.0, None), (0, -1), (0, True), (0, "1"), (0, 1.0)]
)
async def test_a_range_that_cannot_be_meant_is_refused(
    offset: Any, limit: Any, server: ReferenceServer, tmp_path: Path
) -> None:
    """ValueError when it is asked for, not when it is read."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            with pytest.raises(ValueError, match=r"limit|position"):
                log.conversation(CHAT).replay(offset, limit=limit)


@pytest.mark.anyio
async def test_what_is_appended_while_reading_is_read_too(server: ReferenceServer, tmp_path: Path) -> None:
    """The end is where the log ends when it is reached."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 150)
            read = []
            async for item in chat.replay():
                read.append(item.payload["n"])
                if len(read) == 50:
                    await chat.extend(numbered(150, 150)).acknowledged()
            assert read == list(range(300))


# --- verification ----------------------------------------------------------------------------------------------------

NOW = datetime(2026, 9, 25, 9, 14, 2, 118000, tzinfo=UTC)


def page(*seqs: int) -> list[dict[str, Any]]:
    return [
        {"seq": seq, "recorded_at": (NOW + timedelta(seconds=seq)).isoformat(), "payload": {"n": seq}} for seq in seqs
    ]


def answering(pages: Callable[[int, int], object]) -> RawServer:
    """A server whose every read is answered with ``pages(offset, limit)``."""

    def call(seen: Seen) -> None:
        arguments = seen.json["params"]["arguments"]
        seen.rpc(result=tool_result({"items": pages(arguments.get("offset", 0), arguments["limit"])}))

    return RawServer(McpStub(call))


WRONG_PAGES: dict[str, tuple[Callable[[int, int], object], int, int]] = {
    "a gap": (lambda offset, limit: page(0, 1, 3), 2, 3),
    "a repetition": (lambda offset, limit: page(0, 1, 1, 2), 2, 1),
    "descending": (lambda offset, limit: page(1, 0), 0, 1),
    "beginning too late": (lambda offset, limit: page(1, 2), 0, 1),
    "numbered from 1 on the second page": (
        lambda offset, limit: page(*range(limit)) if offset == 0 else page(offset + 1),
        127,
        128,
    ),
    "the first page again": (lambda offset, limit: page(*range(limit)), 127, 0),
    "longer than asked for": (lambda offset, limit: page(*range(offset, offset + limit + 1)), 127, 128),
}


@pytest.mark.anyio
@pytest.mark.contract("C7", "C8")
@pytest.mark.parametrize(("pages", "expected", "got"), WRONG_PAGES.values(), ids=WRONG_PAGES.keys())
async def test_a_page_that_does_not_count_on_is_an_error_and_no_end(
    pages: Callable[[int, int], object], expected: int, got: int, tmp_path: Path
) -> None:
    """C7: what was good before is handed over, of the wrong page nothing; the error says which number should stand where."""
    with answering(pages) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            replay = log.conversation(CHAT).replay()
            read: list[int] = []
            with pytest.raises(SequenceError) as caught:
                async for item in replay:
                    read.append(item.payload["n"])
            assert (caught.value.expected, caught.value.got) == (expected, got)
            assert read in ([], list(range(128)))
            assert replay.next_offset == len(read)
        async with Client(server.url) as client:
            with pytest.raises(SequenceError):
                await numbers(client.replay(CHAT))


SHAPELESS: dict[str, Any] = {
    "no list": {"0": page(0)},
    "null": None,
    "a number as text": [{**page(0)[0], "seq": "0"}],
    "a negative number": [{**page(0)[0], "seq": -1}],
    "a fraction": [{**page(0)[0], "seq": 0.5}],
    "no number": [{"recorded_at": NOW.isoformat(), "payload": {}}],
    "no time": [{"seq": 0, "payload": {}}],
    "seconds for a time": [{**page(0)[0], "recorded_at": 1758791642}],
    "a week for a time": [{**page(0)[0], "recorded_at": "2026-W39-5T09:14:02Z"}],
    "a time without separators": [{**page(0)[0], "recorded_at": "20260925T091402Z"}],
    "an hour for a time": [{**page(0)[0], "recorded_at": "2026-09-25T09Z"}],
    "a time without a zone": [{**page(0)[0], "recorded_at": "2026-09-25T09:14:02"}],
    "a time beyond all times": [{**page(0)[0], "recorded_at": "9999-12-31T23:59:60Z"}],
    "no payload": [{"seq": 0, "recorded_at": NOW.isoformat()}],
    "a payload that is text": [{**page(0)[0], "payload": '{"n":0}'}],
    "a payload that is null": [{**page(0)[0], "payload": None}],
}


@pytest.mark.anyio
@pytest.mark.contract("C8", "C13")
@pytest.mark.parametrize("items", SHAPELESS.values(), ids=SHAPELESS.keys())
async def test_an_answer_of_another_shape_is_an_error_and_no_end(items: Any, tmp_path: Path) -> None:
    """C8: never taken for an empty page; read again first, since a server may just be restarting."""
    with answering(lambda offset, limit: items) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            with pytest.raises(MemoryUnavailableError) as caught:
                await numbers(log.conversation(CHAT).replay())
            assert isinstance(caught.value.__cause__, ProtocolError)
            assert len([seen for seen in server.seen if seen.method == "tools/call"]) == QUICK.attempts


@pytest.mark.anyio
@pytest.mark.contract("C7")
@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-09-25t09:14:02z", datetime(2026, 9, 25, 9, 14, 2, tzinfo=UTC)),
        ("2026-09-25 09:14:02.5-00:00", datetime(2026, 9, 25, 9, 14, 2, 500_000, tzinfo=UTC)),
        ("2026-09-25T09:14:02.123456789+02:00", datetime(2026, 9, 25, 7, 14, 2, 123_456, tzinfo=UTC)),
        ("2026-06-30T23:59:60Z", datetime(2026, 7, 1, tzinfo=UTC)),
    ],
    ids=["small letters", "a blank and no zone known", "nanoseconds", "a leap second"],
)
async def test_each_way_to_write_a_time_is_understood(text: str, time: datetime, tmp_path: Path) -> None:
    """C7: RFC 3339 has several, and Python's own reader neither all of them nor only those."""
    items = [{**page(0)[0], "recorded_at": text}]
    with answering(lambda offset, limit: items if offset == 0 else []) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            assert [item.recorded_at async for item in log.conversation(CHAT).replay()] == [time]


@pytest.mark.anyio
@pytest.mark.contract("C10")
async def test_what_the_contract_does_not_name_is_let_through(tmp_path: Path) -> None:
    """C10: further fields, and another spelling of the time."""
    items = [{**page(0)[0], "recorded_at": "2026-09-25T11:14:02.118+02:00", "author": "somebody"}]
    with answering(lambda offset, limit: items if offset == 0 else []) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            (item,) = [item async for item in log.conversation(CHAT).replay()]
            assert (item.seq, item.recorded_at, item.payload) == (0, NOW, {"n": 0})


# --- pending ---------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_has_not_reached_the_log_comes_last_without_a_number(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """`seq` and `recorded_at` are None; `next_offset` stays where the log ends; `include_pending=False` leaves them out."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 120)
            server.faults.add("stall", tool="append_memory", seconds=None)
            receipts = [chat.append(item) for item in numbered(3, 120)]
            chat_two = log.conversation("conversation-2")
            chat_two.append({"n": -1})
            replay = chat.replay()
            items = [item async for item in replay]
            assert [item.payload["n"] for item in items] == list(range(123))
            assert [item.seq for item in items] == [*range(120), None, None, None]
            assert [item.recorded_at for item in items[120:]] == [None] * 3
            assert replay.next_offset == 120
            assert await numbers(chat.replay(include_pending=False)) == list(range(120))
            assert await numbers(chat.replay(119, limit=3)) == [119, 120, 121]
            assert await numbers(chat.replay(120)) == [120, 121, 122]
            server.faults.clear()
            assert (await receipts[-1].acknowledged()).last_seq == 122
            assert [item.seq async for item in chat.replay(118)] == [118, 119, 120, 121, 122]


@pytest.mark.anyio
async def test_an_append_is_replayed_at_once(server: ReferenceServer, tmp_path: Path) -> None:
    """Without waiting for `stored` or `acknowledged`: what this process appended before, it reads."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = log.conversation(CHAT)
            for n in range(50):
                chat.append({"n": n})
                assert await numbers(chat.replay()) == list(range(n + 1))


@pytest.mark.anyio
@pytest.mark.contract("C6")
@pytest.mark.parametrize("lossy", [False, True], ids=["a calm network", "answers that get lost"])
async def test_each_item_comes_once_while_acknowledgements_race(
    lossy: bool, server: ReferenceServer, tmp_path: Path
) -> None:
    """A few hundred replays, each against a sender at work on the very conversation; also with outcomes unknown."""
    if lossy:
        server.faults.add("drop", tool="append_memory", when="after", probability=0.3, seed=7, times=None)
        server.faults.add("drop", tool="append_memory", when="before", probability=0.2, seed=8, times=None)
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy(delay_min=0.001, delay_max=0.005)) as log:
            for turn in range(150 if lossy else 300):
                chat = log.conversation(f"conversation-{turn:04}")
                chat.append({"n": 0})
                # Not to be lucky but to meet the sender at another point every turn.
                await anyio.sleep(0.0005 * (turn % 11))
                for n in range(1, 4):
                    chat.append({"n": n})
                chat.extend(numbered(3, 4))
                await anyio.sleep(0.0005 * (turn % 7))
                items = [item async for item in chat.replay()]
                assert [item.payload["n"] for item in items] == list(range(7)), turn
                numbered_part = [item.seq for item in items if item.seq is not None]
                assert [item.seq for item in items] == [*numbered_part, *[None] * (7 - len(numbered_part))]
                assert numbered_part == list(range(len(numbered_part)))
            server.faults.clear()
            assert (await log.flush(PATIENCE)).complete
            for turn in range(0, 150, 10):
                assert await numbers(log.conversation(f"conversation-{turn:04}").replay()) == list(range(7))
            # Whatever the race showed, one is certain: a part in the log, and a part on this machine.
            chat = log.conversation("conversation-mixed")
            await chat.append({"n": 0}).acknowledged(PATIENCE)
            server.faults.add("stall", tool="append_memory", seconds=None, times=None)
            chat.extend(numbered(6, 1))
            items = [item async for item in chat.replay()]
            assert [(item.seq, item.payload["n"]) for item in items] == [(0, 0), *[(None, n) for n in range(1, 7)]]
            server.faults.clear()


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_after_an_error_the_same_replay_goes_on(server: ReferenceServer, tmp_path: Path) -> None:
    """`next_offset` is right at every moment, so that another one could go on as well."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 4000)
            replay = chat.replay()
            read: list[int] = []
            for outage in (50, 1500):
                with pytest.raises(MemoryUnavailableError) as caught:
                    async for item in replay:
                        read.append(item.payload["n"])
                        assert replay.next_offset == len(read)
                        if len(read) == outage:
                            server.stop()
                assert isinstance(caught.value.__cause__, TransientError)
                assert len(read) >= outage
                assert replay.next_offset == len(read)
                server.start()
            assert [*read, *await numbers(replay)] == list(range(4000))
            assert await numbers(chat.replay(replay.next_offset)) == []


@pytest.mark.anyio
async def test_a_cancelled_wait_loses_nothing(server: ReferenceServer, tmp_path: Path) -> None:
    """Cancelled again and again in the middle of a page, the same object hands over every item once."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 700)
            server.faults.add("stall", tool="append_memory", seconds=None)
            chat.extend(numbered(3, 700))
            server.faults.add("stall", tool="replay_memory", seconds=None, times=3)
            replay = chat.replay()
            read: list[int] = []
            cancelled = 0
            while True:
                item: Item | None = None
                with anyio.move_on_after(0.1 if cancelled < 3 else 5):
                    try:
                        item = await anext(replay)
                    except StopAsyncIteration:
                        break
                if item is None:
                    cancelled += 1
                    continue
                read.append(item.payload["n"])
            assert cancelled >= 3
            assert read == list(range(703))
            assert replay.next_offset == 700
            server.faults.clear()


@pytest.mark.anyio
async def test_a_replay_that_is_left_leaves_nothing_behind(server: ReferenceServer, tmp_path: Path) -> None:
    """Broken off after an item, or closed: no warning, and the log is as good as before."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 300)
            async for _ in chat.replay():
                break
            replay = chat.replay()
            await anext(replay)
            await replay.aclose()
            await replay.aclose()
            assert await numbers(replay) == []
            assert replay.next_offset == 1
            assert len(await numbers(chat.replay())) == 300


# --- unavailable is not empty ----------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C8")
async def test_an_unknown_conversation_is_empty_and_an_unreachable_server_is_not(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """C8: no items for the one; for the other an error, even where pending items would make a beginning."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, flush_timeout=0) as log:
            chat = log.conversation(CHAT)
            assert await numbers(chat.replay()) == []
            assert await chat.recall() == []
            server.stop()
            await chat.append({"n": 0}).stored()
            for read in (
                lambda: numbers(chat.replay()),
                chat.recall,
                lambda: numbers(chat.replay(include_pending=False)),
            ):
                with pytest.raises(MemoryUnavailableError, match="does not mean that it is empty") as caught:
                    await read()
                assert isinstance(caught.value.__cause__, TransientError)
            server.start()
            assert await numbers(chat.replay()) == [0]


@pytest.mark.anyio
async def test_a_page_is_tried_again_before_it_is_given_up(server: ReferenceServer, tmp_path: Path) -> None:
    """A hiccup of the server is nobody's business."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy(delay_min=0.01, delay_max=0.02)) as log:
            chat = await filled(log, 150)
            server.faults.add("status", tool="replay_memory", status=503)
            server.faults.add("drop", tool="replay_memory", times=2)
            server.faults.add("cut", tool="replay_memory")
            assert await numbers(chat.replay()) == list(range(150))
            assert sum(fault["struck"] for fault in server.faults.listed()) == 4


@pytest.mark.anyio
async def test_wrong_credentials_are_told_as_such(server: ReferenceServer, tmp_path: Path) -> None:
    """An operator has to act; calling it unavailable would hide that."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=("demo", "wrong"), buffer_dir=tmp_path, retry=QUICK) as log:
            with pytest.raises(AuthenticationError):
                await numbers(log.conversation(CHAT).replay())
            with pytest.raises(AuthenticationError):
                await log.conversation(CHAT).recall()


@pytest.mark.anyio
@pytest.mark.contract("C5", "C11")
async def test_a_read_waits_out_a_pause_that_its_deadline_allows(server: ReferenceServer, tmp_path: Path) -> None:
    """C5, C11: a short Retry-After delays the page, one beyond the deadline is raised with the time it asks for."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy(total=5.0, delay_min=0.01)) as log:
            chat = await filled(log, 3)
            server.faults.add("status", tool="replay_memory", status=429, retry_after=1)
            assert await numbers(chat.replay()) == [0, 1, 2]
            server.faults.add("status", tool="replay_memory", status=429, retry_after=300)
            with pytest.raises(MemoryUnavailableError) as caught:
                await numbers(chat.replay())
            assert caught.value.retry_after == 300
            assert caught.value.status == 429


# --- large items -----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C2", "C8")
async def test_pages_shrink_where_items_are_large(server: ReferenceServer, tmp_path: Path) -> None:
    """Ninety items of 256 KiB, of which a page of a hundred is more than an answer may have: smaller pages, same items."""
    # Each quotation mark is two bytes in the item, and four more in the answer's text, which quotes it again.
    text = '"' * ((ITEM_BYTES_MAX - len('{"n":10,"text":""}')) // 2)
    items = [{"n": n + 10, "text": text} for n in range(90)]
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy()) as log:
            chat = log.conversation(CHAT)
            await chat.extend(items, atomic=False).acknowledged()
            calls = server.counters.calls["replay_memory"]
            replayed = [item.payload async for item in chat.replay()]
            assert len(replayed) == 90
            assert replayed == items
            assert server.counters.calls["replay_memory"] - calls >= 3
            # The newest hundred are just as many bytes.
            assert [item.payload for item in await chat.recall(100)] == items


def pages_of(items: list[Item], items_max: int) -> tuple[Callable[[int, int], Awaitable[list[Item]]], list[int]]:
    """A fetch that cannot answer more than ``items_max`` items, and the sizes it was asked for."""
    asked: list[int] = []

    async def fetch(position: int, size: int) -> list[Item]:
        asked.append(size)
        found = items[position : position + size]
        if len(found) > items_max:
            raise ResponseTooLargeError("too large", limit=1)
        return found

    return fetch, asked


@pytest.mark.anyio
@pytest.mark.parametrize("items_max", [1, 2, 7, 50])
async def test_the_size_of_pages_is_found_once_and_kept(items_max: int) -> None:
    """Halved until it fits, and not tried larger again for every page."""
    items = [Item(seq, NOW, {"n": seq}) for seq in range(120)]
    fetch, asked = pages_of(items, items_max)
    with anyio.fail_after(PATIENCE):
        assert await numbers(Replay(fetch)) == list(range(120))
    refused = [size for size in asked if size > items_max]
    assert len(refused) <= 8, asked


@pytest.mark.anyio
async def test_a_single_item_that_is_too_large_is_an_error(server: ReferenceServer) -> None:
    """Raised, never skipped, and what comes before it is handed over."""

    async def fetch(position: int, size: int) -> list[Item]:
        if position <= 5 < position + size:
            raise ResponseTooLargeError("too large", limit=1)
        return [Item(seq, NOW, {"n": seq}) for seq in range(position, position + size)]

    replay, read = Replay(fetch), []
    with anyio.fail_after(PATIENCE):
        with pytest.raises(ResponseTooLargeError):
            async for item in replay:
                read.append(item.payload["n"])
    assert read == [0, 1, 2, 3, 4]
    assert replay.next_offset == 5


# --- recall ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C10")
async def test_recall_gives_the_newest_items_oldest_of_them_first(server: ReferenceServer, tmp_path: Path) -> None:
    """C10: up to the limit, with their numbers."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 120)
            assert [item.seq for item in await chat.recall()] == list(range(20, 120))
            assert [item.payload for item in await chat.recall(3)] == numbered(3, 117)
            assert len(await chat.recall(1000)) == 120
            assert await log.conversation("conversation-2").recall() == []


@pytest.mark.anyio
async def test_recall_counts_what_is_pending(server: ReferenceServer, tmp_path: Path) -> None:
    """The newest are those on this machine; they take the place of as many in the log."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = await filled(log, 10)
            server.faults.add("stall", tool="append_memory", seconds=None)
            for item in numbered(5, 10):
                chat.append(item)
            newest = await chat.recall(8)
            assert [item.payload["n"] for item in newest] == list(range(7, 15))
            assert [item.seq for item in newest] == [7, 8, 9, None, None, None, None, None]
            assert [item.payload["n"] for item in await chat.recall(2)] == [13, 14]
            assert [item.seq for item in await chat.recall(4, include_pending=False)] == [6, 7, 8, 9]
            server.faults.clear()
            await until(lambda: log.statistics().pending_items == 0)
            assert [item.seq for item in await chat.recall(8)] == list(range(7, 15))


@pytest.mark.anyio
@pytest.mark.contract("C10")
async def test_a_server_that_recalls_newest_first_is_understood(tmp_path: Path) -> None:
    """C10: the contract does not say in which order; ascending is what the caller gets."""

    def call(seen: Seen) -> None:
        name = seen.json["params"]["name"]
        seen.rpc(result=tool_result({"items": page(9, 8, 7) if name == "recall_memory" else []}))

    with RawServer(McpStub(call)) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            assert [item.seq for item in await log.conversation(CHAT).recall(3)] == [7, 8, 9]
