"""What to do about a failed append, without a log to do it."""

import asyncio
import os

import memlog
from memlog.errors import RateLimitedError


async def append(client: memlog.Client, conversation_id: str, item: dict[str, object]) -> str:
    try:
        ack = await client.append_memory(conversation_id, [item])
    except RateLimitedError as error:
        return f"later: in {error.retry_after or 1} seconds"
    except memlog.PermanentError as error:
        return f"never: {error}"
    except memlog.TransientError as error:
        return f"again: {error.outcome}"
    return f"acknowledged as {ack.first_seq}"


async def main() -> None:
    user, _, password = os.environ["MEMLOG_AUTH"].partition(":")
    async with memlog.Client(os.environ["MEMLOG_URL"], auth=(user, password)) as client:
        print(await append(client, "c_client_01", {"text": "hello"}))
        print(await append(client, "short", {"text": "hello"}))


asyncio.run(main())
