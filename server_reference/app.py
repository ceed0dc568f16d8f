"""The HTTP side: who may call, one POST in, one answer out, as JSON or as an event stream.

``/mcp`` takes POST (one message) and DELETE (the end of a session). The order of checks: the Host and Origin headers,
credentials, the form of the request, the message, the session, the rate of calls, the tool. ``/faults`` exists only
where faults are allowed, see :mod:`.faults`. No log line and no answer quotes a credential, nor a payload to others.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter, OrderedDict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit

from starlette.applications import Starlette
from starlette.routing import Route

from .auth import Authenticator, Identity, RateLimit
from .conformance import CONFORMANCE_TOOLS
from .faults import Fault, Faults
from .protocol import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    RejectedError,
    Request,
    check_mirrored,
    discovery,
    error_body,
    handshake,
    http_error_code,
    read_message,
    result_body,
)
from .store import Store
from .team import Team
from .team_tools import TEAM_TOOLS
from .tools import TOOLS, Result, Tool, ToolBox, append_answer
from .verbatim import NotJsonError, loads, quote

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping

    from starlette.types import Receive, Scope, Send

__all__ = ["Counters", "create_app"]

REQUEST_BYTES_MAX: Final = 8 * 1024 * 1024
"""A full batch written with an escape for every character is six times its compact size."""

SESSIONS_MAX: Final = 10_000
"""Legacy sessions remembered; the oldest is forgotten, and its client has to initialize again."""

log = logging.getLogger("server_reference")


def create_app(
    *,
    db: str | os.PathLike[str] | None = None,
    sites: Mapping[str, str] | None = None,
    read_tokens: Collection[str] = (),
    team_tokens: Mapping[str, str] | None = None,
    team_members: Mapping[str, Mapping[str, str]] | None = None,
    records: str | os.PathLike[str] | None = None,
    rate: float | None = None,
    allow_faults: bool = False,
    hosts: Collection[str] | None = None,
    no_auth: bool = False,
    conformance_tools: bool = False,
    conversation_items_max: int = 100_000,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """The server as a Starlette application, for uvicorn or an in-process transport.

    ``app.state`` carries ``faults`` (:class:`.Faults`, in effect whether or not `allow_faults` opens ``/faults``),
    ``counters`` (:class:`Counters`) and ``store``. One application may be served several times, also after a stop; who
    is done with it calls ``app.state.store.close()``, or drops it.

    Args:
        db: the database file; None keeps everything in memory.
        sites: site name to password; ``{"demo": "demo"}`` if left out.
        read_tokens: Bearer tokens that are known, but refused by every site tool.
        team_tokens: Bearer token to user, for the tools of team records.
        team_members: team to user to role (``reader``, ``editor``, ``manager``); every team is open to all if left out.
        records: the events that the team records begin with, see :mod:`.team`.
        rate: tool calls a second and site; None for no limit.
        allow_faults: serve ``/faults``.
        hosts: host names a request may be addressed to (a port is not looked at); None for any.
        no_auth: take who gives no credentials for the first site. Only for a server that nobody else can reach.
        conformance_tools: serve the tools of :mod:`.conformance` too.
        conversation_items_max: a lower cap than the contract's 100,000.
        clock: seconds, for the rate limit.

    Raises:
        ValueError: a setting or the records file is not valid.
        StoreUnusableError: the database cannot be used.
    """
    known_sites = {"demo": "demo"} if sites is None else sites
    authenticator = Authenticator(known_sites, read_tokens, team_tokens, no_auth=no_auth)
    limit = RateLimit(rate, clock)
    team = Team(records, team_members)
    store = Store(db, conversation_items_max=conversation_items_max)
    faults, counters = Faults(), Counters()
    tools = {**TOOLS, **TEAM_TOOLS, **(CONFORMANCE_TOOLS if conformance_tools else {})}

    protocol = _Mcp(ToolBox(store, team), tools, limit, faults, counters)
    mcp = _Endpoint(authenticator, hosts, protocol.answer, ("POST", "DELETE"))
    # Both spellings are served: a redirect would cost some clients their body or their credentials.
    routes = [Route("/mcp", endpoint=mcp), Route("/mcp/", endpoint=mcp)]
    if allow_faults:
        control = _Endpoint(authenticator, hosts, _FaultControl(faults).answer, ("GET", "POST", "DELETE"))
        routes.append(Route("/faults", endpoint=control))
    app = Starlette(routes=routes)
    app.state.faults = faults
    app.state.counters = counters
    app.state.store = store
    return app


class Counters:
    """What tests ask afterwards: ``calls`` counts tool calls by name, faulty ones too, ``methods`` all requests."""

    def __init__(self) -> None:
        self.methods: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.in_flight_max = 0
        self.in_flight_max_by_conversation: dict[str, int] = {}
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def appending(self, conversation_id: object) -> Iterator[None]:
        """Counts an append as in flight until it is about to be answered."""
        key = conversation_id if isinstance(conversation_id, str) else ""
        self._in_flight[key] += 1
        self.in_flight_max = max(self.in_flight_max, self._in_flight.total())
        self.in_flight_max_by_conversation[key] = max(
            self.in_flight_max_by_conversation.get(key, 0), self._in_flight[key]
        )
        try:
            yield
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: str = ""
    content_type: str = "application/json"
    headers: Mapping[str, str] | None = None
    broken_off: bool = False
    """Only half of the body is sent."""


class _DropError(Exception):
    """The connection is to be closed without an answer."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One HTTP request, read and authenticated. `headers` are by lower-case name."""

    method: str
    headers: Mapping[str, str]
    repeated: frozenset[str]
    body: bytes
    identity: Identity


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # brackets that hold no address
        return urlsplit("")


def _http_error(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> _Answer:
    return _Answer(status, error_body("null", http_error_code(status), message), headers=headers)


class _Endpoint:
    """The ASGI application of one path: checks what all paths check, and writes the answer, or breaks it off."""

    def __init__(
        self,
        authenticator: Authenticator,
        hosts: Collection[str] | None,
        answer: Callable[[_Call], Awaitable[_Answer]],
        methods: Collection[str],
    ) -> None:
        self._authenticator = authenticator
        self._hosts = hosts
        self._answer = answer
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:  # the caller has gone
            return
        try:
            answer = await self._checked(scope, body)
        except _DropError:
            await _drop(receive)
            return
        bodiless = answer.status in (204, 304)  # neither may even say that it has no body
        content = b"" if bodiless else answer.body.encode("utf-8")
        headers: list[tuple[bytes, bytes]] = []
        if not bodiless:
            headers.append((b"content-length", str(len(content)).encode()))
        if content:
            headers.append((b"content-type", answer.content_type.encode()))
        headers += [(name.encode(), value.encode()) for name, value in (answer.headers or {}).items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if answer.broken_off:
            await send({"type": "http.response.body", "body": content[: len(content) // 2], "more_body": True})
            await _drop(receive, flush=True)
            return
        await send({"type": "http.response.body", "body": content})

    async def _checked(self, scope: Scope, body: bytes) -> _Answer:
        headers: dict[str, str] = {}
        names: Counter[str] = Counter()
        for raw_name, raw_value in scope["headers"]:
            name = raw_name.decode("latin-1").lower()
            names[name] += 1
            headers.setdefault(name, raw_value.decode("latin-1").strip())
        repeated = frozenset(name for name, count in names.items() if count > 1)
        host = headers.get("host", "")
        if self._hosts is not None and _split(f"//{host}").hostname not in self._hosts:
            return _http_error(421, "this server does not answer for that host")
        if "origin" in headers and _split(headers["origin"]).netloc != host:
            return _http_error(403, "requests from pages of another origin are refused")
        identity = None if "authorization" in repeated else self._authenticator.identify(headers.get("authorization"))
        if identity is None:
            challenge = {"www-authenticate": 'Basic realm="memory", charset="UTF-8"'}
            return _http_error(401, "valid credentials are required", headers=challenge)
        if scope["method"] not in self._methods:
            return _http_error(405, "method not allowed", headers={"allow": ", ".join(self._methods)})
        if scope["method"] == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                return _http_error(415, "the body must be application/json")
            if len(body) > REQUEST_BYTES_MAX:
                return _http_error(413, f"the body may have at most {REQUEST_BYTES_MAX} bytes")
        return await self._answer(_Call(scope["method"], headers, repeated, body, identity))


class _Mcp:
    """Answers one message of the protocol."""

    def __init__(
        self, box: ToolBox, tools: Mapping[str, Tool], limit: RateLimit, faults: Faults, counters: Counters
    ) -> None:
        self._box = box
        self._tools = tools
        self._listing = _listing(tools.values())
        self._limit = limit
        self._faults = faults
        self._counters = counters
        self._sessions: OrderedDict[str, Identity] = OrderedDict()

    async def answer(self, call: _Call) -> _Answer:
        if call.method == "DELETE":
            if not self._knows_session(call):
                return _http_error(404, "no such session")
            del self._sessions[call.headers["mcp-session-id"]]
            return _Answer(204)
        try:
            request = read_message(call.body, call.headers, call.repeated)
            if request is None:
                return _Answer(202)
            return await self._request(request, call)
        except RejectedError as rejected:
            return _Answer(rejected.status, rejected.body)

    def _knows_session(self, call: _Call) -> bool:
        """Whether the session that the request names is the caller's own."""
        return self._sessions.get(call.headers.get("mcp-session-id", "")) == call.identity

    async def _request(self, request: Request, call: _Call) -> _Answer:
        self._counters.methods[request.method] += 1
        legacy_session = not request.modern and request.method != "initialize" and "mcp-session-id" in call.headers
        if legacy_session and not self._knows_session(call):
            message = "no such session, initialize again"
            return _Answer(404, error_body(request.id, http_error_code(404), message))
        if request.method == "tools/call":
            return await self._tool_call(request, call)

        async def handled() -> _Answer:
            return self._handle(request, call)

        return await self._under(self._faults.of_call(request.method, is_tool=False), request, handled)

    def _handle(self, request: Request, call: _Call) -> _Answer:
        if request.method == "tools/list":
            more = ',"ttlMs":0,"cacheScope":"private"' if request.modern else ""
            return _Answer(200, result_body(request, f'"tools":{self._listing}{more}'))
        if request.method == "server/discover" and request.modern:
            return _Answer(200, result_body(request, discovery()))
        if request.method == "ping" and not request.modern:
            return _Answer(200, result_body(request, ""))
        if request.method == "initialize" and not request.modern:
            session = secrets.token_urlsafe(24)
            self._sessions[session] = call.identity
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
            return _Answer(200, result_body(request, handshake(request.params)), headers={"mcp-session-id": session})
        raise request.refusal(METHOD_NOT_FOUND, "no such method")

    async def _tool_call(self, request: Request, call: _Call) -> _Answer:
        name, arguments, identity = request.params.get("name"), request.params.get("arguments", {}), call.identity
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            raise request.refusal(INVALID_PARAMS, "no such tool")
        if not isinstance(arguments, dict):
            raise request.refusal(INVALID_PARAMS, "arguments must be an object")
        check_mirrored(request, tool.input_schema, arguments, call.headers, call.repeated)
        self._counters.calls[tool.name] += 1
        if identity.site is not None and (wait := self._limit.retry_after(identity.site)) is not None:
            message, data = "too many calls for this site", f'{{"retry_after":{wait}}}'
            body = error_body(request.id, http_error_code(429), message, data)
            return _Answer(429, body, headers={"retry-after": str(wait)})
        struck = self._faults.of_call(tool.name, is_tool=True)

        async def carried_out() -> _Answer:
            try:
                result = await self._box.call(tool, arguments, identity)
            except Exception:
                log.exception("a call of a tool failed")
                raise request.refusal(INTERNAL_ERROR, "the server could not carry out the call") from None
            return _Answer(200, result_body(request, _members(_with_faulty_ack(result, struck))))

        in_flight = self._counters.appending(arguments.get("conversation_id"))
        with in_flight if tool.name == "append_memory" else nullcontext():
            return await self._under(struck, request, carried_out)

    async def _under(
        self, struck: list[Fault], request: Request, answered: Callable[[], Awaitable[_Answer]]
    ) -> _Answer:
        """The answer, with the faults that strike this call."""
        if instead := await self._strike(struck, "before", request):
            return instead
        answer = await answered()
        if instead := await self._strike(struck, "after", request):
            return instead
        kinds = {fault.kind for fault in struck}
        if "sse" in kinds:
            answer = replace(answer, body=f"event: message\ndata: {answer.body}\n\n", content_type="text/event-stream")
        return replace(answer, broken_off=True) if "cut" in kinds else answer

    async def _strike(self, struck: list[Fault], when: str, request: Request) -> _Answer | None:
        now = {fault.kind: fault for fault in struck if fault.when == when}
        if stall := now.get("stall"):
            await self._faults.stall(stall)
        if "drop" in now:
            raise _DropError
        if (fault := now.get("status")) is None:
            return None
        headers = {} if fault.retry_after is None else {"retry-after": str(fault.retry_after)}
        if fault.body is not None:
            return _Answer(fault.status, fault.body, fault.content_type, headers)
        message = f"answered with status {fault.status} as ordered"
        return _Answer(fault.status, error_body(request.id, http_error_code(fault.status), message), headers=headers)


class _FaultControl:
    """Answers ``/faults``."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def answer(self, call: _Call) -> _Answer:
        if call.method == "GET":
            return _Answer(200, json.dumps({"faults": self._faults.listed()}))
        if call.method == "DELETE":
            self._faults.clear()
            return _Answer(204)
        try:
            loads(call.body)
            settings = json.loads(call.body)
            self._faults.add(**settings)
        except (NotJsonError, TypeError, ValueError) as error:
            return _http_error(400, f"not a fault: {error}")
        return _Answer(204)


def _members(result: Result) -> str:
    structured = f',"structuredContent":{result.text}' if result.structured else ""
    is_error = "true" if result.is_error else "false"
    return f'"content":[{{"type":"text","text":{quote(result.text)}}}]{structured},"isError":{is_error}'


def _with_faulty_ack(result: Result, struck: list[Fault]) -> Result:
    if result.ack is None:
        return result
    for fault in struck:
        if fault.kind == "no_ack":
            return replace(result, text="{}")
        if fault.kind == "wrong_ack":
            first, last = result.ack
            return replace(result, text=append_answer(first + fault.shift, last + fault.shift))
    return result


async def _read(receive: Receive) -> bytes | None:
    """The body, or somewhat more than the limit of a longer one; None if the caller has gone."""
    parts: list[bytes] = []
    size = 0
    while size <= REQUEST_BYTES_MAX:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False):
            break
    return b"".join(parts)


async def _drop(receive: Receive, *, flush: bool = False) -> None:
    """Closes the connection under the answer: at once, or after what was already written."""
    # ASGI has no word for this. uvicorn's `receive` is a method of the object that owns the transport.
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is None:
        raise ConnectionResetError("dropped as ordered")  # what an in-process transport hands to its caller
    if flush:
        transport.close()
    else:
        transport.abort()
    # The server must have seen the loss before this returns, or it would answer 500 in our place.
    while (await receive())["type"] != "http.disconnect":
        pass


def _listing(tools: Iterable[Tool]) -> str:
    listed = [
        {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
        | ({} if tool.output_schema is None else {"outputSchema": tool.output_schema})
        for tool in tools
    ]
    return json.dumps(listed, separators=(",", ":"))
