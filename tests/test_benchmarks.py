"""The benchmarks run and say what they promise to say. How fast anything is depends on the machine and is no test."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUBJECTS = ("bare", "memlog", "memlog, sending", "persist-queue", "litequeue")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(output: str, name: str) -> list[list[str]]:
    """The columns of every row that begins with ``name``."""
    return [line[len(name) :].split() for line in output.splitlines() if line.startswith(name.ljust(17))]


def assert_measured(output: str, name: str) -> None:
    """A row for flat, nested and conversations; positive times, and ratios to bare."""
    rows = rows_of(output, name)
    assert len(rows) == 3, output
    for rate, p50, p99, p50_ratio, p99_ratio, *_ in rows:
        assert float(rate.replace(",", "")) > 0
        assert 0 < float(p50) <= float(p99) + 1
        assert p50_ratio.endswith("x")
        assert p99_ratio.endswith("x")
        assert name != "bare" or p50_ratio == p99_ratio == "1.00x"


def test_the_append_benchmark_measures_memlog_beside_the_bare_baseline() -> None:
    """Ours: three kinds of items, the envelope sketch beside the figures, a verdict for each; files checked by the run."""
    output = run("benchmarks/append.py", "--quick", "--only", "memlog")
    for name in ("bare", "memlog"):
        assert_measured(output, name)
    assert not rows_of(output, "litequeue")
    assert output.count("envelope: ") == 3
    assert output.count("target, ") == 3


@pytest.mark.slow
def test_the_append_benchmark_measures_every_subject_in_one_run() -> None:
    """Ours: with a live server and with the two queues of others; who is not installed is named."""
    output = run("-m", "benchmarks.append", "--quick")
    for name in SUBJECTS:
        if f"{name} is left out: " in output:
            continue
        assert_measured(output, name)
    assert output.count("quiet loop") == 3


def test_the_client_benchmark_measures_beside_the_bytes_by_hand_and_the_official_client() -> None:
    """Ours: a row for each with its ratio, the yardstick at 1.00, and a verdict on each target."""
    output = run("-m", "benchmarks.client", "--quick")
    for name in ("raw httpx2", "raw httpx", "memlog", "official"):
        (row,) = (line[18:].split() for line in output.splitlines() if line.startswith(name.ljust(18)))
        times, ratios = row[::2], [cell.strip("()") for cell in row[1::2]]
        assert len(times) == len(ratios) == 4, output
        assert all(float(cell) > 0 for cell in (*times, *ratios))
        assert name != "raw httpx2" or set(ratios) == {"1.00"}
    assert output.count("target, ") == 4


def test_the_replay_benchmark_reads_beside_a_raw_loop_and_the_official_clients() -> None:
    """Ours: a row for each with its ratio at three sizes of items, the yardstick at 1.00, a verdict on each target."""
    output = run("-m", "benchmarks.replay", "--quick")
    for name in ("raw httpx2", "memlog", "memlog, log", "official"):
        (row,) = (line[18:].split() for line in output.splitlines() if line.startswith(name.ljust(18)))
        rates, ratios = row[::2], [cell.strip("()") for cell in row[1::2]]
        assert len(rates) == len(ratios) == 3, output
        assert all(float(cell.replace(",", "")) > 0 for cell in (*rates, *ratios))
        assert name != "raw httpx2" or set(ratios) == {"1.00"}
    assert output.count("target, ") == 9


@pytest.mark.slow
def test_the_import_benchmark_compares_with_the_floor() -> None:
    """Ours: fresh interpreters, with the floor at 1.00 and a verdict on memlog."""
    output = run("-m", "benchmarks.imports", "--rounds", "1")
    floor = next(line for line in output.splitlines() if line.startswith("floor   "))
    assert floor.split()[-2:] == ["1.00", "1.00"]
    assert output.count("target, memlog") == 2


def test_an_append_that_was_lost_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours: figures of a subject that did not keep everything are never printed."""
    monkeypatch.syspath_prepend(str(ROOT))
    append = importlib.import_module("benchmarks.append")

    class Forgetful(append.Bare):
        def appender(self, conversation: str) -> object:
            keep = super().appender(conversation)
            calls = iter(range(1_000_000))
            return lambda item: next(calls) and keep(item)

    subject = Forgetful(tmp_path)
    with pytest.raises(SystemExit, match="appended"):
        append.asyncio.run(append.take_turn(subject, append.flat_items(), 0.05))
