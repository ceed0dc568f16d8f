"""How long memlog waits, what it reads out of a Retry-After, and what a failed append means."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlog import errors
from memlog.errors import (
    AuthenticationError,
    BufferFullError,
    ConnectionFailedError,
    ConversationFullError,
    InvalidConversationIdError,
    InvalidItemError,
    InvalidRequestError,
    MemlogError,
    ProtocolError,
    RateLimitedError,
    RedirectRefusedError,
    ResponseTooLargeError,
    SequenceError,
    ServerError,
    TimedOutError,
    TooLargeError,
    TransientError,
)
from memlog.retry import NO_RETRY, RetryPolicy, Verdict, classify, parse_retry_after, retrying

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NOW = datetime(2024, 5, 15, 12, 0, 0, tzinfo=UTC)


# -- the policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts", 0),
        ("attempts", -1),
        ("attempts", 2.0),
        ("attempts", True),
        ("attempts", "3"),
        ("total", -0.1),
        ("total", math.nan),
        ("total", math.inf),
        ("total", 10**400),
        ("delay_min", 0),
        ("delay_min", None),
        ("delay_min", "1"),
        ("delay_max", math.inf),
        ("delay_max", 0.05),
        ("blocked_delay", 0.0),
        ("blocked_delay", False),
        ("requests_in_flight", 0),
        ("requests_in_flight", None),
        ("requests_in_flight", 1.5),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_by_field_and_value(field: str, value: object) -> None:
    """At construction, where the mistake was made."""
    with pytest.raises(ValueError, match=field) as caught:
        RetryPolicy(**{field: value})  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


def test_a_policy_is_a_frozen_value_with_keywords_only() -> None:
    """It can be shared, compared and used as a key."""
    policy = RetryPolicy()
    assert policy == RetryPolicy(attempts=5, total=60.0, delay_min=0.1, delay_max=30.0)
    assert hash(policy) == hash(RetryPolicy())
    assert RetryPolicy(attempts=None, total=None) != policy
    assert RetryPolicy(total=0).total == 0
    with pytest.raises(AttributeError):
        policy.attempts = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        RetryPolicy(5)  # type: ignore[misc]


def test_the_delay_doubles_up_to_its_maximum_and_is_spread_over_all_of_it() -> None:
    """Full jitter: from a tenth of `delay_min` up to the bound."""
    policy = RetryPolicy(delay_min=0.1, delay_max=1.0)
    highest = [policy.delay(n, random=lambda: 1.0) for n in range(1, 8)]
    assert highest == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0])
    assert [policy.delay(n, random=lambda: 0.0) for n in (1, 5, 7)] == pytest.approx([0.01] * 3)


@given(
    st.integers(1, 10**6),
    st.floats(1e-9, 1e9),
    st.floats(1e-9, 1e9),
    st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None)
def test_a_delay_is_never_zero_nor_above_its_maximum_nor_an_overflow(
    n: int, one: float, two: float, dice: float
) -> None:
    """Also after a million failures in a row."""
    policy = RetryPolicy(delay_min=min(one, two), delay_max=max(one, two))
    assert 0 < policy.delay(n, random=lambda: dice) <= policy.delay_max
    assert 0 < policy.delay(n) <= policy.delay_max


def test_a_delay_before_the_first_failure_is_a_mistake() -> None:
    """n counts failures so far."""
    with pytest.raises(ValueError, match="at least 1, not 0"):
        RetryPolicy().delay(0)


# -- Retry-After


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("   ", None),
        ("0", 0.0),
        ("120", 120.0),
        (" 7\t", 7.0),
        ("+5", 5.0),
        ("007", 7.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("3.", 3.0),
        ("-3", 0.0),
        ("-0", 0.0),
        ("3600", 3600.0),
        ("3601", 3600.0),
        ("9" * 400, 3600.0),
        ("-" + "9" * 400, 0.0),
        ("0." + "0" * 400 + "1", 0.0),
        ("inf", None),
        ("nan", None),
        ("1e3", None),
        ("1_000", None),
        ("0x10", None),
        ("5 s", None),
        ("1,5", None),
        (".", None),
        ("-", None),
        ("5\n6", None),
        ("\u0663", None),
        ("\xb2", None),
        ("Wed, \u0661\u0665 May 2024 12:00:30 GMT", None),
        (b"30", 30.0),
        (b"\xff\xfe", None),
        (b"Wed, 15 May 2024 12:00:30 GMT", 30.0),
        ("Wed, 15 May 2024 12:00:30 GMT", 30.0),
        ("Wednesday, 15-May-24 12:00:30 GMT", 30.0),
        ("Wed May 15 12:00:30 2024", 30.0),
        ("Wed, 15 May 2024 12:00:30 -0000", 30.0),
        ("Wed, 15 May 2024 14:00:30 +0200", 30.0),
        ("Wed, 15 May 2024 11:59:59 GMT", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Mon, 01 Jan 0001 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 3600.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 3600.0),
        ("Wed, 15 May 99999 12:00:30 GMT", None),
        ("Wed, 32 May 2024 12:00:30 GMT", None),
        ("Wed, 15 May 2024 25:00:30 GMT", None),
        ("tomorrow", None),
        ("<html>", None),
        ("\x00", None),
    ],
)
def test_a_retry_after_is_read_as_http_means_it_or_not_at_all(value: str | bytes | None, seconds: float | None) -> None:
    """C11: seconds or a date, up to an hour; what nobody can read is as good as absent."""
    read = parse_retry_after(value, now=NOW)
    assert read == (seconds if seconds is None else pytest.approx(seconds))
    assert read is None or math.copysign(1, read) == 1


@pytest.mark.contract("C11")
@given(
    st.text()
    | st.binary()
    | st.from_regex(r"[+-]?[0-9]{1,30}(\.[0-9]{0,9})?")
    | st.from_regex(r"[A-Z][a-z]{2}, [0-9]{1,3} [A-Z][a-z]{2} [0-9]{1,6} [0-9:]{1,9} [A-Z+-][A-Z0-9]{1,6}")
)
@settings(deadline=None, max_examples=500)
def test_no_retry_after_whatsoever_raises(value: str | bytes) -> None:
    """It comes from the other side of the wire."""
    seconds = parse_retry_after(value, now=NOW)
    assert seconds is None or 0 <= seconds <= 3600


@pytest.mark.contract("C11")
@given(st.integers(0, 3600), st.timezones())
@settings(deadline=None)
def test_a_date_is_never_undercut(seconds: int, zone: Any) -> None:
    """C11: whatever zone the server writes it in."""
    until = (NOW + timedelta(seconds=seconds)).astimezone(zone)
    read = parse_retry_after(format_datetime(until), now=NOW)
    assert read == seconds


def test_without_a_moment_given_a_date_is_measured_from_now() -> None:
    """The default is the wall clock; a date far ahead is clamped, one far back is 0."""
    assert parse_retry_after("Fri, 31 Dec 9999 23:59:59 GMT") == 3600.0
    assert parse_retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert parse_retry_after("Wed, 15 May 2024 12:00:30 GMT", now=NOW.replace(tzinfo=None)) == 30.0


# -- reads


class Script:
    """Fails with the given errors in turn, then answers; keeps count and the waits in between."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0
        self.waits: list[float] = []

    async def call(self) -> str:
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        if self.failures:
            raise self.failures.pop(0)
        return "answer"

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await anyio.lowlevel.checkpoint()


@pytest.mark.contract("C6")
@pytest.mark.anyio
async def test_a_read_is_repeated_until_it_is_answered() -> None:
    """Transient failures only cost time, on either loop, with the real sleep."""
    script = Script(ServerError("busy", status=500), TimedOutError("late"), ProtocolError("odd"))
    with anyio.fail_after(10):
        answer = await retrying(RetryPolicy(delay_min=0.001, delay_max=0.002), script.call)
    assert (answer, script.calls) == ("answer", 4)


@pytest.mark.anyio
async def test_a_plain_function_that_gives_an_awaitable_is_awaited() -> None:
    """Lambdas and partials are what callers have at hand."""
    script = Script(TimedOutError("late"))
    assert await retrying(RetryPolicy(), lambda: script.call(), sleep=script.sleep) == "answer"


@pytest.mark.anyio
async def test_after_the_last_attempt_its_own_error_is_raised_unchanged() -> None:
    """No wrapper of a library, the very object, with the cause it came with."""
    failures: list[Exception] = [ServerError(f"number {n}") for n in range(3)]
    failures[-1].__cause__ = OSError("socket")
    script = Script(*failures)
    with pytest.raises(ServerError) as caught:
        await retrying(RetryPolicy(attempts=3), script.call, sleep=script.sleep)
    assert caught.value is failures[-1]
    assert isinstance(caught.value.__cause__, OSError)
    assert (script.calls, len(script.waits)) == (3, 2)


@pytest.mark.anyio
async def test_without_retries_there_is_one_attempt() -> None:
    """NO_RETRY."""
    script = Script(TimedOutError("late"))
    with pytest.raises(TimedOutError):
        await retrying(NO_RETRY, script.call, sleep=script.sleep)
    assert (script.calls, script.waits) == (1, [])


@pytest.mark.anyio
async def test_without_a_limit_it_goes_on() -> None:
    """None means no limit, and ten thousand failures are no overflow."""
    script = Script(*(ServerError("down") for _ in range(2000)))
    policy = RetryPolicy(attempts=None, total=None)
    assert await retrying(policy, script.call, sleep=script.sleep) == "answer"
    assert script.calls == 2001
    assert 0 < max(script.waits) <= policy.delay_max


@pytest.mark.contract("C5", "C6")
@pytest.mark.anyio
@pytest.mark.parametrize(
    "failure",
    [
        RateLimitedError("slow down", retry_after=1.0, outcome="refused"),
        AuthenticationError("no", outcome="refused"),
        InvalidRequestError("no"),
        RedirectRefusedError("elsewhere", location="https://example.org/"),
        ResponseTooLargeError("too much", limit=1),
        SequenceError("gap", expected=1, got=2),
        ValueError("a bug"),
    ],
    ids=lambda failure: type(failure).__name__,
)
async def test_what_waiting_cannot_help_is_raised_at_once(failure: Exception) -> None:
    """C5: above all a rate limit, which is the caller's to obey."""
    script = Script(failure)
    with pytest.raises(type(failure)) as caught:
        await retrying(RetryPolicy(), script.call, sleep=script.sleep)
    assert caught.value is failure
    assert (script.calls, script.waits) == (1, [])


@pytest.mark.contract("C11")
@pytest.mark.anyio
async def test_a_retry_after_is_never_undercut() -> None:
    """C11: the wait is the longer one of ours and the server's."""
    script = Script(ServerError("busy", retry_after=7.0, status=503), ServerError("busy", retry_after=0.0, status=503))
    await retrying(RetryPolicy(), script.call, sleep=script.sleep)
    first, second = script.waits
    assert first >= 7.0
    assert 0 < second <= 0.2


@pytest.mark.contract("C11")
@pytest.mark.anyio
@pytest.mark.parametrize("total", [60.0, 0.0])
async def test_a_wait_that_would_outlast_the_total_is_not_begun(total: float) -> None:
    """The caller gets the error while it is still of use, with the server's wish on it."""
    script = Script(ServerError("busy", retry_after=61.0, status=503))
    with pytest.raises(ServerError) as caught:
        await retrying(RetryPolicy(total=total), script.call, sleep=script.sleep)
    assert caught.value.retry_after == 61.0
    assert (script.calls, script.waits) == (1, [])


@pytest.mark.anyio
async def test_the_total_counts_all_waits_together() -> None:
    """Three waits of 50 ms do not fit in 120 ms, so the third failure is the last at the latest."""
    script = Script(*(ServerError("busy", retry_after=0.05) for _ in range(10)))
    policy = RetryPolicy(attempts=None, total=0.12, delay_min=0.001)
    with anyio.fail_after(10), pytest.raises(ServerError):
        await retrying(policy, script.call)
    assert 1 <= script.calls <= 3


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["waiting", "calling"])
async def test_cancelling_a_read_ends_it_at_once(where: str) -> None:
    """A cancellation is not a failure to be retried, neither between two attempts nor inside one."""
    script = Script(ServerError("busy"))
    reached = anyio.Event()

    async def stay(*_: object) -> str:
        reached.set()
        await anyio.sleep_forever()
        raise AssertionError

    call: Callable[[], Awaitable[str]] = script.call if where == "waiting" else stay
    finished = False

    async def read() -> None:
        nonlocal finished
        await retrying(RetryPolicy(), call, sleep=stay)  # type: ignore[arg-type]
        finished = True

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await reached.wait()
            tasks.cancel_scope.cancel()
    assert not finished
    assert script.calls == (1 if where == "waiting" else 0)


# -- the verdicts

INVALID, FULL, THROTTLED = Verdict.INVALID, Verdict.FULL, Verdict.THROTTLED
BLOCKED, UNREACHABLE, TRANSIENT = Verdict.BLOCKED, Verdict.UNREACHABLE, Verdict.TRANSIENT

VERDICTS: list[tuple[MemlogError, Verdict]] = [
    (InvalidItemError("$.a", "no", outcome="refused"), INVALID),
    (TooLargeError("batch", None, None, outcome="refused", status=413), INVALID),
    (InvalidRequestError("no", outcome="refused"), INVALID),
    (InvalidConversationIdError("no", outcome="refused"), INVALID),
    (ConversationFullError("c_12345678", 100_000, outcome="refused"), FULL),
    (RateLimitedError("slow down", retry_after=3.0, status=429), THROTTLED),
    (RateLimitedError("slow down"), THROTTLED),
    (AuthenticationError("no", status=401), BLOCKED),
    (AuthenticationError("unprocessable_parameters"), BLOCKED),
    (RedirectRefusedError("elsewhere", location="https://example.org/", status=302), BLOCKED),
    *((ServerError("odd", status=status), BLOCKED) for status in (301, 304, 404, 405, 410, 421)),
    (ServerError("not here", status=404, retry_after=5.0), BLOCKED),
    (ProtocolError("not here", status=404), BLOCKED),
    (ProtocolError("a web page", status=200), BLOCKED),
    (ProtocolError("a web page", status=204), BLOCKED),
    (ConnectionFailedError("refused", outcome="not_sent"), UNREACHABLE),
    (TimedOutError("no connection", outcome="not_sent"), UNREACHABLE),
    *((ServerError("down", status=status), UNREACHABLE) for status in (502, 503, 504)),
    (ServerError("busy", status=500, retry_after=2.0), UNREACHABLE),
    (ProtocolError("odd", retry_after=0.0), UNREACHABLE),
    (TransientError("busy", retry_after=1.0), UNREACHABLE),
    (ConnectionFailedError("reset", outcome="unknown"), TRANSIENT),
    (TimedOutError("late", outcome="unknown"), TRANSIENT),
    *((ServerError("odd", status=status), TRANSIENT) for status in (None, 100, 200, 400, 409, 418, 500, 501, 505)),
    (ServerError("internal error", code=-32603), TRANSIENT),
    (ProtocolError("the acknowledgement is missing"), TRANSIENT),
    (ProtocolError("odd", status=500), TRANSIENT),
    (ResponseTooLargeError("too much", limit=1, status=200), TRANSIENT),
    (TransientError("odd"), TRANSIENT),
    (SequenceError("gap", expected=1, got=2), TRANSIENT),
    (errors.MemoryUnavailableError("no read", retry_after=2.0), TRANSIENT),
    (errors.PermanentError("unheard of"), TRANSIENT),
    *(
        (cls("a team's matter, and no answer to an append"), TRANSIENT)
        for cls in (
            errors.ConflictError,
            errors.RevisionChangedError,
            errors.RecordUnavailableError,
            errors.RequestIdReusedError,
            errors.ReplacementRejectedError,
            errors.NotSavedError,
        )
    ),
    (BufferFullError("disk", 1, 1), TRANSIENT),
    (errors.BufferUnusableError("/x", "no"), TRANSIENT),
    (errors.ClosedError("closed"), TRANSIENT),
    (MemlogError("unheard of"), TRANSIENT),
]


@pytest.mark.contract("C5", "C6", "C9")
@pytest.mark.parametrize(
    ("error", "verdict"), VERDICTS, ids=[f"{n}-{type(e).__name__}-{e.status}" for n, (e, _) in enumerate(VERDICTS)]
)
def test_a_failed_append_has_one_meaning(error: MemlogError, verdict: Verdict) -> None:
    """C5, C6, C9: what is known decides; what is not known is transient."""
    assert classify(error) is verdict


def test_every_class_of_error_has_a_verdict_in_the_table() -> None:
    """A new class cannot come in without a decision what an append makes of it."""
    assert {type(error).__name__ for error, _ in VERDICTS} == set(errors.__all__)


def test_a_class_that_a_user_derives_is_judged_like_its_base() -> None:
    """Verdicts follow the tree."""

    class QuotaError(RateLimitedError):
        pass

    assert classify(QuotaError("slow down")) is THROTTLED
