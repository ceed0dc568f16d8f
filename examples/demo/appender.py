"""The agent's process, and the only one that uses memlog. It may be killed at any moment.

It appends the script at its pace and never waits for an acknowledgement. What it has to say it prints, one JSON object
a line, at once: a report every 50 ms, and where it stands. Every `stored()` is written to the record as
``conversation position``, without a buffer of its own, so that the record survives the process.

With ``--resume`` it comes after a process that was killed: it drains what that one left on the disk, reads how far each
conversation got, waits for a line on its standard input, appends the rest, drains, and writes what it replays to
a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.abc

import memlog

from .judge import how_far
from .script import Script, read_source, repeat

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_EVERY_S = 0.05
DRAIN_S = 60.0


class GivenUpError(Exception):
    """What was appended does not get to the server; the message says why."""


@dataclass(slots=True)
class Books:
    """Our own, kept from the receipts alone.

    `record` is the record's file descriptor, `append_ns` the time that each append took since the last report.
    """

    record: int
    doing: str = "appending"
    appended: int = 0
    stored: int = 0
    acknowledged: int = 0
    append_ns: list[int] = field(default_factory=list)


def main() -> None:
    options = _options()
    script = repeat(read_source(options.file), rounds=options.rounds, pace=options.pace)
    books = Books(os.open(options.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    try:
        anyio.run(_run, options, script, books)
    except* GivenUpError as errors:
        sys.exit(f"the appender gives up: {_first(errors)}")


async def _run(options: argparse.Namespace, script: Script, books: Books) -> None:
    async with memlog.open_log(options.url, auth=("demo", "demo"), buffer_dir=options.buffer) as log:
        position = dict.fromkeys(script.conversations, 0)
        async with anyio.create_task_group() as reporting:
            reporting.start_soon(_report, log, books)
            if options.resume:
                books.doing = "draining"
                await _drain(log)
                books.doing = "reading"
                position = await _positions(log, script)
                _say("resumed", positions=position)
                await anyio.to_thread.run_sync(sys.stdin.readline)
            books.doing = "appending"
            async with anyio.create_task_group() as receipts:
                await _append(log, script, position, books, receipts)
                _say("appended")
                books.doing = "draining"
                await _drain(log)
            if options.resume:
                books.doing = "replaying"
                await _write_replay(log, script, options.replayed)
            reporting.cancel_scope.cancel()
        _say("done", duplicates=await _duplicates(log), **_figures(log, books))


async def _append(
    log: memlog.MemoryLog,
    script: Script,
    position: Mapping[str, int],
    books: Books,
    receipts: anyio.abc.TaskGroup,
) -> None:
    start = time.monotonic()
    for conversation, index in script.turns():
        if index < position[conversation]:
            continue
        # An agent that is late does not skip its turn: it goes on at once.
        await anyio.sleep(max(0.0, start + books.appended / script.pace - time.monotonic()))
        chat = log.conversation(conversation)
        before = time.perf_counter_ns()
        receipt = chat.append(script.conversations[conversation][index])
        books.append_ns.append(time.perf_counter_ns() - before)
        books.appended += 1
        receipts.start_soon(_follow, receipt, f"{conversation} {index}\n".encode(), books)


async def _follow(receipt: memlog.Receipt, line: bytes, books: Books) -> None:
    await receipt.stored()
    os.write(books.record, line)
    books.stored += 1
    await receipt.acknowledged()
    books.acknowledged += 1


async def _drain(log: memlog.MemoryLog) -> None:
    report = await log.flush(timeout=DRAIN_S)
    if not report.complete:
        reason = f"{report.state}: {report.reason}"
        raise GivenUpError(f"{report.pending:,} items still pending after {DRAIN_S:.0f} s ({reason})")
    if report.refused:
        raise GivenUpError(f"{report.refused:,} items were refused")


async def _positions(log: memlog.MemoryLog, script: Script) -> dict[str, int]:
    """How far each conversation got, as any program would find out: by reading it."""
    duplicates = await _duplicates(log)
    position = {}
    for conversation in script.conversations:
        length = 0
        async for _ in log.conversation(conversation).replay():
            length += 1
        position[conversation] = how_far(length, duplicates.get(conversation, ()))
    return position


async def _write_replay(log: memlog.MemoryLog, script: Script, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for conversation in script.conversations:
            async for item in log.conversation(conversation).replay():
                file.write(json.dumps([conversation, item.seq, item.payload], ensure_ascii=False) + "\n")


async def _duplicates(log: memlog.MemoryLog) -> dict[str, list[tuple[int, int]]]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for duplicate in await log.duplicates():
        ranges.setdefault(duplicate.conversation_id, []).append((duplicate.first_seq, duplicate.last_seq))
    return ranges


async def _report(log: memlog.MemoryLog, books: Books) -> None:
    while True:
        times, books.append_ns = books.append_ns, []
        _say("report", append_ns=times, **_figures(log, books))
        await anyio.sleep(REPORT_EVERY_S)


def _figures(log: memlog.MemoryLog, books: Books) -> dict[str, object]:
    statistics = log.statistics()
    return {
        "at": time.monotonic(),
        "appended": books.appended,
        "stored": books.stored,
        "acknowledged": books.acknowledged,
        "pending": statistics.pending_items,
        "in_flight": statistics.requests_in_flight,
        "requests": statistics.requests_sent,
        "state": statistics.state,
        "doing": books.doing,
    }


def _say(event: str, **data: object) -> None:
    print(json.dumps({"event": event, **data}), flush=True)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="appends a second")
    parser.add_argument("--url", required=True)
    parser.add_argument("--buffer", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--replayed", type=Path, help="with --resume: where to write what was replayed")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
