"""Talks in several conversations until it is killed, and says of each item, unbuffered, when it was stored.

    talker.py URL DIRECTORY RUN [KILL_POINT COUNT]
    talker.py serve

Lines on standard output: `CONVERSATION NUMBER`, those of a batch written with one system call after `stored()`
returned. With a kill point (`before` or `after` one of commit, ack, refuse, requeue, send, read) the process kills
itself when it gets there for the COUNT-th time.

`serve` imports everything and waits: for each line of standard input, a JSON list of a file for standard output, one
for standard error and the arguments above, it forks such a process, which opens a log of its own. It answers with the
process's id, and with its exit code when that has ended; the id stays its own until the next line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import anyio._backends._asyncio  # noqa: F401 - imported late otherwise, by each child that `serve` forks
import httpcore._async.http11  # noqa: F401
import httpx  # noqa: F401

import memlog
from memlog.client import Client
from memlog.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable

CONVERSATIONS = [f"c_crash{n:03}" for n in range(5)]
REFUSED = [f"c_refused{n}" for n in range(2)]


class KillPoint:
    """Where this process shall end, and how often it has been there."""

    name = ""
    count = 0

    @classmethod
    def at(cls, name: str) -> None:
        if name == cls.name:
            cls.count -= 1
            if cls.count == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def guard(owner: Any, name: str, point: Callable[..., str]) -> None:
    """Make a method pass its kill points; `point(*arguments)` names them."""
    real = getattr(owner, name)

    def guarded(*arguments: Any, **options: Any) -> Any:
        what = point(*arguments)
        KillPoint.at(f"before {what}")
        result = real(*arguments, **options)
        KillPoint.at(f"after {what}")
        return result

    async def guarded_async(*arguments: Any, **options: Any) -> Any:
        what = point(*arguments)
        KillPoint.at(f"before {what}")
        result = await real(*arguments, **options)
        KillPoint.at(f"after {what}")
        return result

    setattr(owner, name, guarded_async if asyncio.iscoroutinefunction(real) else guarded)


def commit_of(spool: Spool) -> str:
    if not spool._db.in_transaction:
        return "nothing"
    acknowledged, refused = spool._db.execute("SELECT acknowledged_batches, refused_batches FROM books").fetchone()
    if spool.books.acknowledged_batches > acknowledged:
        return "ack"
    if spool.books.refused_batches != refused:
        return "refuse" if spool.books.refused_batches > refused else "requeue"
    return "commit"


guard(Spool, "commit", commit_of)
guard(Client, "append_encoded", lambda *_: "send")
guard(Client, "replay_memory", lambda *_: "read")


async def reached(chat: memlog.Conversation, *, whole: bool) -> int:
    """Where an earlier process got to: what it stored is on the server, or in the files that this one holds."""
    while True:
        try:
            items = [item async for item in chat.replay()] if whole else await chat.recall(100)
        except memlog.MemlogError:
            await asyncio.sleep(0.02)
        else:
            return max((item.payload["n"] for item in items), default=-1) + 1


async def talk(log: memlog.MemoryLog, name: str, run: int) -> None:
    chat = log.conversation(name)
    number = await reached(chat, whole=run % 10 == 0)
    while True:
        size = 1 + number % 3
        batch: list[dict[str, object]] = [
            {"n": n, "i": i, "of": size, "run": run, "text": "é" * (n % 50)}
            for i, n in enumerate(range(number, number + size))
        ]
        receipt = chat.append(batch[0]) if size == 1 else chat.extend(batch)
        await receipt.stored()
        os.write(1, "".join(f"{name} {item['n']}\n" for item in batch).encode())
        number += size
        await asyncio.sleep(0.002 * (number % 4))


async def refuse_and_requeue(log: memlog.MemoryLog) -> None:
    """What the server refuses becomes a dead letter, and is sent again."""
    for name in REFUSED:
        receipt = log.conversation(name).append({"n": 0, "i": 0, "of": 1, "run": 0, "text": ""})
        await receipt.stored()
        os.write(1, f"{name} 0\n".encode())
        with contextlib.suppress(memlog.PermanentError):
            await receipt.acknowledged()
    for letter in await log.dead_letters():
        await log.requeue(letter)


async def main(url: str, directory: str, run: str, point: str = "", count: str = "0") -> None:
    KillPoint.name, KillPoint.count = point, int(count)
    retry = memlog.RetryPolicy(delay_min=0.005, delay_max=0.05, blocked_delay=0.05)
    log = memlog.open_log(url, auth=("demo", "demo"), buffer_dir=directory, retry=retry, timeout=2)
    if point.endswith(("refuse", "requeue")):
        await refuse_and_requeue(log)
    await asyncio.gather(*(talk(log, name, int(run)) for name in CONVERSATIONS))


def serve() -> None:
    pid = 0
    for line in sys.stdin:
        if pid:
            os.waitpid(pid, 0)
        out, err, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
            asyncio.run(main(*arguments))
            return
        os.write(0, f"{pid}\n".encode())
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        os.write(0, f"{code}\n".encode())


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        asyncio.run(main(*sys.argv[1:]))
