"""The reading back of unknown outcomes over random histories: several writers, alike payloads, resets, crashes, merges.

`Readback` is the real one, over a log in memory; what the sender does with its answers is repeated here in the small.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from memlog import stamps
from memlog.errors import ProtocolError
from memlog.models import Ack, Item
from memlog.payload import decode_items, dumps
from memlog.readback import Readback, Reset, keys_of
from memlog.reconcile import Explanation, key
from memlog.replay import Replay
from memlog.spool import LaneFacts, Row

if TYPE_CHECKING:
    from collections.abc import Coroutine

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Nothing here waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waited")


@dataclass
class World:
    """The server's log. A reset empties it; what was acknowledged before is the server's loss, not ours."""

    log: list[Item] = field(default_factory=list)
    commits: int = 0
    age: int = 0  # how many resets

    async def replay_memory(self, _conversation: str, offset: int, limit: int, *, retry: Any = None) -> list[Item]:
        return self.log[offset : offset + limit]

    def commit(self, rows: list[Row]) -> int:
        self.commits += 1
        first = len(self.log)
        for payload in (payload for row in rows for payload in decode_items(row.body)):
            self.log.append(Item(len(self.log), EPOCH + timedelta(seconds=self.commits), payload))
        return first

    def reset(self) -> None:
        self.log.clear()
        self.age += 1


@dataclass
class Writer:
    """One lane. Disk: rows, acknowledged, facts. Memory, gone in a crash: request and suspicion."""

    rng: random.Random
    world: World
    name: int
    stamped: bool
    alike: bool
    others: bool
    rows: list[Row] = field(default_factory=list)
    acknowledged: int = 0
    facts: LaneFacts = field(default_factory=LaneFacts)
    request: int = 0
    suspect: bool = False
    claims: list[tuple[int, int, int, bool]] = field(default_factory=list)  # age, first seq, items, excusable
    under_way: list[list[Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.readback = Readback(self.world)  # type: ignore[arg-type]  # one method of a client is enough
        self.stamp = f"{self.name:016d}"

    def append(self) -> None:
        number = len(self.rows) + 1
        payloads = [
            {"x": self.rng.randrange(2)} if self.alike else {"w": self.name, "n": number, "i": index}
            for index in range(self.rng.choice([1, 1, 2]))
        ]
        parts = [dumps(payload) for payload in payloads]
        body = stamps.stamped(parts, self.stamp, number) if self.stamped else b",".join(parts)
        self.rows.append(Row(None, number, "c_aaaaaaaa", len(parts), len(body), number, body))  # type: ignore[arg-type]

    def crash(self) -> None:
        self.request, self.suspect = 0, True

    def land(self) -> None:
        if self.under_way:
            self.world.commit(self.under_way.pop(0))

    def take(self, rows: list[Row], found: Explanation, *, read_back: bool) -> None:
        position = found.first_seq
        # What one writer alone may take for its own: it has not met another one yet, and all items look alike.
        excusable = read_back and self.alike and not self.stamped and not self.facts.shared and self.others
        for row in rows[: found.batches]:
            there = [item.payload for item in self.world.log[position : position + row.items]]
            assert there == decode_items(row.body), "acknowledged, and not there"
            self.claims.append((self.world.age, position, row.items, excusable))
            position += row.items
        anchor: bytes | None = key(decode_items(rows[found.batches - 1].body)[-1]) if found.batches else None
        for _, last in found.duplicates:
            if last >= position:
                position, anchor = last + 1, None
        self.acknowledged += found.batches
        self.facts = self.facts._replace(next_seq=position, anchor=anchor)
        if found.batches:
            self.request, self.suspect = 0, False

    def step(self, *, faults: bool) -> None:
        waiting = self.rows[self.acknowledged :]
        if not waiting:
            return
        if self.facts.next_seq is None:
            self.facts = LaneFacts(run(self.readback.length("c_aaaaaaaa")))
            self.suspect = False
        if not self.request:
            self.request = len(waiting) if self.suspect else min(len(waiting), self.rng.randint(1, 4))
        rows = waiting[: self.request]
        if self.suspect:
            found = run(self.readback.landed("c_aaaaaaaa", self.facts, rows))
            self.suspect = False
            if isinstance(found, Reset):
                self.facts = self.facts._replace(next_seq=found.length, anchor=None)
            elif found is not None and (found.batches or found.duplicates):
                self.take(rows, found, read_back=True)
                if found.batches:
                    return
            self.facts = self.facts._replace(echoes=(*self.facts.echoes, keys_of(rows))[-8:])
        self.suspect = True
        fates = ["ok", "ok", "lost before", "lost after", "crash before", "crash after", "late"] if faults else ["ok"]
        fate = self.rng.choice(fates)
        if fate == "late" and len(self.under_way) < 2:
            self.under_way.append(rows)
        if fate in ("ok", "lost after", "crash after"):
            first = self.world.commit(rows)
            if fate == "ok":
                ack = Ack(first, first + sum(row.items for row in rows) - 1)
                try:
                    found, shared, _ = run(self.readback.check("c_aaaaaaaa", self.facts, rows, ack))
                except ProtocolError:
                    return
                self.facts = self.facts._replace(shared=self.facts.shared or shared)
                self.take(rows, found, read_back=False)
        if fate.startswith("crash"):
            self.crash()


def replayed(world: World) -> list[dict[str, Any]]:
    async def fetch(offset: int, limit: int) -> list[Item]:
        return world.log[offset : offset + limit]

    async def all_of_it() -> list[dict[str, Any]]:
        return [item.payload async for item in Replay(fetch)]

    return run(all_of_it())


def history(seed: int, *, writers: int, stamped: bool, alike: bool) -> None:
    rng = random.Random(seed)
    world = World()
    lanes = [Writer(rng, world, name, stamped, alike, writers > 1) for name in range(writers)]
    for _ in range(rng.randint(4, 12) * writers):
        lane = rng.choice(lanes)
        action = rng.random()
        if action < 0.35:
            lane.append()
        elif action < 0.43:
            lane.crash()
        elif action < 0.50:
            lane.land()
        elif action < 0.52:
            world.reset()
        else:
            lane.step(faults=True)
    for _ in range(60):
        for lane in lanes:
            lane.step(faults=False)
    claimed: set[int] = set()
    for lane in lanes:
        assert lane.acknowledged == len(lane.rows)
        now = [claim for claim in lane.claims if claim[0] == world.age]
        for _, first, items, excusable in now:
            span = set(range(first, first + items))
            if not excusable:
                assert not span & claimed, "one place in the log stands for two batches: one of them is lost"
                claimed |= span
        assert alike or [claim[1] for claim in now] == sorted(claim[1] for claim in now), "out of order"
    if stamped and not alike:
        seen = replayed(world)
        for lane in lanes:
            kept = [claim for claim in lane.claims if claim[0] == world.age]
            mine = [(item["n"], item["i"]) for item in seen if item["w"] == lane.name]
            assert mine == sorted(set(mine)), "twice, or out of order"
            last = [(row.id, i) for row in lane.rows[len(lane.rows) - len(kept) :] for i in range(row.items)]
            assert [entry for entry in last if entry not in mine] == []


KINDS = [
    pytest.param(1, False, True, id="one writer, alike"),
    pytest.param(1, False, False, id="one writer"),
    pytest.param(3, False, False, id="three writers"),
    pytest.param(2, False, True, id="two writers, alike"),
    pytest.param(3, True, False, id="three stamped writers"),
    pytest.param(2, True, True, id="two stamped writers, alike"),
]


@pytest.mark.parametrize(("writers", "stamped", "alike"), KINDS)
def test_nothing_is_lost_in_random_histories(writers: int, stamped: bool, alike: bool) -> None:
    """Every batch is where it was said to be, nothing stands for two, stamped items are read once and in order."""
    for seed in range(1_000):
        history(seed, writers=writers, stamped=stamped, alike=alike)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "stamped", "alike"), KINDS)
def test_nothing_is_lost_in_many_more(writers: int, stamped: bool, alike: bool) -> None:
    """The long form: 120,000 histories in all."""
    for seed in range(1_000_000, 1_020_000):
        history(seed, writers=writers, stamped=stamped, alike=alike)
