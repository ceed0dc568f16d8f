"""`open_log`, and what holds for the log, its handles, its receipts and its reports."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import sqlite3
import ssl
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from between import Between, Call
from books import PATIENCE, QUICK, books, contents, until, warnings_of

import memlog
from memlog import BufferLimits, PermanentError, RetryPolicy, Statistics, core, engine, open_log, spool, writer
from memlog.errors import (
    AuthenticationError,
    BufferUnusableError,
    ClosedError,
    ConnectionFailedError,
    ConversationFullError,
    InvalidConversationIdError,
    RateLimitedError,
)
from memlog.payload import encode_batch
from memlog.testing import reference_server

if TYPE_CHECKING:
    from pathlib import Path

    from memlog.events import Event
    from memlog.testing import ReferenceServer

CHAT = "conversation-1"
OTHER = "conversation-2"


def numbered(count: int, start: int = 0) -> list[dict[str, int]]:
    return [{"n": n} for n in range(start, start + count)]


def texts(count: int, start: int = 0) -> list[str]:
    return [f'{{"n":{n}}}' for n in range(start, start + count)]


@pytest.mark.anyio
async def test_leaving_a_log_raises_what_its_user_raised(server: ReferenceServer, tmp_path: Path) -> None:
    """The very object, and not in a group; what was appended is acknowledged first."""
    mine = LookupError("mine")
    with anyio.fail_after(PATIENCE):
        with pytest.raises(LookupError) as caught:
            async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
                log.conversation(CHAT).append({"n": 0})
                raise mine
        assert caught.value is mine
        assert log.closed
    assert await contents(server) == {CHAT: texts(1)}


@pytest.mark.anyio
async def test_a_dead_letter_can_be_exported_as_json(server: ReferenceServer, tmp_path: Path) -> None:
    """Whole, with the reason and what the server said."""
    long = {"text": "x" * 2000}
    with anyio.fail_after(PATIENCE):
        refusing = Between(lambda call: call.refuse() if call.tool == "append_memory" else None)
        settings: dict[str, Any] = {"auth": server.auth, "buffer_dir": tmp_path, "retry": QUICK}
        async with open_log(server.url, transport=refusing, flush_timeout=0, **settings) as log:
            receipt = log.conversation(CHAT).extend([{"n": 0}, long])
            with pytest.raises(PermanentError):
                await receipt.acknowledged()
            [letter] = await log.dead_letters()
    found = json.loads(json.dumps(letter.to_dict()))
    error = found.pop("error")
    assert found == {
        "id": receipt.id,
        "conversation_id": CHAT,
        "items": 2,
        "bytes": letter.bytes,
        "refused_at": letter.refused_at.isoformat(),
        "payloads": [{"n": 0}, long],
    }
    assert error["type"] == "InvalidRequestError"
    assert (error["status"], error["code"], error["outcome"]) == (400, -32602, "refused")
    assert error["message"] == str(letter.error)


@pytest.mark.anyio
async def test_an_ssl_context_reaches_the_client_and_decides_about_sharing(tmp_path: Path) -> None:
    """Two logs of one site with two ideas of whom to trust cannot share connections."""
    own = ssl.create_default_context()
    log = open_log("https://127.0.0.1:9/mcp", buffer_dir=tmp_path, ssl_context=own, flush_timeout=0)
    assert log._core.settings.make_client()._transport._ssl_context is own
    with pytest.raises(ValueError, match="ssl_context"):
        open_log("https://127.0.0.1:9/mcp", buffer_dir=tmp_path, flush_timeout=0)
    await log.close()


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_environment_says_what_the_call_leaves_out(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MEMLOG_URL, MEMLOG_AUTH and MEMLOG_BUFFER_DIR, read when the log is opened."""
    monkeypatch.setenv("MEMLOG_URL", server.url)
    monkeypatch.setenv("MEMLOG_AUTH", ":".join(server.auth))
    monkeypatch.setenv("MEMLOG_BUFFER_DIR", str(tmp_path / "from-environment"))
    with anyio.fail_after(PATIENCE):
        async with open_log() as log:
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
            assert "from-environment" in repr(log)
    assert await contents(server) == {CHAT: texts(1)}


@pytest.mark.anyio
async def test_what_the_call_says_goes_before_the_environment(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three, in one call."""
    monkeypatch.setenv("MEMLOG_URL", "http://127.0.0.1:1/nowhere")
    monkeypatch.setenv("MEMLOG_AUTH", "nobody:nothing")
    monkeypatch.setenv("MEMLOG_BUFFER_DIR", str(tmp_path / "from-environment"))
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "said") as log:
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
    assert not (tmp_path / "from-environment").exists()


@pytest.mark.anyio
async def test_a_password_in_the_environment_may_hold_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Basic authentication, the first colon is the border."""
    monkeypatch.setenv("MEMLOG_AUTH", "site:pass:word")
    with reference_server(auth=("site", "pass:word")) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, buffer_dir=tmp_path) as log:
            await log.check()


def test_credentials_without_a_colon_are_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands there may be the password alone."""
    monkeypatch.setenv("MEMLOG_AUTH", "the-secret-alone")
    with pytest.raises(ValueError, match="MEMLOG_AUTH") as caught:
        open_log("http://127.0.0.1:1/mcp", buffer_dir=tmp_path)
    assert "the-secret-alone" not in str(caught.value)


def test_without_any_address_the_error_says_how_to_give_one(tmp_path: Path) -> None:
    """Neither argument nor variable."""
    with pytest.raises(ValueError, match="MEMLOG_URL"):
        open_log(buffer_dir=tmp_path)


@pytest.mark.anyio
async def test_without_a_directory_the_platform_s_place_for_state_is_taken(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux below XDG_STATE_HOME."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth) as log:
            await log.conversation(CHAT).append({"n": 0}).stored()
    if sys.platform == "linux":
        assert list((tmp_path / "state" / "memlog").glob("*/*.db"))


BAD_SETTINGS: dict[str, dict[str, Any]] = {
    "no scheme": {"url": "127.0.0.1/mcp"},
    "another scheme": {"url": "ftp://127.0.0.1/mcp"},
    "no host": {"url": "http:///mcp"},
    "not a string": {"url": 7},
    "credentials in the URL": {"url": "http://user:secret@127.0.0.1/mcp"},
    "credentials without a scheme": {"url": "user:secret@127.0.0.1/mcp"},
    "a password with a #": {"url": "http://user:secret#more@127.0.0.1/mcp"},
    "a port that is none": {"url": "http://127.0.0.1:port/mcp"},
    "Basic over plain http to elsewhere": {"url": "http://memory.example/mcp"},
    "a timeout of 0": {"timeout": 0},
    "an endless timeout": {"timeout": float("inf")},
    "a timeout of text": {"timeout": "30"},
    "a user with a colon": {"auth": ("us:er", "secret")},
    "a user without a name": {"auth": ("", "secret")},
    "a token with a space": {"auth": "secret token"},
    "credentials in a list": {"auth": ["user", "secret"]},
    "a triple": {"auth": ("user", "secret", "more")},
}


@pytest.mark.parametrize("settings", BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_a_setting_that_cannot_be_meant_is_refused_before_anything_is_made(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """ValueError in the caller's face, without the secret, and no file for it."""
    good: dict[str, Any] = {"url": "http://127.0.0.1:1/mcp", "auth": ("user", "secret"), "buffer_dir": tmp_path / "new"}
    with pytest.raises(ValueError) as caught:
        open_log(**{**good, **settings})
    assert str(caught.value)
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.anyio
async def test_plain_http_to_elsewhere_is_possible_on_request(tmp_path: Path) -> None:
    """`allow_insecure` is for networks that are somebody's own."""
    with anyio.fail_after(PATIENCE):
        log = open_log(
            "http://memory.example/mcp",
            auth=("user", "secret"),
            buffer_dir=tmp_path,
            allow_insecure=True,
            flush_timeout=0,
        )
        await log.close()


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        (RetryPolicy, {"attempts": 0}),
        (RetryPolicy, {"total": -1}),
        (RetryPolicy, {"delay_min": 0}),
        (RetryPolicy, {"delay_min": 2, "delay_max": 1}),
        (RetryPolicy, {"requests_in_flight": 0}),
        (RetryPolicy, {"blocked_delay": "30"}),
        (BufferLimits, {"unstored_bytes": 0}),
        (BufferLimits, {"disk_bytes": -1}),
        (BufferLimits, {"disk_bytes": 1.5}),
        (BufferLimits, {"disk_bytes": True}),
    ],
)
def test_values_check_themselves_and_are_frozen(value: Any, settings: dict[str, Any]) -> None:
    """The error names the field and what was given; nothing can be changed afterwards."""
    name = list(settings)[-1]
    with pytest.raises(ValueError, match=name) as caught:
        value(**settings)
    assert repr(settings[name]) in str(caught.value)
    with pytest.raises(FrozenInstanceError):
        setattr(value(), name, 1)
    with pytest.raises(TypeError):
        value(1)  # keyword-only


# --- handles ---------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_opening_twice_gives_a_counted_handle_on_the_same_log(server: ReferenceServer, tmp_path: Path) -> None:
    """One buffer, one sender: closing one handle leaves the other working, closing the last lets the directory go."""
    with anyio.fail_after(PATIENCE):
        first = open_log(server.url, auth=server.auth, buffer_dir=tmp_path)
        second = open_log(server.url, auth=server.auth, buffer_dir=str(tmp_path) + "/./")
        await first.conversation(CHAT).append({"n": 0}).acknowledged()
        assert books(second)["acknowledged_items"] == 1
        await first.close()
        with pytest.raises(ClosedError):
            first.conversation(CHAT).append({"n": -1})
        await second.conversation(CHAT).append({"n": 1}).acknowledged()
        assert len(list(tmp_path.glob("*/*.db"))) == 1
        await second.close()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, timeout=7) as third:
            await third.conversation(CHAT).append({"n": 2}).acknowledged()
        assert len(list(tmp_path.glob("*/*.db"))) == 1
    assert await contents(server) == {CHAT: texts(3)}


@pytest.mark.anyio
async def test_a_handle_closed_twice_counts_once(server: ReferenceServer, tmp_path: Path) -> None:
    """Close is idempotent, also at the same time, and leaving the context after it is no error."""
    with anyio.fail_after(PATIENCE):
        other = open_log(server.url, auth=server.auth, buffer_dir=tmp_path)
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(log.close)
            await log.close()
        await other.conversation(CHAT).append({"n": 0}).acknowledged()
        await other.close()
        await other.close()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auth", ("demo", "another-secret")),
        ("timeout", 7.0),
        ("retry", RetryPolicy(attempts=2)),
        ("limits", BufferLimits(disk_bytes=10**6)),
        ("on_event", print),
        ("allow_insecure", True),
    ],
)
async def test_opening_again_with_other_settings_is_an_error_that_names_them(
    name: str, value: Any, server: ReferenceServer, tmp_path: Path
) -> None:
    """Two opinions about one log cannot both hold; the first log is not disturbed."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            with pytest.raises(ValueError, match=name) as caught:
                open_log(**{"url": server.url, "auth": server.auth, "buffer_dir": tmp_path, name: value})
            assert "another-secret" not in str(caught.value)
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
        # The refused handle was not counted: the directory is free.
        async with open_log(**{"url": server.url, "auth": server.auth, "buffer_dir": tmp_path, name: value}):
            pass


@pytest.mark.anyio
async def test_other_users_and_other_directories_are_other_logs(tmp_path: Path) -> None:
    """Endpoint, user and directory decide; each has books of its own."""
    with reference_server(sites={"second": "word"}) as server, anyio.fail_after(PATIENCE):
        async with (
            open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "a") as first,
            open_log(server.url, auth=("second", "word"), buffer_dir=tmp_path / "a") as second,
            open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "b") as third,
        ):
            await first.conversation(CHAT).append({"n": 0}).acknowledged()
            await second.conversation(CHAT).append({"n": 1}).acknowledged()
            await third.conversation(CHAT).append({"n": 2}).acknowledged()
            assert [books(log)["stored_items"] for log in (first, second, third)] == [1, 1, 1]
        assert await contents(server, "demo") == {CHAT: ['{"n":0}', '{"n":2}']}
        assert await contents(server, "second") == {CHAT: ['{"n":1}']}


@pytest.mark.anyio
async def test_a_closed_log_says_so_and_what_is_stored_goes_out_later(server: ReferenceServer, tmp_path: Path) -> None:
    """Every method that would need the log raises ClosedError; what never waits still answers."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
        chat = log.conversation(CHAT)
        receipt = chat.append({"n": 0})
        await receipt.stored()
        await log.close()
        with pytest.raises(ClosedError):
            await receipt.acknowledged(PATIENCE)
        await receipt.stored()
        for call in (lambda: chat.append({}), lambda: chat.extend([{}]), chat.replay):
            with pytest.raises(ClosedError):
                call()
        letter = memlog.DeadLetter("x.1", CHAT, 1, 1, None, None, [])  # type: ignore[arg-type]
        for wait in (
            chat.recall,
            log.flush,
            log.check,
            log.dead_letters,
            log.duplicates,
            lambda: log.requeue(letter),
            lambda: log.drop(letter),
        ):
            with pytest.raises(ClosedError):
                await wait()
        assert "closed" in repr(log)
        assert isinstance(log.statistics(), Statistics)
        server.start()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            assert (await log.flush(PATIENCE)).complete
    assert await contents(server) == {CHAT: texts(1)}


@pytest.mark.anyio
async def test_waiting_for_an_acknowledgement_ends_when_the_log_is_closed(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """ClosedError rather than a wait without end; the batch is on disk."""
    outcomes: list[object] = []
    with anyio.fail_after(PATIENCE):
        server.stop()
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
        receipt = log.conversation(CHAT).append({"n": 0})
        await receipt

        async def wait() -> None:
            try:
                outcomes.append(await receipt.acknowledged())
            except ClosedError as error:
                outcomes.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await log.close()
        assert [type(outcome) for outcome in outcomes] == [ClosedError]
        server.start()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            assert (await log.flush(PATIENCE)).complete


@pytest.mark.anyio
async def test_a_restart_finds_its_file_and_its_order_again(server: ReferenceServer, tmp_path: Path) -> None:
    """What an earlier log left goes out first, in order, whatever conversation it belongs to."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        for start in (0, 10):
            log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
            for item in numbered(10, start):
                log.conversation(CHAT).append(item)
                log.conversation(OTHER).append(item)
            assert (await log.flush(PATIENCE, until="stored")).complete
            await log.close()
        assert len(list(tmp_path.glob("*/*.db"))) == 1
        server.start()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            ack = await log.conversation(CHAT).append({"n": 20}).acknowledged()
            assert ack.first_seq == 20
            assert (await log.flush(PATIENCE)).complete
    assert await contents(server) == {CHAT: texts(21), OTHER: texts(20)}


@pytest.mark.parametrize("running", [True, False], ids=["with a server", "without a server"])
def test_not_closing_loses_nothing_and_makes_no_noise(running: bool, server: ReferenceServer, tmp_path: Path) -> None:
    """A script that just ends: all of it is stored, unsent items are told in one line, and the next start sends them."""
    if not running:
        server.stop()
    script = """
import sys, logging, memlog
logging.basicConfig(format="%(levelname)s %(message)s")
logging.getLogger("asyncio").setLevel("ERROR")  # in dev mode it tells of each step that a busy machine makes slow
log = memlog.open_log(sys.argv[1], auth=("demo", "demo"), buffer_dir=sys.argv[2])
chat = log.conversation("conversation-1")
for n in range(500):
    chat.append({"n": n})
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, server.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "may not last" not in line]
    unsent = [line for line in lines if "unsent" in line]
    others = [line for line in lines if "unsent" not in line]
    assert len(unsent) <= 1
    assert len(others) <= (0 if running else 1), ended.stderr  # without a server, that it waits for one
    if not running:
        assert "500 item(s)" in unsent[0]
        assert str(tmp_path) in unsent[0]
        server.start()
    with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK).sync as log:
        assert log.flush(PATIENCE).complete
        assert [item.payload["n"] for item in log.conversation(CHAT).replay()] == list(range(500))


# --- in memory -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_buffer_in_memory_acknowledges_but_stores_nothing(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stored` would be a lie and raises; all the rest is the same, and no file is made."""
    monkeypatch.chdir(tmp_path)
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=":memory:") as log:
            chat = log.conversation(CHAT)
            receipt = chat.extend(numbered(3))
            with pytest.raises(BufferUnusableError):
                await receipt.stored()
            with pytest.raises(BufferUnusableError):
                await receipt
            with pytest.raises(BufferUnusableError):
                await anyio.to_thread.run_sync(log.sync.conversation(CHAT).append({"n": 3}).stored)
            assert (await receipt.acknowledged()).last_seq == 2
            assert (await log.flush(PATIENCE)).complete
            assert [item.payload async for item in chat.replay()] == numbered(4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
async def test_buffers_in_memory_are_not_shared_and_say_what_is_lost(
    server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each opening has its own; what is unsent when it closes is gone, and that is said."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        first = open_log(server.url, auth=server.auth, buffer_dir=":memory:", retry=QUICK, flush_timeout=0)
        second = open_log(server.url, auth=server.auth, buffer_dir=":memory:", retry=QUICK, flush_timeout=0)
        first.conversation(CHAT).append({"n": 0})
        assert not (await first.flush(0.1)).complete
        assert (books(first)["pending_items"], books(second)["pending_items"]) == (1, 0)
        caplog.clear()
        await second.close()
        assert not [record for record in warnings_of(caplog) if "unsent" in record.getMessage()]
        await first.close()
        (told,) = [record.getMessage() for record in warnings_of(caplog) if "unsent" in record.getMessage()]
        assert "lost with this process" in told


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_callback_that_raises_is_logged_and_stops_nothing(
    server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every event still arrives, in a thread of its own, and everything is acknowledged."""
    seen: list[tuple[str, str]] = []

    def on_event(event: Event) -> None:
        seen.append((event.kind, threading.current_thread().name))
        raise LookupError("a defect in the callback")

    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, on_event=on_event) as log:
            for item in numbered(3):
                await log.conversation(CHAT).append(item).acknowledged()
            await until(lambda: len(seen) >= 6)
    assert {kind for kind, _ in seen} == {"stored", "acknowledged"}
    assert {thread for _, thread in seen}.isdisjoint({"MainThread", "memlog-engine", "memlog-writer"})
    logged = [record for record in caplog.records if record.exc_info and record.exc_info[0] is LookupError]
    assert len(logged) >= 3
    assert await contents(server) == {CHAT: texts(3)}


@pytest.mark.anyio
async def test_a_callback_may_use_the_blocking_face(server: ReferenceServer, tmp_path: Path) -> None:
    """Its thread is neither the engine nor the writer, so that waiting there waits for nobody it needs."""
    read: list[int] = []

    def on_event(event: Event) -> None:
        if event.kind == "acknowledged" and event.conversation_id == CHAT:
            read.append(len(log.sync.conversation(CHAT).recall()))

    with anyio.fail_after(PATIENCE):
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, on_event=on_event)
        await log.conversation(CHAT).extend(numbered(3)).acknowledged()
        await until(lambda: read)
        await log.close()
    assert read == [3]


@pytest.mark.anyio
async def test_an_outage_is_told_once_when_it_begins_and_once_when_it_ends(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """Events are changes of state, not attempts."""
    events: list[Event] = []
    with anyio.fail_after(PATIENCE):
        server.stop()
        async with open_log(
            server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, on_event=events.append
        ) as log:
            await log.conversation(CHAT).append({"n": 0}).stored()
            await until(lambda: [event for event in events if event.kind == "waiting"])
            assert log.statistics().state == "waiting"
            await log.conversation(CHAT).append({"n": 1}).stored()
            server.start()
            assert (await log.flush(PATIENCE)).complete
            await until(lambda: events[-1].kind == "acknowledged")
            assert (log.statistics().state, log.statistics().reason) == ("ok", None)
    changes = [event for event in events if event.kind not in ("stored", "acknowledged")]
    assert [event.kind for event in changes] == ["waiting", "ok"]
    assert isinstance(changes[0].error, ConnectionFailedError)
    assert changes[0].reason


@pytest.mark.anyio
async def test_credentials_that_fail_are_told_once_and_once_that_they_serve_again(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """However many probes lie in between."""
    events: list[Event] = []
    server.faults.add("status", status=401, times=None)
    with anyio.fail_after(PATIENCE):
        async with open_log(
            server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, on_event=events.append
        ) as log:
            receipt = log.conversation(CHAT).append({"n": 0})
            await until(lambda: server.counters.calls.total() >= 6)
            assert (log.statistics().state, log.statistics().gate_seconds is None) == ("blocked", False)
            server.faults.clear()
            await receipt.acknowledged()
            await until(lambda: events[-1].kind == "acknowledged")
    changes = [event for event in events if event.kind not in ("stored", "acknowledged")]
    assert [event.kind for event in changes] == ["blocked", "ok"]
    assert isinstance(changes[0].error, AuthenticationError)
    assert changes[0].reason


@pytest.mark.anyio
async def test_a_disk_in_trouble_is_told_once_and_once_that_it_serves_again(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many attempts lie in between; what was accepted meanwhile is stored then."""
    events: list[Event] = []
    commits = 0
    real = spool.Spool.commit

    def commit(self: spool.Spool) -> None:
        nonlocal commits
        if self._db.in_transaction and commits < 4:
            commits += 1
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_WRITE"
            raise error
        real(self)

    with anyio.fail_after(PATIENCE):
        async with open_log(
            server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, on_event=events.append
        ) as log:
            monkeypatch.setattr(spool.Spool, "commit", commit)
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
            await until(lambda: events[-1].kind == "acknowledged")
    changes = [event for event in events if event.kind not in ("stored", "acknowledged")]
    assert [event.kind for event in changes] == ["disk_trouble", "disk_ok"]
    assert "SQLITE_IOERR_WRITE" in (changes[0].reason or "")
    assert commits == 4


@pytest.mark.anyio
async def test_a_damaged_file_of_which_everything_goes_on_is_told_as_degraded(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """With what goes on, and where the file is kept; then it is sent, as what another process left."""
    events: list[Event] = []
    with anyio.fail_after(PATIENCE):
        server.stop()
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
        await log.conversation(CHAT).extend(numbered(3)).stored()
        await log.close()
        [path] = tmp_path.glob("*/*.db")
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("DROP INDEX pending_by_lane")  # then its tables are not those of a spool
        server.start()
        async with open_log(
            server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, on_event=events.append
        ) as log:
            await until(lambda: events and events[-1].kind == "acknowledged")
            assert log.statistics().lost_items == 0
    told = {event.kind: event for event in events}
    assert list(told) == ["degraded", "adopted", "acknowledged"]
    assert told["degraded"].items == told["adopted"].items == 3
    assert f"{path.name}.corrupt-" in (told["degraded"].reason or "")
    assert await contents(server) == {CHAT: texts(3)}


# --- flush, check, statistics ----------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_flush_tells_what_became_of_what_was_appended(server: ReferenceServer, tmp_path: Path) -> None:
    """Complete means that nothing is left of what had been appended before; an empty log is complete at once."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            report = await log.flush()
            assert (report.complete, report.acknowledged, report.pending, report.refused) == (True, 0, 0, 0)
            for item in numbered(20):
                log.conversation(CHAT).append(item)
            report = await log.flush(PATIENCE)
            assert (report.complete, report.pending, report.state, report.reason) == (True, 0, "ok", None)
            assert books(log)["acknowledged_items"] == 20
            with pytest.raises(FrozenInstanceError):
                report.complete = False  # type: ignore[misc]
            with pytest.raises(ValueError, match="until"):
                await log.flush(until="sent")  # type: ignore[arg-type]
    assert await contents(server) == {CHAT: texts(20)}


@pytest.mark.anyio
async def test_flush_until_stored_asks_the_disk_only(server: ReferenceServer, tmp_path: Path) -> None:
    """It is complete without any server, and everything appended before is on disk then."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0) as log:
            receipts = [log.conversation(CHAT).append(item) for item in numbered(20)]
            report = await log.flush(until="stored")
            assert (report.complete, report.acknowledged, report.pending) == (True, 0, 20)
            assert all(receipt.is_stored() for receipt in receipts)
            assert log.statistics().unstored_bytes == 0


@pytest.mark.anyio
async def test_flush_without_any_time_tells_how_things_are(server: ReferenceServer, tmp_path: Path) -> None:
    """A timeout of 0 is a look: complete where nothing is left, and not where something is."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            assert (await log.flush(0)).complete
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
            report = await log.flush(0)
            assert (report.complete, report.pending) == (True, 0)
            server.faults.add("stall", tool="append_memory", seconds=None)
            await log.conversation(CHAT).append({"n": 1}).stored()
            report = await log.flush(0)
            assert (report.complete, report.pending) == (False, 1)
            server.faults.clear()


@pytest.mark.anyio
async def test_flush_returns_at_its_deadline_and_changes_nothing(server: ReferenceServer, tmp_path: Path) -> None:
    """A server that takes its time: incomplete is an answer, not an error."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            server.faults.add("stall", tool="append_memory", seconds=None)
            receipt = log.conversation(CHAT).append({"n": 0})
            report = await log.flush(0.1)
            assert (report.complete, report.acknowledged, report.pending) == (False, 0, 1)
            server.faults.clear()
            assert (await receipt.acknowledged()).first_seq == 0
            assert (await log.flush()).complete


@pytest.mark.anyio
@pytest.mark.contract("C5", "C11")
async def test_flush_returns_early_when_the_server_asked_for_more_time_than_there_is(
    server: ReferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C5: a rate limit closes the gate for the site; nothing is refused, nothing is sent meanwhile."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, flush_timeout=60) as log:
            server.faults.add("status", tool="append_memory", status=429, retry_after=3000)
            await log.conversation(CHAT).append({"n": 0}).stored()
            await until(lambda: log.statistics().state == "waiting")
            calls = server.counters.calls.copy()
            report = await log.flush(1000)  # bounded by the test, far below
            assert (report.complete, report.pending, report.refused, report.state) == (False, 1, 0, "waiting")
            assert "3000 seconds" in (report.reason or "")
            log.conversation(OTHER).append({"n": 0})
            assert not (await log.flush(1000)).complete
            assert server.counters.calls == calls
            assert await log.dead_letters() == []
        # Closing waits no longer than flush would, and the pause is remembered over the restart.
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, flush_timeout=60) as log:
            report = await log.flush(1000)
            assert (report.complete, report.pending, report.state) == (False, 2, "waiting")
            assert server.counters.calls == calls
    assert [record.getMessage() for record in warnings_of(caplog) if "dead letter" in record.getMessage()] == []


@pytest.mark.anyio
async def test_check_asks_the_server_one_harmless_question(server: ReferenceServer, tmp_path: Path) -> None:
    """It returns if it was answered, leaves no conversation behind, and raises the very error it met otherwise."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "a") as log:
            before = server.counters.calls.total()
            await log.check()
            assert server.counters.calls.total() == before + 1
            assert await contents(server) == {}
            server.faults.add("status", status=429, retry_after=7)
            with pytest.raises(RateLimitedError) as limited:
                await log.check()
            assert limited.value.retry_after == 7
            server.stop()
            with pytest.raises(ConnectionFailedError):
                await log.check()
            server.start()
        async with open_log(server.url, auth=("demo", "wrong"), buffer_dir=tmp_path / "b") as log:
            with pytest.raises(AuthenticationError):
                await log.check()


@pytest.mark.anyio
async def test_statistics_count_items_and_batches_and_never_wait(server: ReferenceServer, tmp_path: Path) -> None:
    """Before, while and after it is sent; the value is frozen."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            empty = log.statistics()
            assert empty.spools == 1
            counters = [field.name for field in fields(Statistics) if field.name != "spools"]
            assert all(getattr(empty, name) in (0, "ok", None) for name in counters)
            await log.conversation(CHAT).extend(numbered(7))
            await log.conversation(CHAT).append({"n": 7})
            found = log.statistics()
            assert (found.stored_items, found.stored_batches, found.pending_items, found.pending_batches) == (
                8,
                2,
                8,
                2,
            )
            assert found.pending_bytes == 8 * len('{"n":0}')
            assert found.oldest_pending_seconds is not None
            assert 0 <= found.oldest_pending_seconds < PATIENCE
            server.start()
            assert (await log.flush(PATIENCE)).complete
            await until(lambda: log.statistics().requests_in_flight == 0)
            found = log.statistics()
            assert (found.stored_items, found.acknowledged_items, found.acknowledged_batches) == (8, 8, 2)
            assert (found.pending_bytes, found.state, found.oldest_pending_seconds) == (0, "ok", None)
            assert found.requests_sent >= 1
            with pytest.raises(FrozenInstanceError):
                found.stored_items = 0  # type: ignore[misc]
            books(log)


ANSWERS = ("acknowledged", "invalid", "full", "throttled", "blocked", "transient", "unknown")


def answers(log: memlog.MemoryLog) -> dict[str, int]:
    """The counts of requests by what became of them, without those that are 0."""
    counts = {name: getattr(log.statistics(), f"requests_{name}") for name in ANSWERS}
    return {name: count for name, count in counts.items() if count}


async def arrives_and_breaks(call: Call) -> None:
    await call.forward()
    raise httpx.ReadError("broken")


def breaks(call: Call) -> None:
    raise httpx.ConnectError("no route")


FATES: dict[str, tuple[list[Any], dict[str, int]]] = {
    "taken": ([], {"acknowledged": 1}),
    "refused twice": ([Call.refuse, Call.refuse], {"invalid": 2}),
    "the rate limit": ([lambda call: call.refuse(status=429)], {"throttled": 1, "acknowledged": 1}),
    "the credentials": ([lambda call: call.refuse(status=401)], {"blocked": 1, "acknowledged": 1}),
    "no connection": ([breaks], {"transient": 1, "acknowledged": 1}),
    "a failed server": ([lambda call: call.refuse(status=500)], {"unknown": 1, "acknowledged": 1}),
    "busy": ([lambda call: call.refuse(status=503)], {"unknown": 1, "acknowledged": 1}),
    "arrived, and no answer": ([arrives_and_breaks], {"unknown": 1, "acknowledged": 1}),
}


@pytest.mark.anyio
@pytest.mark.parametrize(("fates", "expected"), FATES.values(), ids=FATES.keys())
async def test_statistics_count_requests_by_their_answers(
    fates: list[Any], expected: dict[str, int], server: ReferenceServer, tmp_path: Path
) -> None:
    """One class a failed append, from its answer alone; what is found by reading the log counts as acknowledged, too."""
    left = list(fates)
    between = Between(lambda call: left.pop(0)(call) if left and call.tool == "append_memory" else None)
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, transport=between) as log:
            assert answers(log) == {}
            receipt = log.conversation(CHAT).append({"n": 0})
            if "invalid" in expected:
                with pytest.raises(PermanentError):
                    await receipt.acknowledged()
            else:
                await receipt.acknowledged()
            assert answers(log) == expected
            assert log.statistics().requests_sent == len(between.appends)


@pytest.mark.anyio
async def test_statistics_count_full_conversations_and_those_that_are_held(tmp_path: Path) -> None:
    """The site is well all the same: a state of its own has neither."""
    refusing = True
    between = Between(lambda call: call.refuse(status=500) if refusing and call.conversation == OTHER else None)
    with reference_server(conversation_items_max=1) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, transport=between) as log:
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
            with pytest.raises(ConversationFullError):
                await log.conversation(CHAT).append({"n": 1}).acknowledged()
            found = log.statistics()
            assert (found.sealed_conversations, found.requests_full, found.held_conversations) == (1, 1, 0)
            receipt = log.conversation(OTHER).append({"n": 0})
            await until(lambda: log.statistics().held_conversations)
            found = log.statistics()
            assert (found.held_conversations, found.gate_seconds) == (1, None)
            refusing = False
            await receipt.acknowledged()
            await until(lambda: log.statistics().held_conversations == 0)
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            assert log.statistics().sealed_conversations == 1


@pytest.mark.anyio
async def test_statistics_tell_for_how_long_the_site_waits(server: ReferenceServer, tmp_path: Path) -> None:
    """None while it does not; also of a pause that an earlier process was asked for."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, flush_timeout=0) as log:
            assert log.statistics().gate_seconds is None
            server.faults.add("status", tool="append_memory", status=429, retry_after=3000)
            await log.conversation(CHAT).append({"n": 0}).stored()
            await until(lambda: log.statistics().state == "waiting")
            found = log.statistics()
            assert found.gate_seconds is not None
            assert 3000 - PATIENCE < found.gate_seconds <= 3000
            assert isinstance(found.last_error, RateLimitedError)
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, flush_timeout=0) as log:
            await until(lambda: log.statistics().state == "waiting")
            again = log.statistics().gate_seconds
            assert again is not None
            assert 3000 - 2 * PATIENCE < again <= found.gate_seconds


@pytest.mark.anyio
async def test_the_last_error_is_kept_after_everything_went_well_again(server: ReferenceServer, tmp_path: Path) -> None:
    """Who looks an hour later wants to know. It is bare: the frames of a traceback would hold payloads."""
    between = Between(lambda call: breaks(call) if failing and call.tool == "append_memory" else None)
    failing = True
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, transport=between) as log:
            assert (log.statistics().last_error, log.statistics().last_error_seconds) == (None, None)
            receipt = log.conversation(CHAT).append({"text": "a-payload"})
            await until(lambda: log.statistics().last_error)
            failing = False
            await receipt.acknowledged()
            found = log.statistics()
    assert (found.state, found.gate_seconds) == ("ok", None)
    error = found.last_error
    assert isinstance(error, ConnectionFailedError)
    assert found.last_error_seconds is not None
    assert 0 <= found.last_error_seconds < PATIENCE
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    assert "a-payload" not in f"{found!r} {error!r} {error.__dict__}"
    for other in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other == found
        assert hash(other) == hash(found)
        assert str(other.last_error) == str(error)


@pytest.mark.anyio
async def test_statistics_wait_for_nobody(server: ReferenceServer, tmp_path: Path) -> None:
    """Neither for the writer nor for the engine nor for an append: a health check that hangs is worse than none."""
    stuck, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        stuck.set()
        go.wait(PATIENCE)

    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, flush_timeout=0) as log:
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
            writing = log._core.buffer.run(hold, writes=True)
            try:
                await anyio.to_thread.run_sync(stuck.wait, PATIENCE)
                locks = (log._core.buffer._lock, core._lock, log._core._sending._lock)
                taken = threading.Event()
                holder = threading.Thread(target=hold_all, args=(locks, taken, go))
                holder.start()
                await anyio.to_thread.run_sync(taken.wait, PATIENCE)
                engine.running().soon(go.wait, PATIENCE)
                assert log.statistics().acknowledged_items == 1
            finally:
                go.set()
            await anyio.to_thread.run_sync(holder.join)
            await anyio.to_thread.run_sync(writing.result, PATIENCE)


def hold_all(locks: tuple[Any, ...], taken: threading.Event, go: threading.Event) -> None:
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        taken.set()
        go.wait(PATIENCE)


@pytest.mark.anyio
async def test_statistics_answer_before_anything_began_and_after_it_ended(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """From the first moment to long after the last: what was known is known still, and no file is held any more."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            assert log._core._sending.sender is None
            assert (log.statistics().stored_items, log.statistics().spools) == (0, 1)
            await log.conversation(CHAT).extend(numbered(3)).acknowledged()
        found = log.statistics()
        assert (found.stored_items, found.acknowledged_items, found.requests_acknowledged) == (3, 3, 1)
        assert (found.requests_in_flight, found.spools, found.unstored_bytes) == (0, 0, 0)
        assert found == log.statistics()


@pytest.mark.anyio
async def test_what_was_in_files_that_are_gone_is_told_and_counts_once(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's file is adopted, drained, given back and removed after an hour: the sums never go back."""
    monkeypatch.setattr(writer, "SCAN_SECONDS", 0.02)
    settings: dict[str, Any] = {"auth": server.auth, "buffer_dir": tmp_path, "retry": QUICK}

    def sums() -> tuple[int, int]:
        found = log.statistics()
        return found.stored_items, found.earlier_stored_items

    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, **settings) as log:
            await log.conversation(CHAT).extend(numbered(3)).acknowledged()
            [own] = tmp_path.glob("*/*.db")
            await anyio.to_thread.run_sync(leave_a_file, own.parent)
            await until(lambda: log.statistics().acknowledged_items == 5)
            await until(lambda: log.statistics().spools == 1)
            assert sums() == (5, 0)  # given back, and counted here
            [path] = [path for path in own.parent.glob("*.db") if path != own]
            os.utime(path, (1, 1))
            await until(lambda: log.statistics().earlier_stored_items)
            await until(lambda: sums() == (3, 2))
            assert not path.exists()
            found = log.statistics()
            assert (found.earlier_acknowledged_items, found.earlier_dropped_items) == (2, 0)
            assert (found.earlier_forgotten_items, found.earlier_lost_items) == (0, 0)
        async with open_log(server.url, **settings) as log:
            await until(lambda: sums() == (3, 2))


def leave_a_file(site: Path) -> None:
    """What a process leaves that was killed: two items, stored and not sent."""
    path = site.parent / "ffff-neighbour.db"  # or it would be taken over before it is done
    left = spool.Spool.open(path, None)
    batch = encode_batch(numbered(2))
    left.begin()
    left.store([spool.NewRow(1, OTHER, batch.items, batch.size, batch.body)])
    left.commit()
    left.close()
    path.rename(site / path.name)


@pytest.mark.anyio
async def test_a_ledger_that_cannot_be_read_stops_nothing(server: ReferenceServer, tmp_path: Path) -> None:
    """Whatever is in it: it is set aside, and sums begin anew."""
    settings: dict[str, Any] = {"auth": server.auth, "buffer_dir": tmp_path, "retry": QUICK}
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, **settings) as log:
            await log.conversation(CHAT).append({"n": 0}).acknowledged()
        [own] = tmp_path.glob("*/*.db")
        for number, text in enumerate(['{"total": {}, "spools": {"a": 3}}', "[" * 100_000, "\udcff", "7"], start=1):
            (own.parent / "ledger.json").write_text(text, "utf-8", "surrogatepass")
            async with open_log(server.url, **settings) as log:
                await log.conversation(CHAT).append({"n": number}).acknowledged()
                await until(lambda number=number: len(list(own.parent.glob("ledger.json.corrupt-*"))) == number)
                assert log.statistics().earlier_stored_items == 0
    assert await contents(server) == {CHAT: texts(5)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_statistics_answer_in_a_forked_child_about_the_child(server: ReferenceServer, tmp_path: Path) -> None:
    """At once, before the child has anything of its own; what the parent has is the parent's."""
    script = """
import json, os, signal, sys
from dataclasses import asdict
from memlog.sync import open_log
log = open_log(sys.argv[1], auth=("demo", "demo"), buffer_dir=sys.argv[2])
log.conversation("c_parent00").extend([{"n": 0}, {"n": 1}]).acknowledged(20)
if os.fork() == 0:
    signal.alarm(20)
    first = log.statistics()
    log.conversation("c_child000").append({"n": 0}).acknowledged(20)
    print(json.dumps([asdict(first), asdict(log.statistics())]), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert log.statistics().acknowledged_items == 2
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, server.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    first, then = json.loads(ended.stdout)
    assert {name: value for name, value in first.items() if value} == {"state": "ok"}
    assert (then["stored_items"], then["acknowledged_items"], then["requests_sent"], then["spools"]) == (1, 1, 1, 1)


# --- conversations that were forgotten ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_conversation_that_the_buffer_has_forgotten_goes_on_where_it_was(
    server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is looked for, as for a new one: also when the answer to its next request is lost, and after a restart."""
    monkeypatch.setattr(spool, "ACKNOWLEDGED_KEPT", 10)
    told: list[str] = []

    def facts(log: memlog.MemoryLog) -> spool.LaneFacts:
        return log._core.buffer.run(lambda spools: spools.own.lane(CHAT)).result(PATIENCE)

    async def others(log: memlog.MemoryLog, count: int = 30) -> None:
        for n in range(count):
            await log.conversation(f"another-{n:04}").append({"n": n}).acknowledged()

    settings: dict[str, Any] = {"auth": server.auth, "buffer_dir": tmp_path, "retry": QUICK}
    with anyio.fail_after(2 * PATIENCE):
        async with open_log(server.url, **settings, on_event=lambda event: told.append(event.kind)) as log:
            await log.conversation(CHAT).extend(numbered(3)).acknowledged()
            assert facts(log).next_seq == 3
            await others(log)
            assert facts(log) == spool.LaneFacts()
            server.faults.add("drop", tool="append_memory", when="after")
            assert (await log.conversation(CHAT).append({"n": 3}).acknowledged()).first_seq == 3
            assert facts(log).next_seq == 4
            await others(log)
            assert facts(log) == spool.LaneFacts()
            found = log.statistics()
            assert found.stored_items == found.acknowledged_items + found.forgotten_items
            assert found.forgotten_items > 0
        async with open_log(server.url, **settings) as log:
            assert (await log.conversation(CHAT).append({"n": 4}).acknowledged()).first_seq == 4
            assert [item.payload async for item in log.conversation(CHAT).replay()] == numbered(5)
    assert (await contents(server))[CHAT] == texts(5)
    assert set(told) <= {"stored", "acknowledged"}


# --- receipts --------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_awaiting_a_receipt_means_that_it_is_stored(server: ReferenceServer, tmp_path: Path) -> None:
    """Any number of times, from any number of tasks, before and after."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0) as log:
            receipt = log.conversation(CHAT).append({"n": 0})
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(receipt.stored)
            assert await receipt is None
            await receipt
            assert receipt.is_stored()
            assert books(log)["stored_items"] == 1


@pytest.mark.anyio
async def test_every_append_has_a_name_of_its_own_for_good(server: ReferenceServer, tmp_path: Path) -> None:
    """Also after a restart, and for several batches under one receipt; a dead letter goes by the same name."""
    ids: list[str] = []
    with anyio.fail_after(PATIENCE):
        for _ in range(2):
            async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
                chat = log.conversation(CHAT)
                receipts = [chat.append({"n": 0}), chat.extend(numbered(600), atomic=False), chat.append({"n": 1})]
                for receipt in receipts:
                    await receipt.acknowledged()
                ids += [receipt.id for receipt in receipts]
                assert all(receipt.conversation_id == CHAT for receipt in receipts)
                assert CHAT in repr(receipts[0])
    assert len(set(ids)) == len(ids) == 6


@pytest.mark.anyio
@pytest.mark.contract("C4")
async def test_a_cut_extend_is_one_receipt_over_contract_sized_batches(server: ReferenceServer, tmp_path: Path) -> None:
    """C4: `atomic=False` cuts into batches of 250; the acknowledgement spans all of them."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            ack = await log.conversation(CHAT).extend(numbered(601), atomic=False).acknowledged()
            assert (ack.first_seq, ack.last_seq) == (0, 600)
            assert books(log)["stored_batches"] == 3
            await log.conversation(CHAT).extend(iter(numbered(2))).acknowledged()
    assert await contents(server) == {CHAT: texts(601) + texts(2)}


@pytest.mark.anyio
async def test_a_timeout_or_a_cancellation_of_a_receipt_changes_nothing(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The builtin TimeoutError; the batch is sent once all the same, and can be waited for again."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            server.faults.add("stall", tool="append_memory", seconds=None)
            receipt = log.conversation(CHAT).append({"n": 0})
            with pytest.raises(TimeoutError):
                await receipt.acknowledged(0.02)
            with anyio.move_on_after(0.02) as scope:
                await receipt.acknowledged()
            assert scope.cancelled_caught
            with anyio.move_on_after(0):
                await receipt.stored()
            await receipt.stored(PATIENCE)
            server.faults.clear()
            assert (await receipt.acknowledged(PATIENCE)).first_seq == 0
            assert (await receipt.acknowledged(PATIENCE)).first_seq == 0  # as often as one likes
    assert await contents(server) == {CHAT: texts(1)}


@pytest.mark.anyio
async def test_appending_needs_no_loop_and_any_thread_will_do(server: ReferenceServer, tmp_path: Path) -> None:
    """The receipt of another thread can be awaited here; order within each thread is kept."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            receipts: list[memlog.Receipt] = []

            def work(name: str) -> None:
                chat = log.conversation(f"thread-{name}")
                receipts.extend([chat.append(item) for item in numbered(50)])

            threads = [threading.Thread(target=work, args=(f"number-{n}",)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
            for receipt in receipts:
                await receipt.acknowledged()
    assert await contents(server) == {f"thread-number-{n}": texts(50) for n in range(4)}


def test_a_log_outlives_the_loops_that_use_it(server: ReferenceServer, tmp_path: Path) -> None:
    """Frameworks make a loop per turn; one that ends in the middle of a wait hurts nobody."""
    log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path)
    chat = log.conversation(CHAT)

    async def turn(n: int) -> list[Any]:
        with anyio.fail_after(PATIENCE):
            await chat.append({"n": n}).acknowledged()
            return [item.payload async for item in chat.replay()]

    async def given_up(receipt: memlog.Receipt) -> None:
        with anyio.move_on_after(0.01):
            await receipt.acknowledged()

    for n, backend in enumerate(["asyncio", "trio", "asyncio", "trio"]):
        assert anyio.run(turn, n, backend=backend) == numbered(n + 1)
    server.faults.add("stall", tool="append_memory", seconds=None)
    receipt = chat.append({"n": 4})
    anyio.run(given_up, receipt, backend="asyncio")
    anyio.run(given_up, receipt, backend="trio")
    server.faults.clear()
    assert anyio.run(turn, 5, backend="asyncio") == numbered(6)
    log.sync.close()


# --- a full conversation ---------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.contract("C2.conversation", "C4")
async def test_a_full_conversation_is_sealed_and_what_does_not_fit_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The batches that fit are in; the first that does not, and all behind it, become dead letters; appends raise.

    It survives a restart, and a dead letter can be sent to another conversation.
    """
    with reference_server(conversation_items_max=5) as server, anyio.fail_after(PATIENCE):
        server.stop()
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK)
        chat = log.conversation(CHAT)
        fits = [chat.extend(numbered(2)), chat.extend(numbered(2, 2))]
        too_much = [chat.extend(numbered(2, 4)), chat.append({"n": 6})]
        await too_much[-1]
        server.start()
        assert [(await receipt.acknowledged()).first_seq for receipt in fits] == [0, 2]
        for receipt in too_much:
            with pytest.raises(ConversationFullError) as refused:
                await receipt.acknowledged()
            assert (refused.value.conversation_id, refused.value.outcome) == (CHAT, "refused")
        with pytest.raises(ConversationFullError) as caught:
            chat.append({"n": 7})
        assert (caught.value.outcome, caught.value.conversation_id) == ("not_sent", CHAT)
        report = await log.flush()
        assert (report.complete, report.pending) == (True, 0)
        assert books(log)["refused_items"] == 3
        letters = await log.dead_letters()
        assert [letter.payloads for letter in letters] == [numbered(2, 4), numbered(1, 6)]
        assert [letter.id for letter in letters] == [receipt.id for receipt in too_much]
        assert all(isinstance(letter.error, ConversationFullError) for letter in letters)
        assert "is full" in caplog.text
        # Others are not concerned.
        await log.conversation(OTHER).append({"n": 0}).acknowledged()
        await log.close()

        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            with pytest.raises(ConversationFullError):
                log.conversation(CHAT).append({"n": 8})
            first, second = await log.dead_letters()
            await log.requeue(first, conversation_id=OTHER)
            await log.requeue(first, conversation_id=OTHER)  # no dead letter any more: nothing happens
            await log.drop(second)
            await log.drop(second)
            assert (await log.flush(PATIENCE)).complete
            assert await log.dead_letters() == []
            assert (books(log)["refused_items"], books(log)["dropped_items"]) == (0, 1)
            with pytest.raises(ConversationFullError):
                log.conversation(CHAT).append({"n": 8})
        assert await contents(server) == {CHAT: texts(4), OTHER: ['{"n":0}', *texts(2, 4)]}


@pytest.mark.anyio
async def test_requeueing_to_a_full_conversation_lets_it_try_again(tmp_path: Path) -> None:
    """The operator may know that there is room by now; if there is not, nothing is lost either."""
    with reference_server(conversation_items_max=2) as server, anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            chat = log.conversation(CHAT)
            await chat.extend(numbered(2)).acknowledged()
            with pytest.raises(ConversationFullError):
                await chat.append({"n": 2}).acknowledged()
            (letter,) = await log.dead_letters()
            await log.requeue(letter)
            await until(lambda: log.statistics().refused_items == 1)
            (again,) = await log.dead_letters()
            assert again.payloads == letter.payloads
            server.app.state.store.conversation_items_max = 10
            await log.requeue(again)
            assert (await log.flush(PATIENCE)).complete
            assert (await chat.append({"n": 3}).acknowledged()).first_seq == 3
            with pytest.raises(InvalidConversationIdError):
                await log.requeue(again, conversation_id="short")
        assert await contents(server) == {CHAT: texts(4)}


@pytest.mark.anyio
async def test_nothing_that_is_shown_holds_a_payload_or_a_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reprs, messages and log lines, at the finest level, over a refusal, an outage and a close."""
    caplog.set_level(logging.DEBUG)
    shown: list[object] = []
    with reference_server(auth=("demo", "pass-w0rd"), conversation_items_max=1) as server, anyio.fail_after(PATIENCE):
        url = f"{server.url}?key=s3cret-query"
        log = open_log(url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0, on_event=shown.append)
        chat = log.conversation(CHAT)
        await chat.append({"text": "a-payload"}).acknowledged()
        receipt = chat.append({"text": "a-payload"})
        with pytest.raises(ConversationFullError) as caught:
            await receipt.acknowledged()
        shown += [log, chat, receipt, caught.value, log.statistics(), log.sync, *await log.dead_letters()]
        shown += [*await chat.recall(), chat.replay(), await log.flush()]
        server.stop()
        await log.conversation(OTHER).append({"text": "a-payload"})
        await until(lambda: log.statistics().state == "waiting")
        await log.close()
    everything = caplog.text + "".join(f"{thing!r} {thing!s}" for thing in shown)
    assert CHAT in everything
    assert "a-payload" not in everything
    assert "pass-w0rd" not in everything
    assert "s3cret-query" not in everything
