"""The two processes that the conductor starts and kills. Leaving ``async with`` ends them, whatever happened.

Both get a session of their own: a Ctrl-C in the terminal reaches the conductor alone, which then ends them in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
READY_S = 20.0
END_S = 5.0
LINE_BYTES_MAX = 64 * 1024 * 1024


class DemoFailedError(Exception):
    """The demo did not show what it is to show; the message says what went wrong, for a person."""


class _Child:
    """One Python process. Each line of its standard error is handed to `on_words`."""

    name = "child"

    def __init__(self, on_words: Callable[[str], None]) -> None:
        self._on_words = on_words
        self._said = False
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *arguments,
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )
        self._listening = asyncio.create_task(self._listen(self._process))
        return self._process

    async def kill(self) -> None:
        """SIGKILL, and no more: the process gets no chance to tidy up. Harmless for one that has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._listening is not None:
            await self._listening

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self._said = True
            self._on_words(line.decode("utf-8", "replace").rstrip())

    async def _ended(self) -> DemoFailedError:
        """What to raise about a process that closed its output, after it has had the time to end."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        await self.kill()
        status = self._process.returncode
        said = "what it said is above" if self._said else "it said nothing"
        return DemoFailedError(f"the {self.name} ended by itself (status {status}); {said}")


class Server(_Child):
    """The reference server on one database file and, after the first start, on one port."""

    name = "server"
    auth = ("demo", "demo")

    def __init__(self, db: Path, on_words: Callable[[str], None]) -> None:
        super().__init__(on_words)
        self._db = db
        self.url = ""
        self.seconds_away = 0.0

    async def start(self) -> None:
        """Returns when it accepts connections."""
        found = re.search(r":(\d+)/", self.url)
        port = found[1] if found else "0"
        process = await self._start("server_reference", "--port", port, "--db", str(self._db))
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_S):
                line = (await process.stdout.readline()).decode()
        except TimeoutError:
            raise DemoFailedError(f"the server did not say within {READY_S:.0f} s that it is ready") from None
        address = re.search(r"https?://\S+", line)
        if address is None:
            raise await self._ended()
        self.url = address[0]

    async def outage(self, seconds: float) -> None:
        """Killed now, and back on the same port and file `seconds` later."""
        since = time.monotonic()
        await self.kill()
        await asyncio.sleep(seconds)
        await self.start()
        self.seconds_away += time.monotonic() - since

    def freeze(self) -> None:
        """Stops in the middle of whatever it does: what was sent to it stays without an answer until :meth:`thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@dataclass(slots=True)
class Report:
    """What the appender last said of itself; `at` is its monotonic clock, which is also ours."""

    at: float = 0.0
    appended: int = 0
    stored: int = 0
    acknowledged: int = 0
    pending: int = 0
    in_flight: int = 0
    requests: int = 0
    state: str = "ok"
    doing: str = "starting"


@dataclass(slots=True)
class Seen:
    """What all its reports come to."""

    append_ns: list[int] = field(default_factory=list)
    pending_max: int = 0


class Appender(_Child):
    """One life of the appending process."""

    name = "appender"

    def __init__(self, seen: Seen, on_report: Callable[[Report], None], on_words: Callable[[str], None]) -> None:
        super().__init__(on_words)
        self.report = Report()
        self._seen = seen
        self._on_report = on_report
        self._events: dict[str, dict[str, Any]] = {}
        self._news = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None
        self._over = False

    async def start(self, *arguments: str) -> None:
        process = await self._start("examples.demo.appender", *arguments)
        self._reading = asyncio.create_task(self._read(process))

    async def kill(self) -> None:
        await super().kill()
        if self._reading is not None:
            await self._reading

    async def until(self, reached: Callable[[Report], bool], *, what: str, seconds: float) -> Report:
        """The first report that `reached` holds for; `what` names that state where it never comes."""
        await self._wait(lambda: reached(self.report), what, seconds)
        return self.report

    async def event(self, name: str, *, seconds: float) -> dict[str, Any]:
        """The data of an event, once it was told."""
        await self._wait(lambda: name in self._events, f"'{name}'", seconds)
        return self._events[name]

    def go(self) -> None:
        """Lets a resumed process go on from 'resumed'."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def _wait(self, reached: Callable[[], bool], what: str, seconds: float) -> None:
        assert self._reading is not None
        try:
            async with asyncio.timeout(seconds), self._news:
                await self._news.wait_for(lambda: reached() or self._over)
        except TimeoutError:
            raise DemoFailedError(
                f"the appender did not reach {what} within {seconds:.0f} s; it last said {self.report}"
            ) from None
        if not reached():
            raise await self._ended()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._take(line)
                async with self._news:
                    self._news.notify_all()
        finally:
            self._over = True
            async with self._news:
                self._news.notify_all()

    def _take(self, line: bytes) -> None:
        try:
            data = json.loads(line)
        except ValueError:  # the last line of a killed process may be half a line
            return
        name = data.pop("event")
        self._seen.append_ns += data.pop("append_ns", [])
        if "at" in data:
            self.report = Report(**{key: data.pop(key) for key in Report.__slots__})
            self._seen.pending_max = max(self._seen.pending_max, self.report.pending)
            self._on_report(self.report)
        if name != "report":
            self._events[name] = data
