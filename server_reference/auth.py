"""Who is calling: a site by its Basic credentials, or the holder of a Bearer token; and how often a site may call."""

from __future__ import annotations

import base64
import binascii
import hmac
import math
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["Authenticator", "Identity", "RateLimit"]


@dataclass(frozen=True, slots=True)
class Identity:
    """``site`` for Basic credentials, ``user`` for a team token, neither for a read-only token."""

    site: str | None = None
    user: str | None = None


class Authenticator:
    """Knows all credentials, and compares a given one with every one of them, so that time tells nothing.

    With `no_auth`, who gives no credentials at all is taken for the first site; wrong ones stay wrong.
    """

    def __init__(
        self,
        sites: Mapping[str, str],
        read_tokens: Collection[str] = (),
        team_tokens: Mapping[str, str] | None = None,
        *,
        no_auth: bool = False,
    ) -> None:
        # Hashes are compared: they are of one length, and a log of locals shows no secret.
        self._known: list[tuple[bytes, Identity]] = []
        for name, password in sites.items():
            if not name or ":" in name:
                raise ValueError("a site needs a name, without a colon")
            self._known.append((_digest("basic", f"{name}:{password}".encode()), Identity(site=name)))
        for token in read_tokens:
            self._known.append((_digest("bearer", _token(token)), Identity()))
        for token, user in (team_tokens or {}).items():
            self._known.append((_digest("bearer", _token(token)), Identity(user=user)))
        if no_auth and not sites:
            raise ValueError("without credentials somebody must be a site, and there is none")
        self._anybody = Identity(site=next(iter(sites))) if no_auth else None

    def identify(self, authorization: str | None) -> Identity | None:
        """None where the header is missing, malformed or wrong; the caller answers all three alike."""
        if authorization is None and self._anybody is not None:
            return self._anybody
        scheme, _, credential = (authorization or "").partition(" ")
        scheme = scheme.lower()
        given = credential.strip().encode("utf-8", "surrogateescape")
        if scheme == "basic":
            try:
                given = base64.b64decode(given, validate=True)
            except (binascii.Error, ValueError):
                return None
        digest = _digest(scheme, given)
        found: Identity | None = None
        for known, identity in self._known:
            if hmac.compare_digest(known, digest):
                found = identity
        return found


class RateLimit:
    """At most `rate` calls a second for each key, in bursts of at most one second's worth (and at least one call)."""

    def __init__(self, rate: float | None, clock: Callable[[], float]) -> None:
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"rate must be above 0, not {rate}")
        self._rate = rate
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def retry_after(self, key: str) -> int | None:
        """None if this call may go on, and is counted; else the whole seconds to wait."""
        if self._rate is None:
            return None
        now = self._clock()
        burst = max(1.0, self._rate)
        tokens, then = self._buckets.get(key, (burst, now))
        tokens = min(burst, tokens + (now - then) * self._rate)
        allowed = tokens >= 1.0
        self._buckets[key] = (tokens - 1.0 if allowed else tokens, now)
        return None if allowed else max(1, math.ceil((1.0 - tokens) / self._rate))


def _digest(scheme: str, credential: bytes) -> bytes:
    return sha256(scheme.encode() + b" " + credential).digest()


def _token(token: str) -> bytes:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token must be visible ASCII characters")
    return token.encode()
