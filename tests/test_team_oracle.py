"""The real team server against ours: what it answered once, recorded, and, if it can be installed, what it answers now."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import Any

import pytest
import team_oracle as oracle
from environments import UnreachableError, python_with


def timeless(value: Any) -> Any:
    """The value without its times, for comparison of two runs."""
    if isinstance(value, datetime):
        return "a time"
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {f.name: timeless(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: timeless(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [timeless(member) for member in value]
    return oracle._settled(value) if isinstance(value, str) else value


@pytest.mark.anyio
@pytest.mark.contract("C12.real-server", "C12.written")
async def test_the_reference_server_answers_each_call_as_the_real_one_did() -> None:
    """C12: insert, confirm, updates, deletion, history, pages, refusals, request ids, a lost answer: call by call."""
    with oracle.our_server() as place:
        seen, exchanges = await oracle.on(place)
    recorded = oracle.recorded()
    assert len(oracle.answers(recorded)) == 145
    assert oracle.differences(oracle.answers(recorded), oracle.answers(exchanges)) == []
    assert timeless(seen) == timeless(await oracle.played(recorded))


@pytest.mark.anyio
@pytest.mark.contract("C12.real-server", "C12.written")
async def test_the_client_understands_what_the_real_server_said() -> None:
    """C12: the answers of the real server, as the client's values and errors."""
    seen = await oracle.played(oracle.recorded())

    first, confirmed, second, third, deleted = seen["written"]
    assert (confirmed.id, confirmed.deduplicated, confirmed.content) == (first.id, True, first.content)
    assert [one.previous_id for one in (first, second, third)] == [None, first.id, second.id]
    assert [one.status for one in seen["read"]] == ["superseded", "superseded", "deleted"]
    assert (deleted.id, deleted.revision) == (third.id, 2)
    whole = [(one.record_id, one.operation) for one in seen[f"history {third.id}"]]
    assert whole == [
        (1, "insert"),
        (1, "confirm"),
        (2, "insert"),
        (1, "update"),
        (3, "insert"),
        (2, "update"),
        (3, "update"),
    ]
    assert [(one.record_id, one.operation) for one in seen[f"history {first.id}"]] == [
        (1, "insert"),
        (1, "confirm"),
        (1, "update"),
    ]
    assert [len(page) for page in seen["pages of one"]] == [1] * 7 + [0]
    assert seen["past the end"] == []
    assert len(seen["pages of fifty"]) == 52
    assert [one[0] for one in seen["refused"]] == (
        ["RecordUnavailableError"] * 4
        + ["RevisionChangedError"] * 2
        + ["AuthenticationError"] * 4
        + ["RecordUnavailableError"]
    )
    assert {one[0] for one in seen["malformed"] + seen["malformed saves"]} == {"InvalidRequestError"}
    once, twice, other, deletion, elsewhere, _, events = seen["again"]
    assert once == twice
    assert other[0] == deletion[0] == "RequestIdReusedError"
    assert (elsewhere.scope.kind, len(events)) == ("shared", 1)
    assert [one.redacted for one in seen["redacted"]] == [("content",)] * 4
    lost, happened, never, sent, resent, settled, events, records = seen["lost"]
    assert lost == ("TimedOutError", None, "unknown")
    assert (happened, never, settled) == (True, False, True)
    assert (sent, len(events), len(records)) == (resent, 1, 1)
    assert seen["happened"] == [True, False, False, False, False, True, False]


def test_the_record_holds_no_times_and_no_names_of_a_machine() -> None:
    """Recorded again, it changes only where the server does."""
    text = json.dumps(oracle.recorded())
    assert oracle._settled(text) == text
    assert "authorization" not in text.lower().replace("proxy-", "")


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.anyio
@pytest.mark.contract("C12.real-server", "C12.written")
async def test_the_real_server_answers_each_call_as_it_did_when_it_was_recorded() -> None:
    """C12: the very server, in an environment of its own."""
    try:
        python = python_with("oracle", *oracle.PACKAGES)
    except UnreachableError as error:
        pytest.skip(str(error))
    with oracle.real_server(python) as place:
        _, exchanges = await oracle.on(place)
    assert oracle.differences(oracle.answers(exchanges), oracle.answers(oracle.recorded())) == []
