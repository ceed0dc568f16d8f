"""The reference server's door: who may call, how often, in which form, and both eras of the protocol."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from server_helpers import CHAT, Caller, in_process

from server_reference import create_app

pytestmark = pytest.mark.asyncio

LIST = '{"jsonrpc":"2.0","id":"a \\"b\\"","method":"tools/list"}'
MODERN = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}
SITE_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("append_memory", {"conversation_id": CHAT, "items": [{}]}),
    ("replay_memory", {"conversation_id": CHAT, "limit": 1}),
    ("recall_memory", {"conversation_id": CHAT, "limit": 1}),
    ("list_conversations", {"limit": 1}),
]


def basic(text: str, encoding: str = "utf-8") -> str:
    return "Basic " + base64.b64encode(text.encode(encoding)).decode()


# --- credentials ---------------------------------------------------------------------------------------------------


async def test_each_site_sees_only_its_own_conversations() -> None:
    """Ours: several sites, the same conversation id in two of them; a password may hold colons and any letter."""
    app = create_app(sites={"one": "secret:with:colons", "zwei": "pässwörd"})
    async with in_process(app=app, auth=None) as caller:
        for site, password in (("one", "secret:with:colons"), ("zwei", "pässwörd")):
            caller.client.headers["authorization"] = basic(f"{site}:{password}")
            assert await caller.append({"of": site}) == {"first_seq": 0, "last_seq": 0}
            assert [item["payload"] for item in await caller.replay()] == [{"of": site}]
    app.state.store.close()


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Basic",
        "Basic !!!",
        basic("demo"),
        basic("demo:"),
        basic("demo:wrong"),
        basic("other:demo"),
        basic("demo:demo "),
        basic("Demo:demo"),
        "Bearer demo:demo",
        "Bearer wrong",
        "Basic reader",
        "Digest demo:demo",
        "Bearer réader",
    ],
)
async def test_wrong_or_missing_credentials_are_answered_alike(authorization: str | None) -> None:
    """Ours: 401 with a challenge for every path and method, and nothing in the answer tells which part was wrong."""
    headers = {} if authorization is None else {b"authorization": authorization.encode("latin-1")}
    async with in_process(auth=None, read_tokens=["reader"], allow_faults=True) as caller:
        answers = [
            await caller.client.request(method, path, content=LIST, headers=headers)
            for method in ("GET", "POST", "DELETE")
            for path in ("/mcp", "/faults")
        ]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic realm=")
        assert answer.json()["error"]["code"] == -31401
    assert len({answer.content for answer in answers}) == 1


async def test_two_authorization_headers_are_as_good_as_none() -> None:
    """Ours: which of the two counts would be anybody's guess."""
    async with in_process(auth=None) as caller:
        lines = [("authorization", basic("demo:demo")), ("authorization", basic("demo:wrong"))]
        answer = await caller.client.post("/mcp", content=LIST, headers=[*lines, ("content-type", "application/json")])
    assert answer.status_code == 401


@pytest.mark.contract("C9")
@pytest.mark.parametrize(("tool", "arguments"), SITE_CALLS)
async def test_a_bearer_token_is_refused_by_every_site_tool(tool: str, arguments: dict[str, Any]) -> None:
    """Contract: `unprocessable_parameters`, saying that Basic authentication is required; also for a team token."""
    settings: dict[str, Any] = {"read_tokens": ["reader"], "team_tokens": {"vasya-token": "vasya"}}
    for token in ("reader", "vasya-token"):
        async with in_process(bearer=token, **settings) as caller:
            assert (await caller.post(LIST)).status_code == 200
            result = (await caller.raw_call(tool, json.dumps(arguments))).json()["result"]
        assert result["isError"] is True
        error = json.loads(result["content"][0]["text"])["error"]
        assert error["code"] == "unprocessable_parameters"
        assert "Basic" in error["message"]


@pytest.mark.parametrize(
    "settings",
    [
        {"sites": {"": "x"}},
        {"sites": {"a:b": "x"}},
        {"read_tokens": [""]},
        {"team_tokens": {"with space": "vasya"}},
        {"rate": 0},
        {"rate": float("nan")},
        {"conversation_items_max": 0},
        {"conversation_items_max": 100_001},
    ],
)
async def test_a_setting_that_cannot_work_is_refused_at_once(settings: dict[str, Any]) -> None:
    """Ours: ValueError when the application is made; no message quotes a secret."""
    with pytest.raises(ValueError, match=r"site|token|rate|items_max"):
        create_app(**settings)


# --- rate ----------------------------------------------------------------------------------------------------------


@pytest.mark.contract("C5", "C11")
@pytest.mark.parametrize(("rate", "burst", "wait"), [(3, 3, 1), (1, 1, 1), (0.25, 1, 4)])
async def test_more_calls_than_the_rate_get_429_with_the_time_to_wait(rate: float, burst: int, wait: int) -> None:
    """Contract: an error with a Retry-After header, also in the JSON-RPC error's data; after that time a call goes."""
    now = 1000.0
    async with in_process(rate=rate, clock=lambda: now) as caller:
        for _ in range(burst):
            await caller.append({})
        for _ in range(2):
            answer = await caller.raw_call(SITE_CALLS[0][0], json.dumps(SITE_CALLS[0][1]))
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == str(wait)
            assert answer.json()["error"]["data"] == {"retry_after": wait}
            assert answer.json()["id"] == 1
        assert (await caller.post(LIST)).status_code == 200
        now += wait
        assert len(await caller.replay()) == burst


async def test_the_rate_of_one_site_is_not_that_of_another() -> None:
    """Ours: each site has its own budget."""
    async with in_process(rate=1, clock=lambda: 0.0, sites={"one": "x", "two": "y"}, auth=None) as caller:
        statuses = []
        for credentials in ("one:x", "one:x", "two:y"):
            caller.client.headers["authorization"] = basic(credentials)
            statuses.append((await caller.raw_call("list_conversations", '{"limit":1}')).status_code)
    assert statuses == [200, 429, 200]


# --- form ----------------------------------------------------------------------------------------------------------


async def test_only_post_and_delete_are_methods_of_the_endpoint() -> None:
    """Ours: GET would have to be a stream, which this server never opens."""
    async with in_process() as caller:
        for method in ("GET", "PUT", "PATCH", "HEAD", "OPTIONS"):
            answer = await caller.client.request(method, "/mcp")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST, DELETE")
        assert (await caller.client.post("/elsewhere")).status_code == 404
        assert (await caller.client.get("/faults")).status_code == 404


async def test_the_endpoint_answers_with_and_without_a_slash() -> None:
    """Ours: a redirect would cost some clients their body or their credentials."""
    async with in_process() as caller:
        answer = await caller.client.post("/mcp/", content=LIST, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert answer.json()["id"] == 'a "b"'


async def test_a_body_must_be_json_of_at_most_8_mib() -> None:
    """Ours: 415 for another type, 413 beyond; a full batch fits however it is escaped."""
    async with in_process() as caller:
        assert (await caller.client.post("/mcp", content=LIST)).status_code == 415
        assert (await caller.post(LIST, content_type="text/plain")).status_code == 415
        assert (await caller.post(LIST, content_type="Application/JSON; charset=utf-8")).status_code == 200
        room = 8 * 1024 * 1024 - len(LIST)
        assert (await caller.post(LIST + " " * room)).status_code == 200
        assert (await caller.post(LIST + " " * (room + 1))).status_code == 413
        escaped = '{"t":"' + "\\u0041" * (262_144 - 8) + '"}'
        body = f'{{"conversation_id":"{CHAT}","items":[{",".join([escaped] * 4)}]}}'
        assert (await caller.raw_call("append_memory", body)).json()["result"]["isError"] is False


async def test_a_request_for_another_host_or_from_another_page_is_refused() -> None:
    """Ours, after the protocol: a page whose name was made to point at this machine gets nowhere."""
    app = create_app(hosts=["127.0.0.1", "localhost", "::1"])
    async with in_process(app=app) as caller:

        async def status(host: str, origin: str | None = None) -> int:
            headers = {"host": host} | ({} if origin is None else {"origin": origin})
            return (await caller.post(LIST, **headers)).status_code

        assert await status("localhost:1234") == 200
        assert await status("[::1]:1234") == 200
        assert await status("evil.example") == 421
        assert await status("[evil") == 421
        assert await status("127.0.0.1.evil.example") == 421
        assert await status("localhost:1234", "http://localhost:1234") == 200
        assert await status("localhost:1234", "http://evil.example") == 403
        assert await status("localhost:1234", "null") == 403
        assert await status("localhost:1234", "http://[localhost:1234") == 403
    app.state.store.close()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("", -32700),
        ("{", -32700),
        ("[]", -32600),
        (f"[{LIST}]", -32600),
        ("7", -32600),
        ('{"id":1,"method":"ping"}', -32600),
        ('{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        ('{"jsonrpc":"2.0","id":1}', -32600),
        ('{"jsonrpc":"2.0","id":1,"method":7}', -32600),
        ('{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        ('{"jsonrpc":"2.0","id":[1],"method":"ping"}', -32600),
        ('{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', -32600),
    ],
)
async def test_what_is_no_message_gets_400_and_an_error(message: str, code: int) -> None:
    """Ours, after JSON-RPC: batches are not taken either, they have left the protocol."""
    async with in_process() as caller:
        answer = await caller.post(message)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_notifications_and_responses_are_taken_without_an_answer() -> None:
    """Ours, after the protocol: 202 and no body."""
    async with in_process() as caller:
        for message in (
            '{"jsonrpc":"2.0","method":"notifications/initialized"}',
            '{"jsonrpc":"2.0","id":1,"result":{}}',
            '{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":""}}',
        ):
            answer = await caller.post(message)
            assert (answer.status_code, answer.content) == (202, b"")


# --- the legacy era ------------------------------------------------------------------------------------------------


async def initialize(caller: Caller, version: str = "2025-11-25", **headers: str) -> Any:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    return await caller.post(json.dumps(message), **headers)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("2025-11-25", "2025-11-25"),
        ("2025-06-18", "2025-06-18"),
        ("2025-03-26", "2025-03-26"),
        (MODERN, "2025-11-25"),
        ("2031-01-01", "2025-11-25"),
    ],
)
async def test_initialize_agrees_on_a_version_that_has_a_handshake(asked: str, given: str) -> None:
    """Ours, after the protocol: `initialize` is legacy even under modern headers, if its `_meta` is not modern."""
    async with in_process() as caller:
        answer = await initialize(caller, asked, mcp_method="initialize", mcp_protocol_version=asked)
    assert answer.json()["result"]["protocolVersion"] == given
    assert answer.json()["result"]["capabilities"] == {"tools": {}}
    assert answer.headers["mcp-session-id"]


async def test_a_session_lasts_until_it_is_deleted_and_belongs_to_who_opened_it() -> None:
    """Ours, after the protocol: 404 to an unknown session, so that its client initializes again; no session is fine."""
    app = create_app(sites={"demo": "demo", "other": "x"})
    async with in_process(app=app) as caller, in_process(app=app, auth=("other", "x")) as stranger:
        session = (await initialize(caller)).headers["mcp-session-id"]
        ping = '{"jsonrpc":"2.0","id":5,"method":"ping"}'
        assert (await caller.post(ping, mcp_session_id=session)).json() == {"jsonrpc": "2.0", "id": 5, "result": {}}
        assert (await caller.post(ping)).status_code == 200
        assert (await stranger.post(ping, mcp_session_id=session)).status_code == 404
        assert (await stranger.client.delete("/mcp", headers={"mcp-session-id": session})).status_code == 404
        assert (await caller.client.delete("/mcp", headers={"mcp-session-id": session})).status_code == 204
        answer = await caller.post(ping, mcp_session_id=session)
        assert (answer.status_code, answer.json()["id"]) == (404, 5)
        assert (await caller.client.delete("/mcp")).status_code == 404
    app.state.store.close()


async def test_an_unknown_method_of_the_legacy_era_is_an_ordinary_answer() -> None:
    """Ours, after the protocol: HTTP 200 and -32601; discovery is a method of the modern era only."""
    async with in_process() as caller:
        for method in ("prompts/list", "server/discover"):
            answer = await caller.post(f'{{"jsonrpc":"2.0","id":1,"method":"{method}"}}')
            assert (answer.status_code, answer.json()["error"]["code"]) == (200, -32601)


# --- the modern era ------------------------------------------------------------------------------------------------


async def modern(
    caller: Caller, method: str, *, meta: dict[str, Any] | None = META, drop: str = "", **more: Any
) -> Any:
    """A modern request; `more` are parameters, or headers where they begin with mcp_."""
    params = {key: value for key, value in more.items() if not key.startswith("mcp_")}
    if meta is not None:
        params["_meta"] = meta
    headers = {"mcp_protocol_version": MODERN, "mcp_method": method}
    if "name" in params:
        headers["mcp_name"] = params["name"]
    headers |= {key: value for key, value in more.items() if key.startswith("mcp_")}
    headers.pop(drop, None)
    return await caller.post(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}), **headers)


async def test_the_modern_era_needs_no_handshake() -> None:
    """Ours, after the protocol: discovery, the list and calls carry `resultType`, and who answered."""
    async with in_process() as caller:
        found = (await modern(caller, "server/discover")).json()["result"]
        assert found["supportedVersions"] == [MODERN]
        assert found["capabilities"] == {"tools": {}}
        listed = (await modern(caller, "tools/list")).json()["result"]
        assert len(listed["tools"]) == 11
        assert (listed["ttlMs"], listed["cacheScope"]) == (0, "private")
        called = (await modern(caller, "tools/call", name="list_conversations", arguments={"limit": 1})).json()[
            "result"
        ]
        assert called["structuredContent"] == {"conversations": []}
        for result in (found, listed, called):
            assert result["resultType"] == "complete"
            assert set(result["_meta"]["io.modelcontextprotocol/serverInfo"]) == {"name", "version"}


async def test_a_modern_request_must_agree_with_its_headers() -> None:
    """Ours, after the protocol: -32020 with HTTP 400 for each header that is missing, wrong or given twice."""
    call: dict[str, Any] = {"name": "list_conversations", "arguments": {"limit": 1}}
    async with in_process() as caller:
        for wrong in (
            {"drop": "mcp_protocol_version"},
            {"drop": "mcp_method"},
            {"drop": "mcp_name"},
            {"mcp_protocol_version": "2025-11-25"},
            {"mcp_method": "tools/list"},
            {"mcp_name": "append_memory"},
            {"mcp_name": "=?base64?!!!?="},
        ):
            answer = await modern(caller, "tools/call", **call, **wrong)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32020), wrong
        encoded = f"=?base64?{base64.b64encode(b'list_conversations').decode()}?="
        assert (await modern(caller, "tools/call", **call, mcp_name=encoded)).status_code == 200
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}
        twice = [("mcp-method", "tools/list")] * 2 + [
            ("mcp-protocol-version", MODERN),
            ("content-type", "application/json"),
        ]
        answer = await caller.client.post("/mcp", content=json.dumps(message), headers=twice)
        assert answer.json()["error"]["code"] == -32020


async def test_a_modern_request_says_its_version_and_capabilities() -> None:
    """Ours, after the protocol: -32602 for what is missing, -32022 with what is supported for another version."""
    async with in_process() as caller:
        for key in META:
            answer = await modern(caller, "tools/list", meta={name: META[name] for name in META if name != key})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32602)
            assert key in answer.json()["error"]["message"]
        assert (await modern(caller, "tools/list", meta=None)).json()["error"]["code"] == -32602
        later = META | {"io.modelcontextprotocol/protocolVersion": "2031-01-01"}
        answer = await modern(caller, "tools/list", meta=later, mcp_protocol_version="2031-01-01")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32022)
        assert answer.json()["error"]["data"] == {"supported": [MODERN], "requested": "2031-01-01"}
        odd = META | {"io.modelcontextprotocol/protocolVersion": 7}
        assert (await modern(caller, "tools/list", meta=odd)).json()["error"]["code"] == -32020


async def test_errors_of_the_modern_era_have_their_http_status() -> None:
    """Ours, after the protocol: an unknown method is 404, an unknown tool 400; a stale session is not looked at."""
    async with in_process() as caller:
        answer = await modern(caller, "prompts/list")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, -32601)
        for removed in ("ping", "initialize"):
            assert (await modern(caller, removed)).status_code == 404
        answer = await modern(caller, "tools/call", name="forget_memory")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32602)
        assert (await modern(caller, "tools/list", mcp_session_id="gone")).status_code == 200


# --- without credentials, and with the tools of the conformance suite ----------------------------------------------


async def test_without_credentials_a_caller_is_the_first_site_only_where_that_was_asked_for() -> None:
    """Ours: wrong credentials stay wrong, and a session of nobody is a session of the site."""
    async with in_process(auth=None, no_auth=True, sites={"first": "x", "second": "y"}) as caller:
        await caller.append({"n": 1})
        session = (await initialize(caller)).headers["mcp-session-id"]
        for credentials, seen in (("first:x", 1), ("second:y", 0)):
            caller.client.headers["authorization"] = basic(credentials)
            assert len(await caller.replay()) == seen
        assert (await caller.post(LIST, mcp_session_id=session)).status_code == 404
        caller.client.headers["authorization"] = basic("first:wrong")
        assert (await caller.post(LIST)).status_code == 401
    with pytest.raises(ValueError, match="site"):
        create_app(no_auth=True, sites={})


async def test_the_suites_tools_are_there_only_where_they_were_asked_for() -> None:
    """Ours: they answer without the memory, whoever calls, and are no part of the contract's list."""
    names = {"test_simple_text", "test_error_handling", "json_schema_2020_12_tool", "test_custom_header"}
    async with in_process(conformance_tools=True, bearer="reader", read_tokens=["reader"]) as caller:
        listed = {tool["name"] for tool in (await caller.post(LIST)).json()["result"]["tools"]}
        assert names < listed
        assert (await caller.raw_call("test_simple_text", "{}")).json()["result"]["content"][0]["text"]
        assert (await caller.raw_call("test_error_handling", "{}")).json()["result"]["isError"] is True
        assert await caller.call("json_schema_2020_12_tool", name="N", email="e") == {"name": "N", "email": "e"}
    async with in_process() as caller:
        listed = {tool["name"] for tool in (await caller.post(LIST)).json()["result"]["tools"]}
        assert not names & listed
        assert (await caller.raw_call("test_simple_text", "{}")).json()["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("argument", "header", "accepted"),
    [
        ("eu", "eu", True),
        ("eu", "=?base64?ZXU=?=", True),
        ("=?base64?ZXU=", "=?base64?ZXU=", True),
        (None, None, True),
        ("eu", None, False),
        (None, "eu", False),
        ("eu", "us", False),
        ("eu", "=?base64?ZXU?=", False),
        ("eu", "=?base64?Z!U=?=", False),
    ],
)
async def test_a_mirrored_argument_must_be_its_header(argument: str | None, header: str | None, accepted: bool) -> None:
    """Ours, after the protocol: in the modern era only, which is the one that has such headers."""
    arguments = {} if argument is None else {"region": argument}
    more = {} if header is None else {"mcp_param_region": header}
    async with in_process(conformance_tools=True) as caller:
        answer = await modern(caller, "tools/call", name="test_custom_header", arguments=arguments, **more)
        if accepted:
            assert answer.json()["result"]["structuredContent"] == arguments
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, -32020)
        assert await caller.call("test_custom_header", **arguments) == arguments
