"""The official `mcp` package as a client: lists the tools, appends, replays, is refused once, and prints what it saw.

A script of its own, so that it runs in an environment of its own: `official_client.py URL MODE`, where MODE is `auto`,
`legacy` or a protocol version (2.x) or `session` (1.x). Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

CHAT = "c_official_client"
ITEMS = [{"role": "user", "text": "héllo 記憶 🙂", "n": 1.5}, {"role": "tool", "result": {"b": 1, "a": [None, True]}}]
APPEND = {"conversation_id": CHAT, "items": ITEMS}
REPLAY = {"conversation_id": CHAT, "limit": 10, "offset": 0}
REFUSED = {"conversation_id": "short", "limit": 10}


async def with_version_2(url: str, mode: str) -> dict[str, Any]:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async with httpx2.AsyncClient(auth=("demo", "demo")) as http:
        transport = streamable_http_client(url, http_client=http)
        async with Client(transport, mode=mode, read_timeout_seconds=20) as client:
            tools = [(tool.name, tool.input_schema, tool.output_schema) for tool in (await client.list_tools()).tools]
            results = [
                await client.call_tool("append_memory", APPEND),
                await client.call_tool("replay_memory", REPLAY),
                await client.call_tool("replay_memory", REFUSED),
            ]
    return {
        "tools": tools,
        "results": [(one.is_error, one.structured_content, one.content[0].text) for one in results],
    }


async def with_version_1(url: str) -> dict[str, Any]:
    import httpx
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx.AsyncClient(auth=("demo", "demo"), timeout=20) as http,
        streamable_http_client(url, http_client=http) as (read, write, session_id),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        tools = [(tool.name, tool.inputSchema, tool.outputSchema) for tool in (await session.list_tools()).tools]
        results = [
            await session.call_tool("append_memory", APPEND),
            await session.call_tool("replay_memory", REPLAY),
            await session.call_tool("replay_memory", REFUSED),
        ]
        has_session = session_id() is not None
    return {
        "tools": tools,
        "results": [(one.isError, one.structuredContent, one.content[0].text) for one in results],
        "session": has_session,
    }


async def main() -> None:
    url, mode = sys.argv[1:]
    seen = await (with_version_1(url) if mode == "session" else with_version_2(url, mode))
    print(json.dumps(seen | {"version": version("mcp"), "items": ITEMS}))


asyncio.run(main())
