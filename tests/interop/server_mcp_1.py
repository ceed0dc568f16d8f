"""A memory server written with the official `mcp` package, 1.x, on its low level."""

from __future__ import annotations

import json
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from memory import SCHEMAS, Memory, main
from starlette.applications import Starlette
from starlette.routing import Mount


def make_server(memory: Memory) -> Server[Any]:
    server: Server[Any] = Server("memory", version="1.0")

    @server.list_tools()
    async def list_tools() -> list[types.Tool]:
        return [types.Tool(name=name, inputSchema=schema) for name, schema in SCHEMAS.items()]

    @server.call_tool()
    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        value = getattr(memory, name)(**arguments)
        text = types.TextContent(type="text", text=json.dumps(value, indent=2))
        return [text] if name == "text_only" else ([text], value)

    return server


def make_app(sse: bool, stateless: bool) -> Any:
    manager = StreamableHTTPSessionManager(make_server(Memory()), json_response=not sse, stateless=stateless)
    return Starlette(routes=[Mount("/mcp", app=manager.handle_request)], lifespan=lambda _: manager.run())


if __name__ == "__main__":
    main(make_app)
