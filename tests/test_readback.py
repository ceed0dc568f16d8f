"""The reading back of unknown outcomes over random histories: several writers, alike payloads, resets, crashes, merges.

`Readback` is the real one, over a log in memory that remembers who put what there; what the sender does with its
answers is repeated here in the small. Nothing may be called delivered that its writer did not put there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from memlog import limits, stamps
from memlog import readback as readback_module
from memlog.errors import ProtocolError
from memlog.models import Ack, Item
from memlog.payload import decode_items, dumps
from memlog.readback import Readback, Reset, keys_of
from memlog.reconcile import Explanation, key
from memlog.replay import Replay
from memlog.spool import ECHOES_KEPT, LaneFacts, Row

if TYPE_CHECKING:
    from collections.abc import Coroutine

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
LANE = "c_aaaaaaaa"
SOMEBODY, BEFORE = -1, -2  # who appends, too, and who did before


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Nothing here waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")


class Kind(NamedTuple):
    """``cuts``: how often, of all steps, the log is cut; somebody else then fills it. ``window``: of a read."""

    writers: int
    stamped: bool = False
    alike: bool = False
    cuts: float = 0.0
    window: int = limits.PAGE_ITEMS_MAX


class Put(NamedTuple):
    """An item in the log, and the truth about it."""

    item: Item
    by: int
    row: int


@dataclass
class World:
    """The server's log. What a cut takes away was acknowledged all the same: that is the server's loss, not ours."""

    log: list[Put] = field(default_factory=list)
    commits: int = 0
    cuts: int = 0

    async def replay_memory(self, _conversation: str, offset: int, limit: int, *, retry: Any = None) -> list[Item]:
        return [put.item for put in self.log[offset : offset + limit]]

    def commit(self, rows: list[Row], by: int) -> int:
        first = len(self.log)
        self.commits += 1
        for row in rows:
            for payload in decode_items(row.body):
                item = Item(len(self.log), EPOCH + timedelta(seconds=self.commits), payload)
                self.log.append(Put(item, by, row.id))
        return first

    def cut(self, length: int) -> None:
        """Emptied, or restored from a backup."""
        del self.log[length:]
        self.cuts += 1


def row_of(payloads: list[dict[str, Any]], number: int, stamp: str | None = None) -> Row:
    parts = [dumps(payload) for payload in payloads]
    body = b",".join(parts) if stamp is None else stamps.stamped(parts, stamp, number)
    return Row(None, number, LANE, len(parts), len(body), number, body)  # type: ignore[arg-type]  # of no spool


def alike(rng: random.Random) -> list[dict[str, Any]]:
    return [{"x": rng.randrange(2)} for _ in range(rng.choice([1, 1, 2]))]


@dataclass
class Writer:
    """One lane. Disk: rows, acknowledged, facts. Memory, gone in a crash: request and suspicion."""

    rng: random.Random
    world: World
    name: int
    kind: Kind
    rows: list[Row] = field(default_factory=list)
    acknowledged: int = 0
    facts: LaneFacts = field(default_factory=LaneFacts)
    request: int = 0
    suspect: bool = False
    claims: list[tuple[Row, list[Put], bool]] = field(default_factory=list)  # with whether another's may stand for it
    duplicates: list[Put] = field(default_factory=list)
    under_way: list[list[Row]] = field(default_factory=list)
    possible: bool = False  # a duplicate is reported without its place
    resets: int = 0

    def __post_init__(self) -> None:
        self.readback = Readback(self.world)  # type: ignore[arg-type]  # one method of a client is enough

    def append(self) -> None:
        number = len(self.rows) + 1
        own = [{"w": self.name, "n": number, "i": index} for index in range(self.rng.choice([1, 1, 2]))]
        stamp = f"{self.name:016d}" if self.kind.stamped else None
        self.rows.append(row_of(alike(self.rng) if self.kind.alike else own, number, stamp))

    def crash(self) -> None:
        self.request, self.suspect = 0, True

    def land(self) -> None:
        """A request that was given up arrives after all."""
        if self.under_way:
            self.world.commit(self.under_way.pop(0), self.name)

    def step(self, *, faults: bool) -> None:
        """One request of the lane, or the reading back of the last one's fate."""
        waiting = self.rows[self.acknowledged :]
        if not waiting:
            return
        if self.facts.next_seq is None:
            self.facts = LaneFacts(run(self.readback.length(LANE)))
            assert self.facts.next_seq == len(self.world.log)
            self.suspect = False
        if not self.request:
            self.request = len(waiting) if self.suspect else min(len(waiting), self.rng.randint(1, 4))
        rows = waiting[: self.request]
        if self.suspect:
            if self.settle(rows):
                return
            if self.rng.random() < 0.1:  # refused for its size before: compose anew
                self.request = self.rng.randint(1, len(rows))
                rows = rows[: self.request]
        self.suspect = True
        fates = ["ok", "ok", "lost before", "lost after", "crash before", "crash after", "late", "lie"]
        self.send(rows, self.rng.choice(fates) if faults else "ok")

    def settle(self, rows: list[Row]) -> bool:
        excusable = self.may_be_taken_in()
        found = run(self.readback.landed(LANE, self.facts, rows))
        self.suspect = False
        if isinstance(found, Reset):
            assert self.world.cuts
            assert found.length == len(self.world.log)
            self.resets += 1
            self.facts = self.facts._replace(next_seq=found.length, anchor=None)
        elif found is None:
            self.possible = True
        else:
            self.take(rows, found, excusable=excusable)
            if found.batches:
                return True
        keys = keys_of(rows)
        others = [echo for echo in self.facts.echoes if echo != keys]
        self.facts = self.facts._replace(echoes=(*others, keys)[-ECHOES_KEPT:])
        return False

    def send(self, rows: list[Row], fate: str) -> None:
        if fate == "late" and len(self.under_way) < 2:
            self.under_way.append(rows)
        if fate in ("ok", "lie", "lost after", "crash after"):
            first = self.world.commit(rows, self.name)
            if fate in ("ok", "lie"):
                told = max(0, first + self.rng.choice([-2, -1, 1, 2])) if fate == "lie" else first
                sent = [payload for row in rows for payload in decode_items(row.body)]
                there = [put.item.payload for put in self.world.log[told : told + len(sent)]]
                # Nobody can see through a lie that names the range that was expected, or one that holds a copy.
                self.acknowledge(rows, first if told == self.facts.next_seq or there == sent else told)
        if fate.startswith("crash"):
            self.crash()

    def acknowledge(self, rows: list[Row], first: int) -> None:
        start = self.facts.next_seq or 0
        ack = Ack(first, first + sum(row.items for row in rows) - 1)
        between = self.world.log[start:first]
        try:
            found, shared, reset = run(self.readback.check(LANE, self.facts, rows, ack))
        except ProtocolError:
            return
        assert reset == (first < start)
        self.resets += reset
        self.facts = self.facts._replace(shared=self.facts.shared or shared)
        if not self.kind.alike and any(put.by != self.name for put in between):
            assert self.facts.shared, "somebody else appends, too, and nobody noticed"
        self.take(rows, found, excusable=False)

    def may_be_taken_in(self) -> bool:
        """Whether an equal batch of somebody else inside the window could stand for ours, as the promise says.

        Not with stamps, nor once another writer was met, nor where the item before the window is not the one that was
        acknowledged last, nor where the window does not reach to the end.
        """
        start, length = self.facts.next_seq or 0, len(self.world.log)
        if self.kind.stamped or self.facts.shared or not self.kind.alike or length - start >= self.kind.window:
            return False
        if self.facts.anchor is None or start == 0:
            return True
        return start <= length and key(self.world.log[start - 1].item.payload) == self.facts.anchor

    def take(self, rows: list[Row], found: Explanation, *, excusable: bool) -> None:
        start, position = self.facts.next_seq or 0, found.first_seq
        for row in rows[: found.batches]:
            puts = self.world.log[position : position + row.items]
            assert [put.item.payload for put in puts] == decode_items(row.body), "acknowledged, and not there"
            assert len({put.item.recorded_at for put in puts}) == 1, "put together of two requests"
            assert excusable or {put.by for put in puts} == {self.name}, (
                "somebody else's stands for ours, which is lost"
            )
            self.claims.append((row, puts, excusable))
            position += row.items
        anchor: bytes | None = key(decode_items(rows[found.batches - 1].body)[-1]) if found.batches else None
        for first, last in found.duplicates:
            self.duplicates += self.world.log[first : last + 1]
            if last >= position:
                position, anchor = last + 1, None
        assert self.resets or position >= start, "it went back, and nobody was told"
        self.acknowledged += found.batches
        if found.batches or found.duplicates:
            self.facts = self.facts._replace(next_seq=position, anchor=anchor)
        if found.batches:
            self.request, self.suspect = 0, False

    def audit(self) -> None:
        """The look at an idle lane that a flush ends with."""
        if self.facts.next_seq is None or not self.facts.echoes:
            return
        found = run(self.readback.echoes(LANE, self.facts))
        if found is None:
            self.possible = True
        else:
            self.take([], found, excusable=False)


def replayed(world: World) -> list[dict[str, Any]]:
    async def fetch(offset: int, limit: int) -> list[Item]:
        return await world.replay_memory(LANE, offset, limit)

    async def all_of_it() -> list[dict[str, Any]]:
        return [item.payload async for item in Replay(fetch)]

    return asyncio.run(all_of_it())


def history(seed: int, kind: Kind) -> None:
    rng = random.Random(seed)
    world = World()
    lanes = [Writer(rng, world, name, kind) for name in range(kind.writers)]
    for number in range(rng.choice([0, 0, 1, 2, 3, 7])):  # by another process, whose buffer is gone
        world.commit([row_of([{"x": number}] if kind.alike else [{"before": number}], number)], BEFORE)
    for _ in range(rng.randint(4, 12) * kind.writers):
        lane = rng.choice(lanes)
        action = rng.random()
        if action < kind.cuts:
            length = len(world.log)
            world.cut(rng.randrange(length + 1))
            if rng.random() < 0.7:
                while len(world.log) < length + rng.randrange(4):
                    world.commit([row_of(alike(rng) if kind.alike else [{"who": len(world.log)}], 0)], SOMEBODY)
        elif action < 0.35 + kind.cuts:
            lane.append()
        elif action < 0.43 + kind.cuts:
            lane.crash()
        elif action < 0.50 + kind.cuts:
            lane.land()
        else:
            lane.step(faults=True)
    for _ in range(60):
        for lane in lanes:
            lane.step(faults=False)
    for lane in lanes:
        while lane.under_way:
            lane.land()
        lane.audit()
    nothing_is_lost(world, lanes, kind)
    every_duplicate_is_told(world, lanes, kind)
    if kind.stamped and not kind.alike:
        a_replay_yields_each_once(world, lanes)


def nothing_is_lost(world: World, lanes: list[Writer], kind: Kind) -> None:
    places = {id(put): position for position, put in enumerate(world.log)}
    claimed: set[int] = set()
    for lane in lanes:
        assert lane.acknowledged == len(lane.rows)
        in_order = []
        for _, puts, excusable in lane.claims:
            span = {places[id(put)] for put in puts if id(put) in places}
            if not excusable:
                assert not span & claimed, "one place in the log stands for two batches: one of them is lost"
                claimed |= span
            in_order += sorted(span)
        # The one that counts is the last of several copies, so that there is an order among them.
        assert world.cuts or in_order == sorted(in_order), "out of order"


def every_duplicate_is_told(world: World, lanes: list[Writer], kind: Kind) -> None:
    """By its place, or as a possible one, or by the news that others append, too, or that the log was cut."""
    for lane in lanes:
        told = {id(put) for put in lane.duplicates}
        if kind.writers == 1 and not world.cuts:
            # A copy that a read does not reach to might be anybody's, and one of alike batches any of them.
            in_doubt = lane.facts.shared or lane.possible
            assert not in_doubt or kind.alike or kind.window < limits.PAGE_ITEMS_MAX, "nobody else is there"
            kept = [put.item.payload for put in world.log if id(put) not in told and put.by == lane.name]
            appended = [payload for row in lane.rows for payload in decode_items(row.body)]
            assert in_doubt or kept == appended
        if kind.alike:
            continue  # which copy is whose is not to be told
        assert all(put.by == lane.name for put in lane.duplicates), "somebody else's is called a duplicate"
        first = {(put.row, dumps(put.item.payload)): id(put) for _, puts, _ in lane.claims for put in puts}
        counted = set(first.values())
        assert not counted & told, "the one that counts is called a duplicate"
        rest = [put for put in world.log if put.by == lane.name and id(put) not in counted | told]
        assert not rest or lane.possible or lane.facts.shared or world.cuts


def a_replay_yields_each_once(world: World, lanes: list[Writer]) -> None:
    there = {id(put) for put in world.log}
    seen = replayed(world)
    for lane in lanes:
        mine = [(item["n"], item["i"]) for item in seen if item.get("w") == lane.name]
        assert mine == sorted(set(mine)), "twice, or out of order"
        kept = [row.id for row, puts, _ in lane.claims if all(id(put) in there for put in puts)]
        assert set(kept) <= {number for number, _ in mine}


KINDS = [
    pytest.param(Kind(1, alike=True), id="one writer, alike"),
    pytest.param(Kind(1), id="one writer"),
    pytest.param(Kind(1, window=4), id="one writer, short reads"),
    pytest.param(Kind(3), id="three writers"),
    pytest.param(Kind(3, window=6), id="three writers, short reads"),
    pytest.param(Kind(2, alike=True), id="two writers, alike"),
    pytest.param(Kind(2, alike=True, window=4), id="two writers, alike, short reads"),
    pytest.param(Kind(3, stamped=True), id="three stamped writers"),
    pytest.param(Kind(2, stamped=True, alike=True), id="two stamped writers, alike"),
    pytest.param(Kind(1, alike=True, cuts=0.12), id="one writer, alike, in a log that is cut and filled"),
    pytest.param(Kind(2, alike=True, cuts=0.06), id="two writers, alike, in a log that is cut and filled"),
    pytest.param(Kind(2, cuts=0.06), id="two writers in a log that is cut and filled"),
    pytest.param(Kind(3, stamped=True, cuts=0.06), id="three stamped writers in a log that is cut and filled"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_in_random_histories(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is where it was said to be, nothing stands for two, stamped items are read once and in order."""
    monkeypatch.setattr(readback_module, "READ_BACK_ITEMS", kind.window)
    for seed in range(500):
        history(seed, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_in_many_more(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long form: 130,000 histories in all."""
    monkeypatch.setattr(readback_module, "READ_BACK_ITEMS", kind.window)
    for seed in range(1_000_000, 1_010_000):
        history(seed, kind)


def test_a_request_of_which_only_a_part_is_stamped_proves_nothing_among_several_writers() -> None:
    """What is not stamped is equal to anybody's."""
    world = World()
    readback = Readback(world)  # type: ignore[arg-type]  # as above
    plain, stamped = row_of([{"x": 0}], 1), row_of([{"x": 0}], 2, "0" * 16)
    world.commit([row_of([{"x": 0}], 7)], SOMEBODY)
    shared = LaneFacts(0, shared=True)
    assert run(readback.landed(LANE, shared, [plain, stamped])) is None
    assert run(readback.landed(LANE, shared, [stamped])) == Explanation(0, 0, ())
    world.commit([stamped], 0)
    assert run(readback.landed(LANE, shared, [stamped])) == Explanation(1, 1, ())
