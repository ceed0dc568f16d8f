"""Copies of a spool's files, taken while its process is stopped somewhere in its work: what was stored is in them.

A copy holds what a crash of the machine would leave if the disk had kept every write, finished or not: the writer may
have been stopped inside a transaction, a checkpoint or a WAL that begins again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from books import contents
from crash.appender import batch, conversation

from memlog.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system does not stop processes")

PROGRAM = Path(__file__).parent / "crash" / "appender.py"
NAME = "copied1"
MOST = 8  # small: the conversations must not get full meanwhile
PATIENCE = 30.0


class Appender:
    """`crash/appender.py` under way, to be stopped and made to go on."""

    def __init__(self, url: str, directory: Path) -> None:
        command = [sys.executable, str(PROGRAM), url, str(directory), NAME, "1000000", str(MOST)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._said = b""
        self._until(b"stored 0\n")

    def _until(self, words: bytes) -> None:
        end = time.monotonic() + PATIENCE
        while words not in self._said:
            assert time.monotonic() < end
            assert self.process.poll() is None
            time.sleep(0.005)
            self._read()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._said += self.process.stdout.read() or b""

    def stop(self) -> int:
        """Stop every thread of it; how many batches it had called stored by then."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)
        self._read()
        return self._said.count(b"stored ")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@dataclass(frozen=True)
class Copy:
    path: Path
    stored: int  # batches said to be stored before
    delivered: dict[str, list[Any]]  # what the server held after


def copies(server: ReferenceServer, tmp_path: Path, count: int, *, seed: int) -> Iterator[Copy]:
    dice = random.Random(seed)
    appender = Appender(server.url, tmp_path / "memory")
    try:
        [spool] = (tmp_path / "memory").glob("*/*.db")
        for number in range(count):
            time.sleep(dice.uniform(0.0, 0.15))
            stored = appender.stop()
            place = tmp_path / f"copy{number}"
            place.mkdir()
            for suffix in ("", "-wal"):
                shutil.copyfile(f"{spool}{suffix}", place / f"{spool.name}{suffix}")
            held = asyncio.run(contents(server))
            appender.go_on()
            yield Copy(place / spool.name, stored, {id_: [json.loads(text) for text in held[id_]] for id_ in held})
            shutil.rmtree(place)
    finally:
        appender.kill()


def check(copy: Copy) -> int:
    """The copy opens, its books close, and with what was delivered it makes up all that was stored; how much waits."""
    spool = Spool.open(copy.path, None)
    books = spool.books
    spool.close()
    db = sqlite3.connect(copy.path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    bodies = db.execute("SELECT conversation, body FROM pending ORDER BY id").fetchall()
    db.close()
    waiting = [(conversation_id, json.loads(b"[%b]" % body)) for conversation_id, body in bodies]
    places = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
    for unit in ("items", "batches"):
        assert getattr(books, f"stored_{unit}") == sum(getattr(books, f"{place}_{unit}", 0) for place in places)
    assert books.pending_batches == len(waiting)
    assert books.pending_items == sum(len(items) for _, items in waiting)
    # What is stored was stored in order, so the copy holds the first ones and maybe a few that were not called so yet.
    assert books.stored_batches >= copy.stored
    for lane in range(2):
        id_ = conversation(NAME, lane)
        mine = [batch(NAME, number, MOST) for number in range(lane, books.stored_batches, 2)]
        left = [items for conversation_id, items in waiting if conversation_id == id_]
        assert left == mine[len(mine) - len(left) :], "what waits is the newest, whole and in order"
        gone = [item for items in mine[: len(mine) - len(left)] for item in items]
        assert gone == copy.delivered.get(id_, [])[: len(gone)], "and the rest is delivered"
    return len(waiting)


@pytest.mark.parametrize("away", [False, True], ids=["while it is sent", "while the server is away"])
def test_every_copy_holds_what_was_stored_before(server: ReferenceServer, tmp_path: Path, away: bool) -> None:
    """15 copies each: nothing that was called stored is missing, whole batches only, and the books close."""
    run(server, tmp_path, 15, away=away, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("away", [False, True], ids=["while it is sent", "while the server is away"])
def test_every_one_of_many_copies_holds_what_was_stored_before(
    server: ReferenceServer, tmp_path: Path, away: bool
) -> None:
    """The long form."""
    run(server, tmp_path, 100, away=away, seed=2)


def run(server: ReferenceServer, tmp_path: Path, count: int, *, away: bool, seed: int) -> None:
    if away:
        server.stop()
    stored = waiting = checked = 0
    for copy in copies(server, tmp_path, count, seed=seed):
        assert copy.stored >= stored
        stored = copy.stored
        waiting += check(copy)
        checked += 1
    assert checked == count
    assert stored > 5 * count  # it was at work
    assert waiting >= stored if away else waiting > 0
