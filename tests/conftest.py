"""What every test shares: both event loops for code that runs in the caller's loop, and a clean environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from memlog.testing import ReferenceServer

pytest_plugins = ["memlog.testing.plugin"]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both loops, always; `test_backends.py` proves that each is the one it claims."""
    return request.param


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMLOG_URL", "MEMLOG_AUTH", "MEMLOG_BUFFER_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(memlog_server: ReferenceServer) -> ReferenceServer:
    """The bundled server on a real socket, in memory: the one that users' tests get."""
    return memlog_server
