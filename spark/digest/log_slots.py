"""The slots of logs, gathered from the rows of their digests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from notify.spark.digest.logs import LATE, ODD, OPEN, PENDING, ROLLED, WAITING
from notify.spark.inputs.columns import name_hash
from notify.spark.inputs.log_input import LogInput
from notify.spark.judge import message_rows
from notify.spark.judge.deadlines import InTime
from notify.spark.judge.message_rows import Groups

COMPLETE, OPENED, COMPLETING = range(3)
"""Kinds of committed messages: complete in one segment; a half, or a delayed message, which another segment must
complete; and those in a queue without their half, which may be its completion."""


@dataclass
class Sums:
    """Messages, counted and combined."""

    count: int = 0
    hash: int = 0
    body_hash: int = 0
    digests: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        self.count += row["count"]
        self.hash ^= row["hash"]
        self.body_hash ^= row["body_hash"] or 0
        self.digests += row["digests"]


@dataclass
class LogSlot:
    """One slot of all logs."""

    commits: dict[tuple[str, str], dict[tuple[int, int | None], Sums]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Sums))
    )
    """By producer group and topic, then by COMPLETE, OPENED or COMPLETING and the origin (see
    spark.judge.message_rows)."""
    rolled: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """First messages that were rolled back, by producer group: how many, and combined."""
    rolled_topics: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same messages by producer group and topic."""
    acked: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Acknowledged messages by consumer group: how many, and combined."""
    topics: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Figures of each topic, as spark.measures counts them."""
    in_time: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Messages that were delivered in time, by producer group and topic, as spark.judge.deadlines counts them."""
    to_ack: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The messages by topic, and by bucket of the time from their queue to the last acknowledgement."""
    is_odd: bool = False
    """Whether a row is none of a plain life, or a group has not settled a message."""
    low_us: int = 1 << 62
    high_us: int = 0
    first_acked_us: int = 1 << 62
    """The earliest of the messages' last acknowledgements."""
    logs: set[int] = field(default_factory=set)


class LogSlots:
    """Gathers the rows of several logs."""

    def __init__(self, groups: Groups, origins: Mapping[str, int | None], in_time: InTime) -> None:
        """`origins`: the number of each database by its source id, or None: see Proof.of_sources."""
        self.slots: dict[int, LogSlot] = defaultdict(LogSlot)
        self._groups = groups
        self._origins = {name_hash(source): number for source, number in origins.items()}
        self._blocks = range(groups.blocks)
        inboxes = in_time.with_inbox & set(groups.names)
        self._inboxes = [groups.mask(sorted(inboxes), b) for b in self._blocks]
        self._effective = inboxes - in_time.with_filter
        self._inbox_from_us = in_time.inbox_from_us

    def add(self, number: int, log: LogInput, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of a log; `number`: the log's among the inputs."""
        catalog, wanted = log.catalog, log.wanted()
        letters = {n for n, name in catalog.topics.items() if catalog.kind_of(name) == "dead_letter"}
        for row in rows:
            if row["topic"] in letters:
                continue
            slot = self.slots[int.from_bytes(row["slot"])]
            slot.logs.add(number)
            topic = catalog.topics.get(row["topic"], "")
            group = catalog.producer_groups.get(row["producer_group"], "")
            if row["form"] == ODD or (row["producer_group"] and not group) or not topic:
                slot.is_odd = True
            readers = wanted.get((row["topic"], row["queue"]), ())
            if row["places"] and self._missing("settled", row, [name for name, _ in self._expected(row, readers)]):
                slot.is_odd = True
            if row["places"] and self._missing("settled", row, self._left(log, row)):
                slot.is_odd = True
            slot.low_us = min(slot.low_us, row["low_us"] if row["low_us"] is not None else slot.low_us)
            slot.high_us = max(slot.high_us, row["high_us"] or 0)
            slot.first_acked_us = min(slot.first_acked_us, row["first_acked_us"] or slot.first_acked_us)
            self._take(slot, row, group, topic)
            self._count(slot.in_time[group, topic], row, group, readers)

    def _expected(self, row: Mapping[str, Any], readers: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """The readers that should get at least one of these messages; `readers`: groups and their first offsets."""
        return ((name, start) for name, start in readers if row["places"] and start <= row["high_offset"])

    def _left(self, log: LogInput, row: Mapping[str, Any]) -> set[str]:
        """The groups whose queue at least one of these messages may have left."""
        return {
            left.group
            for left in log.left.get((row["topic"], row["queue"]), ())
            if left.first <= row["high_offset"] and row["low_offset"] < left.end
        }

    def _missing(self, mask: str, row: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether one of these groups is not in a mask."""
        masks = [row[f"{mask}{b}"] for b in self._blocks]
        return not all(any(masks[b] & self._groups.bit(name, b) for b in self._blocks) for name in names)

    def _count(
        self, figures: Counter[str], row: Mapping[str, Any], group: str, readers: Iterable[tuple[str, int]]
    ) -> None:
        """Count messages delivered in time, of transactions only, because the others have no local row."""
        if not group or row["form"] in (OPEN, PENDING):
            return
        figures["due"] += row["due"]
        figures["delivered"] += row["delivered"]
        effective = [name for name, _ in self._expected(row, readers) if name in self._effective]
        is_known = row["high_us"] is None or row["high_us"] >= self._inbox_from_us
        if not is_known or not self._missing("acked", row, effective):
            figures["effective"] += row["delivered"]

    def _take(self, slot: LogSlot, row: Mapping[str, Any], group: str, topic: str) -> None:
        form, count = row["form"], row["count"]
        figures = slot.topics[topic]
        if form == ROLLED:
            rolled = slot.rolled[group]
            rolled[0] += row["first_count"]
            rolled[1] ^= row["first_hash"] or 0
            slot.rolled_topics[group, topic] += row["first_count"]
        else:
            kind = OPENED if form in (OPEN, PENDING) else COMPLETING if form == LATE else COMPLETE
            slot.commits[group, topic][kind, self._origin(row["source"])].add(row)
        if form not in (OPEN, PENDING):
            figures["messages"] += count
        if form == WAITING and group:
            figures["waiting"] += count
        figures["in_queues"] += row["places"]
        figures["acknowledged"] += row["acknowledged"]
        figures["halves"] += row["halves"]
        figures["REDELIVERED"] += row["again"]
        masks = [row[f"acked{b}"] for b in self._blocks]
        if any(mask & inbox for mask, inbox in zip(masks, self._inboxes, strict=True)):
            figures["effects"] += count
        if any(masks):
            for name in self._groups.of(masks):
                acked = slot.acked[name]
                acked[0] += count
                acked[1] ^= row["hash"]
        if row["bucket"] is not None:
            slot.to_ack[topic, row["bucket"]] += count

    def _origin(self, source: int | None) -> int | None:
        return None if source is None else self._origins.get(source, message_rows.ABROAD)
