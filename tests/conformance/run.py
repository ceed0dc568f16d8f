"""The public conformance suite of the protocol, against our client and against our server.

    python tests/conformance/run.py [--suite VERSION] [--side client|server] [--only SCENARIO]

Every scenario of every protocol revision is run, in both versions of the suite: the newer one knows all revisions and
checks each message against the schema, the older one is what most implementations were measured with. What may fail
stands in ``baseline-VERSION.yml`` with its reason. A failure that is not there, and one there that passes, makes this
exit with 1; 3 means that the suite could not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from environments import UnreachableError, node_with  # noqa: E402 - not a package, found by its path

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITES = {
    "0.2.0-alpha.12": ("2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"),
    "0.1.16": ("2025-03-26", "2025-06-18", "2025-11-25"),
}
SECONDS_MAX = 180
"""For one run of the suite's program. Generous: most take a few seconds, and a busy machine is not a failure."""


class Outcome(NamedTuple):
    name: str
    passed: bool
    checks: tuple[int, int]
    """How many were satisfied, of how many."""

    said: str


class Suite:
    def __init__(self, version: str, results: str) -> None:
        self._baseline = HERE / f"baseline-{version}.yml"
        self._results = results
        self._node = node_with(f"conformance-{version}", f"@modelcontextprotocol/conformance@{version}")

    def client_scenarios(self, revision: str) -> list[str]:
        # Cumulative for the older revisions: what does not apply any more, or not yet, is listed too.
        listed = self._run("list", "--client", "--spec-version", revision)[1]
        return [name for name, known in re.findall(r"^  - (\S+) \[(.*)\]", listed, re.MULTILINE) if revision in known]

    def client(self, scenario: str, revision: str) -> Outcome:
        """One scenario by itself: run side by side, as the suite would, they starve each other."""
        command = f"{sys.executable} {HERE / 'client.py'}"
        options = ["--command", command, "--scenario", scenario, "--timeout", f"{SECONDS_MAX}000"]
        code, said = self._judged("client", revision, *options)
        count = re.search(r"Passed: (\d+)/(\d+)", said)
        checks = (int(count[1]), int(count[2])) if count else (0, 0)
        # The suite looks at its checks only. A client that fell over, or never came, has satisfied none of them.
        idle = ("CLIENT EXITED WITH ERROR" in said or not checks[1]) and "Expected failures (in baseline)" not in said
        return Outcome(f"client {revision} {scenario}", code == 0 and not idle, checks, said)

    def server(self, url: str, revision: str, form: str) -> Outcome:
        """All scenarios of a revision, one after the other."""
        code, said = self._judged("server", revision, "--url", url, "--suite", "all")
        count = re.search(r"^Total: (\d+) passed, (\d+) failed", said, re.MULTILINE)
        passed, failed = (int(count[1]), int(count[2])) if count else (0, 0)
        return Outcome(f"server {revision} as {form}", code == 0 and passed > 0, (passed, passed + failed), said)

    def _judged(self, side: str, revision: str, *options: str) -> tuple[int, str]:
        judged = ["--spec-version", revision, "--expected-failures", str(self._baseline), "-o", self._results]
        return self._run(side, *options, *judged)

    def _run(self, *arguments: str) -> tuple[int, str]:
        command = self._node.command("@modelcontextprotocol/conformance/dist/index.js", *arguments)
        # The scenarios' servers are on this machine: no proxy of the environment has a say.
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=SECONDS_MAX + 20,
                stdin=subprocess.DEVNULL,
                cwd=PROJECT,
                env=environment,
            )
        except subprocess.TimeoutExpired as error:
            return 1, f"no end in sight: {error}"
        return ended.returncode, re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout + ended.stderr)


@contextmanager
def reference_server(*, as_events: bool) -> Iterator[str]:
    options = ["--no-auth", "--conformance-tools", "--allow-faults"]
    command = [sys.executable, "-m", "server_reference", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split(" ")[0].strip()
            for tool in (None, "server/discover", "initialize", "ping", "tools/list") if as_events else ():
                fault = json.dumps({"kind": "sse", "tool": tool, "times": None}).encode()
                order = urllib.request.Request(
                    url.replace("/mcp", "/faults"), fault, {"Content-Type": "application/json"}
                )
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(order, timeout=10).close()
            yield url
        finally:
            process.terminate()


def outcomes(version: str, sides: list[str], only: str | None, results: str) -> Iterator[Outcome]:
    suite = Suite(version, results)
    if "client" in sides:
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            yield from [
                one.result()
                for one in [
                    pool.submit(suite.client, scenario, revision)
                    for revision in SUITES[version]
                    for scenario in suite.client_scenarios(revision)
                    if only in (None, scenario)
                ]
            ]
    if "server" in sides and only is None:
        for form in ("json", "event streams"):
            with reference_server(as_events=form != "json") as url:
                for revision in SUITES[version]:
                    if (version, revision) != ("0.1.16", "2025-03-26"):  # it has no scenario for that
                        yield suite.server(url, revision, form)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="only this version of the suite")
    parser.add_argument("--side", choices=["client", "server"], action="append", help="only our client, or our server")
    parser.add_argument("--only", metavar="SCENARIO", help="only this scenario of the client, with all that is said")
    options = parser.parse_args()
    unexpected = 0
    try:
        with tempfile.TemporaryDirectory() as results:
            for version in options.suite or SUITES:
                for outcome in outcomes(version, options.side or ["client", "server"], options.only, results):
                    unexpected += not outcome.passed
                    passed, total = outcome.checks
                    print(
                        f"{'ok  ' if outcome.passed else 'FAIL'} {version} {outcome.name}: {passed} of {total} checks"
                    )
                    if options.only or not outcome.passed:
                        print(outcome.said)
                    sys.stdout.flush()
    except UnreachableError as error:
        print(f"The conformance suite cannot be installed: {error}.", file=sys.stderr)
        return 3
    print(f"{unexpected} not as expected." if unexpected else "All as expected.")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
