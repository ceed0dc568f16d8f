"""The documentation builds, its programs run and do what the pages say, its tables are complete, and its links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

import memlog
import memlog.sync
import memlog.testing
from memlog import errors, events, limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SNIPPETS = DOCS / "snippets"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*PAGES, *sorted(ROOT.glob("*.md"))]
SECONDS = 60


def page(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def settings(url: str, buffer_dir: Path, auth: str = "demo:demo") -> dict[str, str]:
    return {**os.environ, "MEMLOG_URL": url, "MEMLOG_AUTH": auth, "MEMLOG_BUFFER_DIR": str(buffer_dir)}


def run(program: Path, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# -- the build


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """Every reference resolves and every page is reachable; the same command as `scripts/docs`."""
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "-n", "--keep-going", "-q", "-b", "html"]

    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "html" / "tutorial.html").exists()


def test_code_on_the_pages_comes_from_files(tmp_path: Path) -> None:
    """What is typed into a page is run by nobody; and every snippet is on some page."""
    assert [path.name for path in PAGES if "```python" in path.read_text("utf-8")] == []
    shown = {
        (DOCS / name).resolve()
        for path in PAGES
        for name in re.findall(r"{literalinclude} (\S+)", path.read_text("utf-8"))
    }
    examples = set((ROOT / "examples").glob("*.py"))
    assert shown == {*SNIPPETS.glob("*.py"), *examples}


# -- the programs


def test_the_readme_program_appends_and_reads_back(server: ReferenceServer, tmp_path: Path) -> None:
    """The first lines a newcomer copies, as they stand, but for the port."""
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert program.count("http://127.0.0.1:8080/mcp") == 1
    file = tmp_path / "program.py"
    file.write_text(program.replace("http://127.0.0.1:8080/mcp", server.url), "utf-8")

    done = subprocess.run(
        [sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )

    assert done.returncode == 0, done.stderr
    number, _, payload = done.stdout.strip().partition(" ")
    assert number in ("0", "None")  # it may be read back before it is acknowledged
    assert payload == "{'role': 'user', 'text': 'hello'}"


class Server:
    """The tutorial's server: a process of its own, to be killed and started again on the same port and file."""

    def __init__(self, db: Path) -> None:
        self.db = db
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        command = [sys.executable, "-m", "server_reference", "--port", str(self.port), "--db", str(self.db)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/mcp site=demo:demo\n", line)
        assert found, line
        self.port = int(found[1])

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=SECONDS)
            self.process = None


@pytest.fixture
def tutorial_server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server.db")
    server.start()
    yield server
    server.kill()


def test_the_tutorial_tells_what_happens(tutorial_server: Server, tmp_path: Path) -> None:
    """All of the tutorial: a first item, a killed server, a killed program, and everything there in the end."""
    env = settings(tutorial_server.url, tmp_path / "memory")

    first = run(SNIPPETS / "first_log.py", env=env)
    assert first.stdout == "stored on this disk\nacknowledged by the server as item 0\n", first.stderr

    with talking(60, env) as lines:
        wait_for(lines, " ok")
        tutorial_server.kill()
        wait_for(lines, "sending waits, everything is kept")
        wait_for(lines, " waiting")
        tutorial_server.start()
        said = int(wait_for(lines, " 0 pending   ok").split()[1])

    tutorial_server.kill()
    with talking(60, env) as lines:
        while int(wait_for(lines, " pending   waiting").split()[2]) < 4:
            pass

    away = run(SNIPPETS / "read_back.py", env=env)
    assert "MemoryUnavailableError: the memory could not be read, which does not mean that it is empty" in away.stderr
    tutorial_server.start()
    run(SNIPPETS / "read_back.py", env=env)
    back = run(SNIPPETS / "read_back.py", env=env).stdout.splitlines()

    numbers = [line.split(" ", 1)[0] for line in back]
    texts = [line.split(" ", 1)[1] for line in back]
    assert numbers == [str(number) for number in range(len(back))]
    assert texts[0] == "Remember me."
    second = texts.index("turn 1", 2)
    assert texts[1:second] == [f"turn {number}" for number in range(1, second)]
    assert second > said
    assert texts[second:] == [f"turn {number}" for number in range(1, len(texts) - second + 1)]
    assert len(texts) - second >= 4


class talking:  # noqa: N801 - reads as a verb
    """`talk.py` under way; leaving kills it so that it cannot tidy up."""

    def __init__(self, turns: int, env: dict[str, str]) -> None:
        command = [sys.executable, str(SNIPPETS / "talk.py"), str(turns)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> Iterator[str]:
        assert self.process.stdout is not None
        return iter(self.process.stdout)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=SECONDS)


def wait_for(lines: Iterator[str], part: str) -> str:
    """The first line with ``part`` in it. The program prints twice a second and ends by itself, so this does too."""
    seen = []
    end = time.monotonic() + SECONDS
    for line in lines:
        seen.append(line)
        if part in line:
            return line
        if time.monotonic() > end:
            break
    raise AssertionError(f"no line with {part!r} in {seen}")


def test_check_at_start_serves_without_a_server_and_not_with_a_wrong_password(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The three ways a start can go."""
    program = SNIPPETS / "check_at_start.py"

    good = run(program, env=settings(server.url, tmp_path))
    wrong = run(program, env=settings(server.url, tmp_path, "demo:wrong"))
    server.stop()
    away = run(program, env=settings(server.url, tmp_path))

    assert (good.returncode, good.stdout) == (0, "serving\n")
    assert wrong.returncode == 1
    assert "not starting: " in wrong.stderr
    assert away.returncode == 0
    assert away.stdout.splitlines()[0].startswith("starting without a memory server: ")
    assert away.stdout.splitlines()[1] == "serving"


def test_watch_counts_what_was_acknowledged(server: ReferenceServer, tmp_path: Path) -> None:
    """Events reach the callback, and statistics say the same."""
    done = run(SNIPPETS / "watch.py", env=settings(server.url, tmp_path))

    assert done.stdout.splitlines() == ["ok: 0 pending, 0 refused", "1 request(s) acknowledged"], done.stderr


def test_follow_prints_what_comes_and_ends_with_goodbye(server: ReferenceServer, tmp_path: Path) -> None:
    """What was there before it began, and what comes while it looks on."""
    env = settings(server.url, tmp_path / "reader")
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=tmp_path / "writer") as log:
        chat = log.conversation("c_tutorial_1")
        chat.append({"text": "hello"}).acknowledged(SECONDS)
        with subprocess.Popen(
            [sys.executable, str(SNIPPETS / "follow.py")], env=env, stdout=subprocess.PIPE, text=True
        ) as following:
            try:
                assert following.stdout is not None
                assert following.stdout.readline() == "0 hello\n"
                chat.append({"text": "goodbye"})
                assert following.communicate(timeout=SECONDS)[0] == "1 goodbye\n"
            finally:
                following.kill()
    assert following.returncode == 0


def test_read_degraded_says_whether_that_is_all(server: ReferenceServer, tmp_path: Path) -> None:
    """With the server away what is pending, and the remark; with it all of it."""
    env = settings(server.url, tmp_path)
    server.stop()
    with memlog.sync.open_log(
        server.url, auth=server.auth, buffer_dir=tmp_path, flush_timeout=0, retry=memlog.RetryPolicy(attempts=1)
    ) as log:
        log.conversation("c_tutorial_1").append({"text": "hello"}).stored(SECONDS)
    away = run(SNIPPETS / "read_degraded.py", env=env)
    server.start()
    back = run(SNIPPETS / "read_degraded.py", env=env)
    assert away.stdout == "hello\n(the server is away: there may be more)\n", away.stderr
    assert back.stdout == "hello\n", back.stderr


def test_client_errors_tells_the_cases_apart(server: ReferenceServer, tmp_path: Path) -> None:
    """An acknowledgement, a mistake of the caller's, a rate limit, and a failure that may pass."""
    program = SNIPPETS / "client_errors.py"
    env = settings(server.url, tmp_path)

    first = run(program, env=env).stdout.splitlines()
    server.faults.add("status", tool="append_memory", status=429, retry_after=7)
    limited = run(program, env=env).stdout.splitlines()
    server.faults.add("drop", tool="append_memory", when="after")
    dropped = run(program, env=env).stdout.splitlines()

    assert first[0] == "acknowledged as 0"
    assert first[1].startswith("never: not a conversation id")
    assert limited[0] == "later: in 7.0 seconds"
    assert dropped[0] == "again: unknown"


def test_a_team_record_is_changed_once_and_a_lost_answer_does_no_harm(tmp_path: Path) -> None:
    """Twice under one id it is one update; another one comes too late; and an unknown outcome is looked into."""
    members = {"engineering": {"vasya": "editor"}}
    with memlog.testing.reference_server(team_tokens={"t": "vasya"}, team_members=members) as server:
        env = {**settings(server.url, tmp_path), "MEMLOG_TOKEN": "t"}
        done = run(SNIPPETS / "team_write.py", env=env)

    assert done.stdout.splitlines() == [
        "record 2 replaces 1",
        "record 2 replaces 1",
        "somebody else was faster: read the record again",
    ], done.stderr


def test_the_test_of_an_agent_passes(tmp_path: Path) -> None:
    """The page's test, run by pytest itself, away from this project's own settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]

    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(SNIPPETS / "test_agent.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


# -- the tables


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_on_the_errors_page_and_in_the_api(name: str) -> None:
    """A class nobody can look up helps nobody."""
    assert re.search(rf"^\| (\*\*)?`{name}`", page("errors.md"), re.MULTILINE)
    assert f"memlog.errors.{name}()" in page("api.md")


@pytest.mark.parametrize("name", memlog.__all__)
def test_every_public_name_is_in_the_api(name: str) -> None:
    """What `memlog.__all__` offers is documented."""
    assert re.search(rf":: memlog\.(errors\.)?{name}\b", page("api.md"))


def test_the_events_page_lists_each_kind_with_its_level(caplog: pytest.LogCaptureFixture) -> None:
    """The table against the code: kinds, and the level at which each is written."""
    caplog.set_level("DEBUG", logger="memlog")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page("events.md"), re.MULTILINE))

    written = {}
    for kind in get_args(events.EventKind):
        caplog.clear()
        events.Event(kind=kind).log()
        written[kind] = caplog.records[0].levelname

    assert rows == written


def test_the_events_page_lists_each_figure_of_statistics() -> None:
    """The table against the code, in both directions."""
    table = page("events.md").partition("## Figures")[2]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]

    assert sorted(listed) == sorted(field.name for field in fields(memlog.Statistics))


def test_the_limits_page_has_the_contract_s_numbers() -> None:
    """A number that changes in the code changes on the page."""
    text = page("limits.md")
    for number in (
        limits.ITEMS_PER_BATCH_MAX,
        limits.ITEM_BYTES_MAX,
        limits.BATCH_BYTES_MAX,
        limits.CONVERSATION_ITEMS_MAX,
        limits.PAGE_ITEMS_MAX,
        limits.HISTORY_EVENTS_MAX,
        limits.NESTING_MAX,
        limits.INT_DIGITS_MAX,
        int(limits.RETRY_AFTER_MAX),
    ):
        assert re.search(rf"(?<![\d,]){number:,}(?![\d,])", text), number


def test_the_settings_tables_have_each_setting_with_its_default() -> None:
    """`open_log`, `RetryPolicy` and `BufferLimits`, as they are."""
    text = page("limits.md")
    rows = dict(re.findall(r"^\| `([\w]+)`[^|]*\| ([^|]*?) *\|", text, re.MULTILINE))

    assert set(inspect.signature(memlog.open_log).parameters) - {"transport"} <= set(rows)
    policy = memlog.RetryPolicy()
    for name in ("attempts", "total", "blocked_delay", "requests_in_flight"):
        assert rows[name].removesuffix(" s") == f"{getattr(policy, name):g}"
    assert f"| `delay_min`, `delay_max` | {policy.delay_min:g} s, {policy.delay_max:g} s |" in text
    assert all(f"`{field.name}`" in text for field in fields(memlog.RetryPolicy))
    assert rows["unstored_bytes"] == f"{memlog.BufferLimits().unstored_bytes // 2**20} MiB"
    assert rows["disk_bytes"] == f"{memlog.BufferLimits().disk_bytes // 2**30} GiB"
    defaults = inspect.signature(memlog.open_log).parameters
    for name in ("timeout", "flush_timeout"):
        assert rows[name] == f"{defaults[name].default:g} s"


# -- the links


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(text: Path) -> None:
    """Files and headings; addresses of other sites are not asked."""
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text.read_text("utf-8")):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.removeprefix("project:").partition("#")
        file = (text.parent / name).resolve() if name else text
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], (
                target
            )
