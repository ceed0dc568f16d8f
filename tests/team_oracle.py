"""The real team server (total-agent-memory 14.7.0) beside the reference server: the same calls, the same answers.

    scripts/oracle            run the scenario and a random walk on both, and say where they differ
    scripts/oracle --record   also write what the real one answered to tests/cassettes/, which the normal tests replay

It is installed into an environment of its own (some 600 MB) and spoken to over HTTP only. Compared is what the tools
answer, apart from times (their precision counts) and the names that a server gives its workspaces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from environments import UnreachableError, python_with

from memlog import MemlogError, Scope, TeamClient
from memlog.retry import NO_RETRY
from memlog.testing import reference_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

VERSION = "14.7.0"
# With the first generation of the protocol's package, as most installations have it.
PACKAGES = (f"total-agent-memory=={VERSION}", "mcp>=1.9,<2")
CASSETTE = Path(__file__).parent / "cassettes" / f"team-server-{VERSION}.json"

MEMBERS = {"engineering": {"vasya": "editor", "petya": "manager", "olga": "reader"}}
USERS = ("vasya", "petya", "olga", "zoe")
TEAM = Scope.team("engineering")
START_SECONDS = 60.0
ABORT_SECONDS = 0.4
"""A workspace that is used for the first time needs a second or more."""

CALM = {
    "ANONYMIZED_TELEMETRY": "False",
    "HF_HUB_OFFLINE": "1",
    "MEMORY_CROSS_RERANK": "off",
    "MEMORY_LLM_ENABLED": "false",
    "MEMORY_MODE": "fast",
    "MEMORY_QUALITY_GATE_ENABLED": "false",
    "TAM_TEAM_MAX_WORKERS": "8",  # one for each workspace, or they start anew all the time
}


# -- the servers ------------------------------------------------------------------------------------------------------


class Place:
    """A running server: its address, its users' tokens, and how to make the next save outlast its caller."""

    def __init__(self, url: str, tokens: dict[str, str], stall: Callable[[], None] = lambda: None) -> None:
        self.url = url
        self.tokens = tokens
        self.stall = stall


@contextlib.contextmanager
def real_server(python: Path) -> Iterator[Place]:
    """The real one in a directory of its own, on a free port of this machine."""
    with tempfile.TemporaryDirectory(prefix="team-server-") as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        root = Path(directory)
        environment = os.environ | CALM | {"HOME": directory, "NO_COLOR": "1"}
        command = [str(python.parent / "tam-team"), "--root", str(root / "root")]

        def admin(*arguments: str) -> None:
            subprocess.run(
                [*command, *arguments],
                env=environment,
                cwd=root,
                check=True,
                capture_output=True,
                timeout=START_SECONDS,
            )

        for user in USERS:
            admin("user-add", user, user)
            admin("token-create", "--client", "team-token", "--out", str(root / user), user)
        for team, roles in MEMBERS.items():
            admin("team-add", team, team)
            for user, role in roles.items():
                admin("member", user, team, role)
        with (root / "log").open("wb") as log:
            server = subprocess.Popen(
                [*command, "serve", "--host", "127.0.0.1", "--port", str(port)],
                env=environment,
                cwd=root,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it has processes of its own, which end with it
            )
        try:
            _wait_for(f"http://127.0.0.1:{port}/healthz", server, root / "log")
            tokens = {user: (root / user).read_text().strip() for user in USERS}
            yield Place(f"http://127.0.0.1:{port}/mcp/", tokens)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(10)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the real server did not start:\n{log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def our_server() -> Iterator[Place]:
    tokens = {user: f"token-of-{user}" for user in USERS}
    with reference_server(team_tokens={t: user for user, t in tokens.items()}, team_members=MEMBERS) as server:

        def stall() -> None:
            server.faults.add("stall", tool="memory_save", when="after", seconds=4 * ABORT_SECONDS)

        yield Place(server.url, tokens, stall)
        server.faults.clear()  # ends the stall, whose caller has gone
        time.sleep(0.1)


# -- what goes over the wire ------------------------------------------------------------------------------------------

Exchange = dict[str, Any]


class Recorder(httpx.AsyncBaseTransport):
    """Notes each exchange, in order. One list serves all users: the scenario does one thing at a time."""

    def __init__(self, user: str, exchanges: list[Exchange]) -> None:
        self.user = user
        self.exchanges = exchanges
        self.network = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange: Exchange = {"user": self.user, **_asked(request.method, await request.aread())}
        self.exchanges.append(exchange)
        response = await self.network.handle_async_request(request)
        body = await response.aread()
        await response.aclose()
        exchange["status"] = response.status_code
        exchange["type"] = response.headers.get("content-type", "")
        exchange["body"] = settled(body.decode())
        headers = {
            name: value
            for name, value in response.headers.items()
            if name not in ("content-length", "transfer-encoding")
        }
        return httpx.Response(response.status_code, headers=headers, content=body)

    async def aclose(self) -> None:
        await self.network.aclose()


class Player(httpx.AsyncBaseTransport):
    """Answers as the recorded server did, as long as it is asked the same in the same order."""

    def __init__(self, user: str, exchanges: Iterator[Exchange]) -> None:
        self.user = user
        self.exchanges = exchanges

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = next(self.exchanges)
        asked = {"user": self.user, **_asked(request.method, await request.aread())}
        recorded = {name: exchange.get(name) for name in asked}
        assert asked == recorded, f"asked was {asked}, recorded is {recorded}"
        if "status" not in exchange:
            raise httpx.ReadTimeout("as recorded")
        return httpx.Response(
            exchange["status"], headers={"content-type": exchange["type"]}, content=exchange["body"].encode()
        )


def _asked(verb: str, body: bytes) -> Exchange:
    message = json.loads(body) if body else {}
    params = message.get("params", {})
    return {
        "verb": verb,
        "id": message.get("id"),
        "method": message.get("method"),
        "tool": params.get("name"),
        "arguments": params.get("arguments"),
    }


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_KEY = re.compile(r"((?:personal|team)_)[0-9a-f]{64}")


def settled(text: str) -> str:
    """The text with one moment for all times, of the same precision, and one name for all workspaces of a kind."""
    text = _TIME.sub(lambda match: "2026-01-02T03:04:05" + re.sub(r"\d", "6", match[1] or "") + "Z", text)
    return _KEY.sub(r"\1key", text)


def answers(exchanges: list[Exchange]) -> list[Any]:
    """What the tools said: who asked what, and the answer as JSON or, if it is none, as text."""
    told = []
    for exchange in exchanges:
        if exchange["method"] != "tools/call":
            continue
        told.append({name: exchange[name] for name in ("user", "tool", "arguments")})
        if "status" not in exchange:
            continue
        message = json.loads(exchange["body"])
        result = message.get("result", {})
        texts = [block["text"] for block in result.get("content", [])]
        assert "structuredContent" not in result
        told[-1] |= {
            "status": exchange["status"],
            "isError": result.get("isError"),
            "refused": message.get("error"),
            "answer": [_json_or_text(text) for text in texts],
        }
    return told


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- the scenario -----------------------------------------------------------------------------------------------------


def request_id(name: str) -> str:
    return str(uuid5(NAMESPACE_URL, name))


async def told(call: Awaitable[Any]) -> Any:
    """The value, or the error by its class, code and outcome."""
    try:
        return await call
    except MemlogError as error:
        return type(error).__name__, error.code, getattr(error, "outcome", None)


async def all_of(entries: AsyncIterator[Any]) -> list[Any]:
    return [entry async for entry in entries]


async def scenario(place: Place, transport: Callable[[str], httpx.AsyncBaseTransport]) -> dict[str, Any]:
    """All that the scenario did, by step: values and errors as the client gives them."""
    async with contextlib.AsyncExitStack() as stack:

        async def client(user: str, **settings: Any) -> TeamClient:
            return await stack.enter_async_context(
                TeamClient(place.url, token=place.tokens[user], transport=transport(user), **settings)
            )

        seen: dict[str, Any] = {}
        vasya, petya, olga, zoe = [await client(user) for user in USERS]
        seen["scopes"] = [await one.scopes() for one in (vasya, olga, zoe)]

        # Insert, confirm, update twice, delete.
        text = "Use pgbouncer in transaction mode, for the billing API!"
        first = await vasya.save(
            text,
            type="decision",
            project="billing-api",
            tags=["Postgres", " pooling ", "postgres"],
            context="load tests",
            importance="high",
            scope=TEAM,
            request_id=request_id("insert"),
        )
        confirmed = await petya.save(
            "use PGBOUNCER in transaction  mode for the billing api",
            type="decision",
            project="billing-api",
            scope=TEAM,
            request_id=request_id("confirm"),
        )
        second = await petya.update(
            first.id,
            "Use pgbouncer in session mode.",
            expected_revision=1,
            reason="Migrations need session-level locks",
            scope=TEAM,
            request_id=request_id("update 1"),
        )
        third = await vasya.update(
            second.id,
            "Use no pooler.",
            expected_revision=1,
            reason="The driver pools",
            scope=TEAM,
            request_id=request_id("update 2"),
        )
        deleted = await vasya.delete(
            third.id, expected_revision=1, reason="Obsolete", scope=TEAM, request_id=request_id("delete")
        )
        seen["written"] = [first, confirmed, second, third, deleted]
        seen["read"] = [await olga.get(one.id, scope=TEAM) for one in (first, second, third)]

        # The history, by new and old id, page by page, past the end.
        for one in (third, second, first):
            seen[f"history {one.id}"] = await all_of(olga.history(one.id, scope=TEAM))
        pages = [await olga.memory_history(third.id, TEAM, 0, 1)]
        while pages[-1]:
            pages.append(await olga.memory_history(third.id, TEAM, pages[-1][-1].sequence, 1))
        seen["pages of one"] = pages
        seen["past the end"] = await olga.memory_history(third.id, TEAM, 10_000)
        noted = await petya.save("Said many times.", scope=Scope.shared(), request_id=request_id("many"))
        for n in range(51):
            await petya.save("said many times", scope=Scope.shared(), request_id=request_id(f"many {n}"))
        seen["pages of fifty"] = await all_of(zoe.history(noted.id, scope=Scope.shared()))
        seen["export"] = await all_of(olga.export(scope=TEAM))
        seen["export from there"] = await all_of(olga.export(scope=TEAM, after=first.id, limit=1))

        # Refusals.
        late = {"expected_revision": 1, "reason": "too late", "scope": TEAM}
        seen["refused"] = [
            await told(olga.memory_history(4711, TEAM)),
            await told(olga.get(4711, scope=TEAM)),
            await told(vasya.update(4711, "x", **late, request_id=request_id("wrong id 1"))),
            await told(vasya.delete(4711, **late, request_id=request_id("wrong id 2"))),
            await told(vasya.update(first.id, "x", **late, request_id=request_id("stale 1"))),
            await told(vasya.delete(third.id, **late, request_id=request_id("stale 2"))),
            await told(olga.save("x", scope=TEAM, request_id=request_id("reader 1"))),
            await told(olga.delete(first.id, **late, request_id=request_id("reader 2"))),
            await told(zoe.memory_history(first.id, TEAM)),
            await told(zoe.get(1, scope=Scope.team("nowhere"))),
            await told(vasya.memory_history(first.id)),
        ]
        bad: list[dict[str, Any]] = [{}, {"id": 0}, {"id": "815"}, {"id": 8.5}, {"id": 1, "limit": 51}]
        bad += [{"id": 1, "limit": 0}, {"id": 1, "after": -1}, {"id": 1, "after": None}, {"id": 1, "before": 3}]
        bad += [{"id": 1, "scope": {"kind": "company"}}, {"id": 1, "scope": {"kind": "team", "team_id": "no spaces"}}]
        bad += [{"id": 1, "scope": None}, {"id": 1, "scope": {"kind": "shared", "owner": 1}}, {"id": 0, "x": 1, "y": 2}]
        seen["malformed"] = [await told(vasya.call_tool("memory_history", arguments)) for arguments in bad]
        worse: list[dict[str, Any]] = [{"content": ""}, {"content": "x", "type": "idea"}, {"content": "x", "tags": "a"}]
        worse += [{"content": "x", "tags": ["a"] * 65}, {"content": 5}, {"content": "x", "project": "p" * 129}]
        seen["malformed saves"] = [await told(vasya.call_tool("memory_save", arguments)) for arguments in worse]

        # One request_id, again and for something else.
        again = {"scope": TEAM, "request_id": request_id("again").upper()}
        seen["again"] = [
            await vasya.save("Once only.", **again),
            await vasya.save("Once only.", **again),
            await told(vasya.save("Something else.", **again)),
            await told(vasya.delete(first.id, expected_revision=1, reason="x", **again)),
            await vasya.save("Once only.", scope=Scope.shared(), request_id=again["request_id"]),
            await petya.save("Of another user.", **again),
            await all_of(vasya.history(third.id + 1, scope=TEAM)),
        ]
        kept = {"type": "lesson", "scope": TEAM}
        seen["redacted"] = [
            await vasya.save("Ask ann@example.org.", **kept, request_id=request_id("mail")),
            await vasya.save("ask ann@example.org", **kept, request_id=request_id("mail again")),
            await vasya.save("It says password: hunter2 there", **kept, request_id=request_id("password")),
            await vasya.save(
                "Paid by 4111 1111 1111 1111, order 1234567812345678", **kept, request_id=request_id("card")
            ),
        ]

        # A write whose answer never came, in a workspace that nobody used before.
        await told(petya.scopes())
        hasty = await client("petya", timeout=ABORT_SECONDS, retry=NO_RETRY)
        await hasty.scopes()
        place.stall()
        lost = {"content": "Did this arrive?", "request_id": request_id("lost")}
        seen["lost"] = [
            await told(hasty.save(**lost)),
            await petya.happened(request_id=lost["request_id"]),
            await petya.happened(request_id=request_id("never sent")),
            await petya.save(**lost),
            await petya.save(**lost),
            await petya.happened(request_id=lost["request_id"]),
            await all_of(petya.history(1)),
            await all_of(petya.export()),
        ]
        # To ask leaves no trace: the id is free, and the next event has the next number.
        free = {"request_id": request_id("never sent")}
        seen["asked"] = [
            [await petya.happened(**free) for _ in range(3)],
            await petya.save("Not asked about any more.", **free),
            await petya.happened(**free),
            await all_of(petya.history(2)),
        ]
        change = {"id": first.id, "expected_revision": 1, "scope": TEAM}
        reason = "Migrations need session-level locks"
        seen["happened"] = [
            await petya.happened(**change, reason=reason, content="Use pgbouncer in session mode."),
            await petya.happened(**change, reason="another", content="Use pgbouncer in session mode."),
            await petya.happened(**change, reason=reason, content="Use another one."),
            await petya.happened(**change, reason=reason),
            await vasya.happened(**change, reason=reason, content="Use pgbouncer in session mode."),
            await vasya.happened(id=third.id, expected_revision=1, reason="Obsolete", scope=TEAM),
            await vasya.happened(id=third.id, expected_revision=2, reason="Obsolete", scope=TEAM),
        ]
        return seen


async def on(place: Place) -> tuple[dict[str, Any], list[Exchange]]:
    """The scenario on a running server: what it gave, and what went over the wire."""
    exchanges: list[Exchange] = []
    seen = await scenario(place, lambda user: Recorder(user, exchanges))
    return seen, exchanges


async def played(exchanges: list[Exchange]) -> dict[str, Any]:
    """The scenario on what was recorded, all of which it must use up."""
    left = iter(exchanges)
    seen = await scenario(
        Place("http://127.0.0.1:1/mcp/", dict.fromkeys(USERS, "token")), lambda user: Player(user, left)
    )
    assert next(left, None) is None
    return seen


def recorded() -> list[Exchange]:
    return json.loads(CASSETTE.read_text("utf-8"))


def differences(real: list[Any], ours: list[Any]) -> list[str]:
    """Where two runs differ, call by call."""
    found = [
        f"call {number}:\n  real {json.dumps(one, sort_keys=True)}\n  ours {json.dumps(other, sort_keys=True)}"
        for number, (one, other) in enumerate(zip(real, ours, strict=False))
        if one != other
    ]
    return found + ([] if len(real) == len(ours) else [f"{len(real)} calls on the real server, {len(ours)} on ours"])


def main() -> int:
    import team_walk  # which knows this module

    parser = argparse.ArgumentParser(prog="scripts/oracle", description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the cassettes that the normal tests replay")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the walk; a new one by default")
    parser.add_argument("--steps", type=int, default=400, help="how long the walk is")
    options = parser.parse_args()
    try:
        python = python_with("oracle", *PACKAGES)
    except UnreachableError as error:
        print(f"the real server cannot be installed here: {error}")
        return 2
    begun = time.monotonic()
    with real_server(python) as place:
        _, real = asyncio.run(on(place))
    with our_server() as place:
        _, ours = asyncio.run(on(place))
    found = differences(answers(real), answers(ours))
    print("\n".join(found))
    print(f"the scenario: {len(answers(real))} calls, {len(found)} differ")
    seed = team_walk.RECORDED_SEED if options.record else options.seed
    with real_server(python) as place:
        walk = team_walk.walked(place, seed, options.steps, brief=options.record)
    with our_server() as place:
        strayed = team_walk.differences(place, walk)
    print("\n".join(strayed))
    print(f"the walk of seed {seed}: {len(walk)} calls, {'differs' if strayed else 'no difference'}")
    print(f"{time.monotonic() - begun:.1f} s")
    if options.record:
        CASSETTE.parent.mkdir(exist_ok=True)
        CASSETTE.write_text(json.dumps(real, ensure_ascii=False, indent=1) + "\n", "utf-8")
        team_walk.CASSETTE.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in walk), "utf-8")
        print(f"written: {CASSETTE.name} and {team_walk.CASSETTE.name}")
    return 1 if found or strayed else 0


if __name__ == "__main__":
    sys.exit(main())
