"""When to try again, and what a failed append means for the log. Decides only; the one importer of tenacity.

Reads are driven from here by :func:`retrying`. Appends are not: the log keeps them for as long as it takes, so its
lanes ask :func:`classify` what a failure means and :meth:`RetryPolicy.delay` how long to wait.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from math import inf
from random import random as _random
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_any,
    stop_before_delay,
)

from memlog.errors import (
    AuthenticationError,
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
    ServerError,
    TimedOutError,
    TooLargeError,
    TransientError,
)
from memlog.limits import RETRY_AFTER_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["NO_RETRY", "RetryPolicy", "Verdict", "classify", "parse_retry_after", "retrying"]

T = TypeVar("T")


# -- how long --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How patient memlog is. Times are in seconds; None means no limit.

    Args:
        attempts: tries of one read, the first included. Appends to a log know no such limit.
        total: time for one read, waits included. A wait that would end later is not begun.
        delay_min: upper bound of the first wait; it doubles with every further failure.
        delay_max: where the doubling ends.
        blocked_delay: time between two probes while waiting cannot help, such as a wrong password or address.
        requests_in_flight: requests that a log has under way at the same time, over all conversations.
        poison_answers: how often a batch of a log, sent alone, must meet the same unknown answer to become a dead
            letter; an answer counts only if another batch was acknowledged since the last one.
        poison_seconds: over how long.

    Raises:
        ValueError: a value that cannot be meant; it names the field and the value.
    """

    attempts: int | None = 5
    total: float | None = 60.0
    delay_min: float = 0.1
    delay_max: float = 30.0
    blocked_delay: float = 30.0
    requests_in_flight: int = 8
    poison_answers: int = 20
    poison_seconds: float = 3600.0

    def __post_init__(self) -> None:
        _require("attempts", self.attempts, self.attempts is None or _is_count(self.attempts), "at least 1, or None")
        _require("total", self.total, self.total is None or _is_time(self.total), "from 0 to 10**9 seconds, or None")
        for name in ("delay_min", "delay_max", "blocked_delay"):
            value = getattr(self, name)
            _require(name, value, _is_time(value) and value > 0, "more than 0 and at most 10**9 seconds")
        _require(
            "delay_max", self.delay_max, self.delay_max >= self.delay_min, f"at least delay_min={self.delay_min!r}"
        )
        _require("requests_in_flight", self.requests_in_flight, _is_count(self.requests_in_flight), "at least 1")
        _require("poison_answers", self.poison_answers, _is_count(self.poison_answers), "at least 1")
        _require("poison_seconds", self.poison_seconds, _is_time(self.poison_seconds), "0 or more seconds")

    def delay(self, n: int, random: Callable[[], float] = _random) -> float:
        """Seconds to wait after ``n`` failures in a row, anywhere up to a bound that doubles each time (full jitter).

        The lower end is a tenth of ``delay_min`` and not 0, so that nothing ever spins. ``random`` gives [0, 1).
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n!r}")
        # The exponent is bounded, or a failure count of thousands would overflow. 2**200 is above any ratio meant.
        upper = min(self.delay_max, self.delay_min * 2.0 ** min(n - 1, 200))
        lower = self.delay_min / 10
        return lower + (upper - lower) * random()


def _require(name: str, value: object, fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(f"{name} must be {what}, not {value!r}")


# A bound at which arithmetic cannot overflow; thirty years.
_TIME_MAX: Final = 1e9


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _TIME_MAX


NO_RETRY: Final = RetryPolicy(attempts=1)
"""One attempt, and its own error."""


_SECONDS: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)")


def parse_retry_after(value: str | bytes | None, *, now: datetime | None = None) -> float | None:
    """The seconds that a Retry-After header asks for, or None where it is absent or says nothing intelligible.

    Reads seconds, also with a fraction, and the three forms of an HTTP date, relative to ``now``. What lies in the past
    is 0; what lies beyond an hour is an hour, after which the server is asked again. Never raises.
    """
    if value is None:
        return None
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    text = text.strip(" \t")
    if not text.isascii():
        return None
    seconds = float(text) if _SECONDS.fullmatch(text) else _seconds_until(text, now or datetime.now(UTC))
    return None if seconds is None else min(max(0.0, seconds), RETRY_AFTER_MAX)


def _seconds_until(date: str, now: datetime) -> float | None:
    try:
        return (_as_utc(parsedate_to_datetime(date)) - _as_utc(now)).total_seconds()
    except Exception:  # noqa: BLE001 - the parser of dates fails in more ways than it documents
        return None


def _as_utc(moment: datetime) -> datetime:
    # The zone "-0000" and the form without a zone give a naive datetime, which HTTP means as UTC.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# -- reads -----------------------------------------------------------------------------------------------------------


async def retrying(
    policy: RetryPolicy,
    call: Callable[[], Awaitable[T]],
    *,
    sleep: Callable[[float], Awaitable[None]] | None = None,
) -> T:
    """The answer of ``call``, which is called again after each transient failure for as long as the policy allows.

    Waits at least as long as the server asked for. Not tried again: what is permanent, a refused redirect, and an
    answer above the limit, since neither changes by waiting. The last error is raised as it is. Cancelling it leaves
    nothing behind. ``sleep`` replaces :func:`anyio.sleep`.
    """

    async def attempt() -> T:
        # tenacity awaits only what it recognises as a coroutine function.
        return await call()

    stop = stop_any(
        stop_after_attempt(sys.maxsize if policy.attempts is None else policy.attempts),
        stop_before_delay(inf if policy.total is None else policy.total),
    )
    controller = AsyncRetrying(
        sleep=sleep or anyio.sleep,
        stop=stop,
        wait=_wait(policy),
        retry=retry_if_exception(_may_pass),
        reraise=True,
    )
    return await controller(attempt)


def _wait(policy: RetryPolicy) -> Callable[[RetryCallState], float]:
    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, MemlogError) else None
        return max(policy.delay(state.attempt_number), asked or 0.0)

    return wait


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, TransientError) and not isinstance(error, RedirectRefusedError | ResponseTooLargeError)


# -- appends ---------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """What the sender does about an append that was not acknowledged. A suspicion, until evidence backs it."""

    INVALID = "invalid"
    """This batch: the contract does not allow what it holds. The others can go on."""

    FULL = "full"
    """This conversation: it holds all the items it may."""

    THROTTLED = "throttled"
    """The whole site waits until the server's Retry-After has passed. No attempt is counted."""

    BLOCKED = "blocked"
    """Waiting does not help: credentials, or an address where no memory server answers. All is kept; probe slowly."""

    UNREACHABLE = "unreachable"
    """The whole site waits: nobody answers there, or whoever does asks for time. One lane is enough to find out."""

    TRANSIENT = "transient"
    """This lane waits and tries again. Also for whatever is not known, for ever: nothing is refused on a guess."""


_INVALID: Final = (InvalidItemError, TooLargeError, InvalidRequestError, InvalidConversationIdError)
_WRONG_ADDRESS: Final = frozenset({404, 405, 410, 421})
_UNAVAILABLE: Final = frozenset({502, 503, 504})


def classify(error: MemlogError) -> Verdict:
    """What a failed append means, from the error alone. The first rule that applies decides.

    * INVALID: the batch or its conversation id breaks the contract.
    * FULL: the conversation is full.
    * THROTTLED: the site exceeded its rate limit.
    * BLOCKED: the credentials were refused; a redirect elsewhere; status 3xx, 404, 405, 410 or 421; a protocol error
      that carries a 2xx status, which says that the answer as a whole was not of the protocol: a web page.
    * UNREACHABLE: nothing could be sent; status 502, 503 or 504; any other transient failure with a Retry-After.
    * TRANSIENT: all else, known or not.
    """
    if isinstance(error, _INVALID):
        return Verdict.INVALID
    if isinstance(error, ConversationFullError):
        return Verdict.FULL
    if isinstance(error, RateLimitedError):
        return Verdict.THROTTLED
    if isinstance(error, AuthenticationError | RedirectRefusedError) or _is_wrong_address(error):
        return Verdict.BLOCKED
    if isinstance(error, TransientError) and _is_unreachable(error):
        return Verdict.UNREACHABLE
    return Verdict.TRANSIENT


def _is_wrong_address(error: MemlogError) -> bool:
    if error.status is None or not isinstance(error, ServerError | ProtocolError):
        return False
    if error.status in _WRONG_ADDRESS or 300 <= error.status < 400:
        return True
    return isinstance(error, ProtocolError) and 200 <= error.status < 300


def _is_unreachable(error: TransientError) -> bool:
    if error.retry_after is not None:
        return True
    if isinstance(error, ConnectionFailedError | TimedOutError):
        return error.outcome == "not_sent"
    return isinstance(error, ServerError) and error.status in _UNAVAILABLE
