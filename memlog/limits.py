"""The contract's numbers, each with the sentence it comes from. Knows nothing else."""

from __future__ import annotations

from typing import Final

CONVERSATION_ID_PATTERN: Final = r"[A-Za-z0-9_-]{8,64}"
"""append_memory: "8-64 characters from [A-Za-z0-9_-]"."""

ITEMS_PER_BATCH_MAX: Final = 250
"""append_memory: "The array must contain between 1 and 250 items"."""

ITEM_BYTES_MAX: Final = 256 * 1024
"""append_memory: "Each item's serialized JSON payload must not exceed 256 KiB". Equal is allowed."""

BATCH_BYTES_MAX: Final = 1024 * 1024
"""append_memory: "The sum of all items' serialized JSON payloads in one batch must not exceed 1 MiB"."""

CONVERSATION_ITEMS_MAX: Final = 100_000
"""append_memory: "The total number of items in a conversation cannot exceed 100,000"."""

PAGE_ITEMS_MAX: Final = 1000
"""replay_memory: "limit … Max 1000". 0 is legal on the wire, but a page of 0 can never be short: never asked for."""

HISTORY_EVENTS_MAX: Final = 50
"""memory_history: "limit … min 1, max 50"."""

EXPORT_RECORDS_MAX: Final = 50
"""memory_export, from the team server: records in one page."""

NESTING_MAX: Final = 128
"""Ours: levels of objects and arrays in one item. Common JSON readers give up between 200 and 1,000 levels, and the
protocol's envelope needs a few of its own."""

INT_DIGITS_MAX: Final = 4300
"""Ours: Python refuses to read a longer decimal integer (``sys.set_int_max_str_digits``)."""

RETRY_AFTER_MAX: Final = 3600.0
"""Ours, seconds: the longest wait a Retry-After may impose before the server is asked again."""
