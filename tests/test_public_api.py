"""What users may rely on: the names, their documentation, their signatures, and what they show of themselves."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import memlog
import memlog.errors
import memlog.events
import memlog.sync
import memlog.testing

NAMES = [
    "Ack",
    "BufferFullError",
    "BufferLimits",
    "Client",
    "Conversation",
    "DeadLetter",
    "Duplicate",
    "FlushReport",
    "HistoryEvent",
    "Item",
    "MemlogError",
    "MemoryLog",
    "MemoryUnavailableError",
    "PermanentError",
    "Receipt",
    "Record",
    "Replay",
    "RetryPolicy",
    "Scope",
    "Statistics",
    "TeamClient",
    "TransientError",
    "new_conversation_id",
    "open_log",
]

PUBLIC_MODULES = [memlog, memlog.errors, memlog.sync, memlog.testing]


def public_members(cls: type) -> dict[str, Any]:
    """The methods and properties of ``cls``'s own that a user may call, by name."""
    return {
        name: member
        for base in reversed(cls.__mro__)
        if base.__module__.startswith("memlog")
        for name, member in vars(base).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property))
    }


# --- names -----------------------------------------------------------------------------------------------------------


def test_the_names_of_the_package_are_these() -> None:
    """A name that is added here stays; one that is missing breaks somebody's program."""
    assert memlog.__all__ == NAMES


@pytest.mark.parametrize("module", PUBLIC_MODULES, ids=lambda module: module.__name__)
def test_every_public_name_exists_and_is_sorted(module: Any) -> None:
    """`from module import *` works, and the list can be searched by eye."""
    assert module.__all__ == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name)


def test_all_errors_are_in_one_place() -> None:
    """`memlog.errors` names every class of the tree and nothing else; those of the package are the same objects."""
    tree = {
        cls.__name__ for cls in vars(memlog.errors).values() if isinstance(cls, type) and issubclass(cls, Exception)
    }
    assert set(memlog.errors.__all__) == tree
    for name in set(memlog.__all__) & tree:
        assert getattr(memlog, name) is getattr(memlog.errors, name)


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, memlog.events], ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring_and_so_has_every_method(module: Any) -> None:
    """Docstrings are the contract."""
    assert module.__doc__
    names = getattr(module, "__all__", ["Event"])
    for name in names:
        value = getattr(module, name)
        assert inspect.getdoc(value), name
        assert not (value.__doc__ or "").startswith(f"{name}("), f"{name} has the docstring that dataclasses make up"
        if isinstance(value, type):
            for method, member in public_members(value).items():
                assert inspect.getdoc(member), f"{name}.{method}"


def test_every_module_says_what_it_is() -> None:
    """Also the private ones."""
    for info in pkgutil.walk_packages(memlog.__path__, "memlog."):
        assert importlib.import_module(info.name).__doc__, info.name


# --- signatures ------------------------------------------------------------------------------------------------------


def shape(function: Any) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter, ``self`` left out."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, p.default) for p in parameters if p.name != "self"]


POSITIONAL = "POSITIONAL_OR_KEYWORD"
KEYWORD = "KEYWORD_ONLY"
EMPTY = inspect.Parameter.empty


def test_open_log_takes_these_settings() -> None:
    """One positional argument, the rest by keyword, each with a default that can be defended."""
    assert shape(memlog.open_log) == [
        ("url", POSITIONAL, None),
        ("auth", KEYWORD, None),
        ("buffer_dir", KEYWORD, None),
        ("flush_timeout", KEYWORD, 5.0),
        ("timeout", KEYWORD, 30.0),
        ("retry", KEYWORD, memlog.RetryPolicy()),
        ("limits", KEYWORD, memlog.BufferLimits()),
        ("stamp", KEYWORD, False),
        ("on_event", KEYWORD, None),
        ("allow_insecure", KEYWORD, False),
        ("ssl_context", KEYWORD, None),
        ("transport", KEYWORD, None),
    ]
    assert not inspect.iscoroutinefunction(memlog.open_log)


SIGNATURES: dict[Any, tuple[bool, list[tuple[str, str, Any]]]] = {
    memlog.Conversation.append: (False, [("item", POSITIONAL, EMPTY)]),
    memlog.Conversation.extend: (False, [("items", POSITIONAL, EMPTY), ("atomic", KEYWORD, True)]),
    memlog.Conversation.replay: (
        False,
        [
            ("offset", POSITIONAL, 0),
            ("limit", KEYWORD, None),
            ("include_pending", KEYWORD, True),
            ("raw", KEYWORD, False),
            ("on_unavailable", KEYWORD, "raise"),
            ("follow", KEYWORD, False),
        ],
    ),
    memlog.Conversation.recall: (
        True,
        [("limit", POSITIONAL, 100), ("include_pending", KEYWORD, True), ("on_unavailable", KEYWORD, "raise")],
    ),
    memlog.Receipt.stored: (True, [("timeout", POSITIONAL, None)]),
    memlog.Receipt.acknowledged: (True, [("timeout", POSITIONAL, None)]),
    memlog.MemoryLog.conversation: (False, [("conversation_id", POSITIONAL, EMPTY)]),
    memlog.MemoryLog.flush: (True, [("timeout", POSITIONAL, None), ("until", KEYWORD, "acknowledged")]),
    memlog.MemoryLog.check: (True, []),
    memlog.MemoryLog.statistics: (False, []),
    memlog.MemoryLog.receipt: (False, [("receipt_id", POSITIONAL, EMPTY)]),
    memlog.MemoryLog.dead_letters: (True, []),
    memlog.MemoryLog.list_conversations: (False, []),
    memlog.Replay.close: (True, []),
    memlog.Replay.pages: (False, []),
    memlog.Replay.skip: (False, []),
    memlog.MemoryLog.close: (True, []),
    memlog.new_conversation_id: (False, []),
}


@pytest.mark.parametrize(
    ("function", "expected"), SIGNATURES.items(), ids=lambda value: getattr(value, "__qualname__", "")
)
def test_what_waits_is_async_and_takes_these_arguments(function: Any, expected: tuple[bool, Any]) -> None:
    """Only what may wait is a coroutine function."""
    assert (inspect.iscoroutinefunction(function), shape(function)) == expected


TWINS = [
    (memlog.MemoryLog, memlog.sync.SyncMemoryLog, {"sync", "refuse_closed"}),
    (memlog.Conversation, memlog.sync.SyncConversation, set()),
    (memlog.Receipt, memlog.sync.SyncReceipt, {"is_stored", "when_stored", "complete"}),
    (memlog.Replay, memlog.sync.SyncReplay, {"aclose"}),
]
"""Asynchronous class, blocking class, and what only the former has: plumbing, or the way to the latter."""


@pytest.mark.parametrize(("face", "twin", "alone"), TWINS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_blocking_face_has_the_same_names_and_parameters(face: type, twin: type, alone: set[str]) -> None:
    """What is learned of one serves for the other; nothing of the blocking face is a coroutine."""
    names, twin_names = public_members(face), public_members(twin)
    slots = {name for name in ("id",) if hasattr(face, name)}
    assert set(names) - alone - slots == set(twin_names) - slots
    for name in set(names) & set(twin_names):
        if callable(names[name]):
            assert shape(names[name]) == shape(twin_names[name]), name
        assert not inspect.iscoroutinefunction(twin_names[name]), name


def test_sync_open_log_takes_what_open_log_takes() -> None:
    """The same settings, by the same names."""
    with pytest.raises(TypeError, match="no_such_setting"):
        memlog.sync.open_log("http://127.0.0.1:1/mcp", no_such_setting=1)


# --- values ----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    memlog.Ack(0, 1),
    memlog.Item(0, datetime(2026, 1, 1, tzinfo=UTC), {"text": "a-payload"}),
    memlog.Duplicate("conversation-1", 0, 1),
    memlog.DeadLetter(
        "spool.1",
        "conversation-1",
        1,
        2,
        datetime(2026, 1, 1, tzinfo=UTC),
        memlog.PermanentError("no"),
        [{"text": "a-payload"}],
    ),
    memlog.FlushReport(complete=True, acknowledged=0, pending=0, refused=0, state="ok", reason=None),
    memlog.Statistics(
        state="waiting",
        reason="nobody answers",
        last_error=memlog.TransientError("nobody answers"),
        **{
            field.name: 0
            for field in dataclasses.fields(memlog.Statistics)
            if field.default is dataclasses.MISSING and field.name not in ("state", "reason")
        },
    ),
    memlog.RetryPolicy(),
    memlog.BufferLimits(),
    memlog.events.Event(kind="ok"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_and_can_be_copied_and_sent(value: Any) -> None:
    """Nobody changes a report behind another's back; processes may exchange them. No repr shows a payload."""
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.no_such_field = 1
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert repr(other) == repr(value)
    assert "a-payload" not in repr(value)


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_no_repr_shows_a_secret(tmp_path: Path) -> None:
    """Neither the password nor a key in the URL's query, of whatever a user or a debugger may print."""
    url = "http://127.0.0.1:1/mcp?key=s3cret-query"
    log = memlog.open_log(url, auth=("user", "pass-w0rd"), buffer_dir=tmp_path, flush_timeout=0)
    try:
        shown = [
            log,
            log.sync,
            log._core,
            log._core.settings,
            log._core.buffer,
            log.conversation("conversation-1"),
            log.sync.conversation("conversation-1"),
            memlog.Client(url, auth=("user", "pass-w0rd")),
            memlog.Client(url, auth="t0ken"),
            memlog.TeamClient(url, token="t0ken"),
        ]
        shown += [part for client in shown[-3:] for part in vars(client).values()]
        text = " ".join(f"{thing!r} {thing!s}" for thing in shown)
    finally:
        log.sync.close()
    for secret in ("pass-w0rd", "s3cret-query", "t0ken"):
        assert secret not in text
    assert str(tmp_path) in repr(log)


# --- importing -------------------------------------------------------------------------------------------------------


def test_importing_starts_nothing_touches_no_file_and_needs_no_extra(tmp_path: Path) -> None:
    """No thread, nothing in the home directory, and none of the packages that only extras or other loops bring."""
    script = """
import sys, threading
import memlog, memlog.sync, memlog.errors, memlog.events
memlog.RetryPolicy(), memlog.BufferLimits(), memlog.new_conversation_id()
assert threading.active_count() == 1, threading.enumerate()
extras = {"trio", "starlette", "uvicorn", "mcp", "server_reference", "memlog.testing", "platformdirs"}
assert not extras & set(sys.modules), extras & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=True,
        timeout=60,
        cwd=tmp_path,
        env={
            "HOME": str(tmp_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(Path(memlog.__file__).parents[1]),
        },
    )
    assert list(tmp_path.iterdir()) == []
