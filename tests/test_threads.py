"""Threads that die, get stuck, or are not to be had: it is noticed, made good where that is possible, never waited for."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from between import PATIENCE, Between, Call, Opener, drain, until
from books import QUICK

from memlog import Ack, core, engine, open_log
from memlog.errors import BufferUnusableError, MemlogError
from memlog.sender import Sender
from memlog.spool import Spool, count_pending
from memlog.system import NoThreadError, start_thread
from memlog.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memlog.testing import ReferenceServer

CHAT = "c_aaaaaaaa"


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path)
    yield opener
    opener.close()


class Once:
    """Replaces a method: raises what ends a thread, at one call, before or after the real one."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        name: str,
        *,
        after: bool = False,
        kind: type[BaseException] = SystemExit,
    ) -> None:
        self.hit = threading.Event()
        real = getattr(owner, name)

        def replaced(this: Any, *args: Any) -> Any:
            first, _ = not self.hit.is_set(), self.hit.set()
            if first and not after:
                raise kind("injected")
            result = real(this, *args)
            if first:
                raise kind("injected")
            return result

        monkeypatch.setattr(owner, name, replaced)


@pytest.mark.parametrize("kind", [SystemExit, MemoryError])
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("_sort", False),
        ("_sort", True),
        ("_transact", False),
        ("_transact", True),
        ("_finish", False),
        ("_finish_puts", False),
        ("_finish_puts", True),
        ("_look_before_first", False),
    ],
)
def test_an_exception_that_would_end_the_writer_costs_nothing(
    *,
    kind: type[BaseException],
    name: str,
    after: bool,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At every step of a commit: what was accepted is stored once, and told; the thread is the same."""
    log = opened()
    log.conversation(CHAT).append({"n": 0}).acknowledged(PATIENCE)
    opened.server.stop()
    writer = log._log._core.buffer._writer
    assert writer is not None
    drained = Once(monkeypatch, Writer, name, after=after, kind=kind)
    receipts = [log.conversation(CHAT).append({"n": n}) for n in range(1, 10)]
    for receipt in receipts:
        receipt.stored(PATIENCE)
    until(drained.hit.is_set)
    until(lambda: "the buffer was interrupted" in caplog.text)
    assert writer.thread.is_alive()
    opened.server.start()
    drain(log)
    assert opened.contents() == {CHAT: [{"n": n} for n in range(10)]}
    statistics = log.statistics()
    assert (statistics.stored_items, statistics.acknowledged_items, statistics.unstored_bytes) == (10, 10, 0)


@pytest.mark.parametrize("name", ["_undo", "_collect", "_try_later", "_settle_in"])
def test_an_exception_while_another_one_is_dealt_with_does_not_end_the_writer_either(
    name: str, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins anew from what is on disk. The thread used to end there, and with it the log."""
    first, second = Once(monkeypatch, Writer, "_transact", after=True), Once(monkeypatch, Writer, name)
    log = opened()
    receipts = [log.conversation(CHAT).append({"n": n}) for n in range(10)]
    for receipt in receipts:
        receipt.stored(PATIENCE)
    assert first.hit.is_set()
    until(second.hit.is_set)
    drain(log)
    assert opened.contents() == {CHAT: [{"n": n} for n in range(10)]}
    statistics = log.statistics()
    assert (statistics.stored_items, statistics.acknowledged_items, statistics.unstored_bytes) == (10, 10, 0)


def test_a_command_that_raises_what_ends_a_thread_ends_none(opened: Opener) -> None:
    """Neither the writer's nor that of whoever asked."""
    log = opened()
    buffer = log._log._core.buffer

    def leave(_: Any) -> None:
        raise SystemExit("injected")

    for writes in (False, True):
        with pytest.raises(MemlogError, match="interrupted"):
            buffer.run(leave, writes=writes).result(PATIENCE)
    assert log.conversation(CHAT).append({"n": 0}).acknowledged(PATIENCE) == Ack(0, 0)


def test_an_exception_out_of_the_engines_loop_strands_nobody(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    """The loop goes on as it was, with all who wait in it."""
    opened.server.stop()
    log = opened()
    receipt = log.conversation(CHAT).append({"n": 0})
    acks: list[Ack] = []
    waiting = threading.Thread(target=lambda: acks.append(receipt.acknowledged(PATIENCE)))
    waiting.start()
    until(lambda: log._log._core._sending._awaited)
    thread = engine.running().thread

    def leave() -> None:
        raise SystemExit("injected")

    engine.running().soon(leave)
    until(lambda: "the engine was interrupted" in caplog.text)
    opened.server.start()
    waiting.join(PATIENCE)
    assert acks == [Ack(0, 0)]
    assert engine.running().thread is thread


@pytest.mark.parametrize("error", [SystemExit("injected"), LookupError("injected")], ids=["exit", "defect"])
def test_a_sender_that_was_ended_starts_anew(
    error: BaseException, opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is on disk goes out, who waits gets the answer, and a flush under way completes."""
    log = opened()
    log.conversation(CHAT).append({"n": 0}).acknowledged(PATIENCE)
    real, hit = Sender._dispatch, threading.Event()

    def dispatch(sender: Sender) -> Any:
        if not hit.is_set():
            hit.set()
            raise error
        return real(sender)

    monkeypatch.setattr(Sender, "_dispatch", dispatch)
    receipt = log.conversation(CHAT).append({"n": 1})
    report = log.flush(PATIENCE)
    assert report.complete
    assert hit.is_set()
    assert receipt.acknowledged(PATIENCE) == Ack(1, 1)
    assert "it starts anew" in caplog.text
    assert log.statistics().acknowledged_items == 2
    assert opened.contents() == {CHAT: [{"n": 0}, {"n": 1}]}


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_transport_that_would_end_the_engine_holds_up_its_own_request_only(
    kind: type[BaseException], opened: Opener
) -> None:
    """What a user's transport raises is a failure of the request, which is made again."""
    first = threading.Event()

    def decide(call: Call) -> None:
        if call.tool == "append_memory" and not first.is_set():
            first.set()
            raise kind("the transport's own")

    log = opened(Between(decide))
    assert log.conversation(CHAT).append({"n": 0}).acknowledged(PATIENCE) == Ack(0, 0)
    assert log.conversation("c_bbbbbbbb").append({"n": 0}).acknowledged(PATIENCE) == Ack(0, 0)
    assert first.is_set()


def test_an_engine_whose_thread_ended_is_replaced_under_an_open_log(opened: Opener) -> None:
    """Its successor sends; what is appended meanwhile is stored all the same."""
    log = opened()
    log.conversation(CHAT).append({"n": 0}).acknowledged(PATIENCE)
    engine.running().stop(PATIENCE)
    receipt = log.conversation(CHAT).append({"n": 1})
    receipt.stored(PATIENCE)
    assert receipt.acknowledged(PATIENCE) == Ack(1, 1)
    drain(log)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_ends_its_thread_takes_no_event_with_it(kind: type[BaseException]) -> None:
    """sys.exit() in a callback is as good as any other exception."""
    seen: list[int] = []
    done = threading.Event()

    def callback(value: int) -> None:
        seen.append(value)
        if value == 0:
            raise kind("the user's own")
        done.set()

    for value in range(2):
        engine.callbacks().call(callback, value)
    assert done.wait(PATIENCE)
    assert seen == [0, 1]


# --- deadlines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """The engine's loop hangs until this is set."""
    go, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go.wait(PATIENCE)

    engine.running().soon(hang)
    assert begun.wait(PATIENCE)
    yield go
    go.set()


def test_a_blocking_flush_keeps_its_time_though_the_engine_is_stuck(opened: Opener, stuck: threading.Event) -> None:
    """An incomplete report, a second late at most."""
    log = opened()
    log.conversation(CHAT).append({"n": 0}).stored(PATIENCE)
    started = time.monotonic()
    report = log.flush(0.2)
    assert time.monotonic() - started < 5
    assert (report.complete, report.pending) == (False, 1)
    stuck.set()
    drain(log)


@pytest.mark.anyio
async def test_a_flush_keeps_its_time_though_the_engine_is_stuck(
    server: ReferenceServer, tmp_path: Path, stuck: threading.Event
) -> None:
    """And so does a receipt; afterwards everything goes on."""
    with anyio.fail_after(PATIENCE):
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK)
        receipt = log.conversation(CHAT).append({"n": 0})
        await receipt.stored()
        started = time.monotonic()
        report = await log.flush(0)
        assert (report.complete, report.pending) == (False, 1)
        with pytest.raises(TimeoutError):
            await receipt.acknowledged(0.1)
        assert time.monotonic() - started < 5
        stuck.set()
        assert await receipt.acknowledged() == Ack(0, 0)
        await log.close()


def test_closing_keeps_its_time_though_the_engine_is_stuck(
    opened: Opener, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is unsent is said once. Closing goes on when the engine does; the log may be opened again before."""
    monkeypatch.setattr(core, "_CLOSE_SECONDS", 0.2)
    log = opened(flush_timeout=0.1)
    log.conversation(CHAT).append({"n": 0}).stored(PATIENCE)
    started = time.monotonic()
    log.close()
    assert time.monotonic() - started < 5
    assert log._log.closed
    assert caplog.text.count("closing takes too long") == 1
    assert caplog.text.count("1 item(s) for") == 1
    again = opened(flush_timeout=PATIENCE)
    assert again._log._core is log._log._core
    again.conversation(CHAT).append({"n": 1}).stored(PATIENCE)
    stuck.set()
    again.close()
    assert again._log._core.gone.is_set()
    assert opened.contents() == {CHAT: [{"n": 0}, {"n": 1}]}


@pytest.mark.anyio
async def test_awaiting_the_close_keeps_its_time_though_the_engine_is_stuck(
    server: ReferenceServer,
    tmp_path: Path,
    stuck: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a loop of one's own as well; and it is cut off by nothing else."""
    monkeypatch.setattr(core, "_CLOSE_SECONDS", 0.2)
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0) as log:
            await log.conversation(CHAT).append({"n": 0}).stored()
        assert caplog.text.count("closing takes too long") == 1
        stuck.set()
        while not log._core.gone.is_set():
            await anyio.sleep(0.01)
    assert sum(count_pending(path) for path in tmp_path.glob("*/*.db")) == 1


def test_a_log_whose_engine_has_ended_can_be_closed(opened: Opener) -> None:
    """By the next one."""
    log = opened()
    log.conversation(CHAT).append({"n": 0}).acknowledged(PATIENCE)
    engine.running().stop(PATIENCE)
    log.close()
    assert log._log._core.gone.is_set()


def test_a_flush_keeps_its_time_though_the_disk_is_stuck(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer hangs in a commit: nothing is complete, and nobody waits for longer than was said."""
    go, busy = threading.Event(), threading.Event()
    real = Spool.commit

    def commit(spool: Spool) -> None:
        if spool._db.in_transaction and not go.is_set():
            busy.set()
            go.wait(PATIENCE)
        real(spool)

    log = opened()
    monkeypatch.setattr(Spool, "commit", commit)
    log.conversation(CHAT).append({"n": 0})
    assert busy.wait(PATIENCE)
    started = time.monotonic()
    assert not log.flush(0.2).complete
    assert time.monotonic() - started < 5
    go.set()
    drain(log)


# --- no threads to be had ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No thread can be started, as at a limit of the system, or at the end of an interpreter from 3.12 on."""
    with monkeypatch.context() as patch:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        yield patch


def test_without_threads_an_append_is_on_disk_when_it_returns(
    opened: Opener, no_threads: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once. When there are threads again, the same log sends it, in order."""
    log = opened(on_event=None)
    receipts = [log.conversation(CHAT).append({"n": n}) for n in range(3)]
    receipts += [log.conversation(CHAT).extend([{"n": 3}, {"n": 4}])]
    for receipt in receipts:
        receipt.stored(0)
    assert sum(count_pending(path) for path in opened.directory.glob("*/*.db")) == 5
    assert len({receipt.id for receipt in receipts}) == 4
    assert caplog.text.count("no thread is there to send") == 1
    with pytest.raises(NoThreadError):
        receipts[0].acknowledged(PATIENCE)
    no_threads.undo()
    last = log.conversation(CHAT).append({"n": 5})
    assert last.acknowledged(PATIENCE) == Ack(5, 5)
    assert receipts[3].acknowledged(PATIENCE) == Ack(3, 4)
    assert opened.contents() == {CHAT: [{"n": n} for n in range(6)]}


def test_without_threads_limits_and_stamps_hold_and_memory_says_no(
    opened: Opener, no_threads: pytest.MonkeyPatch
) -> None:
    """An append is wholly in, or raises."""
    from memlog import BufferFullError, BufferLimits

    log = opened(on_event=None, stamp=True, limits=BufferLimits(disk_bytes=300))
    stored = 0
    with pytest.raises(BufferFullError):
        for _ in range(100):
            log.conversation(CHAT).append({"n": stored})
            stored += 1
    assert 0 < stored < 100
    memory = opened(on_event=None, buffer_dir=":memory:")
    with pytest.raises(BufferUnusableError, match="no thread"):
        memory.conversation(CHAT).append({"n": 0})
    no_threads.undo()
    drain(log)
    assert [item.payload for item in log.conversation(CHAT).replay()] == [{"n": n} for n in range(stored)]


def test_without_threads_a_log_can_be_closed(opened: Opener, no_threads: pytest.MonkeyPatch) -> None:
    """Nothing waits for a thread that does not exist."""
    with opened(on_event=None) as log:
        log.conversation(CHAT).append({"n": 0}).stored(0)
    no_threads.undo()
    again = opened(on_event=None)
    drain(again)
    assert opened.contents() == {CHAT: [{"n": 0}]}


def test_a_thread_that_is_refused_leaves_nothing_open(no_threads: pytest.MonkeyPatch) -> None:
    """Neither a loop nor a half-started thread."""
    with pytest.raises(NoThreadError, match="can't start new thread"):
        start_thread(lambda: None, "memlog-none")
    with pytest.raises(NoThreadError):
        engine.Engine()
    with pytest.raises(NoThreadError):
        engine.Callbacks()
    asyncio.new_event_loop().close()
    assert "memlog-none" not in {thread.name for thread in threading.enumerate()}
