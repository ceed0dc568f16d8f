"""Tools that only the public conformance suite of the protocol calls by name. Served with ``--conformance-tools``.

None of them knows the memory. ``test_custom_header`` is the one tool here that wants an argument repeated as a header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .tools import Result, Tool
from .verbatim import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .arguments import Arguments

__all__ = ["CONFORMANCE_TOOLS"]

_NOTHING: Final[Any] = {"properties": {}, "type": "object"}
_ADDRESS_BOOK_ENTRY: Final[Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
_MIRRORED: Final[Any] = {
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    "required": ["region"],
    "type": "object",
}


def _words(_: Arguments) -> Result:
    return Result("A few words for a test.", structured=False)


def _refusal(_: Arguments) -> Result:
    return Result("This tool refuses every call, on purpose.", structured=False, is_error=True)


def _echo(arguments: Arguments) -> Result:
    return Result(dumps(dict(arguments)))


CONFORMANCE_TOOLS: Final[Mapping[str, Tool]] = {
    tool.name: tool
    for tool in (
        Tool(name="test_simple_text", description="Answers with text.", input_schema=_NOTHING, answer=_words),
        Tool(name="test_error_handling", description="Fails.", input_schema=_NOTHING, answer=_refusal),
        Tool(
            name="json_schema_2020_12_tool",
            description="Has a schema with many keywords, and answers with its arguments.",
            input_schema=_ADDRESS_BOOK_ENTRY,
            answer=_echo,
        ),
        Tool(
            name="test_custom_header",
            description="Answers with its arguments, one of which must come as a header too.",
            input_schema=_MIRRORED,
            answer=_echo,
        ),
    )
}
