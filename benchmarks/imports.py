"""What `from memlog import open_log, Client` costs, beside importing what it stands on.

    python -m benchmarks.imports [--rounds N]

Every sample is a fresh interpreter; the kinds take turns, so that whatever else the machine does hits all of them. A
ratio is the median of the rounds' own ratios. Judged by processor time, which the others on a busy machine disturb
least, and with the whole floor in it ("memlog, then the floor"), so that a part of it which memlog imports only where
it is needed does not count as saved. The last rows follow the import with what a program does next: an import that puts
its work off would look good before and bad there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = 1.3

FLOOR = """
import httpx, anyio, tenacity, filelock, platformdirs, sqlite3
from pydantic import BaseModel
"""
MEMLOG = "from memlog import open_log, Client\n"
FIRST_USE = """
log = open_log("http://127.0.0.1:9/mcp", auth=("bench", "bench"), buffer_dir=directory)
log.conversation("c_benchmark").append({"role": "user", "text": "hello"})
"""
FIRST_DEFAULT_DIRECTORY = """
import os
os.environ["XDG_STATE_HOME"] = directory
log = open_log("http://127.0.0.1:9/mcp", auth=("bench", "bench"))
"""

KINDS = {
    "floor": FLOOR,
    "floor, then asyncio": FLOOR + "import asyncio\n",
    "memlog": MEMLOG,
    "memlog, then the floor": MEMLOG + FLOOR,
    "memlog, after the floor": MEMLOG,
    "memlog + first append": MEMLOG + FIRST_USE,
    "memlog + default directory": MEMLOG + FIRST_DEFAULT_DIRECTORY,
}
JUDGED = ("memlog", "memlog, then the floor")
BEFORE = {"memlog, after the floor": FLOOR}
"""What is imported before the clock starts: the row shows what memlog adds of its own."""

# Warnings about an unreachable server are not what is measured. Nothing but sys and time is imported before the clock:
# whatever else a kind needs is part of its cost.
SAMPLE = """
import sys, time
directory = sys.argv[1]
{before}
wall, cpu, known = time.perf_counter(), time.process_time(), len(sys.modules)
{code}
wall, cpu, known = time.perf_counter() - wall, time.process_time() - cpu, len(sys.modules) - known
import json, logging, os
print(json.dumps([wall, cpu, known]), flush=True)
os._exit(0)
"""


def sample(kind: str, bytecode: str) -> tuple[float, float, int]:
    """Wall and processor seconds of one kind in a fresh interpreter, and how many modules it loaded.

    ``bytecode`` is where compiled modules are kept: as an installer does it, nothing is compiled while the clock runs.
    """
    code = SAMPLE.format(before=BEFORE.get(kind, ""), code=KINDS[kind])
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-c", code, directory],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{kind}: {done.stderr.strip()}")
    wall, cpu, modules = json.loads(done.stdout)
    return wall, cpu, modules


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="fresh interpreters of each kind (default: %(default)s)")
    rounds = parser.parse_args(arguments).rounds
    samples: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as bytecode:
        for kind in KINDS:
            sample(kind, bytecode)  # compiles, and warms the page cache
        for number in range(rounds):
            order = list(KINDS)
            shift = number % len(order)
            for kind in order[shift:] + order[:shift]:
                samples[kind].append(sample(kind, bytecode))

    print(f"import, median of {rounds} fresh interpreters, Python {sys.version.split()[0]}")
    print("floor: httpx, pydantic.BaseModel, anyio, tenacity, filelock, platformdirs, sqlite3")
    print()
    print(f"{'':28}{'wall ms':>9}{'cpu ms':>9}{'modules':>9}{'wall ratio':>12}{'cpu ratio':>11}")
    ratios = {}
    for kind, taken in samples.items():
        wall, cpu, modules = (statistics.median(column) for column in zip(*taken, strict=True))
        pairs = list(zip(taken, samples["floor"], strict=True))
        ratio = statistics.median(own[0] / floor[0] for own, floor in pairs)
        cpu_ratio = ratios[kind] = statistics.median(own[1] / floor[1] for own, floor in pairs)
        print(f"{kind:28}{wall * 1e3:9.1f}{cpu * 1e3:9.1f}{modules:9.0f}{ratio:12.2f}{cpu_ratio:11.2f}")
    print()
    for kind in JUDGED:
        verdict = "met" if ratios[kind] <= TARGET else "NOT met"
        print(f"target, {kind}: at most {TARGET} x the floor: {ratios[kind]:.2f}, {verdict}")


if __name__ == "__main__":
    main()
