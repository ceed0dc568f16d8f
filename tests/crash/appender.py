"""Appends through a log and says at once, past every buffer of its own, what is stored; killed, stopped or traced.

    appender.py URL DIRECTORY NAME COUNT [BATCH] [FLUSH]

Batch ``n`` of process NAME goes to conversation ``c_NAME<n % 2>`` and holds ``{"by": NAME, "n": n, "i": i}`` for each i
below 1 + n % BATCH. ``stored n`` is one write(2) to standard output, after ``stored()`` of batch n returned. FLUSH is
how many seconds to wait for the server in the end; it then says ``flushed True`` or ``flushed False``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import memlog.sync


def conversation(name: str, number: int) -> str:
    return f"c_{name}{number % 2}"


def batch(name: str, number: int, most: int) -> list[dict[str, Any]]:
    return [{"by": name, "n": number, "i": i} for i in range(1 + number % most)]


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(arguments: list[str]) -> None:
    url, directory, name, count, most, seconds = [*arguments, *("1", "0")[len(arguments) - 4 :]]
    retry = memlog.RetryPolicy(delay_min=0.01, delay_max=0.1, blocked_delay=0.1)
    log = memlog.sync.open_log(url, auth=("demo", "demo"), buffer_dir=directory, retry=retry, flush_timeout=0)
    say("open")
    for number in range(int(count)):
        receipt = log.conversation(conversation(name, number)).extend(batch(name, number, int(most)))
        receipt.stored(60)
        say(f"stored {number}")
    if float(seconds):
        say(f"flushed {log.flush(float(seconds)).complete}")
    log.close()


if __name__ == "__main__":
    main(sys.argv[1:])
