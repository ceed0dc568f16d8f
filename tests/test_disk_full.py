"""A disk that is full, broken or read-only: what is stored goes out, what is accepted waits, nothing spins."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.errors import BufferFullError, BufferUnusableError
from memlog.payload import encode_batch
from memlog.reserve import RESERVE_BYTES, Reserve
from memlog.schema import wal_of
from memlog.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memlog.directory import Spools

PATIENCE = 20.0
LANE = "c_11111111"


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.trouble: list[str | None] = []

    def stored(self, items: dict[str, int]) -> None:
        pass

    def disk_trouble(self, reason: str | None) -> None:
        self.trouble.append(reason)

    def noticed(self, notice: Any) -> None:
        pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], timeout=PATIENCE, check=True)


def opened(directory: Path, told: Told | None = None) -> Buffer:
    buffer = Buffer(directory, BufferLimits(), told or Told())
    buffer.start()
    return buffer


def put(buffer: Buffer, number: int, filler: int = 20_000) -> Accepted:
    batch = encode_batch([{"n": number, "text": "x" * filler}])
    accepted = Accepted(LANE, [batch])
    buffer.put(accepted, batch.size)
    return accepted


def wait(accepted: Accepted) -> None:
    stored = threading.Event()
    accepted.when_stored(stored.set)
    assert stored.wait(PATIENCE)
    assert accepted.is_stored()


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def fill_disk(place: Path) -> Path:
    """What somebody else puts on the disk, to the last byte."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65_536, 4096, 512):
            try:
                while True:
                    file.write(b"\1" * size)
            except OSError:
                pass
    return filler


def acknowledge_first(buffer: Buffer, count: int) -> None:
    def write(spools: Spools) -> None:
        spools.own.begin()
        spools.own.acknowledge(list(spools.own.pending(LANE))[:count], 0)

    buffer.run(write, writes=True).result(PATIENCE)


def numbers(buffer: Buffer) -> list[int]:
    def read(spools: Spools) -> list[int]:
        return [int(row.body[5 : row.body.index(b",")]) for row in spools.own.pending(LANE)]

    return buffer.run(read).result(PATIENCE)


def reserve_of(place: Path) -> Path:
    [path] = place.glob("*.db")
    return path.with_suffix(".reserve")


def test_on_a_full_disk_acknowledgements_go_through_and_then_appends_again(small_disk: Path) -> None:
    """The reserve lets the first ones through; what they free makes room for more; then the reserve is made again."""
    told = Told()
    buffer = opened(small_disk, told)
    try:
        for number in range(20):
            wait(put(buffer, number))
        until(lambda: reserve_of(small_disk).exists() and reserve_of(small_disk).stat().st_size == RESERVE_BYTES)
        filler = fill_disk(small_disk)
        taken, refused = [], None
        for number in range(20, 400):
            try:
                taken.append(put(buffer, number))
            except BufferFullError as error:
                refused = error
                break
            time.sleep(0.002)
        assert refused is not None
        assert refused.what == "device"
        assert told.trouble[0] is not None
        assert "SQLITE_FULL" in told.trouble[0]
        # Reading goes on, and what was accepted is not forgotten by those who ask.
        stored = numbers(buffer)
        assert stored[:20] == list(range(20))
        waiting = buffer.run(lambda spools: spools.waiting(LANE, 0)).result(PATIENCE)
        assert waiting is not None
        assert len(waiting[1]) == 20 + len(taken)
        # The sender drains; each of these is a transaction of its own on a disk without a free byte.
        for _ in range(10):
            acknowledge_first(buffer, 2)
        assert buffer.books.acknowledged_batches == 20
        filler.unlink()
        for accepted in taken:
            wait(accepted)
        assert numbers(buffer) == list(range(20, 20 + len(taken)))
        until(lambda: told.trouble[-1] is None)
        wait(put(buffer, 1000))
        until(lambda: reserve_of(small_disk).exists())
        assert len(told.trouble) == 2
    finally:
        assert buffer.close(PATIENCE)


def test_what_the_acknowledgements_free_lets_appends_in_again_by_itself(small_disk: Path) -> None:
    """Nobody has to tidy up: the backlog itself was what filled the disk."""
    told = Told()
    buffer = opened(small_disk, told)
    try:
        until(lambda: reserve_of(small_disk).exists())
        number = 0
        with pytest.raises(BufferFullError):
            for number in range(1000):
                put(buffer, number)
                time.sleep(0.002)

        def drained() -> bool:
            acknowledge_first(buffer, 10)
            return not buffer.books.pending_batches and not buffer.unstored_bytes

        until(drained)
        until(lambda: told.trouble[-1] is None)
        wait(put(buffer, number))
        assert numbers(buffer) == [number]
        assert buffer.books.stored_batches == number + 1  # the one that was refused comes in only now
    finally:
        assert buffer.close(PATIENCE)


def test_a_full_disk_is_opened_all_the_same_and_what_waits_can_be_sent(small_disk: Path) -> None:
    """A program that is restarted in the middle of it must not lose its way out."""
    buffer = opened(small_disk)
    for number in range(10):
        wait(put(buffer, number))
    until(lambda: reserve_of(small_disk).exists())
    assert buffer.close(PATIENCE)
    fill_disk(small_disk)
    buffer = opened(small_disk)
    try:
        assert numbers(buffer) == list(range(10))
        acknowledge_first(buffer, 10)
        assert numbers(buffer) == []
    finally:
        assert buffer.close(PATIENCE)


def test_waiting_for_a_full_disk_takes_no_processor(small_disk: Path) -> None:
    """A second of it costs less than a tenth of one."""
    buffer = opened(small_disk)
    try:
        wait(put(buffer, 0))
        fill_disk(small_disk)
        put(buffer, 1, filler=1_000_000 // 4)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.1
    finally:
        buffer.close(0.2)


@pytest.mark.parametrize("name", ["SQLITE_IOERR_WRITE", "SQLITE_READONLY", "SQLITE_CANTOPEN"])
def test_a_disk_that_refuses_everything_is_waited_for_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As after an I/O error or a remount as read-only: told once, and all is there when it is over."""
    told = Told()
    buffer = opened(tmp_path, told)
    try:
        wait(put(buffer, 0))
        broken, attempts, real = threading.Event(), [], Spool.commit

        def commit(spool: Spool) -> None:
            if broken.is_set() and spool._db.in_transaction:
                attempts.append(time.monotonic())
                error = sqlite3.OperationalError("the disk says no")
                error.sqlite_errorname = name
                raise error
            real(spool)

        monkeypatch.setattr(Spool, "commit", commit)
        broken.set()
        taken = [put(buffer, number) for number in range(1, 6)]
        until(lambda: told.trouble)
        assert numbers(buffer) == [0]
        assert not any(accepted.is_stored() for accepted in taken)
        marks = buffer.run(lambda spools: spools.marks()).result(PATIENCE)
        assert not buffer.run(lambda spools: spools.drained_to(marks)).result(PATIENCE)
        assert (
            buffer.run(lambda spools: spools.outcome(taken[0].spool_name, taken[0].first_id)).result(PATIENCE) is None
        )
        stored = buffer.run(lambda spools: spools.marks(), after_puts=True)
        broken.clear()
        for accepted in taken:
            wait(accepted)
        assert stored.result(PATIENCE)
        assert numbers(buffer) == list(range(6))
        until(lambda: len(told.trouble) == 2)
        assert told.trouble[1] is None
    finally:
        assert buffer.close(PATIENCE)


def test_a_directory_that_was_made_read_only_is_trouble_and_not_the_end(small_disk: Path) -> None:
    """A real remount, while the file is open."""
    told = Told()
    buffer = opened(small_disk, told)
    wait(put(buffer, 0))
    until(lambda: reserve_of(small_disk).exists())
    assert buffer.close(PATIENCE)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=PATIENCE, check=True)
    with pytest.raises(BufferUnusableError):
        opened(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], timeout=PATIENCE, check=True)
    buffer = opened(small_disk)
    assert numbers(buffer) == [0]
    assert buffer.close(PATIENCE)


# --- the reserve -----------------------------------------------------------------------------------------------------


def test_the_reserve_takes_real_room_and_gives_it_back(tmp_path: Path) -> None:
    """Not a hole, not compressible, private; and made anew only where it is not whole."""
    reserve = Reserve(tmp_path / "x.reserve")
    assert reserve.make()
    found = reserve.path.stat()
    assert found.st_size == RESERVE_BYTES
    assert found.st_blocks * 512 >= RESERVE_BYTES
    assert found.st_mode & 0o777 == 0o600
    again = Reserve(reserve.path)
    assert again.make()
    assert reserve.path.stat().st_ino == found.st_ino
    reserve.path.write_bytes(b"short")
    assert Reserve(reserve.path).make()
    assert reserve.path.stat().st_size == RESERVE_BYTES
    assert reserve.drop()
    assert not reserve.drop()
    assert not reserve.path.exists()


def test_a_reserve_that_does_not_fit_leaves_nothing_behind(small_disk: Path) -> None:
    """Half of one would be in the way."""
    filler = fill_disk(small_disk)
    os.truncate(filler, filler.stat().st_size - RESERVE_BYTES // 2)
    reserve = Reserve(small_disk / "x.reserve")
    assert not reserve.make()
    assert not reserve.path.exists()
    assert wal_of(reserve.path).exists() is False
