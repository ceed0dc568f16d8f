"""Receipts that outlive the process, the log and a fork: what became of an append can be asked by its id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from between import PATIENCE, Between, Call, Opener, drain
from books import QUICK, until

import memlog
from memlog import Ack, open_log
from memlog.errors import ClosedError, InvalidRequestError, MemlogError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlog.testing import ReferenceServer

CHAT = "conversation-1"
OTHER = "conversation-2"
PROGRAM = Path(__file__).parent / "crash" / "receipts.py"


@pytest.fixture
def opened(server: ReferenceServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path)
    yield opener
    opener.close()


def refusing(text: str) -> Between:
    def decide(call: Call) -> Any:
        return call.refuse() if call.tool == "append_memory" and call.says(text) else None

    return Between(decide)


@pytest.mark.anyio
async def test_a_receipt_is_found_again_by_its_id_and_answers_as_the_first_one(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """In the same log, before the batch is stored, and after."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            first = log.conversation(CHAT).append({"n": 0})
            again = log.receipt(first.id)
            await again
            await first.stored()
            assert again.id == first.id
            assert repr(again) == f"<Receipt {first.id}>"
            assert await again.acknowledged() == await first.acknowledged() == Ack(0, 0)
            several = log.conversation(CHAT).extend([{"n": n} for n in range(1, 600)], atomic=False)
            assert await log.receipt(several.id).acknowledged() == await several.acknowledged() == Ack(1, 599)


@pytest.mark.anyio
async def test_after_a_restart_a_receipt_says_pending_then_acknowledged(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The id is all that has to be kept."""
    with anyio.fail_after(PATIENCE):
        server.stop()
        log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0)
        receipt_id = log.conversation(CHAT).append({"n": 0}).id
        await log.close()
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK, flush_timeout=0) as log:
            receipt = log.receipt(receipt_id)
            await receipt.stored(PATIENCE)
            with pytest.raises(TimeoutError):
                await receipt.acknowledged(0.05)
            server.start()
            assert await receipt.acknowledged() == Ack(0, 0)
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            assert await log.receipt(receipt_id).acknowledged() == Ack(0, 0)
            await log.receipt(receipt_id).stored()


@pytest.mark.anyio
async def test_a_refused_batch_is_told_after_a_restart_and_a_requeued_one_is_followed(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """The error first; after the operator's decision, where it stands now, also after another restart."""
    settings: dict[str, Any] = {"auth": server.auth, "buffer_dir": tmp_path, "retry": QUICK}
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, transport=refusing("poison"), **settings) as log:
            chat = log.conversation(CHAT)
            bad, good = chat.append({"poison": True}), chat.append({"n": 1})
            with pytest.raises(InvalidRequestError):
                await bad.acknowledged()
            assert await good.acknowledged() == Ack(0, 0)
        async with open_log(server.url, **settings) as log:
            found = log.receipt(bad.id)
            await found.stored()
            with pytest.raises(InvalidRequestError):
                await found.acknowledged()
            [letter] = await log.dead_letters()
            await log.requeue(letter, conversation_id=OTHER)
            assert await found.acknowledged() == Ack(0, 0)
            await found.stored()
        async with open_log(server.url, **settings) as log:
            assert await log.receipt(bad.id).acknowledged() == Ack(0, 0)


def test_a_dropped_batch_and_one_that_never_was_are_told_apart_from_pending_ones(opened: Opener) -> None:
    """MemlogError, with the reason; never a wait without end."""
    log = opened(refusing("poison"))
    bad = log.conversation(CHAT).append({"poison": True})
    with pytest.raises(InvalidRequestError):
        bad.acknowledged(PATIENCE)
    [letter] = log.dead_letters()
    log.drop(letter)
    spool = bad.id.partition(".")[0]
    for receipt_id, text in (
        (bad.id, "no longer kept"),
        (f"{spool}.77", "nothing was ever stored as number 77"),
        (f"{spool}.0", "nothing was ever stored"),
        (f"{spool}.1-9", "no longer kept"),
        ("0123456789abcdef.1", "another process's buffer"),
    ):
        for ask in (log.receipt(receipt_id).stored, log.receipt(receipt_id).acknowledged):
            with pytest.raises(MemlogError, match=text):
                ask(PATIENCE)


@pytest.mark.parametrize("bad", ["", "x", "0123456789abcdef", "0123456789abcdef.", "0123456789abcdef.2-1", "../../x.1",
                                 "0123456789abcdef.1-9999999", "0123456789ABCDEF.1", " 0123456789abcdef.1", 7, None])  # fmt: skip
def test_what_is_no_id_is_a_value_error(bad: Any, opened: Opener) -> None:
    """At once, and not when it is waited for."""
    with pytest.raises(ValueError, match="not the id of a receipt"):
        opened().receipt(bad)


def test_a_closed_log_gives_no_receipts(opened: Opener) -> None:
    """As with everything else of it."""
    log = opened()
    receipt_id = log.conversation(CHAT).append({"n": 0}).id
    log.close()
    with pytest.raises(ClosedError):
        log.receipt(receipt_id)


def test_the_blocking_face_has_it_too(opened: Opener) -> None:
    """Also from the other face's receipt."""
    log = opened()
    receipt = log.conversation(CHAT).append({"n": 0})
    again = log.receipt(receipt.id)
    again.stored(PATIENCE)
    assert again.acknowledged(PATIENCE) == Ack(0, 0)
    assert (again.id, repr(again)) == (receipt.id, f"<Receipt {receipt.id}>")


def test_a_buffer_in_memory_stores_nothing_whoever_asks(server: ReferenceServer) -> None:
    """But what was acknowledged can be asked as long as it lives."""
    with memlog.sync.open_log(server.url, auth=server.auth, buffer_dir=":memory:", retry=QUICK) as log:
        receipt = log.conversation(CHAT).append({"n": 0})
        receipt.acknowledged(PATIENCE)
        assert log.receipt(receipt.id).acknowledged(PATIENCE) == Ack(0, 0)
        with pytest.raises(MemlogError, match="in memory"):
            log.receipt(receipt.id).stored(PATIENCE)


def test_another_process_s_buffer_answers_what_is_settled_and_says_what_it_cannot_tell(opened: Opener) -> None:
    """A live process keeps its spool to itself; its settled batches can be read all the same."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "serve", opened.server.url, str(opened.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        ids = json.loads(program.stdout.readline())
        log = opened()
        assert log.receipt(ids["acknowledged"]).acknowledged(PATIENCE) == Ack(0, 0)
        log.receipt(ids["acknowledged"]).stored(PATIENCE)
        for ask in (log.receipt(ids["pending"]).acknowledged, log.receipt(ids["pending"]).stored):
            with pytest.raises(ClosedError, match="another process's buffer"):
                ask(PATIENCE)
        program.stdin.close()
        program.wait(PATIENCE)
    log.close()
    opened.server.faults.clear()
    log = opened()  # the other one is gone, and its spool is ours now
    assert log.receipt(ids["pending"]).acknowledged(PATIENCE) == Ack(1, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_receipt_that_was_not_stored_at_the_fork_does_not_keep_the_child_waiting(opened: Opener) -> None:
    """It is the parent's: ClosedError in the child, promptly; a stored one is answered as far as it can be known."""
    program = subprocess.run(
        [sys.executable, str(PROGRAM), "fork", opened.server.url, str(opened.directory)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert [line for line in program.stderr.splitlines() if not line.startswith("memlog: ")] == []
    assert json.loads(program.stdout.splitlines()[-1]) == {"code": 0}
    log = opened()
    drain(log)
    assert opened.contents() == {"c_parent00": [{"n": 0}, {"n": 1}], "c_child000": [{"n": 0}]}


@pytest.mark.anyio
async def test_an_acknowledgement_that_was_seen_is_remembered_after_the_end_of_the_log(
    server: ReferenceServer, tmp_path: Path
) -> None:
    """By the receipt itself; one that was never asked says that the log is closed."""
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            asked, silent = (log.conversation(CHAT).append({"n": n}) for n in range(2))
            assert await asked.acknowledged() == Ack(0, 0)
            await log.flush()
        assert await asked.acknowledged() == Ack(0, 0)
        assert await asked.acknowledged(0) == Ack(0, 0)
        with pytest.raises(ClosedError):
            await silent.acknowledged()


@pytest.mark.anyio
async def test_closing_tells_who_waits_what_was_acknowledged_meanwhile(server: ReferenceServer, tmp_path: Path) -> None:
    """The last flush may bring the answer; whoever waits for it must not get ClosedError instead."""
    found: list[Any] = []
    with anyio.fail_after(PATIENCE):
        for n in range(20):
            log = open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK)
            receipt = log.conversation(CHAT).append({"n": n})

            async def wait(receipt: memlog.Receipt = receipt) -> None:
                found.append(await receipt.acknowledged())

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await log.close()
    assert found == [Ack(n, n) for n in range(20)]


@pytest.mark.anyio
async def test_a_receipt_stays_good_over_a_kill(server: ReferenceServer, tmp_path: Path) -> None:
    """The process was killed after stored(): its id finds the batch, pending and then acknowledged."""
    program = await anyio.run_process([sys.executable, str(PROGRAM), "killed", server.url, str(tmp_path)], check=False)
    receipt_id = program.stdout.decode().split()[0]
    with anyio.fail_after(PATIENCE):
        async with open_log(server.url, auth=server.auth, buffer_dir=tmp_path, retry=QUICK) as log:
            await log.receipt(receipt_id).stored()
            assert await log.receipt(receipt_id).acknowledged() == Ack(0, 0)
            await until(lambda: log.statistics().pending_items == 0)
