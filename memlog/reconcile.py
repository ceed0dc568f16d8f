"""What the tail of a conversation's log says about requests whose outcome is unknown. Pure.

A conversation with one writer grows only by that writer's requests, and a request is always the longest waiting batches
in order. So everything past the last known end of the log is a row of copies of a *prefix* of what still waits: none,
one (it landed), or several (it landed more than once). Anything else is somebody else's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memlog.models import Item


class Explanation(NamedTuple):
    """``batches`` leading batches landed, the first item at ``first_seq``; ``duplicates``: ranges of further copies."""

    batches: int
    first_seq: int
    duplicates: tuple[tuple[int, int], ...]


def explain(waiting: Sequence[Sequence[dict[str, Any]]], tail: Sequence[Item], start: int) -> Explanation | None:
    """Read ``tail``, the log from ``start`` to its end, as copies of a prefix of ``waiting`` (payloads by batch).

    None if that is impossible: somebody else wrote there, and nothing is proved. An empty tail proves that nothing
    landed. If there are several ways to read it, earlier copies are as long as can be. Of several copies the last of
    the longest counts as the batch, the others as duplicates. Items are compared type by type (1 is neither true nor
    1.0), and a batch must carry one time of recording throughout.
    """
    batches = [[_canonical(payload) for payload in batch] for batch in waiting]
    log = [(_canonical(item.payload), item.recorded_at) for item in tail]
    copies = _copies(batches, log)
    if copies is None:
        return None
    if not copies:
        return Explanation(0, start, ())
    landed = max(enumerate(copies), key=lambda pair: (pair[1][0], pair[0]))[1]
    others = tuple((start + first, start + end - 1) for count, first, end in copies if (count, first, end) != landed)
    return Explanation(landed[0], start + landed[1], others)


def _copies(batches: list[list[object]], log: list[tuple[object, Any]]) -> list[tuple[int, int, int]] | None:
    """The whole of ``log`` cut into copies: batches, first index, index past the last. None if it cannot be.

    Decided from the end: the longest copy that fits at a place may leave a rest that is none, where batches are alike.
    """
    longest: list[tuple[int, int] | None] = [None] * len(log)  # batches and end of the copy that begins there
    for position in range(len(log) - 1, -1, -1):
        for count, end in _prefixes(batches, log, position):
            if end == len(log) or longest[end] is not None:
                longest[position] = count, end
    copies = []
    position = 0
    while position < len(log):
        found = longest[position]
        if found is None:
            return None
        copies.append((found[0], position, found[1]))
        position = found[1]
    return copies


def _prefixes(batches: list[list[object]], log: list[tuple[object, Any]], position: int) -> Iterator[tuple[int, int]]:
    for count, batch in enumerate(batches, start=1):
        there = log[position : position + len(batch)]
        if [item for item, _ in there] != batch or len({time for _, time in there}) != 1:
            return
        position += len(batch)
        yield count, position


def _canonical(payload: dict[str, Any]) -> object:
    try:
        return _typed(payload)
    except RecursionError:
        return object()  # deeper than anything of ours, so equal to nothing


def _typed(value: Any) -> object:
    # Neither JSON text nor repr: both fail on a long integer where the program has lowered Python's limit for them.
    if isinstance(value, dict):
        return dict, frozenset((key, _typed(child)) for key, child in value.items())
    if isinstance(value, list):
        return list, tuple([_typed(child) for child in value])
    return type(value), value
