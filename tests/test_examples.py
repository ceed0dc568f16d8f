"""The programs in ``examples/`` do what their first lines say, as processes of their own, against the reference server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import memlog
import memlog.testing

if TYPE_CHECKING:
    from types import ModuleType

    from memlog.testing import ReferenceServer

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 60

REFUSAL = json.dumps({"jsonrpc": "2.0", "id": 1, "error": {"code": -32602, "message": "Invalid params: not today"}})


def run(
    server: ReferenceServer, buffer_dir: Path, name: str, *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """One example as its own process, with the settings a user would give it."""
    settings = {
        "MEMLOG_URL": server.url,
        "MEMLOG_AUTH": ":".join(server.auth),
        "MEMLOG_BUFFER_DIR": str(buffer_dir),
    }
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, **settings},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def replay(server: ReferenceServer, conversation_id: str) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        async with memlog.Client(server.url, auth=server.auth) as client:
            return [item.payload for item in await client.replay_memory(conversation_id)]

    return asyncio.run(read())


def conversations(server: ReferenceServer) -> list[str]:
    async def read() -> list[str]:
        async with memlog.Client(server.url, auth=server.auth) as client:
            return [info.conversation_id for info in await client.list_conversations()]

    return asyncio.run(read())


def test_quickstart_stores_acknowledges_and_reads_back(server: ReferenceServer, tmp_path: Path) -> None:
    """Every rung of the ladder in one run, and the server holds what was printed."""
    done = run(server, tmp_path, "quickstart.py")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "acknowledged as items 1 to 2"
    assert [line[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert lines[4] == "0 pending, 0 refused"
    [conversation_id] = conversations(server)
    assert replay(server, conversation_id)[2] == {"role": "assistant", "text": "42"}


def test_quickstart_without_a_server_loses_nothing_and_the_next_run_sends_it(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """What its first lines promise to whoever forgets to start the server."""
    server.stop()
    first = run(server, tmp_path, "quickstart.py")
    assert first.returncode == 0, first.stderr
    assert "the next run sends it" in first.stdout
    server.start()

    second = run(server, tmp_path, "quickstart.py")

    assert second.returncode == 0, second.stderr
    assert [len(replay(server, conversation)) for conversation in conversations(server)] == [3, 3]


@pytest.fixture
def chat(server: ReferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MEMLOG_URL", server.url)
    monkeypatch.setenv("MEMLOG_AUTH", ":".join(server.auth))
    monkeypatch.setenv("MEMLOG_BUFFER_DIR", str(tmp_path))
    return load("chat_fastapi")


def load(name: str) -> ModuleType:
    """The example as a module, new for each test; its types are resolved by name, so it must be in sys.modules."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.anyio
async def test_the_chat_answers_and_remembers(chat: ModuleType) -> None:
    """Two turns, then the history of the conversation, and a malformed id is the caller's mistake."""
    async with chat.app.router.lifespan_context(chat.app), _browser(chat) as browser:
        for text in ("hello", "again"):
            answer = await browser.post("/chats/c_7f3a9b2e41", json={"text": text})
            assert answer.json() == {"role": "assistant", "text": f"You said {text!r}."}
        history = (await browser.get("/chats/c_7f3a9b2e41")).json()
        refused = await browser.post("/chats/short", json={"text": "hello"})

    assert [message["text"] for message in history] == ["hello", "You said 'hello'.", "again", "You said 'again'."]
    assert refused.status_code == 422


@pytest.mark.anyio
async def test_the_chat_goes_on_without_a_memory_server_and_its_successor_remembers(
    chat: ModuleType, server: ReferenceServer
) -> None:
    """Memory never blocks the conversation; and a history that cannot be read is an error, not an empty one."""
    server.stop()
    async with chat.app.router.lifespan_context(chat.app), _browser(chat) as browser:
        answer = await browser.post("/chats/c_7f3a9b2e41", json={"text": "hello"})
        history = await browser.get("/chats/c_7f3a9b2e41")
        assert answer.status_code == 200
        assert history.status_code == 503
        server.start()
    async with chat.app.router.lifespan_context(chat.app), _browser(chat) as browser:
        history = await browser.get("/chats/c_7f3a9b2e41")

    assert [message["text"] for message in history.json()] == ["hello", "You said 'hello'."]


def _browser(chat: ModuleType) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=chat.app), base_url="http://chat")


def test_the_state_is_rebuilt_by_every_run(server: ReferenceServer, tmp_path: Path) -> None:
    """Each run starts from nothing but the log."""
    run(server, tmp_path, "rebuild_state.py", "add", "milk")
    run(server, tmp_path, "rebuild_state.py", "add", "bread")
    run(server, tmp_path, "rebuild_state.py", "done", "milk")

    done = run(server, tmp_path, "rebuild_state.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[x] milk", "[ ] bread"]


def test_a_state_that_cannot_be_read_is_not_taken_for_an_empty_one(server: ReferenceServer, tmp_path: Path) -> None:
    """Without a server the program says so and changes nothing."""
    server.stop()

    done = run(server, tmp_path, "rebuild_state.py", "add", "milk")

    assert done.returncode == 1
    assert "the list cannot be rebuilt" in done.stderr
    assert done.stdout == ""


def test_a_snapshot_saves_reading_and_is_thrown_away_when_the_log_is_another_one(tmp_path: Path) -> None:
    """Each run reads only what is new; where the log was reset underneath, also if it grew again, all of it."""
    file = str(tmp_path / "snapshot.json")
    with memlog.testing.reference_server() as server:
        runs = [("milk", "bread"), ("milk",), ()]
        done = [run(server, tmp_path / "a", "incremental_rebuild.py", file, *things) for things in runs]
        assert [one.stderr for one in done if one.returncode] == []
        assert [one.stdout for one in done] == [
            "2 read of 2: {'milk': 1, 'bread': 1}\n",
            "1 read of 3: {'milk': 2, 'bread': 1}\n",
            "0 read of 3: {'milk': 2, 'bread': 1}\n",
        ]
    with memlog.testing.reference_server() as server:
        again = run(server, tmp_path / "b", "incremental_rebuild.py", file, "tea", "tea", "tea", "tea")
        shorter = run(server, tmp_path / "b", "incremental_rebuild.py", file)
    with memlog.testing.reference_server() as server:
        empty = run(server, tmp_path / "c", "incremental_rebuild.py", file)
    assert again.stdout == "4 read of 4: {'tea': 4}\n", again.stderr
    assert shorter.stdout == "0 read of 4: {'tea': 4}\n", shorter.stderr
    assert empty.stdout == "0 read of 0: {}\n", empty.stderr


def test_the_script_appends_each_line_and_skips_what_is_no_item(server: ReferenceServer, tmp_path: Path) -> None:
    """Mistakes in single lines are told and cost only these lines."""
    lines = '{"n": 1}\n[2]\n{"n": 3\n{"n": 4}\n'

    done = run(server, tmp_path, "sync_script.py", "c_import_01", stdin=lines)

    assert done.returncode == 1
    assert done.stdout == "2 in the log, 0 still here, 0 refused\n"
    assert [line.partition(" is")[0] for line in done.stderr.splitlines()] == ["line 2", "line 3"]
    assert replay(server, "c_import_01") == [{"n": 1}, {"n": 4}]


def test_a_dead_letter_is_listed_with_its_reason_requeued_and_dropped(server: ReferenceServer, tmp_path: Path) -> None:
    """Both ways out of the list; what was requeued arrives, what was dropped does not."""
    for number in (1, 2):
        server.faults.add("status", tool="append_memory", status=400, body=REFUSAL, times=2)
        assert run(server, tmp_path, "sync_script.py", f"c_refused_{number}", stdin='{"n": 1}\n').returncode == 1

    listed = run(server, tmp_path, "dead_letters.py")
    ids = [line.partition(":")[0] for line in listed.stdout.splitlines() if "item(s)" in line]
    requeued = run(server, tmp_path, "dead_letters.py", "requeue", ids[0], "c_elsewhere")
    dropped = run(server, tmp_path, "dead_letters.py", "drop", ids[1])
    left = run(server, tmp_path, "dead_letters.py")

    assert listed.stdout.count("InvalidRequestError: ") == 2
    assert "not today" in listed.stdout
    assert requeued.stdout == "1 acknowledged, 0 pending, 0 refused\n"
    assert dropped.returncode == 0, dropped.stderr
    assert left.stdout == "0 dead letter(s)\n"
    assert conversations(server) == ["c_elsewhere"]


def test_an_unknown_dead_letter_is_an_error(server: ReferenceServer, tmp_path: Path) -> None:
    """A mistyped id changes nothing and is not silent."""
    done = run(server, tmp_path, "dead_letters.py", "drop", "nobody.1")

    assert done.returncode == 1
    assert "there is no dead letter 'nobody.1'" in done.stderr


def history_table(url: str, record: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "team_history.py"), str(record)],
        env={**os.environ, "MEMLOG_URL": url, "MEMLOG_TOKEN": "token-of-vasya", "MEMLOG_TEAM": "engineering"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_history_of_a_record_is_a_table_of_who_changed_what_and_why() -> None:
    """A save, a confirmation, an update and a deletion, with what is different; an unknown record is told."""
    tokens = {"token-of-vasya": "vasya", "token-of-petya": "petya"}

    async def change(url: str) -> None:
        team = memlog.Scope.team("engineering")
        vasya, petya = [memlog.TeamClient(url, token=token) for token in tokens]
        async with vasya, petya:
            await vasya.save("Use pgbouncer.", type="decision", project="billing", tags=["db"], scope=team)
            await petya.save("use pgbouncer", type="decision", project="billing", scope=team)
            await petya.update(1, "Use no pooler.", expected_revision=1, reason="The driver pools", scope=team)
            await vasya.delete(2, expected_revision=1, reason="Obsolete", scope=team)

    with memlog.testing.reference_server(team_tokens=tokens) as server:
        asyncio.run(change(server.url))
        done, by_old_id, unknown = [history_table(server.url, record) for record in (2, 1, 77)]

    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-01-02 03:04:05", one) for one in done.stdout.splitlines()]
    assert lines == [
        "When (UTC)           Who           What          Why",
        "2026-01-02 03:04:05  vasya         insert 1      -",
        "               type  decision",
        "            content  Use pgbouncer.",
        "            project  billing",
        "               tags  ['db']",
        "             status  active",
        "2026-01-02 03:04:05  petya         confirm 1     -",
        "2026-01-02 03:04:05  petya         update 2      The driver pools",
        "            content  Use pgbouncer.",
        "                 ->  Use no pooler.",
        "2026-01-02 03:04:05  vasya         update 2      Obsolete",
        "             status  active",
        "                 ->  deleted",
    ]
    assert by_old_id.stdout.splitlines()[-3:] == [
        "             status  active",
        "                 ->  superseded",
        "      superseded_by  2",
    ]
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "the history cannot be read" in unknown.stderr


def test_the_table_stays_one_whatever_stands_in_a_record() -> None:
    """Long texts, wide letters, secrets, and what a terminal would obey: 100 columns, and only what is different."""
    tokens = {"token-of-vasya": "\u74e6\u897f\u91cc", "token-of-petya": "petya"}
    long = " ".join(f"Sentence number {n} of a long text." for n in range(400))
    texts = (
        "Ask ann@example.org.",
        long,
        long.replace("number 200", "number two hundred"),
        "\u8acb\u6c42\u66f8" * 60,
        "x" * 700,
        "\x1b[31mred\nin two lines\u202e, e\u0301",
    )

    async def change(url: str) -> None:
        team = memlog.Scope.team("engineering")
        vasya, petya = [memlog.TeamClient(url, token=token) for token in tokens]
        async with vasya, petya:
            await petya.save(texts[0], scope=team)
            for n, text in enumerate(texts[1:], 1):
                await vasya.update(n, text, expected_revision=1, reason=f"{text[:1900]}\n!", scope=team)

    with memlog.testing.reference_server(team_tokens=tokens) as server:
        asyncio.run(change(server.url))
        done = history_table(server.url, len(texts))

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    wide = [len(line) + len(re.findall(r"[\u3400-\u9fff]", line)) - line.count("\u0301") for line in lines]
    assert max(wide) <= 100
    assert done.stdout.replace("\n", "").isprintable()
    words = " ".join(done.stdout.split())
    for shown in (
        "content Ask [REDACTED].",
        "content ...xt. Sentence number 200 of a long text. Sentence number 201",
        "-> ...xt. Sentence number two hundred of a long text. Sentence number 201",
        "Sentence number 10 of a long text. Sentence number 11 of a l...",
        r"-> \x1b[31mred\nin two lines\u202e, e",
    ):
        assert shown in words
    assert [line for line in lines if "  \u74e6\u897f\u91cc        update 2      Sentence" in line]
