"""A server for what no real server can be asked to do: every byte of its answers, and every cut, is the test's own.

It runs in threads with blocking sockets, so that it behaves the same whichever event loop the test uses.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

PATIENCE = 10.0


@dataclass
class Seen:
    """One request as it arrived, and the connection to answer on."""

    verb: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int
    sock: socket.socket = field(repr=False)
    stopping: threading.Event = field(repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def method(self) -> str:
        return self.json.get("method", "") if self.body else self.verb

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.sock.sendall(piece)

    def respond(
        self,
        status: int = 200,
        body: bytes = b"",
        kind: str | None = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        lines = [f"HTTP/1.1 {status} Reason", f"Content-Length: {len(body)}"]
        lines += [f"Content-Type: {kind}"] if kind else []
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def rpc(self, *, status: int = 200, headers: dict[str, str] | None = None, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": self.json.get("id"), **message}).encode()
        self.respond(status, body, headers=headers)

    def begin_events(self, headers: dict[str, str] | None = None) -> None:
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self.send(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{extra}Transfer-Encoding: chunked\r\n\r\n".encode()
        )

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def end_events(self) -> None:
        self.send(b"0\r\n\r\n")

    def stall(self) -> None:
        """Say nothing until the test is over."""
        self.stopping.wait(PATIENCE)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class RawServer:
    """``with RawServer(answer) as server``: ``answer(seen)`` is called for every request, in the connection's thread.

    With ``tls``, a connection that begins with a TLS handshake gets one, and one that does not is plain http: both on
    one port, so that a redirect can lead from one to the other.
    """

    def __init__(
        self, answer: Callable[[Seen], None], *, read_body: bool = True, tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer = answer
        self.read_body = read_body
        self.tls = tls
        self.seen: list[Seen] = []
        self.connections = 0
        self.failures: list[BaseException] = []
        self._stopping = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    def methods(self) -> list[str]:
        return [seen.method for seen in self.seen]

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not self.failures, self.failures

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(PATIENCE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each second small piece waits 40 ms
            self.connections += 1
            self._sockets.append(sock)
            self._start(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, number: int) -> None:
        buffered = b""
        try:
            if self.tls is not None and sock.recv(1, socket.MSG_PEEK) == b"\x16":
                sock = self.tls.wrap_socket(sock, server_side=True)
                self._sockets.append(sock)
            while True:
                while b"\r\n\r\n" not in buffered:
                    if not (data := sock.recv(65536)):
                        return
                    buffered += data
                head, _, buffered = buffered.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                verb, target, _ = first.split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                length = int(headers.get("content-length", "0")) if self.read_body else 0
                while len(buffered) < length:
                    if not (data := sock.recv(65536)):
                        return
                    buffered += data
                body, buffered = buffered[:length], buffered[length:]
                seen = Seen(verb, target, headers, body, number, sock, self._stopping)
                self.seen.append(seen)
                self.answer(seen)
        except OSError:
            pass  # the client went away, or the test closed the connection: both are what tests are about
        except BaseException as error:
            self.failures.append(error)
        finally:
            sock.close()


class McpStub:
    """An MCP server of one era that behaves until a tool is called; then ``call`` decides."""

    def __init__(self, call: Callable[[Seen], None], *, era: str = "modern") -> None:
        self.call = call
        self.era = era
        self.sessions = 0
        self.lock = threading.Lock()

    def __call__(self, seen: Seen) -> None:
        if seen.verb == "DELETE":
            seen.respond(204, kind=None)
        elif seen.verb != "POST":
            self.call(seen)
        elif seen.method == "server/discover":
            if self.era == "modern":
                seen.rpc(result={"supportedVersions": ["2026-07-28"], "capabilities": {}, "resultType": "complete"})
            else:
                seen.rpc(
                    status=400,
                    error={"code": -32600, "message": "Bad Request: Missing session ID"},
                    headers={"Mcp-Session-Id": "not-this-one"},
                )
        elif seen.method == "initialize":
            with self.lock:
                self.sessions += 1
            result = {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "serverInfo": {"name": "stub", "version": "1"},
            }
            seen.rpc(result=result, headers={"Mcp-Session-Id": f"session-{self.sessions}"})
        elif seen.method.startswith("notifications/"):
            seen.respond(202, kind=None)
        else:
            self.call(seen)


def tool_result(value: object, **more: object) -> dict[str, object]:
    return {
        "content": [{"type": "text", "text": json.dumps(value)}],
        "structuredContent": value,
        "isError": False,
        **more,
    }
