"""What a person sees: one line that moves (or, without a terminal, a line now and then), and a table at the end."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN_EVERY_S = 2.0
BAR = 24


class Display:
    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._moves = out.isatty()
        self._start = time.monotonic()
        self._shown = 0.0
        self._on_line = False

    def say(self, text: str) -> None:
        """Something happened: a line that stays."""
        self._clear()
        self._write(f"{self._stamp()}  {text}\n")

    def progress(self, share: float, text: str) -> None:
        """How far it is. Cheap enough to be called for every report."""
        now = time.monotonic()
        if now - self._shown < (0.1 if self._moves else PLAIN_EVERY_S):
            return
        self._shown = now
        if self._moves:
            full = round(BAR * min(1.0, share))
            line = f"{self._stamp()}  {'█' * full}{'░' * (BAR - full)} {share:4.0%}  {text}"
            self._write("\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K")
            self._on_line = True
        else:
            self._write(f"{self._stamp()}  {share:4.0%}  {text}\n")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        self._clear()
        width = max(len(name) for name, _ in rows)
        self._write("\n" + "".join(f"  {name:>{width}}: {value}\n" for name, value in rows) + "\n")

    def _stamp(self) -> str:
        return f"{time.monotonic() - self._start:6.1f} s"

    def _clear(self) -> None:
        if self._on_line:
            self._write("\r\x1b[K")
            self._on_line = False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
