"""What importing memlog does, and that it does nothing else: every claim is looked at in a fresh interpreter.

How long it takes is measured by benchmarks/imports.py; here stands what keeps it short whatever the machine does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOOR = """
import anyio, asyncio, filelock, httpx, platformdirs, pydantic, sqlite3, tenacity
pydantic.BaseModel
"""

NOT_NEEDED = {
    # what other people's programs bring, or an extra of ours
    "click", "fastapi", "mcp", "requests", "rich", "server_reference", "starlette", "trio", "uvicorn",
    # parts of memlog that are asked for by name
    "memlog.testing",
    # reading all installed distributions, and what deriving a validator from annotations takes: most of the time that an
    # import of memlog could waste
    "annotated_types", "importlib.metadata", "pydantic.plugin._loader", "pydantic.types",
}  # fmt: skip

WATCH = """
import json, os, sys, threading
{before}
known, seen = set(sys.modules), []
CHANGES = ("os.", "shutil.", "tempfile.", "sqlite3.", "socket.", "subprocess.", "_thread.")
READING = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv")

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        seen.append(["write" if writes else "read", os.fsdecode(path) if isinstance(path, (str, bytes)) else str(path)])
    elif event.startswith(CHANGES) and not event.startswith(READING):
        seen.append([event, repr(arguments)])

sys.addaudithook(watch)
{code}
print(json.dumps({{
    "events": seen,
    "threads": [thread.name for thread in threading.enumerate()],
    "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
    "modules": sorted(set(sys.modules) - known),
    "path": [os.path.realpath(entry or ".") for entry in sys.path],
}}))
"""


def watched(code: str, *, before: str = "", home: Path | None = None) -> dict[str, Any]:
    """What ``code`` does in a fresh interpreter, warnings being errors, with ``home`` as the user's directory."""
    # Neither a measuring of coverage nor compiled modules in some other place are part of what memlog does.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTHON"))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if home is not None:
        environment |= {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TMPDIR": str(home)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WATCH.format(before=before, code=code)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    found = watched("from memlog import open_log, Client", home=home)
    assert not list(home.iterdir())
    return found


def test_importing_memlog_writes_nothing_and_connects_to_nothing(imported: dict[str, Any]) -> None:
    """Ours: no file is made or changed, no database, socket or process is opened, nothing is left in the home."""
    assert [event for event in imported["events"] if event[0] != "read"] == []


def test_importing_memlog_reads_nothing_but_modules(imported: dict[str, Any]) -> None:
    """Ours: no settings, no certificates and no package lists are read; only code is."""
    read = {path for kind, path in imported["events"] if kind == "read"}
    assert any("memlog" in Path(path).parts for path in read)
    assert sorted(path for path in read if not path.endswith((".py", ".pyc", ".so", ".pyd"))) == []
    folders = tuple(imported["path"])
    assert sorted(path for path in read if not os.path.realpath(path).startswith(folders)) == []


def test_importing_memlog_starts_no_thread(imported: dict[str, Any]) -> None:
    """Ours: threads start with the first log, so that a program may still fork after its imports."""
    assert imported["threads"] == ["MainThread"]
    assert imported["tasks"] == 1


def test_memlog_brings_only_what_it_stands_on() -> None:
    """Ours: behind httpx, pydantic, anyio and the rest of the floor nothing heavy is imported."""
    added = watched("from memlog import open_log, Client", before=FLOOR)["modules"]
    assert "memlog.log" in added
    assert sorted(NOT_NEEDED.intersection(added)) == []


def test_a_write_a_database_and_a_thread_would_be_seen(tmp_path: Path) -> None:
    """The watch itself: what the tests above deny is reported when it happens."""
    code = f"""
import sqlite3, pathlib
folder = pathlib.Path({str(tmp_path)!r})
(folder / "file").write_text("x")
(folder / "folder").mkdir()
db = sqlite3.connect(folder / "db")
db.close()
stop = threading.Event()
thread = threading.Thread(target=stop.wait, name="extra", daemon=True)
thread.start()
"""
    found = watched(code)
    kinds = {event[0] for event in found["events"]}
    assert {"write", "os.mkdir", "sqlite3.connect"} <= kinds
    assert "extra" in found["threads"]
