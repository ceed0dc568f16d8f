"""What a log answers when it is asked about itself: plain values, frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from memlog.errors import to_record

if TYPE_CHECKING:
    from datetime import datetime

    from memlog.errors import MemlogError, PermanentError

__all__ = ["DeadLetter", "Duplicate", "FlushReport", "State", "Statistics"]

State = Literal["ok", "waiting", "blocked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushReport:
    """What :meth:`MemoryLog.flush` saw. Counts are items.

    ``complete``: nothing that had been appended before is left. ``acknowledged`` and ``refused``: became so meanwhile.
    ``pending``: on this machine, not at the server. ``state`` and ``reason`` as in :class:`Statistics`.
    """

    complete: bool
    acknowledged: int
    pending: int
    refused: int
    state: State
    reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """A log at one moment. ``state``: ``ok``, ``waiting`` (goes on by itself), ``blocked`` (an operator must act).

    The books, over the files this log holds: stored = acknowledged + pending + refused + dropped + forgotten + lost, in
    items as in batches. Forgotten is what was acknowledged so long ago that its place is no longer kept, and lost what
    a damaged file did not give back. ``earlier_…_items`` are the books of files that were emptied and removed, by
    whatever process of the site, as of a few seconds ago: the same in each process, so add them once. Nothing in them
    is pending or refused.

    ``unstored_bytes`` are accepted and not yet on disk. ``oldest_pending_seconds`` is how long the oldest of what is
    pending waits, None if nothing is; ``spools`` is the number of files held.

    Traffic counts since the log was opened in this process. Of ``requests_sent``, ``requests_acknowledged`` are known
    to have arrived, also those that were found by reading the log. The others count the failed ones by their answers:
    ``requests_invalid`` (a batch), ``requests_full`` (a conversation), ``requests_throttled`` and ``requests_blocked``
    (the site; credentials or address) were refused, ``requests_transient`` certainly not carried out,
    ``requests_unknown`` perhaps (a time-out, a broken connection, a 5xx); each of these is looked for before it is sent
    again.

    ``gate_seconds``: how long the whole site still waits before the next request, 0 while that is under way, None if
    the site does not wait. ``held_conversations`` wait by themselves after an error of their own,
    ``sealed_conversations`` are known to be full. ``last_error`` is what sending met last, kept when it goes well
    again, ``last_error_seconds`` how long ago; both None if there was none. It holds no payload and no credential, and
    is left out when two values are compared.
    """

    state: State
    reason: str | None
    stored_items: int
    acknowledged_items: int
    pending_items: int
    refused_items: int
    dropped_items: int
    stored_batches: int
    acknowledged_batches: int
    pending_batches: int
    refused_batches: int
    dropped_batches: int
    pending_bytes: int
    unstored_bytes: int
    requests_sent: int
    requests_in_flight: int
    duplicate_items: int
    forgotten_items: int = 0
    lost_items: int = 0
    forgotten_batches: int = 0
    lost_batches: int = 0
    oldest_pending_seconds: float | None = None
    spools: int = 1
    requests_acknowledged: int = 0
    requests_invalid: int = 0
    requests_full: int = 0
    requests_throttled: int = 0
    requests_blocked: int = 0
    requests_transient: int = 0
    requests_unknown: int = 0
    gate_seconds: float | None = None
    held_conversations: int = 0
    sealed_conversations: int = 0
    last_error: MemlogError | None = field(default=None, compare=False)  # errors compare by identity
    last_error_seconds: float | None = None
    earlier_stored_items: int = 0
    earlier_acknowledged_items: int = 0
    earlier_dropped_items: int = 0
    earlier_forgotten_items: int = 0
    earlier_lost_items: int = 0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A batch that the server refused, kept on disk with the reason until it is requeued or dropped."""

    id: str
    conversation_id: str
    items: int
    bytes: int
    refused_at: datetime
    error: PermanentError
    payloads: list[dict[str, Any]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can take it, to be exported: the time in ISO 8601, the error as its class and its data."""
        record = to_record(self.error)
        error = {"type": record["type"], "message": str(self.error), **record["data"]}
        return {
            "id": self.id,
            "conversation_id": self.conversation_id,
            "items": self.items,
            "bytes": self.bytes,
            "refused_at": self.refused_at.isoformat(),
            "error": error,
            "payloads": self.payloads,
        }


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A range of a conversation's log, inclusive, that holds a second copy of what stands elsewhere in it."""

    conversation_id: str
    first_seq: int
    last_seq: int
