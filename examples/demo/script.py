"""What is to be appended: the conversations of a file, repeated under fresh ids, in the order of the appends.

Both processes make it anew from the same file and number of rounds, so it never has to be passed between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Payload = dict[str, Any]
Conversations = Mapping[str, Sequence[Payload]]

APPENDS_PER_SECOND = 400.0
"""The pace of some twenty busy agents. Slower than memlog, so that the run is long enough to be disturbed twice."""

PACED_SECONDS_MAX = 40.0
"""A large file is appended faster, so that the whole demo ends within two minutes."""

ITEMS_MIN = 1000
"""With less than this there is no room for a hundred pending items between one half and the end."""


class ScriptError(Exception):
    """The file cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Script:
    """Conversations by id (`conversations`), how often the file was repeated for them, and the pace in appends/s."""

    conversations: Conversations
    rounds: int
    pace: float

    @property
    def items(self) -> int:
        return sum(len(items) for items in self.conversations.values())

    def turns(self) -> Iterator[tuple[str, int]]:
        """Conversation and position of each append: round after round, and within one round turn by turn."""
        ids = list(self.conversations)
        per_round = len(ids) // self.rounds
        for start in range(0, len(ids), per_round):
            group = ids[start : start + per_round]
            for position in range(max(len(self.conversations[conversation]) for conversation in group)):
                for conversation in group:
                    if position < len(self.conversations[conversation]):
                        yield conversation, position


def plan(source: Sequence[Sequence[Payload]], *, seconds: float) -> Script:
    """A script that takes at least `seconds` at its own pace."""
    items = sum(len(conversation) for conversation in source)
    rounds = math.ceil(max(seconds * APPENDS_PER_SECOND, ITEMS_MIN) / items)
    pace = max(APPENDS_PER_SECOND, rounds * items / max(PACED_SECONDS_MAX, seconds))
    return repeat(source, rounds=rounds, pace=pace)


def repeat(source: Sequence[Sequence[Payload]], *, rounds: int, pace: float) -> Script:
    """The conversations of `source`, `rounds` times, each time under ids that were never used before."""
    conversations = {
        f"demo-{turn:03d}-{index:05d}": items for turn in range(rounds) for index, items in enumerate(source)
    }
    return Script(conversations, rounds, pace)


def read_source(path: Path) -> list[list[Payload]]:
    """The items of each conversation in the file. Raises :class:`ScriptError`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ScriptError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScriptError(f"{path} is not UTF-8 text (byte {error.start})") from error
    source = [_conversation(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    source = [items for items in source if items]
    if not source:
        raise ScriptError(f"{path} holds no conversation with an item")
    return source


def _conversation(line: str, where: str) -> list[Payload]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ScriptError(f"{where}: not JSON: {error}") from error
    items = value.get("items") if isinstance(value, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ScriptError(f'{where}: not of the form {{"conversation": id, "items": [object, ...]}}')
    return items
