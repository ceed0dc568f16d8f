"""Replay at its edges: large items, long logs, servers that lie, go away or come back, and tails that are followed."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from books import PATIENCE, QUICK, until
from raw_server import McpStub, RawServer, tool_result

import memlog.sync
from memlog import Client, Item, RetryPolicy, open_log
from memlog.errors import MemoryUnavailableError, ProtocolError, SequenceError, ServerError
from memlog.testing import reference_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from raw_server import Seen

    from memlog import MemoryLog, Replay
    from memlog.testing import ReferenceServer

CHAT = "conversation-1"
CONVERSATIONS = Path(__file__).parents[2] / "shared" / "data" / "airline-conversations.jsonl"
NOW = datetime(2026, 9, 25, 9, 14, 2, 118000, tzinfo=UTC)


def a_log(server: ReferenceServer, tmp_path: Path, **settings: Any) -> MemoryLog:
    return open_log(server.url, auth=server.auth, buffer_dir=tmp_path, **{"retry": QUICK, **settings})


async def fill(server: ReferenceServer, count: int, conversation: str = CHAT, **more: Any) -> None:
    """``count`` numbered items in the log, by a client of its own."""
    async with Client(server.url, auth=server.auth) as client:
        for start in range(0, count, 250):
            items = [{"n": n, **more} for n in range(start, min(start + 250, count))]
            await client.append_memory(conversation, items)


async def numbers(replay: Replay) -> list[int]:
    return [item.payload["n"] async for item in replay]


def row(seq: int, **payload: Any) -> dict[str, Any]:
    at = (NOW + timedelta(seconds=seq)).isoformat()
    return {"seq": seq, "recorded_at": at, "payload": payload or {"n": seq}}


class Liar:
    """A server of 300 items whose ``page(call, offset, limit)`` may say something else; None tells the truth."""

    def __init__(self, page: Callable[[int, int, int], list[Any] | None], *, length: int = 300) -> None:
        self._page = page
        self._length = length
        self.asked: list[tuple[int, int]] = []
        self.server = RawServer(McpStub(self._call))

    def _call(self, seen: Seen) -> None:
        arguments = seen.json["params"]["arguments"]
        offset, limit = arguments["offset"], arguments["limit"]
        self.asked.append((offset, limit))
        rows = self._page(len(self.asked) - 1, offset, limit)
        if rows is None:
            rows = [row(seq) for seq in range(offset, min(offset + limit, self._length))]
        seen.rpc(result=tool_result({"items": rows}))


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_pages_are_lists_that_together_are_the_conversation(server: ReferenceServer, tmp_path: Path) -> None:
    """None is empty; single items and lists may be taken in turns from one replay."""
    await fill(server, 1500)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            replay = log.conversation(CHAT).replay()
            pages = [page async for page in replay.pages()]
            assert all(pages)
            assert 2 <= len(pages) <= 4
            assert [item.seq for page in pages for item in page] == list(range(1500))
            assert replay.next_offset == 1500
            replay = log.conversation(CHAT).replay(limit=1300)
            first = await anext(replay)
            rest = [item.seq async for page in replay.pages() for item in page]
            assert [first.seq, *rest] == list(range(1300))
        async with Client(server.url, auth=server.auth) as client:
            pages = [page async for page in client.replay(CHAT).pages()]
            assert [item.seq for page in pages for item in page] == list(range(1500))


def test_the_blocking_face_has_pages_and_a_list_of_conversations(server: ReferenceServer, tmp_path: Path) -> None:
    """Plain iterators, and a closed one is at its end."""
    anyio.run(fill, server, 1500)
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
        replay = log.conversation(CHAT).replay()
        assert [item.seq for page in replay.pages() for item in page] == list(range(1500))
        assert not replay.degraded
        with pytest.raises(ValueError, match="no item to skip"):
            replay.skip()
        assert [info.conversation_id for info in log.list_conversations()] == [CHAT]
        replay = log.conversation(CHAT).replay(follow=True)
        assert next(replay).seq == 0
        replay.close()
        assert list(replay) == []


@pytest.mark.anyio
async def test_the_next_page_is_fetched_while_this_one_is_consumed(server: ReferenceServer, tmp_path: Path) -> None:
    """With the first item in hand, the second page is asked for without anybody waiting; of a plain client it is not."""
    await fill(server, 1500)
    calls = server.counters.calls
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            before = calls["replay_memory"]
            replay = log.conversation(CHAT).replay()
            await anext(replay)
            await until(lambda: calls["replay_memory"] == before + 2)
            assert len(await numbers(replay)) == 1499
            assert calls["replay_memory"] == before + 4, "three pages, each once, and the end that is asked for again"
            before = calls["replay_memory"]
            assert len(await numbers(log.conversation(CHAT).replay(limit=128))) == 128
            assert calls["replay_memory"] == before + 1, "nothing is fetched beyond the limit"
        async with Client(server.url, auth=server.auth) as client:
            before = calls["replay_memory"]
            replay = client.replay(CHAT)
            await anext(replay)
            assert calls["replay_memory"] == before + 1


@pytest.mark.anyio
async def test_what_a_page_fetched_ahead_met_is_told_when_its_turn_comes(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The items before it come first; asking again reads the page again."""
    await fill(server, 500)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy(attempts=1)) as log:
            replay = log.conversation(CHAT).replay()
            read = [(await anext(replay)).payload["n"]]
            # Either the page ahead is here already, or it meets this: both times the third one does.
            server.faults.add("status", tool="replay_memory", status=503, times=None)
            with pytest.raises(MemoryUnavailableError) as caught:
                async for item in replay:
                    read.append(item.payload["n"])
            assert isinstance(caught.value.__cause__, ServerError)
            assert read == list(range(len(read)))
            assert len(read) in (128, 500)
            assert replay.next_offset == len(read)
            server.faults.clear()
            assert [*read, *await numbers(replay)] == list(range(500))


@pytest.mark.anyio
async def test_a_closed_replay_drops_what_it_fetched_ahead(server: ReferenceServer, tmp_path: Path) -> None:
    """Also while that is still on its way; nothing comes after closing, and the log is as good as before."""
    await fill(server, 500)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            replay = log.conversation(CHAT).replay()
            server.faults.add("stall", tool="replay_memory", seconds=None, times=1)
            with anyio.move_on_after(0.1):
                await anext(replay)
            server.faults.clear()
            await anext(replay)
            server.faults.add("stall", tool="replay_memory", seconds=None)
            await replay.close()
            assert await numbers(replay) == []
            server.faults.clear()
            assert len(await numbers(log.conversation(CHAT).replay())) == 500


@pytest.mark.anyio
async def test_the_end_is_where_the_log_ends_when_it_is_reached(server: ReferenceServer, tmp_path: Path) -> None:
    """Not where it ended when the last page was fetched ahead, also where somebody else appends."""
    await fill(server, 200)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            replay = log.conversation(CHAT).replay(include_pending=False)
            read = []
            async for item in replay:
                read.append(item.seq)
                if len(read) == 190:
                    await fill(server, 50)
            assert read == list(range(250))


# --- large and long --------------------------------------------------------------------------------------------------

MEMORY_SCRIPT = """
import asyncio, resource, sys
from memlog import Client

async def main(url, count):
    async with Client(url) as client:
        await client.replay_memory("warm-up-1", 0, 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        read = 0
        async for item in client.replay("conversation-1"):
            assert item.seq == read
            read += 1
        assert read == int(count), read
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main(*sys.argv[1:]))
"""


def peak_of_a_replay(url: str, count: int) -> int:
    """How many bytes a process grows by while it reads a conversation of ``count`` items from ``url``."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, url, str(count)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


@pytest.mark.contract("C2", "C8")
@pytest.mark.parametrize(
    ("size", "count"),
    [(256, 100), pytest.param(256, 1000, marks=pytest.mark.slow), pytest.param(60, 1000, marks=pytest.mark.slow)],
)
def test_large_items_take_little_memory(size: int, count: int) -> None:
    """Ours: items of 256 KiB, as many as you like, in less than 64 MiB; the first page knows nothing of them yet."""
    text = "x" * (size * 1024 - len('{"t":""}'))

    def page(call: int, offset: int, limit: int) -> list[Any]:
        return [row(seq, t=text) for seq in range(offset, min(offset + limit, count))]

    liar = Liar(page)
    with liar.server as server:
        assert peak_of_a_replay(server.url, count) < 64 * 1024 * 1024
    assert len(liar.asked) < 20 + 2 * count * size * 1024 // (2 * 1024 * 1024)


@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_conversation_takes_no_more_memory_than_a_short_one(count: int, server: ReferenceServer) -> None:
    """Ours: flat, whatever its length."""
    liar = Liar(lambda call, offset, limit: None, length=count)
    with liar.server as raw:
        assert peak_of_a_replay(raw.url, count) < 24 * 1024 * 1024


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_the_tail_of_a_long_conversation_is_one_page(count: int, tmp_path: Path) -> None:
    """C8: `replay(offset)` asks for nothing before it."""
    with reference_server() as server:
        await fill(server, count)
        with anyio.fail_after(PATIENCE):
            async with a_log(server, tmp_path) as log:
                before = server.counters.calls["replay_memory"]
                assert await numbers(log.conversation(CHAT).replay(count - 100)) == list(range(count - 100, count))
                assert server.counters.calls["replay_memory"] == before + 1


@pytest.mark.anyio
async def test_pages_follow_the_size_of_items(server: ReferenceServer, tmp_path: Path) -> None:
    """About 2 MiB each: small ones by the thousand, 20 KiB ones by the hundred, however they are mixed."""
    await fill(server, 2000)
    for _ in range(8):
        await fill(server, 50, text="x" * 20_000)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            sizes = [len(page) async for page in log.conversation(CHAT).replay().pages()]
            assert sum(sizes) == 2400
            assert max(sizes) > 900
            assert sizes[-2] < 130
            assert len(sizes) < 12


# --- lies ------------------------------------------------------------------------------------------------------------

LIES: dict[str, tuple[Callable[[int, int, int], list[Any] | None], int, int | None]] = {
    "a gap": (lambda call, offset, limit: [row(127), row(128), row(130)] if call else None, 129, 130),
    "a repetition": (lambda call, offset, limit: [row(127), row(128), row(128)] if call else None, 129, 128),
    "the wrong start": (lambda call, offset, limit: [row(128)] if call else None, 127, 128),
    "longer than asked for": (
        lambda call, offset, limit: [row(seq) for seq in range(offset, offset + limit + 1)] if call else None,
        1000,
        1001,
    ),
    "an empty page in the middle": (lambda call, offset, limit: [] if call else None, 127, None),
    "another item on the second read": (
        lambda call, offset, limit: [row(127, n="changed"), row(128)] if call else None,
        127,
        None,
    ),
    "another time on the second read": (
        lambda call, offset, limit: [{**row(127), "recorded_at": NOW.isoformat()}, row(128)] if call else None,
        127,
        None,
    ),
}


@pytest.mark.anyio
@pytest.mark.contract("C7", "C8")
@pytest.mark.parametrize(("page", "expected", "got"), LIES.values(), ids=LIES.keys())
async def test_a_server_that_lies_is_caught_with_the_place_named(
    page: Callable[[int, int, int], list[Any] | None], expected: int, got: int | None, tmp_path: Path
) -> None:
    """C7: on the second page; the first is handed over, of the other nothing, and asking again finds the same lie."""
    liar = Liar(page, length=5000)
    with liar.server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            replay = log.conversation(CHAT).replay()
            read: list[int] = []
            for _ in range(2):
                with pytest.raises(SequenceError) as caught:
                    async for item in replay:
                        read.append(item.payload["n"])
                assert (caught.value.expected, caught.value.got) == (expected, got)
                assert str(expected) in str(caught.value)
            assert read == list(range(128))
            assert replay.next_offset == 128


@pytest.mark.anyio
async def test_a_payload_that_the_reader_changes_is_no_lie_of_the_server(tmp_path: Path) -> None:
    """What is compared with the next page was noted before anything was handed over."""
    with Liar(lambda call, offset, limit: None).server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            read = []
            async for item in log.conversation(CHAT).replay():
                read.append(item.payload.pop("n"))
            assert read == list(range(300))


@pytest.mark.anyio
async def test_a_list_of_conversations_that_does_not_go_on_is_an_error(tmp_path: Path) -> None:
    """A server that does not know `after` gives the same page for ever; so it is read once."""
    rows = [{"conversation_id": f"conversation-{n:04}"} for n in range(1000)]

    def call(seen: Seen) -> None:
        seen.rpc(result=tool_result({"conversations": rows}))

    with RawServer(McpStub(call)) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            read = []
            with pytest.raises(ProtocolError, match="do not go on"):
                async for info in log.list_conversations():
                    read.append(info.conversation_id)
            assert read == [row["conversation_id"] for row in rows]


@pytest.mark.asyncio
async def test_all_conversations_are_listed_page_by_page(server: ReferenceServer, tmp_path: Path) -> None:
    """C10: also beyond one page, and after an error from where it stopped."""
    ids = [f"conversation-{n:05}" for n in range(1203)]
    with anyio.fail_after(2 * PATIENCE):
        async with Client(server.url, auth=server.auth) as client:
            for name in ids:
                await client.append_memory(name, [{"n": 0}])
        async with a_log(server, tmp_path, retry=RetryPolicy(attempts=1)) as log:
            listing = log.list_conversations()
            found = [(await anext(listing)).conversation_id]
            server.faults.add("status", tool="list_conversations", status=503, times=1)
            with pytest.raises(MemoryUnavailableError):
                async for info in listing:
                    found.append(info.conversation_id)
            assert len(found) == 1000
            found += [info.conversation_id async for info in listing]
            assert sorted(found) == ids


# --- an item that cannot be read -------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("bad", [0, 1, 50, 127, 128, 299])
async def test_an_item_that_cannot_be_read_costs_only_itself(bad: int, tmp_path: Path) -> None:
    """The others come, it is an error with its place, and it is passed over only if the reader says so."""

    def page(call: int, offset: int, limit: int) -> list[Any]:
        rows = [row(seq) for seq in range(offset, min(offset + limit, 300))]
        for entry in rows:
            if entry["seq"] == bad:
                entry["payload"] = "not an object"
        return rows

    with Liar(page).server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            replay = log.conversation(CHAT).replay()
            read: list[int] = []
            for _ in range(2):
                with pytest.raises(MemoryUnavailableError) as caught:
                    async for item in replay:
                        read.append(item.payload["n"])
                assert read == list(range(bad))
                assert replay.next_offset == bad
                assert any(f"item {bad}" in note for note in caught.value.__notes__)
            replay.skip()
            with pytest.raises(ValueError, match="no item to skip"):
                replay.skip()
            assert [*read, *await numbers(replay)] == [n for n in range(300) if n != bad]
            assert replay.next_offset == 300
        async with Client(server.url, retry=QUICK) as client:
            replay = client.replay(CHAT, bad)
            with pytest.raises(ProtocolError):
                await anext(replay)
            replay.skip()
            assert await numbers(replay) == list(range(bad + 1, 300))


# --- a server that cannot be read ------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C8")
async def test_without_a_server_only_what_is_pending_can_be_asked_for(server: ReferenceServer, tmp_path: Path) -> None:
    """C8: by name, and flagged; back again, the same call is whole and not flagged."""
    with anyio.fail_after(2 * PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = log.conversation(CHAT)
            await chat.extend([{"n": n} for n in range(3)]).acknowledged()
            server.stop()
            for n in range(3, 6):
                chat.append({"n": n})
            replay = chat.replay(on_unavailable="pending")
            items = [item async for item in replay]
            assert [item.payload["n"] for item in items] == [3, 4, 5]
            assert {item.seq for item in items} == {None}
            assert replay.degraded
            assert replay.next_offset == 0
            assert [item.payload["n"] for item in await chat.recall(2, on_unavailable="pending")] == [4, 5]
            with pytest.raises(MemoryUnavailableError):
                await chat.recall(2)
            server.start()
            assert (await log.flush(PATIENCE)).complete
            replay = chat.replay(on_unavailable="pending")
            assert await numbers(replay) == list(range(6))
            assert not replay.degraded
            assert [item.seq for item in await chat.recall(2, on_unavailable="pending")] == [4, 5]


@pytest.mark.anyio
async def test_a_server_that_goes_away_in_the_middle_leaves_the_beginning_and_what_is_pending(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """Flagged, and nothing twice."""
    await fill(server, 5000)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, flush_timeout=0) as log:
            replay = log.conversation(CHAT).replay(on_unavailable="pending")
            first = await anext(replay)
            server.stop()
            log.conversation(CHAT).append({"n": -1})
            read = [first.payload["n"], *await numbers(replay)]
            assert read[-1] == -1
            assert read[:-1] == list(range(len(read) - 1))
            assert 128 <= len(read) < 5000
            assert replay.degraded
            assert replay.next_offset == len(read) - 1


@pytest.mark.anyio
async def test_what_does_not_go_together_is_refused(server: ReferenceServer, tmp_path: Path) -> None:
    """ValueError at once, with the reason."""
    async with a_log(server, tmp_path) as log:
        chat = log.conversation(CHAT)
        with pytest.raises(ValueError, match="on_unavailable is"):
            chat.replay(on_unavailable="ignore")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="include_pending"):
            chat.replay(on_unavailable="pending", include_pending=False)
        with pytest.raises(ValueError, match="follow"):
            chat.replay(on_unavailable="pending", follow=True)
        with pytest.raises(ValueError, match="include_pending"):
            await chat.recall(on_unavailable="pending", include_pending=False)


# --- the live tail ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_tail_that_is_followed_gives_each_item_as_it_comes(server: ReferenceServer, tmp_path: Path) -> None:
    """From the log only, so that nothing comes twice; a pause and an outage later it still goes on."""
    await fill(server, 150)
    with anyio.fail_after(2 * PATIENCE):
        async with a_log(server, tmp_path) as log:
            chat = log.conversation(CHAT)
            replay = chat.replay(follow=True)
            read: list[Item] = []
            while len(read) < 150:
                read.append(await anext(replay))
            for n in range(150, 153):
                chat.append({"n": n})
                read.append(await anext(replay))
            with anyio.move_on_after(0.5) as scope:
                await anext(replay)
            assert scope.cancelled_caught
            server.stop()
            with pytest.raises(MemoryUnavailableError):
                await anext(replay)
            server.start()
            await fill(server, 2)
            read += [await anext(replay), await anext(replay)]
            assert [item.seq for item in read] == list(range(155))
            assert [item.payload["n"] for item in read] == [*range(153), 0, 1]
            await replay.aclose()
            assert [item async for item in replay] == []


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["replay", "log"])
async def test_a_tail_ends_when_it_or_its_log_is_closed(how: str, server: ReferenceServer, tmp_path: Path) -> None:
    """While it waits for more, from another task: an end and no error, within moments."""
    await fill(server, 2)
    read = []
    with anyio.fail_after(PATIENCE):
        log = a_log(server, tmp_path)
        replay = log.conversation(CHAT).replay(follow=True)

        async def follow() -> None:
            async for item in replay:
                read.append(item.seq)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await until(lambda: len(read) == 2)
            await (replay.close() if how == "replay" else log.close())
        await log.close()
    assert read == [0, 1]


@pytest.mark.anyio
async def test_a_tail_asks_less_and_less_often_while_nothing_comes(tmp_path: Path) -> None:
    """From 0.2 s on, half as long again each time; from the start again once something came."""
    times: list[float] = []

    def page(call: int, offset: int, limit: int) -> None:
        import time

        times.append(time.monotonic())

    liar = Liar(page, length=1)
    with liar.server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            replay = log.conversation(CHAT).replay(follow=True)
            with anyio.move_on_after(2.2):
                await numbers(replay)
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 2 <= len(waits) <= 6
    assert all(wait > 0.2 * 1.5**number - 0.02 for number, wait in enumerate(waits))


# --- real conversations ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals() -> dict[str, list[dict[str, Any]]]:
    if not CONVERSATIONS.exists():
        pytest.skip(f"the conversations are not here: {CONVERSATIONS.name}")
    with CONVERSATIONS.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    found = {row["conversation"]: row["items"] for row in rows}
    assert len(found) == 120
    return found


async def replayed(log: MemoryLog, ids: Any, **options: Any) -> dict[str, list[dict[str, Any]]]:
    return {name: [item.payload async for item in log.conversation(name).replay(**options)] for name in ids}


async def append_all(log: MemoryLog, conversations: dict[str, list[dict[str, Any]]]) -> None:
    """Turn by turn through all of them, as in life."""
    for turn in range(max(map(len, conversations.values()))):
        for name, items in conversations.items():
            if turn < len(items):
                log.conversation(name).append(items[turn])


class Doubling(httpx.AsyncBaseTransport):
    """The network to a server that carries out 5 % of the appends twice."""

    def __init__(self) -> None:
        self.doubled = 0
        self._network = httpx.AsyncHTTPTransport()
        self._random = random.Random(5)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        if b'"name":"append_memory"' in body and self._random.random() < 0.05:
            self.doubled += 1
            await (await self._network.handle_async_request(request)).aread()
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()


@pytest.mark.asyncio
async def test_real_conversations_come_back_after_a_restart_a_flapping_and_an_absent_server(
    originals: dict[str, list[dict[str, Any]]], server: ReferenceServer, tmp_path: Path
) -> None:
    """Ours: 120 of them, equal to the originals: from a clean start, with every second answer an error, and with the
    server down in the middle and back."""
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path / "a") as log:
            await append_all(log, originals)
            assert (await log.flush(PATIENCE)).complete
        patient = RetryPolicy(attempts=20, delay_min=0.001, delay_max=0.01)
        async with a_log(server, tmp_path / "b", retry=patient) as log:
            assert await replayed(log, originals) == originals
            for kind, seed in (("drop", 1), ("cut", 2)):
                server.faults.add(kind, tool="replay_memory", times=None, probability=0.3, seed=seed)
            assert await replayed(log, originals) == originals
            struck = sum(fault["struck"] for fault in server.faults.listed())
            assert struck > 40
            server.faults.clear()
        async with a_log(server, tmp_path / "c") as log:
            for number, (name, items) in enumerate(originals.items()):
                replay = log.conversation(name).replay()
                found = [(await anext(replay)).payload]
                if number % 10 == 0:
                    replay = log.conversation(name).replay(replay.next_offset)
                    server.stop()
                    with pytest.raises(MemoryUnavailableError):
                        await anext(replay)
                    server.start()
                found += [item.payload async for item in replay]
                assert found == items


@pytest.mark.asyncio
async def test_real_conversations_that_a_server_stores_partly_twice_are_read_once(
    originals: dict[str, list[dict[str, Any]]], server: ReferenceServer, tmp_path: Path
) -> None:
    """Ours: stamped, with 5 % of all requests carried out twice."""
    network = Doubling()
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path, stamp=True, transport=network) as log:
            for turn in range(max(map(len, originals.values()))):
                await append_all(log, {name: items[turn : turn + 1] for name, items in originals.items()})
                await anyio.sleep(0)
            assert (await log.flush(2 * PATIENCE)).complete
        async with a_log(server, tmp_path / "b") as log:
            assert await replayed(log, originals) == originals
            raw = await replayed(log, originals, raw=True)
        assert network.doubled > 0
        assert sum(map(len, raw.values())) > sum(map(len, originals.values()))


@pytest.mark.asyncio
async def test_of_real_conversations_without_a_server_exactly_what_is_pending_comes(
    originals: dict[str, list[dict[str, Any]]], server: ReferenceServer, tmp_path: Path
) -> None:
    """Ours: the first half of each was acknowledged and cannot be read, the second half is here; flagged."""
    halves = {name: len(items) // 2 for name, items in originals.items()}
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path, flush_timeout=0, retry=RetryPolicy(attempts=1)) as log:
            await append_all(log, {name: items[: halves[name]] for name, items in originals.items()})
            assert (await log.flush(PATIENCE)).complete
            server.stop()
            await append_all(log, {name: items[halves[name] :] for name, items in originals.items()})
            for name, items in originals.items():
                replay = log.conversation(name).replay(on_unavailable="pending")
                found = [item async for item in replay]
                assert [item.payload for item in found] == items[halves[name] :]
                assert {item.seq for item in found} == {None}
                assert replay.degraded


# --- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_each_item_comes_once_while_others_are_appended_and_acknowledged(
    rounds: int, server: ReferenceServer, tmp_path: Path
) -> None:
    """C6: a replay of pending and acknowledged items, with appends before, during and behind each of its steps.

    What the race shows is chance; a replay that is certain to meet both kinds is in `test_replay.py`.
    """
    chance = random.Random(6)
    with anyio.fail_after(PATIENCE + rounds * 0.1):
        async with a_log(server, tmp_path, retry=RetryPolicy(delay_min=0.001, delay_max=0.005)) as log:
            for number in range(rounds):
                chat = log.conversation(f"conversation-{number:05}")
                count = 0

                def append(items: int) -> None:
                    nonlocal count
                    for _ in range(items):
                        chat.append({"n": count})  # noqa: B023 - used in this round only
                        count += 1

                append(chance.randrange(1, 6))
                await anyio.sleep(chance.random() * 0.006)
                append(chance.randrange(4))
                before = count
                seqs: list[int | None] = []
                async for item in chat.replay():
                    assert item.payload == {"n": len(seqs)}, number
                    seqs.append(item.seq)
                    if chance.random() < 0.3:
                        append(1)
                    if chance.random() < 0.3:
                        await anyio.sleep(chance.random() * 0.002)
                assert len(seqs) >= before, number
                known = [seq for seq in seqs if seq is not None]
                assert known == list(range(len(known)))
                assert seqs == known + [None] * (len(seqs) - len(known))
            assert (await log.flush(2 * PATIENCE)).complete
