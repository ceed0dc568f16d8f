"""A memory of conversations, and the way to serve one, for the servers beside this that others' packages make of it.

It keeps to the contract as far as the answers go; refusals are those that the packages make by themselves. A server
prints its URL when it accepts connections and serves until its standard input ends. Imports nothing of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Callable

CONVERSATION = {"type": "string", "pattern": "^[A-Za-z0-9_-]{8,64}$"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "append_memory": {
        "type": "object",
        "properties": {
            "conversation_id": CONVERSATION,
            "items": {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": 250},
        },
        "required": ["conversation_id", "items"],
    },
    "replay_memory": {
        "type": "object",
        "properties": {
            "conversation_id": CONVERSATION,
            "offset": {"type": "integer", "format": "uint64", "minimum": 0, "default": 0},
            "limit": {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 1000},
        },
        "required": ["conversation_id", "limit"],
    },
    "text_only": {"type": "object", "properties": {}},
    "broken": {"type": "object", "properties": {}},
}


class Memory:
    def __init__(self) -> None:
        self.conversations: dict[str, list[dict[str, Any]]] = {}

    def append_memory(self, conversation_id: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        log = self.conversations.setdefault(conversation_id, [])
        at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        first = len(log)
        log += [{"seq": first + n, "recorded_at": at, "payload": item} for n, item in enumerate(items)]
        return {"first_seq": first, "last_seq": len(log) - 1}

    def replay_memory(self, conversation_id: str, limit: int, offset: int = 0) -> dict[str, Any]:
        return {"items": self.conversations.get(conversation_id, [])[offset : offset + limit]}

    def text_only(self) -> dict[str, Any]:
        return {"é": [1, 2.5, None, "\u2028"]}

    def broken(self) -> dict[str, Any]:
        raise RuntimeError("a bug in the tool")


def main(make_app: Callable[[bool, bool], Any]) -> None:
    """Serves what ``make_app(sse, stateless)`` makes, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sse", action="store_true", help="answer as event streams")
    parser.add_argument("--stateless", action="store_true", help="no sessions for older clients")
    options = parser.parse_args()
    asyncio.run(serve(make_app(options.sse, options.stateless)))


async def serve(app: Any) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    loop = asyncio.get_running_loop()

    def until_the_end_of_input() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)

    threading.Thread(target=until_the_end_of_input, daemon=True).start()
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    await serving
