"""A disk that is full, broken or read-only: what is stored goes out, what is accepted waits, nothing spins."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from books import QUICK, warnings_of

import memlog.sync
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.errors import BufferFullError, BufferUnusableError
from memlog.payload import encode_batch
from memlog.reserve import RESERVE_BYTES, Reserve
from memlog.schema import wal_of
from memlog.spool import Spool
from memlog.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memlog.directory import Spools
    from memlog.sync import SyncMemoryLog
    from memlog.testing import ReferenceServer

resource = pytest.importorskip("resource")

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
    why_not = command_fails("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place))
    if why_not:
        pytest.skip(f"a small disk cannot be mounted here: {why_not}")
    yield place
    assert command_fails("umount", "-l", str(place)) is None


def command_fails(*command: str) -> str | None:
    """Why the command failed, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or f"{command[0]} failed") if done.returncode else None


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


def assert_patient(attempts: list[float]) -> None:
    """Those to store something were made seldom and ever seldomer, whatever was asked of the buffer meanwhile."""
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert all(pause >= 0.9 * min(0.05 * 2**n, 2.0) for n, pause in enumerate(pauses)), pauses


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
        assert len(waiting.places) == 20 + len(taken)
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
        assert_patient(attempts)
        assert stored.result(PATIENCE)
        assert numbers(buffer) == list(range(6))
        until(lambda: len(told.trouble) == 2)
        assert told.trouble[1] is None
    finally:
        assert buffer.close(PATIENCE)


def test_that_the_disk_is_full_is_told_before_appends_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever meets BufferFullError finds the reason in the events; it came after what had just been refused."""
    told = Told()
    buffer = opened(tmp_path, told)
    try:
        wait(put(buffer, 0))
        known: list[int] = []
        make_room, commit = Writer._make_room, Spool.commit

        def making_room(writer: Writer) -> None:
            known.append(len(told.trouble))
            make_room(writer)

        def full_once(spool: Spool) -> None:
            if spool._db.in_transaction and not known:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            commit(spool)

        monkeypatch.setattr(Writer, "_make_room", making_room)
        monkeypatch.setattr(Spool, "commit", full_once)
        wait(put(buffer, 1))
        assert known == [1]
    finally:
        assert buffer.close(PATIENCE)


class Attempts:
    """When the disk was asked to commit something, from `begin` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[float] = []
        real = Spool.commit

        def commit(spool: Spool) -> None:
            if spool._db.in_transaction:
                self.at.append(time.monotonic())
            real(spool)

        monkeypatch.setattr(Spool, "commit", commit)


def break_by_limit(log: SyncMemoryLog) -> None:
    """From here on no file of this process may grow beyond the size that the WAL has now."""
    size = wal_of(log._log._core.buffer.spool_path).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def mend_limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_writes_that_fail_under_a_running_log_are_waited_out(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system refuses them with an error of its own: one warning, reads and appends go on, nothing is lost."""
    attempts = Attempts(monkeypatch)
    log = memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK)
    chat = log.conversation(LANE)
    try:
        chat.append({"n": 0, "text": "x" * 20_000}).acknowledged(PATIENCE)
        break_by_limit(log)
        attempts.at.clear()
        receipts = [chat.append({"n": n, "text": "x" * 20_000}) for n in range(1, 6)]
        until(lambda: warnings_of(caplog))
        before = time.process_time()
        until(lambda: len(attempts.at) > 5)
        assert time.process_time() - before < 0.5  # of the second and a half that this takes
        assert [item.payload["n"] for item in chat.replay()] == list(range(6))  # five of them only in memory
        assert not any(receipt._receipt.is_stored() for receipt in receipts)
        mend_limit()
        for receipt in receipts:
            receipt.acknowledged(PATIENCE)
        assert_patient(attempts.at[:6])
        assert log.flush(PATIENCE).complete
        assert [item.payload["n"] for item in chat.replay()] == list(range(6))
        [warning] = warnings_of(caplog)
        assert "the disk takes no commits" in warning.getMessage()
    finally:
        mend_limit()
        log.close()


def test_a_disk_that_the_kernel_makes_read_only_under_a_running_log_keeps_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an error in a file system. It is writable again only after it was unmounted, so the log is opened anew."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * 1024 * 1024)
    mount = ("mount", "-o", "loop,errors=remount-ro", str(image), str(place))
    why_not = command_fails("mkfs.ext4", "-q", str(image)) or command_fails(*mount)
    if why_not:
        pytest.skip(f"a disk cannot be mounted here: {why_not}")
    told, attempts = Told(), Attempts(monkeypatch)
    try:
        [device] = [line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(place) in line]
        trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
        if not os.access(trigger, os.W_OK):
            pytest.skip("this kernel makes no errors to order")
        buffer = opened(place, told)
        wait(put(buffer, 0))
        until(lambda: reserve_of(place).exists())
        trigger.write_text("a test")
        attempts.at.clear()
        taken = [put(buffer, number) for number in range(1, 6)]
        until(lambda: len(attempts.at) > 5)
        assert_patient(attempts.at)
        assert len(told.trouble) == 1
        assert numbers(buffer) == [0]
        assert not any(accepted.is_stored() for accepted in taken)
        assert buffer.close(PATIENCE / 10)  # it gives up in time
        for accepted in taken:
            with pytest.raises(BufferUnusableError):
                accepted.is_stored()
        assert command_fails("umount", str(place)) is None
        assert command_fails(*mount) is None
        buffer = opened(place, told)
        assert numbers(buffer) == [0]
        wait(put(buffer, 6))
        assert buffer.close(PATIENCE)
    finally:
        command_fails("umount", "-l", str(place))


def test_a_directory_that_is_read_only_when_it_is_opened_is_refused(small_disk: Path) -> None:
    """And used again when it is writable again."""
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


def test_who_may_not_mount_does_so_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    """Else nearly all of this would be skipped where tests do not run as root."""
    if command_fails("mount", "-t", "tmpfs", "tmpfs", str(tmp_path)) is None:
        command_fails("umount", str(tmp_path))
        pytest.skip("no need for one here")
    why_not = command_fails("unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    if why_not:
        pytest.skip(f"a namespace is not to be had here: {why_not}")
    program = ["unshare", "-Urm", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*program, "--basetemp", str(tmp_path / "inside"), "-k", "full or room or again or fit"],
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout


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
