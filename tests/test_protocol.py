"""MCP: what is sent in each era, how answers are read, and that every failure is the one error that says what happened.

The server here is a stub whose every byte is the test's own; real servers have their turn in the interop tests.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, get_args

import anyio
import pytest
from raw_server import McpStub, RawServer, Seen, tool_result

from memlog import errors, protocol
from memlog.errors import (
    AuthenticationError,
    ConnectionFailedError,
    ConversationFullError,
    InvalidConversationIdError,
    InvalidRequestError,
    MemlogError,
    PermanentError,
    ProtocolError,
    RateLimitedError,
    RedirectRefusedError,
    ResponseTooLargeError,
    ServerError,
    TimedOutError,
    TooLargeError,
)
from memlog.protocol import Session
from memlog.refusal import Refusal, to_error, trimmed
from memlog.sse import EventReader
from memlog.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable

BOUND = 10.0
SECRET = "the patient said that the rash began on Tuesday"
ARGUMENTS = json.dumps({"conversation_id": "c_12345678", "items": [{"text": SECRET, "n": 1.50}]}).encode()
VALUE = {"first_seq": 0, "last_seq": 0}


@asynccontextmanager
async def session_to(server: RawServer, **options):
    era = options.pop("era", "auto")
    session = Session(Transport(server.url, **{"timeout": BOUND, "auth": ("site", "hunter2"), **options}), era=era)
    try:
        yield session
    finally:
        await session.close()


async def call(session: Session, **more: object) -> dict[str, object]:
    with anyio.fail_after(2 * BOUND):
        return await session.call_tool("append_memory", ARGUMENTS, **more)


def good(seen: Seen) -> None:
    seen.rpc(result=tool_result(VALUE))


# -- every behaviour of a server, in both eras -----------------------------------------------------------------------


def body(seen: Seen, **message: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": seen.json["id"], **message}).encode()


def events(*pieces: bytes | Callable[[Seen], bytes], end: str = "end") -> Callable[[Seen], None]:
    def answer(seen: Seen) -> None:
        seen.begin_events()
        for piece in pieces:
            seen.chunk(piece if isinstance(piece, bytes) else piece(seen))
        {"end": seen.end_events, "reset": seen.reset, "stall": seen.stall}[end]()

    return answer


def one_event(seen: Seen) -> bytes:
    return b"data: " + body(seen, result=tool_result(VALUE)) + b"\n\n"


def multi_line(seen: Seen) -> bytes:
    pretty = json.dumps({"jsonrpc": "2.0", "id": seen.json["id"], "result": tool_result(VALUE)}, indent=1)
    return b"event: message\r\n" + b"".join(b"data: %b\r\n" % line.encode() for line in pretty.split("\n")) + b"\r\n"


def in_single_bytes(seen: Seen) -> None:
    seen.begin_events()
    text = {"first_seq": 0, "last_seq": 0, "é": "\u2028 名前 😀"}
    data = json.dumps({"jsonrpc": "2.0", "id": seen.json["id"], "result": tool_result(text)}, ensure_ascii=False)
    for byte in b"\xef\xbb\xbf: hi\r\rdata:" + data.encode() + b"\r\r":
        seen.chunk(bytes([byte]))
    seen.end_events()


def in_pieces(seen: Seen, size: int) -> None:
    value = {**VALUE, "é": "\u2028 名前 😀"}
    data = json.dumps({"jsonrpc": "2.0", "id": seen.json["id"], "result": tool_result(value)}, ensure_ascii=False)
    seen.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    raw = data.encode()
    for at in range(0, len(raw), size):
        seen.chunk(raw[at : at + size])
    seen.end_events()


def tool_error(**value: object) -> Callable[[Seen], None]:
    text = json.dumps(value)
    return lambda seen: seen.rpc(result={"content": [{"type": "text", "text": text}], "isError": True})


def plain_tool_error(text: str) -> Callable[[Seen], None]:
    return lambda seen: seen.rpc(result={"content": [{"type": "text", "text": text}], "isError": True})


def rpc_error(
    code: int, message: str = "no", status: int = 200, data: object = None, **headers: str
) -> Callable[[Seen], None]:
    return lambda seen: seen.rpc(status=status, headers=headers, error={"code": code, "message": message, "data": data})


def http(status: int, raw: bytes = b"", kind: str | None = "text/plain", **headers: str) -> Callable[[Seen], None]:
    return lambda seen: seen.respond(
        status, raw, kind, {name.replace("_", "-"): value for name, value in headers.items()}
    )


def raw_json(text: str) -> Callable[[Seen], None]:
    return lambda seen: seen.respond(200, text.replace("ID", str(seen.json["id"])).encode())


HTML = b"<!doctype html><title>Welcome to nginx</title>"

VALUES: dict[str, Callable[[Seen], None]] = {
    "json": good,
    "json with a charset": lambda seen: seen.respond(
        200, body(seen, result=tool_result(VALUE)), "Application/JSON; charset=utf-8"
    ),
    "text only": lambda seen: seen.rpc(result={"content": [{"type": "text", "text": json.dumps(VALUE, indent=2)}]}),
    "structured only": lambda seen: seen.rpc(result={"structuredContent": VALUE}),
    "unknown content block": lambda seen: seen.rpc(result=tool_result(VALUE, content=[{"type": "hologram"}, "?"])),
    "unknown block beside the text": lambda seen: seen.rpc(
        result={"content": [{"type": "hologram"}, {"type": "text", "text": json.dumps(VALUE)}]}
    ),
    "structured that is no object": lambda seen: seen.rpc(result=tool_result(VALUE, structuredContent=[1])),
    "result type complete": lambda seen: seen.rpc(result=tool_result(VALUE, resultType="complete")),
    "id as a string": lambda seen: seen.respond(
        200,
        body(seen, result=tool_result(VALUE)).replace(b'"id": %d' % seen.json["id"], b'"id": "%d"' % seen.json["id"]),
    ),
    "array of one": lambda seen: seen.respond(200, b"[" + body(seen, result=tool_result(VALUE)) + b"]"),
    "array with a notification and another's answer": lambda seen: seen.respond(
        200,
        b'[{"jsonrpc":"2.0","method":"notifications/message"},{"jsonrpc":"2.0","id":"x","result":{}},%b]'
        % body(seen, result=tool_result(VALUE)),
    ),
    "array in an event": events(lambda seen: b"data: [" + body(seen, result=tool_result(VALUE)) + b"]\n\n"),
    "more than its schema says": lambda seen: seen.rpc(result=tool_result({**VALUE, "later": {"added": [None]}})),
    "json after a BOM": lambda seen: seen.respond(200, b"\xef\xbb\xbf" + body(seen, result=tool_result(VALUE))),
    "json in single bytes": lambda seen: in_pieces(seen, 1),
    "json cut inside characters": lambda seen: in_pieces(seen, 7),
    "event": events(one_event),
    "event with a BOM": events(b"\xef\xbb\xbf", one_event),
    "event in several lines": events(multi_line),
    "event after comments, pings and notifications": events(
        b": hello\n\n",
        b"event: ping\ndata: {}\n\n",
        b"id: 7\ndata:\n\n",
        b'data: {"jsonrpc":"2.0","method":"notifications/progress","params":{}}\n\n',
        b'data: {"jsonrpc":"2.0","id":1,"method":"ping"}\n\n',
        b'data: {"jsonrpc":"2.0","id":"another","result":{}}\n\n',
        one_event,
    ),
    "event cut into single bytes, CR only": in_single_bytes,
    "event without its empty line": events(lambda seen: one_event(seen).rstrip()),
    "event, then silence": events(one_event, end="stall"),
    "event, then a reset": events(one_event, end="reset"),
    "event, then a flood": events(one_event, b": x\n" * 50_000),
}

CASES: dict[str, tuple[Callable[[Seen], None], type[MemlogError], dict[str, object]]] = {
    # HTTP
    "401": (
        http(401, b"Bearer token required"),
        AuthenticationError,
        {"status": 401, "outcome": "refused", "server_said": "Bearer token required"},
    ),
    "403 page": (http(403, HTML, "text/html"), AuthenticationError, {"status": 403, "server_said": None}),
    "429 text": (
        http(429, b"slow down", Retry_After="7"),
        RateLimitedError,
        {"status": 429, "retry_after": 7.0, "outcome": "refused"},
    ),
    "429 without a time": (http(429), RateLimitedError, {"retry_after": None}),
    "429 rpc error": (
        rpc_error(-1, "busy", 429, {"retry_after": 3}),
        RateLimitedError,
        {"retry_after": 3.0, "code": -1},
    ),
    "429 header beats body": (
        rpc_error(-1, "busy", 429, {"retry_after": 3}, **{"Retry-After": "9"}),
        RateLimitedError,
        {"retry_after": 9.0},
    ),
    "429 with a result": (
        lambda seen: seen.rpc(status=429, headers={"Retry-After": "2"}, result=tool_result(VALUE)),
        RateLimitedError,
        {"retry_after": 2.0},
    ),
    "429 cut in its body": (
        lambda seen: (seen.send(b"HTTP/1.1 429 No\r\nRetry-After: 4\r\nContent-Length: 99\r\n\r\nabc"), seen.close()),
        RateLimitedError,
        {"retry_after": 4.0},
    ),
    "413": (http(413, HTML, "text/html"), TooLargeError, {"what": "batch", "size": None, "outcome": "refused"}),
    "408": (http(408), ServerError, {"status": 408, "outcome": "unknown"}),
    "425": (http(425), ServerError, {"status": 425}),
    "500": (http(500, b"Traceback"), ServerError, {"status": 500, "outcome": "unknown"}),
    "500 rpc": (rpc_error(-32603, "oops", 500), ServerError, {"status": 500, "code": -32603}),
    "500 calling it invalid": (rpc_error(-32602, "oops", 500), ServerError, {"status": 500}),
    "502 page": (http(502, HTML, "text/html"), ServerError, {"status": 502, "server_said": None}),
    "503": (
        http(503, b'{"error":"maintenance","code":"unavailable"}', "application/json", Retry_After="30"),
        ServerError,
        {"status": 503, "retry_after": 30.0, "code": "unavailable", "server_said": "maintenance"},
    ),
    "504": (http(504), ServerError, {"status": 504}),
    "400 bare": (http(400, b"bad"), ServerError, {"status": 400}),
    "400 of a framework": (
        http(400, b'{"error":"limit?","code":"invalid_request"}', "application/json"),
        InvalidRequestError,
        {"status": 400, "code": "invalid_request"},
    ),
    "404 page": (http(404, HTML, "text/html"), ServerError, {"status": 404}),
    "405": (http(405, b""), ServerError, {"status": 405}),
    "421": (http(421), ServerError, {"status": 421}),
    "418": (http(418), ServerError, {"status": 418}),
    "200 page": (http(200, HTML, "text/html"), ProtocolError, {"status": 200, "outcome": "unknown"}),
    "200 empty": (http(200, b"", "application/json"), ProtocolError, {"status": 200}),
    "200 without a type": (http(200, b"{}", None), ProtocolError, {"status": 200}),
    "202": (http(202, b"", None), ProtocolError, {"status": 202}),
    "204": (http(204, b"", None), ProtocolError, {"status": 204}),
    "302": (http(302, b"", Location="/login"), RedirectRefusedError, {"status": 302, "outcome": "unknown"}),
    "307 elsewhere": (
        http(307, b"", Location="https://elsewhere.invalid/"),
        RedirectRefusedError,
        {"outcome": "not_sent", "location": "https://elsewhere.invalid/"},
    ),
    "too long": (
        lambda seen: seen.respond(200, b" " * 70_000),
        ResponseTooLargeError,
        {"limit": 60_000, "outcome": "unknown"},
    ),
    "reset": (Seen.reset, ConnectionFailedError, {"outcome": "unknown"}),
    "closed": (Seen.close, ConnectionFailedError, {"outcome": "unknown"}),
    "reset in the head": (
        lambda seen: (seen.send(b"HTTP/1.1 200 OK\r\nContent-Ty"), seen.reset()),
        ConnectionFailedError,
        {"outcome": "unknown"},
    ),
    "cut in a json body": (
        lambda seen: (
            seen.send(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"json'),
            seen.close(),
        ),
        ConnectionFailedError,
        {"outcome": "unknown"},
    ),
    "another protocol": (
        lambda seen: (seen.send(b"220 smtp.example ESMTP\r\n"), seen.close()),
        ConnectionFailedError,
        {"outcome": "unknown"},
    ),
    "compressed": (
        http(200, b"\x1f\x8b", "application/json", Content_Encoding="gzip"),
        ProtocolError,
        {"status": 200, "outcome": "unknown"},
    ),
    "json dripping for ever": (
        lambda seen: (
            seen.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"),
            [seen.chunk(b" ") for _ in iter(lambda: seen.stopping.wait(0.02), True)],
        ),
        TimedOutError,
        {"outcome": "unknown"},
    ),
    "head dripping for ever": (
        lambda seen: (
            seen.send(b"HTTP/1.1 200 OK\r\n"),
            [seen.send(b"X-Slow: 1\r\n") for _ in iter(lambda: seen.stopping.wait(0.02), True)],
        ),
        TimedOutError,
        {"outcome": "unknown"},
    ),
    "silence": (Seen.stall, TimedOutError, {"outcome": "unknown"}),
    "pings for ever": (
        lambda seen: (
            seen.begin_events(),
            [seen.chunk(b": ping\n\n") for _ in iter(lambda: seen.stopping.wait(0.02), True)],
        ),
        TimedOutError,
        {"outcome": "unknown"},
    ),
    # JSON-RPC
    "not json": (raw_json("{"), ProtocolError, {"status": None, "outcome": "unknown"}),
    "NaN": (raw_json('{"jsonrpc":"2.0","id":ID,"result":{"x":NaN}}'), ProtocolError, {}),
    "json, but not rpc": (raw_json('{"ok":true}'), ProtocolError, {"outcome": "unknown"}),
    "a number": (raw_json("7"), ProtocolError, {}),
    "an empty array": (raw_json("[]"), ProtocolError, {}),
    "a foreign id": (
        raw_json('{"jsonrpc":"2.0","id":999999,"result":{"content":[]}}'),
        ProtocolError,
        {"outcome": "unknown"},
    ),
    "result null": (raw_json('{"jsonrpc":"2.0","id":ID,"result":null}'), ProtocolError, {}),
    "result without content": (raw_json('{"jsonrpc":"2.0","id":ID,"result":{}}'), ProtocolError, {}),
    "text that is not json": (
        lambda seen: seen.rpc(result={"content": [{"type": "text", "text": "done!"}]}),
        ProtocolError,
        {"status": None},
    ),
    "two values": (lambda seen: seen.rpc(result={"content": [{"type": "text", "text": "{}"}] * 2}), ProtocolError, {}),
    "asks for input": (
        lambda seen: seen.rpc(
            result={
                "resultType": "input_required",
                "inputRequests": {"q": {"method": "elicitation/create"}},
                "requestState": "x",
            }
        ),
        ProtocolError,
        {"outcome": "unknown"},
    ),
    "asks for itself for ever": (
        lambda seen: seen.rpc(result={"resultType": "input_required", "requestState": "x"}),
        ProtocolError,
        {"outcome": "unknown"},
    ),
    "a result type of the future": (
        lambda seen: seen.rpc(result=tool_result(VALUE, resultType="postponed")),
        ProtocolError,
        {"outcome": "unknown"},
    ),
    "error, id null": (
        raw_json('{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"x"}}'),
        ServerError,
        {"code": -32603},
    ),
    "error, foreign id": (
        raw_json('{"jsonrpc":"2.0","id":"server-error","error":{"code":-5,"message":"x"}}'),
        ServerError,
        {"code": -5},
    ),
    "error, no code": (raw_json('{"jsonrpc":"2.0","id":ID,"error":{}}'), ServerError, {"code": None}),
    "invalid params": (rpc_error(-32602, "Unknown tool"), InvalidRequestError, {"code": -32602, "outcome": "refused"}),
    "parse error": (rpc_error(-32700, "no json", 400), InvalidRequestError, {"status": 400}),
    "no such method": (rpc_error(-32601, "?", 404), ServerError, {"code": -32601, "status": 404}),
    "code in data": (
        rpc_error(-31000, "x", 200, {"code": "rate_limited", "retry_after": "2.5"}),
        RateLimitedError,
        {"code": "rate_limited", "retry_after": 2.5},
    ),
    "error in an event": (
        events(lambda seen: b"data: " + body(seen, error={"code": -32602, "message": "x"}) + b"\n\n"),
        InvalidRequestError,
        {},
    ),
    "event that is not json": (events(b"data: {\n\n", one_event), ProtocolError, {"outcome": "unknown"}),
    "stream without an answer": (events(b": nothing\n\n"), ProtocolError, {"status": None, "outcome": "unknown"}),
    "stream cut in the answer": (
        events(b'data: {"jsonrpc"', end="reset"),
        ConnectionFailedError,
        {"outcome": "unknown"},
    ),
    "stream ended in the answer": (events(b'data: {"jsonrpc"'), ProtocolError, {"outcome": "unknown"}),
    # tools
    "item too large": (
        tool_error(error={"code": "item_too_large", "message": "items[3] has 262145 bytes"}),
        TooLargeError,
        {"what": "item", "outcome": "refused"},
    ),
    "batch too large": (
        tool_error(error={"code": "batch_too_large", "message": "x"}),
        TooLargeError,
        {"what": "batch"},
    ),
    "full": (
        tool_error(error={"code": "conversation_full", "message": "x"}),
        ConversationFullError,
        {"conversation_id": "c_12345678", "limit": 100_000, "outcome": "refused"},
    ),
    "full in words": (
        tool_error(error="conversation_id c_1 is full", code="invalid_request"),
        ConversationFullError,
        {},
    ),
    "bad id": (
        tool_error(error={"code": "invalid_conversation_id", "message": "x"}),
        InvalidConversationIdError,
        {"outcome": "refused"},
    ),
    "C9": (
        tool_error(error={"code": "unprocessable_parameters", "message": "Basic credentials are required"}),
        AuthenticationError,
        {"outcome": "refused", "code": "unprocessable_parameters"},
    ),
    "C9 as text": (
        plain_tool_error("unprocessable_parameters: Basic authentication required"),
        AuthenticationError,
        {"code": None},
    ),
    "forbidden": (
        tool_error(error="Workspace is read-only", code="forbidden"),
        AuthenticationError,
        {"code": "forbidden"},
    ),
    "rate as a tool error": (
        tool_error(error={"code": "rate_limited", "message": "x", "retry_after": 5}),
        RateLimitedError,
        {"retry_after": 5.0},
    ),
    "rate with a header": (
        lambda seen: seen.rpc(
            result={"isError": True, "content": [{"type": "text", "text": "Rate limit exceeded"}]},
            headers={"Retry-After": "11"},
        ),
        RateLimitedError,
        {"retry_after": 11.0, "status": 200},
    ),
    "full as an rpc error": (
        rpc_error(-31000, "conversation is full", 200, {"code": "conversation_full"}),
        ConversationFullError,
        {"conversation_id": "c_12345678"},
    ),
    "rate as text": (plain_tool_error("Rate limit exceeded for this site"), RateLimitedError, {"retry_after": None}),
    "validation as text": (
        plain_tool_error("Input validation error: 51 is greater than the maximum of 50"),
        InvalidRequestError,
        {"server_said": "Input validation error: 51 is greater than the maximum of 50"},
    ),
    "unavailable": (
        tool_error(error="Workspace unavailable; check history", code="unavailable"),
        ServerError,
        {"code": "unavailable", "outcome": "unknown"},
    ),
    "unknown code": (tool_error(error="?", code="gremlins"), ServerError, {"code": "gremlins", "outcome": "unknown"}),
    "unknown text": (plain_tool_error("Something went wrong"), ServerError, {"outcome": "unknown"}),
    "error without a word": (lambda seen: seen.rpc(result={"isError": True}), ServerError, {"server_said": None}),
    "error in structure": (
        lambda seen: seen.rpc(result={"isError": True, "structuredContent": {"error": {"code": "item_too_large"}}}),
        TooLargeError,
        {},
    ),
}


@pytest.mark.anyio
@pytest.mark.contract("C13")
@pytest.mark.parametrize("era", ["modern", "legacy"])
@pytest.mark.parametrize("name", VALUES)
async def test_every_form_of_success_is_the_value(name, era):
    """C13 and ours: structured content or the JSON of the text, whatever it is wrapped in, and the connection is kept or
    replaced without anybody noticing."""
    with RawServer(McpStub(VALUES[name], era=era)) as server:
        async with session_to(server) as session:
            for _ in range(2):
                value = await call(session)
                assert {key: value[key] for key in VALUE} == VALUE


@pytest.mark.anyio
@pytest.mark.contract("C6", "C9", "C11")
@pytest.mark.parametrize("era", ["modern", "legacy"])
@pytest.mark.parametrize("name", CASES)
async def test_every_failure_is_the_one_error_that_says_what_happened(name, era):
    """C6, C9, C11: one tree from three planes; the payload and the password are in no message, and the session lives."""
    behaviour, cls, attributes = CASES[name]
    stub = McpStub(behaviour, era=era)
    with RawServer(stub) as server:
        async with session_to(server, answer_bytes_max=60_000, timeout=BOUND) as session:
            with pytest.raises(MemlogError) as caught:
                await call(session, conversation_id="c_12345678", timeout=0.4 if cls is TimedOutError else None)
            stub.call = good
            assert await call(session) == VALUE
    error = caught.value
    assert type(error) is cls, repr(error)
    assert {key: getattr(error, key) for key in attributes} == attributes
    shown = f"{error!r} {error} {error.server_said} {vars(error)}"
    assert not any(secret in shown for secret in (SECRET, "hunter2", "rash"))
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@pytest.mark.parametrize(
    "words",
    [
        SECRET,
        f"'{SECRET[:9]}' is bad",
        f"not an object: {{'text': '{SECRET}'}}",
        f"input_value='{SECRET[:11]}', input_type=str",
        f"I got {SECRET.upper().lower()}!",
        f"items: {SECRET[3:17]}",
    ],
)
def test_a_server_that_repeats_the_payload_is_not_quoted_with_it(words):
    """Ours: validators like to show the value they dislike; no piece of 8 characters of it gets through."""
    said = trimmed(words, ARGUMENTS) or ""
    # The first word of the payload is "the patient": windows of it must be gone, single common words may stay.
    assert not any(SECRET[at : at + 12] in said for at in range(len(SECRET) - 12))
    assert f"'{SECRET[:9]}'" not in said


def test_the_servers_words_are_short_and_printable():
    """Ours: at most 200 characters, no control characters, None for nothing."""
    assert trimmed("a\x1b[31mb\n\tc\u202e", b"") == "a [31mb c"
    assert trimmed("", b"") is None
    assert len(trimmed("x y " * 200, b"") or "") <= 200
    assert trimmed("limit must be 1 to 1000", b'{"conversation_id":"c_12345678"}') == "limit must be 1 to 1000"


@pytest.mark.parametrize("status", range(300, 600))
def test_the_table_knows_every_status(status):
    """Ours: any status gives an error with an outcome, and only what is plainly the client's fault is permanent."""
    error = to_error(Refusal("tool", status))
    assert error.outcome in ("refused", "unknown")
    assert isinstance(error, PermanentError) == (status in (401, 403, 407, 413, 429))
    assert error.status == status


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_every_status_on_the_wire_is_an_error_that_carries_it(era):
    """Ours: whatever HTTP can say instead of an answer; the session is as good as new after each."""
    stub = McpStub(good, era=era)
    with RawServer(stub) as server:
        async with session_to(server) as session:
            for status in (*range(200, 452), *range(500, 512), 599):
                stub.call = http(status, b"", None)
                with pytest.raises(MemlogError) as caught:
                    await call(session)
                assert caught.value.status == status
                if 300 <= status < 400:
                    assert type(caught.value) is RedirectRefusedError
                elif status < 300:
                    assert type(caught.value) is ProtocolError
                else:
                    assert type(caught.value) is type(to_error(Refusal("tool", status)))
                if status % 10 == 0:
                    stub.call = good
                    assert await call(session) == VALUE


SPEC_CODES = {
    -32700: InvalidRequestError,
    -32600: ServerError,  # what it finds wrong is the envelope, which is ours and not the caller's
    -32601: ServerError,
    -32602: InvalidRequestError,
    -32603: ServerError,
    -32000: ServerError,  # -32000 to -32019 mean whatever their server likes: never to be read anything into
    -32001: ServerError,
    -32002: ServerError,
    -32020: ServerError,
    -32021: ServerError,
    -32022: ServerError,
    -32042: ServerError,
}


@pytest.mark.parametrize("status", [200, 400, 404])
def test_the_table_knows_every_code(status):
    """Ours: the protocol's codes mean what it says, all others of its range are nobody's fault."""
    for code in (*range(-32800, -31900), *range(-31600, -31000), *range(-1000, 1000)):
        error = to_error(Refusal("tool", status, code))
        assert type(error) is SPEC_CODES.get(code, ServerError), code
        assert (error.code, error.status) == (code, status)


def test_the_cases_reach_every_error_that_a_server_can_cause():
    """Ours: no class of the tree is there for show."""
    ours_alone = {errors.InvalidItemError, errors.PermanentError, errors.TransientError}
    tree = [getattr(errors, name) for name in errors.__all__]
    # What only the team server says is the matter of `team.py` and its tests.
    of_the_team = {cls for cls in tree if issubclass(cls, errors.ConflictError | errors.NotSavedError)}
    caused = {cls for cls in tree if issubclass(cls, errors.PermanentError | errors.TransientError)}
    caused -= ours_alone | of_the_team
    assert {cls for _, cls, _ in CASES.values()} == caused


def test_the_table_has_an_error_for_every_meaning():
    """Ours: no condition that the tables can name ends in a KeyError."""
    from memlog import refusal

    named = {meaning for table in (refusal._BY_CODE, refusal._BY_WORDS) for _, meaning in table} | set(
        refusal._BY_STATUS.values()
    )
    assert named == set(refusal._ERRORS) == set(get_args(refusal.Meaning))


# -- the modern era --------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_modern_sends_what_the_revision_wants_and_arguments_verbatim():
    """Spec 2026-07-28: headers equal the body, meta on every request; ours: the argument bytes are not touched."""
    with RawServer(McpStub(good)) as server:
        async with session_to(server, era="modern") as session:
            await call(session)
            await call(session)
    assert server.methods() == ["tools/call", "tools/call"]
    first, second = server.seen
    assert ARGUMENTS in first.body
    assert first.json["id"] != second.json["id"]
    assert first.headers["mcp-protocol-version"] == "2026-07-28"
    assert (first.headers["mcp-method"], first.headers["mcp-name"]) == ("tools/call", "append_memory")
    assert {part.strip() for part in first.headers["accept"].split(",")} == {"application/json", "text/event-stream"}
    assert first.headers["content-type"] == "application/json"
    meta = first.json["params"]["_meta"]
    assert meta["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert meta["io.modelcontextprotocol/clientCapabilities"] == {}
    assert meta["io.modelcontextprotocol/clientInfo"]["name"] == "memlog"
    assert "mcp-session-id" not in first.headers


@pytest.mark.anyio
async def test_auto_asks_once_with_a_question_that_changes_nothing():
    """Spec: the probe is server/discover; ours: its answer is kept for the life of the session."""
    with RawServer(McpStub(good)) as server:
        async with session_to(server) as session:
            for _ in range(3):
                await call(session)
    assert server.methods() == ["server/discover", "tools/call", "tools/call", "tools/call"]


@pytest.mark.anyio
async def test_a_tool_name_that_is_no_header_is_coded():
    """Spec: visible ASCII as it is, everything else (and what looks coded) in Base64."""
    with RawServer(McpStub(good)) as server:
        async with session_to(server, era="modern") as session:
            for name in ("plain name", " edge", "инструмент", "=?base64?eA==?="):
                await session.call_tool(name, b"{}")
    names = [seen.headers["mcp-name"] for seen in server.seen]
    assert names[0] == "plain name"
    assert all(re.fullmatch(r"=\?base64\?[A-Za-z0-9+/]+=*\?=", name) for name in names[1:])


@pytest.mark.anyio
async def test_a_header_mismatch_makes_the_session_read_the_schema_once():
    """Spec: parameters annotated x-mcp-header are mirrored; ours: the tools are listed only when a server insists."""
    schema = {
        "type": "object",
        "properties": {
            "conversation_id": {"type": "string", "x-mcp-header": "Conversation"},
            "where": {"type": "object", "properties": {"dry": {"type": "boolean", "x-mcp-header": "Dry"}}},
        },
    }
    twice = {"properties": {"a": {"type": "string", "x-mcp-header": "A"}, "b": {"type": "string", "x-mcp-header": "a"}}}

    def answer(seen: Seen) -> None:
        if seen.method == "tools/list":
            tools = [{"name": "append_memory", "inputSchema": schema}, {"name": "odd", "inputSchema": twice}]
            page = (
                {"tools": tools[:1], "nextCursor": "2"} if "cursor" not in seen.json["params"] else {"tools": tools[1:]}
            )
            seen.rpc(result={**page, "resultType": "complete"})
        elif seen.headers.get("mcp-param-conversation") == "c_12345678":
            good(seen)
        else:
            seen.rpc(status=400, error={"code": -32020, "message": "header mismatch"})

    with RawServer(McpStub(answer)) as server:
        async with session_to(server, era="modern") as session:
            assert await call(session) == VALUE
            assert await call(session) == VALUE
            assert [tool["name"] for tool in await session.list_tools()] == ["append_memory"]
            await session.call_tool("append_memory", b'{"conversation_id":"c_12345678","where":{"dry":true}}')
    assert server.methods()[:5] == ["tools/call", "tools/list", "tools/list", "tools/call", "tools/call"]
    assert server.seen[-1].headers["mcp-param-dry"] == "true"


@pytest.mark.anyio
async def test_mirrored_headers_carry_the_argument_and_leave_out_what_is_not_there():
    """Spec: integers as such (1.0 is one), booleans in lower case, text that is no header in Base64, null not at all."""
    kinds = {"n": "integer", "f": "integer", "b": "boolean", "s": "string", "e": "string", "null": "string"}
    schema = {"properties": {name: {"type": kind, "x-mcp-header": f"X-{name}"} for name, kind in kinds.items()}}

    def answer(seen: Seen) -> None:
        if seen.method == "tools/list":
            seen.rpc(result={"tools": [{"name": "append_memory", "inputSchema": schema}]})
        elif "mcp-param-x-n" in seen.headers:
            good(seen)
        else:
            seen.rpc(status=400, error={"code": -32020, "message": "header mismatch"})

    arguments = '{"n":9007199254740993,"f":1.0,"b":false,"s":" é","e":"","null":null,"other":1}'.encode()
    with RawServer(McpStub(answer)) as server:
        async with session_to(server, era="modern") as session:
            assert await session.call_tool("append_memory", arguments) == VALUE
    sent = {name: value for name, value in server.seen[-1].headers.items() if name.startswith("mcp-param-")}
    assert sent.pop("mcp-param-x-s") == f"=?base64?{base64.b64encode(' é'.encode()).decode()}?="
    assert sent.pop("mcp-param-x-e") in ("", "=?base64??=")
    assert sent == {"mcp-param-x-n": "9007199254740993", "mcp-param-x-f": "1", "mcp-param-x-b": "false"}


@pytest.mark.anyio
async def test_a_mismatch_that_the_schema_does_not_explain_is_raised_and_not_repeated():
    """Ours: the tools are read once; if that brings no news, sending the same again would be no use."""

    def answer(seen: Seen) -> None:
        if seen.method == "tools/list":
            seen.rpc(result={"tools": []})
        else:
            seen.rpc(status=400, error={"code": -32020, "message": "header mismatch"})

    with RawServer(McpStub(answer)) as server:
        async with session_to(server, era="modern") as session:
            with pytest.raises(ServerError) as caught:
                await call(session)
    assert caught.value.code == -32020
    assert server.methods() == ["tools/call", "tools/list"]


@pytest.mark.anyio
async def test_a_request_for_nothing_but_its_own_state_is_sent_again_with_it():
    """Spec 2026-07-28: the state goes back unread, under a new id, and into no other call."""
    state = 'é"\u2028 {"opaque":1}'

    def answer(seen: Seen) -> None:
        if len(server.seen) % 3:
            seen.rpc(result={"resultType": "input_required", "requestState": f"{state}{len(server.seen)}"})
        else:
            good(seen)

    with RawServer(McpStub(answer)) as server:
        async with session_to(server, era="modern") as session:
            assert await call(session) == VALUE
            assert await call(session) == VALUE
    sent = [seen.json["params"].get("requestState") for seen in server.seen]
    assert sent == [None, f"{state}1", f"{state}2", None, f"{state}4", f"{state}5"]
    assert len({seen.json["id"] for seen in server.seen}) == 6
    assert all(ARGUMENTS in seen.body for seen in server.seen)


@pytest.mark.parametrize(
    "annotated",
    [
        {"properties": {"a": {"type": "number", "x-mcp-header": "A"}}},
        {"properties": {"a": {"type": "string", "x-mcp-header": "A B"}}},
        {"properties": {"a": {"type": "string", "x-mcp-header": ""}}},
        {"properties": {"a": {"type": "string", "x-mcp-header": 1}}},
        {"properties": {"a": {"x-mcp-header": "A"}}},
        {"type": "string", "x-mcp-header": "A"},
        {"properties": {"a": {"type": "array", "items": {"type": "string", "x-mcp-header": "A"}}}},
        {"anyOf": [{"properties": {"a": {"type": "string", "x-mcp-header": "A"}}}]},
        {"$defs": {"a": {"type": "string", "x-mcp-header": "A"}}},
    ],
)
def test_an_impossible_header_annotation_is_found(annotated):
    """Spec: such a tool is passed over. What only looks like an annotation, in an example or a default, is none."""
    assert protocol._mirrored(annotated) is None
    assert protocol._mirrored({"default": annotated, "examples": [annotated]}) == {}


# -- choosing the era ------------------------------------------------------------------------------------------------


def legacy_after(probe: Callable[[Seen], None]) -> Callable[[Seen], None]:
    stub = McpStub(good, era="legacy")
    return lambda seen: probe(seen) if seen.method == "server/discover" else stub(seen)


FALLBACKS = {
    "400 text": http(400, b"Bad Request"),
    "400 -32600": rpc_error(-32600, "Missing session ID", 400),
    "400 -32000": rpc_error(-32000, "Server not initialized", 400),
    "404": http(404, HTML, "text/html"),
    "405": http(405),
    "406": http(406),
    "415": http(415),
    "422": http(422, b'{"detail":"?"}', "application/json"),
    "500": http(500),
    "501": http(501),
    "200 -32601": rpc_error(-32601, "Method not found"),
    "200 -32602": rpc_error(-32602, "Invalid request parameters"),
    "200 page": http(200, HTML, "text/html"),
    "200 other result": lambda seen: seen.rpc(result={"tools": []}),
    "200 older versions": lambda seen: seen.rpc(result={"supportedVersions": ["2025-11-25"]}),
    "only legacy versions": rpc_error(-32022, "version", 400, {"supported": ["2025-11-25"], "requested": "2026-07-28"}),
    "202": http(202, b"", None),
    "silence": Seen.stall,
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", FALLBACKS)
async def test_an_answer_that_no_modern_server_gives_means_legacy(name):
    """Ours, from what deployed servers answer to the probe; a server that stays silent gets its handshake too."""
    with RawServer(legacy_after(FALLBACKS[name])) as server:
        async with session_to(server, timeout=0.8 if name == "silence" else BOUND) as session:
            assert await call(session) == VALUE
    methods = [method for method in server.methods() if method != "notifications/cancelled"]
    assert methods == ["server/discover", "initialize", "notifications/initialized", "tools/call", "DELETE"]


@pytest.mark.anyio
@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 502, 503, 504])
async def test_a_status_that_says_nothing_about_the_era_is_raised(status):
    """Ours: no second request to a server that is busy, and the call itself is known not to have been sent."""
    with RawServer(http(status, Retry_After="5")) as server:
        async with session_to(server) as session:
            with pytest.raises(MemlogError) as caught:
                await call(session)
    assert (caught.value.status, caught.value.retry_after) == (status, 5.0)
    assert caught.value.outcome in ("not_sent", "refused")
    assert server.methods() == ["server/discover"]


@pytest.mark.anyio
@pytest.mark.parametrize("code", [-32020, -32021])
async def test_what_only_a_modern_server_says_is_no_reason_to_fall_back(code):
    """Spec: these codes are positive evidence of the modern era."""
    with RawServer(rpc_error(code, "no", 400)) as server:
        async with session_to(server) as session:
            with pytest.raises(ServerError) as caught:
                await call(session)
    assert (caught.value.code, caught.value.outcome) == (code, "not_sent")
    assert server.methods() == ["server/discover"]


@pytest.mark.anyio
async def test_a_version_refused_once_is_offered_again_if_the_server_lists_it():
    """Spec: pick a version from the list; there is one, so it is asked exactly once more."""
    refusals = iter([True, False])

    def answer(seen: Seen) -> None:
        if seen.method == "server/discover" and next(refusals):
            seen.rpc(status=400, error={"code": -32022, "message": "v", "data": {"supported": ["2026-07-28"]}})
            return
        McpStub(good)(seen)

    with RawServer(answer) as server:
        async with session_to(server) as session:
            assert await call(session) == VALUE
    assert server.methods() == ["server/discover", "server/discover", "tools/call"]


@pytest.mark.anyio
async def test_a_server_replaced_by_one_of_the_other_era_is_found_out():
    """Ours: an answer that casts doubt on the era makes the next call ask again."""
    stub = McpStub(good, era="modern")
    with RawServer(stub) as server:
        async with session_to(server) as session:
            await call(session)
            stub.era, stub.call = "legacy", rpc_error(-32600, "Bad Request: Missing session ID", 400)
            with pytest.raises(ServerError):
                await call(session)
            stub.call = good
            assert await call(session) == VALUE


@pytest.mark.parametrize("era", ["old", "", None, "2026-07-28"])
def test_an_era_is_one_of_three(era):
    """Ours: checked where it is given."""
    with pytest.raises(ValueError, match="era"):
        Session(Transport("http://localhost/mcp"), era=era)


# -- the legacy era --------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_legacy_shakes_hands_once_and_carries_session_and_version():
    """Spec 2025-11-25: initialize, initialized, calls, DELETE; the session id is only taken from the handshake."""
    with RawServer(McpStub(good, era="legacy")) as server:
        async with session_to(server) as session:
            await call(session)
            await call(session)
    assert server.methods() == [
        "server/discover",
        "initialize",
        "notifications/initialized",
        "tools/call",
        "tools/call",
        "DELETE",
    ]
    _, hello, *rest = server.seen
    assert "mcp-session-id" not in hello.headers
    assert "mcp-protocol-version" not in hello.headers
    assert hello.json["params"]["protocolVersion"] == "2025-11-25"
    assert {seen.headers["mcp-session-id"] for seen in rest} == {"session-1"}
    assert {seen.headers["mcp-protocol-version"] for seen in rest} == {"2025-11-25"}
    assert "_meta" not in rest[1].json["params"]
    assert "id" not in rest[0].json


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("version", "on_the_wire"), [("2025-06-18", "2025-06-18"), ("2025-03-26", None), ("2024-11-05", None)]
)
async def test_an_older_version_is_accepted_and_named_where_it_has_to_be(version, on_the_wire):
    """Spec: the header came with 2025-06-18."""

    def answer(seen: Seen) -> None:
        if seen.method == "initialize":
            seen.rpc(result={"protocolVersion": version, "capabilities": {}})
            return
        McpStub(good, era="legacy")(seen)

    with RawServer(answer) as server:
        async with session_to(server, era="legacy") as session:
            await call(session)
    assert server.seen[-1].headers.get("mcp-protocol-version") == on_the_wire
    assert server.methods() == ["initialize", "notifications/initialized", "tools/call"]


@pytest.mark.anyio
@pytest.mark.parametrize("result", [{}, {"protocolVersion": "1999-01-01"}, {"protocolVersion": 3}])
async def test_an_unknown_version_is_an_error_that_names_it(result):
    """Ours: nobody guesses what a future revision means."""
    with RawServer(lambda seen: seen.rpc(result=result)) as server:
        async with session_to(server, era="legacy") as session:
            with pytest.raises(ProtocolError) as caught:
                await call(session)
    assert caught.value.outcome == "not_sent"


def first_transport(seen: Seen, event: bytes = b"event: endpoint\ndata: /messages?id=1\n\n") -> None:
    """What a server of 2024-11-05 does, whose one address is for listening and whose other is told there."""
    if seen.verb == "GET":
        seen.begin_events()
        seen.chunk(event)
        seen.stall()
    else:
        seen.respond(405, b"Method Not Allowed", "text/plain", {"Allow": "GET"})


@pytest.mark.anyio
async def test_a_server_of_the_first_transport_is_recognized_and_called_unsupported():
    """Ours: a clear word instead of a status; the address is at fault, and the call was not sent."""
    with RawServer(first_transport) as server:
        async with session_to(server) as session:
            with pytest.raises(ProtocolError, match=r"2024-11-05.*not supported") as caught:
                await call(session)
    assert (caught.value.status, caught.value.code, caught.value.outcome) == (405, "http+sse", "not_sent")
    assert server.methods() == ["server/discover", "initialize", "GET"]
    assert server.seen[-1].headers["accept"] == "text/event-stream"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "listened",
    [
        http(405),
        http(200, HTML, "text/html"),
        Seen.reset,
        Seen.stall,
        lambda seen: first_transport(seen, b": hello\n\nevent: message\ndata: {}\n\n"),
        lambda seen: first_transport(seen, b": x\n" * 10_000),
    ],
)
async def test_any_other_server_that_refuses_the_handshake_keeps_its_status(listened, monkeypatch):
    """Ours: asking whether it is an old one costs a bounded time and hides nothing."""
    monkeypatch.setattr(protocol, "OLD_TRANSPORT_SECONDS_MAX", 0.2)
    with RawServer(lambda seen: listened(seen) if seen.verb == "GET" else http(405)(seen)) as server:
        async with session_to(server) as session:
            with pytest.raises(ServerError) as caught:
                await call(session)
    assert (caught.value.status, caught.value.outcome) == (405, "not_sent")


@pytest.mark.anyio
async def test_32_calls_that_meet_an_expired_session_make_one_new_handshake():
    """Spec: 404 to a session id means initialize again; ours: once for all, and every call is answered."""
    valid = {"session-1"}
    met = threading.Barrier(32, timeout=BOUND)

    def answer(seen: Seen) -> None:
        if seen.headers["mcp-session-id"] not in valid:
            met.wait()  # nobody learns of the end before everybody has asked
            seen.respond(404, b"Session not found", "text/plain")
            return
        good(seen)

    with RawServer(McpStub(answer, era="legacy")) as server:
        async with session_to(server) as session:
            await call(session)
            valid.clear()
            valid.add("session-2")
            async with anyio.create_task_group() as group:
                for _ in range(32):
                    group.start_soon(call, session)
    assert server.methods().count("initialize") == 2
    assert server.methods().count("tools/call") == 1 + 32 + 32


@pytest.mark.anyio
async def test_a_session_that_is_never_found_ends_after_one_renewal():
    """Ours: resent once, then it is the server's error."""
    with RawServer(McpStub(http(404), era="legacy")) as server:
        async with session_to(server) as session:
            with pytest.raises(ServerError) as caught:
                await call(session)
    assert (caught.value.status, server.methods().count("tools/call")) == (404, 2)


@pytest.mark.anyio
async def test_a_failed_renewal_is_known_not_to_have_carried_the_call_out():
    """Ours: the 404 proved it, so the outcome of the append is not in doubt."""
    stub = McpStub(good, era="legacy")
    gone = threading.Event()
    with RawServer(
        lambda seen: (
            stub(seen) if not gone.is_set() else http(404)(seen) if seen.method == "tools/call" else seen.reset()
        )
    ) as server:
        async with session_to(server) as session:
            await call(session)
            gone.set()
            with pytest.raises(ConnectionFailedError) as caught:
                await call(session)
            gone.clear()
            assert await call(session) == VALUE
    assert caught.value.outcome == "not_sent"


@pytest.mark.anyio
async def test_a_broken_stream_is_resumed_where_the_server_gave_an_event_id():
    """Spec 2025-11-25: GET with Last-Event-ID after the server's `retry`; the answer may come there."""

    def answer(seen: Seen) -> None:
        if seen.verb == "GET":
            number = server.seen[-2].json["id"]
            seen.begin_events()
            seen.chunk(
                b'data: {"jsonrpc":"2.0","id":%d,"result":%b}\n\n' % (number, json.dumps(tool_result(VALUE)).encode())
            )
            seen.end_events()
            return
        seen.begin_events()
        seen.chunk(b"id: ev-1\nretry: 10\ndata:\n\ndata: {unfinish")
        seen.reset()

    with RawServer(McpStub(answer, era="legacy")) as server:
        async with session_to(server) as session:
            assert await call(session) == VALUE
    resumed = next(seen for seen in server.seen if seen.verb == "GET")
    assert resumed.headers["last-event-id"] == "ev-1"
    assert resumed.headers["mcp-session-id"] == "session-1"


@pytest.mark.anyio
async def test_resuming_is_tried_a_few_times_only():
    """Ours: a server that ends every stream gets an error and no loop."""

    def answer(seen: Seen) -> None:
        seen.begin_events()
        seen.chunk(b"id: 1\nretry: 1\ndata:\n\n")
        seen.end_events()

    with RawServer(McpStub(answer, era="legacy")) as server:
        async with session_to(server) as session:
            with pytest.raises(ProtocolError) as caught:
                await call(session)
    assert caught.value.outcome == "unknown"
    assert server.methods().count("GET") == 3


@pytest.mark.anyio
@pytest.mark.parametrize("then", [http(405), http(404), Seen.reset, Seen.stall])
async def test_a_resumption_that_fails_leaves_the_outcome_unknown(then):
    """Ours: the call was sent, so neither a refused GET nor a dead server may look like a refusal of the call."""

    def answer(seen: Seen) -> None:
        if seen.verb == "GET":
            then(seen)
            return
        seen.begin_events()
        seen.chunk(b"id: 1\nretry: 1\ndata:\n\n")
        seen.reset()

    with RawServer(McpStub(answer, era="legacy")) as server:
        async with session_to(server) as session:
            with pytest.raises(ProtocolError) as caught:
                await call(session, timeout=1.0)
            assert (caught.value.outcome, caught.value.status) == ("unknown", None)


@pytest.mark.anyio
@pytest.mark.parametrize("code", [-32602, -32700, -32600])
async def test_a_refused_handshake_is_no_verdict_on_the_call(code):
    """Ours: what was never sent cannot be invalid."""
    with RawServer(rpc_error(code, "invalid params: conversation is full", 200)) as server:
        async with session_to(server, era="legacy") as session:
            with pytest.raises(ServerError) as caught:
                await call(session)
    assert (caught.value.code, caught.value.outcome) == (code, "not_sent")


@pytest.mark.anyio
async def test_no_stream_is_opened_that_nobody_asked_for():
    """Ours: some servers never end a GET."""
    for era in ("modern", "legacy"):
        with RawServer(McpStub(events(one_event), era=era)) as server:
            async with session_to(server) as session:
                await call(session)
        assert "GET" not in server.methods()


@pytest.mark.anyio
async def test_a_call_that_timed_out_is_cancelled_in_so_many_words():
    """Spec: in these revisions a disconnect is no cancellation."""
    with RawServer(McpStub(Seen.stall, era="legacy")) as server:
        async with session_to(server) as session:
            with pytest.raises(TimedOutError):
                await call(session, timeout=0.3)
    asked = next(seen for seen in server.seen if seen.method == "tools/call")
    told = next(seen for seen in server.seen if seen.method == "notifications/cancelled")
    assert told.json["params"]["requestId"] == asked.json["id"]


# -- the session as a whole ------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_one_connection_serves_a_chain_of_calls_also_as_event_streams(era):
    """Ours: a stream is read to its end, so that its connection is good for the next call."""
    with RawServer(McpStub(events(one_event), era=era)) as server:
        async with session_to(server) as session:
            for _ in range(50):
                await call(session)
    assert server.connections == 1


@pytest.mark.anyio
async def test_one_broken_connection_does_not_hurt_the_other_calls():
    """Ours: calls share nothing that can break."""
    count = iter(range(1000))
    lock = threading.Lock()

    def answer(seen: Seen) -> None:
        with lock:
            number = next(count)
        seen.reset() if number == 1 else good(seen)

    outcomes: list[object] = []
    with RawServer(McpStub(answer)) as server:
        async with session_to(server) as session:

            async def one() -> None:
                try:
                    outcomes.append(await call(session))
                except ConnectionFailedError as error:
                    outcomes.append(error.outcome)

            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(one)
            assert await call(session) == VALUE
    assert outcomes.count("unknown") == 1
    assert outcomes.count(VALUE) == 3


@pytest.mark.anyio
async def test_a_call_cancelled_in_its_handshake_leaves_the_next_one_a_clean_start():
    """Ours: the lock is released, nothing half agreed is kept."""
    hold = threading.Event()

    def answer(seen: Seen) -> None:
        if seen.method == "initialize" and not hold.is_set():
            hold.set()
            seen.stall()
            return
        McpStub(good, era="legacy")(seen)

    with RawServer(answer) as server:
        async with session_to(server) as session:
            async with anyio.create_task_group() as group:
                group.start_soon(call, session)
                assert await anyio.to_thread.run_sync(lambda: hold.wait(BOUND))
                group.cancel_scope.cancel()
            assert await call(session) == VALUE


@pytest.mark.anyio
async def test_who_waits_for_anothers_handshake_waits_no_longer_than_its_own_timeout():
    """Ours: the deadline of a call covers the lock too."""
    with RawServer(Seen.stall) as server:
        async with session_to(server, era="legacy") as session:
            seconds: dict[float, str] = {}

            async def one(timeout: float) -> None:
                with pytest.raises(TimedOutError) as caught:
                    await call(session, timeout=timeout)
                seconds[timeout] = caught.value.outcome

            async with anyio.create_task_group() as group:
                group.start_soon(one, 1.0)
                while not server.seen:
                    await anyio.sleep(0.005)
                group.start_soon(one, 0.1)
    assert list(seconds.items()) == [(0.1, "not_sent"), (1.0, "not_sent")]


@pytest.mark.anyio
async def test_close_twice_from_two_tasks_says_goodbye_once():
    """Ours: close is for any task, and a refusal of the goodbye is nobody's problem."""
    stub = McpStub(good, era="legacy")
    with RawServer(lambda seen: seen.respond(405, kind=None) if seen.verb == "DELETE" else stub(seen)) as server:
        session = Session(Transport(server.url))
        await call(session)
        async with anyio.create_task_group() as group:
            group.start_soon(session.close)
            group.start_soon(session.close)
        with pytest.raises(errors.ClosedError):
            await call(session)
    assert server.methods().count("DELETE") == 1


# -- event streams as bytes ------------------------------------------------------------------------------------------


def test_events_are_the_same_wherever_the_chunks_are_cut():
    """Spec (WHATWG): CR, LF and CRLF end lines, one BOM, several data lines, comments, unknown fields and events."""
    stream = (
        b"\xef\xbb\xbfdata: one\r\n\r\n: comment\n\ndata:two\rdata: more\r\r"
        b'event: other\ndata: no\n\nid: 5\nretry: 1500\ndata\n\nid: a\0b\nretry: x\nfoo: bar\ndata: {"a":"\xc3\xa9\xe2\x80\xa8"}\n\n'
        b"event: message\ndata:  kept space\n\ndata: last"
    )
    expected = [b"one", b"two\nmore", b'{"a":"\xc3\xa9\xe2\x80\xa8"}', b" kept space", b"last"]
    for size in range(1, len(stream) + 1):
        reader = EventReader()
        found = [data for at in range(0, len(stream), size) for data in reader.feed(stream[at : at + size])]
        assert found + reader.end() == expected, size
        assert (reader.last_id, reader.retry) == ("5", 1.5)


def test_a_long_line_in_small_pieces_takes_linear_time():
    """Ours: 4 MB in one line and pieces of 64 bytes must not be copied for each of them; quadratic would take minutes."""
    reader = EventReader()
    reader.feed(b"data: ")
    for _ in range(65_536):
        assert reader.feed(b"x" * 64) == []
    assert [len(data) for data in reader.feed(b"\n\n")] == [65_536 * 64]
