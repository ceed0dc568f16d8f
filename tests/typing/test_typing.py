"""What type checkers say about code that uses memlog."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
API = Path(__file__).with_name("api.py")


def check(file: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    # The project's own settings stay out: users have theirs.
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unreachable", "--config-file=", f"--cache-dir={cache}"]
    return subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_code_that_uses_memlog_passes_mypy_in_strict_mode(tmp_path: Path) -> None:
    """TypedDict, dict[str, str] and pydantic models go in; what comes out has its type; the wrong things are refused."""
    outcome = check(API, tmp_path / "cache")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr

    # The proof that the proof works: without its comments the same file is full of errors, one for each of them.
    bare = tmp_path / "bare.py"
    source = API.read_text(encoding="utf-8")
    bare.write_text(source.replace("  # type: ignore", "  # once ignored: "), encoding="utf-8")
    outcome = check(bare, tmp_path / "cache")
    complaints = {line.split(":")[1] for line in outcome.stdout.splitlines() if ": error:" in line}
    expected = {str(n) for n, line in enumerate(source.splitlines(), 1) if "  # type: ignore" in line}
    assert complaints == expected
