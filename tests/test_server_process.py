"""The reference server as a process, and its store: one line, clean ends, and acknowledged means durable."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from server_helpers import CHAT, PROJECT, Process, in_process, over_sockets, socket_caller, wait_until

from server_reference import create_app
from server_reference.store import StoreUnusableError

if TYPE_CHECKING:
    from pathlib import Path


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The command with options with which it does not stay."""
    return subprocess.run(
        [sys.executable, "-m", "server_reference", *options], cwd=PROJECT, capture_output=True, text=True, timeout=30
    )


def test_one_line_says_where_it_is_and_what_opens_it() -> None:
    """Ours: URL and credentials, once connections are accepted; the port is a free one; nothing else is printed."""
    with Process("--site", "a:x", "--site", "b:y:z", "--read-token", "r1", "--team-token", "vasya:t1") as server:
        assert server.line == f"{server.url}/mcp site=a:x site=b:y:z read-token=r1 team-token=vasya:t1\n"
        listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        for credentials in (("a", "x"), ("b", "y:z")):
            assert httpx.post(f"{server.url}/mcp", json=listing, auth=credentials).status_code == 200
        for token in ("r1", "t1"):
            headers = {"authorization": f"Bearer {token}"}
            assert httpx.post(f"{server.url}/mcp", json=listing, headers=headers).status_code == 200
        assert httpx.post(f"{server.url}/mcp", json=listing, auth=("demo", "demo")).status_code == 401
        assert httpx.post(f"{server.url}/mcp", json=listing, headers={"host": "evil.example"}).status_code == 421
        server.popen.terminate()
        assert server.popen.communicate(timeout=10) == ("", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_at_once_with_status_0(name: str) -> None:
    """Ours: also while a call is stalled and a connection is open."""
    with Process("--allow-faults") as server, httpx.Client(base_url=server.url, auth=("demo", "demo")) as client:
        assert server.line.endswith(" site=demo:demo\n")
        client.post("/faults", json={"kind": "stall", "seconds": None}).raise_for_status()
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list_conversations"}})
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as stalled:
            head = (
                f"POST /mcp HTTP/1.1\r\nHost: {host}\r\nAuthorization: Basic ZGVtbzpkZW1v\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            stalled.sendall((head + body).encode())
            wait_until(lambda: client.get("/faults").json()["faults"][0]["struck"])
            server.popen.send_signal(getattr(signal, name))
            assert server.popen.wait(timeout=5) == 0


def test_help_explains_every_option() -> None:
    """Ours: exactly these options, each with its meaning, and the two formats that need more than a line."""
    said = run("--help").stdout
    for option in (
        "--host",
        "--port",
        "--db FILE",
        "--site NAME:PASSWORD",
        "--read-token TOKEN",
        "--team-token USER:TOKEN",
        "--member TEAM:USER:ROLE",
        "--records FILE",
        "--rate N",
        "--allow-faults",
        "--no-auth",
        "--conformance-tools",
    ):
        assert f"\n  {option} " in said or f"\n  {option}\n" in said, option
    assert said.count("\n  --") + said.count("\n  -h, --") == 13
    assert "default: demo:demo" in said
    assert '"superseded_by"' in said
    assert "wrong_ack" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--site", "nocolon"], "must be NAME:PASSWORD"),
        (["--team-token", "vasya:"], "must be USER:TOKEN"),
        (["--member", "engineering:vasya"], "must be TEAM:USER:ROLE"),
        (["--member", "engineering:vasya:king"], "there is no role 'king'"),
        (["--member", "two words:vasya:reader"], "a team's name is"),
        (["--rate", "0"], "rate must be above 0"),
        (["--records", "no-such-file"], "cannot read no-such-file"),
        (["--db", "/no/such/directory/x"], "cannot"),
        (["--port", "x"], "invalid int value"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--allow"], "unrecognized arguments"),
        (["--no-auth", "--host", "0.0.0.0"], "only on this machine"),
    ],
)
def test_an_option_that_cannot_work_ends_it_with_status_2_and_a_reason(options: list[str], said: str) -> None:
    """Ours: one sentence for people, and no traceback."""
    ended = run(*options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_ends_it_with_a_reason() -> None:
    """Ours: never a server on a port that nobody asked for."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("--port", str(taken.getsockname()[1]))
    assert ended.returncode == 2
    assert "cannot listen" in ended.stderr


@pytest.mark.asyncio
@pytest.mark.contract("C4", "C7")
async def test_every_acknowledged_append_survives_a_sigkill(tmp_path: Path) -> None:
    """Contract: the acknowledgement is a durability signal. The kill falls among appends of eight conversations."""
    database = str(tmp_path / "memory.sqlite3")
    acknowledged: dict[str, int] = {}

    async def lane(url: str, chat: str, killed: asyncio.Event) -> None:
        async with socket_caller(url) as caller:
            for n in range(10_000):
                ack = await caller.append(*({"n": n, "part": part} for part in range(3)), chat=chat)
                acknowledged[chat] = ack["last_seq"]
                if sum(acknowledged.values()) > 600:
                    killed.set()

    with Process("--db", database) as server:
        port, killed = server.url.rsplit(":", 1)[1], asyncio.Event()
        lanes = [asyncio.create_task(lane(server.url, f"chat_no_{n}", killed)) for n in range(8)]
        async with asyncio.timeout(30):
            await killed.wait()
        server.popen.kill()
        server.popen.wait(timeout=10)
        ends = await asyncio.wait_for(asyncio.gather(*lanes, return_exceptions=True), 30)
        assert all(isinstance(end, httpx.TransportError) for end in ends), ends

    with Process("--db", database, "--port", port) as server:
        async with socket_caller(server.url) as caller:
            for chat, last in acknowledged.items():
                items = await caller.replay(chat)
                assert len(items) >= last + 1
                assert len(items) % 3 == 0, "half of a batch"
                assert [item["seq"] for item in items] == list(range(len(items)))
                expected = [{"n": n // 3, "part": n % 3} for n in range(len(items))]
                assert [item["payload"] for item in items] == expected
                next_seq = (await caller.append({}, chat=chat))["first_seq"]
                assert next_seq == len(items)


@pytest.mark.asyncio
@pytest.mark.contract("C4", "C7")
async def test_concurrent_appends_get_ranges_without_gaps_or_overlaps(tmp_path: Path) -> None:
    """Contract: each batch occupies its own inclusive range, and its items stand there in order."""
    async with in_process(db=tmp_path / "memory.sqlite3") as caller:
        acks = await asyncio.gather(*(caller.append(*[{"batch": n}] * (n % 4 + 1)) for n in range(200)))
        items = await caller.replay()
    for n, ack in enumerate(acks):
        mine = items[ack["first_seq"] : ack["last_seq"] + 1]
        assert [item["payload"]["batch"] for item in mine] == [n] * (n % 4 + 1)
        assert len({item["recorded_at"] for item in mine}) == 1
    assert len({item["recorded_at"] for item in items}) == 200
    assert sorted(n for ack in acks for n in range(ack["first_seq"], ack["last_seq"] + 1)) == list(range(len(items)))


@pytest.mark.asyncio
@pytest.mark.contract("C7")
async def test_times_go_on_ascending_where_the_clock_was_set_back(tmp_path: Path) -> None:
    """Ours: `recorded_at` tells where batches begin, so no two may share it, nor precede an earlier one."""
    path = tmp_path / "memory.sqlite3"
    async with in_process(db=path) as caller:
        await caller.append({})
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE conversations SET last_recorded_at = '2999-12-31T23:59:59.999998Z'")
    async with in_process(db=path) as caller:
        await caller.append({}, chat="another_one")
        await caller.append({}, chat="another_one")
        times = [item["recorded_at"] for item in await caller.replay("another_one")]
    assert times == ["2999-12-31T23:59:59.999999Z", "3000-01-01T00:00:00.000000Z"]


@pytest.mark.anyio
@pytest.mark.contract("C3")
async def test_the_application_runs_in_process_on_either_loop(tmp_path: Path) -> None:
    """Ours: an in-process transport needs no lifespan events; what one application stored, the next one reads."""
    for n in range(2):
        async with in_process(db=tmp_path / "memory.sqlite3") as caller:
            assert await caller.append({"n": n}) == {"first_seq": n, "last_seq": n}
            assert [item["payload"] for item in await caller.replay()] == [{"n": n} for n in range(n + 1)]


@pytest.mark.asyncio
async def test_one_application_can_be_served_again_after_a_stop() -> None:
    """Ours: an outage in a test loses nothing, even of what is only in memory."""
    app = create_app()
    for n in range(2):
        with over_sockets(app) as url:
            async with socket_caller(url) as caller:
                assert await caller.append({}) == {"first_seq": n, "last_seq": n}
    app.state.store.close()


def test_a_database_has_one_server_and_is_one(tmp_path: Path) -> None:
    """Ours: a second server on one file, a file of another kind, and one of a later version are refused."""
    mine = tmp_path / "mine.sqlite3"
    store = create_app(db=mine).state.store
    try:
        with pytest.raises(StoreUnusableError, match="locked"):
            create_app(db=mine)
    finally:
        store.close()
    store.close()
    with contextlib.closing(sqlite3.connect(mine)) as database:
        database.execute("PRAGMA user_version = 99")
    other = tmp_path / "other.sqlite3"
    with contextlib.closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE somebody_elses (x)")
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look at. " * 100)
    for path in (mine, other, text, tmp_path):
        with pytest.raises(StoreUnusableError):
            create_app(db=path)
    assert text.read_text().startswith("not a database")


@pytest.mark.asyncio
async def test_a_store_that_fails_answers_500_and_stores_nothing(tmp_path: Path) -> None:
    """Ours: a full disk (here: a page limit) is the server's own trouble, told as such, without a payload."""
    app = create_app(db=tmp_path / "memory.sqlite3")
    async with in_process(app=app) as caller:
        await caller.append({"n": 0})
        await app.state.store._run(lambda database: database.execute("PRAGMA max_page_count = 12"), writes=False)
        items = json.dumps({"conversation_id": CHAT, "items": [{"secret": "x" * 200_000}]})
        answer = await caller.raw_call("append_memory", items)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, -32603)
        assert "secret" not in answer.text
        assert [item["payload"] for item in await caller.replay()] == [{"n": 0}]
        assert await caller.append({"n": 1}) == {"first_seq": 1, "last_seq": 1}
    app.state.store.close()


def test_it_imports_nothing_of_the_library() -> None:
    """Ours: so that a wrong constant on one side is caught by the other."""
    code = "import sys, server_reference.__main__; print([m for m in sys.modules if m.split('.')[0] == 'memlog'])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=30)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
