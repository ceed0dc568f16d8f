"""Stamps: what makes an item recognisable wherever it lands, so that several writers can share a conversation.

With ``stamp=True`` each payload carries ``{"_memlog": {"w": writer, "n": number}}`` as its last key: ``w`` is random
for each opening of a log and each fork, ``n`` ascends in the order of storing. Reading drops what it has seen of a
writer already and removes the key, always, if it has exactly this shape; so nobody else's item may carry it.

``n`` is a row's id and the item's index in it, moved to where it always has sixteen digits: a stamp's size is known
before its number is, and stays below the 2**53 up to which every JSON reader counts exactly.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memlog.limits import ITEMS_PER_BATCH_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY: Final = "_memlog"
_WRITER_CHARACTERS: Final = 16
_NUMBER_MIN: Final = 10**15
_INDEX_BITS: Final = 8
assert ITEMS_PER_BATCH_MAX <= 1 << _INDEX_BITS


class Stamp(NamedTuple):
    """Who wrote an item, and the how manieth of theirs it is."""

    writer: str
    number: int


def new_writer() -> str:
    """A name for one opening of a log, or one batch that is sent anew."""
    return secrets.token_hex(_WRITER_CHARACTERS // 2)


def _tail(writer: str, row_id: int, index: int) -> bytes:
    number = _NUMBER_MIN + (row_id << _INDEX_BITS) + index
    return b'"_memlog":{"w":"%b","n":%d}}' % (writer.encode(), number)


STAMP_BYTES: Final = len(_tail("0" * _WRITER_CHARACTERS, 0, 0))
"""What a stamp adds to an item at most: an empty object needs no comma before it."""


def stamped(parts: Sequence[bytes], writer: str, row_id: int) -> bytes:
    """The body of a batch of encoded objects, each with its stamp."""
    return b",".join(
        [
            part[:-1] + (b"," if len(part) > 2 else b"") + _tail(writer, row_id, index)
            for index, part in enumerate(parts)
        ]
    )


def read(payload: Mapping[str, Any]) -> Stamp | None:
    """The payload's stamp; None if it has none of exactly this shape."""
    value = payload.get(KEY)
    if type(value) is not dict or value.keys() != {"w", "n"}:
        return None
    writer, number = value["w"], value["n"]
    if type(writer) is not str or type(number) is not int or len(writer) != _WRITER_CHARACTERS or number < _NUMBER_MIN:
        return None
    return Stamp(writer, number)


def without(payload: dict[str, Any]) -> dict[str, Any]:
    """The payload as it was before it was stamped."""
    return {key: value for key, value in payload.items() if key != KEY}
