"""The ledger of a site: the books of spool files that are gone.

A spool that is drained and deleted leaves its totals here, so that the sums over a site never go back. An entry is
written under the spool's name before the file is removed, and folded into the rest once it is: dying in between, and
doing it all again, counts nothing twice.

    ledger.json     {"total": {counter: number}, "spools": {name: {"file": name, counter: number}}}
    ledger.lock     held while it is read and written

This module knows no SQL, and no spool but by its name and its books.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from memlog import system
from memlog.spool import Books

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WAIT_SECONDS = 2.0


def enter(directory: Path, name: str, file: str, books: Books) -> bool:
    """Write the totals of spool ``name``, kept in ``file``, which is to be deleted next; whether that is done.

    OSError if the disk refuses. Not done if somebody else keeps the ledger for long.
    """
    with _held(directory) as held:
        if held:
            found = _read(directory)
            for other, entry in list(found["spools"].items()):
                if other != name and not (directory / str(entry.get("file", ""))).exists():
                    found["total"] = _counters(_books_of(found["total"]) + _books_of(found["spools"].pop(other)))
            found["spools"][name] = {"file": file, **_counters(books)}
            _write(directory, found)
        return held


def totals(directory: Path) -> Books:
    """The sums over all spools of the site that are gone, whoever held them. OSError if the disk refuses."""
    found = _read(directory)
    entries = [entry for entry in found["spools"].values() if not (directory / str(entry.get("file", ""))).exists()]
    return sum((_books_of(entry) for entry in entries), _books_of(found["total"]))


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[bool]:
    deadline = time.monotonic() + _WAIT_SECONDS
    while (lock := system.try_lock(directory / "ledger.lock")) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _read(directory: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"total": {}, "spools": {}}
    path = directory / "ledger.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return empty
    except (ValueError, RecursionError):
        found = None
    if (
        isinstance(found, dict)
        and all(isinstance(found.get(key), dict) for key in empty)
        and all(isinstance(entry, dict) for entry in found["spools"].values())
    ):
        return found
    # Sums are worth a note, and not worth stopping for.
    with contextlib.suppress(OSError):
        path.rename(path.with_name(f"ledger.json.corrupt-{time.time_ns()}"))
    return empty


def _write(directory: Path, found: dict[str, Any]) -> None:
    system.write_private_file(directory / "ledger.json", json.dumps(found).encode())


def _counters(books: Books) -> dict[str, int]:
    return {name: getattr(books, name) for name in Books.__dataclass_fields__ if name != "next_id"}


def _books_of(entry: dict[str, Any]) -> Books:
    names = [name for name in Books.__dataclass_fields__ if name != "next_id"]
    return Books(**{name: value for name in names if isinstance(value := entry.get(name, 0), int)})
