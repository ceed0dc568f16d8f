"""What the tools share in reading their arguments: the way to say no, and whole numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .verbatim import Number

__all__ = ["Arguments", "Refusal", "SchemaError", "integer"]

Arguments = Mapping[str, Any]


class Refusal(Exception):  # noqa: N818  # an answer, not a failure
    """The tool says no. The message is for the caller and never quotes a payload."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code = code
        self.message = message


class SchemaError(Exception):
    """The arguments are not what the tool's schema asks for; the message is the whole answer, as plain text."""


def integer(arguments: Arguments, name: str, low: int, high: int, *, code: str, default: int | None = None) -> int:
    """A whole number from `low` to `high`, both allowed; `default` if it is left out (null is not left out)."""
    if name not in arguments and default is not None:
        return default
    value = arguments.get(name)
    number = value.integer() if isinstance(value, Number) else None
    if number is None or not low <= number <= high:
        raise Refusal(code, f"{name} must be an integer from {low} to {high}")
    return number
