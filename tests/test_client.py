"""The client: one typed method per tool, verified answers, reads that are tried again and appends that are not."""

from __future__ import annotations

import json
from datetime import datetime

import anyio
import httpx
import pytest
import respx
from pydantic import BaseModel
from raw_server import McpStub, RawServer, tool_result

from memlog import limits
from memlog.client import Client
from memlog.errors import (
    AuthenticationError,
    ClosedError,
    ConnectionFailedError,
    ConversationFullError,
    InvalidConversationIdError,
    InvalidItemError,
    InvalidRequestError,
    MemlogError,
    ProtocolError,
    RateLimitedError,
    SequenceError,
    ServerError,
    TimedOutError,
    TooLargeError,
)
from memlog.models import Ack
from memlog.payload import encode_batch
from memlog.retry import NO_RETRY, RetryPolicy
from memlog.testing import ReferenceServer, reference_server

CHAT = "c_7f3a9b2e41"
BOUND = 10.0
QUICK = RetryPolicy(attempts=4, delay_min=0.001, delay_max=0.002)


def client_of(server: ReferenceServer, **options: object) -> Client:
    return Client(server.url, **{"auth": server.auth, "timeout": BOUND, "retry": QUICK, **options})


def answering(value: object) -> McpStub:
    return McpStub(lambda seen: seen.rpc(result=tool_result(value)))


def item(n: int, **more: object) -> dict[str, object]:
    return {"seq": n, "recorded_at": "2026-11-30T10:00:00.123456Z", "payload": {"n": n}, **more}


# -- the four tools against the reference server ---------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C7", "C10")
async def test_what_was_appended_is_replayed_recalled_and_listed(server: ReferenceServer):
    """C7, C10: ranges count on without a gap, one time of recording a batch, payloads as they were."""

    class Turn(BaseModel):
        role: str
        text: str

    turns = [
        {"role": "user", "text": "Привет 😀"},
        Turn(role="assistant", text="hi"),
        {"n": 1.50, "big": 2**70, "none": None},
    ]
    async with client_of(server) as client:
        assert await client.append_memory(CHAT, turns) == Ack(0, 2)
        assert await client.append_memory(CHAT, [{"a": [True, {"b": {}}]}]) == Ack(3, 3)
        items = await client.replay_memory(CHAT)
        assert [entry.seq for entry in items] == [0, 1, 2, 3]
        assert [entry.payload for entry in items] == [
            turns[0],
            turns[1].model_dump(),
            turns[2],
            {"a": [True, {"b": {}}]},
        ]
        assert isinstance(items[0].recorded_at, datetime)
        assert items[0].recorded_at == items[2].recorded_at
        assert items[0].recorded_at.utcoffset() is not None
        assert await client.replay_memory(CHAT, 1, 2) == items[1:3]
        assert await client.replay_memory(CHAT, 4) == []
        assert await client.recall_memory(CHAT, 2) == items[2:]
        (row,) = await client.list_conversations()
        assert (row.conversation_id, row.items, row.first_recorded_at) == (CHAT, 4, items[0].recorded_at)
        assert await client.list_conversations(after=CHAT) == []
        assert await client.replay_memory("c_unknown_one") == []


@pytest.mark.anyio
@pytest.mark.contract("C8")
async def test_replay_pages_to_the_end_of_the_log(server: ReferenceServer):
    """C8: 600 items come once and in order, whatever the pages."""
    async with client_of(server) as client:
        for start in range(0, 600, 200):
            await client.append_memory(CHAT, [{"n": n} for n in range(start, start + 200)])
        assert [entry.payload["n"] async for entry in client.replay(CHAT)] == list(range(600))
        assert [entry.payload["n"] async for entry in client.replay(CHAT, 595, limit=3)] == [595, 596, 597]


@pytest.mark.anyio
async def test_the_open_door_calls_any_tool(server: ReferenceServer):
    """Ours: arguments as an object in, the answer's object out."""
    async with client_of(server) as client:
        assert await client.call_tool("append_memory", {"conversation_id": CHAT, "items": [{"a": "é"}]}) == {
            "first_seq": 0,
            "last_seq": 0,
        }
        assert await client.call_tool("list_conversations", {"limit": 1}, timeout=5)
        with pytest.raises(InvalidRequestError):
            await client.call_tool("no_such_tool")
        with pytest.raises(InvalidItemError):
            await client.call_tool("append_memory", {"items": [float("nan")]})


@pytest.mark.anyio
@pytest.mark.contract("C1", "C2", "C3", "C4")
@pytest.mark.parametrize(
    ("conversation", "items", "cls"),
    [
        ("c_7chars"[:7], [{}], InvalidConversationIdError),
        ("c" * 65, [{}], InvalidConversationIdError),
        (CHAT + "\n", [{}], InvalidConversationIdError),
        (None, [{}], InvalidConversationIdError),
        (CHAT, [], TooLargeError),
        (CHAT, [{}] * 251, TooLargeError),
        (CHAT, [{"x": "y" * 262_144}], TooLargeError),
        (CHAT, [{"x": "y" * 262_000}] * 5, TooLargeError),
        (CHAT, [{}, "text"], InvalidItemError),
        (CHAT, [{"x": float("inf")}], InvalidItemError),
        (CHAT, [{"x": "\ud800"}], InvalidItemError),
    ],
)
async def test_what_the_contract_forbids_is_found_before_anything_is_sent(server, conversation, items, cls):
    """C1-C4: the caller's mistakes cost no request and leave the client as good as before."""
    async with client_of(server) as client:
        with pytest.raises(cls) as caught:
            await client.append_memory(conversation, items)
        assert caught.value.outcome == "not_sent"
        assert server.counters.methods.total() == 0
        assert await client.append_memory(CHAT, [{"fine": True}]) == Ack(0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tool", "limit"),
    [(tool, limit) for tool in ("replay_memory", "recall_memory") for limit in (0, 1001, -1, True, 1.0, "5", None)],
)
@pytest.mark.contract("C8")
async def test_a_limit_is_1_to_1000(tool, limit):
    """C8: a page of 0 could never be short, so it is never asked for."""
    async with Client("http://localhost:1/mcp") as client:
        with pytest.raises(ValueError, match="limit"):
            await getattr(client, tool)(CHAT, limit=limit)
        with pytest.raises(ValueError, match="limit"):
            await client.list_conversations(limit)
        with pytest.raises(ValueError, match="offset"):
            await client.replay_memory(CHAT, -1)


@pytest.mark.anyio
@pytest.mark.contract("C2", "C4")
async def test_batches_at_the_exact_limits_are_accepted(server: ReferenceServer):
    """C2: equal is allowed, for an item, a batch and the count."""
    async with client_of(server) as client:
        largest = {"x": "y" * (limits.ITEM_BYTES_MAX - 8)}
        assert await client.append_memory(CHAT, [largest] * 4) == Ack(0, 3)
        assert await client.append_memory(CHAT, [{}] * 250) == Ack(4, 253)
        assert (await client.replay_memory(CHAT, 0, 1))[0].payload == largest


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C9")
async def test_a_read_only_token_is_an_authentication_error(server: ReferenceServer):
    """C9: the server calls it unprocessable parameters; we know what we sent."""
    with reference_server(read_tokens=["reader"]) as other:
        async with Client(other.url, auth="reader", retry=QUICK) as client:
            for call in (client.append_memory(CHAT, [{}]), client.replay_memory(CHAT)):
                with pytest.raises(AuthenticationError) as caught:
                    await call
                assert (caught.value.code, caught.value.outcome) == ("unprocessable_parameters", "refused")
                assert "Basic" in str(caught.value)


@pytest.mark.anyio
async def test_a_wrong_password_is_an_authentication_error_and_not_tried_again(server: ReferenceServer):
    """Ours: an operator has to act, and the message does not hold the password."""
    async with client_of(server, auth=("demo", "hunter2")) as client:
        with pytest.raises(AuthenticationError) as caught:
            await client.replay_memory(CHAT)
    assert caught.value.status == 401
    assert "hunter2" not in f"{caught.value}{caught.value!r}{client!r}"


@pytest.mark.anyio
@pytest.mark.contract("C5", "C11")
async def test_a_rate_limit_is_raised_at_once_with_its_time(server: ReferenceServer):
    """C5, C11: permanent for this call, read or append; nothing is tried again behind the caller's back."""
    async with client_of(server) as client:
        await client.append_memory(CHAT, [{}])
        for call in (client.append_memory(CHAT, [{}]), client.replay_memory(CHAT)):
            server.faults.add("status", status=429, retry_after=17, times=1)
            with pytest.raises(RateLimitedError) as caught:
                await call
            assert (caught.value.retry_after, caught.value.status, caught.value.outcome) == (17.0, 429, "refused")
        assert (server.counters.calls["append_memory"], server.counters.calls["replay_memory"]) == (2, 1)
        assert len(await client.replay_memory(CHAT)) == 1


@pytest.mark.anyio
async def test_a_full_conversation_is_told_by_name():
    """append_memory: "the total number of items in a conversation cannot exceed 100,000" (a lower cap stands in)."""
    with reference_server(conversation_items_max=2) as server:
        async with client_of(server) as client:
            await client.append_memory(CHAT, [{}, {}])
            with pytest.raises(ConversationFullError) as caught:
                await client.append_memory(CHAT, [{}])
    assert (caught.value.conversation_id, caught.value.limit, caught.value.outcome) == (CHAT, 100_000, "refused")


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C6")
async def test_reads_are_tried_again_and_appends_are_not(server: ReferenceServer):
    """C6, ours: a lost answer costs a read nothing; an append is one attempt, its outcome is the caller's to judge."""
    async with client_of(server) as client:
        server.faults.add("drop", tool="append_memory", when="after")
        with pytest.raises(ConnectionFailedError) as caught:
            await client.append_memory(CHAT, [{"n": 1}])
        assert caught.value.outcome == "unknown"
        server.faults.add("drop", tool="replay_memory", times=2)
        server.faults.add("status", tool="recall_memory", status=503, retry_after=0, times=3)
        server.faults.add("cut", tool="list_conversations", times=1)
        assert [entry.payload for entry in await client.replay_memory(CHAT)] == [{"n": 1}]
        assert len(await client.recall_memory(CHAT)) == 1
        assert len(await client.list_conversations()) == 1


@pytest.mark.anyio
async def test_a_policy_given_with_a_read_beats_the_clients(server: ReferenceServer):
    """Ours: NO_RETRY is one attempt and its own error; the client's own policy ends with the last error."""
    async with client_of(server) as client:
        server.faults.add("status", status=503, times=1)
        with pytest.raises(ServerError):
            await client.replay_memory(CHAT, retry=NO_RETRY)
        assert await client.replay_memory(CHAT) == []
        fault = server.faults.add("status", status=502, times=None)
        with pytest.raises(ServerError) as caught:
            await client.recall_memory(CHAT)
        assert caught.value.status == 502
        assert fault.struck == QUICK.attempts


@pytest.mark.anyio
async def test_a_server_that_stalls_is_timed_out_and_the_client_lives(server: ReferenceServer):
    """Ours: the deadline is absolute, and the outcome of what was sent unknown."""
    async with client_of(server, timeout=0.3) as client:
        await client.append_memory(CHAT, [{}])
        server.faults.add("stall", tool="append_memory", seconds=None)
        with pytest.raises(TimedOutError) as caught:
            await client.append_memory(CHAT, [{}])
        server.faults.clear()
        assert caught.value.outcome == "unknown"
        assert len(await client.replay_memory(CHAT)) in (1, 2)


@pytest.mark.anyio
async def test_event_streams_are_as_good_as_json(server: ReferenceServer):
    """Ours: the same values either way."""
    async with client_of(server) as client:
        server.faults.add("sse", times=None)
        assert await client.append_memory(CHAT, [{"é": "\u2028"}]) == Ack(0, 0)
        assert (await client.replay_memory(CHAT))[0].payload == {"é": "\u2028"}


@pytest.mark.anyio
async def test_a_restarted_server_is_found_again(server: ReferenceServer):
    """Ours: nothing in the client has to be renewed by hand."""
    async with client_of(server) as client:
        await client.append_memory(CHAT, [{}])
        server.stop()
        with pytest.raises(ConnectionFailedError) as caught:
            await client.append_memory(CHAT, [{}])
        assert caught.value.outcome == "not_sent"
        server.start()
        assert await client.append_memory(CHAT, [{}]) == Ack(1, 1)


@pytest.mark.anyio
async def test_a_cancelled_call_leaves_the_client_whole(server: ReferenceServer):
    """Ours: after any number of cancellations at any point the next call is answered."""
    async with client_of(server) as client:
        await client.append_memory(CHAT, [{}])
        for step in range(40):
            with anyio.move_on_after(step * 0.0005):
                await client.replay_memory(CHAT)
        assert len(await client.replay_memory(CHAT)) == 1


@pytest.mark.anyio
async def test_one_client_serves_many_tasks(server: ReferenceServer):
    """Ours: 64 appends at once to 8 conversations, and each is there once."""
    async with client_of(server) as client:
        async with anyio.create_task_group() as group:
            for n in range(64):
                group.start_soon(client.append_memory, f"c_many_{n % 8:02}", [{"n": n}])
        found = [entry.payload["n"] for chat in range(8) for entry in await client.replay_memory(f"c_many_{chat:02}")]
    assert sorted(found) == list(range(64))


@pytest.mark.anyio
async def test_after_close_every_call_says_so(server: ReferenceServer):
    """Ours: closing twice is fine."""
    client = client_of(server)
    await client.append_memory(CHAT, [{}])
    await client.close()
    await client.close()
    with pytest.raises(ClosedError):
        await client.replay_memory(CHAT)


def test_making_a_client_needs_neither_a_loop_nor_a_network():
    """Ours: the constructor checks its arguments and does nothing else."""
    Client("https://memory.invalid/mcp", auth=("u", "p"))
    with pytest.raises(ValueError, match="allow_insecure"):
        Client("http://memory.example/mcp", auth=("u", "p"))


def test_one_client_can_serve_one_loop_after_another_when_closed_between(server: ReferenceServer):
    """Ours: a client per loop is the rule; making one is cheap."""
    for backend in ("asyncio", "trio"):

        async def use() -> Ack:
            async with client_of(server) as client:
                return await client.append_memory(CHAT, [{}])

        assert isinstance(anyio.run(use, backend=backend), Ack)


# -- answers that the contract does not allow ------------------------------------------------------------------------

ACKS = [
    {},
    {"first_seq": 0},
    {"first_seq": 0, "last_seq": 1},
    {"first_seq": 1, "last_seq": 0},
    {"first_seq": -1, "last_seq": -1},
    {"first_seq": True, "last_seq": True},
    {"first_seq": "0", "last_seq": "0"},
    {"first_seq": 0.0, "last_seq": 0.0},
    {"first_seq": None, "last_seq": None},
]


@pytest.mark.anyio
@pytest.mark.contract("C7")
@pytest.mark.parametrize("ack", ACKS)
async def test_an_acknowledgement_that_does_not_fit_is_no_acknowledgement(ack):
    """C7: the outcome is unknown then, and never taken for stored."""
    with RawServer(answering(ack)) as server:
        async with Client(server.url) as client:
            batch = encode_batch([{"a": 1}])
            with pytest.raises(ProtocolError) as caught:
                await client.append_encoded(CHAT, batch.body, batch.items)
    assert (caught.value.outcome, caught.value.status) == ("unknown", None)


PAGES: dict[str, tuple[object, type[MemlogError]]] = {
    "starts late": ([item(1)], SequenceError),
    "has a gap": ([item(0), item(2)], SequenceError),
    "repeats": ([item(0), item(0)], SequenceError),
    "descends": ([item(1), item(0)], SequenceError),
    "too long": ([item(n) for n in range(4)], SequenceError),
    "a sequence number as text": ([item(0, seq="0")], ProtocolError),
    "a sequence number that is null": ([item(0, seq=None)], ProtocolError),
    "a boolean": ([item(0, seq=False)], ProtocolError),
    "no time": ([item(0, recorded_at=None)], ProtocolError),
    "a time as a number": ([item(0, recorded_at=1_700_000_000)], ProtocolError),
    "a payload that is no object": ([item(0, payload="hi")], ProtocolError),
    "no payload": ([{"seq": 0, "recorded_at": "2026-11-30T10:00:00Z"}], ProtocolError),
    "no list": ({"0": item(0)}, ProtocolError),
    "null": (None, ProtocolError),
}


@pytest.mark.anyio
@pytest.mark.contract("C7", "C8")
@pytest.mark.parametrize("name", PAGES)
async def test_a_page_that_contradicts_the_contract_is_an_error_and_never_a_short_page(name):
    """C7, C8: order, start, gaps and length are checked, and no payload is quoted."""
    page, cls = PAGES[name]
    with RawServer(answering({"items": page})) as server:
        async with Client(server.url, retry=NO_RETRY) as client:
            with pytest.raises(MemlogError) as caught:
                await client.replay_memory(CHAT, 0, 3)
    assert type(caught.value) is cls
    assert "hi" not in str(caught.value).split()


@pytest.mark.anyio
async def test_fields_that_are_not_known_are_no_reason_to_fail():
    """C10: a newer server may say more."""
    row = {"conversation_id": CHAT, "items": 3, "title": "x", "first_recorded_at": "2026-11-30T10:00:00Z"}
    with RawServer(
        answering({"items": [item(0, shard=7)], "conversations": [row, {"conversation_id": "c_only_an_id"}], "next": 1})
    ) as server:
        async with Client(server.url) as client:
            assert (await client.replay_memory(CHAT))[0].payload == {"n": 0}
            first, second = await client.list_conversations()
    assert (first.extra, first.items, second.items) == ({"title": "x"}, 3, None)


@pytest.mark.anyio
@pytest.mark.contract("C10")
@pytest.mark.parametrize("order", [[5, 6, 7], [7, 6, 5]])
async def test_recall_ascends_whatever_the_servers_order(order):
    """C10: recall has no public schema; either order is read, a gap is not."""
    with RawServer(answering({"items": [item(n) for n in order]})) as server:
        async with Client(server.url) as client:
            assert [entry.seq for entry in await client.recall_memory(CHAT)] == [5, 6, 7]
            server.answer = answering({"items": [item(7), item(5)]})
            with pytest.raises(SequenceError):
                await client.recall_memory(CHAT)


# -- what users mock -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@respx.mock
async def test_a_proxys_page_is_a_protocol_error_that_asks_about_the_address():
    """Ours: with respx, as users test; the page itself is not quoted."""
    respx.post("https://memory.example/").respond(200, html="<h1>It works!</h1>")
    async with Client("https://memory.example/", auth=("u", "p"), retry=NO_RETRY) as client:
        with pytest.raises(ProtocolError) as caught:
            await client.append_memory(CHAT, [{}])
    assert (caught.value.status, caught.value.outcome) == (200, "not_sent")
    assert "works" not in str(caught.value)


@pytest.mark.anyio
async def test_a_given_transport_is_the_network():
    """Ours: the seam for tests without a socket."""

    def handle(request: httpx.Request) -> httpx.Response:
        message = json.loads(request.content)
        result: dict[str, object] = {"supportedVersions": ["2026-07-28"]}
        if message["method"] == "tools/call":
            result = tool_result({"first_seq": 8, "last_seq": 8})
        return httpx.Response(200, json={"jsonrpc": "2.0", "id": message["id"], "result": result})

    async with Client("https://memory.example/mcp", transport=httpx.MockTransport(handle)) as client:
        assert await client.append_memory(CHAT, [{}]) == Ack(8, 8)
