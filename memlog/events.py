"""What a log tells about itself: event values for ``on_event``, and one log line per change of state.

Nothing here is told per attempt, and nothing holds a payload or a credential.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger("memlog")

EventKind = Literal[
    "stored",  # batches are on this machine's disk: conversation_id, items
    "acknowledged",  # a request was taken: conversation_id, items, first_seq, last_seq
    "refused",  # a batch became a dead letter: conversation_id, items, error
    "sealed",  # the conversation is full; what waited became dead letters: conversation_id, items, error
    "duplicate",  # a range of the log is a second copy of ours: conversation_id, first_seq, last_seq
    "possible_duplicate",  # it could not be told whether items are there twice: conversation_id, reason
    "several_writers",  # somebody else appends to this conversation: conversation_id
    "log_reset",  # the server's conversation is shorter than it was: conversation_id, reason
    "held",  # one conversation waits, the others go on: conversation_id, reason
    "blocked",  # nothing moves until an operator acts: reason, error
    "waiting",  # the server cannot be reached, or asked for a pause: reason, error
    "ok",  # after blocked or waiting: batches are acknowledged again
    "adopted",  # what another process left is sent from here now: items, reason
    "degraded",  # a damaged file was replaced; nothing that its books know of is missing: items, reason
    "lost",  # a damaged file did not hold everything any more: items, reason
    "disk_trouble",  # the disk takes no commits: reason
    "disk_ok",  # it does again
]

_LEVELS: dict[EventKind, int] = {
    "stored": logging.DEBUG,
    "acknowledged": logging.DEBUG,
    "adopted": logging.INFO,
    "ok": logging.INFO,
    "disk_ok": logging.INFO,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened; fields that do not apply are None. Kinds may be added: pass over unknown ones."""

    kind: EventKind
    conversation_id: str | None = None
    items: int | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    reason: str | None = None
    error: Exception | None = None

    def log(self) -> None:
        """Write it to the logger ``memlog``: WARNING for what an operator should know, less for the rest."""
        level = _LEVELS.get(self.kind, logging.WARNING)
        if logger.isEnabledFor(level):
            logger.log(level, "memlog: %s", _sentence(self))


def _sentence(event: Event) -> str:
    where = f"conversation {event.conversation_id}"
    why = event.reason or str(event.error)
    span = f"{event.first_seq} to {event.last_seq}"
    return {
        "stored": f"{where}: {event.items} item(s) stored",
        "acknowledged": f"{where}: {event.items} item(s) acknowledged as {span}",
        "refused": f"{where}: {event.items} item(s) refused and kept as a dead letter: {why}",
        "sealed": f"{where} is full; {event.items} waiting item(s) are kept as dead letters, further appends raise",
        "duplicate": f"{where}: items {span} of the log are a second copy, left by a request whose outcome was unknown",
        "possible_duplicate": f"{where}: some items may be in the log twice: {why}",
        "several_writers": f"{where} has several writers: order between them is the order of arrival",
        "log_reset": f"{where}: {why}",
        "held": f"{where} waits, the others go on: {why}",
        "blocked": f"sending is blocked, everything is kept: {why}",
        "waiting": f"sending waits, everything is kept: {why}",
        "ok": "sending again",
        "adopted": f"{event.items} item(s) that another process left are sent from here: {why}",
        "degraded": f"a file of the buffer was damaged; {event.items} item(s) in it go on: {why}",
        "lost": f"{event.items} item(s) of the buffer are lost: {why}",
        "disk_trouble": f"the disk takes no commits; items wait in memory: {why}",
        "disk_ok": "the disk takes commits again",
    }[event.kind]
