"""Owns a buffer: stores as many batches as it is told, says so, and waits to be killed or told to end.

owner.py DIRECTORY COUNT
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.payload import encode_batch


class Silent:
    def stored(self, items: dict[str, int]) -> None:
        pass

    def disk_trouble(self, reason: str | None) -> None:
        pass

    def noticed(self, notice: object) -> None:
        pass


def main() -> None:
    buffer = Buffer(Path(sys.argv[1]), BufferLimits(), Silent())
    buffer.start()
    for number in range(int(sys.argv[2])):
        batch = encode_batch([{"n": number}])
        accepted, stored = Accepted("c_11111111", [batch]), threading.Event()
        buffer.put(accepted, batch.size)
        accepted.when_stored(stored.set)
        stored.wait()
    print(buffer.spool_path, flush=True)
    sys.stdin.read()
    buffer.close(5)


main()
