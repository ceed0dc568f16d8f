"""Change a team record so that it happens once, whatever becomes of the answer or of this program."""

import asyncio
import os
from uuid import uuid4

import memlog
from memlog.errors import RevisionChangedError

TEAM = memlog.Scope.team("engineering")


async def decide(team: memlog.TeamClient, record: memlog.Record, text: str, reason: str, request_id: str) -> str:
    try:
        new = await team.update(
            record.id, text, expected_revision=record.revision, reason=reason, scope=TEAM, request_id=request_id
        )
    except RevisionChangedError:
        return "somebody else was faster: read the record again"
    except memlog.TransientError:
        # Keep the request_id. The same call with it later, also by another process, is carried out once.
        return f"unknown; happened so far: {await team.happened(request_id=request_id, scope=TEAM)}"
    return f"record {new.id} replaces {new.previous_id}" + (f", without {new.redacted}" if new.redacted else "")


async def main() -> None:
    async with memlog.TeamClient(os.environ["MEMLOG_URL"], token=os.environ["MEMLOG_TOKEN"]) as team:
        record = await team.save("Use pgbouncer.", type="decision", scope=TEAM)
        request_id = str(uuid4())
        for _ in range(2):
            print(await decide(team, record, "Use no pooler.", "The driver pools", request_id))
        print(await decide(team, record, "Use two.", "One is not enough", str(uuid4())))


asyncio.run(main())
