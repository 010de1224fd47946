"""The facts of a log's segments in memory: a few numbers for each segment, and sums over all.

Segments name the same groups, databases and topics again and again. Each name is held once, and the facts about it are
added up while the facts of the segments are read, one segment after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notify.spark.inputs.catalog import Catalog, learn
from notify.spark.inputs.facts import Facts, Scanned
from notify.storage.log import meta

MOST_BROKEN = 100_000
"""The most damages of one log that are held; further ones are only counted."""


class Gathered:
    """Collects the facts of a log's segments, in log order."""

    def __init__(self, catalog: Catalog) -> None:
        """`catalog`: the catalog of the log's checkpoint; the META records of the segments are added to it."""
        self.catalog = catalog
        self.facts: list[Facts] = []
        self.groups: set[str] = set()
        """Every consumer group that settled something."""
        self.sources: dict[int, frozenset[str]] = {}
        """The databases that the halves of a segment came from, by the segment's base."""
        self._sent: dict[str, dict[int, int]] = {}
        self._names: dict[str, str] = {}
        self._lists: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._broken = 0

    def take(self, scanned: Scanned) -> None:
        """Add the facts of the next segment."""
        facts = scanned.numbers()
        facts.masked = self._list_of(facts.masked)
        room = max(0, MOST_BROKEN - self._broken)
        facts.broken_left += len(facts.broken[room:])
        facts.broken = facts.broken[:room]
        self._broken += len(facts.broken)
        self.facts.append(facts)
        self.groups |= set(map(self._shared, scanned.consumer_groups))
        sources = frozenset(self._shared(sent.source) for sent in scanned.sent if sent.is_of_database)
        self.sources[facts.base] = self._sets.setdefault(sources, sources)
        for sent in scanned.sent:
            if sent.is_of_database:
                last = self._sent.setdefault(self._shared(sent.source), {})
                last[sent.producer_group] = max(last.get(sent.producer_group, 0), sent.last_us)
        for position, time_us, record in scanned.meta:
            learn(self.catalog, position, time_us, meta.of_plain(record), self._seen)

    def sent(self, from_us: int = 0) -> dict[str, dict[str, int]]:
        """By database id and producer group: when the last committed message was decided.

        Groups whose last message was decided before `from_us` are left out.
        """
        last_by_source: dict[str, dict[str, int]] = {}
        for source, by_number in self._sent.items():
            for number, last_us in by_number.items():
                if last_us >= from_us:
                    groups = last_by_source.setdefault(source, {})
                    name = self.catalog.producer_groups.get(number, "")
                    groups[name] = max(groups.get(name, 0), last_us)
        return last_by_source

    def broken(self) -> Iterator[dict[str, Any]]:
        """The damages that are held."""
        for facts in self.facts:
            yield from facts.broken

    def _shared(self, name: str) -> str:
        """The one object that is held for equal names."""
        return self._names.setdefault(name, name)

    def _list_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        shared = self._lists.get(names)
        if shared is None:
            shared = self._lists[names] = tuple(map(self._shared, names))
        return shared
