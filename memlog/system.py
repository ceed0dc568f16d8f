"""What the operating system offers, behind feature tests: kernel locks, private files, fork hooks, file systems.

Everything above asks here and never for `sys.platform`. Linux is tested; elsewhere a missing feature costs the feature,
not the import.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import lock_descriptor

if TYPE_CHECKING:
    from collections.abc import Callable

_PRIVATE_DIRECTORY = 0o700
_PRIVATE_FILE = 0o600
_WORKER_EXIT_PRIORITY = -100  # behind the users' own

_VOLATILE = {
    "tmpfs": "it is in memory (tmpfs) and gone at a reboot",
    "ramfs": "it is in memory (ramfs) and gone at a reboot",
    "overlay": "it is in a container's own layer (overlay) and gone with the container",
}
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"})


@dataclass(slots=True)
class KernelLock:
    """A lock on a file of its own, held by this process until :meth:`release` or its death, however it dies."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Give the lock up. The file stays, so that waiters and newcomers agree on the inode."""
        # Once only: the number of a closed descriptor soon belongs to somebody else.
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: drop the inherited copy, which leaves the parent's lock as it was.

        Unlocking would free the parent's lock, and keeping the copy would outlive the parent with it.
        """
        self.release()


def try_lock(path: Path) -> KernelLock | None:
    """Lock ``path``, creating it; None if another process, or another part of this one, holds it.

    Never falls back to something weaker: a file system without kernel locks raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    while True:
        descriptor = os.open(path, flags, _PRIVATE_FILE)
        try:
            held = lock_descriptor(descriptor, blocking=False)
            if held and _same_file(descriptor, path):
                return KernelLock(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not held:
            return None
        # The file was unlinked or replaced between opening and locking: what we hold guards nothing.


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def make_private_directory(path: Path) -> None:
    """Create ``path`` with its parents, readable by this user only, and sync their names.

    An existing directory is left as it is.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    for place in reversed(missing):
        sync_directory(place.parent)


def make_private_file(path: Path) -> None:
    """Create an empty ``path`` readable by this user only, if it is not there; never follows a link."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(path, flags, _PRIVATE_FILE))


def write_private_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``, synced: after a crash there is the old file or the new one, whole."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(draft, flags, _PRIVATE_FILE), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names that were added to the directory, or changed in it, last: a file is no better kept than its name."""
    with contextlib.suppress(OSError):  # not every system lets a directory be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def why_not_writable(path: Path) -> str | None:
    """Why no file can be made in the directory ``path``, or None. Tries it: permission bits alone do not tell."""
    # Random and not the pid: containers that share a directory all run as process 1.
    probe = path / f".probe-{secrets.token_hex(8)}"
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return "it is not a directory"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), _PRIVATE_FILE))
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def why_not_durable(path: Path) -> str | None:
    """Why files below ``path`` may not outlive this machine's next restart, or None if nothing speaks against it."""
    kind = _file_system(path)
    if kind in _REMOTE:
        return f"it is on a network file system ({kind}), where a crash of this machine is not the only risk"
    return _VOLATILE.get(kind or "")


def available_bytes(path: Path) -> int | None:
    """How much can be written to the disk that the directory ``path`` is on; None if that cannot be told."""
    if not hasattr(os, "statvfs"):
        return None
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def is_remote(path: Path) -> bool:
    """Whether ``path`` is on a network file system: its users may be on several machines, which share no memory."""
    return _file_system(path) in _REMOTE


def _file_system(path: Path) -> str | None:
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
        resolved = path.resolve()
    except OSError:
        return None
    depth, kind = 0, None
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(mount) and len(mount.parts) >= depth:  # the last mount on a place is the one seen
            depth, kind = len(mount.parts), right.split()[0]
    return kind


class NoThreadError(RuntimeError):
    """The system has no thread to give, or the interpreter ends: from Python 3.12 on it refuses them then."""


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that runs ``run``; NoThreadError if there is none to be had."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(f"memlog: {error}") from error
    return thread


_parked: list[object] = []


def park(*things: object) -> None:
    """Keep these until the process is gone: what a forked child inherited, and what was under way at the end.

    Freeing them would close the parent's databases, or complain about every task that is not done.
    """
    _parked.extend(things)


def keep_parked() -> None:
    """The interpreter ends now, and frees everything but what is parked."""
    if _parked:
        with contextlib.suppress(ImportError, AttributeError):  # a Python without it frees them: noise, at worst
            import ctypes  # noqa: PLC0415 - late, and for processes that end with something parked

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(_parked))


def at_worker_exit(call: Callable[[], None]) -> None:
    """Run ``call`` also where a process of multiprocessing's ends, which passes by the hooks of :mod:`atexit`.

    To be called at the import, and again in a forked child: whatever forks for multiprocessing forgets it at first.
    """
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is None or process is None:
        return  # this is no process of its making

    def register(_: object) -> None:
        util.Finalize(None, call, exitpriority=_WORKER_EXIT_PRIORITY)

    util.register_after_fork(call, register)
    if process.parent_process() is not None:
        register(None)


def at_fork(
    *,
    in_child: Callable[[], None],
    before: Callable[[], None] = lambda: None,
    in_parent: Callable[[], None] = lambda: None,
) -> None:
    """Run these around every fork of this process; nothing where processes do not fork."""
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(before=before, after_in_parent=in_parent, after_in_child=in_child)
