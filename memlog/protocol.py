"""MCP as far as a caller of tools needs it: JSON-RPC over Streamable HTTP, in both eras of the protocol.

*Modern* (2026-07-28) has no handshake: every request says all there is to say. *Legacy* (2024-11-05 to 2025-11-25)
begins with ``initialize`` and may have a session. ``auto`` asks ``server/discover`` first, a question that no server
can mistake for an order, and falls back only on an answer that no modern server gives.

Invariants of a :class:`Session`:

* No task and no open stream outlives a call, so a call can fail or be cancelled without the next one noticing.
* What was agreed with the server is one immutable value. Whoever finds it outdated replaces exactly that value, under
  a lock: 32 calls that meet an expired session make one new handshake.
* A call is sent a second time only after an answer which proves that the first was not carried out, or asks for it.
* Arguments are bytes and travel as they are.

It knows no tool by name and retries nothing.
"""

from __future__ import annotations

import base64
import functools
import itertools
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import anyio

from memlog import payload
from memlog.errors import MemlogError, ProtocolError, TimedOutError, TransientError
from memlog.refusal import Refusal, spoken, to_error, trimmed
from memlog.retry import parse_retry_after
from memlog.sse import BOM, EventReader
from memlog.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memlog.transport import Answer, Transport

__all__ = ["Era", "Session"]

Era = Literal["auto", "modern", "legacy"]

MODERN_VERSION: Final = "2026-07-28"
LEGACY_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""The newest first: it is offered, any of them is accepted."""

VERSION_HEADER_SINCE: Final = "2025-06-18"

HEADER_MISMATCH: Final = -32020
MISSING_CAPABILITY: Final = -32021
UNSUPPORTED_VERSION: Final = -32022

PROBE_SECONDS_MAX: Final = 10.0
DRAIN_SECONDS_MAX: Final = 0.1
"""A stream is read to its end for so long after the answer, because closing it early costs the connection."""

RESUMPTIONS_MAX: Final = 3
RESUME_SECONDS_DEFAULT: Final = 1.0
STATE_ROUNDS_MAX: Final = 3
"""How often a call is sent again because the server asked for that, with the state it gave along."""

GOODBYE_SECONDS_MAX: Final = 2.0
OLD_TRANSPORT_SECONDS_MAX: Final = 2.0
OLD_TRANSPORT_BYTES_MAX: Final = 16 * 1024
CANCEL_SECONDS_MAX: Final = 0.5
TOOL_PAGES_MAX: Final = 100

_NOT_ERA_VERDICTS: Final = frozenset({401, 403, 407, 408, 425, 429, 502, 503, 504})
_ERA_DOUBTS: Final = frozenset({400, 404, 405, 406, 415, 422})
_OLD_TRANSPORT_DOUBTS: Final = frozenset({400, 404, 405})


class _Terms:
    """What was agreed with the server. Compared by identity: another object is another agreement."""

    __slots__ = ("session_id", "version")

    def __init__(self, version: str, session_id: str | None = None) -> None:
        self.version: Final = version
        self.session_id: Final = session_id

    @property
    def modern(self) -> bool:
        return self.version == MODERN_VERSION

    def headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        if self.version >= VERSION_HEADER_SINCE:
            headers["MCP-Protocol-Version"] = self.version
        if self.session_id is not None:
            headers["Mcp-Session-Id"] = self.session_id
        return headers


_MODERN: Final = _Terms(MODERN_VERSION)
_BEFORE_AGREEMENT: Final = _Terms("")


class _Call(NamedTuple):
    """A request as the caller means it, before anything of the wire is added. ``params`` is an object's inside."""

    method: str
    params: bytes = b""
    tool: str | None = None
    arguments: bytes = b""
    conversation_id: str | None = None

    @property
    def what(self) -> str:
        return self.tool or self.method


_DISCOVER: Final = _Call("server/discover")


class _Incoming(NamedTuple):
    """What is waited for: the response to request ``number``, and the event stream it may come in."""

    number: int
    events: EventReader


@dataclass(slots=True, eq=False, repr=False)
class _Reply:
    """One HTTP answer, read: its JSON-RPC response if it holds one, else what it holds instead."""

    status: int
    headers: Mapping[str, str]
    message: dict[str, Any] | None = None
    body: object = None
    """What stands in the place of a response: parsed JSON or plain text."""

    problem: ProtocolError | None = None

    @property
    def code(self) -> object:
        error = (self.message or {}).get("error")
        return error.get("code") if isinstance(error, dict) else None

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of a success. A 429 may carry an ordinary one; it is no success for that."""
        result = (self.message or {}).get("result")
        return result if isinstance(result, dict) and 200 <= self.status < 300 else None


class Session:
    """Tool calls to one server over one :class:`Transport`, which it closes with itself."""

    def __init__(self, transport: Transport, *, era: Era = "auto") -> None:
        if era not in ("auto", "modern", "legacy"):
            raise ValueError(f"era must be auto, modern or legacy, got {era!r}")
        self._transport = transport
        self._era = era
        self._lock = anyio.Lock()
        self._terms: _Terms | None = None
        self._ids = itertools.count(1)
        self._mirrored: dict[str, Mapping[tuple[str, ...], str]] = {}

    async def call_tool(
        self, name: str, arguments: bytes, *, conversation_id: str | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Call a tool once and return its result's value: ``structuredContent``, or the JSON of its text.

        ``arguments`` is a JSON object in UTF-8. ``conversation_id`` is for the words of an error only. ``timeout``
        (default: the transport's) is the absolute limit in seconds, a handshake included.

        Raises:
            PermanentError: the server refused.
            TransientError: anything else; its ``outcome`` says whether the call may have been carried out.
        """
        params = b'"name":%b,"arguments":%b' % (payload.dumps(name), arguments)
        call = _Call("tools/call", params, name, arguments, conversation_id)
        deadline = self._deadline(timeout)
        reply, result = await self._call(call, deadline)
        for _ in range(STATE_ROUNDS_MAX):
            if (state := _state_alone(result)) is None:
                break
            again = call._replace(params=b'%b,"requestState":%b' % (params, payload.dumps(state)))
            reply, result = await self._call(again, deadline)
        result_type = result.get("resultType", "complete")
        if result_type != "complete":
            raise ProtocolError(f"{name}: the server asks for something else first ({str(result_type)[:40]!r})")
        if result.get("isError") is True:
            raise self._error(call, reply, _failure_of(result))
        return _value_of(name, result)

    async def list_tools(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """The tools as the server describes them."""
        return await self._list_tools(self._deadline(timeout))

    async def close(self) -> None:
        """Say goodbye where there is a session, and close the connections. From any task, any number of times."""
        terms, self._terms = self._terms, None
        if terms is not None and terms.session_id is not None:
            with anyio.move_on_after(GOODBYE_SECONDS_MAX, shield=True), suppress(MemlogError):
                async with self._transport.request("DELETE", terms.headers()) as answer:
                    await answer.skim()
        await self._transport.close()

    # -- one call ------------------------------------------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> float:
        return anyio.current_time() + (self._transport.timeout if timeout is None else timeout)

    async def _call(self, call: _Call, deadline: float) -> tuple[_Reply, dict[str, Any]]:
        """The answer to one call and its result; sent again only after an answer that proves it was not carried out."""
        terms = await self._agreed(deadline)
        reply = await self._ask(terms, call, deadline)
        again = False
        if (reply.status == 404 and terms.session_id is not None) or reply.code == UNSUPPORTED_VERSION:
            # The session is gone, or another server answers there by now; neither looked at the request.
            renewed = await self._agreed(deadline, instead_of=terms)
            terms, again = renewed, renewed is not terms
        elif reply.code == HEADER_MISMATCH and call.tool is not None:
            again = await self._learn_mirrored(call.tool, deadline)
        if again:
            reply = await self._ask(terms, call, deadline)
        if reply.result is not None:
            return reply, reply.result
        if reply.status in _ERA_DOUBTS and reply.code not in (-32601, -32602) and self._terms is terms:
            # Perhaps another server answers there by now: the next call asks who it is.
            self._terms = None
        if 200 <= reply.status < 300 and (reply.message is None or "error" not in reply.message):
            raise reply.problem or ProtocolError(f"{call.what}: the result is not an object")
        raise self._error(call, reply, reply.body if reply.message is None else reply.message)

    async def _ask(self, terms: _Terms, call: _Call, deadline: float) -> _Reply:
        headers, params = terms.headers(), call.params
        if terms.modern:
            headers["Mcp-Method"] = call.method
            if call.tool is not None:
                headers["Mcp-Name"] = _header_value(call.tool)
                headers.update(_mirrored_headers(self._mirrored.get(call.tool, {}), call.arguments))
            params = b"%b%b%b" % (params, b"," if params else b"", _modern_meta())
        return await self._post(terms, headers, call.method, params, deadline)

    def _error(self, call: _Call, reply: _Reply, words_of: object) -> MemlogError:
        """The error for a refusal, whichever part of the answer it was found in."""
        code, words, hint = spoken(words_of)
        retry_after = parse_retry_after(reply.headers.get("retry-after"))
        if retry_after is None and isinstance(hint, int | float | str) and not isinstance(hint, bool):
            retry_after = parse_retry_after(str(hint))
        said = trimmed(self._transport.mask(words), call.arguments)
        refusal = Refusal(call.what, reply.status, code, words, said, retry_after)
        return to_error(refusal, conversation_id=call.conversation_id, of_a_tool=call.tool is not None)

    # -- agreeing with the server --------------------------------------------------------------------------------------

    async def _agreed(self, deadline: float, *, instead_of: _Terms | None = None) -> _Terms:
        """What is agreed, after a handshake if there is nothing yet or only ``instead_of``, which proved outdated."""
        terms = self._terms
        if terms is not None and terms is not instead_of:
            return terms
        try:
            with anyio.fail_after(max(deadline - anyio.current_time(), 0)):
                async with self._lock:
                    if self._terms is None or self._terms is instead_of:
                        self._terms = None
                        was_legacy = instead_of is not None and instead_of.session_id is not None
                        self._terms = await self._agree(deadline, self._era if not was_legacy else "legacy")
                    return self._terms
        except TimeoutError as error:
            raise TimedOutError("no agreement with the server in time", outcome="not_sent") from error
        except TransientError as error:
            # Whatever became of the handshake, the call behind it was not sent (or was answered: not carried out).
            error.outcome = "not_sent"
            raise

    async def _agree(self, deadline: float, era: Era) -> _Terms:
        if era == "modern":
            return _MODERN
        if era == "legacy":
            return await self._initialize(deadline)
        reply: _Reply | None = None
        for _ in range(2):
            left = max(deadline - anyio.current_time(), 0)
            probe_deadline = anyio.current_time() + min(PROBE_SECONDS_MAX, left / 2)
            try:
                reply = await self._ask(_MODERN, _DISCOVER, probe_deadline)
            except TimedOutError as error:
                if error.outcome == "not_sent":
                    raise
                return await self._initialize(deadline)
            if reply.code != UNSUPPORTED_VERSION:
                break
            supported = _supported(reply)
            if MODERN_VERSION not in supported:
                if any(version in LEGACY_VERSIONS for version in supported):
                    return await self._initialize(deadline)
                break
        assert reply is not None
        if reply.result is not None and MODERN_VERSION in _listed(reply.result.get("supportedVersions")):
            return _MODERN
        if reply.status in _NOT_ERA_VERDICTS or reply.code in (
            HEADER_MISMATCH,
            MISSING_CAPABILITY,
            UNSUPPORTED_VERSION,
        ):
            raise self._error(_DISCOVER, reply, reply.message or reply.body)
        return await self._initialize(deadline)

    async def _initialize(self, deadline: float) -> _Terms:
        params = b'"protocolVersion":"%b","capabilities":{},"clientInfo":%b' % (
            LEGACY_VERSIONS[0].encode(),
            _client_info(),
        )
        headers = _BEFORE_AGREEMENT.headers()
        reply = await self._post(_BEFORE_AGREEMENT, headers, "initialize", params, deadline)
        result = reply.result
        if result is None:
            if 200 <= reply.status < 300 and reply.problem is not None:
                raise reply.problem
            if reply.status in _OLD_TRANSPORT_DOUBTS and reply.message is None and await self._is_old(deadline):
                raise ProtocolError(
                    "the server speaks the transport of MCP 2024-11-05 only (HTTP with SSE), which is not supported: "
                    "ask its operator for a Streamable HTTP address",
                    status=reply.status,
                    code="http+sse",
                )
            raise self._error(_Call("initialize"), reply, reply.message or reply.body)
        version = result.get("protocolVersion")
        if version not in LEGACY_VERSIONS:
            raise ProtocolError(f"the server speaks a version of MCP that is not known here: {str(version)[:40]!r}")
        session_id = reply.headers.get("mcp-session-id")
        if session_id is not None and not re.fullmatch(r"[\x21-\x7e]+", session_id):
            raise ProtocolError("the server's session id is not visible ASCII")
        terms = _Terms(version, session_id)
        await self._notify(terms, b'"method":"notifications/initialized"', deadline)
        return terms

    async def _is_old(self, deadline: float) -> bool:
        """Whether a GET is answered as the first transport of MCP wants it, with the address to post to."""
        events, read = EventReader(kinds=(b"endpoint",)), 0
        left = max(min(deadline - anyio.current_time(), OLD_TRANSPORT_SECONDS_MAX), 0)
        with suppress(TransientError):
            async with self._transport.request("GET", {"Accept": "text/event-stream"}, timeout=left) as answer:
                if answer.status == 200 and answer.media_type == "text/event-stream":
                    async for chunk in answer:
                        read += len(chunk)
                        if events.feed(chunk):
                            return True
                        if read > OLD_TRANSPORT_BYTES_MAX:
                            break
        return False

    async def _notify(self, terms: _Terms, message: bytes, deadline: float) -> None:
        left = max(deadline - anyio.current_time(), 0)
        body = b'{"jsonrpc":"2.0",%b}' % message
        async with self._transport.request("POST", terms.headers(), body, timeout=left) as answer:
            await answer.skim(DRAIN_SECONDS_MAX)

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _post(
        self, terms: _Terms, headers: Mapping[str, str], method: str, params: bytes, deadline: float
    ) -> _Reply:
        incoming = _Incoming(next(self._ids), EventReader())
        body = b'{"jsonrpc":"2.0","id":%d,"method":"%b","params":{%b}}' % (incoming.number, method.encode(), params)
        events = incoming.events
        try:
            reply = await self._exchange("POST", headers, body, incoming, deadline)
            for _ in range(RESUMPTIONS_MAX):
                if reply.message is not None or terms.modern or events.last_id is None or reply.status >= 300:
                    break
                wait = RESUME_SECONDS_DEFAULT if events.retry is None else events.retry
                if anyio.current_time() + wait >= deadline:
                    break
                await anyio.sleep(wait)
                resume = {**headers, "Accept": "text/event-stream", "Last-Event-ID": events.last_id}
                del resume["Content-Type"]
                events.cut()
                # Whatever becomes of this, the call itself was sent: a failure here says nothing about its outcome.
                with suppress(TransientError):
                    resumed = await self._exchange("GET", resume, b"", incoming, deadline)
                    reply.message = resumed.message if resumed.status < 300 else None
        except TimedOutError as error:
            if error.outcome == "unknown" and terms.version and not terms.modern:
                # Disconnecting is not cancelling in these revisions, so the server is told. In vain is fine.
                told = b'"method":"notifications/cancelled","params":{"requestId":%d}' % incoming.number
                with suppress(MemlogError):
                    await self._notify(terms, told, anyio.current_time() + CANCEL_SECONDS_MAX)
            raise
        return reply

    async def _exchange(
        self, verb: str, headers: Mapping[str, str], body: bytes, incoming: _Incoming, deadline: float
    ) -> _Reply:
        reply: _Reply | None = None
        left = max(deadline - anyio.current_time(), 0)
        try:
            async with self._transport.request(verb, headers, body, timeout=left) as answer:
                reply = _Reply(answer.status, answer.headers)
                await _read(answer, reply, incoming)
        except TransientError as error:
            # What is known is known, even if the connection broke while the rest of it was read.
            if reply is None or (reply.status < 300 and reply.message is None):
                if reply is None or incoming.events.last_id is None or isinstance(error, TimedOutError):
                    raise
                reply.problem = _unfinished()
        return reply

    # -- tools with mirrored parameters --------------------------------------------------------------------------------

    async def _learn_mirrored(self, tool: str, deadline: float) -> bool:
        """Ask which arguments the tool wants as headers; True if that is news."""
        known = self._mirrored.get(tool)
        try:
            await self._list_tools(deadline)
        except TransientError as error:
            error.outcome = "not_sent"  # the call behind it was answered: not carried out
            raise
        return self._mirrored.get(tool) != known

    async def _list_tools(self, deadline: float) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(TOOL_PAGES_MAX):
            params = b"" if cursor is None else b'"cursor":' + payload.dumps(cursor)
            _, result = await self._call(_Call("tools/list", params), deadline)
            page = result.get("tools")
            if not isinstance(page, list):
                raise ProtocolError("tools/list: no list of tools")
            tools += [tool for tool in page if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
            cursor = result.get("nextCursor")
            if not isinstance(cursor, str) or not cursor:
                break
        else:
            raise ProtocolError("tools/list: the pages have no end")
        if self._terms is None or not self._terms.modern:
            return tools
        mirrored = {tool["name"]: _mirrored(tool.get("inputSchema")) for tool in tools}
        self._mirrored = {name: paths for name, paths in mirrored.items() if paths}
        # The protocol wants a tool that asks for impossible headers to be passed over.
        return [tool for tool in tools if mirrored[tool["name"]] is not None]


async def _read(answer: Answer, reply: _Reply, incoming: _Incoming) -> None:
    """Fill the reply from the body, by its media type."""
    number, events = incoming.number, incoming.events
    if answer.media_type == "text/event-stream" and 200 <= answer.status < 300:
        async for chunk in answer:
            if (message := _first(events.feed(chunk), number)) is not None:
                reply.message = message
                await answer.skim(DRAIN_SECONDS_MAX)
                return
        reply.message = _first(events.end(), number, at_end=True)
        reply.problem = None if reply.message else _unfinished()
        return
    raw = await answer.read()
    if answer.media_type.endswith("json") and raw:
        try:
            value = payload.loads(raw.removeprefix(BOM))
        except ValueError:
            reply.problem = ProtocolError("the answer is not valid JSON", code="json")
            return
        reply.message = _pick(value, number)
        reply.body = value
        if reply.message is None:
            reply.problem = ProtocolError("the answer is JSON, but no response to this request")
        return
    if answer.media_type == "text/plain":
        reply.body = raw[:1000].decode("utf-8", "replace")
    kind = f"{answer.media_type or 'an unknown type'}" if raw else "nothing"
    # The status stays in this one: it tells a page from a slip of a server that does speak the protocol.
    reply.problem = ProtocolError(
        f"the answer is {kind} where JSON or an event stream belongs: is this the address of an MCP server?",
        status=answer.status,
    )


def _unfinished() -> ProtocolError:
    return ProtocolError("the event stream ended without an answer")


def _first(messages: list[bytes], number: int, *, at_end: bool = False) -> dict[str, Any] | None:
    for data in messages:
        try:
            value = payload.loads(data)
        except ValueError:
            if at_end:
                return None
            raise ProtocolError("an event is not valid JSON", code="json") from None
        if (message := _pick(value, number)) is not None:
            return message
    return None


def _pick(value: object, number: int) -> dict[str, Any] | None:
    """The response to request ``number`` in a JSON value: one message, or an array as revision 2025-03-26 allowed.

    An error under another id or none is ours too: nothing else was asked on this connection, and servers that could
    not read a request cannot know its id.
    """
    for message in value if isinstance(value, list) else (value,):
        if not isinstance(message, dict) or "method" in message:
            continue
        if isinstance(message.get("error"), dict):
            return message
        if "result" in message and str(message.get("id")) == str(number):
            return message
    return None


def _state_alone(result: dict[str, Any]) -> str | None:
    """The state of a server that wants the call again with nothing but that. (There is nobody here to ask for more.)"""
    state = result.get("requestState")
    asks = result.get("resultType") == "input_required" and not result.get("inputRequests")
    return state if asks and isinstance(state, str) else None


def _failure_of(result: dict[str, Any]) -> object:
    """What a result marked ``isError`` says: JSON where it is, else its plain text."""
    structured = result.get("structuredContent")
    if isinstance(structured, dict) and ("error" in structured or "code" in structured):
        return structured
    text = "\n".join(_texts(result))
    with suppress(ValueError):
        value = payload.loads(text.encode("utf-8", "replace"))
        if isinstance(value, dict):
            return value
    return text


def _value_of(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """The value of a success. Content of unknown kinds beside it is nobody's business here."""
    structured = result.get("structuredContent")
    if isinstance(structured, dict):
        return structured
    values = []
    for text in _texts(result):
        with suppress(ValueError):
            value = payload.loads(text.encode("utf-8", "surrogatepass"))
            if isinstance(value, dict):
                values.append(value)
    if len(values) != 1:
        raise ProtocolError(f"{name}: the result holds no JSON object")
    value = values[0]
    assert isinstance(value, dict)
    return value


def _texts(result: dict[str, Any]) -> list[str]:
    content = result.get("content")
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str)]


def _supported(reply: _Reply) -> list[object]:
    error = (reply.message or {}).get("error")
    data = error.get("data") if isinstance(error, dict) else None
    return _listed(data.get("supported")) if isinstance(data, dict) else []


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


@functools.cache
def _client_info() -> bytes:
    return payload.dumps({"name": "memlog", "version": VERSION})


@functools.cache
def _modern_meta() -> bytes:
    return (
        b'"_meta":{"io.modelcontextprotocol/protocolVersion":"%b",'
        b'"io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":%b}'
    ) % (MODERN_VERSION.encode(), _client_info())


def _header_value(text: str) -> str:
    """Visible ASCII with inner spaces as it is, everything else (and what looks like it) in the protocol's Base64."""
    plain = re.fullmatch(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?", text)
    if plain and not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode('ascii')}?="


def _mirrored_headers(paths: Mapping[tuple[str, ...], str], arguments: bytes) -> Iterator[tuple[str, str]]:
    """The arguments that a tool wants repeated as headers."""
    if not paths:
        return
    root = payload.loads(arguments)
    for path, name in paths.items():
        value: object = root
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool):
            yield f"Mcp-Param-{name}", "true" if value else "false"
        elif isinstance(value, float) and value.is_integer():
            yield f"Mcp-Param-{name}", str(int(value))  # 1.0 is an integer to JSON Schema, and is written as one
        elif isinstance(value, str | int | float):
            yield f"Mcp-Param-{name}", _header_value(str(value))


def _mirrored(schema: object) -> dict[tuple[str, ...], str] | None:
    """Path and header name of each property annotated ``x-mcp-header``; None if an annotation breaks the rules.

    The rules: on a property reached through properties only, a header token, a string, integer or boolean, and no name
    twice whatever its case.
    """
    found: dict[tuple[str, ...], str] = {}
    pending: list[tuple[tuple[str, ...] | None, object]] = [((), schema)]
    while pending:
        path, node = pending.pop()
        if isinstance(node, list):
            pending += [(None, child) for child in node]
        if not isinstance(node, dict):
            continue
        if "x-mcp-header" in node:
            name = node["x-mcp-header"]
            if not path or not isinstance(name, str) or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                return None
            if node.get("type") not in ("string", "integer", "boolean"):
                return None
            if name.lower() in (known.lower() for known in found.values()):
                return None
            found[path] = name
        for keyword, child in node.items():
            if keyword == "properties" and isinstance(child, dict):
                pending += [(None if path is None else (*path, key), value) for key, value in child.items()]
            elif keyword in _SCHEMA_MAPS and isinstance(child, dict):
                pending += [(None, value) for value in child.values()]
            elif keyword in _SCHEMAS:
                pending.append((None, child))
    return found


# Keywords of JSON Schema under which further schemas stand. Others hold data, which may look like a schema.
_SCHEMA_MAPS: Final = frozenset({"patternProperties", "dependentSchemas", "$defs", "definitions"})
_SCHEMAS: Final = frozenset(
    {"items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
    | {"not", "if", "then", "else", "contentSchema", "allOf", "anyOf", "oneOf", "prefixItems"}
)
