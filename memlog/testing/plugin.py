"""The reference server as pytest fixtures. In a project's top conftest: ``pytest_plugins = ["memlog.testing.plugin"]``.

A test that asks for ``memlog_server`` gets a server of its own; one that asks for ``memlog_env`` as well needs no
settings in the agent that it tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memlog.testing import reference_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memlog.testing import ReferenceServer

__all__ = ["memlog_env", "memlog_server"]


@pytest.fixture
def memlog_server() -> Iterator[ReferenceServer]:
    """A running reference server, in memory, for this test alone; see :class:`memlog.testing.ReferenceServer`."""
    with reference_server() as server:
        yield server


@pytest.fixture
def memlog_env(memlog_server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``MEMLOG_URL``, ``MEMLOG_AUTH`` and ``MEMLOG_BUFFER_DIR`` for ``memlog_server``; the value is the directory.

    With it ``memlog.open_log()`` needs no argument, and neither do programs that the test starts.
    """
    directory = tmp_path / "memlog"
    monkeypatch.setenv("MEMLOG_URL", memlog_server.url)
    monkeypatch.setenv("MEMLOG_AUTH", ":".join(memlog_server.auth))
    monkeypatch.setenv("MEMLOG_BUFFER_DIR", str(directory))
    return directory
