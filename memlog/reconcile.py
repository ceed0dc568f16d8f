"""What the tail of a conversation's log says about requests whose outcome is unknown. Pure.

A conversation with one writer grows only by that writer's requests, and a request is always the longest waiting batches
in order. So everything past the last known end of the log is a row of copies of a *prefix* of what still waits: none,
one (it landed), or several (it landed more than once). Anything else is somebody else's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memlog.models import Item


@dataclass(frozen=True, slots=True)
class Explanation:
    """``batches`` leading batches landed, the first item at ``first_seq``; ``duplicates``: ranges of further copies."""

    batches: int
    first_seq: int
    duplicates: tuple[tuple[int, int], ...]


def explain(waiting: Sequence[Sequence[dict[str, Any]]], tail: Sequence[Item], start: int) -> Explanation | None:
    """Read ``tail``, the log from ``start`` to its end, as copies of a prefix of ``waiting`` (payloads by batch).

    None if that is impossible: somebody else wrote there, and nothing is proved. An empty tail proves that nothing
    landed. Of several copies the last of the longest counts as the batch, the others as duplicates. Items are compared
    type by type (1 is neither true nor 1.0), and a batch must carry one time of recording throughout.
    """
    batches = [[_canonical(payload) for payload in batch] for batch in waiting]
    log = [(_canonical(item.payload), item.recorded_at) for item in tail]
    copies: list[tuple[int, int, int]] = []  # batches, first index, index past the last
    position = 0
    while position < len(log):
        count, end = _longest_prefix(batches, log, position)
        if count == 0:
            return None
        copies.append((count, position, end))
        position = end
    if not copies:
        return Explanation(0, start, ())
    landed = max(enumerate(copies), key=lambda pair: (pair[1][0], pair[0]))[1]
    others = tuple((start + first, start + end - 1) for count, first, end in copies if (count, first, end) != landed)
    return Explanation(landed[0], start + landed[1], others)


def _longest_prefix(batches: list[list[str]], log: list[tuple[str, Any]], position: int) -> tuple[int, int]:
    count = 0
    for batch in batches:
        there = log[position : position + len(batch)]
        if [text for text, _ in there] != batch or len({time for _, time in there}) != 1:
            break
        position += len(batch)
        count += 1
    return count, position


def _canonical(payload: dict[str, Any]) -> str:
    return json.dumps(payload, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
