"""Stamps: several writers share a conversation, answers get lost, and reading yields each item once all the same."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from between import QUICK, Between, Call

import memlog
import memlog.payload
import memlog.sync
from memlog import stamps
from memlog.errors import InvalidItemError, TooLargeError
from memlog.limits import ITEM_BYTES_MAX
from memlog.payload import dumps

if TYPE_CHECKING:
    from pathlib import Path

    from memlog.testing import ReferenceServer

CHAT = "c_stamped_1"


def test_a_stamp_is_read_back_and_removed_and_its_size_is_known_before_its_number() -> None:
    """Ours: the size that was measured is the size that is sent, for the first batch and for the billionth."""
    parts = [dumps({"a": 1}), dumps({}), dumps({"b": [1, {"_memlog": 1}]})]
    for row_id in (1, 10**9, 2**43):
        body = stamps.stamped(parts, stamps.new_writer(), row_id)
        assert len(body) == sum(map(len, parts)) + len(parts) * stamps.STAMP_BYTES - 1 + len(parts) - 1
        payloads = memlog.payload.decode_items(body)
        found = [stamps.read(payload) for payload in payloads]
        assert all(found)
        assert [stamp.number for stamp in found if stamp] == sorted({stamp.number for stamp in found if stamp})
        assert max(stamp.number for stamp in found if stamp) < 2**53
        assert [stamps.without(payload) for payload in payloads] == [{"a": 1}, {}, {"b": [1, {"_memlog": 1}]}]


@pytest.mark.parametrize(
    "value",
    [{}, {"w": "0" * 16}, {"w": "0" * 15, "n": 10**15}, {"w": "0" * 16, "n": 1}, {"w": 1, "n": 10**15}, [], None, "x"],
)
def test_only_the_exact_shape_is_a_stamp(value: Any) -> None:
    """What merely has the key is the user's own, and comes back as it is."""
    assert stamps.read({"_memlog": value}) is None


@pytest.mark.anyio
async def test_a_stamp_counts_against_the_limit_and_its_key_is_taken(tmp_path: Path, server: ReferenceServer) -> None:
    """C2: measured with it. C3: what would be taken for a stamp and removed is refused, with or without stamping."""
    with anyio.fail_after(30):
        fitting = {"t": "x" * (ITEM_BYTES_MAX - stamps.STAMP_BYTES - len('{"t":""}'))}
        async with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "a", stamp=True) as log:
            chat = log.conversation(CHAT)
            await chat.append(fitting).acknowledged(10)
            with pytest.raises(TooLargeError) as caught:
                chat.append({"t": fitting["t"] + "x"})
            assert (caught.value.size, caught.value.limit) == (ITEM_BYTES_MAX + 1, ITEM_BYTES_MAX)
            with pytest.raises(InvalidItemError) as refused:
                chat.append({"_memlog": "mine"})
            assert refused.value.path == "$._memlog"
            assert [item.payload async for item in chat.replay()] == [fitting]
        async with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "b") as plain:
            other = plain.conversation("c_unstamped")
            with pytest.raises(InvalidItemError):
                other.append({"_memlog": {"w": "0" * 16, "n": 10**15}})
            await other.append({"_memlog": "mine"}).acknowledged(10)
            assert [item.payload async for item in other.replay()] == [{"_memlog": "mine"}]


EACH = pytest.mark.parametrize("each", [40, pytest.param(1_000, marks=pytest.mark.slow)])
"""How many items each writer appends."""


@EACH
@pytest.mark.anyio
async def test_four_stamped_writers_whose_answers_get_lost_are_read_once_each_and_in_order(
    tmp_path: Path, server: ReferenceServer, each: int
) -> None:
    """Four buffers, one conversation, every third answer lost, every third request carried out twice on its way."""

    def repeating() -> Between:
        numbers = itertools.count()

        async def repeat(call: Call) -> None:
            if call.tool == "append_memory" and next(numbers) % 3 == 0:
                await call.forward()

        return Between(repeat)

    with anyio.fail_after(60 + each):
        server.faults.add("drop", tool="append_memory", when="after", times=None, probability=0.34, seed=7)
        logs = [
            memlog.open_log(
                server.url,
                auth=server.auth,
                buffer_dir=tmp_path / str(number),
                stamp=True,
                transport=repeating(),
                retry=QUICK,
            )
            for number in range(4)
        ]
        for index in range(each):
            for number, log in enumerate(logs):
                log.conversation(CHAT).append({"writer": number, "index": index})
            if index % 10 == 9:
                await anyio.sleep(0.05)  # so that requests of several sizes interleave
        for log in logs:
            assert (await log.flush(30 + each / 2)).complete
        server.faults.clear()
        seen = [item.payload async for item in logs[0].conversation(CHAT).replay()]
        for number in range(4):
            assert [item["index"] for item in seen if item["writer"] == number] == list(range(each))
        assert len(seen) == 4 * each
        raw = [item.payload async for item in logs[0].conversation(CHAT).replay(raw=True)]
        assert len(raw) > 4 * each, "nothing was there twice, so that it shows nothing"
        assert all(stamps.read(payload) for payload in raw)
        for log in logs:
            await log.close()


@EACH
@pytest.mark.anyio
async def test_four_unstamped_writers_whose_answers_get_lost_lose_nothing(
    tmp_path: Path, server: ReferenceServer, each: int
) -> None:
    """Duplicates are possible then, and only they: every item is there, in its writer's order of first appearance."""
    with anyio.fail_after(60 + each):
        server.faults.add("drop", tool="append_memory", when="after", times=None, probability=0.34, seed=11)
        logs = [memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path / str(number)) for number in range(4)]
        for index in range(each):
            for number, log in enumerate(logs):
                log.conversation(CHAT).append({"writer": number, "index": index})
            if index % 10 == 9:
                await anyio.sleep(0.05)
        for log in logs:
            assert (await log.flush(30 + each / 2)).complete
        server.faults.clear()
        seen = [item.payload async for item in logs[0].conversation(CHAT).replay()]
        for number in range(4):
            indices = [item["index"] for item in seen if item["writer"] == number]
            assert list(dict.fromkeys(indices)) == list(range(each))
        for log in logs:
            await log.close()


@pytest.mark.anyio
async def test_a_stamped_item_that_is_in_the_log_and_still_thought_to_wait_is_read_once(
    tmp_path: Path, server: ReferenceServer
) -> None:
    """Committed, the answer lost, the server's reading slow to follow: the pending copy is recognised by its stamp."""
    with anyio.fail_after(30):
        async with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, stamp=True) as log:
            chat = log.conversation(CHAT)
            await chat.append({"n": 0}).acknowledged(10)
            server.faults.add("stall", tool="append_memory", when="after", seconds=2.0)
            chat.append({"n": 1})
            while len([item async for item in chat.replay(include_pending=False)]) < 2:
                await anyio.sleep(0.01)
            items = [item async for item in chat.replay()]
            assert [item.payload for item in items] == [{"n": 0}, {"n": 1}]
            assert [item.payload for item in await chat.recall(2)] == [{"n": 0}, {"n": 1}]


@pytest.mark.anyio
async def test_a_requeued_stamped_batch_gets_a_new_stamp_and_is_not_taken_for_a_copy(tmp_path: Path) -> None:
    """Its old number is below what the reader has seen since."""
    from memlog.testing import reference_server

    with anyio.fail_after(30), reference_server(conversation_items_max=2) as server:
        async with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, stamp=True) as log:
            chat = log.conversation(CHAT)
            for number in range(3):
                chat.append({"n": number})
                await log.flush(10)
            (letter,) = await log.dead_letters()
            assert letter.payloads == [{"n": 2}]
            other = log.conversation("c_stamped_2")
            await other.append({"n": "new"}).acknowledged(10)
            await log.requeue(letter, conversation_id="c_stamped_2")
            assert (await log.flush(10)).complete
            assert [item.payload async for item in other.replay()] == [{"n": "new"}, {"n": 2}]


def test_an_append_in_a_signal_handler_gets_a_later_number_and_a_later_place(
    tmp_path: Path, server: ReferenceServer
) -> None:
    """A stamp below one that was read already would be taken for a copy, and the item lost."""
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, stamp=True) as log:
        chat = log.conversation(CHAT)
        fired = itertools.count()

        def interrupt(*_: object) -> None:
            chat.append({"signal": next(fired)})  # and may itself be interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            for index in range(3000):
                chat.append({"index": index})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert log.flush(30).complete
        seen = [item.payload for item in chat.replay()]
        assert [item["index"] for item in seen if "index" in item] == list(range(3000))
        assert sorted(item["signal"] for item in seen if "signal" in item) == list(range(next(fired)))


def test_threads_that_append_at_once_keep_numbers_and_places_together(tmp_path: Path, server: ReferenceServer) -> None:
    """Each thread's items come back in its order, none is taken for a copy."""
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, stamp=True) as log:
        chat = log.conversation(CHAT)

        def work(number: int) -> None:
            for index in range(300):
                chat.append({"thread": number, "index": index, "pad": "x" * random.randrange(200)})

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert log.flush(30).complete
        seen = [item.payload for item in chat.replay()]
        for number in range(4):
            assert [item["index"] for item in seen if item["thread"] == number] == list(range(300))
