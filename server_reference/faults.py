"""Misbehaviour on demand. Nothing here happens unless somebody asked for it.

In process, on ``app.state.faults``:

    faults.add("status", tool="append_memory", status=503, retry_after=2, times=3)
    faults.add("drop", tool="append_memory", when="after")          # committed, and the client hears nothing
    faults.add("sse", probability=0.3, seed=7, times=None)          # for ever, three calls in ten
    faults.clear()

Over HTTP, only where the server was started with ``--allow-faults``, with the credentials of ``/mcp``: ``POST
/faults`` with one such call as a JSON object (``{"kind": "status", "tool": "append_memory", "status": 503}``), ``GET
/faults`` for what was set and how often it struck, ``DELETE /faults`` to end all of it.

Kinds, and the settings that are theirs:

``status``    answer HTTP `status`, with a `retry_after` header (seconds or a date, as given), and `body` of type
              `content_type`; without a body, a JSON-RPC error.
``stall``     wait `seconds` and go on as if nothing was; None waits until the fault is cleared.
``drop``      close the connection without one byte of an answer.
``cut``       send the head of the answer and half of its body, then close the connection.
``wrong_ack`` answer an append with a range shifted by `shift`.
``no_ack``    answer an append without its range.
``sse``       answer as a stream of server-sent events instead of JSON.

Settings of all: `tool`, a tool's name or another method of the protocol (``"server/discover"``, ``"initialize"``), None
for every tool call; `times`, how many calls it strikes, None for no end; `probability` with `seed`, for each call that
it could strike. ``status``, ``stall`` and ``drop`` also take `when`: ``"before"`` the call is carried out, or
``"after"`` it was committed. Of several faults of one kind (and `when`) the oldest strikes; different kinds combine.
A call that a rate limit or missing credentials turn away meets no fault.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import anyio

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Fault", "Faults"]

Kind = Literal["status", "stall", "drop", "cut", "wrong_ack", "no_ack", "sse"]
When = Literal["before", "after"]

KINDS: Final[tuple[str, ...]] = get_args(Kind)
TIMED: Final = frozenset({"status", "stall", "drop"})
STALL_SECONDS_MAX: Final = 3600.0


@dataclass(kw_only=True)
class Fault:
    """One order to misbehave; ``struck`` counts the calls it was carried out on."""

    kind: Kind
    tool: str | None = None
    times: int | None = 1
    probability: float = 1.0
    seed: int | None = None
    when: When = "before"
    status: int = 503
    retry_after: float | str | None = None
    body: str | None = None
    content_type: str = "application/json"
    seconds: float | None = 1.0
    shift: int = 1
    struck: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        checks: Mapping[str, tuple[object, bool]] = {
            "kind": (self.kind, self.kind in KINDS),
            "tool": (self.tool, self.tool is None or isinstance(self.tool, str)),
            "times": (self.times, self.times is None or (type(self.times) is int and self.times >= 1)),
            "probability": (self.probability, type(self.probability) in (int, float) and 0 <= self.probability <= 1),
            "seed": (self.seed, self.seed is None or type(self.seed) is int),
            "when": (self.when, self.when == "before" or (self.when == "after" and self.kind in TIMED)),
            "status": (self.status, type(self.status) is int and 200 <= self.status <= 599),
            "retry_after": (
                self.retry_after,
                self.retry_after is None
                or type(self.retry_after) in (int, float)
                or (isinstance(self.retry_after, str) and _fits_a_header(self.retry_after)),
            ),
            "body": (self.body, self.body is None or isinstance(self.body, str)),
            "content_type": (
                self.content_type,
                isinstance(self.content_type, str) and _fits_a_header(self.content_type),
            ),
            "seconds": (
                self.seconds,
                self.seconds is None or (type(self.seconds) in (int, float) and 0 <= self.seconds <= STALL_SECONDS_MAX),
            ),
            "shift": (self.shift, type(self.shift) is int and abs(self.shift) <= 2**32),
        }
        for name, (value, valid) in checks.items():
            if not valid:
                raise ValueError(f"fault: {name} cannot be {value!r}")
        self._random = random.Random(self.seed)  # noqa: S311  # dice, not secrets

    def strikes(self) -> bool:
        """Whether the next call that it matches is struck; throws the dice and keeps the count."""
        if self.times is not None and self.struck >= self.times:
            return False
        if self.probability < 1.0 and self._random.random() >= self.probability:
            return False
        self.struck += 1
        return True


class Faults:
    """The faults of one server. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._cleared = 0

    def add(self, kind: Kind, **settings: Any) -> Fault:
        """Sets a fault, with the settings of :class:`Fault`; raises ValueError or TypeError for what cannot be one."""
        fault = Fault(kind=kind, **settings)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Ends every fault; calls that are stalled go on."""
        with self._lock:
            self._faults.clear()
            self._cleared += 1

    def listed(self) -> list[dict[str, Any]]:
        """All faults since the last `clear`, oldest first, also those that have struck their last call."""
        with self._lock:
            return [asdict(fault) for fault in self._faults]

    def of_call(self, name: str, *, is_tool: bool) -> list[Fault]:
        """The faults that strike this call: the oldest of each kind and moment. Counts them as struck."""
        if not self._faults:
            return []
        with self._lock:
            chosen: dict[tuple[str, str], Fault] = {}
            for fault in self._faults:
                matches = fault.tool == name or (fault.tool is None and is_tool)
                if matches and (fault.kind, fault.when) not in chosen and fault.strikes():
                    chosen[fault.kind, fault.when] = fault
            return list(chosen.values())

    async def stall(self, fault: Fault) -> None:
        """Waits as long as the fault says, or until :meth:`clear`."""
        # Looked at often rather than signalled: `clear` may come from any thread, and this may run in any loop.
        cleared = self._cleared
        seconds = STALL_SECONDS_MAX if fault.seconds is None else fault.seconds
        end = time.monotonic() + seconds
        while self._cleared == cleared and (left := end - time.monotonic()) > 0:  # noqa: ASYNC110  # see above
            await anyio.sleep(min(left, 0.02))


def _fits_a_header(text: str) -> bool:
    return text.isascii() and text.isprintable()
