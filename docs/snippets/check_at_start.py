"""Stop at the start if the credentials or the address are wrong, and start without a server if it is only away."""

import asyncio
import sys

import memlog
from memlog.errors import AuthenticationError, RedirectRefusedError


async def main() -> None:
    async with memlog.open_log() as log:
        try:
            await log.check()
        except (AuthenticationError, RedirectRefusedError) as error:
            sys.exit(f"not starting: {error}")
        except memlog.TransientError as error:
            print(f"starting without a memory server: {error}")
        print("serving")


asyncio.run(main())
