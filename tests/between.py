"""What stands between a log and its server in tests: sees every tool call, and may hold it up, refuse or replace it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from books import QUICK, contents

import memlog.sync
from memlog import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from memlog.events import Event
    from memlog.sync import SyncMemoryLog
    from memlog.testing import ReferenceServer

PATIENCE = 30.0


@dataclass
class Call:
    """A tool call on its way, as the server would see it."""

    tool: str
    conversation: str
    items: list[Any]
    id: Any
    at: float
    forward: Callable[[], Awaitable[httpx.Response]] = field(repr=False)

    def refuse(self, message: str = "invalid item", *, status: int = 400, code: int = -32602) -> httpx.Response:
        error = {"code": code, "message": message}
        return httpx.Response(status, json={"jsonrpc": "2.0", "id": self.id, "error": error})

    def says(self, text: str) -> bool:
        """Whether one of the items holds these words."""
        return any(text in json.dumps(item, ensure_ascii=False) for item in self.items)


class Between(httpx.AsyncBaseTransport):
    """`decide(call)` returns an answer, or None to let the call pass; it may be a coroutine function, or raise."""

    def __init__(self, decide: Callable[[Call], Any] = lambda _: None) -> None:
        self.decide = decide
        self.calls: list[Call] = []
        self._inner = httpx.AsyncHTTPTransport()

    @property
    def appends(self) -> list[Call]:
        return [call for call in self.calls if call.tool == "append_memory"]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        message = json.loads(body) if body else {}
        if message.get("method") != "tools/call":
            return await self._inner.handle_async_request(request)

        async def forward() -> httpx.Response:
            answer = await self._inner.handle_async_request(request)
            await answer.aread()
            return answer

        arguments = message["params"]["arguments"]
        call = Call(
            message["params"]["name"],
            arguments.get("conversation_id", ""),
            arguments.get("items", []),
            message["id"],
            time.monotonic(),
            forward,
        )
        self.calls.append(call)
        decision = self.decide(call)
        if asyncio.iscoroutine(decision):
            decision = await decision
        return await self._inner.handle_async_request(request) if decision is None else decision

    async def aclose(self) -> None:
        await self._inner.aclose()


class Opener:
    """Opens logs on one server and one directory, keeps their events, and closes what is left open."""

    def __init__(self, server: ReferenceServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.events: list[Event] = []
        self.logs: list[SyncMemoryLog] = []

    def __call__(self, between: Between | None = None, **settings: Any) -> SyncMemoryLog:
        log = memlog.sync.open_log(
            self.server.url,
            **{
                "auth": self.server.auth,
                "buffer_dir": self.directory,
                "retry": QUICK,
                "flush_timeout": 0,
                "on_event": self.events.append,
                "transport": between,
                **settings,
            },
        )
        self.logs.append(log)
        return log

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def close(self) -> None:
        for log in self.logs:
            log.close()

    def contents(self) -> dict[str, list[Any]]:
        """What the server holds, read without memlog."""
        found = asyncio.run(contents(self.server))
        return {name: [json.loads(text) for text in payloads] for name, payloads in found.items()}


def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait in the calling thread until ``condition()`` is true; fail after a long while."""
    end = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"it did not come about: {what or condition}"
        pause.wait(0.002)


def without_duplicates(log: SyncMemoryLog, found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The server's conversations without the ranges that the log reports as second copies."""
    gone = {
        (range_.conversation_id, seq)
        for range_ in log.duplicates()
        for seq in range(range_.first_seq, range_.last_seq + 1)
    }
    return {
        name: [payload for seq, payload in enumerate(payloads) if (name, seq) not in gone]
        for name, payloads in found.items()
    }


def drain(log: SyncMemoryLog) -> None:
    """Flush until all is acknowledged, however often sending is blocked for a moment meanwhile."""
    until(lambda: log.flush(PATIENCE).complete, "drained")


__all__ = ["PATIENCE", "QUICK", "Between", "Call", "Opener", "RetryPolicy", "drain", "until", "without_duplicates"]
