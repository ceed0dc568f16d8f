"""A storm: thousands of calls at once against a server that does something else each time, drawn by a seeded die.

Each call says in its arguments what shall be done to it, so what it has to end in is known beforehand, whatever the
order in which calls arrive. Values carry the call's own number: an answer that went to another call would be found.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from raw_server import McpStub, RawServer, Seen, tool_result

from memlog import transport as transport_module
from memlog.client import Client
from memlog.errors import (
    AuthenticationError,
    ConnectionFailedError,
    ConversationFullError,
    InvalidRequestError,
    MemlogError,
    ProtocolError,
    RateLimitedError,
    RedirectRefusedError,
    ResponseTooLargeError,
    ServerError,
    TimedOutError,
    TooLargeError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

AT_A_TIME = 24
PATIENCE = 0.4
"""The timeout of a call that the server will not answer in time."""

BOUND = 30.0
"""No call may take longer: the timeout of all others is 20 s."""

WRONG_MAX = 10
"""So many say enough: the rest of a storm in which every call fails would take hours."""

ANSWER_BYTES_MAX = 100_000
SEED = int(os.environ.get("MEMLOG_STORM_SEED", "20261130"))


# --- what the server does --------------------------------------------------------------------------------------------


def asked(seen: Seen) -> dict[str, Any]:
    return seen.json["params"]["arguments"]


def value_of(seen: Seen) -> dict[str, Any]:
    return {"n": asked(seen)["n"], "é": "\u2028 名前 😀"}


def message(seen: Seen, **more: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": seen.json["id"], **more}, ensure_ascii=False).encode()


def good(seen: Seen) -> None:
    seen.respond(200, message(seen, result=tool_result(value_of(seen))))


def as_text(seen: Seen) -> None:
    seen.rpc(result={"content": [{"type": "text", "text": json.dumps(value_of(seen), indent=1)}]})


def in_an_array(seen: Seen) -> None:
    seen.respond(200, b"[" + message(seen, result=tool_result(value_of(seen))) + b"]")


def with_a_foreign_id(seen: Seen) -> None:
    answer = {"jsonrpc": "2.0", "id": -seen.json["id"], "result": tool_result(value_of(seen))}
    seen.respond(200, json.dumps(answer).encode())


def in_an_event(seen: Seen) -> None:
    seen.begin_events()
    seen.chunk(b": hi\n\nevent: ping\ndata: {}\n\n")
    seen.chunk(b'data: {"jsonrpc":"2.0","method":"notifications/progress","params":{}}\n\n')
    seen.chunk(b"data: " + message(seen, result=tool_result(value_of(seen))) + b"\n\n")
    seen.end_events()


def in_odd_pieces(seen: Seen) -> None:
    """A BOM, lines that end with CR only, and cuts inside characters."""
    seen.begin_events()
    text = b"\xef\xbb\xbf: hi\r\rdata: " + message(seen, result=tool_result(value_of(seen))) + b"\r\r"
    die = random.Random(asked(seen)["n"])
    while text:
        size = die.randint(1, 40)
        seen.chunk(text[:size])
        text = text[size:]
    seen.end_events()


def without_the_last_line(seen: Seen) -> None:
    seen.begin_events()
    seen.chunk(b"data: " + message(seen, result=tool_result(value_of(seen))))
    seen.end_events()


def slowly(seen: Seen) -> None:
    body = message(seen, result=tool_result(value_of(seen)))
    seen.send(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    for piece in (head[:20], head[20:], body[:30], body[30:]):
        seen.send(piece)
        seen.stopping.wait(0.005)


def from_the_other_path(seen: Seen) -> None:
    if seen.target == "/mcp":
        seen.respond(307, b"over there", "text/plain", {"Location": "/mcp/"})
    else:
        good(seen)


def then_close(seen: Seen) -> None:
    good(seen)
    seen.close()


def then_reset(seen: Seen) -> None:
    good(seen)
    seen.reset()


def announced_close(seen: Seen) -> None:
    seen.respond(200, message(seen, result=tool_result(value_of(seen))), headers={"Connection": "close"})
    seen.close()


def cut_event(seen: Seen) -> None:
    """A stream that can be resumed in one era, and is lost in the other."""
    if seen.verb == "GET":
        seen.begin_events()
        number, n = seen.headers["last-event-id"].split(" ")
        result = tool_result({"n": int(n), "é": "\u2028 名前 😀"})
        answer = json.dumps({"jsonrpc": "2.0", "id": int(number), "result": result})
        seen.chunk(b"data: " + answer.encode() + b"\n\n")
    else:
        seen.begin_events()
        seen.chunk(f"id: {seen.json['id']} {asked(seen)['n']}\nretry: 5\ndata:\n\n".encode())
    seen.end_events()


def reset_in_an_event(seen: Seen) -> None:
    seen.begin_events()
    seen.chunk(message(seen, result=tool_result(value_of(seen)))[:40])
    seen.reset()


def until_hung_up(seen: Seen) -> None:
    """Silence, until the client lets the connection go: it must, or this thread outlives the storm."""
    while seen.sock.recv(4096):
        pass


def drip(seen: Seen) -> None:
    seen.begin_events()
    while not seen.stopping.wait(0.02):
        seen.chunk(b": ping\n\n")


def drip_the_head(seen: Seen) -> None:
    seen.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not seen.stopping.wait(0.02):
        seen.send(b"x")


def flood(seen: Seen) -> None:
    seen.begin_events()
    for _ in range(20):
        seen.chunk(b"x" * (ANSWER_BYTES_MAX // 10))
    seen.end_events()


def gone_session(seen: Seen) -> None:
    """404 to the session that the call first came with; to the one made for it, the value."""
    first = SESSIONS.setdefault(asked(seen)["n"], seen.headers["mcp-session-id"])
    if seen.headers["mcp-session-id"] == first:
        seen.respond(404, b"who?", "text/plain")
    else:
        good(seen)


SESSIONS: dict[int, str] = {}


def http(status: int, body: bytes = b"", kind: str | None = "text/plain", **headers: str) -> Callable[[Seen], None]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda seen: seen.respond(status, body, kind, named)


def error(code: int, words: str = "no", status: int = 200, **data: object) -> Callable[[Seen], None]:
    return lambda seen: seen.rpc(status=status, error={"code": code, "message": words, "data": data})


def tool_error(text: str) -> Callable[[Seen], None]:
    return lambda seen: seen.rpc(result={"content": [{"type": "text", "text": text}], "isError": True})


def raw(data: bytes, *, then: Callable[[Seen], None] = Seen.close) -> Callable[[Seen], None]:
    return lambda seen: (seen.send(data), then(seen))


# --- what it has to end in -------------------------------------------------------------------------------------------

Ending = tuple[type[MemlogError], dict[str, object]] | None
VALUE: Ending = None

UNKNOWN: dict[str, object] = {"outcome": "unknown"}
REFUSED: dict[str, object] = {"outcome": "refused"}
HTML = b"<!doctype html><title>Welcome to nginx</title>"
PAST = "Sun, 06 Nov 1994 08:49:37 GMT"

BOTH: dict[str, tuple[Callable[[Seen], None], Ending]] = {
    "json": (good, VALUE),
    "text": (as_text, VALUE),
    "an array": (in_an_array, VALUE),
    "an event": (in_an_event, VALUE),
    "an event in odd pieces": (in_odd_pieces, VALUE),
    "an event without its last line": (without_the_last_line, VALUE),
    "slowly": (slowly, VALUE),
    "from the other path": (from_the_other_path, VALUE),
    "then closed": (then_close, VALUE),
    "then reset": (then_reset, VALUE),
    "closed as announced": (announced_close, VALUE),
    "429 seconds": (http(429, b"slow", Retry_After="7"), (RateLimitedError, REFUSED | {"retry_after": 7.0})),
    "429 in the body": (error(-1, "busy", 429, retry_after=3), (RateLimitedError, {"retry_after": 3.0, "code": -1})),
    "429 nonsense": (http(429, Retry_After="soon"), (RateLimitedError, {"retry_after": None})),
    "503 date": (http(503, HTML, "text/html", Retry_After=PAST), (ServerError, {"status": 503, "retry_after": 0.0})),
    "500": (http(500, b"Traceback"), (ServerError, UNKNOWN | {"status": 500})),
    "502 page": (http(502, HTML, "text/html"), (ServerError, {"status": 502, "server_said": None})),
    "401": (http(401), (AuthenticationError, REFUSED | {"status": 401})),
    "403 page": (http(403, HTML, "text/html"), (AuthenticationError, {"status": 403})),
    "400": (http(400, b"bad"), (ServerError, {"status": 400})),
    "404": (http(404, HTML, "text/html"), (ServerError, UNKNOWN | {"status": 404})),
    "413": (http(413), (TooLargeError, REFUSED | {"what": "batch"})),
    "302": (http(302, Location="/login"), (RedirectRefusedError, UNKNOWN | {"status": 302})),
    "307 elsewhere": (
        http(307, Location="http://elsewhere.invalid/mcp"),
        (RedirectRefusedError, {"outcome": "not_sent", "location": "http://elsewhere.invalid/mcp"}),
    ),
    "a page": (http(200, HTML, "text/html"), (ProtocolError, UNKNOWN | {"status": 200})),
    "nothing": (http(200, b"", "application/json"), (ProtocolError, UNKNOWN)),
    "202": (http(202, kind=None), (ProtocolError, {"status": 202})),
    "not json": (http(200, b'{"jsonrpc":', "application/json"), (ProtocolError, UNKNOWN)),
    "a foreign id": (with_a_foreign_id, (ProtocolError, UNKNOWN)),
    "an error with no id": (
        http(200, b'{"jsonrpc":"2.0","id":null,"error":{"code":-5,"message":"x"}}', "application/json"),
        (ServerError, UNKNOWN | {"code": -5}),
    ),
    "compressed": (http(200, b"\x1f\x8b", "application/json", Content_Encoding="gzip"), (ProtocolError, UNKNOWN)),
    "invalid params": (error(-32602, "Unknown tool"), (InvalidRequestError, REFUSED | {"code": -32602})),
    "asks for input": (lambda seen: seen.rpc(result={"resultType": "input_required"}), (ProtocolError, UNKNOWN)),
    "full": (tool_error('{"error":{"code":"conversation_full","message":"x"}}'), (ConversationFullError, REFUSED)),
    "failed in words": (tool_error("Something went wrong"), (ServerError, UNKNOWN)),
    "reset": (Seen.reset, (ConnectionFailedError, UNKNOWN)),
    "closed": (Seen.close, (ConnectionFailedError, UNKNOWN)),
    "cut in the head": (raw(b"HTTP/1.1 200 O"), (ConnectionFailedError, UNKNOWN)),
    "cut in the body": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{}"),
        (ConnectionFailedError, UNKNOWN),
    ),
    "another protocol": (raw(b"220 smtp.example ESMTP\r\n"), (ConnectionFailedError, UNKNOWN)),
    "reset in an event": (reset_in_an_event, (ConnectionFailedError, UNKNOWN)),
    "announced as too long": (
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{", then=until_hung_up),
        (ResponseTooLargeError, UNKNOWN | {"limit": ANSWER_BYTES_MAX}),
    ),
    "too long": (flood, (ResponseTooLargeError, UNKNOWN | {"limit": ANSWER_BYTES_MAX})),
    "silence": (until_hung_up, (TimedOutError, UNKNOWN)),
    "a drip": (drip, (TimedOutError, UNKNOWN)),
    "a drip in the head": (drip_the_head, (TimedOutError, UNKNOWN)),
}
BEHAVIOURS = {
    "modern": BOTH | {"a cut event": (cut_event, (ProtocolError, UNKNOWN))},
    "legacy": BOTH | {"a cut event": (cut_event, VALUE), "a session that is gone": (gone_session, VALUE)},
}
SLOW = ("silence", "a drip", "a drip in the head")
HANGS_UP_AFTERWARDS = ("then closed", "then reset")
TWICE = ("from the other path", "a session that is gone")
"""What a call has to be sent twice for."""

GIVEN_UP = "given up"
"""Silence again, but here it is the caller who loses patience and cancels."""


# --- the storm -------------------------------------------------------------------------------------------------------


@dataclass
class Storm:
    """What was done to whom, and what became of it."""

    era: str
    arrived: Counter[int] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    hung_up_on: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def act(self, seen: Seen) -> None:
        if seen.verb == "GET":
            cut_event(seen)
            return
        wanted = asked(seen)["do"]
        self.arrived[asked(seen)["n"]] += 1
        until_hung_up(seen) if wanted == GIVEN_UP else BEHAVIOURS[self.era][wanted][0](seen)

    async def call(self, client: Client, n: int, do: str) -> None:
        timeout = PATIENCE if do in SLOW else None
        result: object = None
        failure: MemlogError | None = None
        try:
            with anyio.fail_after(BOUND), anyio.move_on_after(PATIENCE / 2 if do == GIVEN_UP else None) as patience:
                result = await client.call_tool("storm", {"do": do, "n": n}, timeout=timeout)
        except MemlogError as caught:
            failure = caught
        except TimeoutError:
            self.wrong.append(f"{do}: it hangs")
            return
        self.ended[do] += 1
        if isinstance(failure, ConnectionFailedError) and self.arrived[n] < 1 + (do in TWICE):
            # It (or the handshake it waited for) had already left when the server hung up after the call before.
            self.hung_up_on.append(n)
        elif do == GIVEN_UP:
            self.expect(do, patience.cancelled_caught, failure or result)
        else:
            self.expect(do, self.is_right(n, do, result, failure), failure or result)

    def is_right(self, n: int, do: str, result: object, failure: MemlogError | None) -> bool:
        ending = BEHAVIOURS[self.era][do][1]
        if ending is None:
            return failure is None and result == {"n": n, "é": "\u2028 名前 😀"}
        kind, attributes = ending
        if kind is TimedOutError and not self.arrived[n]:  # its patience ended before its turn came
            attributes = {}
        return type(failure) is kind and {name: getattr(failure, name) for name in attributes} == attributes

    def expect(self, do: str, right: bool, got: object) -> None:
        if not right:
            self.wrong.append(f"{do}: {got!r} {vars(got) if isinstance(got, MemlogError) else ''}")


def descriptors() -> set[str]:
    """What every open file descriptor of this process is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        import trio

        return trio.lowlevel.current_statistics().tasks_living


async def eventually(true: Callable[[], bool]) -> bool:
    """Whether it comes true in good time: sockets are closed by the loop's and the server's next steps."""
    with anyio.move_on_after(5):
        while not true():
            await anyio.sleep(0.01)
    return true()


async def weather(era: str, calls: int) -> Storm:
    """So many calls, at most 24 at a time, each of every kind about equally often; afterwards nothing is left."""
    storm, die = Storm(era), random.Random(f"{SEED} {era}")
    kinds = [*BEHAVIOURS[era], GIVEN_UP]
    script = iter([(n, die.choice(kinds)) for n in range(calls)])
    SESSIONS.clear()
    open_before, tasks_before = descriptors(), tasks()

    async def work() -> None:
        for n, do in script:
            if len(storm.wrong) < WRONG_MAX:
                await storm.call(client, n, do)

    with RawServer(McpStub(storm.act, era=era)) as server:
        client = Client(server.url, timeout=20)
        client._transport._answer_bytes_max = ANSWER_BYTES_MAX
        async with anyio.create_task_group() as group:
            for _ in range(AT_A_TIME):
                group.start_soon(work)
        assert not storm.wrong
        # The client is as good as new: all connections can be used, and none is held twice.
        free = client._transport._free["http"]
        assert client._transport._slots.value == transport_module.CONNECTIONS_MAX
        assert len({id(lane) for lane in free}) == len(free) <= AT_A_TIME
        assert await client.call_tool("storm", {"do": "json", "n": calls}) == {"n": calls, "é": "\u2028 名前 😀"}
        await client.close()
        assert await eventually(lambda: tasks() == tasks_before)
        # Every thread of the server but the one that accepts has seen its client hang up.
        assert await eventually(lambda: sum(thread.is_alive() for thread in server._threads) == 1)
    assert await eventually(lambda: descriptors() <= open_before), descriptors() - open_before
    gc.collect()  # whatever was left to the collector complains here, and a warning is an error
    return storm


def judge(storm: Storm, calls: int) -> None:
    assert storm.ended.total() == calls
    assert set(storm.ended) == {*BEHAVIOURS[storm.era], GIVEN_UP}
    # Nobody but the calls that came after a hang-up may share its fate, and no more than one each.
    assert len(storm.hung_up_on) <= sum(storm.ended[do] for do in HANGS_UP_AFTERWARDS)


@pytest.mark.anyio
@pytest.mark.parametrize("era", BEHAVIOURS)
async def test_in_a_storm_of_faults_every_call_ends_in_its_value_or_the_right_error(era: str) -> None:
    """Ours: 700 calls in each era and loop, some 50 behaviours; no call hangs, and no connection, task or file is left."""
    judge(await weather(era, 700), 700)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("era", BEHAVIOURS)
async def test_in_a_long_storm_nothing_piles_up(era: str) -> None:
    """Ours: 10,000 calls."""
    judge(await weather(era, 10_000), 10_000)
