"""TLS and proxies: who is trusted, what a proxy gets to see, and that every failure on the way is known not to have sent.

Real handshakes and a real proxy, all on this machine; the certificate authority is one of this run.
"""

from __future__ import annotations

import base64
import http.client
import select
import socket
import ssl
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import pytest
import trustme
from raw_server import McpStub, RawServer, Seen, tool_result

from memlog.client import Client
from memlog.errors import ConnectionFailedError, RedirectRefusedError
from memlog.retry import NO_RETRY
from memlog.team import TeamClient
from memlog.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOUND = 10.0
BASIC = "Basic " + base64.b64encode(b"site:hunter2").decode()

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    """What a server for this machine, and for the name ``memory.test``, shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "memory.test").configure_cert(context)
    return context


@pytest.fixture
def trusted(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has set is not what a test means."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def ok(seen: Seen) -> None:
    seen.respond(200, seen.body)


async def post(transport: Transport, body: bytes = b"{}") -> tuple[int, bytes]:
    try:
        with anyio.fail_after(BOUND):
            async with transport.request("POST", {"Content-Type": "application/json"}, body) as answer:
                return answer.status, await answer.read()
    finally:
        await transport.close()


def secure(url: str) -> str:
    return url.replace("http://", "https://")


# -- who is trusted --------------------------------------------------------------------------------------------------


async def test_an_authority_that_the_environment_names_is_trusted(
    server_tls: ssl.SSLContext, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours: SSL_CERT_FILE means what it means elsewhere."""
    bundle = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(bundle)
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    with RawServer(ok, tls=server_tls) as server:
        assert await post(Transport(secure(server.url), auth=("site", "hunter2"))) == (200, b"{}")
    assert server.seen[0].headers["authorization"] == BASIC


async def test_an_ssl_context_given_is_the_one_that_counts(
    server_tls: ssl.SSLContext, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ours: for both clients, and whatever the environment says."""
    trustme.CA().cert_pem.write_to_path(other := tmp_path / "other.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(other))
    with RawServer(McpStub(lambda seen: seen.rpc(result=tool_result({"x": 1}))), tls=server_tls) as server:
        for client in (
            Client(secure(server.url), auth=("site", "hunter2"), ssl_context=trusted),
            TeamClient(secure(server.url), token="hunter2", ssl_context=trusted),
        ):
            async with client:
                assert await client.call_tool("anything") == {"x": 1}


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_who_cannot_prove_to_be_the_server_is_sent_nothing(
    server_tls: ssl.SSLContext, trusted: ssl.SSLContext, wrong: str
) -> None:
    """Ours: an unknown authority or another name; the code says that it will not pass by itself."""
    with RawServer(ok, tls=server_tls) as server:
        url = secure(server.url) if wrong == "authority" else secure(server.url).replace("127.0.0.1", "localhost")
        context = trusted if wrong == "name" else ssl.create_default_context()
        with pytest.raises(ConnectionFailedError, match="certificate") as caught:
            await post(Transport(url, auth=("site", "hunter2"), ssl_context=context))
    assert (caught.value.outcome, caught.value.code) == ("not_sent", "tls")
    assert server.seen == []


async def test_authorities_that_cannot_be_read_are_told_and_nothing_is_sent(
    server_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ours: a bundle that is missing or no bundle is an error of the call, one of ours, and names what to look at."""
    (junk := tmp_path / "junk.pem").write_text("not a certificate")
    with RawServer(ok, tls=server_tls) as server:
        for bundle in (tmp_path / "missing.pem", junk):
            monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
            with pytest.raises(ConnectionFailedError, match="SSL_CERT_FILE") as caught:
                await post(Transport(secure(server.url)))
            assert (caught.value.outcome, caught.value.code) == ("not_sent", "tls")
    assert server.connections == 0


# -- redirects between http and https --------------------------------------------------------------------------------


def upgrading(status: int):
    def answer(seen: Seen) -> None:
        if isinstance(seen.sock, ssl.SSLSocket):
            ok(seen)
        else:
            seen.respond(status, headers={"Location": f"https://{seen.headers['host']}/mcp"})

    return answer


@pytest.mark.parametrize("status", [307, 308])
async def test_plain_http_is_followed_to_https_on_the_same_host(
    server_tls: ssl.SSLContext, trusted: ssl.SSLContext, status: int
) -> None:
    """Ours: with method, body and credentials, which travel in the clear no more often than the server asks for."""
    with RawServer(upgrading(status), tls=server_tls) as server:
        transport = Transport(server.url, auth=("site", "hunter2"), ssl_context=trusted)
        for body in (b'"one"', b'"two"'):
            with anyio.fail_after(BOUND):
                async with transport.request("POST", {}, body) as answer:
                    assert (answer.status, await answer.read()) == (200, body)
        await transport.close()
    ways = [type(seen.sock).__name__ for seen in server.seen]
    assert ways == (["socket", "SSLSocket"] * 2 if status == 307 else ["socket", "SSLSocket", "SSLSocket"])
    assert all(seen.headers["authorization"] == BASIC and seen.verb == "POST" for seen in server.seen)


async def test_https_is_never_followed_to_plain_http(server_tls: ssl.SSLContext, trusted: ssl.SSLContext) -> None:
    """Ours: neither the payload nor the credentials are taken back into the clear."""

    def answer(seen: Seen) -> None:
        seen.respond(307, headers={"Location": f"http://{seen.headers['host']}/mcp"})

    with RawServer(answer, tls=server_tls) as server, pytest.raises(RedirectRefusedError) as caught:
        await post(Transport(secure(server.url), auth=("site", "hunter2"), ssl_context=trusted))
    assert (caught.value.outcome, len(server.seen)) == ("not_sent", 1)


# -- proxies ---------------------------------------------------------------------------------------------------------


@contextmanager
def proxy_to(port: int) -> Iterator[RawServer]:
    """A proxy for which every host is this machine, at ``port``."""

    def tunnel(seen: Seen, upstream: socket.socket) -> None:
        seen.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        pair = {seen.sock: upstream, upstream: seen.sock}
        with suppress(ValueError):  # the test is over, and its socket closed
            while readable := select.select(list(pair), [], [], BOUND)[0]:
                for one in readable:
                    if not (data := one.recv(65536)):
                        return
                    pair[one].sendall(data)

    def answer(seen: Seen) -> None:
        if seen.verb == "CONNECT":
            with socket.create_connection(("127.0.0.1", port), BOUND) as upstream:
                tunnel(seen, upstream)
            seen.close()
            return
        forwarded = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND)
        headers = {name: value for name, value in seen.headers.items() if name != "proxy-authorization"}
        forwarded.request(seen.verb, "/mcp", seen.body, headers)
        response = forwarded.getresponse()
        seen.respond(response.status, response.read())
        forwarded.close()

    with RawServer(answer) as proxy:
        yield proxy


async def test_https_goes_through_the_environments_proxy_which_sees_no_secret(
    server_tls: ssl.SSLContext, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours: CONNECT with the proxy's own credentials, the name looked up there; the rest is between us and the server."""
    with RawServer(ok, tls=server_tls) as server, proxy_to(server.port) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://gate:pass%20word@127.0.0.1:{proxy.port}")
        transport = Transport("https://memory.test/mcp", auth=("site", "hunter2"), ssl_context=trusted)
        assert await post(transport, b'"secret"') == (200, b'"secret"')
    assert [(seen.verb, seen.target) for seen in proxy.seen] == [("CONNECT", "memory.test:443")]
    assert proxy.seen[0].headers["proxy-authorization"] == "Basic " + base64.b64encode(b"gate:pass word").decode()
    assert "authorization" not in proxy.seen[0].headers
    assert server.seen[0].headers["authorization"] == BASIC
    assert "proxy-authorization" not in server.seen[0].headers


async def test_a_proxy_cannot_stand_in_for_the_server(
    server_tls: ssl.SSLContext, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours: at the other end of the tunnel the name is checked as ever."""
    with RawServer(ok, tls=server_tls) as server, proxy_to(server.port) as proxy:
        monkeypatch.setenv("ALL_PROXY", f"127.0.0.1:{proxy.port}")
        with pytest.raises(ConnectionFailedError) as caught:
            await post(Transport("https://other.test/mcp", auth=("site", "hunter2"), ssl_context=trusted))
    assert (caught.value.outcome, caught.value.code) == ("not_sent", "tls")
    assert server.seen == []


async def test_plain_http_is_forwarded_unless_the_host_is_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours: HTTP_PROXY and NO_PROXY mean what they mean elsewhere."""
    with RawServer(ok) as server, proxy_to(server.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,.intern.test")
        assert await post(Transport("http://memory.test/mcp"), b"[1]") == (200, b"[1]")
        assert proxy.seen[0].target == "http://memory.test/mcp"
        assert await post(Transport(server.url), b"[2]") == (200, b"[2]")
    assert len(proxy.seen) == 1
    assert [seen.body for seen in server.seen] == [b"[1]", b"[2]"]


@pytest.mark.parametrize("status", [403, 407, 502, 503])
async def test_a_tunnel_that_the_proxy_refuses_is_known_not_to_have_sent(
    status: int, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours: it is the proxy that says no, not the server, and the call went nowhere."""
    with RawServer(lambda seen: seen.respond(status, b"no")) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://gate:hunter2@127.0.0.1:{proxy.port}")
        with pytest.raises(ConnectionFailedError) as caught:
            await post(Transport("https://memory.test/mcp", auth=("site", "hunter2"), ssl_context=trusted))
    assert caught.value.outcome == "not_sent"
    assert "hunter2" not in f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize("address", ["socks5://gate:hunter2@127.0.0.1:1080", "http://gate:hunter2@[::1", "ftp://x"])
async def test_a_proxy_that_cannot_be_used_is_an_error_of_ours_without_its_password(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours: an address that httpx does not understand is found at the call, and going around it is not our decision."""
    monkeypatch.setenv("ALL_PROXY", address)
    with pytest.raises(ConnectionFailedError, match="proxy") as caught:
        await post(Transport("https://memory.test/mcp", auth=("site", "hunter2")))
    assert (caught.value.outcome, caught.value.code) == ("not_sent", "proxy")
    assert "hunter2" not in f"{caught.value} {caught.value!r}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


async def test_a_proxy_that_is_not_there_is_known_not_to_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours: through both clients' door, without a second attempt."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    async with Client("https://memory.test/mcp", retry=NO_RETRY) as client:
        with pytest.raises(ConnectionFailedError) as caught:
            await client.append_memory("c_12345678", [{}])
    assert caught.value.outcome == "not_sent"
