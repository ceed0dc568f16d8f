"""``python -m examples.demo [FILE.jsonl]``; ``scripts/demo`` also makes the environment for it."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import httpx

from .children import ROOT, DemoFailedError
from .conductor import Outcome, perform
from .display import Display
from .rawlog import RawLogError
from .script import Script, ScriptError, plan, read_source

DESCRIPTION = """\
Appends the conversations of a file through memlog to a server on this machine. On the way the server is killed and
stays away for some seconds, and the appending process is killed in the middle of its work. Then everything is read
back, by memlog and by plain HTTP, and compared with the whole input.

Exit status: 0 if nothing is lost and every conversation is identical, 1 if not or if the run could not be carried
through, 2 for a file that cannot be used, 130 after Ctrl-C.
"""
CONVERSATIONS = ROOT / "examples" / "data" / "conversations.jsonl"
RUN_S_MAX = 120.0


def main() -> int:
    options = _options()
    if not hasattr(signal, "SIGSTOP"):
        print("The demo kills and stops processes as POSIX systems can; this system cannot.", file=sys.stderr)
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a bar in a terminal without Unicode is worth a question mark
    try:
        script = plan(read_source(options.file), seconds=options.seconds)
    except ScriptError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="memlog-demo-"))
    show = Display()
    show.say(
        f"{script.items:,} items in {len(script.conversations):,} conversations "
        f"({options.file.name}, {script.rounds} times), {script.pace:.0f} appends/s"
    )
    try:
        outcome = asyncio.run(_until_told_to_stop(options, script, work, show))
    except (KeyboardInterrupt, asyncio.CancelledError):
        show.say("stopped")
        shutil.rmtree(work, ignore_errors=True)
        return 130
    except (DemoFailedError, RawLogError, httpx.HTTPError, OSError, ExceptionGroup) as error:
        for leaf in _leaves(error):
            show.say(f"FAILED: {leaf or type(leaf).__name__}")
        show.say(f"everything is left for you to look at in {work}")
        return 1
    return _conclude(outcome, work, show)


async def _until_told_to_stop(options: argparse.Namespace, script: Script, work: Path, show: Display) -> Outcome:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    limit = max(RUN_S_MAX, 3 * script.items / script.pace)
    try:
        async with asyncio.timeout(limit):
            return await perform(options.file.resolve(), script, work, show, outage=options.outage)
    except TimeoutError:
        raise DemoFailedError(f"not done after {limit:.0f} s") from None


def _conclude(outcome: Outcome, work: Path, show: Display) -> int:
    show.table(outcome.rows())
    if outcome.kept:
        shutil.rmtree(work, ignore_errors=True)
        return 0
    for failure in outcome.failures():
        print(f"  {failure}")
    print(f"\nThe promise was NOT kept. Everything is left for you to look at in {work}")
    return 1


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file",
        metavar="FILE.jsonl",
        type=Path,
        nargs="?",
        default=CONVERSATIONS,
        help='one {"conversation": id, "items": [...]} a line (default: %(default)s)',
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long to append, at least (default: %(default)g)"
    )
    parser.add_argument("--outage", type=float, default=5.0, help="seconds without a server (default: %(default)g)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
