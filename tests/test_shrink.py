"""Room: files grow in an outage and shrink after it, the WAL has a limit, and a huge backlog is opened at once."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memlog import spool as spool_module
from memlog import system
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.payload import encode_batch
from memlog.schema import WAL_BYTES_MAX, read_only, wal_of
from memlog.spool import NewRow, Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memlog.directory import Spools

PATIENCE = 30.0
LANE = "c_11111111"
MIB = 1024 * 1024


class Silent:
    """Nobody listens."""

    def stored(self, items: dict[str, int]) -> None:
        pass

    def disk_trouble(self, reason: str | None) -> None:
        raise AssertionError(reason)

    def noticed(self, notice: object) -> None:
        pass


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], Buffer]]:
    """Makes started buffers in `tmp_path`, and closes what is left."""
    made: list[Buffer] = []

    def make() -> Buffer:
        buffer = Buffer(tmp_path, BufferLimits(), Silent())
        buffer.start()
        made.append(buffer)
        return buffer

    yield make
    for buffer in made:
        buffer.close(PATIENCE)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def put(buffer: Buffer, count: int, filler: int = 100_000) -> None:
    batch = encode_batch([{"text": "x" * filler}])
    for _ in range(count):
        accepted, stored = Accepted(LANE, [batch]), threading.Event()
        buffer.put(accepted, batch.size)
        accepted.when_stored(stored.set)
        assert stored.wait(PATIENCE)


def drain(buffer: Buffer) -> None:
    def write(spools: Spools) -> bool:
        spools.own.begin()
        rows = spools.next_request(LANE, batches_max=250, items_max=250, bytes_max=MIB)
        spools.own.acknowledge(rows, 0)
        return bool(rows)

    while buffer.run(write, writes=True).result(PATIENCE):
        pass


def backlog(buffer: Buffer, mib: int) -> None:
    put(buffer, mib * 10)
    path = buffer.spool_path
    assert path is not None
    assert path.stat().st_size + wal_of(path).stat().st_size > mib * MIB * 0.9
    drain(buffer)
    until(lambda: path.stat().st_size < MIB and wal_of(path).stat().st_size == 0)


def test_a_drained_backlog_gives_its_room_back_within_seconds(make: Any) -> None:
    """50 MB of an outage; nobody has to restart or to vacuum."""
    backlog(make(), 50)


@pytest.mark.slow
def test_a_large_drained_backlog_gives_its_room_back(make: Any) -> None:
    """500 MB: the long form."""
    backlog(make(), 500)


def test_room_is_given_back_in_steps_between_which_others_are_served(tmp_path: Path, monkeypatch: Any) -> None:
    """A step moves a bounded number of pages."""
    monkeypatch.setattr(spool_module, "_TIDY_PAGES", 50)
    held = Spool.open(tmp_path / "a.db", None)
    body = encode_batch([{"text": "x" * 100_000}])
    held.begin()
    held.store([NewRow(number, LANE, 1, body.size, body.body) for number in range(1, 21)])
    held.commit()
    held.begin()
    held.acknowledge(list(held.pending(LANE)), 0)
    held.commit()
    sizes = []
    while held.tidy():
        sizes.append((tmp_path / "a.db").stat().st_size)
    assert len(sizes) >= 8
    assert sizes == sorted(sizes, reverse=True)
    held.close()


def test_the_wal_stays_below_its_limit_under_load(make: Any) -> None:
    """It is checkpointed as it grows."""
    buffer = make()
    path, largest = buffer.spool_path, 0
    for _ in range(60):
        put(buffer, 1, filler=250_000)
        largest = max(largest, wal_of(path).stat().st_size)
    assert 0 < largest <= WAL_BYTES_MAX


def test_a_reader_that_stays_lets_the_wal_grow_and_stops_nothing(make: Any) -> None:
    """As soon as it leaves, the WAL is cut."""
    buffer = make()
    put(buffer, 1)
    path = buffer.spool_path
    with read_only(path) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM pending").fetchone()
        begun = time.monotonic()
        put(buffer, 100, filler=250_000)
        assert wal_of(path).stat().st_size > WAL_BYTES_MAX
        assert time.monotonic() - begun < PATIENCE / 2  # a second a commit, were the reader waited for
    put(buffer, 25, filler=250_000)
    assert wal_of(path).stat().st_size <= WAL_BYTES_MAX


# --- network file systems ----------------------------------------------------------------------------------------------


def test_on_a_network_file_system_no_wal_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A WAL needs shared memory, which machines do not share; every commit is synced all the same."""
    path = tmp_path / "a.db"
    held = Spool.open(path, None)  # made on a local disk, and moved
    body = encode_batch([{"n": 1}])
    held.begin()
    held.store([NewRow(1, LANE, 1, body.size, body.body)])
    held.commit()
    held.close()
    monkeypatch.setattr(system, "is_remote", lambda path: True)
    held = Spool.open(path, None)
    assert held._db.execute("PRAGMA journal_mode").fetchone()[0] == "truncate"
    assert held._db.execute("PRAGMA synchronous").fetchone()[0] == 2
    held.begin()
    held.store([NewRow(2, LANE, 1, body.size, body.body)])
    held.commit()
    held.tidy()
    held.limit_wal()
    assert not wal_of(path).exists()
    assert len(list(held.pending(LANE))) == 2
    held.close()
    monkeypatch.undo()
    held = Spool.open(path, None)
    assert held._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert len(list(held.pending(LANE))) == 2
    held.close()


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And the warning about it says which."""
    monkeypatch.setattr(system, "_file_system", lambda path: kind)
    assert system.is_remote(tmp_path)
    assert kind in (system.why_not_durable(tmp_path) or "")
    monkeypatch.setattr(system, "_file_system", lambda path: "ext4")
    assert not system.is_remote(tmp_path)


# --- a huge backlog ----------------------------------------------------------------------------------------------------

OPENING = """
import sys, threading, time
from pathlib import Path
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.payload import encode_batch

class Silent:
    def stored(self, items): pass
    def disk_trouble(self, reason): raise AssertionError(reason)
    def noticed(self, notice): pass

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])

before = resident()
begun = time.monotonic()
buffer = Buffer(Path(sys.argv[1]), BufferLimits(), Silent())
buffer.start()
opened = time.monotonic() - begun
batch = encode_batch([{"n": 1}])
accepted, stored = Accepted("c_99999999", [batch]), threading.Event()
buffer.put(accepted, batch.size)
accepted.when_stored(stored.set)
stored.wait()
appended = time.monotonic() - begun

def look(spools):
    lanes = spools.own.lanes()
    return [len(spools.next_request(lane, batches_max=250, items_max=250, bytes_max=1 << 20)) for lane in lanes[:50]]

requests = buffer.run(look).result()
looked = time.monotonic() - begun
assert all(requests)
rss = resident() - before
print(opened, appended, looked, rss, flush=True)
buffer.close(20)
"""


def huge(directory: Path, rows: int, size: int) -> None:
    """A spool with many batches that wait, left as by a kill: its mark says that it was not closed."""
    path = directory / "0000000000000001-00000000.db"
    held = Spool.open(path, None)
    held._db.execute("PRAGMA synchronous = OFF")
    bodies = [encode_batch([{"n": number, "text": "x" * size}]) for number in range(10)]
    for start in range(0, rows, 10_000):
        held.begin()
        held.store(
            [
                NewRow(number + 1, f"c_{number % 1000:08}", 1, bodies[number % 10].size, bodies[number % 10].body)
                for number in range(start, min(rows, start + 10_000))
            ]
        )
        held.commit()
    held.let_go()


def open_huge(tmp_path: Path, rows: int) -> tuple[float, float, float, int]:
    huge(tmp_path, rows, 2_000)
    done = subprocess.run(
        [sys.executable, "-c", OPENING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    opened, appended, looked, rss = done.stdout.split()
    print(f"{rows} rows: open {opened} s, first append stored {appended} s, 50 requests {looked} s, memory {rss} KiB")
    return float(opened), float(appended), float(looked), int(rss)


def test_a_large_backlog_is_opened_at_once_and_read_only_as_it_is_sent(tmp_path: Path) -> None:
    """20,000 batches, 40 MB: what is sent next is read, and nothing else."""
    if not Path("/proc/self/status").exists():
        pytest.skip("memory is measured by /proc")
    opened, _, _, rss = open_huge(tmp_path, 20_000)
    assert opened < 0.5
    assert rss < 60 * 1024


@pytest.mark.slow
def test_a_huge_backlog_is_opened_at_once_and_read_only_as_it_is_sent(tmp_path: Path) -> None:
    """300,000 batches, 620 MB, after a kill: the long form."""
    opened, _, _, rss = open_huge(tmp_path, 300_000)
    assert opened < 0.5
    assert rss < 60 * 1024


def test_the_oldest_batch_is_known_without_reading_the_rest(tmp_path: Path) -> None:
    """For how long the oldest waits: the health of a log at one look."""
    held = Spool.open(tmp_path / "a.db", None)
    plan = held._db.execute("EXPLAIN QUERY PLAN SELECT stored_at FROM pending ORDER BY id LIMIT 1").fetchall()
    assert "TEMP B-TREE" not in str(plan)
    assert held.oldest_pending() is None
    held.close()
    assert sqlite3.sqlite_version_info >= (3, 35)
