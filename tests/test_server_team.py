"""The team half of the reference server: `memory_history` over a file of events."""

from __future__ import annotations

import json
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
    "arguments",
    [
        {},
        {"id": 0},
        {"id": "815"},
        {"id": 8.15},
        {"id": 812, "limit": 0},
        {"id": 812, "limit": 51},
        {"id": 812, "after": -1},
        {"id": 812, "after": None},
        {"id": 812, "before": 3},
        {"id": 812, "scope": {"kind": "team"}},
        {"id": 812, "scope": {"kind": "shared", "team_id": "engineering"}},
        {"id": 812, "scope": {"kind": "team", "team_id": "no spaces"}},
        {"id": 812, "scope": {"kind": "company"}},
        {"id": 812, "scope": {"kind": "shared", "owner": 1}},
        {"id": 812, "scope": None},
    ],
)
async def test_an_argument_outside_of_the_schema_is_an_invalid_request(
    records: Path, arguments: dict[str, Any]
) -> None:
    """Contract: bounds of the schema; ours, after the real server: the code, and that extra keys are refused."""
    assert (await refused(records, **arguments))[0] == "invalid_request"


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
