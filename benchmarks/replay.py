"""What reading a conversation back costs, beside a loop over raw pages and beside the official client's loop.

    python -m benchmarks.replay [--rounds N] [--quick]

The reference server runs in a process of its own; the clients are in this one and take turns in every round, so that
whatever else the machine does hits all of them. A ratio is the median of the rounds' own ratios.

A turn is a whole conversation, read over a connection that is made beforehand. `raw httpx2` posts the body that memlog
sends, for pages as large as the contract allows, and parses each answer with `pydantic_core.from_json`; it verifies
nothing. `official` calls the tool with the official client, page by page. `memlog` is `Client.replay`, `memlog, log`
is `Conversation.replay`, which crosses threads and fetches one page ahead.
The first item is timed for `memlog` in round trips; one is a page of as many items, posted and parsed by `raw`.
The processor time is this process's own, for all its threads: what is left of a turn is waiting for the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import httpx2
import mcp
import pydantic_core
from mcp.client.streamable_http import streamable_http_client

import memlog
from benchmarks.client import AUTH, TEXT, recorded, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PAGE_ITEMS = 1000
SIZES = {"0.2 KiB": (200, 10_000), "1 KiB": (1024, 5_000), "20 KiB": (20 * 1024, 500)}
QUICK_DIVISOR = 10
FIRST = "first"
CPU = "processor time of "


def conversation(size: str) -> str:
    return f"c_bench_{size.replace(' ', '_').replace('.', '_')}"


# --- the subjects ----------------------------------------------------------------------------------------------------


class Subject(Protocol):
    async def read(self, conversation_id: str) -> int:
        """Read all of it; how many items it was."""


class Raw:
    """Pages of 1,000, posted and parsed, and nothing else."""

    def __init__(self, http: Any, request: Any) -> None:
        self._http = http
        self._url, self._headers, self._body = str(request.url), request.headers.raw, request.content

    async def page(self, conversation_id: str, offset: int, limit: int) -> list[Any]:
        old = b'"conversation_id":"c_bench_none","offset":0,"limit":1000'
        assert old in self._body
        new = b'"conversation_id":"%b","offset":%d,"limit":%d' % (conversation_id.encode(), offset, limit)
        body = self._body.replace(old, new)
        headers = [(name, value) for name, value in self._headers if name.lower() != b"content-length"]
        answer = await self._http.post(self._url, content=body, headers=headers)
        items: list[Any] = pydantic_core.from_json(answer.content)["result"]["structuredContent"]["items"]
        return items

    async def read(self, conversation_id: str) -> int:
        count = 0
        while True:
            page = await self.page(conversation_id, count, PAGE_ITEMS)
            for _ in page:
                count += 1
            if len(page) < PAGE_ITEMS:
                return count


class Official:
    def __init__(self, client: Any) -> None:
        self._client = client

    async def read(self, conversation_id: str) -> int:
        count = 0
        while True:
            arguments = {"conversation_id": conversation_id, "offset": count, "limit": PAGE_ITEMS}
            result = await self._client.call_tool("replay_memory", arguments)
            page = result.structured_content["items"]
            for _ in page:
                count += 1
            if len(page) < PAGE_ITEMS:
                return count


class Memlog:
    def __init__(self, client: memlog.Client) -> None:
        self._client = client

    def replay(self, conversation_id: str) -> memlog.Replay:
        return self._client.replay(conversation_id)

    async def read(self, conversation_id: str) -> int:
        count = 0
        async for _ in self.replay(conversation_id):
            count += 1
        return count


class MemlogLog(Memlog):
    def __init__(self, log: memlog.MemoryLog) -> None:
        self._log = log

    def replay(self, conversation_id: str) -> memlog.Replay:
        return self._log.conversation(conversation_id).replay()


@contextlib.asynccontextmanager
async def subjects(url: str) -> AsyncIterator[dict[str, Any]]:
    """Each with a connection of its own, kept for the whole run."""
    request = await recorded(lambda client: client.replay_memory("c_bench_none", 0, PAGE_ITEMS), url)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient())
        official_http = await stack.enter_async_context(httpx2.AsyncClient(auth=AUTH))
        transport = streamable_http_client(url, http_client=official_http)
        official = await stack.enter_async_context(mcp.Client(transport, mode="auto"))
        client = await stack.enter_async_context(memlog.Client(url, auth=AUTH))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        log = await stack.enter_async_context(memlog.open_log(url, auth=AUTH, buffer_dir=directory))
        yield {
            "raw httpx2": Raw(http, request),
            "memlog": Memlog(client),
            "memlog, log": MemlogLog(log),
            "official": Official(official),
        }


# --- one turn --------------------------------------------------------------------------------------------------------

Results = dict[str, dict[str, list[float]]]
"""By size, by subject: items a second in each round; under CPU + subject its microseconds an item; and under FIRST the
first item in round trips."""


async def measure(url: str, rounds: int, sizes: dict[str, tuple[int, int]]) -> Results:
    async with memlog.Client(url, auth=AUTH) as client:
        for size, (length, count) in sizes.items():
            item = {"role": "user", "turn": 17, "text": (TEXT * 300)[: length - 36]}
            batch = min(250, 1024 * 1024 // (length + 64))
            for start in range(0, count, batch):
                await client.append_memory(conversation(size), [item] * min(batch, count - start))
    async with subjects(url) as who:
        columns = [*who, *(CPU + name for name in who), FIRST]
        results: Results = {size: {name: [] for name in columns} for size in sizes}
        for number in range(rounds + 1):
            order = [*who]
            shift = number % len(order)
            for size, (_, count) in sizes.items():
                taken = {}
                for name in order[shift:] + order[:shift]:
                    gc.collect()
                    begun, worked = time.perf_counter(), time.process_time()
                    read = await who[name].read(conversation(size))
                    taken[name] = count / (time.perf_counter() - begun)
                    taken[CPU + name] = (time.process_time() - worked) / count * 1e6
                    if read != count:
                        raise SystemExit(f"{name} read {read} items of {count}")
                first = await first_item(who, size)
                if number:  # the first round connects and warms up
                    results[size][FIRST].append(first)
                    for name, rate in taken.items():
                        results[size][name].append(rate)
        return results


async def first_item(who: dict[str, Any], size: str) -> float:
    """What the first item takes, in round trips that bring as large an answer."""
    begun = time.perf_counter()
    await who["raw httpx2"].page(conversation(size), 0, 128)
    middle = time.perf_counter()
    replay = who["memlog"].replay(conversation(size))
    await anext(replay)
    return (time.perf_counter() - middle) / (middle - begun)


# --- the table -------------------------------------------------------------------------------------------------------

TARGETS = (("raw httpx2", 0.8), ("official", 5.0))
FIRST_TARGET = 1.5


def ratio(rates: dict[str, list[float]], name: str, base: str) -> float:
    return statistics.median(own / other for own, other in zip(rates[name], rates[base], strict=True))


def report(results: Results) -> Iterator[str]:
    """Items a second, and in brackets the ratio to `raw httpx2`: medians over the rounds."""
    yield f"{'items/s (x raw)':18}" + "".join(f"{size:>20}" for size in results)
    for name in ("raw httpx2", "memlog", "memlog, log", "official"):
        cells = ""
        for rates in results.values():
            rate, compared = statistics.median(rates[name]), ratio(rates, name, "raw httpx2")
            cells += f"{rate:,.0f} ({compared:.2f})".rjust(20)
        yield f"{name:18}{cells}"
    firsts = "".join(f"{statistics.median(rates[FIRST]):.2f}".rjust(20) for rates in results.values())
    yield f"{'first item (trips)':18}{firsts}"
    yield ""
    yield "own processor time, us an item"
    for name in ("raw httpx2", "memlog", "memlog, log", "official"):
        cells = "".join(f"{statistics.median(rates[CPU + name]):.1f}".rjust(20) for rates in results.values())
        yield f"  {name:16}{cells}"
    yield ""
    for size, rates in results.items():
        for base, target in TARGETS:
            middle = ratio(rates, "memlog", base)
            verdict = "met" if middle >= target else "NOT met"
            bound = f" (raw httpx2: {ratio(rates, 'raw httpx2', base):.2f})" if base != "raw httpx2" else ""
            yield f"target, {size}: memlog at least {target:g} x {base}: {middle:.2f}{bound}, {verdict}"
        first = statistics.median(rates[FIRST])
        verdict = "met" if first <= FIRST_TARGET else "NOT met"
        yield f"target, {size}: the first item within {FIRST_TARGET:g} round trips: {first:.2f}, {verdict}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of every subject (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, not how fast")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    divisor = QUICK_DIVISOR if options.quick else 1
    sizes = {name: (length, count // divisor) for name, (length, count) in SIZES.items()}
    libraries = ", ".join(f"{name} {version(name)}" for name in ("httpx2", "httpx", "mcp", "pydantic_core"))
    print(f"{rounds} round(s), {os.cpu_count()} processors, Python {sys.version.split()[0]}, {libraries}", flush=True)
    gc.freeze()
    with server() as url:
        results = asyncio.run(measure(url, rounds, sizes))
    print(*report(results), sep="\n")


if __name__ == "__main__":
    main()
