"""The sender against a real server that misbehaves: order, independence, evidence, and nothing lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from between import PATIENCE, QUICK, Between, Call, Opener, RetryPolicy, drain, until, without_duplicates
from books import warnings_of

from memlog import Client
from memlog.errors import (
    AuthenticationError,
    ConversationFullError,
    InvalidRequestError,
    RateLimitedError,
    TooLargeError,
)
from memlog.testing import reference_server
from server_reference import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memlog.sync import SyncMemoryLog
    from memlog.testing import ReferenceServer

LANE = "c_aaaaaaaa"


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path)
    yield opener
    server.faults.clear()
    opener.close()


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"n": n} for n in range(first, first + count)]


def append_all(log: SyncMemoryLog, items: list[dict[str, Any]], conversation: str = LANE) -> None:
    chat = log.conversation(conversation)
    for item in items:
        chat.append(item)


def books_close(log: SyncMemoryLog) -> None:
    now = log.statistics()
    for unit in ("items", "batches"):
        places = ("acknowledged", "pending", "refused", "dropped")
        assert getattr(now, f"stored_{unit}") == sum(getattr(now, f"{place}_{unit}") for place in places)


# --- lanes -----------------------------------------------------------------------------------------------------------


@pytest.mark.contract("C4")
def test_each_conversation_has_one_request_in_flight_and_keeps_its_order(
    opened: Opener, server: ReferenceServer
) -> None:
    """30 conversations over a server that dawdles and breaks connections, at most 8 requests at once."""
    server.faults.add("stall", tool="append_memory", seconds=0.01, probability=0.3, seed=1, times=None)
    server.faults.add("drop", tool="append_memory", when="before", probability=0.1, seed=2, times=None)
    server.faults.add("drop", tool="append_memory", when="after", probability=0.1, seed=3, times=None)
    log = opened()
    names = [f"c_{n:08}" for n in range(30)]
    for n in range(40):
        for name in names:
            log.conversation(name).append({"n": n})
    drain(log)
    assert opened.contents() == {name: numbered(40) for name in names}
    assert set(server.counters.in_flight_max_by_conversation.values()) == {1}
    assert 1 < server.counters.in_flight_max <= 8
    assert log.duplicates() == []
    books_close(log)


def test_while_a_request_is_under_way_the_lane_collects_and_the_next_takes_all_that_fits(opened: Opener) -> None:
    """An idle lane sends at once; 300 that came meanwhile go as 250 and 50."""
    between, gate = holding_the_first()
    log = opened(between)
    append_all(log, numbered(1))
    until(lambda: len(between.appends) == 1)
    append_all(log, numbered(300, 1))
    log.flush(PATIENCE, until="stored")
    assert len(between.appends) == 1
    loop_call(gate.set)
    drain(log)
    assert [len(call.items) for call in between.appends] == [1, 250, 50]
    assert opened.contents()[LANE] == numbered(301)


def holding_the_first() -> tuple[Between, asyncio.Event]:
    """Keeps the first append under way until the event is set, in the engine's loop."""
    gate = asyncio.Event()

    async def hold(call: Call) -> None:
        if call.tool == "append_memory" and len(between.appends) == 1:
            await gate.wait()

    between = Between(hold)
    return between, gate


def loop_call(function: Any) -> None:
    from memlog import engine

    engine.running().soon(function)


@pytest.mark.contract("C4")
def test_whole_batches_are_merged_and_none_is_split(opened: Opener) -> None:
    """By items and by bytes; each receipt gets the range of its own batch."""
    between, gate = holding_the_first()
    log = opened(between)
    chat = log.conversation(LANE)
    receipts = [chat.append({"n": -1})]
    until(lambda: len(between.appends) == 1)
    receipts += [chat.extend(numbered(count)) for count in (200, 49, 2, 100)]
    receipts += [chat.extend([{"x": "y" * 200_000}, {"x": "y" * 200_000}]) for _ in range(3)]
    loop_call(gate.set)
    drain(log)
    assert [len(call.items) for call in between.appends] == [1, 249, 106, 2]
    acks = [receipt.acknowledged(PATIENCE) for receipt in receipts]
    assert [(ack.first_seq, ack.last_seq) for ack in acks] == [
        (0, 0), (1, 200), (201, 249), (250, 251), (252, 351), (352, 353), (354, 355), (356, 357),
    ]  # fmt: skip


def test_a_stalled_conversation_does_not_delay_the_others(opened: Opener) -> None:
    """Independent lanes: 50 others are acknowledged while one hangs."""
    gate = asyncio.Event()

    async def hold(call: Call) -> None:
        if call.conversation == LANE:
            await gate.wait()

    log = opened(Between(hold))
    stuck = log.conversation(LANE).append({"n": 0})
    others = [log.conversation(f"c_{n:08}").append({"n": n}) for n in range(50)]
    for receipt in others:
        receipt.acknowledged(PATIENCE)
    with pytest.raises(TimeoutError):
        stuck.acknowledged(0)
    loop_call(gate.set)
    assert stuck.acknowledged(PATIENCE).first_seq == 0


@pytest.mark.parametrize("requests", [1, 4])
def test_conversations_in_trouble_leave_half_of_the_requests_to_the_others(opened: Opener, requests: int) -> None:
    """Ten that fail slowly, for ever: the eleventh is served, in turn where there is one request at a time."""
    under_way = [0, 0]

    async def fail_slowly(call: Call) -> httpx.Response | None:
        if call.tool != "append_memory" or not call.says("bad"):
            return None
        under_way[0] += 1
        under_way[1] = max(under_way[1], under_way[0])
        try:
            await asyncio.sleep(0.05)
        finally:
            under_way[0] -= 1
        return call.refuse("oops", status=500, code=-32603)

    log = opened(Between(fail_slowly), retry=RetryPolicy(delay_min=0.01, delay_max=0.02, requests_in_flight=requests))
    for n in range(10):
        log.conversation(f"c_bad{n:05}").append({"bad": n})
    until(lambda: len(opened.of("held")) == 10)
    under_way[1] = 0
    for n in range(20):
        log.conversation(LANE).append({"n": n}).acknowledged(PATIENCE)
    assert under_way[1] <= max(1, requests // 2)
    assert log.statistics().pending_items == 10
    assert log.statistics().state == "ok" or log.statistics().reason


def test_a_transport_that_cancels_its_own_request_costs_a_retry(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """A cancellation that nobody asked for neither ends the lane nor the sending of others."""

    async def cancel(call: Call) -> None:
        if call.tool == "append_memory" and len(between.appends) <= 2:
            raise asyncio.CancelledError

    between = Between(cancel)
    log = opened(between)
    append_all(log, numbered(3))
    drain(log)
    assert opened.contents() == {LANE: numbered(3)}
    assert caplog.text.count("Traceback") <= 1


def test_idle_conversations_are_forgotten(opened: Opener) -> None:
    """A process that talks in a million conversations holds the few that have something to send."""
    log = opened()
    for n in range(300):
        log.conversation(f"c_{n:08}").append({"n": n})
    drain(log)
    sending = log._log._core._sending
    until(lambda: not sending.sender._lanes)
    assert sending._awaited == {}
    assert len(sending.sender._tasks) == 0
    assert not sending.sender._ready
    assert not sending.sender._troubled


def test_a_damaged_batch_is_counted_as_lost_and_everything_else_goes_on(
    opened: Opener, server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once; what comes behind it in its conversation is sent, and the damaged file is kept."""
    server.stop()
    log = opened()
    append_all(log, numbered(3))
    append_all(log, numbered(3), "c_bbbbbbbb")
    log.flush(PATIENCE, until="stored")
    log.close()
    [path] = tmp_path.glob("*/*.db")
    db = sqlite3.connect(path)
    db.execute(
        "UPDATE pending SET crc = crc + 1 WHERE id IN (SELECT id FROM pending WHERE conversation = ? LIMIT 2)", (LANE,)
    )
    db.commit()
    db.close()
    server.start()
    caplog.clear()
    log = opened()
    until(lambda: opened.contents() == {LANE: numbered(1, 2), "c_bbbbbbbb": numbered(3)})
    [lost] = opened.of("lost")
    assert lost.items == 2
    assert str(path) in (lost.reason or "")
    assert [record.getMessage().count("is damaged") for record in warnings_of(caplog)] == [1]
    assert log.statistics().lost_items == 2
    assert list(path.parent.glob("*.corrupt-*"))


# --- the site's gate ---------------------------------------------------------------------------------------------------


@pytest.mark.contract("C5", "C11")
def test_a_pause_the_server_asks_for_is_kept_by_the_whole_site(opened: Opener) -> None:
    """After one 429 nobody sends for a second; the batch is no dead letter, and no attempt is made meanwhile."""
    answers = iter([True])

    def throttle(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and next(answers, False):
            return httpx.Response(429, headers={"retry-after": "1"})
        return None

    between = Between(throttle)
    log = opened(between)
    first = log.conversation(LANE).append({"n": 0})
    until(lambda: log.statistics().state == "waiting")
    assert "pause of 1 second" in (log.statistics().reason or "")
    others = [log.conversation(f"c_{n:08}").append({"n": n}) for n in range(20)]
    for receipt in [first, *others]:
        receipt.acknowledged(PATIENCE)
    refused = between.appends[0].at
    assert all(call.at - refused >= 1.0 for call in between.calls if call.at > refused)
    until(lambda: log.statistics().state == "ok")
    assert (log.statistics().refused_items, log.statistics().acknowledged_items) == (0, 21)
    until(lambda: len(opened.of("ok")) == 1)
    assert len(opened.of("waiting")) == 1


@pytest.mark.contract("C5")
def test_a_pause_outlives_the_process(opened: Opener) -> None:
    """A crash loop must not hammer a server that asked for time."""
    log = opened(Between(lambda call: httpx.Response(429, headers={"retry-after": "2"})))
    log.conversation(LANE).append({"n": 0})
    until(lambda: log.statistics().state == "waiting")
    until(lambda: log._log._core.buffer.run(lambda spools: spools.own.noted("gate")).result(PATIENCE))
    log.close()
    between = Between()
    log = opened(between)
    until(lambda: log.statistics().state == "waiting")
    report = log.flush(0.5)
    assert (report.complete, report.pending, report.state) == (False, 1, "waiting")
    assert between.calls == []
    drain(log)
    assert opened.contents()[LANE] == [{"n": 0}]


def test_an_answer_to_an_older_request_does_not_open_the_gate(opened: Opener) -> None:
    """It left before the server asked for the pause: its success is no news."""
    gate = asyncio.Event()

    async def decide(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and call.conversation == LANE and len(call.items) == 1:
            await gate.wait()
        if call.conversation == "c_limited0" and call.tool == "append_memory" and not throttled:
            throttled.append(call.at)
            return httpx.Response(429, headers={"retry-after": "1"})
        return None

    throttled: list[float] = []
    between = Between(decide)
    log = opened(between)
    old = log.conversation(LANE).append({"n": 0})
    until(lambda: between.appends)
    log.conversation("c_limited0").append({"n": 0})
    until(lambda: log.statistics().state == "waiting")
    late = log.conversation("c_late0000").append({"n": 0})
    loop_call(gate.set)
    old.acknowledged(PATIENCE)
    assert log.statistics().state == "waiting"
    late.acknowledged(PATIENCE)
    assert next(call.at for call in between.calls if call.conversation == "c_late0000") - throttled[0] >= 1.0


def test_a_rate_limit_without_a_time_is_waited_for_all_the_same(opened: Opener) -> None:
    """At least a second, and more each time."""
    answers = iter([True])
    between = Between(
        lambda call: httpx.Response(429) if call.tool == "append_memory" and next(answers, False) else None
    )
    log = opened(between)
    log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    first, second = between.appends
    assert second.at - first.at >= 1.0


def test_appends_go_on_through_an_outage_and_drain_in_order_afterwards(
    opened: Opener, server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when it begins, one line when it ends, and the site is probed with one request at a time."""
    log = opened()
    names = [f"c_{n:08}" for n in range(12)]
    for name in names:
        append_all(log, numbered(5), name)
    drain(log)
    server.stop()
    caplog.clear()
    for n in range(5, 40):
        for name in names:
            log.conversation(name).append({"n": n})
    until(lambda: log.statistics().state == "waiting")
    report = log.flush(0.3)
    assert (report.complete, report.state) == (False, "waiting")
    assert report.reason
    assert log.statistics().pending_items == 12 * 35
    assert [record.getMessage().startswith("memlog: sending waits") for record in warnings_of(caplog)] == [True]
    server.start()
    drain(log)
    assert opened.contents() == {name: numbered(40) for name in names}
    until(lambda: len(opened.of("ok")) == 1)
    assert len(opened.of("waiting")) == 1
    assert log.duplicates() == []
    books_close(log)


# --- odd answers -------------------------------------------------------------------------------------------------------

STATUSES = [400, 401, 403, 404, 405, 408, 409, 410, 413, 418, 421, 422, 425, 500, 501, 502, 503, 504, 530, 599]


@pytest.mark.contract("C6")
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_odd_answer_neither_loses_nor_refuses_nor_stops_anything(
    opened: Opener, server: ReferenceServer, when: str
) -> None:
    """Whatever the status, whether or not the batch was committed: all is there in the end, and none is refused.

    A status that means "refused" cannot be told from one that lies: then a copy may be left, and must be reported.
    """
    log = opened()
    for status in STATUSES:
        name = f"c_status_{status}"
        log.conversation(name).append({"n": -1}).acknowledged(PATIENCE)
        fault = server.faults.add("status", tool="append_memory", status=status, when=when)
        append_all(log, numbered(10), name)
        drain(log)
        assert fault.struck == 1
        append_all(log, numbered(5, 10), name)
        drain(log)
    found = without_duplicates(log, opened.contents())
    for status in STATUSES:
        numbers = [item["n"] for item in found[f"c_status_{status}"]]
        assert numbers == list(range(-1, 15)), status
    copied = {int(range_.conversation_id.rpartition("_")[2]) for range_ in log.duplicates()}
    assert not [status for status in copied if status >= 500 or status == 413 or when == "before"]
    assert log.statistics().refused_items == 0
    assert not opened.of("several_writers")
    books_close(log)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, {"content-type": "text/html"}, b"<html>Login</html>"),
        (302, {"location": "https://elsewhere.example/"}, b""),
        (307, {"location": "/login"}, b""),
        (200, {}, b""),
        (204, {}, b""),
        (200, JSON, b"[]"),
        (200, JSON, b"{}"),
        (200, JSON, b"null"),
        (200, JSON, b'{"jsonrpc": "2.0", "id"'),
        (200, {"content-type": "text/event-stream"}, b"data: {}\n\n"),
        (200, JSON, b"\xff\xfe\x00"),
        (200, {**JSON, "content-encoding": "gzip"}, b"\x1f\x8b"),
    ],
    ids=["html", "away", "login", "empty", "204", "list", "object", "null", "half", "event", "not UTF-8", "not gzip"],
)
@pytest.mark.parametrize("committed", [False, True], ids=["not committed", "committed"])
def test_an_answer_that_is_none_is_found_out_about_in_the_log(
    opened: Opener, status: int, headers: dict[str, str], body: bytes, committed: bool
) -> None:
    """A login page, a redirect, half a JSON: the log itself tells whether the batch landed."""

    async def odd(call: Call) -> httpx.Response | None:
        if call.tool != "append_memory" or len(between.appends) != 1:
            return None
        if committed:
            await call.forward()
        return httpx.Response(status, headers=headers, stream=Bytes(body))

    between = Between(odd)
    log = opened(between)
    append_all(log, numbered(3))
    drain(log)
    assert opened.contents() == {LANE: numbered(3)}
    assert (log.duplicates(), log.statistics().refused_items) == ([], 0)


class Bytes(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self.content = content

    async def __aiter__(self) -> Any:
        yield self.content


@pytest.mark.contract("C7")
@pytest.mark.parametrize(
    "ack",
    [
        {},
        {"first_seq": 0},
        {"first_seq": "0", "last_seq": "2"},
        {"first_seq": -1, "last_seq": 1},
        {"first_seq": 0.0, "last_seq": 2.0},
        {"first_seq": True, "last_seq": 3},
        {"first_seq": 0, "last_seq": 5},
        {"first_seq": 2, "last_seq": 0},
        {"first_seq": 1, "last_seq": 3},
        {"first_seq": 10**30, "last_seq": 10**30 + 2},
        {"first_seq": 600, "last_seq": 602},
        [0, 2],
        None,
    ],
    ids=str,
)
def test_an_acknowledgement_is_held_against_the_numbering_before_it_is_believed(opened: Opener, ack: Any) -> None:
    """Of a batch that did land: the right range is found in the log."""

    async def lie(call: Call) -> httpx.Response | None:
        if call.tool != "append_memory" or len(between.appends) != 1:
            return None
        await call.forward()
        text = json.dumps(ack)
        result = {"content": [{"type": "text", "text": text}], "isError": False}
        return httpx.Response(200, json={"jsonrpc": "2.0", "id": call.id, "result": result})

    between = Between(lie)
    log = opened(between)
    receipt = log.conversation(LANE).extend(numbered(3))
    found = receipt.acknowledged(PATIENCE)
    assert (found.first_seq, found.last_seq) == (0, 2)
    assert opened.contents() == {LANE: numbered(3)}
    assert log.duplicates() == []
    assert opened.of("several_writers") == opened.of("log_reset") == []


@pytest.mark.parametrize("shift", [-4, -1, 1, 4, 2000])
def test_an_acknowledgement_of_another_range_is_corrected_from_the_log(
    opened: Opener, server: ReferenceServer, shift: int
) -> None:
    """In the middle of a conversation, to either side; nobody is told that the log was reset when it was not."""
    log = opened()
    log.conversation(LANE).extend(numbered(10)).acknowledged(PATIENCE)
    server.faults.add("wrong_ack", shift=shift)
    receipt = log.conversation(LANE).extend(numbered(3, 10))
    ack = receipt.acknowledged(PATIENCE)
    log.conversation(LANE).extend(numbered(3, 13)).acknowledged(PATIENCE)
    assert opened.contents() == {LANE: numbered(16)}
    assert log.duplicates() == []
    assert (ack.first_seq, ack.last_seq) == (10, 12)
    assert opened.of("log_reset") == opened.of("several_writers") == []


@pytest.mark.contract("C6")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("drop", {"when": "before"}),
        ("drop", {"when": "after"}),
        ("cut", {}),
        ("no_ack", {}),
        ("sse", {}),
        ("status", {"when": "after", "status": 500}),
        ("status", {"when": "after", "status": 504}),
        ("stall", {"when": "after", "seconds": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_lost_answers_neither_lose_nor_repeat_a_batch(
    opened: Opener, server: ReferenceServer, kind: Any, settings: dict[str, Any]
) -> None:
    """Twenty in a row, each read back before anything is sent again."""
    times = 3 if kind == "stall" else 20
    server.faults.add(kind, tool="append_memory", times=times, **settings)
    log = opened(timeout=0.3 if kind == "stall" else 10)
    chat = log.conversation(LANE)
    for n in range(25):
        chat.append({"n": n}).acknowledged(PATIENCE)
    assert opened.contents() == {LANE: numbered(25)}
    assert log.duplicates() == []
    assert log.statistics().refused_items == 0
    books_close(log)


def test_a_request_that_lands_after_its_time_out_is_lost_for_nobody(opened: Opener, server: ReferenceServer) -> None:
    """The first attempt commits while the second is on its way: whatever copy that leaves, nothing is missing."""
    server.faults.add("stall", tool="append_memory", when="before", seconds=0.35, times=3)
    log = opened(timeout=0.3)
    chat = log.conversation(LANE)
    for n in range(8):
        chat.append({"n": n})
    drain(log)
    append_all(log, numbered(4, 8))
    drain(log)
    found = opened.contents()[LANE]
    first_seen = list(dict.fromkeys(item["n"] for item in found))
    assert first_seen == list(range(12))
    reported = sum(range_.last_seq - range_.first_seq + 1 for range_ in log.duplicates())
    assert reported <= len(found) - 12


def test_a_copy_that_lands_before_the_answer_to_the_next_attempt_is_reported(opened: Opener) -> None:
    """The range of the second copy is exact, in the log's own report and as an event."""

    async def twice(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and len(between.appends) == 1:
            raise httpx.ReadError("lost")
        if call.tool == "append_memory" and len(between.appends) == 2:
            await call.forward()  # the first attempt, arriving at last
        return None

    between = Between(twice)
    log = opened(between)
    ack = log.conversation(LANE).extend(numbered(3)).acknowledged(PATIENCE)
    assert opened.contents() == {LANE: numbered(3) * 2}
    assert [(d.conversation_id, d.first_seq, d.last_seq) for d in log.duplicates()] == [(LANE, 0, 2)]
    assert (ack.first_seq, ack.last_seq) == (3, 5)
    until(lambda: opened.of("duplicate"))
    assert log.statistics().duplicate_items == 3
    log.close()
    log = opened()
    assert len(log.duplicates()) == 1
    assert log.conversation(LANE).append({"n": 3}).acknowledged(PATIENCE).first_seq == 6


def test_what_was_in_flight_when_the_log_was_closed_is_looked_for_before_it_is_sent_again(
    opened: Opener, server: ReferenceServer
) -> None:
    """The first process never saw the answer; the second finds the batches in the log."""
    log = opened()
    log.conversation(LANE).append({"n": -1}).acknowledged(PATIENCE)
    server.faults.add("stall", tool="append_memory", when="after", seconds=None)
    append_all(log, numbered(4))
    until(lambda: len(opened.contents()[LANE]) > 1)
    append_all(log, numbered(4, 4))
    log.flush(PATIENCE, until="stored")
    log.close()
    server.faults.clear()
    log = opened()
    assert log.statistics().pending_items == 8
    drain(log)
    assert opened.contents() == {LANE: [{"n": -1}, *numbered(8)]}
    assert log.duplicates() == []


def test_fifty_lost_answers_over_fifty_restarts_leave_no_copy(opened: Opener, server: ReferenceServer) -> None:
    """The base of each lane is on disk, in the same commit as the acknowledgement before."""
    for n in range(50):
        server.faults.clear()
        lost = server.faults.add("drop", tool="append_memory", when="after", times=None)
        server.faults.add("status", tool="replay_memory", status=500, times=None, probability=0.5, seed=n)
        log = opened()
        log.conversation(LANE).append({"n": n})
        until(lambda lost=lost: lost.struck)
        log.close()
    assert server.counters.calls["append_memory"] >= 50
    server.faults.clear()
    log = opened()
    drain(log)
    assert opened.contents() == {LANE: numbered(50)}
    assert log.duplicates() == []


# --- the server's side changes -----------------------------------------------------------------------------------------


def test_a_log_that_was_reset_is_told_and_sent_to_again(
    opened: Opener, server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody emptied the server: what is appended now lands, and the operator learns of it once."""
    log = opened()
    log.conversation(LANE).extend(numbered(50)).acknowledged(PATIENCE)
    server.stop()
    old = server.app
    server.app = create_app(sites={"demo": "demo"})
    server.start()
    try:
        for n in range(3):
            ack = log.conversation(LANE).append({"n": n}).acknowledged(PATIENCE)
            assert ack.first_seq == n
        assert opened.contents() == {LANE: numbered(3)}
        until(lambda: opened.of("log_reset"))
        assert len(opened.of("log_reset")) == 1
        assert "50" in (opened.of("log_reset")[0].reason or "")
    finally:
        log.close()
        old.state.store.close()


def test_another_writer_is_noticed_and_told_once_and_costs_nothing(
    opened: Opener, server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Order between writers is the order of arrival; every item of both is there once."""
    log = opened()

    async def somebody_else(n: int) -> None:
        async with Client(server.url, auth=server.auth) as client:
            await client.append_memory(LANE, [{"other": n}])

    for n in range(6):
        log.conversation(LANE).append({"n": n}).acknowledged(PATIENCE)
        asyncio.run(somebody_else(n))
    expected = [item for n in range(6) for item in ({"n": n}, {"other": n})]
    assert opened.contents() == {LANE: expected}
    until(lambda: opened.of("several_writers"))
    assert len(opened.of("several_writers")) == 1
    assert log.duplicates() == []


def test_a_lost_answer_among_several_writers_is_reported_as_a_possible_duplicate(
    opened: Opener, server: ReferenceServer
) -> None:
    """The tail holds somebody else's items: nothing is proved, so nothing is assumed lost or kept."""

    async def lose(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and call.says("mine") and len(between.appends) == 2:
            await call.forward()
            async with Client(server.url, auth=server.auth) as client:
                await client.append_memory(LANE, [{"other": 1}])
            raise httpx.ReadError("lost")
        return None

    between = Between(lose)
    log = opened(between)
    log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    log.conversation(LANE).append({"mine": 1}).acknowledged(PATIENCE)
    assert opened.contents() == {LANE: [{"n": 0}, {"mine": 1}, {"other": 1}, {"mine": 1}]}
    until(lambda: opened.of("possible_duplicate"))
    assert len(opened.of("possible_duplicate")) == 1


# --- evidence ----------------------------------------------------------------------------------------------------------


def poison(call: Call) -> httpx.Response | None:
    return call.refuse() if call.tool == "append_memory" and call.says("poison") else None


def test_of_a_merged_request_only_the_guilty_batch_is_refused(opened: Opener) -> None:
    """Order is kept around it; the letter says why, whole, and the receipt raises it."""
    gate = asyncio.Event()

    async def decide(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and len(between.appends) == 1:
            await gate.wait()
        return poison(call)

    between = Between(decide)
    log = opened(between)
    chat = log.conversation(LANE)
    chat.append({"n": 0})
    until(lambda: between.appends)
    append_all(log, numbered(3, 1))
    guilty = chat.extend([{"n": "good"}, {"n": "poison"}])
    append_all(log, numbered(3, 4))
    loop_call(gate.set)
    drain(log)
    assert opened.contents() == {LANE: numbered(7)}
    with pytest.raises(InvalidRequestError) as caught:
        guilty.acknowledged(PATIENCE)
    assert caught.value.outcome == "refused"
    [letter] = log.dead_letters()
    assert (letter.conversation_id, letter.items) == (LANE, 2)
    assert letter.payloads == [{"n": "good"}, {"n": "poison"}]
    assert isinstance(letter.error, InvalidRequestError)
    assert guilty.id == letter.id
    alone = [call for call in between.appends if call.says("poison") and len(call.items) == 2]
    assert len(alone) == 2  # answered twice the same before it was believed
    until(lambda: opened.of("refused"))
    assert len(opened.of("refused")) == 1
    books_close(log)


def test_a_batch_is_not_refused_while_the_server_does_not_answer_a_harmless_read(opened: Opener) -> None:
    """A proxy that says "invalid" to everything is no judge of a batch."""
    healthy = [False]

    def decide(call: Call) -> httpx.Response | None:
        if healthy[0]:
            return poison(call)
        if call.tool == "replay_memory" and len(between.appends) == 0:
            return None
        return call.refuse()

    between = Between(decide)
    log = opened(between)
    log.conversation(LANE).append({"n": "poison"})
    until(lambda: len(between.calls) >= 12)
    assert log.dead_letters() == []
    assert log.statistics().state == "blocked"
    healthy[0] = True
    drain(log)
    assert len(log.dead_letters()) == 1


def test_a_batch_that_is_answered_differently_each_time_is_not_refused(opened: Opener) -> None:
    """Two answers that differ are no evidence; when it is taken in the end, it is taken."""
    answers = itertools.cycle([{"message": "invalid item"}, {"message": "item too large", "status": 413}])

    def decide(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and len(between.appends) < 10:
            return call.refuse(**next(answers))
        return None

    between = Between(decide)
    log = opened(between)
    log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    assert len(between.appends) == 10
    assert log.dead_letters() == []


def test_a_server_that_refuses_everything_costs_three_batches_at_most(
    opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """A new schema on its side: sending stops, all else is kept, delivered in order later, and so are the three."""
    mad = [True]
    between = Between(lambda call: call.refuse() if call.tool == "append_memory" and mad[0] else None)
    log = opened(between)
    names = [f"c_{n:08}" for n in range(10)]
    for name in names:
        append_all(log, numbered(4), name)
    until(lambda: log.statistics().state == "blocked")
    log.flush(0.5)
    probes = len(between.appends)
    until(lambda: len(between.appends) > probes + 10)
    assert log.statistics().refused_batches == 3
    assert log.statistics().state == "blocked"
    assert "3 batches in a row" in (log.statistics().reason or "")
    blocked = [record for record in warnings_of(caplog) if "is blocked" in record.getMessage()]
    assert len(blocked) == 1
    mad[0] = False
    drain(log)
    letters = log.dead_letters()
    assert len(letters) == 3
    for letter in letters:
        log.requeue(letter)
    drain(log)
    assert log.dead_letters() == []
    found = opened.contents()
    assert {name: sorted(item["n"] for item in items) for name, items in found.items()} == {
        name: [0, 1, 2, 3] for name in names
    }
    touched = {letter.conversation_id for letter in letters}
    assert all(found[name] == numbered(4) for name in names if name not in touched)
    books_close(log)


def test_many_poisoned_conversations_do_not_block_the_healthy_ones(opened: Opener) -> None:
    """More than three guilty batches in a row, all of them in front: the others are served, and the guilty found."""
    between = Between(poison)
    log = opened(between)
    for n in range(8):
        log.conversation(f"c_bad{n:05}").append({"n": "poison"})
    until(lambda: log.statistics().state == "blocked")
    receipts = [log.conversation(f"c_{n:08}").append({"n": n}) for n in range(5)]
    for receipt in receipts:
        receipt.acknowledged(PATIENCE)
    # Each acknowledgement clears the way for three more verdicts.
    for n in itertools.count():
        if log.statistics().refused_batches == 8:
            break
        log.conversation(LANE).append({"n": n}).acknowledged(PATIENCE)
        assert n < 100
    assert log.statistics().pending_items == 0


@pytest.mark.contract("C2")
def test_a_merge_that_is_too_large_for_a_proxy_is_made_smaller_first(opened: Opener) -> None:
    """413 on a merge blames nobody; alone, a batch that is too large becomes a dead letter."""

    def decide(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and len(call.items) > 4:
            return httpx.Response(413)
        return None

    between = Between(decide)
    log = opened(between)
    chat = log.conversation(LANE)
    receipts = [chat.append(item) for item in numbered(40)]
    large = chat.extend(numbered(5))
    receipts += [chat.append(item) for item in numbered(10, 40)]
    for receipt in receipts:
        receipt.acknowledged(PATIENCE)
    with pytest.raises(TooLargeError):
        large.acknowledged(PATIENCE)
    assert opened.contents() == {LANE: numbered(50)}
    assert len(log.dead_letters()) == 1


def test_wrong_credentials_block_the_site_and_keep_everything_until_they_are_right(
    opened: Opener, server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning however often it is probed; the error says who must act."""
    log = opened(auth=("demo", "wrong"))
    append_all(log, numbered(5))
    until(lambda: log.statistics().state == "blocked")
    report = log.flush(PATIENCE)  # returns early: nothing can move
    assert (report.complete, report.pending, report.state) == (False, 5, "blocked")
    with pytest.raises(AuthenticationError):
        log.check()
    until(lambda: log._log._core._sending.sender.gate.generation > 3)  # probed several times
    assert len([record for record in warnings_of(caplog) if "blocked" in record.getMessage()]) == 1
    assert log.dead_letters() == []
    log.close()
    log = opened()
    drain(log)
    assert opened.contents() == {LANE: numbered(5)}


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_status_that_only_one_conversation_meets_does_not_stop_the_site(opened: Opener, status: int) -> None:
    """A firewall that dislikes one payload: that lane waits, the read beside it passes, the others go on."""
    allowed = [False]

    def firewall(call: Call) -> httpx.Response | None:
        if call.tool == "append_memory" and call.says("DROP TABLE") and not allowed[0]:
            return httpx.Response(status)
        return None

    log = opened(Between(firewall))
    disliked = log.conversation(LANE).append({"text": "DROP TABLE"})
    for n in range(20):
        log.conversation("c_bbbbbbbb").append({"n": n}).acknowledged(PATIENCE)
    until(lambda: opened.of("held"))
    assert opened.of("blocked") == []
    assert len(opened.of("held")) == 1
    assert log.dead_letters() == []
    allowed[0] = True
    disliked.acknowledged(PATIENCE)


@pytest.mark.contract("C9")
def test_unprocessable_parameters_are_a_matter_of_credentials_and_never_a_dead_letter(
    tmp_path: Path,
) -> None:
    """A read-only Bearer token: we know what we sent, so the token is to blame."""
    with reference_server(read_tokens=["read-only"]) as server:
        opened = Opener(server, tmp_path)
        log = opened(auth="read-only")
        append_all(log, numbered(3))
        until(lambda: log.statistics().state == "blocked")
        assert log.statistics().pending_items == 3
        assert log.dead_letters() == []
        opened.close()


# --- full conversations ------------------------------------------------------------------------------------------------


def test_a_full_conversation_is_sealed_and_what_does_not_fit_is_kept(tmp_path: Path) -> None:
    """What fits goes in, in order, out of a merge too; the rest are dead letters; sealing outlives the process."""
    with reference_server(conversation_items_max=10) as server:
        opened = Opener(server, tmp_path)
        server.faults.add("stall", tool="append_memory", seconds=0.2, times=1)
        log = opened()
        chat = log.conversation(LANE)
        receipts = [
            chat.extend(numbered(6)),
            chat.extend(numbered(3, 6)),
            chat.extend(numbered(3, 9)),
            chat.append({"n": 12}),
        ]
        drain(log)
        assert opened.contents() == {LANE: numbered(9)}
        assert [receipt.acknowledged(PATIENCE).first_seq for receipt in receipts[:2]] == [0, 6]
        for receipt in receipts[2:]:
            with pytest.raises(ConversationFullError):
                receipt.acknowledged(PATIENCE)
        with pytest.raises(ConversationFullError):
            chat.append({"n": 13})
        until(lambda: opened.of("sealed"))
        log.conversation("c_bbbbbbbb").append({"n": 0}).acknowledged(PATIENCE)
        log.close()
        log = opened()
        with pytest.raises(ConversationFullError):
            log.conversation(LANE).append({"n": 13})
        first, second = log.dead_letters()
        assert (first.payloads, second.payloads) == (numbered(3, 9), [{"n": 12}])
        log.requeue(first, conversation_id="c_successor")
        log.requeue(second)
        drain(log)
        assert opened.contents() == {
            LANE: [*numbered(9), {"n": 12}],
            "c_bbbbbbbb": [{"n": 0}],
            "c_successor": numbered(3, 9),
        }
        assert log.dead_letters() == []
        books_close(log)
        opened.close()


def test_a_dropped_dead_letter_is_gone_and_counted(opened: Opener) -> None:
    """The only way in which an item leaves without being delivered, and it is the user's own."""
    log = opened(Between(poison))
    log.conversation(LANE).append({"n": "poison"})
    until(lambda: log.statistics().refused_items)
    [letter] = log.dead_letters()
    log.drop(letter)
    log.drop(letter)
    log.requeue(letter)
    assert log.dead_letters() == []
    assert (log.statistics().dropped_items, log.statistics().refused_items, log.statistics().pending_items) == (1, 0, 0)
    books_close(log)


# --- everything at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_server_that_does_everything_wrong_now_and_then_loses_nothing(
    opened: Opener, server: ReferenceServer, seed: int
) -> None:
    """Every fault with a probability, three restarts of the log, one of the server: identical in the end."""
    for kind, settings in [
        ("drop", {"when": "before"}),
        ("drop", {"when": "after"}),
        ("cut", {}),
        ("no_ack", {}),
        ("wrong_ack", {}),
        ("sse", {}),
        ("status", {"status": 500}),
        ("status", {"status": 503, "when": "after"}),
        ("stall", {"seconds": 0.01}),
    ]:
        server.faults.add(kind, times=None, probability=0.06, seed=seed, **settings)
    names = [f"c_{n:08}" for n in range(12)]
    for round_ in range(4):
        log = opened()
        for n in range(10 * round_, 10 * round_ + 10):
            for name in names:
                log.conversation(name).append({"n": n})
        log.flush(0.1)
        if round_ == 2:
            server.stop()
            server.start()
        log.close()
    log = opened()
    drain(log)
    assert without_duplicates(log, opened.contents()) == {name: numbered(40) for name in names}
    assert log.statistics().refused_items == 0
    assert set(server.counters.in_flight_max_by_conversation.values()) == {1}
    books_close(log)


def test_no_log_line_and_no_event_repeats_a_payload_or_a_password(
    opened: Opener, server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong."""
    caplog.set_level(logging.DEBUG)
    secret = "SECRET-PAYLOAD-0123456789"

    def decide(call: Call) -> httpx.Response | None:
        number = len(between.appends)
        if call.tool == "append_memory" and number < 4:
            return call.refuse(f"invalid item: {secret}", status=[400, 500, 404, 400][number])
        return None

    between = Between(decide)
    log = opened(between, auth=("demo", "demo"))
    log.conversation(LANE).append({"text": secret}).acknowledged(PATIENCE)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("memlog")]
    told = [f"{event!r} {event.error}" for event in opened.events]
    assert not [line for line in [*lines, *told] if secret in line or "demo:demo" in line]


@pytest.mark.filterwarnings("error")
def test_a_request_cancelled_at_any_moment_leaves_no_connection_behind(server: ReferenceServer) -> None:
    """Closing a log cancels what is under way, wherever that is; also while an answer is being put away."""
    import gc
    import warnings

    async def cancelled_after(steps: int) -> None:
        client = Client(server.url, auth=server.auth)
        task = asyncio.create_task(client.append_memory(LANE, [{"n": 0}]))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await client.close()
        await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for steps in range(1, 60):
            asyncio.run(cancelled_after(steps))
            gc.collect()
    assert [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)] == []


def test_the_error_of_a_rate_limit_never_reaches_a_receipt(opened: Opener) -> None:
    """It is permanent for a call, not for a batch in a log."""
    answers = iter([True, True])
    log = opened(
        Between(
            lambda call: (
                httpx.Response(429, headers={"retry-after": "0"})
                if call.tool == "append_memory" and next(answers, False)
                else None
            )
        )
    )
    try:
        log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    except RateLimitedError:
        pytest.fail("a rate limit was taken for a verdict")
    assert log.dead_letters() == []


assert QUICK.blocked_delay < 1


def test_an_item_that_another_process_appended_meanwhile_is_not_taken_for_ours(
    opened: Opener, server: ReferenceServer, tmp_path: Path
) -> None:
    """A conversation that moves from process to process, and back: what is equal to ours, in our place, is theirs."""
    lost: list[bool] = []

    def lose(call: Call) -> None:
        if lost and call.tool == "append_memory":
            lost.pop()
            raise httpx.ReadError("lost on the way")

    log = opened(Between(lose))
    log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    other = "import sys; from memlog.sync import open_log\n"
    other += "with open_log(sys.argv[1], auth=('demo', 'demo'), buffer_dir=sys.argv[2]) as log:\n"
    other += f"    log.conversation({LANE!r}).append({{'n': 1}}).acknowledged({PATIENCE})\n"
    subprocess.run([sys.executable, "-c", other, server.url, str(tmp_path)], check=True, timeout=60)
    lost.append(True)
    assert log.conversation(LANE).append({"n": 1}).acknowledged(PATIENCE).first_seq == 2
    assert opened.contents() == {LANE: [{"n": 0}, {"n": 1}, {"n": 1}]}
    assert len(opened.of("several_writers")) == 1


# --- evidence, at its full length --------------------------------------------------------------------------------------


def test_others_are_served_at_every_stage_of_the_case_against_a_batch(opened: Opener) -> None:
    """The accused lane is held up at each of its calls in turn, and meanwhile another one sends and is answered."""
    bad = "c_bad00000"
    steps: list[tuple[str, asyncio.Event]] = []
    over = False

    async def one_step_at_a_time(call: Call) -> httpx.Response | None:
        if call.conversation != bad or over:
            return None
        steps.append((call.tool, asyncio.Event()))
        await steps[-1][1].wait()
        return poison(call)

    between = Between(one_step_at_a_time)
    log = opened(between)
    chat = log.conversation(bad)
    guilty = chat.append({"n": "poison"})
    append_all(log, numbered(3), bad)
    log.flush(PATIENCE, until="stored")
    others = 0
    for stage in itertools.count():
        until(lambda stage=stage: len(steps) > stage or not log.statistics().pending_items)
        if len(steps) == stage:
            over = True
            break
        for _ in range(3):
            log.conversation(LANE).append({"n": others}).acknowledged(PATIENCE)
            others += 1
        loop_call(steps[stage][1].set)
    with pytest.raises(InvalidRequestError):
        guilty.acknowledged(PATIENCE)
    drain(log)
    assert [len(call.items) for call in between.appends if call.conversation == LANE] == [1] * others
    assert others >= 3 * len([tool for tool, _ in steps if tool == "append_memory"]) >= 9
    assert opened.contents() == {bad: numbered(3), LANE: numbered(others)}
    assert opened.of("blocked") == opened.of("waiting") == []
    assert len(log.dead_letters()) == 1


def test_a_proxy_that_refuses_one_payload_holds_up_only_what_waits_behind_it(opened: Opener) -> None:
    """What came before it goes out even from a merge, nothing is refused, and all of it arrives in order."""
    allowed = False

    def firewall(call: Call) -> httpx.Response | None:
        return httpx.Response(403) if call.tool == "append_memory" and call.says("DROP TABLE") and not allowed else None

    log = opened(Between(firewall))
    batches = [{"n": 0}, {"n": 1}, {"text": "DROP TABLE"}, {"n": 2}, {"n": 3}]
    append_all(log, batches)
    others = 0
    while opened.contents().get(LANE) != numbered(2):
        log.conversation("c_bbbbbbbb").append({"n": others}).acknowledged(PATIENCE)
        others += 1
        assert others < 500
    assert opened.of("blocked") == []
    allowed = True
    drain(log)
    assert opened.contents() == {LANE: batches, "c_bbbbbbbb": numbered(others)}
    assert log.dead_letters() == log.duplicates() == []
    assert log.statistics().refused_items == 0


@pytest.mark.contract("C2")
@pytest.mark.parametrize("sizes", [(3, 2, 3, 1), (3, 3, 2, 1)], ids=["straddled", "met exactly"])
def test_the_cap_of_100_000_items_met_within_a_merge_lets_in_what_fits(
    opened: Opener, server: ReferenceServer, sizes: tuple[int, ...]
) -> None:
    """The first batch that is refused alone seals; what waits behind it is kept, in order, and can go elsewhere."""
    cap, held = 100_000, 99_990
    first = 4
    asyncio.run(server.app.state.store.append("demo", LANE, [json.dumps({"n": n}) for n in range(held)]))
    between, gate = holding_the_first()
    log = opened(between)
    chat = log.conversation(LANE)
    starts = list(itertools.accumulate(sizes, initial=held + first))
    receipts = [chat.extend(numbered(first, held))]
    until(lambda: between.appends)
    receipts += [chat.extend(numbered(size, start)) for start, size in zip(starts, sizes, strict=False)]
    log.flush(PATIENCE, until="stored")
    loop_call(gate.set)
    drain(log)
    fit, full = sizes[:2], sizes[2]
    end = held + first + sum(fit)
    assert cap - full < end <= cap
    sent = [call.items for call in between.appends]
    assert sent[1] == numbered(sum(sizes), held + first)
    assert sent[-1] == numbered(full, end)
    assert numbered(1, end + full) not in sent
    assert [receipt.acknowledged(PATIENCE).first_seq for receipt in receipts[:3]] == [held, *starts[:2]]
    for receipt in receipts[3:]:
        with pytest.raises(ConversationFullError):
            receipt.acknowledged(PATIENCE)
    assert opened.contents()[LANE] == numbered(end)
    until(lambda: opened.of("sealed"))
    with pytest.raises(ConversationFullError):
        chat.append({"n": "too late"})
    log.conversation("c_bbbbbbbb").append({"n": 0}).acknowledged(PATIENCE)
    log.close()

    log = opened()
    with pytest.raises(ConversationFullError):
        log.conversation(LANE).append({"n": "too late"})
    letters = log.dead_letters()
    assert [letter.payloads for letter in letters] == [numbered(full, end), numbered(1, end + full)]
    for letter in letters:
        assert isinstance(letter.error, ConversationFullError)
        log.requeue(letter, conversation_id="c_successor")
    drain(log)
    assert opened.contents()["c_successor"] == numbered(full + 1, end)
    assert opened.contents()[LANE] == numbered(end)
    assert log.dead_letters() == log.duplicates() == []
    books_close(log)


def test_a_batch_is_not_refused_on_the_word_of_a_proxy_where_others_append_too(
    opened: Opener, server: ReferenceServer
) -> None:
    """There the log is not read back between two attempts; the harmless read is what clears the batch."""
    mad = False

    def decide(call: Call) -> httpx.Response | None:
        return call.refuse() if mad else poison(call)

    async def somebody_else() -> None:
        async with Client(server.url, auth=server.auth) as client:
            await client.append_memory(LANE, [{"other": 0}])

    between = Between(decide)
    log = opened(between)
    log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    asyncio.run(somebody_else())
    log.conversation(LANE).append({"n": 1}).acknowledged(PATIENCE)
    until(lambda: opened.of("several_writers"))
    mad = True
    before = len(between.appends)
    good = log.conversation(LANE).append({"n": 2})
    until(lambda: len(between.appends) >= before + 5)
    assert log.dead_letters() == []
    assert log.statistics().state == "blocked"
    mad = False
    good.acknowledged(PATIENCE)
    log.conversation(LANE).append({"n": "poison"})
    until(log.dead_letters)
    assert opened.contents() == {LANE: [{"n": 0}, {"other": 0}, {"n": 1}, {"n": 2}]}


@pytest.mark.parametrize("seed", [1, 2, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 33)]])
def test_in_any_company_the_guilty_are_refused_and_only_they(
    opened: Opener, server: ReferenceServer, seed: int
) -> None:
    """One batch in twelve, anywhere in six conversations, over a server that loses answers; one more has none."""
    chance = random.Random(seed)
    server.faults.add("drop", tool="append_memory", when="after", probability=0.05, seed=seed, times=None)
    server.faults.add("status", status=503, probability=0.05, seed=seed, times=None)
    log = opened(Between(poison))
    names = [f"c_{n:08}" for n in range(6)]
    good: dict[str, list[Any]] = {name: [] for name in names}
    guilty = []
    for n in range(240):
        name = chance.choice(names)
        batch = numbered(chance.choice([1, 1, 2, 3]), 10 * n)
        if chance.random() < 1 / 12:
            batch.insert(chance.randrange(len(batch) + 1), {"poison": n})
            guilty.append((name, batch))
        else:
            good[name] += batch
        log.conversation(name).extend(batch)
    healthy = 0
    while not (report := log.flush(0.2)).complete:
        log.conversation(LANE).append({"n": healthy})
        healthy += 1
        assert healthy < 500, report
    server.faults.clear()
    assert without_duplicates(log, opened.contents()) == {**good, **({LANE: numbered(healthy)} if healthy else {})}
    letters = [(letter.conversation_id, letter.payloads) for letter in log.dead_letters()]
    assert sorted(letters, key=str) == sorted(guilty, key=str)
    books_close(log)


def test_a_read_that_is_refused_is_no_verdict_on_what_waits(opened: Opener) -> None:
    """Only the answer to a batch itself can be held against it, not that to the question what became of it."""
    mad, refused = False, 0

    class Reads(Between):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal refused
            message = json.loads(await request.aread())
            if mad and message.get("params", {}).get("arguments", {}).get("limit", 1) > 1:
                refused += 1
                error = {"code": -32602, "message": "invalid"}
                return httpx.Response(400, json={"jsonrpc": "2.0", "id": message["id"], "error": error})
            return await super().handle_async_request(request)

    def lose(call: Call) -> None:
        if call.tool == "append_memory" and len(between.appends) == 2:
            raise httpx.ReadError("lost")

    between = Reads(lose)
    log = opened(between)
    log.conversation(LANE).append({"n": 0}).acknowledged(PATIENCE)
    mad = True
    receipt = log.conversation(LANE).append({"n": 1})
    until(lambda: refused >= 5)
    assert len(between.appends) == 2, "nothing is sent again before it is known what became of it"
    assert log.dead_letters() == []
    mad = False
    assert receipt.acknowledged(PATIENCE).first_seq == 1
    assert opened.contents() == {LANE: numbered(2)}


def test_a_server_that_refuses_everything_costs_three_batches_over_restarts_too(opened: Opener) -> None:
    """A program that is started again every minute must not give up three more each time."""
    mad = True
    names = [f"c_{n:08}" for n in range(20)]
    for round_ in range(5):
        log = opened(Between(lambda call: call.refuse() if call.tool == "append_memory" and mad else None))
        for name in names if round_ == 0 else ():
            append_all(log, numbered(2), name)
        until(lambda log=log: (log.statistics().state, log.statistics().refused_batches) == ("blocked", 3))
        log.close()
    mad = False
    log = opened()
    drain(log)
    assert log.statistics().refused_batches == 3
    touched = {letter.conversation_id for letter in log.dead_letters()}
    assert all(items == numbered(2) for name, items in opened.contents().items() if name not in touched)
    # Trusted again, it may refuse three more.
    mad = True
    log.close()
    log = opened(Between(poison))
    for n in range(3):
        log.conversation(f"c_bad{n:05}").append({"n": "poison"})
    until(lambda: len(log.dead_letters()) == 6)
