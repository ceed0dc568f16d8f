"""How the server's own tests speak to it: raw HTTP, in process or over a socket, without the library."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
import uvicorn

from server_reference import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

CHAT = "c_7f3a9b2e41"
PROJECT = Path(__file__).resolve().parent.parent
JSON_SUITE = PROJECT.parent / "shared" / "data" / "json-test-suite"


class Caller:
    """Posts messages to one server with one set of credentials, as a legacy client without a session does."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, body: str | bytes, **headers: str) -> httpx.Response:
        sent = {"content-type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        return await self.client.post("/mcp", content=body, headers=sent)

    async def raw_call(self, tool: str, arguments: str | bytes) -> httpx.Response:
        """A tool call whose arguments are spliced in as they are."""
        raw = arguments.encode() if isinstance(arguments, str) else arguments
        head = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}","arguments":'
        return await self.post(head.encode() + raw + b"}}")

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured content of a call that went well, which is also its text."""
        response = await self.raw_call(tool, json.dumps(arguments))
        assert response.status_code == 200, response.text
        result = response.json()["result"]
        assert result["isError"] is False, result
        assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
        assert len(result["content"]) == 1
        return result["structuredContent"]

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The code of a call that the tool refused."""
        response = await self.raw_call(tool, json.dumps(arguments))
        assert response.status_code == 200, response.text
        result = response.json()["result"]
        assert result["isError"] is True, result
        assert "structuredContent" not in result  # it would have to match the tool's output schema
        error = json.loads(result["content"][0]["text"])["error"]
        assert set(error) == {"code", "message"}
        return error["code"]

    async def append(self, *items: Any, chat: str = CHAT) -> dict[str, Any]:
        return await self.call("append_memory", conversation_id=chat, items=list(items))

    async def replay(self, chat: str = CHAT, limit: int = 1000, **more: Any) -> list[dict[str, Any]]:
        return (await self.call("replay_memory", conversation_id=chat, limit=limit, **more))["items"]


@asynccontextmanager
async def in_process(
    *, auth: tuple[str, str] | None = ("demo", "demo"), bearer: str | None = None, app: Any = None, **settings: Any
) -> AsyncIterator[Caller]:
    """A caller of an application in this process; it is made from the settings unless one is given."""
    application = app if app is not None else create_app(**settings)
    headers = {"authorization": f"Bearer {bearer}"} if bearer else None
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(application),
        base_url="http://testserver",
        auth=None if bearer or auth is None else auth,
        headers=headers,
    )
    try:
        async with client:
            yield Caller(client)
    finally:
        if app is None:
            application.state.store.close()


@contextmanager
def over_sockets(app: Any) -> Iterator[str]:
    """Serves the application by uvicorn from a thread of its own; the value is its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False, ws="none")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@asynccontextmanager
async def socket_caller(url: str, *, auth: tuple[str, str] = ("demo", "demo")) -> AsyncIterator[Caller]:
    async with httpx.AsyncClient(base_url=url, auth=auth, timeout=10) as client:
        yield Caller(client)


class Process:
    """``python -m server_reference`` with its one line read."""

    def __init__(self, *options: str) -> None:
        # -W error: a warning in the server is a failure here too.
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "server_reference", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=PROJECT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], 20)[0]:
            self.popen.kill()
            raise AssertionError(f"no line in 20 s: {self.popen.communicate()[1]}")
        self.line = self.popen.stdout.readline()
        self.url = self.line.split(" ")[0].removesuffix("/mcp")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate(timeout=10)


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
