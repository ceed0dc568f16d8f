"""A memory server written with the official `mcp` package, 2.x, on its low level."""

from __future__ import annotations

import json
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from memory import SCHEMAS, Memory, main


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


def make_app(sse: bool, stateless: bool) -> Any:
    return make_server(Memory()).streamable_http_app(json_response=not sse, stateless_http=stateless)


if __name__ == "__main__":
    main(make_app)
