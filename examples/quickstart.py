"""Append, leave the network to memlog, read everything back.

    python -m server_reference --port 8080
    MEMLOG_URL=http://127.0.0.1:8080/mcp MEMLOG_AUTH=demo:demo python examples/quickstart.py

Run it without a server, too: nothing is lost, and the next run sends it.
"""

from __future__ import annotations

import asyncio

import memlog


async def main() -> None:
    # Address, credentials and directory come from MEMLOG_URL, MEMLOG_AUTH and MEMLOG_BUFFER_DIR.
    async with memlog.open_log() as log:
        chat = log.conversation(memlog.new_conversation_id())

        # A plain call that is back at once, with or without a server.
        chat.append({"role": "user", "text": "What is 6 times 7?"})

        # Several items that belong together are one batch: all of them are kept, or none.
        receipt = chat.extend(
            [
                {"role": "tool", "name": "multiply", "arguments": [6, 7], "result": 42},
                {"role": "assistant", "text": "42"},
            ]
        )

        # Waiting is a choice. Stored: a crash cannot take it any more. Acknowledged: it is in the remote log.
        await receipt.stored()
        try:
            ack = await receipt.acknowledged(timeout=5)
        except TimeoutError:
            print("nobody acknowledged it yet; it is on this disk, and the next run sends it")
            return
        print(f"acknowledged as items {ack.first_seq} to {ack.last_seq}")

        async for item in chat.replay():
            print(item.seq, item.payload)

        report = await log.flush(timeout=5)
        print(f"{report.pending} pending, {report.refused} refused")


asyncio.run(main())
