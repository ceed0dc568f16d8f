"""The team client: the history of a record, page by page and as a whole."""

from __future__ import annotations

import json

import pytest
from raw_server import McpStub, RawServer, Seen

from memlog.errors import (
    AuthenticationError,
    InvalidRequestError,
    MemlogError,
    ProtocolError,
    SequenceError,
    ServerError,
)
from memlog.retry import NO_RETRY, RetryPolicy
from memlog.team import TeamClient
from memlog.testing import reference_server

QUICK = RetryPolicy(attempts=3, delay_min=0.001, delay_max=0.002)
SCOPE = {"kind": "team", "team_id": "engineering"}


def event(n: int, **more: object) -> dict[str, object]:
    return {
        "sequence": n,
        "record_id": 812,
        "at": "2026-09-25T09:14:02.118Z",
        "operation": "update",
        "actor": {"user_id": "vasya", "display_name": "Vasya", "client": "codex", "org_role": "member"},
        "reason": "",
        "revision": 1,
        "before_state": None,
        "after_state": {"id": 812, "status": "active", "superseded_by": None},
        **more,
    }


def as_text(value: object, *, error: bool = False):
    return lambda seen: seen.rpc(
        result={"content": [{"type": "text", "text": json.dumps(value, indent=2)}], "isError": error}
    )


@pytest.mark.anyio
@pytest.mark.contract("C12")
async def test_a_history_is_read_to_its_end_across_gaps_and_pages(tmp_path):
    """C12: pages of 50 by exclusive `after`, ascending with gaps, the end is a short page."""
    records = tmp_path / "records.jsonl"
    sequences = list(range(3, 3 + 7 * 120, 7))
    records.write_text("".join(json.dumps(event(n)) + "\n" for n in sequences))
    with reference_server(team_tokens={"token-of-vasya": "vasya"}, records=records) as server:
        async with TeamClient(server.url, token="token-of-vasya", retry=QUICK) as team:
            page = await team.memory_history(812)
            assert [one.sequence for one in page] == sequences[:50]
            assert (await team.memory_history(812, after=page[-1].sequence, limit=1))[0].sequence == sequences[50]
            assert await team.memory_history(812, after=sequences[-1]) == []
            assert [one.sequence async for one in team.history(812, scope=SCOPE)] == sequences
            assert [one.sequence async for one in team.history(812, after=sequences[100], limit=5)] == sequences[
                101:106
            ]
    first = page[0]
    assert (first.operation, first.revision, first.actor["client"]) == ("update", 1, "codex")
    assert first.at.utcoffset() is not None
    assert (first.before_state, first.after_state["status"]) == (None, "active")


@pytest.mark.anyio
@pytest.mark.contract("C13")
async def test_the_answer_is_json_in_a_text_behind_a_redirect_to_the_slash():
    """C13 and the real server: text content only, `/mcp` answers 307 to `/mcp/`, and the token goes along."""
    answer = McpStub(
        as_text({"scope": SCOPE, "scope_tags": ["scope:team"], "data": [event(31), event(40)]}), era="legacy"
    )

    def redirecting(seen: Seen) -> None:
        if seen.target == "/mcp":
            seen.respond(307, b"", headers={"Location": "/mcp/"})
            return
        answer(seen)

    with RawServer(redirecting) as server:
        async with TeamClient(server.url, token="personal-token") as team:
            assert [one.sequence for one in await team.memory_history(815, SCOPE)] == [31, 40]
    asked = [seen for seen in server.seen if seen.method == "tools/call" and seen.target == "/mcp/"]
    assert asked[0].headers["authorization"] == "Bearer personal-token"
    assert asked[0].json["params"]["arguments"] == {"id": 815, "after": 0, "limit": 50, "scope": SCOPE}


@pytest.mark.anyio
@pytest.mark.contract("C12")
@pytest.mark.parametrize(
    ("data", "cls"),
    [
        ([event(10)], SequenceError),
        ([event(12), event(12)], SequenceError),
        ([event(14), event(13)], SequenceError),
        ([event(n) for n in range(11, 15)], SequenceError),
        ([event(True)], ProtocolError),
        ([event(11, at=5)], ProtocolError),
        ({"0": event(11)}, ProtocolError),
        (None, ProtocolError),
    ],
)
async def test_a_page_that_does_not_ascend_behind_after_is_an_error(data, cls):
    """C12: strictly increasing, behind `after`, no longer than asked for; never taken for the end."""
    with RawServer(McpStub(as_text({"data": data}))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            with pytest.raises(MemlogError) as caught:
                await team.memory_history(812, after=10, limit=3)
    assert type(caught.value) is cls


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"id": 0}, "id"),
        ({"id": True}, "id"),
        ({"id": 1, "after": -1}, "after"),
        ({"id": 1, "limit": 0}, "limit"),
        ({"id": 1, "limit": 51}, "limit"),
    ],
)
async def test_what_the_schema_forbids_is_found_here(arguments, name):
    """Ours: named by argument, before anything is sent."""
    async with TeamClient("http://localhost:1/mcp", token="t") as team:
        with pytest.raises(ValueError, match=name):
            await team.memory_history(**arguments)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "cls", "calls"),
    [
        (as_text({"error": "Record unavailable", "code": "conflict"}, error=True), InvalidRequestError, 1),
        (as_text({"error": "51 is too many", "code": "invalid_request"}, error=True), InvalidRequestError, 1),
        (as_text({"error": "Workspace unavailable", "code": "forbidden"}, error=True), AuthenticationError, 1),
        (
            as_text({"error": "Maintenance in progress; retry shortly", "code": "unavailable"}, error=True),
            ServerError,
            3,
        ),
        (lambda seen: seen.respond(401, b'{"error": "Invalid or revoked token"}'), AuthenticationError, 1),
        (
            lambda seen: seen.respond(503, b'{"error": "x", "code": "unavailable"}', headers={"Retry-After": "0"}),
            ServerError,
            3,
        ),
    ],
)
async def test_the_servers_refusals_are_told_apart(answer, cls, calls):
    """Ours, from the real server's words: an unknown record is no reason to try again, maintenance is."""
    with RawServer(McpStub(answer)) as server:
        async with TeamClient(server.url, token="personal-token", retry=QUICK) as team:
            with pytest.raises(MemlogError) as caught:
                await team.memory_history(815)
            assert "personal-token" not in f"{team!r}{caught.value}"
    assert type(caught.value) is cls
    assert server.methods().count("tools/call") == calls


@pytest.mark.anyio
async def test_the_open_door_and_the_closed_one():
    """Ours: any tool by name, and a token never goes out in the clear."""
    with RawServer(McpStub(as_text({"workspaces": []}))) as server:
        async with TeamClient(server.url, token="t") as team:
            assert await team.call_tool("memory_scopes") == {"workspaces": []}
    with pytest.raises(ValueError, match="allow_insecure"):
        TeamClient("http://team.example/mcp", token="t")
    TeamClient("http://team.example/mcp", token="t", allow_insecure=True)
