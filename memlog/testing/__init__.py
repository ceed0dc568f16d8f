"""For tests of agents that use memlog, and for memlog's own: the reference server, in a thread of the test process.

    with reference_server() as server:
        async with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            server.faults.add("drop", tool="append_memory", when="after")
            ...

The same as pytest fixtures: :mod:`memlog.testing.plugin`. What became of everything that was appended:
:func:`check_history`. Needs the extra ``memlog-sdk[server]``.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvicorn

from memlog.testing.history import Finding, HistoryReport, check_history, read_history
from server_reference import Faults, create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.applications import Starlette

__all__ = ["Finding", "HistoryReport", "ReferenceServer", "check_history", "read_history", "reference_server"]

_START_SECONDS = 10.0


class ReferenceServer:
    """A running server. ``url`` and ``auth`` open a log or a client on it; its memory outlives :meth:`stop`."""

    def __init__(self, app: Starlette, auth: tuple[str, str]) -> None:
        self.auth = auth
        self.app = app
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The MCP endpoint; the same after a restart."""
        return f"http://127.0.0.1:{self._port}/mcp"

    @property
    def faults(self) -> Faults:
        """Misbehaviour to order: see :mod:`server_reference.faults`."""
        faults: Faults = self.app.state.faults
        return faults

    @property
    def counters(self) -> Any:
        """What the server has seen: calls by tool, and the most appends at once in one conversation."""
        return self.app.state.counters

    def start(self) -> None:
        """Accept connections, after :meth:`stop` on the same port again."""
        # Named TCP, or asyncio leaves Nagle's algorithm on, and every call on a kept connection waits 40 ms.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", self._port))
            listening.listen(2048)
        except BaseException:
            listening.close()
            raise
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(self.app, lifespan="off", log_config=None, access_log=False, ws="none")
        self._server = uvicorn.Server(config)
        ready = threading.Event()
        self._server.startup = _announcing(self._server.startup, ready)  # type: ignore[method-assign]  # no other hook
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="reference-server", daemon=True
        )
        self._thread.start()
        if not ready.wait(_START_SECONDS):
            msg = "the reference server did not start"
            raise RuntimeError(msg)

    def stop(self) -> None:
        """Stop at once: connections are cut, and new ones are refused until :meth:`start`."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join(_START_SECONDS)
            self._server = self._thread = None


def _announcing(startup: Any, ready: threading.Event) -> Any:
    async def announcing(sockets: Any = None) -> None:
        await startup(sockets=sockets)
        ready.set()

    return announcing


@contextlib.contextmanager
def reference_server(*, auth: tuple[str, str] = ("demo", "demo"), **settings: Any) -> Iterator[ReferenceServer]:
    """The bundled server on a free port of this machine, in memory unless ``db`` names a file.

    ``settings`` are those of :func:`server_reference.create_app`. On leaving it is stopped and its store closed.
    """
    user, password = auth
    app = create_app(sites={user: password, **settings.pop("sites", {})}, **settings)
    server = ReferenceServer(app, auth)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        app.state.store.close()
