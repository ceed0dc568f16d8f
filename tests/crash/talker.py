"""Talks in several conversations until it is killed, and says of each item, unbuffered, when it was stored.

    talker.py URL DIRECTORY RUN [KILL_POINT COUNT]

Lines on standard output: `CONVERSATION NUMBER`, written with one system call after `stored()` returned. With a kill
point (`before` or `after` one of commit, ack, send, read, tidy) the process kills itself when it gets there for the
COUNT-th time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import memlog
from memlog.client import Client
from memlog.spool import Spool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

URL, DIRECTORY, RUN = sys.argv[1:4]
POINT, COUNT = (sys.argv[4], int(sys.argv[5])) if len(sys.argv) > 4 else ("", 0)
CONVERSATIONS = [f"c_crash{n:03}" for n in range(5)]

reached = 0


def at(point: str) -> None:
    global reached
    if point == POINT:
        reached += 1
        if reached == COUNT:
            os.kill(os.getpid(), signal.SIGKILL)


def guard(owner: Any, name: str, point: Callable[..., str]) -> None:
    """Make a method pass its kill points; `point(*arguments)` names them."""
    real = getattr(owner, name)

    def guarded(*arguments: Any, **options: Any) -> Any:
        what = point(*arguments)
        at(f"before {what}")
        result = real(*arguments, **options)
        at(f"after {what}")
        return result

    async def guarded_async(*arguments: Any, **options: Any) -> Any:
        what = point(*arguments)
        at(f"before {what}")
        result = await real(*arguments, **options)
        at(f"after {what}")
        return result

    setattr(owner, name, guarded_async if asyncio.iscoroutinefunction(real) else guarded)


def commit_of(spool: Spool) -> str:
    if not spool._db.in_transaction:
        return "nothing"
    kept = spool._db.execute("SELECT acknowledged_batches FROM books").fetchone()[0]
    return "ack" if spool.books.acknowledged_batches > kept else "commit"


guard(Spool, "commit", commit_of)
guard(Spool, "tidy", lambda *_: "tidy")
guard(Client, "append_encoded", lambda *_: "send")
guard(Client, "replay_memory", lambda *_: "read")


async def everything(chat: memlog.Conversation) -> AsyncIterator[dict[str, Any]]:
    while True:
        try:
            async for item in chat.replay():
                yield item.payload
        except memlog.MemlogError:
            await asyncio.sleep(0.02)
        else:
            return


async def talk(log: memlog.MemoryLog, name: str) -> None:
    chat = log.conversation(name)
    # Where an earlier process got to: what it stored is on the server, or in the files that this one holds.
    number = max([item["n"] async for item in everything(chat)], default=-1) + 1
    while True:
        item: dict[str, object] = {"n": number, "run": RUN, "text": "é" * (number % 50)}
        receipt = chat.append(item) if number % 3 else chat.extend([item])
        await receipt.stored()
        os.write(1, f"{name} {number}\n".encode())
        number += 1
        await asyncio.sleep(0.002 * (number % 4))


async def main() -> None:
    retry = memlog.RetryPolicy(delay_min=0.005, delay_max=0.05, blocked_delay=0.05)
    log = memlog.open_log(URL, auth=("demo", "demo"), buffer_dir=DIRECTORY, retry=retry, timeout=2)
    await asyncio.gather(*(talk(log, name) for name in CONVERSATIONS))


asyncio.run(main())
