"""The transport: what leaves, what is followed, what is kept, and how every failure of HTTP is told."""

from __future__ import annotations

import base64
import inspect
import logging
import math
import pickle
import socket
import ssl
import threading

import anyio
import httpx
import pytest
import respx
from raw_server import RawServer, Seen

from memlog import transport as transport_module
from memlog.errors import (
    ClosedError,
    ConnectionFailedError,
    ProtocolError,
    RedirectRefusedError,
    ResponseTooLargeError,
    TimedOutError,
    TransientError,
)
from memlog.transport import TRANSLATIONS, Transport, translate

BOUND = 10.0


async def post(transport: Transport, body: bytes = b"{}", **more: object) -> tuple[int, bytes]:
    with anyio.fail_after(BOUND):
        async with transport.request("POST", {"Content-Type": "application/json"}, body, **more) as answer:
            return answer.status, await answer.read()


def ok(seen: Seen) -> None:
    seen.respond(200, seen.body)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# -- what leaves -----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_request_arrives_with_its_body_and_asks_for_plain_bytes():
    """Ours: the bytes given are the bytes sent, and no encoding is invited that could blow up."""
    with RawServer(ok) as server:
        transport = Transport(server.url, auth=("søren", "påss:word"))
        assert await post(transport, b'{"a":"\xc3\xa9"}') == (200, b'{"a":"\xc3\xa9"}')
        await transport.close()
    seen = server.seen[0]
    assert seen.headers["accept-encoding"] == "identity"
    assert seen.headers["host"] == f"127.0.0.1:{server.port}"
    assert base64.b64decode(seen.headers["authorization"].removeprefix("Basic ")).decode() == "søren:påss:word"


@pytest.mark.anyio
async def test_serial_requests_share_one_connection():
    """Ours: an answer that was read to its end leaves its connection for the next request."""
    with RawServer(ok) as server:
        transport = Transport(server.url)
        for _ in range(20):
            await post(transport)
        await transport.close()
    assert server.connections == 1


@pytest.mark.anyio
async def test_concurrent_requests_have_a_connection_each_up_to_the_limit(monkeypatch):
    """Ours: lanes are as many as are needed, never more than the limit, and the rest waits its turn."""
    monkeypatch.setattr(transport_module, "CONNECTIONS_MAX", 4)
    arrived = threading.Semaphore(0)
    go = threading.Event()

    def answer(seen: Seen) -> None:
        arrived.release()
        go.wait(BOUND)
        ok(seen)

    with RawServer(answer) as server:
        transport = Transport(server.url)
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(post, transport)
            for _ in range(4):
                assert await anyio.to_thread.run_sync(lambda: arrived.acquire(timeout=BOUND))
            assert len(server.seen) == 4
            go.set()
        await transport.close()
    assert (len(server.seen), server.connections) == (10, 4)


@pytest.mark.anyio
async def test_a_token_and_any_httpx_auth_and_a_function_are_credentials():
    """Ours: Bearer for a string, httpx's own schemes with their second request, and a function asked again after a 401."""
    answers = iter(["fresh-1", "fresh-2"])

    def answer(seen: Seen) -> None:
        given = seen.headers.get("authorization", "")
        if given in ("Bearer secret-token", "Bearer fresh-2") or given.startswith("Digest "):
            ok(seen)
            return
        seen.respond(401, b"no", headers={"WWW-Authenticate": 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'})

    with RawServer(answer) as server:
        for auth in ("secret-token", httpx.DigestAuth("u", "p"), lambda: next(answers)):
            transport = Transport(server.url, auth=auth)
            assert await post(transport, b"{}") == (200, b"{}")
            assert await post(transport, b"[]") == (200, b"[]")
            await transport.close()


@pytest.mark.anyio
async def test_32_requests_that_are_refused_at_once_ask_for_fresh_credentials_once():
    """Ours: who issues tokens is not run over, and every request is answered."""
    asked: list[str] = []
    met = threading.Barrier(32, timeout=BOUND)

    def credentials() -> str:
        asked.append(f"token-{len(asked) + 1}")
        return asked[-1]

    def answer(seen: Seen) -> None:
        if seen.headers["authorization"] == "Bearer token-1":
            met.wait()  # nobody learns of the end before everybody has asked
            seen.respond(401, b"expired")
        else:
            ok(seen)

    with RawServer(answer) as server:
        transport = Transport(server.url, auth=credentials)
        async with anyio.create_task_group() as group:
            for _ in range(32):
                group.start_soon(post, transport)
        await transport.close()
    assert asked == ["token-1", "token-2"]
    assert len(server.seen) == 64


@pytest.mark.anyio
async def test_credentials_from_a_function_may_be_of_either_kind_and_are_masked():
    """Ours: Basic today, a token tomorrow; neither is shown by whatever repeats it, and a second refusal is the answer."""
    answers = iter([("site", "hunter2"), "hunter3", "hunter3"])
    with RawServer(lambda seen: seen.respond(401, seen.headers["authorization"].encode())) as server:
        transport = Transport(server.url, auth=lambda: next(answers))
        assert (await post(transport))[0] == 401
        assert transport.mask("hunter3, Bearer hunter3") == "***, Bearer ***"
        assert "hunter" not in repr(transport)
        await transport.close()
    assert [seen.headers["authorization"].partition(" ")[0] for seen in server.seen] == ["Basic", "Bearer"]


@pytest.mark.anyio
@pytest.mark.parametrize("given", [None, ("site",), ["site", "hunter2"], b"hunter2", 7])
async def test_a_function_that_returns_no_credentials_is_told_so_without_repeating_them(given):
    """Ours: nothing is sent with half a header."""
    with RawServer(ok) as server:
        transport = Transport(server.url, auth=lambda: given)
        with pytest.raises(ValueError, match=r"credentials must be \(user, password\) or a token") as caught:
            await post(transport)
        await transport.close()
    assert "hunter2" not in str(caught.value)
    assert server.seen == []


@pytest.mark.parametrize(
    ("url", "auth"),
    [
        ("ftp://example.org/mcp", None),
        ("example.org/mcp", None),
        ("http://", None),
        ("http://user:hunter2@localhost/mcp", None),
        ("http://[::1/mcp", None),
        ("https://example.org/mcp", ("a:b", "hunter2")),
        ("https://example.org/mcp", ("", "hunter2")),
        ("https://example.org/mcp", ("only hunter2",)),
        ("https://example.org/mcp", "hunter2\r\nX: y"),
        ("https://example.org/mcp", ""),
        ("http://example.org/mcp", ("u", "hunter2")),
        ("http://10.0.0.1/mcp", "hunter2"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once_without_repeating_secrets(url, auth):
    """Ours: bad addresses and credentials are ValueErrors of the constructor; credentials never go out in the clear."""
    with pytest.raises(ValueError) as caught:
        Transport(url, auth=auth)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, True, "5", None])
def test_a_timeout_is_a_positive_number(timeout):
    """Ours: no timeout is infinite by mistake."""
    with pytest.raises(ValueError, match="timeout"):
        Transport("http://localhost/mcp", timeout=timeout)


@pytest.mark.parametrize(
    "url", ["http://localhost/mcp", "http://127.8.0.1/mcp", "http://[::1]:80/mcp", "http://x.localhost/"]
)
def test_plain_http_is_fine_on_this_machine(url):
    """Ours: loopback needs no permission."""
    Transport(url, auth=("u", "p"))
    Transport("http://example.org/mcp", auth=("u", "p"), allow_insecure=True)


def test_secrets_are_in_no_repr():
    """Ours: neither the transport nor what it holds shows a credential."""
    transport = Transport("https://example.org/mcp?key=hunter2", auth=("user", "hunter2"))
    shown = repr(transport) + repr(vars(transport)["_header"]) + transport.where
    assert "hunter2" not in shown
    assert base64.b64encode(b"user:hunter2").decode() not in shown
    assert transport.mask("no hunter2 for dXNlcjpodW50ZXIy") == "no *** for ***"


@pytest.mark.anyio
async def test_no_line_is_logged_for_a_request(caplog):
    """Ours: hundreds of requests a second must not fill the application's log."""
    caplog.set_level(logging.INFO)
    with RawServer(ok) as server:
        transport = Transport(server.url)
        await post(transport)
        await transport.close()
    assert not caplog.records


@pytest.mark.anyio
async def test_the_environments_proxy_is_used_unless_the_host_is_excepted(monkeypatch):
    """Ours: HTTP_PROXY and NO_PROXY mean what they mean elsewhere."""
    with RawServer(lambda seen: seen.respond(200, seen.target.encode())) as proxy, RawServer(ok) as server:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "localhost,127.0.0.1")
        direct = Transport(server.url)
        assert await post(direct) == (200, b"{}")
        through = Transport("http://memory.invalid/mcp")
        assert await post(through) == (200, b"http://memory.invalid/mcp")
        await direct.close()
        await through.close()


# -- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("status", [307, 308])
async def test_a_redirect_within_the_origin_keeps_method_body_and_credentials(status):
    """Ours: the slash at the end of an address must not matter; a permanent redirect is remembered."""

    def answer(seen: Seen) -> None:
        if seen.target == "/mcp":
            seen.respond(status, b"over there", headers={"Location": "/mcp/"})
            return
        ok(seen)

    with RawServer(answer) as server:
        transport = Transport(server.url, auth=("u", "p"))
        assert await post(transport, b'"same body"') == (200, b'"same body"')
        assert await post(transport, b"2") == (200, b"2")
        await transport.close()
    followed = [seen for seen in server.seen if seen.target == "/mcp/"]
    assert [seen.body for seen in followed] == [b'"same body"', b"2"]
    assert all(seen.verb == "POST" and seen.headers["authorization"] == "Basic dTpw" for seen in followed)
    assert len(server.seen) == (4 if status == 307 else 3)
    assert server.connections == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "location", "outcome"),
    [
        (307, "http://elsewhere.invalid/mcp?token=hunter2", "not_sent"),
        (308, "http://127.0.0.1:1/mcp", "not_sent"),
        (307, "ftp://127.0.0.1/mcp", "not_sent"),
        (307, None, "not_sent"),
        (301, "/mcp/", "unknown"),
        (302, "/login", "unknown"),
        (303, "/mcp/", "unknown"),
    ],
)
async def test_every_other_redirect_is_an_error_that_names_the_place(status, location, outcome):
    """Ours: credentials and payloads are not carried elsewhere, and no POST becomes a GET."""
    headers = {"Location": location} if location else {}
    with RawServer(lambda seen: seen.respond(status, b"", headers=headers)) as server:
        transport = Transport(server.url, auth=("u", "p"))
        with pytest.raises(RedirectRefusedError) as caught:
            await post(transport)
        await transport.close()
    error = caught.value
    assert (error.status, error.outcome) == (status, outcome)
    assert (error.location is None) == (location is None)
    assert "hunter2" not in f"{error}{error.location}"
    assert len(server.seen) == 1


@pytest.mark.anyio
async def test_a_circle_of_redirects_ends():
    """Ours: a few hops are plenty."""
    with RawServer(lambda seen: seen.respond(307, b"", headers={"Location": "/mcp"})) as server:
        transport = Transport(server.url)
        with pytest.raises(RedirectRefusedError):
            await post(transport)
        await transport.close()
    assert len(server.seen) == 4


def test_plain_http_may_become_https_on_the_same_host_and_never_the_reverse():
    """Ours: the rule by itself, also for the ports that everybody leaves out; test_tls_proxy.py follows it for real."""
    same = transport_module._is_same_or_its_https_twin
    assert same(httpx.URL("http://h/a"), httpx.URL("https://h/b"))
    assert not same(httpx.URL("https://h/a"), httpx.URL("http://h/a"))
    assert not same(httpx.URL("http://h/a"), httpx.URL("https://i/a"))
    assert not same(httpx.URL("http://h:81/a"), httpx.URL("https://h:82/a"))


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("announced", [True, False])
async def test_an_answer_above_the_limit_is_cut(announced):
    """Ours: whether its length is announced or it just keeps coming."""

    def answer(seen: Seen) -> None:
        if announced:
            seen.respond(200, b"x" * 2001)
            return
        seen.begin_events()
        for _ in range(3):
            seen.chunk(b"x" * 700)
        seen.end_events()

    with RawServer(answer) as server:
        transport = Transport(server.url, answer_bytes_max=2000)
        with pytest.raises(ResponseTooLargeError) as caught:
            await post(transport)
        server.answer = lambda seen: seen.respond(200, b"x" * 2000)
        assert await post(transport) == (200, b"x" * 2000)
        await transport.close()
    assert (caught.value.limit, caught.value.status, caught.value.outcome) == (2000, 200, "unknown")


@pytest.mark.anyio
async def test_a_compressed_answer_is_refused_unread():
    """Ours: 65 kB of gzip can be 64 MB of text; nobody asked for it."""
    with RawServer(lambda seen: seen.respond(200, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})) as server:
        transport = Transport(server.url)
        with pytest.raises(ProtocolError, match="compressed"):
            await post(transport)
        await transport.close()


@pytest.mark.anyio
@pytest.mark.parametrize("drip", [False, True])
async def test_the_deadline_is_absolute(drip):
    """Ours: neither silence nor a byte now and then can hold a call longer than its timeout; the next one is fine."""

    def answer(seen: Seen) -> None:
        seen.begin_events()
        while drip and not seen.stopping.wait(0.02):
            seen.chunk(b": ping\n\n")
        seen.stall()

    with RawServer(answer) as server:
        transport = Transport(server.url, timeout=0.3)
        with pytest.raises(TimedOutError) as caught:
            await post(transport)
        assert caught.value.outcome == "unknown"
        server.answer = ok
        assert await post(transport) == (200, b"{}")
        await transport.close()


@pytest.mark.anyio
async def test_waiting_for_a_free_connection_counts_and_is_known_not_to_have_sent(monkeypatch):
    """Ours: what never got a connection was certainly not carried out."""
    monkeypatch.setattr(transport_module, "CONNECTIONS_MAX", 1)
    with RawServer(Seen.stall) as server:
        transport = Transport(server.url)
        outcomes = []

        async def call(timeout: float) -> None:
            with pytest.raises(TimedOutError) as caught:
                await post(transport, timeout=timeout)
            outcomes.append(caught.value.outcome)

        async with anyio.create_task_group() as group:
            group.start_soon(call, 0.6)
            while not server.seen:
                await anyio.sleep(0.005)
            group.start_soon(call, 0.1)
        await transport.close()
    assert outcomes == ["not_sent", "unknown"]


# -- failures --------------------------------------------------------------------------------------------------------


def every_httpx_exception() -> list[type[Exception]]:
    found = [cls for _, cls in inspect.getmembers(httpx, inspect.isclass) if issubclass(cls, Exception)]
    # Raised by the parser of URLs, the cookie jar and httpx2's reader of events: no request goes through any of them.
    return [cls for cls in found if cls.__name__ not in ("InvalidURL", "CookieConflict", "SSEError")]


@pytest.mark.parametrize("cls", every_httpx_exception())
def test_every_exception_of_httpx_has_a_translation(cls):
    """Ours: the table is complete, by name and not by inheritance, and each entry gives an error that can be pickled."""
    assert cls in TRANSLATIONS
    error = cls() if issubclass(cls, httpx.StreamError) and cls is not httpx.StreamError else cls.__new__(cls)
    for begun in (True, False):
        translated = translate(error, begun=begun, where="http://h/mcp")
        assert isinstance(translated, TransientError)
        assert translated.outcome == ("unknown" if begun and not TRANSLATIONS[cls].never_sent else "not_sent")
        assert str(pickle.loads(pickle.dumps(translated))) == str(translated)


@pytest.mark.anyio
async def test_a_closed_port_is_known_not_to_have_been_sent_anything():
    """Ours: nobody listens there, and the message says so in the system's words."""
    transport = Transport(f"http://127.0.0.1:{closed_port()}/mcp")
    with pytest.raises(ConnectionFailedError) as caught:
        await post(transport)
    await transport.close()
    assert caught.value.outcome == "not_sent"
    assert "111" in str(caught.value)


@pytest.mark.anyio
async def test_an_unknown_host_is_known_not_to_have_been_sent_anything():
    """Ours: no address, no request."""
    transport = Transport("http://memory.invalid/mcp")
    with pytest.raises(ConnectionFailedError) as caught:
        await post(transport)
    await transport.close()
    assert caught.value.outcome == "not_sent"


@pytest.mark.anyio
async def test_a_server_without_tls_is_a_tls_failure():
    """Ours: a handshake that fails will not pass by itself, which the code tells."""
    with RawServer(ok) as server:
        transport = Transport(f"https://127.0.0.1:{tls_less_port(server)}/mcp", auth=("u", "p"))
        with pytest.raises(ConnectionFailedError) as caught:
            await post(transport)
        await transport.close()
    assert (caught.value.outcome, caught.value.code) == ("not_sent", "tls")


def tls_less_port(server: RawServer) -> int:
    """A port that answers any first bytes with plain text."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        sock, _ = listener.accept()
        with listener, sock:
            sock.settimeout(BOUND)
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server._start(run)
    return listener.getsockname()[1]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Seen.reset, id="reset before the answer"),
        pytest.param(Seen.close, id="closed before the answer"),
        pytest.param(lambda seen: (seen.send(b"HTTP/1.1 200 O"), seen.close()), id="cut in the head"),
        pytest.param(
            lambda seen: (seen.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"), seen.close()),
            id="cut in the body",
        ),
        pytest.param(
            lambda seen: (seen.begin_events(), seen.chunk(b"abc"), seen.reset()), id="reset in a chunked body"
        ),
        pytest.param(lambda seen: (seen.send(b"220 smtp.example ESMTP\r\n"), seen.close()), id="another protocol"),
    ],
)
async def test_a_connection_that_breaks_after_sending_leaves_the_outcome_unknown(cut):
    """C6: the request may have been carried out; the next one is fine."""
    with RawServer(cut) as server:
        transport = Transport(server.url)
        with pytest.raises(ConnectionFailedError) as caught:
            await post(transport)
        server.answer = ok
        assert await post(transport) == (200, b"{}")
        await transport.close()
    assert caught.value.outcome == "unknown"
    assert "{}" not in str(caught.value)


@pytest.mark.anyio
async def test_a_reset_on_a_reused_connection_leaves_the_outcome_unknown():
    """Ours: the server may have read the request before it hung up; nothing is sent again behind the caller's back."""
    with RawServer(ok) as server:
        transport = Transport(server.url)
        await post(transport)
        server.answer = Seen.reset
        with pytest.raises(ConnectionFailedError) as caught:
            await post(transport)
        await transport.close()
    assert (caught.value.outcome, len(server.seen), server.connections) == ("unknown", 2, 1)


@pytest.mark.anyio
async def test_a_cancelled_request_leaves_the_transport_whole():
    """Ours: cancelled while waiting for the head or within the body, the connection goes and the next call is fine."""

    def begin(seen: Seen) -> None:
        seen.begin_events()
        seen.chunk(b"x")
        seen.stall()

    for stuck in (Seen.stall, begin):
        with RawServer(stuck) as server:
            transport = Transport(server.url)
            for _ in range(40):  # more often than there are connections: none of them leaks
                before = len(server.seen)
                async with anyio.create_task_group() as group:
                    group.start_soon(post, transport)
                    with anyio.fail_after(BOUND):
                        while len(server.seen) == before:
                            await anyio.sleep(0.001)
                    group.cancel_scope.cancel()
            server.answer = ok
            assert await post(transport) == (200, b"{}")
            await transport.close()


@pytest.mark.anyio
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_body_that_a_server_does_not_read_can_be_given_up(cancelled):
    """Ours: cancelled or timed out in the middle of sending, the outcome is unknown and nothing half run is left behind."""
    with RawServer(Seen.stall, read_body=False) as server:
        transport = Transport(server.url)
        if cancelled:
            async with anyio.create_task_group() as group:
                group.start_soon(post, transport, b"x" * 32_000_000)
                with anyio.fail_after(BOUND):
                    while not server.seen:
                        await anyio.sleep(0.005)
                group.cancel_scope.cancel()
        else:
            with pytest.raises(TimedOutError) as caught:
                await post(transport, b"x" * 32_000_000, timeout=0.3)
            assert caught.value.outcome == "unknown"
        server.answer = ok
        server.read_body = True
        assert await post(transport) == (200, b"{}")
        await transport.close()


@pytest.mark.anyio
async def test_a_request_can_be_cancelled_at_any_step():
    """Ours: cancelled after every possible number of steps of the loop, also while connecting; then all is well."""
    with RawServer(ok) as server:
        transport = Transport(server.url)
        for steps in range(60):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def cancel(after: int = steps, scope: anyio.CancelScope = scope) -> None:
                        for _ in range(after):
                            await anyio.lowlevel.checkpoint()
                        scope.cancel()

                    group.start_soon(cancel)
                    await post(transport)
            if steps % 10 == 0:
                assert await post(transport) == (200, b"{}")
        await transport.close()


@pytest.mark.anyio
async def test_an_answer_that_is_not_read_costs_its_connection_only():
    """Ours: leaving the block early is allowed, on trio without a complaint from the garbage collector."""
    with RawServer(lambda seen: (seen.begin_events(), seen.chunk(b"one"), seen.stall())) as server:
        transport = Transport(server.url)
        async with transport.request("POST", {}, b"{}") as answer:
            assert await anext(aiter(answer)) == b"one"
        server.answer = ok
        assert await post(transport) == (200, b"{}")
        await transport.close()
    assert server.connections == 2


@pytest.mark.anyio
async def test_close_is_for_any_task_any_number_of_times_and_lets_others_finish():
    """Ours: a request under way ends by itself, one begun afterwards is refused."""
    go, arrived = threading.Event(), threading.Event()

    def answer(seen: Seen) -> None:
        arrived.set()
        go.wait(BOUND)
        ok(seen)

    with RawServer(answer) as server:
        transport = Transport(server.url)
        async with anyio.create_task_group() as group:
            group.start_soon(post, transport)
            assert await anyio.to_thread.run_sync(lambda: arrived.wait(BOUND))
            group.start_soon(transport.close)
            await transport.close()
            go.set()
        with pytest.raises(ClosedError):
            await post(transport)
        await transport.close()
    assert len(server.seen) == 1


@pytest.mark.anyio
@respx.mock
async def test_respx_intercepts_and_its_failures_are_translated():
    """Ours: users test with respx, so the lanes must not hide from it."""
    route = respx.post("https://memory.example/mcp")
    transport = Transport("https://memory.example/mcp", auth=("u", "p"))
    route.respond(200, content=b"mocked")
    assert await post(transport) == (200, b"mocked")
    for failure, outcome in ((httpx.ConnectError, "not_sent"), (httpx.ReadError, "unknown")):
        route.side_effect = failure
        with pytest.raises(ConnectionFailedError) as caught:
            await post(transport)
        assert caught.value.outcome == outcome
    await transport.close()


@pytest.mark.anyio
async def test_a_given_transport_stands_in_for_the_network():
    """Ours: the seam for users' tests."""
    transport = Transport(
        "http://h/mcp", transport=httpx.MockTransport(lambda r: httpx.Response(201, content=r.content))
    )
    assert await post(transport, b"echo") == (201, b"echo")
    await transport.close()


def test_one_ssl_context_serves_all_connections():
    """Ours: making one takes longer than a request."""
    one, other = Transport("https://a.example/mcp"), Transport("https://b.example/mcp")
    contexts = {id(transport._open("https")._pool._ssl_context) for transport in (one, other)}
    assert len(contexts) == 1
    own = ssl.create_default_context()
    assert Transport("https://a.example/mcp", ssl_context=own)._open("https")._pool._ssl_context is own
