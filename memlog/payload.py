"""What the log can keep, and the bytes it is kept as: validate, encode once, measure, pack. Pure.

The body of a request is built from the very bytes that were measured and stored: a :class:`Batch` holds its items'
JSON joined by commas, so batches merge by joining bodies and nothing is ever encoded a second time.

Two readings of an item. The usual one is quick: a walk that only says "nothing but plain Python values, small enough",
then the encoder. Whatever fails it is copied into plain values by the thorough one, which either leaves nothing
doubtful behind or names the place and the reason. Neither recurses, so the depth of the caller's stack does not matter.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, TypeAlias

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from memlog import stamps
from memlog.errors import InvalidConversationIdError, InvalidItemError, TooLargeError
from memlog.limits import (
    BATCH_BYTES_MAX,
    CONVERSATION_ID_PATTERN,
    INT_DIGITS_MAX,
    ITEM_BYTES_MAX,
    ITEMS_PER_BATCH_MAX,
    NESTING_MAX,
)

__all__ = [
    "Batch",
    "ItemLike",
    "check_conversation_id",
    "decode_items",
    "dumps",
    "encode",
    "encode_batch",
    "encode_batches",
    "loads",
    "new_conversation_id",
    "pack",
]

ItemLike: TypeAlias = Mapping[str, object] | BaseModel
"""What `append` takes. A TypedDict and a ``dict[str, str]`` are mappings of this kind to a type checker."""

_ID: Final = re.compile(CONVERSATION_ID_PATTERN)
_INT_MAX: Final = 10**INT_DIGITS_MAX - 1
_INT_MIN: Final = -_INT_MAX
# A value takes two bytes of JSON at the least, itself and what separates it: with more of them the item is too large,
# whatever they are. Without a bound, lists that hold the same list ten times, ten levels deep, would fill the memory.
_PLAIN_VALUES_MAX: Final = ITEM_BYTES_MAX // 2
# Up to here the thorough reading goes on, for the sake of an exact size in the error.
_VALUES_MAX: Final = ITEM_BYTES_MAX
_KEY_SHOWN_MAX: Final = 40


# -- conversation ids ------------------------------------------------------------------------------------------------


def new_conversation_id() -> str:
    """A fresh id: random, safe in a URL, and saying nothing about anybody."""
    return f"c_{secrets.token_urlsafe(16)}"


def check_conversation_id(value: object) -> str:
    """The id as it was given.

    Raises:
        InvalidConversationIdError: it is not 8 to 64 characters from ``[A-Za-z0-9_-]``. The error does not repeat the
            id: what was passed by mistake may well be an e-mail address.
    """
    if not isinstance(value, str):
        raise InvalidConversationIdError(f"{_kind(value)} instead of a string")
    if not _ID.fullmatch(value):
        if 8 <= len(value) <= 64:
            raise InvalidConversationIdError("only A-Z, a-z, 0-9, '_' and '-' are allowed")
        raise InvalidConversationIdError(f"8 to 64 characters are allowed, this has {len(value):,}")
    return str.__str__(value)


# -- one item --------------------------------------------------------------------------------------------------------


def encode(item: ItemLike, *, to_stamp: bool = False) -> bytes:
    """The item as compact UTF-8 JSON without ASCII escaping, taken now: changing the item later changes nothing.

    What is accepted comes back equal, type for type: objects with string keys, lists, strings, integers of up to 4,300
    digits, finite floats, booleans and None, at most 128 levels deep. Subclasses of these, such as string enums and
    ordered dicts, count as the value they hold. A pydantic model is dumped in its JSON mode first.

    Raises:
        InvalidItemError: anything else; it names the JSON path and the reason, never a value.
        TooLargeError: more than 256 KiB. Beyond 262,144 values ``size`` is the least that they would take.
    """
    return _encode_item(item, "$", stamps.STAMP_BYTES if to_stamp else 0)


def dumps(value: object) -> bytes:
    """Any JSON value under the rules of :func:`encode`, except that neither an object nor a size is asked for.

    Raises:
        InvalidItemError: as :func:`encode`.
    """
    return _encode_value(value, "$")


def loads(data: bytes) -> Any:
    """The value of a JSON text in UTF-8: floats to the last bit, integers of up to 4,300 digits, 128 levels and more.

    Raises:
        ValueError: it is not JSON. NaN and Infinity are not, nor is a text that is not UTF-8; lone surrogates in their
            escaped form are let through, because other writers store them and one must not hide a whole page.
    """
    try:
        return from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        reason = str(error)
    try:
        # The slower parser reads the few texts that the quick one gives up on though they are JSON.
        return json.loads(str(data, "utf-8"), parse_int=_parse_int, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # Not chained: the errors of this parser carry the whole text.
        pass
    raise ValueError(f"not JSON: {reason}")


def _parse_int(digits: str) -> Any:
    # int() obeys a limit that the program may have changed, and from_json of pydantic 2.8 counts the sign as a digit.
    return -from_json(digits[1:]) if digits.startswith("-") else from_json(digits)


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


# -- batches ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Batch:
    """Items that are stored, sent, acknowledged and refused together.

    ``body`` is their JSON joined by commas, without brackets; ``size`` the sum of their bytes, commas not counted: what
    the contract limits. ``parts``, in a log that stamps: the items one by one instead, which get their stamps, counted
    in ``size`` already, together with their number in the buffer.
    """

    body: bytes = field(repr=False)
    items: int
    size: int
    parts: list[bytes] | None = field(default=None, repr=False)


def encode_batch(items: Iterable[ItemLike], *, to_stamp: bool = False) -> Batch:
    """All of the items as one batch; ``to_stamp`` leaves room for stamps.

    Raises:
        InvalidItemError, TooLargeError: as :func:`encode`, the path beginning with ``$.items[2]``; also for a count
            other than 1 to 250 (``"count"``) and for more than 1 MiB together (``"batch"``).
    """
    items = list(items)
    if not 1 <= len(items) <= ITEMS_PER_BATCH_MAX:
        raise TooLargeError("count", len(items), ITEMS_PER_BATCH_MAX)
    reserve = stamps.STAMP_BYTES if to_stamp else 0
    encoded = [_encode_item(item, f"$.items[{index}]", reserve) for index, item in enumerate(items)]
    batch = _join(encoded, reserve)
    if batch.size > BATCH_BYTES_MAX:
        raise TooLargeError("batch", batch.size, BATCH_BYTES_MAX)
    return batch


def encode_batches(items: Iterable[ItemLike], *, to_stamp: bool = False) -> list[Batch]:
    """The items in order, cut into batches that the contract allows, each as full as it gets.

    Raises:
        InvalidItemError, TooLargeError: as :func:`encode_batch`, for one item or for none at all. Either all of the
            items come back or nothing does.
    """
    reserve = stamps.STAMP_BYTES if to_stamp else 0
    encoded = [_encode_item(item, f"$.items[{index}]", reserve) for index, item in enumerate(items)]
    if not encoded:
        raise TooLargeError("count", 0, ITEMS_PER_BATCH_MAX)
    sizes = [(1, len(data) + reserve) for data in encoded]
    batches: list[Batch] = []
    start = 0
    while start < len(encoded):
        # No more than one batch can hold is looked at, so that a long list costs one pass.
        end = start + pack(sizes[start : start + ITEMS_PER_BATCH_MAX])
        batches.append(_join(encoded[start:end], reserve))
        start = end
    return batches


def decode_items(body: bytes) -> list[dict[str, Any]]:
    """The items of a :attr:`Batch.body`.

    Raises:
        ValueError: it is not such a body.
    """
    items = loads(b"[%b]" % body)
    if not all(type(item) is dict for item in items):
        raise ValueError("not a batch body: an item is not an object")
    return items  # type: ignore[no-any-return]  # just checked, item by item


def pack(
    batches: Iterable[tuple[int, int]], *, items_max: int = ITEMS_PER_BATCH_MAX, bytes_max: int = BATCH_BYTES_MAX
) -> int:
    """How many of the leading batches, each given as (items, size), fit in one request.

    At least one, because a batch is never split: a first one above the limits goes alone and the server decides. 0 only
    where there are none. Reads no further than the first that does not fit.
    """
    fitting = items_sum = bytes_sum = 0
    for items, size in batches:
        items_sum += items
        bytes_sum += size
        if fitting and (items_sum > items_max or bytes_sum > bytes_max):
            break
        fitting += 1
    return fitting


def _join(encoded: list[bytes], reserve: int) -> Batch:
    size = sum(map(len, encoded)) + reserve * len(encoded)
    return Batch(b"", len(encoded), size, encoded) if reserve else Batch(b",".join(encoded), len(encoded), size)


# -- the two readings ------------------------------------------------------------------------------------------------


def _encode_item(item: object, root: str, reserve: int = 0) -> bytes:
    value = item if type(item) is dict else _as_dict(item, root)
    if stamps.KEY in value and (reserve or _resembles_a_stamp(value[stamps.KEY])):
        raise InvalidItemError(f"{root}.{stamps.KEY}", "this key is memlog's own")
    data = _encode_value(value, root)
    if len(data) + reserve > ITEM_BYTES_MAX:
        raise TooLargeError("item", len(data) + reserve, ITEM_BYTES_MAX)
    return data


def _resembles_a_stamp(value: object) -> bool:
    # Reading would take it for one and remove it.
    return isinstance(value, dict) and value.keys() == {"w", "n"}


def _encode_value(value: object, root: str) -> bytes:
    if _is_plain(value):
        try:
            return to_json(value)
        except ValueError:
            # A lone surrogate; the thorough reading says where.
            pass
    return to_json(_plain_copy(value, root))


def _as_dict(item: object, root: str) -> dict[Any, Any]:
    if isinstance(item, BaseModel):
        try:
            # A field that holds another type than it declares is kept as it is; the warning would show the value.
            item = item.model_dump(mode="json", warnings=False)
        except Exception as error:
            raise InvalidItemError(root, f"the model {_kind(item)} cannot be dumped as JSON") from error
    if isinstance(item, dict):
        return item
    if isinstance(item, Mapping):
        return dict(item)
    raise InvalidItemError(root, f"{_kind(item)} instead of an object")


def _is_plain(value: object) -> bool:
    """Whether the encoder may have it: exact built-in types in every place, within the limits. False is no verdict.

    Level by level, because lists of containers are quicker than a stack of frames and cannot run in circles.
    """
    values_left = _PLAIN_VALUES_MAX
    level: list[Any] = [(value,)]
    try:
        for _ in range(NESTING_MAX + 1):
            deeper: list[Any] = []
            for container in level:
                values_left -= len(container)
                if values_left < 0:
                    return False
                values = container
                if type(container) is dict:
                    for key in container:
                        if type(key) is not str:
                            return False
                    values = container.values()
                for child in values:
                    kind = type(child)
                    if kind is str or child is None or kind is bool:
                        continue
                    if kind is dict or kind is list:
                        deeper.append(child)
                    elif kind is int:
                        if not _INT_MIN <= child <= _INT_MAX:
                            return False
                    elif kind is not float or not isfinite(child):
                        return False
            if not deeper:
                return True
            level = deeper
    except RuntimeError:
        # Another thread changed a dict meanwhile: a copy is what is needed.
        pass
    return False


class _RefusedError(Exception):
    """Why a value cannot be kept; the place is known further up."""


@dataclass(slots=True, eq=False, repr=False)
class _Container:
    """One container on the way from the root: what it is, its copy, what is left to copy, and the place in it."""

    source: object
    copy: dict[str, Any] | list[Any]
    entries: Iterator[tuple[Any, Any]]
    place: str | int | None = None


def _plain_copy(value: object, root: str) -> Any:
    """The value in exact built-in types, or an error that says where and why it cannot be."""
    result: list[Any] = []
    opened = [_Container(None, result, iter([(None, value)]))]
    try:
        _copy_all(opened)
    except _RefusedError as refusal:
        path = "".join(_step(container.place) for container in opened)
        raise InvalidItemError(f"{root}{path}", str(refusal)) from None
    return result[0]


def _copy_all(opened: list[_Container]) -> None:
    values_left = _VALUES_MAX
    while opened:
        into = opened[-1]
        for place, child in into.entries:
            values_left -= 1
            if values_left < 0:
                raise TooLargeError("item", 2 * _VALUES_MAX, ITEM_BYTES_MAX)
            into.place = None
            if isinstance(into.copy, dict):
                into.place = key = _plain_key(place, into.copy)
                container = _open(child, opened)
                into.copy[key] = container.copy if container else _plain_scalar(child)
            else:
                into.place = place
                container = _open(child, opened)
                into.copy.append(container.copy if container else _plain_scalar(child))
            if container:
                opened.append(container)
                break
        else:
            opened.pop()


def _open(value: object, opened: list[_Container]) -> _Container | None:
    # What a subclass really holds, taken in one step that no other thread can come between.
    if isinstance(value, dict):
        container = _Container(value, {}, iter(list(dict.items(value))))
    elif isinstance(value, list):
        container = _Container(value, [], iter(list(enumerate(list.copy(value)))))
    else:
        return None
    if any(value is above.source for above in opened):
        raise _RefusedError("it contains itself")
    if len(opened) > NESTING_MAX:
        raise _RefusedError(f"more than {NESTING_MAX} levels deep")
    return container


def _plain_key(key: object, taken: dict[str, Any]) -> str:
    if not isinstance(key, str):
        raise _RefusedError(f"a key of type {_kind(key)}, keys are strings")
    plain = _plain_text(key, "a key with a lone surrogate, which UTF-8 cannot carry")
    if plain in taken:
        raise _RefusedError("two of its keys are the same string")
    return plain


def _plain_scalar(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value, "a lone surrogate, which UTF-8 cannot carry")
    if isinstance(value, int):
        number = int.__index__(value)
        if not _INT_MIN <= number <= _INT_MAX:
            raise _RefusedError(f"an integer of more than {INT_DIGITS_MAX:,} digits")
        return number
    if isinstance(value, float):
        real = float.__float__(value)
        if not isfinite(real):
            raise _RefusedError("NaN or Infinity, which JSON does not have")
        return real
    if isinstance(value, BaseModel):
        raise _RefusedError(f"the model {_kind(value)} inside an item: dump it first, with model_dump(mode='json')")
    raise _RefusedError(f"{_kind(value)} is not a JSON type")


def _plain_text(text: str, reason: str) -> str:
    plain = str.__str__(text)
    if plain.isascii():
        return plain
    try:
        plain.encode()
    except UnicodeEncodeError:
        raise _RefusedError(reason) from None
    return plain


def _kind(value: object) -> str:
    return type(value).__name__


def _step(place: str | int | None) -> str:
    if place is None:
        return ""
    if isinstance(place, int):
        return f"[{place}]"
    name = place if len(place) <= _KEY_SHOWN_MAX else f"{place[:_KEY_SHOWN_MAX]}…"
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name)}]"
