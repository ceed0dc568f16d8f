"""Runs the job: starts both processes, kills each once at a count of acknowledged items, and has the end judged.

The kill of the appender must find it with a request in flight and a hundred items pending. So the server is first
stopped in its tracks (SIGSTOP): from then on no request can finish, and what the appender reports after that moment
still holds when the SIGKILL comes. The requests that were in flight are carried out when the server goes on, unheard.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .children import Appender, DemoFailedError, Report, Seen, Server
from .judge import Ranges, Verdict, judge, missing
from .rawlog import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .display import Display
    from .script import Payload, Script

SERVER_KILL_SHARE = 0.25
APPENDER_KILL_SHARE = 0.50
PENDING_MIN = 100
SETTLED_S = 0.2
"""After this long, no answer sent before the SIGSTOP can still be on its way to the appender."""
STATE_S = 20.0
DRAIN_S = 90.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the run came to. `by_replay` and `by_http` judge the same log, read in two ways."""

    script: Script
    seen: Seen
    seconds_away: float
    requests: int
    lost_after_kill: int
    by_replay: Verdict
    by_http: Verdict

    @property
    def lost(self) -> int:
        return max(self.lost_after_kill, self.by_replay.lost, self.by_http.lost)

    @property
    def identical(self) -> bool:
        return self.by_replay.identical and self.by_http.identical

    @property
    def kept(self) -> bool:
        return self.lost == 0 and self.identical

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("conversations", f"{len(self.script.conversations):,}"),
            ("items", f"{self.script.items:,}"),
            ("append p50/p99", "{:.0f} / {:.0f} µs".format(*_percentiles(self.seen.append_ns))),
            ("seconds without a server", f"{self.seconds_away:.1f}"),
            ("most pending", f"{self.seen.pending_max:,}"),
            ("requests sent", f"{self.requests:,}"),
            ("duplicates reported", f"{self.by_http.duplicates_reported:,}"),
            ("duplicates found", f"{self.by_http.duplicates_found:,}"),
            ("lost", f"{self.lost:,}"),
            ("identical", "yes" if self.identical else "no"),
        ]

    def failures(self) -> list[str]:
        """Why the promise was not kept, for a person; empty if it was."""
        told = []
        if self.lost_after_kill:
            told.append(f"{self.lost_after_kill} items were reported stored before the kill, and were gone after it")
        for way, verdict in (("memlog's replay", self.by_replay), ("plain HTTP", self.by_http)):
            if verdict.lost:
                told.append(f"by {way}: {verdict.lost} items of the input are missing")
            if verdict.foreign:
                told.append(f"by {way}: {verdict.foreign} items are there that nobody appended")
            told += [f"by {way}: {difference}" for difference in verdict.differences]
        return told


async def perform(file: Path, script: Script, work: Path, show: Display, *, outage: float) -> Outcome:
    """The whole run in the directory `work`. Raises DemoFailedError where it cannot be carried through."""
    seen = Seen()
    record = work / "stored.record"
    patience = script.items / script.pace + DRAIN_S
    async with Server(work / "server.db", _relay(show, "server")) as server:
        await server.start()
        show.say(f"server ready at {server.url}")
        arguments = _arguments(file, script, server.url, work)

        async with Appender(seen, _Progress(show, script), _relay(show, "memlog")) as first:
            await first.start(*arguments)
            await first.until(_acknowledged(SERVER_KILL_SHARE, script), what="a quarter", seconds=patience)
            show.say(f"server killed (SIGKILL) at {_share(first.report, script)}; back in {outage:g} s")
            await server.outage(outage)
            show.say(f"server back after {server.seconds_away:.1f} s; {first.report.pending:,} items wait for it")
            await first.until(_acknowledged(APPENDER_KILL_SHARE, script), what="one half", seconds=patience)
            server.freeze()
            frozen = time.monotonic()
            state = f"a request in flight and {PENDING_MIN} items pending"
            await first.until(lambda report: _worth_a_kill(report, frozen), what=state, seconds=STATE_S)
            await first.kill()
            server.thaw()
            last = first.report
            if not _worth_a_kill(last, frozen):
                raise DemoFailedError(f"the kill missed its state ({state}): {last}")
        show.say(
            f"appender killed (SIGKILL) at {_share(last, script)}: "
            f"{last.in_flight} requests in flight, {last.pending:,} items pending"
        )

        promised = read_record(record)
        progress = _Progress(show, script, last.stored)
        async with Appender(seen, progress, _relay(show, "memlog")) as second:
            replayed = work / "replayed.jsonl"
            await second.start(*arguments, "--resume", "--replayed", str(replayed))
            positions: Mapping[str, int] = (await second.event("resumed", seconds=patience))["positions"]
            there = await read_all(server.url, server.auth, script.conversations)
            gone = missing(promised, script.conversations, there)
            show.say(
                f"restarted and drained: {sum(map(len, promised.values())):,} items had been reported stored, "
                f"{gone} of them are missing; going on after {sum(positions.values()):,}"
            )
            progress.before = sum(positions.values())
            second.go()
            await second.event("appended", seconds=patience)
            show.say("everything appended; draining, replaying and comparing")
            done = await second.event("done", seconds=patience)
        reported: dict[str, Ranges] = done["duplicates"]
        there = await read_all(server.url, server.auth, script.conversations)
        return Outcome(
            script,
            seen,
            server.seconds_away,
            last.requests + second.report.requests,
            gone,
            judge(script.conversations, read_replayed(replayed), reported),
            judge(script.conversations, there, reported),
        )


def read_record(path: Path) -> dict[str, set[int]]:
    """The positions of each conversation that were reported stored. A torn last line promised nothing."""
    promised: dict[str, set[int]] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        conversation, position = line.decode("ascii").split(" ")
        promised.setdefault(conversation, set()).add(int(position))
    return promised


def read_replayed(path: Path) -> dict[str, list[Payload]]:
    """What memlog replayed, as the appender wrote it down. Raises DemoFailedError where the numbering has a gap."""
    replayed: dict[str, list[Payload]] = {}
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            conversation, seq, payload = json.loads(line)
            items = replayed.setdefault(conversation, [])
            if seq != len(items):
                raise DemoFailedError(f"memlog replayed seq {seq} of {conversation} where {len(items)} should stand")
            items.append(payload)
    return replayed


def _acknowledged(share: float, script: Script) -> Callable[[Report], bool]:
    return lambda report: report.acknowledged >= share * script.items


def _worth_a_kill(report: Report, frozen: float) -> bool:
    """Said after the server stood still, by the buffer's figures and also by the receipts."""
    return (
        report.at > frozen + SETTLED_S
        and report.in_flight >= 1
        and report.pending >= PENDING_MIN
        and report.stored - report.acknowledged >= PENDING_MIN
    )


def _arguments(file: Path, script: Script, url: str, work: Path) -> Sequence[str]:
    places = ("--file", str(file), "--buffer", str(work / "buffer"), "--record", str(work / "stored.record"))
    return (*places, "--rounds", str(script.rounds), "--pace", repr(script.pace), "--url", url)


class _Progress:
    """Shows each report. `before` is how many items were on the server or the disk when the process began."""

    def __init__(self, show: Display, script: Script, before: int = 0) -> None:
        self._show = show
        self._script = script
        self.before = before

    def __call__(self, report: Report) -> None:
        total = self._script.items
        arrived = min(total, max(0, self.before + report.appended - report.pending))
        counts = f"{arrived:,} of {total:,} acknowledged · {report.pending:,} pending"
        self._show.progress(arrived / total, f"{report.doing} · {counts} · {report.state}")


def _relay(show: Display, name: str) -> Callable[[str], None]:
    return lambda line: show.say(f"  {name} │ {line}")


def _share(report: Report, script: Script) -> str:
    return f"{report.acknowledged / script.items:.1%} acknowledged"


def _percentiles(times_ns: Sequence[int]) -> tuple[float, float]:
    cuts = statistics.quantiles(times_ns, n=100)
    return cuts[49] / 1000, cuts[98] / 1000
