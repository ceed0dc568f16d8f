"""Reads the log as anybody could: JSON-RPC over HTTP POST, without memlog. Trusts nothing it can check."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .script import Payload

PROTOCOL = "2026-07-28"
PAGE = 500
READERS = 4


class RawLogError(Exception):
    """The server's answer is not what the contract says; the message tells which answer and why."""


async def read_all(url: str, auth: tuple[str, str], conversations: Iterable[str]) -> dict[str, list[Payload]]:
    """Every payload of these conversations and of all others that the server lists, in the order of ``seq``."""
    async with httpx.AsyncClient(auth=auth, timeout=30.0, trust_env=False) as client:
        log = _RawLog(client, url)
        ids = sorted({*conversations, *await log.listed()})
        todo = iter(ids)
        found: dict[str, list[Payload]] = {}

        async def reader() -> None:
            for conversation in todo:
                found[conversation] = await log.read(conversation)

        async with asyncio.TaskGroup() as readers:
            for _ in range(READERS):
                readers.create_task(reader())
        return found


class _RawLog:
    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url
        self._ids = itertools.count(1)

    async def listed(self) -> list[str]:
        names: list[str] = []
        while True:
            after = {"after": names[-1]} if names else {}
            page = (await self._call("list_conversations", {"limit": PAGE, **after}))["conversations"]
            names += [row["conversation_id"] for row in page]
            if len(page) < PAGE:
                return names

    async def read(self, conversation: str) -> list[Payload]:
        payloads: list[Payload] = []
        while True:
            arguments = {"conversation_id": conversation, "offset": len(payloads), "limit": PAGE}
            page = (await self._call("replay_memory", arguments))["items"]
            for item in page:
                if item["seq"] != len(payloads):
                    raise RawLogError(f"{conversation}: seq {item['seq']} where {len(payloads)} should stand")
                payloads.append(item["payload"])
            if len(page) < PAGE:
                return payloads

    async def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        meta = {
            "io.modelcontextprotocol/protocolVersion": PROTOCOL,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        message = {
            "jsonrpc": "2.0",
            "id": next(self._ids),
            "method": "tools/call",
            "params": {"name": tool, "arguments": arguments, "_meta": meta},
        }
        headers = {
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": PROTOCOL,
            "Mcp-Method": "tools/call",
            "Mcp-Name": tool,
        }
        response = await self._client.post(self._url, json=message, headers=headers)
        try:
            result: dict[str, Any] = response.json()["result"]
            if not result.get("isError"):
                answer: dict[str, Any] = result["structuredContent"]
                return answer
        except (ValueError, KeyError, TypeError) as error:
            raise RawLogError(f"{tool}: HTTP {response.status_code}, and no result in the answer") from error
        raise RawLogError(f"{tool}: the server refused the call: {result.get('content')}")
