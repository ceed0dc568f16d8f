"""A script without an event loop: append a file of JSON lines to a conversation, and say what became of it.

    MEMLOG_URL=http://127.0.0.1:8080/mcp MEMLOG_AUTH=demo:demo python examples/sync_script.py c_import_01 < items.jsonl

What the server cannot take now stays in the buffer; the next program that opens it sends it.
"""

from __future__ import annotations

import json
import sys

import memlog.sync
from memlog.errors import InvalidItemError, TooLargeError


def main(conversation_id: str) -> int:
    skipped = 0
    with memlog.sync.open_log() as log:
        chat = log.conversation(conversation_id)
        for number, line in enumerate(sys.stdin, start=1):
            try:
                chat.append(json.loads(line))
            except (ValueError, InvalidItemError, TooLargeError) as error:
                print(f"line {number} is skipped: {error}", file=sys.stderr)
                skipped += 1
        report = log.flush(timeout=30)
        print(f"{report.acknowledged} in the log, {report.pending} still here, {report.refused} refused")
        if report.reason:
            print(f"{report.state}: {report.reason}", file=sys.stderr)
    return 0 if report.complete and not report.refused and not skipped else 1


sys.exit(main(sys.argv[1]))
