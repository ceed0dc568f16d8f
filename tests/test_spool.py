"""The spool file: what it holds, that its books close after everything, and what it refuses to touch."""

from __future__ import annotations

import hashlib
import random
import sqlite3
import stat
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memlog import limits, schema, spool, system
from memlog.directory import Spools
from memlog.errors import BufferUnusableError, InvalidRequestError, to_record
from memlog.payload import encode_batch
from memlog.schema import APPLICATION_ID, MIGRATIONS
from memlog.spool import LaneFacts, NewRow, Spool, count_pending

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REFUSED = to_record(InvalidRequestError("refused", outcome="refused"))


def opened(path: Path | None) -> Spool:
    lock = None if path is None else system.try_lock(path.with_suffix(".lock"))
    return Spool.open(path, lock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spool.db"


@pytest.fixture
def one(path: Path) -> Iterator[Spool]:
    held = opened(path)
    yield held
    held.close()


def new_row(number: int, conversation: str = "c_11111111", items: int = 1, filler: str = "") -> NewRow:
    batch = encode_batch([{"n": number, "i": i, "filler": filler} for i in range(items)])
    return NewRow(number, conversation, batch.items, batch.size, batch.body)


def keep(held: Spool, *rows: NewRow) -> None:
    held.begin()
    held.store(rows)
    held.commit()


def check_books(held: Spool) -> None:
    """The books close, and say what the tables say."""
    books, db = held.books, held._db
    for unit in ("items", "batches"):
        places = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
        assert getattr(books, f"stored_{unit}") == sum(getattr(books, f"{place}_{unit}") for place in places)
    assert (books.acknowledged_batches, books.acknowledged_items) == db.execute(
        "SELECT count(*), total(last_seq + 1 - first_seq) FROM acknowledged"
    ).fetchone()
    pending = db.execute("SELECT count(*), total(items), total(size), max(id) FROM pending").fetchone()
    assert (books.pending_batches, books.pending_items, books.pending_bytes) == pending[:3]
    assert (books.refused_batches, books.refused_items) == db.execute(
        "SELECT count(*), total(items) FROM refused"
    ).fetchone()
    assert books.next_id > (pending[3] or 0)


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_new_file_says_whose_it_is_and_is_set_up_for_power_cuts(path: Path, one: Spool) -> None:
    """Format number, owner, WAL with a sync at each commit, and an auto-vacuum that can work."""

    def pragma(name: str) -> Any:
        return one._db.execute(f"PRAGMA {name}").fetchone()[0]

    assert pragma("application_id") == APPLICATION_ID
    assert pragma("user_version") == len(MIGRATIONS)
    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 2  # FULL
    assert pragma("auto_vacuum") == 2  # INCREMENTAL; silently 0 if it is asked for after WAL
    assert pragma("mmap_size") == 0
    assert pragma("trusted_schema") == 0


def test_the_files_of_a_spool_are_private(path: Path, one: Spool) -> None:
    """0600 for the database, its WAL, its shared memory and its lock."""
    keep(one, new_row(1))
    files = list(path.parent.iterdir())
    assert {file.name for file in files} == {"spool.db", "spool.db-wal", "spool.db-shm", "spool.lock"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_migrations_one_by_one_give_the_schema_of_a_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that grew up over versions is the same as one made now, and keeps its contents and its name."""

    def shape(held: Spool) -> list[tuple[Any, ...]]:
        return held._db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()

    held = opened(path)
    keep(held, new_row(1))
    name, before = held.name, shape(held)
    held.close()
    added = "ALTER TABLE lane ADD COLUMN later INTEGER;"
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, added))
    held = opened(path)
    fresh = opened(path.with_name("fresh.db"))
    assert shape(held) == shape(fresh) != before
    assert held._db.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS) + 1
    assert held.name == name
    assert [row.id for row in held.pending("c_11111111")] == [1]
    held.close()
    fresh.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a version's script or nothing of it, so that the older version still opens the file."""
    held = opened(path)
    keep(held, new_row(1))
    held.close()
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE half (x); CREATE TABLE lane (x);"))
    with pytest.raises(BufferUnusableError, match="left as it is"):
        opened(path)
    monkeypatch.undo()
    system.try_lock(path.with_suffix(".lock"))
    held = Spool.open(path, None)
    assert [row.id for row in held.pending("c_11111111")] == [1]
    assert held._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'half'").fetchone()[0] == 0
    held.close()


def test_a_file_of_a_newer_version_is_left_untouched_with_a_clear_error(path: Path) -> None:
    """Who goes back to an older memlog-sdk is told to upgrade, and loses nothing."""
    opened(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(BufferUnusableError, match=r"newer version \(format 99.*upgrade memlog-sdk") as caught:
        Spool.open(path, None)
    assert caught.value.path == str(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


@pytest.mark.parametrize("version", [0, 1, 7])
def test_a_database_of_somebody_else_is_refused_untouched(path: Path, version: int) -> None:
    """A file is ours by its application id, whatever its name and its version."""
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(BufferUnusableError, match="not one of memlog's"):
        Spool.open(path, None)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "junk", [b"\0" * 4096, b"\x89PNG\r\n\x1a\n" + b"x" * 5000, b"hello"], ids=["zeros", "png", "text"]
)
def test_what_is_no_database_is_refused_untouched(path: Path, junk: bytes) -> None:
    """Damage is for a person to look at: nothing is overwritten."""
    path.write_bytes(junk)
    with pytest.raises(BufferUnusableError) as caught:
        Spool.open(path, None)
    assert caught.value.path == str(path)
    assert path.read_bytes() == junk


def test_an_empty_file_left_by_a_crash_becomes_a_spool(path: Path) -> None:
    """A process may die between making the file and writing the schema."""
    path.touch()
    held = opened(path)
    keep(held, new_row(1))
    assert held.books.pending_items == 1
    held.close()


def test_a_directory_or_a_link_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    """No file is opened through a link: it could be anybody's."""
    path.mkdir()
    with pytest.raises(BufferUnusableError):
        Spool.open(path, None)
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(BufferUnusableError):
        Spool.open(link, None)
    assert not (tmp_path / "elsewhere.db").exists()


def test_an_old_sqlite_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better at the start than in the first RETURNING."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(BufferUnusableError, match=r"older than 3\.35"):
        Spool.open(path, None)


def test_a_spool_in_memory_keeps_the_same_books() -> None:
    """No path, no lock, the same behaviour."""
    held = opened(None)
    keep(held, new_row(1), new_row(2, items=3))
    assert (held.path, held.books.pending_items) == (None, 4)
    held.begin()
    held.acknowledge(list(held.pending("c_11111111")), 0)
    held.commit()
    check_books(held)
    assert held.books.acknowledged_items == 4
    held.tidy()
    held.close()


def test_a_batch_whose_bytes_changed_on_disk_is_noticed_before_it_is_sent(path: Path) -> None:
    """Bit rot must not become history: the batch before is delivered, the damaged one raises."""
    held = opened(path)
    keep(held, new_row(1), new_row(2), new_row(3, "c_22222222"))
    held.close()
    db = sqlite3.connect(path)
    db.execute("UPDATE pending SET body = CAST(replace(body, '\"n\":2', '\"n\":7') AS BLOB) WHERE id = 2")
    db.commit()
    db.close()
    held = opened(path)
    rows = held.pending("c_11111111")
    assert next(rows).id == 1
    with pytest.raises(BufferUnusableError, match="batch 2 of conversation c_11111111 is damaged"):
        next(rows)
    assert [row.id for row in held.pending("c_22222222")] == [3]
    held.close()


def test_space_comes_back_after_a_drain(path: Path) -> None:
    """An outage of a day must not cost its disk space for ever."""
    held = opened(path)
    keep(held, *(new_row(n, filler="x" * 50_000) for n in range(1, 101)))
    held.tidy()
    assert path.stat().st_size > 5_000_000
    held.begin()
    held.acknowledge(list(held.pending("c_11111111")), 0)
    held.commit()
    held.tidy()
    assert path.stat().st_size < 200_000
    assert path.with_name("spool.db-wal").stat().st_size == 0
    held.close()


def test_pending_items_are_counted_from_outside_without_taking_part(path: Path, one: Spool) -> None:
    """Also what is only in the WAL; a file that is none counts as nothing."""
    keep(one, new_row(1, items=3))
    assert count_pending(path) == 3
    keep(one, new_row(2))
    assert count_pending(path) == 4
    assert count_pending(path.with_name("missing.db")) == 0
    path.with_name("junk.db").write_bytes(b"junk" * 2000)
    assert count_pending(path.with_name("junk.db")) == 0


# --- moves -----------------------------------------------------------------------------------------------------------


def test_an_acknowledged_batch_leaves_its_range_and_nothing_else(one: Spool) -> None:
    """Several batches of one request share its range, in order."""
    keep(one, new_row(1), new_row(2, items=3), new_row(3))
    rows = list(one.pending("c_11111111"))
    one.begin()
    one.acknowledge(rows[:2], 10)
    one.note_end("c_11111111", 14, None)
    one.commit()
    assert (one.outcome(1), one.outcome(2), one.outcome(3)) == ((10, 10), (11, 13), None)
    assert (one.is_pending(2), one.is_pending(3)) == (False, True)
    assert one.lane("c_11111111") == LaneFacts(14)
    assert one.bodies([1, 2, 4]) == [(10, 10), (11, 13), None]
    check_books(one)


def test_what_is_acknowledged_twice_counts_once(one: Spool) -> None:
    """A command may run again after a disk error."""
    keep(one, new_row(1))
    rows = list(one.pending("c_11111111"))
    for _ in range(2):
        one.begin()
        one.acknowledge(rows, 0)
        one.refuse(rows, REFUSED)
        one.commit()
    assert (one.books.acknowledged_items, one.books.refused_items) == (1, 0)
    check_books(one)


def test_a_dead_letter_can_be_requeued_under_a_new_number_or_dropped(one: Spool) -> None:
    """It goes behind what waits, and each way out is counted once."""
    keep(one, new_row(1), new_row(2), new_row(3))
    rows = list(one.pending("c_11111111"))
    one.begin()
    one.refuse(rows[:2], REFUSED)
    one.commit()
    assert [(letter[0], letter[6]) for letter in one.refused()] == [(1, rows[0].body), (2, rows[1].body)]
    assert one.outcome(1) == REFUSED
    check_books(one)
    one.begin()
    first, second = one.take_refused(1), one.take_refused(2)
    assert first is not None
    assert second is not None
    assert one.take_refused(1) is None
    one.requeue(first, one.books.next_id)
    one.drop(second)
    one.commit()
    assert [row.id for row in one.pending("c_11111111")] == [3, 4]
    assert (one.books.stored_items, one.books.dropped_items, one.books.refused_items) == (3, 1, 0)
    check_books(one)


def test_a_rollback_takes_back_books_and_rows_together(one: Spool) -> None:
    """Also when it is called where nothing was begun."""
    keep(one, new_row(1))
    one.begin()
    one.store([new_row(2)])
    one.acknowledge(list(one.pending("c_11111111")), 0)
    one.rollback()
    one.rollback()
    assert one.books.pending_items == 1
    check_books(one)


def test_books_are_right_after_a_rollback_that_could_not_read_them_again(one: Spool) -> None:
    """A disk that fails a commit may fail the next read, too; the figures must not drift for that."""
    keep(one, new_row(1))
    one.begin()
    one.store([new_row(2)])
    one._db.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_READ else sqlite3.SQLITE_OK
    )
    one.rollback()
    one._db.set_authorizer(None)
    keep(one, new_row(2))
    assert one.books.stored_items == 2
    check_books(one)


def test_lane_facts_are_kept_until_they_are_known_better(one: Spool) -> None:
    """None leaves a fact as it is."""
    assert one.lane("c_11111111") == LaneFacts()
    one.begin()
    one.note_lane("c_11111111", sealed=True)
    one.note_end("c_11111111", 7, b"k")
    one.commit()
    assert one.lane("c_11111111") == LaneFacts(7, b"k", sealed=True)
    assert one.sealed_lanes() == ["c_11111111"]
    one.begin()
    one.note_lane("c_11111111", sealed=False)
    one.note_end("c_11111111", 3, None)
    one.commit()
    assert one.lane("c_11111111") == LaneFacts(3)


def test_duplicates_and_single_values_outlive_the_process(path: Path) -> None:
    """A range that is noted twice is one range."""
    held = opened(path)
    held.begin()
    held.note_duplicate("c_11111111", 4, 6)
    held.note_duplicate("c_11111111", 4, 6)
    held.note("gate_until", 12.5)
    held.commit()
    name = held.name
    held.close()
    held = opened(path)
    assert held.name == name
    assert held.duplicates() == [("c_11111111", 4, 6)]
    assert held.noted("gate_until") == 12.5
    held.begin()
    held.note("gate_until", None)
    held.commit()
    assert held.noted("gate_until") is None
    held.close()


def test_what_was_there_at_the_opening_is_told_from_what_came_later(path: Path) -> None:
    """Only an earlier process can have sent something whose answer nobody saw."""
    held = opened(path)
    keep(held, new_row(1, "c_11111111"))
    assert held.lanes(inherited=True) == []
    held.close()
    held = opened(path)
    keep(held, new_row(2, "c_22222222"))
    assert held.lanes(inherited=True) == ["c_11111111"]
    assert sorted(held.lanes()) == ["c_11111111", "c_22222222"]
    assert held.books.next_id == 3
    held.close()


def test_numbers_are_never_used_again_not_even_after_a_drain(path: Path) -> None:
    """A receipt names its batch for good."""
    held = opened(path)
    keep(held, new_row(1), new_row(2))
    held.begin()
    held.acknowledge(list(held.pending("c_11111111")), 0)
    held.commit()
    held.close()
    held = opened(path)
    assert held.books.next_id == 3
    held.close()


def test_acknowledged_ranges_are_kept_for_a_bounded_number_of_batches(
    one: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest by the time of acknowledging stay: a batch that waited for long is not forgotten at once."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 50)
    keep(one, new_row(1, "c_waiting1"), *(new_row(n) for n in range(2, 302)))
    for row in list(one.pending("c_11111111")):
        one.begin()
        one.acknowledge([row], row.id)
        one.commit()
    one.begin()
    one.acknowledge(list(one.pending("c_waiting1")), 0)
    one.commit()
    kept = one._db.execute("SELECT count(*) FROM acknowledged").fetchone()[0]
    assert 50 <= kept <= 60
    assert one.outcome(1) == (0, 0)
    assert one.outcome(301) == (301, 301)
    assert one.outcome(2) is None
    assert (one.books.acknowledged_batches, one.books.forgotten_batches) == (kept, 301 - kept)
    check_books(one)


def test_what_is_forgotten_is_counted_in_items_too_and_over_restarts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books are about items as about batches, and a count that begins anew with each process would not close."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 20)
    for _ in range(4):
        held = opened(path)
        for _ in range(15):
            keep(held, new_row(held.books.next_id, items=3))
            held.begin()
            held.acknowledge(list(held.pending("c_11111111")), 0)
            held.commit()
            check_books(held)
        held.close()
    held = opened(path)
    assert held.books.stored_items == 180
    assert held.books.forgotten_items == 3 * held.books.forgotten_batches > 0
    check_books(held)
    held.close()


def test_ranges_that_a_salvage_brought_back_do_not_take_the_books_below_nothing(
    one: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a damaged file may hold ranges that had been forgotten: they are rows that the counters do not know."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 10)
    one.begin()
    for n in range(100):
        one._db.execute("INSERT INTO acknowledged (id, conversation, first_seq, last_seq) VALUES (?, 'c', 0, 4)", (n,))
    one.commit()
    keep(one, new_row(1001))
    one.begin()
    one.acknowledge(list(one.pending("c_11111111")), 0)
    one.commit()
    books = one.books
    assert (books.acknowledged_batches, books.acknowledged_items) == (0, 0)
    assert (books.stored_items, books.forgotten_items) == (1, 1)


# --- conversations are forgotten, too ----------------------------------------------------------------------------------


def known_lanes(held: Spool) -> set[str]:
    return {row[0] for row in held._db.execute("SELECT conversation FROM lane")}


def acknowledged_elsewhere(held: Spool, count: int) -> None:
    """So many other conversations with one acknowledged batch each."""
    for n in range(count):
        name = f"c_other{held.books.next_id:08}"
        keep(held, new_row(held.books.next_id, name))
        held.begin()
        held.acknowledge(list(held.pending(name)), n)
        held.note_end(name, n + 1, b"k")
        held.commit()


def test_conversations_are_remembered_as_long_as_their_ranges(one: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that talks in a million conversations keeps a bounded number of them in its file."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 50)
    highest = 0
    for _ in range(12):
        acknowledged_elsewhere(one, 50)
        highest = max(highest, len(known_lanes(one)))
    ranges = {row[0] for row in one._db.execute("SELECT conversation FROM acknowledged")}
    assert len(ranges) >= 50
    assert ranges <= known_lanes(one)
    assert highest <= 2 * 50 + 10
    check_books(one)


def test_a_forgotten_conversation_is_one_that_was_never_known(one: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender looks for its end anew, as for any that it meets for the first time."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 10)
    keep(one, new_row(1))
    one.begin()
    one.acknowledge(list(one.pending("c_11111111")), 7)
    one.note_end("c_11111111", 8, b"k")
    one.commit()
    acknowledged_elsewhere(one, 30)
    assert one.lane("c_11111111") == LaneFacts()


@pytest.mark.parametrize("reason", ["pending", "refused", "sent again", "full", "shared"])
def test_a_conversation_of_which_something_is_left_is_not_forgotten(
    reason: str, one: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its end is tells what became of a request, and nobody but us knows that it is full, or shared."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 10)
    lane = "c_11111111"
    one.begin()
    one.note_end(lane, 8, b"k")
    if reason in ("pending", "refused"):
        one.store([new_row(1)])
    if reason == "refused":
        one.refuse(list(one.pending(lane)), REFUSED)
    if reason == "sent again":
        one.note_echo(lane, [[b"k"]])
    one.note_lane(lane, sealed=reason == "full", shared=reason == "shared")
    one.commit()
    before = one.lane(lane)
    acknowledged_elsewhere(one, 40)
    assert one.lane(lane) == before == before._replace(next_seq=8, anchor=b"k")


def test_full_and_shared_conversations_are_remembered_up_to_a_number(
    one: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full ones go first: the server says so again, and nothing depends on it."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 10)
    monkeypatch.setattr(spool, "LANES_KEPT", 40)
    one.begin()
    for n in range(30):
        one.note_lane(f"c_full{n:08}", sealed=True)
        one.note_lane(f"c_shared{n:08}", shared=True)
    one.commit()
    acknowledged_elsewhere(one, 60)
    assert {f"c_shared{n:08}" for n in range(30)} <= known_lanes(one)
    assert len(one.sealed_lanes()) == 10


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_forgotten_that_is_needed_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long walk over a few conversations, beside a model of what each was last known to be; the books always close."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 5)
    chance = random.Random(seed)
    held = opened(None)
    names = [f"c_{n:08}" for n in range(12)]
    known: dict[str, LaneFacts] = {}
    forgotten = 0
    for step in range(1500):
        name = chance.choice(names)
        rows = list(held.pending(name))
        held.begin()
        match chance.choice(["store", "acknowledge", "acknowledge", "refuse", "decide", "mark", "echo"]):
            case "store" if not rows:
                held.store([new_row(held.books.next_id + n, name, chance.randint(1, 3)) for n in range(2)])
            case "acknowledge" if rows:
                held.acknowledge(rows, 0)
                held.note_end(name, step, None)
            case "refuse" if rows:
                held.refuse(rows[:1], REFUSED)
            case "decide" if letters := held.refused_ids(name):
                letter = held.take_refused(letters[0])
                assert letter is not None
                if chance.random() < 0.5:
                    held.requeue(letter, held.books.next_id)
                else:
                    held.drop(letter)
            case "mark" if chance.random() < 0.1:
                held.note_lane(name, sealed=chance.random() < 0.5, shared=chance.random() < 0.1)
            case "echo":
                if chance.random() < 0.1:
                    held.note_echo(name, [[b"k"]])
                held.forget_echoes(2**62, chance.choice(names))
        held.commit()
        check_books(held)
        found = {lane: held.lane(lane) for lane in names}
        for lane in known.keys() - {name}:
            if found[lane] == known[lane]:
                continue
            assert found[lane] in (LaneFacts(), known[lane]._replace(echoes=())), "only echoes end, or all of it"
            if found[lane] == LaneFacts() != known[lane]._replace(echoes=()):
                forgotten += 1
                assert not known[lane].sealed
                assert not known[lane].shared
                assert not known[lane].echoes
                assert not list(held.pending(lane))
                assert not held.refused_ids(lane)
                assert held._db.execute("SELECT 1 FROM acknowledged WHERE conversation = ?", (lane,)).fetchone() is None
        known = found
    assert forgotten > 10
    held.close()


def test_duplicates_are_remembered_up_to_a_number(one: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest ones; each was told of when it was found."""
    monkeypatch.setattr(spool, "DUPLICATES_KEPT", 20)
    one.begin()
    for n in range(50):
        one.note_duplicate("c_11111111", n, n)
    one.commit()
    assert one.duplicates() == [("c_11111111", n, n) for n in range(30, 50)]


def test_short_processes_trim_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that runs every minute and acknowledges a few batches each time must not let the table grow."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 20)
    for _ in range(60):
        held = opened(path)
        keep(held, new_row(held.books.next_id))
        held.begin()
        held.acknowledge(list(held.pending("c_11111111")), 0)
        held.commit()
        held.close()
    held = opened(path)
    assert held._db.execute("SELECT count(*) FROM acknowledged").fetchone()[0] <= 21
    held.close()


# --- any order of moves ----------------------------------------------------------------------------------------------


class SpoolMachine(RuleBasedStateMachine):
    """Random moves, rollbacks and reopenings, beside a model of plain lists. What is acknowledged is soon forgotten."""

    @initialize()
    def begin(self) -> None:
        import tempfile
        from pathlib import Path

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(spool, "ACKNOWLEDGED_KEPT", 1)
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "spool.db"
        self.held = opened(self.path)
        self.pending: list[NewRow] = []
        self.refused: list[NewRow] = []
        self.acknowledged = self.dropped = self.stored = 0

    def of(self, conversation: str) -> list[NewRow]:
        return [row for row in self.pending if row.conversation == conversation]

    @rule(
        conversation=st.sampled_from(["c_aaaaaaaa", "c_bbbbbbbb"]),
        items=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    )
    def store(self, conversation: str, items: list[int]) -> None:
        first = self.held.books.next_id
        rows = [new_row(first + n, conversation, count) for n, count in enumerate(items)]
        keep(self.held, *rows)
        self.pending += rows
        self.stored += sum(items)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), refuse=st.booleans(), undo=st.booleans())
    def settle(self, data: st.DataObject, refuse: bool, undo: bool) -> None:
        conversation = data.draw(st.sampled_from(sorted({row.conversation for row in self.pending})))
        count = data.draw(st.integers(1, len(self.of(conversation))))
        rows = list(self.held.pending(conversation))[:count]
        self.held.begin()
        if refuse:
            self.held.refuse(rows, REFUSED)
        else:
            self.held.acknowledge(rows, 0)
        if undo:
            self.held.rollback()
            return
        self.held.commit()
        gone = self.of(conversation)[:count]
        self.pending = [row for row in self.pending if row not in gone]
        if refuse:
            self.refused += gone
        else:
            self.acknowledged += sum(row.items for row in gone)

    @precondition(lambda self: self.refused)
    @rule(data=st.data(), drop=st.booleans())
    def decide(self, data: st.DataObject, drop: bool) -> None:
        letter = data.draw(st.sampled_from(self.refused))
        self.held.begin()
        taken = self.held.take_refused(letter.id)
        assert taken == letter
        if drop:
            self.held.drop(taken)
            self.dropped += taken.items
        else:
            new_id = self.held.books.next_id
            self.held.requeue(taken, new_id)
            self.pending.append(letter._replace(id=new_id))
        self.held.commit()
        self.refused.remove(letter)

    @rule()
    def reopen(self) -> None:
        self.held.close()
        self.held = opened(self.path)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "held"):
            return
        check_books(self.held)
        books = self.held.books
        assert (books.stored_items, books.acknowledged_items + books.forgotten_items, books.dropped_items) == (
            self.stored,
            self.acknowledged,
            self.dropped,
        )
        for conversation in ("c_aaaaaaaa", "c_bbbbbbbb"):
            there = [(row.id, row.items, row.body) for row in self.held.pending(conversation)]
            assert there == [(row.id, row.items, row.body) for row in self.of(conversation)]
        assert sorted(letter[0] for letter in self.held.refused()) == sorted(row.id for row in self.refused)

    def teardown(self) -> None:
        if hasattr(self, "held"):
            self.held.close()
            self.directory.cleanup()
            self.patch.undo()


SpoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAnyOrderOfMoves = SpoolMachine.TestCase


# --- the next request ------------------------------------------------------------------------------------------------


def ask(spools: Spools, conversation: str = "c_11111111", **bounds: int) -> list[Any]:
    settings = {
        "batches_max": limits.ITEMS_PER_BATCH_MAX,
        "items_max": limits.ITEMS_PER_BATCH_MAX,
        "bytes_max": limits.BATCH_BYTES_MAX,
        **bounds,
    }
    return spools.next_request(conversation, **settings)


def test_a_request_takes_whole_batches_as_many_as_fit(one: Spool) -> None:
    """By items, by bytes, by batches; the first one always goes."""
    keep(one, new_row(1, items=100), new_row(2, items=100), new_row(3, items=60), new_row(4))
    spools = Spools(one, [])
    assert [row.id for row in ask(spools)] == [1, 2]
    assert [row.id for row in ask(spools, items_max=260)] == [1, 2, 3]
    assert [row.id for row in ask(spools, batches_max=1)] == [1]
    assert [row.id for row in ask(spools, bytes_max=10)] == [1]
    assert ask(spools, "c_99999999") == []


def test_two_spools_are_merged_by_time_and_never_mixed_in_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adopted spool's older batches go first, its newer ones wait for ours."""
    now = [0]
    monkeypatch.setattr(spool.time, "time_ns", lambda: now[0] * 1000)
    own, adopted = opened(tmp_path / "own.db"), opened(tmp_path / "adopted.db")
    for moment, held in enumerate([adopted, adopted, own, own, adopted, own], start=1):
        now[0] = moment
        keep(held, new_row(held.books.next_id))
    spools = Spools(own, [adopted])
    sent = []
    while rows := ask(spools):
        assert len({id(row.spool) for row in rows}) == 1
        held = rows[0].spool
        sent.append(("own" if held is own else "adopted", [row.id for row in rows]))
        held.begin()
        held.acknowledge(rows, 0)
        held.commit()
    assert sent == [("adopted", [1, 2]), ("own", [1, 2]), ("adopted", [3]), ("own", [3])]
    own.close()
    adopted.close()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(1, 120)), min_size=1, max_size=25),
    batches_max=st.integers(1, 30),
)
def test_draining_two_spools_keeps_the_order_of_each_whatever_the_clock_does(
    rows: list[tuple[bool, int, int]], batches_max: int
) -> None:
    """A clock may be set back: merging is by time, but order within a spool is by number."""
    spools = Spools(opened(None), [opened(None)])
    held = [spools.own, spools.adopted[0]]
    with pytest.MonkeyPatch.context() as patch:
        for which, moment, items in rows:
            patch.setattr(spool.time, "time_ns", lambda moment=moment: moment * 1000)
            keep(held[which], new_row(held[which].books.next_id, items=items))
    waiting = spools.waiting("c_11111111", 0).places
    seen: dict[int, list[int]] = {0: [], 1: []}
    while chosen := ask(spools, batches_max=batches_max):
        which = held.index(chosen[0].spool)
        assert all(row.spool is chosen[0].spool for row in chosen)
        assert len(chosen) <= batches_max
        assert len(chosen) == 1 or sum(row.items for row in chosen) <= limits.ITEMS_PER_BATCH_MAX
        seen[which] += [row.id for row in chosen]
        chosen[0].spool.begin()
        chosen[0].spool.acknowledge(chosen, 0)
        chosen[0].spool.commit()
    assert all(ids == sorted(ids) for ids in seen.values())
    assert len(seen[0]) + len(seen[1]) == len(rows)
    for each in held:
        check_books(each)
        each.close()
    if all(not which for which, _, _ in rows):
        assert [(place.id, place.items) for place in waiting] == [(n, row[2]) for n, row in enumerate(rows, start=1)]


def test_a_drained_spool_is_given_back_and_still_counted(tmp_path: Path) -> None:
    """Its totals and duplicates stay in the process's figures, its lock is free; one with a dead letter is kept."""
    own = opened(tmp_path / "own.db")
    drained, letters = opened(tmp_path / "drained.db"), opened(tmp_path / "letters.db")
    spools = Spools(own, [drained, letters])
    for held in (drained, letters):
        keep(held, new_row(1))
        held.begin()
        if held is drained:
            held.acknowledge(list(held.pending("c_11111111")), 0)
            held.note_duplicate("c_11111111", 1, 1)
        else:
            held.refuse(list(held.pending("c_11111111")), REFUSED)
        held.commit()
    spools.release_drained()
    assert list(spools) == [own, letters]
    assert spools.books.stored_items == 2
    assert spools.books.acknowledged_items == 1
    assert spools.duplicates() == [("c_11111111", 1, 1)]
    lock = system.try_lock(tmp_path / "drained.lock")
    assert lock is not None
    lock.release()
    assert system.try_lock(tmp_path / "letters.lock") is None
    own.close()
    letters.close()
