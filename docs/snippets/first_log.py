"""The first log: one item on its way to the server."""

import asyncio

import memlog


async def main() -> None:
    async with memlog.open_log() as log:
        chat = log.conversation("c_tutorial_1")
        receipt = chat.append({"role": "user", "text": "Remember me."})
        await receipt.stored()
        print("stored on this disk")
        ack = await receipt.acknowledged()
        print(f"acknowledged by the server as item {ack.first_seq}")


asyncio.run(main())
