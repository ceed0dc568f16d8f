"""Commands from outside: carried out once, by the owner, whoever it is; nonsense is set aside; looking changes nothing."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from memlog import inbox, system, writer
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.errors import BufferUnusableError, InvalidRequestError, to_record
from memlog.inbox import Applied, Intent, list_dead_letters, list_pending, list_spools, request
from memlog.payload import encode_batch
from memlog.spool import NewRow, Spool, inbox_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from memlog.directory import Spools

PATIENCE = 20.0
LANE, OTHER = "c_11111111", "c_22222222"
REFUSED = to_record(InvalidRequestError("no", outcome="refused"))


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.applied: list[Applied] = []

    def stored(self, items: dict[str, int]) -> None:
        pass

    def disk_trouble(self, reason: str | None) -> None:
        pass

    def noticed(self, notice: Any) -> None:
        if isinstance(notice, Applied):
            self.applied.append(notice)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A free spool with two dead letters and one batch that waits; conversation OTHER is full."""
    path = tmp_path / "0000000000000001-00000000.db"
    held = Spool.open(path, None)
    held.begin()
    for number, lane in ((1, LANE), (2, OTHER), (3, LANE)):
        batch = encode_batch([{"n": number}])
        held.store([NewRow(number, lane, 1, batch.size, batch.body)])
    held.refuse([next(held.pending(LANE)), next(held.pending(OTHER))], REFUSED)
    held.note_lane(OTHER, sealed=True)
    held.commit()
    held.close()
    return path


@pytest.fixture
def owned(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Buffer, Told]]:
    """The same spool, owned by somebody who looks round often."""
    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.02)
    told = Told()
    buffer = Buffer(path.parent, BufferLimits(), told)
    buffer.start()
    yield buffer, told
    buffer.close(PATIENCE)


def bodies(path: Path) -> list[tuple[int, str, str]]:
    return [(entry.id, entry.conversation, entry.body.decode()) for entry in list_pending(path)]


# --- looking -----------------------------------------------------------------------------------------------------------


def test_looking_from_outside_shows_what_is_there_and_changes_nothing(path: Path) -> None:
    """Free or owned; the file keeps every byte."""
    before = path.read_bytes()
    [found] = list_spools(path.parent)
    assert (found.path, found.owned, found.intents) == (path, False, 0)
    assert found.books is not None
    assert (found.books.pending_items, found.books.refused_items) == (1, 2)
    assert bodies(path) == [(3, LANE, '{"n":3}')]
    letters = list_dead_letters(path)
    assert [(letter.id, letter.conversation, letter.items) for letter in letters] == [(1, LANE, 1), (2, OTHER, 1)]
    assert letters[0].error is not None
    assert letters[0].error["type"] == "InvalidRequestError" if "type" in letters[0].error else letters[0].error
    assert letters[0].refused_at is not None
    assert abs(letters[0].refused_at - time.time()) < 600
    assert len(list_dead_letters(path, limit=1)) == 1
    assert path.read_bytes() == before


def test_an_owned_spool_can_be_looked_at(path: Path, owned: tuple[Buffer, Told]) -> None:
    """Beside an owner that writes."""
    [found] = list_spools(path.parent)
    assert found.owned
    assert bodies(path) == [(3, LANE, '{"n":3}')]


def test_what_is_no_spool_is_an_error_in_our_words(tmp_path: Path) -> None:
    """For looking as for commands."""
    for call in (list_pending, list_dead_letters, lambda path: request(path, Intent(do="drop"))):
        with pytest.raises(BufferUnusableError):
            call(tmp_path / "nothing.db")
    (tmp_path / "junk.db").write_bytes(b"\xff" * 5000)
    with pytest.raises(BufferUnusableError):
        list_pending(tmp_path / "junk.db")
    with pytest.raises(BufferUnusableError):
        request(tmp_path / "junk.db", Intent(do="drop"))
    assert [found.books for found in list_spools(tmp_path)] == [None]


# --- a free spool ------------------------------------------------------------------------------------------------------


def test_a_command_for_a_free_spool_is_carried_out_at_once(path: Path) -> None:
    """Behind what waits, under a new number, elsewhere if that is wanted; and the lock is free again."""
    assert request(path, Intent(do="requeue", letter=1, conversation="c_33333333")) == "applied"
    assert bodies(path) == [(3, LANE, '{"n":3}'), (4, "c_33333333", '{"n":1}')]
    assert request(path, Intent(do="drop")) == "applied"
    assert list_dead_letters(path) == []
    [found] = list_spools(path.parent)
    assert found.books is not None
    assert (found.books.stored_items, found.books.pending_items, found.books.dropped_items) == (3, 2, 1)
    lock = system.try_lock(path.with_suffix(".lock"))
    assert lock is not None
    lock.release()


def test_requeuing_or_releasing_lifts_the_seal_of_a_conversation(path: Path) -> None:
    """Somebody has made room in it, or knows better."""
    request(path, Intent(do="release", conversation=OTHER))
    held = Spool.open(path, None)
    assert held.sealed_lanes() == []
    held.begin()
    held.note_lane(OTHER, sealed=True)
    held.commit()
    held.close()
    request(path, Intent(do="requeue", conversation=OTHER))
    held = Spool.open(path, None)
    assert held.sealed_lanes() == []
    assert [row.id for row in held.pending(OTHER)] == [4]
    assert held.refused_ids() == [1]
    held.close()


# --- an owned spool ----------------------------------------------------------------------------------------------------


def test_a_command_for_an_owned_spool_is_carried_out_by_its_owner_within_seconds(
    path: Path, owned: tuple[Buffer, Told]
) -> None:
    """Once, told to whoever sends, and removed; its file is private and was whole from the first moment."""
    buffer, told = owned
    assert request(path, Intent(do="requeue")) == "queued"
    until(lambda: told.applied)
    assert told.applied == [Applied(frozenset({LANE, OTHER}), frozenset({LANE, OTHER}))]
    until(lambda: not list(inbox_of(path).iterdir()))
    found = bodies(path)
    assert [body for _, _, body in found] == ['{"n":3}', '{"n":1}', '{"n":2}']
    assert buffer.books.pending_items == 3
    assert inbox_of(path).stat().st_mode & 0o777 == 0o700


def test_numbers_given_to_requeued_batches_are_never_given_to_new_ones(path: Path, owned: tuple[Buffer, Told]) -> None:
    """The owner appends all the while."""
    buffer, told = owned
    stored = []

    def append() -> None:
        for number in range(200):
            batch = encode_batch([{"m": number}])
            accepted, done = Accepted(LANE, [batch]), threading.Event()
            buffer.put(accepted, batch.size)
            accepted.when_stored(done.set)
            stored.append(done)

    thread = threading.Thread(target=append)
    thread.start()
    request(path, Intent(do="requeue"))
    thread.join(PATIENCE)
    for done in stored:
        assert done.wait(PATIENCE)
    until(lambda: told.applied)
    numbers = [number for number, _, _ in bodies(path)]
    assert len(numbers) == len(set(numbers)) == 203


def test_a_command_is_carried_out_once_even_if_its_file_comes_back(path: Path, owned: tuple[Buffer, Told]) -> None:
    """The owner may die between the commit and the removal of the file."""
    _, told = owned
    intent = Intent(do="drop", letter=1)
    inbox._post(path, intent)
    until(lambda: len(list_dead_letters(path)) == 1)
    until(lambda: not list(inbox_of(path).iterdir()))
    again = Intent(do="drop", letter=2, id=intent.id)
    inbox._post(path, again)
    until(lambda: not list(inbox_of(path).iterdir()))
    assert len(list_dead_letters(path)) == 1
    assert told.applied == []  # a drop gives nobody anything to send


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"do": "format"}',
        '{"do": "format", "letter": null, "conversation": null, "id": "x"}',
        '{"do": "drop", "letter": "1", "conversation": null, "id": "x"}',
        '{"do": "drop", "letter": true, "conversation": null, "id": "x"}',
        '{"do": "requeue", "letter": 1, "conversation": "../../etc", "id": "x"}',
        '{"do": "release", "letter": null, "conversation": null, "id": "x"}',
        '{"do": "drop", "letter": null, "conversation": null, "id": ""}',
        json.dumps({"do": "drop", "letter": None, "conversation": None, "id": "x", "more": "x" * 10_000}),
    ],
)
def test_nonsense_in_the_inbox_is_set_aside_with_a_warning(
    path: Path, owned: tuple[Buffer, Told], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """Told once, kept, and nothing is done; the next command is carried out all the same."""
    inbox_of(path).mkdir(exist_ok=True)
    (inbox_of(path) / "0-bad.json").write_text(text)
    request(path, Intent(do="drop", letter=1))
    until(lambda: len(list_dead_letters(path)) == 1)
    until(lambda: [file.name for file in inbox_of(path).iterdir()] == ["0-bad.bad"])
    assert caplog.text.count("not understood") == 1


@pytest.mark.parametrize(
    "values",
    [
        {"do": "format"},
        {"do": "drop", "letter": "1"},
        {"do": "drop", "letter": True},
        {"do": "requeue", "conversation": "no"},
        {"do": "release"},
        {"do": "release", "conversation": LANE, "letter": 1},
        {"do": "drop", "id": "a/b"},
    ],
)
def test_a_command_that_cannot_be_meant_is_refused_where_it_is_made(values: dict[str, Any]) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match=r"Intent"):
        Intent(**values)


def test_commands_that_waited_for_nobody_are_carried_out_by_the_next_owner(path: Path, monkeypatch: Any) -> None:
    """Written for an owner that died before it looked."""
    inbox._post(path, Intent(do="requeue", letter=2))
    told = Told()
    buffer = Buffer(path.parent, BufferLimits(), told)
    buffer.start()
    until(lambda: told.applied)
    assert buffer.close(PATIENCE)
    assert [number for number, _, _ in bodies(path)] == [3, 4]


def test_a_command_for_an_adopted_spool_is_carried_out_by_its_adopter(path: Path, monkeypatch: Any) -> None:
    """It is nobody's own, and held all the same."""
    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.02)
    first = path.with_name("0000000000000000-00000000.db")
    Spool.open(first, None).close()
    told = Told()
    buffer = Buffer(path.parent, BufferLimits(), told)
    buffer.start()
    assert buffer.spool_path == first
    assert request(path, Intent(do="requeue", letter=1)) == "queued"
    until(lambda: told.applied)

    def read(spools: Spools) -> list[int]:
        return [row.id for spool in spools.adopted for row in spool.pending(LANE)]

    assert buffer.run(read).result(PATIENCE) == [3, 4]
    assert buffer.close(PATIENCE)
