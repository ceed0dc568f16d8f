"""Conversation memory that survives: append at once, stored in milliseconds, replayed after any failure.

    async with memlog.open_log(URL, auth=("site", "secret"), buffer_dir="./memory") as log:
        chat = log.conversation("c_7f3a9b2e41")
        receipt = chat.append({"role": "user", "text": "hello"})
        async for item in chat.replay():
            ...

All errors are in :mod:`memlog.errors`, the blocking face in :mod:`memlog.sync`.
"""

from __future__ import annotations

from memlog.buffer import BufferLimits
from memlog.client import Client
from memlog.errors import (
    BufferFullError,
    MemlogError,
    MemoryUnavailableError,
    PermanentError,
    TransientError,
)
from memlog.log import Conversation, MemoryLog, Receipt, open_log
from memlog.models import Ack, HistoryEvent, Item, Record, Scope
from memlog.payload import new_conversation_id
from memlog.replay import Replay
from memlog.report import DeadLetter, Duplicate, FlushReport, Statistics
from memlog.retry import RetryPolicy
from memlog.team import TeamClient

__all__ = [
    "Ack",
    "BufferFullError",
    "BufferLimits",
    "Client",
    "Conversation",
    "DeadLetter",
    "Duplicate",
    "FlushReport",
    "HistoryEvent",
    "Item",
    "MemlogError",
    "MemoryLog",
    "MemoryUnavailableError",
    "PermanentError",
    "Receipt",
    "Record",
    "Replay",
    "RetryPolicy",
    "Scope",
    "Statistics",
    "TeamClient",
    "TransientError",
    "new_conversation_id",
    "open_log",
]
