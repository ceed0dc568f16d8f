"""What the tail of a log proves: random histories of one writer, and what was claimed about them against the truth."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlog import reconcile
from memlog.models import Item
from memlog.reconcile import Explanation, key

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def keys(batches: list[list[dict[str, Any]]]) -> list[list[bytes]]:
    """Payloads by batch as `explain` wants them."""
    return [[key(payload) for payload in batch] for batch in batches]


def explain(waiting: Any, tail: list[Item], start: int, *, echoes: Any = (), stamped: bool = False) -> Any:
    """`reconcile.explain` over payloads."""
    return reconcile.explain(keys(waiting), tail, start, echoes=[keys(echo) for echo in echoes], stamped=stamped)


def log(*copies: list[list[dict[str, Any]]], start: int = 0) -> list[Item]:
    """The log after these requests, each of several batches, each request recorded at a time of its own."""
    items: list[Item] = []
    for number, copy in enumerate(copies):
        for payload in (payload for batch in copy for payload in batch):
            items.append(Item(start + len(items), EPOCH + timedelta(seconds=number), payload))
    return items


A, B, C = [{"a": 1}], [{"b": 1}, {"b": 2}], [{"c": 1}]


@pytest.mark.parametrize(
    ("waiting", "copies", "expected"),
    [
        ([A, B], [], Explanation(0, 7, ())),
        ([A, B], [[A]], Explanation(1, 7, ())),
        ([A, B], [[A, B]], Explanation(2, 7, ())),
        ([A, B], [[A], [A, B]], Explanation(2, 8, ((7, 7),))),
        ([A, B], [[A, B], [A]], Explanation(2, 7, ((10, 10),))),
        ([A, B], [[A], [A]], Explanation(1, 8, ((7, 7),))),
        ([A, B], [[B]], None),
        ([A, B], [[A], [C]], None),
        ([A], [[A, B]], None),
        ([A, B, A], [[A, B], [A, B]], Explanation(2, 10, ((7, 9),))),
        ([A, B, A], [[A, B, A], [A, B]], Explanation(3, 7, ((11, 13),))),
        ([B], [[[{"b": 1}]]], None),
    ],
    ids=[
        "nothing landed",
        "a prefix landed",
        "all landed",
        "the shorter copy first",
        "the shorter copy last",
        "the same twice",
        "somebody else's",
        "somebody else behind us",
        "more than we sent",
        "a longer reading leaves a rest",
        "the first is longer",
        "half a batch",
    ],
)
def test_a_tail_is_read_as_copies_of_a_prefix_or_not_at_all(
    waiting: list[Any], copies: list[Any], expected: Explanation | None
) -> None:
    """None, one or several copies; whatever else stands there, nothing is proved."""
    assert explain(waiting, log(*copies, start=7), 7) == expected


@pytest.mark.parametrize(
    ("sent", "there", "same"),
    [
        ({"x": 1}, {"x": True}, False),
        ({"x": 0}, {"x": False}, False),
        ({"x": 1}, {"x": 1.0}, False),
        ({"x": None}, {}, False),
        ({"x": "1"}, {"x": 1}, False),
        ({"x": [1, 2]}, {"x": [2, 1]}, False),
        ({"x": "é"}, {"x": "e\u0301"}, False),
        ({"x": 0.0}, {"x": -0.0}, False),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True),
        ({"x": 1e400}, {"x": 1e400}, True),
        ({"x": ["a", 'b"c']}, {"x": ['a"b', "c"]}, False),
        ({"x": [1, [2]]}, {"x": [1, [], 2]}, False),
        ({"x": {"y": 1}}, {"x": {}, "y": 1}, False),
    ],
)
def test_items_are_compared_type_by_type(sent: dict[str, Any], there: dict[str, Any], same: bool) -> None:
    """Python calls 1, 1.0 and True equal; a log does not. The order of keys is the server's to choose."""
    found = explain([[sent]], log([[there]]), 0)
    assert found == (Explanation(1, 0, ()) if same else None)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-1, 1) | st.text('"{[;i1', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"{1', max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(first=values, second=values)
def test_two_payloads_have_one_key_if_they_are_the_same_json_and_only_then(first: Any, second: Any) -> None:
    """A digest over pieces that could be cut otherwise would take one item for another."""
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (key({"x": first}) == key({"x": second})) == same


def test_an_item_deeper_than_any_of_ours_is_equal_to_nothing() -> None:
    """Somebody else's, in a log that we only read: it must not stop the sending."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert explain([A], log([[{"x": deep}]]), 0) is None
    assert explain([A], log([[{"x": deep}], A]), 0, stamped=True) == Explanation(1, 1, ())
    while deep:  # or freeing it would go as deep
        deep = deep.pop()


def test_a_batch_recorded_at_two_times_is_not_that_batch() -> None:
    """A batch is committed at once; two equal items of two other requests are not it."""
    items = [Item(0, EPOCH, {"b": 1}), Item(1, EPOCH + timedelta(seconds=1), {"b": 2})]
    assert explain([B], items, 0) is None
    assert explain([[{"b": 1}], [{"b": 2}]], items, 0) == Explanation(2, 0, ())


batches = st.lists(
    st.lists(st.sampled_from([{"x": 0}, {"x": 1}, {"x": 2}]), min_size=1, max_size=3), min_size=1, max_size=6
)


@settings(max_examples=400, deadline=None)
@given(waiting=batches, counts=st.lists(st.integers(1, 6), max_size=4), start=st.integers(0, 1000))
def test_every_row_of_copies_is_explained_and_the_explanation_accounts_for_every_item(
    waiting: list[Any], counts: list[int], start: int
) -> None:
    """Batches are often alike here. Nothing is claimed that is not there, and each item is batch or duplicate."""
    tail = log(*(waiting[: min(count, len(waiting))] for count in counts), start=start)
    found = explain(waiting, tail, start)
    assert found is not None
    payloads = [item.payload for item in tail]
    landed = [payload for batch in waiting[: found.batches] for payload in batch]
    first = found.first_seq - start
    assert payloads[first : first + len(landed)] == landed
    rest = set(range(first, first + len(landed)))
    for low, high in found.duplicates:
        span = range(low - start, high - start + 1)
        assert not rest & set(span)
        rest |= set(span)
        # Each duplicate is what it says: a copy of a prefix of what landed, cut between batches.
        assert payloads[low - start : high - start + 1] in [
            [payload for batch in waiting[:n] for payload in batch] for n in range(1, found.batches + 1)
        ]
    assert rest == set(range(len(tail)))
    assert (found.batches > 0) == bool(counts)


@settings(max_examples=400, deadline=None)
@given(
    waiting=batches,
    tail=st.lists(st.tuples(st.sampled_from([{"x": 0}, {"x": 1}, {"x": 2}]), st.integers(0, 2)), max_size=8),
)
def test_nothing_is_ever_claimed_that_is_not_there(waiting: list[Any], tail: list[tuple[dict[str, Any], int]]) -> None:
    """Any tail at all: what is said to have landed is there, item for item, within one time a batch."""
    items = [Item(seq, EPOCH + timedelta(seconds=when), payload) for seq, (payload, when) in enumerate(tail)]
    found = explain(waiting, items, 0)
    if found is None:
        return
    position = found.first_seq
    for batch in waiting[: found.batches]:
        there = items[position : position + len(batch)]
        assert [item.payload for item in there] == batch
        assert len({item.recorded_at for item in there}) == 1
        position += len(batch)
    assert (found.batches == 0) == (not tail)


# --- the sender's rules, simulated ------------------------------------------------------------------------------------


@dataclass
class Writer:
    """One conversation's only writer, with the sender's rules and nothing else: what the disk holds is kept apart.

    Disk: ``base`` and ``acknowledged``, changed together, and ``echoes``, written before anything is sent again. Memory,
    gone in a crash: the frozen request and the suspicion.
    """

    rng: random.Random
    late: bool
    server: list[Item] = field(default_factory=list)
    appended: list[list[dict[str, Any]]] = field(default_factory=list)
    acknowledged: int = 0
    base: int = 0
    request: int = 0
    suspect: bool = False
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    echoes: list[Any] = field(default_factory=list)
    under_way: list[Any] = field(default_factory=list)
    commits: int = 0
    possible: bool = False  # a duplicate is reported without its place

    def append(self) -> None:
        # Few different payloads, so that batches are often alike, and now and then one of several items.
        size = self.rng.choice([1, 1, 1, 2, 3])
        self.appended.append([{"x": self.rng.randrange(3)} for _ in range(size)])

    @property
    def waiting(self) -> list[list[dict[str, Any]]]:
        return self.appended[self.acknowledged :]

    def commit(self, batches: list[list[dict[str, Any]]]) -> int:
        first = len(self.server)
        self.commits += 1
        for payload in (payload for batch in batches for payload in batch):
            self.server.append(Item(len(self.server), EPOCH + timedelta(seconds=self.commits), payload))
        return first

    def acknowledge(self, found: Explanation) -> None:
        items = sum(map(len, self.waiting[: found.batches]))
        self.acknowledged += found.batches
        self.base = max([found.first_seq + items, *(last + 1 for _, last in found.duplicates)])
        self.duplicates += found.duplicates
        self.request, self.suspect = 0, False

    def crash(self) -> None:
        self.request, self.suspect = 0, True

    def step(self) -> None:
        """One request of the lane, or the reading back of the last one's fate."""
        if not self.waiting:
            return None
        if not self.request:
            self.request = min(len(self.waiting), self.rng.randint(1, 4))
            if self.suspect:  # a restart composes anew: everything that waits, as far as it fits
                self.request = len(self.waiting)
        rows = self.waiting[: self.request]
        if self.suspect:
            if self.rng.random() < 0.2:
                return None  # the read failed: nothing is known, and nothing is sent
            found = explain(rows, self.server[self.base :], self.base, echoes=self.echoes)
            assert found is not None, "one writer's tail must always be explained"
            self.suspect = False
            if found.batches:
                self.acknowledge(found)
                return None
            self.note_duplicates(found)
            self.echoes.append(rows)
        self.suspect = True
        fate = self.rng.choice(["ok", "ok", "lost before", "lost after", "crash before", "crash after", "late"])
        if fate == "late" and not (self.late and len(self.under_way) < 2):
            fate = "lost before"
        if fate in ("ok", "lost after", "crash after"):
            first = self.commit(rows)
            if fate == "ok":
                if self.rng.random() < 0.05:
                    return self.crash()  # between the answer and the commit of the acknowledgement
                found = explain(rows, self.server[self.base : first], self.base, echoes=self.echoes)
                assert found is not None
                self.acknowledge(Explanation(len(rows), first, found.copies(keys(rows))))
        if fate == "late":
            self.under_way.append(rows)
        if fate.startswith("crash"):
            self.crash()
        return None

    def note_duplicates(self, found: Explanation) -> None:
        self.duplicates += found.duplicates
        self.base = max([self.base, *(last + 1 for _, last in found.duplicates)])

    def land(self) -> None:
        """A request that was given up arrives after all, whatever has been sent and answered since."""
        if self.under_way:
            self.commit(self.under_way.pop(self.rng.randrange(len(self.under_way))))

    def audit(self) -> None:
        """The look at an idle lane that a flush ends with."""
        found = explain([], self.server[self.base :], self.base, echoes=self.echoes)
        if found is None:
            self.possible = True
        else:
            self.note_duplicates(found)


def check(writer: Writer) -> None:
    payloads = [item.payload for item in writer.server]
    gone = {seq for first, last in writer.duplicates for seq in range(first, last + 1)}
    kept = [payload for seq, payload in enumerate(payloads) if seq not in gone]
    appended = [payload for batch in writer.appended for payload in batch]
    if writer.possible:
        rest = iter(kept)
        assert all(payload in rest for payload in appended), "something was lost or came out of order"
        return
    assert kept == appended
    assert sum(last - first + 1 for first, last in writer.duplicates) == len(gone)


def run_histories(count: int, *, late: bool, seed: int) -> int:
    """How many of the histories held a duplicate; fails on the first one that broke the promise."""
    with_duplicates = in_doubt = 0
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        writer = Writer(rng, late)
        for _ in range(rng.randint(2, 14)):
            action = rng.random()
            if action < 0.35:
                writer.append()
            elif action < 0.45:
                writer.crash()
            elif action < 0.55:
                writer.land()
            else:
                writer.step()
        for _ in range(500):
            if not writer.waiting:
                break
            writer.step()
        assert not writer.waiting
        while writer.under_way:
            writer.land()
        writer.audit()
        check(writer)
        with_duplicates += bool(writer.duplicates)
        in_doubt += writer.possible
    # Three payloads for all batches: only there can a late copy be read in more than one way.
    assert in_doubt <= count / 10_000
    return with_duplicates


def test_one_writer_whose_requests_end_with_their_connection_never_duplicates_or_loses() -> None:
    """20,000 random histories: lost answers, merged requests, failed reads, crashes at every place, equal batches."""
    assert run_histories(20_000, late=False, seed=1) == 0


def test_one_writer_whose_given_up_requests_land_later_loses_nothing_and_reports_each_duplicate() -> None:
    """5,000 more, where a request that was read back as missing lands later, at any time until the last flush."""
    assert run_histories(5_000, late=True, seed=2) > 100


@pytest.mark.slow
def test_the_same_over_many_more_histories() -> None:
    """The long form."""
    assert run_histories(200_000, late=False, seed=3) == 0
    assert run_histories(200_000, late=True, seed=4) > 1000
