"""The official `mcp` package's client, of both major versions, against the reference server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_helpers import PROJECT, over_sockets

from server_reference import create_app

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).parent / "interop" / "official_client.py"
VENVS = Path(os.environ.get("MEMLOG_INTEROP_VENVS") or PROJECT / ".venvs")


@pytest.fixture(scope="session")
def python_with_mcp_1() -> Path:
    """An interpreter that has mcp 1.30.0, made once; skips where no package index can be reached."""
    place = VENVS / "mcp-1.30"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = place / "complete"
    if not complete.exists():
        venv.create(place, clear=True, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "mcp==1.30.0"]
        if subprocess.run(install, capture_output=True, timeout=600).returncode != 0:
            pytest.skip("mcp 1.30.0 could not be installed: is a package index within reach?")
        complete.touch()
    return python


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
    assert refused[1]["error"]["code"] == "invalid_conversation_id"
    assert all(json.loads(text) == structured for _, structured, text in seen["results"])
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
