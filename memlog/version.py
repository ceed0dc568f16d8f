"""The version, said once: the distribution and the protocol's handshake read it here."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
