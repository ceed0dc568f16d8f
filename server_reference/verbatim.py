"""Strict JSON that keeps what a reader normally throws away: the order of keys and the way a number is written.

:func:`loads` refuses everything that two readers could understand differently (a key repeated in one object, ``NaN``,
bytes that are not UTF-8, half a surrogate pair). :func:`dumps` writes a value that `loads` returned as compact
UTF-8 JSON: no white space, no escapes but the necessary ones, keys in the order they came, numbers letter by letter.
The text it returns is what the server measures, stores and sends back.
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring as quote
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NESTING_MAX", "NotJsonError", "Number", "dumps", "loads", "quote"]

NESTING_MAX: Final = 256
"""Levels of objects and arrays in a value that `dumps` writes. The contract names no limit, Python's stack has one."""

_HALF_A_PAIR_IS_POSSIBLE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class NotJsonError(ValueError):
    """The bytes are not JSON as this server reads it. The message never quotes them."""


class Number:
    """A number as it was written. Arithmetic would already be an interpretation."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Number({self.text!r})"

    def integer(self) -> int | None:
        """The value, or None for a fraction, an exponent or more digits than any 64-bit integer has."""
        return int(self.text) if len(self.text) <= 20 and self.text.lstrip("-").isdigit() else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NotJsonError("a key is repeated in one object")
    return value


def _constant(_name: str) -> None:
    raise NotJsonError("NaN and Infinity are not JSON")


_decoder: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=Number, parse_float=Number, parse_constant=_constant
)


def loads(data: bytes | str) -> Any:
    """Objects as dict, arrays as list, numbers as :class:`Number`; :class:`NotJsonError` for anything doubtful."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = _decoder.decode(text)
        if _HALF_A_PAIR_IS_POSSIBLE.search(text):
            dumps(value).encode("utf-8")
    except NotJsonError:
        raise
    except UnicodeDecodeError:
        raise NotJsonError("not UTF-8") from None
    except UnicodeEncodeError:
        raise NotJsonError("a string holds half a surrogate pair") from None
    except RecursionError:
        raise NotJsonError("nested too deeply") from None
    except json.JSONDecodeError as error:
        # error.msg is Python's own wording and position; str(error) would be as safe, error.doc would not.
        raise NotJsonError(f"{error.msg} at character {error.pos}") from None
    return value


def dumps(value: Any) -> str:
    """The compact text of a value that :func:`loads` returned; raises :class:`NotJsonError` past NESTING_MAX levels."""
    parts: list[str] = []
    _write(value, parts.append, 0)
    return "".join(parts)


def _write(value: Any, write: Callable[[str], None], level: int) -> None:
    # One Python frame a level: comprehensions would double that and bring the interpreter's own limit into sight.
    kind = type(value)
    if kind is str:
        write(quote(value))
    elif kind is Number:
        write(value.text)
    elif kind is dict or kind is list:
        if level >= NESTING_MAX:
            raise NotJsonError("nested too deeply")
        before = "{" if kind is dict else "["
        if not value:
            write(before)
        elif kind is dict:
            for key, member in value.items():
                write(before)
                write(quote(key))
                write(":")
                _write(member, write, level + 1)
                before = ","
        else:
            for member in value:
                write(before)
                _write(member, write, level + 1)
                before = ","
        write("}" if kind is dict else "]")
    elif value is None:
        write("null")
    else:
        write("true" if value else "false")
