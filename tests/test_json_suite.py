"""Every valid document of a public JSON test suite, as the value of a key, there and back again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from books import PATIENCE

from memlog import Client, open_log

if TYPE_CHECKING:
    from memlog.testing import ReferenceServer

SUITE = Path(__file__).parents[2] / "shared" / "data" / "json-test-suite"

VALID = sorted(SUITE.glob("y_*.json"))

pytestmark = pytest.mark.skipif(not VALID, reason=f"the JSON test suite is not at {SUITE}")


def exactly(value: object) -> str:
    """A text that is equal only for values of equal types: repr tells 1 from True and 1.0, and -0.0 from 0.0."""
    return repr(value)


@pytest.mark.anyio
@pytest.mark.contract("C3")
async def test_what_python_reads_from_each_valid_document_comes_back_equal(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """C3: type for type and key for key in order, through the log and by the client; ours is that files are named."""
    assert len(VALID) > 90, "the suite is not whole"
    given = [{"file": path.name, "value": json.loads(path.read_bytes())} for path in VALID]
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path) as log:
            chat = log.conversation("json-suite")
            ack = await chat.extend(given, atomic=False).acknowledged()
            assert (ack.first_seq, ack.last_seq) == (0, len(given) - 1)
            replayed = [item.payload async for item in chat.replay()]
        async with Client(server.url, auth=server.auth) as client:
            read = [item.payload for item in await client.replay_memory("json-suite")]
    assert [exactly(payload) for payload in replayed] == [exactly(item) for item in given]
    assert read == replayed
