"""Rebuild an agent's state after a restart: the log holds what happened, the state is what it adds up to.

    export MEMLOG_URL=http://127.0.0.1:8080/mcp MEMLOG_AUTH=demo:demo
    python examples/rebuild_state.py add milk
    python examples/rebuild_state.py done milk

Every run is a restart that begins with nothing but the log.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import memlog

CONVERSATION = "c_shopping_list"


def apply(state: dict[str, bool], event: dict[str, Any]) -> None:
    """The only place that changes the state, both for what happens now and for what happened before."""
    state[event["thing"]] = event["event"] == "done"


async def rebuild(chat: memlog.Conversation) -> dict[str, bool]:
    state: dict[str, bool] = {}
    # In order and without a gap; what has not reached the server yet comes last.
    async for item in chat.replay():
        apply(state, item.payload)
    return state


async def main(arguments: list[str]) -> str | None:
    async with memlog.open_log() as log:
        chat = log.conversation(CONVERSATION)
        try:
            state = await rebuild(chat)
        except memlog.MemoryUnavailableError as error:
            # Going on with an empty list would be wrong: unknown is not the same as empty.
            return f"the list cannot be rebuilt: {error}"
        if arguments:
            event = {"event": arguments[0], "thing": arguments[1]}
            chat.append(event)
            apply(state, event)
        for thing, done in state.items():
            print(f"[{'x' if done else ' '}] {thing}")
    return None


sys.exit(asyncio.run(main(sys.argv[1:])))
