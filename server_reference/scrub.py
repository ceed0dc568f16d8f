"""What a team's memory server does to text: what looks like a secret is not kept, and how two texts are compared."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

__all__ = ["REDACTED", "scrubbed", "without_private_parts", "words"]

REDACTED: Final = "[REDACTED]"

# What is replaced whole, in this order: the special forms before those that would only take a part of them.
_SECRETS: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
        r"\b(?:sk|pk|rk|api[_-]?key)[_-](?:[a-z]+[_-])?\w{20,}",
        r"\b(?:gh[opsru]_|github_pat_|glpat-|xox[a-z]-|hf_|npm_)[\w-]{20,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\beyJ[\w-]{20,}(?:\.[\w-]+){1,2}",
        r"\b(?:bearer|authorization)\s+\S+",
        r"\b[\w-]*(?:password|passwd|pwd|secret)[\w-]*\s*[:=]\s*\S+",
        r"\b(?:token|(?:api|access|private)[_-]?key)\s*[:=]\s*\S+",
        r"[\w.%+-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)*\.[a-z]{2,}",
    )
)
_IN_URL: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s:/@]+:[^\s/@]+@", re.IGNORECASE)
_CARD: Final = re.compile(r"(?<![\w-])\d{4}(?:[ -]?\d{4}){3}(?![\w-])")
_PRIVATE: Final = re.compile(r"<private>.*?</private>", re.IGNORECASE | re.DOTALL)
_WORD: Final = re.compile(r"\w+(?:[-./:]\w+)*")


def scrubbed(value: Any) -> Any:
    """The JSON value with :data:`REDACTED` in place of what looks like a secret in its texts, and texts in NFC."""
    if isinstance(value, dict):
        return {key: scrubbed(member) for key, member in value.items()}
    if isinstance(value, list):
        return [scrubbed(member) for member in value]
    if not isinstance(value, str):
        return value
    text = _IN_URL.sub(rf"\1{REDACTED}@", unicodedata.normalize("NFC", value))
    for secret in _SECRETS:
        text = secret.sub(REDACTED, text)
    return _CARD.sub(lambda run: REDACTED if _is_card(run[0]) else run[0], text)


def without_private_parts(text: str) -> tuple[str, int]:
    """The text without what stands between ``<private>`` and ``</private>``, and how many such parts it had."""
    return _PRIVATE.subn("", text)


def words(text: str) -> list[str]:
    """What two texts are compared by: their words, without regard to case, spacing and punctuation between them."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold().replace("ё", "е"))  # noqa: RUF001 - Russian


def _is_card(run: str) -> bool:
    digits = [int(digit) for digit in run if digit.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(doubled) + sum(digits[-1::-2])) % 10 == 0
