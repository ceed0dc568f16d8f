"""Bad input: each kind has its class and its data, leaves the books as they were, and stops nothing that comes after."""

from __future__ import annotations

import decimal
import enum
import os
import socket
import tempfile
import uuid
from collections import OrderedDict
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from books import PATIENCE, QUICK, CountingTransport, books, contents, nothing_kept, until, warnings_of
from pydantic import BaseModel
from raw_server import RawServer

import memlog.testing
from memlog import Client, open_log
from memlog.errors import (
    AuthenticationError,
    BufferUnusableError,
    ConnectionFailedError,
    InvalidConversationIdError,
    InvalidItemError,
    PermanentError,
    ProtocolError,
    RedirectRefusedError,
    TooLargeError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from raw_server import Seen

    from memlog.testing import ReferenceServer

CHAT = "conversation-1"

ITEM_BYTES_MAX = 262_144
BATCH_BYTES_MAX = 1_048_576


def item_of(size: int, text: str = "x") -> dict[str, str]:
    """An item of exactly ``size`` bytes of compact JSON, filled with ``text`` as far as it goes and then with ASCII."""
    room = size - len('{"k":""}')
    filling = text * (room // len(text.encode()))
    return {"k": filling + "." * (room - len(filling.encode()))}


def batch_of(size: int) -> list[dict[str, str]]:
    """Five items, the largest the contract allows but for the last, of ``size`` bytes in all."""
    return [item_of(ITEM_BYTES_MAX - 100)] * 4 + [item_of(size - 4 * (ITEM_BYTES_MAX - 100))]


# --- conversation ids ------------------------------------------------------------------------------------------------

BAD_IDS = {
    "7 characters": "a" * 7,
    "65 characters": "a" * 65,
    "a trailing newline": "conversation\n",
    "64 and a newline": "a" * 64 + "\n",
    "é": "conversationé",
    "a digit that is not ASCII": "conversation٣",
    "empty": "",
    "a space": "conver sation",
    "a slash": "conver/sation",
    "None": None,
    "bytes": b"conversation",
    "a number": 12345678,
}


@pytest.mark.anyio
@pytest.mark.contract("C1")
@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS.keys())
async def test_a_malformed_id_is_refused_before_anything_is_stored(
    bad: Any, server: ReferenceServer, tmp_path: Path
) -> None:
    """C1: checked here, in the log as in the client; it never becomes another conversation, and is not repeated."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            async with nothing_kept(server, log, chat):
                with pytest.raises(InvalidConversationIdError) as caught:
                    log.conversation(bad)
                async with Client(server.url, auth=server.auth) as client:
                    for call in (
                        lambda: client.append_memory(bad, [{"a": 1}]),
                        lambda: client.replay_memory(bad),
                        lambda: client.recall_memory(bad),
                    ):
                        with pytest.raises(InvalidConversationIdError):
                            await call()
        assert caught.value.outcome == "not_sent"
        assert caught.value.retry_after is None
        assert caught.value.reason
        if bad:
            assert str(bad) not in str(caught.value)


@pytest.mark.anyio
@pytest.mark.contract("C1")
@pytest.mark.parametrize("good", ["a" * 8, "a" * 64, "A-Z_a-z-0_9"])
async def test_ids_at_the_bounds_are_taken(good: str, server: ReferenceServer, tmp_path: Path) -> None:
    """C1: 8 and 64 characters, and every kind of character that is allowed."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            await log.conversation(good).append({"a": 1}).acknowledged()
            assert await contents(server) == {good: ['{"a":1}']}


# --- sizes and counts ------------------------------------------------------------------------------------------------

TOO_LARGE: dict[str, tuple[Callable[[Any], Any], tuple[str, int, int]]] = {
    "an empty batch": (lambda chat: chat.extend([]), ("count", 0, 250)),
    "an empty batch that may be cut": (lambda chat: chat.extend([], atomic=False), ("count", 0, 250)),
    "251 items": (lambda chat: chat.extend([{"n": n} for n in range(251)]), ("count", 251, 250)),
    "an item of 262,145 bytes": (
        lambda chat: chat.append(item_of(ITEM_BYTES_MAX + 1)),
        ("item", ITEM_BYTES_MAX + 1, ITEM_BYTES_MAX),
    ),
    "262,145 bytes of CJK text": (
        lambda chat: chat.append(item_of(ITEM_BYTES_MAX + 1, "漢字")),
        ("item", ITEM_BYTES_MAX + 1, ITEM_BYTES_MAX),
    ),
    "an item too large among others": (
        lambda chat: chat.extend([{"a": 1}, item_of(ITEM_BYTES_MAX + 1)]),
        ("item", ITEM_BYTES_MAX + 1, ITEM_BYTES_MAX),
    ),
    "one too large of many that may be cut": (
        lambda chat: chat.extend([{"a": 1}] * 300 + [item_of(ITEM_BYTES_MAX + 1)], atomic=False),
        ("item", ITEM_BYTES_MAX + 1, ITEM_BYTES_MAX),
    ),
    "a batch of 1,048,577 bytes": (
        lambda chat: chat.extend(batch_of(BATCH_BYTES_MAX + 1)),
        ("batch", BATCH_BYTES_MAX + 1, BATCH_BYTES_MAX),
    ),
}


@pytest.mark.anyio
@pytest.mark.contract("C2", "C4")
@pytest.mark.parametrize(("call", "expected"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
async def test_one_byte_or_item_too_many_is_refused_whole(
    call: Callable[[Any], Any], expected: tuple[str, int, int], server: ReferenceServer, tmp_path: Path
) -> None:
    """C2, C4: the error says what was measured, how much it was and how much may be; nothing of the batch is kept."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            async with nothing_kept(server, log, chat):
                with pytest.raises(TooLargeError) as caught:
                    call(chat)
    error = caught.value
    assert (error.what, error.size, error.limit) == expected
    assert (error.outcome, error.retry_after, error.status) == ("not_sent", None, None)


@pytest.mark.anyio
@pytest.mark.contract("C2")
@pytest.mark.parametrize("text", ["x", "漢字", "é", "😀"])
async def test_an_item_of_262144_bytes_is_kept_and_comes_back(
    text: str, server: ReferenceServer, tmp_path: Path
) -> None:
    """C2: equal is allowed, measured in the bytes of UTF-8 and not in characters or in escapes."""
    item = item_of(ITEM_BYTES_MAX, text)
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            chat = log.conversation(CHAT)
            await chat.append(item).acknowledged()
            assert len((await contents(server))[CHAT][0].encode()) == ITEM_BYTES_MAX
            assert [entry.payload async for entry in chat.replay()] == [item]


@pytest.mark.anyio
@pytest.mark.contract("C2", "C4")
async def test_full_batches_are_kept_and_come_back(server: ReferenceServer, tmp_path: Path) -> None:
    """C2: 1,048,576 bytes, and 250 items, are a batch each."""
    full, many = batch_of(BATCH_BYTES_MAX), [{"n": n} for n in range(250)]
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            chat = log.conversation(CHAT)
            first = await chat.extend(full).acknowledged()
            second = await chat.extend(many).acknowledged()
            assert (first.first_seq, first.last_seq, second.first_seq, second.last_seq) == (0, 4, 5, 254)
            assert sum(len(text.encode()) for text in (await contents(server))[CHAT][:5]) == BATCH_BYTES_MAX
            replayed = [entry async for entry in chat.replay()]
    assert [entry.payload for entry in replayed] == full + many
    # One batch, one time of recording.
    assert len({entry.recorded_at for entry in replayed[:5]}) == len({entry.recorded_at for entry in replayed[5:]}) == 1


# --- what JSON cannot hold -------------------------------------------------------------------------------------------


class Model(BaseModel):
    """A model that lets through what JSON has no word for."""

    ratio: float


class Plain:
    """Any object."""


def nested(levels: int, inside: Any = None) -> Any:
    """``inside`` below ``levels`` lists."""
    for _ in range(levels):
        inside = [inside]
    return inside


def circle() -> list[Any]:
    round_and_round: list[Any] = []
    round_and_round.append(round_and_round)
    return round_and_round


BAD_VALUES: dict[str, Any] = {
    "an int key": {1: "a"},
    "a None key": {None: "a"},
    "a bool key": {True: "a"},
    "a float key": {1.5: "a"},
    "a bytes key": {b"k": "a"},
    "a tuple key": {("a", "b"): "a"},
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "a lone high surrogate": "a\ud800b",
    "a lone low surrogate": "\udc00",
    "surrogates in the wrong order": "\ude00\ud83d",
    "a lone surrogate in a key": {"\ud800": 1},
    "bytes": b"bytes",
    "a bytearray": bytearray(b"bytes"),
    "a datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "a date": date(2026, 1, 1),
    "a set": {1, 2},
    "a frozenset": frozenset((1, 2)),
    "a tuple": (1, 2),
    "an empty tuple": (),
    "a Decimal": decimal.Decimal("1.5"),
    "a UUID": uuid.UUID(int=1),
    "a complex number": 1j,
    "an object": Plain(),
    "a class": Plain,
    "a generator": (n for n in range(3)),
    "an int of 4,301 digits": 10**4300,
    "a negative int of 4,301 digits": -(10**4300),
    "129 levels": nested(128),
    "a thousand levels": nested(1000),
    "a list that holds itself": circle(),
}


@pytest.mark.anyio
@pytest.mark.contract("C3")
@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES.keys())
async def test_what_would_not_come_back_equal_is_refused_wherever_it_stands(
    bad: Any, server: ReferenceServer, tmp_path: Path
) -> None:
    """C3: at the top and at depth, alone and in the middle of a batch; the error names the path, never the value."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            deep = {"role": "user", "parts": [{"ok": 1}, {"deep": {"er": [0, bad]}}]}
            async with nothing_kept(server, log, chat):
                with pytest.raises(InvalidItemError) as at_the_top:
                    chat.append({"secret-word": bad})
                with pytest.raises(InvalidItemError) as at_depth:
                    chat.append(deep)
                with pytest.raises(InvalidItemError) as in_a_batch:
                    chat.extend([{"fine": 1}, {"fine": 2}, deep, {"fine": 3}])
                with pytest.raises(InvalidItemError) as in_a_cut_batch:
                    chat.extend([{"fine": 1}] * 300 + [deep], atomic=False)
                async with Client(server.url, auth=server.auth) as client:
                    with pytest.raises(InvalidItemError) as in_the_client:
                        await client.append_memory(CHAT, [deep])
    assert at_the_top.value.path.startswith("$.secret-word") or at_the_top.value.path.startswith('$["secret-word"]')
    assert at_depth.value.path.startswith("$.parts[1].deep.er[1]")
    assert in_a_batch.value.path.startswith("$.items[2].parts[1].deep.er[1]")
    assert in_a_cut_batch.value.path.startswith("$.items[300].parts[1].deep.er[1]")
    assert in_the_client.value.path.startswith("$.items[0].parts[1].deep.er[1]")
    for caught in (at_the_top, at_depth, in_a_batch, in_a_cut_batch, in_the_client):
        assert isinstance(caught.value, PermanentError)
        assert caught.value.reason
        assert (caught.value.outcome, caught.value.retry_after) == ("not_sent", None)


NO_OBJECTS: dict[str, Any] = {
    "a list": [{"role": "user"}],
    "a string": "hello",
    "a JSON text": '{"role": "user"}',
    "bytes": b'{"role": "user"}',
    "None": None,
    "a number": 7,
    "True": True,
    "a tuple of pairs": (("role", "user"),),
    "an object": Plain(),
    "a model class": Model,
    "a model that holds NaN": Model(ratio=float("nan")),
}


@pytest.mark.anyio
@pytest.mark.contract("C3")
@pytest.mark.parametrize("bad", NO_OBJECTS.values(), ids=NO_OBJECTS.keys())
async def test_only_an_object_is_an_item(bad: Any, server: ReferenceServer, tmp_path: Path) -> None:
    """C3: a list or a string is not taken for the object that it may hold."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            async with nothing_kept(server, log, chat):
                with pytest.raises(InvalidItemError) as alone:
                    chat.append(bad)
                with pytest.raises(InvalidItemError) as in_a_batch:
                    chat.extend([{"fine": 1}, bad])
    assert alone.value.path.startswith("$")
    assert in_a_batch.value.path.startswith("$.items[1]")
    assert alone.value.outcome == in_a_batch.value.outcome == "not_sent"


class Colour(enum.Enum):
    RED = "red"


class Word(str, enum.Enum):  # noqa: UP042 - people write it, and it behaves otherwise than a StrEnum
    HELLO = "hello"


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    __slots__ = ()


@pytest.mark.anyio
@pytest.mark.contract("C3")
async def test_what_has_a_json_value_is_kept_as_that_value(server: ReferenceServer, tmp_path: Path) -> None:
    """C3: str and int enums, subclasses of dict, any mapping, a model: they come back as the plain value they hold."""
    given: list[tuple[Any, dict[str, Any]]] = [
        ({"word": Word.HELLO, "level": Level.HIGH}, {"word": "hello", "level": 3}),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (MappingProxyType({"a": OrderedDict(x=None)}), {"a": {"x": None}}),
        ({Text("key"): Text("text")}, {"key": "text"}),
        (Model(ratio=0.1), {"ratio": 0.1}),
        ({"levels": nested(127)}, {"levels": nested(127)}),
        ({"digits": 10**4300 - 1}, {"digits": 10**4300 - 1}),
        ({"pair": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")}, {"pair": "😀"}),
        ({}, {}),
        ({"": {"": ""}}, {"": {"": ""}}),
        ({"1": True, "2": 1, "3": 1.0, "4": -0.0}, {"1": True, "2": 1, "3": 1.0, "4": -0.0}),
    ]
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            chat = log.conversation(CHAT)
            receipts = [chat.append(item) for item, _ in given]
            with pytest.raises(InvalidItemError):
                chat.append({"colour": Colour.RED})  # an enum of neither str nor int has no JSON value
            await receipts[-1].acknowledged()
            replayed = [entry.payload async for entry in chat.replay()]
    # repr tells 1 from True and from 1.0, -0.0 from 0.0, and a plain type from a subclass.
    assert [repr(payload) for payload in replayed] == [repr(expected) for _, expected in given]


@pytest.mark.anyio
@pytest.mark.contract("C3")
async def test_changing_an_item_after_the_append_changes_nothing(server: ReferenceServer, tmp_path: Path) -> None:
    """C3: verbatim means as it was when it was handed over."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            chat = log.conversation(CHAT)
            item: dict[str, Any] = {"parts": ["a"]}
            receipt = chat.append(item)
            item["parts"].append("b")
            await receipt.acknowledged()
            assert (await contents(server))[CHAT] == ['{"parts":["a"]}']


# --- limits of reads -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C8", "C10")
@pytest.mark.parametrize("limit", [0, 1001, -1, True, 1.0, "10", None])
async def test_a_page_of_none_or_of_more_than_a_thousand_is_not_asked_for(
    limit: Any, server: ReferenceServer, tmp_path: Path
) -> None:
    """C8: the server would take 0, whose page is never short. ValueError names the argument and what it was."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            async with nothing_kept(server, log, chat), Client(server.url, auth=server.auth) as client:
                calls_before = server.counters.calls.copy()
                for call in (
                    lambda: client.replay_memory(CHAT, 0, limit),
                    lambda: client.recall_memory(CHAT, limit),
                    lambda: client.list_conversations(limit),
                    lambda: chat.recall(limit),
                ):
                    with pytest.raises(ValueError, match="limit") as caught:
                        await call()
                    assert repr(limit) in str(caught.value)
                assert server.counters.calls == calls_before


@pytest.mark.anyio
@pytest.mark.contract("C8")
@pytest.mark.parametrize("offset", [-1, True, 1.5, "0", None])
async def test_a_position_before_the_first_is_not_asked_for(
    offset: Any, server: ReferenceServer, tmp_path: Path
) -> None:
    """C8: positions count from 0."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            async with nothing_kept(server, log, chat), Client(server.url, auth=server.auth) as client:
                with pytest.raises(ValueError, match="offset"):
                    await client.replay_memory(CHAT, offset)
                with pytest.raises(ValueError, match="position"):
                    chat.replay(offset)


# --- wrong credentials -----------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C9")
async def test_a_wrong_password_stops_sending_and_nothing_else(
    server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Appends go on, one warning, blocked with the reason; the right password, later, drains it in order."""
    user, password = server.auth
    with anyio.fail_after(PATIENCE):
        network = CountingTransport()
        wrong = (user, "not-the-password")
        log = open_log(server.url, auth=wrong, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0.1, transport=network)
        chat = log.conversation(CHAT)
        await chat.append({"n": 0}).stored()
        await until(lambda: log.statistics().state == "blocked")
        # Several more probes, and appends between them, are no further news.
        for n in range(1, 4):
            await chat.append({"n": n}).stored()
            probes = network.requests
            await until(lambda probes=probes: network.requests > probes + 2)
        statistics = log.statistics()
        assert statistics.state == "blocked"
        assert "credentials" in (statistics.reason or "")
        report = await log.flush(PATIENCE)  # returns early: nothing can move
        assert (report.complete, report.acknowledged, report.pending, report.refused) == (False, 0, 4, 0)
        assert (report.state, report.reason) == ("blocked", log.statistics().reason)
        assert await log.dead_letters() == []
        with pytest.raises(AuthenticationError) as caught:
            await log.check()
        assert caught.value.status == 401
        warnings = warnings_of(caplog)
        assert len(warnings) == 1, caplog.text
        assert "blocked" in warnings[0].getMessage()
        with pytest.raises(TimeoutError):
            await chat.append({"n": 4}).acknowledged(0.01)
        await log.close()
        assert "not-the-password" not in caplog.text
        assert await contents(server) == {}
        async with open_log(server.url, auth=(user, password), buffer_dir=tmp_path, retry=QUICK) as log:
            assert (await log.flush(PATIENCE)).complete
            assert books(log)["acknowledged_items"] == 5
            ack = await log.conversation(CHAT).append({"n": 5}).acknowledged()
            assert ack.first_seq == 5
        assert await contents(server) == {CHAT: [f'{{"n":{n}}}' for n in range(6)]}


@pytest.mark.anyio
@pytest.mark.contract("C9")
async def test_a_read_only_token_is_the_operators_problem_and_no_dead_letter(tmp_path: Path) -> None:
    """C9: `unprocessable_parameters` for a Bearer token speaks of the token; the items are kept."""
    with memlog.testing.reference_server(read_tokens=["read-only-token"]) as server, anyio.fail_after(PATIENCE):
        log = open_log(server.url, auth="read-only-token", buffer_dir=tmp_path, retry=QUICK, flush_timeout=0.1)
        await log.conversation(CHAT).append({"n": 0}).stored()
        await until(lambda: log.statistics().state == "blocked")
        assert "Basic" in (log.statistics().reason or "")
        with pytest.raises(AuthenticationError) as caught:
            await log.check()
        assert caught.value.code == "unprocessable_parameters"
        assert await log.dead_letters() == []
        assert books(log)["pending_items"] == 1
        await log.close()
        assert await contents(server) == {}


# --- wrong addresses -------------------------------------------------------------------------------------------------


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def html_page(seen: Seen) -> None:
    seen.respond(200, b"<!doctype html><title>Welcome</title><p>It works!", kind="text/html")


def redirect_elsewhere(seen: Seen) -> None:
    seen.respond(307, headers={"Location": "http://elsewhere.example/mcp"})


WRONG_ADDRESSES: dict[str, tuple[Callable[[Seen], None], type[Exception]]] = {
    "an HTML page": (html_page, ProtocolError),
    "a redirect elsewhere": (redirect_elsewhere, RedirectRefusedError),
    "a redirect that changes the method": (
        lambda seen: seen.respond(302, headers={"Location": "http://elsewhere.example/mcp"}),
        RedirectRefusedError,
    ),
}


@pytest.mark.anyio
@pytest.mark.contract("C6")
@pytest.mark.parametrize(("answer", "error"), WRONG_ADDRESSES.values(), ids=WRONG_ADDRESSES.keys())
async def test_a_wrong_address_blocks_with_the_reason_and_keeps_everything(
    answer: Callable[[Seen], None],
    error: type[Exception],
    server: ReferenceServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever answers there is no memory server: one warning, nothing refused, all of it sent once it is one."""
    with anyio.fail_after(PATIENCE):
        with RawServer(answer) as stranger:
            log = open_log(stranger.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0.1)
            chat = log.conversation(CHAT)
            for n in range(3):
                await chat.append({"n": n}).stored()
            await until(lambda: log.statistics().state == "blocked")
            probes = len(stranger.seen)
            await until(lambda: len(stranger.seen) > probes + 4)
            with pytest.raises(error):
                await log.check()
            report = await log.flush(PATIENCE)
            assert (report.complete, report.pending, report.state) == (False, 3, "blocked")
            assert report.reason
            assert server.auth[1] not in report.reason.split()
            assert await log.dead_letters() == []
            warnings = warnings_of(caplog)
            assert len(warnings) == 1, caplog.text
            assert "blocked" in warnings[0].getMessage()
            await log.close()
            # No payload ever left for the stranger's next stop, and reopening finds everything.
            log = open_log(stranger.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0.1)
            assert books(log)["pending_items"] == 3
            await log.close()
        # The address begins to be right: the same port, now with a memory server behind it.
        server._port = stranger.port
        server.stop()
        server.start()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            assert (await log.flush(PATIENCE)).complete
        assert await contents(server) == {CHAT: ['{"n":0}', '{"n":1}', '{"n":2}']}


@pytest.mark.anyio
@pytest.mark.contract("C6")
async def test_a_closed_port_makes_it_wait_and_the_server_coming_back_drains_it(
    server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody there is not somebody wrong: waiting, one warning, and it goes on by itself."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            for n in range(3):
                await chat.append({"n": n}).stored()
            await until(lambda: log.statistics().state == "waiting")
            with pytest.raises(ConnectionFailedError) as caught:
                await log.check()
            assert caught.value.outcome == "not_sent"
            assert "no connection" in (log.statistics().reason or "")
            assert books(log)["pending_items"] == 3
            await chat.append({"n": 3}).stored()
            assert await log.dead_letters() == []
            warnings = warnings_of(caplog)
            assert len(warnings) == 1, caplog.text
            assert "waits" in warnings[0].getMessage()
            server.start()
            report = await log.flush(PATIENCE)
            assert (report.complete, report.pending, report.state) == (True, 0, "ok")
            assert await contents(server) == {CHAT: [f'{{"n":{n}}}' for n in range(4)]}
        assert len(warnings_of(caplog)) == 1, caplog.text


@pytest.mark.anyio
async def test_a_reason_tells_of_the_network_and_not_of_what_the_caller_was_doing() -> None:
    """Called while another error is handled, the client takes that one neither for the cause nor into its words."""
    with anyio.fail_after(PATIENCE):
        async with Client(f"http://127.0.0.1:{unused_port()}/mcp", retry=QUICK) as client:
            try:
                raise ValueError("what a user typed")
            except ValueError:
                with pytest.raises(ConnectionFailedError) as caught:
                    await client.append_memory(CHAT, [{"a": 1}])
    assert "typed" not in str(caught.value)
    assert "no connection" in str(caught.value)


# --- a directory that cannot be used ---------------------------------------------------------------------------------


def a_file(tmp_path: Path) -> Path:
    path = tmp_path / "a-file"
    path.write_text("precious")
    return path


def below_a_file(tmp_path: Path) -> Path:
    return a_file(tmp_path) / "memory"


def a_dangling_link(tmp_path: Path) -> Path:
    link = tmp_path / "loop"
    link.symlink_to(link)
    return link


def where_nothing_can_be_made(_: Path) -> Path:
    if not Path("/proc/self").exists():
        pytest.skip("this system has no /proc")
    return Path("/proc/memory")


@pytest.mark.anyio
@pytest.mark.parametrize("make", [a_file, below_a_file, a_dangling_link, where_nothing_can_be_made])
async def test_a_directory_that_is_none_is_refused_at_open(
    make: Callable[[Path], Path], server: ReferenceServer, tmp_path: Path
) -> None:
    """The error comes when the log is opened, names path and reason, and harms neither what is there nor a next try."""
    path = make(tmp_path)
    with anyio.fail_after(PATIENCE):
        with pytest.raises(BufferUnusableError) as caught:
            open_log(server.url, auth=server.auth, buffer_dir=path)
        assert Path(caught.value.path) == path
        assert caught.value.reason
        assert caught.value.retry_after is None
        if (tmp_path / "a-file").exists():
            assert (tmp_path / "a-file").read_text() == "precious"
        assert await contents(server) == {}
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "fine") as log:
            assert (await log.conversation(CHAT).append({"n": 0}).acknowledged()).first_seq == 0


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Permission bits mean nothing to root: be somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no permission bits of this kind")
@pytest.mark.anyio
async def test_a_read_only_directory_is_refused_at_open(server: ReferenceServer) -> None:
    """Also where the folder is there from better days; made writable, it serves again with all that was in it."""
    # Not below tmp_path, whose parents an ordinary user may not enter.
    with tempfile.TemporaryDirectory() as outer, anyio.fail_after(PATIENCE):
        Path(outer).chmod(0o755)
        buffer_dir = Path(outer, "memory")
        buffer_dir.mkdir()
        buffer_dir.chmod(0o555)
        with as_an_ordinary_user(), pytest.raises(BufferUnusableError) as caught:
            open_log(server.url, auth=server.auth, buffer_dir=buffer_dir)
        assert (Path(caught.value.path), caught.value.reason) == (buffer_dir, "Permission denied")
        buffer_dir.chmod(0o777)
        server.stop()
        with as_an_ordinary_user():
            log = open_log(server.url, auth=server.auth, buffer_dir=buffer_dir, retry=QUICK, flush_timeout=0)
            await log.conversation(CHAT).append({"n": 0}).stored()
            await log.close()
        (site,) = buffer_dir.iterdir()
        site.chmod(0o555)
        with as_an_ordinary_user(), pytest.raises(BufferUnusableError, match="Permission denied"):
            open_log(server.url, auth=server.auth, buffer_dir=buffer_dir)
        site.chmod(0o777)
        server.start()
        async with open_log(server.url, auth=server.auth, buffer_dir=buffer_dir) as log:
            assert (await log.conversation(CHAT).append({"n": 1}).acknowledged()).first_seq == 1
        assert await contents(server) == {CHAT: ['{"n":0}', '{"n":1}']}


# --- what waits for another site -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_waits_for_another_address_is_told_once_with_the_cure(
    server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning with the count, the address and how to send it; following it sends it, and there is none any more."""
    old = f"http://127.0.0.1:{unused_port()}/old"
    with anyio.fail_after(PATIENCE):
        log = open_log(old, auth=("old-site", "old-secret"), buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
        for n in range(3):
            await log.conversation(CHAT).append({"n": n}).stored()
        # Held by a living log, it is being sent and is nobody's worry.
        caplog.clear()
        other = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK)
        assert [record for record in warnings_of(caplog) if "another site" in record.getMessage()] == []
        await other.close()
        await log.close()
        caplog.clear()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            warnings = warnings_of(caplog)
            assert len(warnings) == 1, caplog.text
            text = warnings[0].getMessage()
            assert "3 item(s)" in text
            assert repr(old) in text
            assert repr("old-site") in text
            assert "open a log there" in text
            assert "old-secret" not in caplog.text
            assert (await log.conversation(CHAT).append({"new": True}).acknowledged()).first_seq == 0
            assert books(log)["stored_items"] == 1
        assert len(warnings_of(caplog)) == 1, caplog.text
        log = open_log(old, auth=("old-site", "old-secret"), buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
        assert books(log)["pending_items"] == 3
        await log.close()
