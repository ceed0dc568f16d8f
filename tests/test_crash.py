"""kill -9, at random moments and at named ones: what was reported as stored is there in the end, once and in order."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from between import PATIENCE, Opener, drain, without_duplicates

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


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path / "memory")
    yield opener
    server.faults.clear()
    opener.close()


class Killed:
    """Runs appenders one after the other, kills each, and remembers what they reported as stored."""

    def __init__(self, opened: Opener, tmp_path: Path) -> None:
        self.opened = opened
        self.out = tmp_path / "stored"
        self.out.touch()
        self.runs = 0

    def run(self, seconds: float | None, *, point: str = "", count: int = 0) -> None:
        """Until the appender has reported something and ``seconds`` more, or until it kills itself."""
        command = [sys.executable, str(PROGRAM), self.opened.server.url, str(self.opened.directory), str(self.runs)]
        command += [point, str(count)] if point else []
        self.runs += 1
        size = self.out.stat().st_size
        with (
            self.out.open("ab", buffering=0) as out,
            subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True) as program,
        ):
            end = time.monotonic() + PATIENCE
            if seconds is not None:
                while self.out.stat().st_size == size and time.monotonic() < end and program.poll() is None:
                    time.sleep(0.002)
                time.sleep(seconds)
                program.kill()
            try:
                _, err = program.communicate(timeout=PATIENCE)
            finally:
                program.kill()  # one that never gets to its kill point fails the test, and must not hold it up
        assert program.returncode == -signal.SIGKILL, err
        assert "Traceback" not in err, err

    def stored(self) -> dict[str, list[int]]:
        """Numbers reported as stored, by conversation. The last line of a killed process may be torn."""
        found: dict[str, list[int]] = {}
        for line in self.out.read_text().splitlines():
            name, _, number = line.partition(" ")
            found.setdefault(name, []).append(int(number))
        return found

    def check(self) -> int:
        """Drain, then hold the server against the reports; how many items were reported stored."""
        self.opened.server.faults.clear()
        log = self.opened()
        drain(log)
        stored = self.stored()
        there = without_duplicates(log, self.opened.contents())
        for name, numbers in stored.items():
            found = [item["n"] for item in there[name]]
            assert found == list(range(len(found))), f"{name}: out of order, torn or twice: {found}"
            assert set(numbers) <= set(found), f"{name}: lost {set(numbers) - set(found)}"
        now = log.statistics()
        assert now.stored_items == now.acknowledged_items
        assert (now.pending_items, now.refused_items) == (0, 0)
        log.close()
        for path in self.opened.directory.glob("*/*.db"):
            db = sqlite3.connect(path)
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            db.close()
        return sum(map(len, stored.values()))


def storm(opened: Opener, tmp_path: Path, runs: int, seed: int) -> int:
    killed = Killed(opened, tmp_path)
    dice = random.Random(seed)
    for number, (kind, settings) in enumerate(FAULTS):
        opened.server.faults.add(
            kind, tool="append_memory", times=None, probability=0.05, seed=seed + number, **settings
        )
    for _ in range(runs):
        killed.run(dice.random() ** 2 * 0.4)
    return killed.check()


@pytest.mark.contract("C6")
def test_thirty_kills_at_random_moments_lose_nothing(opened: Opener, tmp_path: Path) -> None:
    """With faults on the server all the while; each process goes on where the one before was killed."""
    assert storm(opened, tmp_path, 30, seed=1) > 100


@pytest.mark.slow
def test_three_hundred_kills_at_random_moments_lose_nothing(opened: Opener, tmp_path: Path) -> None:
    """The long form."""
    assert storm(opened, tmp_path, 300, seed=2) > 1000


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("before commit", 1),
        ("after commit", 9),
        ("before ack", 1),
        ("after ack", 6),
        ("before send", 1),
        ("after send", 7),
        ("before read", 3),
        ("after read", 5),
    ],
)
def test_a_kill_at_a_named_point_loses_nothing(opened: Opener, tmp_path: Path, point: str, count: int) -> None:
    """Around each commit, each acknowledgement and each request: the batch is pending or acknowledged, never neither."""
    killed = Killed(opened, tmp_path)
    killed.run(None, point=point, count=count)
    killed.check()


def test_a_crash_loop_that_never_gets_an_answer_leaves_no_copy(opened: Opener, tmp_path: Path) -> None:
    """Every process is killed right after its first request was answered, before the acknowledgement is kept."""
    killed = Killed(opened, tmp_path)
    for _ in range(4):
        killed.run(None, point="after send", count=1)
    killed.check()
    log = opened()
    assert log.duplicates() == []
    log.close()


def test_a_killed_server_and_a_killed_appender_lose_nothing_together(opened: Opener, tmp_path: Path) -> None:
    """The server goes away in the middle, the appender after it; both come back."""
    killed = Killed(opened, tmp_path)
    killed.run(0.1)
    opened.server.faults.add("drop", tool="append_memory", when="after", times=None)
    killed.run(0.1)
    opened.server.stop()
    opened.server.start()
    killed.run(0.1)
    assert killed.check() > 0
