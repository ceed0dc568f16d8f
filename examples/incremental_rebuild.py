"""Rebuild an agent's state quickly: a snapshot of what a part of the log added up to, and then only the rest of it.

    export MEMLOG_URL=http://127.0.0.1:8080/mcp MEMLOG_AUTH=demo:demo
    python examples/incremental_rebuild.py snapshot.json milk bread
    python examples/incremental_rebuild.py snapshot.json milk

Each run counts what it is given, says how much of the log it had to read, and leaves a snapshot for the next one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import memlog

CONVERSATION = "c_counted_things"
NOTHING: dict[str, Any] = {"state": {}, "offset": 0, "last": None}


async def rebuild(chat: memlog.Conversation, snapshot: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The snapshot brought up to the end of the log, and how many items that took."""
    state, offset, last = dict(snapshot["state"]), snapshot["offset"], snapshot["last"]
    # Is it still the log that the snapshot was taken of? Then its last item, offset - 1, is the same.
    replay = chat.replay(max(offset - 1, 0), include_pending=False)
    if offset:
        item = await anext(replay, None)
        if item is None or [str(item.recorded_at), item.payload] != last:
            return await rebuild(chat, NOTHING)
    read = 0
    async for item in replay:
        state[item.payload["thing"]] = state.get(item.payload["thing"], 0) + 1
        last = [str(item.recorded_at), item.payload]
        read += 1
    return {"state": state, "offset": replay.next_offset if read else offset, "last": last}, read


async def main(snapshot: dict[str, Any], things: list[str]) -> dict[str, Any]:
    async with memlog.open_log() as log:
        chat = log.conversation(CONVERSATION)
        for thing in things:
            chat.append({"thing": thing})
        # A snapshot is of what is in the log, and nothing that is only on its way there.
        if not (await log.flush(timeout=10)).complete:
            sys.exit("not everything is in the log yet; the next run counts it")
        snapshot, read = await rebuild(chat, snapshot)
    print(f"{read} read of {snapshot['offset']}: {snapshot['state']}")
    return snapshot


if __name__ == "__main__":
    file = Path(sys.argv[1])
    before = json.loads(file.read_text()) if file.exists() else NOTHING
    file.write_text(json.dumps(asyncio.run(main(before, sys.argv[2:]))))
