"""The team client: records, their history, and writes that may be repeated."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from raw_server import McpStub, RawServer, Seen

from memlog import Record, Scope
from memlog.errors import (
    AuthenticationError,
    ConflictError,
    ConnectionFailedError,
    InvalidRequestError,
    MemlogError,
    NotSavedError,
    ProtocolError,
    RateLimitedError,
    RecordUnavailableError,
    ReplacementRejectedError,
    RequestIdReusedError,
    RevisionChangedError,
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
        (as_text({"error": "Record unavailable", "code": "conflict"}, error=True), RecordUnavailableError, 1),
        (as_text({"error": "No such record", "code": "not_found"}, error=True), RecordUnavailableError, 1),
        (
            as_text({"error": "Revision changed; read the record before retrying", "code": "conflict"}, error=True),
            RevisionChangedError,
            1,
        ),
        (
            as_text({"error": "request_id was already used with different arguments", "code": "conflict"}, error=True),
            RequestIdReusedError,
            1,
        ),
        (
            as_text({"error": "Replacement rejected by quality gate", "code": "conflict"}, error=True),
            ReplacementRejectedError,
            1,
        ),
        (as_text({"error": "Operation rolled back", "code": "conflict"}, error=True), ConflictError, 1),
        (as_text({"error": "Identity changed; retry the request", "code": "conflict"}, error=True), ServerError, 3),
        (
            as_text(
                {"error": "Workspace unavailable; check history before retrying a write", "code": "unavailable"},
                error=True,
            ),
            ServerError,
            3,
        ),
        (lambda seen: seen.respond(429, b'{"error": "Server busy"}'), ServerError, 3),
        (lambda seen: seen.respond(429, b'{"error": "Slow down"}'), RateLimitedError, 1),
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


# -- records ----------------------------------------------------------------------------------------------------------

MEMBERS = {"engineering": {"vasya": "editor", "petya": "manager", "olga": "reader"}}
TOKENS = {f"token-of-{user}": user for user in ("vasya", "petya", "olga", "zoe")}
TEAM = Scope.team("engineering")


@pytest.fixture
def place():
    """A server with one team: two who write, one who reads, and zoe, who is not of it."""
    with reference_server(team_tokens=TOKENS, team_members=MEMBERS) as server:
        yield server


def of(server, user: str, **settings: object) -> TeamClient:
    return TeamClient(server.url, token=f"token-of-{user}", **{"retry": QUICK, **settings})


async def all_of(entries):
    return [entry async for entry in entries]


@pytest.mark.anyio
async def test_a_record_is_saved_read_replaced_and_deleted(place):
    """Ours: typed, with tags as texts, and what this version does not know kept aside."""
    async with of(place, "vasya") as vasya, of(place, "petya") as petya:
        first = await vasya.save(
            "Use pgbouncer.", type="decision", project="billing", tags=["Pool", "db"], importance="high", scope=TEAM
        )
        assert (first.id, first.revision, first.status, first.content) == (1, 1, "active", "Use pgbouncer.")
        assert (first.tags, first.scope, first.type, first.importance) == (("pool", "db"), TEAM, "decision", "high")
        assert (first.redacted, first.deduplicated, first.previous_id) == ((), False, None)
        assert UUID(first.request_id)
        assert first.created_at.tzinfo is not None
        assert first.extra["session_id"] == "workspace"
        assert first.extra["last_recalled"] is None
        second = await petya.update(1, "Use no pooler.", expected_revision=1, reason="The driver pools", scope=TEAM)
        assert (second.id, second.previous_id, second.tags) == (2, 1, ("pool", "db"))
        assert (second.created_by["user_id"], second.updated_by["user_id"]) == ("vasya", "petya")
        old = await vasya.get(1, scope=TEAM)
        assert (old.status, old.superseded_by, old.revision, old.previous_id) == ("superseded", 2, 2, None)
        gone = await vasya.delete(2, expected_revision=1, reason="Obsolete", scope=TEAM)
        assert (gone.status, gone.revision) == ("deleted", 2)
        assert [one.status async for one in petya.export(scope=TEAM)] == ["superseded", "deleted"]
        events = await all_of(petya.history(2, scope=TEAM))
    assert [(one.record_id, one.operation, one.reason) for one in events] == [
        (1, "insert", ""),
        (2, "insert", "The driver pools"),
        (1, "update", "The driver pools"),
        (2, "update", "Obsolete"),
    ]
    assert events[0].changes["tags"] == (None, ["pool", "db"])
    assert events[2].changes == {"status": ("active", "superseded"), "superseded_by": (None, 2)}
    assert events[3].changes == {"status": ("active", "deleted")}
    assert events[1].differences(events[2].before_state, events[1].after_state) == {
        "id": (1, 2),
        "content": ("Use pgbouncer.", "Use no pooler."),
    }


@pytest.mark.anyio
async def test_saving_the_same_words_again_confirms_the_record(place):
    """The real server: case, spacing and punctuation do not count; the text stays as it was."""
    async with of(place, "vasya") as vasya:
        first = await vasya.save("No rid, unique GIRAFFE!")
        again = await vasya.save("no rid unique giraffe", tags=["new"])
        assert (again.id, again.deduplicated, again.content, again.tags) == (first.id, True, first.content, ())
        assert again.redacted == ()
        assert (await vasya.save("no rid unique giraffe", type="lesson")).id != first.id


@pytest.mark.anyio
async def test_what_the_server_does_not_keep_as_it_was_sent_is_told(place):
    """Ours: found by comparison, since the server's own flag says nothing of it."""
    async with of(place, "vasya") as vasya:
        record = await vasya.save(
            "Ask ann@example.org.", context="password: hunter2", tags=["ok", "bob@example.org"], project="p"
        )
        assert record.redacted == ("content", "context", "tags")
        assert record.content == "Ask [REDACTED]."
        assert (await vasya.save("ask ann@example.org")).redacted == ("content",)
        private = await vasya.save("cafe\u0301 <private>x</private>", branch="Bearer x")
        assert (private.redacted, private.content) == (("content", "branch"), "cafe\u0301 ")
        assert (await vasya.save("<private>y</private> CAFE\u0301")).redacted == ("content",)
        again = await vasya.save("caf\u00e9!")
        assert (again.deduplicated, again.redacted) == (True, ())
        named = await vasya.save("It says [REDACTED] there.")
        assert (named.redacted, (await vasya.save("it says [redacted] there")).redacted) == ((), ())
        replaced = await vasya.update(record.id, "token: abc", expected_revision=1, reason="of bob@example.org")
        assert replaced.redacted == ("content",)


@pytest.mark.anyio
async def test_what_the_server_only_writes_in_another_way_is_not_told_as_lost(place):
    """The real server keeps letters as they come, and tags in lower case, with words of its vocabulary beside them."""
    async with of(place, "vasya") as vasya:
        decomposed = {"content": "cafe\u0301", "context": "e\u0301", "project": "e\u0301", "branch": "e\u0301"}
        record = await vasya.save(**decomposed, tags=["Cafe\u0301", " ÜNÏẞ ", "", "ünïß"])
        assert {name: getattr(record, name) for name in decomposed} == decomposed
        assert (record.tags, record.redacted) == (("cafe\u0301", "ünïß"), ())
    row = {
        "id": 7,
        "revision": 1,
        "status": "active",
        "content": "x",
        "project": "general",
        "tags": '["database", "db"]',
    }
    with RawServer(McpStub(as_text({"data": row}))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            assert (await team.save("x", tags=["DB"])).redacted == ()
            assert (await team.save("x", tags=["DB", "ann@example.org"])).redacted == ("tags",)


@pytest.mark.anyio
async def test_who_may_only_read_writes_nothing_and_who_is_not_of_the_team_sees_nothing(place):
    """The real server: forbidden, and nobody's fault but the operator's."""
    async with of(place, "olga") as olga, of(place, "zoe") as zoe, of(place, "vasya") as vasya:
        record = await vasya.save("Ours.", scope=TEAM)
        with pytest.raises(AuthenticationError):
            await olga.save("Mine.", scope=TEAM)
        assert (await olga.get(record.id, scope=TEAM)).content == "Ours."
        with pytest.raises(AuthenticationError):
            await zoe.get(record.id, scope=TEAM)
        with pytest.raises(RecordUnavailableError):
            await zoe.get(record.id)
        scopes = await olga.scopes()
        assert scopes.actor["user_id"] == "olga"
        assert [(one.scope, one.writable) for one in scopes.workspaces] == [
            (Scope.personal(), True),
            (TEAM, False),
            (Scope.shared(), True),
        ]
        assert [one.scope.kind for one in (await zoe.scopes()).workspaces] == ["personal", "shared"]


@pytest.mark.anyio
async def test_an_export_goes_through_all_pages(place):
    """Ours: fifty at a time, by the last id; from anywhere, and as many as wanted."""
    async with of(place, "vasya") as vasya:
        for n in range(103):
            await vasya.save(f"number {n}")
        calls = place.counters.calls["memory_export"]
        assert [one.id async for one in vasya.export()] == list(range(1, 104))
        assert place.counters.calls["memory_export"] - calls == 3
        export = vasya.export(after=100, limit=2)
        assert [one.id async for one in export] == [101, 102]
        assert export.next_after == 102


@pytest.mark.anyio
@pytest.mark.contract("C12")
@pytest.mark.parametrize("events", [99, 100, 101])
async def test_a_history_that_breaks_off_goes_on_where_it_was(place, events):
    """C12, ours: after an error the same object asks for the same page again; nothing is lost, nothing comes twice."""
    async with of(place, "vasya", retry=NO_RETRY) as vasya:
        for _ in range(events):
            await vasya.save("Said many times.")
        history, seen, errors = vasya.history(1), [], 0
        place.faults.add("drop", tool="memory_history", when="before")
        while True:
            try:
                async for event in history:
                    seen.append(event.sequence)
                    assert history.next_after == event.sequence
                    if event.sequence == 50:
                        place.faults.add("drop", tool="memory_history", when="after")
                        place.faults.add("status", tool="memory_history", when="before", times=2)
                break
            except (ConnectionFailedError, ServerError):
                errors += 1
        assert seen == list(range(1, events + 1))
        assert errors == 3
        assert [one async for one in history] == []
        assert [one.sequence async for one in vasya.history(1, after=seen[-3])] == seen[-2:]


@pytest.mark.anyio
@pytest.mark.contract("C12")
async def test_a_server_that_gives_a_page_again_is_caught_and_the_right_one_goes_on():
    """C12: never taken for the end, never handed out, and the iteration is where it was before."""
    first, second = [event(n) for n in range(1, 51)], [event(51), event(60)]
    pages = iter([first, first, [event(49), *second], second])
    with RawServer(McpStub(lambda seen: as_text({"data": next(pages)})(seen))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            history = team.history(812)
            seen = [(await anext(history)).sequence for _ in range(50)]
            for got in (1, 49):
                with pytest.raises(SequenceError) as caught:
                    await anext(history)
                assert (caught.value.expected, caught.value.got) == (51, got)
            assert [*seen, *[one.sequence for one in await all_of(history)]] == [*range(1, 52), 60]
    asked = [seen.json["params"]["arguments"] for seen in server.seen if seen.method == "tools/call"]
    assert [one["after"] for one in asked] == [0, 50, 50, 50]


@pytest.mark.anyio
@pytest.mark.parametrize("ids", [[3], [5, 5], [6, 5], [4, 5, 6, 7]])
async def test_a_page_of_an_export_that_does_not_ascend_is_an_error(ids):
    """Ours: never taken for the end, never handed out."""
    rows = [{"id": n, "revision": 1, "status": "active", "content": "x"} for n in ids]
    with RawServer(McpStub(as_text({"data": rows}))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            with pytest.raises(SequenceError):
                await all_of(team.export(after=3, limit=3))


# -- writes whose outcome is unknown ----------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C12.written")
async def test_a_write_whose_answer_is_lost_is_sent_again_and_happens_once(place):
    """C12: the client itself tries again, under the same request_id; the history has one event of it."""
    async with of(place, "vasya") as vasya:
        for tool in ("memory_save", "memory_update", "memory_delete"):
            place.faults.add("drop", tool=tool, when="after", times=2)
        record = await vasya.save("Kept once.", scope=TEAM)
        changed = await vasya.update(record.id, "Changed once.", expected_revision=1, reason="why", scope=TEAM)
        await vasya.delete(changed.id, expected_revision=1, reason="done", scope=TEAM)
        assert not record.deduplicated
        assert [place.counters.calls[tool] for tool in ("memory_save", "memory_update", "memory_delete")] == [3, 3, 3]
        assert len(await vasya.memory_history(changed.id, TEAM)) == 4


@pytest.mark.anyio
@pytest.mark.contract("C12.written")
async def test_after_a_restart_the_request_id_tells_whether_it_happened_and_makes_sure(place):
    """C12: asked before retrying, by another client; asking changes nothing, resending settles it."""
    mine, never = uuid4(), uuid4()
    async with of(place, "vasya", retry=NO_RETRY) as vasya:
        place.faults.add("drop", tool="memory_save", when="after")
        with pytest.raises(ConnectionFailedError) as caught:
            await vasya.save("Did this arrive?", scope=TEAM, request_id=mine)
        assert (caught.value.outcome, caught.value.request_id) == ("unknown", str(mine))
        place.faults.add("drop", tool="memory_save", when="before")
        with pytest.raises(ConnectionFailedError) as caught:
            await vasya.save("And this?", scope=TEAM)
        unsent = caught.value.request_id
    async with of(place, "vasya") as vasya, of(place, "petya") as petya, of(place, "olga") as olga:
        assert await vasya.happened(request_id=mine, scope=TEAM)
        assert not await vasya.happened(request_id=unsent, scope=TEAM)
        assert not await vasya.happened(request_id=never, scope=TEAM)
        assert not await vasya.happened(request_id=mine)
        assert not await petya.happened(request_id=mine, scope=TEAM)
        with pytest.raises(AuthenticationError):
            await olga.happened(request_id=mine, scope=TEAM)
        again = await vasya.save("Did this arrive?", scope=TEAM, request_id=str(mine).upper())
        assert (again.id, again.request_id, again.deduplicated) == (1, str(mine), False)
        with pytest.raises(RequestIdReusedError) as reused:
            await vasya.save("Something else.", scope=TEAM, request_id=mine)
        assert reused.value.request_id == str(mine)
        assert (await vasya.save("And this?", scope=TEAM, request_id=unsent)).id == 2
        assert len(await all_of(vasya.export(scope=TEAM))) == 2
        assert len(await vasya.memory_history(1, TEAM)) == 1


@pytest.mark.anyio
@pytest.mark.contract("C12.written")
async def test_the_history_tells_whether_an_update_or_a_deletion_happened(place):
    """C12: by record and revision, without the request_id, also by one who may only read."""
    async with of(place, "vasya") as vasya, of(place, "petya") as petya, of(place, "olga") as olga:
        first = await vasya.save("One.", scope=TEAM)
        for _ in range(60):
            await vasya.save("one", scope=TEAM)  # its change is not on the first page
        asked = {"id": first.id, "expected_revision": 1, "scope": TEAM}
        assert not await vasya.happened(**asked, content="Two. ann@example.org")
        second = await vasya.update(
            1, "Two. ann@example.org", expected_revision=1, reason="as bob@example.org said", scope=TEAM
        )
        assert await vasya.happened(**asked, content="Two. ann@example.org")
        assert await vasya.happened(**asked, content="Two. ann@example.org", reason="as bob@example.org said")
        assert not await vasya.happened(**asked, content="Two. ann@example.org", reason="another")
        assert not await vasya.happened(**asked, content="Two.")
        assert not await vasya.happened(**asked)  # a deletion was not what happened
        assert not await petya.happened(**asked, content="Two. ann@example.org")
        assert not await olga.happened(**asked, content="Two. ann@example.org")
        await petya.delete(second.id, expected_revision=1, reason="gone", scope=TEAM)
        asked = {"id": second.id, "expected_revision": 1, "scope": TEAM}
        assert await petya.happened(**asked, reason="gone")
        assert not await petya.happened(**asked, content="Three.")
        assert not await vasya.happened(**asked)
        assert not await petya.happened(id=second.id, expected_revision=2, scope=TEAM)
        with pytest.raises(RecordUnavailableError):
            await petya.happened(id=77, expected_revision=1, scope=TEAM)


@pytest.mark.anyio
@pytest.mark.contract("C12.written")
@pytest.mark.parametrize(
    ("sent", "others"),
    [
        ("a <private>b <private>c</private></private> d", ["a  d.", "a <private>b</private>", "ad"]),
        ("x <private>and no end, of ann@example.org", ["x", "y <private>and no end, of ann@example.org"]),
        (
            "x password: a y token: b z",
            ["x  y token: b z", "x password: a y  z", "x password: a", "password: a y token: b z", "xyz"],
        ),
        ("ann@example.org " * 40 + "x", ["ann@example.org " * 40 + "y", "ann@example.org " * 30 + "x"]),
        ("cafe\u0301", ["caf\u00e9", "cafe"]),
    ],
)
async def test_a_text_is_known_again_after_what_the_server_took_out_of_it(place, sent, others):
    """C12: secrets and private parts; and no other text passes for it. (With many of them it once took for ever.)"""
    async with of(place, "vasya") as vasya:
        first = await vasya.save("One.")
        await vasya.update(first.id, sent, expected_revision=1, reason="why")
        asked = {"id": first.id, "expected_revision": 1}
        assert await vasya.happened(**asked, content=sent)
        for other in others:
            assert not await vasya.happened(**asked, content=other)


@pytest.mark.anyio
@pytest.mark.contract("C12.written")
async def test_to_ask_leaves_no_trace(place):
    """C12: no record, no event, no number used up, and the id still to be had, however often it is asked."""
    mine = uuid4()
    async with of(place, "vasya") as vasya:
        await vasya.save("One.", scope=TEAM)
        before = [await all_of(vasya.export(scope=TEAM)), await all_of(vasya.history(1, scope=TEAM))]
        assert [await vasya.happened(request_id=mine, scope=TEAM) for _ in range(5)] == [False] * 5
        assert [await all_of(vasya.export(scope=TEAM)), await all_of(vasya.history(1, scope=TEAM))] == before
        record = await vasya.save("Two.", scope=TEAM, request_id=mine)
        assert [one.sequence for one in await vasya.memory_history(record.id, TEAM)] == [2]
        assert await vasya.happened(request_id=mine, scope=TEAM)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"request_id": str(uuid4()), "id": 1, "expected_revision": 1},
        {"request_id": str(uuid4()), "reason": "x"},
        {"request_id": "not-a-uuid"},
        {"id": 1},
        {"id": 0, "expected_revision": 1},
    ],
)
async def test_the_question_has_two_forms_and_no_mixture(arguments):
    """Ours: found here, before anything is sent."""
    async with TeamClient("http://localhost:1/mcp", token="t") as team:
        with pytest.raises(ValueError, match=r"happened|id|expected_revision"):
            await team.happened(**arguments)


@pytest.mark.anyio
async def test_all_attempts_of_a_write_carry_one_request_id():
    """Ours: stable over retries, different between writes, and told by the error."""
    busy = as_text(
        {"error": "Workspace unavailable; check history before retrying a write", "code": "unavailable"}, error=True
    )
    with RawServer(McpStub(busy)) as server:
        async with TeamClient(server.url, retry=QUICK) as team:
            with pytest.raises(ServerError) as first:
                await team.delete(1, expected_revision=1, reason="x")
            with pytest.raises(ServerError) as second:
                await team.delete(1, expected_revision=1, reason="x")
    sent = [seen.json["params"]["arguments"]["request_id"] for seen in server.seen if seen.method == "tools/call"]
    assert (first.value.outcome, first.value.code) == ("unknown", "unavailable")
    assert sent == [first.value.request_id] * 3 + [second.value.request_id] * 3
    assert first.value.request_id != second.value.request_id


@pytest.mark.anyio
@pytest.mark.contract("C12.written")
@pytest.mark.parametrize(
    "write",
    [
        lambda team, **more: team.save("Ünï", tags={"b", "a", "c", "d"}, scope=TEAM, **more),
        lambda team, **more: team.update(7, "Ünï", expected_revision=1, reason="r", scope=Scope.shared(), **more),
        lambda team, **more: team.delete(7, expected_revision=1, reason="r", **more),
    ],
)
async def test_a_write_is_the_same_to_the_byte_each_time(write):
    """The server compares the arguments under one id: what was sent before an unknown outcome is sent after it, too."""
    row = {"id": 7, "revision": 1, "status": "active", "content": "Ünï", "tags": ["a", "b", "c", "d"]}
    first_row = as_text({"data": row})
    answers = [
        lambda seen: seen.reset(),
        lambda seen: seen.respond(503, b"{}"),
        lambda seen: seen.respond(429, b'{"error": "Server busy"}'),
        as_text({"error": "Workspace unavailable; check history before retrying a write", "code": "unavailable"}),
        lambda seen: seen.respond(200, b"no JSON"),
        as_text({"data": None}),
        first_row,
    ]
    calls = iter([*answers, first_row])
    with RawServer(McpStub(lambda seen: next(calls)(seen))) as server:
        async with TeamClient(server.url, retry=RetryPolicy(attempts=9, delay_min=0.001, delay_max=0.002)) as team:
            record = await write(team)
            again = await write(team, request_id=record.request_id.upper())
    assert again == record
    bodies = [seen.body for seen in server.seen if seen.method == "tools/call"]
    assert len(bodies) == 8
    assert len({re.sub(rb'"id":\d+', b"", body, count=1) for body in bodies}) == 1
    if b"tags" in bodies[0]:
        assert seen_arguments(bodies[0])["tags"] == ["a", "b", "c", "d"]


def seen_arguments(body: bytes) -> dict[str, object]:
    return json.loads(body)["params"]["arguments"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("scope", "sent"),
    [
        (None, None),
        (Scope.personal(), {"kind": "personal"}),
        (Scope.team("engineering"), SCOPE),
        (Scope.shared(), {"kind": "shared"}),
        (SCOPE, SCOPE),
    ],
)
async def test_a_scope_goes_over_the_wire_as_the_tools_have_it(scope, sent):
    """The real server refuses what its schema does not name, and a team_id that is not needed."""
    with RawServer(McpStub(as_text({"data": []}))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            assert await all_of(team.export(scope=scope)) == await all_of(team.history(1, scope=scope)) == []
    asked = [seen_arguments(seen.body) for seen in server.seen if seen.method == "tools/call"]
    assert [one.get("scope") for one in asked] == [sent, sent]
    assert [set(one) - {"scope"} for one in asked] == [{"after", "limit"}, {"id", "after", "limit"}]


@pytest.mark.anyio
async def test_a_refusal_after_an_unknown_outcome_does_not_hide_it():
    """Ours: what became of the earlier attempt is as unknown as before."""
    calls = iter([lambda seen: seen.reset(), lambda seen: seen.respond(401, b"{}")])
    with RawServer(McpStub(lambda seen: next(calls)(seen))) as server:
        async with TeamClient(server.url, retry=QUICK) as team:
            with pytest.raises(AuthenticationError) as caught:
                await team.save("x")
    assert caught.value.__notes__ == ["an earlier attempt of this write may have been carried out"]


@pytest.mark.anyio
async def test_a_text_that_the_quality_gate_does_not_keep_is_an_error_and_no_record():
    """The real server answers it without an error; taken for success, the text would be lost unseen."""
    answer = {"scope": SCOPE, "scope_tags": [], "data": {"saved": False, "quality": {"score": 0.1}}}
    with RawServer(McpStub(as_text(answer))) as server:
        async with TeamClient(server.url, retry=QUICK) as team:
            with pytest.raises(NotSavedError) as caught:
                await team.save("x")
    assert (caught.value.quality, caught.value.outcome) == ({"score": 0.1}, "refused")
    assert server.methods().count("tools/call") == 1


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_record_is_read_leniently_where_nobody_promised_anything():
    """Ours: what is missing or odd does no harm; what every use needs must be there."""
    row = {"id": 7, "revision": 2, "status": "active", "content": "x", "tags": "no list", "created_at": 5, "new": None}
    answers = iter(
        [
            {"data": row},
            {"data": {**row, "tags": "[" * 100_000}},
            {"data": {**row, "tags": ["a"], "created_at": "2026-09-25T09:14:02Z"}, "scope": {"kind": "galaxy"}},
            {"data": {**row, "revision": "2"}},
            {"data": [row]},
        ]
    )
    with RawServer(McpStub(lambda seen: as_text(next(answers))(seen))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            odd = await team.get(7)
            assert (await team.get(7)).tags == ()
            fine = await team.get(7)
            for _ in range(2):
                with pytest.raises(ProtocolError):
                    await team.get(7)
    assert odd == Record(7, 2, "active", "x", extra={"tags": "no list", "created_at": 5, "new": None})
    assert (fine.tags, fine.scope) == (("a",), None)
    assert fine.created_at == datetime(2026, 9, 25, 9, 14, 2, tzinfo=UTC)
    assert "content" not in repr(odd)


@pytest.mark.anyio
async def test_what_a_newer_server_says_is_kept_aside():
    """Ours: fields of events, workspaces and scopes that this version does not know, and kinds of scopes."""
    galaxy = {"scope": {"kind": "galaxy"}, "writable": True}
    told = {
        "memory_history": {"data": [event(1, reason=None, before_state=None, trace="t")]},
        "memory_scopes": {
            "actor": {"user_id": "vasya", "shift": "night"},
            "workspaces": [{"key": "k", "scope": SCOPE, "writable": 1, "quota": 5}, galaxy],
            "region": "eu",
        },
    }
    with RawServer(McpStub(lambda seen: as_text(told[seen.json["params"]["name"]])(seen))) as server:
        async with TeamClient(server.url, retry=NO_RETRY) as team:
            (one,) = await team.memory_history(812)
            scopes = await team.scopes()
    assert (one.extra, one.reason) == ({"trace": "t"}, "")
    assert (scopes.actor["shift"], scopes.extra) == ("night", {"region": "eu", "workspaces": [galaxy]})
    (workspace,) = scopes.workspaces
    assert (workspace.scope, workspace.writable, workspace.extra) == (TEAM, False, {"key": "k", "quota": 5})


@pytest.mark.parametrize(
    "arguments", [("team",), ("team", "no spaces"), ("team", "x" * 65), ("team", "ü"), ("shared", "x"), ("galaxy",)]
)
def test_a_scope_that_cannot_be_is_no_scope(arguments):
    """Ours: found where it is made."""
    with pytest.raises(ValueError, match=r"scope|team_id"):
        Scope(*arguments)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda team: team.save("  "), "content"),
        (lambda team: team.save("x" * 200_001), "content"),
        (lambda team: team.save(5), "content"),
        (lambda team: team.save("x", tags="a"), "tags"),
        (lambda team: team.save("x", request_id="5"), "request_id"),
        (lambda team: team.update(0, "x", expected_revision=1, reason="x"), "id"),
        (lambda team: team.update(1, "x", expected_revision=0, reason="x"), "expected_revision"),
        (lambda team: team.update(1, "x", expected_revision=1, reason=""), "reason"),
        (lambda team: team.delete(1, expected_revision=1, reason="x" * 2001), "reason"),
        (lambda team: team.get(True), "id"),
        (lambda team: team.get(2**63), "id"),
        (lambda team: team.happened(id=1, expected_revision=2**63), "expected_revision"),
        (lambda team: team.memory_history(1, after=2**63), "after"),
    ],
)
async def test_a_write_that_the_server_would_not_take_is_not_sent(call, name):
    """Ours: named by argument; a text is never quoted."""
    async with TeamClient("http://localhost:1/mcp", token="t") as team:
        with pytest.raises(ValueError, match=name) as caught:
            await call(team)
    assert "xxx" not in str(caught.value)
