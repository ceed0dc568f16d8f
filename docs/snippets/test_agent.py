"""An agent's own test: a busy server, then a lost answer, and all the same nothing is lost or there twice."""

import asyncio
from pathlib import Path

import memlog
from memlog.testing import reference_server


async def remember(log: memlog.MemoryLog) -> None:
    """Stands for the agent under test."""
    log.conversation("c_under_test").append({"role": "user", "text": "hello"})


def test_the_agent_remembers_through_a_bad_day(tmp_path: Path) -> None:
    async def scenario() -> list[memlog.Item]:
        server.faults.add("status", tool="append_memory", status=503, times=2)
        server.faults.add("drop", tool="append_memory", when="after", times=1)
        async with memlog.open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            await remember(log)
            report = await log.flush(timeout=30)
            assert report.complete
            return [item async for item in log.conversation("c_under_test").replay()]

    with reference_server() as server:
        items = asyncio.run(scenario())

    assert [item.payload["text"] for item in items] == ["hello"]
