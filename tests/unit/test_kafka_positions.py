"""A long position and its base are read from Kafka one after the other, while a bridge may write both."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from notify.errors import InvalidRequest
from notify.kafka import positions
from notify.kafka.cluster import Cluster
from notify.movers.long_positions import LONG, LongPosition

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
