"""The blocking face: the same log, from code without a loop, beside one, and inside one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import pytest
from books import PATIENCE, QUICK, books, contents, until

import memlog
import memlog.sync
from memlog import engine
from memlog.errors import ClosedError, ConversationFullError, InvalidItemError, MemoryUnavailableError
from memlog.testing import reference_server

if TYPE_CHECKING:
    from pathlib import Path

    from memlog.testing import ReferenceServer

CHAT = "conversation-1"


def numbered(count: int, start: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(start, start + count)]


def whole_job(server: ReferenceServer, buffer_dir: Path) -> None:
    """Everything that a script does with a log, from append to close."""
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=buffer_dir, retry=QUICK) as log:
        log.check()
        chat = log.conversation(CHAT)
        assert chat.id == CHAT
        receipt = chat.append({"n": 0})
        receipt.stored(PATIENCE)
        assert receipt.id
        assert receipt.acknowledged(PATIENCE) == memlog.Ack(0, 0)
        assert chat.extend(numbered(300, 1), atomic=False).acknowledged(PATIENCE) == memlog.Ack(1, 300)
        report = log.flush(PATIENCE)
        assert (report.complete, report.pending) == (True, 0)
        assert [item.payload for item in chat.replay()] == numbered(301)
        assert [item.seq for item in chat.replay(290, limit=3)] == [290, 291, 292]
        assert [item.payload for item in chat.recall(2)] == numbered(2, 299)
        assert log.dead_letters() == []
        assert log.duplicates() == []
        assert log.statistics().stored_items == 301
        assert CHAT in repr(chat)
        assert CHAT in repr(receipt)
        assert str(buffer_dir) in repr(log)
    log.close()
    with pytest.raises(ClosedError):
        chat.append({"n": -1})


def test_a_script_without_any_loop_does_the_whole_job(server: ReferenceServer, tmp_path: Path) -> None:
    """From append to close, with the names of the asynchronous log."""
    whole_job(server, tmp_path)


@pytest.mark.anyio
async def test_it_works_in_a_thread_whose_own_loop_is_running(server: ReferenceServer, tmp_path: Path) -> None:
    """It holds that loop up, as blocking calls do, and needs nothing of it."""
    with anyio.fail_after(PATIENCE):
        whole_job(server, tmp_path)


@pytest.mark.anyio
async def test_it_works_in_a_worker_thread_of_a_loop(server: ReferenceServer, tmp_path: Path) -> None:
    """Where asynchronous programs put their blocking calls."""
    with anyio.fail_after(PATIENCE):
        await anyio.to_thread.run_sync(whole_job, server, tmp_path)


@pytest.mark.anyio
async def test_both_faces_are_one_log(server: ReferenceServer, tmp_path: Path) -> None:
    """What one appends the other sees; closing either closes the handle."""
    with anyio.fail_after(PATIENCE):
        log = memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path)
        await log.conversation(CHAT).append({"n": 0}).acknowledged()
        blocking = log.sync
        assert [item.payload for item in blocking.conversation(CHAT).replay()] == numbered(1)
        blocking.conversation(CHAT).append({"n": 1}).stored()
        assert (await log.flush(PATIENCE)).complete
        assert blocking.statistics() == log.statistics() or log.statistics().requests_in_flight
        blocking.close()
        with pytest.raises(ClosedError):
            log.conversation(CHAT).append({"n": 2})
        await log.close()


def test_many_threads_share_one_log(server: ReferenceServer, tmp_path: Path) -> None:
    """Appending, waiting, reading and counting at the same time; each thread's order is kept."""
    threads = 8

    def work(number: int) -> list[int]:
        chat = log.conversation(f"thread-{number:04}")
        for n in range(25):
            receipt = chat.append({"n": n})
            if n % 5 == 0:
                assert receipt.acknowledged(PATIENCE).last_seq == n
            log.statistics()
        assert log.flush(PATIENCE).complete
        return [item.payload["n"] for item in chat.replay()]

    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(work, range(threads), timeout=PATIENCE))
        assert results == [list(range(25))] * threads
        assert books(log._log)["acknowledged_items"] == threads * 25
    stored = asyncio.run(contents(server))
    assert stored == {f"thread-{number:04}": [f'{{"n":{n}}}' for n in range(25)] for number in range(threads)}


def test_a_timeout_is_the_builtin_one_and_changes_nothing(server: ReferenceServer, tmp_path: Path) -> None:
    """As with the asynchronous receipt."""
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
        server.faults.add("stall", tool="append_memory", seconds=None)
        receipt = log.conversation(CHAT).append({"n": 0})
        with pytest.raises(TimeoutError):
            receipt.acknowledged(0.02)
        receipt.stored(PATIENCE)
        assert not log.flush(0.02).complete
        server.faults.clear()
        assert receipt.acknowledged(PATIENCE) == memlog.Ack(0, 0)
    assert asyncio.run(contents(server)) == {CHAT: ['{"n":0}']}


def test_errors_come_through_as_they_are(tmp_path: Path) -> None:
    """The caller's mistake, a refusal, a read that could not be answered; dead letters go where they are sent."""
    with reference_server(conversation_items_max=1) as server:
        with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            with pytest.raises(InvalidItemError):
                chat.append({"n": float("nan")})
            chat.append({"n": 0}).acknowledged(PATIENCE)
            with pytest.raises(ConversationFullError):
                chat.append({"n": 1}).acknowledged(PATIENCE)
            (letter,) = log.dead_letters()
            log.requeue(letter, conversation_id="conversation-2")
            assert log.flush(PATIENCE).complete
            with pytest.raises(ConversationFullError):
                log.conversation("conversation-2").append({"n": 2}).acknowledged(PATIENCE)
            (letter,) = log.dead_letters()
            log.drop(letter)
            assert log.dead_letters() == []
            server.stop()
            with pytest.raises(MemoryUnavailableError):
                list(chat.replay())
            server.start()
        assert asyncio.run(contents(server)) == {CHAT: ['{"n":0}'], "conversation-2": ['{"n":1}']}


def test_a_blocking_replay_resumes_after_an_error(server: ReferenceServer, tmp_path: Path) -> None:
    """The same object goes on where it stopped; closed, it is at its end."""
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
        chat = log.conversation(CHAT)
        chat.extend(numbered(500), atomic=False).acknowledged(PATIENCE)
        replay = chat.replay()
        read = [next(replay).payload["n"]]
        server.stop()
        with pytest.raises(MemoryUnavailableError):
            for item in replay:
                read.append(item.payload["n"])
        assert replay.next_offset == len(read)
        server.start()
        read += [item.payload["n"] for item in replay]
        assert read == list(range(500))
        assert list(replay) == []
        replay = chat.replay()
        next(replay)
        replay.close()
        assert list(replay) == []


@pytest.mark.parametrize("name", ["memlog-engine", "memlog-writer"])
def test_a_blocking_call_in_memlogs_own_threads_raises(name: str, server: ReferenceServer, tmp_path: Path) -> None:
    """There it would wait for itself, for ever; and nobody would know why."""
    outcomes: list[BaseException | None] = []
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
        receipt = log.conversation(CHAT).append({"n": 0})
        done = threading.Event()

        def try_all() -> None:
            for call in (
                receipt.stored,
                receipt.acknowledged,
                log.flush,
                log.check,
                log.dead_letters,
                log.conversation(CHAT).recall,
                lambda: list(log.conversation(CHAT).replay()),
                log.close,
            ):
                try:
                    call()
                except BaseException as error:
                    outcomes.append(error)
                else:
                    outcomes.append(None)
            done.set()

        if name == "memlog-engine":
            engine.running().soon(try_all)
        else:
            log._log._core.buffer.run(lambda _: try_all())
        assert done.wait(PATIENCE)
        assert [type(outcome) for outcome in outcomes] == [RuntimeError] * 8
        assert receipt.acknowledged(PATIENCE) == memlog.Ack(0, 0)


@pytest.mark.anyio
async def test_an_interrupted_wait_leaves_the_log_working(server: ReferenceServer, tmp_path: Path) -> None:
    """A worker thread that is abandoned while it waits holds nothing that others need."""
    with anyio.fail_after(PATIENCE):
        log = memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path)
        fault = server.faults.add("stall", tool="append_memory", seconds=None)
        receipt = log.sync.conversation(CHAT).append({"n": 0})
        await until(lambda: fault.struck)
        with anyio.move_on_after(0.05):
            await anyio.to_thread.run_sync(receipt.acknowledged, abandon_on_cancel=True)
        server.faults.clear()
        assert (await log.conversation(CHAT).append({"n": 1}).acknowledged()).first_seq == 1
        await log.close()
