"""Any order of appending, sending, refusing, killing, opening and taking over, beside a model of plain lists.

Two processes work in one directory, each a :class:`~memlog.buffer.Buffer`; kernel locks keep them apart as they keep
processes apart. A kill is honest: the files are put back as they were at that moment, whatever closing did to them, and
the moment may be inside a transaction. There is no server: what is "sent" is acknowledged, refused, or neither.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memlog import limits
from memlog.buffer import Accepted, Buffer, BufferLimits
from memlog.errors import InvalidRequestError, to_record
from memlog.payload import encode_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlog.directory import Spools
    from memlog.spool import Spool

SECONDS = 30.0
LANES = ["c_aaaaaaaa", "c_bbbbbbbb"]
REFUSED = to_record(InvalidRequestError("refused", outcome="refused"))

number_of = st.integers(0, 1)  # of a process
some_run = precondition(lambda self: any(self.processes))
some_rest = precondition(lambda self: not all(self.processes))
lane = st.sampled_from(LANES)


class Silent:
    """Nobody listens."""

    def stored(self, items: dict[str, int]) -> None:
        pass

    def disk_trouble(self, reason: str | None) -> None:
        raise AssertionError(reason)

    def noticed(self, notice: object) -> None:
        pass


@dataclass
class Expected:
    """What one spool should hold: batches by their number."""

    pending: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in LANES})
    refused: list[tuple[str, int]] = field(default_factory=list)

    @property
    def holds_something(self) -> bool:
        return bool(self.refused or any(self.pending.values()))


def items_of(number: int) -> list[dict[str, Any]]:
    return [{"n": number, "i": i} for i in range(1 + number % 3)]


def number_in(body: bytes) -> int:
    """Which batch it is, checked to be that batch and all of it."""
    items = json.loads(b"[%b]" % body)
    assert items == items_of(items[0]["n"])
    return int(items[0]["n"])


def held(spool: Spool) -> Expected:
    """What a spool holds, in the terms of the model."""
    found = Expected()
    for name in LANES:
        found.pending[name] = [number_in(row.body) for row in spool.pending(name)]
    found.refused = [(row[1], number_in(row[6])) for row in spool.refused()]
    return found


class Machine(RuleBasedStateMachine):
    """A rule that is given a number of a process that does not run takes the other one."""

    @initialize()
    def begin(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.directory = Path(self.place.name) / "site"
        self.directory.mkdir()
        self.processes: list[Buffer | None] = [None, None]
        self.model: dict[str, Expected] = {}  # by the spool's name
        self.doubtful: dict[str, list[tuple[str, int]]] = {}  # put just before a kill: there or not, in this order
        self.numbers = 0
        self.delivered: dict[str, list[int]] = {name: [] for name in LANES}
        self.dropped: list[int] = []
        self.vanished: list[int] = []
        self.open(0)
        self.open(1)

    def _running(self, number: int) -> tuple[int, Buffer]:
        process = self.processes[number]
        return (number, process) if process is not None else self._running(1 - number)

    # --- life

    @some_rest
    @rule(number=number_of)
    def open(self, number: int) -> None:
        """It takes a free spool, and over whatever else is free and holds something."""
        if self.processes[number] is not None:
            number = 1 - number
        others = [] if self.processes[1 - number] is None else self._paths(self.processes[1 - number])
        free = sorted(path for path in self.directory.glob("*.db") if path not in others)
        process = self.processes[number] = Buffer(self.directory, BufferLimits(), Silent())
        process.start()
        assert not free or self._paths(process)[0] == free[0], "a restart finds its file, and with it its order"
        holding = self._ask(process, lambda spools: [spool.name for spool in spools])
        self.model.setdefault(holding[0], Expected())
        other = self.processes[1 - number]
        elsewhere = [] if other is None else self._ask(other, lambda spools: [spool.name for spool in spools])
        self._left_over(process, holding, elsewhere)

    def _paths(self, process: Buffer | None) -> list[Path | None]:
        assert process is not None
        return self._ask(process, lambda spools: [spool.path for spool in spools])

    def _left_over(self, process: Buffer, holding: list[str], elsewhere: list[str]) -> None:
        """After taking over: each spool with something in it is held, by one of the two."""
        assert not set(holding) & set(elsewhere)
        self._held(process)
        for name in self.doubtful.keys() - set(elsewhere):  # nothing of it is there, or it would have been taken over
            self.vanished += [batch for _, batch in self.doubtful.pop(name)]
        waiting = {name for name, expected in self.model.items() if expected.holds_something}
        assert waiting <= {*holding, *elsewhere}, "something is left with nobody to send it"

    @some_run
    @rule(number=number_of)
    def adopt(self, number: int) -> None:
        """The scan that a running process makes every few seconds: it takes over what the other one left."""
        number, process = self._running(number)
        before = self._ask(process, lambda spools: [spool.name for spool in spools])
        told = process.run(lambda spools: [notice.path for notice in spools.scan()]).result(SECONDS)
        holding = self._ask(process, lambda spools: [spool.name for spool in spools])
        assert holding[: len(before)] == before, "what it holds stays where it is"
        assert len(told) <= len(holding) - len(before)
        other = self.processes[1 - number]
        elsewhere = [] if other is None else self._ask(other, lambda spools: [spool.name for spool in spools])
        self._left_over(process, holding, elsewhere)

    @some_run
    @rule(number=number_of)
    def close(self, number: int) -> None:
        """In good order."""
        number, process = self._running(number)
        assert process.close(SECONDS)
        self.processes[number] = None

    @some_run
    @rule(number=number_of, lanes=st.lists(lane, max_size=3), inside=st.booleans())
    def kill(self, number: int, lanes: list[str], inside: bool) -> None:
        """kill -9, after appends that nobody waited for, between two transactions or inside one."""
        number, process = self._running(number)
        put = [(name, self._put(process, name)[0]) for name in lanes]
        saved = Path(self.place.name) / "saved"

        def save(spools: Spools) -> str:
            if not saved.exists():  # a transaction may run twice
                if inside:
                    spools.own.begin()
                    spools.own.note("never", "seen")
                saved.mkdir()
                for spool in spools:
                    assert spool.path is not None
                    for path in self.directory.glob(f"{spool.path.stem}*"):
                        if path.suffix not in (".lock", ".db-shm"):
                            shutil.copyfile(path, saved / path.name)
            return spools.own.name

        own = process.run(save, writes=inside).result(SECONDS)
        assert process.close(SECONDS)
        for path in [*saved.glob("*.db")]:
            for later in ("-wal", "-shm"):  # the saved ones belong to it, no others
                (self.directory / f"{path.name}{later}").unlink(missing_ok=True)
        for path in [*saved.iterdir()]:
            shutil.move(path, self.directory / path.name)
        saved.rmdir()
        self.processes[number] = None
        if put:
            self.doubtful[own] = [*self.doubtful.get(own, ()), *put]

    def _held(self, process: Buffer) -> tuple[dict[str, Expected], Any]:
        """What a process holds by spool, and its books; what nobody waited for is there or not, and known from here on.

        Of that the first ones are there, in order, each wholly.
        """
        found, books = self._ask(process, lambda spools: ({spool.name: held(spool) for spool in spools}, spools.books))
        for name in [name for name in self.doubtful if name in found]:
            batches = self.doubtful.pop(name)
            there = [number for conversation, number in batches if number in found[name].pending[conversation]]
            assert there == [number for _, number in batches][: len(there)]
            for conversation, number in batches:
                if number in there:
                    self.model[name].pending[conversation].append(number)
                else:
                    self.vanished.append(number)
        return found, books

    # --- work

    def _put(self, process: Buffer, conversation: str) -> tuple[int, Accepted]:
        number = self.numbers
        self.numbers += 1
        encoded = encode_batch(items_of(number))
        accepted = Accepted(conversation, [encoded])
        process.put(accepted, encoded.size)
        return number, accepted

    @some_run
    @rule(number=number_of, lanes=st.lists(lane, min_size=2, max_size=6))
    def append(self, number: int, lanes: list[str]) -> None:
        """Several batches, waited for."""
        number, process = self._running(number)
        put = [(name, *self._put(process, name)) for name in lanes]
        for conversation, which, accepted in put:
            done = threading.Event()
            accepted.when_stored(done.set)
            assert done.wait(SECONDS)
            assert accepted.is_stored()
            self.model[accepted.spool_name].pending[conversation].append(which)

    @some_run
    @rule(
        number=number_of,
        conversation=lane,
        most=st.integers(1, 4),
        fate=st.sampled_from(["taken", "refused", "undone"]),
    )
    def send(self, number: int, conversation: str, most: int, fate: str) -> None:
        """The next request of a lane is acknowledged, or its first batch refused, or the transaction comes to nothing."""
        number, process = self._running(number)
        start = len(self.delivered[conversation])

        def write(spools: Spools) -> tuple[str, list[int]] | None:
            rows = spools.next_request(
                conversation,
                batches_max=most,
                items_max=limits.ITEMS_PER_BATCH_MAX,
                bytes_max=limits.BATCH_BYTES_MAX,
            )
            if not rows:
                return None
            [spool] = {id(row.spool): row.spool for row in rows}.values()
            spool.begin()
            if fate == "refused":
                del rows[1:]
                spool.refuse(rows, REFUSED)
            else:
                spool.acknowledge(rows, start)
            if fate == "undone":
                raise UndoneError
            return spool.name, [number_in(row.body) for row in rows]

        try:
            sent = process.run(write, writes=True).result(SECONDS)
        except UndoneError:
            return
        if sent is None:
            holding = self._ask(process, lambda spools: [spool.name for spool in spools])
            assert not any(self.model[name].pending[conversation] for name in holding)
            return
        name, numbers = sent
        waiting = self.model[name].pending[conversation]
        assert numbers == waiting[: len(numbers)], "not the oldest ones, in order"
        del waiting[: len(numbers)]
        if fate == "refused":
            self.model[name].refused += [(conversation, which) for which in numbers]
        else:
            self.delivered[conversation] += numbers

    @precondition(lambda self: any(self.processes) and any(expected.refused for expected in self.model.values()))
    @rule(number=number_of, conversation=lane, which=st.integers(0, 5), drop=st.booleans())
    def decide(self, number: int, conversation: str, which: int, drop: bool) -> None:
        """A dead letter goes back, into the same conversation or another, or away."""
        number, process = self._running(number)
        letters = self._ask(
            process,
            lambda spools: [
                (spool.name, row[0], row[1], number_in(row[6])) for spool in spools for row in spool.refused()
            ],
        )
        if not letters:
            return
        name, row_id, before, batch = letters[which % len(letters)]
        own_id = process.allocate_id()

        def write(spools: Spools) -> None:
            spool = spools.named(name)
            assert spool is not None
            spool.begin()
            row = spool.take_refused(row_id)
            assert row is not None
            if drop:
                spool.drop(row)
            else:
                new_id = own_id if spool is spools.own else spool.books.next_id
                spool.requeue(row._replace(conversation=conversation), new_id)

        process.run(write, writes=True).result(SECONDS)
        self.model[name].refused.remove((before, batch))
        if drop:
            self.dropped.append(batch)
        else:
            self.model[name].pending[conversation].append(batch)

    # --- what must hold

    def _ask(self, process: Buffer, question: Callable[[Spools], Any]) -> Any:
        return process.run(question).result(SECONDS)

    @invariant()
    def what_is_held_is_what_the_model_says(self) -> None:
        """Byte for byte and in order, and the books close."""
        for process in getattr(self, "processes", []):
            if process is None:
                continue
            found, books = self._held(process)
            for name, contents in found.items():
                expected = self.model[name]
                assert contents.pending == expected.pending
                assert sorted(contents.refused) == sorted(expected.refused)
            for unit in ("items", "batches"):
                places = ("acknowledged", "pending", "refused", "dropped", "forgotten", "lost")
                assert getattr(books, f"stored_{unit}") == sum(getattr(books, f"{place}_{unit}", 0) for place in places)
            assert books.pending_batches == sum(len(batches) for e in found.values() for batches in e.pending.values())
            assert books.refused_batches == sum(len(e.refused) for e in found.values())

    @invariant()
    def every_batch_is_in_exactly_one_place(self) -> None:
        """Delivered once, waiting, refused, thrown away, or never said to be stored."""
        if not hasattr(self, "model"):
            return
        places = [*self.dropped, *self.vanished]
        for batches in self.delivered.values():
            places += batches
        for expected in self.model.values():
            places += [number for batches in expected.pending.values() for number in batches]
            places += [number for _, number in expected.refused]
        places += [number for batches in self.doubtful.values() for _, number in batches]
        assert sorted(places) == list(range(self.numbers))

    def teardown(self) -> None:
        """In the end one process takes over everything, and all of it goes out."""
        if not hasattr(self, "processes"):
            return
        try:
            while any(self.processes):
                self.close(0)
            self.open(0)
            self.what_is_held_is_what_the_model_says()
            for name in LANES:
                while any(expected.pending[name] for expected in self.model.values()):
                    before = len(self.delivered[name])
                    self.send(0, name, 4, "taken")
                    assert len(self.delivered[name]) > before
            assert not self.doubtful
            self.every_batch_is_in_exactly_one_place()
        finally:
            for process in self.processes:
                if process is not None:
                    process.close(SECONDS)
            self.place.cleanup()


class UndoneError(Exception):
    """A command that fails after it has written."""


def run(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_moves_agrees_with_the_model() -> None:
    """The same 30 walks each time."""
    run(30, 25, derandomize=True)


@pytest.mark.slow
def test_any_order_of_many_moves_agrees_with_the_model() -> None:
    """Others each time; a failure prints the steps, which then belong among those below."""
    run(400, 40, derandomize=False)


# --- walks that are kept ---------------------------------------------------------------------------------------------


@pytest.fixture
def machine() -> Any:
    walking = Machine()
    walking.begin()
    yield walking
    walking.teardown()


def step(machine: Machine, name: str, *arguments: Any) -> None:
    getattr(machine, name)(*arguments)
    machine.what_is_held_is_what_the_model_says()
    machine.every_batch_is_in_exactly_one_place()


def test_a_letter_requeued_in_an_adopted_spool_survives_its_adopters_death(machine: Machine) -> None:
    """The other one's file is written by whoever took it over, and that one is killed as well."""
    a, b = LANES
    step(machine, "append", 0, [a])
    step(machine, "append", 1, [a, b, a])
    step(machine, "kill", 1, [], False)
    step(machine, "send", 0, a, 4, "refused")
    step(machine, "close", 0)
    step(machine, "open", 0)
    step(machine, "send", 0, a, 1, "refused")
    step(machine, "decide", 0, b, 1, False)
    step(machine, "kill", 0, [a, b], True)
    step(machine, "open", 1)
    step(machine, "decide", 1, a, 0, False)
    step(machine, "send", 1, a, 2, "undone")
    step(machine, "kill", 1, [], True)


def test_numbers_go_on_after_a_kill_inside_a_transaction(machine: Machine) -> None:
    """Batches that came to nothing leave no gap that a later one could fall into."""
    a, _ = LANES
    for _ in range(3):
        step(machine, "append", 0, [a, a])
        step(machine, "kill", 0, [a, a, a], True)
        step(machine, "open", 0)
    step(machine, "send", 0, a, 4, "taken")
    step(machine, "send", 0, a, 4, "undone")


def test_a_spool_with_nothing_but_letters_is_taken_over(machine: Machine) -> None:
    """Somebody has to decide about them, and only who holds the file can carry that out."""
    a, b = LANES
    step(machine, "append", 1, [a, b])
    step(machine, "send", 1, a, 1, "refused")
    step(machine, "send", 1, b, 1, "refused")
    step(machine, "close", 1)
    step(machine, "adopt", 0)
    step(machine, "decide", 0, a, 1, False)
    step(machine, "close", 0)
    step(machine, "open", 0)
