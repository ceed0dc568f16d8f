"""Our client against servers that others' packages make, in each of their modes and in both eras."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from environments import UnreachableError, node_with, python_with

from memlog.client import Client
from memlog.errors import MemlogError, PermanentError
from memlog.models import Ack
from memlog.retry import NO_RETRY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHAT = "c_7f3a9b2e41"
INTEROP = Path(__file__).parent / "interop"
SERVERS = ("mcp-2", "mcp-1.30", "fastmcp-4", "typescript-sdk-1")
MODERN = ("mcp-2", "fastmcp-4")
"""Those that know the revision without a handshake."""

MODES = {"json": [], "sse": ["--sse"], "json-stateless": ["--stateless"], "sse-stateless": ["--sse", "--stateless"]}

pytestmark = [pytest.mark.interop, pytest.mark.anyio]


def command_of(server: str) -> list[str]:
    """How to start it; its environment is made if there is none yet."""
    try:
        if server == "mcp-1.30":
            return [str(python_with("mcp-1.30", "mcp==1.30.0")), str(INTEROP / "server_mcp_1.py")]
        if server == "fastmcp-4":
            return [str(python_with("fastmcp-4", "fastmcp==4.1.6")), str(INTEROP / "server_fastmcp.py")]
        if server == "typescript-sdk-1":
            node = node_with("typescript-sdk-1", "@modelcontextprotocol/sdk@1.32.2")
            return node.command(INTEROP / "server_typescript.mjs", str(node.place))
    except UnreachableError as error:
        pytest.skip(f"{server} cannot be installed: {error}")
    if importlib.util.find_spec("mcp") is None:
        pytest.skip("the official mcp package is not installed")
    return [sys.executable, str(INTEROP / "server_mcp_2.py")]


@contextmanager
def running(server: str, *options: str) -> Iterator[str]:
    """The server in a process of its own, which ends with its standard input whatever becomes of the test."""
    command = [*command_of(server), *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http"), "the server did not start"
            yield url
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def short(mode: str, era: str) -> bool:
    """In every run: the two forms that differ most, found out as a user's client finds them out."""
    return era == "auto" and mode in ("json", "sse-stateless")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "client" in metafunc.fixturenames:
        each = [
            pytest.param(
                (server, mode), era, id=f"{server}-{mode}-{era}", marks=() if short(mode, era) else pytest.mark.slow
            )
            for server in SERVERS
            for mode in MODES
            for era in ("auto", "legacy", *(["modern"] if server in MODERN else []))
        ]
        metafunc.parametrize(("other", "client"), each, indirect=True)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str, str], str]]:
    """Each is started once, by the first test that asks for it: some take seconds."""
    urls: dict[tuple[str, str], str] = {}
    with ExitStack() as stack:

        def url_of(server: str, mode: str) -> str:
            if (server, mode) not in urls:
                urls[server, mode] = stack.enter_context(running(server, *MODES[mode]))
            return urls[server, mode]

        yield url_of


@pytest.fixture
def other(request: pytest.FixtureRequest, servers: Callable[[str, str], str]) -> str:
    return servers(*request.param)


@pytest.fixture
async def client(request: pytest.FixtureRequest, other: str, anyio_backend: str):
    async with Client(other, era=request.param, retry=NO_RETRY, timeout=20) as opened:
        yield opened


def fresh(request: pytest.FixtureRequest) -> str:
    """An id of this test's own: the server outlives it."""
    return f"c_{abs(hash(request.node.nodeid)):020}"


async def test_append_and_replay_give_back_what_was_given(client: Client, request: pytest.FixtureRequest):
    """Interop: the typed methods, several calls on one client, unusual text and numbers."""
    chat = fresh(request)
    items = [{"text": "Привет \u2028 😀", "n": 1.5, "big": 2**53, "none": None}, {"nested": [[{}], True]}]
    assert await client.append_memory(chat, items) == Ack(0, 1)
    assert await client.append_memory(chat, [{"n": n} for n in range(250)]) == Ack(2, 251)
    found = await client.replay_memory(chat)
    assert [item.payload for item in found] == [*items, *({"n": n} for n in range(250))]
    assert await client.replay_memory(chat, 251, 1) == found[251:]
    assert [item.seq async for item in client.replay(chat, 200)] == list(range(200, 252))


async def test_a_large_batch_arrives_whole(client: Client, request: pytest.FixtureRequest):
    """Interop: a full mebibyte, there and back; one event of a stream may be as long as that."""
    chat = fresh(request)
    items = [{"x": "ж" * 131_000} for _ in range(4)]
    assert await client.append_memory(chat, items) == Ack(0, 3)
    assert [item.payload for item in await client.replay_memory(chat)] == items


async def test_the_open_door_reads_text_and_tells_refusals(client: Client, request: pytest.FixtureRequest):
    """Interop: text content without structure; an unknown tool and a bug in a tool are errors, and the next call works."""
    assert await client.call_tool("text_only") == {"é": [1, 2.5, None, "\u2028"]}
    for tool in ("no_such_tool", "broken"):
        with pytest.raises(MemlogError) as caught:
            await client.call_tool(tool)
        # Some call an unknown tool an invalid request, others a failure like any.
        assert caught.value.outcome == ("refused" if isinstance(caught.value, PermanentError) else "unknown")
        assert tool == "no_such_tool" or not isinstance(caught.value, PermanentError)
    assert await client.append_memory(fresh(request), [{}]) == Ack(0, 0)


async def test_many_calls_at_once_are_all_answered(client: Client, request: pytest.FixtureRequest):
    """Interop: 40 appends at once, more than there are connections, and each is there once."""
    chat = fresh(request)
    async with anyio.create_task_group() as group:
        for n in range(40):
            group.start_soon(client.append_memory, chat, [{"n": n}])
    assert sorted(item.payload["n"] for item in await client.replay_memory(chat)) == list(range(40))


@pytest.mark.parametrize("server", SERVERS)
async def test_a_server_that_restarted_without_our_session_is_no_trouble(anyio_backend: str, server: str):
    """Interop: a session that the server does not know is answered with 404; one new handshake, and on."""
    with running(server) as url:
        async with Client(url, era="legacy", retry=NO_RETRY, timeout=20) as client:
            await client.append_memory(CHAT, [{}])
            terms = client._session._terms
            assert terms is not None
            assert terms.session_id is not None
            client._session._terms = type(terms)(terms.version, "a-session-of-another-life")
            assert await client.append_memory(CHAT, [{}]) == Ack(1, 1)
