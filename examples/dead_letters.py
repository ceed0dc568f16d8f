"""Look at what the server refused, and decide: send it again, elsewhere perhaps, or drop it.

    export MEMLOG_URL=http://127.0.0.1:8080/mcp MEMLOG_AUTH=demo:demo MEMLOG_BUFFER_DIR=./memory
    python examples/dead_letters.py                        # list them, with the reason
    python examples/dead_letters.py requeue ID             # send again to the same conversation
    python examples/dead_letters.py requeue ID c_other_01  # or to another one
    python examples/dead_letters.py drop ID

A process has its own file in the buffer: run this while the agent that was refused is stopped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import memlog.sync

if TYPE_CHECKING:
    from memlog import DeadLetter


def show(letter: DeadLetter) -> None:
    print(f"{letter.id}: {letter.items} item(s), {letter.bytes} bytes, for {letter.conversation_id}")
    print(f"  refused at {letter.refused_at:%Y-%m-%d %H:%M:%S} UTC")
    print(f"  {type(letter.error).__name__}: {letter.error}")


def main(command: str = "list", letter_id: str = "", conversation_id: str | None = None) -> str | None:
    with memlog.sync.open_log() as log:
        letters = {letter.id: letter for letter in log.dead_letters()}
        if command == "list":
            for letter in letters.values():
                show(letter)
            print(f"{len(letters)} dead letter(s)")
            return None
        if letter_id not in letters:
            return f"there is no dead letter {letter_id!r}"
        if command == "requeue":
            log.requeue(letters[letter_id], conversation_id=conversation_id)
            report = log.flush(timeout=10)
            print(f"{report.acknowledged} acknowledged, {report.pending} pending, {report.refused} refused")
        elif command == "drop":
            log.drop(letters[letter_id])
        else:
            return f"unknown command {command!r}"
    return None


sys.exit(main(*sys.argv[1:]))
