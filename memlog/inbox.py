"""Commands from outside for a spool: requeue or drop dead letters, lift the seal of a conversation.

Only a spool's owner writes to it. So a command is a small file, an *intent*, in the directory ``<spool>.inbox`` beside
the spool; the owner carries it out within seconds, in one transaction, once, and removes it. If nobody owns the spool,
the command takes its lock and does it at once.

    <time>-<id>.json    {"id": "…", "do": "requeue" | "drop" | "release", "letter": 7, "conversation": "…"}

What cannot be understood is renamed to ``….bad``, with a warning, and kept. Looking at a spool is read-only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import sqlite3
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from memlog import stamps, system
from memlog.errors import BufferUnusableError
from memlog.limits import CONVERSATION_ID_PATTERN
from memlog.payload import decode_items, dumps
from memlog.schema import read_only
from memlog.spool import Books, NewRow, Spool, checksum, inbox_of, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

logger = logging.getLogger("memlog")

Action = Literal["requeue", "drop", "release"]

INTENTS_AT_ONCE = 100
_INTENT_BYTES_MAX = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """One command.

    Args:
        do: ``requeue`` puts dead letters behind what waits; ``drop`` throws them away; ``release`` lifts the seal of a
            conversation that was full.
        letter: the number of one dead letter; None for all of the spool, or all of ``conversation``.
        conversation: for ``requeue`` of one letter, another conversation to send it to; else, which one is meant.
    """

    do: Action
    letter: int | None = None
    conversation: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        if self.do not in get_args(Action):
            msg = f"Intent.do must be one of {', '.join(get_args(Action))}, got {self.do!r}"
            raise ValueError(msg)
        if self.letter is not None and (not isinstance(self.letter, int) or isinstance(self.letter, bool)):
            msg = f"Intent.letter must be a number or None, got {type(self.letter).__name__}"
            raise ValueError(msg)
        if self.conversation is not None and not (
            isinstance(self.conversation, str) and re.fullmatch(CONVERSATION_ID_PATTERN, self.conversation)
        ):
            msg = "Intent.conversation must be 8 to 64 of A-Z a-z 0-9 _ -"
            raise ValueError(msg)
        if self.do == "release" and (self.conversation is None or self.letter is not None):
            msg = "Intent: release needs a conversation, and no letter"
            raise ValueError(msg)
        if not isinstance(self.id, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.id):
            msg = "Intent.id must be 1 to 64 of A-Z a-z 0-9 _ -"
            raise ValueError(msg)


class Applied(NamedTuple):
    """What commands from outside did to a spool: conversations with something new to send, and those unsealed."""

    requeued: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()

    def __or__(self, other: Applied) -> Applied:
        return Applied(self.requeued | other.requeued, self.released | other.released)

    def __bool__(self) -> bool:
        return bool(self.requeued or self.released)


# --- asked from outside ----------------------------------------------------------------------------------------------


class SpoolInfo(NamedTuple):
    """A spool file as it looks from outside; ``books`` is None if it cannot be read."""

    path: Path
    books: Books | None
    owned: bool
    intents: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch in a spool, as it looks from outside. ``stored_at`` is in seconds since 1970."""

    id: int
    conversation: str
    items: int
    size: int
    stored_at: float
    body: bytes = field(repr=False)
    error: dict[str, Any] | None = None
    refused_at: float | None = None


def list_spools(directory: Path) -> list[SpoolInfo]:
    """The spools in a buffer directory, or in one site's directory of it, the oldest first."""
    found = []
    for path in sorted([*directory.glob("*.db"), *directory.glob("*/*.db")]):
        lock = system.try_lock(path.with_suffix(".lock"))
        if lock is not None:
            lock.release()
        inbox = inbox_of(path)
        found.append(SpoolInfo(path, peek(path), lock is None, len(list(inbox.glob("*.json")))))
    return found


def list_pending(path: Path, *, limit: int | None = None) -> list[Entry]:
    """What waits in the spool file at ``path``, in order. BufferUnusableError if it cannot be read."""
    query = "SELECT id, conversation, items, size, body, stored_at, crc, NULL, NULL FROM pending ORDER BY id LIMIT ?"
    return _entries(path, query, limit)


def list_dead_letters(path: Path, *, limit: int | None = None) -> list[Entry]:
    """The dead letters in the spool file at ``path``, in order. BufferUnusableError if it cannot be read."""
    query = (
        "SELECT id, conversation, items, size, body, stored_at, crc, error, refused_at FROM refused ORDER BY id LIMIT ?"
    )
    return _entries(path, query, limit)


def _entries(path: Path, query: str, limit: int | None) -> list[Entry]:
    entries = []
    try:
        with read_only(path) as db:
            for *columns, stored_at, crc, error, refused_at in db.execute(query, (-1 if limit is None else limit,)):
                row = NewRow(*columns)
                if checksum(row, stored_at) == crc:  # the rest is for the owner to deal with
                    said = None if error is None else json.loads(error)
                    when = None if refused_at is None else refused_at / 1e6
                    entries.append(Entry(*row[:4], stored_at / 1e6, row.body, said, when))
    except (sqlite3.Error, ValueError) as error:
        raise BufferUnusableError(str(path), str(error)) from error
    return entries


def request(path: Path, intent: Intent) -> Literal["applied", "queued"]:
    """Carry ``intent`` out on the spool file at ``path``: at once if nobody owns it, else by its owner within seconds.

    BufferUnusableError if there is no such spool, or it cannot be written to.
    """
    if not path.is_file():
        raise BufferUnusableError(str(path), "there is no such file")
    try:
        lock = system.try_lock(path.with_suffix(".lock"))
        if lock is None:
            _post(path, intent)
            return "queued"
        try:
            spool = Spool.open(path, lock)
        except BaseException:
            lock.release()
            raise
        try:
            spool.begin()
            apply(spool, intent, lambda: spool.books.next_id)
            spool.commit()
        finally:
            spool.close()
    except (OSError, sqlite3.Error) as error:
        raise BufferUnusableError(str(path), str(error)) from error
    return "applied"


def _post(path: Path, intent: Intent) -> None:
    inbox = inbox_of(path)
    system.make_private_directory(inbox)
    name = f"{time.time_ns() // 1000:016x}-{intent.id}.json"
    system.write_private_file(inbox / name, json.dumps(asdict(intent)).encode())


# --- carried out by the owner ----------------------------------------------------------------------------------------


def collect(path: Path) -> Iterator[tuple[Path, Intent]]:
    """The commands that wait for the owner of the spool file at ``path``, the oldest first, and where they are."""
    inbox = inbox_of(path)
    try:
        files = sorted(inbox.glob("*.json"))[:INTENTS_AT_ONCE]
    except OSError:
        return
    for file in files:
        try:
            with file.open("rb") as opened:
                found = json.loads(opened.read(_INTENT_BYTES_MAX))
            intent = Intent(**{name: found[name] for name in ("do", "letter", "conversation", "id")})
        except OSError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            with contextlib.suppress(OSError):
                file.rename(file.with_suffix(".bad"))
                reason = str(error) if isinstance(error, ValueError) else "a field is missing or of a wrong kind"
                logger.warning("memlog: a command in %s is not understood and set aside: %s", file, reason)
            continue
        yield file, intent


def letters_of(spool: Spool, intent: Intent) -> list[int]:
    """The numbers of the dead letters that ``intent`` is about."""
    if intent.do == "release":
        return []
    if intent.letter is not None:
        return [intent.letter]
    return spool.refused_ids(intent.conversation)


def apply(spool: Spool, intent: Intent, new_id: Callable[[], int]) -> Applied:
    """Carry ``intent`` out, inside a transaction; nothing if that is done. ``new_id`` numbers what is requeued."""
    if not spool.note_intent(intent.id):
        return Applied()
    requeued, released = set(), set()
    if intent.do == "release" and intent.conversation is not None:
        spool.note_lane(intent.conversation, sealed=False)
        released.add(intent.conversation)
    for letter in letters_of(spool, intent):
        row = spool.take_refused(letter)
        if row is None:
            continue  # somebody else was first
        if intent.do == "drop":
            spool.drop(row)
            continue
        target = intent.conversation if intent.letter is not None and intent.conversation else row.conversation
        send_anew(spool, row, target, new_id())
        requeued.add(target)
    return Applied(frozenset(requeued), frozenset(requeued | released))


def send_anew(spool: Spool, row: NewRow, conversation: str, row_id: int) -> None:
    """Put a dead letter behind what waits for ``conversation``, as ``row_id``; a seal of it is lifted."""
    spool.requeue(row._replace(conversation=conversation, body=_stamped_anew(row.body, row_id)), row_id)
    spool.note_lane(conversation, sealed=False)


def _stamped_anew(body: bytes, row_id: int) -> bytes:
    # Its old number may be below what the reader has seen of that writer by now: it would be taken for a copy.
    payloads = decode_items(body)
    if any(stamps.read(payload) is None for payload in payloads):
        return body
    return stamps.stamped([dumps(stamps.without(payload)) for payload in payloads], stamps.new_writer(), row_id)
