"""What becomes of a damaged spool file: it is set aside, and what is whole in it goes on in a fresh one.

The damaged file is never deleted, nor written to again: it is renamed, with what belongs to it, to
``<name>.corrupt-<time>``. The fresh one takes its place under the same lock, with the same spool name and the same
ids, so that receipts and dead letters keep their meaning. Every batch is taken over byte for byte or not at all; its
checksum decides. What is missing then is counted as lost.

First the tables are read as tables, from both ends where something in between cannot be read. If batches are still
missing, every page is looked at by itself (:mod:`memlog.pages`).
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from memlog import system
from memlog.errors import BufferUnusableError
from memlog.pages import records
from memlog.schema import companions, connect, read_only, wal_of
from memlog.spool import Books, NewRow, Spool, checksum, peek_books

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from memlog.pages import Value

_ROWS_A_COMMIT = 500
_FACTS_MAX = 10_000_000  # a damaged tree may lead in circles
_BATCHES = ("pending", "refused")
_FACTS = ("meta", "lane", "echo", "duplicate", "acknowledged", "intent")
_OWN_FACTS = ("name", "clean")  # of meta: the fresh file has its own


class Salvage(NamedTuple):
    """What became of a damaged file: where it is now, and how much of it goes on in the fresh one.

    ``lost_items`` is what its books say beyond that; with ``books_known`` false they could not be read.
    """

    aside: Path
    reason: str
    kept_batches: int
    kept_items: int
    lost_batches: int
    lost_items: int
    books_known: bool


def recover(spool: Spool, reason: str) -> Salvage:
    """Give an open spool, found damaged, a fresh file with all that can be read of the old one."""
    assert spool.path is not None
    with contextlib.suppress(sqlite3.Error):
        spool.rollback()
    spool.let_go()
    try:
        done = salvage(spool.path, reason, name=spool.name, known=spool.books)
    except BaseException:
        # The disk refuses. What can be read of the old one is read meanwhile, unless it has gone aside already.
        if spool.path.exists():
            with contextlib.suppress(sqlite3.Error, BufferUnusableError):
                spool.reopen()
        raise
    spool.reopen()
    return done


def salvage(path: Path, reason: str, *, name: str | None = None, known: Books | None = None) -> Salvage:
    """Set the file at ``path`` aside, and put a fresh one with all that can be read of it into its place.

    Under the spool's lock, with nobody reading. ``name`` and ``known``, where the caller has them, are believed more
    than the file. OSError or sqlite3.Error, with the file where it was, if the disk refuses.
    """
    draft = _draft_of(path)
    finish(path)  # or, if the last step was refused before, the draft to be removed is all there is
    _remove(draft)
    if not path.is_dir():
        name, known = _identity(path, name, known)
    fresh = connect(draft)
    try:
        fresh.execute("BEGIN")
        if name is not None:
            fresh.execute("UPDATE meta SET value = ? WHERE key = 'name'", (name,))
        if not path.is_dir():
            _fill(fresh, path, known)
        fresh.execute("COMMIT")
    finally:
        fresh.close()
    books, lost = _settle(draft, known)
    aside = _name_aside(path)
    path.rename(aside)
    _finish(path, aside)
    return Salvage(
        aside=aside,
        reason=reason,
        kept_batches=books.pending_batches + books.refused_batches,
        kept_items=books.pending_items + books.refused_items,
        lost_batches=lost.lost_batches,
        lost_items=lost.lost_items,
        books_known=known is not None,
    )


def finish(path: Path) -> None:
    """If a salvage of ``path`` was cut off between its last two steps, take the last one. Under the spool's lock."""
    if _draft_of(path).exists():
        if path.exists():
            _remove(_draft_of(path))  # it may be half done, and is done again
        else:
            _finish(path, _name_aside(path))


def unfinished(directory: Path) -> list[Path]:
    """The spool files that :func:`finish` must be called for, and which may not exist."""
    return [file.with_suffix("") for file in directory.glob("*.db.salvage")]


def _draft_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.salvage")


def _name_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    wanted = path.with_name(f"{path.name}.corrupt-{stamp}")
    number = 1
    while wanted.exists():
        number += 1
        wanted = path.with_name(f"{path.name}.corrupt-{stamp}-{number}")
    return wanted


def _finish(path: Path, aside: Path) -> None:
    # What belongs to the old file must be gone before the fresh one is there: SQLite would put the two together.
    for companion, its_aside in zip(companions(path), companions(aside), strict=True):
        with contextlib.suppress(FileNotFoundError):
            companion.rename(its_aside)
    _draft_of(path).rename(path)
    system.sync_directory(path.parent)


def _remove(draft: Path) -> None:
    for file in (*companions(draft), draft):
        file.unlink(missing_ok=True)


def _identity(path: Path, name: str | None, known: Books | None) -> tuple[str | None, Books | None]:
    """The spool's name and its books, from the file where the caller does not know them."""
    with contextlib.suppress(sqlite3.Error), _damaged(path) as old:
        if known is None:
            with contextlib.suppress(sqlite3.Error):
                known = peek_books(old)
        if name is None:
            with contextlib.suppress(sqlite3.Error):
                found = old.execute("SELECT value FROM meta WHERE key = 'name'").fetchone()
                name = found[0] if found and isinstance(found[0], str) else None
    return name, known


@contextlib.contextmanager
def _damaged(path: Path) -> Iterator[sqlite3.Connection]:
    with read_only(path) as old:
        old.text_factory = lambda text: text.decode("utf-8", "replace")  # the checksum finds out
        old.execute("PRAGMA writable_schema = ON")  # or SQLite would not open a file that has been cut
        yield old


def _fill(fresh: sqlite3.Connection, path: Path, known: Books | None) -> None:
    whole = False
    with contextlib.suppress(sqlite3.Error), _damaged(path) as old:
        complete = [_copy_batches(fresh, old, table) for table in _BATCHES]
        for table in _FACTS:
            _copy_facts(fresh, old, table)
        whole = all(complete)
    if known is not None:
        wanted = {"pending": known.pending_batches, "refused": known.refused_batches}
        whole = whole and all(_count(fresh, table) >= count for table, count in wanted.items())
    if not whole:
        _take_from_pages(fresh, path)


def _copy_batches(fresh: sqlite3.Connection, old: sqlite3.Connection, table: str) -> bool:
    """Take over the batches of one table; whether all of it could be read."""
    columns = _columns_of(fresh, table)
    query = f"SELECT {', '.join(columns)} FROM {table} "  # noqa: S608 - names of our own
    last = None
    try:
        for row in old.execute(query + "ORDER BY id"):
            if not isinstance(row[0], int) or (last is not None and row[0] <= last):
                break  # a tree that leads in circles
            last = row[0]
            _add_batch(fresh, table, columns, row)
        else:
            return True
    except sqlite3.Error:
        pass
    before = None
    with contextlib.suppress(sqlite3.Error):
        for row in old.execute(query + "WHERE id > ? ORDER BY id DESC", (last or 0,)):
            if not isinstance(row[0], int) or (before is not None and row[0] >= before):
                break
            before = row[0]
            _add_batch(fresh, table, columns, row)
    return False


def _add_batch(fresh: sqlite3.Connection, table: str, columns: Sequence[str], row: Sequence[Value]) -> None:
    """Put a batch into the fresh file if it is whole, and not there yet."""
    value: dict[str, Any] = dict(zip(columns, row, strict=True))
    batch = NewRow(**{name: value[name] for name in NewRow._fields})
    if isinstance(value["body"], bytes) and checksum(batch, value["stored_at"]) == value["crc"]:
        _insert(fresh, table, columns, row)


def _insert(fresh: sqlite3.Connection, table: str, columns: Sequence[str], row: Sequence[Value]) -> None:
    places = ", ".join("?" * len(columns))
    # What a column does not take (a NULL, say) is damaged, too. A full disk is not, and ends the salvage.
    with contextlib.suppress(sqlite3.IntegrityError, OverflowError):
        added = fresh.execute(f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({places})", row).rowcount  # noqa: S608 - as above
        if added and fresh.total_changes % _ROWS_A_COMMIT == 0:
            fresh.execute("COMMIT")  # not as a script: that would be committed before it begins
            fresh.execute("BEGIN")


def _copy_facts(fresh: sqlite3.Connection, old: sqlite3.Connection, table: str) -> None:
    columns = _columns_of(fresh, table)
    with contextlib.suppress(sqlite3.Error):
        for row in old.execute(f"SELECT {', '.join(columns)} FROM {table} LIMIT {_FACTS_MAX}"):  # noqa: S608 - names of our own
            if table != "meta" or (row[0] not in _OWN_FACTS and isinstance(row[1], int | float)):
                _insert(fresh, table, columns, row)


def _take_from_pages(fresh: sqlite3.Connection, path: Path) -> None:
    """Take over the batches that no tree leads to any more."""
    layouts = {table: _columns_of(fresh, table) for table in _BATCHES}
    settled = _columns_of(fresh, "acknowledged")
    for row_id, values in records(path, wal_of(path)):
        # Its row id stands for the column that is the primary key; that one is stored as NULL.
        if len(values) == len(settled) and values[0] is None and isinstance(values[2], str):
            _insert(fresh, "acknowledged", settled, [row_id, *values[1:]])
    for row_id, values in records(path, wal_of(path)):
        row = [row_id, *values[1:]]
        for table, columns in layouts.items():
            if len(row) == len(columns) and values[0] is None and not _is_settled(fresh, row_id):
                _add_batch(fresh, table, columns, row)


def _is_settled(fresh: sqlite3.Connection, row_id: int) -> bool:
    """Whether the batch is accounted for: a page may hold what was moved elsewhere since."""
    query = "SELECT 1 FROM {} WHERE id = ?"
    return any(
        fresh.execute(query.format(table), (row_id,)).fetchone() is not None
        for table in ("pending", "refused", "acknowledged")
    )


def _columns_of(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


def _count(db: sqlite3.Connection, table: str) -> int:
    found: tuple[int] = db.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - names of our own
    return found[0]


def _settle(draft: Path, known: Books | None) -> tuple[Books, Books]:
    """Close the books of the fresh file; what they are, and in ``lost_…`` what this has cost."""
    spool = Spool.open(draft, None)
    try:
        before = replace(known) if known is not None else Books()
        spool.begin()
        spool.books = replace(before)
        spool.recount(trusted=known is not None)
        spool.commit()
        after = replace(spool.books)
    finally:
        spool.close()
    return after, Books(
        lost_batches=max(0, after.lost_batches - before.lost_batches),
        lost_items=max(0, after.lost_items - before.lost_items),
    )
