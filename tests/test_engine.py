"""The engine's thread, crossing between loops, and the end of a process: bounded, quiet, with everything stored."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from between import PATIENCE, Opener, drain, until

from memlog import engine
from memlog.spool import count_pending

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

PROGRAM = Path(__file__).parent / "crash" / "exits.py"
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path)
    yield opener
    server.faults.clear()
    opener.close()


# --- crossing ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_call_runs_in_the_engines_thread_and_its_result_comes_back() -> None:
    """From asyncio and from trio."""

    async def work(value: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return value + 1, threading.current_thread().name

    with anyio.fail_after(PATIENCE):
        assert await engine.running().call(work, 1) == (2, "memlog-engine")


@pytest.mark.anyio
async def test_an_error_comes_back_as_itself() -> None:
    """The very object that was raised."""
    mine = LookupError("mine")

    async def work() -> None:
        raise mine

    with anyio.fail_after(PATIENCE), pytest.raises(LookupError) as caught:
        await engine.running().call(work)
    assert caught.value is mine


@pytest.mark.anyio
async def test_cancelling_a_wait_cancels_the_work() -> None:
    """Nothing goes on for nobody."""
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            group.start_soon(engine.running().call, work)
            while not begun.is_set():
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
    assert ended.wait(PATIENCE)


@pytest.mark.anyio
async def test_a_thousand_waits_hold_no_thread() -> None:
    """Waiting is a callback, not a thread."""
    gate: Future[int] = Future()
    before = threading.active_count()
    results: list[int] = []

    async def wait() -> None:
        results.append(await engine.outcome(gate))

    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as group:
            # One future each: cancelling one's wait must not cancel another's.
            gates = [Future() for _ in range(1000)]

            async def each(own: Future[int]) -> None:
                results.append(await engine.outcome(own))

            for own in gates:
                group.start_soon(each, own)
            await anyio.sleep(0.05)
            assert threading.active_count() <= before + 1
            for number, own in enumerate(gates):
                own.set_result(number)
    assert sorted(results) == list(range(1000))


def test_a_loop_that_is_closed_by_then_is_no_error() -> None:
    """Frameworks close a loop per turn, whoever still waits in it."""
    wake: list[Any] = []

    async def main() -> None:
        wake.append(engine.waker(lambda: None))

    asyncio.run(main())
    wake[0]()
    import trio

    trio.run(main)
    wake[1]()


def test_the_callers_context_does_not_leak_into_the_engine() -> None:
    """A request's variables must not be seen by what is sent later for others."""

    async def read() -> str:
        return variable.get()

    variable.set("of this request")
    assert engine.running().block(read) == "none"


@pytest.mark.parametrize("name", ["engine", "callbacks"])
def test_a_blocking_call_from_memlogs_own_thread_is_refused_where_it_would_wait_for_itself(
    name: str, opened: Opener
) -> None:
    """In the engine it raises; in an on_event callback it is fine."""
    log = opened()
    log.conversation("c_aaaaaaaa").append({"n": 0})
    drain(log)

    async def from_the_engine() -> None:
        log.flush(1)

    if name == "engine":
        with pytest.raises(RuntimeError, match="would wait for itself"):
            engine.running().block(from_the_engine)
        return
    result: Future[bool] = Future()
    engine.callbacks().call(lambda _: result.set_result(log.flush(1).complete), None)
    assert result.result(PATIENCE)


def test_a_blocking_call_that_is_interrupted_cancels_its_work() -> None:
    """Ctrl-C must not leave the work behind."""
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    class Interrupt(BaseException):
        pass

    future_result = Future.result

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        with pytest.raises(TimeoutError):
            future_result(future, 0.05)
        raise Interrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(Interrupt):
            engine.running().block(work)
    assert ended.wait(PATIENCE)


def test_callbacks_run_in_order_and_one_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Logged, never propagated."""
    seen: list[int] = []
    done = threading.Event()

    def callback(value: int) -> None:
        seen.append(value)
        if value == 1:
            raise LookupError("the user's own")
        if value == 3:
            done.set()

    for value in range(4):
        engine.callbacks().call(callback, value)
    assert done.wait(PATIENCE)
    assert seen == [0, 1, 2, 3]
    assert "a callback raised" in caplog.text


def test_a_slow_callback_delays_neither_appends_nor_sending(opened: Opener) -> None:
    """It has a thread of its own."""
    go = threading.Event()
    log = opened(on_event=lambda _: go.wait(PATIENCE))
    receipts = [log.conversation("c_aaaaaaaa").append({"n": n}) for n in range(20)]
    assert receipts[-1].acknowledged(PATIENCE).last_seq == 19
    go.set()


def test_an_engine_that_died_is_replaced() -> None:
    """Whoever stopped its loop."""
    first = engine.running()
    first.stop(PATIENCE)
    assert not first.thread.is_alive()
    first.loop.close()
    second = engine.running()
    assert second is not first

    async def work() -> int:
        return 1

    assert second.block(work) == 1


def test_two_handles_that_are_closed_at_once_wait_for_each_other(opened: Opener) -> None:
    """The last one to have flushed closes; neither hangs, whichever is more patient."""
    gate = threading.Event()
    opened.server.faults.add("stall", tool="append_memory", seconds=0.3)
    patient, hasty = opened(flush_timeout=None), opened(flush_timeout=0)
    patient.conversation("c_aaaaaaaa").append({"n": 0})
    threads = [threading.Thread(target=log.close) for log in (patient, hasty)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not [thread for thread in threads if thread.is_alive()]
    assert opened.contents() == {"c_aaaaaaaa": [{"n": 0}]}
    assert not gate.is_set()


# --- the end of a process ----------------------------------------------------------------------------------------------


def end(mode: str, url: str, directory: Path) -> tuple[int, list[str], float]:
    """Exit code, what was said on standard error but for warnings about the place, and how long it took."""
    started = time.monotonic()
    program = subprocess.run(
        [sys.executable, str(PROGRAM), mode, url, str(directory)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    said = [line for line in program.stderr.splitlines() if "may not last" not in line]
    return program.returncode, said, time.monotonic() - started


def pending_in(directory: Path) -> int:
    return sum(count_pending(path) for path in directory.glob("*/*.db"))


AT_THE_END = {"after_all": 2, "opened_after_all": 1, "without_threads": 1, "loop_at_exit": 1, "deleted": 2}
"""Modes that append when it has been said already what is unsent, and how often that is said."""


@pytest.mark.parametrize(
    ("mode", "code", "items"),
    [
        ("plain", 0, 10),
        ("status", 3, 10),
        ("in_the_loop", 5, 10),
        ("own_error", 7, 10),
        ("at_exit", 0, 10),
        ("after_all", 0, 10),
        ("opened_after_all", 0, 10),
        ("without_threads", 0, 10),
        ("logging_is_gone", 0, 10),
        ("closed_at_exit", 0, 10),
        ("threads", 0, 200),
        ("outliving", 0, 10),
        ("loop_at_exit", 0, 10),
        ("deleted", 0, 10),
    ],
)
def test_a_process_that_ends_without_a_server_has_stored_everything_and_says_so(
    server: ReferenceServer, opened: Opener, mode: str, code: int, items: int
) -> None:
    """Its exit code is its own; how many items are unsent, where they are and what sends them is said once."""
    server.stop()
    found, said, _ = end(mode, server.url, opened.directory)
    assert found == code
    assert pending_in(opened.directory) == items
    unsent = [line for line in said if "unsent" in line]
    assert len(unsent) == AT_THE_END.get(mode, 1)
    assert all(str(opened.directory) in line and "opening the log again sends" in line for line in unsent)
    if mode not in AT_THE_END:
        assert f"{items} item(s)" in unsent[0]
    assert [line for line in said if not line.startswith("memlog: ")] == []
    server.start()
    log = opened()
    drain(log)
    numbers = [item["n"] for item in opened.contents()["c_exiting0"]]
    assert sorted(numbers) == list(range(items))


@pytest.mark.parametrize(("mode", "code"), [("hard", 4), ("terminated", -15)])
def test_a_process_that_ends_without_its_hooks_has_stored_what_it_was_told_is(
    server: ReferenceServer, tmp_path: Path, mode: str, code: int
) -> None:
    """os._exit(), and a signal without a handler: nothing of memlog runs any more, and the code is theirs."""
    server.stop()
    found, said, _ = end(mode, server.url, tmp_path)
    assert (found, pending_in(tmp_path)) == (code, 10)
    assert [line for line in said if not line.startswith("memlog: sending waits")] == []


@pytest.mark.parametrize("mode", ["plain", "waiting"])
def test_a_server_that_never_answers_does_not_keep_a_process_from_ending(
    server: ReferenceServer, tmp_path: Path, opened: Opener, mode: str
) -> None:
    """A request is in flight when the script ends: quiet, code 0, within seconds."""
    server.faults.add("stall", tool="append_memory", seconds=None, times=None)
    server.faults.add("stall", tool="replay_memory", seconds=None, times=None)
    code, said, seconds = end(mode, server.url, tmp_path)
    assert code == 0
    assert [line for line in said if not line.startswith("memlog: ")] == []
    assert len(said) == 1
    assert seconds < 15
    assert pending_in(tmp_path) > 0


def test_an_error_or_an_interrupt_ends_the_process_as_it_would_without_memlog(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The traceback is the script's own, and everything is stored."""
    server.stop()
    code, said, _ = end("error", server.url, tmp_path / "a")
    assert code == 1
    assert [line for line in said if line.startswith("RuntimeError")] == ["RuntimeError: the script's own"]
    assert pending_in(tmp_path / "a") == 10
    code, said, _ = end("interrupted", server.url, tmp_path / "b")
    assert code in (-2, 130)
    assert said.count("KeyboardInterrupt") == 1
    assert pending_in(tmp_path / "b") == 10


def test_a_close_that_is_interrupted_leaves_everything_stored_and_says_so(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """Ctrl-C during the last flush: what is unsent is told once, by the closing that goes on or by the end."""
    server.stop()
    code, said, seconds = end("interrupted_close", server.url, tmp_path)
    assert code in (-2, 130)
    assert seconds < 15
    assert pending_in(tmp_path) == 10
    assert sum("10 item(s)" in line and "unsent" in line for line in said) == 1


def test_signal_handlers_append_and_end_the_process_as_they_like(
    server: ReferenceServer, tmp_path: Path, opened: Opener
) -> None:
    """SIGINT, SIGTERM and others, in the middle of appends of the main thread: all in order, the exit code is theirs."""
    code, said, _ = end("signalled", server.url, tmp_path)
    assert code == 6
    assert [line for line in said if not line.startswith("memlog: ")] == []
    drain(opened())
    found = opened.contents()
    assert found["c_exiting0"] == [{"n": n} for n in range(5)]
    assert set(map(str, found["c_theother"])) == {"{'busy': True}"}


def test_a_log_that_was_only_opened_ends_without_a_word(server: ReferenceServer, tmp_path: Path) -> None:
    """Not closing is legal."""
    assert end("untouched", server.url, tmp_path)[:2] == (0, [])


def test_one_log_serves_many_loops_one_after_the_other(server: ReferenceServer, tmp_path: Path, opened: Opener) -> None:
    """asyncio.run per turn, with tasks left behind in loops that are gone: everything arrives, nothing is said."""
    code, said, _ = end("turns", server.url, tmp_path)
    assert code == 0
    assert [line for line in said if not line.startswith("memlog: ")] == []
    log = opened()
    drain(log)
    assert [item["n"] for item in opened.contents()["c_exiting0"]] == [0, 0.5, 1, 2, 2.5, 3, 4, 4.5, 5]
    until(lambda: log.statistics().pending_items == 0)
