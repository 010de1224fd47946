"""Compares the digests of tables and logs, slot by slot.

A slot is equal if its rows can only be those of messages of which every input says the same, so that an audit of them
has no finding but REDELIVERED; anything else is unequal, and the audit reads its messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from notify.spark.digest import hashes
from notify.spark.digest.log_slots import COMPLETING, OPENED, LogSlot, Sums
from notify.spark.digest.slots import SLOT_US
from notify.spark.digest.tables import LocalSlot, TableSlots, topic_text
from notify.spark.inputs.ranges import EPOCH_US
from notify.spark.judge.coverage import Coverage
from notify.spark.judge.deadlines import COUNTED
from notify.spark.judge.message_rows import ABROAD

_NO_LOG = LogSlot()


@dataclass
class Equal:
    """One equal slot, and the times of its messages."""

    slot: int
    low_us: int
    high_us: int
    topics: dict[str, Counter[str]]
    """Figures of each topic, as spark.measures counts them."""
    to_ack: Mapping[tuple[str, int], int]
    """See LogSlot."""
    acked: list[str]
    """The groups that acknowledged messages."""


@dataclass
class Compared:
    """The slots of the audited range."""

    equal: list[Equal] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)


class Comparison:
    """Compares the slots of some databases, in order, and of all logs together."""

    def __init__(
        self,
        tables: Sequence[TableSlots],
        logs: Mapping[int, LogSlot],
        coverage: Coverage,
        inbox_groups: frozenset[str],
        covered_groups: frozenset[str],
    ) -> None:
        """`inbox_groups`: consumer groups with an inbox. `covered_groups`: producer groups with local rows."""
        self._tables = tables
        self._logs = logs
        self._coverage = coverage
        self._inbox_groups = inbox_groups
        self._covered_groups = covered_groups
        self._local: list[dict[int, dict[str, LocalSlot]]] = [_by_slot(table.local) for table in tables]
        self._effects = [_by_slot(table.effects) for table in tables]

    def compared(self, wanted: Collection[str] = ()) -> Compared:
        """`wanted`: classes of findings that make a slot unequal although they fail no audit."""
        result = Compared()
        slots = set(self._logs)
        for known in (*self._local, *self._effects):
            slots |= known.keys()
        for slot in sorted(slots):
            log = self._logs.get(slot, _NO_LOG)
            low_us, high_us = self._times(slot, log)
            start_us, end_us = slot * SLOT_US, (slot + 1) * SLOT_US
            coverage = self._coverage
            is_odd = start_us >= coverage.terms.ahead_us or end_us <= EPOCH_US
            is_outside = max(high_us, end_us) <= coverage.from_us or min(low_us, start_us) >= coverage.to_us
            if is_outside and not (is_odd and any(slot in rows for rows in self._effects)):
                continue
            slack_us = coverage.terms.slack_us
            is_inside = coverage.from_us <= low_us and high_us < coverage.to_us
            is_dated = end_us - slack_us <= low_us and high_us <= start_us + slack_us
            closed_us = coverage.terms.closed_before_us
            is_one = is_inside and is_dated and (high_us < closed_us or low_us >= closed_us)
            equal = self._equal(slot, log) if is_one and not log.is_odd else None
            if equal is None or any(figures[name] for figures in equal.values() for name in wanted):
                result.unequal.append(slot)
                continue
            is_closed = high_us < closed_us
            for figures in equal.values():
                figures["closed"] = figures["messages"]
                for name in () if is_closed else ("closed", *COUNTED):
                    figures[name] = 0
            result.equal.append(Equal(slot, low_us, high_us, equal, log.to_ack, sorted(log.acked) if is_closed else []))
        return result

    def _times(self, slot: int, log: LogSlot) -> tuple[int, int]:
        """The lowest and the highest time of a slot's messages that have rows or places."""
        local = [row for rows in self._local for row in rows.get(slot, {}).values()]
        lows = [log.low_us] * (log.high_us > 0) + [row.first_us for row in local]
        highs = [log.high_us] * (log.high_us > 0) + [row.last_us for row in local]
        return min(lows, default=slot * SLOT_US), max(highs, default=slot * SLOT_US)

    # --- one slot ---------------------------------------------------------------------------------------------

    def _equal(self, slot: int, log: LogSlot) -> dict[str, Counter[str]] | None:
        """The figures of an equal slot by topic; None for an unequal one."""
        local = [rows.get(slot, {}) for rows in self._local]
        if any(row.odd for rows in local for row in rows.values()) or any(slot in t.mixed for t in self._tables):
            return None
        figures = {topic: Counter(known) for topic, known in log.topics.items()}
        sent = self._committed(log, local)
        if sent is None or not _same_commits(local, sent):
            return None
        if not self._same_effects(slot, log) or self._may_conflict(log, local):
            return None
        for counts in sent.values():
            for (_, topic), sums in counts.items():
                figures[topic]["committed"] += sums.count
        for group, topic in {key for counts in sent.values() for key in counts}:
            figures[topic].update(log.in_time[group, topic])
        buried = {group for rows in local for group, row in rows.items() if row.tombstones}
        for (group, topic), count in log.rolled_topics.items():
            if group in buried:  # each of them has a tombstone
                figures[topic]["rows"] += count
        for known in figures.values():
            known["rows"] += known["committed"]
            known["queued"] = max(0, known["committed"] - known["waiting"])
        return figures

    def _committed(
        self, log: LogSlot, local: Sequence[Mapping[str, LocalSlot]]
    ) -> dict[int, dict[tuple[str, str], Sums]] | None:
        """The messages that each database must have committed, by producer group and topic; None if the log's rows do
        not show it."""
        sent: dict[int, dict[tuple[str, str], Sums]] = {}
        for (group, topic), kinds in log.commits.items():
            opened = [sums for (kind, _), sums in kinds.items() if kind == OPENED]
            completing = [sums for (kind, _), sums in kinds.items() if kind == COMPLETING]
            if opened and _total(opened) != _total(completing):
                return None
            for (kind, origin), sums in kinds.items():
                if not group or (kind == COMPLETING and opened):
                    continue  # sent without a transaction, or known by its half
                number = self._database_of(group, origin, local)
                if number is None:
                    return None
                if number != ABROAD:
                    known = sent.setdefault(number, {}).setdefault((group, topic), Sums())
                    known.count += sums.count
                    known.hash ^= sums.hash
                    known.body_hash ^= sums.body_hash
                    known.digests += sums.digests
        return sent

    def _database_of(self, group: str, origin: int | None, local: Sequence[Mapping[str, LocalSlot]]) -> int | None:
        """The number of the database that has the rows of messages; ABROAD for one that is not given, None if nothing
        tells it."""
        if origin is not None:
            return origin
        holders = [number for number, rows in enumerate(local) if group in rows]
        if len(holders) == 1:
            return holders[0]
        return None if holders or group in self._covered_groups else ABROAD

    def _same_effects(self, slot: int, log: LogSlot) -> bool:
        """Whether every inbox has exactly what its group acknowledged, at possible times."""
        combined: dict[str, list[int]] = {}
        slack_us = self._coverage.terms.slack_us
        first_us, last_us = (slot + 1) * SLOT_US - slack_us, log.first_acked_us + slack_us
        for rows in self._effects:
            for group, row in rows.get(slot, {}).items():
                if row.replays or row.undated or group not in self._inbox_groups:
                    return False
                if row.first_us < first_us or row.last_us > last_us:
                    return False
                known = combined.setdefault(group, [0, 0])
                known[0] += row.count
                known[1] ^= row.hash
        acked = {group: sums for group, sums in log.acked.items() if group in self._inbox_groups}
        return combined == acked

    def _may_conflict(self, log: LogSlot, local: Sequence[Mapping[str, LocalSlot]]) -> bool:
        """Whether a transaction may have both outcomes, or a tombstone no half that was rolled back."""
        groups = {group for rows in local for group, row in rows.items() if row.tombstones}
        for group in groups:
            rows = [known[group] for known in local if group in known]
            count = sum(row.tombstones for row in rows)
            combined = 0
            for row in rows:
                combined ^= row.tombstones_hash
            if [count, combined] != log.rolled.get(group):
                return True
        if not any(count for count, _ in log.rolled.values()):
            return False
        has_late = any(kind == COMPLETING for kinds in log.commits.values() for kind, _ in kinds)
        return has_late or len(log.logs) > 1


def _same_commits(local: Sequence[Mapping[str, LocalSlot]], sent: Mapping[int, Mapping[tuple[str, str], Sums]]) -> bool:
    """Whether each database committed exactly what was sent."""
    for number, rows in enumerate(local):
        by_group: dict[str, list[tuple[str, Sums]]] = {}
        for (group, topic), sums in sent.get(number, {}).items():
            by_group.setdefault(group, []).append((topic, sums))
        for group in rows.keys() | by_group.keys():
            row, topics = rows.get(group), by_group.get(group, [])
            if row is None or row.committed != sum(sums.count for _, sums in topics):
                return False
            if row.digests not in (0, row.committed):
                return False  # rows of an older SDK among others: they are compared one by one
            combined = 0
            for topic, sums in topics:
                of_messages = sums.body_hash if row.digests else sums.hash
                combined ^= hashes.of_text(topic_text(of_messages, sums.count, topic))
            if combined != row.hash:
                return False
    return True


def _total(several: Sequence[Sums]) -> tuple[int, int]:
    count = combined = 0
    for sums in several:
        count, combined = count + sums.count, combined ^ sums.hash
    return count, combined


def _by_slot(rows: Mapping[tuple[int, str], Any]) -> dict[int, dict[str, Any]]:
    slots: dict[int, dict[str, Any]] = {}
    for (slot, name), row in rows.items():
        slots.setdefault(slot, {})[name] = row
    return slots


def figures_of(equal: list[Equal], bucket_us: int) -> list[dict[str, Any]]:
    """Figures by bucket and topic, as spark.measures.count has them. Those of a slot are spread over its time."""
    buckets: dict[tuple[int, str], dict[str, Any]] = {}
    for known in equal:
        first, last = known.low_us // bucket_us, known.high_us // bucket_us
        length_us = known.high_us - known.low_us + 1
        for topic, figures in known.topics.items():
            spread = dict.fromkeys(figures, 0)
            for number in range(first, last + 1):
                passed_us = min(known.high_us + 1, (number + 1) * bucket_us) - known.low_us
                key = (number * bucket_us, topic)
                bucket = buckets.setdefault(key, {"at_us": key[0], "topic": topic, "newest_row_us": 0})
                if figures["rows"]:
                    newest_us = min(known.high_us, key[0] + bucket_us - 1)
                    bucket["newest_row_us"] = max(bucket["newest_row_us"], newest_us)
                for name, count in figures.items():
                    so_far = count * passed_us // length_us
                    bucket[name] = bucket.get(name, 0) + so_far - spread[name]
                    spread[name] = so_far
    return list(buckets.values())


def latencies_of(equal: list[Equal], bucket_us: int) -> list[tuple[int, str, int, int]]:
    """Rows of Result.latencies of the time from a queue to the last acknowledgement."""
    counted: Counter[tuple[int, str, int]] = Counter()
    for known in equal:
        at_us = known.low_us // bucket_us * bucket_us
        for (topic, bucket), count in known.to_ack.items():
            counted[at_us, topic, bucket] += count
    return sorted((*key, count) for key, count in counted.items())
