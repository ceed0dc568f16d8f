"""What one append costs the caller and the caller's event loop, at 10,000 appends a second.

    python -m benchmarks.append [--rounds N] [--quick] [--conversations FILE] [--directory DIR]

An asyncio program paces the appends and times every call, while a second task measures how late the loop wakes it.
All subjects take turns in every round, each with a directory of its own, so that whatever else the machine does hits
all of them; a ratio is the median of the rounds' own ratios to `bare`. Every turn ends with a count of what really is
in the file: a subject that lost something stops the benchmark.

`bare` has memlog's shape and nothing else: json.dumps, a queue, a writer thread that commits in groups to SQLite in WAL
with synchronous=FULL. No checks, no receipts, no limits, no books, no sending.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import queue
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import memlog
from memlog.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Item = dict[str, Any]
Work = list[tuple[str, Item]]

ROOT = Path(__file__).resolve().parent.parent
CONVERSATIONS = ROOT / "examples" / "data" / "conversations.jsonl"
AUTH = ("bench", "bench")
NOBODY = "http://127.0.0.1:9/mcp"  # the discard port: the connection is refused at once

RATE = 10_000
TICK_SECONDS = 0.001
BURST_SECONDS = 0.005
"""Who is behind catches up for so long before the loop gets its turn: no subject may take the loop for good."""
PROBE_SECONDS = 0.002
LANES = 32
GROUP_MAX = 512
PAGE_BYTES = 4096
CHECKPOINT_PAGES = 1000  # SQLite's default
TARGET = 3.0


# --- the subjects ----------------------------------------------------------------------------------------------------


class Subject(Protocol):
    commits: int

    def appender(self, conversation: str) -> Callable[[Item], object]:
        """The call that is timed."""

    async def close(self) -> int:
        """Let go, and return how many items are in the file."""


class Bare:
    """The baseline: queue, writer thread, group commit."""

    def __init__(self, directory: Path) -> None:
        self.commits = 0
        self._path = directory / "bare.db"
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write)
        self._writer.start()

    def appender(self, conversation: str) -> Callable[[Item], object]:
        return functools.partial(self._put, conversation)

    def _put(self, conversation: str, item: Item) -> None:
        self._queue.put((conversation, json.dumps(item).encode()))

    def _write(self) -> None:
        db = sqlite3.connect(self._path, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE pending (id INTEGER PRIMARY KEY, conversation TEXT NOT NULL, body BLOB NOT NULL)")
        running = True
        while running:
            group: list[Any] = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while group[-1] is not None and len(group) < GROUP_MAX:
                    group.append(self._queue.get_nowait())
            if group[-1] is None:
                group.pop()
                running = False
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT INTO pending (conversation, body) VALUES (?, ?)", group)
            db.execute("COMMIT")
            self.commits += 1
        db.close()

    async def close(self) -> int:
        self._queue.put(None)
        await asyncio.to_thread(self._writer.join)
        db = sqlite3.connect(self._path)
        with contextlib.closing(db):
            count: int = db.execute("SELECT count(*) FROM pending").fetchone()[0]
        return count


class Memlog:
    """memlog with a server that refuses connections: what is buffered stays, and the sender backs off."""

    def __init__(self, directory: Path, url: str = NOBODY) -> None:
        self.commits = 0
        self._log = memlog.open_log(url, auth=AUTH, buffer_dir=directory, flush_timeout=0)
        self._commit = Spool.commit
        Spool.commit = self._counted()  # type: ignore[method-assign,assignment] # one more addition for each group of rows

    def _counted(self) -> Callable[[Spool], None]:
        commit = self._commit

        def counted(spool: Spool) -> None:
            self.commits += 1
            commit(spool)

        return counted

    def appender(self, conversation: str) -> Callable[[Item], object]:
        return self._log.conversation(conversation).append

    async def close(self) -> int:
        await self._log.flush(until="stored")
        Spool.commit = self._commit  # type: ignore[method-assign] # as it was
        stored = self._log.statistics().stored_items
        await self._log.close()
        return stored


class MemlogSending(Memlog):
    """memlog with the reference server in a process of its own, so that the sender works all the time."""

    def __init__(self, directory: Path) -> None:
        user, password = AUTH
        command = [sys.executable, "-m", "server_reference", "--site", f"{user}:{password}"]
        self._server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, self._server.kill)  # also when the benchmark fails
        assert self._server.stdout is not None
        found = re.search(r"http://\S+/mcp", self._server.stdout.readline())
        if not found:
            raise SystemExit("the reference server did not say where it is")
        super().__init__(directory, found.group())

    async def close(self) -> int:
        stored = await super().close()
        self._server.terminate()
        self._server.communicate()
        return stored


class PersistQueue:
    """persist-queue: pickles and commits in the call."""

    def __init__(self, directory: Path) -> None:
        import persistqueue

        self.commits = 0
        self._queue = persistqueue.SQLiteAckQueue(str(directory), multithreading=True)

    def appender(self, conversation: str) -> Callable[[Item], object]:
        def append(item: Item) -> None:
            self._queue.put((conversation, item))

        return append

    async def close(self) -> int:
        stored: int = self._queue.size
        self.commits = stored
        self._queue.close()
        return stored


class LiteQueue:
    """litequeue: commits in the call, synchronous=NORMAL, so the last ones may be gone after a power cut."""

    def __init__(self, directory: Path) -> None:
        import litequeue  # type: ignore[import-untyped] # it has no types

        self.commits = 0
        self._queue = litequeue.LiteQueue(directory / "lite.db")

    def appender(self, conversation: str) -> Callable[[Item], object]:
        def append(item: Item) -> None:
            self._queue.put(json.dumps([conversation, item]))

        return append

    async def close(self) -> int:
        stored: int = self._queue.qsize()
        self.commits = stored
        self._queue.close()
        return stored


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "bare": Bare,
    "memlog": Memlog,
    "memlog, sending": MemlogSending,
    "persist-queue": PersistQueue,
    "litequeue": LiteQueue,
}


# --- the work --------------------------------------------------------------------------------------------------------


def flat_items() -> Work:
    """1 KB of one level: what a chat turn looks like."""
    text = "The quick agent notes what it was told, and goes on with what it was doing. " * 12

    def item(number: int) -> Item:
        return {"role": "user", "turn": number, "at": 1757000000.25 + number, "text": text[: 944 - len(str(number))]}

    return [(f"c_bench_{number % LANES:02}", item(number)) for number in range(1000)]


def nested_items() -> Work:
    """1 KB in some 70 values on five levels: what tool calls and their results look like."""

    def flight(number: int) -> Item:
        return {"number": f"HAT{100 + number}", "price": 153.5 + number, "seats": number, "direct": True}

    def call(number: int, place: int) -> Item:
        return {
            "id": f"call_{number:04}_{place}",
            "name": "search_direct_flight",
            "arguments": {"origin": "JFK", "destination": "SEA", "date": "2024-05-20", "cabins": ["main", "first"]},
            "result": {"flights": [flight(row) for row in range(2)], "next": None},
        }

    def item(number: int) -> Item:
        return {
            "role": "assistant",
            "turn": number,
            "calls": [call(number, place) for place in range(3)],
            "usage": {"tokens": {"in": 1234, "out": 56}, "seconds": 0.81},
        }

    return [(f"c_bench_{number % LANES:02}", item(number)) for number in range(1000)]


def real_items(file: Path) -> Work:
    """The conversations of a file, one JSON object a line, interleaved turn by turn."""
    turns: list[tuple[int, str, Item]] = []
    for line in file.read_bytes().splitlines():  # of bytes: in text, a U+2028 inside a string would end the line
        entry = json.loads(line)
        turns += [(turn, entry["conversation"], item) for turn, item in enumerate(entry["items"])]
    turns.sort(key=lambda entry: entry[0])
    return [(conversation, item) for _, conversation, item in turns]


# --- one turn --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What one subject did in one round."""

    rate: float
    call_p50: float
    call_p99: float
    lag_p50: float
    lag_p99: float
    cpu_per_item: float
    bytes_per_item: float
    items_per_commit: float


async def take_turn(subject: Subject | None, work: Work, seconds: float) -> Turn:
    """Append at the rate for so long. Without a subject only the loop's lag is measured."""
    appends: list[tuple[Callable[[Item], object], Item]] = []
    if subject is not None:
        appenders = {conversation: subject.appender(conversation) for conversation in {name for name, _ in work}}
        appends = [(appenders[conversation], item) for conversation, item in work]
    took: list[int] = []
    lags: list[float] = []
    gc.collect()
    written, cpu = _bytes_written(), time.process_time()
    probe = asyncio.get_running_loop().create_task(_probe(lags))
    clock = time.perf_counter_ns
    started = ended = clock()
    while (elapsed := (clock() - started) / 1e9) < seconds:
        due = int(elapsed * RATE) if appends else 0
        burst_ends = clock() + BURST_SECONDS * 1e9
        while len(took) < due and ended < burst_ends:
            append, item = appends[len(took) % len(appends)]
            begun = clock()
            append(item)
            ended = clock()
            took.append(ended - begun)
        await asyncio.sleep(TICK_SECONDS)
    probe.cancel()
    stored = await subject.close() if subject is not None else 0
    if stored != len(took):
        raise SystemExit(f"{type(subject).__name__}: {len(took)} items appended, {stored} in the file")
    count = len(took) or 1
    return Turn(
        rate=len(took) / seconds,
        call_p50=_percentile(took, 50) / 1e3,
        call_p99=_percentile(took, 99) / 1e3,
        lag_p50=_percentile(lags, 50) * 1e3,
        lag_p99=_percentile(lags, 99) * 1e3,
        cpu_per_item=(time.process_time() - cpu) / count * 1e6,
        bytes_per_item=(_bytes_written() - written) / count,
        items_per_commit=count / (subject.commits or 1) if subject is not None else 0,
    )


async def _probe(lags: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(PROBE_SECONDS)
        lags.append(time.perf_counter() - begun - PROBE_SECONDS)


def _percentile(values: list[Any], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)] if values else 0.0


def _bytes_written() -> int:
    """What this process gave to write calls so far, data of sockets not counted; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())
        return int(found.group(1)) if found else 0
    return 0


# --- the table -------------------------------------------------------------------------------------------------------


def envelope(work: Work) -> str:
    """What bytes and syncs alone would say of memlog, to be held against the figures below it."""
    sizes = [len(json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()) for _, item in work]
    body = statistics.fmean(sizes)
    row = body + 60  # id, conversation, counts, checksum, time, and SQLite's own header
    lanes = len({conversation for conversation, _ in work})
    lines = [
        f"envelope: {body:,.0f} B an item, {row:,.0f} B a row; {RATE:,} a second are {RATE * row / 1e6:.1f} MB/s;",
        f"  once in the WAL, once or more carried to the file with 2 syncs for every {CHECKPOINT_PAGES:,} pages",
    ]
    for group in (RATE * TICK_SECONDS, 100):
        # Every page that a commit touches goes to the WAL whole: the rows', the one half full before, the books', and
        # of the index by conversation one for each conversation in the group, once there are many pending.
        pages = group * row / PAGE_BYTES + 2 + min(group, lanes)
        wal = pages * (PAGE_BYTES + 24) / group
        lines.append(
            f"  commits of {group:.0f}: {RATE / group:,.0f} a second with 1 sync and {pages:.0f} pages each, "
            f"so {wal / 1e3:.1f} + {row / 1e3:.1f} KB written an item"
        )
    return "\n".join(lines)


def report(results: dict[str, list[Turn]]) -> Iterator[str]:
    """The table: medians over the rounds."""
    yield (
        f"{'':17}{'rate/s':>8}{'call p50':>10}{'p99 µs':>9}{'p50 ratio':>11}{'p99 ratio':>11}{'lag p50':>9}"
        f"{'p99 ms':>8}{'cpu µs/item':>13}{'written/item':>14}{'items/commit':>14}"
    )
    for name, turns in results.items():
        middle = Turn(*(statistics.median(getattr(turn, field.name) for turn in turns) for field in fields(Turn)))
        lag = f"{middle.lag_p50:9.2f}{middle.lag_p99:8.2f}"
        if name == "quiet loop":
            yield f"{name:66}{lag}"
            continue
        call = f"{middle.rate:8,.0f}{middle.call_p50:10.1f}{middle.call_p99:9.0f}"
        ratios = "".join(f"{ratio_to_bare(results, name, column):10.2f}x" for column in ("call_p50", "call_p99"))
        cost = f"{middle.cpu_per_item:13.0f}{middle.bytes_per_item:12,.0f} B{middle.items_per_commit:14.1f}"
        yield f"{name:17}{call}{ratios}{lag}{cost}"


def ratio_to_bare(results: dict[str, list[Turn]], name: str, column: str) -> float:
    pairs = zip(results[name], results["bare"], strict=True)
    ratios: list[float] = [getattr(own, column) / getattr(bare, column) for own, bare in pairs]
    return statistics.median(ratios)


def sync_milliseconds(directory: str | None) -> float:
    """What one small write and its sync take here: on a disk that does not really sync, the peers look better."""
    took = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(50):
            file.write(bytes(4096))
            file.flush()
            begun = time.perf_counter()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1e3


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="turns of every subject (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, not how fast")
    parser.add_argument("--conversations", type=Path, default=CONVERSATIONS, metavar="FILE", help="JSON lines")
    parser.add_argument("--directory", help="where the files go (default: the system's temporary directory)")
    parser.add_argument("--only", action="append", choices=SUBJECTS, help="only this one and bare; may be repeated")
    options = parser.parse_args(arguments)
    rounds, seconds = (1, 0.1) if options.quick else (options.rounds, 1.0)
    # The server that is away is part of the measurement, not news.
    logging.getLogger("memlog").setLevel(logging.CRITICAL)

    names: list[str] = []
    for name in SUBJECTS:
        if options.only and name not in ("bare", *options.only):
            continue
        try:
            if name in ("persist-queue", "litequeue"):
                importlib.import_module(name.replace("-", ""))
            names.append(name)
        except (ImportError, SyntaxError) as error:  # or it is written for a newer Python
            print(f"{name} is left out: {error}")
    file: Path = options.conversations
    works = {"flat": flat_items(), "nested": nested_items(), file.stem: real_items(file)}

    print(
        f"append at {RATE:,}/s for {seconds:g} s a turn, {rounds} round(s), {os.cpu_count()} processors, "
        f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}, "
        f"one sync of 4 KiB takes {sync_milliseconds(options.directory):.2f} ms"
    )
    verdicts = []
    for work_name, work in works.items():
        results: dict[str, list[Turn]] = {"quiet loop": [], **{name: [] for name in names}}
        for number in range(rounds):
            order = list(results)
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                    subject = None if name == "quiet loop" else SUBJECTS[name](Path(directory))
                    results[name].append(asyncio.run(take_turn(subject, work, seconds)))
        print(f"\n{work_name}\n{envelope(work)}")
        print(*report(results), sep="\n", flush=True)
        if "memlog" in results:
            verdicts.append((work_name, ratio_to_bare(results, "memlog", "call_p50")))
    print()
    for work_name, ratio in verdicts:
        verdict = "met" if ratio <= TARGET else "NOT met"
        print(f"target, {work_name}: memlog's call at most {TARGET:g} x bare at p50: {ratio:.2f}, {verdict}")


if __name__ == "__main__":
    main()
