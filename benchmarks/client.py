"""What one call over MCP costs, beside the same bytes posted by hand and beside the official client.

    python -m benchmarks.client [--rounds N] [--quick]

The reference server runs in a process of its own; the clients are in this one and take turns in every round, so that
whatever else the machine does hits all of them. A ratio is the median of the rounds' own ratios.

A turn is a new client and with it, its connections made beforehand: appends of one 1 KB item one at a time, reads of a
page of 1,000 items, and the appends again by 32 tasks at a time.
`raw httpx2` and `raw httpx` post exactly the body that memlog sends (it is recorded, not rebuilt) with `AsyncClient`,
and look at nothing but the status: no item is checked or encoded, no answer is parsed. The official client is given the
item and the arguments as Python values, as memlog is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import httpx2
import mcp
from mcp.client.streamable_http import streamable_http_client

import memlog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
AUTH = ("bench", "bench")
AT_A_TIME = 32
PAGE = "c_bench_page"
PAGE_ITEMS = 1000
TEXT = "The quick agent notes what it was told, and goes on with what it was doing. "
ITEM = {"role": "user", "turn": 17, "at": 1757000000.25, "text": (TEXT * 13)[:940]}
PAGE_ITEM = {"role": "user", "turn": 17, "at": 1757000000.25, "text": (TEXT * 13)[:240]}


# --- the subjects ----------------------------------------------------------------------------------------------------


class Subject(Protocol):
    async def append(self) -> object:
        """One item."""

    async def page(self) -> object:
        """1,000 items."""


class Memlog:
    def __init__(self, client: memlog.Client) -> None:
        self._client = client

    async def append(self) -> object:
        return await self._client.append_memory("c_bench_memlog", [ITEM])

    async def page(self) -> object:
        items = await self._client.replay_memory(PAGE, 0, PAGE_ITEMS)
        assert len(items) == PAGE_ITEMS
        return items


class Official:
    def __init__(self, client: Any) -> None:
        self._client = client

    async def append(self) -> object:
        result = await self._client.call_tool("append_memory", {"conversation_id": "c_bench_official", "items": [ITEM]})
        assert not result.is_error
        return result

    async def page(self) -> object:
        result = await self._client.call_tool(
            "replay_memory", {"conversation_id": PAGE, "offset": 0, "limit": PAGE_ITEMS}
        )
        assert len(result.structured_content["items"]) == PAGE_ITEMS
        return result


class Raw:
    """``AsyncClient.post``; of the answer nothing but the status is looked at."""

    def __init__(self, client: Any, append: httpx.Request, page: httpx.Request) -> None:
        self._client = client
        self._append, self._page = append, page

    async def append(self) -> object:
        return await self._post(self._append)

    async def page(self) -> object:
        return await self._post(self._page)

    async def _post(self, request: httpx.Request) -> object:
        response = await self._client.post(str(request.url), content=request.content, headers=request.headers.raw)
        assert response.status_code == httpx.codes.OK
        return response


@contextlib.asynccontextmanager
async def open_memlog(url: str) -> AsyncIterator[Subject]:
    async with memlog.Client(url, auth=AUTH) as client:
        yield Memlog(client)


@contextlib.asynccontextmanager
async def open_official(url: str) -> AsyncIterator[Subject]:
    async with httpx2.AsyncClient(auth=AUTH) as http:
        transport = streamable_http_client(url, http_client=http)
        async with mcp.Client(transport, mode="auto") as client:
            yield Official(client)


@contextlib.asynccontextmanager
async def open_raw(library: Any, url: str) -> AsyncIterator[Subject]:
    append = await recorded(lambda client: client.append_memory(f"c_bench_{library.__name__}", [ITEM]), url)
    page = await recorded(lambda client: client.replay_memory(PAGE, 0, PAGE_ITEMS), url)
    # By default 20 connections are kept, and with 32 tasks the yardstick would connect anew all the time.
    limits = library.Limits(max_connections=AT_A_TIME, max_keepalive_connections=AT_A_TIME)
    async with library.AsyncClient(limits=limits) as client:
        yield Raw(client, append, page)


async def recorded(call: Callable[[memlog.Client], Awaitable[object]], url: str) -> httpx.Request:
    """The request that memlog makes of a call, caught before it leaves."""
    seen: list[httpx.Request] = []

    async def catch(request: httpx.Request) -> httpx.Response:
        await request.aread()
        seen.append(request)
        return httpx.Response(503)

    network, once = httpx.MockTransport(catch), memlog.RetryPolicy(attempts=1)
    async with memlog.Client(url, auth=AUTH, era="modern", transport=network, retry=once) as client:
        with contextlib.suppress(memlog.TransientError):
            await call(client)
    return seen[0]


SUBJECTS: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Subject]]] = {
    "raw httpx2": functools.partial(open_raw, httpx2),
    "raw httpx": functools.partial(open_raw, httpx),
    "memlog": open_memlog,
    "official": open_official,
}


# --- one turn --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What one subject did in one round, in milliseconds."""

    one: float
    """The median call, one at a time."""

    many: float
    """All calls at 32 at a time, divided by their number."""

    many_p99: float
    page: float
    """The median page."""


async def take_turn(subject: Subject, calls: int, pages: int) -> Turn:
    # One at a time before many: the connections that many leave would slow down a pool that looks through them.
    await _timed(subject.append, 5, 1)
    ones = await _timed(subject.append, calls, 1)
    read = await _timed(subject.page, pages, 1)
    await _timed(subject.append, AT_A_TIME * 2, AT_A_TIME)
    begun = time.perf_counter()
    many = await _timed(subject.append, calls * 4, AT_A_TIME)
    took = (time.perf_counter() - begun) * 1e3
    return Turn(
        one=statistics.median(ones),
        many=took / len(many),
        many_p99=sorted(many)[len(many) * 99 // 100],
        page=statistics.median(read),
    )


async def _timed(call: Callable[[], Awaitable[object]], calls: int, at_a_time: int) -> list[float]:
    """What each of so many calls took."""
    took: list[float] = []
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            begun = time.perf_counter()
            await call()
            took.append((time.perf_counter() - begun) * 1e3)

    gc.collect()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_a_time):
            group.create_task(work())
    return took


# --- the table -------------------------------------------------------------------------------------------------------

TARGETS = (
    ("one", "raw httpx2", 1.25),
    ("many", "raw httpx2", 1.25),
    ("many_p99", "official", 1.0),
    ("page", "official", 0.2),
)
TITLES = {"one": "1 at a time", "many": "32 at a time", "many_p99": "p99 at 32", "page": "a page"}


def ratio(results: dict[str, list[Turn]], name: str, base: str, column: str) -> tuple[float, float, float]:
    """The median of the rounds' own ratios, and the quarter of them to either side."""
    pairs = zip(results[name], results[base], strict=True)
    ratios = sorted(getattr(own, column) / getattr(other, column) for own, other in pairs)
    quarter = len(ratios) // 4
    return statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]


def report(results: dict[str, list[Turn]]) -> Iterator[str]:
    """Milliseconds, and in brackets the ratio to `raw httpx2`: medians over the rounds."""
    yield f"{'ms (x raw httpx2)':18}" + "".join(f"{title:>20}" for title in TITLES.values())
    for name, turns in results.items():
        cells = ""
        for field in fields(Turn):
            middle = statistics.median(getattr(turn, field.name) for turn in turns)
            compared, *_ = ratio(results, name, "raw httpx2", field.name)
            cells += f"{middle:.2f} ({compared:.2f})".rjust(20)
        yield f"{name:18}{cells}"
    yield ""
    for column, base, target in TARGETS:
        middle, low, high = ratio(results, "memlog", base, column)
        verdict = "met" if middle <= target else "NOT met"
        yield (
            f"target, {TITLES[column]}: memlog at most {target:g} x {base}: {middle:.2f} "
            f"(half of the rounds {low:.2f} to {high:.2f}), {verdict}"
        )


@contextlib.contextmanager
def server() -> Iterator[str]:
    user, password = AUTH
    command = [sys.executable, "-m", "server_reference", "--site", f"{user}:{password}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+/mcp", process.stdout.readline())
            if not found:
                raise SystemExit("the reference server did not say where it is")
            yield found.group()
        finally:
            process.terminate()


async def measure(url: str, rounds: int, calls: int, pages: int) -> dict[str, list[Turn]]:
    async with memlog.Client(url, auth=AUTH) as client:
        for _ in range(PAGE_ITEMS // 250):
            await client.append_memory(PAGE, [PAGE_ITEM] * 250)
    results: dict[str, list[Turn]] = {name: [] for name in SUBJECTS}
    for number in range(rounds):
        order = list(SUBJECTS)
        shift = number % len(order)
        for name in order[shift:] + order[:shift]:
            async with SUBJECTS[name](url) as subject:
                results[name].append(await take_turn(subject, calls, pages))
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns of every subject (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, not how fast")
    options = parser.parse_args(arguments)
    rounds, calls, pages = (1, 10, 1) if options.quick else (options.rounds, 200, 20)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("httpx2", "httpx", "mcp"))
    print(f"{rounds} round(s), {os.cpu_count()} processors, Python {sys.version.split()[0]}, {libraries}")
    print(f"an item is {len(json.dumps(ITEM)):,} bytes", flush=True)
    # What the libraries brought is there for good: looking through it again and again would be a part of every figure.
    gc.freeze()
    with server() as url:
        results = asyncio.run(measure(url, rounds, calls, pages))
    print(*report(results), sep="\n")


if __name__ == "__main__":
    main()
