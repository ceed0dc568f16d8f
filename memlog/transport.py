"""HTTP, and the only importer of httpx: connections, deadlines, redirects, the body cap and the error border.

One :class:`Transport` speaks to one address. It knows neither MCP nor memory: bytes go out, a status, headers and
chunks of bytes come back, and whatever goes wrong is one of this package's errors, which says whether the request may
have been carried out.

* Connections are *lanes*: each is a pool of one connection, the last one used is taken first. One pool of many
  connections looks through all of them for every request and was 2.6 times slower with 32 at a time.
* A lane is used again only after an answer that was read to its end. Cancelled, failed or cut short: the lane is thrown
  away, so no caller can leave it in a state that hurts the next one.
* httpx's transports are used without httpx's client: no cookies, no line in the log for every request, no decoder that
  a small compressed answer could make eat the memory. (We ask for plain bytes and refuse others.)
"""

from __future__ import annotations

import base64
import functools
import ipaddress
import math
import os
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Final, Literal, NamedTuple
from urllib.request import getproxies, proxy_bypass

import anyio
import httpx

from memlog.errors import (
    ClosedError,
    ConnectionFailedError,
    ProtocolError,
    RedirectRefusedError,
    ResponseTooLargeError,
    TimedOutError,
    TransientError,
)

__all__ = ["TRANSLATIONS", "Answer", "Auth", "BaseTransport", "Transport", "translate"]

BaseTransport = httpx.AsyncBaseTransport
"""What may stand in for the network."""

Credentials = tuple[str, str] | str
Auth = Credentials | httpx.Auth | Callable[[], Credentials]
"""``(user, password)`` for Basic, a token for Bearer, any ``httpx.Auth``, or a function that returns the first two; it
is asked at the first request and again after a 401."""

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024

answer_limit: Final[ContextVar[int]] = ContextVar("answer_limit", default=sys.maxsize)
"""A lower limit for the answers that the caller is about to ask for. One too long by its head is not read at all."""

CONNECTIONS_MAX: Final = 32
REDIRECTS_MAX: Final = 3
SKIM_BYTES_MAX: Final = 64 * 1024
"""How much of an uninteresting body is read to keep its connection."""

CONNECT_SECONDS_MAX: Final = 10.0
"""A host that does not even accept is found out early, while it is still certain that nothing was sent."""

KEEPALIVE_SECONDS: Final = 4.0
"""Shorter than the 5 s of uvicorn and others: an idle connection is dropped by us before the server drops it."""


class Answer:
    """The head of an answer, and its body as chunks. Good inside the ``async with`` that gave it."""

    def __init__(self, response: httpx.Response, *, bytes_max: int) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.exhausted = False
        self._bytes_left = bytes_max
        self._bytes_max = bytes_max
        # An answer that an httpx.Auth had to read, or that a stand-in made, is there as a whole.
        stream = httpx.ByteStream(response.content) if response.is_stream_consumed else response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        self._chunks = aiter(stream)
        self._response = response

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            self.exhausted = True
            raise
        self._bytes_left -= len(chunk)
        if self._bytes_left < 0:
            msg = f"the answer exceeds {self._bytes_max:,} bytes"
            raise ResponseTooLargeError(msg, limit=self._bytes_max, status=self.status)
        return chunk

    async def read(self) -> bytes:
        """The body from here to its end."""
        return b"".join([chunk async for chunk in self])

    async def skim(self, seconds: float | None = None) -> None:
        """Pass over the rest if it is short (and comes within ``seconds``), so that the connection can be kept."""
        read = 0
        with anyio.move_on_after(seconds):
            async for chunk in self:
                read += len(chunk)
                if read > SKIM_BYTES_MAX:
                    break

    async def aclose(self) -> None:
        """Give the body up where it is. Never raises and waits for nothing but the closing of the socket."""
        if not self.exhausted:
            # The stream is a chain of generators. Only an exception from the innermost ends them all in this task
            # instead of leaving some to the garbage collector, which trio rightly complains about.
            with anyio.CancelScope() as scope, suppress(Exception):
                scope.cancel()
                while True:
                    await anext(self._chunks)
        with anyio.CancelScope(shield=True), suppress(Exception):
            await self._response.aclose()

    def raise_unless_plain(self) -> None:
        """A body in another encoding than the one asked for, or announced as too long, is not read at all."""
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ProtocolError("the answer is compressed, which was not asked for", status=self.status)
        length = self.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._bytes_max):
            msg = f"the answer exceeds {self._bytes_max:,} bytes"
            raise ResponseTooLargeError(msg, limit=self._bytes_max, status=self.status)


class Transport:
    """Requests to one address, with its credentials. Every argument is checked here, before anything is sent.

    ``timeout`` is the absolute limit of one attempt in seconds, from waiting for a connection to the last byte of the
    answer. ``transport`` (an ``httpx.AsyncBaseTransport``) stands in for the network; it is closed with this.
    Proxies and certificate authorities come from the usual environment variables, the latter unless ``ssl_context``.
    """

    def __init__(
        self,
        url: str,
        *,
        auth: Auth | None = None,
        timeout: float = 30.0,
        allow_insecure: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
        ssl_context: ssl.SSLContext | None = None,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        self._url = _checked_url(url)
        self.timeout = _checked_timeout(timeout)
        self._header, self._auth = _checked_auth(auth)
        if auth is not None and self._url.scheme == "http" and not allow_insecure and not _is_loopback(self._url.host):
            msg = f"credentials would travel in the clear to {self.where}: use https, or pass allow_insecure=True"
            raise ValueError(msg)
        self._answer_bytes_max = answer_bytes_max
        self._ssl_context = ssl_context
        self._given = transport
        self._slots = anyio.Semaphore(CONNECTIONS_MAX)
        self._free: dict[str, list[httpx.AsyncBaseTransport]] = {"http": [], "https": []}
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where!r})"

    @property
    def where(self) -> str:
        """The address for messages: without a query, which may hold a secret."""
        return str(self._url.copy_with(query=None))

    def mask(self, text: str) -> str:
        """``text`` without this transport's credentials, for a server that repeats them."""
        for secret in (*self._header.secrets, *(self._auth.secrets if isinstance(self._auth, _Asked) else ())):
            text = text.replace(secret, "***")
        return text

    @asynccontextmanager
    async def request(
        self, method: str, headers: Mapping[str, str], body: bytes = b"", *, timeout: float | None = None
    ) -> AsyncGenerator[Answer]:
        """Send one request and hand out its answer, whatever its status.

        Inside the block the body is read; all of it counts against the deadline. Cancelled at any point, the connection
        is closed and the transport is as good as before.

        Raises: TransientError, its ``outcome`` saying whether the request may have been carried out.
        """
        if self._closed:
            raise ClosedError("the client is closed")
        seconds = self.timeout if timeout is None else max(timeout, 0.0)
        sent = _Body(body)
        outer = sys.exception()
        try:
            with anyio.fail_after(seconds):
                async with self._answer(method, headers, sent, seconds) as answer:
                    yield answer
        except TimeoutError as error:
            msg = f"no complete answer from {self.where} within {seconds:g} s"
            raise TimedOutError(msg, outcome="unknown" if sent.begun else "not_sent") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise translate(error, begun=sent.begun, where=self.where, outer=outer) from error

    async def close(self) -> None:
        """No more requests; idle connections are closed, requests under way end by themselves.

        From any task, any number of times.
        """
        self._closed = True
        with anyio.CancelScope(shield=True):
            for lanes in self._free.values():
                while lanes:
                    await lanes.pop().aclose()
            if self._given is not None:
                given, self._given = self._given, None
                await given.aclose()

    @asynccontextmanager
    async def _answer(
        self, method: str, headers: Mapping[str, str], body: _Body, seconds: float
    ) -> AsyncGenerator[Answer]:
        """Follow the few redirects that can be trusted; all others are errors."""
        url = self._url
        for _ in range(REDIRECTS_MAX + 1):
            async with self._exchange(self._request(method, url, headers, body, seconds)) as answer:
                target = _redirect(url, answer)
                if target is None:
                    answer.raise_unless_plain()
                    yield answer
                    return
                await answer.skim()
            if answer.status == httpx.codes.PERMANENT_REDIRECT and url == self._url:
                # "Permanent" is an invitation to ask there from now on, and saves sending every body twice.
                self._url = target
            url = target
        raise RedirectRefusedError(f"{self.where} redirects without end", location=_named(url), outcome="not_sent")

    def _request(
        self, method: str, url: httpx.URL, headers: Mapping[str, str], body: _Body, seconds: float
    ) -> httpx.Request:
        fields = [("Host", url.netloc.decode("ascii")), *self._header.fields, *headers.items()]
        fields += [("Accept-Encoding", "identity"), ("User-Agent", "memlog")]
        if method == "POST":
            fields.append(("Content-Length", str(len(body))))
        phases = {"connect": min(seconds, CONNECT_SECONDS_MAX), "read": seconds, "write": seconds, "pool": seconds}
        return httpx.Request(method, url, headers=fields, stream=body, extensions={"timeout": phases})

    @asynccontextmanager
    async def _exchange(self, request: httpx.Request) -> AsyncGenerator[Answer]:
        async with AsyncExitStack() as stack:
            lane = await self._lane(request.url.scheme, stack)
            answer: Answer | None = None
            try:
                bytes_max = min(self._answer_bytes_max, answer_limit.get())
                answer = Answer(await self._send(lane, request), bytes_max=bytes_max)
                yield answer
            finally:
                whole = False
                try:
                    if answer is not None:
                        await answer.aclose()
                        whole = answer.exhausted
                finally:  # also when closing the answer was what was cancelled
                    if lane is not self._given:
                        if whole and not self._closed:
                            self._free[request.url.scheme].append(lane)
                        else:
                            with anyio.CancelScope(shield=True), suppress(Exception):
                                await lane.aclose()

    async def _lane(self, scheme: str, stack: AsyncExitStack) -> httpx.AsyncBaseTransport:
        if self._given is not None:
            return self._given
        try:
            self._slots.acquire_nowait()
        except anyio.WouldBlock:
            await self._slots.acquire()
        stack.callback(self._slots.release)
        free = self._free[scheme]
        return free.pop() if free else self._open(scheme)

    def _open(self, scheme: str) -> httpx.AsyncBaseTransport:
        context = self._ssl_context
        if context is None:
            context = _shared_ssl_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_SECONDS)
        try:
            return httpx.AsyncHTTPTransport(verify=context, limits=limits, proxy=_proxy(scheme, self._url))
        except (ValueError, httpx.InvalidURL, ImportError):
            # Not even the cause is chained: the address of a proxy may hold a password.
            msg = f"the proxy that the environment names for {scheme} cannot be used: its address must be http or https"
            raise ConnectionFailedError(msg, outcome="not_sent", code="proxy") from None

    async def _send(self, lane: httpx.AsyncBaseTransport, request: httpx.Request) -> httpx.Response:
        if self._auth is None:
            return await lane.handle_async_request(request)
        flow = self._auth.async_auth_flow(request)
        try:
            request = await anext(flow)
            while True:
                response = await lane.handle_async_request(request)
                response.request = request
                try:
                    request = await flow.asend(response)
                except StopAsyncIteration:
                    return response
                answer = Answer(response, bytes_max=self._answer_bytes_max)
                try:
                    await answer.skim()
                finally:
                    await answer.aclose()
        finally:
            await flow.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of a request.

    Until its first byte is asked for no server can have carried the request out: the head announces a length, and a
    head without its body is not a request.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.begun = False

    def __len__(self) -> int:
        return len(self._body)

    def __aiter__(self) -> AsyncIterator[bytes]:
        self.begun = True
        return _Once(self._body)


class _Once(AsyncIterator[bytes]):
    """One chunk. A generator would be left half run by a cancelled request, which trio complains about."""

    def __init__(self, chunk: bytes) -> None:
        self._chunk = chunk

    async def __anext__(self) -> bytes:
        if not self._chunk:
            raise StopAsyncIteration
        chunk, self._chunk = self._chunk, b""
        return chunk


class _Header(NamedTuple):
    """A ready ``Authorization`` line, and the words that must never be shown."""

    fields: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "_Header(***)"


class _Asked(httpx.Auth):
    """Credentials from a function, asked again when they are refused."""

    def __init__(self, ask: Callable[[], Credentials]) -> None:
        self._ask = ask
        self._header: _Header | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        return self._header.secrets if self._header else ()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        used = self._header = self._header or _header(self._ask())
        request.headers.update(used.fields)
        response = yield request
        if response.status_code == httpx.codes.UNAUTHORIZED:
            if self._header is used:  # else another request that was refused has asked already
                self._header = _header(self._ask())
            request.headers.update(self._header.fields)
            yield request


def _header(credentials: Credentials) -> _Header:
    if isinstance(credentials, str):
        if not credentials or not credentials.isascii() or not credentials.isprintable() or " " in credentials:
            raise ValueError("the token must be printable ASCII without spaces")
        return _Header((("Authorization", f"Bearer {credentials}"),), (credentials,))
    if not isinstance(credentials, tuple) or len(credentials) != 2:
        raise ValueError("credentials must be (user, password) or a token")
    user, password = credentials
    if not isinstance(user, str) or not isinstance(password, str) or not user or ":" in user:
        raise ValueError("auth must be (user, password), the user not empty and without a colon")
    coded = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
    return _Header((("Authorization", f"Basic {coded}"),), (coded, password) if password else (coded,))


def _checked_auth(auth: Auth | None) -> tuple[_Header, httpx.Auth | None]:
    if auth is None:
        return _Header(), None
    if isinstance(auth, httpx.Auth):
        return _Header(), auth
    if isinstance(auth, str) or (isinstance(auth, tuple) and len(auth) == 2):
        return _header(auth), None
    if callable(auth):
        return _Header(), _Asked(auth)
    # Not even the type of what is inside is shown: it may be a secret in the wrong wrapping.
    raise ValueError(
        "auth must be (user, password), a token, an httpx.Auth or a function that returns one of the first two"
    )


def _checked_url(url: str) -> httpx.URL:
    # A missing scheme, or a password with "#" or "/" in it, makes the password a part of the path or the port: then a
    # complaint must not quote it.
    quotable = "@" not in str(url)
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"not a URL: {error}" if quotable else "not a URL") from None
    if parsed.userinfo:
        raise ValueError("the URL holds credentials: pass them as auth=")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"not an http or https URL{f': {_named(parsed)!r}' if quotable else ''}")
    return parsed.copy_with(fragment=None)


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return float(timeout)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _named(url: httpx.URL) -> str:
    """A URL for messages: neither a query nor a password."""
    return str(url.copy_with(userinfo=None, query=None, fragment=None))


def _redirect(url: httpx.URL, answer: Answer) -> httpx.URL | None:
    """Where to ask again with the same method, body and credentials: the same origin, or its https twin.

    Raises: RedirectRefusedError for every other redirect.
    """
    if not 300 <= answer.status < 400:
        return None
    # Only these two promise that the request was not acted upon.
    repeatable = answer.status in (httpx.codes.TEMPORARY_REDIRECT, httpx.codes.PERMANENT_REDIRECT)
    try:
        target = url.join(answer.headers["location"])
    except (KeyError, httpx.InvalidURL):
        target = None
    if target is not None and repeatable and not target.userinfo and _is_same_or_its_https_twin(url, target):
        return target.copy_with(fragment=None)
    location = None if target is None else _named(target)
    raise RedirectRefusedError(
        f"{_named(url)} answers {answer.status} and points to {location or 'nowhere'}; it is not followed there",
        location=location,
        status=answer.status,
        outcome="not_sent" if repeatable else "unknown",
    )


def _is_same_or_its_https_twin(url: httpx.URL, target: httpx.URL) -> bool:
    schemes = (url.scheme, target.scheme)
    return (target.host, target.port) == (url.host, url.port) and (
        schemes[0] == schemes[1] or schemes == ("http", "https")
    )


def _proxy(scheme: str, url: httpx.URL) -> httpx.Proxy | None:
    """The proxy that the environment names for this address, by the standard library's rules."""
    proxies = getproxies()
    address = proxies.get(scheme) or proxies.get("all")
    if not address or proxy_bypass(url.netloc.decode("ascii")):
        return None
    return httpx.Proxy(address if "://" in address else f"http://{address}")


@functools.lru_cache(maxsize=2)
def _shared_ssl_context(cert_file: str | None, cert_dir: str | None) -> ssl.SSLContext:  # noqa: ARG001 - the cache's key; httpx reads the variables itself
    """One per process and setting: making one takes about 19 ms."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        msg = f"the certificate authorities that SSL_CERT_FILE or SSL_CERT_DIR name cannot be read: {error}"
        raise ConnectionFailedError(msg, outcome="not_sent", code="tls") from error


class Translation(NamedTuple):
    """What an httpx exception means here. ``never_sent``: it cannot happen once a request is under way."""

    error: type[ConnectionFailedError | TimedOutError | ProtocolError]
    text: str
    never_sent: bool = False


TRANSLATIONS: Final[Mapping[type[Exception], Translation]] = {
    httpx.ConnectTimeout: Translation(TimedOutError, "{where} did not accept a connection in time", never_sent=True),
    httpx.PoolTimeout: Translation(TimedOutError, "no connection to {where} became free in time", never_sent=True),
    httpx.ReadTimeout: Translation(TimedOutError, "{where} stopped answering"),
    httpx.WriteTimeout: Translation(TimedOutError, "{where} stopped reading the request"),
    httpx.TimeoutException: Translation(TimedOutError, "no answer from {where} in time"),
    httpx.ConnectError: Translation(ConnectionFailedError, "no connection to {where}", never_sent=True),
    httpx.ProxyError: Translation(ConnectionFailedError, "the proxy gave no connection to {where}", never_sent=True),
    httpx.UnsupportedProtocol: Translation(ConnectionFailedError, "no way to speak to {where}", never_sent=True),
    httpx.ReadError: Translation(ConnectionFailedError, "the connection to {where} broke"),
    httpx.WriteError: Translation(ConnectionFailedError, "the connection to {where} broke"),
    httpx.CloseError: Translation(ConnectionFailedError, "the connection to {where} broke"),
    httpx.NetworkError: Translation(ConnectionFailedError, "the connection to {where} broke"),
    httpx.RemoteProtocolError: Translation(
        ConnectionFailedError, "{where} closed the connection or does not speak HTTP"
    ),
    httpx.LocalProtocolError: Translation(ProtocolError, "the request to {where} is not valid HTTP"),
    httpx.ProtocolError: Translation(ProtocolError, "{where} does not speak HTTP"),
    httpx.TransportError: Translation(ConnectionFailedError, "the exchange with {where} failed"),
    httpx.DecodingError: Translation(ProtocolError, "the answer of {where} cannot be decoded"),
    httpx.TooManyRedirects: Translation(ProtocolError, "{where} redirects without end"),
    httpx.RequestError: Translation(ConnectionFailedError, "the exchange with {where} failed"),
    httpx.HTTPStatusError: Translation(ProtocolError, "{where} answered with an error"),
    httpx.HTTPError: Translation(ConnectionFailedError, "the exchange with {where} failed"),
    httpx.StreamConsumed: Translation(ProtocolError, "the answer of {where} was read twice"),
    httpx.StreamClosed: Translation(ConnectionFailedError, "the connection to {where} was closed"),
    httpx.ResponseNotRead: Translation(ProtocolError, "the answer of {where} was not read"),
    httpx.RequestNotRead: Translation(ProtocolError, "the request to {where} was not read"),
    httpx.StreamError: Translation(ProtocolError, "the answer of {where} cannot be read"),
}


def translate(error: Exception, *, begun: bool, where: str, outer: BaseException | None = None) -> TransientError:
    """This package's error for one of httpx. ``begun``: the body of the request was on its way.

    ``outer`` is what the caller was handling before the request: it stands in the chain of causes and is none of them.
    A certificate or handshake that fails has ``code="tls"``: it will not pass by itself.
    """
    meaning = next(TRANSLATIONS[cls] for cls in type(error).__mro__ if cls in TRANSLATIONS)
    outcome: Literal["not_sent", "unknown"] = "unknown" if begun and not meaning.never_sent else "not_sent"
    root = _root(error, outer)
    reason = str(root) if not isinstance(root, httpx.HTTPError | httpx.StreamError) else ""
    text = meaning.text.format(where=where) + (f": {reason[:200]}" if reason else "")
    return meaning.error(text, outcome=outcome, code="tls" if isinstance(root, ssl.SSLError) else None)


def _root(error: BaseException, outer: BaseException | None) -> BaseException:
    """The operating system's or the TLS library's word at the bottom of the chain."""
    while not isinstance(error, ssl.SSLError):
        # Several addresses were tried in vain: the first complaint is as good as any.
        below = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
        if below is None or below is outer:
            break
        error = below
    return error
