"""Who changed a team record, when and why, with what is different: a table of its history.

    export MEMLOG_URL=https://memory.example/mcp MEMLOG_TOKEN=... MEMLOG_TEAM=engineering
    python examples/team_history.py 815

An update makes a new record. So ask with the newest id: the versions that it replaced are in its history.
"""

from __future__ import annotations

import asyncio
import os
import sys

import memlog

HEAD = ("When (UTC)", "Who", "What", "Why")


async def rows(team: memlog.TeamClient, record_id: int, scope: memlog.Scope) -> list[tuple[str, ...]]:
    events = [event async for event in team.history(record_id, scope=scope)]
    versions = {event.record_id for event in events}
    # The last text of each version that was replaced, by the id of its successor.
    replaced = {(event.after_state or {}).get("superseded_by"): event.before_state for event in events}
    table: list[tuple[str, ...]] = [HEAD]
    for event in events:
        what, changes = event.operation, event.changes
        if "superseded_by" in changes and changes["superseded_by"][1] in versions:
            continue  # told by the successor's own first event, which comes just before
        if before := replaced.get(event.record_id) if what == "insert" else None:
            what, changes = "update", event.differences(before, event.after_state)
        when, who = f"{event.at:%Y-%m-%d %H:%M:%S}", event.actor.get("display_name", "?")
        table.append((when, who, f"{what} {event.record_id}", event.reason or "-"))
        table += [("", "", f"  {name}", f"{old!r} -> {new!r}") for name, (old, new) in changes.items() if name != "id"]
    return table


async def main(record_id: int) -> str | None:
    team = os.environ.get("MEMLOG_TEAM")
    scope = memlog.Scope.team(team) if team else memlog.Scope.personal()
    async with memlog.TeamClient(os.environ["MEMLOG_URL"], token=os.environ["MEMLOG_TOKEN"]) as client:
        try:
            table = await rows(client, record_id, scope)
        except memlog.MemlogError as error:
            return f"the history cannot be read: {error}"
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    return None


sys.exit(asyncio.run(main(int(sys.argv[1]))))
