"""Who changed a team record, when and why, with what is different: a table of its history.

    export MEMLOG_URL=https://memory.example/mcp MEMLOG_TOKEN=... MEMLOG_TEAM=engineering
    python examples/team_history.py 815

An update makes a new record. So ask with the newest id: the versions that it replaced are in its history.
"""

from __future__ import annotations

import asyncio
import os
import sys
import unicodedata
from typing import TYPE_CHECKING

import memlog

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = ("When (UTC)", "Who", "What", "Why")
WIDTH = 100
CONTEXT, MOST = 20, 600  # characters: of what is alike around a difference, and of one text


async def main(record_id: int) -> str | None:
    team = os.environ.get("MEMLOG_TEAM")
    scope = memlog.Scope.team(team) if team else memlog.Scope.personal()
    async with memlog.TeamClient(os.environ["MEMLOG_URL"], token=os.environ["MEMLOG_TOKEN"]) as client:
        try:
            events = [event async for event in client.history(record_id, scope=scope)]
        except memlog.MemlogError as error:
            return f"the history cannot be read: {error}"
    rows = list(changes(events))
    widths = [max(columns(row[n]) for row, _ in rows) for n in range(3)]
    for row, differences in rows:
        lead = "".join(padded(cell, width + 2) for cell, width in zip(row, widths, strict=False))
        print_folded(lead, row[3])
        for name, text in differences:
            print_folded(f"{name:>{widths[0]}}  ", text)
    return None


def changes(events: list[memlog.HistoryEvent]) -> Iterator[tuple[tuple[str, ...], list[tuple[str, str]]]]:
    """A row for each change, with the lines of what is different."""
    yield HEAD, []
    versions = {event.record_id for event in events}
    # The last text of each version that was replaced, by the id of its successor.
    replaced = {(event.after_state or {}).get("superseded_by"): event.before_state for event in events}
    for event in events:
        what, changed = event.operation, event.changes
        if "superseded_by" in changed and changed["superseded_by"][1] in versions:
            continue  # told by the successor's own first event, which comes just before
        if before := replaced.get(event.record_id) if what == "insert" else None:
            what, changed = "update", event.differences(before, event.after_state)
        who = printable(str(event.actor.get("display_name", "?")))[:24]
        row = f"{event.at:%Y-%m-%d %H:%M:%S}", who, f"{what} {event.record_id}", printable(event.reason) or "-"
        lines: list[tuple[str, str]] = []
        for name, (old, new) in changed.items():
            if name == "id" or not (old or new):
                continue
            was, now = shortened(old, new)
            if old in (None, "", []):
                lines.append((name, now))
            elif columns(was + now) < WIDTH // 2:
                lines.append((name, f"{was} -> {now}"))
            else:
                lines += [(name, was), ("->", now)]
        yield row, lines


def shortened(old: object, new: object) -> tuple[str, str]:
    """Both values in print; of two texts what is around their difference, and of a long one the beginning."""
    texts = [value if isinstance(value, str) else repr(value) for value in (old, new)]
    if isinstance(old, str) and isinstance(new, str):
        start = max(0, alike(old, new) - CONTEXT)
        end = max(0, alike(old[start:][::-1], new[start:][::-1]) - CONTEXT)
        before, behind = "..." if start else "", "..." if end else ""
        texts = [f"{before}{text[start : len(text) - end]}{behind}" for text in texts]
    texts = [text if len(text) <= MOST else f"{text[:MOST]}... ({len(text):,} characters)" for text in texts]
    return printable(texts[0]), printable(texts[1])


def alike(one: str, other: str) -> int:
    """How many letters at their beginning are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (letter, another) in pairs if letter != another), min(len(one), len(other)))


def printable(text: str) -> str:
    """The text in one line, with nothing in it that a terminal obeys."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def columns(text: str) -> int:
    """How wide it is on a terminal: some letters take two columns, some marks none."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def padded(text: str, width: int) -> str:
    return text + " " * (width - columns(text))


def print_folded(lead: str, text: str) -> None:
    """Print the text beside ``lead``, in as many lines as it takes."""
    room, line = WIDTH - columns(lead), ""
    for word in text.split(" "):
        if line and columns(f"{line} {word}") > room:
            print(lead + line)
            lead, line = " " * columns(lead), word
        else:
            line = f"{line} {word}" if line else word
        while columns(line) > room:  # a word, or a language without spaces
            cut = next(n for n in range(len(line), 0, -1) if columns(line[:n]) <= room)
            print(lead + line[:cut])
            lead, line = " " * columns(lead), line[cut:]
    print((lead + line).rstrip())


sys.exit(asyncio.run(main(int(sys.argv[1]))))
