"""What tests hold against each other: a log's books, and what the server has really stored, read without memlog."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx

from memlog import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    from memlog import Conversation, MemoryLog
    from memlog.testing import ReferenceServer

PATIENCE = 20.0
"""Seconds that anything in a test may take. Far above what it takes, so that a loaded machine fails nothing."""

QUICK = RetryPolicy(attempts=2, delay_min=0.01, delay_max=0.05, blocked_delay=0.05)
"""As persistent as the default, at a test's pace."""

_BOOKS = (
    "stored_items",
    "acknowledged_items",
    "pending_items",
    "refused_items",
    "dropped_items",
    "stored_batches",
    "acknowledged_batches",
    "pending_batches",
    "refused_batches",
    "dropped_batches",
    "pending_bytes",
    "unstored_bytes",
)


def books(log: MemoryLog) -> dict[str, int]:
    """The books of the log, checked to be closed."""
    statistics = log.statistics()
    for unit in ("items", "batches"):
        whereabouts = (
            getattr(statistics, f"{place}_{unit}") for place in ("acknowledged", "pending", "refused", "dropped")
        )
        assert getattr(statistics, f"stored_{unit}") == sum(whereabouts), statistics
    return {name: getattr(statistics, name) for name in _BOOKS}


async def contents(server: ReferenceServer, site: str = "demo") -> dict[str, list[str]]:
    """Every conversation of the site as the server holds it: payloads as JSON text, straight from its store."""
    store = server.app.state.store
    found = await store.conversations(site, 1000, None)
    return {
        row.conversation_id: [item.payload for item in await store.replay(site, row.conversation_id, 0, 100_000)]
        for row in found
    }


@asynccontextmanager
async def nothing_kept(server: ReferenceServer, log: MemoryLog, chat: Conversation) -> AsyncIterator[None]:
    """What happens inside leaves no trace in the books or on the server, and the next append is acknowledged."""
    await chat.append({"before": True}).acknowledged(PATIENCE)
    books_before, contents_before = books(log), await contents(server)
    yield
    assert books(log) == books_before
    assert await contents(server) == contents_before
    ack = await chat.append({"after": True}).acknowledged(PATIENCE)
    # Nothing slipped in between: the numbers follow each other.
    assert (ack.first_seq, ack.last_seq) == (1, 1)
    assert (await contents(server))[chat.id] == ['{"before":true}', '{"after":true}']


class CountingTransport(httpx.AsyncBaseTransport):
    """The network, and a count of the requests that went there, refused ones too."""

    def __init__(self) -> None:
        self.requests = 0
        self._network = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests += 1
        return await self._network.handle_async_request(request)

    async def aclose(self) -> None:
        await self._network.aclose()


async def until(condition: Callable[[], Any]) -> None:
    """Wait until ``condition()`` is true; the caller bounds it."""
    while not condition():
        await anyio.sleep(0.005)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The warnings and errors that memlog logged, but for the one about the place where tests keep their files."""
    return [
        record
        for record in caplog.records
        if record.name.startswith("memlog") and record.levelno >= logging.WARNING
        if "may not last" not in record.getMessage()
    ]
