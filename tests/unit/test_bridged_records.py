"""Records of bridges that are left out of a segment's facts: the gaps that an audit finds stay the same."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from notify.spark.checks.searches import gaps
from notify.spark.inputs.catalog import Bridged, Catalog, learn
from notify.spark.inputs.scan import thinned
from notify.storage.bridged import BridgeState
from notify.storage.log import meta


def record(at: int, source: str, position: int, since: int | None, epoch: int = 1) -> list[Any]:
    text = None if since is None else str(since)
    state = BridgeState(source=source, epoch=epoch, position=str(position), since=text)
    return [at, at * 1000, meta.plain(msgspec.msgpack.encode(meta.BridgeMoved(state)))]


def learned(segments: list[list[list[Any]]]) -> Catalog:
    catalog = Catalog()
    for records in segments:
        for at, time_us, plain in records:
            learn(catalog, at, time_us, meta.of_plain(plain), set())
    return catalog


def found(bridges: list[Bridged]) -> list[tuple[Any, ...]]:
    return [(case.detail, case.at_us, case.evidence) for case in gaps("log", bridges)]


def all_of(records: list[list[Any]]) -> list[Bridged]:
    """Every record, as it was written."""
    each = [(at, time_us, plain[1]) for at, time_us, plain in records]
    return [
        Bridged(at, us, b["source"], b.get("epoch", 0), b["position"], b.get("since"), b.get("rows", 0))
        for at, us, b in each
    ]


def test_an_audit_holds_two_records_of_a_bridge_that_goes_on() -> None:
    segments = [[record(n, "shop", n + 1, n) for n in range(first, first + 10)] for first in range(0, 500, 10)]
    bridges = learned([thinned(records) for records in segments]).bridges
    assert [(b.at, b.since, b.time_us) for b in bridges] == [(0, "0", 0), (499, "1", 499_000)]


def test_a_bridge_that_goes_on_is_two_records_of_a_segment() -> None:
    records = [record(n, "shop", n + 1, n) for n in range(100)]
    assert [(each[0], each[2][1]["since"]) for each in thinned(records)] == [(0, "0"), (99, "1")]
    assert thinned(records[:2]) == records[:2] and thinned([]) == []


@pytest.mark.long
def test_gaps_are_the_same_in_what_is_left() -> None:
    rng = random.Random(3)
    total = 0
    for _ in range(200):
        positions, epochs, records = {"a": 0, "b": 0}, {"a": 1, "b": 1}, []
        for at in range(60):
            source = rng.choice("ab")
            since: int | None = positions[source]
            if rng.random() < 0.06:
                since = rng.choice([None, 777, 0])
            if rng.random() < 0.05:
                epochs[source] += rng.choice([-1, 1, 1])
            positions[source] += rng.randint(1, 3)
            records.append(record(at, source, positions[source], since, epochs[source]))
        cut = rng.randint(0, 60)
        whole = found(all_of(records))
        assert found(learned([records]).bridges) == whole
        assert found(learned([thinned(records[:cut]), thinned(records[cut:])]).bridges) == whole
        total += len(whole)
    assert total > 200
