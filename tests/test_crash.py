"""kill -9, at random moments and at named ones: what was reported as stored is there in the end, once and in order."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from between import PATIENCE, Opener, drain, until, without_duplicates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

PROGRAM = Path(__file__).parent / "crash" / "talker.py"
FAULTS = [
    ("drop", {"when": "before"}),
    ("drop", {"when": "after"}),
    ("cut", {}),
    ("no_ack", {}),
    ("wrong_ack", {}),
    ("status", {"status": 500}),
    ("status", {"status": 503, "when": "after"}),
    ("stall", {"seconds": 0.02, "when": "after"}),
]
REFUSAL = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "invalid item"}})
LATER = {"commit": 9, "ack": 6, "send": 7, "read": 5, "refuse": 2, "requeue": 2}
"""The kill points of `talker.py`, and the occurrence that stands for a later one."""

FRESH_EVERY = 10
"""One in so many processes is a fresh interpreter; the others are forked from one that has imported everything."""


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path / "memory")
    yield opener
    server.faults.clear()
    opener.close()


class Nursery:
    """`talker.py serve`: starts talkers in hundredths of a second. One at a time, with the face of a Popen."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen([sys.executable, str(PROGRAM), "serve"], stdin=theirs)
        theirs.close()
        self._answers = self._ours.makefile("r")
        self._pid = 0
        self.returncode: int | None = None

    def start(self, arguments: list[str], out: Path, err: Path) -> None:
        self._ours.sendall(f"{json.dumps([str(out), str(err), *arguments])}\n".encode())
        self.returncode, self._pid = None, int(self._answers.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ours], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self._answers.close()
        self._ours.close()
        assert self._process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


class Killed:
    """Runs talkers one after the other, kills each, and remembers what they reported as stored."""

    def __init__(self, opened: Opener, tmp_path: Path, nursery: Nursery) -> None:
        self.opened = opened
        self.out = tmp_path / "stored"
        self.err = tmp_path / "said"
        self.out.touch()
        self.err.touch()
        self.runs = 0
        self._nursery = nursery

    def run(self, seconds: float | None, *, at_once: bool = False, point: str = "", count: int = 0) -> None:
        """Until ``seconds`` after its first report, or ``at_once`` after its start; None: until it kills itself."""
        arguments = [self.opened.server.url, str(self.opened.directory), str(self.runs)]
        arguments += [point, str(count)] if point else []
        fresh = self.runs % FRESH_EVERY == FRESH_EVERY - 1
        self.runs += 1
        size = self.out.stat().st_size
        program = self._interpreter(arguments) if fresh else self._nursery
        if not fresh:
            self._nursery.start(arguments, self.out, self.err)
        try:
            if seconds is not None:
                until(lambda: at_once or self.out.stat().st_size > size or program.poll() is not None, "a report")
                time.sleep(seconds)
                program.kill()
            until(lambda: program.poll() is not None, f"its end {point}")
        finally:
            program.kill()  # one that never gets to its kill point fails the test, and must not hold it up
            until(lambda: program.poll() is not None)
        said = self.err.read_text()
        assert program.returncode == -signal.SIGKILL, said
        assert "Traceback" not in said, said

    def _interpreter(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        with self.out.open("ab") as out, self.err.open("ab") as err:
            return subprocess.Popen([sys.executable, str(PROGRAM), *arguments], stdout=out, stderr=err)

    def stored(self) -> dict[str, list[int]]:
        """Numbers reported as stored, by conversation."""
        found: dict[str, list[int]] = {}
        for line in self.out.read_text().splitlines():
            name, _, number = line.partition(" ")
            found.setdefault(name, []).append(int(number))
        return found

    def check(self) -> int:
        """Drain, then hold the server against the reports; how many items were reported stored.

        Copies that the log reports are taken out first. One that it does not report, or a report of what is no copy,
        leaves a conversation in which the numbers do not follow each other.
        """
        self.opened.server.faults.clear()
        log = self.opened()
        drain(log)
        for letter in log.dead_letters():
            log.requeue(letter)
        drain(log)
        stored = self.stored()
        there = without_duplicates(log, self.opened.contents())
        for name, numbers in stored.items():
            assert_whole_and_in_order(name, there[name])
            assert set(numbers) <= set(range(len(there[name]))), f"{name}: lost {len(numbers)} > {len(there[name])}"
        now = log.statistics()
        assert now.stored_items == now.acknowledged_items + now.forgotten_items
        assert (now.pending_items, now.refused_items) == (0, 0)
        log.close()
        for path in self.opened.directory.glob("*/*.db"):
            db = sqlite3.connect(path)
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            db.close()
        return sum(map(len, stored.values()))


def assert_whole_and_in_order(name: str, items: list[dict[str, Any]]) -> None:
    found = [item["n"] for item in items]
    assert found == list(range(len(found))), f"{name}: out of order, or twice: {found}"
    while items:
        size, run, first = items[0]["of"], items[0]["run"], items[0]["n"]
        batch, items = items[:size], items[size:]
        assert batch == [
            {"n": first + i, "i": i, "of": size, "run": run, "text": "é" * ((first + i) % 50)} for i in range(size)
        ], f"{name}: torn"


@pytest.fixture
def killed(opened: Opener, tmp_path: Path, nursery: Nursery) -> Killed:
    return Killed(opened, tmp_path, nursery)


def storm(killed: Killed, runs: int, seed: int) -> int:
    dice = random.Random(seed)
    for number, (kind, settings) in enumerate(FAULTS):
        killed.opened.server.faults.add(
            kind, tool="append_memory", times=None, probability=0.05, seed=seed + number, **settings
        )
    for _ in range(runs):
        killed.run(dice.random() ** 2 * 0.4, at_once=dice.random() < 0.2)
    return killed.check()


@pytest.mark.contract("C6")
def test_thirty_kills_at_random_moments_lose_nothing(killed: Killed) -> None:
    """With faults on the server all the while; each process goes on where the one before was killed."""
    assert storm(killed, 30, seed=1) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_a_thousand_kills_at_random_moments_lose_nothing(killed: Killed, seed: int) -> None:
    """The long form: four times 250."""
    assert storm(killed, 250, seed) > 1000


@pytest.mark.parametrize("which", ["first", "later"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", LATER)
def test_a_kill_at_a_named_point_loses_nothing(killed: Killed, point: str, when: str, which: str) -> None:
    """Around each commit, acknowledgement, refusal and request: the batch is in one of its places, never in none."""
    if point in ("refuse", "requeue"):
        killed.opened.server.faults.add("status", tool="append_memory", status=400, body=REFUSAL, times=4)
    killed.run(None, point=f"{when} {point}", count=LATER[point] if which == "later" else 1)
    killed.check()


def test_a_crash_loop_that_never_gets_an_answer_leaves_no_copy(killed: Killed) -> None:
    """Every process is killed right after its first request was answered, before the acknowledgement is kept."""
    for _ in range(4):
        killed.run(None, point="after send", count=1)
    killed.check()
    log = killed.opened()
    assert log.duplicates() == []
    log.close()


def test_a_killed_server_and_a_killed_appender_lose_nothing_together(killed: Killed) -> None:
    """The server goes away in the middle, the appender after it; both come back."""
    server = killed.opened.server
    killed.run(0.1)
    server.faults.add("drop", tool="append_memory", when="after", times=None)
    killed.run(0.1)
    server.stop()
    server.start()
    killed.run(0.1)
    assert killed.check() > 0
