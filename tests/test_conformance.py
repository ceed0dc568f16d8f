"""The public conformance suite of the protocol, as a part of ours, and what its baseline files may say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).parent / "conformance"
BASELINES = sorted(CONFORMANCE.glob("baseline-*.yml"))

OURS = {
    "client": {
        "initialize",
        "tools_call",
        "sse-retry",
        "request-metadata",
        "http-standard-headers",
        "http-custom-headers",
        "http-invalid-tool-headers",
        "json-schema-ref-no-deref",
        "json-schema-2020-12-preservation",
    },
    "server": {
        "server-initialize",
        "server-session-lifecycle",
        "ping",
        "tools-list",
        "tools-call-simple-text",
        "tools-call-error",
        "dns-rebinding-protection",
        "server-sse-multiple-streams",
        "http-header-validation",
        "http-custom-header-server-validation",
        "json-schema-2020-12",
    },
}
"""What a client and a server of tools have to do: never to be excused, not even one check of it."""


def entries(baseline: Path) -> list[tuple[str, str, str]]:
    """Side, entry and the comment above it, of a baseline file."""
    found: list[tuple[str, str, str]] = []
    side = reason = previous = ""
    for line in baseline.read_text().splitlines():
        if line.endswith(":") and not line.startswith((" ", "#")):
            side, reason = line[:-1], ""
        elif line.startswith("  # "):
            reason = f"{reason} {line[4:]}" if previous.startswith("  # ") else line[4:]
        elif line.startswith("  - "):
            found.append((side, line[4:].strip(), reason))
        previous = line
    return found


@pytest.mark.interop
@pytest.mark.slow
@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("suite", ["0.2.0-alpha.12", "0.1.16"])
def test_every_scenario_ends_as_expected(suite: str, side: str) -> None:
    """Spec: all that a client and a server of tools have to do, in every revision that the suite knows."""
    command = [sys.executable, CONFORMANCE / "run.py", "--suite", suite, "--side", side]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    if ended.returncode == 3:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("All as expected.\n")
    ran = set(re.findall(rf"^ok +{re.escape(suite)} client \S+ (\S+): [1-9]\d* of", ended.stdout, re.MULTILINE))
    if side == "client":
        assert ran >= (OURS["client"] if suite != "0.1.16" else {"initialize", "tools_call", "sse-retry"})


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda path: path.stem)
def test_whatever_is_excused_has_a_reason_and_is_not_our_business(baseline: Path) -> None:
    """Ours: a scenario that a client or a server of tools must pass is in no baseline, and nothing is without a why."""
    found = entries(baseline)
    assert len({(side, entry) for side, entry, _ in found}) == len(found)
    for side, entry, reason in found:
        assert entry.partition(":")[0] not in OURS[side]
        assert len(reason.split()) > 5, entry
