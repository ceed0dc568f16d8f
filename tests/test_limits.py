"""The contract's numbers, and each of them at its very border."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from memlog import limits, payload
from memlog.errors import TooLargeError

ITEM = 262_144
BATCH = 1_048_576


def item_of(size: int, character: str = "x") -> dict[str, Any]:
    """An item of exactly this many bytes."""
    frame = len(b'{"t":""}')
    width = len(character.encode())
    count, rest = divmod(size - frame, width)
    item = {"t": character * count + "x" * rest}
    assert len(payload.encode(item) if size <= ITEM else payload.dumps(item)) == size
    return item


@pytest.mark.contract("C1", "C2", "C8", "C11", "C12")
def test_the_numbers_are_those_of_the_contract() -> None:
    """Written down twice on purpose: a slip of the finger in one place is found by the other."""
    assert limits.ITEMS_PER_BATCH_MAX == 250
    assert limits.ITEM_BYTES_MAX == ITEM
    assert limits.BATCH_BYTES_MAX == BATCH
    assert limits.CONVERSATION_ITEMS_MAX == 100_000
    assert limits.PAGE_ITEMS_MAX == 1000
    assert limits.HISTORY_EVENTS_MAX == 50
    assert limits.RETRY_AFTER_MAX == 3600
    assert limits.CONVERSATION_ID_PATTERN == "[A-Za-z0-9_-]{8,64}"
    assert (limits.NESTING_MAX, limits.INT_DIGITS_MAX) == (128, 4300)


def test_the_limits_know_nothing_of_the_rest() -> None:
    """The lowest floor imports nothing of the package, and every number carries its source."""
    tree = ast.parse(Path(limits.__file__).read_text(encoding="utf-8"))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == ["__future__", "typing"]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    for number, source in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(number, ast.AnnAssign):
            assert isinstance(source, ast.Expr), ast.unparse(number)


@pytest.mark.contract("C2")
@pytest.mark.parametrize("character", ["x", "漢", "😀", "é"])
def test_an_item_of_256_kib_is_accepted_and_one_byte_more_is_not(character: str) -> None:
    """C2: equal is allowed, measured in UTF-8 bytes."""
    assert len(payload.encode(item_of(ITEM, character))) == ITEM
    with pytest.raises(TooLargeError) as caught:
        payload.encode(item_of(ITEM + 1, character))
    error = caught.value
    assert (error.what, error.size, error.limit, error.outcome) == ("item", ITEM + 1, ITEM, "not_sent")


@pytest.mark.contract("C2")
@pytest.mark.parametrize("encode", [payload.encode_batch, payload.encode_batches])
def test_an_item_above_the_limit_is_refused_in_a_batch_as_well(encode: Any) -> None:
    """C2: the limit of an item holds wherever it comes from."""
    with pytest.raises(TooLargeError) as caught:
        encode([{}, item_of(ITEM + 1)])
    assert (caught.value.what, caught.value.size) == ("item", ITEM + 1)


@pytest.mark.contract("C2")
def test_a_batch_of_1_mib_is_accepted_and_one_byte_more_is_not() -> None:
    """C2: the sum of the items, their separators not counted."""
    items = [item_of(ITEM)] * 4
    batch = payload.encode_batch(items)
    assert (batch.size, len(batch.body)) == (BATCH, BATCH + 3)
    with pytest.raises(TooLargeError) as caught:
        payload.encode_batch([*items[:3], item_of(ITEM - 9), item_of(10)])
    error = caught.value
    assert (error.what, error.size, error.limit, error.outcome) == ("batch", BATCH + 1, BATCH, "not_sent")


@pytest.mark.contract("C2")
@pytest.mark.parametrize("count", [0, 251, 1000])
def test_a_batch_of_another_count_than_1_to_250_is_refused(count: int) -> None:
    """C2: between 1 and 250 items."""
    with pytest.raises(TooLargeError) as caught:
        payload.encode_batch([{}] * count)
    error = caught.value
    assert (error.what, error.size, error.limit, error.outcome) == ("count", count, 250, "not_sent")


@pytest.mark.contract("C2")
@pytest.mark.parametrize("count", [1, 250])
def test_a_batch_of_1_or_250_items_is_accepted(count: int) -> None:
    """C2: both borders belong to it."""
    assert payload.encode_batch([{}] * count).items == count


@pytest.mark.contract("C2")
def test_cutting_at_the_border_wastes_nothing() -> None:
    """Four full items fill a batch exactly; 500 items fill two; nothing at all is refused like an empty batch."""
    assert [batch.size for batch in payload.encode_batches([item_of(ITEM)] * 5)] == [BATCH, ITEM]
    assert [batch.items for batch in payload.encode_batches([{}] * 501)] == [250, 250, 1]
    with pytest.raises(TooLargeError) as caught:
        payload.encode_batches([])
    assert (caught.value.what, caught.value.size) == ("count", 0)
