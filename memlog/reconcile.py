"""What the tail of a conversation's log says about requests whose outcome is unknown. Pure.

A conversation with one writer grows only by that writer's requests, and a request is always the longest waiting batches
in order. So everything past the last known end of the log is a row of copies of a *prefix* of what still waits: none,
one (it landed), or several (it landed more than once). To these come *echoes*: requests that were sent again, and whose
first sending may arrive late. Anything else is somebody else's, and proves nothing, unless items carry stamps.

Items are compared by their :func:`key`, so that a request can be recognised when its payloads are long gone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memlog.models import Item

Batches = list[list[bytes]]
"""Batches in order, each as the keys of its items."""


class Explanation(NamedTuple):
    """``batches`` leading batches landed, the first item at ``first_seq``; ``duplicates``: ranges of further copies."""

    batches: int
    first_seq: int
    duplicates: tuple[tuple[int, int], ...]

    def copies(self, waiting: Batches) -> tuple[tuple[int, int], ...]:
        """All ranges that hold copies, where what counts as the batch is known to stand elsewhere."""
        items = sum(len(batch) for batch in waiting[: self.batches])
        landed = ((self.first_seq, self.first_seq + items - 1),) if items else ()
        return tuple(sorted([*self.duplicates, *landed]))


def key(payload: dict[str, Any]) -> bytes:
    """A digest that is equal for equal payloads only, type by type: 1 is neither true nor 1.0."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for piece in _pieces(payload):
            digest.update(piece)
    except RecursionError:
        return b""  # deeper than anything of ours, so equal to nothing
    return digest.digest()


def _pieces(value: Any) -> Iterator[bytes]:
    # Neither JSON text nor repr: both fail on a long integer where the program has lowered Python's limit for them.
    if isinstance(value, dict):
        yield b"{%d;" % len(value)
        for name in sorted(value):
            yield from _pieces(name)
            yield from _pieces(value[name])
    elif isinstance(value, list):
        yield b"[%d;" % len(value)
        for child in value:
            yield from _pieces(child)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield b'"%d;' % len(text)
        yield text
    elif isinstance(value, bool) or value is None:
        yield repr(value).encode()
    elif isinstance(value, int):
        yield f"i{value:x};".encode()
    else:
        yield b"f%b;" % float(value).hex().encode()


def explain(
    waiting: Batches, tail: Sequence[Item], start: int, *, echoes: Sequence[Batches] = (), stamped: bool = False
) -> Explanation | None:
    """Read ``tail``, the log from ``start`` to its end, as copies of a prefix of ``waiting`` or of one of ``echoes``.

    None if that is impossible: somebody else wrote there, and nothing is proved. With ``stamped`` items, which are
    equal to nothing but their copies, what somebody else wrote is passed over instead. An empty tail proves that
    nothing landed. Of several copies of ``waiting`` the last of the longest counts as the batch, all other copies as
    duplicates. A batch must carry one time of recording throughout.
    """
    log = [(key(item.payload), item.recorded_at) for item in tail]
    copies = _copies([waiting, *echoes], log, foreign=stamped)
    if copies is None:
        return None
    ours = [copy for copy in copies if copy.of == 0]
    landed = max(enumerate(ours), key=lambda pair: (pair[1].batches, pair[0]))[1] if ours else None
    others = tuple((start + copy.first, start + copy.end - 1) for copy in copies if copy is not landed)
    if landed is None:
        return Explanation(0, start, others)
    return Explanation(landed.batches, start + landed.first, others)


class _Copy(NamedTuple):
    of: int  # which request: 0 is what waits
    batches: int
    first: int
    end: int  # behind the last item


def _copies(requests: list[Batches], log: list[tuple[bytes, Any]], *, foreign: bool) -> list[_Copy] | None:
    """The whole of ``log`` cut into copies; None if it cannot be, unless ``foreign`` items may lie between.

    Decided from the end: the longest copy that fits at a place may leave a rest that is none, where batches are alike.
    """
    best: list[_Copy | None] = [None] * len(log)
    for position in range(len(log) - 1, -1, -1):
        for of, batches in enumerate(requests):
            for count, end in _prefixes(batches, log, position):
                if foreign or end == len(log) or best[end] is not None:
                    best[position] = _Copy(of, count, position, end)
            if best[position] is not None:
                break  # what waits is looked for first
    copies = []
    position = 0
    while position < len(log):
        found = best[position]
        if found is not None:
            copies.append(found)
            position = found.end
        elif foreign:
            position += 1
        else:
            return None
    return copies


def _prefixes(batches: Batches, log: list[tuple[bytes, Any]], position: int) -> Iterator[tuple[int, int]]:
    for count, batch in enumerate(batches, start=1):
        there = log[position : position + len(batch)]
        if [item for item, _ in there] != batch or len({time for _, time in there}) != 1:
            return
        position += len(batch)
        yield count, position
