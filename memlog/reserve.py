"""A file that only takes room, so that there is some when the disk is full.

A full disk refuses deletes, too: SQLite has to write before it can give anything back. The reserve is removed then,
which lets the acknowledgements through; they make room, and the reserve is made again.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from memlog import system

if TYPE_CHECKING:
    from pathlib import Path

RESERVE_BYTES = 1024 * 1024


class Reserve:
    """The file at ``path``. Used by whoever holds the spool beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_there = False

    def make(self) -> bool:
        """Take the room if that is not done; whether it is taken now. Never raises for a disk in trouble."""
        if self.is_there:
            return True
        try:
            if not self.path.exists() or self.path.stat().st_size != RESERVE_BYTES:
                self._write()
        except OSError:
            self.drop()
            return False
        self.is_there = True
        return True

    def _write(self) -> None:
        system.make_private_file(self.path)
        with self.path.open("wb") as file:
            # Noise, and synced: zeros may be kept as a hole or compressed, and nothing is taken before it is written.
            file.write(secrets.token_bytes(RESERVE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def drop(self) -> bool:
        """Give the room back; whether there was any."""
        self.is_there = False
        try:
            self.path.unlink()
        except OSError:
            return False
        return True
