"""The tree of errors: each class can be made, carried through pickle and copy, and shown to anybody."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from memlog import errors
from memlog.errors import MemlogError, PermanentError, TransientError

if TYPE_CHECKING:
    from collections.abc import Callable

SAID = {"retry_after": 1.5, "status": 429, "code": -32000, "server_said": "slow down"}

SAMPLES: list[tuple[MemlogError, dict[str, Any]]] = [
    (errors.MemlogError("odd", **SAID), {}),
    (errors.PermanentError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.InvalidItemError("$.a[3]", "NaN", **SAID), {"path": "$.a[3]", "reason": "NaN", "outcome": "not_sent"}),
    (
        errors.TooLargeError("item", 262_145, 262_144, **SAID),
        {"what": "item", "size": 262_145, "limit": 262_144, "outcome": "not_sent"},
    ),
    (errors.InvalidConversationIdError("too short", **SAID), {"reason": "too short", "outcome": "not_sent"}),
    (errors.InvalidRequestError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (
        errors.ConversationFullError("c_12345678", 100_000, outcome="refused", **SAID),
        {"conversation_id": "c_12345678", "limit": 100_000, "outcome": "refused"},
    ),
    (errors.RateLimitedError("slow down", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.AuthenticationError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.ConflictError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.RevisionChangedError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.RecordUnavailableError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.RequestIdReusedError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (errors.ReplacementRejectedError("no", outcome="refused", **SAID), {"outcome": "refused"}),
    (
        errors.NotSavedError("no", quality={"score": 1}, outcome="refused", **SAID),
        {"quality": {"score": 1}, "outcome": "refused"},
    ),
    (errors.TransientError("again", **SAID), {"outcome": "unknown"}),
    (errors.ConnectionFailedError("refused", outcome="not_sent", **SAID), {"outcome": "not_sent"}),
    (errors.TimedOutError("late", **SAID), {"outcome": "unknown"}),
    (errors.ServerError("down", **SAID), {"outcome": "unknown"}),
    (errors.ProtocolError("a page", row=3, **SAID), {"outcome": "unknown", "row": 3}),
    (
        errors.RedirectRefusedError("elsewhere", location="https://example.org/", outcome="not_sent", **SAID),
        {"location": "https://example.org/", "outcome": "not_sent"},
    ),
    (errors.ResponseTooLargeError("too much", limit=7, **SAID), {"limit": 7, "outcome": "unknown"}),
    (errors.BufferFullError("disk", 11, 10, **SAID), {"what": "disk", "bytes": 11, "limit": 10}),
    (errors.BufferUnusableError("/data", "read-only", **SAID), {"path": "/data", "reason": "read-only"}),
    (errors.ClosedError("closed", **SAID), {}),
    (errors.SequenceError("a gap", expected=4, got=6, **SAID), {"expected": 4, "got": 6}),
    (errors.MemoryUnavailableError("no read", **SAID), {}),
]

WAYS: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]

each_error = pytest.mark.parametrize(("error", "data"), SAMPLES, ids=[type(error).__name__ for error, _ in SAMPLES])


def test_all_errors_are_exported_and_have_a_sample_here() -> None:
    """`__all__` is complete, sorted, and nothing escapes the tests below."""
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert classes == set(errors.__all__) == {type(error).__name__ for error, _ in SAMPLES}
    assert list(errors.__all__) == sorted(errors.__all__)
    assert len(SAMPLES) == len(errors.__all__)


@each_error
def test_an_error_carries_its_data_as_attributes(error: MemlogError, data: dict[str, Any]) -> None:
    """What a program needs is never only in the words."""
    assert vars(error) == data | SAID


@each_error
@pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", *(f"pickle-{n}" for n in range(len(WAYS) - 2))])
def test_an_error_survives_pickle_and_copy(error: MemlogError, data: dict[str, Any], way: Callable[[Any], Any]) -> None:
    """Errors cross processes: type, words and data stay."""
    twin = way(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), repr(twin), twin.args, vars(twin)) == (str(error), repr(error), error.args, vars(error))


def test_notes_and_classes_of_users_survive_too() -> None:
    """A subclass with an `__init__` of its own does not break the way back."""
    error = errors.ServerError("down")
    error.add_note("while reading page 3")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while reading page 3"]
    mine = Mine(7)
    assert vars(pickle.loads(pickle.dumps(mine))) == vars(copy.deepcopy(mine)) == vars(mine)


class Mine(errors.ServerError):
    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number


@each_error
def test_the_words_are_those_of_the_message_and_of_the_server(error: MemlogError, data: dict[str, Any]) -> None:
    """Nothing else is shown, in the text as in the repr and a traceback."""
    message = error.args[0]
    assert error.args == (message,)
    assert str(error) == f'{message} (the server said: "slow down")'
    assert repr(error) == f"{type(error).__name__}({message!r})"
    assert traceback.format_exception_only(error) == [f"memlog.errors.{type(error).__name__}: {error}\n"]


def test_without_the_servers_words_there_is_the_message_alone() -> None:
    """No empty brackets."""
    assert str(errors.ServerError("down")) == "down"
    assert vars(errors.MemlogError("odd")) == {"retry_after": None, "status": None, "code": None, "server_said": None}


@pytest.mark.contract("C5", "C6")
def test_the_tree_says_who_must_act() -> None:
    """Permanent or transient: the split that callers decide on. The other classes are neither."""
    permanent = {type(error).__name__ for error, _ in SAMPLES if isinstance(error, PermanentError)}
    transient = {type(error).__name__ for error, _ in SAMPLES if isinstance(error, TransientError)}
    assert permanent == {
        "PermanentError",
        "InvalidItemError",
        "TooLargeError",
        "InvalidConversationIdError",
        "InvalidRequestError",
        "ConversationFullError",
        "RateLimitedError",
        "AuthenticationError",
        "ConflictError",
        "RevisionChangedError",
        "RecordUnavailableError",
        "RequestIdReusedError",
        "ReplacementRejectedError",
        "NotSavedError",
    }
    assert transient == {
        "TransientError",
        "ConnectionFailedError",
        "TimedOutError",
        "ServerError",
        "ProtocolError",
        "RedirectRefusedError",
        "ResponseTooLargeError",
    }
    assert all(isinstance(error, MemlogError) for error, _ in SAMPLES)
    assert all(type(error).__doc__ for error, _ in SAMPLES)


def test_the_drawn_tree_names_every_class() -> None:
    """The module opens with the tree; a class that is missing there is missing for its readers."""
    assert errors.__doc__ is not None
    assert [name for name in errors.__all__ if f" {name}" not in f" {errors.__doc__}"] == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.TooLargeError("item", 262_145, 262_144), "the item may be at most 262,144 bytes, this is 262,145"),
        (errors.TooLargeError("batch", 1_048_577, 1_048_576), "the batch may be at most 1,048,576 bytes, this is 1,048,577"),
        (errors.TooLargeError("count", 251, 250), "the number of items may be at most 250 items, this is 251"),
        (errors.TooLargeError("count", 0, 250), "the number of items must be at least 1 item, this is 0"),
        (errors.TooLargeError("batch", None, None, outcome="refused"), "the batch is too large for the server"),
        (errors.BufferFullError("unstored", 11, 10), "the buffer is full: 11 bytes waiting for the disk, at most 10; nothing of this append was stored"),
        (errors.BufferFullError("disk", 2048, 1024), "the buffer is full: 2,048 bytes on disk, at most 1,024; nothing of this append was stored"),
        (errors.SequenceError("a gap", expected=4, got=6), "a gap: expected 4, got 6"),
        (errors.SequenceError("changed", expected=4, got=None), "changed: item 4"),
        (errors.InvalidItemError("$.a[3]", "NaN"), "the item cannot be kept: $.a[3]: NaN"),
        (errors.InvalidConversationIdError("too short"), "not a conversation id: too short"),
        (errors.ConversationFullError("c_12345678", 100_000), "conversation c_12345678 is full: it may hold at most 100,000 items"),
        (errors.BufferUnusableError("/data", "read-only"), "the buffer at /data cannot be used: read-only"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_a_message_is_made_of_the_data(error: MemlogError, words: str) -> None:
    """For people: what, how much, and what is allowed."""
    assert str(error) == words


def test_an_error_can_name_its_conversation_once() -> None:
    """Said twice it is not repeated, and it stays the same error."""
    error = errors.InvalidItemError("$.a", "NaN")
    assert error.about("c_12345678") is error
    assert str(error.about("c_12345678")) == "conversation c_12345678: the item cannot be kept: $.a: NaN"
    assert (error.path, pickle.loads(pickle.dumps(error)).args) == ("$.a", error.args)
