"""Forks with an open log, in the ways that servers, task queues and scripts do.

    forks.py MODE URL DIRECTORY

Prints one JSON line at the end of the parent.
"""

from __future__ import annotations

import json
import logging  # noqa: F401 - its hooks shall run after the one below, and not hold its locks meanwhile
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

hook_seconds = [0.0]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: time.sleep(hook_seconds[0]))  # before memlog's are, so it runs after them

import memlog.sync  # noqa: E402
from memlog import buffer as buffer_module  # noqa: E402
from memlog import engine  # noqa: E402
from memlog.core import Core  # noqa: E402
from memlog.spool import Spool  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12+

MODE, URL, DIRECTORY = sys.argv[1:4]


def open_log(**settings: Any) -> Any:
    return memlog.sync.open_log(URL, auth=("demo", "demo"), buffer_dir=DIRECTORY, flush_timeout=0, **settings)


def spool_of(log: Any) -> str:
    return str(log._log._core.buffer.spool_path)


def fork(work: Any) -> int:
    """The child runs ``work`` and ends with what it returns, without running what the parent's exit would run."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        code = work() or 0
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr, flush=True)
    os._exit(code)


def wait(*pids: int) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def basic() -> dict[str, Any]:
    """Parent and two children append to conversations of their own and to a shared one."""
    log = open_log()
    for n in range(3):
        log.conversation("c_parent00").append({"before": n})
    before = spool_of(log)

    def child(name: str) -> int:
        chat = log.conversation(f"c_{name}")
        first = chat.append({name: 0})
        first.stored(20)
        assert spool_of(log) != before
        chat.append({name: 1})
        assert log.flush(20).complete
        assert log.statistics().stored_items == 2
        log.close()
        return 0

    codes = wait(fork(lambda: child("child001")), fork(lambda: child("child002")))
    for n in range(2):
        log.conversation("c_parent00").append({"after": n})
    complete = log.flush(20).complete
    same = spool_of(log) == before
    log.close()
    return {"codes": codes, "complete": complete, "same spool": same}


def exits() -> dict[str, Any]:
    """Children that end through the interpreter's own exit, with and without having used the log."""
    log = open_log()
    receipts = [log.conversation("c_parent00").append({"n": n}) for n in range(50)]
    receipts[-1].stored(20)
    pids = []
    for number in range(5):
        pid = os.fork()
        if pid == 0:
            if number % 2:
                log.conversation(f"c_child{number:03}").append({"child": number})
            if number == 4:
                sys.excepthook = lambda *_: None
                raise LookupError("the child's own")
            sys.exit(number)  # runs atexit hooks and tears modules down
        pids.append(pid)
    codes = wait(*pids)
    receipts = [log.conversation("c_parent00").append({"n": n}) for n in range(50, 60)]
    receipts[-1].stored(20)
    return {"codes": codes, "spool": spool_of(log)}


def orphan() -> dict[str, Any]:
    """The parent is killed while its child lives on, which must keep neither lock nor file, then exits normally."""
    log = open_log()
    for n in range(30):
        log.conversation("c_parent00").append({"n": n}).stored(20)
    reading, writing = os.pipe()
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.write(tell, b"x")
        os.read(reading, 1)  # until its parent is dead
        sys.exit(0)
    os.read(ready, 1)
    print(json.dumps({"child": pid, "spool": spool_of(log)}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # which is the end of its pipe, too
    return {}


def closed() -> dict[str, Any]:
    """A log that was closed long ago must not close somebody else's descriptors in a child."""
    log = open_log()
    log.conversation("c_parent00").append({"n": 0}).stored(20)
    log.close()
    names = [os.path.join(DIRECTORY, f"other{n}") for n in range(20)]
    descriptors = [os.open(name, os.O_CREAT | os.O_RDWR) for name in names]

    def child() -> int:
        for descriptor in descriptors:
            os.fstat(descriptor)
        return 0

    return {"codes": wait(fork(child)), "kept": log._log._core is not None}


def threads() -> dict[str, Any]:
    """Several threads fork at once while others append: nobody waits for ever, nothing is lost."""
    log = open_log()
    stop = threading.Event()
    counts = [0] * 3
    codes: list[int] = []

    def append(which: int) -> None:
        while not stop.is_set():
            log.conversation(f"c_thread{which:02}").append({"n": counts[which]})
            counts[which] += 1
            time.sleep(0.001)

    def forking() -> None:
        for _ in range(15):
            codes.extend(wait(fork(lambda: 0)))

    appending = [threading.Thread(target=append, args=(n,)) for n in range(3)]
    forkers = [threading.Thread(target=forking) for _ in range(4)]
    for thread in [*appending, *forkers]:
        thread.start()
    for thread in forkers:
        thread.join(60)
    stop.set()
    for thread in appending:
        thread.join(20)
    alive = [thread.name for thread in [*appending, *forkers] if thread.is_alive()]
    complete = log.flush(20).complete
    log.close()
    return {"codes": codes, "alive": alive, "complete": complete, "counts": counts}


def stuck() -> dict[str, Any]:
    """The disk does not answer while somebody forks: the fork goes on after its bound, and so does the writer."""
    buffer_module._FORK_WAIT_SECONDS = 0.2
    log = open_log()
    busy, go = threading.Event(), threading.Event()
    real = Spool.commit

    def commit(spool: Spool) -> None:
        if spool._db.in_transaction and not busy.is_set():
            busy.set()
            go.wait(20)
        real(spool)

    Spool.commit = commit  # type: ignore[method-assign]
    receipt = log.conversation("c_parent00").append({"n": 0})
    busy.wait(20)

    def child() -> int:
        Spool.commit = real  # type: ignore[method-assign]
        log.conversation("c_child000").append({"n": 0}).stored(20)
        return 0

    pid = fork(child)
    go.set()
    codes = wait(pid)
    receipt.stored(20)
    log.conversation("c_parent00").append({"n": 1}).stored(20)
    return {"codes": codes}


def generations() -> dict[str, Any]:
    """A child's child, each with a log of its own name and a spool of its own."""
    log = open_log()
    log.conversation("c_level000").append({"level": 0})

    def child() -> int:
        log.conversation("c_level001").append({"level": 1}).stored(20)

        def grandchild() -> int:
            log.conversation("c_level002").append({"level": 2}).stored(20)
            return 0 if log.flush(20).complete else 1

        return wait(fork(grandchild))[0] or (0 if log.flush(20).complete else 1)

    codes = wait(fork(child))
    return {"codes": codes, "complete": log.flush(20).complete}


def in_flight() -> dict[str, Any]:
    """Forked while the engine has a request under way, which goes on in the parent."""
    log = open_log()
    log.conversation("c_parent00").append({"n": 0})
    while not log.statistics().requests_in_flight:
        time.sleep(0.001)

    def child() -> int:
        assert log.statistics().requests_in_flight == 0
        log.conversation("c_child000").append({"n": 0})
        return 0 if log.flush(20).complete else 1

    pid = fork(child)
    log.conversation("c_parent00").append({"n": 1})
    return {"complete": log.flush(20).complete, "codes": wait(pid)}


def halfway(start: Callable[[Any, Callable[[], None]], object]) -> dict[str, Any]:
    """Forked while another thread is in the middle of something that has a lock, as imports and SQLite have."""
    log = open_log()
    log.conversation("c_parent00").append({"n": 0}).stored(20)
    lock, begun = threading.Lock(), threading.Event()

    def work() -> None:
        with lock:
            begun.set()
            time.sleep(0.3)

    start(log, work)
    begun.wait(20)
    return {"codes": wait(fork(lambda: int(not lock.acquire(timeout=1)))), "complete": log.flush(20).complete}


def engine_halfway() -> dict[str, Any]:
    return halfway(lambda _, work: engine.running().soon(work))


def writer_halfway() -> dict[str, Any]:
    return halfway(lambda log, work: log._log._core.buffer.run(lambda _: work()))


def engine_starting() -> dict[str, Any]:
    """Forked just before the writer starts the engine, whose thread begins with something that has a lock."""
    lock, about_to = threading.Lock(), threading.Event()
    live, stored = engine.Engine._live, Core.stored

    def slow_live(self: engine.Engine) -> None:
        with lock:
            time.sleep(0.5)
        live(self)

    def slow_stored(self: Core, items: dict[str, int]) -> None:
        about_to.set()
        time.sleep(0.1)
        stored(self, items)

    engine.Engine._live, Core.stored = slow_live, slow_stored  # type: ignore[method-assign]
    log = open_log()
    log.conversation("c_parent00").append({"n": 0})
    about_to.wait(20)
    hook_seconds[0] = 0.3
    return {"codes": wait(fork(lambda: int(not lock.acquire(timeout=1)))), "complete": log.flush(20).complete}


def callback() -> dict[str, Any]:
    """Forked in a callback of the log, which is a thread of memlog's."""
    codes: list[int] = []
    first = threading.Event()

    def on_event(event: memlog.events.Event) -> None:
        if event.kind == "acknowledged" and not first.is_set():
            first.set()
            codes.extend(wait(fork(lambda: child())))

    log = open_log(on_event=on_event)

    def child() -> int:
        log.conversation("c_child000").append({"n": 0}).stored(20)
        return 0 if log.flush(20).complete else 1

    log.conversation("c_parent00").append({"n": 0}).acknowledged(20)
    while not codes:
        time.sleep(0.001)
    return {"codes": codes, "complete": log.flush(20).complete}


def prefork() -> dict[str, Any]:
    """The log is opened in a master, which forks workers, ends one hard, replaces it and lets the others finish."""
    log = open_log()
    log.conversation("c_master00").append({"n": 0}).acknowledged(20)

    def worker(name: str) -> int:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        chat = log.conversation(f"c_{name}")
        for n in range(20):
            chat.append({"n": n}).stored(20)
        os.write(tell, b"x")
        stop.wait(20)
        sys.exit(0)

    told, tell = os.pipe()
    pids = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            worker(f"worker{number:02}")
        pids.append(pid)
    for _ in pids:
        os.read(told, 1)
    os.kill(pids[0], signal.SIGKILL)
    codes = wait(pids[0])
    pid = os.fork()
    if pid == 0:
        worker("worker03")
    pids[0] = pid
    os.read(told, 1)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    codes += wait(*pids)
    log.conversation("c_master00").append({"n": 1})
    return {"codes": codes, "complete": log.flush(20).complete}


opened: list[Any] = []


def work(name: str) -> None:
    log = opened[0] if opened else open_log()
    for n in range(10):
        log.conversation(f"c_{name}").append({"n": n})


def workers() -> dict[str, Any]:
    """Processes of multiprocessing's: they end as soon as their function returns, without the interpreter's hooks."""
    opened.append(open_log())
    opened[0].conversation("c_parent00").append({"n": 0}).stored(20)
    codes = []
    for method in ("fork", "forkserver"):
        context = multiprocessing.get_context(method)
        started = [context.Process(target=work, args=(f"{method}{n:02}",)) for n in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join(20)
            codes.append(process.exitcode)
    return {"codes": codes}


if __name__ == "__main__":
    print(json.dumps(globals()[MODE]()), flush=True)
    assert Path(DIRECTORY).is_dir()
