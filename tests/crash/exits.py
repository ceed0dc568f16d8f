"""Ends a process that has an open log in one of the ways in which processes end.

exits.py MODE URL DIRECTORY
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from typing import Any

last_of_all: list[Any] = []
atexit.register(lambda: [work() for work in last_of_all])  # before memlog's own hooks are, so it runs after them

import memlog  # noqa: E402
import memlog.sync  # noqa: E402

MODE, URL, DIRECTORY = sys.argv[1:4]


def open_log(**settings: Any) -> memlog.MemoryLog:
    return memlog.open_log(URL, auth=("demo", "demo"), buffer_dir=DIRECTORY, **settings)


def append(log: memlog.MemoryLog, count: int = 10, first: int = 0) -> None:
    for n in range(first, first + count):
        log.conversation("c_exiting0").append({"n": n})


def plain() -> None:
    append(open_log())


def status() -> None:
    append(open_log())
    sys.exit(3)


def error() -> None:
    append(open_log())
    raise RuntimeError("the script's own")


def interrupted() -> None:
    log = open_log()
    append(log)
    # CPython forgets that it was interrupted where code is compiled afterwards, as imports of the first request do.
    while log.statistics().state == "ok":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)


def in_the_loop() -> None:
    async def main() -> None:
        async with open_log(flush_timeout=0) as log:
            append(log)
            sys.exit(5)

    asyncio.run(main())


def own_error() -> None:
    async def main() -> None:
        async with open_log(flush_timeout=0) as log:
            append(log)
            raise LookupError("the user's own")

    try:
        asyncio.run(main())
    except LookupError:  # itself, and not in a group
        sys.exit(7)


def turns() -> None:
    log = open_log()
    chat = log.conversation("c_exiting0")

    async def turn(n: int) -> None:
        receipt = chat.append({"n": n})
        await receipt.stored(20)
        if n % 2:
            await receipt.acknowledged(20)
        else:
            chat.append({"n": n + 0.5})
            task = asyncio.create_task(log.flush())  # left behind by its loop
            await asyncio.sleep(0)
            del task

    for n in range(6):
        asyncio.run(turn(n))


def hard() -> None:
    """No hook runs; what was reported as stored is."""
    log = open_log()
    append(log)
    log.sync.flush(20, until="stored")
    os._exit(4)


def terminated() -> None:
    """By the signal's own doing, as without memlog."""
    log = open_log()
    append(log)
    log.sync.flush(20, until="stored")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


def interrupted_close() -> None:
    """Somebody does not want to wait for the flush at the end."""
    with open_log(flush_timeout=60).sync as log:
        append(log._log)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()


def outliving() -> None:
    """A thread that appends when the main one has ended already, and one that ends by an exit of its own."""
    log = open_log()
    main = threading.current_thread()

    def late() -> None:
        main.join()
        append(log, 5, 5)

    def leave() -> None:
        append(log, 5)
        sys.exit(9)  # of the thread only

    for work in (leave, late):
        threading.Thread(target=work).start()


def loop_at_exit() -> None:
    """A loop of its own in an exit hook, with a log in it, when every hook of memlog has run."""

    async def work() -> None:
        async with open_log() as log:
            append(log)

    last_of_all.append(lambda: asyncio.run(work()))


def deleted() -> None:
    """An object that appends when the interpreter tears it down."""

    class Mourner:
        def __init__(self, log: memlog.MemoryLog) -> None:
            self.log = log
            self.append = append

        def __del__(self) -> None:
            self.append(self.log, 5, 5)

    log = open_log()
    append(log, 5)
    globals()["mourner"] = Mourner(log)


def at_exit() -> None:
    log = open_log()
    append(log, 5)
    atexit.register(append, log, 5, 5)


def after_all() -> None:
    """Appended when every hook of memlog has run."""
    log = open_log()
    append(log, 5)
    last_of_all.append(lambda: append(log, 5, 5))


def opened_after_all() -> None:
    """A log that is opened, used and closed when every hook of memlog has run."""

    def work() -> None:
        with memlog.sync.open_log(URL, auth=("demo", "demo"), buffer_dir=DIRECTORY) as log:
            for n in range(10):
                log.conversation("c_exiting0").append({"n": n}).stored()

    last_of_all.append(work)


def without_threads() -> None:
    """As from Python 3.12 on: no thread can be started at the end of the interpreter."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def work() -> None:
        threading.Thread.start = refuse  # type: ignore[method-assign]
        with memlog.sync.open_log(URL, auth=("demo", "demo"), buffer_dir=DIRECTORY) as log:
            for n in range(10):
                log.conversation("c_exiting0").append({"n": n}).stored()

    atexit.register(work)


def logging_is_gone() -> None:
    """Other libraries' hooks have run: executors are shut down, handlers and standard streams closed."""
    import logging
    from concurrent.futures import thread

    log = open_log()
    append(log, 5)

    def work() -> None:
        thread._python_exit()
        logging.shutdown()
        append(log, 5, 5)

    atexit.register(work)


def closed_at_exit() -> None:
    """What scripts do: they register the end of the log beside its beginning."""
    log = open_log(flush_timeout=0.2)
    atexit.register(log.sync.close)
    append(log)


def signalled() -> None:
    """Handlers that append, while the main thread appends, and that end the process in the middle of it."""
    log = open_log()
    count = 0

    def handle(number: int, _: Any) -> None:
        nonlocal count
        append(log, 1, count)
        count += 1
        if number == signal.SIGTERM:
            sys.exit(6)

    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    other = log.conversation("c_theother")
    for sent in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        threading.Timer(0.02, os.kill, (os.getpid(), sent)).start()
        before = count
        while count == before:
            other.append({"busy": True})
            time.sleep(0.001)


def threads() -> None:
    log = open_log()
    for number in range(4):
        threading.Thread(target=append, args=(log, 50, 50 * number), daemon=True).start()
    time.sleep(0.05)


def waiting() -> None:
    """Threads that wait for something that will not come: the end must not hang, nor they make noise."""
    log = open_log()
    receipt = log.conversation("c_exiting0").append({"n": 0})

    def wait() -> None:
        asyncio.run(receipt.acknowledged())

    for _ in range(3):
        threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)


def untouched() -> None:
    open_log()


globals()[MODE]()
