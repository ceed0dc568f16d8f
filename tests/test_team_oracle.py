"""The real team server against ours: what it answered once, recorded, and, if it can be installed, what it answers now."""

from __future__ import annotations

import copy
import dataclasses
import json
import secrets
from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import team_oracle as oracle
import team_walk as walk
from environments import UnreachableError, python_with

from memlog import Scope, TeamClient

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    return oracle.settled(value) if isinstance(value, str) else value


@pytest.mark.anyio
@pytest.mark.contract("C12.real-server", "C12.written")
async def test_the_reference_server_answers_each_call_as_the_real_one_did() -> None:
    """C12: insert, confirm, updates, deletion, history, pages, refusals, request ids, a lost answer: call by call."""
    with oracle.our_server() as place:
        seen, exchanges = await oracle.on(place)
    recorded = oracle.recorded()
    assert len(oracle.answers(recorded)) == 151
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
    asked, saved, settled, events = seen["asked"]
    assert (asked, settled) == ([False] * 3, True)
    assert (saved.id, saved.deduplicated) == (2, False)
    assert [one.sequence for one in events] == [2]


@pytest.mark.contract("C12.real-server", "C12.written")
def test_the_reference_server_answers_a_random_walk_as_the_real_one_did() -> None:
    """C12, ours: texts, tags, ids, pages and scopes near the edges, in an order that nobody thought of."""
    record = walk.recorded()
    assert len(record) == 400
    done = {tool for _, tool, _, failed, _ in record if not failed}
    assert done == {f"memory_{tool}" for tool in ("save", "update", "delete", "get", "history", "export")}
    with oracle.our_server() as place:
        assert walk.differences(place, record) == []


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all that is no list and no object."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if members is None:
        yield path
    for key, member in members or ():
        yield from leaves(member, (*path, key))


def with_another(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy whose member at the path is a different one."""
    changed = copy.deepcopy(value)
    place = changed
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    place[path[-1]] = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else f"{old or ''}x"
    return changed


def test_nothing_that_a_server_says_can_change_unnoticed() -> None:
    """Ours: a comparison that passes by accident is worth nothing. Each answer is changed at some place and differs."""
    random = Random(1)
    said = oracle.answers(oracle.recorded())
    for number, one in enumerate(said):
        for path in random.sample(list(leaves(one)), min(3, len(list(leaves(one))))):
            other = [*said[:number], with_another(one, path), *said[number + 1 :]]
            assert len(oracle.differences(said, other)) == 1, path
    assert len(oracle.differences(said, said[:-1])) == 1
    for _, _, _, *answer in walk.recorded():
        if answer[0] and isinstance(answer[1], dict) and answer[1]["code"] == "invalid_request":
            continue  # whose words are the validator's
        path = random.choice(list(leaves(answer)))
        assert not walk.agree(tuple(answer), tuple(with_another(answer, path))), path


def test_the_record_holds_no_times_and_no_names_of_a_machine() -> None:
    """Recorded again, it changes only where the server does."""
    for record in (oracle.recorded(), walk.recorded()):
        text = json.dumps(record)
        assert oracle.settled(text) == text
        assert "127.0.0.1" not in text
    assert "authorization" not in oracle.CASSETTE.read_text().lower()


# -- the very server, in an environment of its own ---------------------------------------------------------------------


@pytest.fixture
def real_place() -> Iterator[oracle.Place]:
    try:
        python = python_with("oracle", *oracle.PACKAGES)
    except UnreachableError as error:
        pytest.skip(str(error))
    with oracle.real_server(python) as place:
        yield place


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.anyio
@pytest.mark.contract("C12.real-server", "C12.written")
async def test_the_real_server_answers_each_call_as_it_did_when_it_was_recorded(real_place: oracle.Place) -> None:
    """C12: the scenario, call by call."""
    _, exchanges = await oracle.on(real_place)
    assert oracle.differences(oracle.answers(exchanges), oracle.answers(oracle.recorded())) == []


@pytest.mark.slow
@pytest.mark.interop
def test_a_new_random_walk_meets_the_same_answers_on_both_servers(real_place: oracle.Place) -> None:
    """C12, ours: another one each time, with texts as long as may be; the seed is in the message."""
    seed = secrets.randbelow(10**6)
    record = walk.walked(real_place, seed, 1000)
    with oracle.our_server() as place:
        assert (seed, walk.differences(place, record)) == (seed, [])


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.anyio
async def test_what_the_real_server_adds_is_no_redaction_and_what_it_shortens_is(real_place: oracle.Place) -> None:
    """The real server does more than ours: words of a vocabulary beside the tags, and less of a program's output."""
    output = "\n".join(f"DEBUG step {n} was taken\nINFO step {n} is done" for n in range(40))
    async with TeamClient(real_place.url, token=real_place.tokens["zoe"]) as zoe:
        tagged = await zoe.save("Tagged.", tags=["db", "cafe\u0301"], scope=Scope.shared())
        shortened = await zoe.save(output, type="lesson")
        whole = await zoe.save(output, type="lesson", project="another", source_format="conversation")
    assert tagged.redacted == ()
    assert set(tagged.tags) > {"db", "cafe\u0301"}
    assert shortened.redacted == ("content",)
    assert len(shortened.content) < len(output) / 2
    assert (whole.redacted, whole.content) == ((), output)
