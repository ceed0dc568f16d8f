"""The format of a spool file: its tables, its versions, and how a connection to one is set up.

A file whose header, tables or bytes cannot be right raises :class:`DamagedError`: what is in it may be salvaged. One
that is somebody else's, or of a newer version, raises :class:`NotOursError` and is not touched.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import sqlite3
from typing import TYPE_CHECKING

from memlog import system
from memlog.errors import BufferUnusableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APPLICATION_ID = 0x6D6C6F67  # "mlog"
SQLITE_OLDEST = (3, 35, 0)  # RETURNING
WAL_BYTES_MAX = 16 * 1024 * 1024

PASSING_ERRORS = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_BUSY", "SQLITE_CANTOPEN", "SQLITE_NOMEM")
"""The disk is in trouble and may get out of it; anything else is damage or a bug, and waiting does not help."""

_DAMAGE_ERRORS = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_DATA")


class DamagedError(BufferUnusableError):
    """The file holds what no memlog wrote: it is damaged. What is still readable can be salvaged."""


class NotOursError(BufferUnusableError):
    """The file is somebody else's, or from a newer version."""


def is_damage(error: BaseException) -> bool:
    """Whether ``error`` says that the file's contents cannot be right."""
    if isinstance(error, DamagedError):
        return True
    return isinstance(error, sqlite3.Error) and error_name(error).startswith(_DAMAGE_ERRORS)


def is_passing(error: sqlite3.Error) -> bool:
    """Whether the disk may get over ``error`` by itself."""
    return error_name(error).startswith(PASSING_ERRORS) and not is_damage(error)


def error_name(error: BaseException) -> str:
    """SQLite's own name for ``error``."""
    return getattr(error, "sqlite_errorname", "")


_SCHEMA_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE pending (
    id INTEGER PRIMARY KEY,
    conversation TEXT NOT NULL,
    items INTEGER NOT NULL CHECK (items > 0),
    size INTEGER NOT NULL CHECK (size > 0),
    crc INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX pending_by_lane ON pending (conversation, id);
CREATE TABLE acknowledged (
    turn INTEGER PRIMARY KEY,
    id INTEGER NOT NULL UNIQUE,
    conversation TEXT NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL
);
CREATE INDEX acknowledged_by_lane ON acknowledged (conversation, last_seq);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY,
    conversation TEXT NOT NULL,
    items INTEGER NOT NULL,
    size INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    refused_at INTEGER NOT NULL,
    error TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE TABLE lane (
    conversation TEXT PRIMARY KEY,
    next_seq INTEGER,
    anchor BLOB,
    sealed INTEGER NOT NULL DEFAULT 0,
    shared INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE echo (
    conversation TEXT NOT NULL,
    sent_at INTEGER NOT NULL,
    keys TEXT NOT NULL
);
CREATE INDEX echo_by_lane ON echo (conversation);
CREATE TABLE duplicate (
    conversation TEXT NOT NULL,
    first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    UNIQUE (conversation, first_seq, last_seq)
);
CREATE TABLE books (
    next_id INTEGER NOT NULL,
    stored_batches INTEGER NOT NULL, stored_items INTEGER NOT NULL,
    acknowledged_batches INTEGER NOT NULL, acknowledged_items INTEGER NOT NULL,
    refused_batches INTEGER NOT NULL, refused_items INTEGER NOT NULL,
    dropped_batches INTEGER NOT NULL, dropped_items INTEGER NOT NULL,
    forgotten_batches INTEGER NOT NULL, forgotten_items INTEGER NOT NULL,
    lost_batches INTEGER NOT NULL, lost_items INTEGER NOT NULL,
    pending_batches INTEGER NOT NULL, pending_items INTEGER NOT NULL, pending_bytes INTEGER NOT NULL,
    crc INTEGER
);
INSERT INTO books VALUES (1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL);
CREATE TABLE intent (
    turn INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE
);
"""

MIGRATIONS: tuple[str, ...] = (_SCHEMA_1,)
"""The n-th script brings a file from version n to n + 1. Scripts are only ever added."""


def connect(path: Path | None) -> sqlite3.Connection:
    """Open or create the file, bring it to the newest version, and set the connection up for power cuts.

    None is a database in memory. Raises DamagedError or NotOursError, with the file untouched, or BufferUnusableError
    where the file system or the disk refuses.
    """
    where = ":memory:" if path is None else str(path)
    if sqlite3.sqlite_version_info < SQLITE_OLDEST:
        raise BufferUnusableError(where, f"SQLite {sqlite3.sqlite_version} is older than 3.35")
    try:
        if path is not None:
            system.make_private_file(path)
            wal = wal_of(path)
            if path.stat().st_size == 0 and wal.exists() and wal.stat().st_size > 0:
                raise DamagedError(where, "the file is empty, what belongs to it is not")  # SQLite would remove that
            if any(place.exists() and not place.is_file() for place in companions(path)):
                raise DamagedError(where, "what stands beside it is no file")
        db = sqlite3.connect(where, timeout=5.0, isolation_level=None, check_same_thread=True)
    except (OSError, sqlite3.Error) as error:
        raise BufferUnusableError(where, str(error)) from error
    try:
        _prepare(db, where, shared=path is None or not system.is_remote(path))
    except BufferUnusableError:
        db.close()
        raise
    except sqlite3.Error as error:
        db.close()
        kind = BufferUnusableError if is_passing(error) else DamagedError
        raise kind(where, f"{error}; the file was left as it is") from error
    return db


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[sqlite3.Connection]:
    """Read the file without taking part in it: for short looks from outside, beside an owner that writes.

    sqlite3.Error, here or inside, if it cannot be read.
    """
    if not path.is_file() or path.stat().st_size == 0:
        # SQLite would remove the WAL beside an empty one, even here, and wait for ever at a pipe.
        msg = "there is no file, or it is empty"
        raise sqlite3.DatabaseError(msg)
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.2, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


def wal_of(path: Path) -> Path:
    """The write-ahead log beside ``path``."""
    return path.with_name(f"{path.name}-wal")


def companions(path: Path) -> list[Path]:
    """What SQLite may have put beside ``path``, and must go where it goes."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


def _prepare(db: sqlite3.Connection, where: str, *, shared: bool) -> None:
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    db.execute("PRAGMA mmap_size = 0")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    owner = db.execute("PRAGMA application_id").fetchone()[0]
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not (empty and version == 0) and owner != APPLICATION_ID:
        raise NotOursError(where, "the file is a database, but not one of memlog's")
    if version > len(MIGRATIONS):
        known = len(MIGRATIONS)
        reason = f"it was written by a newer version (format {version}, this one knows {known}): upgrade memlog-sdk"
        raise NotOursError(where, reason)
    if not empty and shape(db) != _shape_of(version):
        raise DamagedError(where, "its tables are not those of a spool")
    if empty:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect only before the journal mode is set
    # A WAL needs memory that is shared, and over a network file system that is another machine's.
    db.execute(f"PRAGMA journal_mode = {'WAL' if shared else 'TRUNCATE'}")
    # FULL: a commit is on the disk when it returns. Grouped as they are, it costs nothing over NORMAL.
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_MAX}")
    _migrate(db, version)


def _migrate(db: sqlite3.Connection, version: int) -> None:
    while version < len(MIGRATIONS):
        script = MIGRATIONS[version]
        version += 1
        db.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {version}; PRAGMA application_id = {APPLICATION_ID};"
        )
        if db.execute("SELECT 1 FROM meta WHERE key = 'name'").fetchone() is None:
            db.execute("INSERT INTO meta VALUES ('name', ?)", (secrets.token_hex(8),))
        db.execute("COMMIT")


def shape(db: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """The tables and indexes, as they were declared."""
    return db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()


def _shape_of(version: int) -> list[tuple[str, str, str]]:
    return _shape_after(MIGRATIONS[:version])


@functools.lru_cache(maxsize=4)
def _shape_after(scripts: tuple[str, ...]) -> list[tuple[str, str, str]]:
    db = sqlite3.connect(":memory:")
    try:
        for script in scripts:
            db.executescript(script)
        return shape(db)
    finally:
        db.close()
