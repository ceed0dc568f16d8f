"""Compares what should be in the log with what is there. Pure functions; knows neither memlog nor HTTP.

Two payloads are the same if their JSON text is: same keys in the same order, 1 is not 1.0 and not true, -0.0 is not
0.0. A log is *identical* if it is the input, item by item and in order, once exactly those positions are taken out
that were reported as duplicates. *Lost* and *found* are counted without looking at the reports or at the order, so
that a wrong report can neither hide a loss nor explain a surplus.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .script import Conversations, Payload

Ranges = Sequence[tuple[int, int]]
"""Inclusive ranges of positions in one conversation."""

DIFFERENCES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lost` and `duplicates_found` in items; `differences` says where the log is not the input, the first few."""

    lost: int
    foreign: int
    duplicates_reported: int
    duplicates_found: int
    differences: Sequence[str] = field(default=())

    @property
    def identical(self) -> bool:
        return not self.differences


def judge(expected: Conversations, found: Conversations, reported: Mapping[str, Ranges]) -> Verdict:
    """The whole log against the whole input. `reported` are the duplicates that memlog owned up to."""
    lost = foreign = surplus = 0
    differences = [f"{conversation}: nobody appended to it" for conversation in found if conversation not in expected]
    foreign += sum(len(found[conversation]) for conversation in found if conversation not in expected)
    for conversation, items in expected.items():
        want, have = _texts(items), _texts(found.get(conversation, ()))
        wanted, had = Counter(want), Counter(have)
        lost += (wanted - had).total()
        foreign += sum(count for text, count in had.items() if text not in wanted)
        surplus += sum(count for text, count in (had - wanted).items() if text in wanted)
        if difference := _difference(want, have, _positions(reported.get(conversation, ()))):
            differences.append(f"{conversation}: {difference}")
    differences += [f"{conversation}: duplicates reported, but not ours" for conversation in {*reported} - {*expected}]
    told = sum(len(_positions(ranges)) for ranges in reported.values())
    return Verdict(lost, foreign, told, surplus, differences[:DIFFERENCES_SHOWN])


def missing(promised: Mapping[str, Collection[int]], expected: Conversations, found: Conversations) -> int:
    """How many of the promised positions of the input are absent from `found`, whatever else is in it."""
    absent = 0
    for conversation, positions in promised.items():
        want = Counter(_texts(expected[conversation][position] for position in set(positions)))
        absent += (want - Counter(_texts(found.get(conversation, ())))).total()
    return absent


def how_far(length: int, ranges: Ranges) -> int:
    """How many items of the input are in a log of `length` positions, the reported duplicates not counted."""
    return length - len({position for position in _positions(ranges) if position < length})


def text(payload: Payload) -> str:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _texts(items: Iterable[Payload]) -> list[str]:
    return [text(item) for item in items]


def _positions(ranges: Ranges) -> set[int]:
    return {position for first, last in ranges for position in range(first, last + 1)}


def _difference(want: Sequence[str], have: Sequence[str], removed: Collection[int]) -> str:
    if beyond := [position for position in removed if not 0 <= position < len(have)]:
        return f"position {min(beyond)} was reported as a duplicate, but the log has {len(have)} items"
    kept = [(position, item) for position, item in enumerate(have) if position not in removed]
    for (position, item), wanted in zip(kept, want, strict=False):
        if item != wanted:
            return f"position {position} is not what was appended there"
    if len(kept) != len(want):
        return f"{len(kept)} items without the reported duplicates, {len(want)} were appended"
    return ""
