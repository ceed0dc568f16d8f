"""What a server's "no" means: one table for its three planes (pure).

A refusal comes as an HTTP status, as a JSON-RPC error or as a tool result marked ``isError``, whose text may be JSON or
plain. The contract names the conditions but, save one, no codes. So codes and words are matched leniently, and what
nobody recognises is transient: the contract calls "any other failure" safe to retry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from memlog import limits
from memlog.errors import (
    AuthenticationError,
    ConversationFullError,
    InvalidConversationIdError,
    InvalidRequestError,
    MemlogError,
    RateLimitedError,
    ServerError,
    TooLargeError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Refusal", "spoken", "to_error", "trimmed"]

SERVER_SAID_MAX: Final = 200

Meaning = Literal["throttled", "full", "item", "batch", "count", "id", "credentials", "wrong_kind", "invalid", "server"]


class Refusal(NamedTuple):
    """One refusal, from whichever plane. ``words`` are for matching only, ``said`` is fit to be shown."""

    what: str
    status: int
    code: int | str | None = None
    words: str = ""
    said: str | None = None
    retry_after: float | None = None


# The status decides where it is plain enough; the body of such an answer may be anybody's (a proxy's page).
_BY_STATUS: Final[Mapping[int, Meaning]] = {
    401: "credentials",
    403: "credentials",
    407: "credentials",
    408: "server",
    425: "server",
    429: "throttled",
}

# Codes are compared in lower case with spaces for "_", "-" and ".", the first match decides.
# (Compiled by `re` when first needed: most processes never meet a refusal.)
_BY_CODE: Final[tuple[tuple[str, Meaning], ...]] = (
    (r"rate limit|too many requests|throttl|quota", "throttled"),
    (r"conversation (full|too (long|large)|limit)|(item|conversation) cap\b", "full"),
    (r"too many items|(item|batch) count|items count|empty batch|no items", "count"),
    (r"item (payload )?(too large|size|oversize)|item exceed", "item"),
    (r"(batch|payload|request|content|body|total) (too large|size)|batch exceed", "batch"),
    (r"conversation id|\bid (invalid|malformed)", "id"),
    (r"unprocessable parameters", "wrong_kind"),
    (r"unauthori[sz]ed|unauthenticated|forbidden|permission|access denied|authenti|credential|token", "credentials"),
    (r"invalid|malformed|validation|bad request|unprocessable|^-32602$|^-32700$", "invalid"),
    (r"unavailable|internal|busy|timeout|maintenance|^-32603$", "server"),
)

# The same for words. Looked at where the code is missing, unknown, or says no more than "invalid".
_BY_WORDS: Final[tuple[tuple[str, Meaning], ...]] = (
    (r"\brate limit|too many requests", "throttled"),
    (
        r"conversation\b.*\bfull\b|\b100[, ._]?000\b|conversation\b.*\b(item (limit|cap)|maximum number of items)",
        "full",
    ),
    (r"conversation ?id\b.*(invalid|malformed|must|character|match|pattern|\b8\b)", "id"),
    (r"(invalid|malformed|bad) conversation ?id", "id"),
    (r"\b250\b|too many items|at least (1|one) item", "count"),
    (r"\bitems?\b.*(256 ?ki?b|\b262[, ]?144\b)|\bitem\b.*(too large|too big|exceed)", "item"),
    (r"\b(batch|total|request|payloads|body)\b.*(too large|too big|exceed)|\b1 ?mi?b\b|\b1[, ]?048[, ]?576\b", "batch"),
    (r"unprocessable parameters", "wrong_kind"),
    (r"basic (auth|credential)|invalid credential|invalid or revoked|unauthori[sz]ed|bearer token", "credentials"),
    (r"validation error|invalid (param|argument|request|input)", "invalid"),
)


def to_error(refusal: Refusal, *, conversation_id: str | None = None, of_a_tool: bool = True) -> MemlogError:
    """The one error that says what happened, with ``status``, ``code``, ``retry_after`` and ``server_said``.

    A refusal of anything but a tool call (``of_a_tool``), such as a handshake, says nothing about what the caller sent.
    """
    meaning = _meaning(refusal)
    if not of_a_tool and meaning not in ("throttled", "credentials", "wrong_kind"):
        meaning = "server"
    return _ERRORS[meaning](refusal, conversation_id, _details(refusal))


def _meaning(refusal: Refusal) -> Meaning:
    if refusal.status in _BY_STATUS:
        return _BY_STATUS[refusal.status]
    if refusal.status >= 500:
        return "server"
    words = _plain(refusal.words)
    by_code = _first(_BY_CODE, _plain(str(refusal.code))) if refusal.code is not None else None
    if by_code in (None, "invalid", "wrong_kind"):
        by_words = _first(_BY_WORDS, words)
        if by_code == "wrong_kind" and by_words not in ("full", "item", "batch", "count"):
            return "wrong_kind"
        if by_words is not None:
            return by_words
    if by_code is not None:
        return by_code
    return "batch" if refusal.status == 413 else "server"


def _first(table: tuple[tuple[str, Meaning], ...], text: str) -> Meaning | None:
    return next((meaning for pattern, meaning in table if re.search(pattern, text, re.DOTALL)), None)


def _plain(text: str) -> str:
    spaced = re.sub(r"(?<=[A-Za-z])[_.-]+(?=[A-Za-z])", " ", text[:1000])
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", spaced).lower()


def _details(refusal: Refusal) -> dict[str, Any]:
    return {
        "status": refusal.status,
        "code": refusal.code,
        "retry_after": refusal.retry_after,
        "server_said": refusal.said,
    }


def _answered(refusal: Refusal) -> str:
    number = f"status {refusal.status}" if refusal.status >= 300 else "an error"
    return f"{refusal.what}: the server answered with {number}" + (f", code {refusal.code}" if refusal.code else "")


_REFUSED: Final[dict[str, Any]] = {"outcome": "refused"}

_ERRORS: Final[Mapping[Meaning, Callable[[Refusal, str | None, dict[str, Any]], MemlogError]]] = {
    "throttled": lambda r, _, d: RateLimitedError(f"{r.what}: the rate limit is exceeded", **_REFUSED, **d),
    "full": lambda _, c, d: ConversationFullError(c or "(unnamed)", limits.CONVERSATION_ITEMS_MAX, **_REFUSED, **d),
    "item": lambda _, __, d: TooLargeError("item", None, None, **_REFUSED, **d),
    "batch": lambda _, __, d: TooLargeError("batch", None, None, **_REFUSED, **d),
    "count": lambda _, __, d: TooLargeError("count", None, None, **_REFUSED, **d),
    "id": lambda _, __, d: InvalidConversationIdError("the server refused it", **_REFUSED, **d),
    "credentials": lambda r, _, d: AuthenticationError(f"{r.what}: the credentials were refused", **_REFUSED, **d),
    "wrong_kind": lambda r, _, d: AuthenticationError(
        f"{r.what} needs the site's Basic credentials; a token of another kind was sent, or none", **_REFUSED, **d
    ),
    "invalid": lambda r, _, d: InvalidRequestError(_answered(r), **_REFUSED, **d),
    "server": lambda r, _, d: ServerError(_answered(r), **d),
}


def spoken(value: object) -> tuple[int | str | None, str, object]:
    """Code, words and ``retry_after`` of an error in JSON, in any of the shapes that servers use.

    ``{"error": {"code", "message", "data"}}`` (JSON-RPC, and the reference server inside a tool result),
    ``{"error": "words", "code": ...}`` (the team server), or such an object without its wrapper.
    """
    if isinstance(value, str):
        return None, value, None
    if not isinstance(value, dict):
        return None, "", None
    inner = value.get("error")
    error: dict[str, Any] = inner if isinstance(inner, dict) else value
    data = error.get("data")
    data = data if isinstance(data, dict) else {}
    code = next((c for c in (data.get("code"), error.get("code"), value.get("code")) if _is_code(c)), None)
    texts = (inner, error.get("message"), error.get("detail"), error.get("error_description"))
    words = next((text for text in texts if isinstance(text, str) and text), "")
    hints = (data.get("retry_after"), error.get("retry_after"), value.get("retry_after"))
    return code, words, next((hint for hint in hints if hint is not None), None)


def _is_code(value: object) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and 0 < len(value) <= 64)


_QUOTED: Final = re.compile(r"'([^']{1,})'|\"([^\"]{1,})\"|`([^`]{1,})`|\{.*\}", re.DOTALL)
_ECHO: Final = re.compile(r"input_value=.*", re.DOTALL)
_WINDOW: Final = 8


def trimmed(words: str, sent: bytes) -> str | None:
    """``words`` fit for a message: short, printable, and without what was sent.

    Validators like to repeat the value they dislike. Anything quoted that occurs in ``sent`` is taken out, and so is
    every longer run of characters that does.
    """
    if not words:
        return None
    # The names of arguments are the contract's, only their values are the caller's.
    haystack = sent.decode("utf-8", "replace").replace('"conversation_id":', "", 1)
    text = _ECHO.sub("…", words[: 4 * SERVER_SAID_MAX])
    text = _QUOTED.sub(lambda match: "…" if match[0][0] == "{" or _inside(match) in haystack else match[0], text)
    text = _without_runs(text, haystack)
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (text[: SERVER_SAID_MAX - 1] + "…" if len(text) > SERVER_SAID_MAX else text) or None


def _inside(match: re.Match[str]) -> str:
    return match[1] or match[2] or match[3]


def _without_runs(text: str, haystack: str) -> str:
    """``text`` without the runs of 12 or more characters that it shares with ``haystack``.

    Such a run holds a window of eight that starts at a multiple of four: so only those are looked up, and a hit is
    widened to both sides.
    """
    start = 0
    while start + _WINDOW <= len(text):
        at = haystack.find(text[start : start + _WINDOW])
        if at < 0:
            start += 4
            continue
        first, last = start, start + _WINDOW
        while first and at and text[first - 1] == haystack[at - 1]:
            first, at = first - 1, at - 1
        while last < len(text) and text[first : last + 1] == haystack[at : at + last + 1 - first]:
            last += 1
        if last - first >= 12:
            text = f"{text[:first]}…{text[last:]}"
            start = first + 1
        else:
            start += 4
    return text
