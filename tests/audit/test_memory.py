"""The process of an audit holds a stated number of bytes of each of a log's segments, whatever the segments tell."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from notify.spark.checks.searches import corrupt, gaps
from notify.spark.inputs import log_input
from notify.spark.inputs.damage import MOST_BROKEN, Broken, Damages
from notify.spark.inputs.facts import Facts, Hole, Scanned, Sent
from notify.spark.inputs.log_files import SegmentFile
from notify.spark.inputs.log_input import LogInput
from notify.spark.inputs.ranges import Span
from notify.storage.bridged import BridgeState
from notify.storage.log import meta
from notify.storage.log.format import segment_header
from notify.storage.log.segments import segment_name

SEGMENTS = 300
SIZE = 1 << 20
HELD_BYTES = 2048
"""docs/audit-spark.md says that a segment takes 2 KB of the driver."""
T0 = 1_800_000_000_000_000
MANY = 60
"""So many consumer groups, producer groups and records of bridges each segment tells of."""


def told_by(number: int) -> Scanned:
    """The facts of a segment that tells much: the same names as the others, and its own numbers."""
    base, at_us = number * SIZE, T0 + number * 60_000_000
    facts = Scanned(base, base + SIZE, base + SIZE - 64, at_us, at_us + 59_000_000, at_us, 10 + number, 900, 1800)
    facts.consumer_groups = [f"group-{n}" for n in range(MANY)] + [f"group-1@instance-{n}" for n in range(MANY)]
    facts.masked = tuple(facts.consumer_groups[: MANY - number % 3])
    facts.sent = [Sent(f"source-{n % 3}", n, at_us, at_us + n, 15) for n in range(MANY)]
    for n in range(MANY):
        step = number * MANY + n
        moved = BridgeState(source=f"bridge-{n % 2}", epoch=1, position=str(step), since=str(step - 2))
        plain = meta.plain(msgspec.msgpack.encode(meta.BridgeMoved(moved)))
        facts.meta.append([base + 100 * n, at_us + n, plain])
    facts.crc = 3_000_000_000 + number
    return facts


class Told:
    """Copies of segments that nobody reads: their facts are made when they are asked for."""

    def __init__(self, told: Callable[[int], Scanned]) -> None:
        """`told`: the facts of a segment, by its number."""
        self._told = told

    def has(self, segment: SegmentFile) -> bool:
        return True

    def facts_of(self, segment: SegmentFile) -> Scanned:
        return self._told(segment.base // SIZE)

    def longest_unread(self, copied: Any, most_bytes: int) -> list[SegmentFile]:
        return []

    def keep(self, wanted: set[str]) -> None:
        pass

    def release(self) -> None:
        pass


def log_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch, segments: int, told: Callable[[int], Scanned] = told_by
) -> LogInput:
    """A log whose copies tell these facts."""
    for number in range(segments):
        (directory / segment_name(number * SIZE)).write_bytes(segment_header(number * SIZE, T0 + number))
    monkeypatch.setattr(log_input, "copies_in", lambda scratch, name: Told(told))
    log = LogInput(directory)
    log.prepare(None, directory)
    return log


@pytest.mark.long
def test_a_segment_takes_two_kilobytes_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    for segments in (3, SEGMENTS):  # the first time is for what modules keep
        tracemalloc.start()
        log = log_of(tmp_path, monkeypatch, segments)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert len(log.facts) == SEGMENTS and len(log.groups()) == 2 * MANY
    assert held[-1] / SEGMENTS < HELD_BYTES, f"{held[-1] / SEGMENTS:.0f} bytes for each segment"
    assert sum(map(len, log.sent().values())) == 3, "numbers of groups that have no name are one group of a source"
    assert len(log.catalog.bridges) == 4 and not list(gaps("log", log.catalog.bridges))
    assert isinstance(log.facts[0], Facts) and not isinstance(log.facts[0], Scanned)


def test_a_part_of_a_segment_counts_as_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that begins in a large segment is no large range."""
    log = log_of(tmp_path, monkeypatch, 4)
    last = log.facts[-1]
    assert log.count_from(None) == 4 * last.messages
    assert log.count_from(Span(last.first_us, 1 << 60)) == last.messages
    middle = (last.first_us + last.last_us) // 2
    assert log.count_from(Span(middle, 1 << 60)) == last.messages // 2
    assert log.count_from(Span(last.last_us + 1, 1 << 60)) == 0


def test_damage_beyond_a_bound_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damages, facts = Damages(), Scanned(0, SIZE, last_us=7)
    for n in range(MOST_BROKEN + 5):
        damages.add(Broken(n, n + 1, "a byte is wrong", time_us=n))
        damages.add_hole(Hole(n, n + 1, n, n + 1))
    damages.tell(facts)
    assert (len(facts.broken), facts.broken_left, len(facts.holes)) == (MOST_BROKEN, 5, MOST_BROKEN)
    last = facts.holes[-1]
    assert (last.start, last.end, last.from_us, last.to_us) == (
        MOST_BROKEN - 1, MOST_BROKEN + 5, MOST_BROKEN - 1, MOST_BROKEN + 5,
    )  # fmt: skip

    monkeypatch.setattr("notify.spark.inputs.segments.MOST_BROKEN", MOST_BROKEN + 10)
    log = log_of(
        tmp_path, monkeypatch, 2, lambda number: dataclasses.replace(facts, base=number * SIZE, last_us=7 + number)
    )
    assert len(list(log.broken())) == MOST_BROKEN + 10
    cases, count = corrupt(log, lambda at_us: True)
    assert (len(cases), count) == (MOST_BROKEN + 10, 2 * (MOST_BROKEN + 5))
    assert corrupt(log, lambda at_us: at_us == 7)[1] == 2 + 5, "what is counted has the segment's time"
