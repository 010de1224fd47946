"""Long positions: what is stored is short, and gives the whole position again, also while Kafka gets a new one."""

from __future__ import annotations

import random
from typing import Any, cast

import msgspec
import pytest

from notify.binlog_bridge.binlog.position import MySqlSet, Position
from notify.errors import InvalidRequest
from notify.kafka import positions
from notify.kafka.cluster import Cluster
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


# --- A long position and its base are read from Kafka one after the other, while a bridge may write both ------------

CLUSTER = cast(Cluster, None)
FIRST, SECOND = "a" * 2 * LONG, "b" * 2 * LONG


class Topic:
    """A topic of positions: the last values of its keys. `later`: what a bridge commits after the first look."""

    def __init__(self, values: dict[bytes, bytes], later: dict[bytes, bytes]) -> None:
        self._values, self._later = values, later

    def latest(self, cluster: Any, topic: str, key: bytes, **options: Any) -> bytes | None:
        value = self._values.get(key)
        self._values |= self._later
        return value


def committed(position: str) -> dict[bytes, bytes]:
    """The records that a bridge commits with a position that is its own base."""
    stored = LongPosition.becoming_base(position).stored
    return {
        b"s": msgspec.json.encode(positions.Standing(1, stored)),
        b"s base 0": msgspec.json.encode(positions.BasePart(position, 1)),
    }


def test_a_base_that_is_written_between_two_looks_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "latest", Topic(committed(FIRST), committed(SECOND)).latest)
    assert positions.newest_whole(CLUSTER, "s") == SECOND


def test_a_base_that_is_missing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    only = {b"s": committed(FIRST)[b"s"]}
    monkeypatch.setattr(positions, "latest", Topic(only, {}).latest)
    with pytest.raises(InvalidRequest, match="base that the target does not have"):
        positions.newest_whole(CLUSTER, "s")
