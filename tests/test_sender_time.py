"""Sending over long times and odd clocks, and answers that are lost many times in a row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from between import Between, Call, Opener, until
from books import QUICK

from memlog import RetryPolicy, sender
from memlog.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

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
    server.faults.add("drop", tool="append_memory", when="after", times=200)
    log = opened(retry=FAST)
    chat = log.conversation(LANE)
    for n in range(200):
        assert chat.append({"n": n}).acknowledged(30).first_seq == n
    assert log.duplicates() == []
    assert opened.contents()[LANE] == [{"n": n} for n in range(200)]


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
