"""A memory server written with fastmcp, 4.x: schemas and structured results are made of the functions' signatures."""

from __future__ import annotations

import json
from typing import Any

from fastmcp import FastMCP
from fastmcp.tools import ToolResult
from memory import Memory, main


def make_app(sse: bool, stateless: bool) -> Any:
    memory, server = Memory(), FastMCP("memory")

    @server.tool
    def append_memory(conversation_id: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        return memory.append_memory(conversation_id, items)

    @server.tool
    def replay_memory(conversation_id: str, limit: int, offset: int = 0) -> dict[str, Any]:
        return memory.replay_memory(conversation_id, limit, offset)

    @server.tool
    def text_only() -> ToolResult:
        return ToolResult(content=json.dumps(memory.text_only()))

    @server.tool
    def broken() -> dict[str, Any]:
        return memory.broken()

    return server.http_app(path="/mcp", json_response=not sse, stateless_http=stateless)


if __name__ == "__main__":
    main(make_app)
