"""The buffer: batches are taken at once, stored in groups, and never lost to a disk in trouble, a signal or a lock."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memlog import directory as directory_module
from memlog import system
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.directory import prepare_directory, site_directory
from memlog.errors import BufferFullError, BufferUnusableError, ClosedError
from memlog.payload import encode_batch
from memlog.spool import Spool
from memlog.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from memlog.directory import Spools

PATIENCE = 20.0
OWNER = Path(__file__).parent / "crash" / "owner.py"
LANE = "c_11111111"


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.conversations: list[set[str]] = []
        self.trouble: list[str | None] = []
        self.notices: list[Any] = []

    def stored(self, items: dict[str, int]) -> None:
        self.conversations.append(set(items))

    def disk_trouble(self, reason: str | None) -> None:
        self.trouble.append(reason)

    def noticed(self, notice: Any) -> None:
        self.notices.append(notice)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Buffer]]:
    """Makes started buffers, in `tmp_path` unless told otherwise, and closes what is left."""
    made: list[Buffer] = []

    def make(directory: Path | None = tmp_path, listener: Any = None, **limits: int) -> Buffer:
        buffer = Buffer(directory, BufferLimits(**limits), listener or Told())
        buffer.start()
        made.append(buffer)
        return buffer

    yield make
    for buffer in made:
        buffer.close(PATIENCE)


def put(buffer: Buffer, number: Any = 0, conversation: str = LANE, batches: int = 1, filler: str = "") -> Accepted:
    encoded = [encode_batch([{"n": number, "b": b, "filler": filler}]) for b in range(batches)]
    accepted = Accepted(conversation, encoded)
    buffer.put(accepted, sum(batch.size for batch in encoded))
    return accepted


def wait(accepted: Accepted) -> None:
    done = threading.Event()
    accepted.when_stored(done.set)
    assert done.wait(PATIENCE)
    assert accepted.is_stored()


def bodies(buffer: Buffer, conversation: str = LANE) -> list[bytes]:
    def read(spools: Spools) -> list[bytes]:
        return [row.body for spool in spools for row in spool.pending(conversation)]

    return buffer.run(read).result(PATIENCE)


def acknowledge_all(buffer: Buffer) -> None:
    def write(spools: Spools) -> None:
        for spool in spools:
            spool.begin()
            for conversation in spool.lanes():
                spool.acknowledge(list(spool.pending(conversation)), 0)

    buffer.run(write, writes=True).result(PATIENCE)


class Stalled:
    """Keeps the writer busy inside the block, so that whatever is put queues up."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.go, self.busy = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        def hold(_: Spools) -> None:
            self.busy.set()
            self.go.wait(PATIENCE)

        self.held = self.buffer.run(hold)
        assert self.busy.wait(PATIENCE)

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.held.result(PATIENCE)


def disk_error(name: str, text: str = "the disk says no") -> sqlite3.Error:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorname = name
    return error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Makes the next commits fail, of all spools or of one; returns the list of attempts."""

    def failing(name: str, times: int, *, when: Callable[[Spool], bool] = lambda _: True) -> list[int]:
        real, attempts = Spool.commit, []

        def commit(spool: Spool) -> None:
            if spool._db.in_transaction and when(spool):
                attempts.append(1)
                if len(attempts) <= times:
                    raise disk_error(name)
            real(spool)

        monkeypatch.setattr(Spool, "commit", commit)
        return attempts

    return failing


# --- storing ---------------------------------------------------------------------------------------------------------


def test_what_queues_up_is_committed_together_in_order(make: Any, failing: Any) -> None:
    """1,000 appends behind a stall cost a handful of syncs, and stand in the order in which they were made."""
    buffer = make()
    commits = failing("", 0)
    with Stalled(buffer):
        receipts = [put(buffer, n) for n in range(1000)]
        assert not any(receipt.is_stored() for receipt in receipts)
    wait(receipts[-1])
    assert all(receipt.is_stored() for receipt in receipts)
    assert len(commits) <= 1000 // 512 + 1
    assert bodies(buffer) == [encode_batch([{"n": n, "b": 0, "filler": ""}]).body for n in range(1000)]
    assert [receipt.first_id for receipt in receipts] == list(range(1, 1001))


def test_several_batches_of_one_append_are_committed_together(make: Any) -> None:
    """They get numbers in a row, and one receipt."""
    listener = Told()
    buffer = make(listener=listener)
    first, second = put(buffer, batches=3), put(buffer, 1, "c_22222222")
    wait(second)
    assert (first.first_id, first.count, second.first_id) == (1, 3, 4)
    assert len(bodies(buffer)) == 3
    assert set().union(*listener.conversations) == {LANE, "c_22222222"}
    assert first.batches is None  # the bytes are not kept in memory once they are on disk


def test_many_threads_may_put_at_once(make: Any) -> None:
    """Every batch once, and each thread's in its own order."""
    buffer = make()
    start = threading.Barrier(8)

    def work(name: int) -> None:
        start.wait(PATIENCE)
        for number in range(200):
            put(buffer, f"{name}:{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    found = [body.decode().split('"')[3] for body in bodies(buffer)]
    assert len(found) == len(set(found)) == 1600
    for name in range(8):
        assert [text for text in found if text.startswith(f"{name}:")] == [f"{name}:{n}" for n in range(200)]


def test_a_receipt_may_be_waited_for_from_many_threads(make: Any) -> None:
    """Nobody's wake-up is lost, whether asked for before, during or after the commit."""
    buffer = make()
    for _ in range(50):
        calls: list[int] = []
        with Stalled(buffer):
            accepted = put(buffer)
            threads = [
                threading.Thread(target=accepted.when_stored, args=(lambda calls=calls, n=n: calls.append(n),))
                for n in range(4)
            ]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        wait(accepted)
        assert set(calls) == set(range(4))


def test_an_append_may_interrupt_an_append_at_any_line(make: Any) -> None:
    """As a signal handler or a __del__ does: both are stored, each under a number of its own."""
    buffer = make()
    inner: list[Accepted] = []
    code = Buffer.put.__code__

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        if event in ("line", "return"):
            inner.append(put(buffer, f"inner {len(inner)}"))
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        outer = [put(buffer, f"outer {n}") for n in range(5)]
    finally:
        sys.settrace(old)
    assert len(inner) > 5 * 10
    for accepted in [*outer, *inner]:
        wait(accepted)
    numbers = [accepted.first_id for accepted in [*outer, *inner]]
    assert len(set(numbers)) == len(numbers) == len(bodies(buffer))


def test_a_signal_handler_may_append_while_its_thread_appends(make: Any) -> None:
    """A real signal, hundreds of times, in the thread that holds the buffer's lock."""
    buffer = make()
    inner: list[Accepted] = []
    old = signal.signal(signal.SIGALRM, lambda *_: inner.append(put(buffer, "inner")))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        outer = []
        end = time.monotonic() + PATIENCE
        while (len(inner) < 100 or len(outer) < 1000) and time.monotonic() < end:
            outer.append(put(buffer, "outer"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(inner) >= 100
    for accepted in [*outer, *inner]:
        wait(accepted)
    assert len(bodies(buffer)) == len(outer) + len(inner)


def test_a_finalizer_may_append(make: Any) -> None:
    """The collector runs __del__ wherever it likes, also inside an append."""
    buffer = make()
    made: list[Accepted] = []

    class Last:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            made.append(put(buffer, "last words"))

    for _ in range(100):
        Last()
        put(buffer, "outer")
    gc.collect()
    assert len(made) == 100
    for accepted in made:
        wait(accepted)
    assert len(bodies(buffer)) == 200


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_stalled_disk_fills_the_memory_up_to_a_limit_and_nothing_is_dropped(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller is told, the operator once; what was taken before is stored, and then there is room again."""
    buffer = make(unstored_bytes=10_000)
    with Stalled(buffer):
        taken = []
        with pytest.raises(BufferFullError) as caught:
            while True:
                taken.append(put(buffer, len(taken), filler="x" * 1000))
        with pytest.raises(BufferFullError):
            put(buffer, filler="x" * 1000)
        assert (caught.value.what, caught.value.limit) == ("unstored", 10_000)
        assert 8_000 < caught.value.bytes <= 10_000
        assert buffer.unstored_bytes == caught.value.bytes
    wait(taken[-1])
    assert len(bodies(buffer)) == len(taken) == 9
    assert buffer.unstored_bytes == 0
    wait(put(buffer, filler="x" * 1000))
    assert [record.levelname for record in caplog.records if "full" in record.getMessage()] == ["WARNING"]


def test_an_outage_fills_the_disk_up_to_a_limit(make: Any, tmp_path: Path) -> None:
    """Pending bytes count, those of an earlier process included; acknowledging makes room."""
    buffer = make(disk_bytes=10_000)
    with pytest.raises(BufferFullError, match="nothing of this append was stored") as caught:
        for number in range(100):
            wait(put(buffer, number, filler="x" * 1000))
    assert caught.value.what == "disk"
    before = len(bodies(buffer))
    buffer.close(PATIENCE)
    buffer = make(disk_bytes=10_000)
    with pytest.raises(BufferFullError):
        put(buffer, filler="x" * 2000)
    assert len(bodies(buffer)) == before
    acknowledge_all(buffer)
    wait(put(buffer, filler="x" * 1000))


def test_an_append_of_several_batches_is_wholly_in_or_wholly_out(make: Any) -> None:
    """Half an append would be half a turn of a conversation."""
    buffer = make(disk_bytes=5_000)
    with pytest.raises(BufferFullError):
        put(buffer, batches=6, filler="x" * 1000)
    assert bodies(buffer) == []
    wait(put(buffer, batches=4, filler="x" * 1000))


def test_a_buffer_in_memory_has_a_limit_too(make: Any) -> None:
    """It must not eat the process."""
    buffer = make(None, unstored_bytes=5_000)
    with pytest.raises(BufferFullError) as caught:
        for number in range(100):
            wait(put(buffer, number, filler="x" * 1000))
    assert (caught.value.what, caught.value.limit) == ("memory", 5_000)
    assert buffer.spool_path is None


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1"])
def test_limits_that_cannot_be_meant_are_refused_at_once(value: Any) -> None:
    """By name and value."""
    with pytest.raises(ValueError, match=f"unstored_bytes .*{value!r}"):
        BufferLimits(unstored_bytes=value)


# --- commands --------------------------------------------------------------------------------------------------------


def test_a_command_sees_all_that_was_put_before(make: Any) -> None:
    """Also what is still queued with it."""
    buffer = make()
    with Stalled(buffer):
        for number in range(10):
            put(buffer, number)
        count = buffer.run(lambda spools: spools.own.books.pending_batches)
    assert count.result(PATIENCE) == 10


def test_a_failing_command_hurts_only_itself(make: Any) -> None:
    """The rest of its group is stored and carried out, once."""
    buffer = make()

    def note(key: str) -> Callable[[Spools], None]:
        def write(spools: Spools) -> None:
            spools.own.begin()
            spools.own.note(key, 1)

        return write

    def fails(spools: Spools) -> None:
        spools.own.begin()
        spools.own.note("never", 1)
        raise LookupError("mine")

    with Stalled(buffer):
        accepted = put(buffer)
        commands = [buffer.run(what, writes=True) for what in (note("one"), fails, note("two"), fails)]
    wait(accepted)
    assert [type(command.exception(PATIENCE)) for command in commands] == [type(None), LookupError] * 2
    assert buffer.run(lambda s: [s.own.noted(key) for key in ("one", "two", "never")]).result(PATIENCE) == [1, 1, None]
    assert len(bodies(buffer)) == 1


def test_a_command_is_done_when_it_is_committed(make: Any, failing: Any) -> None:
    """Its future must not promise what the disk has not got."""
    buffer = make()
    failing("SQLITE_FULL", 3)
    seen: list[str] = []

    def write(spools: Spools) -> str:
        seen.append("ran")
        spools.own.begin()
        spools.own.note("key", "value")
        return "done"

    assert buffer.run(write, writes=True).result(PATIENCE) == "done"
    assert seen == ["ran"] * 4
    assert buffer.run(lambda spools: spools.own.noted("key")).result(PATIENCE) == "value"


def test_a_cancelled_command_is_not_carried_out_and_the_writer_goes_on(make: Any) -> None:
    """Cancelling a wait cancels its command, if that has not begun."""
    buffer = make()
    with Stalled(buffer):
        ran: list[int] = []
        commands: list[Future[None]] = [buffer.run(lambda _, n=n: ran.append(n), writes=bool(n % 2)) for n in range(4)]
        for command in commands:
            assert command.cancel()
    wait(put(buffer))
    assert ran == []


def test_a_read_that_the_disk_refuses_says_so_in_our_words(make: Any) -> None:
    """No caller has to know which database is underneath."""
    buffer = make()

    def read(_: Spools) -> None:
        raise disk_error("SQLITE_IOERR_READ")

    error = buffer.run(read).exception(PATIENCE)
    assert isinstance(error, BufferUnusableError)
    wait(put(buffer))


# --- a disk in trouble -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["SQLITE_IOERR_FSYNC", "SQLITE_READONLY", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_NOMEM"]
)
def test_a_disk_in_trouble_is_waited_for_told_once_and_nothing_is_lost(make: Any, failing: Any, name: str) -> None:
    """Appends go on meanwhile; then all is there, once, in order."""
    listener = Told()
    buffer = make(listener=listener)
    attempts = failing(name, 4)
    receipts = [put(buffer, n) for n in range(20)]
    wait(receipts[-1])
    assert len(attempts) > 4
    end = time.monotonic() + PATIENCE  # the receipts are told first
    while len(listener.trouble) < 2 and time.monotonic() < end:
        time.sleep(0.002)
    assert len(listener.trouble) == 2
    assert name in (listener.trouble[0] or "")
    assert listener.trouble[1] is None
    assert bodies(buffer) == [encode_batch([{"n": n, "b": 0, "filler": ""}]).body for n in range(20)]
    books = buffer.books
    assert (books.stored_items, books.pending_items) == (20, 20)


def test_trouble_with_an_adopted_spool_does_not_store_new_batches_twice(
    make: Any, failing: Any, tmp_path: Path
) -> None:
    """Each file commits by itself: what is already in one must not be put in again for the other's sake."""
    buffers = [make(), make()]
    for buffer in buffers:
        wait(put(buffer, "left"))
    for buffer in buffers:
        buffer.close(PATIENCE)
    buffer = make()
    adopted = buffer.run(lambda spools: spools.adopted[0]).result(PATIENCE)
    failing("SQLITE_FULL", 3, when=lambda spool: spool is adopted)

    def write(_: Spools) -> None:
        adopted.begin()
        adopted.acknowledge(list(adopted.pending(LANE)), 0)

    with Stalled(buffer):
        accepted = put(buffer, "new")
        command = buffer.run(write, writes=True)
    command.result(PATIENCE)
    wait(accepted)
    assert len(bodies(buffer)) == 2
    books = buffer.books
    assert (books.stored_items, books.pending_items, books.acknowledged_items) == (3, 2, 1)
    assert system.try_lock(adopted.path.with_suffix(".lock")) is not None  # it was drained, and given back


def test_a_file_found_damaged_while_it_is_used_is_replaced_and_nothing_stored_or_accepted_is_lost(
    make: Any, failing: Any, tmp_path: Path
) -> None:
    """Who waits does not notice; the damaged file is kept for a person to look at."""
    listener = Told()
    buffer = make(listener=listener)
    before = put(buffer, "before")
    wait(before)
    failing("SQLITE_CORRUPT", 1)
    with Stalled(buffer):
        after = put(buffer, "after")
    wait(after)
    assert after.first_id == before.first_id + 1
    assert bodies(buffer) == [encode_batch([{"n": n, "b": 0, "filler": ""}]).body for n in ("before", "after")]
    [notice] = listener.notices
    assert (notice.kept_items, notice.lost_items) == (1, 0)
    assert notice.aside.is_file()
    assert listener.trouble == []


def test_damage_that_comes_back_at_once_ends_the_buffer_with_an_error_for_everybody_who_waits(
    make: Any, failing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that spoils every fresh file is not to be written to, and saying nothing would be worse."""
    buffer = make()
    wait(put(buffer, "before"))
    failing("SQLITE_CORRUPT", 100)
    accepted = put(buffer)
    done = threading.Event()
    accepted.when_stored(done.set)
    assert done.wait(PATIENCE)
    with pytest.raises(BufferUnusableError, match="the disk says no"):
        accepted.is_stored()
    with pytest.raises(BufferUnusableError):
        put(buffer)
    assert isinstance(buffer.run(lambda _: None).exception(PATIENCE), BufferUnusableError)
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    assert buffer.close(PATIENCE)


def test_a_listener_that_fails_stops_nothing(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No thread or descriptor to be had for telling is no reason to stop storing."""

    class Broken(Told):
        def stored(self, items: dict[str, int]) -> None:
            raise OSError(24, "Too many open files")

    buffer = make(listener=Broken())
    for number in range(3):
        wait(put(buffer, number))
    assert len(bodies(buffer)) == 3
    assert "could not tell" in caplog.text


def test_a_defect_in_the_writer_is_reported_and_what_is_on_disk_stays_stored(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that dies in silence would leave everybody waiting for ever."""
    buffer = make()
    wait(before := put(buffer, "before"))
    monkeypatch.setattr(Spool, "store", lambda *_: 1 / 0)
    with Stalled(buffer):
        accepted, command = put(buffer), buffer.run(lambda _: None)
    done = threading.Event()
    accepted.when_stored(done.set)
    assert done.wait(PATIENCE)
    assert isinstance(command.exception(PATIENCE), BufferUnusableError)
    with pytest.raises(BufferUnusableError):
        accepted.is_stored()
    assert before.is_stored()
    assert "a defect in the buffer" in caplog.text


# --- the end ---------------------------------------------------------------------------------------------------------


def test_closing_stores_what_was_accepted(make: Any) -> None:
    """And only then gives the file up; afterwards nothing is taken."""
    buffer = make()
    receipts = [put(buffer, n) for n in range(500)]
    assert buffer.close(PATIENCE)
    assert all(receipt.is_stored() for receipt in receipts)
    with pytest.raises(ClosedError):
        put(buffer)
    with pytest.raises(ClosedError):
        buffer.run(lambda _: None)
    assert buffer.close(PATIENCE)
    assert len(bodies(make())) == 500


def test_closing_is_bounded_even_if_the_disk_never_answers(make: Any, failing: Any) -> None:
    """Whoever waits is told in the end; the process can go."""
    buffer = make()
    failing("SQLITE_IOERR", 10**6)
    accepted = put(buffer)
    started = time.monotonic()
    buffer.close(0.2)
    assert time.monotonic() - started < 5
    done = threading.Event()
    accepted.when_stored(done.set)
    assert done.wait(PATIENCE)
    with pytest.raises(BufferUnusableError):
        accepted.is_stored()


def test_closing_does_not_wait_for_a_stuck_command(make: Any) -> None:
    """It says that it was not done."""
    buffer = make()
    with Stalled(buffer):
        accepted = put(buffer)
        assert not buffer.close(0.1)
        assert not accepted.is_stored()
    wait(accepted)


# --- whose file it is ------------------------------------------------------------------------------------------------


def test_a_restart_finds_its_own_file_and_goes_on_behind_what_is_there(make: Any) -> None:
    """Same file, numbers go on, order is kept."""
    buffer = make()
    wait(put(buffer, "first"))
    path = buffer.spool_path
    buffer.close(PATIENCE)
    buffer = make()
    assert buffer.spool_path == path
    accepted = put(buffer, "second")
    wait(accepted)
    assert accepted.first_id == 2
    assert [b"first" in body for body in bodies(buffer)] == [True, False]


def test_the_oldest_free_spool_becomes_the_own_one_and_others_are_adopted_in_place(make: Any) -> None:
    """Nothing moves between files; an adopted one is given back when it is drained."""
    buffers = [make() for _ in range(3)]
    paths = [buffer.spool_path for buffer in buffers]
    assert paths == sorted(paths)
    for number, buffer in enumerate(buffers):
        wait(put(buffer, number))
        buffer.close(PATIENCE)
    buffer = make()
    held = buffer.run(lambda spools: [spool.path for spool in spools]).result(PATIENCE)
    assert held == paths
    other = make()
    assert other.spool_path not in paths
    acknowledge_all(buffer)
    wait(put(buffer, "behind"))
    held = buffer.run(lambda spools: [spool.path for spool in spools]).result(PATIENCE)
    assert held == paths[:1]
    assert buffer.books.acknowledged_items == 3
    third = make()
    assert third.spool_path == paths[1]


def test_a_free_spool_with_nothing_in_it_is_left_to_others(make: Any) -> None:
    """It is the next process's own, not a burden of this one."""
    buffers = [make() for _ in range(3)]
    paths = [buffer.spool_path for buffer in buffers]
    for buffer in buffers:
        buffer.close(PATIENCE)
    first, second = make(), make()
    assert [first.spool_path, second.spool_path] == paths[:2]


def test_another_process_gets_a_spool_of_its_own_and_a_killed_one_leaves_its_spool_at_once(
    make: Any, tmp_path: Path
) -> None:
    """The kernel holds the lock: no age, no heartbeat, no waiting."""
    with subprocess.Popen(
        [sys.executable, str(OWNER), str(tmp_path), "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = make()
        assert mine.spool_path != theirs
        assert bodies(mine) == []
        other.kill()
        other.wait(PATIENCE)
        heir = make()
    assert heir.spool_path == theirs
    assert len(bodies(heir)) == 5


def test_processes_that_start_at_once_never_share_a_file(tmp_path: Path) -> None:
    """Four owners of one directory with four spools to take up."""
    command = [sys.executable, str(OWNER), str(tmp_path)]
    for count in ("3", "3"):
        owners = [
            subprocess.Popen([*command, count], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        paths = [owner.stdout.readline().strip() for owner in owners if owner.stdout is not None]
        assert len(set(paths)) == 4
        for owner in owners:
            owner.communicate(timeout=PATIENCE)
            assert owner.returncode == 0


def test_a_lost_lock_file_is_made_again(make: Any, tmp_path: Path) -> None:
    """It holds nothing: somebody may have tidied up."""
    buffer = make()
    wait(put(buffer))
    path = buffer.spool_path
    buffer.close(PATIENCE)
    path.with_suffix(".lock").unlink()
    buffer = make()
    assert buffer.spool_path == path
    assert len(bodies(buffer)) == 1


def test_a_file_of_somebody_else_is_left_alone_and_appends_go_to_another(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One strange file must not stop an agent; the operator is told, once."""
    theirs = tmp_path / "0000.db"
    db = sqlite3.connect(theirs)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = theirs.read_bytes()
    buffer = make()
    wait(put(buffer))
    assert theirs.read_bytes() == before
    assert caplog.text.count(str(theirs)) <= 2
    assert "left alone" in caplog.text
    assert system.try_lock(theirs.with_suffix(".lock")) is not None


def test_an_opening_that_fails_half_way_keeps_no_lock(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next attempt of the same process would find its own files taken."""
    buffers = [make(), make()]
    for buffer in buffers:
        wait(put(buffer))
        buffer.close(PATIENCE)
    real, calls = directory_module._take, []

    def fails_at_the_second(path: Path, *rest: Any) -> Any:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(24, "Too many open files")
        return real(path, *rest)

    monkeypatch.setattr(directory_module, "_take", fails_at_the_second)
    with pytest.raises(BufferUnusableError, match="Too many open files"):
        make()
    monkeypatch.undo()
    held = make().run(lambda spools: [spool.path for spool in spools]).result(PATIENCE)
    assert held == [buffer.spool_path for buffer in buffers]


# --- the directory ---------------------------------------------------------------------------------------------------


def test_a_site_is_its_endpoint_and_user_never_its_password(tmp_path: Path) -> None:
    """Whatever is only spelled differently is the same site."""

    def key(url: str, user: str | None = "demo") -> Path:
        return site_directory(tmp_path, url, user)

    assert key("https://Host.example/mcp") == key("https://host.example:443/mcp/")
    distinct = [
        key("https://host.example/mcp"),
        key("http://host.example/mcp"),
        key("https://host.example:8443/mcp"),
        key("https://host.example/other"),
        key("https://other.example/mcp"),
        key("https://host.example/mcp", "else"),
        key("https://host.example/mcp", None),
    ]
    assert len(set(distinct)) == len(distinct)
    assert all(path.parent == tmp_path for path in distinct)


def prepared(directory: Path, url: str, user: str = "demo") -> Path:
    site = site_directory(directory, url, user)
    prepare_directory(directory, site, url, user)
    return site


def test_everything_in_the_directory_is_private(make: Any, tmp_path: Path) -> None:
    """0700 for directories, 0600 for files: conversations are nobody else's business."""
    old = os.umask(0)
    try:
        site = prepared(tmp_path / "memory", "https://host.example/mcp")
        buffer = make(site)
        wait(put(buffer))
    finally:
        os.umask(old)
    modes = {
        (entry.is_dir(), stat.S_IMODE(entry.stat().st_mode))
        for entry in [tmp_path / "memory", *(tmp_path / "memory").rglob("*")]
    }
    assert modes == {(True, 0o700), (False, 0o600)}


def warned_about_others(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "another site" in record.getMessage()]


def test_what_waits_for_another_site_is_told_once_with_the_way_to_send_it(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A changed URL or user must not strand a backlog in silence; a living owner is no news."""
    url = "https://old.example/mcp?key=hidden"
    buffer = make(prepared(tmp_path, url))
    for number in range(3):
        wait(put(buffer, number))
    prepared(tmp_path, "https://new.example/mcp")
    assert warned_about_others(caplog) == []
    buffer.close(PATIENCE)
    prepared(tmp_path, "https://new.example/mcp")
    [message] = warned_about_others(caplog)
    assert "3 item(s)" in message
    assert "'https://old.example/mcp'" in message
    assert "'demo'" in message
    assert "hidden" not in message
    caplog.clear()
    prepared(tmp_path, url)
    assert warned_about_others(caplog) == []


def test_what_a_killed_process_left_for_another_site_is_counted_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is only in the WAL, and stays there: a look changes nothing."""
    site = prepared(tmp_path, "https://old.example/mcp")
    with subprocess.Popen(
        [sys.executable, str(OWNER), str(site), "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        other.kill()
        other.wait(PATIENCE)
    before = path.read_bytes()
    prepared(tmp_path, "https://new.example/mcp")
    assert "4 item(s)" in warned_about_others(caplog)[0]
    assert path.read_bytes() == before


@pytest.mark.parametrize("what", ["file", "link to nowhere", "inside a file"])
def test_a_directory_that_cannot_be_one_is_an_error_at_the_opening(tmp_path: Path, what: str) -> None:
    """With the place and the reason."""
    place = tmp_path / "memory"
    if what == "link to nowhere":
        place.symlink_to(tmp_path / "nowhere" / "deep")
        (tmp_path / "nowhere").touch()
    else:
        place.touch()
    with pytest.raises(BufferUnusableError) as caught:
        prepared(place / "deeper" if what == "inside a file" else place, "https://host.example/mcp")
    assert str(place) in caught.value.path
    assert caught.value.reason


def test_a_place_that_does_not_last_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Items on a tmpfs are gone after a reboot, which is when they are needed."""
    monkeypatch.setattr(system, "why_not_durable", lambda _: "it is in memory (tmpfs) and gone at a reboot")
    prepared(tmp_path, "https://host.example/mcp")
    assert "may not last: it is in memory" in caplog.text


def test_retrying_a_stuck_disk_does_not_spin(make: Any, failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits double from 50 ms up to 2 s."""
    waits: list[float] = []

    def no_wait(writer: Writer) -> float | None:
        if writer._accepted:
            waits.append(writer._retry_at - time.monotonic())
            writer._retry_at = 0.0
            return 0.0
        return real(writer)

    real = Writer._patience
    buffer = make()
    wait(put(buffer))
    monkeypatch.setattr(Writer, "_patience", no_wait)
    attempts = failing("SQLITE_IOERR", 8)
    wait(put(buffer))
    assert [round(seconds, 1 if seconds > 0.07 else 2) for seconds in waits] == [
        0.05,
        0.1,
        0.2,
        0.4,
        0.8,
        1.6,
        2.0,
        2.0,
    ]
    assert len(attempts) >= 9
