"""Several processes on one directory: killed, suspended and awake again, and every batch is delivered once, in order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from between import PATIENCE, Opener, drain, until
from crash.appender import batch, conversation

from memlog.spool import count_pending
from memlog.testing import check_history, read_history

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.sync import SyncMemoryLog
    from memlog.testing import HistoryReport, ReferenceServer

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system does not stop processes")

PROGRAM = Path(__file__).parent / "crash" / "appender.py"
MOST = 3
ADOPTED_SECONDS = 10.0


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path / "memory")
    yield opener
    opener.close()


class Process:
    """`crash/appender.py` under way; a thread of ours listens to it."""

    def __init__(self, opener: Opener, name: str, count: int) -> None:
        self.name = name
        self.count = count
        arguments = [opener.server.url, str(opener.directory), name, str(count), str(MOST), str(PATIENCE)]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def wait_for(self, line: str) -> None:
        until(lambda: line in self.lines or not self._listener.is_alive(), line)
        assert line in self.lines

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> int:
        code = self.process.wait(2 * PATIENCE)
        self._listener.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def stored(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("stored ")]


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.process.kill()
        process.end()


def judged(server: ReferenceServer, processes: list[Process], log: SyncMemoryLog) -> HistoryReport:
    """What the processes appended, what they said was stored, and what the server holds."""
    appended: dict[str, list[Any]] = {}
    stored: dict[str, set[int]] = {}
    for process in processes:
        said = set(process.stored)
        for lane in range(2):
            numbers = range(lane, process.count, 2)
            id_ = conversation(process.name, lane)
            appended[id_] = [batch(process.name, number, MOST) for number in numbers]
            stored[id_] = {place for place, number in enumerate(numbers) if number in said}
    ours = {process.name for process in processes}
    held = asyncio.run(read_history(server.url, server.auth))
    held = {id_: items for id_, items in held.items() if id_[2:-1] in ours}
    return check_history(appended, held, duplicates=log.duplicates(), stored=stored)


def four(opened: Opener, processes: list[Process], count: int) -> None:
    opened.server.faults.add("stall", tool="append_memory", seconds=0.05, times=None)
    processes += [Process(opened, f"process{n}", count) for n in range(4)]
    victim = processes[2]
    victim.wait_for(f"stored {count // 4}")
    victim.signal(signal.SIGKILL)
    assert victim.end() == -signal.SIGKILL
    for survivor in processes:
        if survivor is not victim:
            assert survivor.end() == 0
            assert survivor.stored == list(range(count))
            assert survivor.lines[-1] == "flushed True"
    assert count // 4 < len(victim.stored) < count
    opened.server.faults.clear()
    log = opened()
    drain(log)
    report = judged(opened.server, processes, log)
    assert report.ok, report
    assert not report.duplicated
    assert log.statistics().pending_items == 0
    assert sum(count_pending(path) for path in opened.directory.glob("*/*.db")) == 0


def test_four_processes_and_one_is_killed_all_is_delivered_once_and_in_order(
    opened: Opener, processes: list[Process]
) -> None:
    """4 times 200 appends. Each process keeps to conversations of its own, all to one directory."""
    four(opened, processes, 200)


@pytest.mark.slow
def test_four_processes_append_a_thousand_times_each_and_one_is_killed(
    opened: Opener, processes: list[Process]
) -> None:
    """The long form."""
    four(opened, processes, 1000)


def test_what_a_killed_process_left_is_taken_over(opened: Opener, processes: list[Process]) -> None:
    """By one that runs already, within ten seconds; and what the new owner appends to the same conversation comes after."""
    opened.server.stop()
    running = opened()
    running.conversation("c_running00").append({"mine": 0}).stored(PATIENCE)
    victim = Process(opened, "victim00", 1_000_000)
    processes.append(victim)
    victim.wait_for("stored 40")
    victim.signal(signal.SIGKILL)
    victim.end()
    killed = time.monotonic()
    left = max(count_pending(path) for path in opened.directory.glob("*/*.db"))
    assert left > 40
    opened.server.start()
    until(lambda: opened.of("adopted"), "adopted")
    assert time.monotonic() - killed < ADOPTED_SECONDS
    drain(running)
    until(lambda: running.statistics().pending_items == 0 and delivered(opened, "victim00") >= left, "delivered")
    victim.count = len(victim.stored) + 5  # the last ones may be there, stored, and never said to be
    report = judged(opened.server, [victim], running)
    assert report.ok, report
    assert report.items == left


def delivered(opened: Opener, name: str) -> int:
    held = opened.contents()
    return sum(len(held.get(conversation(name, lane), ())) for lane in range(2))


@pytest.mark.parametrize("when", ["while it waits for the server", "with a request in flight"])
def test_a_suspended_owner_keeps_its_lock_and_nothing_is_sent_twice(
    opened: Opener, processes: list[Process], when: str
) -> None:
    """Nobody takes its file over while it sleeps, and it goes on where it was."""
    server = opened.server
    if when == "with a request in flight":
        server.faults.add("stall", tool="append_memory", seconds=0.3, times=None)
    else:
        server.stop()
    sleeper = Process(opened, "sleeper0", 60)
    processes.append(sleeper)
    sleeper.wait_for("stored 20")
    if when == "with a request in flight":
        until(lambda: server.faults.listed()[0]["struck"], "a request in flight")
    sleeper.signal(signal.SIGSTOP)
    [its] = opened.directory.glob("*/*.db")
    pending = count_pending(its)
    assert pending > 0
    if when != "with a request in flight":
        server.start()
    log = opened()
    assert log._log._core.buffer.spool_path != its
    ack = log.conversation("c_awake000").append({"awake": True}).acknowledged(PATIENCE)
    assert ack.first_seq == 0
    drain(log)
    assert log.statistics().acknowledged_items == 1  # its own, and none of the sleeper's
    assert count_pending(its) == pending
    server.faults.clear()
    sleeper.signal(signal.SIGCONT)
    assert sleeper.end() == 0
    assert sleeper.lines[-1] == "flushed True"
    report = judged(server, [sleeper], log)
    assert report.ok, report
    assert not report.duplicated
    assert report.items == sum(len(batch("sleeper0", number, MOST)) for number in range(60))
