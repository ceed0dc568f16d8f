"""Server-sent events, read from bytes as they come (pure; knows neither HTTP nor JSON)."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["BOM", "EventReader"]

# Bytes, because text splitting would also cut at U+2028 and friends, which JSON strings may hold.
_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
BOM: Final = b"\xef\xbb\xbf"


class EventReader:
    """Feed chunks cut anywhere, even inside a character or between CR and LF; get the data of each finished message.

    Comments, events without data and events of other types than ``kinds`` are passed over. ``last_id`` and
    ``retry`` (seconds) are what the stream said last, None before it said anything; a reader may go on with the
    chunks of the stream that resumes this one after :meth:`cut`.
    """

    def __init__(self, *, kinds: tuple[bytes, ...] = (b"", b"message")) -> None:
        self._kinds = kinds
        self.last_id: str | None = None
        self.retry: float | None = None
        self.cut()

    def cut(self) -> None:
        """The stream broke: an unfinished event is dropped, what comes next is the start of a stream."""
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._type = b""
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the messages that this chunk completes."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        first, *rest = _LINE_END.split(chunk)
        # Pieces of a long line are joined once, when it ends: a line of many megabytes must not be copied per chunk.
        self._line.append(first)
        messages: list[bytes] = []
        for piece in rest:
            line = b"".join(self._line)
            self._line = [piece]
            if (message := self._take(line)) is not None:
                messages.append(message)
        return messages

    def end(self) -> list[bytes]:
        """The stream ended. An event without its closing empty line is given out too; parsing shows if it is whole."""
        messages = [message for message in (self._take(b"".join(self._line)), self._take(b"")) if message is not None]
        self.cut()
        return messages

    def _take(self, line: bytes) -> bytes | None:
        if self._at_start:
            line = line.removeprefix(BOM)
            self._at_start = False
        if not line:
            data, kind = b"\n".join(self._data), self._type
            self._data, self._type = [], b""
            return data if data and kind in self._kinds else None
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._type = value
        elif field == b"id" and b"\0" not in value:
            self.last_id = value.decode("utf-8", "replace")
        elif field == b"retry" and value.isdigit() and len(value) < 10:
            self.retry = int(value) / 1000
        return None
