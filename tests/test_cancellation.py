"""Cancelling any await of the API, at any moment: a batch is wholly in or wholly out, and what comes next works.

Each round appends a batch, starts one of the calls and cancels it after a random while, from "not even begun" to "long
done". At the end the server must hold every batch once, whole, and nobody may still run for the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from between import Between, Call
from books import PATIENCE, QUICK, contents

from memlog import Client, DeadLetter, MemoryLog, engine, open_log
from memlog.errors import MemlogError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from memlog import Conversation, Receipt
    from memlog.testing import ReferenceServer

LANES = [f"c_lane000{n}" for n in range(4)]
CLIENT = "c_client00"
POISON = "c_poison00"
REQUEUED = "c_requeued"


class Rounds:
    """What a round may call, and the books of what was appended."""

    def __init__(self, server: ReferenceServer, directory: Path, seed: int) -> None:
        self.server = server
        self.directory = directory
        self.random = random.Random(seed)
        self.appended: dict[str, list[list[int]]] = {lane: [] for lane in LANES}
        self.sent: list[list[int]] = []
        self.acknowledged: list[list[int]] = []
        self.letters: list[DeadLetter] = []
        self.cancelled = 0
        self.number = 0

    def open(self) -> MemoryLog:
        def decide(call: Call) -> Any:
            return call.refuse() if call.tool == "append_memory" and call.conversation == POISON else None

        return open_log(
            self.server.url,
            auth=self.server.auth,
            buffer_dir=self.directory,
            retry=QUICK,
            flush_timeout=0,
            transport=Between(decide),
        )

    def append(self, chat: Conversation) -> Receipt:
        """A batch of one to three numbers, all of them new."""
        batch = self.batch()
        self.appended[chat.id].append(batch)
        return chat.extend([{"n": n} for n in batch])

    def batch(self) -> list[int]:
        batch = list(range(self.number, self.number + self.random.randint(1, 3)))
        self.number += len(batch)
        return batch

    def calls(self, log: MemoryLog, client: Client) -> dict[str, Callable[[], Awaitable[object]]]:
        chat = log.conversation(self.random.choice(LANES))

        async def iterate() -> None:
            async for _ in chat.replay():
                pass

        async def listed() -> None:
            async for _ in log.list_conversations():
                pass

        async def append_by_client() -> None:
            batch = self.batch()
            self.sent.append(batch)
            await client.append_memory(CLIENT, [{"n": n} for n in batch])
            self.acknowledged.append(batch)

        async def refused() -> None:
            await log.conversation(POISON).append({"poison": True}).acknowledged()

        async def close() -> None:
            await open_log_again(self, log)

        receipt = self.append(chat)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "stored": receipt.stored,
            "acknowledged": receipt.acknowledged,
            "recalled": log.receipt(receipt.id).acknowledged,
            "flush": log.flush,
            "flush to disk": lambda: log.flush(until="stored"),
            "check": log.check,
            "replay": iterate,
            "recall": chat.recall,
            "list": listed,
            "dead letters": log.dead_letters,
            "duplicates": log.duplicates,
            "refused": refused,
            "close": close,
            "client append": append_by_client,
            "client replay": lambda: client.replay_memory(CLIENT),
            "client recall": lambda: client.recall_memory(CLIENT),
            "client list": client.list_conversations,
        }
        if self.letters:
            letter = self.random.choice(self.letters)
            calls["requeue"] = lambda: log.requeue(letter, conversation_id=REQUEUED)
            calls["drop"] = lambda: log.drop(letter)
        return calls


async def open_log_again(rounds: Rounds, log: MemoryLog) -> None:
    """Close a second handle: the first one keeps the log open."""
    other = open_log(
        rounds.server.url,
        auth=rounds.server.auth,
        buffer_dir=rounds.directory,
        retry=QUICK,
        flush_timeout=0.01,
        transport=log._core.settings.transport,
    )
    try:
        await other.close()
    finally:
        assert other.closed


async def cancel_at_random(server: ReferenceServer, directory: Path, rounds_: int, seed: int) -> None:
    rounds = Rounds(server, directory, seed)
    log = rounds.open()
    names: set[str] = set()
    async with Client(server.url, auth=server.auth, retry=QUICK) as client:
        await log.conversation(LANES[0]).append({"n": -1}).acknowledged(PATIENCE)
        rounds.appended[LANES[0]].append([-1])
        threads = threading.active_count()
        for turn in range(rounds_):
            calls = rounds.calls(log, client)
            name = rounds.random.choice(sorted(calls))
            names.add(name)
            await cancelled(rounds, calls[name])
            if turn % 25 == 0:
                await log.conversation(LANES[0]).append({"n": -2}).acknowledged(PATIENCE)
                rounds.appended[LANES[0]].append([-2])
                rounds.letters = await log.dead_letters()
        # The next append works, and so does a call of each kind.
        assert (await client.append_memory(CLIENT, [{"n": -3}])).last_seq >= 0
        for lane in LANES:
            rounds.appended[lane].append([-3])
            await log.conversation(lane).append({"n": -3}).acknowledged(PATIENCE)
        with anyio.fail_after(PATIENCE):
            while not (await log.flush()).complete:
                await anyio.sleep(0.01)
        assert threading.active_count() <= threads + 1  # the callbacks' may have started
    statistics = log.statistics()
    places = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
    assert statistics.stored_items == sum(getattr(statistics, f"{place}_items") for place in places)
    assert log._core.handles == 1
    await log.close()
    await settled()
    assert rounds.cancelled > rounds_ // 10, "cancelled too late to prove anything"
    assert len(names) >= min(19, rounds_ // 15)
    await judge(rounds)


async def cancelled(rounds: Rounds, call: Callable[[], Awaitable[object]]) -> None:
    delay = rounds.random.choice([0.0, 0.0, rounds.random.random() * 0.002, rounds.random.random() * 0.02])
    with anyio.fail_after(PATIENCE):
        with anyio.move_on_after(delay) as scope:
            with contextlib.suppress(MemlogError):  # refused, say
                await call()
        rounds.cancelled += scope.cancelled_caught


async def settled() -> None:
    """No task of ours is left in the engine's loop."""

    async def left() -> list[str]:
        own = asyncio.current_task()
        return [str(task.get_coro()) for task in asyncio.all_tasks() if task is not own]

    with anyio.fail_after(PATIENCE):
        while await engine.running().call(left):
            await anyio.sleep(0.01)


async def judge(rounds: Rounds) -> None:
    found = {name: [_number(text) for text in texts] for name, texts in (await contents(rounds.server)).items()}
    for lane in LANES:
        assert found[lane] == [n for batch in rounds.appended[lane] for n in batch], lane
    by_client = found[CLIENT]
    for batch in rounds.sent:
        held = [n for n in by_client if n in batch]
        assert held in ([], batch), "torn"
        assert held or batch not in rounds.acknowledged, "lost"
    assert POISON not in found


def _number(text: str) -> Any:
    return json.loads(text).get("n")


@pytest.mark.anyio
@pytest.mark.contract("C4")
async def test_three_hundred_calls_cancelled_at_random_moments(server: ReferenceServer, tmp_path: Path) -> None:
    """Over all that can be awaited, on either loop."""
    await cancel_at_random(server, tmp_path, 300, seed=4)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_ten_thousand_calls_cancelled_at_random_moments(
    server: ReferenceServer, tmp_path: Path, seed: int
) -> None:
    """Five times a thousand on either loop."""
    await cancel_at_random(server, tmp_path, 1000, seed)


@pytest.mark.anyio
async def test_a_cancelled_close_can_be_made_up_for(server: ReferenceServer, tmp_path: Path) -> None:
    """The handle is closed and the rest is done without us: opened again at once, nothing is lost or sent twice."""
    for n in range(20):
        with anyio.fail_after(PATIENCE):
            log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
            log.conversation(LANES[0]).append({"n": n})
            with anyio.move_on_after(n * 0.0005):
                await log.close()
            assert log.closed
            async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as again:
                await again.conversation(LANES[1]).append({"n": n}).acknowledged()
    await settled()
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            while not (await log.flush()).complete:
                await anyio.sleep(0.01)
    found = await contents(server)
    for lane in LANES[:2]:
        assert sorted(map(_number, found[lane])) == list(range(20))
