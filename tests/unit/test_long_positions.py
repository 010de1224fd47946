"""Long positions: what is stored is short, and gives the whole position again."""

from __future__ import annotations

import random

import pytest

from notify.binlog_bridge.binlog.position import MySqlSet, Position
from notify.errors import InvalidRequest
from notify.movers.long_positions import LONG, MOST_CHANGED, LongPosition, refers_to_base
from notify.protocol.limits import BASE_CHARACTERS, POSITION_CHARACTERS
from tests.support.binlog import megabyte


def stored_again(at: LongPosition, base: str) -> str:
    """The whole position as the next bridge reads it."""
    return LongPosition(at.stored, base).whole


def test_a_short_position_is_stored_as_it_is() -> None:
    at = LongPosition()
    for position in ("", "0-1-42", '["half_message", []]', "x" * LONG):
        moved = at.moved(position)
        assert moved is not None and moved.stored == moved.whole == position == LongPosition(position).whole
        at = moved


@pytest.mark.long
def test_a_long_position_is_stored_as_what_differs() -> None:
    text = megabyte()
    gtids = MySqlSet.parse(text)
    base = Position(text, "binlog.000001", 4).text
    assert LongPosition().moved(base) is None
    at = LongPosition.becoming_base(base)
    assert len(at.stored) < 100 and stored_again(at, base) == base
    chance = random.Random(7)
    servers = [part[:36] for part in text.split(",")]
    for n in range(200):
        gtids.add(chance.choice(servers[:3]), 200_000 + n)
        position = Position(str(gtids), "binlog.000001", 1000 + n, newest_us=n).text
        moved = at.moved(position)
        assert moved is not None and len(moved.stored) < 5000 and refers_to_base(moved.stored)
        assert moved.whole == position == stored_again(moved, base)
        assert moved.moved(position) is moved
        at = moved
    back = at.moved("0-1-42")
    assert back is not None and back.stored == "0-1-42"


def test_a_very_different_position_becomes_the_base() -> None:
    base = ",".join(str(n) * 100 for n in range(100))
    at = LongPosition.becoming_base(base)
    assert at.moved(base + ",more") is None
    assert at.moved(base.replace("7", "8" * (MOST_CHANGED // 100))) is None
    with pytest.raises(InvalidRequest, match="too many gaps"):
        LongPosition.becoming_base("x" * (BASE_CHARACTERS + 1))
    assert 2 * MOST_CHANGED < POSITION_CHARACTERS


def test_another_base_is_noticed() -> None:
    base = ",".join(str(n) * 100 for n in range(100))
    moved = LongPosition.becoming_base(base).moved(base.replace("99", "77"))
    assert moved is not None
    for other in ("", base + "x"):
        with pytest.raises(InvalidRequest, match="does not have"):
            LongPosition(moved.stored, other)
