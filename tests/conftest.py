"""What every test shares: both event loops for code that runs in the caller's loop, and a clean environment."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both loops, always; `test_backends.py` proves that each is the one it claims."""
    return request.param


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMLOG_URL", "MEMLOG_AUTH", "MEMLOG_BUFFER_DIR"):
        monkeypatch.delenv(name, raising=False)
