"""A test of an agent's memory: whatever the server did, what was stored is there, whole, in order, and once."""

import asyncio

import pytest

import memlog
from memlog.testing import ReferenceServer, check_history, read_history

pytest_plugins = ["memlog.testing.plugin"]  # in a project of several files: in the top conftest.py

CHAT = "c_under_test"


async def agent(turns: range) -> list[list[dict[str, object]]]:
    """Stands for the agent under test; returns what it appended, and ends without waiting for the server."""
    appended: list[list[dict[str, object]]] = []
    async with memlog.open_log(flush_timeout=0) as log:
        for turn in turns:
            batch: list[dict[str, object]] = [{"role": role, "turn": turn} for role in ("user", "assistant")]
            await log.conversation(CHAT).extend(batch)
            appended.append(batch)
    return appended


async def duplicates_after_the_rest_is_sent() -> list[memlog.Duplicate]:
    async with memlog.open_log() as log:
        assert (await log.flush(timeout=30)).complete
        return await log.duplicates()


@pytest.mark.usefixtures("memlog_env")
def test_nothing_is_lost_on_a_bad_day(memlog_server: ReferenceServer) -> None:
    memlog_server.faults.add("status", tool="append_memory", status=503, times=3)
    memlog_server.faults.add("drop", tool="append_memory", when="after", probability=0.3, seed=1, times=20)

    appended = asyncio.run(agent(range(20)))
    appended += asyncio.run(agent(range(20, 40)))  # as after a restart
    duplicates = asyncio.run(duplicates_after_the_rest_is_sent())

    held = asyncio.run(read_history(memlog_server.url, memlog_server.auth))
    report = check_history({CHAT: appended}, held, duplicates=duplicates)
    assert report.ok, report
