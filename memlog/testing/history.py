"""The history checker: what was appended, what was reported, and what the server holds, held against each other.

    report = check_history({"c_7f3a9b2e41": [first, [second, third]]}, await read_history(url, auth))
    assert report.ok, report

It believes nobody: a report of a duplicate neither hides a loss nor explains a surplus, and of several ways to read the
same log it takes the one with the least damage. So it finds damage where, and only where, there is no harmless reading.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from memlog import Client, Item, stamps
from memlog.errors import ResponseTooLargeError
from memlog.limits import PAGE_ITEMS_MAX
from memlog.payload import decode_items, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from memlog.report import Duplicate

__all__ = ["Finding", "HistoryReport", "check_history", "read_history"]

_SHOWN = 5  # findings of a kind in a report's text


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: in which conversation, which batch (its place in what was appended), and where.

    ``items`` are concerned. ``seqs``: where they stand in the log, as inclusive ranges; empty if they are not there.
    ``batch`` is None where no appended batch is concerned.
    """

    conversation_id: str
    batch: int | None
    items: int
    seqs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        what = f"{self.items} item(s)" if self.batch is None else f"batch {self.batch}, {self.items} item(s)"
        spans = [str(first) if first == last else f"{first} to {last}" for first, last in self.seqs[:_SHOWN]]
        more = ", …" if len(self.seqs) > _SHOWN else ""
        return f"{self.conversation_id}: {what}" + (f", at {', '.join(spans)}{more}" if spans else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryReport:
    """What :func:`check_history` found. ``str()`` names conversations, batches and positions, never a payload.

    ``lost``: a batch that was stored is not in the log; of a torn one, the part that is missing.
    ``reordered``: it is there, but not in the order of appending.
    ``torn``: only a part of it stands there, or its parts stand apart or were recorded at different times.
    ``duplicated``: second copies, which a retry may leave, reported or not. No damage by themselves.
    ``unreported``: those of them, or the part of them, that nobody reported.
    ``overreported``: reported as a second copy, and none: the only copy, something else, or nothing at all.
    ``foreign``: nobody appended this.
    ``misnumbered``: sequence numbers that do not go on from 0 without a gap.
    """

    conversations: int
    batches: int
    items: int
    lost: tuple[Finding, ...] = ()
    reordered: tuple[Finding, ...] = ()
    torn: tuple[Finding, ...] = ()
    duplicated: tuple[Finding, ...] = ()
    unreported: tuple[Finding, ...] = ()
    overreported: tuple[Finding, ...] = ()
    foreign: tuple[Finding, ...] = ()
    misnumbered: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the log is what was appended, but for duplicates that were reported."""
        return not any(getattr(self, kind) for kind in _DAMAGE)

    def __str__(self) -> str:
        checked = f"{self.conversations} conversation(s), {self.batches} batch(es) appended, {self.items} item(s) held"
        lines = [f"{checked}: {'ok' if self.ok else 'DAMAGED'}"]
        for kind in _KINDS:
            found: tuple[Finding, ...] = getattr(self, kind)
            lines += [f"  {kind}: {finding}" for finding in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"  {kind}: … and {len(found) - _SHOWN} more")
        return "\n".join(lines)


_KINDS = tuple(field.name for field in fields(HistoryReport) if field.name not in ("conversations", "batches", "items"))
_DAMAGE = tuple(kind for kind in _KINDS if kind != "duplicated")


def check_history(
    appended: Mapping[str, Sequence[Any]],
    held: Mapping[str, Sequence[Item | Mapping[str, Any]]],
    *,
    duplicates: Iterable[Duplicate] = (),
    stored: Mapping[str, Collection[int]] | None = None,
) -> HistoryReport:
    """Hold what a server has against what was appended, conversation by conversation. Pure.

    Args:
        appended: by conversation, in order, what one writer appended: an item for each ``append``, a list of items for
            each ``extend``.
        held: by conversation, what the server has: items with their numbers, as :func:`read_history` returns them, or
            payloads alone, counted from 0. A conversation that is missing is empty. Of a log with stamps these are
            removed, and an item that a replay passes over counts as reported, whichever of its copies
            the log has named.
        duplicates: the second copies that were reported: ``await log.duplicates()``.
        stored: by conversation, which batches (their places in ``appended``) must be there; the others may be there or
            not, but wholly, once and in order: of a process that was killed, those whose ``stored()`` had not returned,
            and of any, those that were refused. None: all of them must be there.

    Payloads are equal if they are the same JSON: 1 is neither true nor 1.0, the order of keys does not matter. Raises
    ValueError if the arguments do not fit each other: an empty batch, a place that does not exist, an item that is only
    pending.
    """
    logs = {conversation: _Log(rows) for conversation, rows in held.items()}
    reported: dict[str, set[int]] = defaultdict(set)
    for duplicate in duplicates:
        reported[duplicate.conversation_id].update(range(duplicate.first_seq, duplicate.last_seq + 1))
    for conversation, places in (stored or {}).items():
        count = len(appended.get(conversation, ()))
        if wrong := [place for place in places if not 0 <= place < count]:
            raise ValueError(f"stored: {conversation} has {count} batch(es), there is no batch {wrong[0]}")
    found: dict[str, list[Finding]] = {kind: [] for kind in _KINDS}
    for conversation in dict.fromkeys([*appended, *logs, *reported]):
        batches = [_batch(entry) for entry in appended.get(conversation, ())]
        if not all(batches):
            raise ValueError(f"appended: batch {batches.index(())} of {conversation} is empty")
        must = set(range(len(batches))) if stored is None else set(stored.get(conversation, ()))
        _Comparison(conversation, batches, must, logs.get(conversation, _Log(())), reported[conversation], found).run()
    return HistoryReport(
        conversations=len(dict.fromkeys([*appended, *logs])),
        batches=sum(len(batches) for batches in appended.values()),
        items=sum(len(log.tokens) for log in logs.values()),
        **{kind: tuple(findings) for kind, findings in found.items()},
    )


async def read_history(
    url: str, auth: Any = None, conversation_ids: Iterable[str] | None = None, **settings: Any
) -> dict[str, list[Item]]:
    """Everything that the server holds in these conversations, or in all of the site's, for :func:`check_history`.

    ``settings`` are those of :class:`memlog.Client`, and so are the errors. Items come as they are in the log.
    """
    async with Client(url, auth=auth, **settings) as client:
        ids = [name async for name in _all_ids(client)] if conversation_ids is None else list(conversation_ids)
        return {conversation: await _read(client, conversation) for conversation in ids}


async def _all_ids(client: Client) -> Any:
    after = None
    while True:
        page = await client.list_conversations(PAGE_ITEMS_MAX, after)
        for row in page:
            yield row.conversation_id
        if len(page) < PAGE_ITEMS_MAX:
            return
        after = page[-1].conversation_id


async def _read(client: Client, conversation: str) -> list[Item]:
    items: list[Item] = []
    size = PAGE_ITEMS_MAX
    while True:
        try:
            page = await client.replay_memory(conversation, len(items), size)
        except ResponseTooLargeError:
            if size == 1:
                raise
            size //= 2
            continue
        items += page
        if len(page) < size:
            return items


# --- one conversation ------------------------------------------------------------------------------------------------

_Batch = tuple[str, ...]
"""The canonical texts of a batch's items."""


def _batch(entry: Any) -> _Batch:
    items = [entry] if isinstance(entry, (Mapping, BaseModel)) else list(entry)
    # By the way that an append takes, so that a model or an enum is what it is in the log.
    return tuple([_text(decode_items(encode(item))[0]) for item in items])


def _text(payload: object) -> str:
    return json.dumps(payload, sort_keys=True, separators=(",", ":"))


class _Log:
    """What the server holds of one conversation, by position; ``seqs`` are what it calls them.

    ``copies``: the positions of each stamped item; ``passed_over``: those that a replay leaves out for their stamps.
    """

    def __init__(self, rows: Sequence[Item | Mapping[str, Any]]) -> None:
        self.tokens: list[str] = []
        self.times: list[Any] = []
        self.seqs: list[int] = []
        self.starts: dict[str, list[int]] = defaultdict(list)
        self.copies: dict[stamps.Stamp, list[int]] = defaultdict(list)
        self.passed_over: set[int] = set()
        newest: dict[str, int] = {}
        for position, row in enumerate(rows):
            if isinstance(row, Item):
                if row.seq is None:
                    raise ValueError("held: an item without a number is pending, and not held by the server")
                seq, time, payload = row.seq, row.recorded_at, row.payload
            else:
                seq, time, payload = position, None, dict(row)
            stamp = stamps.read(payload)
            if stamp is not None:
                payload = stamps.without(payload)
                self.copies[stamp].append(position)
                if stamp.number <= newest.get(stamp.writer, -1):
                    self.passed_over.add(position)
                newest[stamp.writer] = max(stamp.number, newest.get(stamp.writer, -1))
            self.seqs.append(seq)
            self.times.append(time)
            self.tokens.append(_text(payload))
            self.starts[self.tokens[-1]].append(position)

    def holds(self, batch: _Batch, position: int) -> bool:
        """Whether a whole copy of ``batch`` begins there."""
        end = position + len(batch)
        return tuple(self.tokens[position:end]) == batch and len(set(self.times[position:end])) == 1


@dataclass(slots=True, eq=False, repr=False)
class _Comparison:
    """What was appended to one conversation against what is held of it.

    First the batches are matched with places in the log; what is left of both is then explained.
    """

    conversation: str
    batches: list[_Batch]
    must: set[int]
    log: _Log
    told: set[int]  # seqs
    found: dict[str, list[Finding]]
    matched: dict[int, int] = field(default_factory=dict)  # batch: position
    reported: set[int] = field(default_factory=set)  # positions
    wrong: set[int] = field(default_factory=set)  # positions that are reported and no second copy
    torn: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # batch: positions
    standing: dict[_Batch, bool] = field(default_factory=dict)  # whether it stands where nobody reported a copy

    def run(self) -> None:
        self._check_numbers()
        self.reported = {position for position, seq in enumerate(self.log.seqs) if seq in self.told}
        # A replay yields the first copy, and the log may have named just that one: one of them is left, either way.
        for places in self.log.copies.values():
            read = [p for p in places if p in self.reported and p not in self.log.passed_over]
            left_out = [p for p in places if p in self.log.passed_over and p not in self.reported]
            self.reported.difference_update(read[: len(left_out)])
        self.reported |= self.log.passed_over
        self.matched = self._walk() or dict(self._best())
        taken = {p for batch, start in self.matched.items() for p in range(start, start + len(self.batches[batch]))}
        self.wrong = taken & self.reported
        missing = [batch for batch in range(len(self.batches)) if batch not in self.matched]
        copies, rest = self._cut(sorted(set(range(len(self.log.tokens))) - taken))
        missing = self._place(copies, missing)
        self._sort_out(rest, missing)
        self._sum_up(missing)

    def _check_numbers(self) -> None:
        wrong = [seq for expected, seq in enumerate(self.log.seqs) if seq != expected]
        if wrong:
            self._add("misnumbered", None, len(wrong), _ranges(wrong))

    # --- matching

    def _walk(self) -> dict[int, int] | None:
        """The matching of a log that is all right, which is found by walking along; None if it is not."""
        matched = {}
        position, end = 0, len(self.log.tokens)
        for number, batch in enumerate(self.batches):
            while position in self.reported:
                position += 1
            span = range(position, position + len(batch))
            if self.log.holds(batch, position) and self.reported.isdisjoint(span):
                matched[number] = position
                position += len(batch)
            elif number in self.must:
                return None
        return matched if all(rest in self.reported for rest in range(position, end)) else None

    def _best(self) -> list[tuple[int, int]]:
        """The matching in order, without overlaps, that explains the most: the heaviest chain of occurrences.

        What must be there counts most, then each position that nobody reported; a reported one counts against it.
        """
        size = len(self.log.tokens) + 1
        # By the end of the chain, only those that no shorter chain outweighs: both lists ascend.
        ends, weights = [0], [0]
        chains: list[_Chain | None] = [None]
        for number, batch in enumerate(self.batches):
            extended = []
            for start in self.log.starts.get(batch[0], ()):
                if self.log.holds(batch, start):
                    end = start + len(batch)
                    known = len(self.reported.intersection(range(start, end))) if self.reported else 0
                    weight = (number in self.must) * len(batch) * size**2 + (len(batch) - known) * size - known
                    before = bisect.bisect_right(ends, start) - 1
                    extended.append((end, weights[before] + weight, (number, start, chains[before])))
            for end, weight, chain in extended:
                place = bisect.bisect_right(ends, end)
                if weights[place - 1] >= weight:
                    continue
                beaten = place
                while beaten < len(ends) and weights[beaten] <= weight:
                    beaten += 1
                if ends[place - 1] == end:
                    place -= 1
                ends[place:beaten], weights[place:beaten], chains[place:beaten] = [end], [weight], [chain]
        return list(_links(chains[-1]))

    # --- what is left of the log

    def _stands(self, batch: _Batch) -> bool:
        """Whether there is a copy of ``batch`` that nobody reported, so that another one may be a second one."""
        known = self.standing.get(batch)
        if known is None:
            known = self.standing[batch] = any(
                self.log.holds(batch, start) and self.reported.isdisjoint(_span(batch, start))
                for start in self.log.starts.get(batch[0], ())
            )
        return known

    def _cut(self, left: list[int]) -> tuple[list[tuple[_Batch, int]], list[int]]:
        """Cut what is left into whole copies of batches, and positions that are in none: with the least damage."""
        begins: dict[str, list[_Batch]] = defaultdict(list)
        for batch in sorted(set(self.batches), key=len, reverse=True):
            begins[batch[0]].append(batch)
        free = set(left)
        nothing = (0, 0, None)
        best: dict[
            int, tuple[int, int, _Batch | None]
        ] = {}  # positions in no copy, positions of wrong copies, the copy
        for position in reversed(left):
            loose, wrong, _ = best.get(position + 1, nothing)
            options: list[tuple[int, int, _Batch | None]] = [(loose + 1, wrong, None)]
            for batch in begins.get(self.log.tokens[position], ()):
                span = _span(batch, position)
                if free.issuperset(span) and self.log.holds(batch, position):
                    loose, wrong, _ = best.get(span.stop, nothing)
                    if not (self.reported.issuperset(span) and self._stands(batch)):
                        wrong += len(batch)
                    options.append((loose, wrong, batch))
            best[position] = min(options, key=lambda option: option[:2])
        copies, rest = [], []
        past = 0
        for position in left:
            if position >= past:
                copy = best[position][2]
                past = position + len(copy or ("",))
                if copy is None:
                    rest.append(position)
                else:
                    copies.append((copy, position))
        return copies, rest

    def _place(self, copies: list[tuple[_Batch, int]], missing: list[int]) -> list[int]:
        """Say of each copy what it is; the batches that are still missing then."""
        present = {self.batches[batch] for batch in self.matched}
        waiting: dict[_Batch, list[int]] = defaultdict(list)
        for number in missing:
            waiting[self.batches[number]].append(number)
        # First those that nobody reported: if it is reported, another copy may well be the batch.
        for copy, start in sorted(copies, key=lambda pair: self.reported.issuperset(_span(*pair))):
            span = _span(copy, start)
            known = self.reported.intersection(span)
            if waiting[copy] and not ((copy in present or self._stands(copy)) and len(known) == len(copy)):
                number = waiting[copy].pop(0)
                missing = [other for other in missing if other != number]
                present.add(copy)
                self.wrong |= known
                if number in self.must or len(known) < len(copy):
                    self._add("reordered", number, len(copy), self._seqs(span))
                continue
            self._add("duplicated", self.batches.index(copy), len(copy), self._seqs(span))
            if unknown := [position for position in span if position not in known]:
                self._add("unreported", self.batches.index(copy), len(unknown), self._seqs(unknown))
        return missing

    def _sort_out(self, rest: list[int], missing: list[int]) -> None:
        """Positions that belong to no whole copy: parts of a batch, or nobody's."""
        homes: dict[str, list[int]] = defaultdict(list)
        for number in [*missing, *self.matched, *range(len(self.batches))]:
            for token in set(self.batches[number]):
                homes[token].append(number)
        wanted = {number: Counter(self.batches[number]) for number in missing}
        foreign = []
        home: int | None = None
        for position in rest:
            token = self.log.tokens[position]
            options = homes.get(token, ())
            if not options:
                foreign.append(position)
                home = None
                continue
            if home not in options or (home in wanted and not wanted[home][token]):
                home = next((n for n in options if n in wanted and wanted[n][token]), options[-1])
            if home in wanted:
                wanted[home][token] -= 1
            self.torn[home].append(position)
        self.wrong |= self.reported.intersection(rest)
        if foreign:
            self._add("foreign", None, len(foreign), self._seqs(foreign))

    # --- telling

    def _sum_up(self, missing: list[int]) -> None:
        for number, positions in sorted(self.torn.items()):
            self._add("torn", number, len(positions), self._seqs(positions))
        for number in missing:
            batch = self.batches[number]
            there = Counter(self.log.tokens[position] for position in self.torn.get(number, ()))
            gone = (Counter(batch) - there).total()
            if gone and number in self.must:
                self._add("lost", number, gone, ())
        beyond = self.told - set(self.log.seqs)
        if self.wrong or beyond:
            seqs = sorted({*(self.log.seqs[position] for position in self.wrong), *beyond})
            self._add("overreported", None, len(seqs), _ranges(seqs))

    def _seqs(self, positions: Iterable[int]) -> tuple[tuple[int, int], ...]:
        return _ranges([self.log.seqs[position] for position in positions])

    def _add(self, kind: str, batch: int | None, items: int, seqs: tuple[tuple[int, int], ...]) -> None:
        self.found[kind].append(Finding(self.conversation, batch, items, seqs))


_Chain = tuple[int, int, Any]
"""A batch, its position, and the chain before it."""


def _links(chain: _Chain | None) -> Iterator[tuple[int, int]]:
    while chain is not None:
        batch, position, chain = chain
        yield batch, position


def _span(copy: _Batch, start: int) -> range:
    return range(start, start + len(copy))


def _ranges(seqs: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for seq in seqs:
        if ranges and seq == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], seq)
        else:
            ranges.append((seq, seq))
    return tuple(ranges)
