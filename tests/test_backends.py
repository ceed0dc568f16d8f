"""Each event loop that tests claim to run on is the one they run on."""

from __future__ import annotations

import asyncio
import sys

import anyio
import pytest
import sniffio


@pytest.mark.anyio
async def test_the_loop_is_the_one_that_the_parameter_names(anyio_backend: str) -> None:
    """Proved by what only that loop can do, not by what the plugin says of itself."""
    assert sniffio.current_async_library() == anyio_backend
    if anyio_backend == "asyncio":
        assert asyncio.get_running_loop().is_running()
        with pytest.raises(RuntimeError):
            sys.modules["trio"].lowlevel.current_task()
    else:
        import trio

        assert trio.lowlevel.current_task().name
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()


_SEEN: set[str] = set()


@pytest.mark.anyio
async def test_each_loop_has_a_turn(anyio_backend: str) -> None:
    """Remembers who was here, for the test below."""
    await anyio.sleep(0)
    _SEEN.add(sniffio.current_async_library())


def test_both_loops_had_their_turn(request: pytest.FixtureRequest) -> None:
    """No parameter was lost on the way from the fixture to the tests."""
    config = request.config
    if config.getoption("keyword") or any("::" in argument for argument in config.args):
        pytest.skip("only a part of this file was asked for")
    assert {"asyncio", "trio"} == _SEEN
