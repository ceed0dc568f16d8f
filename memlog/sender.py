"""The sender: takes stored batches to the server, lane by lane, and never gives one up without evidence.

A *lane* is a conversation with something to send: at most one request in flight, strict order. Lanes are independent
and share a number of requests in flight. There is no linger: an idle lane sends at once, and while a request is under
way the lane collects; the next one takes all that fits.

The *gate* is the whole site: closed while the server asks for a pause, cannot be reached, or refuses the credentials;
behind it one request probes, and success opens it step by step.

What a failure means is decided by :func:`memlog.retry.classify`; what it takes to act on it stands in ``_failed``: one
odd answer neither stops a site nor makes a dead letter. After an unknown outcome the log is read before anything is
sent again (:mod:`memlog.readback`).

Lives in the engine's loop. Knows the buffer, the client and the clock; nothing of logs, receipts or callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memlog import limits
from memlog.errors import (
    ClosedError,
    ConnectionFailedError,
    ConversationFullError,
    InvalidRequestError,
    MemlogError,
    PermanentError,
    ProtocolError,
    TimedOutError,
    TooLargeError,
    TransientError,
    to_record,
)
from memlog.events import Event, EventKind
from memlog.payload import decode_items
from memlog.readback import Readback, Reset, keys_of
from memlog.reconcile import Explanation, key
from memlog.retry import Verdict, classify
from memlog.spool import ECHOES_KEPT, LaneFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from memlog.buffer import Buffer
    from memlog.client import Client
    from memlog.directory import Spools
    from memlog.models import Ack
    from memlog.report import State
    from memlog.retry import RetryPolicy
    from memlog.spool import Row, Spool

logger = logging.getLogger("memlog")

T = TypeVar("T")

_REFUSALS_IN_A_ROW = 3
_SAME_ANSWERS = 2
_HELD_AFTER = 3  # a failure or two are a hiccup, not a state
_DOUBTS_MAX = 3  # acknowledgements that name a wrong range, in a row, before one is taken as it is
_ECHO_SECONDS = 600.0  # how long a request that was sent again may still arrive from its first sending


@dataclass(slots=True, eq=False, repr=False)
class Lane:
    """What is known of one conversation while it has something to send."""

    conversation: str
    facts: LaneFacts = field(default_factory=LaneFacts)  # of the spool that its request is from
    suspect: bool = False  # something of it may have been sent without our seeing the answer
    inherited: set[str] = field(default_factory=set)  # the spools whose rows from earlier owners were looked for
    request: list[Row] | None = None  # its composition is frozen until its outcome is known
    batches_max: int = limits.ITEMS_PER_BATCH_MAX
    failures: int = 0
    answers: tuple[int, str, int] | None = None  # row, answer and how often, while a single batch is being refused
    doubts: int = 0
    poison: Poison | None = None
    held: bool = False
    generation: int = 0  # of the gate, when its last request left
    state: Literal["idle", "ready", "busy", "busy_and_woken", "waiting"] = "ready"


@dataclass(slots=True, eq=False, repr=False)
class Poison:
    """A batch that meets the same answer again and again while others are taken."""

    row_id: int
    answer: str
    since: float
    taken: int  # how many requests had been acknowledged when it was last counted
    count: int = 1


@dataclass(slots=True, eq=False, repr=False)
class Gate:
    """The site: open, or closed until a moment of the monotonic clock, after which one request probes."""

    width_max: int
    width: int = 1
    state: State = "ok"
    reason: str | None = None
    error: MemlogError | None = None
    until: float = 0.0
    failures: int = 0
    generation: int = 0  # failures of requests sent before the gate last closed are no news

    def close(self, state: State, delay: float, error: MemlogError, reason: str) -> bool:
        """Close for ``delay`` seconds; whether that is a change of state."""
        changed = self.state != state
        self.state, self.reason, self.error = state, reason, error
        self.until = max(self.until, time.monotonic() + delay)
        self.width = 1
        self.generation += 1
        return changed

    def asked(self) -> tuple[MemlogError | None, float]:
        """The error by which the server asked for a pause, and the seconds that are left of it; None if it did not."""
        left = self.until - time.monotonic()
        if self.error is None or self.error.retry_after is None or self.state == "blocked" or left <= 0:
            return None, 0.0
        return self.error, left

    def closed_for(self) -> float | None:
        """Seconds until the next probe may leave, 0 while it is under way; None if the gate is open."""
        return None if self.state == "ok" else max(0.0, self.until - time.monotonic())

    def succeed(self) -> bool:
        """A request was answered; whether that opened the gate."""
        changed = self.state != "ok"
        self.state, self.reason, self.error = "ok", None, None
        self.failures = 0
        self.until = 0.0
        self.width = min(self.width * 2, self.width_max)
        return changed


@dataclass(slots=True, eq=False, repr=False)
class Traffic:
    """Counters since the log was opened in this process, and the last error that sending met."""

    requests_sent: int = 0
    requests_acknowledged: int = 0
    acknowledged_items: int = 0
    refused_items: int = 0
    duplicate_items: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # appends that failed, by what the answer alone says
    last_error: MemlogError | None = None
    failed_at: float = 0.0

    def met(self, error: MemlogError, *, answer: bool = False) -> None:
        """Remember ``error``; count it if it is the answer to an append."""
        # A copy: the frames of its traceback hold payloads, and what it was raised from may hold credentials.
        self.last_error, self.failed_at = copy.copy(error), time.monotonic()
        if answer:
            verdict = classify(error)
            kind = verdict.value
            if verdict in (Verdict.UNREACHABLE, Verdict.TRANSIENT):
                kind = "unknown" if _is_unknown(error) else "transient"
            self.failures[kind] += 1


@dataclass(slots=True, eq=False, repr=False)
class Sender:
    """``tell`` gets every event, ``resolved`` the ids of batches whose outcome became known: both in its loop."""

    buffer: Buffer
    client: Client
    policy: RetryPolicy
    tell: Callable[[Event], None]
    resolved: Callable[[str, Iterable[int]], None]
    sealed: set[str]
    gate: Gate = field(init=False)
    readback: Readback = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)
    in_flight: int = 0
    _lanes: dict[str, Lane] = field(default_factory=dict)
    _ready: deque[Lane] = field(default_factory=deque)
    _troubled: deque[Lane] = field(default_factory=deque)
    _troubled_in_flight: int = 0
    _troubled_last: bool = False  # they take turns with the others, which matters where there is one request at a time
    _refusals: int = 0
    _defects: set[type[BaseException]] = field(default_factory=set)
    _ended: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate = Gate(self.policy.requests_in_flight, width=self.policy.requests_in_flight)
        self.readback = Readback(self.client)

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send until cancelled. What is in flight then stays pending, and is looked for before it is sent again."""
        try:
            await self._recall()
            while True:
                self._work.clear()
                delay = self._dispatch()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._work.wait()
        finally:
            self._ended = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self, conversations: Iterable[str]) -> None:
        """These conversations have something new on disk."""
        for conversation in conversations:
            lane = self._lanes.get(conversation)
            if lane is None:
                lane = self._lanes[conversation] = Lane(conversation)
                self._enqueue(lane)
            elif lane.state == "idle":
                self._enqueue(lane)
            elif lane.state == "busy":
                lane.state = "busy_and_woken"
        self._work.set()

    @property
    def state(self) -> tuple[State, str | None]:
        """What sending is doing, and why: the gate's state, or ``waiting`` where every lane is held by itself."""
        if self.gate.state == "ok" and self._lanes and all(lane.held for lane in list(self._lanes.values())):
            return "waiting", f"{len(self._lanes)} conversation(s) wait after an error of their own"
        return self.gate.state, self.gate.reason

    @property
    def held(self) -> int:
        """How many conversations wait after an error of their own."""
        return sum(lane.held for lane in list(self._lanes.values()))

    def news(self) -> asyncio.Event:
        """Set when something about what is pending or about the gate has changed since this call."""
        return self._changed

    async def _recall(self) -> None:
        """Take up what earlier processes left: their lanes are suspect, and a pause that was asked for still holds."""

        def read(spools: Spools) -> tuple[set[str], set[str], float, bool]:
            waiting = {conversation for spool in spools for conversation in spool.lanes()}
            left = {conversation for spool in spools for conversation in spool.lanes(inherited=True)}
            pause = max(_pause_left(spool.noted("gate")) for spool in spools)
            return waiting, left, pause, any(spool.noted("refuses all") is not None for spool in spools)

        waiting, left, pause, refuses_all = await _await(self.buffer.run(read))
        if refuses_all:  # or a program that is started again and again would give up some batches each time
            self._refusals = _REFUSALS_IN_A_ROW
        if pause > 0:
            error = TransientError("the server asked for a pause that has not ended", outcome="not_sent")
            self._close_gate("waiting", pause, error, f"the server asked for a pause of {pause:.0f} more seconds")
        for conversation in left:
            lane = self._lanes.setdefault(conversation, Lane(conversation, state="idle"))
            lane.suspect = True
        self.wake(waiting)

    def _dispatch(self) -> float | None:
        """Start what may start now; how long until that changes by itself."""
        now = time.monotonic()
        if now < self.gate.until:
            return self.gate.until - now
        while self.in_flight < self.gate.width and (lane := self._next_lane()) is not None:
            lane.state = "busy"
            troubled = lane.failures > 0
            self.in_flight += 1
            self._troubled_in_flight += troubled
            task = asyncio.get_running_loop().create_task(self._serve(lane, troubled=troubled))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    def _next_lane(self) -> Lane | None:
        if self.gate.state != "ok" and self._ready:
            return self._ready.popleft()  # the better probe: it has no trouble of its own
        # Lanes in trouble use at most half of the requests, so that the others never wait for them.
        half = max(1, self.gate.width_max // 2)
        if self._troubled and self._troubled_in_flight < half and not (self._ready and self._troubled_last):
            self._troubled_last = True
            return self._troubled.popleft()
        self._troubled_last = False
        return self._ready.popleft() if self._ready else None

    def _enqueue(self, lane: Lane) -> None:
        lane.state = "ready"
        (self._troubled if lane.failures else self._ready).append(lane)
        self._work.set()

    def _back_off(self, lane: Lane, delay: float) -> None:
        lane.state = "waiting"
        asyncio.get_running_loop().call_later(delay, self._enqueue, lane)

    async def _serve(self, lane: Lane, *, troubled: bool) -> None:
        """One step of one lane, and what comes after it."""
        more = True
        try:
            more = await self._step(lane)
        except ClosedError:
            more = False  # the buffer was closed first, by the end of the process
        except MemlogError as error:
            self._hold(lane, error)  # its batches cannot be read
        except BaseException as error:
            if self._ended:
                raise
            # A transport's own, be it a cancellation or an exit: it must neither end the loop nor leave the lane busy.
            if type(error) not in self._defects:  # once a kind, however many lanes meet it how often
                self._defects.add(type(error))
                logger.exception("memlog: a defect in sending conversation %s; it is tried again", lane.conversation)
            self._hold(lane, TransientError(f"a defect: {type(error).__name__}"))
        finally:
            self.in_flight -= 1
            self._troubled_in_flight -= troubled
            self._work.set()
        if lane.state == "waiting":
            return
        if more or lane.state == "busy_and_woken":
            self._enqueue(lane)
        else:
            # An idle lane is forgotten: what is worth remembering of it is in the spool.
            lane.state = "idle"
            del self._lanes[lane.conversation]

    async def _step(self, lane: Lane) -> bool:
        """Send the lane's next request, or find out about its last one; whether there may be more to do."""
        lane.generation = self.gate.generation
        if lane.conversation in self.sealed:
            return await self._seal(lane)
        rows = lane.request or await self._fetch(lane)
        if not rows:
            return False
        lane.request = rows
        try:
            await self._find_end(lane, rows[0])
            if lane.suspect:
                if await self._settle(lane, rows):
                    return True
                rows = lane.request = rows[: lane.batches_max]  # it is not there: compose anew, where that helps
            lane.suspect = True  # until its outcome is known
            ack = await self._append(lane, rows)
            if ack is not None:
                await self._acknowledge(lane, rows, await self._check(lane, rows, ack))
        except ClosedError:
            raise
        except MemlogError as error:
            # A read was refused, or the disk: no verdict on the batch, whatever the words.
            await self._failed(lane, rows, error, blame=False)
        return True

    async def _append(self, lane: Lane, rows: list[Row]) -> Ack | None:
        """Send the request; None if it failed, with all done that follows from it."""
        self.traffic.requests_sent += 1
        body = b",".join(row.body for row in rows)
        try:
            return await self.client.append_encoded(lane.conversation, body, sum(row.items for row in rows))
        except MemlogError as error:
            if not _is_unknown(error) and not self._is_doubtful(lane, error):
                lane.request, lane.suspect = None, False  # it was not carried out: compose anew
            await self._failed(lane, rows, error, blame=True)
            return None

    def _is_doubtful(self, lane: Lane, error: MemlogError) -> bool:
        """Whether a refusal is looked into before the next, perhaps smaller, request.

        It may be of something on the way, after the server had taken the batches: what landed is no dead letter, and a
        request that is cut anew would not be recognised. Where others append, too, the log could not tell.
        """
        return classify(error) in (Verdict.INVALID, Verdict.FULL) and not lane.facts.shared

    # --- what is sent, and where it should land --------------------------------------------------------------------

    async def _fetch(self, lane: Lane) -> list[Row]:
        def read(spools: Spools) -> tuple[list[Row], LaneFacts]:
            rows = spools.next_request(
                lane.conversation,
                batches_max=lane.batches_max,
                items_max=limits.ITEMS_PER_BATCH_MAX,
                bytes_max=limits.BATCH_BYTES_MAX,
            )
            if not rows:
                return [], LaneFacts()
            first, spool = rows[0], rows[0].spool
            if first.id < spool.opened_at and spool.name not in lane.inherited:
                # Its earlier owner may have sent it: looked for once, also where it was adopted while this runs.
                lane.inherited.add(spool.name)
                lane.suspect = True
            facts = spool.lane(lane.conversation)
            # Another spool that sent to the conversation is another writer, even if it is held here by now.
            others = [spool.lane(lane.conversation) for spool in spools if spool is not rows[0].spool]
            return rows, facts._replace(shared=facts.shared or any(other.next_seq is not None for other in others))

        rows, lane.facts = await _await(self.buffer.run(read))
        return rows

    async def _find_end(self, lane: Lane, row: Row) -> None:
        """Know where the lane's next item should land; found and stored before its first request is sent.

        Without it a request that was cut off could never be told from one that did not arrive.
        """
        if lane.facts.next_seq is None:
            await self._note_end(lane, row, await self.readback.length(lane.conversation))
            lane.suspect = False  # never sent: this would be known

    async def _note_end(self, lane: Lane, row: Row, next_seq: int) -> None:
        def write(_: Spools) -> None:
            row.spool.begin()
            row.spool.note_end(row.conversation, next_seq, None)

        await _await(self.buffer.run(write, writes=True))
        lane.facts = lane.facts._replace(next_seq=next_seq, anchor=None)

    # --- outcomes --------------------------------------------------------------------------------------------------

    async def _settle(self, lane: Lane, rows: list[Row]) -> bool:
        """Read the log back: whether some of ``rows`` is there already, and is acknowledged now.

        If not they are sent again, which is remembered first: the earlier sending may still arrive.
        """
        if not lane.facts.shared and await self._is_used_elsewhere(lane):
            self._note_shared(lane)
        found = await self.readback.landed(lane.conversation, lane.facts, rows)
        lane.suspect = False
        if isinstance(found, Reset):
            self._tell_reset(lane, f"it holds {found.length} items, and not the last one that was acknowledged")
            await self._note_end(lane, rows[0], found.length)
        elif found is None:
            reason = "the outcome of a request is unknown, and the log does not tell: somebody else appends, too"
            self._tell("possible_duplicate", conversation_id=lane.conversation, reason=reason)
        elif found.batches:
            await self._acknowledge(lane, rows, found)
            return True
        elif found.duplicates:
            await self._note_duplicates(lane, rows[0].spool, found)
        keys = keys_of(rows)

        def write(_: Spools) -> None:
            rows[0].spool.begin()
            rows[0].spool.note_echo(lane.conversation, keys)

        await _await(self.buffer.run(write, writes=True))
        others = (echo for echo in lane.facts.echoes if echo != keys)
        lane.facts = lane.facts._replace(echoes=(*others, keys)[-ECHOES_KEPT:])
        return False

    async def _check(self, lane: Lane, rows: list[Row], ack: Ack) -> Explanation:
        try:
            found, shared, reset = await self.readback.check(lane.conversation, lane.facts, rows, ack)
        except ProtocolError as error:
            lane.doubts += 1
            if lane.doubts < _DOUBTS_MAX:
                raise
            # A server that does not keep payloads as they are, or lies: sending for ever would only add copies.
            self._tell("possible_duplicate", conversation_id=lane.conversation, reason=str(error))
            return Explanation(len(rows), ack.first_seq, ())
        if reset:
            self._tell_reset(lane, f"item {lane.facts.next_seq} was expected next, it assigned {ack.first_seq}")
        if shared and not lane.facts.shared:
            self._note_shared(lane)
        return found

    async def _is_used_elsewhere(self, lane: Lane) -> bool:
        """Whether a process beside this one has appended behind the end that is known here, or is about to.

        What stands there may be its, and be equal to ours.
        """
        conversation, end = lane.conversation, lane.facts.next_seq
        assert end is not None
        return await _await(self.buffer.run(lambda spools: spools.is_used_elsewhere(conversation, end)))

    def _note_shared(self, lane: Lane) -> None:
        lane.facts = lane.facts._replace(shared=True)
        self._tell("several_writers", conversation_id=lane.conversation)

    async def _acknowledge(self, lane: Lane, rows: list[Row], found: Explanation) -> None:
        taken = rows[: found.batches]
        items = sum(row.items for row in taken)
        next_seq = found.first_seq + items
        anchor: bytes | None = key(decode_items(taken[-1].body)[-1])
        for _, last in found.duplicates:
            if last >= next_seq:
                next_seq, anchor = last + 1, None
        shared = lane.facts.shared
        spool = rows[0].spool
        trusts_again = self._refusals >= _REFUSALS_IN_A_ROW

        def write(spools: Spools) -> None:
            if trusts_again:
                for held in spools:
                    held.begin()
                    held.note("refuses all", None)
            spool.begin()
            spool.acknowledge(taken, found.first_seq)
            spool.note_end(lane.conversation, next_seq, anchor)
            if shared:
                spool.note_lane(lane.conversation, shared=True)
            for first, last in found.duplicates:
                spool.note_duplicate(lane.conversation, first, last)

        await _await(self.buffer.run(write, writes=True))
        lane.facts = lane.facts._replace(next_seq=next_seq, anchor=anchor)
        lane.request, lane.suspect, lane.answers, lane.poison = None, False, None, None
        lane.failures, lane.held, lane.doubts = 0, False, 0
        lane.batches_max = min(lane.batches_max * 2, limits.ITEMS_PER_BATCH_MAX)
        self._refusals = 0
        self.traffic.requests_acknowledged += 1
        self.traffic.acknowledged_items += items
        self._reached(lane)
        self._tell(
            "acknowledged",
            conversation_id=lane.conversation,
            items=items,
            first_seq=found.first_seq,
            last_seq=found.first_seq + items - 1,
        )
        self._tell_duplicates(lane.conversation, found)
        self.resolved(spool.name, [row.id for row in taken])
        self._news()

    async def _note_duplicates(self, lane: Lane, spool: Spool, found: Explanation) -> None:
        next_seq = max(last for _, last in found.duplicates) + 1

        def write(_: Spools) -> None:
            spool.begin()
            spool.note_end(lane.conversation, next_seq, None)
            for first, last in found.duplicates:
                spool.note_duplicate(lane.conversation, first, last)

        await _await(self.buffer.run(write, writes=True))
        lane.facts = lane.facts._replace(next_seq=next_seq, anchor=None)
        self._tell_duplicates(lane.conversation, found)

    async def audit(self) -> None:
        """Look once more at idle conversations where something was sent twice: has the first sending arrived late?"""

        def read(spools: Spools) -> list[tuple[Spool, str, LaneFacts]]:
            twice = [(spool, name) for spool in spools for name in spool.lanes_with_echoes()]
            return [(spool, name, spool.lane(name)) for spool, name in twice]

        for spool, name, facts in await _await(self.buffer.run(read)):
            if name in self._lanes or facts.next_seq is None:
                continue
            found = await self.readback.echoes(name, facts)
            # In the meantime the lane may have come to life, and then it finds by itself what there is.
            if name in self._lanes:
                continue
            if found is None:
                reason = "something was sent twice, and the end of the log does not tell what became of it"
                self._tell("possible_duplicate", conversation_id=name, reason=reason)
                await self._forget_echoes(time.time(), name)
            elif found.duplicates:
                await self._note_duplicates(Lane(name, facts), spool, found)
        await self._forget_echoes(time.time() - _ECHO_SECONDS)

    async def _forget_echoes(self, before: float, conversation: str | None = None) -> None:
        def write(spools: Spools) -> None:
            for spool in spools:
                if spool.lanes_with_echoes():
                    spool.begin()
                    spool.forget_echoes(int(before * 1e6), conversation)

        await _await(self.buffer.run(write, writes=True))

    async def _failed(self, lane: Lane, rows: list[Row], error: MemlogError, *, blame: bool) -> None:
        """Act on a failure: the only place where a batch can be given up, and where the site is stopped.

        ``blame``: the server answered the batch itself, so that it may be guilty.
        """
        self.traffic.met(error, answer=blame)
        verdict = classify(error)
        if verdict in (Verdict.FULL, Verdict.INVALID) and not blame:
            verdict = Verdict.BLOCKED  # a harmless read was refused: the canary tells whether all of them are
        if verdict is Verdict.BLOCKED or (verdict is Verdict.INVALID and len(rows) == 1):
            canary = await self.readback.canary(lane.conversation)
            if canary is not None:  # the site itself does not answer: this batch is not to blame
                error, verdict = canary, classify(canary)
                if verdict is Verdict.INVALID:
                    verdict = Verdict.BLOCKED
            elif verdict is Verdict.BLOCKED:
                verdict = Verdict.TRANSIENT
        if verdict is Verdict.THROTTLED:
            await self._throttled(error)
        elif verdict is Verdict.BLOCKED:
            self._close_gate("blocked", error.retry_after or self.policy.blocked_delay, error, str(error))
        elif verdict is Verdict.UNREACHABLE:
            if lane.generation == self.gate.generation:
                self.gate.failures += 1
                delay = self.policy.delay(self.gate.failures)
                if error.retry_after is not None:
                    delay = max(delay, error.retry_after + self.policy.delay(1))  # spread, and never too early
                self._close_gate("waiting", delay, error, str(error))
        elif verdict in (Verdict.FULL, Verdict.INVALID):
            assert isinstance(error, PermanentError)  # what classify gives these two verdicts to
            await self._refused(lane, rows, verdict, error)
        else:
            answered = not isinstance(error, (ConnectionFailedError, TimedOutError))
            if answered:
                self._reached(lane)
            if not (answered and blame and await self._poisonous(lane, rows, error)):
                self._hold(lane, error)

    async def _poisonous(self, lane: Lane, rows: list[Row], error: MemlogError) -> bool:
        """Whether the batch is given up: alone, it met the same answer often and long enough while others were taken.

        An answer counts only if some other request was acknowledged since the last one: during an outage none does.
        """
        answer, taken = _answer(error), self.traffic.requests_acknowledged
        poison = lane.poison
        if poison is None or (poison.row_id, poison.answer) != (rows[0].id, answer):
            lane.poison = Poison(rows[0].id, answer, time.monotonic(), taken)
            return False
        if poison.taken < taken:
            poison.taken, poison.count = taken, poison.count + 1
        if len(rows) > 1:
            if poison.count >= _HELD_AFTER:
                lane.batches_max = 1
            return False
        if poison.count < self.policy.poison_answers or time.monotonic() - poison.since < self.policy.poison_seconds:
            return False
        verdict = InvalidRequestError(
            f"the same answer {poison.count} times over {self.policy.poison_seconds:.0f} s or more, while other batches"
            f" were taken: {error.args[0]}",
            outcome="refused",
            status=error.status,
            code=error.code,
            server_said=error.server_said,
        )
        await self._bury(lane, rows, verdict, "refused")
        return True

    def _hold(self, lane: Lane, error: MemlogError) -> None:
        self.traffic.met(error)
        lane.failures += 1
        if lane.failures >= _HELD_AFTER and not lane.held:
            lane.held = True
            self._tell("held", conversation_id=lane.conversation, reason=str(error), error=error)
        self._back_off(lane, max(self.policy.delay(lane.failures), error.retry_after or 0.0))

    async def _refused(self, lane: Lane, rows: list[Row], verdict: Verdict, error: PermanentError) -> None:
        refuses_all = verdict is Verdict.INVALID and self._refusals >= _REFUSALS_IN_A_ROW
        if not refuses_all:
            self._reached(lane)
        if len(rows) > 1:
            # Somebody in this request is guilty. Too large a body says only that; otherwise one by one, in order.
            too_large = isinstance(error, TooLargeError) and error.what == "batch"
            lane.batches_max = max(1, len(rows) // 2) if too_large else 1
        elif verdict is Verdict.FULL:
            self.sealed.add(lane.conversation)
        elif not refuses_all:
            await self._suspect(lane, rows, error)
        if refuses_all:
            # Nothing more is given up, and the gate stays closed, until some other batch is taken.
            lane.failures += 1
            reason = f"the server refused {_REFUSALS_IN_A_ROW} batches in a row and took none in between: {error}"
            self._close_gate("blocked", self.policy.blocked_delay, error, reason)

    async def _suspect(self, lane: Lane, rows: list[Row], error: PermanentError) -> None:
        row, answer = rows[0], _answer(error)
        before = lane.answers
        count = before[2] + 1 if before is not None and before[:2] == (row.id, answer) else 1
        lane.answers = (row.id, answer, count)
        if count < _SAME_ANSWERS:
            lane.failures += 1
            self._back_off(lane, self.policy.delay(lane.failures))
        else:
            self._refusals += 1
            await self._bury(lane, rows, error, "refused")

    async def _seal(self, lane: Lane) -> bool:
        """Make dead letters of everything that waits for a full conversation; whether there was any."""
        lane.request = None
        rows = await self._fetch(lane)
        if rows:
            error = ConversationFullError(lane.conversation, limits.CONVERSATION_ITEMS_MAX, outcome="refused")
            await self._bury(lane, rows, error, "sealed")
        return bool(rows)

    async def _bury(self, lane: Lane, rows: list[Row], error: PermanentError, kind: EventKind) -> None:
        spool = rows[0].spool
        record = to_record(error)
        refuses_all = kind == "refused" and self._refusals >= _REFUSALS_IN_A_ROW

        def write(spools: Spools) -> None:
            spool.begin()
            spool.refuse(rows, record)
            if refuses_all:
                spools.own.begin()
                spools.own.note("refuses all", 1)
            if kind == "sealed":
                spool.note_lane(lane.conversation, sealed=True)

        await _await(self.buffer.run(write, writes=True))
        # What waits behind it starts with a clean slate.
        lane.request, lane.suspect, lane.answers, lane.poison = None, False, None, None
        lane.failures, lane.held = 0, False
        items = sum(row.items for row in rows)
        self.traffic.refused_items += items
        self._tell(kind, conversation_id=lane.conversation, items=items, error=error, reason=str(error))
        self.resolved(spool.name, [row.id for row in rows])
        self._news()

    # --- the gate --------------------------------------------------------------------------------------------------

    async def _throttled(self, error: MemlogError) -> None:
        self.gate.failures += 1
        delay = error.retry_after if error.retry_after is not None else max(1.0, self.policy.delay(self.gate.failures))
        gate = f"{time.time() + delay} {delay}"

        def write(spools: Spools) -> None:
            spools.own.begin()
            spools.own.note("gate", gate)

        self._close_gate("waiting", delay, error, f"the server asked for a pause of {delay:.0f} seconds")
        await _await(self.buffer.run(write, writes=True))

    def _close_gate(self, state: State, delay: float, error: MemlogError, reason: str) -> None:
        self.traffic.met(error)
        changed = self.gate.close(state, delay, error, reason)
        # The end of the pause must wake the loop, which may have gone to sleep without one.
        self._work.set()
        if changed:
            self._tell("blocked" if state == "blocked" else "waiting", reason=reason, error=error)
        self._news()

    def _reached(self, lane: Lane) -> None:
        """The server answered: open the gate a step further, unless it was closed after this request had left."""
        if lane.generation == self.gate.generation and self.gate.succeed():
            self._tell("ok")
            self._news()

    # --- telling ---------------------------------------------------------------------------------------------------

    def _tell_duplicates(self, conversation: str, found: Explanation) -> None:
        for first, last in found.duplicates:
            self.traffic.duplicate_items += last - first + 1
            self._tell("duplicate", conversation_id=conversation, first_seq=first, last_seq=last)

    def _tell_reset(self, lane: Lane, what: str) -> None:
        self._tell("log_reset", conversation_id=lane.conversation, reason=f"the log was reset: {what}")

    def _tell(self, kind: EventKind, **details: Any) -> None:
        self.tell(Event(kind=kind, **details))

    def _news(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _pause_left(gate: object) -> float:
    """Seconds until the moment that was noted, but never more than the pause was long: the clock may have been set."""
    try:
        until, pause = map(float, str(gate).split())
    except ValueError:
        return 0.0  # nothing noted, or damaged: the server will say so again
    return min(until - time.time(), pause, limits.RETRY_AFTER_MAX)


def _is_unknown(error: MemlogError) -> bool:
    """Whether the request that failed may have been carried out."""
    return getattr(error, "outcome", "unknown") == "unknown"


def _answer(error: MemlogError) -> str:
    return f"{type(error).__name__} {error.status} {error.code}"


async def _await(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
