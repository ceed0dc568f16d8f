"""The team half of the reference server: records, their history, and a file of events to begin with."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from server_helpers import in_process

from server_reference import create_app

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio

ENGINEERING = {"kind": "team", "team_id": "engineering"}
ACTOR = {"user_id": "vasya", "display_name": "Vasya", "client": "codex"}


def event(sequence: int, record: int, *, superseded_by: int | None = None, **more: Any) -> dict[str, Any]:
    state = {"id": record, "type": "decision", "tags": '["a"]', "status": "active", "superseded_by": superseded_by}
    return {
        "sequence": sequence,
        "record_id": record,
        "at": "2026-09-25T09:14:02.118Z",
        "operation": "update" if superseded_by else "insert",
        "actor": ACTOR,
        "reason": "",
        "revision": 1.50,
        "before_state": None,
        "after_state": state,
    } | more


# 812 was replaced by 815, 815 by 820; 900 has nothing to do with them. Sequences have gaps and stand in no order.
EVENTS = [
    event(41, 820),
    event(31, 812),
    event(42, 815, superseded_by=820),
    event(38, 815),
    event(40, 812, superseded_by=815),
    event(35, 900),
]


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(one | {"scope": ENGINEERING}) + "\n" for one in EVENTS) + "\n")
    return path


async def history(records: Path | None, **arguments: Any) -> dict[str, Any]:
    """The result of one call by a team user."""
    async with in_process(bearer="secret", team_tokens={"secret": "vasya"}, records=records) as caller:
        response = await caller.raw_call("memory_history", json.dumps(arguments))
    assert response.status_code == 200
    result = response.json()["result"]
    assert "structuredContent" not in result
    assert len(result["content"]) == 1
    return result


async def answered(records: Path, **arguments: Any) -> dict[str, Any]:
    result = await history(records, **({"scope": ENGINEERING} | arguments))
    assert result["isError"] is False, result
    return json.loads(result["content"][0]["text"])


async def refused(records: Path | None, **arguments: Any) -> tuple[str, str]:
    result = await history(records, **arguments)
    assert result["isError"] is True
    error = json.loads(result["content"][0]["text"])
    assert set(error) == {"error", "code"}
    return error["code"], error["error"]


@pytest.mark.contract("C12", "C13")
async def test_history_is_json_text_with_the_record_and_all_that_it_replaced(records: Path) -> None:
    """Contract: oldest first, predecessors followed back to the first; the events word for word; no other content."""
    answer = await answered(records, id=820)
    assert list(answer) == ["scope", "scope_tags", "data"]
    assert answer["scope"] == ENGINEERING
    assert answer["scope_tags"] == ["scope:team", "team:engineering"]
    assert answer["data"] == sorted((one for one in EVENTS if one["record_id"] != 900), key=lambda one: one["sequence"])


@pytest.mark.contract("C12")
async def test_an_old_record_does_not_show_its_successor(records: Path) -> None:
    """Ours, after the real server: only its own events, of which the last names the successor."""
    data = (await answered(records, id=812))["data"]
    assert [one["sequence"] for one in data] == [31, 40]
    assert data[-1]["after_state"]["superseded_by"] == 815


@pytest.mark.contract("C12")
async def test_after_is_exclusive_and_pages_end_with_a_short_one(records: Path) -> None:
    """Contract: pass the last sequence received as `after`; past the end the page is empty."""

    async def page(**arguments: Any) -> list[int]:
        return [one["sequence"] for one in (await answered(records, id=820, **arguments))["data"]]

    assert await page(limit=2) == [31, 38]
    assert await page(limit=2, after=38) == [40, 41]
    assert await page(limit=2, after=41) == [42]
    assert await page(limit=2, after=42) == []


@pytest.mark.contract("C12")
async def test_a_page_holds_50_events_unless_fewer_are_asked_for(tmp_path: Path) -> None:
    """Contract: the default is 50, which is also the most."""
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps(event(n, 1)) for n in range(1, 61)))
    assert [one["sequence"] for one in (await answered(path, id=1))["data"]] == list(range(1, 51))
    assert [one["sequence"] for one in (await answered(path, id=1, after=50))["data"]] == list(range(51, 61))


@pytest.mark.contract("C12")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "'id' is a required property"),
        ({"id": 0}, "0 is less than or equal to the minimum of 0"),
        ({"id": "815"}, "'815' is not of type 'integer'"),
        ({"id": 8.15}, "8.15 is not of type 'integer'"),
        ({"id": True}, "True is not of type 'integer'"),
        ({"id": 812, "limit": 0}, "0 is less than the minimum of 1"),
        ({"id": 812, "limit": 51}, "51 is greater than the maximum of 50"),
        ({"id": 812, "after": -1}, "-1 is less than the minimum of 0"),
        ({"id": 812, "after": None}, "None is not of type 'integer'"),
        ({"id": 812, "before": 3}, "Additional properties are not allowed ('before' was unexpected)"),
        ({"id": 0, "b": 3, "a": 2}, "Additional properties are not allowed ('a', 'b' were unexpected)"),
        ({"id": 812, "scope": {"kind": "team", "team_id": "no spaces"}}, "does not match '^[a-zA-Z0-9_-]{1,64}$'"),
        ({"id": 812, "scope": {"kind": "company"}}, "'company' is not one of ['personal', 'team', 'shared']"),
        ({"id": 812, "scope": {"kind": "shared", "owner": 1}}, "('owner' was unexpected)"),
        ({"id": 812, "scope": None}, "None is not of type 'object'"),
    ],
)
async def test_an_argument_outside_of_the_schema_is_told_in_plain_words(
    records: Path, arguments: dict[str, Any], said: str
) -> None:
    """Contract: bounds of the schema; ours, after the real server: the words, that they are no JSON, no extra keys."""
    result = await history(records, **arguments)
    assert result["isError"] is True
    assert result["content"][0]["text"].startswith("Input validation error: ")
    assert result["content"][0]["text"].endswith(said)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"id": 812, "scope": {"kind": "team"}}, "invalid_request"),
        ({"id": 812, "scope": {"kind": "shared", "team_id": "engineering"}}, "invalid_request"),
        ({"id": 2**63}, "unavailable"),
        ({"id": 1.0}, "conflict"),
    ],
)
async def test_what_a_schema_cannot_say_is_refused_with_a_code(
    records: Path, arguments: dict[str, Any], code: str
) -> None:
    """Ours, after the real server: a team's scope needs a team, and only that; a number must fit into 64 bits."""
    assert (await refused(records, **arguments))[0] == code


async def test_a_record_that_is_not_there_is_a_conflict(records: Path) -> None:
    """Ours, after the real server: not an empty list; the same for a record of another scope, or without a file."""
    expected = ("conflict", "Record unavailable")
    assert await refused(records, scope=ENGINEERING, id=1) == expected
    assert await refused(records, id=812) == expected
    assert await refused(None, id=812) == expected


async def test_an_event_without_a_scope_is_found_in_every_scope(tmp_path: Path) -> None:
    """Ours: the contract's own example is a records file as it stands."""
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(event(1, 5)))
    for scope, tags in (({"kind": "personal"}, ["scope:personal"]), ({"kind": "shared"}, ["scope:shared"])):
        answer = await answered(path, id=5, scope=scope)
        assert (answer["scope"], answer["scope_tags"]) == (scope | {"team_id": None}, tags)
        assert len(answer["data"]) == 1


async def test_only_a_team_token_reads_history(records: Path) -> None:
    """Ours: a site's credentials and a read-only token are known, but not of a team."""
    for who in ({}, {"bearer": "reader", "read_tokens": ["reader"]}):
        async with in_process(records=records, **who) as caller:
            result = (await caller.raw_call("memory_history", '{"id":812}')).json()["result"]
        assert json.loads(result["content"][0]["text"])["code"] == "forbidden"
        assert result["isError"] is True


# -- records that are written -----------------------------------------------------------------------------------------

TOKENS = {f"token-of-{user}": user for user in ("vasya", "petya", "olga", "zoe")}
MEMBERS = {"engineering": {"vasya": "editor", "petya": "manager", "olga": "reader"}}


class Users:
    """Calls of several users on one application."""

    def __init__(self, **settings: Any) -> None:
        self.app = create_app(team_tokens=TOKENS, **settings)

    async def result(self, user: str, tool: str, **arguments: Any) -> dict[str, Any]:
        async with in_process(bearer=f"token-of-{user}", app=self.app) as caller:
            response = await caller.raw_call(tool, json.dumps(arguments))
        assert response.status_code == 200
        result = response.json()["result"]
        assert "structuredContent" not in result
        return result

    async def ask(self, user: str, tool: str, **arguments: Any) -> Any:
        result = await self.result(user, tool, **arguments)
        assert result["isError"] is False, result
        return json.loads(result["content"][0]["text"])

    async def data(self, user: str, tool: str, **arguments: Any) -> Any:
        answer = await self.ask(user, tool, **arguments)
        assert set(answer) == {"scope", "scope_tags", "data"}
        return answer["data"]

    async def refused(self, user: str, tool: str, **arguments: Any) -> tuple[str, str]:
        result = await self.result(user, tool, **arguments)
        assert result["isError"] is True, result
        error = json.loads(result["content"][0]["text"])
        return error["code"], error["error"]


@pytest.fixture
def users() -> Any:
    users = Users(team_members=MEMBERS)
    yield users
    users.app.state.store.close()


async def test_an_update_leaves_two_events_and_a_deletion_is_an_update(users: Users) -> None:
    """After the real server: the new record's insert first, both with the reason; numbered by the scope."""
    here = {"scope": ENGINEERING}
    await users.data("vasya", "memory_save", content="Another.", **here)
    first = await users.data("vasya", "memory_save", content="One.", tags=["A", "a ", ""], **here)
    assert (first["id"], first["revision"], first["saved"], first["deduplicated"]) == (2, 1, True, False)
    assert first["tags"] == '["a"]'
    second = await users.data(
        "petya", "memory_update", id=2, expected_revision=1, content="Two.", reason="better", **here
    )
    assert (second["id"], second["revision"], second["previous_id"]) == (3, 1, 2)
    assert (second["created_by"]["user_id"], second["updated_by"]["user_id"]) == ("vasya", "petya")
    gone = await users.data("vasya", "memory_delete", id=3, expected_revision=1, reason="enough", **here)
    assert (gone["status"], gone["revision"]) == ("deleted", 2)
    events = await users.data("olga", "memory_history", id=3, **here)
    assert [
        (one["sequence"], one["record_id"], one["operation"], one["revision"], one["reason"]) for one in events
    ] == [
        (2, 2, "insert", 1, ""),
        (3, 3, "insert", 1, "better"),
        (4, 2, "update", 2, "better"),
        (5, 3, "update", 2, "enough"),
    ]
    assert [one["before_state"] is None for one in events] == [True, True, False, False]
    assert events[2]["after_state"]["superseded_by"] == 3
    assert events[3]["after_state"]["status"] == "deleted"
    states = {"id", "type", "content", "context", "project", "tags", "status", "superseded_by"}
    assert all(set(one["after_state"]) == states for one in events)
    assert [one["sequence"] for one in await users.data("olga", "memory_history", id=2, **here)] == [2, 4]
    assert [one["id"] for one in await users.data("olga", "memory_export", after=1, limit=2, **here)] == [2, 3]


async def test_a_repeat_save_is_a_confirmation_of_what_is_active(users: Users) -> None:
    """After the real server: same words, type and project; the event has equal states and no reason."""
    first = await users.data("vasya", "memory_save", content="Ёлка, it's GREEN!")
    again = await users.data("vasya", "memory_save", content="елка it's green", tags=["x"])
    assert (again["id"], again["deduplicated"], again["content"]) == (first["id"], True, "Ёлка, it's GREEN!")
    assert again["last_confirmed"] >= first["last_confirmed"]
    event = (await users.data("vasya", "memory_history", id=1))[-1]
    assert (event["operation"], event["revision"], event["reason"]) == ("confirm", 1, "")
    assert event["before_state"] == event["after_state"]
    for other in ({"type": "lesson"}, {"project": "p"}, {"content": "it's green, ёлка"}):
        assert not (await users.data("vasya", "memory_save", **{"content": "елка it's green", **other}))["deduplicated"]
    await users.data("vasya", "memory_delete", id=1, expected_revision=1, reason="x")
    assert not (await users.data("vasya", "memory_save", content="елка it's green"))["deduplicated"]


@pytest.mark.parametrize(
    ("first", "again", "is_repeat"),
    [
        ("Straße offen", "straße OFFEN.", False),
        ("STRASSE offen", "Straße offen", True),
        ("ﬁne print", "ﬁne print", False),
        ("fine print", "ﬁne print", True),
        ("ｗｉｄｅ words", "wide words", False),
        ("нет", "нет", False),
        ("нет мест", "Нет мест", False),
        ("нет зимы", "Нет зимы", True),
        ("cafe\u0301", "CAFÉ", True),
        ("İstanbul", "İSTANBUL", False),
        ("ΟΔΟΣ", "οδος", True),
        ("हिन्दी में", "हिन्दी, में", True),
        ("1 2", "1, 2", True),
        ("a_b c-d", "a b c d", False),
        ("at 10:30", "at 10 30", False),
        ("!!", "!!", False),
    ],
)
async def test_a_repeat_is_only_what_the_index_finds(users: Users, first: str, again: str, is_repeat: bool) -> None:
    """After the real server, which looks for repeats by an index of words, and misses those it has in another form."""
    await users.data("vasya", "memory_save", content=first)
    assert (await users.data("vasya", "memory_save", content=again))["deduplicated"] is is_repeat


async def test_a_confirmation_changes_nothing_but_that_it_is_a_conversation(users: Users) -> None:
    """After the real server: no event tells of it."""
    await users.data("vasya", "memory_save", content="x", tags=["İj", "ẞ", " Zz "])
    again = {"content": "X", "tags": ["b"], "context": "c", "importance": "high", "branch": "d"}
    record = await users.data("vasya", "memory_save", source_format="conversation", **again)
    assert (record["source_format"], record["importance"], record["context"]) == ("conversation", "medium", "")
    assert json.loads(record["tags"]) == ["i̇j", "ß", "zz"]
    assert (await users.data("vasya", "memory_save", **again))["source_format"] == "conversation"


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("memory_get", {"id": 2**63 - 1}, ("conflict", "Record unavailable")),
        ("memory_get", {"id": 2**63}, ("unavailable", "Workspace operation failed")),
        ("memory_export", {"after": 2**63}, ("unavailable", "Workspace operation failed")),
        (
            "memory_delete",
            {"id": 1, "expected_revision": 2**63, "reason": "x"},
            ("conflict", "Revision changed; read the record before retrying"),
        ),
        (
            "memory_save",
            {"content": "a@b.co " * 28_571 + "abc"},
            ("invalid_request", "too long, with the marks in place of its secrets"),
        ),
        (
            "memory_save",
            {"content": "x", "request_id": "6f1f8c1e58a8-4a0e-9a55-0d8e4a9d7c11"},
            ("invalid_request", "request_id should be a valid UUID"),
        ),
    ],
)
async def test_a_value_that_fits_the_schema_may_still_be_too_much(
    users: Users, tool: str, arguments: dict[str, Any], expected: tuple[str, str]
) -> None:
    """After the real server: the database has 64 bits, and a mark may be longer than what it stands for."""
    await users.data("vasya", "memory_save", content="x")
    assert await users.refused("vasya", tool, **arguments) == expected


async def test_a_request_id_belongs_to_one_write_of_a_user_in_a_scope(users: Users) -> None:
    """After the real server: the same answer for the same arguments, spelled as they may be; refused writes leave it."""
    mine = {"request_id": "6f1f8c1e-58a8-4a0e-9a55-0d8e4a9d7c11"}
    refused = ("conflict", "Record unavailable")
    assert await users.refused("vasya", "memory_delete", id=9, expected_revision=1, reason="x", **mine) == refused
    first = await users.data("vasya", "memory_save", content="x", **mine)
    loud = {"request_id": mine["request_id"].upper()}
    assert await users.data("vasya", "memory_save", content="x", type="fact", tags=[], **loud) == first
    reused = ("conflict", "request_id was already used with different arguments")
    assert await users.refused("vasya", "memory_save", content="y", **mine) == reused
    assert await users.refused("vasya", "memory_delete", id=9, expected_revision=1, reason="x", **mine) == reused
    shared = {"scope": {"kind": "shared"}}
    assert (await users.data("vasya", "memory_save", content="x", **shared, **mine))["deduplicated"] is False
    assert (await users.data("petya", "memory_save", content="x", **shared, **mine))["deduplicated"] is True
    assert len(await users.data("vasya", "memory_history", id=1)) == 1
    assert (await users.refused("vasya", "memory_save", content="x", request_id="zz"))[0] == "invalid_request"


async def test_a_record_that_changed_meanwhile_is_not_overwritten(users: Users) -> None:
    """After the real server: another revision, or not active any more."""
    await users.data("vasya", "memory_save", content="x")
    changed = ("conflict", "Revision changed; read the record before retrying")
    update = {"content": "y", "reason": "r"}
    assert await users.refused("vasya", "memory_update", id=1, expected_revision=2, **update) == changed
    await users.data("vasya", "memory_delete", id=1, expected_revision=1, reason="r")
    assert await users.refused("vasya", "memory_update", id=1, expected_revision=2, **update) == changed
    assert await users.refused("vasya", "memory_delete", id=2, expected_revision=1, reason="r") == (
        "conflict",
        "Record unavailable",
    )


async def test_roles_decide_who_reads_and_who_writes(users: Users) -> None:
    """After the real server: a reader changes nothing, others see nothing; everybody has a space of their own."""
    here = {"scope": ENGINEERING}
    await users.data("petya", "memory_save", content="x", **here)
    read_only, hidden = ("forbidden", "Workspace is read-only"), ("forbidden", "Workspace unavailable")
    assert await users.refused("olga", "memory_save", content="x", **here) == read_only
    assert await users.refused("olga", "memory_delete", id=1, expected_revision=1, reason="r", **here) == read_only
    assert (await users.data("olga", "memory_get", id=1, **here))["content"] == "x"
    assert await users.refused("zoe", "memory_get", id=1, **here) == hidden
    assert await users.refused("vasya", "memory_export", scope={"kind": "team", "team_id": "sales"}) == hidden
    assert await users.refused("vasya", "memory_get", id=1) == ("conflict", "Record unavailable")
    told = await users.ask("olga", "memory_scopes")
    assert set(told) == {"actor", "workspaces"}
    assert set(told["actor"]) == {"user_id", "display_name", "client", "org_role"}
    assert [(one["scope"]["kind"], one["owner_id"], one["writable"]) for one in told["workspaces"]] == [
        ("personal", "olga", True),
        ("team", None, False),
        ("shared", None, True),
    ]


async def test_without_members_every_team_is_open_to_all(records: Path) -> None:
    """Ours: the file's teams and those that were used are listed; a wrong role is told at the start."""
    users = Users(records=records)
    await users.data("zoe", "memory_save", content="x", scope={"kind": "team", "team_id": "sales"})
    told = await users.ask("olga", "memory_scopes")
    teams = [one["scope"]["team_id"] for one in told["workspaces"] if one["scope"]["kind"] == "team"]
    assert teams == ["engineering", "sales"]
    assert all(one["writable"] for one in told["workspaces"])
    users.app.state.store.close()
    with pytest.raises(ValueError, match="no role 'king'"):
        create_app(team_members={"engineering": {"zoe": "king"}})


async def test_what_a_file_tells_can_be_changed_and_the_file_stays(records: Path) -> None:
    """Ours: its records go on with the next numbers of their scope, and in memory only."""
    before = records.read_bytes()
    users = Users(records=records)
    here = {"scope": ENGINEERING}
    record = await users.data("vasya", "memory_get", id=820, **here)
    assert (record["type"], record["status"], record["tags"]) == ("decision", "active", '["a"]')
    new = await users.data("petya", "memory_update", id=820, expected_revision=1, content="New.", reason="r", **here)
    assert new["id"] == 901
    events = await users.data("vasya", "memory_history", id=901, **here)
    assert [one["sequence"] for one in events] == [31, 38, 40, 41, 42, 43, 44]
    assert events[:5] == sorted((one for one in EVENTS if one["record_id"] != 900), key=lambda one: one["sequence"])
    assert records.read_bytes() == before
    users.app.state.store.close()


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("mail ann@example.org now", "mail [REDACTED] now"),
        ("password: hunter2 x", "[REDACTED] x"),
        ("db_password=hunter2", "[REDACTED]"),
        ("token: abc", "[REDACTED]"),
        ("Bearer abc.def", "[REDACTED]"),
        ("card 4111 1111 1111 1111 end", "card [REDACTED] end"),
        ("order 1234567812345678", "order 1234567812345678"),
        ("6f1f8c1e-58a8-4a0e-9a55-411111111111", "6f1f8c1e-58a8-4a0e-9a55-411111111111"),
        ("https://user:pass@host/x", "https://[REDACTED]@host/x"),
        ("ghp_" + "a" * 36, "[REDACTED]"),
        ("AKIAABCDEFGHIJKLMNOP", "[REDACTED]"),
        ("eyJhbGciOiJIUzI1NiJ9abcdef.eyJzdWIiOiIxMjM0NTY3ODkwIn0abc.sig", "[REDACTED]"),
        ("my password is foo", "my password is foo"),
        ("mypassword=x, passwords: y, pwd-2 = z", "mypassword=x, passwords: y, [REDACTED]"),
        ("forbearer x", "for[REDACTED]"),
        ("müller@example.org, a@b", "mü[REDACTED], a@b"),
        ("a@b.co1x@d.org", "[REDACTED][REDACTED]"),
        ("sk-" + "a" * 19 + " gho_short", "sk-" + "a" * 19 + " gho_short"),
        ("cafe\u0301", "cafe\u0301"),
    ],
)
async def test_what_looks_like_a_secret_is_not_kept(users: Users, sent: str, kept: str) -> None:
    """After the real server, whose own flag does not tell it. All else is kept letter by letter."""
    record = await users.data("vasya", "memory_save", content=sent, context=sent, project=sent, branch=sent)
    assert [record[name] for name in ("content", "context", "project", "branch")] == [kept] * 4
    assert (record["privacy_redacted"], record["privacy_redacted_sections"]) == (False, 0)
    await users.data("vasya", "memory_update", id=1, expected_revision=1, content="x", reason=f"of {sent}")
    assert (await users.data("vasya", "memory_history", id=2))[-1]["reason"] == f"of {kept}"


@pytest.mark.parametrize(
    ("sent", "kept", "parts"),
    [
        ("a <private>b</private> c", "a  c", 1),
        ("a <private>b <Private >c</private> d</private> e", "a  e", 1),
        ("a< private>b</private>c<private>d</ private >", "ac", 2),
        ("a <private>and no end", "a ", 1),
        ("a </private> b", "a  b", 0),
        ("<private>all</private>", "", 1),
        ("pass<private>x</private>word: y", "[REDACTED]", 1),
    ],
)
async def test_what_is_marked_as_private_is_not_kept(users: Users, sent: str, kept: str, parts: int) -> None:
    """After the real server: in the text and its context, also of an update; what that brings to light is looked at."""
    record = await users.data("vasya", "memory_save", content=sent, context=sent)
    assert (record["content"], record["context"]) == (kept, kept)
    assert (record["privacy_redacted"], record["privacy_redacted_sections"]) == ("REDACTED" in kept, 2 * parts)
    again = await users.data("vasya", "memory_save", content=sent)
    assert again["deduplicated"] is bool(kept)
    assert again["privacy_redacted_sections"] == parts
    update = {"id": 1, "expected_revision": 1, "content": sent, "reason": sent}
    record = await users.data("vasya", "memory_update", **update)
    assert (record["content"], record["privacy_redacted_sections"]) == (kept, parts)


async def test_a_secret_is_looked_for_in_no_time_whatever_the_text() -> None:
    """A single word of 200,000 letters, or parts of a name without end, kept the server busy for minutes."""
    texts = ("x" * 200_000, "a-" * 100_000, "password_" * 20_000, "a@" * 100_000, "<private>" * 20_000)
    program = "\n".join(
        (
            "from server_reference.scrub import scrubbed, without_private_parts",
            *(f"without_private_parts(scrubbed({text[:9]!r} * {len(text) // 9}))" for text in texts[2:3] + texts[4:]),
            *(f"scrubbed({text[:2]!r} * {len(text) // 2})" for text in (*texts[:2], texts[3])),
        )
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "'content' is a required property"),
        ({"content": ""}, "'' should be non-empty"),
        ({"content": 5}, "5 is not of type 'string'"),
        ({"content": "x" * 200_001}, "is too long"),
        (
            {"content": "x", "type": "idea"},
            "'idea' is not one of ['fact', 'decision', 'solution', 'lesson', 'convention']",
        ),
        ({"content": "x", "tags": "a"}, "'a' is not of type 'array'"),
        ({"content": "x", "tags": [5]}, "5 is not of type 'string'"),
        ({"content": "x", "tags": ["a"] * 65}, "is too long"),
        ({"content": "x", "project": ""}, "'' should be non-empty"),
        (
            {"content": "x", "type": None},
            "None is not one of ['fact', 'decision', 'solution', 'lesson', 'convention']",
        ),
        ({"content": "x", "request_id": 5}, "5 is not valid under any of the given schemas"),
        ({"type": "x", "tags": [5, "a", 6]}, "'content' is a required property"),
        ({"content": "", "project": "", "tags": [5]}, "'' should be non-empty"),
        ({"content": "", "type": "x", "tags": "a", "scope": {"kind": "x"}}, "'solution', 'lesson', 'convention']"),
        ({"content": "x", "tags": [5, "a", 6], "scope": {"kind": 1}}, "6 is not of type 'string'"),
        ({"content": "  "}, "content must be non-empty text"),
        ({"content": "x", "tags": ["scope:mine"]}, "tags: at most 128 characters, and not reserved for scopes"),
        ({"content": "x", "tags": ["a" * 129]}, "tags: at most 128 characters, and not reserved for scopes"),
    ],
)
async def test_a_save_that_cannot_be_is_refused(users: Users, arguments: dict[str, Any], said: str) -> None:
    """After the real server: what a schema can say in plain words, the rest with a code."""
    result = await users.result("vasya", "memory_save", **arguments)
    assert result["isError"] is True
    text = result["content"][0]["text"]
    assert (json.loads(text)["error"] if text.startswith("{") else text).endswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "line 1: an event needs sequence"),
        ("\n[]", "line 2: an event must be"),
        ('{"sequence":1,"record_id":0}', "line 1: an event needs"),
        ('{"sequence":1,"record_id":1,"scope":"team"}', "line 1: scope must be"),
        ('{"sequence":1,"record_id":1}\n{"sequence":1,"record_id":2}', "a sequence stands twice"),
        ('{"sequence":NaN}', "line 1: NaN"),
    ],
)
async def test_a_bad_records_file_is_told_by_line_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    """Ours: a server that starts has read all of its records."""
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        create_app(records=path)
    with pytest.raises(ValueError, match="cannot read"):
        create_app(records=tmp_path / "missing.jsonl")
