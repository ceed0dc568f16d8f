"""Replay at its edges: large items, long logs, servers that lie, go away or come back, and tails that are followed."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from between import Between
from books import PATIENCE, QUICK, until
from raw_server import McpStub, RawServer, tool_result
from server_helpers import wait_until

import memlog.replay as replay_module
import memlog.sync
from memlog import Client, Item, Replay, RetryPolicy, open_log
from memlog.directory import open_spools
from memlog.errors import (
    ClosedError,
    MemoryUnavailableError,
    ProtocolError,
    ResponseTooLargeError,
    SequenceError,
    ServerError,
)
from memlog.replay import Ahead, Pending
from memlog.spool import NewRow
from memlog.testing import reference_server
from server_reference import create_app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from between import Call
    from raw_server import Seen

    from memlog import MemoryLog
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


# --- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["client", "log"])
async def test_a_replay_is_for_one_task_at_a_time(how: str, tmp_path: Path) -> None:
    """Two that waited both got the page that came. Now the second is told so, and the first gets each item once."""
    with Liar(lambda call, offset, limit: None, length=3000).server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log, Client(server.url) as client:
            replay = log.conversation(CHAT).replay() if how == "log" else client.replay(CHAT)
            read: list[int] = []
            told: list[str] = []

            async def consume() -> None:
                try:
                    async for item in replay:
                        read.append(item.payload["n"])
                        await anyio.sleep(0)
                except RuntimeError as error:
                    told.append(str(error))

            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(consume)
            assert sorted(read) == list(range(3000))
            assert len(told) == 2
            assert all("each task needs one of its own" in words for words in told)


def test_threads_that_share_a_blocking_replay_share_its_items(server: ReferenceServer, tmp_path: Path) -> None:
    """Each item goes to one of them; closing it ends the wait of all."""
    anyio.run(fill, server, 1500)
    read: list[int] = []

    def consume() -> None:
        for item in replay:
            read.append(item.payload["n"])

    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
        for follow in (False, True):
            read.clear()
            replay = log.conversation(CHAT).replay(follow=follow)
            threads = [threading.Thread(target=consume) for _ in range(4)]
            for thread in threads:
                thread.start()
            if follow:
                wait_until(lambda: len(read) == 1500)
                replay.close()
            for thread in threads:
                thread.join(PATIENCE)
                assert not thread.is_alive()
            assert sorted(read) == list(range(1500))


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["client", "log", "log that is followed"])
async def test_closing_a_replay_ends_the_wait_for_it(how: str, server: ReferenceServer, tmp_path: Path) -> None:
    """From another task, while the server says nothing: an end and no error, and not after a time-out."""
    await fill(server, 3)
    ended = []
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log, Client(server.url, auth=server.auth) as client:
            follow = how == "log that is followed"
            replay = client.replay(CHAT) if how == "client" else log.conversation(CHAT).replay(follow=follow)
            if follow:
                for _ in range(3):
                    await anext(replay)
            stall = server.faults.add("stall", tool="replay_memory", seconds=None)

            async def consume() -> None:
                ended.append(await numbers(replay))

            async with anyio.create_task_group() as group:
                group.start_soon(consume)
                await until(lambda: stall.struck)
                await replay.close()
            assert ended == [[]]
            server.faults.clear()
            assert len(await numbers(log.conversation(CHAT).replay())) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("follow", [False, True], ids=["to the end", "following"])
async def test_closing_the_log_ends_the_wait_of_its_readers(
    follow: bool, server: ReferenceServer, tmp_path: Path
) -> None:
    """At once, while the server says nothing: an end for who follows, else ClosedError. It took as long as a time-out."""
    await fill(server, 3)
    ended: list[object] = []
    with anyio.fail_after(PATIENCE):
        log = a_log(server, tmp_path, flush_timeout=0)
        replay = log.conversation(CHAT).replay(follow=follow)
        if follow:
            for _ in range(3):
                await anext(replay)
        stall = server.faults.add("stall", tool="replay_memory", seconds=None, times=None)

        async def consume() -> None:
            try:
                ended.append(await numbers(replay))
            except ClosedError as error:
                ended.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await until(lambda: stall.struck)
            await log.close()
        if follow:
            assert ended == [[]]
        else:
            (error,) = ended
            assert isinstance(error, ClosedError)
            assert (error.conversation_id, error.next_offset) == (CHAT, 0)
        server.faults.clear()


class Interrupted:
    """A log of 40 items and 6 pending ones whose every wait is counted, and cancelled when its turn has come."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.waits = 0
        self.scope = anyio.CancelScope()

    async def wait(self) -> None:
        self.waits += 1
        if self.waits == self.at:
            self.scope.cancel()
        await anyio.lowlevel.checkpoint()

    async def fetch(self, position: int, size: int) -> list[Item]:
        await self.wait()
        items = [Item(seq, NOW, {"n": seq}) for seq in range(position, min(position + size, 40))]
        await self.wait()
        return items

    async def pending(self, position: int) -> Pending:
        await self.wait()
        # The first two batches are in the log, and their acknowledgements on the way.
        bodies = [b'{"n":38}', b'{"n":39}', b'{"n":40},{"n":41}', b'{"n":42},{"n":43}', b'{"n":44}', b'{"n":45}']

        async def load(first: int, last: int) -> list[bytes | tuple[int, int] | None]:
            await self.wait()
            return [*bodies[first:last]]

        sizes = [(1024 * 1024, body.count(b"n")) for body in bodies]
        return Pending(sizes, load, start=38, beyond=frozenset({(0, 41)}))

    def ahead(self, position: int, size: int) -> Ahead:
        return _Ahead(self, position, size)


class _Ahead:
    def __init__(self, log: Interrupted | World, position: int, size: int) -> None:
        self._fetch = log.fetch
        self._request = position, size

    async def come(self) -> list[Item] | None:
        return await self._fetch(*self._request)

    def drop(self) -> None:
        pass


@pytest.mark.anyio
@pytest.mark.parametrize("by_pages", [False, True], ids=["by items", "by pages"])
@pytest.mark.parametrize("prefetch", [False, True], ids=["plain", "reading ahead"])
async def test_whichever_wait_is_cancelled_every_item_comes_once(
    by_pages: bool, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them in turn, in pages, at the end of the log, and in what is pending."""
    monkeypatch.setattr(replay_module, "_FIRST_PAGE_ITEMS", 10)
    monkeypatch.setattr(replay_module, "_GROWTH", 1)
    at, waits = 0, 1
    with anyio.fail_after(PATIENCE):
        while at <= waits:
            at += 1
            log = Interrupted(at)
            replay = Replay(log.fetch, pending=log.pending, ahead=log.ahead if prefetch else None)
            source: Any = replay.pages() if by_pages else replay
            read: list[Any] = []
            with log.scope:
                async for found in source:
                    read += found if by_pages else [found]
            if log.scope.cancelled_caught:
                async for found in source:
                    read += found if by_pages else [found]
            assert [item.payload["n"] for item in read] == list(range(46)), at
            assert [item.seq for item in read] == [*range(40), *[None] * 6], at
            waits = log.waits
    assert at > 15


# --- large and long --------------------------------------------------------------------------------------------------

MIB = 1024 * 1024
MEMORY_SCRIPT = """
import asyncio, sys, tempfile
from memlog import Client, RetryPolicy, open_log

def peak():
    # Not ru_maxrss: that begins with the peak of whoever started this process, and hides all below it.
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

async def grown_by(replay, count):
    before, read = peak(), 0
    async for item in replay:
        assert item.seq in (read, None)
        read += 1
    assert read == count, read
    print(peak() - before)

async def main(how, url, count, size):
    text = "x" * (size - len('{"t":""}'))
    with tempfile.TemporaryDirectory() as directory:
        async with (
            Client(url) as client,
            open_log(url, buffer_dir=directory, flush_timeout=0, retry=RetryPolicy(attempts=1)) as log,
        ):
            chat = log.conversation("conversation-1")
            if how == "pending":
                for n in range(count):
                    receipt = chat.append({"t": text})
                    if n % 20 == 0:
                        await receipt
                await receipt
                await grown_by(chat.replay(on_unavailable="pending"), count)
            elif how == "log":
                await log.check()
                await grown_by(chat.replay(), count)
            else:
                await client.replay_memory("warm-up-1", 0, 1)
                await grown_by(client.replay("conversation-1"), count)

asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
"""


def peak_of_a_replay(how: str, url: str, count: int, size: int = 100) -> int:
    """How many bytes a process grows by while it reads a conversation of ``count`` items of ``size`` bytes."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell what a process took at its peak")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, how, url, str(count), str(size)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) * 1024


VALUES: dict[str, Callable[[int], Any]] = {
    "text": lambda size: "x" * size,
    "text of wide characters": lambda size: "x" * (size - 4) + "\U0001f600",
    "small objects": lambda size: [{"a": 1}] * (size // 8),
}


@pytest.mark.contract("C2", "C8")
@pytest.mark.parametrize("how", ["client", "log"])
@pytest.mark.parametrize(
    ("value", "size", "count"),
    [
        ("text", 256, 100),
        ("small objects", 256, 30),
        pytest.param("text", 256, 1000, marks=pytest.mark.slow),
        pytest.param("text", 60, 1000, marks=pytest.mark.slow),
        pytest.param("text of wide characters", 256, 1000, marks=pytest.mark.slow),
        pytest.param("small objects", 256, 200, marks=pytest.mark.slow),
    ],
)
def test_large_items_take_little_memory(how: str, value: str, size: int, count: int) -> None:
    """Ours: items of 256 KiB, as many as you like, in less than 64 MiB; the first page knows nothing of them yet.

    Objects take in memory what is many times their text.
    """
    content = json.dumps({"t": VALUES[value](size * 1024 - len('{"t":""}'))}, separators=(",", ":"), ensure_ascii=False)
    quoted = json.dumps(content, ensure_ascii=False)[1:-1]
    asked = 0

    def call(seen: Seen) -> None:
        nonlocal asked
        asked += 1
        arguments = seen.json["params"]["arguments"]
        offset, limit = arguments["offset"], arguments["limit"]
        # Encoded once: the usual way takes a server in Python a second for each page of these.
        answer = {"items": [row(seq, t="?") for seq in range(offset, min(offset + limit, count))]}
        head, _, tail = json.dumps(tool_result(answer)).partition('"structuredContent"')
        result = head.replace(r"{\"t\": \"?\"}", quoted) + '"structuredContent"' + tail.replace('{"t": "?"}', content)
        seen.respond(200, f'{{"jsonrpc":"2.0","id":{json.dumps(seen.json["id"])},"result":{result}}}'.encode())

    with RawServer(McpStub(call)) as server:
        grown = peak_of_a_replay(how, server.url, count)
    assert 4 * MIB < grown < 64 * MIB, "less than a page would be no measurement"
    assert asked < 20 + (2 * count * size // 2048 if value != "small objects" else count)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_is_pending_takes_little_memory_too(count: int) -> None:
    """Ours: an outage may leave gigabytes in the buffer, and whoever starts again reads them. It was all of it at once."""
    assert peak_of_a_replay("pending", "http://127.0.0.1:9/mcp", count, 256 * 1024) < 32 * MIB


@pytest.mark.parametrize("how", ["client", "log"])
@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_conversation_takes_no_more_memory_than_a_short_one(how: str, count: int) -> None:
    """Ours: flat, whatever its length."""
    liar = Liar(lambda call, offset, limit: None, length=count)
    with liar.server as raw:
        assert peak_of_a_replay(how, raw.url, count) < 8 * MIB


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
    for _ in range(12):
        await fill(server, 50, text="x" * 20_000)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            sizes = [len(page) async for page in log.conversation(CHAT).replay().pages()]
            assert sum(sizes) == 2600
            assert max(sizes) > 900
            assert 80 < sizes[-2] < 130
            assert len(sizes) < 12


# --- lies ------------------------------------------------------------------------------------------------------------

LIES: dict[str, tuple[Callable[[int, int, int], list[Any] | None], int, int | None]] = {
    "a gap": (lambda call, offset, limit: [row(127), row(128), row(130)] if call else None, 129, 130),
    "a repetition": (lambda call, offset, limit: [row(127), row(128), row(128)] if call else None, 129, 128),
    "the wrong start": (lambda call, offset, limit: [row(128)] if call else None, 127, 128),
    "longer than asked for": (
        lambda call, offset, limit: [row(seq) for seq in range(offset, offset + limit + 1)] if call else None,
        1126,
        1127,
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


def forget_everything(server: ReferenceServer) -> None:
    """The same address, and an empty store behind it."""
    server.stop()
    server.app.state.store.close()
    server.app = create_app(sites={"demo": "demo"})
    server.start()


@pytest.mark.anyio
@pytest.mark.contract("C3", "C8")
@pytest.mark.parametrize("restarted", [False, True], ids=["in the same process", "after a restart"])
async def test_a_log_without_what_it_acknowledged_is_an_error_and_no_end(restarted: bool, tmp_path: Path) -> None:
    """C3: an acknowledgement is a promise. The replay asked for the missing page again and again, without end.

    Whoever wants what is there asks for it by name, and with the next append the log goes on as the one it is now.
    """
    with reference_server() as server, anyio.fail_after(2 * PATIENCE):
        log = a_log(server, tmp_path)
        chat = log.conversation(CHAT)
        await chat.extend([{"n": n} for n in range(10)]).acknowledged()
        if restarted:
            await log.close()
        forget_everything(server)
        if restarted:
            log = a_log(server, tmp_path)
            chat = log.conversation(CHAT)
        async with log:
            for replay in (chat.replay(), chat.replay(4), chat.replay()):
                for _ in range(2):
                    calls = server.counters.calls["replay_memory"]
                    with pytest.raises(SequenceError, match="ends before what it acknowledged") as caught:
                        await anext(replay)
                    assert (caught.value.expected, caught.value.got) == (replay.next_offset, None)
                    assert server.counters.calls["replay_memory"] - calls <= 2
            with pytest.raises(SequenceError):
                await chat.recall()
            assert await numbers(chat.replay(include_pending=False)) == []
            await chat.append({"n": 10}).acknowledged()
            assert await numbers(chat.replay()) == [10]
            assert [item.payload for item in await chat.recall()] == [{"n": 10}]


@pytest.mark.anyio
@pytest.mark.parametrize("limit", [129, 130, 200])
async def test_the_log_is_held_against_the_last_page_up_to_the_last_item(limit: int, tmp_path: Path) -> None:
    """Also where a limit leaves one item to be read, which was taken as it came."""
    liar = Liar(
        lambda call, offset, limit: [row(seq, n=-seq) for seq in range(offset, offset + limit)] if call else None
    )
    with liar.server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            with pytest.raises(SequenceError) as caught:
                await numbers(log.conversation(CHAT).replay(limit=limit))
            assert (caught.value.expected, caught.value.got) == (127, None)


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
async def test_another_order_of_names_is_no_lie_of_the_server(tmp_path: Path) -> None:
    """Objects have none, and servers that keep them in hash tables may give another one each time."""

    def page(call: int, offset: int, limit: int) -> list[Any]:
        names = ["a", "b", "c"][:: -1 if call % 2 else 1]
        return [row(seq, n=seq, of={name: [] for name in names}) for seq in range(offset, min(offset + limit, 300))]

    with Liar(page).server as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK) as log:
            assert await numbers(log.conversation(CHAT).replay()) == list(range(300))


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


def with_one_that_is_no_json(bad: int, length: int) -> Callable[[Seen], None]:
    """A server that writes a bare NaN into one item of ``length``."""

    def call(seen: Seen) -> None:
        arguments = seen.json["params"]["arguments"]
        seqs = range(arguments["offset"], min(arguments["offset"] + arguments["limit"], length))
        answer = {"jsonrpc": "2.0", "id": seen.json["id"], "result": tool_result({"items": [row(seq) for seq in seqs]})}
        seen.respond(200, json.dumps(answer).replace(f'{{"n": {bad}}}', '{"n": NaN}').encode())

    return call


@pytest.mark.anyio
@pytest.mark.parametrize("bad", [0, 1, 127, 128, 700, 1499])
async def test_an_item_that_is_no_json_does_not_take_its_page_along(bad: int, tmp_path: Path) -> None:
    """It makes the whole answer unreadable, so the place has to be looked for; a thousand good items were lost with it."""
    with RawServer(McpStub(with_one_that_is_no_json(bad, 1500))) as server, anyio.fail_after(PATIENCE):
        async with (
            open_log(server.url, buffer_dir=tmp_path, retry=RetryPolicy(attempts=1)) as log,
            Client(server.url, retry=RetryPolicy(attempts=1)) as client,
        ):
            for replay in (log.conversation(CHAT).replay(), client.replay(CHAT)):
                before, read = len(server.seen), []
                for _ in range(2):
                    with pytest.raises((MemoryUnavailableError, ProtocolError)) as caught:
                        async for item in replay:
                            read.append(item.payload["n"])
                    assert read == list(range(bad))
                    assert caught.value.next_offset == bad
                    assert any(f"item {bad}" in note for note in caught.value.__notes__)
                replay.skip()
                assert [*read, *await numbers(replay)] == [n for n in range(1500) if n != bad]
                assert len(server.seen) - before < 24


@pytest.mark.anyio
async def test_a_server_that_speaks_no_json_at_all_is_no_matter_of_an_item(tmp_path: Path) -> None:
    """It gives nothing else where no item can stand; nothing is to be skipped, and it is not asked for each half."""
    with RawServer(McpStub(lambda seen: seen.respond(200, b'{"jsonrpc": '))) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=RetryPolicy(attempts=1)) as log:
            replay = log.conversation(CHAT).replay()
            with pytest.raises(MemoryUnavailableError) as caught:
                await anext(replay)
            assert not hasattr(caught.value, "__notes__")
            with pytest.raises(ValueError, match="no item to skip"):
                replay.skip()
            assert len([seen for seen in server.seen if seen.method == "tools/call"]) == 2


@pytest.mark.anyio
async def test_a_foreign_item_that_cannot_be_read_does_not_bar_the_way_to_what_is_pending(tmp_path: Path) -> None:
    """Skipped in its page, it was met again where the pending batch should have landed, and there was no way past it."""
    length = 3

    def call(seen: Seen) -> None:
        if seen.json["params"]["name"] == "append_memory":
            seen.respond(503)
            return
        arguments = seen.json["params"]["arguments"]
        rows = [row(seq) for seq in range(arguments["offset"], min(arguments["offset"] + arguments["limit"], length))]
        for entry in rows:
            if entry["seq"] == 3:
                entry["payload"] = "not an object"
        seen.rpc(result=tool_result({"items": rows}))

    with RawServer(McpStub(call)) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0) as log:
            chat = log.conversation(CHAT)
            chat.append({"n": 100})
            await until(lambda: log.statistics().state == "waiting")  # by now it knows where the batch should land
            length = 5
            replay = chat.replay()
            read = [(await anext(replay)).payload["n"] for _ in range(3)]
            with pytest.raises(MemoryUnavailableError):
                await anext(replay)
            replay.skip()
            assert [*read, *await numbers(replay)] == [0, 1, 2, 4, 100]


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


@pytest.mark.anyio
async def test_errors_say_where_to_go_on(server: ReferenceServer, tmp_path: Path) -> None:
    """As data and in words, from a log and from a client, in pages and over the blocking face; also after pickling."""
    await fill(server, 300)
    with anyio.fail_after(PATIENCE):
        async with (
            a_log(server, tmp_path, retry=RetryPolicy(attempts=1)) as log,
            Client(server.url, auth=server.auth, retry=RetryPolicy(attempts=1)) as client,
        ):
            chat = log.conversation(CHAT)
            for replay in (chat.replay(), client.replay(CHAT), chat.replay(7), chat.replay(follow=True)):
                source = replay.pages()
                read = len(await anext(source))
                server.faults.add("status", tool="replay_memory", status=503, times=None)
                with pytest.raises((MemoryUnavailableError, ServerError)) as caught:
                    while True:
                        read += len(await anext(source))
                server.faults.clear()
                error = pickle.loads(pickle.dumps(caught.value))
                assert (error.conversation_id, error.next_offset) == (CHAT, replay.next_offset)
                assert f"go on from offset {replay.next_offset} of conversation {CHAT}" in str(error)
                rest = chat.replay(error.next_offset)
                assert read + len(await numbers(rest)) == 300 - (7 if replay.next_offset == 135 else 0)

            def block() -> None:
                blocking = log.sync.conversation(CHAT).replay()
                next(blocking)
                server.faults.add("status", tool="replay_memory", status=503, times=None)
                with pytest.raises(MemoryUnavailableError) as caught:
                    list(blocking)
                assert caught.value.next_offset == blocking.next_offset >= 128
                server.faults.clear()
                assert [*blocking][-1].seq == 299

            await anyio.to_thread.run_sync(block)


@pytest.mark.anyio
async def test_a_pause_that_the_server_asked_of_appends_holds_up_reads_as_well(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The limit is the site's. What fits into a read's time is waited for, what does not is told with what is left."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy(total=5.0), flush_timeout=0) as log:
            chat = log.conversation(CHAT)
            server.faults.add("status", tool="append_memory", status=429, retry_after=1)
            chat.append({"n": 0})
            await until(lambda: log.statistics().state == "waiting")
            closed_until = anyio.current_time() + 0.9
            calls = server.counters.calls["replay_memory"]
            items = [item.payload["n"] async for item in chat.replay()]
            assert items == [0]
            assert anyio.current_time() >= closed_until
            await until(lambda: log.statistics().state == "ok")
            server.faults.add("status", tool="append_memory", status=429, retry_after=300)
            chat.append({"n": 1})
            await until(lambda: log.statistics().state == "waiting")
            calls = server.counters.calls["replay_memory"]
            with pytest.raises(MemoryUnavailableError) as caught:
                await numbers(chat.replay())
            assert caught.value.status == 429
            assert 290 < (caught.value.retry_after or 0) <= 300
            assert server.counters.calls["replay_memory"] == calls, "it was not even asked"
            replay = chat.replay(on_unavailable="pending")
            assert await numbers(replay) == [1]
            assert replay.degraded


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
async def test_a_tail_tells_of_a_pause_and_of_a_reset_and_can_be_followed_on(tmp_path: Path) -> None:
    """Silence would look like a quiet conversation. What was followed is not lost by it, nor taken from another log."""
    with reference_server() as server, anyio.fail_after(PATIENCE):
        await fill(server, 3)
        async with a_log(server, tmp_path, retry=RetryPolicy(total=2.0)) as log:
            replay = log.conversation(CHAT).replay(follow=True, limit=6)
            read = [(await anext(replay)).payload["n"] for _ in range(3)]
            server.faults.add("status", tool="replay_memory", status=429, retry_after=300)
            with pytest.raises(MemoryUnavailableError) as caught:
                await anext(replay)
            assert (caught.value.retry_after, caught.value.next_offset) == (300, 3)
            await fill(server, 1)
            read.append((await anext(replay)).payload["n"])
            assert read == [0, 1, 2, 0]
            forget_everything(server)
            await fill(server, 6)
            for _ in range(2):
                with pytest.raises(SequenceError) as reset:
                    await anext(replay)
                assert (reset.value.expected, reset.value.got) == (3, None)
            replay = log.conversation(CHAT).replay(4, follow=True, limit=2)
            assert await numbers(replay) == [4, 5], "an end, since the limit is reached"


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
    """The network to a server that carries out 5 % of the appends twice: at once, or when others have come since."""

    def __init__(self) -> None:
        self.doubled = 0
        self._late: list[httpx.Request] = []
        self._network = httpx.AsyncHTTPTransport()
        self._random = random.Random(5)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        if b'"name":"append_memory"' in body and self._random.random() < 0.05:
            self.doubled += 1
            if self.doubled % 2:
                await (await self._network.handle_async_request(request)).aread()
            else:
                self._late.append(request)
        elif len(self._late) > 2:
            await (await self._network.handle_async_request(self._late.pop(0))).aread()
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()


class Flapping(httpx.AsyncBaseTransport):
    """The network to a server that fails whenever a page is asked for, and answers when it is asked for again."""

    def __init__(self) -> None:
        self.failed = 0
        self._network = httpx.AsyncHTTPTransport()
        self._asked: set[bytes] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        page = body[body.find(b'"arguments"') :]
        if b'"name":"replay_memory"' in body and page not in self._asked:
            self._asked.add(page)
            self.failed += 1
            if self.failed % 2:
                raise httpx.ReadError("it went away", request=request)
            return httpx.Response(503)
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()


class Switch(httpx.AsyncBaseTransport):
    """The network to a server, which is ``down`` or not."""

    def __init__(self) -> None:
        self.down = False
        self._network = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("it is away", request=request)
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of ten items: the real conversations are short, and have several of them then."""
    monkeypatch.setattr(replay_module, "_FIRST_PAGE_ITEMS", 10)
    monkeypatch.setattr(replay_module, "_GROWTH", 1)


@pytest.mark.asyncio
@pytest.mark.usefixtures("small_pages")
async def test_real_conversations_come_back_after_a_restart_and_from_a_server_that_fails_at_each_page(
    originals: dict[str, list[dict[str, Any]]], server: ReferenceServer, tmp_path: Path
) -> None:
    """Ours: 120 of them, equal to the originals."""
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path / "a") as log:
            await append_all(log, originals)
            assert (await log.flush(PATIENCE)).complete
        async with a_log(server, tmp_path / "a") as log:
            assert await replayed(log, originals) == originals
        network = Flapping()
        async with a_log(server, tmp_path / "b", transport=network) as log:
            assert await replayed(log, originals) == originals
        pages = sum(len(items) // 10 + 1 for items in originals.values())
        assert network.failed >= pages > 3 * len(originals)


@pytest.mark.asyncio
@pytest.mark.usefixtures("small_pages")
async def test_real_conversations_are_gone_on_with_when_their_server_was_away_in_the_middle(
    originals: dict[str, list[dict[str, Any]]], server: ReferenceServer, tmp_path: Path
) -> None:
    """Ours: by the same replay, and by a new one from where the error says; nothing twice, and nothing left out."""
    network = Switch()
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path, retry=RetryPolicy(attempts=1), transport=network) as log:
            await append_all(log, originals)
            assert (await log.flush(PATIENCE)).complete
            for number, (name, items) in enumerate(originals.items()):
                replay = log.conversation(name).replay()
                found = [(await anext(replay)).payload]
                network.down = True
                with pytest.raises(MemoryUnavailableError) as caught:
                    async for item in replay:
                        found.append(item.payload)
                assert 10 <= len(found) == caught.value.next_offset <= len(items)
                network.down = False
                if number % 2:
                    replay = log.conversation(name).replay(caught.value.next_offset)
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


# --- pending, in pieces and in several buffers -----------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("refused", [False, True], ids=["all is taken", "one is refused"])
async def test_what_is_acknowledged_while_the_pending_ones_are_read_comes_all_the_same(
    refused: bool, server: ReferenceServer, tmp_path: Path
) -> None:
    """They are read from disk piece by piece; those that are in the log by their turn come from there, without a number.

    One that was refused meanwhile does not wait any more.
    """

    def decide(call: Call) -> Any:
        if network.down:
            raise httpx.ConnectError("it is away")
        return call.refuse() if refused and call.says("poison") else None

    network = Switch()
    between = Between(decide)
    with anyio.fail_after(2 * PATIENCE):
        async with a_log(server, tmp_path, transport=between) as log:
            chat = log.conversation(CHAT)
            await chat.append({"n": 0}).acknowledged()
            network.down = True
            for n in range(1, 40):
                chat.append({"n": n, "text": "poison" if n == 30 else "x" * 200_000})
            # The end of the log is seen, and then it cannot be reached, with what waits taken stock of.
            replay = chat.replay(on_unavailable="pending")
            read = [await anext(replay)]
            assert read[0].payload["n"] == 1
            network.down = False
            assert (await log.flush(PATIENCE)).complete
            assert len(await log.dead_letters()) == refused
            reads = sum(call.tool == "replay_memory" for call in between.calls)
            read += [item async for item in replay]
            reads = sum(call.tool == "replay_memory" for call in between.calls) - reads
            assert reads < 10, "batches that follow each other in the log are read together"
            assert [item.payload["n"] for item in read] == [n for n in range(1, 40) if not (refused and n == 30)]
            assert {item.seq for item in read} == {None}
            expected = [n for n in range(40) if not (refused and n == 30)]
            assert await numbers(chat.replay()) == expected


WRITER = """
import sys, time
import memlog.sync

url, directory, count, pace = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
with memlog.sync.open_log(url, auth=("demo", "demo"), buffer_dir=directory, flush_timeout=10) as log:
    chat = log.conversation("conversation-1")
    for n in range(count):
        receipt = chat.append({"n": n})
        time.sleep(pace)
    receipt.stored()
    print("stored", flush=True)
    sys.stdin.read()
"""


@contextmanager
def a_writer(server: ReferenceServer, directory: Path, count: int, pace: float = 0.0) -> Iterator[Callable[[], None]]:
    """Another process with the same directory that appends; what comes waits until all of it is stored."""
    arguments = [server.url, str(directory), str(count), str(pace)]
    popen = subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )

    def wait() -> None:
        assert popen.stdout is not None
        assert popen.stdout.readline() == "stored\n", popen.stderr and popen.stderr.read()

    try:
        yield wait
    finally:
        popen.communicate(timeout=3 * PATIENCE)


@pytest.mark.asyncio
async def test_what_waits_in_the_buffer_of_a_process_that_lives_is_read_too(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """Design: workers share a directory, and the one that is asked for the conversation need not be its writer.

    Files that are none of ours, or damaged, stand in nobody's way.
    """
    await fill(server, 2)
    server.faults.add("status", tool="append_memory", status=503, times=None)
    with anyio.fail_after(3 * PATIENCE), a_writer(server, tmp_path, 5) as wait:
        async with a_log(server, tmp_path, flush_timeout=0) as log:
            await anyio.to_thread.run_sync(wait)
            (site,) = (path.parent for path in tmp_path.glob("*/site.json"))
            (site / "0-empty.db").touch()
            (site / "1-directory.db").mkdir()
            (site / "2-nonsense.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
            (site / "3-gone.db").symlink_to(site / "nowhere")
            chat = log.conversation(CHAT)
            chat.append({"n": 5})
            assert await numbers(chat.replay()) == [0, 1, *range(6)]
            assert [item.seq async for item in chat.replay()] == [0, 1, *[None] * 6]
            assert [item.payload["n"] for item in await chat.recall(7)] == [1, *range(6)]
            assert await numbers(log.conversation("conversation-2").replay()) == []
            server.faults.clear()


@pytest.mark.asyncio
@pytest.mark.parametrize("whose", ["of this process", "of another process"])
async def test_what_is_in_the_log_and_waits_for_the_answer_comes_once(
    whose: str, server: ReferenceServer, tmp_path: Path
) -> None:
    """Its batch is pending, and stands in the pages: seen by comparing what comes after the end that was known."""
    await fill(server, 2)
    server.faults.add("stall", tool="append_memory", when="after", seconds=None, times=None)
    with anyio.fail_after(3 * PATIENCE):
        async with a_log(server, tmp_path, flush_timeout=0) as log, AsyncExitStack() as stack:
            chat = log.conversation(CHAT)
            if whose == "of this process":
                for n in range(5):
                    chat.append({"n": n})
            else:
                wait = stack.enter_context(a_writer(server, tmp_path, 5))
                await anyio.to_thread.run_sync(wait)
            async with Client(server.url, auth=server.auth) as client:
                while len(await client.replay_memory(CHAT)) < 3:
                    await anyio.sleep(0.005)
            for replay in (chat.replay(), chat.replay(raw=True)):
                items = [item async for item in replay]
                assert [item.payload["n"] for item in items] == [0, 1, *range(5)]
                assert items[2].seq == 2
            server.faults.clear()


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
async def test_each_item_of_another_process_comes_once_while_it_writes(
    count: int, server: ReferenceServer, tmp_path: Path
) -> None:
    """Acknowledged between the last page and the look into its file, or not yet: without a gap, and never twice."""
    done = anyio.Event()
    with anyio.fail_after(3 * PATIENCE + count * 0.1), a_writer(server, tmp_path, count, 0.005) as wait:
        async with a_log(server, tmp_path) as log:

            async def watch() -> None:
                await anyio.to_thread.run_sync(wait)
                done.set()

            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                read: list[Item] = []
                while not done.is_set():
                    before = len(read)
                    read = [item async for item in log.conversation(CHAT).replay()]
                    assert [item.payload["n"] for item in read] == list(range(len(read)))
                    assert len(read) >= before, "what was there is there"
            assert len(await numbers(log.conversation(CHAT).replay())) == count


@pytest.mark.parametrize(
    ("own", "other", "start"),
    [
        ({"waits": True, "end": 4}, {}, 4),
        ({"waits": True}, {}, None),
        ({"waits": True, "end": 4, "shared": True}, {}, None),
        ({"waits": True, "end": 4}, {"end": 3}, 4),
        ({"waits": True, "end": 4}, {"end": 5}, None),
        ({"waits": True, "end": 4}, {"waits": True, "end": 4}, None),
        ({"waits": True, "end": 4}, {"waits": True}, None),
        ({"end": 4}, {"waits": True, "end": 4}, 4),
        ({"end": 4}, {"waits": True}, None),
        ({"end": 4}, {}, None),
    ],
    ids=[
        "alone",
        "never sent",
        "somebody else was seen in the log",
        "another process sent before",
        "another process sent since",
        "both have something to send",
        "another process is about to send",
        "only another process has something to send",
        "another process has sent nothing yet",
        "nothing waits",
    ],
)
def test_where_a_pending_batch_should_stand_is_known_where_one_process_alone_sends(
    own: dict[str, Any], other: dict[str, Any], start: int | None, tmp_path: Path
) -> None:
    """Design: anything else proves nothing, and an item too many can be lived with, one too few not."""
    both = [open_spools(tmp_path), open_spools(tmp_path)]
    for spools, what in zip(both, (own, other), strict=True):
        spools.own.begin()
        if what.get("waits"):
            spools.own.store([NewRow(1, CHAT, 1, 7, b'{"n":0}')])
        if "end" in what:
            spools.own.note_end(CHAT, what["end"], None)
        if what.get("shared"):
            spools.own.note_lane(CHAT, shared=True)
        spools.own.commit()
    waiting = both[0].waiting(CHAT, 0)
    assert waiting.start == start
    assert len(waiting.places) == bool(own.get("waits")) + bool(other.get("waits"))
    assert waiting.length == own.get("end", 0)
    assert {end for _, end in waiting.beyond} == {what["end"] for what in (own, other) if "end" in what}
    for spools in both:
        spools.close()


def test_what_a_spool_acknowledged_and_was_given_back_for_is_not_missed(tmp_path: Path) -> None:
    """Between the last page and the look at what waits: neither in the pages nor pending any more, it was left out."""
    spools = open_spools(tmp_path)
    left = open_spools(tmp_path)
    left.own.begin()
    left.own.store([NewRow(1, CHAT, 1, 7, b'{"n":0}')])
    left.own.commit()
    left.close()
    spools.scan()
    assert [place.id for place in spools.waiting(CHAT, 0).places] == [1]
    (adopted,) = spools.adopted
    adopted.begin()
    adopted.acknowledge(list(adopted.pending(CHAT)), 0)
    adopted.note_end(CHAT, 1, None)
    adopted.commit()
    places = spools.waiting(CHAT, 1).places
    spools.release_drained()
    assert not spools.adopted
    waiting = spools.waiting(CHAT, 0)
    assert (places, waiting.places, len(waiting.beyond), waiting.length) == ([], [], 1, 0)
    assert not spools.waiting(CHAT, 1).beyond
    spools.close()


# --- the newest ------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_recall_makes_up_for_copies(server: ReferenceServer, tmp_path: Path) -> None:
    """As many of the newest as were asked for, if there are so many: a copy of a stamped item counts for nothing."""
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path, stamp=True) as log:
            chat = log.conversation(CHAT)
            for n in range(20):
                await chat.append({"n": n}).acknowledged()
            stamped = [item.payload async for item in chat.replay(raw=True)]
            async with Client(server.url, auth=server.auth) as client:
                await client.call_tool(
                    "append_memory", {"conversation_id": CHAT, "items": [*stamped[10:], *stamped[15:], *stamped[10:]]}
                )
            await chat.append({"n": 20}).acknowledged()
            for limit in (1, 2, 5, 11, 12, 20, 21, 100):
                found = await chat.recall(limit)
                assert [item.payload for item in found] == [{"n": n} for n in range(21)][-limit:]
            server.faults.add("stall", tool="append_memory", seconds=None, times=None)
            chat.append({"n": 21})
            assert [item.payload["n"] for item in await chat.recall(4)] == [18, 19, 20, 21]
            server.faults.clear()


@pytest.mark.anyio
async def test_recall_takes_one_call(server: ReferenceServer, tmp_path: Path) -> None:
    """Its answer says where the log ends; only what is acknowledged behind that is read besides."""
    await fill(server, 50)
    with anyio.fail_after(PATIENCE):
        async with a_log(server, tmp_path) as log:
            calls = server.counters.calls
            for limit, expected in ((7, range(43, 50)), (50, range(50)), (1000, range(50))):
                before = calls.copy()
                assert [item.seq for item in await log.conversation(CHAT).recall(limit)] == list(expected)
                assert calls - before == {"recall_memory": 1}


# --- everything at once, simulated ------------------------------------------------------------------------------------


class World:
    """One writer, its buffer and its log. Something of it happens before and after each thing that a replay asks for."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.log: list[Item] = []
        self.batches: list[list[int]] = []  # all that were ever appended, in order
        self.ranges: list[tuple[int, int]] = []  # of those that were acknowledged
        self.next_seq: int | None = None
        self.sent = 0  # batches in flight
        self.landed = False
        self.items = 0
        self.late = 0  # acknowledged when their turn among the pending ones came
        for _ in range(self.chance.randrange(30)):
            self.happen()

    def happen(self) -> None:
        for _ in range(self.chance.randrange(4)):
            match self.chance.randrange(5):
                case 0:
                    count = self.chance.randrange(1, 4)
                    self.batches.append(list(range(self.items, self.items + count)))
                    self.items += count
                case 1 if self.sent == 0 and len(self.ranges) < len(self.batches):
                    self.sent = self.chance.randrange(1, len(self.batches) - len(self.ranges) + 1)
                    self.next_seq = len(self.log) if self.next_seq is None else self.next_seq
                case 2 if self.sent and not self.landed:
                    self.landed = self.chance.random() < 0.8
                    at = NOW + timedelta(seconds=len(self.log))
                    numbers = [n for batch in self.waiting()[: self.sent] for n in batch] if self.landed else []
                    self.log += [Item(len(self.log) + n, at, {"n": number}) for n, number in enumerate(numbers)]
                    self.sent = self.sent if self.landed else 0  # it never arrived, and is read back
                case 3 if self.landed:
                    for batch in self.waiting()[: self.sent]:
                        first = self.ranges[-1][1] + 1 if self.ranges else 0
                        self.ranges.append((first, first + len(batch) - 1))
                    self.next_seq, self.sent, self.landed = len(self.log), 0, False

    def waiting(self) -> list[list[int]]:
        return self.batches[len(self.ranges) :]

    async def fetch(self, position: int, size: int) -> list[Item]:
        self.happen()
        trouble = self.chance.random()
        if trouble < 0.05:
            raise MemoryUnavailableError("it is away")
        if trouble < 0.1 and size > 1:
            raise ResponseTooLargeError("too much", limit=1)
        page = self.log[position : position + size]
        self.happen()
        return page

    async def look(self, position: int) -> Pending:
        self.happen()
        first, waiting = len(self.ranges), self.waiting()

        async def load(start: int, stop: int) -> list[bytes | tuple[int, int] | None]:
            self.happen()
            self.late += first + start < len(self.ranges)
            return [
                self.ranges[number]
                if number < len(self.ranges)
                else b",".join(b'{"n":%d}' % n for n in self.batches[number])
                for number in range(first + start, first + stop)
            ]

        beyond = frozenset({(0, self.next_seq)} if (self.next_seq or 0) > position else ())
        # Large on paper, so that they are loaded one or two at a time.
        sizes = [(1024 * 1024, len(batch)) for batch in waiting]
        pending = Pending(sizes, load, self.next_seq, (), beyond, self.next_seq or 0)
        self.happen()
        return pending

    def ahead(self, position: int, size: int) -> Ahead:
        return _Ahead(self, position, size)


@pytest.mark.asyncio
@pytest.mark.parametrize("worlds", [400, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_each_item_comes_once_whatever_happens_between_two_waits(worlds: int, small_pages: None) -> None:
    """C6: appended, sent, lost, stored and acknowledged at any point of a replay, which fails now and then."""
    numbered_only = mixed = late = 0
    for seed in range(worlds):
        world = World(seed)
        offset = world.chance.randrange(len(world.log) + 1) if seed % 3 == 0 else 0
        limit = world.chance.randrange(20) if seed % 5 == 0 else None
        least = world.items - offset if limit is None else min(limit, world.items - offset)
        replay = Replay(
            world.fetch,
            offset=offset,
            limit=limit,
            pending=world.look,
            ahead=world.ahead if seed % 2 else None,
        )
        read: list[Item] = []
        for _ in range(200):
            try:
                async for item in replay:
                    read.append(item)
                break
            except (MemoryUnavailableError, ResponseTooLargeError):
                assert replay.next_offset <= len(world.log)
        assert [item.payload["n"] for item in read] == list(range(offset, offset + len(read))), seed
        assert least <= len(read) <= (world.items if limit is None else limit), seed
        known = sum(item.seq is not None for item in read)
        assert [item.seq for item in read] == [*range(offset, offset + known), *[None] * (len(read) - known)], seed
        assert replay.next_offset == offset + known, seed
        numbered_only += known == len(read) > 0
        mixed += 0 < known < len(read)
        late += world.late
    assert min(numbered_only, mixed, late) > worlds // 50


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
