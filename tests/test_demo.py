"""The demo: its judge can fail, its input is what it claims to be, and a short run of the whole keeps the promise."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import respx

from examples.demo import conductor, rawlog
from examples.demo.children import DemoFailedError
from examples.demo.display import Display
from examples.demo.judge import how_far, judge, missing
from examples.demo.script import APPENDS_PER_SECOND, ITEMS_MIN, ScriptError, plan, read_source, repeat
from memlog import Client, limits
from memlog.payload import check_conversation_id, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memlog.testing import ReferenceServer

ROOT = Path(__file__).resolve().parents[1]
CONVERSATIONS = ROOT / "examples" / "data" / "conversations.jsonl"
A, B, C, D = ({"n": n} for n in "abcd")


def verdict_on(want: Sequence[dict[str, Any]], have: Sequence[dict[str, Any]], *ranges: tuple[int, int]) -> Any:
    return judge({"one": want}, {"one": have}, {"one": ranges})


# The judge


def test_a_log_that_is_the_input_is_identical() -> None:
    """Ours: nothing lost, nothing found, nothing to tell."""
    verdict = verdict_on([A, B, B, C], [A, B, B, C])
    assert (verdict.lost, verdict.foreign, verdict.duplicates_found, verdict.identical) == (0, 0, 0, True)


@pytest.mark.parametrize("have", [[A, B], [A, C], [B, C], []], ids=["last", "middle", "first", "all"])
def test_a_missing_item_is_lost_wherever_it_stood(have: list[dict[str, Any]]) -> None:
    """Ours."""
    verdict = verdict_on([A, B, C], have)
    assert verdict.lost == 3 - len(have)
    assert not verdict.identical


def test_a_missing_conversation_is_lost() -> None:
    """Ours: what is not in the log at all is not skipped."""
    assert judge({"one": [A], "two": [B, C]}, {"one": [A]}, {}).lost == 2


def test_another_order_is_not_identical_though_nothing_is_lost() -> None:
    """Ours."""
    verdict = verdict_on([A, B, C], [A, C, B])
    assert (verdict.lost, verdict.identical) == (0, False)


def test_a_duplicate_that_nobody_reported_is_found_and_not_identical() -> None:
    """Ours: only what memlog owned up to is taken out."""
    verdict = verdict_on([A, B], [A, A, B])
    assert (verdict.duplicates_found, verdict.duplicates_reported, verdict.identical) == (1, 0, False)


def test_reported_duplicates_are_taken_out_before_comparing() -> None:
    """Ours: exactly the reported positions, and a range reported twice counts once."""
    verdict = verdict_on([A, B, C], [A, B, A, B, C], (2, 3), (2, 3))
    assert (verdict.duplicates_found, verdict.duplicates_reported, verdict.identical) == (2, 2, True)


@pytest.mark.parametrize("ranges", [[(1, 1)], [(2, 4)], [(3, 3)], [(9, 9)]], ids=["early", "long", "late", "beyond"])
def test_a_report_of_the_wrong_range_is_not_identical(ranges: list[tuple[int, int]]) -> None:
    """Ours: a report is a statement about positions, and a wrong one must not pass for a right one."""
    assert not verdict_on([A, B, C, D], [A, B, B, C, C, D], *ranges).identical


def test_a_report_where_nothing_is_duplicate_is_not_identical() -> None:
    """Ours: reporting everything must not be a way to pass."""
    verdict = verdict_on([A, B], [A, B], (1, 1))
    assert (verdict.lost, verdict.duplicates_found, verdict.identical) == (0, 0, False)
    assert not judge({"one": [A]}, {"one": [A]}, {"two": [(0, 0)]}).identical


def test_a_torn_item_is_lost_and_foreign() -> None:
    """Ours: half an item is not that item, nor a duplicate of it."""
    verdict = verdict_on([A, {"text": "whole"}], [A, {"text": "who"}])
    assert (verdict.lost, verdict.foreign, verdict.duplicates_found, verdict.identical) == (1, 1, 0, False)


def test_a_conversation_that_nobody_appended_to_is_not_identical() -> None:
    """Ours."""
    verdict = judge({"one": [A]}, {"one": [A], "two": [B]}, {})
    assert (verdict.foreign, verdict.identical) == (1, False)


@pytest.mark.parametrize(
    ("want", "have"),
    [
        ({"v": 1}, {"v": 1.0}),
        ({"v": 1}, {"v": True}),
        ({"v": 0.0}, {"v": -0.0}),
        ({"v": None}, {}),
        ({"v": "é"}, {"v": "e\u0301"}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
    ids=["int-float", "int-bool", "sign-of-zero", "null-absent", "normalised", "key-order"],
)
def test_payloads_that_python_may_call_equal_are_told_apart(want: dict[str, Any], have: dict[str, Any]) -> None:
    """C3: stored verbatim."""
    assert verdict_on([want], [have]).lost == 1
    assert not verdict_on([want], [have]).identical


def test_items_promised_before_a_kill_are_missed_one_by_one() -> None:
    """Ours: a second copy of the same payload does not stand for the promised one."""
    expected = {"one": [A, B, A, C]}
    assert missing({"one": {0, 1, 2}}, expected, {"one": [A, B, A]}) == 0
    assert missing({"one": {0, 1, 2}}, expected, {"one": [A, B]}) == 1
    assert missing({"one": {0, 1, 2}}, expected, {"one": [B, B, B]}) == 2
    assert missing({"one": {0, 3}}, expected, {}) == 2


def test_how_far_does_not_count_reported_duplicates() -> None:
    """Ours: otherwise the resumed process would leave out as many items as were sent twice."""
    assert how_far(10, [(2, 4), (4, 5)]) == 6
    assert how_far(10, []) == 10


def test_a_torn_line_of_the_record_promised_nothing(tmp_path: Path) -> None:
    """Ours: the process may be killed within a write."""
    record = tmp_path / "stored.record"
    record.write_bytes(b"demo-000-00000 0\ndemo-000-00000 1\ndemo-000-00001 0\ndemo-000-000")
    assert conductor.read_record(record) == {"demo-000-00000": {0, 1}, "demo-000-00001": {0}}


@pytest.mark.parametrize("seqs", [[0, 2], [1], [0, 0], [0, None]])
def test_a_replay_with_a_gap_fails_the_demo(tmp_path: Path, seqs: list[int | None]) -> None:
    """C7: gapless from 0; and nothing may be pending at the end."""
    replayed = tmp_path / "replayed.jsonl"
    replayed.write_text("".join(json.dumps(["one", seq, A]) + "\n" for seq in seqs))
    with pytest.raises(DemoFailedError, match="should stand"):
        conductor.read_replayed(replayed)


# Reading without memlog


def test_plain_http_reads_page_after_page_and_what_nobody_named(server: ReferenceServer) -> None:
    """Ours: conversations that only the server knows are read too, or a stray one would go unseen."""
    items = [{"n": n} for n in range(2 * rawlog.PAGE)]

    async def write_and_read() -> dict[str, list[dict[str, Any]]]:
        async with Client(server.url, auth=server.auth) as client:
            for start in range(0, len(items), limits.ITEMS_PER_BATCH_MAX):
                await client.append_memory("conversation-long", items[start : start + limits.ITEMS_PER_BATCH_MAX])
            await client.append_memory("conversation-stray", [A])
        return await rawlog.read_all(server.url, server.auth, ["conversation-long", "conversation-none"])

    found = asyncio.run(write_and_read())
    assert found == {"conversation-long": items, "conversation-stray": [A], "conversation-none": []}


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json={"result": {"structuredContent": {"items": [{"seq": 1, "payload": {}}]}}}),
        httpx.Response(200, json={"result": {"isError": True, "content": [], "structuredContent": {"items": []}}}),
        httpx.Response(200, json={"error": {"code": 1, "message": "no"}}),
        httpx.Response(502, text="<html>"),
    ],
    ids=["gap", "refused", "error", "page"],
)
def test_plain_http_does_not_take_a_wrong_answer_for_an_end(answer: httpx.Response) -> None:
    """Ours: an answer that is no page of the log fails the demo."""

    def reply(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["params"]["name"] == "list_conversations":
            return httpx.Response(200, json={"result": {"structuredContent": {"conversations": []}}})
        return answer

    with respx.mock() as mock:
        mock.post("http://memory.example/mcp").mock(side_effect=reply)
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(rawlog.read_all("http://memory.example/mcp", ("demo", "demo"), ["conversation"]))
    assert caught.group_contains(rawlog.RawLogError)


# What is appended


def test_a_script_repeats_the_file_under_fresh_ids_turn_by_turn() -> None:
    """Ours: within a round one item of each conversation after the other, and no id comes twice."""
    script = repeat([[A, B, C], [D]], rounds=2, pace=1.0)
    first, second, third, fourth = script.conversations
    turns = [(first, 0), (second, 0), (first, 1), (first, 2), (third, 0), (fourth, 0), (third, 1), (third, 2)]
    assert list(script.turns()) == turns
    assert script.items == 8
    for conversation in script.conversations:
        check_conversation_id(conversation)


@pytest.mark.parametrize("items", [1, 620, 3202, 7999, 8001, 100_000])
def test_a_script_lasts_as_long_as_it_was_told_and_not_much_longer(items: int) -> None:
    """Ours: at least 20 s of appending, and a large file is appended faster instead of longer."""
    script = plan([[A] * items], seconds=20.0)
    assert script.items >= max(items, ITEMS_MIN)
    assert 20.0 <= script.items / script.pace <= 40.0 + 1e-6
    assert script.pace >= APPENDS_PER_SECOND
    assert plan([[A]], seconds=0.1).items == ITEMS_MIN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no conversation"),
        (b'{"conversation": "x", "items": []}\n', "holds no conversation"),
        (b'{"conversation": "x", "items": [{}]}\n{"items": ', "line 2: not JSON"),
        (b'{"conversation": "x", "items": [[]]}', "line 1: not of the form"),
        (b'[{"role": "user"}]', "line 1: not of the form"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(tmp_path: Path, content: bytes, message: str) -> None:
    """Ours: with the file's name and, where there is one, the line."""
    file = tmp_path / "input.jsonl"
    file.write_bytes(content)
    with pytest.raises(ScriptError, match=message) as caught:
        read_source(file)
    assert str(file) in str(caught.value)
    with pytest.raises(ScriptError, match="cannot be read"):
        read_source(tmp_path / "absent.jsonl")


# The conversations that come with it


def rows() -> Iterator[dict[str, Any]]:
    for line in CONVERSATIONS.read_text(encoding="utf-8").split("\n"):
        if line:
            yield json.loads(line)


def values(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for inner in value.values():
            yield from values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from values(inner)


def test_the_example_conversations_are_valid_and_of_realistic_size() -> None:
    """C1, C2, C3: every id and every item is accepted as it is."""
    names = [check_conversation_id(row["conversation"]) for row in rows()]
    sizes = [len(row["items"]) for row in rows()]
    assert len(names) == len(set(names)) >= 20
    assert min(sizes) >= 15
    assert max(sizes) <= 70
    longest = max(len(encode(item)) for row in rows() for item in row["items"])
    assert 32 * 1024 < longest < limits.ITEM_BYTES_MAX


def test_the_example_conversations_hold_what_makes_a_log_hard_to_keep() -> None:
    """Ours: scripts, joined emoji, and each kind of JSON value at its edge; otherwise the demo proves less than it says."""
    everything = [value for row in rows() for item in row["items"] for value in values(item)]
    texts = [value for value in everything if isinstance(value, str)]
    letters = Counter(unicodedata.name(c, "").split(" ")[0] for text in texts for c in text if c.isalpha())
    for script in ("LATIN", "CYRILLIC", "ARABIC", "DEVANAGARI", "CJK", "HIRAGANA", "HANGUL", "HEBREW", "GREEK", "THAI"):
        assert letters[script] > 20, script
    assert any("\u200d" in text for text in texts)
    assert any("\u2068" in text for text in texts)
    assert "" in texts
    assert any(type(value) is int and value > 2**64 for value in everything)
    assert any(type(value) is float and str(value) == "-0.0" for value in everything)
    assert any(value is None for value in everything)
    assert any(value is True for value in everything)
    assert [] in everything
    assert {} in everything
    calls = [value for value in everything if isinstance(value, dict) and value.keys() & {"arguments", "input"}]
    assert len(calls) > 100


# The whole


def demo(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


def processes_with(argument: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            found += [line] if argument in line else []
    return found


def port_of(line: str) -> int:
    found = re.search(r":(\d+)/mcp", line)
    assert found, line
    return int(found[1])


def test_a_short_run_keeps_the_promise() -> None:
    """Ours, the purpose of it all: two kills, nothing lost, every conversation identical."""
    with demo("--seconds", "8", "--outage", "1") as process:
        said, _ = process.communicate(timeout=100)
    assert process.returncode == 0, said
    table = dict(re.findall(r"^ *([a-z0-9/ ]+): (.+)$", said, re.MULTILINE))
    assert list(table) == [
        "conversations",
        "items",
        "append p50/p99",
        "seconds without a server",
        "most pending",
        "requests sent",
        "duplicates reported",
        "duplicates found",
        "lost",
        "identical",
    ]
    assert (table["lost"], table["identical"]) == ("0", "yes")
    assert table["duplicates reported"] == table["duplicates found"]
    assert float(table["seconds without a server"]) >= 1.0
    assert int(table["most pending"].replace(",", "")) >= 100
    killed = re.search(r"appender killed .* at (\d+\.\d)%.*: (\d+) requests in flight, ([\d,]+) items", said)
    assert killed
    assert float(killed[1]) >= 50.0
    assert int(killed[2]) >= 1
    assert int(killed[3].replace(",", "")) >= 100


def test_a_promise_that_was_not_kept_fails_the_demo(tmp_path: Path) -> None:
    """Ours: one item too many in the record of `stored()`, which the kill made unreachable, is one item lost."""
    source = [[{"n": n} for n in range(50)]] * 20
    script = repeat(source, rounds=1, pace=200.0)
    file = tmp_path / "input.jsonl"
    file.write_text(
        "".join(json.dumps({"conversation": f"c{n}", "items": items}) + "\n" for n, items in enumerate(source))
    )
    last, position = list(script.turns())[-1]
    (tmp_path / "stored.record").write_text(f"{last} {position}\n")
    shown = io.StringIO()
    outcome = asyncio.run(conductor.perform(file, script, tmp_path, Display(shown), outage=0.0))
    assert outcome.lost_after_kill == 1, shown.getvalue()
    assert (outcome.by_http.lost, outcome.by_replay.lost) == (0, 0)
    assert outcome.identical
    assert not outcome.kept
    assert ("lost", "1") in outcome.rows()
    assert "1 items were reported stored before the kill" in outcome.failures()[0]


def test_a_kill_that_misses_its_state_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours: without enough pending items the kill would prove nothing, so that is no success."""
    monkeypatch.setattr(conductor, "PENDING_MIN", 10**9)
    monkeypatch.setattr(conductor, "STATE_S", 1.0)
    script = plan(read_source(CONVERSATIONS), seconds=0.1)
    with pytest.raises(DemoFailedError, match="did not reach a request in flight and 1000000000 items pending"):
        asyncio.run(conductor.perform(CONVERSATIONS, script, tmp_path, Display(io.StringIO()), outage=0.0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_children_too(number: signal.Signals) -> None:
    """Ours: Ctrl-C leaves neither a server nor an appender behind, and says so by its status."""
    with demo() as process:
        assert process.stdout is not None
        port = port_of(next(line for line in process.stdout if "server ready" in line))
        next(line for line in process.stdout if "appending" in line)
        assert len(processes_with(f":{port}/mcp")) == 1
        process.send_signal(number)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert processes_with(f":{port}/mcp") == []
    with contextlib.closing(socket.socket()) as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_unusable_file_is_status_2() -> None:
    """Ours: told apart from a promise that was not kept."""
    with demo("absent.jsonl") as process:
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "cannot be read" in said
