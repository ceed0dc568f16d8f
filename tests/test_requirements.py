"""The requirements and the tests that prove them, held against each other in both directions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from requirements import REQUIREMENTS

TESTS = Path(__file__).parent


def marks_of(path: Path) -> dict[str, set[str]]:
    """Each test of the file, as ``file::name``, with the ids it carries: its own, its class's and its module's."""
    tree = ast.parse(path.read_text("utf-8"))
    of_module = {
        contract_id
        for node in tree.body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
        for contract_id in ids_in(node.value)
    }
    found: dict[str, set[str]] = {}

    def visit(nodes: list[ast.stmt], inherited: set[str]) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = inherited | {contract_id for mark in node.decorator_list for contract_id in ids_in(mark)}
                if isinstance(node, ast.ClassDef):
                    visit(node.body, own)
                elif node.name.startswith("test_"):
                    found[f"{path.relative_to(TESTS).as_posix()}::{node.name}"] = own

    visit(tree.body, of_module)
    return found


def ids_in(expression: ast.expr) -> set[str]:
    """The ids of every ``pytest.mark.contract(…)`` in ``expression``, which must be written out there."""
    found: set[str] = set()
    for call in ast.walk(expression):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.contract":
            assert call.args, "a contract mark without an id"
            assert not call.keywords
            for argument in call.args:
                assert isinstance(argument, ast.Constant), ast.unparse(call)
                assert isinstance(argument.value, str), ast.unparse(call)
                found.add(argument.value)
    return found


MARKS = {test: ids for path in sorted(TESTS.rglob("test_*.py")) for test, ids in marks_of(path).items()}

PROVED = [contract_id for contract_id, requirement in REQUIREMENTS.items() if requirement.open is None]
OPEN = [contract_id for contract_id, requirement in REQUIREMENTS.items() if requirement.open is not None]


def base(contract_id: str) -> str:
    """C2 for C2.conversation."""
    return contract_id.partition(".")[0]


def test_the_scan_sees_what_pytest_sees(request: pytest.FixtureRequest) -> None:
    """The marks of this session's tests are those that were read from the source."""
    for item in request.session.items:
        if not item.path.is_relative_to(TESTS):
            continue
        name = f"{item.path.relative_to(TESTS).as_posix()}::{getattr(item, 'originalname', item.name)}"
        seen = {contract_id for mark in item.iter_markers("contract") for contract_id in mark.args}
        assert seen == MARKS.get(name, set()), name


def test_all_thirteen_readings_of_the_contract_are_here() -> None:
    """C1 to C13, in order, and parts of them behind them."""
    assert [contract_id for contract_id in REQUIREMENTS if "." not in contract_id] == [f"C{n}" for n in range(1, 14)]
    for contract_id in REQUIREMENTS:
        assert re.fullmatch(r"C\d+(\.[a-z-]+)?", contract_id)
        assert base(contract_id) in REQUIREMENTS


@pytest.mark.parametrize("contract_id", REQUIREMENTS)
def test_a_requirement_is_a_sentence_with_a_source_and_a_proof_or_a_reason(contract_id: str) -> None:
    """Either proved by tests or open by name, never both and never neither."""
    requirement = REQUIREMENTS[contract_id]
    assert requirement.sentence.endswith(".")
    assert re.match(r"append_memory|replay_memory|memory_history", requirement.source)
    assert bool(requirement.tests) != bool(requirement.open)
    assert len(set(requirement.tests)) == len(requirement.tests)


def test_every_mark_names_a_requirement() -> None:
    """From the tests to the manifest: an id that nobody wrote down proves nothing. An open one is not proved."""
    used = {contract_id for ids in MARKS.values() for contract_id in ids}
    assert used <= set(PROVED)


@pytest.mark.parametrize("contract_id", PROVED)
def test_every_requirement_is_proved_by_tests_that_exist_and_say_so(contract_id: str) -> None:
    """From the manifest to the tests: each one named exists and carries the id, or that of the whole."""
    for test in REQUIREMENTS[contract_id].tests:
        assert test in MARKS, f"there is no test {test}"
        assert MARKS[test] & {contract_id, base(contract_id)}, f"{test} does not carry {contract_id}"


def test_what_is_open_is_a_part_of_what_is_proved() -> None:
    """No reading of the contract is open as a whole."""
    assert all("." in contract_id for contract_id in OPEN)
