"""An audit's memory of a log's segments: a few numbers of each, and sums of all.

Segments name the same groups, databases and topics again and again. So names are held once, and what is told of them is
added up as the facts of the segments are read, one segment after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notify.spark.catalog import Catalog, learn
from notify.spark.facts import Facts, Scanned
from notify.storage.log import meta

MOST_BROKEN = 100_000
"""So many pieces of damage are held of one log; those beyond are counted."""


class Gathered:
    """Takes the facts of a log's segments, in log order."""

    def __init__(self, catalog: Catalog) -> None:
        """`catalog`: what is known of the log besides; it learns from the segments."""
        self.catalog = catalog
        self.facts: list[Facts] = []
        self.groups: set[str] = set()
        """Every consumer group that settled something."""
        self.sources: dict[int, frozenset[str]] = {}
        """The databases that the halves of a segment came from, by where it begins."""
        self._sent: dict[str, dict[int, int]] = {}
        self._names: dict[str, str] = {}
        self._lists: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._broken = 0

    def take(self, scanned: Scanned) -> None:
        """Take the next segment's facts."""
        facts = scanned.numbers()
        facts.masked = self._list_of(facts.masked)
        room = max(0, MOST_BROKEN - self._broken)
        facts.broken_left += len(facts.broken[room:])
        facts.broken = facts.broken[:room]
        self._broken += len(facts.broken)
        self.facts.append(facts)
        self.groups |= set(map(self._named, scanned.consumer_groups))
        sources = frozenset(self._named(s.source) for s in scanned.sent if s.source)
        self.sources[facts.base] = self._sets.setdefault(sources, sources)
        for s in scanned.sent:
            if s.source:
                last = self._sent.setdefault(self._named(s.source), {})
                last[s.producer_group] = max(last.get(s.producer_group, 0), s.last_us)
        for position, time_us, record in scanned.meta:
            learn(self.catalog, position, time_us, meta.of_plain(record), self._seen)

    def sent(self, from_us: int = 0) -> dict[str, dict[str, int]]:
        """When each database's last committed message of each producer group was decided, by the database's id; without
        those from before an instant."""
        known: dict[str, dict[str, int]] = {}
        for source, by_number in self._sent.items():
            for number, last_us in by_number.items():
                if last_us >= from_us:
                    groups = known.setdefault(source, {})
                    name = self.catalog.producer_groups.get(number, "")
                    groups[name] = max(groups.get(name, 0), last_us)
        return known

    def broken(self) -> Iterator[dict[str, Any]]:
        """The damage that is held."""
        for facts in self.facts:
            yield from facts.broken

    def _named(self, name: str) -> str:
        return self._names.setdefault(name, name)

    def _list_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        known = self._lists.get(names)
        if known is None:
            known = self._lists[names] = tuple(map(self._named, names))
        return known
