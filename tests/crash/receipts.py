"""Makes receipts and hands out their ids, or lives on in a child of its own.

receipts.py MODE URL DIRECTORY
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings

import memlog.sync
from memlog import buffer as buffer_module
from memlog.errors import ClosedError
from memlog.spool import Spool

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12+

MODE, URL, DIRECTORY = sys.argv[1:4]
log = memlog.sync.open_log(URL, auth=("demo", "demo"), buffer_dir=DIRECTORY, flush_timeout=0)


def serve() -> None:
    """One acknowledged, one pending in a lane that waits; lives until its standard input ends."""
    from memlog import sender

    first = log.conversation("conversation-1").append({"n": 0})
    first.acknowledged(20)
    sender.Sender._dispatch = lambda _: None  # type: ignore[method-assign,assignment] # nothing more is sent
    second = log.conversation("conversation-1").append({"n": 1})
    second.stored(20)
    print(json.dumps({"acknowledged": first.id, "pending": second.id}), flush=True)
    sys.stdin.read()


def killed() -> None:
    receipt = log.conversation("conversation-1").append({"n": 0})
    receipt.stored(20)
    print(receipt.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def fork() -> None:
    """The disk hangs while somebody forks: the child has receipts of which it will never know."""
    buffer_module._FORK_WAIT_SECONDS = 0.2
    early = log.conversation("c_parent00").append({"n": 0})
    early.acknowledged(20)
    busy, go = threading.Event(), threading.Event()
    real = Spool.commit

    def commit(spool: Spool) -> None:
        if spool._db.in_transaction and not busy.is_set():
            busy.set()
            go.wait(20)
        real(spool)

    Spool.commit = commit  # type: ignore[method-assign]
    late = log.conversation("c_parent00").append({"n": 1})
    busy.wait(20)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            Spool.commit = real  # type: ignore[method-assign]
            code = child(early, late)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
        os._exit(code)
    go.set()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    late.stored(20)
    print(json.dumps({"code": code}), flush=True)


def child(early: memlog.sync.SyncReceipt, late: memlog.sync.SyncReceipt) -> int:
    started = time.monotonic()
    for ask in (late.stored, late.acknowledged):
        try:
            ask(20)
        except ClosedError as error:
            if "forked" not in str(error):
                return 2
        else:
            return 1
    assert time.monotonic() - started < 5
    early.stored(20)
    assert early.acknowledged(20).first_seq == 0  # settled: any process can read that
    log.conversation("c_child000").append({"n": 0}).stored(20)
    return 0


globals()[MODE]()
