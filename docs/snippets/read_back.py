"""Read the whole conversation, as a new process would after a crash."""

import asyncio

import memlog


async def main() -> None:
    async with memlog.open_log() as log:
        async for item in log.conversation("c_tutorial_1").replay():
            print("-" if item.seq is None else item.seq, item.payload["text"])


asyncio.run(main())
