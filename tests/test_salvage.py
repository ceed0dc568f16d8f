"""Damage: whatever happens to a spool file, opening is quick, appends work at once, and what is whole goes on."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from books import warnings_of

from memlog import directory as directory_module
from memlog import salvage as salvage_module
from memlog import writer as writer_module
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.directory import Adopted, Recounted
from memlog.errors import BufferUnusableError, InvalidRequestError, to_record
from memlog.pages import records
from memlog.payload import encode_batch
from memlog.salvage import Salvage, finish, salvage, unfinished
from memlog.schema import MIGRATIONS, connect, wal_of
from memlog.spool import Books, NewRow, Spool, peek

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.directory import Spools

PATIENCE = 20.0
OPEN_SECONDS = 2.0
LANES = ["c_11111111", "c_22222222", "c_33333333"]
REFUSED = to_record(InvalidRequestError("no", outcome="refused"))


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.notices: list[Any] = []

    def stored(self, items: dict[str, int]) -> None:
        pass

    def disk_trouble(self, reason: str | None) -> None:
        pass

    def noticed(self, notice: Any) -> None:
        self.notices.append(notice)


def new_row(number: int) -> NewRow:
    # Sizes from one that fits many to a page up to one that needs several pages.
    sizes = [10, 300, 5_000, 12_000]
    batch = encode_batch([{"n": number, "i": i, "text": "x" * sizes[number % 4]} for i in range(1 + number % 3)])
    return NewRow(number, LANES[number % 3], batch.items, batch.size, batch.body)


def fill(path: Path, *, clean: bool, batches: int = 60, settled: int = 2) -> dict[int, NewRow]:
    """A spool with a bit of everything; what is pending or refused in it, by number."""
    held = Spool.open(path, None)
    held._db.execute("PRAGMA secure_delete = OFF")  # some builds of SQLite wipe what is deleted, most leave it
    rows = [new_row(number) for number in range(1, batches + 1)]
    for row in rows:
        held.begin()
        held.store([row])
        held.commit()
    held.begin()
    gone: set[int] = set()
    for lane in LANES:
        *taken, letter = list(held.pending(lane))[: settled + 1]
        held.acknowledge(taken, 7)
        held.refuse([letter], REFUSED)
        held.note_lane(lane, sealed=False)
        held.note_duplicate(lane, 3, 4)
        gone |= {row.id for row in taken}
    held.commit()
    if clean:
        held.close()
    else:
        cut_off(held, path)
    return {row.id: row for row in rows if row.id not in gone}


def cut_off(held: Spool, path: Path) -> None:
    """Leave the files as a kill would: closing must not bring the WAL into the file."""
    files = [path, wal_of(path)]
    copies = [file.with_name(f"{file.name}.copy") for file in files]
    for file, copy in zip(files, copies, strict=True):
        shutil.copy(file, copy)
    held.close()
    for file, copy in zip(files, copies, strict=True):
        copy.replace(file)


def append_to(buffer: Buffer, text: str) -> None:
    """And wait until it is stored."""
    batch = encode_batch([{"text": text}])
    accepted, stored = Accepted("c_99999999", [batch]), threading.Event()
    buffer.put(accepted, batch.size)
    accepted.when_stored(stored.set)
    assert stored.wait(PATIENCE)
    assert accepted.is_stored()


class Found:
    """A directory opened as a program opens it: what is in it, and that it works."""

    def __init__(self, directory: Path) -> None:
        self.told = Told()
        self.buffer = Buffer(directory, BufferLimits(), self.told)
        begun = time.monotonic()
        self.buffer.start()
        self.opened_in = time.monotonic() - begun
        append_to(self.buffer, "after")
        self.rows, self.letters, self.books = self.buffer.run(self._look).result(PATIENCE)

    @staticmethod
    def _look(spools: Spools) -> tuple[dict[int, NewRow], dict[int, NewRow], list[Books]]:
        rows, letters = {}, {}
        for spool in spools:
            for lane in LANES:
                numbers = []
                for row in spool.pending(lane):
                    rows[row.id] = NewRow(row.id, row.conversation, row.items, row.size, row.body)
                    numbers.append(row.id)
                assert numbers == sorted(numbers)
            for row_id, conversation, items, size, _, _, body in spool.refused():
                letters[row_id] = NewRow(row_id, conversation, items, size, body)
        return rows, letters, [spool.books for spool in spools]

    def close(self) -> None:
        assert self.buffer.close(PATIENCE)


def check(directory: Path, expected: dict[int, NewRow], *, whole_books: bool = True) -> Found:
    """Open the directory: quick, usable at once, books closed, and whatever is there is byte for byte what was put.

    Rows that are not expected any more may come back with an older state of the file; they are whole as well.
    """
    found = Found(directory)
    try:
        assert found.opened_in < OPEN_SECONDS
        for row_id, row in {**found.rows, **found.letters}.items():
            assert row == expected.get(row_id, new_row(row_id))
        for books in found.books:
            for unit in ("items", "batches"):
                places = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
                assert getattr(books, f"stored_{unit}") == sum(getattr(books, f"{place}_{unit}") for place in places)
        pending = sum(books.pending_batches for books in found.books)
        # What an index hides from its conversation is found by the next count; nothing is there that is not counted.
        assert len(found.rows) + 1 <= pending if whole_books else True
    finally:
        found.close()
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0000000000000001-00000000.db"


def copies_of(tmp_path: Path, source: Path) -> Iterator[tuple[Path, Path]]:
    """Fresh directories, each with the spool in it."""
    number = 0
    while True:
        number += 1
        directory = tmp_path / f"copy{number}"
        directory.mkdir()
        for file in (source, wal_of(source)):
            if file.exists():
                shutil.copy(file, directory / file.name)
        yield directory, directory / source.name
        shutil.rmtree(directory)


# --- a file that is not a spool any more -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "junk",
    [b"\0" * 4096, b"\x89PNG\r\n\x1a\n" + b"x" * 5000, b"", b"SQLite format 3\0"],
    ids=["zeros", "png", "empty", "head"],
)
def test_junk_in_the_place_of_a_spool_is_set_aside_and_kept(path: Path, junk: bytes) -> None:
    """What cannot be read at all may still be of use to somebody: it is renamed, never deleted."""
    path.write_bytes(junk)
    found = check(path.parent, {})
    kept = list(path.parent.glob("*.corrupt-*"))
    assert [file.read_bytes() for file in kept] == ([junk] if junk else [])  # an empty file is a spool to be
    assert [type(notice) for notice in found.told.notices if not hasattr(notice, "conversations")] == [Salvage] * len(
        kept
    )
    assert all(not notice.books_known for notice in found.told.notices if isinstance(notice, Salvage))


def test_a_directory_in_the_place_of_a_spool_is_set_aside(path: Path) -> None:
    """With what is in it."""
    path.mkdir()
    (path / "note").write_text("mine")
    check(path.parent, {})
    [kept] = path.parent.glob("*.corrupt-*")
    assert (kept / "note").read_text() == "mine"
    assert path.is_file()


def test_an_empty_file_beside_a_wal_is_not_taken_for_a_new_one(path: Path) -> None:
    """SQLite would remove the WAL, and with it everything that was stored since the last checkpoint."""
    expected = fill(path, clean=False)
    path.write_bytes(b"")
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()
    [aside] = [file for file in path.parent.glob("*.corrupt-*") if not file.name.endswith(("-wal", "-shm"))]
    assert aside.with_name(aside.name + "-wal").stat().st_size > 0


def test_a_log_without_its_file_is_not_left_lying(path: Path) -> None:
    """Somebody removed what looked like the database: what is in its write-ahead log is sent all the same."""
    expected = fill(path, clean=False)
    path.unlink()
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()


def test_a_file_without_its_log_is_as_it_was_when_that_was_brought_in_last(path: Path) -> None:
    """What was only in the log is gone without a trace; the file is a spool all the same."""
    held = Spool.open(path, None)
    held.begin()
    held.store([new_row(1)])
    held.commit()
    held.checkpoint()
    held.begin()
    held.store([new_row(2)])
    held.commit()
    cut_off(held, path)
    wal_of(path).unlink()
    assert check(path.parent, {1: new_row(1)}).rows.keys() == {1}


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("suffix", ["-shm", "-journal"])
@pytest.mark.parametrize(
    "junk",
    [b"", b"\0" * 32_768, b"\xff" * 32_768, b"\x89PNG\r\n\x1a\n" + b"x" * 5000, None],
    ids=["empty", "zeros", "ones", "png", "directory"],
)
def test_junk_beside_a_spool_costs_nothing(path: Path, clean: bool, suffix: str, junk: bytes | None) -> None:
    """What SQLite can make anew, and what it never had."""
    expected = fill(path, clean=clean)
    beside = path.with_name(path.name + suffix)
    if junk is None:
        beside.mkdir()
    else:
        beside.write_bytes(junk)
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()


@pytest.mark.parametrize(
    "junk",
    [b"", b"\0" * 32_768, b"\x89PNG\r\n\x1a\n" + b"x" * 5000, None],
    ids=["empty", "zeros", "png", "directory"],
)
def test_junk_in_the_place_of_a_closed_spools_log_costs_nothing(path: Path, junk: bytes | None) -> None:
    """A spool that was closed has none."""
    expected = fill(path, clean=True)
    if junk is None:
        wal_of(path).mkdir()
    else:
        wal_of(path).write_bytes(junk)
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has neither")
@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a link to itself", "a pipe", "a socket"])
def test_what_is_no_file_is_left_alone_and_told_once(
    path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Not followed, not waited for, not written to."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / path.name
    fill(elsewhere, clean=True)
    content = elsewhere.read_bytes()
    match kind:
        case "a link":
            path.symlink_to(elsewhere)
        case "a link to nothing":
            path.symlink_to(elsewhere.with_name("nothing.db"))
        case "a link to itself":
            path.symlink_to(path)
        case "a pipe":
            os.mkfifo(path)
        case "a socket":
            socket_at(path)
    before = path.lstat()
    found = check(path.parent, {})
    assert found.rows == {}
    assert [str(path) in record.getMessage() for record in warnings_of(caplog)] == [True]
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert elsewhere.read_bytes() == content
    assert not elsewhere.with_name("nothing.db").exists()


def socket_at(path: Path) -> None:
    place = os.open(path.parent, os.O_RDONLY)  # its name may be longer than a socket's
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"/proc/self/fd/{place}/{path.name}")
    finally:
        os.close(place)


@pytest.mark.parametrize("kind", ["a directory", "a link", "a pipe"])
def test_a_lock_that_is_no_file_costs_only_its_spool(
    path: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Nobody can tell whether the spool has an owner; everything else goes on."""
    fill(path, clean=True)
    lock = path.with_suffix(".lock")
    match kind:
        case "a directory":
            lock.mkdir()
        case "a link":
            lock.symlink_to(tmp_path_factory.mktemp("elsewhere") / "lock")
        case "a pipe":
            os.mkfifo(lock)
    other = path.with_name("0000000000000002-00000000.db")
    expected = fill(other, clean=True)
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()
    assert kind == "a pipe" or [str(path) in record.getMessage() for record in warnings_of(caplog)] == [True]


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="this system has no users to become")
def test_a_spool_that_may_only_be_read_is_left_alone_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Another user's, or protected: what is in it stays there, and new items go to another file."""
    with tempfile.TemporaryDirectory() as place:  # below one that everybody may enter
        path = Path(place) / "site" / "0000000000000001-00000000.db"
        path.parent.mkdir()
        fill(path, clean=True)
        content = path.read_bytes()
        path.chmod(0o444)
        me = os.geteuid()
        if me == 0:  # who may do everything
            for file in (place, path.parent, path):
                os.chown(file, 65534, 65534)
            os.seteuid(65534)
        try:
            found = check(path.parent, {})
        finally:
            os.seteuid(me)
        assert found.rows == {}
        assert path.read_bytes() == content
        assert [str(path) in record.getMessage() for record in warnings_of(caplog)] == [True]


# --- every border, every page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_file_cut_at_any_border_opens_and_gives_back_what_is_whole(
    tmp_path: Path, clean: bool, request: pytest.FixtureRequest
) -> None:
    """Every 16th border of 512 bytes here; all of them with ``-m slow``."""
    cut_everywhere(tmp_path, clean=clean, step=16 * 512)


@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_file_cut_at_every_border_opens_and_gives_back_what_is_whole(tmp_path: Path, clean: bool) -> None:
    """The long form."""
    cut_everywhere(tmp_path, clean=clean, step=512)


def cut_everywhere(tmp_path: Path, *, clean: bool, step: int) -> None:
    source = tmp_path / "source" / "0000000000000001-00000000.db"
    source.parent.mkdir()
    expected = fill(source, clean=clean)
    copies = copies_of(tmp_path, source)
    for length in range(0, source.stat().st_size, step):
        directory, path = next(copies)
        with path.open("r+b") as file:
            file.truncate(length)
        check(directory, expected)
    if not clean:
        for length in range(0, wal_of(source).stat().st_size, step):
            directory, path = next(copies)
            with wal_of(path).open("r+b") as file:
                file.truncate(length)
            check(directory, expected)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_one_flipped_byte_in_any_page_loses_at_most_what_it_hit(tmp_path: Path, clean: bool) -> None:
    """One byte a page, in every third page here; several a page in all of them with ``-m slow``."""
    flip_everywhere(tmp_path, clean=clean, every=3, times=1)


@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_flipped_bytes_in_every_page_lose_at_most_what_they_hit(tmp_path: Path, clean: bool) -> None:
    """The long form."""
    flip_everywhere(tmp_path, clean=clean, every=1, times=8)


def flip_everywhere(tmp_path: Path, *, clean: bool, every: int, times: int) -> None:
    source = tmp_path / "source" / "0000000000000001-00000000.db"
    source.parent.mkdir()
    expected = fill(source, clean=clean)
    copies = copies_of(tmp_path, source)
    chance = random.Random(4)
    for page in range(0, source.stat().st_size // 4096, every):
        for _ in range(times):
            directory, path = next(copies)
            offset = page * 4096 + chance.randrange(4096)
            with path.open("r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            found = check(directory, expected)
            if (path.with_suffix(".lock")).exists() and not any("newer" in str(n) for n in found.told.notices):
                kept = found.rows.keys() | found.letters.keys()
                untouched = path.exists() and peek(path) is None  # it looks like somebody else's, and is left alone
                # A byte hits one batch, or a page of small ones, or nothing that matters.
                assert untouched or not kept or len(expected.keys() - kept) <= 30, offset


@pytest.mark.parametrize("every", [pytest.param(8, id="every 8th"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_one_flipped_byte_in_a_log_leaves_an_earlier_state_of_the_spool(tmp_path: Path, every: int) -> None:
    """In each frame, also in its head: what was committed before it is there, and the books of that state close."""
    source = tmp_path / "source" / "0000000000000001-00000000.db"
    source.parent.mkdir()
    fill(source, clean=False)
    copies = copies_of(tmp_path, source)
    chance = random.Random(5)
    kept = 0
    for frame in range(0, (wal_of(source).stat().st_size - 32) // (4096 + 24), every):
        for offset in (chance.randrange(24), 24 + chance.randrange(4096)):
            directory, path = next(copies)
            with wal_of(path).open("r+b") as file:
                file.seek(32 + frame * (4096 + 24) + offset)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            found = check(directory, {})
            stored = sorted(found.rows.keys() | found.letters.keys())
            # Nothing is settled before all is stored, so that an earlier state is a beginning.
            assert stored == list(range(1, len(stored) + 1)) or len(stored) == 54
            assert len(stored) >= kept or len(stored) == 54, "a later frame costs no more"
            kept = max(kept, len(stored) if len(stored) != 54 else 0)
    assert kept > 40


# --- what is taken over ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settled", [2, 400], ids=["much to send", "much settled"])
@pytest.mark.parametrize("hit", ["a batch", "the head", "the tree"])
def test_a_spool_that_has_seen_much_is_salvaged_like_a_small_one(path: Path, settled: int, hit: str) -> None:
    """A fresh file of more than one transaction."""
    expected = fill(path, clean=True, batches=1_300, settled=settled)
    hurt(path, hit)
    gone = {1250} if hit == "a batch" else set()
    before = Spool.open(path, None).books if hit == "a batch" else None
    done = salvage(path, "damaged")
    assert (done.kept_batches, done.lost_batches) == (len(expected) - len(gone), len(gone))
    found = check(path.parent, expected)
    assert expected.keys() - (found.rows.keys() | found.letters.keys()) == gone
    if before is not None:
        assert found.books[0].acknowledged_batches == before.acknowledged_batches == 3 * settled


def hurt(path: Path, hit: str) -> None:
    if hit == "the head":
        damage_header(path)
        return
    db = sqlite3.connect(path)
    [root] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'pending'").fetchone()
    if hit == "a batch":
        db.execute("UPDATE pending SET crc = crc + 1 WHERE id = 1250")
        db.commit()
    db.close()
    if hit == "the tree":
        with path.open("r+b") as file:
            file.seek((root - 1) * 4096)
            file.write(b"\xff" * 4096)


def test_salvage_keeps_name_ids_dead_letters_and_what_is_known_of_conversations(path: Path) -> None:
    """Receipts and dead letters keep their meaning, and the books tell what is lost."""
    expected = fill(path, clean=True)
    held = Spool.open(path, None)
    name, books = held.name, held.books
    lane, refused, duplicates = held.lane(LANES[0]), held.refused_ids(), held.duplicates()
    outcome = held.outcome(3)
    held.begin()
    held.note("gate_until", 123.5)
    held.note_intent("done")
    held.commit()
    held.close()
    db = sqlite3.connect(path)
    db.execute("UPDATE pending SET crc = crc + 1 WHERE id = 20")
    db.commit()
    db.close()
    done = salvage(path, "a batch is damaged")
    assert (done.lost_batches, done.lost_items, done.books_known) == (1, expected[20].items, True)
    held = Spool.open(path, None)
    assert held.name == name
    assert (held.lane(LANES[0]), held.refused_ids(), held.duplicates()) == (lane, refused, duplicates)
    assert held.outcome(3) == outcome == (7, 7)
    assert held.noted("gate_until") == 123.5
    assert held.books.next_id == books.next_id
    assert (held.books.stored_batches, held.books.lost_batches) == (books.stored_batches, 1)
    held.begin()
    assert not held.note_intent("done")
    held.close()


@pytest.mark.parametrize("table", ["pending", "refused"])
def test_batches_are_found_without_the_tree_that_leads_to_them(path: Path, table: str) -> None:
    """A table whose root page is gone has its leaves still, and they say what they are."""
    expected = fill(path, clean=True)
    db = sqlite3.connect(path)
    [root] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    small = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] < 10
    db.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    found = check(path.parent, expected)
    kept = found.rows.keys() | found.letters.keys()
    lost = expected.keys() - kept
    assert len(lost) == sum(books.lost_batches for books in found.books)
    assert not lost if not small else len(lost) <= 3  # a small table is its root page


def test_what_was_deleted_does_not_come_back_from_free_pages(path: Path) -> None:
    """The pages of what was acknowledged long ago still hold it; it would be sent again, behind what came later."""
    expected = fill(path, clean=True, settled=15)
    db = sqlite3.connect(path)
    db.execute("DELETE FROM acknowledged")  # as after the next ten thousand
    db.commit()
    assert db.execute("PRAGMA freelist_count").fetchone()[0] > 0
    [root] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'pending'").fetchone()
    db.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()


@pytest.mark.parametrize("lost", ["pending", "acknowledged"])
def test_a_stale_copy_of_what_was_acknowledged_is_not_sent_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A page that SQLite has given up may hold whole batches still, and a damaged head does not tell which these are."""
    held = Spool.open(path, None)
    held.begin()
    held.store([new_row(number) for number in range(1, 10)])
    held.commit()
    held.close()
    stale = list(records(path, wal_of(path)))
    held = Spool.open(path, None)
    held.begin()
    held.acknowledge(list(held.pending(LANES[1]))[:2], 0)
    held.refuse(list(held.pending(LANES[2]))[:1], REFUSED)
    held.commit()
    assert (held.outcome(1), held.is_pending(2)) == ((0, 1), False)
    held.close()
    db = sqlite3.connect(path)
    [root] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (lost,)).fetchone()
    leaves = [*records(path, wal_of(path)), *stale]
    db.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 4096)
        if lost == "acknowledged":  # that is known from the pages then, and these are looked at for the batches' sake
            file.seek(0)
            file.write(b"\xff" * 100)
    monkeypatch.setattr(salvage_module, "records", lambda *_: iter(leaves))
    salvage(path, "damaged")
    held = Spool.open(path, None)
    assert [held.is_pending(number) for number in range(1, 10)] == [False, False, True, False, *[True] * 5]
    assert held.refused_ids() == [2]
    held.close()


def test_pages_give_the_same_records_as_sqlite(path: Path) -> None:
    """Integers of every width, text, bytes over several pages, NULL: whatever a table holds, WAL included."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b, c)")
    values = [0, 1, -1, 127, 32_768, -(2**23), 2**31, 2**40, 2**62, -(2**63), 1.5, "é" * 30, b"\0" * 20_000, None]
    rows = [(number + 1, value, "x" * (number * 700), bytes([number]) * number) for number, value in enumerate(values)]
    db.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
    db.commit()
    assert wal_of(path).stat().st_size > 0
    found = {row_id: (row_id, *columns[1:]) for row_id, columns in records(path, wal_of(path)) if len(columns) == 4}
    assert found == {row[0]: row for row in rows}
    db.close()


def test_random_bytes_never_make_the_reader_of_pages_raise(path: Path) -> None:
    """It looks at what nobody vouches for."""
    chance = random.Random(7)
    fill(path, clean=False)
    good = path.read_bytes()
    for _ in range(60):
        bad = bytearray(good)
        for _ in range(200):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        path.write_bytes(bad)
        list(records(path, wal_of(path)))


# --- cut off, refused by the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["draft", "aside"])
def test_a_salvage_that_is_cut_off_is_finished_by_the_next_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Killed with a half-made file, or between setting the old one aside and putting the fresh one in its place."""
    expected = fill(path, clean=False)
    damage_header(path)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(salvage_module, "_settle" if step == "draft" else "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        salvage(path, "damaged")
    monkeypatch.undo()
    assert path.exists() == (step == "draft")
    assert unfinished(path.parent) == [path]
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()
    assert unfinished(path.parent) == []


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 100)


def test_a_draft_nobody_needs_is_removed(path: Path) -> None:
    """As long as the old file is there, it is all done again."""
    fill(path, clean=True)
    draft = path.with_name(f"{path.name}.salvage")
    draft.write_bytes(b"half")
    finish(path)
    assert not draft.exists()
    assert path.exists()


def test_two_salvages_in_one_second_keep_both_files(path: Path) -> None:
    """Nothing that was set aside is ever written over."""
    for _ in range(3):
        path.write_bytes(b"\xff" * 5000)
        salvage(path, "junk")
    assert len(list(path.parent.glob("*.corrupt-*"))) == 3


@pytest.mark.parametrize("hit", ["the head", "the tree"])
@pytest.mark.parametrize("step", ["_fill", "_settle", "_finish"])
def test_a_salvage_that_the_disk_refuses_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, hit: str, step: str
) -> None:
    """Twice, at any step: meanwhile appends are accepted, and what is whole goes on in the end."""
    monkeypatch.setattr(writer_module, "SCAN_SECONDS", 0.05)
    real, refusals = getattr(salvage_module, step), [OSError(28, "no space"), full()]

    def refuse(*arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return real(*arguments)

    monkeypatch.setattr(salvage_module, step, refuse)
    expected = fill(path, clean=True, batches=1_300)
    hurt(path, hit)
    buffer = Buffer(path.parent, BufferLimits(), Told())
    buffer.start()
    end = time.monotonic() + PATIENCE
    numbers: list[int] = []
    try:
        append_to(buffer, "during")
        while len(numbers) < len(expected) and time.monotonic() < end:
            try:
                rows, letters, _ = buffer.run(Found._look).result(PATIENCE)
            except BufferUnusableError:
                rows = letters = {}  # as a sender would, it comes back
            numbers = [*rows, *letters]
            time.sleep(0.02)
        assert sorted(numbers) == sorted(expected)
        append_to(buffer, "after")
    finally:
        assert buffer.close(PATIENCE)


def full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    return error


@pytest.mark.parametrize("trouble", ["its salvage", "its opening"])
def test_a_spool_that_cannot_be_taken_over_just_now_holds_up_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    """Three orphans, trouble with the one in the middle: the others are taken over at once, and told of; it, later."""
    monkeypatch.setattr(writer_module, "SCAN_SECONDS", 0.05)
    told = Told()
    buffer = Buffer(path.parent, BufferLimits(), told)
    buffer.start()
    paths = [path.with_name(f"000000000000000{number}-00000000.db") for number in (2, 3, 4)]
    refused, allowed = threading.Event(), threading.Event()
    real_salvage, real_open = salvage, Spool.open

    def trying(place: Path) -> None:
        if place == paths[1] and not allowed.is_set():
            if caplog.records:
                refused.set()
            raise BufferUnusableError(str(place), "busy") from full()

    def salvaging(place: Path, *arguments: Any) -> Any:
        trying(place)
        return real_salvage(place, *arguments)

    def opening(place: Path, lock: Any) -> Any:
        trying(place)
        return real_open(place, lock)

    ready = path.parent / "ready"
    ready.mkdir()
    for place in paths:
        fill(ready / place.name, clean=True)
    if trouble == "its salvage":
        damage_header(ready / paths[1].name)
        monkeypatch.setattr(directory_module, "salvage", salvaging)
    else:
        monkeypatch.setattr(Spool, "open", opening)
    try:
        for place in paths:
            (ready / place.name).rename(place)
        assert refused.wait(PATIENCE)
        adopted(told, {paths[0], paths[2]})
        assert [str(paths[1]) in record.getMessage() for record in warnings_of(caplog)] == [True]
        allowed.set()
        adopted(told, set(paths))
    finally:
        assert buffer.close(PATIENCE)


def adopted(told: Told, expected: set[Path]) -> None:
    end = time.monotonic() + PATIENCE
    while (found := {notice.path for notice in told.notices if isinstance(notice, Adopted)}) < expected:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert found == expected


# --- unclean stops and books -----------------------------------------------------------------------------------------


def test_a_file_that_was_closed_is_not_checked_again_and_one_that_was_cut_off_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check reads everything: it is for those that need it."""
    fill(path, clean=True)
    held = Spool.open(path, None)
    assert held.was_clean
    cut_off(held, path)
    held = Spool.open(path, None)
    assert not held.was_clean
    assert held.examine(PATIENCE) == 0
    held.close()
    held = Spool.open(path, None)
    assert held.was_clean
    held.close()


def test_after_a_kill_damage_is_found_before_anybody_meets_it(path: Path) -> None:
    """Also where no count comes by: in the pages that hold the rest of a large batch."""
    expected = fill(path, clean=True)
    held = Spool.open(path, None)
    held.checkpoint()
    cut_off(held, path)
    content = bytearray(path.read_bytes())
    # Pages that begin with the number of the next one, and go on with the middle of a text.
    rests = [start for start in range(0, len(content), 4096) if content[start + 4 : start + 4096] == b"x" * 4092]
    start = next(start for start in rests if any(content[start : start + 4]))
    content[start : start + 4] = b"\xff\xff\xff\x00"
    path.write_bytes(content)
    told = Told()
    buffer = Buffer(path.parent, BufferLimits(), told)
    buffer.start()
    try:
        end = time.monotonic() + PATIENCE
        while not told.notices and time.monotonic() < end:
            time.sleep(0.01)
        [notice] = told.notices
        assert isinstance(notice, Salvage)
        assert (notice.kept_batches, notice.lost_batches) == (len(expected) - 1, 1)
    finally:
        assert buffer.close(PATIENCE)


def test_books_that_contradict_the_rows_are_counted_again(path: Path) -> None:
    """A wrong counter would make the buffer look full for ever, or empty while something waits."""
    fill(path, clean=True)
    held = Spool.open(path, None)
    right = Books(**{name: getattr(held.books, name) for name in Books.__dataclass_fields__})
    held.begin()
    held.books.pending_bytes += 1000
    held.books.pending_items += 5
    held.books.stored_items += 5
    held.commit()
    cut_off(held, path)
    found = Found(path.parent)
    assert [notice.lost_items for notice in found.told.notices if isinstance(notice, Recounted)] == [5]
    found.close()
    books = peek(path)
    assert books is not None
    assert (books.pending_bytes - right.pending_bytes, books.lost_items) == (len(b'{"text":"after"}'), 5)


def test_a_damaged_counter_is_found_out_even_after_a_clean_stop(path: Path) -> None:
    """The counters have a checksum of their own."""
    fill(path, clean=True)
    right = peek(path)
    db = sqlite3.connect(path)
    db.execute("UPDATE books SET pending_items = pending_items + 7")
    db.commit()
    db.close()
    assert peek(path) is None
    held = Spool.open(path, None)
    assert right is not None
    assert (held.books.pending_items, held.books.pending_bytes) == (right.pending_items, right.pending_bytes)
    assert held.books.next_id == right.next_id
    held.close()


def test_a_large_file_is_not_checked_in_the_way_of_the_caller(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check happens in the writer thread after the opening; what is appended meanwhile is accepted."""
    held = Spool.open(path, None)
    cut_off(held, path)
    begun, go = threading.Event(), threading.Event()

    def slow(_: Spool, __: float) -> int:
        begun.set()
        go.wait(PATIENCE)
        return 0

    monkeypatch.setattr(Spool, "examine", slow)
    buffer = Buffer(path.parent, BufferLimits(), Told())
    buffer.start()
    assert begun.wait(PATIENCE)
    batch = encode_batch([{"n": 1}])
    accepted, stored = Accepted(LANES[0], [batch]), threading.Event()
    buffer.put(accepted, batch.size)
    assert not accepted.is_stored()
    go.set()
    accepted.when_stored(stored.set)
    assert stored.wait(PATIENCE)
    assert buffer.close(PATIENCE)


def test_the_schema_of_a_file_is_compared_with_what_its_version_should_have(path: Path) -> None:
    """A flipped byte in a CHECK or a column's name must not surface in the middle of a commit."""
    expected = fill(path, clean=True)
    db = sqlite3.connect(path)
    db.execute("PRAGMA writable_schema = ON")
    db.execute("UPDATE sqlite_master SET sql = replace(sql, 'items > 0', 'items > 9') WHERE name = 'pending'")
    db.commit()
    db.close()
    found = check(path.parent, expected)
    assert found.rows.keys() | found.letters.keys() == expected.keys()
    assert len(MIGRATIONS) >= 1
    connect(path).close()
