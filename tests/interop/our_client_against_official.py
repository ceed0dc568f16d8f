"""A memory server written with the official `mcp` package (2.x), for our client to talk to. Imports nothing of ours.

    python our_client_against_official.py [--sse] [--stateless]

prints its URL when it accepts connections and serves until its standard input ends. It keeps to the contract as far as
the answers go; its refusals are those that the package makes by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
from datetime import UTC, datetime
from typing import Any

import uvicorn
from mcp import types
from mcp.server.lowlevel import Server

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


def make_server(memory: Memory) -> Server[Any]:
    async def list_tools(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name=name, input_schema=schema) for name, schema in SCHEMAS.items()]
        )

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in SCHEMAS:
            text = json.dumps({"error": {"code": "unknown_tool", "message": "no such tool"}})
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)
        value = getattr(memory, params.name)(**(params.arguments or {}))
        text = types.TextContent(type="text", text=json.dumps(value, indent=2))
        if params.name == "text_only":
            return types.CallToolResult(content=[text])
        return types.CallToolResult(content=[text], structured_content=value)

    return Server("memory", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


async def serve(options: argparse.Namespace) -> None:
    app = make_server(Memory()).streamable_http_app(json_response=not options.sse, stateless_http=options.stateless)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sse", action="store_true", help="answer as event streams")
    parser.add_argument("--stateless", action="store_true", help="no sessions for older clients")
    asyncio.run(serve(parser.parse_args()))
