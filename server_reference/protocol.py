"""MCP without HTTP's body and socket: what a POSTed message is, in both eras, and how an answer to it is worded.

Modern (2026-07-28): every request carries its protocol version in ``_meta`` and in headers; there is no handshake.
Legacy (2025-11-25 and before): ``initialize`` first, and possibly a session. A request is modern if it says so in
``_meta`` or by its headers; for ``initialize`` only ``_meta`` counts, and then there is no such method. Errors that are
not a tool's own are JSON-RPC errors. Those of this server's HTTP answers have the code -31000 minus the HTTP status,
outside of what the protocol reserves.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .verbatim import NotJsonError, Number, dumps, loads, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "INVALID_REQUEST",
    "LEGACY_VERSIONS",
    "METHOD_NOT_FOUND",
    "MODERN_VERSION",
    "RejectedError",
    "Request",
    "check_mirrored",
    "error_body",
    "http_error_code",
    "read_message",
    "result_body",
]

MODERN_VERSION: Final = "2026-07-28"
LEGACY_VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
HEADER_MISMATCH: Final = -32020
UNSUPPORTED_PROTOCOL_VERSION: Final = -32022

# In the modern era an error's code also decides the HTTP status; in the legacy era an error is an answer like others.
_MODERN_STATUS: Final[Mapping[int, int]] = {METHOD_NOT_FOUND: 404, INTERNAL_ERROR: 500}

_META_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
_META_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
_META_SERVER: Final = "io.modelcontextprotocol/serverInfo"
_SERVER_INFO: Final = '{"name":"memlog-reference-server","version":"1"}'
_BASE64_HEADER: Final = re.compile(r"=\?base64\?(.*)\?=")


@dataclass(frozen=True, slots=True)
class Request:
    """One request to answer. ``id`` is JSON text, to be sent back as it came."""

    id: str
    method: str
    params: Mapping[str, Any]
    modern: bool

    def refusal(self, code: int, message: str, data: str | None = None) -> RejectedError:
        """An error in answer to this request, with the HTTP status that its era gives it."""
        status = _MODERN_STATUS.get(code, 400) if self.modern else 500 if code == INTERNAL_ERROR else 200
        return RejectedError(status, code, message, data=data, request_id=self.id)


class RejectedError(Exception):
    """The message is answered with an error of the protocol; ``data`` is JSON text."""

    def __init__(
        self, status: int, code: int, message: str, *, data: str | None = None, request_id: str = "null"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(request_id, code, message, data)


def http_error_code(status: int) -> int:
    return -31000 - status


def error_body(request_id: str, code: int, message: str, data: str | None = None) -> str:
    more = "" if data is None else f',"data":{data}'
    return f'{{"jsonrpc":"2.0","id":{request_id},"error":{{"code":{code},"message":{quote(message)}{more}}}}}'


def result_body(request: Request, members: str) -> str:
    """The answer whose result has these members (JSON text without the braces), and what the request's era adds."""
    if request.modern:
        added = f'"resultType":"complete","_meta":{{"{_META_SERVER}":{_SERVER_INFO}}}'
        members = f"{members},{added}" if members else added
    return f'{{"jsonrpc":"2.0","id":{request.id},"result":{{{members}}}}}'


def discovery() -> str:
    """The members of the result of ``server/discover``."""
    return f'"supportedVersions":["{MODERN_VERSION}"],"capabilities":{{"tools":{{}}}},"ttlMs":0,"cacheScope":"private"'


def handshake(params: Mapping[str, Any]) -> str:
    """The members of the result of ``initialize``: the version asked for if it is known, else the newest legacy one."""
    asked = params.get("protocolVersion")
    version = asked if asked in LEGACY_VERSIONS else LEGACY_VERSIONS[0]
    return f'"protocolVersion":"{version}","capabilities":{{"tools":{{}}}},"serverInfo":{_SERVER_INFO}'


def read_message(body: bytes, headers: Mapping[str, str], repeated: frozenset[str]) -> Request | None:
    """The request, or None for a notification or a response, which are taken without an answer.

    `headers` are by lower-case name; `repeated` names those that came more than once. Raises :class:`RejectedError`.
    """
    try:
        message = loads(body)
    except NotJsonError as error:
        raise RejectedError(400, PARSE_ERROR, f"not a JSON message: {error}") from None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise RejectedError(400, INVALID_REQUEST, "not one JSON-RPC 2.0 message")
    method = message.get("method")
    if method is None and "id" in message and ("result" in message or "error" in message):
        return None
    if not isinstance(method, str):
        raise RejectedError(400, INVALID_REQUEST, "a message needs a method")
    if "id" not in message:
        return None
    if not isinstance(message["id"], (str, Number)):
        raise RejectedError(400, INVALID_REQUEST, "a request's id must be a string or a number")
    params = message.get("params", {})
    request_id = dumps(message["id"])
    if not isinstance(params, dict):
        raise RejectedError(400, INVALID_REQUEST, "params must be an object", request_id=request_id)
    request = Request(request_id, method, params, _is_modern(method, params, headers))
    if request.modern:
        _check_modern(request, headers, repeated)
    return request


def _is_modern(method: str, params: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    meta = params.get("_meta")
    if isinstance(meta, dict) and _META_VERSION in meta:
        return True
    if method == "initialize":
        return False
    version = headers.get("mcp-protocol-version")
    return "mcp-method" in headers or (version is not None and version not in LEGACY_VERSIONS)


def _check_modern(request: Request, headers: Mapping[str, str], repeated: frozenset[str]) -> None:
    meta = request.params.get("_meta")
    missing = [key for key in (_META_VERSION, _META_CAPABILITIES) if not isinstance(meta, dict) or key not in meta]
    if missing or not isinstance(meta, dict):
        raise request.refusal(INVALID_PARAMS, f"params._meta lacks {', '.join(missing)}")
    for name in ("mcp-protocol-version", "mcp-method", "mcp-name"):
        if name in repeated:
            raise request.refusal(HEADER_MISMATCH, f"the header {name} came more than once")
    version = meta[_META_VERSION]
    if headers.get("mcp-protocol-version") != version:
        raise request.refusal(HEADER_MISMATCH, "the header mcp-protocol-version is not the version in params._meta")
    if headers.get("mcp-method") != request.method:
        raise request.refusal(HEADER_MISMATCH, "the header mcp-method is not the method of the message")
    if request.method == "tools/call" and _decoded(headers.get("mcp-name")) != request.params.get("name"):
        raise request.refusal(HEADER_MISMATCH, "the header mcp-name is not the name of the tool")
    if version != MODERN_VERSION:
        data = f'{{"supported":["{MODERN_VERSION}"],"requested":{quote(version)}}}'
        raise request.refusal(UNSUPPORTED_PROTOCOL_VERSION, "unsupported protocol version", data)


def _decoded(header: str | None) -> str | None:
    """A header's value; one that HTTP cannot carry as it is comes as ``=?base64?...?=``."""
    encoded = _BASE64_HEADER.fullmatch(header) if header is not None else None
    if encoded is None:
        return header
    try:
        return base64.b64decode(encoded[1], validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None


def check_mirrored(
    request: Request, schema: Any, arguments: Mapping[str, Any], headers: Mapping[str, str], repeated: frozenset[str]
) -> None:
    """A modern call repeats arguments whose schema says ``x-mcp-header``, and those only if they are there.

    Raises :class:`RejectedError`. Only properties of the schema's top level are looked at: no tool here has others.
    """
    if not request.modern:
        return
    for key, property_schema in schema.get("properties", {}).items():
        if (name := property_schema.get("x-mcp-header")) is None:
            continue
        header = f"mcp-param-{name}".lower()
        value = arguments.get(key)
        if header in repeated or _decoded(headers.get(header)) != (None if value is None else _header_text(value)):
            raise request.refusal(HEADER_MISMATCH, f"the header {header} is not the argument {key}")


def _header_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)
