"""Misbehaviour on demand: each fault over a real socket, exactly as often as ordered."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from server_helpers import CHAT, Caller, in_process, over_sockets, socket_caller

from server_reference import Faults, create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio

APPEND = json.dumps({"conversation_id": CHAT, "items": [{"n": 1}]})


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[Caller, Any]]:
    """A caller over a socket, and the state of the application it calls."""
    app = create_app(allow_faults=True)
    with over_sockets(app) as url:
        async with socket_caller(url) as caller:
            yield caller, app.state


async def append(caller: Caller) -> httpx.Response:
    return await caller.raw_call("append_memory", APPEND)


async def test_nothing_happens_that_was_not_ordered(served: tuple[Caller, Any]) -> None:
    """Ours: a server without faults is exact, and counts what it is asked."""
    caller, state = served
    for n in range(3):
        assert await caller.append({}) == {"first_seq": n, "last_seq": n}
    assert len(await caller.replay()) == 3
    assert state.counters.calls == {"append_memory": 3, "replay_memory": 1}
    assert state.counters.methods == {"tools/call": 4}


@pytest.mark.parametrize(("when", "stored"), [("before", 0), ("after", 1)])
async def test_a_status_is_answered_before_or_after_the_commit(
    served: tuple[Caller, Any], when: Any, stored: int
) -> None:
    """Ours: with Retry-After and a JSON-RPC error body; the call after the last ordered one is answered well."""
    caller, state = served
    fault = state.faults.add("status", tool="append_memory", status=503, retry_after=2, when=when)
    answer = await append(caller)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert (answer.json()["id"], answer.json()["error"]["code"]) == (1, -31503)
    assert len(await caller.replay()) == stored
    assert await caller.append({}) == {"first_seq": stored, "last_seq": stored}
    assert fault.struck == 1


async def test_a_status_may_have_any_body_and_any_retry_after(served: tuple[Caller, Any]) -> None:
    """Ours: what proxies answer is no JSON-RPC, and dates are allowed in Retry-After."""
    caller, state = served
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    state.faults.add("status", status=502, body="<html>é</html>", content_type="text/html", retry_after=date)
    answer = await append(caller)
    assert (answer.status_code, answer.text) == (502, "<html>é</html>")
    assert (answer.headers["content-type"], answer.headers["retry-after"]) == ("text/html", date)
    state.faults.add("status", status=204)
    answer = await append(caller)
    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize(("when", "stored"), [("before", 0), ("after", 1)])
async def test_a_dropped_connection_carries_no_byte_of_an_answer(
    served: tuple[Caller, Any], when: Any, stored: int
) -> None:
    """Ours: closed before or after the commit; other connections and the next call are not affected."""
    caller, state = served
    state.faults.add("drop", tool="append_memory", when=when)
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        await append(caller)
    assert len(await caller.replay()) == stored
    await caller.append({})


async def test_a_connection_cut_inside_the_answer_is_seen_as_cut(served: tuple[Caller, Any]) -> None:
    """Ours: the head and half of the body arrive, the append is committed."""
    caller, state = served
    state.faults.add("cut", tool="append_memory")
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete"):
        await append(caller)
    assert len(await caller.replay()) == 1


async def test_a_dropped_connection_is_an_error_of_the_in_process_transport_too() -> None:
    """Ours: there is no socket to close, so the caller gets the error itself."""
    app = create_app()
    async with in_process(app=app) as caller:
        app.state.faults.add("drop", when="after")
        with pytest.raises(ConnectionResetError):
            await append(caller)
        assert len(await caller.replay()) == 1
    app.state.store.close()


async def test_a_stall_without_an_end_lasts_until_the_faults_are_cleared(served: tuple[Caller, Any]) -> None:
    """Ours: then the stalled call goes on as if nothing was; other calls do not wait behind it."""
    caller, state = served
    fault = state.faults.add("stall", tool="append_memory", seconds=None)
    stalled = asyncio.create_task(append(caller))
    async with asyncio.timeout(5):
        while not fault.struck:
            await asyncio.sleep(0.005)
        assert await caller.replay() == []
        assert not stalled.done()
        state.faults.clear()
        assert (await stalled).json()["result"]["isError"] is False


async def test_a_stall_of_a_length_ends_by_itself(served: tuple[Caller, Any]) -> None:
    """Ours: the caller that waits long enough gets its answer."""
    caller, state = served
    state.faults.add("stall", seconds=0.05)
    async with asyncio.timeout(5):
        assert await caller.append({}) == {"first_seq": 0, "last_seq": 0}


async def test_an_ack_can_be_wrong_or_missing(served: tuple[Caller, Any]) -> None:
    """Ours: the append itself is carried out."""
    caller, state = served
    state.faults.add("wrong_ack", shift=2)
    assert await caller.append({}, {}) == {"first_seq": 2, "last_seq": 3}
    state.faults.add("no_ack")
    assert await caller.append({}) == {}
    assert await caller.append({}) == {"first_seq": 3, "last_seq": 3}


async def test_an_answer_can_come_as_an_event_stream(served: tuple[Caller, Any]) -> None:
    """Ours: one message event that holds the same answer; the connection stays usable."""
    caller, state = served
    state.faults.add("sse", tool="append_memory")
    answer = await append(caller)
    assert answer.headers["content-type"] == "text/event-stream"
    event, data, *rest = answer.text.split("\n")
    assert (event, rest) == ("event: message", ["", ""])
    assert json.loads(data.removeprefix("data: "))["result"]["structuredContent"] == {"first_seq": 0, "last_seq": 0}


async def test_faults_of_one_kind_strike_one_after_another_and_kinds_combine(served: tuple[Caller, Any]) -> None:
    """Ours: two orders of a status are two calls; a wrong ack may come as an event stream."""
    caller, state = served
    state.faults.add("status", status=503, times=2)
    state.faults.add("status", status=500)
    state.faults.add("wrong_ack", tool="append_memory", times=1)
    statuses = [(await append(caller)).status_code for _ in range(4)]
    assert statuses == [503, 503, 500, 200]
    state.faults.clear()
    state.faults.add("sse")
    state.faults.add("wrong_ack", shift=10)
    assert '"first_seq":11' in (await append(caller)).text.replace("\\", "")


async def test_a_fault_of_one_tool_or_method_leaves_the_others_alone(served: tuple[Caller, Any]) -> None:
    """Ours: None means every tool call, and no other request."""
    caller, state = served
    listing = '{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
    state.faults.add("status", tool="replay_memory", status=500)
    state.faults.add("status", tool="tools/list", status=501)
    assert (await append(caller)).status_code == 200
    assert (await caller.post(listing)).status_code == 501
    assert (await caller.post(listing)).status_code == 200
    state.faults.clear()
    state.faults.add("status", status=502)
    assert (await caller.post(listing)).status_code == 200
    assert (await append(caller)).status_code == 502


async def test_the_dice_of_a_probability_fall_the_same_for_the_same_seed() -> None:
    """Ours: a failing run can be run again."""

    def run(seed: int) -> list[bool]:
        faults = Faults()
        faults.add("status", probability=0.3, seed=seed, times=None)
        return [bool(faults.of_call("append_memory", is_tool=True)) for _ in range(200)]

    assert run(7) == run(7) != run(8)
    assert 30 < sum(run(7)) < 90


async def test_faults_can_be_ordered_listed_and_ended_over_http(served: tuple[Caller, Any]) -> None:
    """Ours: with the credentials of the tools; only where they are allowed."""
    caller, _ = served
    order = {"kind": "status", "tool": "append_memory", "status": 503, "retry_after": 1, "times": 2}
    assert (await caller.client.post("/faults", json=order)).status_code == 204
    assert (await append(caller)).status_code == 503
    (listed,) = (await caller.client.get("/faults")).json()["faults"]
    assert listed.items() >= (order | {"struck": 1}).items()
    assert (await caller.client.delete("/faults")).status_code == 204
    assert (await caller.client.get("/faults")).json() == {"faults": []}
    assert (await append(caller)).status_code == 200
    assert (await caller.client.get("/faults", auth=("demo", "wrong"))).status_code == 401


@pytest.mark.parametrize(
    "order",
    [
        {},
        [],
        {"kind": "explode"},
        {"kind": "status", "status": 99},
        {"kind": "status", "status": True},
        {"kind": "status", "retry_after": "1\r\nx: y"},
        {"kind": "status", "content_type": ""} | {"content_type": 7},
        {"kind": "status", "times": 0},
        {"kind": "status", "probability": 2},
        {"kind": "status", "when": "later"},
        {"kind": "sse", "when": "after"},
        {"kind": "stall", "seconds": -1},
        {"kind": "stall", "seconds": "1"},
        {"kind": "status", "tool": 7},
        {"kind": "status", "struck": 1},
        {"kind": "status", "unknown": 1},
        {"kind": "wrong_ack", "shift": 0.5},
    ],
)
async def test_an_order_that_is_none_is_refused(order: Any) -> None:
    """Ours: a fault that silently never strikes would be a test that cannot fail."""
    async with in_process(allow_faults=True) as caller:
        assert (await caller.client.post("/faults", json=order)).status_code == 400
        assert (await caller.client.get("/faults")).json() == {"faults": []}


async def test_the_highest_concurrency_is_counted_by_conversation(served: tuple[Caller, Any]) -> None:
    """Ours: so that a test can tell that a client keeps to one request in flight for each conversation."""
    caller, state = served
    state.faults.add("stall", tool="append_memory", seconds=None, times=3)
    both = json.dumps({"conversation_id": "another_one", "items": [{}]})
    calls = [asyncio.create_task(append(caller)) for _ in range(2)]
    calls.append(asyncio.create_task(caller.raw_call("append_memory", both)))
    async with asyncio.timeout(5):
        while state.counters.in_flight_max < 3:
            await asyncio.sleep(0.005)
        state.faults.clear()
        await asyncio.gather(*calls)
    await append(caller)
    assert state.counters.in_flight_max == 3
    assert state.counters.in_flight_max_by_conversation == {CHAT: 2, "another_one": 1}
