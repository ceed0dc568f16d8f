"""Reads records out of the pages of an SQLite file whose own tree cannot be walked any more.

Every page of the file (and of the WAL beside it, as far as it was committed) that looks like a leaf of a table gives up
its records, whether or not anything still points to it. Pages on the free list are passed over: they hold what was
deleted. Nothing here is trusted by whoever asks: bytes that make no sense are skipped, and what a record means, and
whether it is whole, is for the caller to check.

The format is described at https://www.sqlite.org/fileformat2.html. This module knows no table of ours.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["Value", "records"]

Value = int | float | str | bytes | None

_MAGIC = b"SQLite format 3\0"
_LEAF = 0x0D
_WAL_HEADER = 32
_WAL_FRAME = 24
_PAGE_SIZE = 4096  # SQLite's default, and so that of a file whose header is gone
_RECORD_BYTES_MAX = 64 * 1024 * 1024
_INTEGER_BYTES = (0, 1, 2, 3, 4, 6, 8)


class _NonsenseError(Exception):
    """The bytes cannot be what they should be."""


def records(path: Path, wal: Path) -> Iterator[tuple[int, list[Value]]]:
    """Every record of a table's leaf in ``path`` and its ``wal``, with its row id. Never raises for their contents."""
    with path.open("rb") as file, (wal if wal.is_file() else path).open("rb") as log:
        pages = _Pages(file, log if wal.is_file() else None)
        free = pages.free()
        for number in range(1, pages.count + 1):
            if number in free:
                continue
            page = pages.read(number)
            start = 100 if number == 1 else 0
            if len(page) < pages.usable or page[start] != _LEAF:
                continue
            cells = struct.unpack_from(">H", page, start + 3)[0]
            for index in range(min(cells, (pages.size - start - 8) // 2)):
                try:
                    offset = struct.unpack_from(">H", page, start + 8 + 2 * index)[0]
                    yield _cell(pages, page, offset)
                except (_NonsenseError, struct.error, IndexError, UnicodeDecodeError):
                    continue


class _Pages:
    """The pages as the last commit left them: those of the file, and those of the WAL over them."""

    def __init__(self, file: BinaryIO, wal: BinaryIO | None) -> None:
        header = file.read(100)
        self.size, reserved = _PAGE_SIZE, 0
        if len(header) == 100 and header.startswith(_MAGIC):
            size = struct.unpack_from(">H", header, 16)[0]
            size = 65536 if size == 1 else size
            if size >= 512 and size & (size - 1) == 0:
                self.size, reserved = size, header[20]
        self._file = file
        self._wal = wal
        self._frames: dict[int, int] = {}
        if wal is not None:
            self._read_wal(wal)
        self.usable = self.size - reserved
        self.count = max(file.seek(0, 2) // self.size, max(self._frames, default=0))

    def _read_wal(self, wal: BinaryIO) -> None:
        header = wal.read(_WAL_HEADER)
        if len(header) < _WAL_HEADER or header[:3] != b"\x37\x7f\x06":
            return
        size, salts = struct.unpack_from(">I", header, 8)[0], header[16:24]
        if 512 <= size <= 65536 and size & (size - 1) == 0:
            self.size = size
        offset, open_frames = _WAL_HEADER, {}
        while len(frame := wal.read(_WAL_FRAME)) == _WAL_FRAME and frame[8:16] == salts:
            number, committed = struct.unpack_from(">II", frame)
            open_frames[number] = offset + _WAL_FRAME
            offset = wal.seek(self.size, 1)
            if committed:
                self._frames.update(open_frames)
                open_frames.clear()

    def read(self, number: int) -> bytes:
        """The page; short or empty if it is not there."""
        offset = self._frames.get(number)
        if offset is not None and self._wal is not None:
            self._wal.seek(offset)
            return self._wal.read(self.size)
        if not 0 < number <= self.count:
            return b""
        self._file.seek((number - 1) * self.size)
        return self._file.read(self.size)

    def free(self) -> set[int]:
        """The pages of the free list, as far as it can be followed."""
        found: set[int] = set()
        header = self.read(1)
        trunk = struct.unpack_from(">I", header, 32)[0] if header.startswith(_MAGIC) else 0
        while 0 < trunk <= self.count and trunk not in found:
            page = self.read(trunk)
            if len(page) < 8:
                break
            found.add(trunk)
            trunk, leaves = struct.unpack_from(">II", page)
            if leaves <= self.size // 4 - 2 and len(page) >= 8 + 4 * leaves:
                found.update(struct.unpack_from(f">{leaves}I", page, 8))
        return found


def _cell(pages: _Pages, page: bytes, offset: int) -> tuple[int, list[Value]]:
    length, offset = _varint(page, offset)
    row_id, offset = _varint(page, offset)
    if not 0 < length <= _RECORD_BYTES_MAX:
        raise _NonsenseError
    return row_id, _record(_payload(pages, page, offset, length))


def _payload(pages: _Pages, page: bytes, offset: int, length: int) -> bytes:
    usable = pages.usable
    local = length
    if length > usable - 35:
        least = (usable - 12) * 32 // 255 - 23
        local = least + (length - least) % (usable - 4)
        if local > usable - 35:
            local = least
    parts, left = [page[offset : offset + local]], length - local
    overflow = struct.unpack_from(">I", page, offset + local)[0] if left else 0
    while left > 0:
        page = pages.read(overflow)
        if len(page) < usable:
            raise _NonsenseError  # the chain is broken, or leads outside
        overflow = struct.unpack_from(">I", page)[0]
        parts.append(page[4 : min(usable, 4 + left)])
        left -= len(parts[-1])
    return b"".join(parts)


def _record(payload: bytes) -> list[Value]:
    size, position = _varint(payload, 0)
    kinds: list[int] = []
    while position < size:
        kind, position = _varint(payload, position)
        kinds.append(kind)
    values: list[Value] = []
    for kind in kinds:
        value, position = _value(payload, position, kind)
        values.append(value)
    if position != len(payload):
        raise _NonsenseError
    return values


def _value(payload: bytes, position: int, kind: int) -> tuple[Value, int]:
    if kind == 0:
        return None, position
    if kind <= 6:
        end = position + _INTEGER_BYTES[kind]
        return int.from_bytes(payload[position:end], "big", signed=True), end
    if kind == 7:
        return struct.unpack_from(">d", payload, position)[0], position + 8
    if kind in (8, 9):
        return kind - 8, position
    if kind < 12:
        raise _NonsenseError
    end = position + (kind - 12) // 2
    if end > len(payload):
        raise _NonsenseError
    return (payload[position:end].decode() if kind % 2 else payload[position:end]), end


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for index in range(8):
        byte = data[offset + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, offset + index + 1
    value = value << 8 | data[offset + 8]
    return value - (1 << 64 if value >> 63 else 0), offset + 9
