"""What `append` accepts comes back equal, and what it refuses is refused by name and place, before anything is stored."""

from __future__ import annotations

import json
import math
import struct
import sys
import types
from collections import OrderedDict, UserDict, defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, RootModel

from memlog import payload
from memlog.errors import InvalidConversationIdError, InvalidItemError, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUITE = Path(__file__).parents[2] / "shared" / "data" / "json-test-suite"
CONVERSATIONS = SUITE.parent / "airline-conversations.jsonl"

PLAIN_TYPES = (str, int, float, bool, type(None), list, dict)
BIG = 10**4300 - 1


class Role(StrEnum):
    USER = "user"
    EMOJI = "😀"


class Level(IntEnum):
    HIGH = 3


class Colour(Enum):
    RED = "red"


class OldRole(str, Enum):  # noqa: UP042 - the form before StrEnum, which much code still has
    USER = "user"


class Twin(str):
    """A string that a dict keeps beside its equal."""

    __slots__ = ()

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Message(BaseModel):
    role: str
    score: float = 1.5
    at: datetime | None = None


class Turn(TypedDict):
    role: str
    text: str


def same(left: Any, right: Any) -> bool:
    """Equal type for type: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


def nested(levels: int) -> dict[str, Any]:
    """An object with this many levels in all, objects and arrays in turn."""
    value: Any = {} if levels % 2 else []
    for level in range(levels - 1, 0, -1):
        value = {"a": value} if level % 2 else [value]
    assert isinstance(value, dict)
    return value


def refusal(item: Any) -> InvalidItemError:
    with pytest.raises(InvalidItemError) as caught:
        payload.encode(item)
    return caught.value


# -- strategies

integers = st.integers() | st.integers(-(10**40), 10**40) | st.sampled_from([BIG, -BIG, 2**63, 2**64, -(2**63) - 1])
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | integers | floats | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)
objects = st.dictionaries(st.text(), values, max_size=6)

surrogates = st.characters(categories=["Cs"])
unkeepable = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 1j, Ellipsis, Decimal(1), Colour.RED, object()]),
    st.binary(),
    st.datetimes(),
    st.dates(),
    st.uuids(),
    st.sets(st.integers()),
    st.tuples(st.integers()),
    st.builds("{}{}".format, st.text(), surrogates),
    st.builds(lambda: Message(role="user")),
)
doubtful_keys = st.text() | st.text() | st.integers(0, 3) | st.none() | surrogates | st.sampled_from([Role.USER])
doubtful = st.recursive(
    scalars | scalars | unkeepable,
    lambda inner: st.lists(inner) | st.dictionaries(doubtful_keys, inner),
    max_leaves=12,
)


def keepable(value: Any) -> bool:
    """The rules once more, written down another way than in the module."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int):
        return abs(value) <= BIG
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, dict):
        texts = [str.__str__(key) for key in value if isinstance(key, str)]
        return len(set(texts)) == len(value) and all(map(keepable, texts)) and all(map(keepable, value.values()))
    return isinstance(value, list) and all(map(keepable, value))


# -- what is accepted


@pytest.mark.contract("C2", "C3")
@given(objects)
@settings(deadline=None)
def test_what_is_accepted_comes_back_equal_type_for_type(item: dict[str, Any]) -> None:
    """Ours, C3: encode and loads are inverse, order of keys and sign of zero included; so are json's eyes on it."""
    data = payload.encode(item)
    assert same(payload.loads(data), item)
    assert same(json.loads(data), item)


@pytest.mark.contract("C3")
@given(st.dictionaries(doubtful_keys, doubtful, max_size=4))
@settings(deadline=None, max_examples=300)
@example({1: "a", "1": "b"})
@example({Twin("user"): 1, "user": 2})
def test_an_item_is_either_kept_or_refused_by_name_and_never_changed(item: dict[Any, Any]) -> None:
    """C3: the verdict is the one of the rules, and what is kept equals what went in."""
    if keepable(item):
        assert payload.loads(payload.encode(item)) == item
    else:
        assert refusal(item).path.startswith("$")


@pytest.mark.contract("C3")
@given(floats)
@settings(deadline=None, max_examples=500)
@example(5e-324)
@example(-0.0)
@example(2.2250738585072011e-308)
@example(1.7976931348623157e308)
@example(1e22)
@example(9007199254740993.0)
def test_floats_come_back_to_the_last_bit(number: float) -> None:
    """C3: subnormals and the sign of zero included."""
    assert same(payload.loads(payload.encode({"x": number}))["x"], number)


@given(
    st.decimals(-(10**30), 10**30, places=40)
    | st.from_regex(r"-?[1-9][0-9]{0,30}\.[0-9]{1,60}(e-?[0-9]{1,2})?", fullmatch=True)
)
@settings(deadline=None)
def test_floats_written_by_others_are_read_as_python_reads_them(number: object) -> None:
    """Other writers spell floats in other ways; the nearest double is the only right answer."""
    text = f"{number:f}" if isinstance(number, Decimal) else str(number)
    assert same(payload.loads(text.encode()), float(text))


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        ({"role": Role.USER}, {"role": "user"}),
        ({"role": OldRole.USER, "emoji": Role.EMOJI}, {"role": "user", "emoji": "😀"}),
        ({Role.USER: 1, "b": {OldRole.USER: 2}}, {"user": 1, "b": {"user": 2}}),
        ({"level": Level.HIGH}, {"level": 3}),
        (OrderedDict(b=1, a=[OrderedDict(c=2)]), {"b": 1, "a": [{"c": 2}]}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (types.MappingProxyType({"a": {"b": None}}), {"a": {"b": None}}),
        (UserDict({"a": 1}), {"a": 1}),
        (Turn(role="user", text="hi"), {"role": "user", "text": "hi"}),
        (
            Message(role="user", at=datetime(2024, 5, 15, tzinfo=UTC)),
            {"role": "user", "score": 1.5, "at": "2024-05-15T00:00:00Z"},
        ),
    ],
    ids=[
        "StrEnum",
        "str and Enum",
        "enum key",
        "IntEnum",
        "OrderedDict",
        "defaultdict",
        "proxy",
        "UserDict",
        "TypedDict",
        "model",
    ],
)
def test_subclasses_count_as_the_json_value_they_hold(item: Any, kept: dict[str, Any]) -> None:
    """C3: the reader gets plain types, equal to what was appended."""
    assert same(payload.loads(payload.encode(item)), kept)


def test_subclasses_with_opinions_of_their_own_are_taken_for_what_they_are() -> None:
    """Not what a subclass says about itself counts but what it holds."""

    class Loud(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "LOUD"

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    class Half(float):
        def __repr__(self) -> str:
            return "half"

    class Reversed(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return reversed(list.copy(self))

    class Liar(int):
        def __index__(self) -> int:
            return 7

        __int__ = __index__

    class Views(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            return [("view", "changed")]

    item = {"text": Loud("soft"), "number": Half(0.5), "list": Reversed([1, 2]), "int": Liar(1), "dict": Views(a=1)}
    assert same(
        payload.loads(payload.encode(item)), {"text": "soft", "number": 0.5, "list": [1, 2], "int": 1, "dict": {"a": 1}}
    )


@pytest.mark.contract("C2", "C3")
def test_the_bytes_are_compact_utf8_without_ascii_escapes() -> None:
    """C2: what is measured is what any compact encoder without ASCII escaping would write."""
    item = {"text": 'é漢😀\u2028 "\\/\x7f', "control": "\x00\n", "list": [1, -2.5, None, True], "": {}}
    assert payload.encode(item) == json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.contract("C3")
def test_the_bytes_are_taken_at_the_call() -> None:
    """Changing an item after append changes nothing."""
    item: dict[str, Any] = {"a": [1]}
    batch = payload.encode_batch([item])
    item["a"].append(2)
    assert payload.decode_items(batch.body) == [{"a": [1]}]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_an_item_that_another_thread_changes_meanwhile_is_taken_as_it_was_at_some_moment(kind: type[Any]) -> None:
    """Ours: a dict that grows is no RuntimeError. The other thread may come in before any line, so it does so here."""

    def encode_while_it_grows(item: Any, quiet_lines: int) -> bytes:
        lines = 0

        def trace(frame: types.FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if event == "line" and frame.f_code.co_filename == payload.__file__:
                lines += 1
                if quiet_lines < lines < quiet_lines + 40:
                    item[f"k{lines}"] = lines
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return payload.encode(item)
        finally:
            sys.settrace(before)

    for quiet_lines in range(60):
        assert payload.loads(encode_while_it_grows(kind(steady=1, other={}), quiet_lines))["steady"] == 1


@pytest.mark.parametrize("digits", [0, 640, 4300, 100_000])
def test_the_limit_of_integers_is_ours_whatever_the_interpreters_is(digits: int) -> None:
    """C3: 4,300 digits come back, 4,301 are refused, also where the program changed `sys.set_int_max_str_digits`."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(digits)
    try:
        for number in (BIG, -BIG, 10**4299):
            assert payload.loads(payload.encode({"n": number}))["n"] == number
        for number in (BIG + 1, -BIG - 1):
            error = refusal({"a": [{"n": number}]})
            assert (error.path, error.reason) == ("$.a[0].n", "an integer of more than 4,300 digits")
    finally:
        sys.set_int_max_str_digits(before)


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else at_depth(frames - 1, call)


@pytest.mark.contract("C3")
def test_nesting_is_limited_by_our_number_and_not_by_the_stack_of_the_caller() -> None:
    """C3: 128 levels come back and 129 are refused, even where few frames are left of the recursion limit."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    left = sys.getrecursionlimit() - depth - 40
    deepest = nested(128)
    subclassed = OrderedDict(deepest)
    for item in (deepest, subclassed):
        assert at_depth(left, lambda item=item: payload.loads(payload.encode(item))) == deepest
    error = at_depth(left, lambda: refusal(nested(129)))
    assert error.path.count("a") + error.path.count("[0]") == 128
    assert error.reason == "more than 128 levels deep"


@pytest.mark.parametrize("opening", ["objects", "arrays"])
def test_the_reader_has_room_for_the_deepest_item_in_an_envelope(opening: str) -> None:
    """A page of the deepest items is read back, with the levels that a protocol puts around it."""
    item = payload.encode(nested(128)).decode()
    around = ('{"a":' * 20, "}" * 20) if opening == "objects" else ("[" * 20, "]" * 20)
    value = payload.loads((around[0] + item + around[1]).encode())
    for _ in range(20):
        value = value["a"] if opening == "objects" else value[0]
    assert value == nested(128)


# -- what is refused


def cycle_of_dicts() -> dict[str, Any]:
    item: dict[str, Any] = {"a": {}}
    item["a"]["b"] = item
    return item


def cycle_with_many_ways() -> dict[str, Any]:
    item: dict[str, Any] = {}
    item.update({f"k{number}": item for number in range(50)})
    return item


def cycle_of_lists() -> dict[str, Any]:
    inner: list[Any] = []
    inner.append(inner)
    return {"a": inner}


class Pair(NamedTuple):
    x: int
    y: int


REFUSED: list[tuple[Any, str, str]] = [
    ({"a": {1: "x"}}, "$.a", "a key of type int, keys are strings"),
    ({None: 1}, "$", "a key of type NoneType, keys are strings"),
    ({"a": [0, {True: 1}]}, "$.a[1]", "a key of type bool, keys are strings"),
    ({b"k": 1}, "$", "a key of type bytes, keys are strings"),
    ({Twin("user"): 1, "user": 2}, "$", "two of its keys are the same string"),
    ({"a": [1, 2, 3, {"b": math.nan}]}, "$.a[3].b", "NaN or Infinity, which JSON does not have"),
    ({"a": -math.inf}, "$.a", "NaN or Infinity, which JSON does not have"),
    ({"a b": {"x": math.inf}}, '$["a b"].x', "NaN or Infinity, which JSON does not have"),
    ({"": {'"': [math.inf]}}, '$[""]["\\""][0]', "NaN or Infinity, which JSON does not have"),
    ({"é": {"class": {1}}}, "$.é.class", "set is not a JSON type"),
    ({"a": "\ud800"}, "$.a", "a lone surrogate, which UTF-8 cannot carry"),
    ({"a": ["x", "ok \udfff"]}, "$.a[1]", "a lone surrogate, which UTF-8 cannot carry"),
    ({"a": {"\udc80": 1}}, "$.a", "a key with a lone surrogate, which UTF-8 cannot carry"),
    ({"a": b"bytes"}, "$.a", "bytes is not a JSON type"),
    ({"a": bytearray(b"x")}, "$.a", "bytearray is not a JSON type"),
    ({"a": datetime(2024, 1, 1, tzinfo=UTC)}, "$.a", "datetime is not a JSON type"),
    ({"a": frozenset()}, "$.a", "frozenset is not a JSON type"),
    ({"a": (1, 2)}, "$.a", "tuple is not a JSON type"),
    ({"a": Pair(1, 2)}, "$.a", "Pair is not a JSON type"),
    ({"a": Decimal("1.5")}, "$.a", "Decimal is not a JSON type"),
    ({"a": Colour.RED}, "$.a", "Colour is not a JSON type"),
    ({"a": iter([1])}, "$.a", "list_iterator is not a JSON type"),
    ({"a": types.MappingProxyType({})}, "$.a", "mappingproxy is not a JSON type"),
    ({"a": Message(role="u")}, "$.a", "the model Message inside an item: dump it first, with model_dump(mode='json')"),
    ({"a": object()}, "$.a", "object is not a JSON type"),
    (Message(role="u", score=math.nan), "$.score", "NaN or Infinity, which JSON does not have"),
    (RootModel[list[int]]([1]), "$", "list instead of an object"),
    (cycle_of_dicts(), "$.a.b", "it contains itself"),
    (cycle_with_many_ways(), "$.k0", "it contains itself"),
    (cycle_of_lists(), "$.a[0]", "it contains itself"),
    ([{"a": 1}], "$", "list instead of an object"),
    ("text", "$", "str instead of an object"),
    (b'{"a":1}', "$", "bytes instead of an object"),
    (None, "$", "NoneType instead of an object"),
    ([("a", 1)], "$", "list instead of an object"),
]


@pytest.mark.contract("C3")
@pytest.mark.parametrize(
    ("item", "path", "reason"), REFUSED, ids=[f"{n}-{row[2][:30]}" for n, row in enumerate(REFUSED)]
)
def test_what_cannot_come_back_equal_is_refused_with_its_path_and_reason(item: Any, path: str, reason: str) -> None:
    """C3: all that the contract's words exclude, on the top and below it."""
    error = refusal(item)
    assert (error.path, error.reason, error.outcome) == (path, reason, "not_sent")


def test_a_refusal_shows_no_value_and_no_more_of_a_key_than_helps_to_find_it() -> None:
    """Errors are for people and logs: keys lead to the place, values stay out."""
    error = refusal({"k" * 5000: [{"text": "secret", "bad": b"secret"}]})
    assert error.path == f'$["{"k" * 40}\\u2026"][0].bad'
    assert "secret" not in f"{error}{error!r}{error.__cause__!r}{error.__context__!r}"


def test_a_model_that_cannot_be_dumped_is_refused_with_its_name() -> None:
    """What pydantic says about it is chained."""

    class Odd(BaseModel):
        thing: Any

    error = refusal(Odd(thing=object()))
    assert (error.path, error.reason) == ("$", "the model Odd cannot be dumped as JSON")
    assert error.__cause__ is not None


def test_a_model_whose_field_was_set_to_another_type_is_kept_without_a_warning() -> None:
    """pydantic's warning would show the value; warnings are errors here."""
    message = Message(role="user")
    message.role = 7  # type: ignore[assignment]
    assert payload.loads(payload.encode(message))["role"] == 7


def test_lists_that_hold_each_other_over_and_over_are_refused_and_fill_no_memory() -> None:
    """Ten lists of ten, twenty levels deep, would be 10**20 values."""
    value: list[Any] = []
    for _ in range(20):
        value = [value] * 10
    with pytest.raises(TooLargeError) as caught:
        payload.encode({"a": value})
    assert caught.value.what == "item"
    assert caught.value.size is not None
    assert caught.value.size > 262_144


def test_an_item_of_many_small_values_is_measured_exactly() -> None:
    """Near the limit the number of values decides nothing, the bytes do."""
    fitting = {"ab": [1] * 131_068}
    assert len(payload.encode(fitting)) == 262_144
    with pytest.raises(TooLargeError) as caught:
        payload.encode({"a": [1] * 200_000})
    assert caught.value.size == 400_007


# -- conversation ids


@pytest.mark.contract("C1")
@pytest.mark.parametrize("conversation_id", ["a" * 8, "a" * 64, "c_7f3a9b2e41", "-_-_-_-_", "A0b1C2d3"])
def test_a_conversation_id_of_the_contract_is_returned_as_it_is(conversation_id: str) -> None:
    """C1: 8 to 64 characters from [A-Za-z0-9_-]."""
    assert payload.check_conversation_id(conversation_id) == conversation_id


@pytest.mark.contract("C1")
@pytest.mark.parametrize(
    ("conversation_id", "reason"),
    [
        ("a" * 7, "8 to 64 characters are allowed, this has 7"),
        ("a" * 65, "8 to 64 characters are allowed, this has 65"),
        ("", "8 to 64 characters are allowed, this has 0"),
        ("conversation\n", "only A-Z, a-z, 0-9, '_' and '-' are allowed"),
        ("caf\u00e9-1234", "only A-Z, a-z, 0-9, '_' and '-' are allowed"),
        ("٣٣٣٣٣٣٣٣", "only A-Z, a-z, 0-9, '_' and '-' are allowed"),
        ("me@example.org", "only A-Z, a-z, 0-9, '_' and '-' are allowed"),
        (12345678, "int instead of a string"),
        (b"conversation", "bytes instead of a string"),
        (None, "NoneType instead of a string"),
    ],
)
def test_another_conversation_id_is_refused_and_not_repeated(conversation_id: object, reason: str) -> None:
    """C1: checked before anything is stored; what was passed by mistake may be personal."""
    with pytest.raises(InvalidConversationIdError) as caught:
        payload.check_conversation_id(conversation_id)
    assert caught.value.reason == reason
    assert not conversation_id or str(conversation_id) not in str(caught.value)


@pytest.mark.contract("C1")
def test_new_conversation_ids_are_valid_and_differ() -> None:
    """C1: minted by the client."""
    minted = {payload.new_conversation_id() for _ in range(1000)}
    assert len(minted) == 1000
    assert all(payload.check_conversation_id(each) == each for each in minted)


# -- batches


@pytest.mark.contract("C2", "C4")
@given(st.lists(objects, min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_a_batch_holds_its_items_in_order_and_knows_their_bytes(items: list[dict[str, Any]]) -> None:
    """C2: the size is the sum of the items' own bytes; the body with brackets around it is the array that is sent."""
    batch = payload.encode_batch(items)
    assert batch.items == len(items)
    assert batch.size == sum(len(payload.encode(item)) for item in items) == len(batch.body) - (len(items) - 1)
    assert same(payload.decode_items(batch.body), items)


def test_a_bad_item_in_a_batch_is_named_by_its_place() -> None:
    """The whole batch is refused."""
    for encode in (payload.encode_batch, payload.encode_batches):
        with pytest.raises(InvalidItemError) as caught:
            encode([{"a": 1}, {"b": [math.nan]}])
        assert caught.value.path == "$.items[1].b[0]"
        with pytest.raises(InvalidItemError) as caught:
            encode([{"a": 1}, "text"])  # type: ignore[list-item]
        assert (caught.value.path, caught.value.reason) == ("$.items[1]", "str instead of an object")
        with pytest.raises(InvalidItemError) as caught:
            encode({"a": 1})  # type: ignore[arg-type]
        assert (caught.value.path, caught.value.reason) == ("$.items[0]", "str instead of an object")


def test_a_batch_of_any_iterable_is_taken_once() -> None:
    """Generators too."""
    assert payload.encode_batch({"n": n} for n in range(3)).items == 3
    assert [batch.items for batch in payload.encode_batches({"n": n} for n in range(3))] == [3]


def test_a_batch_shows_no_payload() -> None:
    """A repr ends up in logs."""
    assert "secret" not in repr(payload.encode_batch([{"a": "secret"}]))


@pytest.mark.parametrize("body", [b"1", b'{"a":1},[]', b'{"a":1', b'{"a":1}]', b'"x"', b"\xff"])
def test_what_is_no_batch_body_is_not_taken_for_one(body: bytes) -> None:
    """A damaged row is an error, and its message holds no byte of it."""
    with pytest.raises(ValueError):
        payload.decode_items(body)


sizes = st.lists(st.tuples(st.integers(1, 250), st.integers(2, 1 << 20)), max_size=30)


@pytest.mark.contract("C2", "C4")
@given(sizes)
@settings(deadline=None)
def test_packing_takes_all_that_fits_and_nothing_more(batches: list[tuple[int, int]]) -> None:
    """C2, C4: whole batches only, the longest run of leading ones within both limits, at least one."""
    count = payload.pack(batches)

    def fits(n: int) -> bool:
        return sum(items for items, _ in batches[:n]) <= 250 and sum(size for _, size in batches[:n]) <= 1 << 20

    assert count == max((n for n in range(len(batches) + 1) if fits(n)), default=0)
    assert count >= min(1, len(batches))


def test_packing_lets_a_first_batch_above_the_limits_go_alone_and_reads_no_further_than_it_must() -> None:
    """A batch is never split, and a lane with thousands of batches is not read to its end."""
    assert payload.pack([(9, 100), (1, 1)], items_max=4) == 1
    assert payload.pack([(1, 100), (1, 1)], bytes_max=50) == 1
    assert payload.pack([]) == 0
    endless = iter(lambda: (100, 1), None)
    assert payload.pack(endless) == 2
    assert payload.pack([(100, 1), (100, 1), (50, 1), (1, 1)]) == 3


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=12), st.integers(0, 700))
@settings(deadline=None, max_examples=40)
def test_cutting_gives_batches_of_the_contract_each_as_full_as_it_gets(lengths: list[int], small: int) -> None:
    """`extend(atomic=False)`: order kept, every batch legal, and none could have taken the next one's first item."""
    items = [{"t": "x" * min(length, 262_000)} for length in lengths] + [{}] * small
    batches = payload.encode_batches(items)
    assert [item for batch in batches for item in payload.decode_items(batch.body)] == items
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert 1 <= batch.items <= 250
        assert batch.size <= 1 << 20
        if following is not None:
            first = payload.encode(payload.decode_items(following.body)[0])
            assert batch.items == 250 or batch.size + len(first) > 1 << 20


# -- the reader and the other values


@given(values)
@settings(deadline=None)
def test_any_json_value_is_dumped_and_loaded_equal(value: Any) -> None:
    """Not only objects: arguments and answers are made of all of them."""
    assert same(payload.loads(payload.dumps(value)), value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'"\\ud83d\\ude00"', "😀"),
        (b'"\\ud800"', "\ud800"),
        (b'["\\ud800",-12,3]', ["\ud800", -12, 3]),
        (b'{"a":"\\udc00\\ud800"}', {"a": "\udc00\ud800"}),
        (b" [1 , 2.0 ]\r\n\t", [1, 2.0]),
        (b"[" * 400 + b"]" * 400, None),
    ],
    ids=["pair", "lone", "lone beside integers", "lone pair", "blanks", "400 levels"],
)
def test_what_other_writers_store_is_read(text: bytes, value: Any) -> None:
    """One odd item by another client must not hide a page."""
    read = payload.loads(text)
    assert value is None or same(read, value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"NaN",
        b"[Infinity]",
        b'{"a":-Infinity}',
        b"<html>",
        b"\xef\xbb\xbf{}",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b"{} {}",
        b"[" * 100_000,
    ],
    ids=["empty", "NaN", "Infinity", "-Infinity", "page", "BOM", "Latin-1", "raw surrogate", "two", "too deep"],
)
def test_what_is_not_json_is_a_value_error_without_the_text(text: bytes) -> None:
    """Nothing else is raised, and neither message nor chain repeats what the server sent."""
    with pytest.raises(ValueError, match=r"^not JSON: ") as caught:
        payload.loads(text)
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None
    assert len(str(caught.value)) < 120


@pytest.mark.contract("C3")
@pytest.mark.skipif(not SUITE.is_dir(), reason="the JSON test suite is not there")
def test_the_json_suite_is_read_and_refused_as_it_should_be() -> None:
    """Every y_ file goes through encode and loads as one value; every n_ file is refused by the reader."""
    accepted, refused = sorted(SUITE.glob("y_*.json")), sorted(SUITE.glob("n_*.json"))
    assert len(accepted) > 90
    assert len(refused) > 180
    for file in accepted:
        text = file.read_bytes()
        value = json.loads(text)
        assert same(payload.loads(text), value), file.name
        if file.name != "y_object_duplicated_key.json":
            assert same(payload.loads(payload.encode({"value": value})), {"value": value}), file.name
    for file in refused:
        with pytest.raises(ValueError, match="not JSON"):
            payload.loads(file.read_bytes())


@pytest.mark.contract("C3")
@pytest.mark.skipif(not CONVERSATIONS.is_file(), reason="the conversation file is not there")
def test_real_conversations_come_back_equal() -> None:
    """3,202 items of real agents."""
    count = 0
    for line in CONVERSATIONS.read_bytes().splitlines():
        for item in json.loads(line)["items"]:
            assert same(payload.loads(payload.encode(item)), item)
            count += 1
    assert count == 3202
