"""Cancelling any await of the API, at any moment: a batch is wholly in or wholly out, and what comes next works.

Each round appends a batch, starts one of the calls and cancels it after a random while, from "not even begun" to "long
done". At the end the server must hold every batch once, whole, and nobody may still run for the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import random
import threading
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from between import Between, Call
from books import PATIENCE, QUICK, contents

from memlog import Client, Conversation, DeadLetter, MemoryLog, Receipt, Record, Replay, TeamClient, engine, open_log
from memlog.errors import MemlogError
from memlog.replay import Listing, Pages
from memlog.team import Export, History
from memlog.testing import reference_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable
    from pathlib import Path

    from memlog.testing import ReferenceServer

LANES = [f"c_lane000{n}" for n in range(4)]
CLOSED = "c_closed00"
CLIENT = "c_client00"
POISON = "c_poison00"
REQUEUED = "c_requeued"
TOKEN = "token-of-vasya"
NEVER_WAITS = {
    "MemoryLog.__aenter__",
    "Client.__aenter__",
    "TeamClient.__aenter__",
    *(f"{kind}.{name}" for kind in ("Replay", "History", "Export") for name in ("close", "aclose")),
}


class Rounds:
    """What a round may call, and the books of what was appended."""

    def __init__(self, server: ReferenceServer, team_url: str, directory: Path, seed: int) -> None:
        self.server = server
        self.team_url = team_url
        self.directory = directory
        self.random = random.Random(seed)
        self.appended: dict[str, list[list[int]]] = {lane: [] for lane in (*LANES, CLOSED)}
        self.sent: list[list[int]] = []
        self.acknowledged: list[list[int]] = []
        self.letters: list[DeadLetter] = []
        self.poison: set[int] = set()
        self.requeued: list[int] = []
        self.records: list[Record] = []
        self.written: set[str] = set()
        self.asked: list[str] = []
        self.cancelled: Counter[str] = Counter()
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

    def open_other(self) -> MemoryLog:
        """A log of its own, whose last handle this is; taken up again by the next one."""
        where = self.directory / "other"
        return open_log(self.server.url, auth=self.server.auth, buffer_dir=where, retry=QUICK, flush_timeout=0.01)

    def append(self, chat: Conversation) -> Receipt:
        """A batch of one to three numbers, all of them new."""
        batch = self.batch()
        self.appended[chat.id].append(batch)
        return chat.extend([{"n": n} for n in batch])

    def batch(self) -> list[int]:
        batch = list(range(self.number, self.number + self.random.randint(1, 3)))
        self.number += len(batch)
        return batch

    def calls(self, log: MemoryLog, client: Client, team: TeamClient) -> dict[str, Callable[[], Awaitable[object]]]:
        """One for every await of the API, named after it; after a comma, in what state of things."""
        chat = log.conversation(self.random.choice(LANES))
        receipt = self.append(chat)
        return {
            "MemoryLog.flush": log.flush,
            "MemoryLog.flush, to disk": lambda: log.flush(until="stored"),
            "MemoryLog.check": log.check,
            "MemoryLog.dead_letters": log.dead_letters,
            "MemoryLog.duplicates": log.duplicates,
            "MemoryLog.requeue": lambda: self.requeue(log),
            "MemoryLog.drop": lambda: log.drop(self.letters.pop()),
            "MemoryLog.close": lambda: self.close(self.open_again(log)),
            "MemoryLog.close, the last": lambda: self.close(self.open_other(), append=True),
            "MemoryLog.__aexit__": self.leave,
            "Receipt.stored": lambda: self.append(chat).stored(),
            "Receipt.stored, recalled": lambda: log.receipt(receipt.id).stored(),
            "Receipt.__await__": lambda: self.append(chat),
            "Receipt.acknowledged": receipt.acknowledged,
            "Receipt.acknowledged, recalled": lambda: log.receipt(receipt.id).acknowledged(),
            "Receipt.acknowledged, refused": lambda: self.refused(log),
            "Conversation.recall": chat.recall,
            "Replay.__anext__": lambda: through(chat.replay()),
            "Replay.__anext__, following": lambda: through(chat.replay(follow=True)),
            "Replay.__anext__, of a client": lambda: through(client.replay(CLIENT)),
            "Pages.__anext__": lambda: through(chat.replay().pages()),
            "Listing.__anext__": lambda: through(log.list_conversations()),
            "Client.append_memory": lambda: self.append_by(client),
            "Client.append_encoded": lambda: self.append_by(client, encoded=True),
            "Client.replay_memory": lambda: client.replay_memory(CLIENT),
            "Client.replay_page": lambda: client.replay_page(CLIENT, 0, 10),
            "Client.recall_memory": lambda: client.recall_memory(CLIENT),
            "Client.list_conversations": client.list_conversations,
            "Client.call_tool": lambda: client.call_tool("list_conversations", {"limit": 1}),
            "Client.close": lambda: self.use_and_close(Client(self.server.url, auth=self.server.auth, retry=QUICK)),
            "Client.__aexit__": lambda: use(Client(self.server.url, auth=self.server.auth, retry=QUICK)),
            "TeamClient.save": lambda: self.save(team),
            "TeamClient.update": lambda: self.update(team),
            "TeamClient.delete": lambda: self.delete(team),
            "TeamClient.get": lambda: team.get(self.records[0].id),
            "TeamClient.happened": lambda: team.happened(request_id=self.asked[0]),
            "TeamClient.memory_history": lambda: team.memory_history(self.records[0].id),
            "TeamClient.scopes": team.scopes,
            "TeamClient.call_tool": lambda: team.call_tool("memory_scopes", {}),
            "TeamClient.close": lambda: self.use_and_close(TeamClient(self.team_url, token=TOKEN, retry=QUICK)),
            "TeamClient.__aexit__": lambda: use(TeamClient(self.team_url, token=TOKEN, retry=QUICK)),
            "History.__anext__": lambda: through(team.history(self.records[0].id)),
            "Export.__anext__": lambda: through(team.export()),
        }

    def open_again(self, log: MemoryLog) -> MemoryLog:
        """A second handle: the first one keeps the log open."""
        return open_log(
            self.server.url,
            auth=self.server.auth,
            buffer_dir=self.directory,
            retry=QUICK,
            flush_timeout=0.01,
            transport=log._core.settings.transport,
        )

    async def close(self, log: MemoryLog, *, append: bool = False) -> None:
        if append:
            self.append(log.conversation(CLOSED))
        try:
            await log.close()
        finally:
            assert log.closed

    async def leave(self) -> None:
        async with self.open_other() as log:
            self.append(log.conversation(CLOSED))

    async def refused(self, log: MemoryLog) -> None:
        [number] = self.batch()[:1]
        self.poison.add(number)
        await log.conversation(POISON).append({"n": number}).acknowledged()

    async def requeue(self, log: MemoryLog) -> None:
        letter = self.letters.pop()
        await log.requeue(letter, conversation_id=REQUEUED)
        self.requeued += [payload["n"] for payload in letter.payloads]

    async def append_by(self, client: Client, *, encoded: bool = False) -> None:
        batch = self.batch()
        self.sent.append(batch)
        if encoded:
            body = b",".join(json.dumps({"n": n}).encode() for n in batch)
            await client.append_encoded(CLIENT, body, len(batch))
        else:
            await client.append_memory(CLIENT, [{"n": n} for n in batch])
        self.acknowledged.append(batch)

    async def use_and_close(self, client: Client | TeamClient) -> None:
        try:
            await first_call(client)
        finally:
            await client.close()

    async def save(self, team: TeamClient) -> None:
        self.asked.append(str(uuid.uuid4()))
        text = f"the number is {self.batch()[0]}"
        self.records.append(await team.save(text, request_id=self.asked[-1]))
        self.written.add(self.asked[-1])

    async def update(self, team: TeamClient) -> None:
        old = self.records.pop()
        self.asked.append(str(uuid.uuid4()))
        new = f"now it is {self.batch()[0]}"
        about = {"expected_revision": old.revision, "reason": "it changed", "request_id": self.asked[-1]}
        self.records.append(await team.update(old.id, new, **about))
        self.written.add(self.asked[-1])

    async def delete(self, team: TeamClient) -> None:
        old = self.records.pop()
        self.asked.append(str(uuid.uuid4()))
        await team.delete(old.id, expected_revision=old.revision, reason="it is over", request_id=self.asked[-1])
        self.written.add(self.asked[-1])

    async def provide(self, log: MemoryLog, team: TeamClient) -> None:
        """What the calls of a pass use up: dead letters and records."""
        await log.conversation(LANES[0]).append({"n": -2}).acknowledged(PATIENCE)
        self.appended[LANES[0]].append([-2])
        while len(self.letters) < 2:
            with contextlib.suppress(MemlogError):
                await self.refused(log)
            self.letters = await log.dead_letters()
        while len(self.records) < 3:
            await self.save(team)


async def through(entries: AsyncIterable[object]) -> None:
    async for _ in entries:
        pass


async def first_call(client: Client | TeamClient) -> None:
    await (client.scopes() if isinstance(client, TeamClient) else client.recall_memory(CLIENT))


async def use(client: Client | TeamClient) -> None:
    async with client:
        await first_call(client)


async def cancel_at_random(server: ReferenceServer, directory: Path, cancellations: int, seed: int) -> None:
    with reference_server(team_tokens={TOKEN: "vasya"}) as team_server:
        rounds = Rounds(server, team_server.url, directory, seed)
        log = rounds.open()
        async with (
            Client(server.url, auth=server.auth, retry=QUICK) as client,
            TeamClient(team_server.url, token=TOKEN, retry=QUICK) as team,
        ):
            await log.conversation(LANES[0]).append({"n": -1}).acknowledged(PATIENCE)
            rounds.appended[LANES[0]].append([-1])
            threads = threading.active_count()
            passes = 0
            with anyio.fail_after(PATIENCE + cancellations):
                while rounds.cancelled.total() < cancellations:
                    await rounds.provide(log, team)
                    names = list(rounds.calls(log, client, team))
                    for name in rounds.random.sample(names, len(names)):
                        delay = rounds.random.random() * rounds.random.choice([0.002, 0.02]) if passes % 2 else 0.0
                        await cancelled(rounds, name, rounds.calls(log, client, team)[name], delay)
                    passes += 1
            assert set(rounds.cancelled) == set(names)
            await go_on(rounds, log, client, team)
            assert threading.active_count() <= threads + 1  # the callbacks' may have started
            await judge_team(rounds, team)
        statistics = log.statistics()
        places = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
        assert statistics.stored_items == sum(getattr(statistics, f"{place}_items") for place in places)
        assert log._core.handles == 1
        await log.close()
        await settled()
        await judge(rounds)


async def cancelled(rounds: Rounds, name: str, call: Callable[[], Awaitable[object]], delay: float) -> None:
    with anyio.fail_after(PATIENCE):
        with anyio.move_on_after(delay) as scope:
            with contextlib.suppress(MemlogError):  # refused, say
                await call()
        rounds.cancelled[name] += scope.cancelled_caught


async def go_on(rounds: Rounds, log: MemoryLog, client: Client, team: TeamClient) -> None:
    """The next append works, and so does a call of each kind."""
    assert (await client.append_memory(CLIENT, [{"n": -3}])).last_seq >= 0
    await rounds.save(team)
    with anyio.fail_after(PATIENCE):
        for lane in LANES:
            rounds.appended[lane].append([-3])
            await log.conversation(lane).append({"n": -3}).acknowledged()
        async with rounds.open_other() as other:
            rounds.append(other.conversation(CLOSED))
            for each in (log, other):
                while not (await each.flush()).complete:
                    await anyio.sleep(0.01)


async def settled() -> None:
    """No task of ours is left in the engine's loop."""

    async def left() -> list[str]:
        own = asyncio.current_task()
        return [str(task.get_coro()) for task in asyncio.all_tasks() if task is not own]

    with anyio.fail_after(PATIENCE):
        while await engine.running().call(left):
            await anyio.sleep(0.01)


async def judge(rounds: Rounds) -> None:
    found = {name: [json.loads(text)["n"] for text in texts] for name, texts in (await contents(rounds.server)).items()}
    for lane, batches in rounds.appended.items():
        assert found[lane] == [n for batch in batches for n in batch], lane
    by_client = found[CLIENT]
    for batch in rounds.sent:
        held = [n for n in by_client if n in batch]
        assert held in ([], batch), "torn"
        assert held or batch not in rounds.acknowledged, "lost"
    assert POISON not in found
    requeued = found.get(REQUEUED, [])
    assert set(rounds.requeued) <= set(requeued) <= rounds.poison
    assert len(requeued) == len(set(requeued)), "twice"


async def judge_team(rounds: Rounds, team: TeamClient) -> None:
    for request_id in rounds.asked:
        happened = await team.happened(request_id=request_id)
        assert happened or request_id not in rounds.written, "lost"
    texts = [record.content async for record in team.export()]
    assert len(texts) == len(set(texts)), "twice"


def test_every_await_of_the_api_is_among_them(server: ReferenceServer, tmp_path: Path) -> None:
    """One that is added must be cancelled, too."""
    kinds = (MemoryLog, Receipt, Conversation, Replay, Pages, Listing, Client, TeamClient, History, Export)
    waits = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, member in inspect.getmembers(kind)
        if name == "__await__"
        or (inspect.iscoroutinefunction(member) and (name.startswith("__") or not name.startswith("_")))
    }
    rounds = Rounds(server, server.url, tmp_path, 0)
    log = rounds.open()
    called = rounds.calls(log, Client(server.url), TeamClient(server.url, token=TOKEN))
    assert {name.partition(",")[0] for name in called} == waits - NEVER_WAITS
    log.sync.close()


def test_what_is_not_among_them_does_not_wait(server: ReferenceServer, tmp_path: Path) -> None:
    """It returns at its first step, so that no cancellation can come in between."""
    log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path)
    team = TeamClient(server.url, token=TOKEN)
    readers = (log.conversation(LANES[0]).replay(), team.history(1), team.export())
    entered = (log, Client(server.url), team)
    calls = [*(one.__aenter__() for one in entered), *(call() for one in readers for call in (one.close, one.aclose))]
    assert len(calls) == len(NEVER_WAITS)
    for call in calls:
        with pytest.raises(StopIteration):
            call.send(None)
    log.sync.close()


@pytest.mark.anyio
@pytest.mark.contract("C4")
async def test_a_hundred_calls_cancelled_at_random_moments(server: ReferenceServer, tmp_path: Path) -> None:
    """Over all that can be awaited, on either loop."""
    await cancel_at_random(server, tmp_path, 100, seed=4)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_ten_thousand_calls_cancelled_at_random_moments(
    server: ReferenceServer, tmp_path: Path, seed: int
) -> None:
    """Five times a thousand on either loop, not counting those that were done before."""
    await cancel_at_random(server, tmp_path, 1000, seed)


@pytest.mark.anyio
async def test_a_cancelled_close_can_be_made_up_for(server: ReferenceServer, tmp_path: Path) -> None:
    """The handle is closed and the rest is done without us: opened again at once, all comes once and in order.

    The log that is opened then takes up the same file; it used to begin a second one, which could overtake the first.
    """
    for n in range(20):
        with anyio.fail_after(PATIENCE):
            log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
            log.conversation(LANES[0]).append({"n": 2 * n})
            with anyio.move_on_after(n * 0.0005):
                await log.close()
            assert log.closed
            async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as again:
                await again.conversation(LANES[0]).append({"n": 2 * n + 1}).acknowledged()
    await settled()
    found = await contents(server)
    assert [json.loads(text)["n"] for text in found[LANES[0]]] == list(range(40))
    assert len(list(tmp_path.glob("*/*.db"))) == 1
