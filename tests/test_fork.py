"""Forks with an open log: parent and children both go on, nothing is sent twice, and nobody's files are touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from between import PATIENCE, Opener, drain, until
from books import contents  # noqa: F401 - what Opener.contents reads

from memlog import system
from memlog.spool import Spool, count_pending

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

PROGRAM = Path(__file__).parent / "crash" / "forks.py"


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path)
    yield opener
    opener.close()


def start(mode: str, server: ReferenceServer, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), mode, server.url, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(mode: str, server: ReferenceServer, directory: Path) -> dict[str, Any]:
    with start(mode, server, directory) as program:
        out, err = program.communicate(timeout=2 * PATIENCE)
    noise = [line for line in err.splitlines() if not line.startswith("memlog: ")]
    assert noise == []
    assert program.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_parent_and_children_go_on_and_nothing_is_sent_twice(server: ReferenceServer, opened: Opener) -> None:
    """Three are pending at the fork, in the parent only; each process has a spool of its own."""
    server.faults.add("stall", tool="append_memory", seconds=0.3, times=1)
    result = run("basic", server, opened.directory)
    assert result == {"codes": [0, 0], "complete": True, "same spool": True}
    assert opened.contents() == {
        "c_parent00": [*({"before": n} for n in range(3)), {"after": 0}, {"after": 1}],
        "c_child001": [{"child001": 0}, {"child001": 1}],
        "c_child002": [{"child002": 0}, {"child002": 1}],
    }


def test_children_that_exit_normally_leave_the_parents_files_alone(server: ReferenceServer, opened: Opener) -> None:
    """Interpreter exit closes what it finds; the parent's connection must not be among it."""
    server.stop()
    result = run("exits", server, opened.directory)
    assert result["codes"] == [0, 1, 2, 3, 1]
    spools = list(opened.directory.glob("*/*.db"))
    assert sum(count_pending(path) for path in spools) == 62
    assert count_pending(Path(result["spool"])) == 60
    for path in spools:
        held = Spool.open(path, None)
        assert held._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        held.close()
    server.start()
    log = opened()
    drain(log)
    assert opened.contents() == {
        "c_parent00": [{"n": n} for n in range(60)],
        "c_child001": [{"child": 1}],
        "c_child003": [{"child": 3}],
    }


def test_a_child_that_outlives_its_parent_keeps_neither_its_lock_nor_its_file(
    server: ReferenceServer, opened: Opener
) -> None:
    """The parent is killed: its spool is free at once, and the child's later exit takes nothing out of it."""
    server.stop()
    with start("orphan", server, opened.directory) as program:
        assert program.stdout is not None
        told = json.loads(program.stdout.readline())
        program.wait(PATIENCE)
        assert program.returncode == -signal.SIGKILL
        spool = Path(told["spool"])
        lock = system.try_lock(spool.with_suffix(".lock"))
        assert lock is not None
        lock.release()
        until(lambda: not alive(told["child"]), "the child's end")
    assert count_pending(spool) == 30
    server.start()
    log = opened()
    assert log.statistics().pending_items == 30
    drain(log)
    assert opened.contents() == {"c_parent00": [{"n": n} for n in range(30)]}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_closed_log_closes_nothing_in_a_child(server: ReferenceServer, opened: Opener) -> None:
    """Its descriptors' numbers belong to others by then."""
    assert run("closed", server, opened.directory) == {"codes": [0], "kept": True}


def test_threads_may_fork_at_once_while_others_append(server: ReferenceServer, opened: Opener) -> None:
    """60 forks from four threads: no deadlock, and every append arrives once, in order."""
    result = run("threads", server, opened.directory)
    assert result["codes"] == [0] * 60
    assert (result["alive"], result["complete"]) == ([], True)
    assert opened.contents() == {
        f"c_thread{which:02}": [{"n": n} for n in range(count)] for which, count in enumerate(result["counts"])
    }


def test_a_fork_while_the_disk_hangs_is_bounded_and_hurts_neither_side(server: ReferenceServer, opened: Opener) -> None:
    """The child cannot know what the writer was doing, and need not."""
    assert run("stuck", server, opened.directory) == {"codes": [0]}
    log = opened()
    drain(log)
    assert opened.contents() == {"c_parent00": [{"n": 0}, {"n": 1}], "c_child000": [{"n": 0}]}


def test_a_fork_while_a_request_is_under_way_sends_it_once(server: ReferenceServer, opened: Opener) -> None:
    """It goes on in the parent; the child has connections of its own."""
    server.faults.add("stall", tool="append_memory", when="after", seconds=1.0)
    assert run("in_flight", server, opened.directory) == {"complete": True, "codes": [0]}
    assert opened.contents() == {"c_parent00": [{"n": 0}, {"n": 1}], "c_child000": [{"n": 0}]}


@pytest.mark.parametrize("mode", ["engine_halfway", "writer_halfway", "engine_starting"])
def test_a_fork_waits_until_no_thread_of_ours_is_in_the_middle_of_something(
    server: ReferenceServer, opened: Opener, mode: str
) -> None:
    """A lock held there would be held in the child for ever.

    It was that of a module: children forked in the first half second, while the engine imported what its first request
    needs, hung at their own first request or at their end, one in three of them on a loaded machine.
    """
    assert run(mode, server, opened.directory) == {"codes": [0], "complete": True}


def test_a_callback_may_fork(server: ReferenceServer, opened: Opener) -> None:
    """The thread it runs in is the child's only one."""
    assert run("callback", server, opened.directory) == {"codes": [0], "complete": True}
    assert opened.contents() == {"c_parent00": [{"n": 0}], "c_child000": [{"n": 0}]}


def test_a_log_opened_before_workers_are_forked_serves_them_all(server: ReferenceServer, opened: Opener) -> None:
    """As under gunicorn with preloading: one worker is killed and replaced, the others are told to end."""
    assert run("prefork", server, opened.directory) == {"codes": [-signal.SIGKILL, 0, 0, 0], "complete": True}
    drain(opened())
    assert opened.contents() == {
        "c_master00": [{"n": 0}, {"n": 1}],
        **{f"c_worker{number:02}": [{"n": n} for n in range(20)] for number in range(4)},
    }


def test_a_multiprocessing_worker_that_ends_has_stored_what_it_appended(
    server: ReferenceServer, opened: Opener
) -> None:
    """It runs none of the interpreter's exit hooks; what it had appended last used to be lost."""
    server.stop()
    assert run("workers", server, opened.directory) == {"codes": [0, 0, 0, 0]}
    server.start()
    drain(opened())
    names = [f"c_{method}{number:02}" for method in ("fork", "forkserver") for number in range(2)]
    assert opened.contents() == {"c_parent00": [{"n": 0}], **{name: [{"n": n} for n in range(10)] for name in names}}


def test_a_childs_child_has_a_spool_of_its_own_too(server: ReferenceServer, opened: Opener) -> None:
    """Three generations, one item each, delivered by whoever appended it."""
    assert run("generations", server, opened.directory) == {"codes": [0], "complete": True}
    assert opened.contents() == {f"c_level00{n}": [{"level": n}] for n in range(3)}
