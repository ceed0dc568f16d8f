"""Sending over long times and odd clocks, and answers that are lost many times in a row."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from between import Between, Call, Opener, until
from books import QUICK

from memlog import Client, RetryPolicy, engine, sender
from memlog.errors import InvalidRequestError
from memlog.testing import check_history, read_history

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memlog.testing import ReferenceServer

LANE, OTHER = "c_aaaaaaaa", "c_bbbbbbbb"
YEAR = 365 * 86_400.0
FAST = RetryPolicy(delay_min=0.001, delay_max=0.005, blocked_delay=0.01)


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path)
    yield opener
    server.faults.clear()
    opener.close()


class Clock:
    """Stands in for `time` in the sender: the monotonic clock runs `speed` times as fast, the wall clock can be set."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.offset = 0.0

    def monotonic(self) -> float:
        return time.monotonic() * self.speed

    def time(self) -> float:
        return time.time() + self.offset


def fails(call: Call) -> httpx.Response:
    return call.refuse("oops", status=500, code=-32603)


def test_200_lost_answers_in_a_row_leave_no_copy(opened: Opener, server: ReferenceServer) -> None:
    """The server commits, then drops the answer, every time: each batch is found in the log and sent once."""
    fault = server.faults.add("drop", tool="append_memory", when="after", times=200)
    log = opened(retry=FAST)
    chat = log.conversation(LANE)
    for n in range(200):
        assert chat.append({"n": n}).acknowledged(30).first_seq == n
    assert fault.struck == server.counters.calls["append_memory"] == 200
    assert log.duplicates() == []
    assert opened.of("possible_duplicate") == []
    assert opened.contents()[LANE] == [{"n": n} for n in range(200)]


def test_200_lost_answers_beside_another_writer_leave_200_copies_and_each_is_told(
    opened: Opener, server: ReferenceServer
) -> None:
    """Where somebody else appends, too, reading back proves nothing about items without stamps: nothing is lost."""
    answered = True

    async def lose_the_first_answer(call: Call) -> httpx.Response | None:
        nonlocal answered
        if call.tool == "append_memory" and call.says("mine"):
            answered = not answered
            if not answered:
                await call.forward()
                raise httpx.ReadError("lost")
        return None

    log = opened(Between(lose_the_first_answer), retry=FAST)
    chat = log.conversation(LANE)
    chat.append({"n": 0}).acknowledged(30)
    asyncio.run(somebody_else(server))
    chat.append({"n": 1}).acknowledged(30)
    for n in range(200):
        assert chat.append({"mine": n}).acknowledged(30).first_seq == 3 + 2 * n + 1
    until(lambda: len(opened.of("possible_duplicate")) == 200, "every one of them is told")
    assert len(opened.of("several_writers")) == 1
    mine = [{"mine": n} for n in range(200) for _ in range(2)]
    assert opened.contents()[LANE] == [{"n": 0}, {"other": 0}, {"n": 1}, *mine]


async def somebody_else(server: ReferenceServer) -> None:
    async with Client(server.url, auth=server.auth) as client:
        await client.append_memory(LANE, [{"other": 0}])


@pytest.mark.parametrize("found", ["by the next append", "by a flush", "by the next process"])
def test_a_first_attempt_that_lands_after_the_second_is_reported_with_its_place(opened: Opener, found: str) -> None:
    """It was given up, looked for and sent again; then it arrives, behind the copy that was acknowledged."""
    kept: list[Call] = []

    def keep_the_first(call: Call) -> None:
        if call.tool == "append_memory" and call.says("late") and not kept:
            kept.append(call)
            raise httpx.ReadError("lost")

    log = opened(Between(keep_the_first), retry=FAST)
    chat = log.conversation(LANE)
    chat.append({"n": 0}).acknowledged(30)
    ack = chat.extend([{"late": 1}, {"late": 2}]).acknowledged(30)
    assert (ack.first_seq, ack.last_seq) == (1, 2)
    late = {"late": 1}, {"late": 2}
    if found == "by the next process":
        # Its connection outlives the log that it belongs to, as one in a proxy does.
        log.close()
        body = list(late)
        asyncio.run(append_raw(opened.server, body))
        log = opened(retry=FAST)
        chat = log.conversation(LANE)
    else:
        engine.running().spawn(kept[0].forward()).result(30)
    assert opened.contents()[LANE] == [{"n": 0}, *late, *late]
    if found == "by a flush":
        assert log.flush(30).complete
    else:
        assert chat.append({"n": 5}).acknowledged(30).first_seq == 5
    assert [(told.first_seq, told.last_seq) for told in log.duplicates()] == [(3, 4)]
    until(lambda: [(told.first_seq, told.last_seq) for told in opened.of("duplicate")] == [(3, 4)], "and as an event")
    assert opened.of("several_writers") == opened.of("possible_duplicate") == opened.of("log_reset") == []
    assert chat.append({"n": 6}).acknowledged(30).first_seq == (5 if found == "by a flush" else 6)


async def append_raw(server: ReferenceServer, items: list[dict[str, Any]]) -> None:
    async with Client(server.url, auth=server.auth) as client:
        await client.append_memory(LANE, items)


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 22)]])
@pytest.mark.parametrize("stamp", [False, True], ids=["plain", "stamped"])
def test_first_attempts_that_land_at_any_later_time_lose_nothing_and_are_all_reported(
    opened: Opener, stamp: bool, seed: int
) -> None:
    """Every third request of several lanes is given up, and arrives between later ones: 100 batches in each."""
    chance = random.Random(seed)
    kept: list[Call] = []

    async def mislay(call: Call) -> None:
        if call.tool != "append_memory":
            return
        if kept and chance.random() < 0.3:
            await kept.pop(chance.randrange(len(kept))).forward()
        if chance.random() < 0.3:
            kept.append(call)
            raise httpx.ReadError("lost")

    log = opened(Between(mislay), retry=FAST, stamp=stamp)
    lanes = [LANE, OTHER, "c_cccccccc"]
    batches = {lane: [[{"n": n, "i": i} for i in range(1 + n % 3)] for n in range(100)] for lane in lanes}
    for n in range(100):
        for lane in lanes:
            log.conversation(lane).extend(batches[lane][n])
        if n % 10 == 0:
            log.flush(0.05)
    assert log.flush(30).complete
    while kept:
        engine.running().spawn(kept.pop().forward()).result(30)
    assert log.flush(30).complete
    held = asyncio.run(read_history(opened.server.url, opened.server.auth))
    report = check_history(batches, held, duplicates=log.duplicates())
    assert report.ok, report
    assert len(report.duplicated) > 10, "it does not show anything"
    assert opened.of("possible_duplicate") == []
    for lane in lanes:
        replayed = [item.payload for item in log.conversation(lane).replay()]
        assert len(replayed) >= sum(map(len, batches[lane]))
        assert not stamp or replayed == [item for batch in batches[lane] for item in batch]


def test_four_days_of_500_refuse_nothing_and_everything_arrives_in_order(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an outage no other batch is taken in between, so no answer counts against any."""
    clock = Clock(speed=200_000.0)
    monkeypatch.setattr(sender, "time", clock)
    broken = True
    between = Between(lambda call: fails(call) if broken and call.tool == "append_memory" else None)
    log = opened(between, retry=FAST)
    begin = clock.monotonic()
    for n in range(20):
        log.conversation(LANE).append({"n": n})
        log.conversation(OTHER).append({"n": n})
    until(lambda: clock.monotonic() - begin > 4 * 86_400 and len(between.appends) > 50, "four days")
    assert log.statistics().refused_items == 0
    lanes = log._log._core._sending.sender._lanes
    # However often a request was sent again, it is remembered once, before and after it was cut to size.
    assert max(len(lane.facts.echoes) for lane in lanes.values()) <= 3
    broken = False
    assert log.flush(30).complete
    assert log.dead_letters() == []
    assert opened.contents() == {LANE: [{"n": n} for n in range(20)], OTHER: [{"n": n} for n in range(20)]}


def test_a_batch_that_alone_meets_the_same_failure_for_an_hour_while_others_are_taken_is_given_up(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guilty one only: what was merged with it, and what waits behind it, arrives in order."""
    monkeypatch.setattr(sender, "time", Clock(speed=200_000.0))
    between = Between(lambda call: fails(call) if call.tool == "append_memory" and call.says("poison") else None)
    log = opened(between, retry=FAST)
    chat = log.conversation(LANE)
    for text in ("first", "poison", "last"):
        chat.append({"text": text})
    taken = 0

    def others_go_on_until_it_is_refused() -> bool:
        nonlocal taken
        log.conversation(OTHER).append({"n": taken}).acknowledged(10)
        taken += 1
        return log.statistics().refused_items == 1

    until(others_go_on_until_it_is_refused, "a dead letter")
    assert log.flush(30).complete
    (letter,) = log.dead_letters()
    assert letter.payloads == [{"text": "poison"}]
    assert isinstance(letter.error, InvalidRequestError)
    assert letter.error.status == 500
    assert taken >= 20, "an answer counts only if another batch was taken in between"
    assert opened.contents() == {
        LANE: [{"text": "first"}, {"text": "last"}],
        OTHER: [{"n": n} for n in range(taken)],
    }


@pytest.mark.parametrize("jump", [YEAR, -YEAR], ids=["a year on", "a year back"])
def test_a_wall_clock_that_jumps_causes_neither_a_stall_nor_a_burst(
    opened: Opener, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Pauses run on the monotonic clock; one that is kept over a restart is never longer than it was when asked for."""
    clock = Clock()
    monkeypatch.setattr(sender, "time", clock)
    server.faults.add("status", tool="append_memory", status=429, retry_after=1, times=1)
    first = opened(retry=QUICK)
    first.conversation(LANE).append({"n": 0})
    until(lambda: opened.of("waiting"), "the pause")
    clock.offset = jump
    first.conversation(LANE).append({"n": 1})
    first.close()
    second = opened(retry=QUICK)
    second.conversation(LANE).append({"n": 2})
    assert second.flush(20).complete
    assert opened.contents()[LANE] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_note_of_a_pause_that_makes_no_sense_is_no_pause() -> None:
    """Damage in one value must not keep everything from being sent."""
    values: list[Any] = [None, "", "x y", "1", "nan nan", b"\xff"]
    assert [not sender._pause_left(value) > 0 for value in values] == [True] * len(values)
