"""What the reference server stores is what it was sent, and what is not strictly JSON is never stored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from server_helpers import CHAT, JSON_SUITE, Caller, in_process

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio

NOT_JSON = -32700
HEAD = f'{{"conversation_id":"{CHAT}","items":[{{"before":1}},'


def suite(pattern: str) -> list[Any]:
    files = sorted(JSON_SUITE.glob(pattern))
    missing = pytest.mark.skip(reason=f"the JSON test suite is not at {JSON_SUITE}")
    return [pytest.param(file, id=file.stem) for file in files] or [pytest.param(None, marks=missing)]


async def append_raw(caller: Caller, item: bytes) -> Any:
    """Appends a batch whose second item is spliced in raw; the JSON-RPC answer."""
    response = await caller.raw_call("append_memory", HEAD.encode() + item + b"]}")
    answer = response.json()
    assert response.status_code == (400 if answer.get("error", {}).get("code") == NOT_JSON else 200), answer
    return answer


@pytest.mark.contract("C3")
@pytest.mark.parametrize(
    "payload",
    [
        '{"b":1,"a":2,"":3}',
        '{"zero":-0,"one":1.0,"big":1E400,"small":1e-400,"plus":1e+2,"long":0.1000000000000000055511151231257827}',
        '{"int":123456789012345678901234567890,"digits":' + "9" * 5000 + "}",
        '{"text":"\\"\\\\/\\b\\f\\n\\r\\t\\u0000\\u001f\x7f\u2028\u2029\ufeff é 記憶 🙂"}',
        '{"nested":[{"a":[[],{}]},null,true,false],"$ref":"#/x","__proto__":{"a":1}}',
    ],
)
async def test_a_payload_is_spliced_back_byte_by_byte(payload: str) -> None:
    """Contract: stored verbatim. Key order and the form of a number survive, in both forms of the answer."""
    async with in_process() as caller:
        assert "result" in await append_raw(caller, payload.encode())
        response = await caller.raw_call("replay_memory", f'{{"conversation_id":"{CHAT}","limit":10}}')
    structured = response.text.partition('"structuredContent":')[2]
    assert f'"payload":{payload}}}]}}' in structured
    assert f'"payload":{payload}}}]}}' in json.loads(response.text, parse_int=str)["result"]["content"][0]["text"]


@pytest.mark.contract("C3")
async def test_only_white_space_and_needless_escapes_are_dropped() -> None:
    """Ours: the compact form is stored, because that is the form the limits measure."""
    sent = ' { "a" : [ 1.50 , "\\u00e9\\ud83d\\ude42\\/" ] ,\n\t"b" : { } } '
    async with in_process() as caller:
        await append_raw(caller, sent.encode())
        response = await caller.raw_call("replay_memory", f'{{"conversation_id":"{CHAT}","limit":10}}')
    assert '"payload":{"a":[1.50,"é🙂/"],"b":{}}}' in response.text.partition('"structuredContent":')[2]


@pytest.mark.contract("C3")
@pytest.mark.parametrize("file", suite("n_*.json"))
async def test_what_is_not_json_is_refused_and_nothing_is_stored(file: Path) -> None:
    """Contract: each file of the suite that must be refused, as one value inside an otherwise valid append."""
    async with in_process() as caller:
        answer = await append_raw(caller, b'{"key":' + file.read_bytes() + b"}")
        assert answer["error"]["code"] == NOT_JSON
        assert await caller.replay() == []


@pytest.mark.contract("C3")
@pytest.mark.parametrize(
    "value",
    [
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b'{"a":1,"a":1}',
        b'[[{"x":{"a":1,"b":2,"\\u0061":3}}]]',
        b'"\\ud800"',
        b'"\\uDE42\\uD83D"',
        b'{"\\udfff":1}',
        b'"\xed\xa0\x80"',
        b'"\xff"',
        b'"\xc0\xaf"',
    ],
)
async def test_what_lenient_readers_accept_is_refused_and_nothing_is_stored(value: bytes) -> None:
    """Contract: NaN and Infinity, a key given twice at any depth, half a surrogate pair, bytes that are not UTF-8."""
    async with in_process() as caller:
        answer = await append_raw(caller, b'{"key":' + value + b"}")
        assert answer["error"]["code"] == NOT_JSON
        assert await caller.replay() == []


async def test_a_repeated_key_is_refused_in_the_envelope_too() -> None:
    """Ours: two readers of one request must not see two conversations."""
    async with in_process() as caller:
        response = await caller.raw_call(
            "append_memory", f'{{"conversation_id":"{CHAT}","items":[{{}}],"conversation_id":"{CHAT}"}}'
        )
        assert response.json()["error"]["code"] == NOT_JSON


@pytest.mark.contract("C3")
@pytest.mark.parametrize("file", suite("y_*.json"))
async def test_what_is_json_comes_back_equal(file: Path) -> None:
    """Contract: each file that must be accepted, except a repeated key, which would not come back as it was."""
    async with in_process() as caller:
        answer = await append_raw(caller, b'{"key":' + file.read_bytes() + b"}")
        stored = await caller.replay()
    if "duplicated_key" in file.name:
        assert answer["error"]["code"] == NOT_JSON
        assert stored == []
    else:
        assert stored[1]["payload"] == {"key": json.loads(file.read_bytes())}


@pytest.mark.contract("C3")
@pytest.mark.parametrize("file", suite("i_*.json"))
async def test_what_readers_disagree_on_is_stored_whole_or_refused(file: Path) -> None:
    """Ours: where the suite leaves it open, the answer is still one of two, never an accident."""
    async with in_process() as caller:
        answer = await append_raw(caller, b'{"key":' + file.read_bytes() + b"}")
        accepted = "result" in answer and answer["result"]["isError"] is False
        assert len(await caller.replay()) == (2 if accepted else 0)


def nested(levels: int) -> bytes:
    """An object of this many levels, itself counted."""
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(("levels", "code"), [(257, "invalid_items"), (100_000, NOT_JSON)])
async def test_deep_nesting_is_refused_cleanly(levels: int, code: str | int) -> None:
    """Ours: the contract names no depth; 256 levels are kept, more are refused in words, never by a crash."""
    async with in_process() as caller:
        answer = await append_raw(caller, nested(levels))
        error = answer["error"] if "error" in answer else json.loads(answer["result"]["content"][0]["text"])["error"]
        assert error["code"] == code
        assert await caller.replay() == []
        assert "result" in await append_raw(caller, nested(256))
        assert len(await caller.replay()) == 2
