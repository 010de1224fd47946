"""DISORDER of a key that has most of the messages: spread over tasks, it is what one task finds."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from notify.spark.checks import searches
from notify.spark.small_table import small_table

KINDS = dict.fromkeys(("group", "topic", "queue", "key_hash", "epoch", "seq", "offset"), pa.int64())


@pytest.mark.long
def test_a_hot_key_is_judged_part_by_part(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    rows: list[tuple[int, ...]] = []
    expected: set[tuple[int, int, int]] = set()
    for key, count in ((1, 300), (2, 20), (3, 1)):
        offsets = list(range(count))
        for _ in range(count // 20):
            a, b = rng.sample(range(count), 2)
            offsets[a], offsets[b] = offsets[b], offsets[a]
        highest = -1
        for n, offset in enumerate(offsets):
            rows.append((1, 1, 0, key, 0, n * 10, offset))
            if highest > offset:
                expected.add((key, offset, highest))
            highest = max(highest, offset)
    rng.shuffle(rows)
    settled = small_table(spark, KINDS, rows)

    def late() -> set[tuple[int, int, int]]:
        found = searches.settled_late(settled, len(rows)).collect()
        return {(row["key_hash"], row["offset"], row["highest"]) for row in found}

    assert late() == expected and len(expected) > 20
    monkeypatch.setattr(searches, "HOT_ROWS", 50)
    monkeypatch.setattr(searches, "PART_BYTES", 100)
    assert late() == expected
