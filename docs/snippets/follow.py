"""Print what is said in a conversation, as it comes, until somebody says goodbye."""

import asyncio
from contextlib import aclosing

import memlog


async def main() -> None:
    async with memlog.open_log() as log, aclosing(log.conversation("c_tutorial_1").replay(follow=True)) as replay:
        async for item in replay:
            print(item.seq, item.payload["text"], flush=True)
            if item.payload["text"] == "goodbye":
                break


asyncio.run(main())
