"""The floors: who may import whom. Read from the source, so that a lazy import or one for types counts as well."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "memlog"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("memlog.testing.plugin",),
    ("memlog.testing",),
    ("memlog.testing.history",),
    ("memlog",),
    ("memlog.sync",),
    ("memlog.log",),
    ("memlog.core",),
    ("memlog.sender", "memlog.engine"),
    ("memlog.readback",),
    ("memlog.team", "memlog.client"),
    ("memlog.replay",),
    ("memlog.protocol",),
    ("memlog.refusal", "memlog.sse", "memlog.transport"),
    ("memlog.buffer",),
    ("memlog.writer",),
    ("memlog.directory",),
    ("memlog.inbox", "memlog.ledger", "memlog.salvage"),
    ("memlog.spool",),
    ("memlog.schema", "memlog.pages", "memlog.reserve"),
    ("memlog.reconcile",),
    ("memlog.report", "memlog.events", "memlog.retry", "memlog.payload", "memlog.models", "memlog.system"),
    ("memlog.stamps",),
    ("memlog.errors", "memlog.limits", "memlog.version"),
)
"""From the roof down. A module imports from the floors below its own only, never from its neighbours."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "memlog.log",
        "memlog.sync",
    ): "`log.sync` hands out the blocking face; imported when it is asked for, or for types",
}

ALONE: dict[str, set[str]] = {
    "httpx": {"memlog.transport"},
    "tenacity": {"memlog.retry"},
    "sqlite3": {f"memlog.{name}" for name in ("schema", "spool", "salvage", "inbox", "directory", "writer")},
    "filelock": {"memlog.system"},
    "fcntl": {"memlog.system"},
    "msvcrt": {"memlog.system"},
    "server_reference": {"memlog.testing"},
    "uvicorn": {"memlog.testing"},
    "starlette": {"memlog.testing"},
    "platformdirs": {"memlog.log"},
}
"""Packages that are one module's business."""

FORBIDDEN = {"mcp", "requests", "aiohttp", "trio.testing"}

RUNTIME = {"anyio", "filelock", "httpx", "platformdirs", "pydantic", "pydantic_core", "sniffio", "tenacity"}
"""What the distribution depends on; pydantic brings its core."""

OPTIONAL = {"trio": {"memlog.engine"}, "pytest": {"memlog.testing.plugin"}}
"""Imported only where the caller has it already."""


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name to file."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules_of(PACKAGE)


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Every module that ``path`` imports anywhere in it, for types too; ours as modules, others as they are written."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            # `from memlog import limits` imports the module, `from memlog import open_log` the package.
            found |= {inner if (inner := f"{base}.{alias.name}") in modules else base for alias in node.names}
    return found - {name}


def floor_of(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def test_every_module_has_its_floor() -> None:
    """Ours: a new module is placed by whoever writes it, and a removed one leaves no trace here."""
    placed = [module for floor in FLOORS for module in floor]
    assert len(placed) == len(set(placed))
    assert sorted(placed) == sorted(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    """Ours: whoever needs to look up is given a value or a callable instead."""
    upward = {
        other
        for other in imports_of(module, MODULES[module], MODULES)
        if other in MODULES and floor_of(other) <= floor_of(module) and (module, other) not in EXCEPTIONS
    }
    assert not upward, f"{module} imports from its own floor or above: {sorted(upward)}"


def test_every_exception_is_still_needed() -> None:
    """Ours: an exception that nobody makes use of any more is deleted."""
    for module, other in EXCEPTIONS:
        assert other in imports_of(module, MODULES[module], MODULES)


@pytest.mark.parametrize("package", sorted(ALONE))
def test_one_package_one_importer(package: str) -> None:
    """Ours: what can be replaced in one file is imported in one file."""
    importers = {
        module
        for module, path in MODULES.items()
        if any(other.split(".")[0] == package for other in imports_of(module, path, MODULES))
    }
    assert importers <= ALONE[package]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_what_the_distribution_depends_on_is_imported(module: str) -> None:
    """Ours: no dependency that an install would not bring."""
    foreign = {
        root
        for other in imports_of(module, MODULES[module], MODULES)
        if (root := other.split(".")[0]) not in sys.stdlib_module_names and root != "memlog"
    }
    allowed = RUNTIME | {name for name, importers in OPTIONAL.items() if module in importers}
    allowed |= {name for name in ("server_reference", "uvicorn", "starlette") if module == "memlog.testing"}
    assert foreign <= allowed
    assert not foreign & FORBIDDEN


def test_the_reference_server_knows_nothing_of_memlog() -> None:
    """Ours: a wrong number on one side is caught by the other only if they share none."""
    modules = modules_of(ROOT / "server_reference")
    assert modules
    for name, path in modules.items():
        roots = {other.split(".")[0] for other in imports_of(name, path, modules)}
        assert "memlog" not in roots, name


@pytest.mark.parametrize("module", ["memlog.buffer", "memlog.spool", "memlog.directory", "memlog.payload"])
def test_what_is_on_disk_knows_no_loop_and_no_network(module: str) -> None:
    """Ours: the buffer works whatever loop its caller runs, if any."""
    roots = {other.split(".")[0] for other in imports_of(module, MODULES[module], MODULES)}
    assert not roots & {"asyncio", "anyio", "trio", "sniffio", "httpx", "socket", "ssl"}
