"""The history checker: each kind of damage is found and named, nothing else is, and nobody can talk it out of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import memlog
from memlog import stamps
from memlog.models import Item
from memlog.payload import decode_items, encode
from memlog.report import Duplicate
from memlog.testing import HistoryReport, check_history, read_history
from memlog.testing.history import _DAMAGE, _KINDS, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

ROOT = Path(__file__).parents[1]
ID = "c_11111111"
START = datetime(2026, 1, 1, tzinfo=UTC)

Batches = list[list[dict[str, Any]]]


def log_of(*copies: list[dict[str, Any]]) -> list[Item]:
    """A log of these batches, each recorded at a time of its own."""
    items = []
    for number, copy in enumerate(copies):
        items += [Item(len(items) + n, START + timedelta(seconds=number), payload) for n, payload in enumerate(copy)]
    return items


def numbered(items: list[Item]) -> list[Item]:
    return [Item(seq, item.recorded_at, item.payload) for seq, item in enumerate(items)]


def check(batches: Any, held: Any, *told: tuple[int, int], stored: set[int] | None = None) -> HistoryReport:
    report = check_history(
        {ID: batches},
        {ID: held},
        duplicates=[Duplicate(ID, *pair) for pair in told],
        stored=None if stored is None else {ID: stored},
    )
    assert report.ok == (not kinds(report) - {"duplicated"})
    return report


def kinds(report: HistoryReport) -> set[str]:
    return {kind for kind in _KINDS if getattr(report, kind)}


def places(findings: tuple[Finding, ...]) -> list[tuple[int | None, int, tuple[tuple[int, int], ...]]]:
    assert all(finding.conversation_id == ID for finding in findings)
    return [(finding.batch, finding.items, finding.seqs) for finding in findings]


A, B, C, D = ([{"a": 0}], [{"b": 0}, {"b": 1}, {"b": 2}], [{"c": 0}], [{"d": 0}, {"d": 1}])


# --- one kind of damage each -----------------------------------------------------------------------------------------


def test_a_log_that_is_what_was_appended_is_ok() -> None:
    """With times or without, in one request or several; an item stands for a batch of one."""
    assert kinds(check([A, B, C], log_of(A, B, C))) == set()
    assert kinds(check([A, B, C], log_of(A + B + C))) == set()  # merged in one request
    assert kinds(check([A[0], B, C[0]], [*A, *B, *C])) == set()
    assert kinds(check([], [])) == set()
    assert kinds(check_history({ID: []}, {})) == set()


def test_a_batch_that_is_missing_is_lost() -> None:
    """By its place in what was appended."""
    report = check([A, B, C], log_of(A, C))
    assert kinds(report) == {"lost"}
    assert places(report.lost) == [(1, 3, ())]
    assert places(check([A, B, C], []).lost) == [(0, 1, ()), (1, 3, ()), (2, 1, ())]


def test_batches_in_another_order_are_reordered() -> None:
    """As few as possible are named."""
    report = check([A, B, C, D], log_of(A, C, D, B))
    assert kinds(report) == {"reordered"}
    assert places(report.reordered) in ([(1, 3, ((3, 5),))], [(1, 3, ((4, 6),))])
    report = check([A, B], log_of(B, A))
    assert kinds(report) == {"reordered"}
    assert places(report.reordered) == [(0, 1, ((3, 3),))]


def test_a_part_of_a_batch_is_torn_and_what_is_missing_of_it_lost() -> None:
    """At its beginning, inside or at its end."""
    for gone in range(3):
        held = log_of(A, B, C)
        del held[1 + gone]
        report = check([A, B, C], numbered(held))
        assert kinds(report) == {"torn", "lost"}
        assert places(report.torn) == [(1, 2, ((1, 2),))]
        assert places(report.lost) == [(1, 1, ())]


def test_a_batch_that_stands_apart_is_torn_and_not_lost() -> None:
    """All of it is there, with another batch inside, in another order, or recorded at two times."""
    apart = check([A, B, C], log_of(A, B[:1], C, B[1:]))
    assert kinds(apart) == {"torn"}
    assert places(apart.torn) == [(1, 3, ((1, 1), (3, 4)))]
    twisted = check([A, B, C], log_of(A, [B[1], B[0], B[2]], C))
    assert kinds(twisted) == {"torn"}
    assert places(twisted.torn) == [(1, 3, ((1, 3),))]
    two_times = check([A, B, C], log_of(A, B[:2], B[2:] + C))
    assert kinds(two_times) == {"torn"}
    assert places(two_times.torn) == [(1, 3, ((1, 3),))]


def test_a_second_copy_is_damage_only_if_nobody_reported_it() -> None:
    """Wherever it stands, and whichever of the two was reported."""
    for held, ways in (
        (log_of(A, B, B, C), [(1, 3), (4, 6)]),
        (log_of(A, B, C, B), [(5, 7)]),
        (log_of(A, B, A + B, C), [(4, 7)]),
    ):
        silent = check([A, B, C], held)
        assert kinds(silent) == {"duplicated", "unreported"}
        assert sum(finding.items for finding in silent.unreported) in (3, 4)
        for way in ways:
            assert kinds(check([A, B, C], held, way)) == {"duplicated"}
    assert places(check([A, B, C], log_of(A, B, C, B), (5, 6)).unreported) == [(1, 1, ((7, 7),))]


def test_a_report_of_a_duplicate_that_is_none_is_damage() -> None:
    """It names the only copy, a part of it, or nothing."""
    held = log_of(A, B, C)
    only = check([A, B, C], held, (1, 3))
    assert kinds(only) == {"overreported"}
    assert places(only.overreported) == [(None, 3, ((1, 3),))]
    assert places(check([A, B, C], held, (3, 3)).overreported) == [(None, 1, ((3, 3),))]
    assert places(check([A, B, C], held, (5, 7)).overreported) == [(None, 3, ((5, 7),))]
    elsewhere = check_history({ID: [A]}, {ID: log_of(A)}, duplicates=[Duplicate("c_22222222", 0, 0)])
    assert [str(finding) for finding in elsewhere.overreported] == ["c_22222222: 1 item(s), at 0"]


def test_what_nobody_appended_is_foreign() -> None:
    """In a conversation of ours, or in one that is not."""
    report = check([A, B], log_of(A, [{"who": 1}], B))
    assert kinds(report) == {"foreign"}
    assert places(report.foreign) == [(None, 1, ((1, 1),))]
    other = check_history({ID: [A]}, {ID: log_of(A), "c_22222222": log_of(B)})
    assert [(finding.conversation_id, finding.items) for finding in other.foreign] == [("c_22222222", 3)]
    assert not other.ok


def test_numbers_that_do_not_go_on_are_misnumbered() -> None:
    """A gap, a repeated number, a beginning that is not 0; what the items are is another question."""
    for numbers, wrong in (([0, 1, 3], ((3, 3),)), ([0, 0, 1], ((0, 1),)), ([1, 2, 3], ((1, 3),))):
        held = [Item(seq, START, payload) for seq, payload in zip(numbers, [*A, *D], strict=True)]
        report = check([A, D], held)
        assert kinds(report) == {"misnumbered"}
        assert report.misnumbered[0].seqs == wrong


# --- what may be there or not ----------------------------------------------------------------------------------------


def test_what_was_not_reported_stored_may_be_there_or_not() -> None:
    """But wholly, once, and in order."""
    assert kinds(check([A, B, C], log_of(A), stored={0})) == set()
    assert kinds(check([A, B, C], log_of(A, B), stored={0})) == set()
    assert kinds(check([A, B, C], log_of(A, C), stored={0})) == set()
    assert kinds(check([A, B, C], log_of(A, B, C), stored=set())) == set()
    assert kinds(check([A, B, C], log_of(A), stored={0, 1})) == {"lost"}
    assert kinds(check([A, B, C], log_of(A, B[:2]), stored={0})) == {"torn"}
    assert kinds(check([A, B, C], log_of(B, A), stored={0})) == {"reordered"}
    assert kinds(check([A, B, C], log_of(A, B, B), stored={0})) == {"duplicated", "unreported"}
    assert kinds(check_history({ID: [A]}, {}, stored={})) == set()


def test_arguments_that_do_not_fit_each_other_are_refused() -> None:
    """A checker that is used wrongly must not say that all is well."""
    with pytest.raises(ValueError, match=f"batch 1 of {ID} is empty"):
        check([A, []], [])
    with pytest.raises(ValueError, match=f"stored: {ID} has 1 batch"):
        check([A], log_of(A), stored={1})
    with pytest.raises(ValueError, match=r"stored: c_22222222 has 0 batch"):
        check_history({ID: [A]}, {}, stored={"c_22222222": [0]})
    with pytest.raises(ValueError, match="pending"):
        check([A], [Item(None, None, A[0])])
    with pytest.raises(memlog.PermanentError):
        check([[{"a": float("nan")}]], [])


# --- it cannot be fooled ---------------------------------------------------------------------------------------------


def test_equal_payloads_are_counted() -> None:
    """A copy does not stand for another batch of the same content, and a wrong report does not explain a surplus."""
    x = [{"x": 1}]
    assert kinds(check([x, x, x], log_of(x, x, x))) == set()
    assert kinds(check([x, x, x], log_of(x, x))) == {"lost"}
    assert kinds(check([x, x, x], log_of(x, x, x, x))) == {"duplicated", "unreported"}
    for seq in range(4):
        assert kinds(check([x, x, x], log_of(x, x, x, x), (seq, seq))) == {"duplicated"}
    assert kinds(check([x, x, x], log_of(x, x, x), (1, 1))) == {"overreported"}
    assert kinds(check([x, x, x], log_of(x, x), (1, 1))) == {"lost", "overreported"}
    assert kinds(check([x, A, x], log_of(x, x, A))) == {"reordered"}
    # The report is true, so it is the third that is missing.
    report = check([x, A, x], log_of(x, x, A), (1, 1))
    assert kinds(report) == {"duplicated", "lost"}
    assert places(report.lost) == [(2, 1, ())]


def test_batches_of_equal_items_may_be_read_in_any_way_that_does_no_harm() -> None:
    """[x, x], [x] and [x], [x, x] look alike; three of one time may be both."""
    x = {"x": 1}
    assert kinds(check([[x, x], [x]], log_of([x, x, x]))) == set()
    assert kinds(check([[x, x], [x]], log_of([x, x], [x]))) == set()
    assert not check([[x, x], [x]], log_of([x], [x], [x])).ok
    # The second must be there, the first may: the one that is there is the second.
    assert kinds(check([[x], [x]], log_of([x]), stored={1})) == set()
    # Here the report is right only if the optional one was never taken.
    assert kinds(check([[x], [x]], log_of([x], [x]), (1, 1), stored={0})) == {"duplicated"}


def test_kept_examples_of_readings_that_were_missed() -> None:
    """The second copies of one item, and not the only copy of two."""
    x = {"x": 1}
    assert kinds(check([[x], [x, x]], log_of([x, x, x]), (0, 1), stored=set())) == {"duplicated"}


def test_duplicates_of_duplicates_are_each_reported_or_not() -> None:
    """Three copies need two reports; the same report twice is one."""
    held = log_of(A, B, A + B, A, C)
    assert kinds(check([A, B, C], held, (4, 7), (8, 8))) == {"duplicated"}
    assert kinds(check([A, B, C], held, (4, 7), (4, 7))) == {"duplicated", "unreported"}
    x = [{"x": 1}]
    assert kinds(check([x], log_of(x, x, x), (0, 0), (1, 1))) == {"duplicated"}
    assert kinds(check([x], log_of(x, x, x), (1, 1), (1, 1))) == {"duplicated", "unreported"}
    everything = check([x], log_of(x, x, x), (0, 2))
    assert kinds(everything) == {"duplicated", "overreported"}
    assert sum(finding.items for finding in everything.overreported) == 1


def test_a_report_cannot_hide_a_foreign_or_a_torn_item() -> None:
    """Only a whole copy of what stands elsewhere is a second copy."""
    foreign = check([A, B], log_of(A, [{"who": 1}], B), (1, 1))
    assert kinds(foreign) == {"foreign", "overreported"}
    half = check([A, B], log_of(A, B, B[:2]), (4, 5))
    assert kinds(half) == {"torn", "overreported"}
    assert places(half.torn) == [(1, 2, ((4, 5),))]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"v": 1}, {"v": True}),
        ({"v": 1}, {"v": 1.0}),
        ({"v": 0}, {"v": False}),
        ({"v": 0.0}, {"v": -0.0}),
        ({"v": None}, {}),
        ({"v": "1"}, {"v": 1}),
        ({"v": [1, 2]}, {"v": [2, 1]}),
        ({"v": "\u00e9"}, {"v": "e\u0301"}),
    ],
)
def test_payloads_are_compared_as_json(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Python finds some of these pairs equal."""
    assert kinds(check([mine], [mine])) == set()
    assert kinds(check([mine], [theirs])) == {"lost", "foreign"}


def test_the_order_of_keys_and_the_kind_of_object_do_not_matter() -> None:
    """A model is what it becomes in the log."""

    class Said(BaseModel):
        role: str
        text: str

    assert kinds(check([Said(role="user", text="é")], [{"text": "é", "role": "user"}])) == set()


def test_stamps_are_removed_and_what_a_replay_passes_over_counts_as_reported() -> None:
    """A stamp that hides the only copy of an item from every reader is damage."""

    def stamped(batch: list[dict[str, Any]], row: int) -> list[dict[str, Any]]:
        return decode_items(stamps.stamped([encode(item) for item in batch], "0123456789abcdef", row))

    a, b, c = stamped(A, 1), stamped(B, 2), stamped(C, 3)
    assert kinds(check([A, B, C], log_of(a, b, c))) == set()
    assert kinds(check([A, B, C], log_of(a, b, b, a, c))) == {"duplicated"}
    assert kinds(check([A, B, C], log_of(a, b, B, c))) == {"duplicated", "unreported"}
    # Which of two copies the log has named does not matter: the replay leaves out one of them, the later.
    for told in ((1, 3), (4, 6)):
        assert kinds(check([A, B, C], log_of(a, b, b, c), told)) == {"duplicated"}
    assert kinds(check([A, B, C], log_of(a, b, b, b, c), (1, 3), (7, 9))) == {"duplicated"}
    assert kinds(check([A, B, C], log_of(a, b, b, c), (1, 6))) == {"duplicated", "overreported"}
    assert kinds(check([A, B, C], log_of(a, b, c), (1, 3))) == {"overreported"}
    hidden = check([B, A], log_of(b, a))
    assert kinds(hidden) == {"overreported"}
    assert places(hidden.overreported) == [(None, 1, ((3, 3),))]


def test_the_report_reads_well_and_holds_no_payload() -> None:
    """Conversation and numbers, a few of each kind, and how many more there are."""
    secret = [[{"secret": n}] for n in range(20)]
    report = check_history(
        {ID: [*secret, [{"secret": 20}, {"secret": 21}]]}, {ID: log_of([{"secret": 20}], [{"other": "secret"}])}
    )
    text = str(report)
    assert text.startswith("1 conversation(s), 21 batch(es) appended, 2 item(s) held: DAMAGED\n")
    assert f"  lost: {ID}: batch 0, 1 item(s)\n" in text
    assert "  lost: … and 16 more\n" in text
    assert f"  torn: {ID}: batch 20, 1 item(s), at 0\n" in text
    assert f"  foreign: {ID}: 1 item(s), at 1" in text
    assert "secret" not in text + repr(report)
    assert str(check([A], log_of(A))) == "1 conversation(s), 1 batch(es) appended, 1 item(s) held: ok"


# --- any history, any damage -----------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn, *, alike: bool = False) -> tuple[Batches, list[list[int]], list[int]]:
    """Batches, and an honest log of them as requests of batch numbers; the requests that are second copies."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    if alike:
        values = iter(draw(st.lists(st.integers(0, 1), min_size=sum(sizes), max_size=sum(sizes))))
    else:
        values = iter(range(sum(sizes)))
    batches = [[{"n": next(values)} for _ in range(size)] for size in sizes]
    requests: list[list[int]] = []
    again: list[int] = []
    number = 0
    while number < len(batches):
        count = draw(st.integers(1, len(batches) - number))
        request = list(range(number, number + count))
        for _ in range(draw(st.integers(0, 2))):  # copies of a part of it that landed before
            again.append(len(requests))
            requests.append(request[: draw(st.integers(1, count))])
        requests.append(request)
        number += count
    return batches, requests, again


def told_of(batches: Batches, requests: list[list[int]], again: list[int]) -> tuple[list[Item], list[tuple[int, int]]]:
    held = log_of(*[[item for number in request for item in batches[number]] for request in requests])
    ranges, position = [], 0
    for place, request in enumerate(requests):
        size = sum(len(batches[number]) for number in request)
        if place in again:
            ranges.append((position, position + size - 1))
        position += size
    return held, ranges


@given(history=st.one_of(histories(), histories(alike=True)), data=st.data())
@settings(max_examples=150, deadline=None)
def test_an_honest_history_is_ok_whatever_its_payloads(history: Any, data: st.DataObject) -> None:
    """Requests of one or many batches, copies of any of them, reported; also if not all had to be there."""
    batches, requests, again = history
    held, ranges = told_of(batches, requests, again)
    stored = data.draw(st.none() | st.sets(st.integers(0, len(batches) - 1)))
    report = check(batches, held, *ranges, stored=stored)
    assert report.ok, report
    assert report.items == len(held)


@given(history=histories(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_single_damage_is_named_exactly(history: Any, data: st.DataObject) -> None:
    """Payloads differ, so that there is one way to read the log, and one name for what was done to it."""
    batches, requests, again = history
    held, ranges = told_of(batches, requests, again)
    damage = data.draw(st.sampled_from(["lose", "tear", "swap", "silence", "invent", "accuse", "cut apart"]))
    position = data.draw(st.integers(0, len(held) - 1))
    number = next(n for n, batch in enumerate(batches) if held[position].payload in batch)
    batch = batches[number]
    copies = sum(request.count(number) for request in requests)
    told = {seq for first, last in ranges for seq in range(first, last + 1)}
    if damage == "lose":
        gone = {seq for seq, item in enumerate(held) if item.payload in batch}
        held, told = without(held, told, gone)
        report = check(batches, held, *pairs(told))
        assert kinds(report) - {"duplicated"} == {"lost"}
        assert places(report.lost) == [(number, len(batch), ())]
        assert kinds(check(batches, held, *pairs(told), stored={*range(len(batches))} - {number})) <= {"duplicated"}
    elif damage == "tear":
        assume(len(batch) > 1 and copies == 1)
        held, told = without(held, told, {position})
        report = check(batches, held, *pairs(told))
        assert kinds(report) - {"duplicated"} == {"torn", "lost"}
        assert [(finding.batch, finding.items) for finding in report.torn] == [(number, len(batch) - 1)]
        assert places(report.lost) == [(number, 1, ())]
    elif damage == "swap":
        assume(len(batches) > 1 and not again)
        other = data.draw(st.integers(0, len(batches) - 1).filter(lambda n: n != number))
        order = list(range(len(batches)))
        order[number], order[other] = order[other], order[number]
        report = check(batches, log_of(*(batches[n] for n in order)))
        assert kinds(report) == {"reordered"}
        # No more than have to be taken out so that the rest is in order, by items.
        assert sum(finding.items for finding in report.reordered) == least_moved(batches, order)
    elif damage == "silence":
        assume(again)
        silent = data.draw(st.sampled_from(ranges))
        report = check(batches, held, *[pair for pair in ranges if pair != silent])
        assert kinds(report) == {"duplicated", "unreported"}
        assert sum(finding.items for finding in report.unreported) == silent[1] - silent[0] + 1
    elif damage == "invent":
        held.insert(position, Item(0, START - timedelta(1), {"foreign": True}))
        shifted = {seq + (seq >= position) for seq in told}
        report = check(batches, numbered(held), *pairs(shifted))
        inside = position > 0 and held[position - 1].recorded_at == held[position + 1].recorded_at
        assert kinds(report) - {"duplicated"} >= {"foreign"}
        assert places(report.foreign) == [(None, 1, ((position, position),))]
        assert inside or kinds(report) <= {"foreign", "duplicated"}
    elif damage == "accuse":
        assume(copies == 1)
        report = check(batches, held, *ranges, (position, position))
        assert kinds(report) - {"duplicated"} == {"overreported"}
        assert places(report.overreported) == [(None, 1, ((position, position),))]
    else:
        assume(copies == 1 and len(batch) > 1 and not again)
        late = [Item(i.seq, i.recorded_at if i.payload != batch[0] else START - timedelta(1), i.payload) for i in held]
        report = check(batches, late)
        assert kinds(report) == {"torn"}
        assert [(finding.batch, finding.items) for finding in report.torn] == [(number, len(batch))]


def without(held: list[Item], told: set[int], gone: set[int]) -> tuple[list[Item], set[int]]:
    kept = [seq for seq in range(len(held)) if seq not in gone]
    return numbered([held[seq] for seq in kept]), {new for new, old in enumerate(kept) if old in told}


def pairs(seqs: set[int]) -> Iterator[tuple[int, int]]:
    for seq in seqs:
        yield seq, seq


def least_moved(batches: Batches, order: list[int]) -> int:
    """By trying all subsets that are in order."""
    best = 0
    for mask in range(1 << len(order)):
        chosen = [n for place, n in enumerate(order) if mask >> place & 1]
        if chosen == sorted(chosen):
            best = max(best, sum(len(batches[n]) for n in chosen))
    return sum(map(len, batches)) - best


@given(history=histories(alike=True), data=st.data())
@settings(max_examples=200, deadline=None)
def test_it_finds_damage_where_there_is_no_harmless_reading_and_only_there(history: Any, data: st.DataObject) -> None:
    """Payloads are alike, the log is cut, doubled and turned at random: a search of all readings says the same."""
    batches, requests, _ = history
    batches = batches[:5]
    requests = [kept for request in requests if (kept := [n for n in request if n < len(batches)])]
    held, _ = told_of(batches, requests, [])
    for _ in range(data.draw(st.integers(0, 2))):
        assume(held)
        position = data.draw(st.integers(0, len(held) - 1))
        match data.draw(st.sampled_from(["delete", "double", "move", "retime"])):
            case "delete":
                del held[position]
            case "double":
                held.insert(position, held[position])
            case "move":
                held.insert(data.draw(st.integers(0, len(held) - 1)), held.pop(position))
            case _:
                held[position] = Item(0, START - timedelta(1), held[position].payload)
    held = numbered(held)
    assume(len(held) <= 12)
    told = data.draw(st.sets(st.integers(0, max(0, len(held) - 1)), max_size=3))
    told = {seq for seq in told if seq < len(held)}
    stored = data.draw(st.sets(st.integers(0, len(batches) - 1)))
    report = check(batches, held, *pairs(told), stored=stored)
    assert report.ok == harmless(batches, held, told, stored), report


def harmless(batches: Batches, held: list[Item], told: set[int], stored: set[int]) -> bool:
    """Whether some reading of the log does no harm: tries them all."""

    def fits(batch: list[dict[str, Any]], position: int, *, reported: bool) -> bool:
        span = held[position : position + len(batch)]
        return (
            [item.payload for item in span] == batch
            and len({item.recorded_at for item in span}) == 1
            and all((item.seq in told) == reported for item in span)
        )

    def read(position: int, number: int) -> bool:
        if position == len(held):
            return all(other not in stored for other in range(number, len(batches)))
        if position in told:  # a second copy, of what stands elsewhere
            return any(
                read(position + len(batch), number)
                for batch in batches
                if fits(batch, position, reported=True)
                if any(fits(batch, elsewhere, reported=False) for elsewhere in range(len(held)))
            )
        for other in range(number, len(batches)):
            if fits(batches[other], position, reported=False) and read(position + len(batches[other]), other + 1):
                return True
            if other in stored:
                return False
        return False

    return read(0, 0)


def test_a_long_history_is_checked_in_seconds() -> None:
    """20,000 items, some lost, some twice, some moved: near the damage and far from it."""
    dice = random.Random(7)
    batches = [[{"n": number, "i": i} for i in range(dice.randint(1, 4))] for number in range(8000)]
    order = [*range(4000), 7000, *range(4001, 7000), 4000, *range(7001, 8000), 100]
    held = log_of(*[batches[n] for n in order if n not in (5, 6000)])
    report = check(batches, held)
    assert kinds(report) == {"lost", "reordered", "duplicated", "unreported"}
    assert [finding.batch for finding in report.lost] == [5, 6000]
    assert sorted(finding.batch for finding in report.reordered if finding.batch) == [4000, 7000]
    assert [finding.batch for finding in report.unreported] == [100]


def test_every_kind_has_its_name_in_the_report() -> None:
    """The docstring explains each; only second copies that were reported are no damage."""
    assert HistoryReport.__doc__ is not None
    assert all(f"``{kind}``" in HistoryReport.__doc__ for kind in _KINDS)
    assert set(_KINDS) - set(_DAMAGE) == {"duplicated"}


# --- with a server ---------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_servers_history_is_read_whole(server: ReferenceServer, tmp_path: Path) -> None:
    """More than a page of it, pages too large for one answer, and by default all the site's conversations."""
    small, large = "c_11111111", "c_22222222"
    some = [[{"n": n}] for n in range(30)]
    wide = [[{"n": n, "text": "x" * 200_000}] for n in range(80)]
    many = [[{"n": n, "i": i} for i in range(250)] for n in range(5)]
    async with memlog.Client(server.url, auth=server.auth) as client:
        for conversation, batches in ((small, some + many), (large, wide)):
            for batch in batches:
                await client.append_memory(conversation, batch)
    held = await read_history(server.url, server.auth)
    assert {conversation: len(items) for conversation, items in held.items()} == {small: 1280, large: 80}
    report = check_history({small: some + many, large: wide}, held)
    assert report.ok, report
    assert await read_history(server.url, server.auth, ["c_99999999"]) == {"c_99999999": []}
    assert list(await read_history(server.url, server.auth, [small])) == [small]


@pytest.mark.anyio
async def test_all_conversations_are_found_page_by_page(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site may have more of them than one answer lists."""
    monkeypatch.setattr("memlog.testing.history.PAGE_ITEMS_MAX", 3)
    ids = [f"c_{n:08}" for n in range(7)]
    async with memlog.Client(server.url, auth=server.auth) as client:
        for conversation in ids:
            for n in range(4):
                await client.append_memory(conversation, [{"n": n}])
    held = await read_history(server.url, server.auth)
    assert sorted(held) == ids
    assert [len(items) for items in held.values()] == [4] * 7


def test_duplicates_that_a_server_caused_are_told_by_the_log(server: ReferenceServer, tmp_path: Path) -> None:
    """The checker agrees with what memlog reports when every answer gets lost."""
    batches = [[{"n": n}] for n in range(20)]
    server.faults.add("drop", tool="append_memory", when="after", probability=0.5, seed=3, times=None)
    retry = memlog.RetryPolicy(delay_min=0.01, delay_max=0.02)
    import asyncio

    with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=retry).sync as log:
        for batch in batches:
            log.conversation(ID).extend(batch)
        assert log.flush(30).complete
        duplicates = log.duplicates()
    server.faults.clear()
    held = asyncio.run(read_history(server.url, server.auth))
    report = check_history({ID: batches}, held, duplicates=duplicates)
    assert report.ok, report


# --- as users get it -------------------------------------------------------------------------------------------------


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def test_importing_memlog_testing_needs_no_pytest() -> None:
    """A demonstration or a soak uses it, too."""
    done = python(
        "import sys; sys.modules['pytest'] = None; import memlog.testing; print(sorted(memlog.testing.__all__))"
    )
    assert done.returncode == 0, done.stderr
    assert "check_history" in done.stdout


PLUGIN = """
pytest_plugins = ["memlog.testing.plugin"]

import memlog

def test_a_server(memlog_server):
    with memlog.open_log(memlog_server.url, auth=memlog_server.auth, buffer_dir=":memory:").sync as log:
        assert log.conversation("c_11111111").append({"n": 1}).acknowledged(20).first_seq == 0

def test_a_server_of_its_own(memlog_server, memlog_env):
    with memlog.open_log().sync as log:
        assert log.conversation("c_11111111").append({"n": 1}).acknowledged(20).first_seq == 0
    assert list(memlog_env.glob("*/*.db"))
"""


def test_the_plugin_gives_a_users_test_a_server(tmp_path: Path) -> None:
    """With nothing but the line that names it."""
    (tmp_path / "test_users.py").write_text(PLUGIN, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_users.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_documented_program_checks_a_killed_agent(server: ReferenceServer, tmp_path: Path) -> None:
    """The snippet of the how-to, as it stands; and it does find the damage that a server may do."""
    snippet = ROOT / "docs" / "snippets" / "test_history.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(snippet)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert json.dumps(snippet.name).strip('"') in (ROOT / "docs" / "howto.md").read_text("utf-8")
