"""The official clients against the reference server: the `mcp` package, of both major versions, and the Inspector."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from environments import Node, UnreachableError, node_with, python_with
from server_helpers import over_sockets

from server_reference import create_app

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parent / "interop" / "official_client.py"
INSPECTOR = "@modelcontextprotocol/inspector"


@pytest.fixture(scope="session")
def python_with_mcp_1() -> Path:
    try:
        return python_with("mcp-1.30", "mcp==1.30.0")
    except UnreachableError as error:
        pytest.skip(f"mcp 1.30 cannot be installed: {error}")


@pytest.fixture(scope="session")
def inspector() -> Node:
    try:
        return node_with("inspector", f"{INSPECTOR}@2.12.0")
    except UnreachableError as error:
        pytest.skip(f"the Inspector cannot be installed: {error}")


def run(python: Path | str, mode: str) -> dict[str, Any]:
    """What the official client saw of a fresh server, after checking what the server saw of it."""
    app = create_app()
    with over_sockets(app) as url:
        ended = subprocess.run([python, SCRIPT, f"{url}/mcp", mode], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        seen = json.loads(ended.stdout)
        listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        tools = httpx.post(f"{url}/mcp", json=listing, auth=("demo", "demo")).json()["result"]["tools"]
    assert app.state.counters.calls == {"append_memory": 1, "replay_memory": 2}
    assert seen["tools"] == [[tool["name"], tool["inputSchema"], tool.get("outputSchema")] for tool in tools]

    appended, replayed, refused = seen["results"]
    assert appended[:2] == [False, {"first_seq": 0, "last_seq": 1}]
    assert [(item["seq"], item["payload"]) for item in replayed[1]["items"]] == list(enumerate(seen["items"]))
    assert replayed[0] is False
    assert refused[0] is True
    assert refused[1] is None
    assert json.loads(refused[2])["error"]["code"] == "invalid_conversation_id"
    assert all(json.loads(text) == structured for _, structured, text in (appended, replayed))
    return seen | {"methods": app.state.counters.methods}


@pytest.mark.contract("C13")
@pytest.mark.parametrize("mode", ["auto", "legacy", "2026-07-28"])
def test_the_official_client_2_lists_appends_and_replays(mode: str) -> None:
    """Contract: the tools as any client of the protocol meets them, in both eras."""
    pytest.importorskip("mcp")
    seen = run(sys.executable, mode)
    assert seen["version"].startswith("2.")
    assert bool(seen["methods"]["initialize"]) == (mode == "legacy")


@pytest.mark.contract("C13")
def test_the_official_client_1_lists_appends_and_replays(python_with_mcp_1: Path) -> None:
    """Contract: the same for the version that most programs still have; with a handshake and a session."""
    seen = run(python_with_mcp_1, "session")
    assert seen["version"] == "1.30.0"
    assert seen["session"] is True
    assert seen["methods"]["initialize"] == 1


@pytest.mark.contract("C13")
def test_the_inspectors_command_lists_appends_replays_and_is_refused(inspector: Node, tmp_path: Path) -> None:
    """Contract: the tools as a person meets them who looks at a server with the usual instrument."""
    app = create_app()
    with over_sockets(app) as url:
        basic = base64.b64encode(b"demo:demo").decode()

        def inspected(*options: str) -> dict[str, Any]:
            where = ["--cli", f"{url}/mcp", "--transport", "http", "--header", f"Authorization: Basic {basic}"]
            command = inspector.command(f"{INSPECTOR}/clients/launcher/build/index.js", *where, *options)
            # It keeps files in the home directory, which are nobody's business here.
            environment = os.environ | {"HOME": str(tmp_path)}
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=120, env=environment, stdin=subprocess.DEVNULL
            )
            assert ended.stdout, ended.stderr
            return json.loads(ended.stdout)

        def called(tool: str, **arguments: Any) -> dict[str, Any]:
            pairs = [
                f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in arguments.items()
            ]
            result = inspected("--method", "tools/call", "--tool-name", tool, "--tool-arg", *pairs)
            return result | {"text": json.loads(result["content"][0]["text"])}

        listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        tools = httpx.post(f"{url}/mcp", json=listing, auth=("demo", "demo")).json()["result"]["tools"]
        items = [{"role": "user", "text": "héllo 記憶 🙂", "n": 1.5}, {"nested": [[{}], None]}]
        assert inspected("--method", "tools/list")["tools"] == tools
        appended = called("append_memory", conversation_id="c_inspector", items=items)
        assert appended["structuredContent"] == appended["text"] == {"first_seq": 0, "last_seq": 1}
        replayed = called("replay_memory", conversation_id="c_inspector", limit=10, offset=0)
        assert [item["payload"] for item in replayed["structuredContent"]["items"]] == items
        refused = called("replay_memory", conversation_id="short", limit=10)
        assert refused["isError"] is True
        assert refused["text"]["error"]["code"] == "invalid_conversation_id"
    assert app.state.counters.calls == {"append_memory": 1, "replay_memory": 2}
