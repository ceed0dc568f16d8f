"""Kernel locks and private files: what holds between processes, and what does not."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memlog import system

PATIENCE = 20.0
HOLDER = """
import sys
from pathlib import Path
from memlog import system
lock = system.try_lock(Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that tries the lock, says how it went, and keeps it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_lock_is_held_against_this_very_process_too(tmp_path: Path) -> None:
    """Also from another thread: two logs in one process are two owners."""
    path = tmp_path / "a.lock"
    lock = system.try_lock(path)
    assert lock is not None
    assert system.try_lock(path) is None
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(system.try_lock(path)))
    thread.start()
    thread.join(PATIENCE)
    assert found == [None]
    lock.release()
    again = system.try_lock(path)
    assert again is not None
    again.release()


def test_a_lock_is_held_against_other_processes_and_free_at_once_when_its_owner_is_killed(tmp_path: Path) -> None:
    """No age, no pid, no heartbeat: the kernel knows."""
    path = tmp_path / "a.lock"
    with holder(path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert system.try_lock(path) is None
        other.send_signal(signal.SIGKILL)
        other.wait(PATIENCE)
        lock = system.try_lock(path)
        assert lock is not None
    with holder(path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "refused\n"
    lock.release()


def test_a_stopped_owner_keeps_its_lock(tmp_path: Path) -> None:
    """A suspended machine or a debugger is not a death."""
    path = tmp_path / "a.lock"
    with holder(path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGSTOP)
        assert system.try_lock(path) is None
        other.send_signal(signal.SIGCONT)
        other.communicate(timeout=PATIENCE)


def test_a_lock_file_that_was_unlinked_or_replaced_is_not_mistaken_for_the_one_in_place(tmp_path: Path) -> None:
    """Whoever locks the file that has the name now owns it; what a deleted file's holder has guards nothing."""
    path = tmp_path / "a.lock"
    old = system.try_lock(path)
    assert old is not None
    path.unlink()
    new = system.try_lock(path)
    assert new is not None
    assert os.fstat(new.descriptor).st_ino == path.stat().st_ino
    assert system.try_lock(path) is None
    old.release()
    assert system.try_lock(path) is None
    new.release()


def test_a_file_replaced_between_opening_and_locking_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race itself, made to happen: the inode is looked at after the lock was acquired."""
    path = tmp_path / "a.lock"
    real, calls = system.lock_descriptor, []

    def replaced_meanwhile(descriptor: int, *, blocking: bool) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            path.rename(path.with_name("moved"))
            path.touch()
        if len(calls) == 2:
            path.unlink()
        return real(descriptor, blocking=blocking)

    monkeypatch.setattr(system, "lock_descriptor", replaced_meanwhile)
    lock = system.try_lock(path)
    assert lock is not None
    assert len(calls) == 3
    assert os.fstat(lock.descriptor).st_ino == path.stat().st_ino
    lock.release()


def test_a_symbolic_link_is_never_locked(tmp_path: Path) -> None:
    """It would create or lock a file of somebody else's choice."""
    (tmp_path / "a.lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"a\.lock"):
        system.try_lock(tmp_path / "a.lock")
    with pytest.raises(OSError, match=r"a\.lock"):
        system.make_private_file(tmp_path / "a.lock")
    assert not (tmp_path / "target").exists()


def test_a_released_lock_does_not_close_a_descriptor_that_is_somebody_elses_by_now(tmp_path: Path) -> None:
    """Numbers are used again at once; a second release, or a fork after the close, must not hit a stranger."""
    lock = system.try_lock(tmp_path / "a.lock")
    assert lock is not None
    number = lock.descriptor
    lock.release()
    stranger = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    assert stranger == number
    lock.release()
    lock.forget()
    os.fstat(stranger)
    os.close(stranger)


def test_a_lock_does_not_pass_to_programs_that_are_started(tmp_path: Path) -> None:
    """A long-lived child would keep the lock after its parent died."""
    lock = system.try_lock(tmp_path / "a.lock")
    assert lock is not None
    assert not os.get_inheritable(lock.descriptor)
    lock.release()


def test_new_files_and_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """What exists already keeps the mode its owner gave it."""
    old = os.umask(0)
    try:
        system.make_private_directory(tmp_path / "d")
        system.make_private_file(tmp_path / "d" / "f")
        lock = system.try_lock(tmp_path / "d" / "l")
    finally:
        os.umask(old)
    assert lock is not None
    lock.release()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("d", "d/f", "d/l")]
    assert modes == [0o700, 0o600, 0o600]
    (tmp_path / "d" / "f").chmod(0o640)
    (tmp_path / "d" / "f").write_text("kept")
    system.make_private_file(tmp_path / "d" / "f")
    assert (tmp_path / "d" / "f").read_text() == "kept"
    assert stat.S_IMODE((tmp_path / "d" / "f").stat().st_mode) == 0o640


def test_whether_a_directory_can_be_written_is_found_by_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind; permission bits say nothing to root."""
    assert system.why_not_writable(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert system.why_not_writable(tmp_path / "file") == "it is not a directory"
    assert system.why_not_writable(tmp_path / "missing") == "No such file or directory"

    def read_only(*_: object, **__: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    assert system.why_not_writable(tmp_path) == "Read-only file system"


def test_processes_with_the_same_number_can_try_a_shared_directory_at_once(tmp_path: Path) -> None:
    """Containers on one volume are all process 1: their probes must not meet."""
    found: list[object] = []
    start = threading.Barrier(8)

    def probe() -> None:
        start.wait(PATIENCE)
        found.extend(system.why_not_writable(tmp_path) for _ in range(100))

    threads = [threading.Thread(target=probe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [None] * 800


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("1 1 8:1 / / rw - ext4 /dev/a rw", None),
        ("1 1 8:1 / / rw - overlay o rw", "container"),
        ("1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 0:1 / {here} rw - tmpfs t rw", "reboot"),
        ("1 1 0:1 / / rw - tmpfs t rw\n2 1 8:1 / {here} rw - ext4 /dev/a rw", None),
        ("1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 0:1 / {here} rw shared:1 - nfs4 host:/x rw", "network"),
        ("1 1 0:1 / {here} rw - tmpfs t rw\n2 1 8:1 / {here} rw - ext4 /dev/a rw", None),
    ],
    ids=["disk", "container", "tmpfs", "volume in tmpfs", "nfs", "mounted over"],
)
def test_a_place_that_does_not_last_is_recognised_by_the_mount_it_lies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, said: str | None
) -> None:
    """The deepest mount decides, and of several on one place the last."""
    real = Path.read_text

    def read_text(path: Path, *arguments: str) -> str:
        return mounts.format(here=tmp_path) if path == Path("/proc/self/mountinfo") else real(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_text)
    reason = system.why_not_durable(tmp_path / "below")
    assert reason is None if said is None else said in (reason or "")


def test_where_the_system_says_nothing_about_mounts_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc, no warning."""

    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert system.why_not_durable(Path("/")) is None
