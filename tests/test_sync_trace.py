"""What is called stored is on the disk: seen in a trace of system calls, because a kill of the process proves no sync.

Runs where strace is installed and may trace.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

PROGRAM = Path(__file__).parent / "crash" / "appender.py"
SECONDS = 120
CALLS = "write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,sync_file_range,ftruncate"
FRAME_HEADER = 24
"""SQLite writes the head of each frame of a WAL and its page apart; the head of a commit's last frame says so."""

LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\((\d+)(?:<((?:[^>\\]|\\.)*)>)?)(.*)", re.DOTALL)
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@pytest.fixture(scope="module", autouse=True)
def _strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip("tracing is not permitted here (ptrace)")


@dataclass(frozen=True)
class Call:
    """A system call as it begins (``ended`` False) or comes back; one that never overlapped another does both at once."""

    name: str
    path: str
    data: bytes
    begins: bool
    ended: bool
    succeeded: bool


def unescaped(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def path_of(text: str) -> str:
    return unescaped(text).decode() if text.startswith("\\x") else text


def calls(trace: Path) -> Iterator[Call]:
    """The trace in order. A call during which another thread was seen is two lines, and two of these."""
    unfinished: dict[str, Call] = {}
    for line in trace.read_text("ascii").splitlines():
        found = LINE.match(line)
        if found is None:
            continue  # a signal or an exit
        thread, resumed, name, _, path, rest = found.groups()
        succeeded = re.search(r"\) += \d", rest) is not None
        if resumed:
            before = unfinished.pop(thread)
            yield Call(before.name, before.path, before.data, begins=False, ended=True, succeeded=succeeded)
            continue
        data = b"".join(unescaped(text) for text in TEXT.findall(rest))
        ended = "<unfinished ...>" not in rest
        call = Call(name, path_of(path or ""), data, begins=True, ended=ended, succeeded=succeeded)
        if not ended:
            unfinished[thread] = call
        yield call


def traced(directory: Path, trace: Path, url: str, count: int) -> None:
    strace = ["strace", "-f", "-y", "-xx", "-s", "70000", "-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(trace)]
    program = [sys.executable, str(PROGRAM), url, str(directory), "traced1", str(count), "3"]
    done = subprocess.run([*strace, *program], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["open", *(f"stored {number}" for number in range(count))]


class Wal:
    """What a power cut would leave of it: what was written before the last sync that came back had begun."""

    def __init__(self, count: int) -> None:
        self.written = 0  # calls
        self.synced = 0
        self._syncing = 0
        self._closing = False
        self._unseen = set(range(count))
        self._open: list[int] = []  # batches of the transaction under way
        self.committed: dict[int, int] = {}  # by batch, the write that ended its transaction

    def sync(self, call: Call) -> None:
        if call.begins:
            self._syncing = self.written
        if call.ended and call.succeeded:
            self.synced = self._syncing

    def write(self, data: bytes) -> None:
        self.written += 1
        if len(data) == FRAME_HEADER:
            self._closing = struct.unpack(">I", data[4:8])[0] > 0  # with the page that comes next
            return
        found = {number for number in self._unseen if f'"n":{number},'.encode() in data}
        self._unseen -= found
        self._open += found
        if self._closing:
            self.committed.update(dict.fromkeys(self._open, self.written))
            self._open, self._closing = [], False


def follow(trace: Path, count: int) -> tuple[list[str], list[str]]:
    """Reads the trace: what was called stored too early, and the "stored" lines in order."""
    wal = Wal(count)
    early, said = [], []
    for call in calls(trace):
        if call.path.endswith(".db-wal"):
            if call.name in ("fdatasync", "fsync"):
                wal.sync(call)
            elif call.name.startswith(("write", "pwrite")) and call.begins:
                wal.write(call.data)
        elif call.begins and call.name == "write" and (found := re.fullmatch(rb"stored (\d+)\n", call.data)):
            number = int(found[1])
            said.append(f"stored {number}")
            committed = wal.committed.get(number)
            if committed is None or committed > wal.synced:
                early.append(f"stored {number}: committed by write {committed}, synced up to {wal.synced}")
    return early, said


def check(server: ReferenceServer, tmp_path: Path, count: int) -> None:
    trace = tmp_path / "trace"
    traced(tmp_path / "memory", trace, server.url, count)
    early, said = follow(trace, count)
    assert early == []
    assert said == [f"stored {number}" for number in range(count)]


def test_each_stored_follows_a_sync_of_the_wal_that_holds_it(server: ReferenceServer, tmp_path: Path) -> None:
    """Written, committed and synced, in this order, and only then is it said; while acknowledgements are written, too."""
    check(server, tmp_path, 40)


@pytest.mark.slow
def test_each_of_a_thousand_stored_follows_a_sync(server: ReferenceServer, tmp_path: Path) -> None:
    """Long enough for the WAL to be checkpointed and begun again."""
    check(server, tmp_path, 1000)


def test_the_trace_shows_a_sync_that_is_missing(server: ReferenceServer, tmp_path: Path) -> None:
    """The proof is worth something only if it fails where syncs are switched off."""
    trace = tmp_path / "trace"
    traced(tmp_path / "memory", trace, server.url, 10)
    without = tmp_path / "without"
    lines = trace.read_text("ascii").splitlines()
    without.write_text("\n".join(line for line in lines if "sync" not in line), "ascii")
    early, _ = follow(without, 10)
    assert len(early) == 10
    # And where the answer does not wait for it.
    hasty = tmp_path / "hasty"
    syncs = [
        place for place, line in enumerate(lines) if "sync" in line and b"wal".hex(" ").replace(" ", "\\x") in line
    ]
    for place in syncs:
        later = next((p for p in range(place, len(lines)) if b"stored ".hex(" ").replace(" ", "\\x") in lines[p]), None)
        if later is not None:
            lines.insert(place, lines.pop(later))
    hasty.write_text("\n".join(lines), "ascii")
    early, _ = follow(hasty, 10)
    assert early


def test_the_names_of_new_files_are_synced_before_anything_is_stored(server: ReferenceServer, tmp_path: Path) -> None:
    """A file whose directory entry is not on the disk is gone after a power cut, with all that was synced in it."""
    trace = tmp_path / "trace"
    traced(tmp_path / "memory", trace, server.url, 1)
    synced = []
    for call in calls(trace):
        if call.data == b"stored 0\n":
            break
        if call.name in ("fsync", "fdatasync") and call.ended and call.succeeded:
            synced.append(call.path)
    [site] = [path for path in (tmp_path / "memory").iterdir() if path.is_dir()]
    assert {os.fspath(site), os.fspath(tmp_path / "memory"), os.fspath(tmp_path)} <= set(synced)
