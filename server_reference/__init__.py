"""A small, exact server of the conversation memory tools, to develop and to test against.

It keeps to the letter of the contract at every limit, and misbehaves only on demand (see :mod:`.faults`). It shares no
code with the client it is used to test, so that a wrong number on one side is caught by the other.

    python -m server_reference --db memory.sqlite3

or, inside a program, :func:`create_app`, a Starlette application.
"""

from __future__ import annotations

from .app import create_app
from .faults import Fault, Faults

__all__ = ["Fault", "Faults", "create_app"]
