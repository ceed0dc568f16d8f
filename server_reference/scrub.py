"""What a team's memory server does to text: what looks like a secret is not kept, and which texts say the same."""

from __future__ import annotations

import re
import unicodedata
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["REDACTED", "is_indexed", "scrubbed", "without_private_parts", "words"]

REDACTED: Final = "[REDACTED]"

_A: Final = "A-Za-z0-9"

# What is replaced whole, in this order: the special forms before those that would only take a part of them. A name may
# have several parts; it is looked at from its first one only, or a long one would take minutes.
_KEYS: Final = (
    r"(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
    rf"\bsk-(?:ant|proj|svcacct|admin)-[{_A}_-]{{20,}}",
    rf"\b(?:[spr]k_(?:live|test)_[{_A}]{{16,}}|(?i:[sp]k|api[_-]?key)[_-]?[{_A}]{{20,}})",
    rf"\b(?:gh[opsru]_[{_A}]{{36,}}|github_pat_[{_A}_]{{22,}}|glpat-[{_A}_-]{{20,}}|xox[aboprs]-[{_A}-]{{10,}})",
    rf"\b(?:hf_[{_A}]{{30,}}|npm_[{_A}]{{36}}|AIza[{_A}_-]{{35}}|(?:AKIA|ASIA)[A-Z0-9]{{16}}\b)",
    rf"https://hooks\.slack\.com/services/[{_A}/_-]+",
    rf"\b\d{{8,10}}:AA[{_A}_-]{{33}}\b",
    rf"\beyJ[{_A}_-]{{20,}}\.[{_A}_-]{{20,}}(?:\.[{_A}_-]+)?",
    r"(?i:bearer|authorization)\s+\S+",
    rf"\b(?<![{_A}]-)(?=[{_A}][{_A}_-]*+\s*[:=])(?:[{_A}]+[_-])*(?i:secret|password|passwd|pwd)(?:[_-][{_A}]+)*+\s*[:=]\s*\S+",
    r"\b(?i:token|(?:api|access|private)[_-]?key)\s*[:=]\s*\S+",
)
_SECRETS: Final = tuple(re.compile(pattern) for pattern in _KEYS)
_IN_URL: Final = re.compile(r"(\b[a-z][a-z0-9+.-]{0,60}+://)[^\s:/@]+:[^\s/@]+@", re.IGNORECASE)
_MAILBOX: Final = f"{ascii_letters}{digits}._%+-"
_DOMAIN: Final = re.compile(rf"[{_A}.-]+\.[A-Za-z]{{2,}}")
_CARD: Final = re.compile(r"(?<![\w-])\d{4}(?:[ -]?\d{4}){3}(?![\w-])")
_PRIVATE: Final = re.compile(r"<\s*(/?)private\s*>", re.IGNORECASE)
_WORD: Final = re.compile(r"\w+(?:[-./:]\w+)*")
_INDEXED: Final = re.compile(r"[^\W_]+")
_TERMS_MAX: Final = 32


def scrubbed(value: Any) -> Any:
    """The JSON value with :data:`REDACTED` in place of what looks like a secret in its texts."""
    if isinstance(value, dict):
        return {key: scrubbed(member) for key, member in value.items()}
    if isinstance(value, list):
        return [scrubbed(member) for member in value]
    if not isinstance(value, str):
        return value
    text = _IN_URL.sub(rf"\1{REDACTED}@", value)
    for secret in _SECRETS:
        text = secret.sub(REDACTED, text)
    return _CARD.sub(lambda run: REDACTED if _is_card(run[0]) else run[0], _without_addresses(text))


def without_private_parts(text: str) -> tuple[str, int]:
    """The text without what stands between ``<private>`` and ``</private>``, and how many such parts it had.

    They may stand in each other, and the last one need not be closed.
    """
    kept: list[str] = []
    parts = level = end = 0
    for tag in _PRIVATE.finditer(text):
        if level == 0:
            kept.append(text[end : tag.start()])
            parts += not tag[1]
        level = max(0, level + (-1 if tag[1] else 1))
        end = tag.end()
    return "".join(kept if level else [*kept, text[end:]]), parts


def words(text: str) -> list[str]:
    """What two texts are compared by: their words, without regard to case, spacing and punctuation between them."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold().replace("ё", "е"))  # noqa: RUF001 - Russian


def is_indexed(said: Sequence[str], text: str) -> bool:
    """Whether an index of plain words would find the text by its :func:`words`, as it must to be compared at all.

    It is asked for the long ones, and for none with the letter that has two forms. So a text which has no others is
    found by nothing, like one whose letters are written in a form (wide, joined) that the index keeps and words do not.
    """
    certain = [word for word in said if "е" not in word]  # noqa: RUF001 - Russian
    terms = list(dict.fromkeys([word for word in certain if len(word) > 2] or certain))[:_TERMS_MAX]
    index = _as_indexed(text)
    return bool(terms) and all(_as_indexed(term) in index for term in terms)


def _as_indexed(text: str) -> str:
    plain = "".join(char for char in unicodedata.normalize("NFD", text) if not "\u0300" <= char <= "\u0331")
    folded = "".join(low if len(low := char.casefold()) == 1 else char.lower() for char in plain)
    return f" {' '.join(_INDEXED.findall(folded))} "


def _without_addresses(text: str) -> str:
    """The text without addresses of mail. They are looked for from their ``@``: from the left it would take minutes."""
    kept: list[str] = []
    end = done = 0
    for at in re.finditer("@", text):
        before = text[max(done, end) : at.start()]
        start = max(done, end) + len(before.rstrip(_MAILBOX))
        end = at.end()
        if at.start() < done or start == at.start() or (domain := _DOMAIN.match(text, end)) is None:
            continue
        kept += [text[done:start], REDACTED]
        done = domain.end()
    return "".join([*kept, text[done:]])


def _is_card(run: str) -> bool:
    numbers = [int(digit) for digit in run if digit.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in numbers[-2::-2]]
    return (sum(doubled) + sum(numbers[-1::-2])) % 10 == 0
