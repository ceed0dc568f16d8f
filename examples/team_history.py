"""Who changed a team record, when and why, with what is different: a table of its history.

    export MEMLOG_URL=https://memory.example/mcp MEMLOG_TOKEN=... MEMLOG_TEAM=engineering
    python examples/team_history.py 815

An update makes a new record. So ask with the newest id: the versions that it replaced are in its history. Of a long
text it shows what is around the first difference.
"""

import asyncio
import os
import sys
import textwrap
import unicodedata

import memlog

HEAD = f"{'When (UTC)':19}  {'Who':12}  {'What':12}  "


async def main(record_id: int) -> None:
    scope = memlog.Scope.team(os.environ["MEMLOG_TEAM"]) if "MEMLOG_TEAM" in os.environ else memlog.Scope.personal()
    async with memlog.TeamClient(os.environ["MEMLOG_URL"], token=os.environ["MEMLOG_TOKEN"]) as client:
        try:
            events = [event async for event in client.history(record_id, scope=scope)]
        except memlog.MemlogError as error:
            sys.exit(f"the history cannot be read: {error}")
    show(HEAD, "Why")
    replaced = {(event.after_state or {}).get("superseded_by"): event.before_state for event in events}  # by successor
    for event in events:
        what, changes = event.operation, event.changes
        if changes.get("superseded_by", (None, None))[1] in {other.record_id for other in events}:
            continue  # told by the successor's own first event, which comes just before
        if before := replaced.get(event.record_id) if what == "insert" else None:
            what, changes = "update", event.differences(before, event.after_state)
        who = str(event.actor.get("display_name", "?"))[:12]
        lead = f"{event.at:%Y-%m-%d %H:%M:%S}  {who:{12 - wide(who)}}  {f'{what} {event.record_id}':12}  "
        show(lead, event.reason or "-")
        for name, (old, new) in changes.items():
            texts = [value if value and isinstance(value, str) else repr(value) for value in (old, new)]
            start = max(0, next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0) - 20)
            texts = [f"{'...' * (start > 0)}{text[start:][:400]}{'...' * (len(text) > start + 400)}" for text in texts]
            for label, text in zip((name, "->"), texts if old else texts[1:], strict=False):
                if name != "id" and (old or new):
                    show(f"{label:>19}  ", text)


def show(lead: str, text: str) -> None:
    """Print the text beside ``lead``, in lines of 100 columns, and nothing that a terminal would obey."""
    lead, text = ("".join(c if c.isprintable() else repr(c)[1:-1] for c in part) for part in (lead, text))
    width = len(lead) + (100 - len(lead) - wide(lead)) // (2 if wide(text) else 1)
    print(textwrap.fill(text, width, initial_indent=lead, subsequent_indent=" " * (len(lead) + wide(lead))))


def wide(text: str) -> int:
    return sum(unicodedata.east_asian_width(c) in "WF" for c in text)


asyncio.run(main(int(sys.argv[1])))
