"""Spools that others left: found while running, sent in order, and removed when they are empty, with their sums kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from books import PATIENCE, QUICK, contents

from memlog import directory as directory_module
from memlog import ledger, open_log, writer
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.directory import Adopted
from memlog.errors import ClosedError
from memlog.payload import encode_batch
from memlog.spool import Books, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memlog.directory import Spools
    from memlog.testing import ReferenceServer

APPENDER = Path(__file__).parent / "crash" / "appender.py"
LANE = "c_11111111"


class Told:
    """A listener that remembers, in order."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    @property
    def adopted(self) -> list[Adopted]:
        return [notice for notice in self.all if isinstance(notice, Adopted)]

    def stored(self, items: dict[str, int]) -> None:
        self.all.append(set(items))

    def disk_trouble(self, reason: str | None) -> None:
        self.all.append(reason)

    def noticed(self, notice: Any) -> None:
        self.all.append(notice)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Buffer]]:
    """Makes started buffers in `tmp_path`, which look round when a test says so, and closes what is left."""
    monkeypatch.setattr(writer, "SCAN_SECONDS", 3600.0)
    made: list[Buffer] = []

    def make(told: Told | None = None) -> Buffer:
        buffer = Buffer(tmp_path, BufferLimits(), told or Told())
        buffer.start()
        made.append(buffer)
        return buffer

    yield make
    for buffer in made:
        buffer.close(PATIENCE)


def put(buffer: Buffer, number: Any, conversation: str = LANE) -> Accepted:
    batch = encode_batch([{"n": number}])
    accepted, stored = Accepted(conversation, [batch]), threading.Event()
    buffer.put(accepted, batch.size)
    accepted.when_stored(stored.set)
    assert stored.wait(PATIENCE)
    return accepted


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def bodies(buffer: Buffer) -> list[bytes]:
    def read(spools: Spools) -> list[bytes]:
        found = spools.bodies(spools.waiting(LANE, 0).places)
        return [body for body in found if isinstance(body, bytes)]

    return buffer.run(read).result(PATIENCE)


def acknowledge_all(buffer: Buffer, first_seq: int = 0) -> None:
    def write(spools: Spools) -> None:
        for spool in spools:
            spool.begin()
            for conversation in spool.lanes():
                spool.acknowledge(list(spool.pending(conversation)), first_seq)

    buffer.run(write, writes=True).result(PATIENCE)


# --- found while running -----------------------------------------------------------------------------------------------


def test_what_a_process_leaves_is_adopted_within_seconds_by_one_that_runs(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to be restarted for it."""
    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.05)
    told = Told()
    lives, dies = make(told), make()
    put(lives, "mine")
    put(dies, "theirs")
    assert told.adopted == []
    assert dies.close(PATIENCE)
    until(lambda: told.adopted)
    [notice] = told.adopted
    assert (notice.path, notice.items, notice.conversations) == (dies_path(notice), 1, frozenset({LANE}))
    assert lives.spools_held == 2
    assert len(bodies(lives)) == 2
    assert lives.books.pending_items == 2


def dies_path(notice: Adopted) -> Path:
    assert notice.path.exists()
    return notice.path


def test_an_orphan_is_found_before_the_first_batch_of_a_conversation_goes_out(make: Any) -> None:
    """However long it is until the next look round: the older batch must be sent first."""
    told = Told()
    lives, dies = make(told), make()
    put(dies, "old")
    assert dies.close(PATIENCE)
    time.sleep(2 * writer._SCAN_SECONDS_MIN)
    put(lives, "new")
    until(lambda: {LANE} in told.all)
    # Adopted is told first, so that the sender knows all of it when it begins.
    assert [type(notice) for notice in told.all] == [Adopted, set]
    assert [body.decode() for body in bodies(lives)] == ['{"n":"old"}', '{"n":"new"}']


def test_many_new_conversations_do_not_mean_as_many_looks_round(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What died since the last look, a moment ago, is found by the next one."""
    buffer = make()
    put(buffer, 0)
    looks: list[float] = []
    real = directory_module.Spools.scan

    def scan(spools: Spools) -> Any:
        looks.append(time.monotonic())
        return real(spools)

    monkeypatch.setattr(directory_module.Spools, "scan", scan)
    begun = time.monotonic()
    for number in range(200):
        put(buffer, number, f"c_{number:08}")
    assert len(looks) <= 2 + (time.monotonic() - begun) / writer._SCAN_SECONDS_MIN


def test_a_suspended_owner_keeps_its_spool(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernel locks know no age: who is frozen for minutes wakes up as the owner."""

    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.02)
    owner = Path(__file__).parent / "crash" / "owner.py"
    with subprocess.Popen(
        [sys.executable, str(owner), str(tmp_path), "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        os.kill(other.pid, signal.SIGSTOP)
        told = Told()
        buffer = make(told)
        scans = [buffer._writer._scanned_at]
        until(lambda: scans.append(buffer._writer._scanned_at) or len(set(scans)) > 5)
        assert told.adopted == []
        os.kill(other.pid, signal.SIGCONT)
        other.kill()
        other.wait(PATIENCE)
        until(lambda: told.adopted)
    assert len(bodies(buffer)) == 3


def test_order_within_a_spool_is_kept_when_it_comes_to_the_newer_batches_of_another(make: Any) -> None:
    """A request holds rows of one spool only, the oldest first; the adopter's newer ones wait their turn."""
    lives, dies = make(), make()
    for number in range(3):
        put(dies, f"old {number}")
    put(lives, "new")
    assert dies.close(PATIENCE)
    lives.run(lambda spools: spools.scan()).result(PATIENCE)  # if it did not do so by itself
    assert lives.run(lambda spools: len(spools.adopted)).result(PATIENCE) == 1

    def request(spools: Spools) -> list[str]:
        rows = spools.next_request(LANE, batches_max=10, items_max=250, bytes_max=10_000)
        assert all(row.id < row.spool.opened_at for row in rows)  # may have been sent: suspect
        return [row.body.decode() for row in rows]

    assert lives.run(request).result(PATIENCE) == ['{"n":"old 0"}', '{"n":"old 1"}', '{"n":"old 2"}']


# --- given back, removed -----------------------------------------------------------------------------------------------


def test_the_outcome_of_a_spool_that_was_given_back_can_still_be_asked_for(make: Any) -> None:
    """Its file stays for an hour, and is read from outside."""
    lives, dies = make(), make()
    accepted = put(dies, 1)
    assert dies.close(PATIENCE)
    lives.run(lambda spools: spools.scan()).result(PATIENCE)
    acknowledge_all(lives, first_seq=5)
    until(lambda: lives.spools_held == 1)
    where = (accepted.spool_name, accepted.first_id)
    assert lives.run(lambda spools: spools.outcome(*where)).result(PATIENCE) == (5, 5)
    with pytest.raises(ClosedError):
        lives.run(lambda spools: spools.outcome("elsewhere", 1)).result(PATIENCE)


def test_a_drained_spool_is_removed_after_an_hour_and_its_sums_go_to_the_ledger(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short-lived processes must not fill the directory with empty files; the site's sums never go back."""
    lives, dies = make(), make()
    put(dies, 1)
    put(dies, 2)
    path = dies.spool_path
    acknowledge_all(dies)
    assert dies.close(PATIENCE)
    lives.run(lambda spools: spools.scan()).result(PATIENCE)
    assert path.exists()
    assert ledger.totals(tmp_path) == Books()
    os.utime(path, (time.time() - 7200, time.time() - 7200))
    lives.run(lambda spools: spools.scan()).result(PATIENCE)
    assert not path.exists()
    assert list(tmp_path.glob(f"{path.stem}*")) == []
    found = ledger.totals(tmp_path)
    assert (found.stored_items, found.acknowledged_items, found.pending_items) == (2, 2, 0)
    assert lives.spool_path.exists()  # the own one is never removed, however old
    os.utime(lives.spool_path, (1, 1))
    lives.run(lambda spools: spools.scan()).result(PATIENCE)
    assert lives.spool_path.exists()


def test_a_spool_that_still_holds_something_is_never_removed(make: Any, tmp_path: Path) -> None:
    """Neither with something pending nor with a dead letter, however old."""
    first = make()
    put(first, 1)
    path = first.spool_path
    assert first.close(PATIENCE)
    os.utime(path, (1, 1))
    second = make()
    assert len(bodies(second)) == 1
    assert second.spool_path == path


def test_sums_are_counted_once_whatever_is_cut_off(tmp_path: Path) -> None:
    """Between the ledger and the removal of the file it may end, and begins anew with the same name."""
    file = tmp_path / "a.db"
    file.touch()
    books = Books(stored_items=3, acknowledged_items=3)
    assert ledger.enter(tmp_path, "a", "a.db", books)
    assert ledger.totals(tmp_path).stored_items == 0  # it is still there, and counts itself
    assert ledger.enter(tmp_path, "a", "a.db", books)
    file.unlink()
    assert ledger.totals(tmp_path).stored_items == 3
    assert ledger.enter(tmp_path, "b", "b.db", Books(stored_items=1, acknowledged_items=1))
    assert ledger.enter(tmp_path, "c", "c.db", Books(stored_items=1, acknowledged_items=1))
    assert ledger.totals(tmp_path).stored_items == 5


def test_a_damaged_ledger_is_set_aside(tmp_path: Path) -> None:
    """Sums are worth a note, and not worth stopping for."""
    (tmp_path / "ledger.json").write_text('{"total": [')
    assert ledger.enter(tmp_path, "a", "a.db", Books(stored_items=1, acknowledged_items=1))
    assert ledger.totals(tmp_path).stored_items == 1
    assert len(list(tmp_path.glob("ledger.json.corrupt-*"))) == 1


def test_what_was_given_back_and_is_adopted_again_counts_once(make: Any) -> None:
    """A dead letter that is requeued from outside brings a spool back."""
    lives, dies = make(), make()
    put(dies, 1)
    assert dies.close(PATIENCE)
    lives.run(lambda spools: spools.scan()).result(PATIENCE)
    acknowledge_all(lives)
    until(lambda: lives.spools_held == 1)
    assert lives.books.stored_items == 1
    again = make()
    put(again, 2)
    assert again.close(PATIENCE)
    lives.run(lambda spools: spools.scan()).result(PATIENCE)
    put(lives, 3)
    assert (lives.books.stored_items, lives.books.pending_items) == (3, 2)


# --- over the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_work_of_a_killed_process_is_delivered_by_its_neighbour(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds, in order, once; the neighbour says so in an event."""

    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.1)
    events: list[Any] = []
    with anyio.fail_after(3 * PATIENCE):
        async with open_log(
            server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, on_event=events.append
        ) as log:
            await log.conversation("c_neighbour").append({"n": 0}).acknowledged()
            server.stop()
            command = [sys.executable, str(APPENDER), server.url, str(tmp_path), "abcdefgh", "20"]
            done = await anyio.run_process([*command], check=False)
            assert b"stored 19" in done.stdout
            server.start()
            while len(await contents(server)) < 3:
                await anyio.sleep(0.05)
            assert (await log.flush(PATIENCE)).complete
            held = await contents(server)
            for lane in (0, 1):
                expected = [f'{{"by":"abcdefgh","n":{n},"i":0}}' for n in range(20) if n % 2 == lane]
                assert held[f"c_abcdefgh{lane}"] == expected
            assert sum(event.items for event in events if event.kind == "adopted") == 20
            assert log.statistics().pending_items == 0
    assert all(books is None or books.pending_items == 0 for books in map(peek, tmp_path.glob("*/*.db")))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_orphan_adopted_while_a_newer_batch_of_its_conversation_is_in_flight_keeps_its_order(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request under way is resolved first; then what is older, in its order; then what was appended since."""
    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.05)
    lane = "c_abcdefgh0"
    events: list[Any] = []
    server.stop()
    # It stays in its flush, and is frozen there: it owns its spool, and sends nothing.
    command = [sys.executable, str(APPENDER), server.url, str(tmp_path), "abcdefgh", "20", "1", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        while b"stored 19" not in other.stdout.readline():
            pass
        os.kill(other.pid, signal.SIGSTOP)
        server.start()
        with anyio.fail_after(3 * PATIENCE):
            async with open_log(
                server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, on_event=events.append
            ) as log:
                server.faults.add("stall", tool="append_memory", when="after", seconds=1.5)
                chat = log.conversation(lane)
                first = chat.append({"new": 0})
                while not (await contents(server)).get(lane):
                    await anyio.sleep(0.01)
                other.kill()
                while "adopted" not in [event.kind for event in events]:
                    await anyio.sleep(0.01)
                assert log.statistics().requests_in_flight >= 1
                chat.append({"new": 1})
                assert (await first.acknowledged(PATIENCE)).first_seq == 0
                assert (await log.flush(PATIENCE)).complete
                old = [f'{{"by":"abcdefgh","n":{n},"i":0}}' for n in range(0, 20, 2)]
                assert (await contents(server))[lane] == ['{"new":0}', *old, '{"new":1}']
